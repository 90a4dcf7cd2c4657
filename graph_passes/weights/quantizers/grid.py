"""Formats of quantized weights, and rounding to nearest.

W is float32 [k, n], and finite. Groups are runs of group_size inputs of a column (the last may be shorter); without a
group_size, a group is a whole column. A weight is scale (q - zero), with zero = 0 if symmetric, or scale q + minimum:

    symmetric 8    q in -127 … 127            asymmetric 4   q in 0 … 15; zero also, an integer or in sixteenths
    symmetric 4    q in -8 … 7                minimum 4      q in 0 … 15

Scales and minimums are float16, or bfloat16 for operators that require it; short() below is this rounding. 8-bit whole
columns have float32 scales, and may have a reduced range: the sum of q of inputs 2 i and 2 i + 1 is then at most 128 in
magnitude, which is faster on CPUs without an exact byte product (ops/formats/bitmap_int8.h). A scale may be negative;
then the minimum is the largest value. Round to nearest uses for each group (mse.py finds better values):

    symmetric 8    scale = max(short(max |W| / 127), 2^-126)             q = rint(W / scale), in -127 … 127
    reduced range  scale = max(max |W| / 127, max |W[2 i] + W[2 i + 1]| / 127, 2^-126)
    symmetric 4    scale = max(short(max |W| / 7), 2^-126)               q = rint(W / scale), in -7 … 7
    asymmetric 4   scale = max(short((high - low) / 15), 2^-126)         q = clip(rint(W / scale + zero), 0, 15)
                   zero = rint(-low / scale), in 0 … 15;                 low = min(min W, 0), high = max(max W, 0)
                   in sixteenths: rint(-16 low / scale) / 16
    minimum 4      scale = max(short((max W - min W) / 15), 2^-126)      q = clip(rint((W - minimum) / scale), 0, 15)
                   minimum = short(min W)
    all W of a group zero: scale = 0, zero = 0, minimum = 0, q = 0

Except with minimums and fractional zero points, zero is representable, so pruned weights stay zero. Arithmetic is
float32. short() rounds to nearest even; outside the range of float16 it rounds to bfloat16, if that is nearer. Bounds
of round to nearest:

    |W - scale (q - zero)| <= scale / 2 (1 + 2^-16)             symmetric
                           <= scale / 2 (1 + 2^-16) + scale / 17    asymmetric

Symmetric: 1/2 is from rint, and |W| / scale * 2^-24 < 2^-17 from the division. No value is clipped: |W| / scale exceeds
127 by at most 127 * 2^-9 < 1/2 (short() changes a scale by at most 2^-9 of it), and 7 by less, so rint gives at most
127 and 7. Asymmetric: clipping removes what short() lost, 15 * 2^-9 < 1/17 of a step. 2^-126 is the smallest normal
float: smaller scales are too coarse for the bounds, and are zero where denormals are flushed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from ...names import GROUP_SIZES as GROUP_SIZES

EIGHT_BIT_GROUP = (
    64  # group size of 8-bit output heads in int4 models, and of word embeddings that may share their weight
)
SMALLEST_SCALE = np.float32(2.0**-126)
FRACTION_STEPS = 16  # zero points are multiples of 1/16; equals the constant in ops/formats/group.h
LEVELS = 15  # largest q of an asymmetric 4-bit weight
_CHUNK = 1 << 22  # number of weights rounded at a time
_LARGEST_BF16 = np.float32((2 - 2**-7) * 2.0**127)
_SMALLEST_HALF, _LARGEST_HALF = np.float32(2.0**-14), np.float32(65504)
_ALL = slice(None)


@dataclass(frozen=True)
class Quantization:
    """Format of a quantized weight: integers of 4 or 8 bits, and a scale for each group of inputs (None: a column)."""

    bits: int
    group_size: int | None
    symmetric: bool = field(default=True, kw_only=True)  # False: each group has a zero point or minimum
    minimum: bool = field(default=False, kw_only=True)  # asymmetric: a minimum instead of the zero point
    bf16_scales: bool = field(default=False, kw_only=True)  # 4 bits: scales are bfloat16 instead of float16
    fractions: bool = field(default=False, kw_only=True)  # asymmetric: zero points are multiples of 1/16
    reduced: bool = field(default=False, kw_only=True)  # 8 bits, whole columns: reduced range

    @property
    def zero_point_steps(self) -> int:
        """Return the divisor of stored zero points."""
        return FRACTION_STEPS if self.fractions else 1

    def rows(self, k: int) -> int:
        """Return the inputs of a group."""
        return self.group_size or k

    def groups(self, k: int) -> int:
        """Return the number of groups of k inputs."""
        return -(-k // self.rows(k))

    @property
    def levels(self) -> tuple[int, int]:
        """Return the smallest and the largest q."""
        if not self.symmetric:
            return 0, LEVELS
        return (-8, 7) if self.bits == 4 else (-127, 127)

    def stored_zero(self, zero: np.ndarray) -> np.ndarray:
        """Round zero points, float32, to values that can be stored."""
        steps, largest = (FRACTION_STEPS, 255) if self.fractions else (1, LEVELS)
        found: np.ndarray = np.clip(np.rint(zero * steps), 0, largest) / np.float32(steps)
        return found

    def short(self, array: np.ndarray) -> np.ndarray:
        """Round scales and minimums, float32, to values that can be stored."""
        if self.bits == 8 and self.group_size is None:
            return array
        return bf16(array) if self.bf16_scales else half(array)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized weight: W = scales (q - zero_points), or scales q + minimums, with a row of scales for each group."""

    q: np.ndarray  # [k, n]; int8, or uint8 if asymmetric
    scales: np.ndarray  # float32 [groups, n]
    # [groups, n] uint8, or float32 multiples of 1/16; None if symmetric or with minimums
    zero_points: np.ndarray | None
    minimums: np.ndarray | None = None  # float32 [groups, n]

    @classmethod
    def empty(cls, k: int, n: int, quantization: Quantization) -> QuantizedMatrix:
        """Return uninitialized arrays for a weight [k, n]."""
        shape = (quantization.groups(k), n)
        if quantization.symmetric:
            return cls(np.empty((k, n), np.int8), np.empty(shape, np.float32), None)
        q, scales = np.empty((k, n), np.uint8), np.empty(shape, np.float32)
        if quantization.minimum:
            return cls(q, scales, None, np.empty(shape, np.float32))
        return cls(q, scales, np.empty(shape, np.float32 if quantization.fractions else np.uint8))


