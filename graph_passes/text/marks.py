"""Marks in texts inside the graph: the end of a word, the end of a text, and added tokens found in a text.

Marks consist of four characters that Unicode reserves for internal use (U+FDD0 to U+FDD3). If a text contains such a
character, U+FDD4 replaces it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

SPLIT, TEXT_END = "\ufdd0", "\ufdd1"
_DIGITS = "\ufdd2\ufdd3"
MARKS = (SPLIT, TEXT_END, *_DIGITS)
STAND_IN = "\ufdd4"
LAST_OF_ASCII = 0x7F
_MARKS_RANGE = (0xFDD0, 0xFDD3)
_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF
_LAST_OF_A_CLASS = 0x3347F  # later characters (unassigned, private, variation selectors) are in no class

Ranges = tuple[tuple[int, int], ...]  # (first, last) characters of ranges


def found_token(number: int) -> str:
    """Return the marks for an added token: its number as 16 binary digits."""
    return f"{number:016b}".translate({ord("0"): _DIGITS[0], ord("1"): _DIGITS[1]})


@lru_cache
def ranges(pattern: str) -> Ranges:
    r"""Return the characters of a class of `tokenizers`' regular expressions, such as r"\p{L}"."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(f"[^{pattern}]+"), "removed")
    return _ranges(split.pre_tokenize_str("".join(map(chr, _codes()))))


@lru_cache
def _codes() -> tuple[int, ...]:
    """Return all characters that may belong to a class of regular expressions."""
    return tuple(code for code in range(1, _LAST_OF_A_CLASS + 1) if not _SURROGATES[0] <= code <= _SURROGATES[1])


def _ranges(pieces: Iterable[tuple[str, tuple[int, int]]]) -> Ranges:
    """Return the character ranges of pieces that were split from the text of all `_codes`."""
    codes, found = _codes(), list[tuple[int, int]]()
    for _, (start, end) in pieces:
        first, last = codes[start], codes[end - 1]
        if first < _SURROGATES[0] and last > _SURROGATES[1]:
            found += [(first, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, last)]
        else:
            found.append((first, last))
    return tuple(found)


@lru_cache
def digits() -> Ranges:
    """Return the digits of pre-tokenizer Digits.

    It uses Rust's tables, which differ from those of regular expressions.
    """
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.Digits(individual_digits=False)
    pieces = split.pre_tokenize_str("".join(map(chr, _codes())))
    return _ranges(pieces[1::2])  # pieces alternate, and the first characters are not digits


def others(*classes: Ranges) -> Ranges:
    """Return all characters outside the classes, except marks."""
    taken = sorted([*(one for some in classes for one in some), _MARKS_RANGE, _SURROGATES])
    free, start = [], 1
    for first, last in taken:
        if first > start:
            free.append((start, first - 1))
        start = max(start, last + 1)
    if start <= _LAST:
        free.append((start, _LAST))
    return tuple(free)


def written(*classes: Ranges) -> str:
    """Return the classes as the content of an RE2 bracket expression."""
    return "".join(rf"\x{{{first:X}}}-\x{{{last:X}}}" for some in classes for first, last in some)


_CLASS = re.compile(r"\[((?:\\x\{[0-9A-F]+\}-\\x\{[0-9A-F]+\})+)\]")
_RANGE = re.compile(r"\\x\{([0-9A-F]+)\}-\\x\{([0-9A-F]+)\}")


def narrowed(expression: str) -> str:
    """Return the expression with classes reduced to ASCII and marks, which compiles a hundred times faster."""

    def narrow(found: re.Match[str]) -> str:
        pairs = ((int(first, 16), int(last, 16)) for first, last in _RANGE.findall(found[1]))
        kept = tuple((first, min(last, LAST_OF_ASCII)) for first, last in pairs if first <= LAST_OF_ASCII)
        return f"[{written(kept)}]" if kept else found[0]

    return _CLASS.sub(narrow, expression)


def spaces() -> Ranges:
    r"""Return the characters that \s matches."""
    return ranges(r"\s")


ANY = f"[^{written((_MARKS_RANGE,))}]"  # any character but a mark


def literal(text: str) -> str:
    """Return an RE2 expression that finds the text."""
    return "".join(rf"\x{{{ord(character):X}}}" for character in text)
