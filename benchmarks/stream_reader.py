"""The memory bandwidth of this machine, which bounds the speed of memory-bound kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from ortolan.graph_passes.measure.machine import cold_budget, last_level_cache_bytes
from ortolan.graph_passes.report.figures import Timing


class StreamReader:
    """Reads a buffer of eight times the L3 (at most a quarter of the memory for cold copies) as fast as possible.

    Needs a build with the kernels of bare_kernels.py.
    """

    PREFETCH_BYTES = (0, 4096, 12288)

    def __init__(self, threads: int) -> None:
        self.threads = threads
        size = max(min(8 * last_level_cache_bytes(), cold_budget() // 4), 2**16)
        self.buffer = np.ones(size, np.uint8)  # ones, because unwritten pages would all be one cached page

    def candidates(self) -> dict[str, Callable[[], object]]:
        """Return one candidate per prefetch distance; the fastest is the stream rate."""
        from .._testing import stream_read

        return {
            f"stream_read {distance}": partial(stream_read, self.buffer, self.threads, distance)
            for distance in self.PREFETCH_BYTES
        }

    def time_for(self, timings: Mapping[str, Timing], size: float) -> Timing:
        """Return the time of `size` bytes at the best rate found."""
        best = min((timings[name] for name in self.candidates()), key=lambda timing: timing.min_ms)
        return best.scaled(size / self.buffer.size)
