"""The result of a comparison: rows, their geometric means, and the printed table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from ortolan.benchmarks.result import geometric_mean
from ortolan.graph_passes.report.figures import Timing

if TYPE_CHECKING:
    from rich.console import Group

Turns = list[list[float]]  # milliseconds of each timed run, one list per turn

SLOWER = 0.95


@dataclass(frozen=True)
class RowResult:
    """Times of a layer or a model with the old and the new library, or the failure.

    Attributes:
        noise: Relative difference between the shortest times of one library's odd and even turns, which run in two
            processes. With equal libraries, the ratio may differ from 1 by this much.
        repeated: How many times the row was measured again, each time with new processes.
        difference: Relative difference of the answers; None for equal bits.
    """

    operator: str
    name: str
    threads: int
    old: Timing | None = None
    new: Timing | None = None
    noise: float = 0.0
    repeated: int = 0
    difference: float | None = None
    failure: str | None = None

    @classmethod
    def of_turns(
        cls,
        operator: str,
        name: str,
        threads: int,
        old: Turns,
        new: Turns,
        layers: int,
        repeated: int = 0,
        difference: float | None = None,
    ) -> RowResult:
        """Return the result of these turns, whose runs have `layers` layers."""
        noise = max(noise_of(old), noise_of(new))
        before, after = (timing_of(turns).scaled(1 / layers) for turns in (old, new))
        return cls(operator, name, threads, before, after, noise, repeated, difference)

    @property
    def ratio(self) -> float:
        """Old minimum / new minimum: above 1 the new library is faster. NaN for a row that failed."""
        return float("nan") if self.old is None or self.new is None else self.old.min_ms / self.new.min_ms

    @property
    def answers(self) -> str:
        """The relative difference of the answers, or "same"."""
        return "same" if self.difference is None else f"{self.difference:.1e}"

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        case = {"operator": self.operator, "row": self.name, "threads": self.threads}
        if self.old is None or self.new is None:
            return {**case, "failure": self.failure}
        return {
            **case,
            "old_ms": round(self.old.min_ms, 6),
            "old_median_ms": round(self.old.median_ms, 6),
            "new_ms": round(self.new.min_ms, 6),
            "new_median_ms": round(self.new.median_ms, 6),
            "ratio": round(self.ratio, 4),
            "noise": round(self.noise, 4),
            "repeated": self.repeated,
            "answers": self.answers,
        }

    def __str__(self) -> str:
        where = f"{self.operator}, {self.name}, threads {self.threads}"
        return f"{where}: {self.failure}" if self.failure else f"{where}: {self.ratio:.3f}x"


def timing_of(turns: Turns) -> Timing:
    """Return the minimum and the median of all runs."""
    times = list(chain.from_iterable(turns))
    return Timing(min(times), statistics.median(times))


def noise_of(turns: Turns) -> float:
    """Return the relative difference between the minima of odd and even turns; 0 for a single turn."""
    if len(turns) < 2:
        return 0.0
    halves = [min(chain.from_iterable(turns[start::2])) for start in (0, 1)]
    return max(halves) / min(halves) - 1


@dataclass
class Comparison:
    """All rows. `header` has a line for each fact about the run."""

    header: dict[str, str]
    notes: list[str] = field(default_factory=list)
    rows: list[RowResult] = field(default_factory=list)
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """True if a row failed."""
        return any(row.failure for row in self.rows)

    def means(self) -> dict[tuple[str, int], float]:
        """Return geometric means of the ratios by operator and threads; the key "all" is for all operators."""
        found: dict[tuple[str, int], list[float]] = {}
        measured = [row for row in self.rows if not row.failure]
        for row in measured:
            found.setdefault((row.operator, row.threads), []).append(row.ratio)
        for row in measured:
            found.setdefault(("all", row.threads), []).append(row.ratio)
        return {key: geometric_mean(ratios) for key, ratios in found.items()}

    def slower(self) -> list[RowResult]:
        """Return the rows whose ratio is below SLOWER."""
        return [row for row in self.rows if row.ratio < SLOWER]

    def to_json(self) -> str:
        """Return the result as JSON."""
        means = [
            {"operator": operator, "threads": threads, "ratio": round(mean, 4)}
            for (operator, threads), mean in self.means().items()
        ]
        document = {
            **self.header,
            "notes": self.notes,
            "interrupted": self.interrupted,
            "rows": [row.to_dict() for row in self.rows],
            "geometric_means": means,
        }
        return json.dumps(document, indent=2)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table

        table = Table(
            title_justify="left",
            caption="ms per layer or model; ratio: old minimum / new minimum",
        )
        for name in (
            "operator",
            "row",
            "threads",
            "old, min / median",
            "new, min / median",
            "ratio",
            "noise",
            "answers",
        ):
            table.add_column(name, justify="left" if name in ("operator", "row") else "right", no_wrap=True)
        last = None
        for row in self.rows:
            if last is not None and (row.operator, row.threads) != last:
                table.add_section()
            last = (row.operator, row.threads)
            cells = ["failed: see below"] if row.failure else _cells(row)
            table.add_row(row.operator, row.name, str(row.threads), *cells)
        means = Table(title="Geometric means", title_justify="left")
        for name in ("operator", "threads", "rows", "ratio"):
            means.add_column(name, justify="left" if name == "operator" else "right")
        for (operator, threads), mean in self.means().items():
            count = sum(
                not row.failure and row.threads == threads and operator in (row.operator, "all") for row in self.rows
            )
            means.add_row(operator, str(threads), str(count), f"{mean:.3f}x")
        header = [f"{name}: {text}" for name, text in self.header.items()]
        return Group(*header, table, means, *self._last_lines())

    def _last_lines(self) -> list[str]:
        lines = [f"Failed: {row}" for row in self.rows if row.failure]
        slower = self.slower()
        lines += [f"Slower: {row} (noise {row.noise:.1%})" for row in slower]
        if not slower and not self.failed:
            lines.append(f"No row is below {SLOWER}x.")
        if self.interrupted:
            lines.append("Interrupted: not all rows are measured.")
        return lines + self.notes


def _cells(row: RowResult) -> Sequence[str]:
    again = f" ({row.repeated + 1} times)" if row.repeated else ""
    return str(row.old), str(row.new), f"{row.ratio:.3f}x{again}", f"{row.noise:.1%}", row.answers
