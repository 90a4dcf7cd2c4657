"""Learns what calls of a model cost by their number of tokens."""

from __future__ import annotations

import math
from bisect import bisect_left

MOST_ROWS = 64  # of logits in a step with drafts; each takes 4 bytes a token of the vocabulary
_GROWTH = 0.25  # until they are measured, steps of n times the tokens take n ** _GROWTH times as long
_STALE_STEPS = 256  # after that many steps, a measurement is made again if drafts may gain
_MOST_ERROR = 2.0  # a longer step is counted as this much longer than expected: other load of the machine
_LEAST_SECONDS = 1e-6  # of a step; a coarse clock may show 0
_SCALE_RATE, _LEAST_RATE = 0.5, 0.1  # of learning the scale and relative costs


class StepCosts:
    """Relative costs of steps of decoding by their number of tokens, learned from each step.

    A common scale follows the lengths of the sequences and other load of the machine. Relative costs change only when a
    step has another number of tokens than the step before it, so that the two are measured under equal conditions.
    """

    def __init__(self) -> None:
        self._relative = [0.0] * (MOST_ROWS + 1)
        self._counts = [0] * (MOST_ROWS + 1)  # of measurements
        self._latest = [0] * (MOST_ROWS + 1)  # the number of the last step that was measured
        self._scale = 0.0  # seconds
        self._steps = self._last = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step of up to MOST_ROWS tokens."""
        seconds = max(seconds, _LEAST_SECONDS)
        self._steps += 1
        known = self._relative[tokens] if self._is_fresh(tokens) else self.table(tokens, tokens)[0]
        if not self._scale:
            self._scale = seconds / known
        error = min(max(seconds / (self._scale * known), 1 / _MOST_ERROR), _MOST_ERROR)
        if tokens != self._last:
            count = 1 + (self._counts[tokens] if self._is_fresh(tokens) else 0)
            change = error ** max(1 / (count + 1), _LEAST_RATE)
            self._relative[tokens] = known * change
            self._counts[tokens] = count
            error /= change
        self._scale *= error**_SCALE_RATE
        self._latest[tokens] = self._steps
        self._last = tokens

    def table(self, first: int, last: int) -> list[float]:
        """Return the relative costs of steps of `first` to `last` tokens."""
        known = [n for n in range(1, MOST_ROWS + 1) if self._is_fresh(n)]
        return [self._cost(n, known) for n in range(first, last + 1)]

    def seconds(self, first: int, last: int) -> list[float]:
        """Return the times of steps of `first` to `last` tokens; empty if none was measured."""
        return [self._scale * cost for cost in self.table(first, last)] if self._scale else []

    def _cost(self, tokens: int, known: list[int]) -> float:
        """Return the cost of a step, from the nearest numbers of tokens that were measured."""
        cost, place = self._relative, bisect_left(known, tokens)
        below, above = known[:place][-1:], known[place : place + 1]
        if above == [tokens]:
            return cost[tokens]
        if below and above:
            low, high = cost[below[0]], cost[above[0]]
            return low + (high - low) * (tokens - below[0]) / (above[0] - below[0])
        if not below and not above:
            return math.pow(tokens, _GROWTH)
        (nearest,) = below or above
        return cost[nearest] * math.pow(tokens / nearest, _GROWTH)

    def _is_fresh(self, tokens: int) -> bool:
        return self._counts[tokens] > 0 and self._steps - self._latest[tokens] <= _STALE_STEPS
