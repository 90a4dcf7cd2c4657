"""Text of reports: one labelled fact per line, and plain tables."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WIDTH = 80
_LABEL_WIDTH = 14
_NATURAL = 10_000  # width for tables whose names must not be wrapped

Fact = tuple[str, str]  # (label, text); an empty label continues the fact above


def lay_out(facts: Iterable[Fact], width: int = WIDTH, label_width: int = _LABEL_WIDTH) -> str:
    """Return one line for each fact, `label  text`. Longer texts continue in indented lines."""
    indent = " " * label_width
    return "\n".join(wrap(text, width, f"{label:{label_width - 1}} ", indent) for label, text in facts)


def wrap(text: str, width: int = WIDTH, first: str = "", indent: str = "") -> str:
    """Wrap text at spaces. Names and paths are never broken, even if they are longer than a line."""
    filled = textwrap.fill(
        text.replace(" %", "\N{NO-BREAK SPACE}%"),  # keep a number and its % on one line
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace("\N{NO-BREAK SPACE}%", " %")


def table(columns: Mapping[str, Sequence[str]], left: Sequence[str] = (), width: int | None = None) -> str:
    """Return a plain table without its empty columns.

    Args:
        columns: Cells by heading; all columns have the same length.
        left: Headings of left-aligned columns. If the table is too wide, each cell of the first of these columns gets a
            line of its own above the rest of its row.
        width: Columns of the terminal; None: no limit.
    """
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    lines = _rows(shown, left)
    if width is None or max(map(len, lines), default=0) <= width or not left or left[0] not in shown or len(shown) == 1:
        return "\n".join(lines)
    names = shown.pop(left[0])
    others = [f"  {line}" for line in _rows(shown, left)]
    pairs = zip([left[0], *names], others, strict=True)
    return "\n".join(line for pair in pairs for line in pair)


def _rows(columns: Mapping[str, Sequence[str]], left: Sequence[str]) -> list[str]:
    """Return the lines of a table, headings first, as wide as its cells."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        made.add_row(*map(Text, cells))
    return as_text(made, _NATURAL).splitlines()


def as_text(result: Any, width: int = 120) -> str:
    """Return the text that rich prints for an object, without colours."""
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=width, no_color=True, highlight=False, legacy_windows=False).print(result)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def count(number: int, noun: str) -> str:
    """Return a count with its noun: 1 layer, 2 layers."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_of(names: Sequence[str]) -> str:
    """Return the first name and the number of further names: "a and 2 more"."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def factor(ratio: float, better: str, worse: str, same: str = "about the same") -> str:
    """Return a ratio in words, such as "2.00x smaller" or "2.00x larger"."""
    if f"{ratio:.2f}" == "1.00":
        return same
    return f"{ratio:.2f}x {better}" if ratio >= 1 else f"{1 / ratio:.2f}x {worse}"


def percent(fraction: float | None) -> str:
    """Return a fraction as a percentage; "" for None."""
    return "" if fraction is None else f"{100 * fraction:.1f} %"


def number(value: float | None) -> str:
    """Return a value with two significant digits; "" for None."""
    return "" if value is None else f"{value:.2g}"


def largest(values: Iterable[float | None]) -> float | None:
    """Return the largest value that is known and finite."""
    return max((value for value in values if value is not None and math.isfinite(value)), default=None)
