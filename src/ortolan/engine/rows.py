"""The interface between the engine and a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .requests import SamplingOptions


@dataclass(eq=False, slots=True)
class RowState:
    """A sequence for which the next token is drawn. The engine keeps one object for the life of the sequence.

    Attributes:
        options: The options of the request.
        prompt: The tokens of the prompt.
        answer: The tokens drawn so far. The engine appends to this list.
        index: The choice of the request, from 0.
        seed: `options.seed`, or a number that the engine drew for the request.
        mask: uint32 [ceil(vocabulary / 32)], token t in bit t % 32: the tokens that a grammar allows; None: all.
        cache: What a sampler likes to keep between calls, such as counts of tokens. It must follow from the other
            attributes, since a call may be repeated after an error.
    """

    options: SamplingOptions
    prompt: tuple[int, ...]
    answer: list[int]
    index: int
    seed: int
    mask: NDArray[np.uint32] | None = None
    cache: Any = None


class Sampled(NamedTuple):
    """A drawn token.

    Attributes:
        token: The token.
        logprob: Its log probability, if the row's options ask for log probabilities; else None.
        top: The likeliest tokens with their log probabilities, likeliest first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class TokenSampler(Protocol):
    """Draws tokens. A row's token depends only on its logits and on its `RowState`, not on other rows or calls."""

    def sample(self, logits: NDArray[np.float32], rows: Sequence[RowState]) -> list[Sampled]:
        """Draw a token for each row.

        Args:
            logits: float32 [rows, vocabulary]. They are not changed.
            rows: The sequences of the rows.

        Raises:
            OrtolanError: A row has logits that are not numbers, or no allowed token. The engine then draws row by row,
                and only the rows that fail end with the error.
        """
        ...
