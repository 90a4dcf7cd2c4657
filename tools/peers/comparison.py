"""Measure a section: convert, open and judge each configuration, then time all of them in turns on each work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..workers.process import WorkerError
from .configuration import Configuration, Runner, interleave
from .result import PeersResult, Row
from .verdict import counts_beside, is_no_worse

if TYPE_CHECKING:
    from ortolan.engine.model import CacheType

OUTRUN = 1.25  # ratio of speeds
REQUESTS, ARRIVALS = (1, 4, 16, 64), 100
CACHE_TYPES: tuple[CacheType, ...] = ("bfloat16",)
Judge = Callable[[Runner], Mapping[str, float]]
Found = Mapping[str, tuple[Runner, Row]]  # the configurations that were made, by name
LeaveOut = Callable[[str, WorkerError], None]  # records why a configuration's work is missing


@dataclass(frozen=True)
class Job:
    """The settings of a run, from the command line.

    Attributes:
        seconds: Time for each kind of work, for all configurations together.
        pythons: Maps each engine that takes part to its interpreter.
        gguf: A GGUF file that is served too.
        requests: Numbers of requests to serve at once.
        arrivals: Number of requests that arrive at random times.
        cache_types: Types of the KV cache of Ortolan's engine.
        models, works: Names of models and kinds of work to measure; None for all.
        done: Maps (section, model) to the numbers of threads that its rows already have.
        keep: Called when all rows of a model are complete for one number of threads.
    """

    threads: tuple[int, ...]
    seconds: float
    pythons: Mapping[str, str]
    folder: Path
    say: Callable[[str], None]
    sts: Path | None = None
    text: Path | None = None
    gguf: Path | None = None
    requests: tuple[int, ...] = REQUESTS
    arrivals: int = ARRIVALS
    cache_types: tuple[CacheType, ...] = CACHE_TYPES
    models: tuple[str, ...] | None = None
    works: tuple[str, ...] | None = None
    done: Mapping[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    keep: Callable[[], None] = lambda: None

    def takes_model(self, section: str, name: str) -> bool:
        """Return whether to measure the model."""
        return (self.models is None or name in self.models) and bool(self.threads_left(section, name))

    def threads_left(self, section: str, model: str) -> list[int]:
        """Return the numbers of threads that the model was not yet timed with."""
        done = self.done.get((section, model), frozenset())
        return [threads for threads in self.threads if threads not in done]

    def takes_work(self, name: str) -> bool:
        """Return whether to measure this kind of work."""
        return self.works is None or name in self.works


@dataclass(frozen=True)
class Work:
    """One kind of work. Engines receive `given`; a pass of one copy has `count` units.

    `after` names a cheaper, similar work. Configurations that another one outruns at that
    work skip this one (`outrun_by`).
    """

    name: str
    given: Mapping[str, Any]
    count: int
    unit: str
    after: str | None = None


TimeAll = Callable[[Job, Found, Sequence[Work], int, LeaveOut], None]


def compare(
    job: Job,
    section: str,
    model: str,
    script: str,
    configurations: Sequence[Configuration],
    works: Sequence[Work],
    judge: Judge,
    result: PeersResult,
    openings: int = 3,
    time_all: TimeAll | None = None,
) -> None:
    """Add a row, or the reason for its absence, for each configuration; extend existing rows by new numbers of threads.

    script: The section's file in tools/workers. configurations: The first one is judged first. works: Kinds of work;
    the load time is measured with the first. judge: Returns the qualities of an opened configuration; raises
    WorkerError for wrong answers. openings: How often the load time is measured; 0 leaves load time and memory out.
    time_all: Times all works with one number of threads; by default, passes in turns.
    """

    def leave_out(name: str, error: WorkerError) -> None:
        reason = f"{section}, {model}: {name}: {error}"
        job.say(f"left out: {reason}")
        if reason not in result.left_out:
            result.left_out.append(reason)

    if (section, model) not in job.done:  # its rows, if any, are older than the code
        result.drop(section, model)
    threads_left = job.threads_left(section, model)
    with ExitStack() as stack:
        found: dict[str, tuple[Runner, Row]] = {}
        for number, one in enumerate(configurations):
            folder = job.folder / section.replace(" ", "-") / model / str(number)
            runner = stack.enter_context(Runner(one, script, folder))
            began = perf_counter()
            try:
                row = runner.make(section, model, threads_left[0])
                opened = [runner.open(threads_left[0], works[0].given) for _ in range(max(1, openings))]
                if openings:
                    row.load_seconds, row.peak_megabytes = min(seconds for seconds, _ in opened), opened[-1][1]
                row.quality = dict(judge(runner))
                row = result.add(row)
            except WorkerError as error:
                leave_out(one.name, error)
                continue
            finally:
                runner.close()
            found[one.name] = runner, row
            qualities = ", ".join(f"{name} {value:.4f}" for name, value in row.quality.items())
            job.say(f"{section}, {model}: {one.name} made in {perf_counter() - began:.0f} s; {qualities}")
        for threads in threads_left:
            (time_all or _time_all)(job, found, works, threads, leave_out)
            job.say(f"{section}, {model}: timed with {threads} thread{'s' if threads > 1 else ''}")
            job.keep()


def outrun_by(row: Row, rows: Sequence[Row], work: str, threads: int) -> str | None:
    """Return the name of a faster row that makes this row irrelevant for longer works, or None.

    A row of Ortolan is irrelevant if another row of Ortolan is at least OUTRUN times as fast and no less accurate. A
    peer's row is irrelevant if every row of Ortolan that it is compared with is also compared with a peer that is at
    least OUTRUN times as fast.
    """
    speed = row.speed(work, threads)
    if speed is None:
        return None
    faster = {
        other.name: other
        for other in rows
        if other.ours == row.ours and (its := other.speed(work, threads)) and its.best >= OUTRUN * speed.best
    }
    if row.ours:
        return next((name for name, other in faster.items() if is_no_worse(other, row)), None)
    beside = [ours for ours in rows if ours.ours and counts_beside(row, ours)]
    decides = any(not any(counts_beside(other, ours) for other in faster.values()) for ours in beside)
    if decides:
        return None
    equal = (name for name, other in faster.items() if any(counts_beside(other, ours) for ours in beside))
    return next(equal, next(iter(faster), None))


def open_all(found: Found, threads: int, work: Work, leave_out: LeaveOut) -> dict[str, Runner]:
    """Open the configurations with this number of threads, and return their processes; leave the rest out."""
    opened = {}
    for name, (runner, _) in found.items():
        try:
            runner.open(threads, work.given)
            opened[name] = runner
        except WorkerError as error:
            leave_out(f"{name}, {threads} threads", error)
    return opened


def require_not_outrun(row: Row, rows: Sequence[Row], work: str, threads: int) -> None:
    """Raise WorkerError if a faster row at a cheaper work makes this row irrelevant."""
    if other := outrun_by(row, rows, work, threads):
        raise WorkerError(f"skipped: at {work}, {other} is at least {OUTRUN:g} times as fast at equal quality")


def _time_all(job: Job, found: Found, works: Sequence[Work], threads: int, leave_out: LeaveOut) -> None:
    opened = open_all(found, threads, works[0], leave_out)
    for work in works:
        given = {}
        rows = [found[name][1] for name in opened]
        for name, runner in opened.items():
            try:
                if work.after is not None:
                    require_not_outrun(found[name][1], rows, work.after, threads)
                runner.give(work.given)
                given[name] = runner
            except WorkerError as error:
                leave_out(f"{name}, {work.name}, {threads} threads", error)
        for name, speed in interleave(given, work.name, threads, work.count, work.unit, job.seconds).items():
            if isinstance(speed, WorkerError):
                leave_out(f"{name}, {work.name}, {threads} threads", speed)
            else:
                found[name][1].speeds.append(speed)
    for runner in opened.values():
        runner.close()
