"""Options and results of benchmarks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ortolan.graph_passes.report.figures import Timing

from ..session import cpu_info, package_versions

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


@dataclass(frozen=True)
class BenchOptions:
    """The cases to measure. None means the benchmark's default.

    Attributes:
        threads: Numbers of intra-op threads.
        cases: (m, k, n) triples.
        sparsity: Fractions of zero weights.
        layers: Names in shapes.py.
        batch: Rows (m) to measure the layers with.
        group_size: Weights per scale.
        device: "opencl" compares an OpenCL device with the CPU, instead of Ortolan with peers.
    """

    threads: tuple[int, ...] = (1, 2)
    quick: bool = False
    cases: tuple[tuple[int, int, int], ...] | None = None
    sparsity: tuple[float, ...] | None = None
    layers: tuple[str, ...] | None = None
    batch: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None
    group_size: int | None = None
    device: str | None = None


@dataclass(frozen=True)
class BenchRow:
    """Times in ms of Ortolan and a peer, measured in the same rounds. If the ratio is above 1, Ortolan is faster."""

    op: str
    case: dict[str, Any]
    threads: int
    ours: Timing
    peer: str
    peer_time: Timing

    @property
    def ratio(self) -> float:
        """The ratio peer_ms / ours_ms of the fastest runs."""
        return self.peer_time.min_ms / self.ours.min_ms

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return {
            "op": self.op,
            "case": self.case,
            "threads": self.threads,
            "ours_ms": round(self.ours.min_ms, 5),
            "ours_median_ms": round(self.ours.median_ms, 5),
            "peer": self.peer,
            "peer_ms": round(self.peer_time.min_ms, 5),
            "peer_median_ms": round(self.peer_time.median_ms, 5),
            "ratio": round(self.ratio, 4),
        }


@dataclass(frozen=True)
class SummaryRow:
    """Speedups over a peer on named layers, by the fastest runs.

    Attributes:
        case: The kind of weights, m, and other values that the benchmark varies.
        ratios: Maps a column of the table to a speedup.
        geomean: Geometric mean over all layers.
        others: Maps the column of another peer to the geometric mean of the speedups over it.
    """

    case: dict[str, Any]
    threads: int
    ratios: dict[str, float]
    geomean: float
    others: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return {
            **self.case,
            "threads": self.threads,
            "ratios": {name: round(ratio, 4) for name, ratio in self.ratios.items()},
            "geomean": round(self.geomean, 4),
            **{f"{name}_geomean": round(ratio, 4) for name, ratio in self.others.items()},
        }


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def summarize(
    rows: Sequence[BenchRow],
    peers: Mapping[str, Sequence[str]],
    columns: Mapping[str, Sequence[str]],
    others: Mapping[str, str],
) -> list[SummaryRow]:
    """Return one row per number of threads and case (without its layer) that was measured with a peer of its kind.

    Args:
        rows: Rows whose case has "kind", "m", "k", "n" and, for named layers, "layer": the names joined by ", ".
        peers: Maps a kind of weights to its peers; the fastest measured peer counts.
        columns: Maps a column of the table to the layers whose geometric mean it shows.
        others: Maps a column to one more peer.
    """
    found: dict[tuple[Any, ...], dict[str, dict[str, float]]] = {}
    for row in rows:
        case = {name: value for name, value in row.case.items() if name not in ("layer", "k", "n")}
        kind, m = case.pop("kind"), case.pop("m")
        for layer in filter(None, row.case.get("layer", "").split(", ")):
            by_layer = found.setdefault((kind, row.threads, m, *case.items()), {})
            by_layer.setdefault(layer, {})[row.peer] = row.ratio
    # Rows are sorted by kind, threads, m and the other keys; values keep the order in which they first occur.
    orders = [list(dict.fromkeys(values)) for values in zip(*found, strict=True)]
    summary = []
    for key in sorted(found, key=lambda key: [order.index(value) for order, value in zip(orders, key, strict=True)]):
        (kind, threads, m, *rest), by_layer = key, found[key]
        ratios = {}
        for layer, by_peer in by_layer.items():
            if measured := [by_peer[peer] for peer in peers[kind] if peer in by_peer]:
                ratios[layer] = min(measured)
        if not ratios:
            continue
        by_column = {
            column: geometric_mean([ratios[layer] for layer in layers if layer in ratios])
            for column, layers in columns.items()
            if not ratios.keys().isdisjoint(layers)
        }
        further = {}
        for name, peer in others.items():
            if measured := [by_layer[layer][peer] for layer in ratios if peer in by_layer[layer]]:
                further[name] = geometric_mean(measured)
        case = {"kind": kind, "m": m, **dict(rest)}
        summary.append(SummaryRow(case, threads, by_column, geometric_mean(list(ratios.values())), further))
    return summary


def cpu_name() -> str:
    """Return the CPU and its features in use, as results show them."""
    cpu = cpu_info()
    return f"{cpu['name']} ({cpu['isa']})"


def versions_line(versions: Mapping[str, str] | None = None) -> str:
    """Return CPU, features and versions in one line: the start of every printed result."""
    versions = package_versions() if versions is None else versions
    return " · ".join([cpu_name(), *(f"{name} {number}" for name, number in versions.items())])


@dataclass
class BenchResult:
    """All rows of one run and its environment. interrupted: some cases are missing."""

    rows: list[BenchRow] = field(default_factory=list)
    summary: list[SummaryRow] = field(default_factory=list)
    summary_title: str = ""
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    cpu: str = field(default_factory=cpu_name)
    versions: dict[str, str] = field(default_factory=package_versions)

    def to_json(self) -> str:
        """Return {"cpu", "versions", "notes", "interrupted", "summary", "rows"} as JSON; see the rows' to_dict."""
        document = {
            "cpu": self.cpu,
            "versions": self.versions,
            "notes": self.notes,
            "interrupted": self.interrupted,
            "summary": [row.to_dict() for row in self.summary],
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(document, indent=2)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table

        table = Table(title=versions_line(self.versions), title_justify="left")
        table.add_column("case")
        table.add_column("threads", justify="right")
        table.add_column("ours, ms (min / median)", justify="right")
        table.add_column("against")
        table.add_column("its ms (min / median)", justify="right")
        table.add_column("ratio", justify="right")
        last = None
        for row in self.rows:
            case = " ".join(f"{key}={value}" for key, value in row.case.items())
            if last is not None and (case, row.threads) != last:
                table.add_section()
            table.add_row(
                case if last is None or case != last[0] else "",
                str(row.threads),
                str(row.ours),
                row.peer,
                str(row.peer_time),
                f"{row.ratio:.2f}x",
            )
            last = (case, row.threads)
        tables = [table, *([self._summary_table()] if self.summary else [])]
        return Group(*tables, *self.notes)

    def _summary_table(self) -> Table:
        from rich.table import Table

        columns = list(dict.fromkeys(name for row in self.summary for name in row.ratios))
        others = list(dict.fromkeys(name for row in self.summary for name in row.others))
        table = Table(title=self.summary_title, title_justify="left")
        table.add_column("weights")
        for name in ("threads", "batch", *list(self.summary[0].case)[2:], *columns, "geomean", *others):
            table.add_column(name, justify="right")
        last = None
        for row in self.summary:
            kind, m, *rest = row.case.values()
            if last is not None and (kind, row.threads, m) != last:
                table.add_section()
            last = (kind, row.threads, m)
            cells = [row.ratios.get(name) for name in columns] + [row.geomean] + [row.others.get(o) for o in others]
            table.add_row(
                *map(str, (kind, row.threads, m, *rest)), *("" if cell is None else f"{cell:.2f}" for cell in cells)
            )
        return table
