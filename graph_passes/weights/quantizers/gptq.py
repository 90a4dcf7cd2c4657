"""GPTQ: rounds one input after another, and lets the inputs that are still to come make up for the error.

Frantar, Ashkboos, Hoefler, Alistarh: GPTQ (ICLR 2023, arXiv:2210.17323), algorithm 1. It minimizes ||XW - XV||^2 over V
on the grid, for inputs X [rows, k], greedily in a fixed order of inputs, by the inverse of the Hessian:

    H = X^T X / mean(diag(X^T X)) + damping I,        H^-1 = U^T U with U upper triangular
    for i in order:    v_i = round(w_i),    e = (w_i - v_i) / U_ii,    w_j -= U_ij e for all j > i

(A factor of H cancels, so the paper's 2 X X^T is X^T X here.) Row i of U holds what input i tells those behind it: by
the lower factor, or with i and j swapped, the error spreads to where it cannot be made up for. The loop is in
error_feedback.py. Three things are chosen with more care than in the paper:

Order. hessian.py, choose_order; without act_order, inputs go as they stand.

Grids. All are fitted to W beforehand, so that they may belong to runs of neighbouring inputs in any order (no g_idx is
stored). ||XW - XV||^2 comes to the sum of (w_i - v_i)^2 / U_ii^2 over the updated w, so 1 / U_ii^2 is the importance of
input i by which grids are fitted.

Refinement. The greedy choice looks ahead but not back. So afterwards, a few times over: the scale of each group becomes
the best one for its q (least squares under H), and each weight is rounded anew, with all others as they are by then
(coordinate descent, as in QuantEase: Behdin et al., arXiv:2309.01885). Each step lowers ||XW - XV||^2, or changes
nothing.

What each of the three gains: docs/verification.md.

Weights that are zero stay zero; what the updates would have made of them counts as rounding error and is passed on, as
in SparseGPT (Frantar, Alistarh, ICML 2023, section 3.3), so that pruned layers keep their pattern. The error of pruning
itself is not made up for: the target is W as it is given (pruners/sparsegpt.py sees to that).
"""

from __future__ import annotations

import numpy as np

from .error_feedback import BLOCK, settle_inputs
from .grid import SMALLEST_SCALE, Grid, Quantization, Rounded, best_grid, bf16, dequantize
from .hessian import best_damping, choose_order, damped, inverse_factor

_COLUMNS = 1024  # that are rounded together: what is at work stays in the cache
_SWEEPS = 4


def gptq(
    matrix: np.ndarray, hessian: np.ndarray, quantization: Quantization, damping: float = 0.03, act_order: bool = True
) -> Rounded:
    """W, float32 [k, n], finite, for inputs with hessian = X^T X, float [k, k], finite.

    Works on copies of W, and on float64 copies of the Hessian. Raises numpy.linalg.LinAlgError if the damped Hessian
    is not positive definite.
    """
    return gptq_of(matrix, damped(hessian, damping), quantization, act_order)


def choose_damping(matrix: np.ndarray, halves: np.ndarray, quantization: Quantization) -> float:
    """best_damping for weights that are rounded. halves: X^T X of each half of the inputs, float [2, k, k]."""

    def fit(sample: np.ndarray, hessian: np.ndarray) -> np.ndarray:
        rounded = gptq_of(sample, hessian, quantization, act_order=False, sweeps=0)
        return dequantize(rounded, quantization.group_size)

    return best_damping(matrix, halves, fit)


