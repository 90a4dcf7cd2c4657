"""AWQ: quantize important inputs more finely, by scaling them in the layer and dividing in the previous layer.

Reference: Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan, Han: AWQ (MLSys 2024, arXiv:2306.00978), section 3.2.
Since XW = (X diag(s)^-1) (diag(s) W), a large s gives the rounding error of diag(s) W less weight. With x_i the mean
magnitude of input i,

    s = x^a / sqrt(max(x^a) min(x^a)),    a in {0, 1/20, …, 19/20} with the least sum ||XW - (X / s) round(s W)||^2

over all layers W that read X. a = 0 gives plain rounding. Weights are not clipped (the paper's second search).
passes/quantize/fold_scales.py folds the division by s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .grid import Quantization, dequantize, round_to_nearest

_STEPS = 20
_MIN_MAGNITUDE = 1e-4  # lower bound, relative to the largest mean magnitude: keeps scales of all-zero inputs finite


def search_scales(
    x: np.ndarray, matrices: Sequence[np.ndarray], quantization: Quantization
) -> tuple[np.ndarray, float, float]:
    """Search the scales of the inputs `x`, float32 [rows, k], of layers with the weights `matrices`, float32 [k, n].

    Returns:
        s, float32 [k], and the sum of squared errors with s and without scaling.
    """
    magnitude = np.abs(x).mean(axis=0)
    magnitude = np.maximum(magnitude, magnitude.max() * np.float32(_MIN_MAGNITUDE))
    best, least, plain = np.ones(x.shape[1], np.float32), np.inf, np.inf
    products = [x @ matrix for matrix in matrices]
    for step in range(_STEPS if magnitude.max() > 0 else 1):
        scales = magnitude ** np.float32(step / _STEPS) if step else best
        scales = scales / np.sqrt(scales.max() * scales.min())
        error = 0.0
        for matrix, product in zip(matrices, products, strict=True):
            rounded = round_to_nearest(matrix * scales[:, None], quantization)
            weights = dequantize(rounded, quantization.group_size, quantization.subgroup_size)
            difference = (x / scales) @ weights - product
            error += float(np.vdot(difference, difference))
        if step == 0:
            plain = error
        if error < least:
            best, least = scales, error
    return best, least, plain
