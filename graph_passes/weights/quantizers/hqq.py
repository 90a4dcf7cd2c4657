"""HQQ: find zero points and scales by half-quadratic splitting, which gives outliers less weight. Needs no inputs.

Reference: Badri, Shaji: Half-Quadratic Quantization of Large Machine Learning Models (Mobius Labs, 2023),
https://mobiusml.github.io/hqq_blog. For each group, with q = clip(rint((W - m) / s), 0, 15) and the minimum m, which is
-s times the paper's zero point, iterate:

    E = shrink(W - s q - m)                     shrink(x) = sign(x) max(|x| - |x|^(p - 1) / beta, 0), p = 0.7
    s, m = least squares of W - E by q          both rounded to what is stored

beta grows by a factor in each iteration. Errors are in units of round-to-nearest's scale, so that the result does not
depend on the magnitude of W. With integer zero points, z = rint(mean(q - (W - E) / s)), in 0 … 15, replaces m, and s is
the least squares fit by q - z. Differences from the paper:

- The paper's scales are fixed. Here they are fitted too, and the search starts from several fractions of the range of
  round-to-nearest.
- Each column takes the iterate with the least sum of squared errors. Round-to-nearest is one of them, so the result is
  never worse (the paper stops by the mean of |error|). Choosing by the sum of |error|^p clips outliers, and is worse
  (docs/verification.md).
"""

from __future__ import annotations

import numpy as np

from .grid import SMALLEST_SCALE, Grid, Quantization, QuantizedMatrix, fit_grid

_POWER = 0.7
_BETA, _BETA_GROWTH = 10.0, 1.1
_ITERATIONS = 8
_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)


def half_quadratic(matrix: np.ndarray, quantization: Quantization) -> QuantizedMatrix:
    """Quantize W, float32 [k, n], finite, to 4 bits with zero points or minimums."""
    k, n = matrix.shape
    result = QuantizedMatrix.empty(k, n, quantization)
    rows = quantization.rows(k)
    for group, start in enumerate(range(0, k, rows)):
        part = matrix[start : start + rows]
        grid = _best_grid(part, quantization)
        grid.store(result, group)
        result.q[start : start + rows] = grid.round(part)
    return result


def _best_grid(part: np.ndarray, quantization: Quantization) -> Grid:
    best = fit_grid(part, quantization)
    first = best
    # Errors are in units of the first scale, so those of round-to-nearest are at most 1/2.
    unit = np.where(first.scale > 0, first.scale, 1)
    least = _squared_error(part, first, unit)
    for fraction in _RANGES:
        scale = quantization.short(first.scale * np.float32(fraction))
        scale = np.where(first.scale > 0, np.maximum(scale, SMALLEST_SCALE), 0)
        grid = Grid(quantization.bits, scale, first.zero, first.minimum)
        beta = _BETA
        for _ in range(_ITERATIONS):
            grid = _step(part, grid, unit, beta, quantization)
            beta *= _BETA_GROWTH
            loss = _squared_error(part, grid, unit)
            better = loss < least
            if not better.any():
                break
            least = np.where(better, loss, least)
            best = _merged(better, grid, best)
    return best


def _merged(where: np.ndarray, grid: Grid, other: Grid) -> Grid:
    scale = np.where(where, grid.scale, other.scale)
    if grid.minimum is not None and other.minimum is not None:
        return Grid(grid.bits, scale, None, np.where(where, grid.minimum, other.minimum))
    assert grid.zero is not None and other.zero is not None
    return Grid(grid.bits, scale, np.where(where, grid.zero, other.zero))


def _step(part: np.ndarray, grid: Grid, unit: np.ndarray, beta: float, quantization: Quantization) -> Grid:
    q = grid.round(part)
    error = (part - grid.weights(q)) / unit
    target = part - _shrink(error, beta) * unit
    zero, middle = None, q.mean(axis=0)
    if grid.minimum is None:
        divisor = np.where(grid.scale > 0, grid.scale, 1)
        zero = middle = quantization.stored_zero((q - target / divisor).mean(axis=0))
    steps = q - middle
    squares = (steps * steps).sum(axis=0)
    # If all q of a group are equal, or equal to the zero point, they do not determine a scale.
    fitted = quantization.short(((target / unit) * steps).sum(axis=0) / np.where(squares > 0, squares, 1) * unit)
    scale = np.where((squares > 0) & (fitted >= SMALLEST_SCALE), fitted, grid.scale)
    minimum = None if grid.minimum is None else quantization.short((target - scale * q).mean(axis=0))
    return Grid(grid.bits, scale, zero, minimum)


def _shrink(error: np.ndarray, beta: float) -> np.ndarray:
    magnitude = np.abs(error)
    # |x|^(p - 1) overflows for tiny x, which all shrink to zero.
    shrunk = magnitude - np.maximum(magnitude, 1e-6) ** (_POWER - 1) / beta
    result: np.ndarray = np.sign(error) * np.maximum(shrunk, 0)
    return result


def _squared_error(part: np.ndarray, grid: Grid, unit: np.ndarray) -> np.ndarray:
    error = (part - grid.weights(grid.round(part))) / unit
    total: np.ndarray = (error * error).sum(axis=0)
    return total
