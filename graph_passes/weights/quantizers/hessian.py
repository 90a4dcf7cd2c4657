"""Operations on H = X^T X for GPTQ and SparseGPT: damping, order of the inputs, and a factor of the inverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0)
_FIRST = 2  # index of the damping tried first; with a few thousand rows, most layers choose it or a neighbour
_SAMPLED_COLUMNS = 64
_BLOCK = 128  # number of inputs eliminated at a time
_LEAF = 64  # triangular matrices up to this size are inverted directly


def damped(hessian: np.ndarray, damping: float, dtype: type[np.floating] = np.float64) -> np.ndarray:
    """Return H / mean(diag H) + damping I, [k, k] of the given type; I if all inputs are 0."""
    mean = hessian.diagonal().mean(dtype=np.float64)
    if mean == 0:
        return np.eye(len(hessian), dtype=dtype)
    result = hessian.astype(dtype)
    result /= dtype(mean)
    result[np.diag_indices_from(result)] += damping
    return result


def best_damping(sample: np.ndarray, halves: np.ndarray, fit: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> float:
    """Return the damping with which weights fitted on half of the inputs do best on the other half.

    Damping avoids overfitting: the fewer inputs, the larger it must be. The search moves up or down from 0.1 while the
    error falls.

    sample: some columns of W, float32 [k, n] (`sampled`). halves: X^T X of each half, float [2, k, k]. fit: returns V,
    exact or approximate, for the sample and a damped H, float32.
    """

    @cache
    def error_at(number: int) -> float:
        error = 0.0
        for fitted, other in (halves, halves[::-1]):
            difference = sample - fit(sample, damped(fitted, DAMPINGS[number], np.float32))
            error += float(np.vdot(difference, other @ difference))
        return error

    best = _FIRST
    for step in (1, -1):
        while 0 <= best + step < len(DAMPINGS) and error_at(best + step) < error_at(best):
            best += step
        if best != _FIRST:
            break
    return DAMPINGS[best]


def sampled(matrices: Sequence[np.ndarray]) -> np.ndarray:
    """Return columns of the weights, float32 [k, n], that represent all layers with the same inputs."""
    each = -(-_SAMPLED_COLUMNS // len(matrices))
    return np.concatenate([matrix[:, :: -(-matrix.shape[1] // each)] for matrix in matrices], axis=1)


def choose_order(hessian: np.ndarray) -> np.ndarray:
    """Return the order in which inputs are best rounded, int [k], for a damped H.

    The final cost of rounding an input is its variance given the inputs after it. So the last input is the one with the
    smallest variance, the input before it has the smallest variance given the last, and so on: a Cholesky factorization
    with pivots. For uncorrelated inputs this is GPTQ's act-order, by descending H_ii.
    """
    rest = hessian
    remaining = np.arange(len(hessian))
    backwards: list[int] = []
    while len(remaining):
        variance = rest.diagonal().copy()
        columns = np.empty((len(remaining), min(_BLOCK, len(remaining))))
        for j in range(columns.shape[1]):
            pivot = int(variance.argmin())
            column = rest[pivot] - columns[:, :j] @ columns[pivot, :j]  # rest is symmetric
            # The pivot can be 0 or less only by rounding; then the order does not matter.
            columns[:, j] = column / np.sqrt(max(column[pivot], np.finfo(np.float64).tiny))
            variance -= columns[:, j] ** 2
            variance[pivot] = np.inf
            backwards.append(int(remaining[pivot]))
        kept = np.flatnonzero(variance < np.inf)
        rest = rest[np.ix_(kept, kept)] - columns[kept] @ columns[kept].T
        remaining = remaining[kept]
    return np.array(backwards[::-1])


def inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """Return U, float32 [k, k] upper triangular, with U^T U the inverse of a damped H, float64 or float32.

    Raises:
        numpy.linalg.LinAlgError: H is not positive definite.
    """
    # Cholesky of the reversed matrix gives H = R R^T with R upper triangular. U = R^-1, so H is not inverted.
    upper = np.linalg.cholesky(hessian[::-1, ::-1])[::-1, ::-1]
    return _inverse_of_upper(upper).astype(np.float32, copy=False)


def _inverse_of_upper(upper: np.ndarray) -> np.ndarray:
    """Invert by halves: [[A, B], [0, C]]^-1 = [[A^-1, -A^-1 B C^-1], [0, C^-1]]."""
    half = len(upper) // 2
    if len(upper) <= _LEAF:
        return np.linalg.inv(upper)
    result = np.zeros_like(upper)
    result[:half, :half] = _inverse_of_upper(upper[:half, :half])
    result[half:, half:] = _inverse_of_upper(upper[half:, half:])
    result[:half, half:] = -(result[:half, :half] @ upper[:half, half:]) @ result[half:, half:]
    return result
