"""Decides how many drafted tokens a step verifies, from their chances and from what steps cost."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Items

from .drafts import Draft, Drafter
from .sequence import Sequence

MOST_ROWS = 64  # of logits in a step with drafts; each takes 4 bytes a token of the vocabulary
MOST_DRAFTED = 15  # tokens of a draft, so that the last token and the draft fill one tile of 16 rows
_LEAST_GAIN = 1.02  # least expected gain of a step with drafts, because estimates have errors
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


class Speculation:
    """Chooses drafts so that a step gives the most tokens a second.

    A step of n tokens that takes t seconds gives one token of each sequence, and a drafted token with its chance. The
    likeliest drafted tokens are taken, up to the number that makes (sequences + their chances) / t largest.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.costs = StepCosts()

    def choose(self, most: dict[Sequence, int], rows: int, tokens: int, left: int) -> dict[Sequence, Items[int]]:
        """Return the drafts that the next step should verify.

        Args:
            most: The sequences whose next token the step computes, and the most drafted tokens of each.
            rows: The logits of the step.
            tokens: The tokens of the step. With more tokens than rows, the step has chunks of prompts.
            left: The most drafted tokens of the step.
        """
        room = min(left, MOST_ROWS - rows)
        wanted = {one: min(count, room, MOST_DRAFTED) for one, count in most.items() if count > 0}
        if room <= 0 or not wanted:
            return {}
        drafts = [
            Draft(draft.tokens[:limit], draft.chances[:limit])  # a longer one could exceed the context
            for draft, limit in zip(
                self._drafter.propose(list(wanted), list(wanted.values())), wanted.values(), strict=True
            )
        ]
        chances = sorted((chance for draft in drafts for chance in draft.chances), reverse=True)[:room]
        count = self._count(chances, rows, tokens)
        if count == 0:
            return {}
        return _likeliest(wanted, drafts, chances[count - 1], count)

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn the cost of a step, unless it had chunks of prompts."""
        if tokens == rows <= MOST_ROWS:
            self.costs.observe(tokens, seconds)

    def _count(self, chances: list[float], rows: int, tokens: int) -> int:
        """Return how many of the likeliest drafted tokens to take."""
        if not chances:
            return 0
        if tokens == rows:
            costs = self.costs.table(rows, rows + len(chances))
        else:  # prompts are bound by computation, so that each token costs the same
            costs = [1 + n / tokens for n in range(len(chances) + 1)]
        expected, best, count = float(rows), _LEAST_GAIN * rows / costs[0], 0
        for n, chance in enumerate(chances, 1):
            expected += chance
            if expected > best * costs[n]:
                best, count = expected / costs[n], n
        return count


def _likeliest(wanted: Iterable[Sequence], drafts: list[Draft], least: float, count: int) -> dict[Sequence, Items[int]]:
    """Return the beginnings of drafts whose chances are at least `least`, and together `count` tokens."""
    result: dict[Sequence, Items[int]] = {}
    for sequence, (tokens, chances) in zip(wanted, drafts, strict=True):
        length = min(sum(chance >= least for chance in chances), count)
        if length:
            result[sequence] = tokens[:length]
            count -= length
    return result
