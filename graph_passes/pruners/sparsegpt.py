"""SparseGPT: sets weights to zero input after input, and lets the inputs that are still to come make up for it.

Frantar, Alistarh: SparseGPT (ICML 2023, arXiv:2301.00774), algorithm 1. With H = X^T X, damped, H^-1 = U^T U and the
loop of quantizers/error_feedback.py, a weight that goes costs (w / U_ii)^2 of ||XW - XV||^2: of 128 inputs at once (of
M for N:M), all that is settled before them included, those go that cost least. Inputs stay in the order in which they
stand, which N:M needs.

Jointly with quantization the paper rounds in the same loop (section 3.5). Here the mask comes from the loop without
rounding; a second one then starts from the dense W again and settles each input at its rounded value, or at zero, so
that one update makes up for both errors. Grids are fitted to what the first loop left of the weights, inputs are taken
in GPTQ's order, and GPTQ's refinement ends it (quantizers/gptq.py).
"""

from __future__ import annotations

import numpy as np

from ..quantizers.error_feedback import settle_inputs
from ..quantizers.gptq import gptq_of
from ..quantizers.grid import Quantization, Rounded
from ..quantizers.hessian import inverse_factor
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
) -> Rounded:
    """The same, jointly with rounding."""
    pruned = sparsegpt(matrix, hessian, pattern, sparsity)
    return gptq_of(matrix, hessian, quantization, kept=pruned != 0, fit_to=pruned)
