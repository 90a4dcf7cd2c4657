"""Pre-tokenizers as RE2 expressions that put a mark between words.

RE2 and `tokenizers` use different versions of Unicode, so character classes are spelled out. RE2 has no lookahead, so
an extra mark splits runs of spaces where the lookahead of GPT-2's pattern splits them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .marks import ANY, MARKS, SPLIT, TEXT_END, digits, literal, others, ranges, spaces, written
from .tokenizer_file import Refuse

Replacements = list[tuple[str, str]]
_LINES = ((10, 10), (13, 13))

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_LOOKAHEAD = r"\s+(?!\S)|\s+"
_ONE_CLASS = (r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r"[0-9]", r"[0-9]+", r"\s", r"\s+")


def read_splits(said: Mapping[str, Any] | None, refuse: Refuse) -> Replacements:
    """Return replacements that do what a tokenizer.json's pre-tokenizer does, except its mapping of bytes."""
    return [one for part in flat(said, "pretokenizers") for one in _split(part, refuse)]


def flat(said: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a sequence in a tokenizer.json; sequences may be nested."""
    if said is None:
        return
    if said["type"] != "Sequence":
        yield said
        return
    for one in said[parts]:
        yield from flat(one, parts)


def _split(part: Mapping[str, Any], refuse: Refuse) -> Replacements:
    known: dict[str, Callable[[Mapping[str, Any], Refuse], Replacements]] = {
        "ByteLevel": _byte_level,
        "Metaspace": _metaspace,
        "Split": _by_pattern,
        "WhitespaceSplit": lambda part, refuse: [(f"[{written(spaces())}]+", SPLIT)],
        "Digits": _digits,
    }
    if part["type"] not in known:
        raise refuse(f"has a pre-tokenizer {part['type']!r}, expected one of {', '.join(known)}")
    return known[part["type"]](part, refuse)


def _byte_level(part: Mapping[str, Any], refuse: Refuse) -> Replacements:
    before = [_begin_with(" ")] if part.get("add_prefix_space", True) else []
    return before + (_words(_GPT2) if part.get("use_regex", True) else [])


def _begin_with(text: str) -> tuple[str, str]:
    """Return a replacement that adds the text before each run between marks, unless the run starts with it."""
    return f"{literal(text)}({ANY}*)|({ANY}+)", rf"{text}\1\2"


def _metaspace(part: Mapping[str, Any], refuse: Refuse) -> Replacements:
    mark = part["replacement"]
    scheme = part.get("prepend_scheme")
    if scheme is None:  # older files lack the entry
        scheme = "always" if part.get("add_prefix_space", True) else "never"
    if scheme not in ("always", "first", "never"):
        raise refuse(f"has a Metaspace with prepend_scheme {scheme!r}")
    made = [(literal(" "), mark)]
    if scheme == "always":
        made.append(_begin_with(mark))
    elif scheme == "first":
        begin = f"(^|{literal(TEXT_END)})"
        made.append((f"{begin}(?:{literal(mark)}({ANY}*)|({ANY}+))", rf"\1{mark}\2\3"))
    if part.get("split", True):
        made.append((literal(mark), SPLIT + mark))
    return made


def _digits(part: Mapping[str, Any], refuse: Refuse) -> Replacements:
    each = "" if part.get("individual_digits") else "+"
    return [(f"([{written(digits())}]{each})", rf"{SPLIT}\1{SPLIT}")]


def _by_pattern(part: Mapping[str, Any], refuse: Refuse) -> Replacements:
    pattern, behavior = part["pattern"], part["behavior"]
    if part.get("invert"):
        raise refuse("has an inverted pre-tokenizer Split, which is not supported")
    by = {
        "Isolated": rf"{SPLIT}\1{SPLIT}",
        "Removed": SPLIT,
        "MergedWithPrevious": rf"\1{SPLIT}",
        "MergedWithNext": rf"{SPLIT}\1",
    }
    expression = pattern.get("Regex")
    if behavior == "Isolated" and expression in (_GPT2, _LLAMA3, _QWEN2):
        return _words(expression)
    found = literal(pattern["String"]) if "String" in pattern else ""
    if expression in _ONE_CLASS:
        found = _spelled(expression)
    if not found or behavior not in by:
        raise refuse(
            f"splits texts ({behavior}) by {pattern!r}, expected a string, one of {', '.join(_ONE_CLASS)}, or the "
            "pattern of GPT-2, Llama 3 or Qwen2"
        )
    return [(f"({found})", by[behavior])]


def _words(pattern: str) -> Replacements:
    """Return replacements that put a mark on both sides of each match of a known pattern."""
    space = spaces()
    # The last of several spaces belongs to the next word, unless it is a line end, which the pattern matches first.
    last = tuple(one for one in _single(space) if one not in _LINES) if r"[\r\n]" in pattern else space
    cut = (f"([{written(space)}]+)([{written(last)}])([{written(others(space))}])", rf"\1{SPLIT}\2\3")
    words = _spelled(pattern.removesuffix(_LOOKAHEAD) + r"\s+")
    return [cut, (f"({words})", rf"{SPLIT}\1{SPLIT}")]


def _spelled(expression: str) -> str:
    """Return an expression with its classes spelled out."""
    letters, numbers, space = ranges(r"\p{L}"), ranges(r"\p{N}"), spaces()
    for old, new in (
        (r"[^\s\p{L}\p{N}]", f"[{written(others(space, letters, numbers))}]"),
        (r"[^\r\n\p{L}\p{N}]", f"[{written(others(_LINES, letters, numbers))}]"),
        (r"\p{L}", f"[{written(letters)}]"),
        (r"\p{N}", f"[{written(numbers)}]"),
        (r"\s", f"[{written(space)}]"),
    ):
        expression = expression.replace(old, new)
    return expression


def _single(some: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Split ranges into single characters."""
    return [(code, code) for first, last in some for code in range(first, last + 1)]


def spaces_beside(tokens: list[tuple[str, bool, bool]]) -> Replacements:
    """Return replacements that remove the spaces beside tokens: (content, spaces before, spaces after)."""
    space = f"[{written(spaces())}]+"
    made: Replacements = []
    before = [literal(content) for content, left, _ in tokens if left]
    behind = [literal(content) for content, _, right in tokens if right]
    if before:
        made.append((f"{space}({'|'.join(before)})", r"\1"))
    if behind:
        made.append((f"({'|'.join(behind)}){space}", r"\1"))
    return made


def read_expression(pattern: Mapping[str, str], refuse: Refuse) -> str:
    """Return the RE2 expression of a Replace normalizer: a string, or runs of a character or of spaces."""
    if "String" in pattern:
        if not pattern["String"] or any(mark in pattern["String"] for mark in MARKS):
            raise refuse(f"has a normalizer that replaces {pattern['String']!r}")
        return literal(pattern["String"])
    known = {
        r" {2,}": literal(" ") + "{2,}",
        r"\s+": f"[{written(spaces())}]+",
        r"\s{2,}": f"[{written(spaces())}]{{2,}}",
        r" +": literal(" ") + "+",
        r"\s": f"[{written(spaces())}]",
    }
    if pattern["Regex"] not in known:
        raise refuse(f"has a normalizer that replaces {pattern['Regex']!r}, expected one of {', '.join(known)}")
    return known[pattern["Regex"]]


def rewritten(text: str) -> str:
    """Return text as an RE2 replacement, where a backslash starts a group's number."""
    return text.replace("\\", "\\\\")
