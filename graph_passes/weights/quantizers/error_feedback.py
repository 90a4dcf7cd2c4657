"""The loop of GPTQ and SparseGPT: settles one input after another, and those still to come make up for the error.

    H^-1 = U^T U with U upper triangular
    for i in order:    v_i = what is settled for w_i,    e = (w_i - v_i) / U_ii,    w_j -= U_ij e for all j > i

U_ii^2 is what is left of H^-1_ii once the inputs before i are settled, and row i of U over U_ii the update that
Optimal Brain Surgeon (Hassibi, Stork, 1993) makes of the inputs behind it; so ||XW - XV||^2 grows by e^2. Blocks of
inputs update the rest of W at once ("lazy batch-updates", GPTQ, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

BLOCK = 128  # inputs; a multiple of every group size

# choose(start, stop, W[start:stop] as it is by then): which of them are kept, bool [stop - start, n].
Choose = Callable[[int, int, np.ndarray], np.ndarray]
# settle(i, w_i, zero where it is not kept): v_i, float32 [n].
Settle = Callable[[int, np.ndarray], np.ndarray]


def settle_inputs(weights: np.ndarray, factor: np.ndarray, choose: Choose, settle: Settle, span: int = BLOCK) -> None:
    """Turns W, float32 [k, n], into V in place; factor: U, float32 [k, k].

    span: of inputs for which `choose` is asked at once, when those before are settled. At most BLOCK.
    """
    k, n = weights.shape
    block = BLOCK // span * span
    for start in range(0, k, block):
        stop = min(start + block, k)
        errors = np.empty((stop - start, n), np.float32)
        for i in range(start, stop):
            if (i - start) % span == 0:
                first, last = i, min(i + span, stop)
                kept = choose(first, last, weights[first:last])
            value = settle(i, weights[i] * kept[i - first])
            error = np.divide(weights[i] - value, factor[i, i], out=errors[i - start])
            weights[i] = value
            weights[i + 1 : stop] -= np.outer(factor[i, i + 1 : stop], error)
        weights[stop:] -= factor[start:stop, stop:].T @ errors
