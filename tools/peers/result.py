"""The result of a comparison, and its JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ortolan.benchmarks.result import cpu_name
from ortolan.errors import OrtolanError
from ortolan.session import package_versions

from ..workers.process import WorkerError


@dataclass(frozen=True)
class Speed:
    """The speed of one work: units per second by the shortest and by the median time.

    `spread` is the distance between the quartiles of the times, relative to the median.
    """

    work: str
    threads: int
    unit: str
    best: float
    median: float
    spread: float


@dataclass(frozen=True)
class Measure:
    """A latency, a memory size or another figure of one work, which is not a speed."""

    work: str
    threads: int
    name: str
    unit: str
    value: float


@dataclass
class Row:
    """One configuration of a model, with its measurements.

    Rows are compared within `section` and `model`. `quality` maps measures to values (see verdict.py). `load_seconds`
    is the time from opening the file to the first answer, `peak_megabytes` the process's peak memory until then.
    `make_seconds` and `make_megabytes` are the time of the conversion, from the start of its process, and its peak of
    anonymous memory; None if the engine reads the file as it is. `measured` is the date, and `code` the digest of the
    code (freshness.py); old files have neither.
    """

    section: str
    model: str
    name: str
    engine: str
    ours: bool
    call: str
    versions: dict[str, str]
    megabytes: float
    load_seconds: float | None = None
    peak_megabytes: float | None = None
    make_seconds: float | None = None
    make_megabytes: float | None = None
    measured: str | None = None
    code: str | None = None
    quality: dict[str, float] = field(default_factory=dict)
    speeds: list[Speed] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)

    def measure(self, work: str, threads: int, name: str) -> Measure | None:
        """Return a measure of a work, or None."""
        key = (work, threads, name)
        return next((one for one in self.measures if (one.work, one.threads, one.name) == key), None)

    def speed(self, work: str, threads: int) -> Speed | None:
        """Return the speed at a work, or None."""
        return next((one for one in self.speeds if (one.work, one.threads) == (work, threads)), None)


def _row_from(found: Mapping[str, Any]) -> Row:
    """Return the row of a result's file. Files of older versions have no measures."""
    speeds = [Speed(**one) for one in found["speeds"]]
    return Row(**{**found, "speeds": speeds, "measures": [Measure(**one) for one in found.get("measures", ())]})


def _differences(one: Row, other: Row) -> Iterator[tuple[str, float, float]]:
    """Yield the differences of size and quality that are larger than rounding."""
    pairs = [("size in MB", one.megabytes, other.megabytes)]
    pairs += [(name, value, other.quality.get(name, math.nan)) for name, value in one.quality.items()]
    for what, before, after in pairs:
        if not math.isclose(before, after, rel_tol=1e-3):
            yield what, before, after


@dataclass
class PeersResult:
    """All rows of a comparison.

    `commands` made the result, one after the other; `date` is ISO 8601; `notes` describe the run; `left_out` has the
    reasons for missing rows.
    """

    commands: list[str]
    date: str
    notes: list[str] = field(default_factory=list)
    cpu: str = field(default_factory=cpu_name)
    versions: dict[str, str] = field(default_factory=package_versions)
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the result as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PeersResult:
        """Return the result that `to_json` wrote.

        Raises:
            OrtolanError: The text is not such a result.
        """
        try:
            found = json.loads(text)
            rows = [_row_from(row) for row in found["rows"]]
            return cls(**{**found, "rows": rows})
        except (ValueError, TypeError, KeyError) as error:
            raise OrtolanError(
                f"not the result of a comparison: {error!r}; expected a file written by --json"
            ) from None

    def add(self, row: Row) -> Row:
        """Return the existing row of the same configuration, or add this row and return it.

        Raises:
            WorkerError: The existing row has another size or quality. This can happen if formats are chosen by
                measurement.
        """
        key = (row.section, row.model, row.name)
        for one in self.rows:
            if (one.section, one.model, one.name) != key:
                continue
            if different := next(_differences(one, row), None):
                what, before, after = different
                raise WorkerError(f"its {what} is {after:.4g}, but the existing row has {before:.4g}")
            return one
        self.rows.append(row)
        return row

    def drop(self, section: str, model: str) -> None:
        """Remove the rows of a model, and the reasons for missing ones."""
        self.rows = [row for row in self.rows if (row.section, row.model) != (section, model)]
        self.left_out = [reason for reason in self.left_out if not reason.startswith(f"{section}, {model}: ")]

    def timed(self) -> dict[tuple[str, str], frozenset[int]]:
        """Return the numbers of threads that each (section, model) was timed with."""
        groups = self.groups().items()
        return {group: frozenset(speed.threads for row in rows for speed in row.speeds) for group, rows in groups}

    def groups(self) -> dict[tuple[str, str], list[Row]]:
        """Return the rows of each (section, model), in the order of measurement."""
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.section, row.model), []).append(row)
        return found


def works_of(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Return the (work, threads) pairs that the rows were timed at, ordered by threads."""
    found = dict.fromkeys((speed.work, speed.threads) for row in rows for speed in row.speeds)
    return sorted(found, key=lambda one: one[1])
