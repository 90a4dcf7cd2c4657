"""A model in one runtime and format, run by a process of its own."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ortolan.benchmarks.memory import PeakMemory

from ..workers.process import Worker, WorkerError, cpus_to_use
from .freshness import digest_of
from .result import Row, Speed

WORKERS = Path(__file__).parent.with_name("workers")
_LEAST_ROUNDS = 3
_WARM_UP_SECONDS = 0.3  # per turn: longer than OpenMP threads of the previous turn spin
_TURN_SECONDS, _MOST_PASSES = 0.2, 200  # seconds and most passes per turn; the first turn is one pass


@dataclass(frozen=True)
class Configuration:
    """A model in one runtime and format.

    Tables show `name`. The worker script's `engine`, run by the interpreter `python`, converts `model` with `options`.
    `exact` configurations compute in fp32 and must return the original's answers. A pass runs the work `copies` times.
    """

    name: str
    engine: str
    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    ours: bool = False
    exact: bool = False
    copies: int = 1


class Runner:
    """The process of a configuration. The model is converted once; each `open` starts a new process."""

    def __init__(self, configuration: Configuration, script: str, folder: Path) -> None:
        """Prepare the folder; start nothing.

        Args:
            configuration: What to run.
            script: A file of the folder tools/workers.
            folder: New folder for the converted model and for files that the processes exchange.
        """
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
        """End the process, if there is one."""
        if self._worker is not None:
            self._worker.restart()
            self._worker = None

    def make(self, section: str, model: str, threads: int) -> Row:
        """Convert the model and return a row that describes it, without speeds.

        Raises:
            WorkerError: The engine cannot convert the model.
        """
        one, folder = self.configuration, tempfile.mkdtemp(dir=self._folder)
        began, worker = perf_counter(), self._start(threads)
        with PeakMemory(worker.pid) as peak:
            made = worker.ask("make", engine=one.engine, model=str(one.model), folder=folder, options=dict(one.options))
        seconds, converted = perf_counter() - began, any(Path(folder).iterdir())
        self._opened = made["opened"]
        self.close()  # so that the peak memory excludes the conversion
        return Row(
            section, model, one.name, one.engine, one.ours, made["call"], made["versions"], made["megabytes"],
            make_seconds=seconds if converted else None,
            make_megabytes=peak.anonymous or None if converted else None,
            measured=date.today().isoformat(),
            code=digest_of(section) if one.ours else None,
        )  # fmt: skip

    def open(self, threads: int, work: Mapping[str, Any]) -> tuple[float, float | None]:
        """Open the model in a new process.

        Returns:
            Seconds until the first answer to the work, and the process's peak memory in MB (None if unknown).

        Raises:
            WorkerError: The engine cannot open the model.
        """
        answer = self._start(threads).ask(
            "open", engine=self.configuration.engine, opened=self._opened, work=dict(work)
        )
        peak = answer["peak_megabytes"]
        return float(answer["seconds"]), None if peak is None else float(peak)

    def give(self, work: Mapping[str, Any]) -> None:
        """Set the work that `time` and `answer` run.

        Raises:
            WorkerError: The engine cannot do this work.
        """
        self._running().ask("give", work=dict(work))

    def time(self, passes: int, warm_up: float) -> list[float]:
        """Return the seconds of each pass over the work, after `warm_up` untimed seconds.

        Raises:
            WorkerError: A pass failed.
        """
        return list(map(float, self._running().ask("time", passes=passes, warm_up=warm_up)["seconds"]))

    def serve(self) -> Mapping[str, Any]:
        """Serve the requests of the work that was given, and return the reply of tools/workers/serving.py.

        Raises:
            WorkerError: A request failed.
        """
        return self._running().ask("serve")

    def answer(self, work: Mapping[str, Any]) -> np.ndarray:
        """Return the answers to the work, float32 [rows, …]. The work replaces the one set before.

        Raises:
            WorkerError: The engine cannot do this work.
        """
        self.give(work)
        path = self._folder / "answer.npy"
        self._running().ask("answer", path=str(path))
        return np.asarray(np.load(path))

    def _start(self, threads: int) -> Worker:
        self.close()
        # Libraries read OMP_NUM_THREADS when they are loaded. TOKENIZERS_PARALLELISM stops tokenizers from starting
        # threads.
        environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        settings = {"threads": threads, "cpus": cpus_to_use(threads)}
        self._worker = Worker(self._script, settings, python=self.configuration.python, environment=environment)
        return self._worker

    def _running(self) -> Worker:
        if self._worker is None:
            raise WorkerError("the process has ended; open it again")
        return self._worker


def interleave(
    runners: Mapping[str, Runner], work: str, threads: int, count: int, unit: str, seconds: float
) -> dict[str, Speed | WorkerError]:
    """Time the runners in turns (A B C A B C …) on the work that each was given.

    count: Units of the work, for example texts, in one pass of one copy. seconds: Time for all runners together; each
    has at least three turns.

    Returns:
        The speed of each runner, or the error that stopped it.
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
    """Return the speed from the seconds of passes over `count` units."""
    median = statistics.median(seconds)
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (median,) * 3
    return Speed(work, threads, unit, count / min(seconds), count / median, (upper - lower) / median)
