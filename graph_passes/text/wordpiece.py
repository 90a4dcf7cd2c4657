"""A WordPiece tokenizer.json (BERT, MPNet, …) as nodes of onnxruntime-extensions.

onnxruntime-extensions' BertTokenizer knows accents and capitals of Latin-1 only, and turns a word with an unknown
character into its first pieces and [UNK], where `tokenizers` gives [UNK] alone. So only its search for pieces is used.
What stands before it is made from what the tokenizer itself does with each character: SentencepieceTokenizer splits the
text into characters (and special tokens written out in it), a table gives what becomes of each one (lower case, without
accent, with spaces around punctuation), StringJoin puts them together, and two regular expressions put the unknown
token in the place of words with unknown characters and of words that are too long.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortolan.errors import ModelError

_UNKNOWN = "\x02"  # what the table gives for characters that the vocabulary lacks
_MOST_CHARACTERS = 999  # of a word: what the regular expressions of RE2 count to, but for one
_DROPPED = "\x01"  # stands for characters that the tokenizer removes
# A run of so many characters of which the same becomes is left to a regular expression: a table of them would be large.
_LONG_RUN = 256
_LAST_LOOKED_AT = 0x40000
# What is behind is alike from each of these to the next: nothing, tags, selectors of variants, nothing, private use.
_BEHIND = (0x40000, 0xE0000, 0xE0100, 0xE01F0, 0xF0000, 0x100000, 0x110000)
_SURROGATES = range(0xD800, 0xE000)
# What the pieces of SentencePiece's model are, and its model type that knows single characters only.
_NORMAL, _PIECE_UNKNOWN, _USER_DEFINED, _CHARACTERS = 1, 2, 4, 4
_NO_MAP = struct.pack("<I", 1024) + bytes(1024 + 1)  # the size of a trie, its smallest and emptiest one, no results


@dataclass(frozen=True)
class WordPiece:
    """What a tokenizer.json says, and what it does with each character.

    table: character, or special token -> what becomes of it. dropped, spaced: ranges of characters that are removed, or
    that are words of their own.
    """

    vocabulary: tuple[str, ...]
    unknown: str
    prefix: str
    most_characters: int
    begin: str
    end: str
    pad: str
    pad_id: int
    max_tokens: int | None  # the tokenizer's own truncation
    table: dict[str, str]
    dropped: tuple[range, ...]
    spaced: tuple[range, ...]


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """A tokenizers.Tokenizer, which neither pads nor cuts. Raises ModelError."""
    if not Path(path).is_file():
        raise ModelError(f"tokenizer file {os.fspath(path)!r} does not exist")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ModelError(
            "a tokenizer.json needs the package 'tokenizers'; install it with: pip install 'ortolan[text]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # tokenizers raises a plain Exception
        raise ModelError(f"tokenizer file {os.fspath(path)!r} is no tokenizer.json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def read_wordpiece(path: str | os.PathLike[str]) -> WordPiece:
    """Reads a tokenizer.json. Raises ModelError for other kinds of tokenizers, naming what is not supported."""
    tokenizer = load_tokenizer(path)
    said = json.loads(Path(path).read_text(encoding="utf-8"))

    def refuse(what: str) -> ModelError:
        return ModelError(
            f"tokenizer file {os.fspath(path)!r} {what}; expected a WordPiece tokenizer with BertPreTokenizer, as "
            "of BERT and MPNet models: for others, keep tokens as the model's inputs"
        )

    model = said["model"]
    if model.get("type") != "WordPiece":
        raise refuse(f"has a model {model.get('type')!r}")
    before = (said.get("pre_tokenizer") or {}).get("type")
    if before != "BertPreTokenizer" or tokenizer.normalizer is None:
        raise refuse(f"has a pre-tokenizer {before!r} and a normalizer {(said.get('normalizer') or {}).get('type')!r}")
    vocabulary = _vocabulary(model["vocab"], said["added_tokens"], refuse)
    ends = tokenizer.encode("").ids
    if len(ends) != 2 or tokenizer.encode("a").ids[:: len(tokenizer.encode("a").ids) - 1] != ends:
        raise refuse(f"puts tokens {ends} around a text, expected one in front and one behind")
    prefix = model["continuing_subword_prefix"]
    special = _special_tokens(said["added_tokens"], vocabulary, refuse)
    known = {word for word in vocabulary if len(word) == 1}
    within = {word for word in known if prefix + word in model["vocab"]}
    try:
        table, dropped, spaced = _table(tokenizer, known, within)
    except ValueError:  # the words between the characters are not what they were
        raise refuse("has a normalizer that changes plain letters") from None
    padding = said.get("padding") or {}
    pad_id = padding.get("pad_id", model["vocab"].get("[PAD]", 0))
    if not isinstance(pad_id, int) or not 0 <= pad_id < len(vocabulary):
        raise refuse(f"pads with id {pad_id!r} of {len(vocabulary)} tokens")
    most, unknown = model["max_input_chars_per_word"], model["unk_token"]
    if not isinstance(most, int) or not 1 <= most <= _MOST_CHARACTERS:
        raise refuse(f"has max_input_chars_per_word {most!r}, above {_MOST_CHARACTERS} or no number from 1 on")
    if "\\" in unknown or " " in unknown:
        raise refuse(f"has the unknown token {unknown!r}")
    return WordPiece(
        vocabulary=vocabulary,
        unknown=unknown,
        prefix=prefix,
        most_characters=most,
        begin=vocabulary[ends[0]],
        end=vocabulary[ends[1]],
        pad=vocabulary[pad_id],
        pad_id=pad_id,
        max_tokens=(said.get("truncation") or {}).get("max_length"),
        table=table | special,
        dropped=dropped,
        spaced=spaced,
    )


def _vocabulary(
    tokens: dict[str, int], added: Sequence[dict[str, Any]], refuse: Callable[[str], ModelError]
) -> tuple[str, ...]:
    """The tokens in the order of their ids: BertTokenizer numbers the lines that it is given."""
    all_tokens = tokens | {token["content"]: token["id"] for token in added}
    ids = {number: token for token, number in all_tokens.items()}
    if sorted(ids) != list(range(len(ids))) or len(ids) != len(all_tokens):
        raise refuse("has token ids with gaps, or two tokens of one id")
    broken = next((token for token in all_tokens if not token or "\n" in token), None)
    if broken is not None:
        raise refuse(f"has the token {broken!r}")
    return tuple(ids[number] for number in range(len(ids)))


def _special_tokens(
    added: Sequence[dict[str, Any]], vocabulary: Sequence[str], refuse: Callable[[str], ModelError]
) -> dict[str, str]:
    """Tokens that are found in texts as they are written, whatever stands around them."""
    table: dict[str, str] = {}
    for token in added:
        content = token["content"]
        if token.get("single_word") or " " in content:
            raise refuse(f"has the added token {content!r} of a kind that is not known here")
        forms = {content, content.lower(), content.upper()} if token.get("normalized") else {content}
        table |= dict.fromkeys(sorted(forms), f" {content} ")
    return table


def _table(
    tokenizer: Any, known: set[str], within: set[str]
) -> tuple[dict[str, str], tuple[range, ...], tuple[range, ...]]:
    """What becomes of each character.

    known: characters that are words. within: those that may also stand inside of words; a word of such characters alone
    always has pieces, and one with any other never does.
    """
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
            # A long run of words of their own goes on behind a known one: its own entry only adds spaces to spaces.
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
    close(_LAST_LOOKED_AT)
    for first, last in itertools.pairwise(_BEHIND):
        if not dict(_some_characters(tokenizer, [first + 1]))[first + 1]:
            runs[_DROPPED].append(range(first, last))
    table[_DROPPED], table[_UNKNOWN] = "", ""
    # What the regular expression finds is replaced by a character that is dropped; NUL would end a text.
    return table, (range(0, 1), *runs[_DROPPED]), tuple(runs[_UNKNOWN])


def _characters(tokenizer: Any) -> Iterator[tuple[int, str]]:
    codes = [code for code in range(_LAST_LOOKED_AT) if code not in _SURROGATES]
    for first in range(0, len(codes), 4096):
        yield from _some_characters(tokenizer, codes[first : first + 4096])


def _some_characters(tokenizer: Any, codes: Sequence[int]) -> Iterator[tuple[int, str]]:
    """What the tokenizer makes of each character inside of a word, with a space where it breaks the word."""
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


def character_model(wordpiece: WordPiece) -> tuple[str, list[str]]:
    """SentencePiece's model (base64), which splits into the table's characters and tokens; what becomes of each id."""
    pieces, becomes = [_piece(_UNKNOWN * 2, _PIECE_UNKNOWN)], [_UNKNOWN]
    for text, made in wordpiece.table.items():
        pieces.append(_piece(text, _NORMAL if len(text) == 1 else _USER_DEFINED))
        becomes.append(made)
    trainer = _number(3, _CHARACTERS) + _number(4, len(pieces)) + _bytes(45, (_UNKNOWN * 2).encode())
    # A map of characters that holds none (without a map, SentencePiece says so at each start), and every space kept.
    normalizer = _bytes(1, b"none") + _bytes(2, _NO_MAP) + _number(3, 0) + _number(4, 0) + _number(5, 0)
    model = b"".join(_bytes(1, piece) for piece in pieces) + _bytes(2, trainer) + _bytes(3, normalizer)
    return base64.b64encode(model).decode(), becomes


def replacements(wordpiece: WordPiece) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Regular expressions of RE2 and what replaces what they find: for a text, and for what has become of it."""
    unknown = f" {wordpiece.unknown} "
    first = [(f"[{_ranges(wordpiece.dropped)}]", _DROPPED)]
    if wordpiece.spaced:
        first.append((f"([{_ranges(wordpiece.spaced)}])", r" \1 "))
    # BertTokenizer, told to split at spaces, takes a second space for a part of a word.
    last = [(f"[^ ]*{_UNKNOWN}[^ ]*", unknown), (f"[^ ]{{{wordpiece.most_characters + 1},}}", unknown)]
    return first, [*last, (" +", " "), ("^ ", "")]


def _ranges(ranges: Sequence[range]) -> str:
    return "".join(rf"\x{{{part.start:X}}}-\x{{{part.stop - 1:X}}}" for part in ranges)


def _piece(text: str, kind: int) -> bytes:
    return _bytes(1, text.encode()) + b"\x15" + struct.pack("<f", 0.0) + _number(3, kind)


def _bytes(field: int, content: bytes) -> bytes:
    """A protobuf field of bytes, text or a message."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
