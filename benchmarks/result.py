"""What a benchmark is asked and what it answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..session import cpu_info, package_versions
from .timing import Timing

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    threads: numbers of intra-op threads. quick: fewer cases and rounds. cases: (m, k, n) triples and sparsity:
    fractions of zero weights, both in place of the benchmark's own.
    """

    threads: tuple[int, ...] = (1, 2)
    quick: bool = False
    cases: tuple[tuple[int, int, int], ...] | None = None
    sparsity: tuple[float, ...] | None = None


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


def cpu_name() -> str:
    """The CPU and the tier in use, as results name them."""
    cpu = cpu_info()
    return f"{cpu['name']} ({cpu['isa']})"


def versions_line() -> str:
    """CPU, tier and versions in one line: what every printed result begins with."""
    return " · ".join([cpu_name(), *(f"{name} {number}" for name, number in package_versions().items())])


@dataclass
class BenchResult:
    """All rows of one run, and what they were measured on."""

    rows: list[BenchRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cpu: str = field(default_factory=cpu_name)
    versions: dict[str, str] = field(default_factory=package_versions)

    def to_json(self) -> str:
        """{"cpu", "versions", "notes", "rows": [{"op", "case", "threads", "ours_ms", "peer", "peer_ms", "ratio"}]}."""
        document = {
            "cpu": self.cpu,
            "versions": self.versions,
            "notes": self.notes,
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(document, indent=2)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table

        table = Table(title=versions_line(), title_justify="left")
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
        return Group(table, *self.notes)
