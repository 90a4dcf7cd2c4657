"""Repair: adjust the kept weights to minimize the error of the layer's output, by least squares.

    ||XW - XV||^2 + damping ||W - V||^2    over V that are zero outside a mask, for each output

Conjugate gradients run for all outputs at once: a step costs one product with H = X^T X. An exact solution would cost
k^3 per output, as each has its own mask. Each step reduces the error, so a few suffice. The preconditioner is the
diagonal of H.
"""

from __future__ import annotations

import numpy as np

_STEPS = 64
_TOLERANCE = 1e-4  # iterations stop at this gradient norm, relative to the first one
_COLUMNS = 1024  # number of columns per batch


def repair(matrix: np.ndarray, values: np.ndarray, kept: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """Return V, float32 [k, n], from an initial V (`values`), the mask `kept`, bool [k, n], and the damped H."""
    precise = hessian.astype(np.float32)
    scale = 1 / precise.diagonal()[:, None]
    result = np.where(kept, values, np.float32(0))
    for start in range(0, matrix.shape[1], _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        _descend(matrix[:, columns], result[:, columns], kept[:, columns], precise, scale)
    return result


def _descend(matrix: np.ndarray, values: np.ndarray, kept: np.ndarray, hessian: np.ndarray, scale: np.ndarray) -> None:
    slope = np.where(kept, hessian @ (matrix - values), np.float32(0))
    scaled = scale * slope
    direction = scaled.copy()
    length = (slope * scaled).sum(axis=0)
    enough = length * np.float32(_TOLERANCE**2)
    for _ in range(_STEPS):
        active = length > enough
        if not active.any():
            return
        curved = np.where(kept, hessian @ direction, np.float32(0))
        curvature = (direction * curved).sum(axis=0)
        active &= curvature > 0
        step = np.where(active, length, 0) / np.where(active, curvature, 1)
        values += step * direction
        slope -= step * curved
        scaled = scale * slope
        after = (slope * scaled).sum(axis=0)
        direction *= np.where(active, after, 0) / np.where(active, length, 1)
        direction += np.where(active, scaled, 0)
        length = np.where(active, after, 0)
