"""Plots of speed against quality: a mark and a name for each form of a model, ours apart from others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CLOSE = tuple(one / 10 for one in range(10, 100, 5))
_LINE, _LETTER, _RADIUS = 10.0, 4.8, 4.0  # in points: the height of a name, the width of a letter, half a mark


@dataclass(frozen=True)
class Theme:
    """Colours. Pictures have no background of their own."""

    name: str
    text: str
    faint: str
    grid: str
    ours: str
    others: tuple[str, ...]


LIGHT = Theme(
    "light", "#1f2328", "#59636e", "#e4e7eb", "#c4501b", ("#7a7a7a", "#3b6ea5", "#5b8c5a", "#8a6bb0", "#b08a2e")
)
DARK = Theme(
    "dark", "#e6edf3", "#9da7b3", "#31373e", "#ff8a4c", ("#a0a0a0", "#79b0e8", "#8fc78d", "#bfa2e6", "#dcb95c")
)


@dataclass(frozen=True)
class Mark:
    """x: the speed; y: the quality."""

    name: str
    ours: bool
    x: float
    y: float


def draw_marks(plot: Any, marks: Sequence[Mark], others_label: str, our_label: str, theme: Theme) -> None:
    colors = ((False, others_label, theme.others[0], "s"), (True, our_label, theme.ours, "o"))
    for ours, label, color, marker in colors:
        some = [mark for mark in marks if mark.ours == ours]
        plot.scatter(
            [mark.x for mark in some], [mark.y for mark in some],
            label=label, color=color, marker=marker, s=36, zorder=3,
        )  # fmt: skip


def name_marks(plot: Any, marks: Sequence[Mark], theme: Theme) -> None:
    """Sets the plot's limits, with a logarithmic axis of speed, and writes each name to the right of its mark, higher
    or lower where it would lie on another name or mark."""
    plot.set_xscale("log")
    plot.set_xlim(min(mark.x for mark in marks) / 1.2, 2.2 * max(mark.x for mark in marks))
    round_ticks(plot.xaxis, [mark.x for mark in marks])
    plot.margins(y=0.15)
    plot.figure.draw_without_rendering()
    scale = 72.0 / plot.figure.dpi
    places = {mark: [scale * value for value in plot.transData.transform((mark.x, mark.y))] for mark in marks}
    taken = [(x - _RADIUS, x + _RADIUS, y) for x, y in places.values()]  # left, right and height, in points
    for mark in sorted(marks, key=lambda one: (-one.y, one.x)):
        x, y = places[mark]
        left, right = x + 7, x + 7 + _LETTER * len(mark.name)
        near = [other for begin, end, other in taken if begin < right and left < end]
        steps = sorted(range(-len(near), len(near) + 1), key=lambda step: (abs(step), -step))
        shift = next(
            _LINE * step for step in steps if all(abs(y + _LINE * step - other) >= _LINE - 1e-6 for other in near)
        )
        taken.append((left, right, y + shift))
        plot.annotate(
            mark.name, (mark.x, mark.y), (7, shift - 3.5), textcoords="offset points",
            fontsize=8, color=theme.ours if mark.ours else theme.faint,
            arrowprops={"arrowstyle": "-", "color": theme.faint, "lw": 0.5} if abs(shift) > _LINE else None,
        )  # fmt: skip


def round_ticks(axis: Any, values: Sequence[float]) -> None:
    """Of a logarithmic axis: round numbers, about a half apart, that hold all of the values."""
    wide = max(values) > 8 * min(values)
    bases = (
        (1.0, 2.0, 5.0) if wide else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0) if max(values) > 2 * min(values) else _CLOSE
    )
    steps = [base * 10.0**power for power in range(-3, 7) for base in bases]
    ticks = [tick for tick in steps if 0.9 * min(values) <= tick <= 1.1 * max(values)]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def dress(plot: Any, theme: Theme) -> None:
    """Grid and axes."""
    plot.grid(True, color=theme.grid, zorder=0)
    plot.set_axisbelow(True)
    plot.spines[["top", "right"]].set_visible(False)
    plot.spines[["left", "bottom"]].set_color(theme.faint)
    plot.tick_params(colors=theme.faint, labelsize=8)
    for text in (plot.title, plot.xaxis.label, plot.yaxis.label):
        text.set_color(theme.text)


def dress_legend(legend: Any, theme: Theme) -> None:
    for text in legend.get_texts():
        text.set_color(theme.text)


def save_svg(figure: Any, path: Path) -> None:
    """The same bytes for the same figure."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "ortolan"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
