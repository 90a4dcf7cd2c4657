"""Distribute a target sparsity over layers: more where it costs less.

A layer's error curve is ||XW - XV||^2 / ||XW||^2 at several sparsities, for inputs X, weight W [k, n] and pruned weight
V (Wanda's mask, some columns). The total error is smallest if all curves have the same slope of error per pruned
weight. So a greedy loop starts at the lowest sparsity and takes the step with the smallest slope until the target is
reached. Steps follow each curve's lower convex hull, on which slopes increase. Sparsities stay within SPREAD of the
target, because a curve does not show how later layers amplify an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from .masks import Pattern, keep_by_output

SPREAD = 0.2
_STEP = 0.05
_MAX_SPARSITY = 0.98
_SAMPLED_COLUMNS = 64


def levels(target: float) -> np.ndarray:
    """Return the sparsities to try, float64, ascending."""
    low, high = max(target - SPREAD, 0.0), min(target + SPREAD, max(target, _MAX_SPARSITY))
    return np.unique(np.append(np.arange(low, high, _STEP), high))


def error_curve(matrix: np.ndarray, hessian: np.ndarray, pattern: Pattern, sparsities: np.ndarray) -> np.ndarray:
    """Return ||XW - XV||^2 / ||XW||^2 at each sparsity, float64 [sparsities]. hessian: X^T X."""
    width = pattern.outputs  # columns of one unit stay together
    blocks = -(-matrix.shape[1] // width)
    chosen = np.arange(0, blocks, -(-blocks * width // _SAMPLED_COLUMNS))
    columns = (chosen[:, None] * width + np.arange(width)).ravel()
    sample = np.ascontiguousarray(matrix[:, columns[columns < matrix.shape[1]]])
    scores = np.abs(sample) * np.sqrt(hessian.diagonal())[:, None]
    norm = float(np.vdot(sample, hessian @ sample))
    errors = []
    for sparsity in sparsities:
        difference = np.where(keep_by_output(scores, sample != 0, pattern, float(sparsity)), np.float32(0), sample)
        errors.append(float(np.vdot(difference, hessian @ difference)) / norm if norm > 0 else 0.0)
    return np.array(errors)


def allocate(curves: Sequence[np.ndarray], sizes: Sequence[int], sparsities: np.ndarray, target: float) -> list[float]:
    """Return a sparsity for each layer so that `target` of all weights together become zero.

    curves: error of each layer at each of the ascending sparsities, whose range contains the target. sizes: number of
    weights of each layer.
    """
    chosen = [float(sparsities[0])] * len(curves)
    steps = []
    for layer, (curve, size) in enumerate(zip(curves, sizes, strict=True)):
        corners = _hull(sparsities, curve)
        for before, after in pairwise(corners):
            slope = (curve[after] - curve[before]) / ((sparsities[after] - sparsities[before]) * size)
            steps.append((slope, layer, float(sparsities[before]), float(sparsities[after])))
    remaining: float = (target - float(sparsities[0])) * sum(sizes)
    for _, layer, low, high in sorted(steps):
        taken = min(remaining, (high - low) * sizes[layer])
        if taken <= 0:
            break
        chosen[layer] = low + taken / sizes[layer]
        remaining -= taken
    return chosen


def _hull(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Return the indices of the corners of the lower convex hull of points, by ascending x."""
    corners: list[int] = []
    for index in range(len(x)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (y[b] - y[a]) * (x[index] - x[a]) < (y[index] - y[a]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(index)
    return corners
