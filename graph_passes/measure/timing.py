"""Times candidates in turn, with cold weights. A single thread is pinned to a CPU."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ..report.figures import Timing
from .machine import cold_budget, last_level_cache_bytes

MAX_CANDIDATES = 16  # largest number of candidates that a benchmark times together

# After a change of workload, a memory-bound layer needs this long to reach the speed of a decode loop
# (ops/sparse_amx_matmul/README.md).
_WARM_UP_SECONDS = 0.08
_TIMED_CALLS = 3
# A candidate's turn ends after this time, but includes at least one timed call.
_TURN_SECONDS = 0.4


def interleave(
    candidates: Mapping[str, Callable[[], object]], *, seconds: float, min_rounds: int = 3
) -> dict[str, Timing]:
    """Time the candidates in turn (A B C A B C …) for about `seconds`.

    In its turn, a candidate first runs untimed, and is then timed a few times (a slow candidate once). As in a decode
    loop, code and page tables are warm; weights are cold if their copies outgrow the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    end = time.perf_counter() + seconds
    rounds = 0
    while time.perf_counter() < end or rounds < min_rounds:
        for name, call in candidates.items():
            began = time.perf_counter()
            call()
            while time.perf_counter() < began + _WARM_UP_SECONDS:
                call()
            for _ in range(_TIMED_CALLS):
                start = time.perf_counter()
                call()
                stop = time.perf_counter()
                times[name].append((stop - start) * 1e3)
                if stop > began + _TURN_SECONDS:
                    break
        rounds += 1
    return {name: Timing(min(values), statistics.median(values)) for name, values in times.items()}


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Pin one thread to a CPU; several threads are not pinned."""
    if threads != 1 or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def copies_to_stay_cold(bytes_each: int) -> int:
    """Return how many copies of a weight to use in turn, so that no copy stays in a cache.

    The copies take four times the size of the L3 cache. There are 4 to 2048 copies, within `cold_bytes_each`.
    """
    wanted = min(max(4, -(-4 * last_level_cache_bytes() // bytes_each)), 2048)
    return max(1, min(wanted, cold_bytes_each() // bytes_each))


def cold_bytes_each() -> int:
    """Return the memory for the copies of one candidate, in bytes, if MAX_CANDIDATES are timed together."""
    return cold_budget() // MAX_CANDIDATES


def describe_cold_copies() -> str:
    """Return a note on the memory of the copies, to print with results."""
    mebibytes, cache = cold_bytes_each() >> 20, last_level_cache_bytes() >> 20
    warm = " Weights may be warm." if mebibytes <= 2 * cache else ""
    copies = f"Copies of weights take up to {mebibytes} MiB per candidate (all: 1/8 of free memory)"
    return f"{copies}; L3 cache {cache} MiB.{warm}"
