"""GPTQ: rounds one input after another, and lets the inputs that are still to come make up for the error.

Frantar, Ashkboos, Hoefler, Alistarh: GPTQ (ICLR 2023, arXiv:2210.17323), algorithm 1. It minimizes ||XW - XV||^2 over V
on the grid, for inputs X [rows, k], greedily in a fixed order of inputs, by the inverse of the Hessian:

    H = X^T X + damping mean(diag(X^T X)) I,        H^-1 = U^T U with U upper triangular
    for i in order:    v_i = round(w_i),    e = (w_i - v_i) / U_ii,    w_j -= U_ij e for all j > i

(A factor of H cancels, so the paper's 2 X X^T is X^T X here.) Row i of U holds what input i tells those behind it: by
the lower factor, or with i and j swapped, the error spreads to where it cannot be made up for. Blocks of 128 inputs
update the rest of W at once ("lazy batch-updates", section 3.3).

Grids. Without act_order, that of a group is fitted when its first input is reached, to the weights as they are updated
by then, and kept. With act_order, inputs go by falling H_ii, so a group's weights are not updated together: all grids
are fitted to W beforehand, and still belong to runs of neighbouring inputs (no g_idx is stored). So are those of
whole columns.

Weights that are zero stay zero; what the updates would have made of them counts as rounding error and is passed on, as
in SparseGPT (Frantar, Alistarh, ICML 2023, section 3.3), so that pruned layers keep their pattern. The error of pruning
itself is not made up for: the target is W as it is given.
"""

from __future__ import annotations

import numpy as np

from .grid import Grid, Quantization, Rounded, fit_grid

_BLOCK = 128  # a multiple of every group size


def gptq(
    matrix: np.ndarray, hessian: np.ndarray, quantization: Quantization, damping: float = 0.01, act_order: bool = False
) -> Rounded:
    """W, float32 [k, n], finite, for inputs with hessian = X^T X, float [k, k], finite.

    Works on a copy of W, and on float64 copies of the Hessian. Raises numpy.linalg.LinAlgError if the damped Hessian is
    not positive definite.
    """
    k, n = matrix.shape
    rows = quantization.rows(k)
    result = Rounded.empty(k, n, quantization)
    order = np.argsort(-hessian.diagonal(), kind="stable") if act_order else np.arange(k)
    weights = matrix[order]
    kept = weights != 0
    factor = inverse_factor(hessian[np.ix_(order, order)] if act_order else hessian, damping)
    grids: list[Grid] = []
    if act_order or quantization.group_size is None:
        grids = [fit_grid(matrix[start : start + rows], quantization) for start in range(0, k, rows)]
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        errors = np.empty((stop - start, n), np.float32)
        for i in range(start, stop):
            group = int(order[i]) // rows
            if group == len(grids):
                grids.append(fit_grid(weights[i : i + rows] * kept[i : i + rows], quantization))
            grid = grids[group]
            q = grid.round(weights[i] * kept[i])
            result.q[order[i]] = q
            error = np.divide(weights[i] - grid.weights(q), factor[i, i], out=errors[i - start])
            weights[i + 1 : stop] -= np.outer(factor[i, i + 1 : stop], error)
        weights[stop:] -= factor[start:stop, stop:].T @ errors
    for group, grid in enumerate(grids):
        grid.store(result, group)
    return result


def inverse_factor(hessian: np.ndarray, damping: float) -> np.ndarray:
    """U, float32 [k, k] upper triangular, with U^T U = c (H + damping mean(diag H) I)^-1 for some number c > 0."""
    scaled = hessian.astype(np.float64)
    mean = scaled.diagonal().mean()
    if mean == 0:  # no input was ever seen
        return np.eye(len(scaled), dtype=np.float32)
    scaled /= mean
    scaled[np.diag_indices_from(scaled)] += damping
    # H = R R^T with R upper triangular, by a Cholesky factor from the other end; U = R^-1, without inverting H itself.
    upper = np.linalg.cholesky(scaled[::-1, ::-1])[::-1, ::-1]
    return np.linalg.inv(upper).astype(np.float32)
