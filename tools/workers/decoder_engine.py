"""The base class of decoders: prompts, steps of greedy decoding and probabilities of texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .engine import Engine
else:
    from engine import Engine


@dataclass(frozen=True)
class Part:
    """One part of a pass.

    With `steps`, greedy steps after `ids` or, without ids, after `context` tokens in the cache. Without `steps`, the
    ids are run. `score`: tokens to run at a time when the ids are scored; 0 if they are not scored.
    """

    ids: Sequence[int]
    context: int = 0
    steps: int = 0
    score: int = 0


class DecoderEngine(Engine):
    """A decoder in a runtime, with a token sequence and its cache."""

    _next: int  # the token to run next

    @abstractmethod
    def make_room(self, tokens: int) -> None:
        """Make an empty cache for this number of tokens."""

    @abstractmethod
    def rewind(self, tokens: int) -> None:
        """Keep the first `tokens` tokens; forget the rest."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return the logits of the last one, [vocabulary]."""

    @abstractmethod
    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return their logits, [tokens, vocabulary]."""

    @abstractmethod
    def fill(self, tokens: int) -> None:
        """Put this number of arbitrary tokens into the empty cache.

        Raises:
            ValueError: This would take too long.
        """

    def prepare(self, work: Mapping[str, Any]) -> list[Part]:
        """Return the parts of the work, with a cache that is large enough."""
        kind, steps = work["kind"], work.get("steps", 0)
        if kind == "score":
            windows = work["windows"]
            self.make_room(max(map(len, windows)))
            return [Part(ids, score=work.get("step") or len(ids)) for ids in windows]
        if kind == "step":
            context = work["context"]
            self.make_room(context + steps)
            self.fill(context)
            return [Part([], context, steps)]
        if kind not in ("prompt", "decode"):
            raise ValueError(f"unknown work {kind!r}; expected prompt, decode, step or score")
        self.make_room(len(work["ids"]) + steps)
        return [Part(work["ids"], steps=steps)]

    def set_up(self, part: Part) -> None:
        """Rewind the cache; before decoding, run the prompt."""
        self.rewind(part.context)
        if part.steps:
            self._next = int(self.feed(part.ids).argmax()) if part.ids else any_ids(1)[0]

    def run(self, part: Part) -> np.ndarray:
        """Run the part: score it, run its prompt, or decode its steps."""
        if part.score:
            return np.array([self._surprise(part)])
        if not part.steps:
            return self.feed(part.ids)[None]
        for _ in range(part.steps):
            self._next = int(self.feed([self._next]).argmax())
        return np.array([[self._next]])

    def _surprise(self, part: Part) -> tuple[float, int]:
        total, ids = 0.0, part.ids[:-1]
        for begin in range(0, len(ids), part.score):
            given = ids[begin : begin + part.score]
            total += surprise(self.feed_all(given), part.ids[begin + 1 : begin + 1 + len(given)])
        return total, len(ids)


def surprise(logits: np.ndarray, tokens: Sequence[int]) -> float:
    """Return the sum of -log softmax(logits)[token] over the rows."""
    rows = logits.astype(np.float64)
    peak = rows.max(axis=1)
    log_sum = peak + np.log(np.exp(rows - peak[:, None]).sum(axis=1))
    return float((log_sum - rows[np.arange(len(tokens)), tokens]).sum())


def any_ids(tokens: int) -> list[int]:
    """Return arbitrary token ids that every vocabulary here has."""
    return list(map(int, np.random.default_rng(0).integers(3, 96, tokens)))
