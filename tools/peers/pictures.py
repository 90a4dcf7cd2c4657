"""Draw the pictures of a result, each for light and for dark pages: peers-NAME-light.svg, peers-NAME-dark.svg.

summary    two panels of bars, embeddings and decoding: the fastest format of each runtime at equal quality
context    tokens decoded per second after contexts of several lengths, the fastest format of each runtime
shapes     encoders: speedup over ONNX Runtime in fp32 by batch and length, the fastest format of each runtime
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortolan.errors import OrtolanError

from .names import MODELS, RUNTIMES, cpu_label, runtime_of
from .result import PeersResult, Row
from .verdict import COSINE, DECODERS, ENCODERS, Verdict, counts_beside, verdicts

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError:
    raise OrtolanError("pictures need matplotlib; install it with: pip install matplotlib") from None

THREADS = 1  # in every picture
MOST_RUNTIMES = 5
OURS = RUNTIMES["ortolan"]
# Maps a panel to its section, works with captions, and unit. The first work that was timed is shown.
_PANELS = {
    "Embeddings": (
        ENCODERS,
        {
            "mixed 8-256, sorted": "texts of 8 to 256 tokens, sorted by length",
            "mixed 8-256": "texts of 8 to 256 tokens",
            "1x128": "texts of 128 tokens",
        },
        "texts/s",
    ),
    "Decoding": (DECODERS, {"decode": "one token at a time"}, "tokens/s"),
}
_SHAPE = re.compile(r"\d+x\d+")
_STEP = re.compile(r"step at (\d+)")
_FP32 = "ORT fp32"
_WIDTH = 8.3  # inches: a README's column of 830 pixels at 100 dpi
_LABEL_HEIGHT, _LETTER = 13.0, 6.0  # in points, for names of lines: height of a name, width of a letter
# Runtimes with equal colors never appear in one picture.
_COLORS = {
    "ONNX Runtime": 0, "OpenVINO": 1, "llama.cpp": 1, "CTranslate2": 2, "ik_llama.cpp": 2, "PyTorch": 3,
    "mistral.rs": 4, "DeepSparse": 4, "EmbedAnything": 4, "infinity": 5,
}  # fmt: skip


@dataclass(frozen=True)
class Theme:
    """Colors for light or dark pages. Pictures have no background."""

    name: str
    text: str
    faint: str
    grid: str
    ours: str
    others: tuple[str, ...]

    def color(self, runtime: str) -> str:
        """Return the color of a runtime, the same in every picture with several colors."""
        return self.ours if runtime == OURS else self.others[_COLORS.get(runtime, 0)]


LIGHT = Theme(
    "light",
    "#1f2328",
    "#59636e",
    "#e4e7eb",
    "#c4501b",
    ("#7a7a7a", "#3b6ea5", "#5b8c5a", "#8a6bb0", "#b08a2e", "#2f8a86"),
)
DARK = Theme(
    "dark",
    "#e6edf3",
    "#9da7b3",
    "#31373e",
    "#ff8a4c",
    ("#8b949e", "#79b0e8", "#8fc78d", "#bfa2e6", "#dcb95c", "#6cc5c0"),
)


def draw_all(result: PeersResult, folder: Path) -> list[Path]:
    """Write every picture that the result has data for.

    Raises:
        OrtolanError: The result has data for no picture.
    """
    drawn = []
    for name, draw in PICTURES.items():
        for theme in (LIGHT, DARK):
            figure = draw(result, theme)
            if figure is not None:
                path = folder / f"peers-{name}-{theme.name}.svg"
                _save(figure, path)
                drawn.append(path)
    if not drawn:
        raise OrtolanError("the result has no data for any picture; measure encoders or decoders with one thread")
    return drawn


@dataclass(frozen=True)
class Panel:
    """Speeds of runtimes on one work: Ortolan first, then the other runtimes, the fastest first."""

    title: str
    model: str
    work: str
    unit: str
    speeds: Mapping[str, float]


def find_panels(result: PeersResult) -> list[Panel]:
    """Return the panels of the summary that the result has data for."""
    found = verdicts(result)
    panels = []
    for title, (section, works, unit) in _PANELS.items():
        for work, described in works.items():
            shown = [one for one in found if (one.section, one.work, one.threads) == (section, work, THREADS)]
            models = [model for group, model in result.groups() if group == section]
            if shown:
                first = min(shown, key=lambda one: models.index(one.model))
                speeds = _speeds_beside(first, result)
                panels.append(Panel(title, MODELS.get(first.model, first.model), described, unit, speeds))
                break
    return panels


def _speeds_beside(verdict: Verdict, result: PeersResult) -> dict[str, float]:
    rows = result.groups()[verdict.section, verdict.model]
    fastest = _fastest_forms([row for row in rows if counts_beside(row, verdict.ours)], verdict.work)
    speeds = sorted(((_best(row, verdict.work), name) for name, row in fastest.items()), reverse=True)
    return {OURS: verdict.our_value, **{name: speed for speed, name in speeds[: MOST_RUNTIMES - 1]}}


def _fastest_forms(rows: Iterable[Row], work: str) -> dict[str, Row]:
    """Return the fastest row on the work for each runtime except Ortolan."""
    fastest: dict[str, Row] = {}
    for row in rows:
        name = runtime_of(row)
        if name != OURS and _best(row, work) > (_best(fastest[name], work) if name in fastest else 0.0):
            fastest[name] = row
    return fastest


def _best(row: Row, work: str) -> float:
    speed = row.speed(work, THREADS)
    return 0.0 if speed is None else speed.best


def draw_summary(result: PeersResult, theme: Theme) -> Any:
    """Return a figure of horizontal bars, or None without data."""
    panels = find_panels(result)
    if not panels:
        return None
    bars = max(len(panel.speeds) for panel in panels)
    figure = Figure(figsize=(_WIDTH, 1.25 + 0.34 * bars))
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08, wspace=0.03)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for plot, panel in zip(axes, panels, strict=True):
        _draw_bars(plot, panel, bars, theme)
    caption = f"{_caption(result)}. Each runtime in its fastest format that is as accurate as Ortolan's."
    figure.supxlabel(caption, fontsize=9, color=theme.faint)
    return figure


def _draw_bars(plot: Any, panel: Panel, bars: int, theme: Theme) -> None:
    ours = panel.speeds[OURS]
    for number, (name, speed) in enumerate(panel.speeds.items()):
        is_ours = name == OURS
        plot.barh(number, speed, 0.72, color=theme.ours if is_ours else theme.others[0], zorder=3)
        label = f"{speed:.0f} {panel.unit}" if is_ours else f"{speed:.0f}, {_ratio(ours, speed)}"
        plot.annotate(
            label, (speed, number), (5, 0), textcoords="offset points", va="center", fontsize=10,
            color=theme.text, weight="bold" if is_ours else "normal",
        )  # fmt: skip
    plot.set_yticks(range(len(panel.speeds)), list(panel.speeds))
    plot.set_ylim(bars - 0.5, -0.5)
    plot.set_xlim(0, 1.5 * max(panel.speeds.values()))
    plot.set_xticks([])
    plot.spines[["top", "right", "bottom"]].set_visible(False)
    plot.spines["left"].set_color(theme.faint)
    plot.tick_params(axis="y", length=0, labelsize=10, labelcolor=theme.text)
    plot.set_title(f"{panel.model}, {panel.work}", loc="left", fontsize=9, color=theme.faint, pad=6)
    plot.annotate(
        panel.title, (0, 1), (0, 22), xycoords="axes fraction", textcoords="offset points", fontsize=13,
        weight="bold", color=theme.text,
    )  # fmt: skip


def _ratio(ours: float, peer: float) -> str:
    if peer > ours:
        return f"{peer / ours:.1f}× faster"
    return f"{ours / peer:.1f}× slower"


def draw_context(result: PeersResult, theme: Theme) -> Any:
    """Return a figure with a line for each runtime, or None without data."""
    plots = [
        (model, lines)
        for (section, model), rows in result.groups().items()
        if section == DECODERS and (lines := _context_lines(model, rows, result))
    ]
    if not plots:
        return None
    figure, axes = _figure(result, len(plots), theme)
    for plot, (model, lines) in zip(axes, plots, strict=True):
        for name, line in lines.items():
            plot.plot(*zip(*line, strict=True), color=theme.color(name), marker="o", markersize=4, lw=1.6, zorder=3)
        plot.set_xscale("log", base=2)
        plot.set_yscale("log")
        contexts = sorted({context for line in lines.values() for context, _ in line})
        plot.set_xticks(contexts, [f"{context:,}" for context in contexts])
        _round_ticks(plot.yaxis, [speed for line in lines.values() for _, speed in line])
        plot.set_title(MODELS.get(model, model), fontsize=11)
        plot.set_xlabel("tokens of context", fontsize=10)
        plot.set_ylabel("tokens decoded per second", fontsize=10)
        _dress(plot, theme)
        plot.margins(x=0.05, y=0.12)
        plot.set_xlim(right=2.1 * contexts[-1])  # room for names
        _name_lines(plot, lines, theme)
    return figure


def _context_lines(model: str, rows: Sequence[Row], result: PeersResult) -> dict[str, list[tuple[int, float]]]:
    """Return the (context, speed) points of one row per runtime.

    The row is the fastest at the second shortest context, which all runtimes reach.

    The result is empty if fewer than two contexts were measured.
    """
    contexts = sorted({context for row in rows for context, _ in _by_context(row)})
    if len(contexts) < 2:
        return {}
    work = f"step at {contexts[1]}"
    verdict = next((one for one in verdicts(result) if (one.model, one.work, one.threads) == (model, work, 1)), None)
    if verdict is None:
        return {}
    fastest = _fastest_forms([row for row in rows if counts_beside(row, verdict.ours)], work)
    order = sorted(fastest, key=lambda name: -_best(fastest[name], work))[: MOST_RUNTIMES - 1]
    forms = {OURS: verdict.ours, **{name: fastest[name] for name in order}}
    return {name: _by_context(row) for name, row in forms.items()}


def _by_context(row: Row) -> list[tuple[int, float]]:
    found = [
        (int(match[1]), speed.best)
        for speed in row.speeds
        if speed.threads == THREADS and (match := _STEP.fullmatch(speed.work))
    ]
    return sorted(found)


def _name_lines(plot: Any, lines: Mapping[str, Sequence[tuple[int, float]]], theme: Theme) -> None:
    """Write each line's name to the right of its last point, moved up or down to avoid overlap."""
    plot.figure.draw_without_rendering()
    scale = 72.0 / plot.figure.dpi
    taken = []  # points of the figure covered by lines or names
    for line in lines.values():
        corners = plot.transData.transform(line) * scale
        for begin, end in itertools.pairwise(corners):
            taken += [begin + (end - begin) * step / 50 for step in range(51)]
    for name, line in sorted(lines.items(), key=lambda one: -one[1][-1][1]):
        x, y = plot.transData.transform(line[-1]) * scale
        left, right = x + 8, x + 8 + _LETTER * len(name)
        near = [height for position, height in taken if left - 2 <= position <= right + 2]
        shifts = sorted(range(-60, 61, 2), key=abs)
        free = (shift for shift in shifts if all(abs(y + shift - height) >= _LABEL_HEIGHT / 2 + 1 for height in near))
        shift = next(free, 0)
        taken += [(left + (right - left) * step / 10, y + shift + edge) for step in range(11) for edge in (-5, 0, 5)]
        plot.annotate(
            name, line[-1], (8, shift), textcoords="offset points", va="center", fontsize=10,
            color=theme.color(name), annotation_clip=False,
        )  # fmt: skip


