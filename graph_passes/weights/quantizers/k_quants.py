"""Round weights to GGUF's Q6_K (ops/formats/k_quant.h): W = scale step (q - 32), with an 8-bit step per 16 inputs.

The scale of a subgroup is the best of several: each maps the largest weight to about -32, the end of the range, and is
then fitted by least squares. The scale of a group maps the largest of these to the step -128.
"""

from __future__ import annotations

import numpy as np

from .grid import GROUPS_OF_SUBGROUPS, SUBGROUP_SIZES, Quantization, QuantizedMatrix, half

_ZERO = 32
Q6_K = Quantization(6, GROUPS_OF_SUBGROUPS[-1], subgroup_size=SUBGROUP_SIZES[0], k_quant_zero=_ZERO)
_LARGEST = (-32, -31.5, -31, -30, -33, -34)  # q - 32 of the largest weight, as tried
_STEPS = 128
_COLUMNS = 512  # columns rounded together, so that arrays fit the caches


def round_to_q6_k(matrix: np.ndarray) -> QuantizedMatrix:
    """Quantize W, float32 [k, n], finite."""
    k, n = matrix.shape
    groups, subgroups = Q6_K.groups(k), Q6_K.grids(k)
    result = QuantizedMatrix(
        np.empty((k, n), np.uint8),
        np.empty((groups, n), np.float32),
        None,
        subgroup_scales=np.empty((subgroups, n), np.int8),
    )
    assert result.subgroup_scales is not None
    rows, size = Q6_K.rows(k), Q6_K.grid_rows(k)
    for group in range(groups):
        inputs = slice(group * rows, min((group + 1) * rows, k))
        steps = slice(inputs.start // size, -(-inputs.stop // size))
        for first in range(0, n, _COLUMNS):
            columns = slice(first, first + _COLUMNS)
            part = matrix[inputs, columns]
            padded = np.zeros((steps.stop - steps.start, size, part.shape[1]), np.float32)
            padded.reshape(-1, part.shape[1])[: len(part)] = part
            scale, step, q = _rounded(padded)
            result.scales[group, columns], result.subgroup_scales[steps, columns] = scale, step
            result.q[inputs, columns] = q.reshape(-1, part.shape[1])[: len(part)]
    return result


def _rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scales [n], steps [subgroups, n] and q of W, float32 [subgroups, inputs, n]."""
    widths = _widths(x)
    ends = np.take_along_axis(widths, np.abs(widths).argmax(axis=0)[None], axis=0)[0]
    scale = half(ends / np.float32(-_STEPS))
    step = np.clip(np.rint(widths / np.where(scale != 0, scale, 1)), -_STEPS, _STEPS - 1)
    return scale, step.astype(np.int8), (_nearest(x, scale * step) + _ZERO).astype(np.uint8)


def _widths(x: np.ndarray) -> np.ndarray:
    """Return the best scale found for each subgroup, [subgroups, n]."""
    high, low = x.max(axis=1), x.min(axis=1)
    largest = np.where(high > -low, high, low)
    best, least = np.zeros_like(largest), np.full_like(largest, np.inf)
    for end in _LARGEST:
        q = _nearest(x, largest / np.float32(end))
        squares = np.square(q).sum(axis=1)
        width = (q * x).sum(axis=1) / np.maximum(squares, 1)
        loss = np.square(x - q * width[:, None]).sum(axis=1)
        better = loss < least
        np.copyto(best, width, where=better)
        np.copyto(least, loss, where=better)
    found: np.ndarray = best
    return found


def _nearest(x: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Return q - 32, float32, for scales [subgroups, n]."""
    with np.errstate(over="ignore"):  # infinity becomes the last q
        q: np.ndarray = np.rint(x / np.where(width != 0, width, 1)[:, None])
    np.clip(q, -_ZERO, _ZERO - 1, out=q)
    return q
