"""A model of two layers of hashes instead of attention, a sampler for it, and the answers that they must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ortolan.engine import BLOCK_TOKENS, Request, RowState, Sampled, Step

VOCABULARY = 53
_CERTAIN = 2.0**25  # a logit of a token that is drawn with any temperature
_U64 = NDArray[np.uint64]


def mix(values: _U64) -> _U64:
    """splitmix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sums(values: _U64, positions: _U64) -> _U64:
    return np.cumsum(values * (mix(positions) | np.uint64(1)))


def first_layer(tokens: Sequence[int] | NDArray[np.int64], positions: _U64) -> _U64:
    return mix(np.asarray(tokens).astype(np.uint64) * np.uint64(1 << 20) + positions)


def logits_of(states: _U64, tokens: NDArray[np.int64], repeats: bool = False) -> NDArray[np.float32]:
    """Logits below 2**24; in texts that repeat, most rows give one token more, which follows from the last one."""
    scores = mix(states[:, None] + np.arange(VOCABULARY, dtype=np.uint64)[None, :])
    logits = (scores >> np.uint64(40)).astype(np.float32)
    if repeats:
        rows = np.flatnonzero(mix(states) % np.uint64(8))
        logits[rows, successor(tokens[rows])] = _CERTAIN
    return logits


def successor(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The token after each token in most places of a text that repeats. The cycles are short."""
    first = tokens // 6 * 6
    return first + (tokens - first + 1) % np.minimum(6, VOCABULARY - first)


class SmallModel:
    """Logits depend on all tokens of a sequence, as they are found in pools by the block table.

    Each layer stores a hash for each token: the first one of token and position, the second one of all hashes of the
    first layer up to the token. So a wrong block, order, length or position anywhere in the sequence changes answers.
    If its texts repeat, the hashes still decide where they do not.
    """

    vocabulary = VOCABULARY

    def __init__(self, blocks: int, context: int = 1 << 20, repeats: bool = False) -> None:
        self.blocks, self.context, self.repeats = blocks, context, repeats
        self.pools = mix(np.arange(2 * blocks * BLOCK_TOKENS, dtype=np.uint64)).reshape(2, -1)
        self.check: Callable[[Step], None] | None = None

    def run(self, step: Step) -> NDArray[np.float32]:
        if self.check is not None:
            self.check(step)
        states = np.zeros(len(step.input_ids), np.uint64)
        for row, past in enumerate(step.past_lengths.tolist()):
            start, end = step.sequence_starts[row : row + 2].tolist()
            positions = np.arange(past + end - start, dtype=np.uint64)
            offsets = np.arange(past + end - start) % BLOCK_TOKENS
            places = step.block_table[row].repeat(BLOCK_TOKENS)[: len(offsets)] * BLOCK_TOKENS + offsets
            assert np.array_equal(step.position_ids[start:end], positions[past:].astype(np.int64))
            stored = self.pools[:, places]
            stored[0, past:] = first_layer(step.input_ids[start:end], positions[past:])
            stored[1, past:] = mix(sums(stored[0], positions))[past:]
            self.pools[:, places[past:]] = stored[:, past:]
            states[start:end] = sums(stored[1], positions)[past:]
        return logits_of(states[step.logit_rows], step.input_ids[step.logit_rows], self.repeats)


class SmallSampler:
    """The likeliest token, or with a temperature the likeliest after each score is hashed with seed and position."""

    def sample(self, logits: NDArray[np.float32], rows: Sequence[RowState]) -> list[Sampled]:
        return [draw(line, row) for line, row in zip(logits, rows, strict=True)]


def draw(logits: NDArray[np.float32], row: RowState) -> Sampled:
    scores = logits.astype(np.uint64)
    if row.options.temperature > 0:
        salt = (row.seed * 1_000_003 + row.index * 1009 + len(row.answer)) * 2**24 % 2**64
        scores = np.where(logits == _CERTAIN, np.uint64(2**64 - 1), mix(scores + np.uint64(salt)))
    if row.mask is not None:
        allowed = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[:VOCABULARY].astype(bool)
        scores = np.where(allowed, scores, 0)
    token = int(scores.argmax())
    if row.options.logprobs is None:
        return Sampled(token)
    return Sampled(token, float(logits[token]), tuple((best, float(logits[best])) for best in (-logits).argsort()[:2]))


def answer(
    request: Request, context: int = 1 << 20, index: int = 0, seed: int = 0, *, repeats: bool = False
) -> list[int]:
    """The answer to a request, computed without an engine, pools or blocks."""
    tokens = list(request.prompt)
    row = RowState(request.sampling, request.prompt, [], index, seed)
    while len(row.answer) < request.max_tokens and len(tokens) < context:
        positions = np.arange(len(tokens), dtype=np.uint64)
        second = mix(sums(first_layer(tokens, positions), positions))
        logits = logits_of(sums(second, positions)[-1:], np.array(tokens[-1:]), repeats)
        token = draw(logits[0], row).token
        row.answer.append(token)
        tokens.append(token)
        if token in request.end_tokens:
            break
    return row.answer
