"""A BPE tokenizer.json (GPT-2, RoBERTa, Llama, Qwen, …) as nodes of onnxruntime-extensions.

onnxruntime-extensions' HfJsonTokenizer reads such files, but it loses the end of a text that ends with the beginning of
an added token, classifies spaces and letters differently, and cuts Llama's words every 100 bytes. So these nodes use
only the merge search of its GPT2Tokenizer, which treats a run of letters as one word. Each initial symbol of merges (a
byte or a character) is replaced by a letter that is unique to this symbol, and words are separated by full stops.
GPT2Tokenizer starts from bytes, so the first merges combine the bytes of each letter.
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

_BETWEEN, _BEHIND = ".", "!"  # separator of words, and end of a text; not letters, so they end a word
# Ranges of letters with two or three bytes in UTF-8, from alphabets that every version of Unicode has.
_LETTERS = ((0x100, 0x1BA), (0x400, 0x482), (0x4E00, 0x9FA6), (0xAC00, 0xD7A4))


@dataclass(frozen=True)
class Bpe:
    """A BPE tokenizer.

    Attributes:
        words: Splits texts into words.
        symbols: Finds the initial symbols and the marks in a text.
        becomes: The letter that replaces each symbol or mark.
        vocabulary: The vocabulary for GPT2Tokenizer, in which the bytes of a symbol's letter spell the symbol.
        merges: The merges for GPT2Tokenizer.
        between: Id of the token that separates words.
        behind: Id of the token after each text.
    """

    words: Words
    symbols: PieceModel
    becomes: tuple[str, ...]
    vocabulary: str
    merges: str
    between: int
    behind: int

    @property
    def probes(self) -> tuple[str, ...]:
        """Texts that this tokenizer might get wrong."""
        return self.words.probes

    def tokenize(self, nodes: Nodes, texts: ir.Value) -> Tokens:
        """Add nodes that tokenize texts, strings [batch]."""
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
    """Read a BPE tokenizer.

    Raises:
        ModelError: Names a feature that is not supported.
    """
    model, refuse = file.said["model"], file.refuse
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise refuse(f"has a BPE model with {name} {model[name]!r}, which is not supported")
    words = read_words(file)
    vocabulary = model["vocab"]
    byte_level = any(part["type"] == "ByteLevel" for part in flat(file.said.get("pre_tokenizer"), "pretokenizers"))
    bytes_of, unknown = _byte_tokens(model, byte_level, refuse)
    # Symbols are the initial tokens of words, before any merge.
    characters = [] if byte_level else [token for token in vocabulary if len(token) == 1]
    begin = [token for token in dict.fromkeys([*characters, *(bytes_of or ()), unknown]) if token is not None]
    # Strings that are always tokens: added tokens, and words that merges do not produce.
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
    """Return the ids of marked words that are tokens although no merges produce them (ignore_merges)."""
    if not file.said["model"].get("ignore_merges"):
        return {}
    from tokenizers import Tokenizer

    vocabulary = file.said["model"]["vocab"]
    said = {**file.said, "model": {**file.said["model"], "ignore_merges": False}}
    merging = Tokenizer.from_str(json.dumps(said)).model
    added = {token["content"] for token in file.added_tokens}  # these are found in texts before words are split
    tokens = [token for token in vocabulary if token not in added and len(merging.tokenize(token)) != 1]
    if tokens and not words.marked_on_both_sides:
        raise file.refuse(f"has ignore_merges and the token {tokens[0]!r}, which merges do not produce")
    texts = {token: _text(token) if byte_level else token for token in tokens}
    return {f"{SPLIT}{text}{SPLIT}": vocabulary[token] for token, text in texts.items() if text}


def _text(token: str) -> str:
    """Return the text of a byte-level token, or "" if its bytes are not UTF-8."""
    bytes_of = {character: byte for byte, character in enumerate(_byte_characters())}
    try:
        return bytes(bytes_of[character] for character in token).decode()
    except (KeyError, UnicodeDecodeError):
        return ""


def _byte_tokens(
    model: Mapping[str, Any], byte_level: bool, refuse: Refuse
) -> tuple[list[str | None] | None, str | None]:
    """Return the tokens of the 256 bytes (None: the byte is dropped), or None; and the unknown token."""
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
    """Return GPT-2's characters for the 256 bytes: printable bytes are themselves, all others start at U+0100."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    behind = itertools.count(0x100)
    return tuple(chr(byte if byte in plain else next(behind)) for byte in range(256))


def _letters() -> list[str]:
    return [chr(code) for first, last in _LETTERS for code in range(first, last)]


def _spell(letter: str) -> str:
    """Return the characters that GPT2Tokenizer uses for a letter's UTF-8 bytes."""
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
    """Return the ids of tokens that merges produce, and the merges, both spelled in letters."""
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
    """Yield merges that join the bytes of letters.

    Ids of intermediate results, starting at `free`, are added to `ids`.
    """
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
