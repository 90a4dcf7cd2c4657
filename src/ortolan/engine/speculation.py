"""Decides how many drafted tokens a step verifies, from their chances and from what steps cost."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Items

from ..errors import OrtolanError
from .draft_model import DraftModel
from .drafts import Draft, Drafter
from .sequence import Sequence
from .step_costs import MOST_ROWS, StepCosts

_log = logging.getLogger(__name__)
MOST_DRAFTED = 15  # tokens of a draft, so that the last token and the draft fill one tile of 16 rows
_LEAST_GAIN = 1.02  # the expected gain of a step with drafts, because estimates err


class Speculation:
    """Chooses drafts so that a step gives the most tokens a second.

    A step of n tokens that takes t seconds gives one token of each sequence, and a drafted token with its chance. The
    likeliest drafted tokens are taken, up to the number that makes (sequences + their chances) / t largest.
    """

    def __init__(self, drafter: Drafter, model: DraftModel | None = None, vocabulary: int | None = None) -> None:
        """Choose among the drafts of a drafter, and of a model where the drafter's first token is less likely.

        Args:
            drafter: The drafter.
            model: The draft model.
            vocabulary: The number of token ids, which the drafter's tokens must be below; None: all are taken.
        """
        self._drafter: Drafter | None = drafter
        self._model = model
        self._vocabulary = vocabulary
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
        drafts = self._propose(wanted)
        if self._model is not None and tokens == rows and not self._model.rests():  # prompts take long enough
            self._improve(self._model, drafts, wanted, rows, room)
        chances = sorted((chance for draft in drafts for chance in draft.chances), reverse=True)[:room]
        count = self._count(chances, rows, tokens)
        if count == 0:
            return {}
        return _likeliest(wanted, drafts, chances[count - 1], count)

    def _propose(self, wanted: dict[Sequence, int]) -> list[Draft]:
        """Return the drafter's drafts, cut to their limits: a longer one could exceed the context."""
        limits = list(wanted.values())
        if self._drafter is not None:
            try:
                drafts = self._drafter.propose(list(wanted), limits)
                return [
                    Draft(self._checked(draft.tokens[:limit]), draft.chances[:limit])
                    for draft, limit in zip(drafts, limits, strict=True)
                ]
            except Exception:  # answers do not need it
                _log.exception("the drafter failed and is not used again")
                self._drafter = None
        return [Draft() for _ in limits]

    def _checked(self, tokens: Items[int]) -> Items[int]:
        """Return drafted tokens. Raise OrtolanError for one that the model does not have."""
        if self._vocabulary is not None and len(tokens) and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < self._vocabulary)
            raise OrtolanError(
                f"a draft has token {wrong}, expected 0 to {self._vocabulary - 1}, the model's vocabulary; use a "
                "drafter for this model"
            )
        return tokens

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn the cost of a step, unless it had chunks of prompts."""
        if tokens == rows <= MOST_ROWS:
            self.costs.observe(tokens, seconds)

    def _improve(
        self, model: DraftModel, drafts: list[Draft], wanted: dict[Sequence, int], rows: int, room: int
    ) -> None:
        """Replace drafts whose first token is less likely than the model's usually are."""
        poor = {
            sequence: index
            for index, (sequence, draft) in enumerate(zip(wanted, drafts, strict=True))
            if not draft.chances or draft.chances[0] < model.accuracy
        }
        if not poor:
            return
        steps = self.costs.seconds(rows, rows + min(room, MOST_DRAFTED * len(poor)))
        try:
            better = model.propose(list(poor), [wanted[one] for one in poor], rows, steps)
        except Exception:  # answers do not need it
            _log.exception("the draft model failed and is not used again")
            self._model = None
            return
        for index, draft in zip(poor.values(), better, strict=True):
            if sum(draft.chances) > sum(drafts[index].chances):
                drafts[index] = draft

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
