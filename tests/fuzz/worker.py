"""A process that tries graphs, so that a crash or a hang is recorded as an outcome."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

from ortolan.graph_passes.auto import layer_times, trials
from ortolan.graph_passes.measure import timing

from .fuzz import Outcome, build, try_graph

_SECONDS = 300.0  # for one graph


def _measure_briefly() -> None:
    """Shorten all timings, because this test ignores times."""
    layer_times._SECONDS, layer_times._MOST_COPIES = 0.005, 2
    trials._SECONDS = 0.02
    timing._WARM_UP_SECONDS = 0.001


def _work(pipe: Connection) -> None:
    """Receive seeds and send their outcomes until the pipe is closed."""
    _measure_briefly()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide messages of native libraries about unusual models
    while True:
        try:
            seed, without = pipe.recv()
        except EOFError:
            return
        pipe.send(try_graph(seed, without))


class Worker:
    """The client of the process. It restarts the process after a crash or a hang."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def ask(self, seed: int, without: tuple[int, ...] = ()) -> Outcome:
        self.pipe.send((seed, without))
        try:
            if self.pipe.poll(_SECONDS):
                found: Outcome = self.pipe.recv()
                return found
            kind, detail = "hang", f"no answer in {_SECONDS:g} s"
        except EOFError:
            self.process.join()
            kind, detail = "crash", f"exit status {self.process.exitcode}"
        self.close()
        self._start()
        graph = build(seed, without)
        return Outcome(seed, kind, detail, graph.base, graph.call, graph.case.done)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def shrink(worker: Worker, outcome: Outcome) -> Outcome:
    """Remove mutations that are not needed to reproduce the defect."""
    without: tuple[int, ...] = ()
    for line in outcome.done:
        fewer = (*without, int(line.split(":")[0]))
        try:
            tried = worker.ask(outcome.seed, fewer)
        except Exception:  # later mutations may depend on earlier ones
            continue
        if tried.kind == outcome.kind:
            outcome, without = tried, fewer
    return outcome