def draw_shapes(result: PeersResult, theme: Theme) -> Any:
    """Return a figure of bars by shape of the batch, or None without data."""
    plots = [
        (model, shapes, bars)
        for (section, model), rows in result.groups().items()
        if section == ENCODERS
        for shapes, bars in [_bars(rows)]
        if bars
    ]
    if not plots:
        return None
    figure, axes = _figure(result, len(plots), theme, "Speedup over ONNX Runtime in fp32. ")
    for plot, (model, shapes, bars) in zip(axes, plots, strict=True):
        width = 0.84 / len(bars)
        for number, (name, values) in enumerate(bars.items()):
            positions = [shape - 0.42 + width * (number + 0.5) for shape in range(len(shapes))]
            plot.bar(positions, values, 0.92 * width, color=theme.color(name), label=name, zorder=3)
        plot.axhline(1.0, color=theme.faint, lw=1, ls="--", zorder=4)
        plot.set_xticks(range(len(shapes)), [shape.replace("x", " × ") for shape in shapes])
        plot.set_title(MODELS.get(model, model), fontsize=11)
        plot.set_xlabel("texts × tokens", fontsize=10)
        _dress(plot, theme)
    labeled = [zip(*plot.get_legend_handles_labels(), strict=True) for plot in axes]
    handles = {label: handle for pairs in labeled for handle, label in pairs}
    legend = figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles), frameon=False,
        fontsize=10,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_color(theme.text)
    return figure


