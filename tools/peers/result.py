"""What a comparison found, and its file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from ortolan.benchmarks.result import cpu_name
from ortolan.errors import OrtolanError
from ortolan.session import package_versions

from ..workers.process import WorkerError


@dataclass(frozen=True)
class Speed:
    """Of one kind of work: units a second, by the shortest time and by the median. spread: the distance between the
    quartiles of the times, in medians."""

    work: str
    threads: int
    unit: str
    best: float
    median: float
    spread: float


@dataclass
class Row:
    """A form of a model in a runtime. section, model: what it is compared within. quality: measure -> value, as
    verdict.py knows them. load_seconds: from the file to the first answer. peak_megabytes: of the process till then."""

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
    quality: dict[str, float] = field(default_factory=dict)
    speeds: list[Speed] = field(default_factory=list)

    def speed(self, work: str, threads: int) -> Speed | None:
        return next((one for one in self.speeds if (one.work, one.threads) == (work, threads)), None)


def _differences(one: Row, other: Row) -> Iterator[tuple[str, float, float]]:
    """Of size and quality, beyond rounding."""
    pairs = [("size in MB", one.megabytes, other.megabytes)]
    pairs += [(name, value, other.quality.get(name, math.nan)) for name, value in one.quality.items()]
    for what, before, after in pairs:
        if not math.isclose(before, after, rel_tol=1e-3):
            yield what, before, after


@dataclass
class PeersResult:
    """commands: one after the other. date: ISO 8601. notes: on how it was measured. left_out: rows that are not there,
    and why."""

    commands: list[str]
    date: str
    notes: list[str] = field(default_factory=list)
    cpu: str = field(default_factory=cpu_name)
    versions: dict[str, str] = field(default_factory=package_versions)
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PeersResult:
        """The inverse of to_json. Raises OrtolanError for any other text."""
        try:
            found = json.loads(text)
            rows = [Row(**{**row, "speeds": [Speed(**one) for one in row["speeds"]]}) for row in found["rows"]]
            return cls(**{**found, "rows": rows})
        except (ValueError, TypeError, KeyError) as error:
            raise OrtolanError(f"not the result of a comparison: {error!r}; expected what --json has written") from None

    def add(self, row: Row) -> Row:
        """The row of the same form if there is one, else this one, which is one of the result's now. Raises WorkerError
        for a form that has come out otherwise than that row's: what is found by measurement may."""
        form = (row.section, row.model, row.name)
        for one in self.rows:
            if (one.section, one.model, one.name) != form:
                continue
            if different := next(_differences(one, row), None):
                what, before, after = different
                raise WorkerError(f"its {what} is {after:.4g}, that of the row that is there {before:.4g}")
            return one
        self.rows.append(row)
        return row

    def timed(self) -> dict[tuple[str, str], frozenset[int]]:
        """By section and model, the numbers of threads of its rows."""
        groups = self.groups().items()
        return {group: frozenset(speed.threads for row in rows for speed in row.speeds) for group, rows in groups}

    def groups(self) -> dict[tuple[str, str], list[Row]]:
        """By section and model, in the order in which they were measured."""
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.section, row.model), []).append(row)
        return found


def works_of(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """The work and numbers of threads that these rows were timed at, in order of the threads."""
    found = dict.fromkeys((speed.work, speed.threads) for row in rows for speed in row.speeds)
    return sorted(found, key=lambda one: one[1])
