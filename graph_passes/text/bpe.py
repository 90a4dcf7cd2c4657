"""A BPE tokenizer.json (GPT-2, RoBERTa, Llama, Qwen, …) as nodes of onnxruntime-extensions.

onnxruntime-extensions' HfJsonTokenizer reads such files itself, but it loses the end of a text that ends with the
beginning of an added token, sees other spaces and letters, and cuts words of Llama's kind every 100 bytes. So only the
search for merges is used, of its GPT2Tokenizer: each symbol that merges begin with (a byte, or a character) is written
as a letter of its own, and words are sent through with full stops between them. GPT2Tokenizer takes a run of letters
for one word, whatever they stand for. It knows bytes only, so that the first merges put the letters' bytes together.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from .marks import SPLIT, TEXT_END
from .nodes import EXTENSIONS_DOMAIN, Nodes, Tokens
from .pieces import UNKNOWN_ID, Kind, PieceModel, Search
from .splitting import flat
from .tokenizer_file import Refuse, TokenizerFile
from .words import Words, marked_tokens, read_words

_BETWEEN, _BEHIND = ".", "!"  # words, texts: no letters
# Letters of two and of three bytes in UTF-8, of old alphabets, so that every version of Unicode knows them.
_LETTERS = ((0x100, 0x1BA), (0x400, 0x482), (0x4E00, 0x9FA6), (0xAC00, 0xD7A4))


@dataclass(frozen=True)
class Bpe:
    """symbols: what a piece of a text, or a mark, is written as. vocabulary, merges: of GPT2Tokenizer, in which each
    symbol is spelled by its letter's bytes. between, behind: the ids of what stands between words and behind texts."""

    words: Words
    symbols: PieceModel
    becomes: tuple[str, ...]
    vocabulary: str
    merges: str
    between: int
    behind: int

    @property
    def probes(self) -> tuple[str, ...]:
        """Texts that this tokenizer may be wrong about."""
        return self.words.probes

    def tokenize(self, nodes: Nodes, texts: ir.Value) -> Tokens:
        """texts: strings [batch]."""
        letters = nodes.rewrite(self.words.split(nodes, texts), self.symbols, self.becomes, last=_BETWEEN)
        ids = nodes.many(
            "GPT2Tokenizer",
            2,
            letters,
            domain=EXTENSIONS_DOMAIN,
            vocab=self.vocabulary,
            merges=self.merges,
            padding_length=-1,
        )[0]
        ids = nodes.op("Reshape", ids, nodes.ints(-1))
        ids = nodes.op("Compress", ids, nodes.op("Not", nodes.op("Equal", ids, nodes.integer(self.between))))
        return nodes.split_at(ids, self.behind)


def read_bpe(file: TokenizerFile) -> Bpe:
    """Raises ModelError, naming what is not supported."""
    model, refuse = file.said["model"], file.refuse
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise refuse(f"has a BPE model with {name} {model[name]!r}, which is not supported")
    words = read_words(file)
    vocabulary = model["vocab"]
    byte_level = any(part["type"] == "ByteLevel" for part in flat(file.said.get("pre_tokenizer"), "pretokenizers"))
    bytes_of, unknown = _byte_tokens(model, byte_level, refuse)
    # Which tokens words begin with, before anything is merged.
    characters = [] if byte_level else [token for token in vocabulary if len(token) == 1]
    begin = [token for token in dict.fromkeys([*characters, *(bytes_of or ()), unknown]) if token is not None]
    # What is a token wherever it stands: added tokens, and words that merges do not lead to.
    found = dict(zip(marked_tokens(words), words.added, strict=True)) | _whole_words(file, words, byte_level)
    letters = _letters()
    if len(begin) + len(found) > len(letters):
        raise refuse(f"has {len(begin)} symbols and {len(found)} added tokens, expected {len(letters)} together")
    written = dict(zip(begin, letters, strict=False))
    marked = dict(zip(found, letters[len(begin) :], strict=False))
    symbols, becomes = _symbols(characters, bytes_of, unknown, written, marked)
    spelled = {token: _spell(letter) for token, letter in written.items()}
    size = max([*vocabulary.values(), *words.added]) + 1
    ids, merges = _merges(model, spelled)
    ids |= {_spell(letter): found[mark] for mark, letter in marked.items()}
    merges = [*_letter_merges([*written.values(), *marked.values()], ids, size + 2), *merges]
    ids |= {_BETWEEN: size, _BEHIND: size + 1}
    return Bpe(
        words=words,
        symbols=symbols,
        becomes=becomes,
        vocabulary=json.dumps(ids, ensure_ascii=False, separators=(",", ":")),
        merges="\n".join(f"{left} {right}" for left, right in merges),
        between=size,
        behind=size + 1,
    )


