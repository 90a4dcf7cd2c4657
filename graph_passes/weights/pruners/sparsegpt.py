"""SparseGPT: sets weights to zero input after input, and lets the inputs that are still to come make up for it.

Frantar, Alistarh: SparseGPT (ICML 2023, arXiv:2301.00774), algorithm 1. With H = X^T X, damped, H^-1 = U^T U and the
loop of quantizers/error_feedback.py, a weight that goes costs (w / U_ii)^2 of ||XW - XV||^2: of 128 inputs at once (of
M for N:M), all that is settled before them included, those go that cost least. Inputs stay in the order in which they
stand, which N:M needs.

Jointly with quantization the paper rounds in the same loop (section 3.5). Here the mask comes from the loop without
rounding; V, the best weights under it (least_squares.py), stand for the dense ones from then on: for any Q of that
mask, ||XW - XQ||^2 = ||XW - XV||^2 + ||XV - XQ||^2, damping included. So GPTQ of V (quantizers/gptq.py) makes
up for both.
"""

from __future__ import annotations

import numpy as np

from ..quantizers.error_feedback import settle_inputs
from ..quantizers.gptq import gptq, prepare
from ..quantizers.grid import Quantization, QuantizedMatrix
from ..quantizers.hessian import inverse_factor
from .least_squares import repair
from .masks import Pattern, keep_in_groups, keep_largest, share_out, unit_scores


def sparsegpt(matrix: np.ndarray, hessian: np.ndarray, pattern: Pattern, sparsity: float) -> np.ndarray:
    """V, float32 [k, n], of W, float32 [k, n], finite; weights of W that are zero stay zero.

    hessian: damped, float64 [k, k]. sparsity: of the units of the pattern; N:M takes its own.
    Raises numpy.linalg.LinAlgError if H is not positive definite.
    """
    factor = inverse_factor(hessian)
    importance = factor.diagonal()[:, None] ** -2.0
    alive = matrix != 0
    starts = range(0, len(matrix), pattern.span)
    units_alive = [
        np.count_nonzero(unit_scores(part, part, pattern.outputs) >= 0)
        for part in (alive[start : start + pattern.span] for start in starts)
    ]
    sizes = [pattern.units(len(alive[start : start + pattern.span]), matrix.shape[1]) for start in starts]
    counts = share_out(np.array(units_alive), np.array(sizes), sparsity)

    def choose(start: int, stop: int, weights: np.ndarray) -> np.ndarray:
        costs = weights * weights * importance[start:stop]
        if pattern.of:
            return keep_in_groups(costs, alive[start:stop], pattern)
        return keep_largest(costs, alive[start:stop], pattern, int(counts[start // pattern.span]))

    values = matrix.copy()
    settle_inputs(values, factor, choose, lambda i, row: row, pattern.span)
    return values


def sparsegpt_rounded(
    matrix: np.ndarray, hessian: np.ndarray, pattern: Pattern, sparsity: float, quantization: Quantization
) -> QuantizedMatrix:
    """The same, jointly with rounding."""
    pruned = sparsegpt(matrix, hessian, pattern, sparsity)
    kept = pruned != 0
    return gptq(repair(matrix, pruned, kept, hessian), prepare(hessian), quantization, kept=kept)
