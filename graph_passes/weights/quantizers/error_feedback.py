"""The loop of GPTQ and SparseGPT: settle (round or prune) input after input, and let later inputs compensate.

    H^-1 = U^T U with U upper triangular
    for i in order:    v_i = the settled w_i,    e = (w_i - v_i) / U_ii,    w_j -= U_ij e for all j > i

||XW - XV||^2 grows by e^2: U_ii^2 is the conditional H^-1_ii after the inputs before i are settled, and row i of U over
U_ii is the update of later inputs by Optimal Brain Surgeon (Hassibi, Stork, 1993). The loop is recursive: once the
first half of a range is settled, one matrix product updates the second half (GPTQ's "lazy batch-updates", section 3.3,
at every size).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

BLOCK = 128  # default number of inputs whose mask is chosen at a time; a multiple of every group size
_LEAF = 8  # ranges of at most this many inputs are settled one input at a time

# choose(start, stop, current W[start:stop]): mask of the weights that are kept, bool [stop - start, n].
Choose = Callable[[int, int, np.ndarray], np.ndarray]
# settle(i, w_i with zeros where it is not kept): v_i, float32 [n].
Settle = Callable[[int, np.ndarray], np.ndarray]


def settle_inputs(weights: np.ndarray, factor: np.ndarray, choose: Choose, settle: Settle, span: int = BLOCK) -> None:
    """Replace W (`weights`, float32 [k, n]) with V in place.

    factor: U, float32 [k, k]. choose: chooses the mask of `span` inputs once the inputs before them are settled.
    """
    _Settling(weights, factor, choose, settle, span).run(0, len(weights))


class _Settling:
    def __init__(self, weights: np.ndarray, factor: np.ndarray, choose: Choose, settle: Settle, span: int) -> None:
        self._weights, self._factor, self._span = weights, factor, span
        self._choose, self._settle = choose, settle
        self._errors = np.empty_like(weights)
        self._kept = np.empty((0, 0), bool)
        self._first = self._last = 0  # range of inputs of _kept

    def run(self, start: int, stop: int) -> None:
        """Settle a range of inputs. The updates of all inputs before it have been applied."""
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
    """Return about half of the inputs: a multiple of the span, if there are several spans."""
    unit = span if count > span else 1
    return (count // unit + 1) // 2 * unit
