"""Sampling in float64 numpy, in the order of src/sampling.h, with the same random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ortolan.engine.requests import SamplingOptions

_WORD = 0xFFFFFFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Return the four words of Philox4x32-10."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _WORD, (a >> 32) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, generated: int, choice: int) -> float:
    """Return the number in [0, 1) that chooses a token."""
    seed &= (1 << 64) - 1
    low, high, *_ = philox((generated & _WORD, generated >> 32, choice, 0), (seed & _WORD, seed >> 32))
    return ((high << 32 | low) >> 11) / 2**53


def adjust(
    logits: NDArray[np.float32],
    options: SamplingOptions,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    allowed: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Return the logits after bias, mask and penalties, rounded to float32 after each of them."""
    x = logits.copy()
    for token, bias in options.logit_bias.items():
        x[token] += np.float32(bias)
    if allowed is not None:
        x[~allowed] = -np.inf
    seen = sorted({*prompt, *answer})
    penalty = np.float32(options.repetition_penalty)
    # RepetitionPenaltyLogitsProcessor of transformers
    x[seen] = np.where(x[seen] < 0, x[seen] * penalty, x[seen] / penalty)
    counts = np.bincount(np.asarray(answer, np.int64), minlength=len(x)).astype(np.float32)
    x -= np.float32(options.frequency_penalty) * counts
    x -= np.float32(options.presence_penalty) * (counts > 0).astype(np.float32)
    return x.astype(np.float64)


def distribution(x: NDArray[np.float64], options: SamplingOptions, top_p: float | None = None) -> NDArray[np.float64]:
    """Return the probabilities of tokens with adjusted logits."""
    order = np.lexsort((np.arange(len(x)), -x))
    probabilities = np.zeros(len(x))
    if options.temperature == 0:
        probabilities[order[0]] = 1
        return probabilities
    kept = order[: options.top_k or None]
    weights = np.exp((x[kept] - x[kept[0]]) / options.temperature)
    running = np.cumsum(weights / weights.sum())
    count = int(np.searchsorted(running, options.top_p if top_p is None else top_p)) + 1
    if options.top_p < 1:
        kept, weights = kept[:count], weights[:count]
    weights = np.where(weights >= options.min_p, weights, 0)
    probabilities[kept] = weights / weights.sum()
    return probabilities


def possible_tokens(x: NDArray[np.float64], options: SamplingOptions, number: float) -> set[int]:
    """Return the token that a number in [0, 1) chooses, and others if rounding to float32 may decide between them."""
    tokens: set[int] = set()
    rounding = 4e-6
    for top_p in {options.top_p, options.top_p - rounding, options.top_p + rounding} if options.top_p < 1 else {1.0}:
        running = np.cumsum(distribution(x, options, top_p))
        for nudge in (-rounding, 0, rounding):
            position = int(np.searchsorted(running, number + nudge, side="right"))
            tokens.add(min(position, int(np.flatnonzero(np.diff(running, prepend=0))[-1])))
    return tokens