def _whole_words(file: TokenizerFile, words: Words, byte_level: bool) -> dict[str, int]:
    """Words that are tokens though merges do not lead to them (ignore_merges), between the marks of words."""
    if not file.said["model"].get("ignore_merges"):
        return {}
    from tokenizers import Tokenizer

    vocabulary = file.said["model"]["vocab"]
    said = {**file.said, "model": {**file.said["model"], "ignore_merges": False}}
    merging = Tokenizer.from_str(json.dumps(said)).model
    added = {token["content"] for token in file.added_tokens}  # which are found in texts before there are words
    tokens = [token for token in vocabulary if token not in added and len(merging.tokenize(token)) != 1]
    if tokens and not words.marked_on_both_sides:
        raise file.refuse(f"has ignore_merges and the token {tokens[0]!r}, which merges do not lead to")
    texts = {token: _text(token) if byte_level else token for token in tokens}
    return {f"{SPLIT}{text}{SPLIT}": vocabulary[token] for token, text in texts.items() if text}


def _text(token: str) -> str:
    """What a token of bytes is written as; empty where it is no text."""
    bytes_of = {character: byte for byte, character in enumerate(_byte_characters())}
    try:
        return bytes(bytes_of[character] for character in token).decode()
    except (KeyError, UnicodeDecodeError):
        return ""


def _byte_tokens(
    model: Mapping[str, Any], byte_level: bool, refuse: Refuse
) -> tuple[list[str | None] | None, str | None]:
    """The tokens of the 256 bytes, if words are made of bytes: None for a byte that is left out. Else the token of what
    is unknown."""
    vocabulary, unknown = model["vocab"], model.get("unk_token")
    if unknown is not None and unknown not in vocabulary:
        raise refuse(f"has the unknown token {unknown!r}, which is not in its vocabulary")
    if not byte_level and not model.get("byte_fallback"):
        if unknown is None or not model.get("fuse_unk"):
            raise refuse("neither has tokens for bytes nor makes one unknown token of several unknown characters")
        return None, unknown
    tokens = list(_byte_characters()) if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    missing = [token for token in tokens if token not in vocabulary]
    if missing and (not byte_level or (unknown is not None and model.get("fuse_unk"))):
        raise refuse(f"lacks the token {missing[0]!r} of a byte")
    return [unknown if token in missing else token for token in tokens], None


def _byte_characters() -> tuple[str, ...]:
    """The characters that stand for bytes in GPT-2's vocabulary: printable ones for themselves, then those behind."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    behind = itertools.count(0x100)
    return tuple(chr(byte if byte in plain else next(behind)) for byte in range(256))


def _letters() -> list[str]:
    return [chr(code) for first, last in _LETTERS for code in range(first, last)]


def _spell(letter: str) -> str:
    """As GPT2Tokenizer sees a letter."""
    characters = _byte_characters()
    return "".join(characters[byte] for byte in letter.encode())


def _symbols(
    characters: Sequence[str],
    bytes_of: Sequence[str | None] | None,
    unknown: str | None,
    written: Mapping[str, str],
    marked: Mapping[str, str],
) -> tuple[PieceModel, tuple[str, ...]]:
    model = PieceModel(Search.CHARACTERS)
    becomes = [""] * len(model.pieces)
    if bytes_of is not None:
        model.add_bytes()
        becomes += ["" if token is None else written[token] for token in bytes_of]
    elif unknown is not None:
        becomes[UNKNOWN_ID] = written[unknown]
    for character in characters:
        model.add(character, Kind.NORMAL)
        becomes.append(written[character])
    for mark, made in {SPLIT: _BETWEEN, TEXT_END: _BEHIND, **marked}.items():
        model.add(mark, Kind.FOUND)
        becomes.append(f"{_BETWEEN}{made}{_BETWEEN}" if len(mark) > 1 and mark.startswith(SPLIT) else made)
    return model, tuple(becomes)


def _merges(model: Mapping[str, Any], spelled: Mapping[str, str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids of tokens that words may become, and the merges that lead to them, both spelled."""
    vocabulary = model["vocab"]
    made = {token: spelling for token, spelling in spelled.items() if token in vocabulary}
    merges: list[tuple[str, str]] = []
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if left in made and right in made and left + right in vocabulary:
            made.setdefault(left + right, made[left] + made[right])
            merges.append((made[left], made[right]))
    return {spelling: vocabulary[token] for token, spelling in made.items()}, merges


def _letter_merges(letters: Sequence[str], ids: dict[str, int], free: int) -> Iterator[tuple[str, str]]:
    """What puts the bytes of letters together; gives ids, from `free` on, to what is on the way."""
    known: set[tuple[str, str]] = set()
    numbers = itertools.count(free)
    for letter in letters:
        spelling = _spell(letter)
        for end in range(1, len(spelling)):
            for part in (spelling[:end], spelling[end]):
                if part not in ids:
                    ids[part] = next(numbers)
            if (merge := (spelling[:end], spelling[end])) not in known:
                known.add(merge)
                yield merge
