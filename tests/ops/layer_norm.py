"""Check LayerNormalization results against the error bound of ops/epilogue/layer_norm.h; random weights and biases."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .single_node import U

Floats = NDArray[np.float32]


def assert_normalized(y: Floats, x: Floats, weight: Floats, bias: Floats, epsilon: float) -> None:
    """Check that y is the LayerNormalization of x within the bound, for finite values, |x| <= 2^60, epsilon >= 2^-60.

    All arrays are float32.
    """
    n = x.shape[1]
    wide = x.astype(np.float64)
    d = wide - wide.mean(axis=1, keepdims=True)
    # Subtract the mean twice, because the first mean is rounded.
    d -= d.mean(axis=1, keepdims=True)
    s = np.sqrt((d * d).mean(axis=1, keepdims=True) + np.float64(np.float32(epsilon)))
    p = d / s
    exact = p * weight + bias
    c = (n / 4 + 16) * U
    t = c + (U + c * c) * np.abs(wide).mean(axis=1, keepdims=True) / s
    bound = np.abs(weight) * (t + np.abs(p) * (t * t / 2 + c)) + 2 * U * np.abs(exact) + 2.0**-126
    assert y.dtype == np.float32 and y.shape == x.shape
    error = np.abs(y - exact)
    assert (error <= bound).all(), f"largest error over its bound: {np.max(error / bound)}"


def random_vectors(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    return rng.standard_normal(n, dtype=np.float32) + 1, rng.standard_normal(n, dtype=np.float32)