@dataclass(frozen=True)
class Grid:
    """Scale, and zero point or minimum, of each column of one group."""

    bits: int
    scale: np.ndarray  # float32 [n]; 0 for columns that are zero
    zero: np.ndarray | None  # float32 [n], integers or multiples of 1/16; None if symmetric or with a minimum
    minimum: np.ndarray | None = None  # float32 [n]

    def round(self, part: np.ndarray) -> np.ndarray:
        """Return q, as float32, for weights [rows, n] or [n]."""
        above = part
        if self.minimum is not None:
            with np.errstate(over="ignore"):  # infinity becomes the last q
                above = part - self.minimum
        q: np.ndarray = above / np.where(self.scale != 0, self.scale, 1)
        if self.zero is not None:
            q += self.zero
        np.rint(q, out=q)
        if self.zero is None and self.minimum is None:
            low, high = (-8, 7) if self.bits == 4 else (-127, 127)
            return np.clip(q, low, high, out=q)
        return np.clip(q, 0, LEVELS, out=q)

    def weights(self, q: np.ndarray) -> np.ndarray:
        """Return the dequantized weights of q, float32."""
        result: np.ndarray = self.scale * (q if self.zero is None else q - self.zero)
        return result if self.minimum is None else result + self.minimum

    def store(self, into: QuantizedMatrix, group: int, columns: slice = _ALL) -> None:
        """Store the group's scales and zero points or minimums in a matrix."""
        into.scales[group, columns] = self.scale
        if into.zero_points is not None:
            into.zero_points[group, columns] = self.zero
        if into.minimums is not None:
            into.minimums[group, columns] = self.minimum


