"""SparseGPT: prune input after input, and let later inputs compensate for the error.

Reference: Frantar, Alistarh: SparseGPT (ICML 2023, arXiv:2301.00774), algorithm 1. With damped H = X^T X, H^-1 = U^T U
and the loop of quantizers/error_feedback.py, pruning a weight adds (w / U_ii)^2 to ||XW - XV||^2. The mask is chosen
for 128 inputs at a time (M for N:M), once earlier inputs are processed: the weights with the smallest cost are pruned.
Inputs keep their order, as N:M requires.

For joint quantization, the paper rounds in the same loop (section 3.5). Here the loop without rounding chooses the
mask. GPTQ (quantizers/gptq.py) then quantizes V, the best weights under this mask (least_squares.py). That compensates
for both errors: for any Q with this mask, ||XW - XQ||^2 = ||XW - XV||^2 + ||XV - XQ||^2, with damping included.
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
    """Return V, float32 [k, n]. Weights of W that are zero stay zero.

    matrix: W, finite. hessian: damped H, float64 [k, k]. Patterns N:M ignore `sparsity`.

    Raises:
        numpy.linalg.LinAlgError: H is not positive definite.
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
    """Prune like `sparsegpt`, jointly with quantization."""
    pruned = sparsegpt(matrix, hessian, pattern, sparsity)
    kept = pruned != 0
    return gptq(repair(matrix, pruned, kept, hessian), prepare(hessian), quantization, kept=kept)
