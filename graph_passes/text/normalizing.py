"""Normalizers as tables of replacements, made by running the normalizer on each character.

A table has an entry for each character that the normalizer changes, and for each sequence that changes as a whole.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from .marks import ANY, MARKS, SPLIT, STAND_IN, TEXT_END, spaces, written
from .splitting import Replacements, flat, read_expression, rewritten
from .tokenizer_file import Refuse

# These normalizers change single characters, or sequences of one letter and its accents.
_LOCAL = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Precompiled")
_APART = "\ue123"  # a private-use character, which no normalizer changes or combines
# Code points outside these ranges are unassigned or private.
_LOOKED_AT = (range(1, 0xD800), range(0xE000, 0x33500), range(0xE0000, 0xE0200))
_MAX_PARTS = 4
_WIDTHS, _SYLLABLES = range(0xFF00, 0xFFF0), range(0xAC00, 0xD7A4)

Table = dict[str, str]
Step = Table | Replacements


def read_steps(said: Mapping[str, Any] | None, refuse: Refuse) -> list[Step]:
    """Return the steps of a tokenizer.json's normalizer; the first one is a table."""
    steps: list[Step] = []
    for local, parts in itertools.groupby(flat(said, "normalizers"), lambda part: part["type"] in _LOCAL):
        if local:
            steps.append(_table(list(parts), refuse))
        else:
            steps += [_replacements(part, refuse) for part in parts]
    if not steps or not isinstance(steps[0], dict):
        steps.insert(0, {})
    steps[0] = {mark: STAND_IN for mark in MARKS} | dict(steps[0])
    return steps


def _replacements(part: Mapping[str, Any], refuse: Refuse) -> Replacements:
    space = f"[{written(spaces())}]+"
    if part["type"] == "Replace":
        return [(read_expression(part["pattern"], refuse), rewritten(part["content"]))]
    if part["type"] == "Prepend":
        return [(f"({ANY}+)", rewritten(part["prepend"]) + r"\1")]
    if part["type"] == "Strip":
        made: Replacements = []
        marks = written(((ord(SPLIT), ord(TEXT_END)),))
        if part["strip_left"]:
            made.append((f"(^|[{marks}]){space}", r"\1"))
        if part["strip_right"]:
            made.append((f"{space}([{marks}])", r"\1"))
        return made
    raise refuse(
        f"has a normalizer {part['type']!r}, expected one of {', '.join([*_LOCAL, 'Prepend', 'Replace', 'Strip'])}"
    )


def _table(parts: Sequence[Mapping[str, Any]], refuse: Refuse) -> Table:
    from tokenizers import Tokenizer

    empty = {"type": "BPE", "vocab": {}, "merges": []}
    said = {"version": "1.0", "added_tokens": [], "model": empty}
    said["normalizer"] = {"type": "Sequence", "normalizers": list(parts)}
    normalizer = Tokenizer.from_str(json.dumps(said)).normalizer

    def ask(texts: Sequence[str]) -> list[str]:
        found = normalizer.normalize_str(_APART + _APART.join(texts) + _APART).split(_APART)
        if len(found) != len(texts) + 2:
            raise refuse("has a normalizer that changes characters of private use")
        return [str(one) for one in found[1:-1]]

    characters = [chr(code) for codes in _LOOKED_AT for code in codes if chr(code) != _APART]
    table = {one: made for one, made in zip(characters, ask(characters), strict=True) if made != one}
    compatible = any(part["type"] in ("NFKC", "NFKD", "Nmt", "Precompiled") for part in parts)
    sequences = list(dict.fromkeys(_sequences("NFKC" if compatible else "NFC")))
    for one, made in zip(sequences, ask(sequences), strict=True):
        if made != "".join(table.get(character, character) for character in one):
            table[one] = made
    return table


def _sequences(form: Literal["NFC", "NFKC"]) -> Iterator[str]:
    """Yield the sequences that normal forms may combine: accented letters, Korean syllables, line ends."""
    yield "\r\n"
    alike: dict[str, list[str]] = {}  # maps a normal form to all characters that have it
    for character in map(chr, itertools.chain(*_LOOKED_AT)):
        # Compatibility forms are used for full-width and half-width letters only; with more variants, the table would
        # be large.
        made = unicodedata.normalize(form if ord(character) in _WIDTHS else "NFC", character)
        if len(made) == 1 and made != character:
            alike.setdefault(made, []).append(character)
    for sequence in _accented():
        yield from map("".join, itertools.product(*([one, *alike.get(one, ())] for one in sequence)))
    for syllable in map(chr, _SYLLABLES):
        parts = unicodedata.normalize("NFD", syllable)
        yield parts
        if len(parts) == 3:
            yield unicodedata.normalize("NFC", parts[:2]) + parts[2]


def _accented() -> Iterator[str]:
    """Yield decomposed and partly composed forms of accented letters, with accents in any order."""
    for character in map(chr, itertools.chain(*_LOOKED_AT)):
        apart = unicodedata.normalize("NFD", character)
        if not 2 <= len(apart) <= _MAX_PARTS or ord(character) in _SYLLABLES:
            continue
        for accents in itertools.permutations(apart[1:]):
            for composed in range(1, len(apart)):
                begin = unicodedata.normalize("NFC", "".join([apart[0], *accents[: composed - 1]]))
                yield begin + "".join(accents[composed - 1 :])