def fit_grid(part: np.ndarray, quantization: Quantization) -> Grid:
    """Return the round-to-nearest grid of a group, W float32 [rows, n]; see the top of this file."""
    low, high = part.min(axis=0), part.max(axis=0)
    short = quantization.short
    if quantization.minimum:
        # Division comes first, because high - low may overflow.
        scale = np.maximum(short(high / LEVELS - low / LEVELS), SMALLEST_SCALE)
        return Grid(quantization.bits, np.where(high > low, scale, 0), None, short(low))
    if quantization.symmetric:
        max_q = np.float32(quantization.levels[1])
        largest = np.maximum(high, -low)
        scale = largest / max_q
        if quantization.reduced:
            scale = np.maximum(scale, _largest_pairs(part, max_q))
        scale = np.maximum(short(scale), SMALLEST_SCALE)
        return Grid(quantization.bits, np.where(largest > 0, scale, 0), None)
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scale = np.maximum(short(high / LEVELS - low / LEVELS), SMALLEST_SCALE)
    scale = np.where(high > low, scale, 0)
    return Grid(quantization.bits, scale, quantization.stored_zero(-low / np.where(scale > 0, scale, 1)))


def _largest_pairs(part: np.ndarray, max_q: np.float32) -> np.ndarray:
    """Return for each column the largest magnitude of a sum of two neighbours, divided by max_q."""
    even, odd = part[0::2], part[1::2]
    # Division comes first, because the sum may overflow.
    pairs = even[: len(odd)] / max_q + odd / max_q
    largest: np.ndarray = np.abs(pairs).max(axis=0, initial=0)
    return largest


def round_to_nearest(matrix: np.ndarray, quantization: Quantization) -> QuantizedMatrix:
    """Round each weight of W, float32 [k, n], to the nearest value of its group's grid."""
    k, n = matrix.shape
    result = QuantizedMatrix.empty(k, n, quantization)
    rows = quantization.rows(k)
    for group, start in enumerate(range(0, k, rows)):
        part = matrix[start : start + rows]
        grid = fit_grid(part, quantization)
        grid.store(result, group)
        step = max(1, _CHUNK // n)
        for first in range(0, len(part), step):
            q = grid.round(part[first : first + step])
            result.q[start + first : start + first + len(q)] = q
    return result


def dequantize(rounded: QuantizedMatrix, group_size: int | None) -> np.ndarray:
    """Return scales (q - zero_points) or scales q + minimums as float32 [k, n]. Overflow gives infinity."""
    weights = np.empty(rounded.q.shape, np.float32)
    rows = group_size or len(rounded.q)
    with np.errstate(over="ignore"):
        for group, start in enumerate(range(0, len(rounded.q), rows)):
            part = weights[start : start + rows]
            part[:] = rounded.q[start : start + rows]
            if rounded.zero_points is not None:
                part -= rounded.zero_points[group]
            part *= rounded.scales[group]
            if rounded.minimums is not None:
                part += rounded.minimums[group]
    return weights


def bf16(array: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, nearest even, without overflow to infinity; return float32."""
    rounded: np.ndarray = array.astype(ml_dtypes.bfloat16).astype(np.float32)
    return np.clip(rounded, -_LARGEST_BF16, _LARGEST_BF16, out=rounded)


def half(array: np.ndarray) -> np.ndarray:
    """Round float32 to float16, nearest even, and return it as float32.

    Values outside float16's normal range are rounded to bfloat16 if that is nearer.
    """
    with np.errstate(over="ignore", under="ignore"):
        rounded: np.ndarray = array.astype(np.float16).astype(np.float32)
    magnitude = np.abs(rounded)
    inside = (magnitude >= _SMALLEST_HALF) & (magnitude <= _LARGEST_HALF)
    if inside.all():
        return rounded
    other = bf16(array)
    return np.where(inside | (np.abs(rounded - array) <= np.abs(other - array)), rounded, other)


def narrowed(array: np.ndarray) -> np.ndarray:
    """Return the array as float16 if that is exact, otherwise unchanged."""
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float16)
    return narrow if (narrow.astype(np.float32) == array).all() else array
