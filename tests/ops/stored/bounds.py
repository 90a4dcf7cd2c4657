"""Error bounds of float32 outputs, as the operators' headers document them, computed in float64.

A Product holds the output of a linear layer before its epilogue, and the largest error of each element.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

U = 2.0**-24
SMALLEST = 2.0**-126  # below this, float32 has fewer significant bits


@dataclass(frozen=True)
class Product:
    value: Doubles  # rows of x with Inf or NaN count as zeros
    error: Doubles

    def plus(self, other: np.ndarray) -> Product:
        """Return the bound after adding a bias or residual, rounded once."""
        total = self.value + other
        return Product(total, self.error + U * (np.abs(total) + self.error))

    def activated(self, slope: float = 1.13, relative: float = 3 * U) -> Product:
        """Return the bound after GELU or SiLU; for ReLU, pass 1 and 0.

        `value` of the result is an upper bound of the magnitude.
        """
        size = np.abs(self.value)
        return Product(size, slope * self.error + relative * (size + self.error) + SMALLEST)

    def times(self, other: Product) -> Product:
        a, b = np.abs(self.value), np.abs(other.value)
        error = self.error * (b + other.error) + a * other.error
        return Product(a * b, error + U * (a * b + error) + SMALLEST)

    def columns(self, begin: int, end: int) -> Product:
        return Product(self.value[:, begin:end], self.error[:, begin:end])

    def layer_norm_error(self, weight: np.ndarray, epsilon: float) -> Doubles:
        """Return the bound of ops/epilogue/layer_norm.h for input rows that already have an error."""
        n = self.value.shape[1]
        s = np.sqrt(self.value.var(axis=1, keepdims=True) + epsilon)
        p = np.abs(self.value - self.value.mean(axis=1, keepdims=True)) / s
        c = (n / 4 + 16) * U
        t = c + (U + c * c) * np.abs(self.value).mean(axis=1, keepdims=True) / s
        moved = self.error.max(axis=1, keepdims=True) / s
        own = t + p * (t * t / 2 + c) + 4 * U * (p + 1)
        return np.abs(weight) * (own + 2 * moved * (p + 2)) + 4 * U + SMALLEST


def finite(x: np.ndarray) -> Doubles:
    """Return x with rows that contain NaN or Inf set to zero.

    In these rows, only the positions of NaN and Inf are compared.
    """
    return np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, 0).astype(np.float64)


def float_product(x: np.ndarray, w: np.ndarray, roundings: int = 8) -> Product:
    """Return the product with the error of float32 sums in any order; denormal sums may be flushed to zero."""
    x64, w64 = finite(x), w.astype(np.float64)
    magnitude = np.abs(x64) @ np.abs(w64)
    k = len(w)
    return Product(x64 @ w64, (k + roundings) * U * magnitude + k * 1.2e-38)


def integer_product(
    q: np.ndarray, s: np.ndarray, weights: np.ndarray, scales: np.ndarray, group: int | None
) -> Product:
    """Return the product with the error of exact integer sums per group of inputs, scaled and added in float32.

    Shapes: q [m, k] and weights [k, n] are integers; s [m, 1] or [m, groups]; scales [groups, n]. group: inputs per
    group; None: one group.
    """
    k = len(weights)
    groups = len(scales)
    size = k if group is None else group
    # Exact in float64, because the sums are at most 255 x 128 x k.
    q64, w64 = q.astype(np.float64), weights.astype(np.float64)
    s64 = np.broadcast_to(np.where(np.isfinite(s), s, 0).astype(np.float64), (len(q), groups))
    value = np.zeros((len(q), weights.shape[1]))
    magnitude = np.zeros_like(value)
    for g in range(groups):
        part = slice(g * size, (g + 1) * size)
        term = s64[:, g : g + 1] * (q64[:, part] @ w64[part]) * scales[g].astype(np.float64)
        value += term
        magnitude += np.abs(term)
    denormals = SMALLEST * (1 + np.abs(w64).sum(axis=0))
    return Product(value, (groups + 4) * U * magnitude + U * np.abs(value) + denormals)


def decode_error(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, codebooks: np.ndarray | None, int8_values: bool
) -> float:
    """Return the largest bound of ops/attention/decode.h over all rows of q, k and v [..., rows, head_dim].

    codebooks: if set, their values bound the keys instead of k.
    """
    head_dim, tokens = q.shape[-1], k.shape[-2]
    factor = 1.4426950408889634 * abs(scale)
    most_q, most_v = float(np.abs(q).max()), float(np.abs(v).max())
    if codebooks is None:
        e = (head_dim + 8) * U * factor * head_dim * most_q * float(np.abs(k).max())
    else:
        parts, d_sub = codebooks.shape[-3], codebooks.shape[-1]
        entry = factor * d_sub * most_q * float(np.abs(codebooks).max())
        e = parts * (2 * entry / 255 * (0.5 + 2.0**-12) + 2.0**-100) + (2 * parts + 16) * U * parts * entry
    left_out = 2.0**-23 if codebooks is None and not int8_values else 2.0**-11
    rounded = 2.0**-16 * tokens if int8_values else 0.0
    return most_v * (2.0 ** (2 * e) - 1 + (tokens + 32) * 2.0**-22 + left_out + rounded)


def weights_error(v: np.ndarray) -> float:
    """Return the bound if the scores have the same bits, so that only exp2 and the order of the sums differ."""
    return float(np.abs(v).max()) * (v.shape[-2] + 32) * 2.0**-22
