"""A form of a model in a runtime, in a process of its own, as the sections of the comparison see it."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ..workers.process import Worker, WorkerError, cpus_to_use
from .result import Row, Speed

WORKERS = Path(__file__).parent.with_name("workers")
_LEAST_ROUNDS = 3
_WARM_UP_SECONDS = 0.3  # of each turn; longer than the threads of OpenMP spin that had the last one
_TURN_SECONDS, _MOST_PASSES = 0.2, 200  # timed in each turn but the first


@dataclass(frozen=True)
class Configuration:
    """name: what tables call it. engine: of the section's worker, run by the interpreter `python`. model: what it is
    made from, with options. exact: it computes in fp32, so it must give the original's answers. copies: how often a
    pass does the work."""

    name: str
    engine: str
    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    ours: bool = False
    exact: bool = False
    copies: int = 1


class Runner:
    """A configuration: made once, then opened with so many threads as often as one likes. Ends its process when closed."""

    def __init__(self, configuration: Configuration, script: str, folder: Path) -> None:
        """script: of the folder workers. folder: new, for what is made and for the files that pass between the
        processes."""
        self.configuration = configuration
        self._script = WORKERS / script
        self._folder = folder
        folder.mkdir(parents=True)
        self._worker: Worker | None = None
        self._opened: Mapping[str, Any] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.restart()
            self._worker = None

    def make(self, section: str, model: str, threads: int) -> Row:
        """Converts the model, and describes it in a row without speeds. Raises WorkerError."""
        one = self.configuration
        made = self._start(threads).ask(
            "make", engine=one.engine, model=str(one.model), folder=tempfile.mkdtemp(dir=self._folder),
            options=dict(one.options),
        )  # fmt: skip
        self._opened = made["opened"]
        self.close()  # its memory is not that of the model
        return Row(section, model, one.name, one.engine, one.ours, made["call"], made["versions"], made["megabytes"])

    def open(self, threads: int, work: Mapping[str, Any]) -> tuple[float, float | None]:
        """In a new process: seconds until the first answer to the work, and the process's peak in MB. Raises
        WorkerError."""
        answer = self._start(threads).ask(
            "open", engine=self.configuration.engine, opened=self._opened, work=dict(work)
        )
        peak = answer["peak_megabytes"]
        return float(answer["seconds"]), None if peak is None else float(peak)

    def give(self, work: Mapping[str, Any]) -> None:
        """What is timed or answered next. Raises WorkerError."""
        self._running().ask("give", work=dict(work))

    def time(self, passes: int, warm_up: float) -> list[float]:
        """Seconds of each pass over what was given, behind so many seconds that are not counted. Raises WorkerError."""
        return list(map(float, self._running().ask("time", passes=passes, warm_up=warm_up)["seconds"]))

    def answer(self, work: Mapping[str, Any]) -> np.ndarray:
        """float32 [rows, …]: the answers to the work. What was given before is forgotten. Raises WorkerError."""
        self.give(work)
        path = self._folder / "answer.npy"
        self._running().ask("answer", path=str(path))
        return np.asarray(np.load(path))

    def _start(self, threads: int) -> Worker:
        self.close()
        # Libraries read the first one when they are loaded; a tokenizer's threads are nobody's business here.
        environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        settings = {"threads": threads, "cpus": cpus_to_use(threads)}
        self._worker = Worker(self._script, settings, python=self.configuration.python, environment=environment)
        return self._worker

    def _running(self) -> Worker:
        if self._worker is None:
            raise WorkerError("its process has ended; open it again")
        return self._worker


def interleave(
    runners: Mapping[str, Runner], work: str, threads: int, count: int, unit: str, seconds: float
) -> dict[str, Speed | WorkerError]:
    """The speed of each at what it was given, timed in turns, A B C A B C …, or why it has none.

    count: how many of the unit the work is. seconds: spent on all of them; each has three turns at least.
    """
    times: dict[str, list[float]] = {name: [] for name in runners}
    failed: dict[str, WorkerError] = {}
    end, rounds = perf_counter() + seconds, 0
    while perf_counter() < end or rounds < _LEAST_ROUNDS:
        for name in [one for one in runners if one not in failed]:
            shortest = min(times[name], default=_TURN_SECONDS)
            passes = round(max(1, _TURN_SECONDS / max(shortest, _TURN_SECONDS / _MOST_PASSES)))
            try:
                times[name] += runners[name].time(passes, _WARM_UP_SECONDS)
            except WorkerError as error:
                failed[name] = error
        rounds += 1
    speeds = {
        name: speed_of(work, threads, count * runner.configuration.copies, unit, times[name])
        for name, runner in runners.items()
        if name not in failed
    }
    return {**speeds, **failed}


def speed_of(work: str, threads: int, count: int, unit: str, seconds: Sequence[float]) -> Speed:
    """Of the times of passes over `count` of the unit."""
    median = statistics.median(seconds)
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (median,) * 3
    return Speed(work, threads, unit, count / min(seconds), count / median, (upper - lower) / median)
