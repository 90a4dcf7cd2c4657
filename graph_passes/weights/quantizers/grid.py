"""Formats of quantized weights, and rounding to nearest.

W is float32 [k, n], and finite. Groups are runs of group_size inputs of a column (the last may be shorter); without a
group_size, a group is a whole column. A weight is scale (q - zero), with zero = 0 if symmetric, or scale q + minimum:

    symmetric 8    q in -127 … 127            asymmetric 4   q in 0 … 15; zero also, an integer or in sixteenths
    symmetric 4    q in -8 … 7                minimum 4      q in 0 … 15

Groups may be divided into subgroups of 16 or 32 inputs, with 4, 5 or 6 bits (ops/formats/subgroup.h). A weight is then
scale step (q - zero), with an integer step and zero for each subgroup:

    subgroups b    q, zero in 0 … 2^b - 1;  step in 1 … 2^(8-b) - 1;  |step (q - zero)| <= 127

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
    subgroups b    scale = max(short(max |W| / floor((2^(8-b) - 1) (2^b - 1) / 2)), 2^-126), max over the group
                   step = clip(ceil((high - low) / ((2^b - 1) scale)), 1, 2^(8-b) - 1), low and high of the subgroup
                   zero = clip(rint(-low / (scale step)), 0, 2^b - 1)
                   q = clip(rint(W / (scale step)) + zero, 0, 2^b - 1), |q - zero| <= floor(127 / step)
    all W of a group zero: scale = 0, zero = 0, minimum = 0, q = 0;  of a subgroup: step = 0, zero = 0, q = 0

Except with minimums and fractional zero points, zero is representable, so pruned weights stay zero. Arithmetic is
float32. short() rounds to nearest even; outside the range of float16 it rounds to bfloat16, if that is nearer. Bounds
of round to nearest:

    |W - scale (q - zero)| <= scale / 2 (1 + 2^-16)             symmetric
                           <= scale / 2 (1 + 2^-16) + scale / 17    asymmetric
    |W - scale step (q - zero)| <= scale step / 2 (1 + 2^-16)       subgroups

Symmetric: 1/2 is from rint, and |W| / scale * 2^-24 < 2^-17 from the division. No value is clipped: |W| / scale exceeds
127 by at most 127 * 2^-9 < 1/2 (short() changes a scale by at most 2^-9 of it), and 7 by less, so rint gives at most
127 and 7. Asymmetric: clipping removes what short() lost, 15 * 2^-9 < 1/17 of a step. Subgroups: the largest step holds
the range of any subgroup, because the divisor of max |W| leaves room for what short() loses; so clipping changes no
value by more than rounding does. 2^-126 is the smallest normal float: smaller scales are too coarse for the bounds, and
are zero where denormals are flushed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import ml_dtypes
import numpy as np

from ...names import GROUP_SIZES as GROUP_SIZES

# Sizes of groups with subgroups, and of subgroups (ops/formats/subgroup.h).
GROUPS_OF_SUBGROUPS = (64, 128, 256)
SUBGROUP_SIZES = (16, 32)
LARGEST_VALUE = np.float32(127)  # limit of |step (q - zero)|: int8 in kernels
EIGHT_BIT_GROUP = (
    64  # group size of 8-bit output heads in int4 models, and of word embeddings that may share their weight
)
SMALLEST_SCALE = np.float32(2.0**-126)
FRACTION_STEPS = 16  # zero points are multiples of 1/16; equals the constant in ops/formats/group.h
LEVELS = 15  # largest q of an asymmetric 4-bit weight
_CHUNK = 1 << 22  # number of weights rounded at a time
LARGEST_FLOAT = np.float32(np.finfo(np.float32).max)
_LARGEST_BF16 = np.float32((2 - 2**-7) * 2.0**127)
_SMALLEST_HALF, _LARGEST_HALF = np.float32(2.0**-14), np.float32(65504)
_ALL = slice(None)


@dataclass(frozen=True)
class Quantization:
    """Format of a quantized weight: integers of few bits, and a scale for each group of inputs (None: a column)."""

    bits: int  # 4 or 8; with subgroups 4, 5 or 6
    group_size: int | None
    symmetric: bool = field(default=True, kw_only=True)  # False: each group has a zero point or minimum
    minimum: bool = field(default=False, kw_only=True)  # asymmetric: a minimum instead of the zero point
    bf16_scales: bool = field(default=False, kw_only=True)  # 4 bits: scales are bfloat16 instead of float16
    fractions: bool = field(default=False, kw_only=True)  # asymmetric: zero points are multiples of 1/16
    reduced: bool = field(default=False, kw_only=True)  # 8 bits, whole columns: reduced range
    # Not symmetric: inputs that share an integer scale and zero point; None: groups have no subgroups.
    subgroup_size: int | None = field(default=None, kw_only=True)
    # K-quants (ops/formats/k_quant.h): the zero point of all weights, 0 with minimums. If a group has more than one
    # subgroup, these have scales of 8 bits, and with minimums factors of the minimum.
    k_quant_zero: int | None = field(default=None, kw_only=True)

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

    def grid_rows(self, k: int) -> int:
        """Return the inputs of a subgroup, or of a group without subgroups."""
        return self.subgroup_size or self.rows(k)

    def grids(self, k: int) -> int:
        """Return the number of subgroups of k inputs, or of groups without subgroups."""
        return -(-k // self.grid_rows(k))

    @property
    def largest_step(self) -> int:
        """Return the largest integer scale of a subgroup."""
        return int(2 ** (8 - self.bits) - 1)

    @property
    def levels(self) -> tuple[int, int]:
        """Return the smallest and the largest q."""
        if not self.symmetric:
            return 0, int(2**self.bits - 1)
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
    """A quantized weight: W = scales (q - zero_points), or scales q + minimums, with a row of scales for each group.

    With subgroups: W = scales subgroup_scales (q - zero_points). K-quants: W = scales subgroup_scales (q - zero) +
    minimums subgroup_minimums, with one zero point.
    """

    q: np.ndarray  # [k, n]; int8, or uint8 if asymmetric
    scales: np.ndarray  # float32 [groups, n]
    # [groups, n] uint8, or float32 multiples of 1/16; uint8 [subgroups, n]; None if symmetric or with minimums
    zero_points: np.ndarray | None
    minimums: np.ndarray | None = None  # float32 [groups, n]
    subgroup_scales: np.ndarray | None = None  # uint8, K-quants int8 [subgroups, n]; None without subgroups
    subgroup_minimums: np.ndarray | None = None  # uint8 [subgroups, n]; None except for K-quants

    @classmethod
    def empty(cls, k: int, n: int, quantization: Quantization) -> QuantizedMatrix:
        """Return uninitialized arrays for a weight [k, n]."""
        shape = (quantization.groups(k), n)
        if quantization.symmetric:
            return cls(np.empty((k, n), np.int8), np.empty(shape, np.float32), None)
        q, scales = np.empty((k, n), np.uint8), np.empty(shape, np.float32)
        if quantization.subgroup_size is not None:
            zeros, steps = (np.empty((quantization.grids(k), n), np.uint8) for _ in range(2))
            return cls(q, scales, zeros, None, steps)
        if quantization.minimum:
            return cls(q, scales, None, np.empty(shape, np.float32))
        return cls(q, scales, np.empty(shape, np.float32 if quantization.fractions else np.uint8))


@dataclass(frozen=True)
class Grid:
    """Scale, and zero point or minimum, of each column of one group; or all values of one subgroup."""

    bits: int
    scale: np.ndarray  # float32 [n]; 0 for columns that are zero
    zero: np.ndarray | None  # float32 [n], integers or multiples of 1/16; None if symmetric or with a minimum
    minimum: np.ndarray | None = None  # float32 [n]
    step: np.ndarray | None = None  # float32 [n], integers; 0 for subgroups that are zero; None without subgroups

    @cached_property
    def _divisor(self) -> np.ndarray:
        width = self.scale if self.step is None else self.scale * self.step
        divisor: np.ndarray = np.where(width != 0, width, 1)
        return divisor

    @cached_property
    def _levels(self) -> tuple[np.ndarray | int, np.ndarray | int]:
        """Return the smallest and the largest q."""
        if self.zero is None and self.minimum is None:
            return (-8, 7) if self.bits == 4 else (-127, 127)
        if self.step is None or self.zero is None:
            return 0, LEVELS
        # The second limit keeps weights finite.
        largest = np.minimum(LARGEST_VALUE, np.floor(LARGEST_FLOAT / np.maximum(self.scale, 1)))
        most = np.floor(largest / np.maximum(self.step, 1))
        return np.maximum(self.zero - most, 0), np.minimum(self.zero + most, 2**self.bits - 1)

    def round(self, part: np.ndarray) -> np.ndarray:
        """Return q, as float32, for weights [rows, n] or [n]."""
        above = part
        if self.minimum is not None:
            with np.errstate(over="ignore"):  # infinity becomes the last q
                above = part - self.minimum
        q: np.ndarray = above / self._divisor
        if self.zero is not None:
            q += self.zero
        np.rint(q, out=q)
        return np.clip(q, *self._levels, out=q)

    def weights(self, q: np.ndarray) -> np.ndarray:
        """Return the dequantized weights of q, float32."""
        steps = q if self.zero is None else q - self.zero
        result: np.ndarray = self.scale * (steps if self.step is None else self.step * steps)
        return result if self.minimum is None else result + self.minimum

    def store(self, into: QuantizedMatrix, group: int, columns: slice = _ALL, subgroup: int | None = None) -> None:
        """Store scales and zero points or minimums in a matrix.

        Args:
            into: The matrix.
            group: The group's number.
            columns: The columns of the grid.
            subgroup: The subgroup's number, counted over all groups; None without subgroups.
        """
        into.scales[group, columns] = self.scale
        if into.zero_points is not None:
            into.zero_points[group if subgroup is None else subgroup, columns] = self.zero
        if into.subgroup_scales is not None:
            into.subgroup_scales[subgroup, columns] = self.step
        if into.minimums is not None:
            into.minimums[group, columns] = self.minimum


def fit_grids(part: np.ndarray, quantization: Quantization) -> list[Grid]:
    """Return the round-to-nearest grids of a group's subgroups, W float32 [rows, n]; without subgroups, one grid."""
    size = quantization.subgroup_size
    if size is None:
        return [fit_grid(part, quantization)]
    largest = np.maximum(part.max(axis=0), -part.min(axis=0))
    scale = group_scale(largest, quantization)
    grids = []
    for start in range(0, len(part), size):
        rows = part[start : start + size]
        low, high = np.minimum(rows.min(axis=0), 0), np.maximum(rows.max(axis=0), 0)
        step, zero = nearest_step(low, high, scale, quantization)
        grids.append(Grid(quantization.bits, scale, zero, None, step))
    return grids


