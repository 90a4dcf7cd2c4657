"""What a benchmark is asked and what it answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..session import cpu_info, package_versions
from .timing import Timing

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    threads: numbers of intra-op threads. quick: fewer cases and rounds. The others take the place of the benchmark's
    own: cases: (m, k, n) triples; sparsity: fractions of zero weights; layers: names out of shapes.py; batch: rows
    (m) to measure these with; kinds: of weights; group_size: weights to a scale.
    """

    threads: tuple[int, ...] = (1, 2)
    quick: bool = False
    cases: tuple[tuple[int, int, int], ...] | None = None
    sparsity: tuple[float, ...] | None = None
    layers: tuple[str, ...] | None = None
    batch: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None
    group_size: int | None = None


@dataclass(frozen=True)
class BenchRow:
    """One comparison, both sides timed in the same rounds. Times in milliseconds; ratio above 1: Ortolan is faster."""

    op: str
    case: dict[str, Any]
    threads: int
    ours: Timing
    peer: str
    peer_time: Timing

    @property
    def ratio(self) -> float:
        """peer_ms / ours_ms, of the minima."""
        return self.peer_time.min_ms / self.ours.min_ms

    def to_dict(self) -> dict[str, Any]:
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
    """How many times faster than dense Ortolan is on named layers: the fastest dense peer's ms over ours, of minima.

    ratios: by layer, in the order of the benchmark. fp32_geomean: of the ratios against ort_matmul_fp32.
    """

    kind: str
    threads: int
    m: int
    storage: str
    sparsity: float
    ratios: dict[str, float]
    fp32_geomean: float

    @property
    def geomean(self) -> float:
        return geometric_mean(list(self.ratios.values()))

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "threads": self.threads,
            "m": self.m,
            "storage": self.storage,
            "sparsity": self.sparsity,
            "ratios": {name: round(ratio, 4) for name, ratio in self.ratios.items()},
            "geomean": round(self.geomean, 4),
            "fp32_geomean": round(self.fp32_geomean, 4),
        }


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summarize(
    rows: Sequence[BenchRow], dense_peers: Mapping[str, Sequence[str]], layers: Sequence[str]
) -> list[SummaryRow]:
    """A row for each kind, number of threads, m, storage and sparsity that was measured against a dense peer.

    rows: their case holds "kind", "m", "storage", "sparsity" and, if named, "layer", names joined by ", "; each case
    has the peer ort_matmul_fp32. dense_peers: of each kind, the peers of its precision. layers: all names, in order.
    """
    ratios: dict[tuple[str, int, int, str, float], dict[str, dict[str, float]]] = {}
    for row in rows:
        case = row.case
        key = (case["kind"], row.threads, case["m"], case["storage"], case["sparsity"])
        for name in filter(None, case.get("layer", "").split(", ")):
            ratios.setdefault(key, {}).setdefault(name, {})[row.peer] = row.ratio
    summary = []
    for (kind, threads, m, storage, sparsity), by_layer in ratios.items():
        against_dense: dict[str, float] = {}
        for name in layers:
            found = [by_layer.get(name, {}).get(peer) for peer in dense_peers[kind]]
            if measured := [ratio for ratio in found if ratio is not None]:
                against_dense[name] = min(measured)
        if against_dense:
            fp32 = geometric_mean([by_layer[name]["ort_matmul_fp32"] for name in against_dense])
            summary.append(SummaryRow(kind, threads, m, storage, sparsity, against_dense, fp32))
    order = {kind: i for i, kind in enumerate(dense_peers)}
    return sorted(summary, key=lambda row: (order[row.kind], row.threads, row.m, row.storage, row.sparsity))


def cpu_name() -> str:
    """The CPU and the tier in use, as results name them."""
    cpu = cpu_info()
    return f"{cpu['name']} ({cpu['isa']})"


def versions_line(versions: Mapping[str, str] | None = None) -> str:
    """CPU, tier and versions in one line: what every printed result begins with."""
    versions = package_versions() if versions is None else versions
    return " · ".join([cpu_name(), *(f"{name} {number}" for name, number in versions.items())])


@dataclass
class BenchResult:
    """All rows of one run, and what they were measured on. interrupted: there would have been more."""

    rows: list[BenchRow] = field(default_factory=list)
    summary: list[SummaryRow] = field(default_factory=list)
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    cpu: str = field(default_factory=cpu_name)
    versions: dict[str, str] = field(default_factory=package_versions)

    def to_json(self) -> str:
        """{"cpu", "versions", "notes", "interrupted", "summary": SummaryRow.to_dict, "rows": BenchRow.to_dict}."""
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

        names = list(dict.fromkeys(name for row in self.summary for name in row.ratios))
        title = "Times faster than the fastest dense peer (bf16: or our dense storage); last: ORT fp32, geometric mean"
        table = Table(title=title, title_justify="left")
        table.add_column("weights")
        for name in ("threads", "batch", "zeros", *names, "geomean", "fp32"):
            table.add_column(name, justify="right")
        last = None
        for row in self.summary:
            if last is not None and (row.kind, row.threads, row.m) != last:
                table.add_section()
            last = (row.kind, row.threads, row.m)
            table.add_row(
                row.kind,
                str(row.threads),
                str(row.m),
                f"{row.sparsity:.0%}" if row.storage == "bitmap" else row.storage,
                *(f"{row.ratios[name]:.2f}" if name in row.ratios else "" for name in names),
                f"{row.geomean:.2f}",
                f"{row.fp32_geomean:.2f}",
            )
        return table
