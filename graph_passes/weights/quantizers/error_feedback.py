"""The loop of GPTQ and SparseGPT: settles one input after another, and those still to come make up for the error.

    H^-1 = U^T U with U upper triangular
    for i in order:    v_i = what is settled for w_i,    e = (w_i - v_i) / U_ii,    w_j -= U_ij e for all j > i

U_ii^2 is what is left of H^-1_ii once the inputs before i are settled, and row i of U over U_ii the update that
Optimal Brain Surgeon (Hassibi, Stork, 1993) makes of the inputs behind it; so ||XW - XV||^2 grows by e^2. By halves:
when the first half of some inputs is settled, it updates the second at once (GPTQ's "lazy batch-updates", section 3.3,
of all sizes), so that nearly all the work is in products of matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

BLOCK = 128  # inputs; a multiple of every group size
_LEAF = 8  # inputs that are settled one after the other

# choose(start, stop, W[start:stop] as it is by then): which of them are kept, bool [stop - start, n].
Choose = Callable[[int, int, np.ndarray], np.ndarray]
# settle(i, w_i, zero where it is not kept): v_i, float32 [n].
Settle = Callable[[int, np.ndarray], np.ndarray]


def settle_inputs(weights: np.ndarray, factor: np.ndarray, choose: Choose, settle: Settle, span: int = BLOCK) -> None:
    """Turns W, float32 [k, n], into V in place; factor: U, float32 [k, k].

    span: of inputs for which `choose` is asked at once, when those before are settled.
    """
    _Settling(weights, factor, choose, settle, span).run(0, len(weights))


class _Settling:
    def __init__(self, weights: np.ndarray, factor: np.ndarray, choose: Choose, settle: Settle, span: int) -> None:
        self._weights, self._factor, self._span = weights, factor, span
        self._choose, self._settle = choose, settle
        self._errors = np.empty_like(weights)
        self._kept = np.empty((0, 0), bool)
        self._first = self._last = 0  # inputs of _kept

    def run(self, start: int, stop: int) -> None:
        """Settles these inputs; those before have updated them."""
        weights, factor, errors = self._weights, self._factor, self._errors
        if stop - start <= self._span and start >= self._last:
            self._kept, self._first, self._last = self._choose(start, stop, weights[start:stop]), start, stop
        if stop - start > min(_LEAF, self._span):
            middle = start + _half(stop - start, self._span)
            self.run(start, middle)
            weights[middle:stop] -= factor[start:middle, middle:stop].T @ errors[start:middle]
            self.run(middle, stop)
            return
        for i in range(start, stop):
            value = self._settle(i, weights[i] * self._kept[i - self._first])
            np.divide(weights[i] - value, factor[i, i], out=errors[i])
            weights[i] = value
            if i + 1 < stop:
                weights[i + 1 : stop] -= factor[i, i + 1 : stop, None] * errors[i]


def _half(count: int, span: int) -> int:
    """About half of the inputs: whole spans, of more than one."""
    unit = span if count > span else 1
    return (count // unit + 1) // 2 * unit
