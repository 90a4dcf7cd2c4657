"""A WordPiece tokenizer.json (BERT, MPNet, …) as nodes of onnxruntime-extensions.

onnxruntime-extensions' BertTokenizer handles accents and capitals of Latin-1 only, and turns a word with an unknown
character into its first pieces and [UNK], where `tokenizers` returns [UNK] alone. So only its search for pieces is
used. Before the search, SentencepieceTokenizer splits the text into characters and special tokens. A table, made by
running the tokenizer on each character, maps them (lower case, no accents, spaces around punctuation), and StringJoin
joins the results. Two regular expressions replace words that are too long, or have unknown characters, by the unknown
token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import onnx_ir as ir

from .nodes import EXTENSIONS_DOMAIN, Nodes, Tokens
from .pieces import UNKNOWN_ID, Kind, PieceModel, Search
from .tokenizer_file import Refuse, TokenizerFile

_UNKNOWN = "\x02"  # the table maps characters that the vocabulary lacks to this
_MAX_CHARACTERS = 999  # largest limit for a word's length: RE2's repetition counts end at 1000
_DROPPED = "\x01"  # replaces characters that the tokenizer removes
# Runs of at least this many characters with the same result are handled by a regular expression, to keep the table
# small.
_LONG_RUN = 256
_END_OF_TABLE = 0x40000
# Starts of later blocks (and the end). The tokenizer treats all characters of a block alike: unassigned, tags,
# variation selectors, unassigned, private use.
_LATER_BLOCKS = (0x40000, 0xE0000, 0xE0100, 0xE01F0, 0xF0000, 0x100000, 0x110000)
_SURROGATES = range(0xD800, 0xE000)
_TEXT_END = "\x03"  # added as a word after each text; the tokenizer removes this character from texts


@dataclass(frozen=True)
class WordPiece:
    """A WordPiece tokenizer, and how it maps each character.

    Attributes:
        vocabulary: Tokens in the order of their ids.
        unknown: The unknown token.
        prefix: Prefix of pieces that continue a word, such as "##".
        max_characters: Longer words become the unknown token.
        table: Maps each character and special token to its replacement.
        dropped: Characters that are removed.
        spaced: Characters that are words of their own.
    """

    vocabulary: tuple[str, ...]
    unknown: str
    prefix: str
    max_characters: int
    table: dict[str, str]
    dropped: tuple[range, ...]
    spaced: tuple[range, ...]

    @property
    def probes(self) -> tuple[str, ...]:
        """Texts that this tokenizer might get wrong."""
        return ("a" * (self.max_characters + 1),)

    def tokenize(self, nodes: Nodes, texts: ir.Value) -> Tokens:
        """Add nodes that tokenize texts, strings [batch]."""
        first, last = _replacements(self)
        model, becomes = _characters_model(self)
        words = nodes.rewrite(nodes.replace(texts, first), model, becomes, end=f" {_TEXT_END} ")
        ids = nodes.many(
            "BertTokenizer",
            3,
            nodes.replace(words, last),
            domain=EXTENSIONS_DOMAIN,
            vocab_file="\n".join([*self.vocabulary, _TEXT_END]),
            do_lower_case=0,
            do_basic_tokenize=0,
            strip_accents=0,
            tokenize_chinese_chars=0,
            unk_token=self.unknown,
            # These attributes are required, but have no effect or add tokens that are removed below.
            cls_token=_TEXT_END,
            sep_token=_TEXT_END,
            pad_token=_TEXT_END,
            mask_token=_TEXT_END,
            suffix_indicator=self.prefix,
        )[0]
        ids = nodes.op("Slice", ids, nodes.ints(1), nodes.ints(-1))
        return nodes.split_at(ids, len(self.vocabulary))


def read_wordpiece(file: TokenizerFile) -> WordPiece:
    """Read a WordPiece tokenizer.

    Raises:
        ModelError: Names a feature that is not supported.
    """
    model, tokenizer, refuse = file.said["model"], file.tokenizer, file.refuse
    before = (file.said.get("pre_tokenizer") or {}).get("type")
    if before != "BertPreTokenizer" or tokenizer.normalizer is None:
        raise refuse(
            f"has a WordPiece model, a pre-tokenizer {before!r} and a normalizer "
            f"{(file.said.get('normalizer') or {}).get('type')!r}, expected BertPreTokenizer and a normalizer, as BERT "
            "and MPNet have them"
        )
    vocabulary = _vocabulary(model["vocab"], file.added_tokens, refuse)
    prefix = model["continuing_subword_prefix"]
    special = _special_tokens(file.added_tokens, refuse)
    known = frozenset(word for word in vocabulary if len(word) == 1)
    within = frozenset(word for word in known if prefix + word in model["vocab"])
    try:
        table, dropped, spaced = _table(_Splitter(json.dumps(file.said["normalizer"]), tokenizer), known, within)
    except ValueError:  # the normalizer has changed the separators
        raise refuse("has a normalizer that changes plain letters") from None
    if table.get(_TEXT_END) != "" and not any(ord(_TEXT_END) in some for some in dropped):
        raise refuse("has a normalizer that keeps control characters")
    limit, unknown = model["max_input_chars_per_word"], model["unk_token"]
    if not isinstance(limit, int) or not 1 <= limit <= _MAX_CHARACTERS:
        raise refuse(f"has max_input_chars_per_word {limit!r}, expected 1 to {_MAX_CHARACTERS}")
    if "\\" in unknown or " " in unknown:
        raise refuse(f"has the unknown token {unknown!r}")
    return WordPiece(vocabulary, unknown, prefix, limit, {**table, **special}, dropped, spaced)


def _vocabulary(tokens: Mapping[str, int], added: Sequence[Mapping[str, Any]], refuse: Refuse) -> tuple[str, ...]:
    """Return the tokens in the order of their ids, because BertTokenizer uses its vocabulary's line numbers as ids."""
    all_tokens = {**tokens} | {token["content"]: token["id"] for token in added}
    ids = {number: token for token, number in all_tokens.items()}
    if sorted(ids) != list(range(len(ids))) or len(ids) != len(all_tokens):
        raise refuse("has token ids with gaps, or two tokens of one id")
    broken = next((token for token in all_tokens if not token or "\n" in token), None)
    if broken is not None:
        raise refuse(f"has the token {broken!r}")
    return tuple(ids[number] for number in range(len(ids)))


