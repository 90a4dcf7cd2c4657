"""The rows of both sides in turns: A B A B …, and again for those that stand out."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import OrtolanError
from .layers import COLD_BYTES, Row, TimedModel, Work
from .process import WorkerError, WorkerProcess
from .result import RowResult, Turns

Side = Literal["old", "new"]
SIDES: tuple[Side, Side] = ("old", "new")

STANDS_OUT = 0.95
# Slow rows are measured again more often than fast ones; but fast ones too, for noise is to be kept out of both ends.
_AGAIN_IF_SLOW, _AGAIN_IF_FAST = 2, 1
_WARM_UP_SECONDS = 0.03
_TURN_SECONDS = 0.06
_ROW_SECONDS = 4.0  # rows of slow calls have fewer rounds
_FEWEST_ROUNDS = 4
_SHARED_MEMORY = Path("/dev/shm")
_FEEDS = "feeds.npz"


@dataclass(frozen=True)
class Pace:
    """rounds: of a row, each a turn of either side. The seconds are those of a turn. repeats: rows that stand out."""

    rounds: int = 10
    warm_up: float = _WARM_UP_SECONDS
    turn: float = _TURN_SECONDS
    repeats: bool = True


QUICK_PACE = Pace(2, 0.0, 0.0, repeats=False)


def measure_again(ratio: float, repeated: int) -> bool:
    """Whether a row that was measured again so often should be once more. ratio: the old time over the new one."""
    if ratio < STANDS_OUT:
        return repeated < _AGAIN_IF_SLOW
    return ratio > 1 / STANDS_OUT and repeated < _AGAIN_IF_FAST


def calls_a_turn(seconds: float, pace: Pace) -> int:
    """Of runs that take so long, on the slower side."""
    return max(1, round(pace.turn / max(seconds, 1e-7)))


def rounds_of(seconds: float, pace: Pace) -> int:
    turn = max(pace.turn, seconds) + max(pace.warm_up, seconds)
    return max(min(pace.rounds, round(_ROW_SECONDS / (2 * turn))), min(pace.rounds, _FEWEST_ROUNDS))


@dataclass
class _Pair:
    """The processes of a number of threads, and what they have open."""

    threads: int
    processes: Mapping[Side, WorkerProcess]
    folder: Path
    model: TimedModel | None = None
    holds: set[Side] = field(default_factory=set)

    def open(self, model: TimedModel) -> None:
        self.model, self.holds = model, set()

    def feed(self, side: Side, row: Row) -> float:
        """Seconds of a run. A process that was started again gets the model again. Raises WorkerError."""
        assert self.model is not None
        process = self.processes[side]
        if side not in self.holds or not process.running:
            process.ask("open", model=str(self.model.path))
            self.holds.add(side)
        answer = process.ask(
            "feed",
            feeds=str(self.folder / _FEEDS),
            answer=str(self.folder / f"{side}.npy"),
            copies=self.model.copies,
            of_each_copy=self.model.of_each_copy,
            in_place=dict(self.model.in_place),
        )
        return float(answer["seconds"])


def compare(
    works: Sequence[Work],
    threads: Sequence[int],
    process: Callable[[Side, int], WorkerProcess],
    pace: Pace,
) -> Iterator[RowResult]:
    """One result a row and number of threads, as soon as it is there. A row that fails does not keep the others from
    being measured.

    process: of a side and a number of threads.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        pairs = [
            _Pair(count, {side: stack.enter_context(process(side, count)) for side in SIDES}, folder)
            for count in threads
        ]
        for work in works:
            yield from _measure_work(work, pairs, folder, pace)


def _measure_work(work: Work, pairs: Sequence[_Pair], folder: Path, pace: Pace) -> Iterator[RowResult]:
    with tempfile.TemporaryDirectory(dir=folder) as of_model:
        try:
            model = work.write(Path(of_model))
        except OrtolanError as error:
            for row in work.rows:
                for pair in pairs:
                    yield RowResult(work.room, row.name, pair.threads, failure=f"the model is not made: {error}")
            return
        for pair in pairs:
            pair.open(model)
        for row in work.rows:
            arrays: dict[str, Any] = dict(row.feeds())
            np.savez(folder / _FEEDS, **arrays)
            for pair in pairs:
                yield _measure_row(work.room, row, pair, pace)


def _measure_row(room: str, row: Row, pair: _Pair, pace: Pace) -> RowResult:
    turns: dict[Side, Turns] = {side: [] for side in SIDES}
    repeated = 0
    side: Side = SIDES[0]
    try:
        while True:
            slowest = 0.0
            for side in SIDES:
                slowest = max(slowest, pair.feed(side, row))
            calls = calls_a_turn(slowest, pace)
            for _ in range(rounds_of(slowest, pace)):
                for side in SIDES:
                    turns[side].append(pair.processes[side].ask("time", calls=calls, warm_up=pace.warm_up)["times"])
            assert pair.model is not None
            difference = compare_answers(*(np.load(pair.folder / f"{one}.npy") for one in SIDES))
            result = RowResult.of_turns(
                room, row.name, pair.threads, turns["old"], turns["new"], pair.model.copies, repeated, difference
            )
            if not pace.repeats or not measure_again(result.ratio, repeated):
                return result
            repeated += 1
            for process in pair.processes.values():
                process.restart()
    except WorkerError as error:
        return RowResult(room, row.name, pair.threads, failure=f"{side} side: {error}")


def compare_answers(old: np.ndarray, new: np.ndarray) -> float | None:
    """None for equal bits, else the norm of the difference over the old answer's; infinite where shapes differ."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return float("inf")
    if old.tobytes() == new.tobytes():
        return None
    a, b = old.astype(np.float64), new.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return float("inf")
    difference, size = np.linalg.norm(a[finite] - b[finite]), np.linalg.norm(a[finite])
    return float(difference / size) if size else float(difference)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Where models are written for some seconds: in memory where there is room, for a disk that writes disturbs."""
    roomy = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 8 * COLD_BYTES
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if roomy else None) as folder:
        yield Path(folder)
