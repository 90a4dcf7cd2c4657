"""Common parts of the operators' benchmarks: layers of Ortolan and its peers, timed in the same rounds.

Times are of one layer with cold weights (cold_layers.py). Each benchmark has these peers in addition to its own:

    stream_read        only for m = 1: reading the stored bytes at the measured memory bandwidth; ratio 0.8: Ortolan
                       reaches 80 % of it
    ortolan_1_thread   Ortolan on one thread
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortolan.graph_passes.measure.timing import describe_cold_copies, interleave, pinned
from ortolan.graph_passes.report.figures import Timing

from ..errors import OrtolanError
from ..progress import Progress
from .bare_kernels import bare_kernels
from .cold_layers import TimedLayer
from .result import BenchOptions, BenchResult, BenchRow
from .shapes import LAYERS
from .stream_reader import StreamReader

# Time for measuring all candidates, and the smallest number of rounds, because one round of large layers takes long.
SECONDS, ROUNDS = 2.5, 5
QUICK_SECONDS, QUICK_ROUNDS = 0.3, 3

STREAM_NOTE = (
    "Times are of one layer. stream_read: time to read the stored bytes from memory (ratio 0.8: 80 % of the bandwidth)."
)
GROUP_SIZES = (32, 64, 128)
_MAX_QUANTIZED_INPUTS = 2**17  # ops/formats/bitmap_int8.h


@dataclass(frozen=True)
class Shape:
    """A weight's shape, the rows of x to measure it with, and the names of its layers ("" if unnamed)."""

    k: int
    n: int
    batch: tuple[int, ...]
    names: str = ""


@dataclass(frozen=True)
class Comparison:
    """One of Ortolan's candidates and its peers.

    Attributes:
        case: The keys that identify its rows.
        peers: Maps the name in the row to the name of the candidate.
    """

    case: Mapping[str, Any]
    ours: str
    peers: Mapping[str, str]


@dataclass(frozen=True)
class Setup:
    """All candidates timed in the same rounds, in this order, and the comparisons between them."""

    candidates: Mapping[str, TimedLayer]
    comparisons: Sequence[Comparison]


@dataclass(frozen=True)
class Plan:
    """A setup that is made just before it is measured. title: its name in messages."""

    title: str
    shape: Shape
    make: Callable[[], Setup]


