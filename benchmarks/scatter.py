"""Plots of speed against quality: a mark and a name for each form of a model, ours apart from others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LINE, _LETTER = 11.0, 5.4  # of a name in points: its height, and the width of a letter


@dataclass(frozen=True)
class Mark:
    """x: the speed; y: the quality."""

    name: str
    ours: bool
    x: float
    y: float


def draw_marks(plot: Any, marks: Sequence[Mark], others_label: str, our_label: str) -> None:
    for ours, label, color, marker in ((False, others_label, "#7a7a7a", "s"), (True, our_label, "#c4501b", "o")):
        some = [mark for mark in marks if mark.ours == ours]
        plot.scatter(
            [mark.x for mark in some], [mark.y for mark in some],
            label=label, color=color, marker=marker, s=48, zorder=3,
        )  # fmt: skip


def name_marks(plot: Any, marks: Sequence[Mark]) -> None:
    """Sets the plot's limits, and writes each name to the right of its mark, higher or lower where another name would
    lie on it."""
    plot.set_xlim(0, 1.25 * max(mark.x for mark in marks))
    plot.margins(y=0.15)
    plot.grid(True, color="0.92", zorder=0)
    plot.spines[["top", "right"]].set_visible(False)
    plot.figure.draw_without_rendering()
    scale = 72.0 / plot.figure.dpi
    taken: list[tuple[float, float, float]] = []  # left, right and height of a name, in points of the picture
    for mark in sorted(marks, key=lambda one: (-one.y, one.x)):
        x, y = (scale * value for value in plot.transData.transform((mark.x, mark.y)))
        left, right = x + 7, x + 7 + _LETTER * len(mark.name)
        near = [other for begin, end, other in taken if begin < right and left < end]
        steps = sorted(range(-len(near), len(near) + 1), key=lambda step: (abs(step), -step))
        shift = next(
            _LINE * step for step in steps if all(abs(y + _LINE * step - other) >= _LINE - 1e-6 for other in near)
        )
        taken.append((left, right, y + shift))
        plot.annotate(
            mark.name, (mark.x, mark.y), (7, shift - 3.5), textcoords="offset points",
            fontsize=9, color="#8c3510" if mark.ours else "0.3",
            arrowprops={"arrowstyle": "-", "color": "0.7", "lw": 0.6} if abs(shift) > _LINE else None,
        )  # fmt: skip


def save_svg(figure: Any, path: Path) -> None:
    """The same bytes for the same figure."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "ortolan"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