def group_scale(largest: np.ndarray, quantization: Quantization) -> np.ndarray:
    """Return the scale of a group that clips no weight, for the largest |W|, float32 [n]."""
    reach = np.float32(quantization.largest_step * quantization.levels[1] // 2)
    scale = np.maximum(quantization.short(largest / reach), SMALLEST_SCALE)
    return np.where(largest > 0, scale, np.float32(0))


def nearest_step(
    low: np.ndarray, high: np.ndarray, scale: np.ndarray, quantization: Quantization
) -> tuple[np.ndarray, np.ndarray]:
    """Return step and zero point of subgroups with weights low <= 0 … high >= 0, by round to nearest.

    low and high are float32 [n] or [subgroups, n], scale is that of the group.
    """
    levels, divisor = np.float32(quantization.levels[1]), np.where(scale > 0, scale, 1)
    # Division comes first, because high - low may overflow.
    step = np.clip(np.ceil((high / divisor - low / divisor) / levels), 1, quantization.largest_step)
    zero = np.clip(np.rint(-low / divisor / step), 0, levels)
    nothing = high <= low
    return np.where(nothing, np.float32(0), step), np.where(nothing, np.float32(0), zero)


def fit_grid(part: np.ndarray, quantization: Quantization) -> Grid:
    """Return the round-to-nearest grid of a group without subgroups, W float32 [rows, n]; see the top of this file."""
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
        round_group(part, fit_grids(part, quantization), quantization, result, group)
    return result


def round_group(
    part: np.ndarray,
    grids: Sequence[Grid],
    quantization: Quantization,
    into: QuantizedMatrix,
    group: int,
    columns: slice = _ALL,
) -> None:
    """Round W of a group, float32 [rows, n], to the nearest values of its grids, and store all in a matrix."""
    first_row = group * quantization.rows(len(into.q))
    size = quantization.grid_rows(len(into.q))
    chunk = max(1, _CHUNK // part.shape[1])
    for number, grid in enumerate(grids):
        subgroup = None if quantization.subgroup_size is None else first_row // size + number
        grid.store(into, group, columns, subgroup)
        stop = min((number + 1) * size, len(part))
        for first in range(number * size, stop, chunk):
            rows = slice(first, min(first + chunk, stop))
            into.q[first_row + rows.start : first_row + rows.stop, columns] = grid.round(part[rows])


def dequantize(
    rounded: QuantizedMatrix, group_size: int | None, subgroup_size: int | None = None, k_quant_zero: int | None = None
) -> np.ndarray:
    """Return the weights as float32 [k, n]; see `QuantizedMatrix`. Overflow gives infinity."""
    if k_quant_zero is not None:
        assert group_size is not None and subgroup_size is not None
        return _dequantized_k_quants(rounded, group_size, subgroup_size, k_quant_zero)
    weights = np.empty(rounded.q.shape, np.float32)
    k = len(rounded.q)
    if rounded.subgroup_scales is not None:
        assert subgroup_size is not None and rounded.zero_points is not None
        for subgroup, start in enumerate(range(0, k, subgroup_size)):
            part = weights[start : start + subgroup_size]
            part[:] = rounded.q[start : start + subgroup_size]
            part -= rounded.zero_points[subgroup]
            part *= rounded.subgroup_scales[subgroup]
    rows = group_size or k
    with np.errstate(over="ignore"):
        for group, start in enumerate(range(0, k, rows)):
            part = weights[start : start + rows]
            if rounded.subgroup_scales is not None:
                part *= rounded.scales[group]
                continue
            part[:] = rounded.q[start : start + rows]
            if rounded.zero_points is not None:
                part -= rounded.zero_points[group]
            part *= rounded.scales[group]
            if rounded.minimums is not None:
                part += rounded.minimums[group]
    return weights


def _dequantized_k_quants(rounded: QuantizedMatrix, group_size: int, subgroup_size: int, zero: int) -> np.ndarray:
    weights = rounded.q.astype(np.float32)
    for subgroup, start in enumerate(range(0, len(weights), subgroup_size)):
        part, group = weights[start : start + subgroup_size], start // group_size
        part -= zero
        if rounded.subgroup_scales is not None:
            part *= rounded.subgroup_scales[subgroup]
        part *= rounded.scales[group]
        if rounded.minimums is not None:
            minimum = rounded.minimums[group].astype(np.float32)
            part += minimum if rounded.subgroup_minimums is None else minimum * rounded.subgroup_minimums[subgroup]
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
