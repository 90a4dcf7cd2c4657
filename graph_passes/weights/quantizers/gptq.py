"""GPTQ: round one input after another, and let later inputs compensate for the error.

Reference: Frantar, Ashkboos, Hoefler, Alistarh: GPTQ (ICLR 2023, arXiv:2210.17323), algorithm 1. It minimizes ||XW -
XV||^2 over V on the grid, for inputs X [rows, k], greedily in a fixed order of inputs, with the inverse of the Hessian:

    H = X^T X / mean(diag(X^T X)) + damping I,        H^-1 = U^T U with U upper triangular
    for i in order:    v_i = round(w_i),    e = (w_i - v_i) / U_ii,    w_j -= U_ij e for all j > i

The loop is in error_feedback.py. A factor of H cancels, so X^T X replaces the paper's 2 X X^T. Row i of U holds the
update of later inputs; the lower factor, or swapped i and j, would move the error to inputs that are already rounded.
Three choices differ from the paper (their gains are in docs/verification.md):

Order: choose_order in hessian.py. Without act_order, inputs keep their order.

Grids: all grids are fitted to W beforehand (mse.py, subgroups.py), so groups are runs of neighbouring inputs in any
order, and no g_idx is stored. The importance of input i is 1 / U_ii^2, because ||XW - XV||^2 is the sum of (w_i -
v_i)^2 / U_ii^2 over the updated w.

Refinement: the greedy loop does not revise earlier inputs. So a few sweeps follow: each group gets the best scale (and
minimum) for its q, by least squares under H, while zero points and the steps of subgroups stay; then each weight is
rounded again with all others fixed (coordinate descent, as in QuantEase: Behdin et al., arXiv:2309.01885). No step
increases ||XW - XV||^2.

Zero weights stay zero. Their updates count as rounding error and are passed on, as in SparseGPT (Frantar, Alistarh,
ICML 2023, section 3.3), so pruned layers keep their pattern. The error of pruning itself is not compensated, because
the target is the given W (pruners/sparsegpt.py does that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .error_feedback import BLOCK, settle_inputs
from .grid import SMALLEST_SCALE, Grid, Quantization, QuantizedMatrix, fit_grids
from .hessian import best_damping, choose_order, inverse_factor, sampled
from .mse import mse_grids

_COLUMNS = 2048  # number of columns rounded together
_SWEEPS = 2
_LEAF = 16  # number of inputs in a block of coordinate descent


@dataclass(frozen=True)
class Prepared:
    """A damped Hessian, prepared for `gptq` once for all layers with the same inputs, such as query, key and value."""

    hessian: np.ndarray  # float32 [k, k]
    order: np.ndarray  # order of the inputs, int [k]
    factor: np.ndarray  # U, float32 [k, k], for the inputs in that order

    @property
    def importance(self) -> np.ndarray:
        """Return the importance of the inputs in their stored order, float32 [k]."""
        result = np.empty(len(self.order), np.float32)
        result[self.order] = self.factor.diagonal() ** -2.0
        return result


def prepare(hessian: np.ndarray, act_order: bool = True) -> Prepared:
    """Prepare a damped Hessian, float64 or float32 [k, k].

    Raises:
        numpy.linalg.LinAlgError: it is not positive definite.
    """
    order = choose_order(hessian) if act_order else np.arange(len(hessian))
    factor = inverse_factor(hessian[np.ix_(order, order)] if act_order else hessian)
    return Prepared(hessian.astype(np.float32, copy=False), order, factor)


def choose_damping(matrices: Sequence[np.ndarray], halves: np.ndarray, quantization: Quantization) -> float:
    """Return the best damping for the weights of layers with the same inputs.

    halves: X^T X of each half of the inputs, float [2, k, k].
    """

    def fit(sample: np.ndarray, hessian: np.ndarray) -> np.ndarray:
        k, rows = len(sample), quantization.rows(len(sample))
        grids = [grid for start in range(0, k, rows) for grid in fit_grids(sample[start : start + rows], quantization)]
        prepared = prepare(hessian, act_order=False)
        q = _round(sample, sample != 0, grids, quantization.grid_rows(k), prepared)
        return _values(q, grids, quantization.grid_rows(k))

    return best_damping(sampled(matrices), halves, fit)


def gptq(
    matrix: np.ndarray,
    prepared: Prepared,
    quantization: Quantization,
    sweeps: int = _SWEEPS,
    kept: np.ndarray | None = None,
) -> QuantizedMatrix:
    """Quantize W (`matrix`, float32 [k, n], finite) for inputs with the prepared Hessian.

    sweeps: number of refinements. kept: mask of weights that may be nonzero, bool [k, n]; None: the nonzero weights.
    """
    k, n = matrix.shape
    rows, grid_rows = quantization.rows(k), quantization.grid_rows(k)
    result = QuantizedMatrix.empty(k, n, quantization)
    importance = prepared.importance
    for first in range(0, n, _COLUMNS):
        columns = slice(first, first + _COLUMNS)
        part = np.ascontiguousarray(matrix[:, columns])
        mask = part != 0 if kept is None else kept[:, columns]
        grids = [
            grid
            for start in range(0, k, rows)
            for grid in mse_grids(part[start : start + rows], importance[start : start + rows], quantization)
        ]
        q = _round(part, mask, grids, grid_rows, prepared)
        if sweeps:
            _refine(part, mask, q, grids, quantization, prepared.hessian, sweeps)
        result.q[:, columns] = q
        for number, grid in enumerate(grids):
            subgroup = None if quantization.subgroup_size is None else number
            grid.store(result, number * grid_rows // rows, columns, subgroup)

    return result


def _values(q: np.ndarray, grids: Sequence[Grid], rows: int) -> np.ndarray:
    """Return the dequantized weights of q [k, n], float32. rows: inputs of a grid."""
    return np.concatenate([grid.weights(q[g * rows : (g + 1) * rows]) for g, grid in enumerate(grids)])


def _round(matrix: np.ndarray, kept: np.ndarray, grids: list[Grid], rows: int, prepared: Prepared) -> np.ndarray:
    """Return q as float32 [k, n], with the loop described at the top of this file. rows: inputs of a grid."""
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
    """Improve q, float32 [k, n], and the grids in place. hessian: damped, float32."""
    k = len(q)
    rows, grid_rows = quantization.rows(k), quantization.grid_rows(k)
    span = BLOCK if quantization.group_size is None else max(BLOCK, rows)  # a multiple of every group size
    values = _values(q, grids, grid_rows)
    slope = hessian @ (matrix - values)  # H (W - V): positive where a larger v is better
    for _ in range(sweeps):
        for start in range(0, k, span):
            inside = slice(start, min(start + span, k))
            block = hessian[inside, inside]
            before = values[inside].copy()
            near = slope[inside].copy()  # updated within the block; `slope` only after it
            for first in range(inside.start, inside.stop, _LEAF):
                if first % rows == 0 and quantization.group_size is not None:
                    part = slice(first, min(first + rows, k))
                    within = slice(part.start - start, part.stop - start)
                    own = slice(first // grid_rows, -(-part.stop // grid_rows))
                    grids[own] = _refit(grids[own], q[part], near[within], block[within, within], quantization)
                    step = _values(q[part], grids[own], grid_rows) - values[part]
                    near -= block[:, within] @ step
                    values[part] += step
                leaf = slice(first, min(first + _LEAF, inside.stop))
                within = slice(leaf.start - start, leaf.stop - start)
                steps = _descend(
                    q[leaf],
                    values[leaf],
                    near[within].copy(),
                    kept[leaf],
                    grids[first // grid_rows],
                    block[within, within],
                )
                near -= block[:, within] @ steps
            slope -= hessian[:, inside] @ (values[inside] - before)


def _descend(
    q: np.ndarray, values: np.ndarray, slope: np.ndarray, kept: np.ndarray, grid: Grid, hessian: np.ndarray
) -> np.ndarray:
    """Round a few inputs of a group again, one by one, in place (q, values). Return the change of the values."""
    steps = np.empty_like(values)
    for i in range(len(q)):
        best = values[i] + slope[i] / hessian[i, i]
        q[i] = grid.round(best * kept[i])
        new = grid.weights(q[i])
        np.subtract(new, values[i], out=steps[i])
        values[i] = new
        slope[i + 1 :] -= hessian[i + 1 :, i, None] * steps[i]
    return steps


def _refit(
    grids: list[Grid], q: np.ndarray, slope: np.ndarray, hessian: np.ndarray, quantization: Quantization
) -> list[Grid]:
    """Return the grids of a group with the best scale (and minimum) for q [rows, n]. Zero points and steps are kept."""
    grid = grids[0]
    if grid.step is not None:
        units = [replace(one, scale=np.ones(1, np.float32)) for one in grids]
        steps = _values(q, units, quantization.grid_rows(len(q)))
    else:
        steps = q if grid.zero is None else q - grid.zero
    curved = hessian @ steps
    curvature = np.einsum("in,in->n", steps, curved)
    gain = np.einsum("in,in->n", steps, slope)
    if grid.minimum is None:
        wanted = grid.scale + gain / np.where(curvature > 0, curvature, 1)
        scale = quantization.short(wanted)
        # The error is a parabola in the scale: the scale closer to its minimum is better.
        better = (
            (curvature > 0) & (np.abs(scale) >= SMALLEST_SCALE) & (np.abs(scale - wanted) < np.abs(grid.scale - wanted))
        )
        return [replace(one, scale=np.where(better, scale, grid.scale)) for one in grids]
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
    return [replace(grid, scale=np.where(better, scale, grid.scale), minimum=np.where(better, minimum, grid.minimum))]
