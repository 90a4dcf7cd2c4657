"""Patterns of zeros, and masks with an exact number of zeros.

    unstructured    each weight is a unit
    4x1             a unit is a block of one input and four consecutive outputs; n is padded to a multiple of four
    N:M             N of M consecutive inputs of each output are kept ("2:4"); of a last group with r < M inputs,
                    (M - N) r / M are pruned, rounded down

A unit is kept or pruned as a whole. Units that are already zero are pruned first and count, so an existing mask stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..quantizers.error_feedback import BLOCK

BLOCK_OUTPUTS = 4
MAX_OF_GROUP = BLOCK
_ZERO_SCORE = np.float32(-1)  # score of units that are zero; all other scores are at least 0
_COLUMNS = 1024  # number of columns that are sorted at a time


@dataclass(frozen=True)
class Pattern:
    """A pattern of zeros. kept and of are N and M of N:M, otherwise 0."""

    outputs: int = 1  # outputs of a unit, which is kept or pruned as a whole
    kept: int = 0
    of: int = 0

    @classmethod
    def read(cls, text: str) -> Pattern | None:
        """Parse a pattern; None if it is invalid."""
        if text in ("unstructured", "4x1"):
            return cls(BLOCK_OUTPUTS if text == "4x1" else 1)
        match = re.fullmatch(r"([1-9]\d?):([1-9]\d{0,2})", text)
        if match is None or not int(match[1]) < int(match[2]) <= MAX_OF_GROUP:
            return None
        return cls(1, int(match[1]), int(match[2]))

    @property
    def is_two_four(self) -> bool:
        """Return True if at most two of every four aligned inputs are kept."""
        return self.of in (2, 4) and 4 // self.of * self.kept <= 2

    def units(self, k: int, n: int) -> int:
        """Return the number of units of a weight."""
        return k * -(-n // self.outputs)

    def zeros(self, k: int, n: int, sparsity: float) -> int:
        """Return the number of units pruned from a weight without zeros."""
        if not self.of:
            return round(sparsity * self.units(k, n))
        whole, rest = divmod(k, self.of)
        return n * (whole * (self.of - self.kept) + (self.of - self.kept) * rest // self.of)

    @property
    def span(self) -> int:
        """Return the number of inputs for which SparseGPT chooses a mask at a time."""
        return self.of or BLOCK


def unit_scores(scores: np.ndarray, alive: np.ndarray, outputs: int) -> np.ndarray:
    """Return the sum of scores of each unit, or -1 for units that are zero: float32 [k, ceil(n / outputs)]."""
    if outputs == 1:
        return np.where(alive, scores, _ZERO_SCORE)
    rows, n = scores.shape
    padding = ((0, 0), (0, -n % outputs))
    sums = np.pad(np.where(alive, scores, 0), padding).reshape(rows, -1, outputs).sum(axis=2)
    any_alive = np.pad(alive, padding).reshape(rows, -1, outputs).any(axis=2)
    return np.where(any_alive, sums, _ZERO_SCORE)


def spread_units(kept: np.ndarray, alive: np.ndarray, outputs: int) -> np.ndarray:
    """Return the mask of weights, bool [k, n]: nonzero weights whose unit is kept."""
    if outputs > 1:
        kept = np.repeat(kept, outputs, axis=1)[:, : alive.shape[1]]
    both: np.ndarray = kept & alive
    return both


def share_out(alive: np.ndarray, sizes: np.ndarray, sparsity: float) -> np.ndarray:
    """Return the number of units to prune in each part, int [parts]: its zeros, plus a proportional number of others.

    alive and sizes: nonzero units and all units of each part, int [parts]. The result adds up to round(sparsity * all
    units), or to the number of zeros if that is larger.
    """
    zeros = sizes - alive
    more = max(round(sparsity * int(sizes.sum())) - int(zeros.sum()), 0)
    total = max(int(alive.sum()), 1)
    ends = np.array([round(more * int(before) / total) for before in (0, *np.cumsum(alive))])
    counts: np.ndarray = zeros + np.diff(ends)
    return counts


def keep_by_output(scores: np.ndarray, alive: np.ndarray, pattern: Pattern, sparsity: float) -> np.ndarray:
    """Return the mask that keeps the same number of weights in each output, those with the largest scores.

    scores: float32 [k, n], not negative. alive: nonzero weights, bool [k, n]. Patterns N:M ignore `sparsity`.
    """
    if pattern.of:
        return keep_in_groups(scores, alive, pattern)
    units = unit_scores(scores, alive, pattern.outputs)
    k = len(units)
    counts = share_out((units >= 0).sum(axis=0), np.full(units.shape[1], k), sparsity)
    kept = np.empty(units.shape, bool)
    for columns in _chunks(units.shape[1]):
        order = np.argsort(units[:, columns], axis=0, kind="stable")
        stays = np.arange(k)[:, None] >= counts[columns]
        np.put_along_axis(kept[:, columns], order, stays, axis=0)
    return spread_units(kept, alive, pattern.outputs)


def keep_largest(scores: np.ndarray, alive: np.ndarray, pattern: Pattern, count: int) -> np.ndarray:
    """Return the mask without the `count` units with the smallest scores. Not for N:M."""
    units = unit_scores(scores, alive, pattern.outputs)
    kept = np.ones(units.size, bool)
    if count:
        kept[np.argpartition(units, count - 1, axis=None)[:count]] = False
    return spread_units(kept.reshape(units.shape), alive, pattern.outputs)


def keep_in_groups(scores: np.ndarray, alive: np.ndarray, pattern: Pattern) -> np.ndarray:
    """Return the N:M mask that keeps the largest scores of each group."""
    units = unit_scores(scores, alive, 1)
    kept = np.empty(units.shape, bool)
    for start in range(0, len(units), pattern.of):
        part = units[start : start + pattern.of]
        gone = (pattern.of - pattern.kept) * len(part) // pattern.of
        order = np.argsort(part, axis=0, kind="stable")
        stays = np.broadcast_to(np.arange(len(part))[:, None] >= gone, part.shape)
        np.put_along_axis(kept[start : start + pattern.of], order, stays, axis=0)
    both: np.ndarray = kept & alive
    return both


def _chunks(columns: int) -> Iterator[slice]:
    return (slice(start, start + _COLUMNS) for start in range(0, columns, _COLUMNS))
