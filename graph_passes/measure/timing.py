"""How times are taken: candidates interleaved in one run, cold weights, minimum and median, pinned when alone."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ..report.figures import Timing
from .machine import cold_budget, last_level_cache_bytes

MOST_CANDIDATES = 16  # timed together in the largest benchmark

# After other work, a layer bound by memory needs this long until it runs as fast as it goes on to, as it would in a
# decode loop (ops/sparse_amx_matmul/README.md).
_WARM_UP_SECONDS = 0.08
_TIMED_CALLS = 3
# A candidate's turn ends early once it has taken so long, after one timed call at least.
_TURN_SECONDS = 0.4


def interleave(
    candidates: Mapping[str, Callable[[], object]], *, seconds: float, min_rounds: int = 3
) -> dict[str, Timing]:
    """Time the candidates A B C A B C … for about `seconds`.

    In its turn each one runs untimed for a while and is then timed a few times (a slow one once), as it would run again
    and again in a decode loop: its code and page tables are warm, its weights are not, where the copies outgrow the
    caches.
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
    """One thread runs on one fixed CPU; several run where the system likes."""
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
    """Return how many copies of a weight to use in turn so that none stays in a cache: four times the L3.

    Between 4 and 2048 copies, but never more than a candidate's share of machine.cold_budget.
    """
    wanted = min(max(4, -(-4 * last_level_cache_bytes() // bytes_each)), 2048)
    return max(1, min(wanted, cold_share() // bytes_each))


def cold_share() -> int:
    """Return the bytes for the copies of one candidate if MOST_CANDIDATES are timed together."""
    return cold_budget() // MOST_CANDIDATES


def describe_cold_copies() -> str:
    """Return a note for results on the memory that copies may take."""
    share, cache = cold_share() >> 20, last_level_cache_bytes() >> 20
    warm = " Weights may be warm." if share <= 2 * cache else ""
    most = f"Copies of weights take up to {share} MiB a candidate (all: 1/8 of free memory)"
    return f"{most}; L3 cache {cache} MiB.{warm}"
