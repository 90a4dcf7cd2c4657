"""The rows of both sides in turns: A B A B …, and again for those that stand out."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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
_ROW_SECONDS = 8.0  # rows of slow calls have fewer rounds
_FEWEST_ROUNDS = 4
_SHARED_MEMORY = Path("/dev/shm")


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
class _Opened:
    """What the processes have open, so that one that was started again gets it again."""

    processes: dict[Side, WorkerProcess]
    folder: Path
    model: TimedModel | None = None
    holds: set[Side] = field(default_factory=set)

    def open(self, model: TimedModel) -> None:
        self.model, self.holds = model, set()

    def feed(self, side: Side, row: Row) -> float:
        """Seconds of a run. Raises WorkerError."""
        assert self.model is not None
        process = self.processes[side]
        if side not in self.holds or not process.running:
            process.ask("open", model=str(self.model.path))
            self.holds.add(side)
        answer = process.ask(
            "feed",
            feeds=str(self.folder / "feeds.npz"),
            answer=str(self.folder / f"{side}.npy"),
            copies=self.model.copies,
            of_each_copy=self.model.of_each_copy,
            in_place=dict(self.model.in_place),
        )
        return float(answer["seconds"])


def compare(
    works: Sequence[Work],
    processes: Callable[[Side], WorkerProcess],
    threads: int,
    pace: Pace,
    say: Callable[[RowResult], None],
) -> Iterator[RowResult]:
    """One result a row, told as soon as it is there. A row that fails does not keep the others from being measured."""
    with ExitStack() as stack:
        opened = _Opened(
            {side: stack.enter_context(processes(side)) for side in SIDES},
            stack.enter_context(scratch_folder()),
        )
        for work in works:
            for result in _measure_work(work, opened, threads, pace):
                say(result)
                yield result


def _measure_work(work: Work, opened: _Opened, threads: int, pace: Pace) -> Iterator[RowResult]:
    with tempfile.TemporaryDirectory(dir=opened.folder) as folder:
        try:
            opened.open(work.write(Path(folder)))
        except OrtolanError as error:
            yield from (RowResult(work.room, row.name, threads, failure=f"not made: {error}") for row in work.rows)
            return
        for row in work.rows:
            np.savez(opened.folder / "feeds.npz", **row.feeds())
            yield _measure_row(work.room, row, opened, threads, pace)


def _measure_row(room: str, row: Row, opened: _Opened, threads: int, pace: Pace) -> RowResult:
    turns: dict[Side, Turns] = {side: [] for side in SIDES}
    repeated = 0
    side: Side = SIDES[0]
    try:
        while True:
            slowest = 0.0
            for side in SIDES:
                slowest = max(slowest, opened.feed(side, row))
            calls = calls_a_turn(slowest, pace)
            for _ in range(rounds_of(slowest, pace)):
                for side in SIDES:
                    turns[side].append(opened.processes[side].ask("time", calls=calls, warm_up=pace.warm_up)["times"])
            assert opened.model is not None
            answers = compare_answers(*(np.load(opened.folder / f"{one}.npy") for one in SIDES))
            result = RowResult.of_turns(
                room, row.name, threads, turns["old"], turns["new"], opened.model.copies, repeated, answers
            )
            if not pace.repeats or not measure_again(result.ratio, repeated):
                return result
            repeated += 1
            for process in opened.processes.values():
                process.restart()
    except WorkerError as error:
        return RowResult(room, row.name, threads, failure=f"{side} side: {error}")


def compare_answers(old: np.ndarray, new: np.ndarray) -> float:
    """0 for equal bits, else the norm of the difference over that of the old answer; infinite where shapes differ."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return float("inf")
    if old.tobytes() == new.tobytes():
        return 0.0
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