def chosen_kinds(options: BenchOptions, known: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of weights to measure, without duplicates.

    Raises:
        OrtolanError: A kind is unknown.
    """
    kinds = tuple(dict.fromkeys(options.kinds or known))
    for kind in kinds:
        if kind not in known:
            raise OrtolanError(f"--kind: unknown kind of weights {kind!r}, expected one of {', '.join(known)}")
    return kinds


def check_quantized_inputs(options: BenchOptions, advice: str) -> None:
    """Check the options for quantized weights.

    Raises:
        OrtolanError: The group size is not supported, or k is too large for 32-bit sums. The message ends in `advice`.
    """
    if options.group_size not in (None, *GROUP_SIZES):
        raise OrtolanError(f"--group-size is {options.group_size}, expected 32, 64 or 128")
    largest = max((k for _, k, _ in options.cases or ()), default=0)
    if largest > _MAX_QUANTIZED_INPUTS:
        raise OrtolanError(
            f"--shape: k is {largest}; int8 and int4 weights have at most {_MAX_QUANTIZED_INPUTS} inputs{advice}"
        )


def shapes_to_measure(options: BenchOptions, layers: Sequence[str], batch: tuple[int, ...]) -> list[Shape]:
    """Return the named layers, merged by shape, then the given m x k x n, merged by k x n.

    `layers` and `batch` are the defaults. With the option quick, one row is measured.
    """
    names = options.layers or (() if options.cases else layers)
    rows_of_x = options.batch or ((1,) if options.quick else batch)
    by_shape: dict[tuple[int, int], list[str]] = {}
    for name in dict.fromkeys(names):
        by_shape.setdefault(LAYERS[name], []).append(name)
    shapes = [Shape(k, n, rows_of_x, ", ".join(equal)) for (k, n), equal in by_shape.items()]
    by_weight: dict[tuple[int, int], list[int]] = {}
    for m, k, n in dict.fromkeys(options.cases or ()):
        by_weight.setdefault((k, n), []).append(m)
    return shapes + [Shape(k, n, tuple(rows)) for (k, n), rows in by_weight.items()]


def measure(
    op: str,
    plans: Sequence[Plan],
    options: BenchOptions,
    result: BenchResult,
    progress: Progress,
    min_rounds: int = ROUNDS,
) -> None:
    """Add the rows of every plan, number of threads and batch to the result.

    An interrupt ends the measurement early; the result notes it. `min_rounds` is ignored with the option quick.
    """
    seconds, min_rounds = (QUICK_SECONDS, QUICK_ROUNDS) if options.quick else (SECONDS, min_rounds)
    result.notes.append(describe_cold_copies())
    total = len(options.threads) * sum(len(plan.shape.batch) for plan in plans)
    done = 0
    if bare_kernels() is None:
        result.notes.append("stream_read is left out: only builds with ORTOLAN_TESTING have it.")
    try:
        for plan in plans:
            where = f"{plan.title} {plan.shape.k} x {plan.shape.n}"
            progress(f"{where}: making weights", done, total)
            setup = plan.make()
            one_thread: dict[tuple[int, str], Timing] = {}
            for threads in options.threads:
                with pinned(threads):
                    binds = {name: candidate.open(threads) for name, candidate in setup.candidates.items()}
                    stream = None if bare_kernels() is None else StreamReader(threads)
                    for m in plan.shape.batch:
                        progress(f"{where}, {m} rows, threads {threads}", done, total)
                        x = np.random.default_rng(m).standard_normal((m, plan.shape.k), dtype=np.float32)
                        calls = {name: bind(x) for name, bind in binds.items()}
                        # With more rows, the layer is compute-bound.
                        timings = _time(setup, calls, stream if m == 1 else None, seconds, min_rounds)
                        result.rows += _rows(op, plan.shape, setup, timings, m, threads, one_thread)
                        done += 1
                del calls, binds, stream
            del setup
        progress("done", total, total)
    except KeyboardInterrupt:
        if not result.rows:
            raise
        result.interrupted = True
        result.notes.append(f"Interrupted: {done} of {total} measurements.")


@dataclass(frozen=True)
class _Timings:
    """Times of one layer, by candidate. stream: time to read Ortolan's weights if the layer is memory-bound."""

    layers: dict[str, Timing]
    stream: dict[str, Timing]


def _time(
    setup: Setup,
    calls: Mapping[str, Callable[[], object]],
    stream: StreamReader | None,
    seconds: float,
    min_rounds: int,
) -> _Timings:
    streams = {} if stream is None else stream.candidates()
    timings = interleave({**calls, **streams}, seconds=seconds, min_rounds=min_rounds)
    layers = {name: timings[name].scaled(1 / candidate.copies) for name, candidate in setup.candidates.items()}
    bounds = {}
    if stream is not None:
        for comparison in setup.comparisons:
            stored = setup.candidates[comparison.ours].stored_bytes
            bounds[comparison.ours] = stream.time_for(timings, stored)
    return _Timings(layers, bounds)


def _rows(
    op: str,
    shape: Shape,
    setup: Setup,
    timings: _Timings,
    m: int,
    threads: int,
    one_thread: dict[tuple[int, str], Timing],
) -> Iterator[BenchRow]:
    """Yield the comparisons. one_thread stores Ortolan's times with one thread, for rows with more threads."""
    for comparison in setup.comparisons:
        name = comparison.ours
        ours = timings.layers[name]
        case: dict[str, Any] = {"layer": shape.names} if shape.names else {}
        case |= {"m": m, "k": shape.k, "n": shape.n, **comparison.case}
        against = {peer: timings.layers[candidate] for peer, candidate in comparison.peers.items()}
        if name in timings.stream:
            against["stream_read"] = timings.stream[name]
        if threads == 1:
            one_thread[m, name] = ours
        elif (m, name) in one_thread:
            against["ortolan_1_thread"] = one_thread[m, name]
        for peer, time in against.items():
            yield BenchRow(op, case, threads, ours, peer, time)
