"""The rows of both sides in turns: A B A B …, and again for those that stand out."""

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
# Slow rows are measured again more often than fast ones; but fast ones too, for noise is to be kept out of both ends.
_AGAIN_IF_SLOW, _AGAIN_IF_FAST = 2, 1
_WARM_UP_SECONDS = 0.03
_TURN_SECONDS = 0.06
_ROW_SECONDS = 4.0  # rows of slow calls have fewer rounds
_FEWEST_ROUNDS = 4
_SHORTEST_TIME = 5e-5  # calls that are shorter are timed together, for reading the clock takes time as well
_LONG_CALL = 1e-3
_PAIRS = 2
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


@dataclass(frozen=True)
class Turn:
    """`count` times, each of `together` calls; see worker.py, `time`."""

    count: int
    together: int
    cpu_time: bool


def turn_of(seconds: float, threads: int, pace: Pace) -> Turn:
    """For calls that take so long on the slower side."""
    together = max(1, round(_SHORTEST_TIME / max(seconds, 1e-7)))
    count = max(1, round(pace.turn / (together * max(seconds, 1e-7))))
    # A thread's own clock stands still while something else has the CPU, but is off by microseconds when that happens.
    # Short calls have turns enough in which nothing does.
    return Turn(count, together, threads == 1 and seconds > _LONG_CALL)


def rounds_of(seconds: float, pace: Pace) -> int:
    """Fewer where calls take long; even, so that each pair of processes has as many."""
    turn = max(pace.turn, seconds) + max(pace.warm_up, seconds)
    wanted = max(min(pace.rounds, round(_ROW_SECONDS / (2 * turn))), min(pace.rounds, _FEWEST_ROUNDS))
    return -(-wanted // _PAIRS) * _PAIRS


@dataclass(frozen=True)
class _Group:
    """The processes of a number of threads: pairs that take turns, for where a process has its memory makes a
    difference of some percent to times that are otherwise the same."""

    threads: int
    pairs: Sequence[Mapping[Side, WorkerProcess]]

    def restart(self) -> None:
        for pair in self.pairs:
            for process in pair.values():
                process.restart()


def compare(
    works: Sequence[Work],
    threads: Sequence[int],
    process: Callable[[Side, int], WorkerProcess],
    pace: Pace,
) -> Iterator[RowResult]:
    """One result a row and number of threads, as soon as it is there. A row that fails does not keep the others from
    being measured.

    process: a new one, of a side and a number of threads.
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
                    yield RowResult(work.room, row.name, group.threads, failure=f"the model is not made: {error}")
            return
        for row in work.rows:
            arrays: dict[str, Any] = dict(row.feeds())
            np.savez(Path(of_model) / _FEEDS, **arrays)
            for group in groups:
                yield _measure_row(work.room, row, group, model, pace)


def _measure_row(room: str, row: Row, group: _Group, model: TimedModel, pace: Pace) -> RowResult:
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
                room, row.name, group.threads, turns["old"], turns["new"], model.copies, repeated, difference
            )
            if not pace.repeats or not measure_again(result.ratio, repeated):
                return result
            repeated += 1
            group.restart()
    except WorkerError as error:
        return RowResult(room, row.name, group.threads, failure=f"{side} side: {error}")


def _feed(process: WorkerProcess, model: TimedModel, answer: Path) -> float:
    """Seconds of a run. Raises WorkerError."""
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
