"""GPTQ: rounds one input after another, and lets the inputs that are still to come make up for the error.

Frantar, Ashkboos, Hoefler, Alistarh: GPTQ (ICLR 2023, arXiv:2210.17323), algorithm 1. It minimizes ||XW - XV||^2 over V
on the grid, for inputs X [rows, k], greedily in a fixed order of inputs, by the inverse of the Hessian:

    H = X^T X / mean(diag(X^T X)) + damping I,        H^-1 = U^T U with U upper triangular
    for i in order:    v_i = round(w_i),    e = (w_i - v_i) / U_ii,    w_j -= U_ij e for all j > i

(A factor of H cancels, so the paper's 2 X X^T is X^T X here.) Row i of U holds what input i tells those behind it: by
the lower factor, or with i and j swapped, the error spreads to where it cannot be made up for. The loop is in
error_feedback.py. Three things are chosen with more care than in the paper:

Order. hessian.py, choose_order; without act_order, inputs go as they stand.

Grids. All are searched for W beforehand (mse.py), so that they may belong to runs of neighbouring inputs in any
order (no g_idx is stored). ||XW - XV||^2 comes to the sum of (w_i - v_i)^2 / U_ii^2 over the updated w, so 1 / U_ii^2
is the importance of input i.

Refinement. The greedy choice looks ahead but not back. So afterwards, a few times over: the scale, and the minimum, of
each group becomes the best one for its q (least squares under H), and each weight is rounded anew, with all others as
they are by then (coordinate descent, as in QuantEase: Behdin et al., arXiv:2309.01885). Each step lowers
||XW - XV||^2, or changes nothing.

What depends on the inputs alone, Prepared, is made once for all layers with the same inputs, such as query, key and
value.

What each of the three gains: docs/verification.md.

Weights that are zero stay zero; what the updates would have made of them counts as rounding error and is passed on, as
in SparseGPT (Frantar, Alistarh, ICML 2023, section 3.3), so that pruned layers keep their pattern. The error of pruning
itself is not made up for: the target is W as it is given (pruners/sparsegpt.py sees to that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .error_feedback import BLOCK, settle_inputs
from .grid import SMALLEST_SCALE, Grid, Quantization, QuantizedMatrix, fit_grid
from .hessian import best_damping, choose_order, inverse_factor, sampled
from .mse import mse_grid

_COLUMNS = 2048  # that are rounded together
_SWEEPS = 2
_LEAF = 16  # inputs that coordinate descent takes one after the other


@dataclass(frozen=True)
class Prepared:
    """Of a damped Hessian."""

    hessian: np.ndarray  # float32 [k, k]
    order: np.ndarray  # int [k]
    factor: np.ndarray  # U, float32 [k, k], of the inputs in that order

    @property
    def importance(self) -> np.ndarray:
        """Of the inputs as they stand, float32 [k]."""
        result = np.empty(len(self.order), np.float32)
        result[self.order] = self.factor.diagonal() ** -2.0
        return result


def prepare(hessian: np.ndarray, act_order: bool = True) -> Prepared:
    """hessian: damped, float64 [k, k], or float32. Raises numpy.linalg.LinAlgError if it is not positive definite."""
    order = choose_order(hessian) if act_order else np.arange(len(hessian))
    factor = inverse_factor(hessian[np.ix_(order, order)] if act_order else hessian)
    return Prepared(hessian.astype(np.float32, copy=False), order, factor)


def choose_damping(matrices: Sequence[np.ndarray], halves: np.ndarray, quantization: Quantization) -> float:
    """best_damping for weights that are rounded.

    matrices: of layers with the same inputs. halves: X^T X of each half of the inputs, float [2, k, k].
    """

    def fit(sample: np.ndarray, hessian: np.ndarray) -> np.ndarray:
        k, rows = len(sample), quantization.rows(len(sample))
        grids = [fit_grid(sample[start : start + rows], quantization) for start in range(0, k, rows)]
        prepared = prepare(hessian, act_order=False)
        q = _round(sample, sample != 0, grids, rows, prepared)
        return np.concatenate([grid.weights(q[g * rows : (g + 1) * rows]) for g, grid in enumerate(grids)])

    return best_damping(sampled(matrices), halves, fit)


def gptq(
    matrix: np.ndarray,
    prepared: Prepared,
    quantization: Quantization,
    sweeps: int = _SWEEPS,
    kept: np.ndarray | None = None,
) -> QuantizedMatrix:
    """W, float32 [k, n], finite, for inputs with the Hessian that was prepared.

    kept: bool [k, n], which weights may be other than zero; None: those that are now.
    """
    k, n = matrix.shape
    rows = quantization.rows(k)
    result = QuantizedMatrix.empty(k, n, quantization)
    importance = prepared.importance
    for first in range(0, n, _COLUMNS):
        columns = slice(first, first + _COLUMNS)
        part = np.ascontiguousarray(matrix[:, columns])
        mask = part != 0 if kept is None else kept[:, columns]
        grids = [
            mse_grid(part[start : start + rows], importance[start : start + rows], quantization)
            for start in range(0, k, rows)
        ]
        q = _round(part, mask, grids, rows, prepared)
        if sweeps:
            _refine(part, mask, q, grids, quantization, prepared.hessian, sweeps)
        result.q[:, columns] = q
        for group, grid in enumerate(grids):
            grid.store(result, group, columns)

    return result


def _round(matrix: np.ndarray, kept: np.ndarray, grids: list[Grid], rows: int, prepared: Prepared) -> np.ndarray:
    """q, as float32 [k, n], by the algorithm at the top of this file."""
    q = np.empty(matrix.shape, np.float32)
    order = prepared.order
    mask = kept[order]

    def settle(i: int, row: np.ndarray) -> np.ndarray:
        grid = grids[order[i] // rows]
        q[order[i]] = grid.round(row)
        value: np.ndarray = grid.weights(q[order[i]])
        return value

    settle_inputs(matrix[order], prepared.factor, lambda start, stop, weights: mask[start:stop], settle)
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
    """Makes q, float32 [k, n], and the grids better in place. hessian: damped, float32."""
    k = len(q)
    rows = quantization.rows(k)
    values = np.concatenate([grid.weights(q[g * rows : (g + 1) * rows]) for g, grid in enumerate(grids)])
    slope = hessian @ (matrix - values)  # H (W - V): where it is positive, a larger v is better
    for _ in range(sweeps):
        for start in range(0, k, BLOCK):
            inside = slice(start, min(start + BLOCK, k))
            block = hessian[inside, inside]
            before = values[inside].copy()
            near = slope[inside].copy()  # is kept up to date inside of the block
            for first in range(inside.start, inside.stop, _LEAF):
                group = first // rows
                if first % rows == 0 and quantization.group_size is not None:
                    part = slice(first, min(first + rows, k))
                    within = slice(part.start - start, part.stop - start)
                    grids[group] = _refit(grids[group], q[part], near[within], block[within, within], quantization)
                    step = grids[group].weights(q[part]) - values[part]
                    near -= block[:, within] @ step
                    values[part] += step
                leaf = slice(first, min(first + _LEAF, inside.stop))
                within = slice(leaf.start - start, leaf.stop - start)
                steps = _descend(
                    q[leaf], values[leaf], near[within].copy(), kept[leaf], grids[group], block[within, within]
                )
                near -= block[:, within] @ steps
            slope -= hessian[:, inside] @ (values[inside] - before)


def _descend(
    q: np.ndarray, values: np.ndarray, slope: np.ndarray, kept: np.ndarray, grid: Grid, hessian: np.ndarray
) -> np.ndarray:
    """Rounds a few inputs of a group anew, one after the other, q and values in place; what it adds to the values."""
    steps = np.empty_like(values)
    for i in range(len(q)):
        best = values[i] + slope[i] / hessian[i, i]
        q[i] = grid.round(best * kept[i])
        new = grid.weights(q[i])
        np.subtract(new, values[i], out=steps[i])
        values[i] = new
        slope[i + 1 :] -= hessian[i + 1 :, i, None] * steps[i]
    return steps


def _refit(grid: Grid, q: np.ndarray, slope: np.ndarray, hessian: np.ndarray, quantization: Quantization) -> Grid:
    """The grid with the scale, and the minimum, that are best for the q, [rows, n], of a group; others stay."""
    steps = q if grid.zero is None else q - grid.zero
    curved = hessian @ steps
    curvature = np.einsum("in,in->n", steps, curved)
    gain = np.einsum("in,in->n", steps, slope)
    if grid.minimum is None:
        wanted = grid.scale + gain / np.where(curvature > 0, curvature, 1)
        scale = quantization.short(wanted)
        # The error is a parabola over the scale: of two scales the one nearer to its bottom is better.
        better = (
            (curvature > 0) & (np.abs(scale) >= SMALLEST_SCALE) & (np.abs(scale - wanted) < np.abs(grid.scale - wanted))
        )
        return Grid(grid.bits, np.where(better, scale, grid.scale), grid.zero)
    across, raised, offset_gain = curved.sum(axis=0), np.float32(hessian.sum()), slope.sum(axis=0)
    determinant = curvature * raised - across * across
    fits = determinant > 1e-6 * curvature * raised
    divisor = np.where(fits, determinant, 1)
    scale = quantization.short(grid.scale + (raised * gain - across * offset_gain) / divisor)
    more = scale - grid.scale
    minimum = quantization.short(grid.minimum + (offset_gain - across * more) / raised)
    up = minimum - grid.minimum
    change = more * (more * curvature - 2 * gain) + up * (up * raised + 2 * more * across - 2 * offset_gain)
    better = fits & (change < 0) & (np.abs(scale) >= SMALLEST_SCALE)
    return Grid(grid.bits, np.where(better, scale, grid.scale), None, np.where(better, minimum, grid.minimum))
