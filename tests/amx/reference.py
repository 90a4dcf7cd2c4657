"""NumPy reference of the AMX multiplications, independent of the emulator and exact except for NaN payloads.

Matrices are logical: a [m, K], b [K, n], c [m, n]. `pack_b` makes a B tile.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

SMALLEST_NORMAL = np.float32(2.0**-126)


def pack_b(b: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return b [K, n] as a B tile [K / g, n * g], where g elements fill 4 bytes: 2 of bf16, 4 of int8."""
    group = 4 // b.dtype.itemsize
    k, n = b.shape
    return np.ascontiguousarray(b.reshape(k // group, group, n).transpose(0, 2, 1)).reshape(k // group, n * group)


def flush(x: F32) -> F32:
    """Return x with denormals replaced by zeros of their sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def round_to_float32(exact: F64) -> F32:
    """Round float64 to float32, nearest even, and flush results that would be denormal before rounding to zero."""
    scale = 2.0**64
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = (exact * scale).astype(np.float32)
        tiny = np.abs(scaled) < SMALLEST_NORMAL * scale
        return np.where(tiny, np.copysign(np.float32(0), exact.astype(np.float32)), exact.astype(np.float32))


def add(a: F64, b: F64) -> F32:
    """Return a + b rounded once to float32; a and b are exact and at most 2^300.

    The float64 sum is rounded to odd, so that rounding it to 24 bits gives the correctly rounded sum (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums").
    """
    with np.errstate(invalid="ignore"):
        total = a + b
        b_part = total - a
        error = (a - (total - b_part)) + (b - b_part)
    even = (total.view(np.int64) & 1) == 0
    wrong_side = np.isfinite(total) & (error != 0) & even
    return round_to_float32(np.where(wrong_side, np.nextafter(total, np.copysign(np.inf, error)), total))


def multiply_add(x: F32, y: F32, z: F32) -> F32:
    """Return x y + z rounded once. x and y hold bf16 values, so their product is exact in float64."""
    with np.errstate(invalid="ignore"):
        product = flush(x).astype(np.float64) * flush(y).astype(np.float64)
    return add(product, flush(z).astype(np.float64))


def tdpbf16ps(c: F32, a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> F32:
    """Return c + a b for bfloat16 a [m, K] and b [K, n]; K must be even, at most 32 for one instruction."""
    a32, b32 = a.astype(ml_dtypes.bfloat16).astype(np.float32), b.astype(ml_dtypes.bfloat16).astype(np.float32)
    chains = [np.zeros(c.shape, np.float32), np.zeros(c.shape, np.float32)]
    for k in range(a.shape[1]):
        chains[k % 2] = multiply_add(a32[:, k : k + 1], b32[k : k + 1, :], chains[k % 2])
    product = add(chains[0].astype(np.float64), chains[1].astype(np.float64))
    return add(flush(c).astype(np.float64), product.astype(np.float64))


def tdp_int8(c: npt.NDArray[np.int32], a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> npt.NDArray[np.int32]:
    """Return c + a b modulo 2^32, as int32. The types of a and b are int8 or uint8."""
    exact = c.astype(np.int64) + a.astype(np.int64) @ b.astype(np.int64)
    return exact.astype(np.uint32).view(np.int32)
