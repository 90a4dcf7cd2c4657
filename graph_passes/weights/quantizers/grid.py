"""The numbers that a quantized weight may be, and rounding to the nearest of them.

W is float32 [k, n], and finite. Groups are runs of group_size inputs of a column (the last may be shorter); without
a group_size, a whole column. A weight stands for scale (q - zero), with zero = 0 if symmetric, or scale q + minimum:

    symmetric 8    q in -127 … 127            asymmetric 4   q in 0 … 15; zero too, whole, or a fraction of sixteenths
    symmetric 4    q in -8 … 7                minimum 4      q in 0 … 15

Scales and minimums are float16 numbers as a rule, or bfloat16 ones where an operator has no others; below, short() is
that rounding. With 8 bits and whole columns they are any float32. There the
range may be reduced: no sum of q of inputs 2 i and 2 i + 1 is beyond 128, with which CPUs without an exact product of
bytes are faster (ops/formats/bitmap_int8.h). A scale may be negative; then a minimum is the
largest number. Round to nearest takes, of each group (mse.py finds better ones),

    symmetric 8    scale = max(short(max |W| / 127), 2^-126)             q = rint(W / scale), in -127 … 127
    its range reduced  scale = max(max |W| / 127, max |W[2 i] + W[2 i + 1]| / 127, 2^-126)
    symmetric 4    scale = max(short(max |W| / 7), 2^-126)               q = rint(W / scale), in -7 … 7
    asymmetric 4   scale = max(short((high - low) / 15), 2^-126)         q = clip(rint(W / scale + zero), 0, 15)
                   zero = rint(-low / scale), in 0 … 15;                 low = min(min W, 0), high = max(max W, 0)
                   as a fraction: rint(-16 low / scale) / 16
    minimum 4      scale = max(short((max W - min W) / 15), 2^-126)      q = clip(rint((W - minimum) / scale), 0, 15)
                   minimum = short(min W)
    all W of a group zero: scale = 0, zero = 0, minimum = 0, q = 0

But for minimums and fractions, zero is always among these numbers, so what was pruned stays zero. Arithmetic is
float32; short() rounds to nearest even, and to bfloat16 where that is nearer: outside of float16's range. By round to
nearest,

    |W - scale (q - zero)| <= scale / 2 (1 + 2^-16)             symmetric
                           <= scale / 2 (1 + 2^-16) + scale / 17    asymmetric

Symmetric: 1/2 from rint, and |W| / scale * 2^-24 < 2^-17 from the division; nothing is clipped, for |W| / scale exceeds
127 by 127 * 2^-9 < 1/2 at most (short() loses at most 2^-9 of the scale), and 7 by less, so rint gives 127 and 7 at
most. Asymmetric: the clip takes away what short() lost, 15 * 2^-9 < 1/17 of a step. 2^-126 is the smallest normal
number: scales below it are coarse themselves, which would break the bounds, and arithmetic that flushes denormals would
take them for zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from ...names import GROUP_SIZES as GROUP_SIZES

EIGHT_BIT_GROUP = 64  # of heads beside layers of 4 bits, and of word embeddings, which may be tied to them
SMALLEST_SCALE = np.float32(2.0**-126)
FRACTION_STEPS = 16  # as in ops/formats/group.h
LEVELS = 15  # the largest q of an asymmetric weight
_CHUNK = 1 << 22  # weights that are rounded at once
_LARGEST_BF16 = np.float32((2 - 2**-7) * 2.0**127)
_SMALLEST_HALF, _LARGEST_HALF = np.float32(2.0**-14), np.float32(65504)
_ALL = slice(None)


@dataclass(frozen=True)
class Quantization:
    """How a weight is stored: whole numbers of so many bits, and a scale a group of inputs (None: a column)."""

    bits: int
    group_size: int | None
    symmetric: bool = field(default=True, kw_only=True)  # False: each group has a zero point
    minimum: bool = field(default=False, kw_only=True)  # not symmetric: it has a minimum in place of the zero point
    bf16_scales: bool = field(default=False, kw_only=True)  # 4 bits: scales are bfloat16 numbers, not float16 ones
    fractions: bool = field(default=False, kw_only=True)  # not symmetric: its zero point is a fraction, of sixteenths
    reduced: bool = field(default=False, kw_only=True)  # 8 bits, whole columns: its range is reduced

    @property
    def zero_point_steps(self) -> int:
        """Of a whole number: by what stored zero points are divided."""
        return FRACTION_STEPS if self.fractions else 1

    def rows(self, k: int) -> int:
        """The inputs of a group."""
        return self.group_size or k

    def groups(self, k: int) -> int:
        return -(-k // self.rows(k))

    @property
    def levels(self) -> tuple[int, int]:
        """The smallest and the largest q."""
        if not self.symmetric:
            return 0, LEVELS
        return (-8, 7) if self.bits == 4 else (-127, 127)

    def stored_zero(self, zero: np.ndarray) -> np.ndarray:
        """Zero points, float32, as they are stored."""
        steps, most = (FRACTION_STEPS, 255) if self.fractions else (1, LEVELS)
        found: np.ndarray = np.clip(np.rint(zero * steps), 0, most) / np.float32(steps)
        return found

    def short(self, array: np.ndarray) -> np.ndarray:
        """Scales and minimums, float32, as they are stored."""
        if self.bits == 8 and self.group_size is None:
            return array
        return bf16(array) if self.bf16_scales else half(array)


@dataclass(frozen=True)
class QuantizedMatrix:
    """W = scales (q - zero_points), or scales q + minimums, each group of rows with its row of scales."""

    q: np.ndarray  # [k, n]; int8, asymmetric: uint8
    scales: np.ndarray  # float32 [groups, n]
    zero_points: np.ndarray | None  # [groups, n] uint8, or fractions, float32; symmetric, or with minimums: None
    minimums: np.ndarray | None = None  # float32 [groups, n]

    @classmethod
    def empty(cls, k: int, n: int, quantization: Quantization) -> QuantizedMatrix:
        shape = (quantization.groups(k), n)
        if quantization.symmetric:
            return cls(np.empty((k, n), np.int8), np.empty(shape, np.float32), None)
        q, scales = np.empty((k, n), np.uint8), np.empty(shape, np.float32)
        if quantization.minimum:
            return cls(q, scales, None, np.empty(shape, np.float32))
        return cls(q, scales, np.empty(shape, np.float32 if quantization.fractions else np.uint8))


@dataclass(frozen=True)
class Grid:
    """Of one group: the scale, and the zero point or minimum, of each column."""

    bits: int
    scale: np.ndarray  # float32 [n]; 0 where all weights are
    zero: np.ndarray | None  # float32 [n], whole numbers or fractions; symmetric, or with a minimum: None
    minimum: np.ndarray | None = None  # float32 [n]

    def round(self, part: np.ndarray) -> np.ndarray:
        """q, as float32, for weights [rows, n] or [n]."""
        above = part
        if self.minimum is not None:
            with np.errstate(over="ignore"):  # infinity is the last q
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
        """What q stands for, float32."""
        result: np.ndarray = self.scale * (q if self.zero is None else q - self.zero)
        return result if self.minimum is None else result + self.minimum

    def store(self, into: QuantizedMatrix, group: int, columns: slice = _ALL) -> None:
        into.scales[group, columns] = self.scale
        if into.zero_points is not None:
            into.zero_points[group, columns] = self.zero
        if into.minimums is not None:
            into.minimums[group, columns] = self.minimum


def fit_grid(part: np.ndarray, quantization: Quantization) -> Grid:
    """The grid of a group, W float32 [rows, n], by its smallest and largest weights; see the top of this file."""
    low, high = part.min(axis=0), part.max(axis=0)
    short = quantization.short
    if quantization.minimum:
        # Each divided first: their difference may be beyond float32.
        scale = np.maximum(short(high / LEVELS - low / LEVELS), SMALLEST_SCALE)
        return Grid(quantization.bits, np.where(high > low, scale, 0), None, short(low))
    if quantization.symmetric:
        most = np.float32(quantization.levels[1])
        largest = np.maximum(high, -low)
        scale = largest / most
        if quantization.reduced:
            scale = np.maximum(scale, _largest_pairs(part, most))
        scale = np.maximum(short(scale), SMALLEST_SCALE)
        return Grid(quantization.bits, np.where(largest > 0, scale, 0), None)
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scale = np.maximum(short(high / LEVELS - low / LEVELS), SMALLEST_SCALE)
    scale = np.where(high > low, scale, 0)
    return Grid(quantization.bits, scale, quantization.stored_zero(-low / np.where(scale > 0, scale, 1)))


def _largest_pairs(part: np.ndarray, most: np.float32) -> np.ndarray:
    """Of each column the largest sum of two neighbours, by its magnitude, divided by most."""
    even, odd = part[0::2], part[1::2]
    # Each divided first: their sum may be beyond float32.
    pairs = even[: len(odd)] / most + odd / most
    largest: np.ndarray = np.abs(pairs).max(axis=0, initial=0)
    return largest


def round_to_nearest(matrix: np.ndarray, quantization: Quantization) -> QuantizedMatrix:
    """Each weight of W, float32 [k, n], becomes the nearest number of its group's grid."""
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
    """scales (q - zero_points) or scales q + minimums as float32 [k, n]; what would overflow is infinite."""
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
    """float32 rounded to bfloat16, nearest even, as float32 again; never to infinity."""
    rounded: np.ndarray = array.astype(ml_dtypes.bfloat16).astype(np.float32)
    return np.clip(rounded, -_LARGEST_BF16, _LARGEST_BF16, out=rounded)


def half(array: np.ndarray) -> np.ndarray:
    """float32 rounded to float16, nearest even, as float32 again; to bfloat16 where that is nearer: beyond float16's
    range, or among its subnormal numbers."""
    with np.errstate(over="ignore", under="ignore"):
        rounded: np.ndarray = array.astype(np.float16).astype(np.float32)
    magnitude = np.abs(rounded)
    inside = (magnitude >= _SMALLEST_HALF) & (magnitude <= _LARGEST_HALF)
    if inside.all():
        return rounded
    other = bf16(array)
    return np.where(inside | (np.abs(rounded - array) <= np.abs(other - array)), rounded, other)


def narrowed(array: np.ndarray) -> np.ndarray:
    """float16 if that holds all of the numbers, else as it is: float32."""
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float16)
    return narrow if (narrow.astype(np.float32) == array).all() else array
