"""The pictures of a result, each for light and for dark pages: peers-NAME-light.svg, peers-NAME-dark.svg.

quality    speed against quality, a plot a model
context    tokens a second against the tokens in front
shapes     encoders, bars by batch and tokens: times as fast as ONNX Runtime in fp32, the fastest form of each runtime
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ortolan.errors import OrtolanError

from ..scatter import DARK, LIGHT, Mark, Theme, draw_marks, dress, dress_legend, name_marks, round_ticks, save_svg
from .result import PeersResult, Row
from .verdict import COSINE, DECODERS, ENCODERS

try:
    from matplotlib.figure import Figure
except ImportError:
    raise OrtolanError("pictures need matplotlib; install it with: pip install matplotlib") from None

THREADS = 1  # of all pictures
# What speed is shown of: the first of these that was timed.
_QUALITY_WORKS = {ENCODERS: ("mixed 8-256", "1x128"), DECODERS: ("decode",)}
_QUALITIES = {ENCODERS: ("Spearman", "cosine"), DECODERS: ("perplexity",)}
_TITLES = {"Spearman": "Spearman's correlation, STS-B dev", "cosine": "cosine to fp32", "perplexity": "perplexity"}
_LOWER_IS_BETTER = ("perplexity",)
_SHAPE = re.compile(r"\d+x\d+")
_STEP = re.compile(r"step at (\d+)")
_FP32 = "ORT fp32"
_WIDTH = 5.4  # inches a plot


def draw_all(result: PeersResult, folder: Path) -> list[Path]:
    """Writes those pictures that there is something for. Raises OrtolanError where there is nothing at all."""
    drawn = []
    for name, draw in PICTURES.items():
        for theme in (LIGHT, DARK):
            figure = draw(result, theme)
            if figure is not None:
                path = folder / f"peers-{name}-{theme.name}.svg"
                save_svg(figure, path)
                drawn.append(path)
    if not drawn:
        raise OrtolanError("the result holds nothing to draw")
    return drawn


def draw_quality(result: PeersResult, theme: Theme) -> Any:
    plots = [
        (model, work, quality, marks)
        for (section, model), rows in result.groups().items()
        if section in _QUALITY_WORKS
        for work, quality, marks in [_quality_marks(section, rows)]
        if marks
    ]
    if not plots:
        return None
    figure, axes = _figure(result, len(plots), theme)
    for plot, (model, work, quality, marks) in zip(axes, plots, strict=True):
        draw_marks(plot, marks, "others", "Ortolan, in ONNX Runtime", theme)
        plot.set_title(model, fontsize=10)
        unit = "texts" if quality != "perplexity" else "tokens"
        plot.set_xlabel(f"{unit} a second, {work}", fontsize=9)
        plot.set_ylabel(_TITLES[quality], fontsize=9)
        if quality in _LOWER_IS_BETTER:
            plot.set_yscale("log")
            plot.invert_yaxis()
            round_ticks(plot.yaxis, [mark.y for mark in marks])
        dress(plot, theme)
        name_marks(plot, marks, theme)
    _legend(figure, axes, theme)
    return figure


def _quality_marks(section: str, rows: Sequence[Row]) -> tuple[str, str, list[Mark]]:
    """The work whose speed is shown, the quality, and a mark for each row that has both."""
    works = [one for one in _QUALITY_WORKS[section] if any(row.speed(one, THREADS) for row in rows)]
    qualities = [one for one in _QUALITIES[section] if any(one in row.quality for row in rows)]
    if not works or not qualities:
        return "", "", []
    work, quality = works[0], qualities[0]
    marks = [
        Mark(row.name, row.ours, speed.best, row.quality[quality])
        for row in rows
        if quality in row.quality and (speed := row.speed(work, THREADS))
    ]
    return work, quality, marks


def draw_context(result: PeersResult, theme: Theme) -> Any:
    plots = [
        (model, lines)
        for (section, model), rows in result.groups().items()
        if section == DECODERS and (lines := [(row, line) for row in rows if len(line := _by_context(row)) > 1])
    ]
    if not plots:
        return None
    figure, axes = _figure(result, len(plots), theme)
    for plot, (model, lines) in zip(axes, plots, strict=True):
        colors = iter(theme.others * len(lines))
        for row, line in lines:
            color = theme.ours if row.ours else next(colors)
            plot.plot(*zip(*line, strict=True), color=color, marker="o", markersize=3, lw=1.2, label=row.name)
        plot.set_xscale("log", base=2)
        plot.set_yscale("log")
        contexts = sorted({context for _, line in lines for context, _ in line})
        plot.set_xticks(contexts, [f"{context:,}" for context in contexts])
        round_ticks(plot.yaxis, [speed for _, line in lines for _, speed in line])
        plot.set_title(model, fontsize=10)
        plot.set_xlabel("tokens in front", fontsize=9)
        plot.set_ylabel("tokens decoded a second", fontsize=9)
        dress(plot, theme)
        _name_lines(plot, lines, theme)
    return figure


def _by_context(row: Row) -> list[tuple[int, float]]:
    found = [
        (int(match[1]), speed.best)
        for speed in row.speeds
        if speed.threads == THREADS and (match := _STEP.fullmatch(speed.work))
    ]
    return sorted(found)


def _name_lines(plot: Any, lines: Sequence[tuple[Row, list[tuple[int, float]]]], theme: Theme) -> None:
    """Beside the last point of each, the lower ones lower."""
    heights = []
    last: float | None = None
    for row, line in sorted(lines, key=lambda one: -one[1][-1][1]):
        height = line[-1][1] if last is None else min(line[-1][1], last / 1.13)
        heights.append((row, line[-1][0], height))
        last = height
    for row, context, height in heights:
        plot.annotate(
            row.name, (context, height), (6, -3), textcoords="offset points", fontsize=8,
            color=theme.ours if row.ours else theme.faint, annotation_clip=False,
        )  # fmt: skip


def draw_shapes(result: PeersResult, theme: Theme) -> Any:
    plots = [
        (model, shapes, bars)
        for (section, model), rows in result.groups().items()
        if section == ENCODERS
        for shapes, bars in [_bars(rows)]
        if bars
    ]
    if not plots:
        return None
    figure, axes = _figure(result, len(plots), theme)
    for plot, (model, shapes, bars) in zip(axes, plots, strict=True):
        width = 0.84 / len(bars)
        colors = iter(theme.others * len(bars))
        for number, (engine, values) in enumerate(bars.items()):
            places = [shape - 0.42 + width * (number + 0.5) for shape in range(len(shapes))]
            color = theme.ours if engine == "ortolan" else next(colors)
            plot.bar(places, values, 0.92 * width, color=color, label=engine, zorder=3)
        plot.set_xticks(range(len(shapes)), shapes)
        plot.set_title(model, fontsize=10)
        plot.set_xlabel("texts x tokens", fontsize=9)
        plot.set_ylabel("times as fast as ONNX Runtime in fp32", fontsize=9)
        dress(plot, theme)
    _legend(figure, axes, theme)
    return figure


def _bars(rows: Sequence[Row]) -> tuple[list[str], Mapping[str, list[float]]]:
    """Shapes, and for each engine how many times as fast as fp32 its fastest form of cosine 0.99 is; 0 for none."""
    base = next((row for row in rows if row.name == _FP32), None)
    if base is None:
        return [], {}
    shapes = [speed.work for speed in base.speeds if speed.threads == THREADS and _SHAPE.fullmatch(speed.work)]
    good = [row for row in rows if row.quality.get("cosine", 0.0) >= COSINE and row is not base]
    bars = {}
    for engine in sorted({row.engine for row in good}, key=lambda one: (one != "ortolan", one)):
        forms = [row for row in good if row.engine == engine]
        values = [_fastest(forms, shape) / _fastest([base], shape) for shape in shapes]
        if any(values):
            bars[engine] = values
    return shapes, bars


def _fastest(rows: Sequence[Row], work: str) -> float:
    return max((speed.best for row in rows if (speed := row.speed(work, THREADS))), default=0.0)


def _figure(result: PeersResult, count: int, theme: Theme) -> tuple[Any, Sequence[Any]]:
    """With so many plots, two in a row."""
    across = min(count, 2)
    down = -(-count // across)
    figure = Figure(figsize=(_WIDTH * across, 4.0 * down + 0.5), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for plot in axes[count:]:
        plot.set_visible(False)
    threads = f"{THREADS} thread" + ("s" if THREADS > 1 else "")
    caption = f"{result.cpu}, {threads}, onnxruntime {result.versions.get('onnxruntime', '')}, {result.date}"
    figure.suptitle(caption, fontsize=8, color=theme.faint)
    return figure, axes[:count]


def _legend(figure: Any, axes: Sequence[Any], theme: Theme) -> None:
    found = dict(_labels(axes))
    legend = figure.legend(
        list(found.values()),
        list(found),
        loc="outside lower center",
        ncols=min(4, len(found)),
        frameon=False,
        fontsize=8,
    )
    dress_legend(legend, theme)


def _labels(axes: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for plot in axes:
        handles, labels = plot.get_legend_handles_labels()
        yield from zip(labels, handles, strict=True)


PICTURES: Mapping[str, Callable[[PeersResult, Theme], Any]] = {
    "quality": draw_quality,
    "context": draw_context,
    "shapes": draw_shapes,
}
