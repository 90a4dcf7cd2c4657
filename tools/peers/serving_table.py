"""The table of decoders that serve requests: one line per configuration, work and number of threads."""

from __future__ import annotations

from collections.abc import Sequence

from .result import Row
from .serving import BETWEEN, BLOCKS, COLD, FIRST, MEMORY, PERCENTILES, RATE, WARM

_SPEEDS = ("prompts", "decoding", "whole")
_LATENCIES = (FIRST, BETWEEN)
_PREFIX = (COLD, WARM, BLOCKS)


def columns() -> list[str]:
    """Return the names of the columns."""
    percents = " · ".join(f"p{percent}" for percent in PERCENTILES)
    return [
        *("", "perplexity", "work", "threads", "prompts, tokens/s", "decoding, tokens/s", "whole, tokens/s"),
        *(f"{name}, {percents}, ms" for name in _LATENCIES),
        "peak memory, MB",
        "more",
    ]


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """Return the cells of each line, works in the order of measurement, so that configurations can be compared."""
    pairs = dict.fromkeys((one.work, one.threads) for row in rows for one in row.measures)
    return [
        _cells(row, work, threads)
        for work, threads in sorted(pairs, key=lambda pair: pair[1])
        for row in rows
        if any((one.work, one.threads) == (work, threads) for one in row.measures)
    ]


def _cells(row: Row, work: str, threads: int) -> list[str]:
    def value(name: str, digits: str = ".4g") -> str:
        found = row.measure(work, threads, name)
        return "-" if found is None else format(found.value, digits)

    speeds = [row.speed(f"{work}, {name}", threads) for name in _SPEEDS]
    more = [
        f"{name} {one.value:.4g} {one.unit}" for name in (RATE, *_PREFIX) if (one := row.measure(work, threads, name))
    ]
    return [
        row.name,
        f"{row.quality['perplexity']:.3f}" if "perplexity" in row.quality else "-",
        work,
        str(threads),
        *("-" if speed is None else f"{speed.best:.4g}" for speed in speeds),
        *(" · ".join(value(f"{name}, p{percent}") for percent in PERCENTILES) for name in _LATENCIES),
        value(MEMORY, ".0f"),
        ", ".join(more),
    ]
