"""How sparse each layer becomes under one target for all: more where it costs less.

For each layer, ||XW - XV||^2 / ||XW||^2 at several sparsities (Wanda's mask, some columns) is a curve. The sum over all
layers is least where all curves have one slope, error by weights that go; so, from the least sparsity, the cheapest
step of all is taken until the target is reached. Steps are those of a curve's convex hull from below, by which the
order of steps is that of their slopes. Sparsities stay within SPREAD of the target: curves know of one layer only, not
of what becomes of its error behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from .masks import Pattern, keep_by_output

SPREAD = 0.2
_STEP = 0.05
_LARGEST = 0.98
_SAMPLED_COLUMNS = 64


def levels(target: float) -> np.ndarray:
    """The sparsities that are tried, float64, rising."""
    low, high = max(target - SPREAD, 0.0), min(target + SPREAD, max(target, _LARGEST))
    return np.unique(np.append(np.arange(low, high, _STEP), high))


def error_curve(matrix: np.ndarray, hessian: np.ndarray, pattern: Pattern, shares: np.ndarray) -> np.ndarray:
    """||XW - XV||^2 / ||XW||^2 at each sparsity, float64 [shares], for W, float32 [k, n], and hessian = X^T X."""
    width = pattern.outputs  # columns that belong together stay together
    blocks = -(-matrix.shape[1] // width)
    chosen = np.arange(0, blocks, -(-blocks * width // _SAMPLED_COLUMNS))
    columns = (chosen[:, None] * width + np.arange(width)).ravel()
    sample = np.ascontiguousarray(matrix[:, columns[columns < matrix.shape[1]]])
    scores = np.abs(sample) * np.sqrt(hessian.diagonal())[:, None]
    norm = float(np.vdot(sample, hessian @ sample))
    errors = []
    for share in shares:
        difference = np.where(keep_by_output(scores, sample != 0, pattern, float(share)), np.float32(0), sample)
        errors.append(float(np.vdot(difference, hessian @ difference)) / norm if norm > 0 else 0.0)
    return np.array(errors)


def allocate(curves: Sequence[np.ndarray], sizes: Sequence[int], shares: np.ndarray, target: float) -> list[float]:
    """A sparsity for each layer, of sizes so many weights, that makes target of all of them zero.

    curves: for each layer, its error at each of the shares, which rise and hold the target between them.
    """
    chosen = [float(shares[0])] * len(curves)
    steps = []
    for layer, (curve, size) in enumerate(zip(curves, sizes, strict=True)):
        corners = _hull(shares, curve)
        for before, after in pairwise(corners):
            slope = (curve[after] - curve[before]) / ((shares[after] - shares[before]) * size)
            steps.append((slope, layer, float(shares[before]), float(shares[after])))
    left: float = (target - float(shares[0])) * sum(sizes)
    for _, layer, low, high in sorted(steps):
        taken = min(left, (high - low) * sizes[layer])
        if taken <= 0:
            break
        chosen[layer] = low + taken / sizes[layer]
        left -= taken
    return chosen


def _hull(x: np.ndarray, y: np.ndarray) -> list[int]:
    """The corners of the lower convex hull of points, by rising x."""
    corners: list[int] = []
    for index in range(len(x)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (y[b] - y[a]) * (x[index] - x[a]) < (y[index] - y[a]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(index)
    return corners
