"""Time each row with both libraries in turns (A B A B …), and repeat rows whose ratio is far from 1."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ortolan.errors import OrtolanError

from ..workers.process import WorkerError
from .layers import COLD_BYTES, Row, TimedModel, Work
from .process import WorkerProcess
from .result import RowResult, Turns

Side = Literal["old", "new"]
SIDES: tuple[Side, Side] = ("old", "new")

STANDS_OUT = 0.95
# Repetitions of a row whose ratio is below STANDS_OUT, or above its inverse. Fast rows are repeated too, so that noise
# does not bias the mean.
_AGAIN_IF_SLOW, _AGAIN_IF_FAST = 2, 1
_WARM_UP_SECONDS = 0.03
_TURN_SECONDS = 0.06
_ROW_SECONDS = 4.0  # limit for all turns of a row; slow rows get fewer rounds
_FEWEST_ROUNDS = 4
_SHORTEST_TIME = 5e-5  # shorter calls are timed together, because reading the clock takes time
_LONG_CALL = 1e-3
_PAIRS = 2
_SHARED_MEMORY = Path("/dev/shm")
_FEEDS = "feeds.npz"


@dataclass(frozen=True)
class Pace:
    """The number of turns of each library per row, and the seconds of warm-up and timing in a turn.

    `repeats`: measure rows again whose ratio is far from 1.
    """

    rounds: int = 10
    warm_up: float = _WARM_UP_SECONDS
    turn: float = _TURN_SECONDS
    repeats: bool = True


QUICK_PACE = Pace(2, 0.0, 0.0, repeats=False)


def measure_again(ratio: float, repeated: int) -> bool:
    """Return whether to measure a row again that was repeated `repeated` times. ratio: old time / new time."""
    if ratio < STANDS_OUT:
        return repeated < _AGAIN_IF_SLOW
    return ratio > 1 / STANDS_OUT and repeated < _AGAIN_IF_FAST


@dataclass(frozen=True)
class Turn:
    """`count` measurements of `together` calls each; see `time` in worker.py."""

    count: int
    together: int
    cpu_time: bool


def turn_of(seconds: float, threads: int, pace: Pace) -> Turn:
    """Return the turn for calls that take `seconds` with the slower library."""
    together = max(1, round(_SHORTEST_TIME / max(seconds, 1e-7)))
    count = max(1, round(pace.turn / (together * max(seconds, 1e-7))))
    # CPU time excludes preemption, but each preemption adds an error of microseconds. Short calls use wall time,
    # because enough of their turns are not preempted.
    return Turn(count, together, threads == 1 and seconds > _LONG_CALL)


def rounds_of(seconds: float, pace: Pace) -> int:
    """Return the number of rounds: fewer for long calls, and even, so that both pairs of processes get half."""
    turn = max(pace.turn, seconds) + max(pace.warm_up, seconds)
    wanted = max(min(pace.rounds, round(_ROW_SECONDS / (2 * turn))), min(pace.rounds, _FEWEST_ROUNDS))
    return -(-wanted // _PAIRS) * _PAIRS


@dataclass(frozen=True)
class _Group:
    """Pairs of processes, one per library, that run in turns with the same number of threads.

    There are several pairs, because the memory addresses of a process change its times by some percent.
    """

    threads: int
    pairs: Sequence[Mapping[Side, WorkerProcess]]

    def restart(self) -> None:
        """Start all processes anew."""
        for pair in self.pairs:
            for process in pair.values():
                process.restart()


def compare(
    works: Sequence[Work],
    threads: Sequence[int],
    process: Callable[[Side, int], WorkerProcess],
    pace: Pace,
) -> Iterator[RowResult]:
    """Yield one result per row and number of threads. A row that fails does not stop the others.

    process: Makes a process of a side and a number of threads.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        groups = [
            _Group(
                count,
                [{side: stack.enter_context(process(side, count)) for side in SIDES} for _ in range(_PAIRS)],
            )
            for count in threads
        ]
        for work in works:
            yield from _measure_work(work, groups, folder, pace)


def _measure_work(work: Work, groups: Sequence[_Group], folder: Path, pace: Pace) -> Iterator[RowResult]:
    with tempfile.TemporaryDirectory(dir=folder) as of_model:
        try:
            model = work.write(Path(of_model))
        except OrtolanError as error:
            for row in work.rows:
                for group in groups:
                    yield RowResult(work.operator, row.name, group.threads, failure=f"cannot make the model: {error}")
            return
        for row in work.rows:
            arrays: dict[str, Any] = dict(row.feeds())
            np.savez(Path(of_model) / _FEEDS, **arrays)
            for group in groups:
                yield _measure_row(work.operator, row, group, model, pace)


def _measure_row(operator: str, row: Row, group: _Group, model: TimedModel, pace: Pace) -> RowResult:
    turns: dict[Side, Turns] = {side: [] for side in SIDES}
    repeated = 0
    turn: Turn | None = None
    side: Side = SIDES[0]
    answers = {one: model.path.with_name(f"{one}.npy") for one in SIDES}
    try:
        while True:
            slowest = 0.0
            for pair in group.pairs:
                for side in SIDES:
                    slowest = max(slowest, _feed(pair[side], model, answers[side]))
            turn = turn or turn_of(slowest, group.threads, pace)
            for number in range(rounds_of(slowest, pace)):
                for side in SIDES:
                    process = group.pairs[number % _PAIRS][side]
                    turns[side].append(process.ask("time", **asdict(turn), warm_up=pace.warm_up)["times"])
            difference = compare_answers(*(np.load(answers[one]) for one in SIDES))
            result = RowResult.of_turns(
                operator, row.name, group.threads, turns["old"], turns["new"], model.copies, repeated, difference
            )
            if not pace.repeats or not measure_again(result.ratio, repeated):
                return result
            repeated += 1
            group.restart()
    except WorkerError as error:
        return RowResult(operator, row.name, group.threads, failure=f"{side} side: {error}")


def _feed(process: WorkerProcess, model: TimedModel, answer: Path) -> float:
    """Feed the model and return the seconds of a run.

    Raises:
        WorkerError: The model cannot be opened or run.
    """
    process.open(model.path)
    fed = process.ask(
        "feed",
        feeds=str(model.path.with_name(_FEEDS)),
        answer=str(answer),
        copies=model.copies,
        of_each_copy=model.of_each_copy,
        in_place=dict(model.in_place),
    )
    return float(fed["seconds"])


def compare_answers(old: np.ndarray, new: np.ndarray) -> float | None:
    """Return None for equal bits, else the norm of the difference relative to the old answer; inf if shapes differ."""
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
    """Yield a folder for models: in shared memory if there is space, because disk writes disturb the timing."""
    roomy = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 8 * COLD_BYTES
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if roomy else None) as folder:
        yield Path(folder)
