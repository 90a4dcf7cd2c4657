"""Decides how many drafted tokens a step verifies, from their chances and from what steps cost."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from .drafts import Draft, Drafter
from .sequence import Sequence

MOST_ROWS = 64  # of logits in a step with drafts; each takes 4 bytes a token of the vocabulary
MOST_DRAFTED = 15  # tokens of a draft, so that the last token and the draft fill one tile of 16 rows
_LEAST_GAIN = 1.02  # the expected gain of a step with drafts, because estimates err
_GROWTH = 0.25  # until they are measured, steps of n times the tokens take n ** _GROWTH times as long
_STALE_STEPS = 256  # after that many steps, a measurement is made again if drafts may gain
_SCALE_RATE = 0.5  # of the scale, which follows the lengths of the sequences and other load of the machine
_UP_RATE, _DOWN_RATE = 0.05, 0.3  # of relative costs; most errors of a measurement make it too long


class StepCosts:
    """What steps of decoding cost by their number of tokens, relative to each other, learned from each step."""

    def __init__(self, most: int = MOST_ROWS) -> None:
        """Create costs of steps of up to this number of tokens."""
        self._relative: list[float | None] = [None] * (most + 1)
        self._measured = [0] * (most + 1)  # the number of the step
        self._scale = 0.0  # seconds
        self._steps = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step."""
        self._steps += 1
        if seconds <= 0:
            return
        if not self._scale:
            self._scale = seconds / self._guess(tokens)
        known = self._relative[tokens]
        if known is None or self._is_stale(tokens):
            self._relative[tokens] = seconds / self._scale
        else:
            error = min(max(seconds / (self._scale * known), 0.5), 2.0)
            self._scale *= error**_SCALE_RATE
            self._relative[tokens] = known * error ** (_UP_RATE if error > 1 else _DOWN_RATE)
        self._measured[tokens] = self._steps

    def table(self, first: int, last: int) -> list[float]:
        """Return the relative costs of steps of `first` to `last` tokens."""
        known = [(n, cost) for n, cost in enumerate(self._relative) if cost is not None and not self._is_stale(n)]
        if not known:
            return [self._guess(n) for n in range(first, last + 1)]
        result = []
        at = 0
        for n in range(first, last + 1):
            while at < len(known) and known[at][0] < n:
                at += 1
            if at == 0:
                (above, cost) = known[0]
                result.append(cost * (n / above) ** _GROWTH)
            elif at == len(known):
                (below, cost) = known[-1]
                result.append(cost * (n / below) ** _GROWTH)
            else:
                (below, low), (above, high) = known[at - 1], known[at]
                result.append(low + (high - low) * (n - below) / (above - below))
        return result

    def _guess(self, tokens: int) -> float:
        return tokens**_GROWTH

    def _is_stale(self, tokens: int) -> bool:
        return self._steps - self._measured[tokens] > _STALE_STEPS


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
        drafts = self._drafter.propose(list(wanted), list(wanted.values()))
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