def _special_tokens(added: Sequence[Mapping[str, Any]], refuse: Refuse) -> dict[str, str]:
    """Return the tokens that are found literally in texts, whatever surrounds them."""
    table: dict[str, str] = {}
    for token in added:
        content = token["content"]
        if token.get("single_word") or " " in content:
            raise refuse(f"has the added token {content!r} with options that are not supported")
        forms = {content, content.lower(), content.upper()} if token.get("normalized") else {content}
        table |= dict.fromkeys(sorted(forms), f" {content} ")
    return table


@dataclass(frozen=True)
class _Splitter:
    """A tokenizer with BertPreTokenizer. Tokenizers with equal normalizers are equal: they treat characters alike."""

    normalizer: str
    tokenizer: Any = field(compare=False)


@lru_cache(maxsize=4)  # a call takes a second
def _table(
    splitter: _Splitter, known: frozenset[str], within: frozenset[str]
) -> tuple[Mapping[str, str], tuple[range, ...], tuple[range, ...]]:
    """Return the result of each character, and the ranges of dropped and of spaced characters.

    Args:
        splitter: The tokenizer.
        known: Characters that are words of the vocabulary.
        within: Characters that may be inside of words. A word has pieces if and only if all its characters are in this
            set.
    """
    tokenizer = splitter.tokenizer
    table: dict[str, str] = {}
    runs: dict[str, list[range]] = {_DROPPED: [], _UNKNOWN: []}
    start, kind = 0, ""

    def close(end: int) -> None:
        if not kind:
            return
        if end - start >= _LONG_RUN:
            runs[kind].append(range(start, end))
            return
        text = "" if kind == _DROPPED else f" {_UNKNOWN} "
        codes = (code for code in range(max(start, 1), end) if code not in _SURROGATES)
        table.update((chr(code), text) for code in codes if chr(code) not in table)

    for code, becomes in _characters(tokenizer):
        words = becomes.split()
        apart = bool(words) and becomes[0] == becomes[-1] == " "
        if words and all(set(word) <= within or (apart and word in known) for word in words):
            if code:
                table[chr(code)] = becomes
            # A known character does not end a run of `spaced` characters, because adding spaces twice is harmless.
            now = kind if kind == _UNKNOWN and becomes == f" {chr(code)} " else ""
        elif not becomes:
            now = _DROPPED
        elif not words:
            table[chr(code)] = " "
            now = ""
        else:
            now = _UNKNOWN if apart else ""
        if now != kind:
            close(code)
            start, kind = code, now
    close(_END_OF_TABLE)
    for first, last in itertools.pairwise(_LATER_BLOCKS):
        if not dict(_some_characters(tokenizer, [first + 1]))[first + 1]:
            runs[_DROPPED].append(range(first, last))
    table[_DROPPED], table[_UNKNOWN] = "", ""
    # StringRegexReplace cuts a text at NUL in any case. The range of NUL only keeps the character class non-empty.
    return table, (range(0, 1), *runs[_DROPPED]), tuple(runs[_UNKNOWN])


def _characters(tokenizer: Any) -> Iterator[tuple[int, str]]:
    codes = [code for code in range(_END_OF_TABLE) if code not in _SURROGATES]
    for first in range(0, len(codes), 4096):
        yield from _some_characters(tokenizer, codes[first : first + 4096])


def _some_characters(tokenizer: Any, codes: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield the tokenizer's result for each character inside a word, with a space where the word is split."""
    normal = tokenizer.normalizer.normalize_str(" zz ".join(f"a{chr(code)}a" for code in codes))
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "zz":
            parts.append([])
        else:
            parts[-1].append(word)
    for code, part in zip(codes, parts, strict=True):
        yield code, " ".join(part)[1:-1]


def _characters_model(wordpiece: WordPiece) -> tuple[PieceModel, list[str]]:
    """Return a SentencePiece model of the table's characters and tokens, and the result of each piece."""
    model = PieceModel(Search.CHARACTERS)
    becomes = [""] * len(model.pieces)
    becomes[UNKNOWN_ID] = _UNKNOWN
    for text, made in wordpiece.table.items():
        model.add(text, Kind.NORMAL if len(text) == 1 else Kind.FOUND)
        becomes.append(made)
    return model, becomes


def _replacements(wordpiece: WordPiece) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return two lists of RE2 replacements: for texts before the table is applied, and for the joined results."""
    unknown = f" {wordpiece.unknown} "
    first = [(f"[{_ranges(wordpiece.dropped)}]", _DROPPED)]
    if wordpiece.spaced:
        first.append((f"([{_ranges(wordpiece.spaced)}])", r" \1 "))
    # Runs of spaces become one space: BertTokenizer, set to split at spaces, treats a second space as part of a word.
    last = [(f"[^ ]*{_UNKNOWN}[^ ]*", unknown), (f"[^ ]{{{wordpiece.max_characters + 1},}}", unknown)]
    return first, [*last, (" +", " "), ("^ ", "")]


def _ranges(ranges: Sequence[range]) -> str:
    return "".join(rf"\x{{{part.start:X}}}-\x{{{part.stop - 1:X}}}" for part in ranges)