def _bars(rows: Sequence[Row]) -> tuple[list[str], dict[str, list[float]]]:
    """Return the shapes, and the speedups over fp32 by runtime: of the fastest row with a cosine of 0.99, or zeros."""
    base = next((row for row in rows if row.name == _FP32), None)
    if base is None:
        return [], {}
    shapes = [speed.work for speed in base.speeds if speed.threads == THREADS and _SHAPE.fullmatch(speed.work)]
    good = [row for row in rows if row.quality.get("cosine", 0.0) >= COSINE and row is not base]
    bars = {}
    for name in sorted({runtime_of(row) for row in good}, key=lambda one: (one != OURS, one)):
        forms = [row for row in good if runtime_of(row) == name]
        values = [max(_best(row, shape) for row in forms) / _best(base, shape) for shape in shapes]
        if any(values):
            bars[name] = values
    return shapes, bars


def _round_ticks(axis: Any, values: Sequence[float]) -> None:
    """Label a logarithmic axis with round values that cover all of `values`."""
    wide = max(values) > 8 * min(values)
    bases = (1.0, 2.0, 5.0) if wide else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    steps = [base * 10.0**power for power in range(-3, 7) for base in bases]
    ticks = [tick for tick in steps if 0.9 * min(values) <= tick <= 1.1 * max(values)]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def _dress(plot: Any, theme: Theme) -> None:
    plot.grid(True, axis="y", color=theme.grid, zorder=0)
    plot.set_axisbelow(True)
    plot.spines[["top", "right"]].set_visible(False)
    plot.spines[["left", "bottom"]].set_color(theme.faint)
    plot.tick_params(colors=theme.faint, labelsize=9)
    for text in (plot.title, plot.xaxis.label, plot.yaxis.label):
        text.set_color(theme.text)


def _figure(result: PeersResult, count: int, theme: Theme, topic: str = "") -> tuple[Any, Sequence[Any]]:
    """Return a figure with `count` plots, two in a row, and the plots."""
    across = min(count, 2)
    down = -(-count // across)
    figure = Figure(figsize=(_WIDTH, 3.4 * down), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for plot in axes[count:]:
        plot.set_visible(False)
    figure.suptitle(topic + _caption(result), fontsize=9, color=theme.faint)
    return figure, axes[:count]


def _caption(result: PeersResult) -> str:
    return f"{cpu_label(result.cpu)}, {THREADS} thread{'s' if THREADS > 1 else ''}, {result.date}"


def _save(figure: Any, path: Path) -> None:
    """Write the figure as SVG. Equal figures give equal bytes."""
    with matplotlib.rc_context({"svg.hashsalt": "ortolan"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)


PICTURES: Mapping[str, Callable[[PeersResult, Theme], Any]] = {
    "summary": draw_summary,
    "context": draw_context,
    "shapes": draw_shapes,
}