def gptq_of(
    matrix: np.ndarray,
    hessian: np.ndarray,
    quantization: Quantization,
    act_order: bool = True,
    sweeps: int = _SWEEPS,
    kept: np.ndarray | None = None,
) -> Rounded:
    """The same for a damped Hessian, float64 [k, k].

    kept: bool [k, n], which weights may be other than zero; None: those that are now.
    """
    k, n = matrix.shape
    rows = quantization.rows(k)
    result = Rounded.empty(k, n, quantization)
    order = choose_order(hessian) if act_order else np.arange(k)
    factor = inverse_factor(hessian[np.ix_(order, order)] if act_order else hessian)
    importance = np.empty(k, np.float32)
    importance[order] = factor.diagonal() ** -2.0
    precise = hessian.astype(np.float32) if sweeps else None
    for first in range(0, n, _COLUMNS):
        columns = slice(first, first + _COLUMNS)
        part = matrix[:, columns]
        mask = part != 0 if kept is None else kept[:, columns]
        grids = [
            best_grid(part[start : start + rows], importance[start : start + rows], quantization)
            for start in range(0, k, rows)
        ]
        q = _round(part, mask, grids, rows, order, factor)
        if precise is not None:
            _refine(part, mask, q, grids, quantization, precise, sweeps)
        result.q[:, columns] = q
        for group, grid in enumerate(grids):
            grid.store(result, group, columns)
    return result


def _round(
    matrix: np.ndarray, kept: np.ndarray, grids: list[Grid], rows: int, order: np.ndarray, factor: np.ndarray
) -> np.ndarray:
    """q, as float32 [k, n], by the algorithm at the top of this file. order, factor: of the inputs in that order."""
    q = np.empty(matrix.shape, np.float32)
    mask = kept[order]

    def settle(i: int, row: np.ndarray) -> np.ndarray:
        grid = grids[order[i] // rows]
        q[order[i]] = grid.round(row)
        value: np.ndarray = grid.weights(q[order[i]])
        return value

    settle_inputs(matrix[order], factor, lambda start, stop, weights: mask[start:stop], settle)
    return q


def _refine(
    matrix: np.ndarray,
    kept: np.ndarray,
    q: np.ndarray,
    grids: list[Grid],
    quantization: Quantization,
    hessian: np.ndarray,
    sweeps: int,
) -> None:
    """Makes q, float32 [k, n], and the scales of the grids better in place. hessian: damped, float32."""
    k = len(q)
    rows = quantization.rows(k)
    values = np.concatenate([grid.weights(q[g * rows : (g + 1) * rows]) for g, grid in enumerate(grids)])
    slope = hessian @ (matrix - values)  # H (W - V): where it is positive, a larger v is better
    for _ in range(sweeps):
        for start in range(0, k, BLOCK):
            stop = min(start + BLOCK, k)
            block = hessian[start:stop, start:stop]
            before = values[start:stop].copy()
            near = slope[start:stop].copy()  # is kept up to date inside of the block
            for i in range(start, stop):
                group, first = divmod(i, rows)
                if first == 0 and quantization.group_size is not None:
                    part = slice(i, min(i + rows, k))
                    within = slice(i - start, part.stop - start)
                    grid = _refit(grids[group], q[part], near[within], block[within, within])
                    step = grid.weights(q[part]) - values[part]
                    near -= block[:, within] @ step
                    values[part] += step
                    grids[group] = grid
                grid = grids[group]
                best = values[i] + near[i - start] / block[i - start, i - start]
                q[i] = grid.round(best * kept[i])
                step = grid.weights(q[i]) - values[i]
                if step.any():
                    near -= np.outer(block[:, i - start], step)
                    values[i] += step
            slope -= hessian[:, start:stop] @ (values[start:stop] - before)


def _refit(grid: Grid, q: np.ndarray, slope: np.ndarray, hessian: np.ndarray) -> Grid:
    """The grid with the scale that is best for the q, [rows, n], of a group, all other groups as they are."""
    steps = q if grid.zero is None else q - grid.zero
    curvature = (steps * (hessian @ steps)).sum(axis=0)
    wanted = grid.scale + (steps * slope).sum(axis=0) / np.where(curvature > 0, curvature, 1)
    scale = bf16(wanted)
    # The error is a parabola over the scale: of two scales the one nearer to its bottom is better.
    better = (curvature > 0) & (scale >= SMALLEST_SCALE) & (np.abs(scale - wanted) < np.abs(grid.scale - wanted))
    return Grid(grid.bits, np.where(better, scale, grid.scale), grid.zero)
