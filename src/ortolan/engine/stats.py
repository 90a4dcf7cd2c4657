"""Counters and histograms of an engine."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# fmt: off
_SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)
# fmt: on


@dataclass(frozen=True, slots=True)
class HistogramData:
    """A histogram at one time.

    Attributes:
        bounds: The upper bounds of the buckets; the last bucket has none.
        counts: Observations in each bucket, not cumulative, one more than bounds.
        total: The sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self.counts)


class Histogram:
    """Counts observations in buckets. One thread writes; others may read copies."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def data(self) -> HistogramData:
        """Return a copy."""
        return HistogramData(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of an engine since it started, and its present state. A request of n choices counts as n sequences.

    Attributes:
        queued_sequences: Sequences that wait to start, or to continue after a preemption.
        running_sequences: Sequences that own blocks.
        blocks_used: Blocks that sequences use.
        blocks_cached: Unused blocks that hold a prefix.
        blocks_free: Blocks that hold nothing.
        prefix_queried_tokens: Tokens of prompts that were looked up in the prefix cache.
        prefix_hit_tokens: Tokens of prompts that were found there.
        preemptions: How often a sequence gave up its blocks.
        steps: Calls of the model.
        computed_tokens: Tokens that the model computed, recomputed ones included.
        prompt_tokens: Tokens of the prompts of sequences that got a first token.
        generated_tokens: Tokens of answers.
        drafted_tokens: Tokens that were computed as a guess of an answer's next tokens.
        accepted_tokens: Drafted tokens that were right, so that they became tokens of answers.
        finished: Sequences by their finish reason.
        rejected_requests: Requests that found the queue full.
        time_to_first_token: Seconds from `submit` to a sequence's first token.
        time_between_tokens: Seconds between tokens of a sequence.
        step_seconds: Seconds of a step, the model's and the engine's.
        request_seconds: Seconds from `submit` to the end of a sequence.
    """

    queued_sequences: int
    running_sequences: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    steps: int
    computed_tokens: int
    prompt_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    finished: dict[str, int]
    rejected_requests: int
    time_to_first_token: HistogramData
    time_between_tokens: HistogramData
    step_seconds: HistogramData
    request_seconds: HistogramData


class Counters:
    """The numbers of an engine that no other part holds. The engine's thread writes them."""

    def __init__(self) -> None:
        self.steps = self.computed_tokens = self.prompt_tokens = self.generated_tokens = self.rejected = 0
        self.drafted_tokens = self.accepted_tokens = 0
        # All reasons from the beginning, so that a copy never meets a dictionary that grows.
        self.finished = dict.fromkeys(("stop", "length", "cancelled", "deadline", "error"), 0)
        self.time_to_first_token = Histogram()
        self.time_between_tokens = Histogram()
        self.step_seconds = Histogram()
        self.request_seconds = Histogram()
