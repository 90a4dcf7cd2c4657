"""What a comparison of text encoders found: a file, tables, and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OrtolanError
from ..session import package_versions
from .encoder import INT8
from .result import cpu_name, versions_line
from .scatter import Mark, draw_marks, name_marks, save_svg

if TYPE_CHECKING:
    from rich.table import Table

ORDERS = ("as they come", "sorted by length")


@dataclass(frozen=True)
class Speed:
    """Of all texts of a work in one order: seconds, minimum and median."""

    work: str
    order: str
    seconds: float
    median: float


@dataclass
class Row:
    """A form of a model in a runtime. cosine: to ONNX Runtime's fp32, the mean over STS-B's
    sentences, or where there are none over our own. alone: whether texts have
    the same vectors, bit by bit, alone and in a batch. spearman: on all of STS-B's file, where that was given."""

    name: str
    ours: bool
    versions: dict[str, str]
    call: str
    megabytes: float
    cosine: float = 0.0
    alone: bool = False
    spearman: float | None = None
    speeds: list[Speed] = field(default_factory=list)

    def speed(self, work: str, order: str) -> Speed | None:
        return next((one for one in self.speeds if (one.work, one.order) == (work, order)), None)


@dataclass
class ModelRows:
    """texts: how many each work has; tokens: of these, without padding."""

    model: str
    texts: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def rates(self, row: Row, work: str, order: str) -> tuple[float, float] | None:
        """Texts a second, by the shortest time and by the median."""
        speed = row.speed(work, order)
        return None if speed is None else (self.texts[work] / speed.seconds, self.texts[work] / speed.median)


@dataclass
class EmbeddingsResult:
    command: str
    threads: int
    batch: int
    cpu: str = field(default_factory=cpu_name)
    versions: dict[str, str] = field(default_factory=package_versions)
    models: list[ModelRows] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> EmbeddingsResult:
        """The inverse of to_json. Raises OrtolanError for any other text."""
        try:
            found = json.loads(text)
            for model in found["models"]:
                for row in model["rows"]:
                    row["speeds"] = [Speed(**one) for one in row["speeds"]]
                model["rows"] = [Row(**row) for row in model["rows"]]
            return cls(**{**found, "models": [ModelRows(**model) for model in found["models"]]})
        except (ValueError, TypeError, KeyError) as error:
            raise OrtolanError(f"not the result of a comparison: {error!r}; expected what --json has written") from None

    def tables(self) -> Iterator[Table | str]:
        """One a model and work; then the versions and calls of its rows, and what was left out."""
        for model in self.models:
            for work in model.texts:
                yield self._table(model, work)
            for row in model.rows:
                versions = ", ".join(f"{name} {number}" for name, number in row.versions.items())
                yield f"{row.name}: {versions}; {row.call}"
            for reason in model.left_out:
                yield f"left out: {reason}"

    def _table(self, model: ModelRows, work: str) -> Table:
        from rich.table import Table

        title = (
            f"{versions_line(self.versions)}\n{model.model} · {work}: {model.texts[work]} texts in batches of"
            f" {self.batch}, {model.tokens[work]} tokens · threads {self.threads}"
        )
        caption = (
            "texts a second, by the shortest time and by the median; how many times as fast as"
            f" {INT8} in the same order, by the shortest times"
        )
        table = Table(title=title, title_justify="left", caption=caption)
        for column in ("", "MB", "Spearman", "cosine", "alone", *ORDERS):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        base = next((row for row in model.rows if row.name == INT8), None)
        for row in model.rows:
            cells = []
            for order in ORDERS:
                rates, peer = (None if one is None else model.rates(one, work, order) for one in (row, base))
                ratio = "" if rates is None or peer is None else f"  {rates[0] / peer[0]:.2f}x"
                cells.append("-" if rates is None else f"{rates[0]:.4g} / {rates[1]:.4g}{ratio}")
            spearman = "" if row.spearman is None else f"{row.spearman:.4f}"
            alone = "same" if row.alone else "differs"
            table.add_row(row.name, f"{row.megabytes:.1f}", spearman, f"{row.cosine:.4f}", alone, *cells)
        return table


def draw(result: EmbeddingsResult, path: Path) -> None:
    """Writes an SVG: a plot a model and work, texts a second as they come to the right, quality upwards: Spearman's
    correlation, or the cosine where that was not measured."""
    from matplotlib.figure import Figure

    works = list(dict.fromkeys(work for model in result.models for work in model.texts))
    if not works:
        raise OrtolanError("the result holds no rows to draw")
    figure = Figure(figsize=(5.5 * len(result.models), 4.2 * len(works) + 0.4), layout="constrained")
    plots = figure.subplots(len(works), len(result.models), squeeze=False)
    for across, model in enumerate(result.models):
        for down, work in enumerate(works):
            _draw_plot(plots[down][across], model, work)
    handles, labels = plots[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    threads = f"{result.threads} thread" + ("s" if result.threads > 1 else "")
    figure.suptitle(f"{result.cpu}, {threads}, batches of {result.batch}", fontsize=9, color="0.35")
    save_svg(figure, path)


def _draw_plot(plot: Any, model: ModelRows, work: str) -> None:
    marks = list(_marks(model, work))
    plot.set_title(f"{model.model}, {work}")
    plot.set_xlabel("texts a second")
    plot.set_ylabel("Spearman, STS-B dev" if _scored(model.rows) else "cosine to fp32")
    if marks:
        draw_marks(plot, marks, "others", "Ortolan, in ONNX Runtime")
        name_marks(plot, marks)


def _scored(rows: Sequence[Row]) -> bool:
    return any(row.spearman is not None for row in rows)


def _marks(model: ModelRows, work: str) -> Iterator[Mark]:
    scored = _scored(model.rows)
    for row in model.rows:
        rates, quality = model.rates(row, work, ORDERS[0]), row.spearman if scored else row.cosine
        if rates is not None and quality is not None:
            yield Mark(row.name, row.ours, rates[0], quality)
