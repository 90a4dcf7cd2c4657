"""Search, for each group, the grid with the least sum of importance (w - v)^2. Needs no inputs.

A quantized weight is scale t + minimum, with an integer t in low … low + width. Without minimums, minimum is 0; with
zero points, low is -zero. For given t, the best scale and minimum are a weighted least squares fit; for a given scale
and minimum, the best t is the nearest. The search alternates between the two from several starts, and each column takes
the best grid seen, with scale and minimum in stored precision. Round to nearest is one of the starts, so the result is
never worse. Groups with subgroups have their own search (subgroups.py). The other starts are

    minimum, zero points    the range of the group, a wider one, or the range with a fraction cut off at either end
    fractions               as for minimums; the zero points found are then rounded to sixteenths
    symmetric 4             the largest value by magnitude is about -8 or 7 steps; the scale has either sign, so that
                            the side with this value gets the extra level -8
    symmetric 8             the largest value is 127 steps or more, and values beyond 127 are clipped

as in llama.cpp's and HQQ's quantizers. Weights on such a grid, such as dequantized GGUF weights (Q4_0, Q4_1), are kept
exactly.

The importance of an input is its energy, the mean of x^2. Without inputs, all weights are equally important: powers of
|w|, and sigma^2 + w^2, are worse (docs/verification.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from .grid import (
    FRACTION_STEPS,
    LEVELS,
    Grid,
    Quantization,
    QuantizedMatrix,
    fit_grid,
    round_group,
)
from .subgroups import COLUMNS, subgroup_grids
from .units import Units

_BLOCK = 1 << 16  # number of weights searched at a time, so that the working set fits the cache
_TURNS = 2  # number of least squares fits from each starting grid
# Fractions of the range that a start cuts off below and above.
_CUTS = (
    (-0.02, -0.02),
    (0.03, 0.03),
    (0.06, 0.06),
    (0.1, 0.1),
    (0.05, 0.0),
    (0.0, 0.05),
    (0.1, 0.0),
    (0.0, 0.1),
    (0.2, 0.0),
    (0.0, 0.2),
)
# Steps that a start assigns to the largest value by magnitude.
_STEPS = {
    4: (-8, -7.75, -7.5, -7.25, -7, -6.5, -8.5, -9, -9.5, 7, 7.5, 6.5, 6),
    8: (127, 128, 130, 133, 138, 145, 155, 170, 190),
}
_SAMPLE = 8  # number of inputs checked first, which suffices to reject most groups that are not on a grid


@dataclass
class _Lines:
    """Grids of columns: the values scale t + minimum, t = low … low + width."""

    scale: np.ndarray  # float32 [n]
    minimum: np.ndarray | None  # float32 [n]
    low: np.ndarray | np.float32  # integers as float32, [n] or a scalar

    def take(self, other: _Lines, where: np.ndarray) -> None:
        """Copy the other object's grids in the columns `where`, bool [n]."""
        self.scale = np.where(where, other.scale, self.scale)
        self.low = np.where(where, other.low, self.low)
        if self.minimum is not None and other.minimum is not None:
            self.minimum = np.where(where, other.minimum, self.minimum)


def round_mse(matrix: np.ndarray, quantization: Quantization, importance: np.ndarray | None = None) -> QuantizedMatrix:
    """Quantize W, float32 [k, n], finite, with the best grids found.

    importance: float32 [k], not negative; None: all equal.
    """
    k, n = matrix.shape
    result = QuantizedMatrix.empty(k, n, quantization)
    rows = quantization.rows(k)
    step = max(16, _BLOCK // rows) if quantization.subgroup_size is None else COLUMNS

    for group, start in enumerate(range(0, k, rows)):
        inputs = slice(start, start + rows)
        for first in range(0, n, step):
            columns = slice(first, min(first + step, n))
            part = np.ascontiguousarray(matrix[inputs, columns])
            grids = mse_grids(part, None if importance is None else importance[inputs], quantization)
            round_group(part, grids, quantization, result, group, columns)
    return result


def mse_grids(part: np.ndarray, importance: np.ndarray | None, quantization: Quantization) -> list[Grid]:
    """Return the grids of a group, W float32 [rows, n], with the least sum of importance (w - v)^2 found.

    Returns:
        The grids of the group's subgroups; without subgroups, one grid.
    """
    if quantization.subgroup_size is not None:
        return subgroup_grids(part, importance, quantization)
    if quantization.fractions:
        return [_with_fractions(part, importance, quantization)]
    return [_Search(part, importance, quantization).grid()]


def _with_fractions(part: np.ndarray, importance: np.ndarray | None, quantization: Quantization) -> Grid:
    """Search with minimums, and convert them to fractional zero points.

    Columns whose zero point is out of range get an integer zero point.
    """
    found = _Search(part, importance, replace(quantization, fractions=False, minimum=True)).grid()
    assert found.minimum is not None
    wanted = -found.minimum / np.where(found.scale != 0, found.scale, 1)
    zero, scale = quantization.stored_zero(wanted), found.scale.copy()
    beyond = (found.scale == 0) | (np.abs(zero - wanted) > 1 / FRACTION_STEPS)
    if beyond.any():
        columns = np.ascontiguousarray(part[:, beyond])
        whole = _Search(columns, importance, replace(quantization, fractions=False)).grid()
        scale[beyond], zero[beyond] = whole.scale, whole.zero
    return Grid(quantization.bits, scale, zero)


class _Search:
    """Search of the grids of one group.

    Weights, scales and minimums are in units of their column.
    """

    def __init__(self, part: np.ndarray, importance: np.ndarray | None, quantization: Quantization) -> None:
        self._quantization = quantization
        self._units = Units(part, quantization)
        self._x = self._units.scaled(part)
        self._importance = None if importance is None else importance[:, None] / max(importance.max(), 1e-30)
        low, high = quantization.levels
        self._width = np.float32(high - low)
        self._t, self._spare = np.empty_like(self._x), np.empty_like(self._x)
        self._total = np.float32(len(part)) if self._importance is None else self._importance.sum()
        self._sum = self._summed(self._x)
        nearest = fit_grid(part, quantization)
        minimum = None if nearest.minimum is None else self._units.of(nearest.minimum)
        zero = np.float32(-low) if nearest.zero is None else nearest.zero
        self._best = _Lines(self._units.of(nearest.scale), minimum, -zero)
        self._least = np.full(part.shape[1], np.inf, np.float32)

    def grid(self) -> Grid:
        nearest = _Lines(**vars(self._best))
        self._follow(nearest)
        for start in self._starts():
            self._follow(start)
        for lines in self._exact():
            self._offer(lines)
        best, bits = self._best, self._quantization.bits
        scale = self._units.true(best.scale)
        if best.minimum is not None:
            return Grid(bits, scale, None, self._units.true(best.minimum))
        return Grid(bits, scale, None if self._quantization.symmetric else np.negative(best.low))

    def _summed(self, values: np.ndarray) -> np.ndarray:
        total: np.ndarray = (values if self._importance is None else values * self._importance).sum(axis=0)
        return total

    def _follow(self, lines: _Lines) -> None:
        """Evaluate these grids, and the grids that least squares makes from them."""
        self._offer(lines)
        for _ in range(_TURNS):
            lines = self._refitted(lines)
            self._offer(lines)

    def _offer(self, lines: _Lines) -> None:
        """Round to these grids, and keep a column's grid if it is the best so far. Leaves t in self._t."""
        t, error = self._t, self._spare
        divisor = np.where(lines.scale != 0, lines.scale, 1)
        if lines.minimum is None:
            np.divide(self._x, divisor, out=t)
        else:
            np.subtract(self._x, lines.minimum, out=t)
            np.divide(t, divisor, out=t)
        np.rint(t, out=t)
        np.clip(t, lines.low, lines.low + self._width, out=t)
        np.multiply(t, lines.scale, out=error)
        if lines.minimum is not None:
            error += lines.minimum
        if self._units.limit is not None:
            np.copyto(error, np.inf, where=np.abs(error) > self._units.limit)
        np.subtract(self._x, error, out=error)
        np.square(error, out=error)
        loss = self._summed(error)
        better = loss < self._least
        if better.any():
            self._least = np.where(better, loss, self._least)
            self._best.take(lines, better)

    def _refitted(self, lines: _Lines) -> _Lines:
        """Return the grids with the best scale (and minimum) for the t in self._t."""
        t = self._t
        weighted = t if self._importance is None else t * self._importance
        squares = np.multiply(weighted, t, out=self._spare).sum(axis=0)
        products = np.multiply(weighted, self._x, out=self._spare).sum(axis=0)
        if lines.minimum is None:
            scale = np.where(squares > 0, products / np.where(squares > 0, squares, 1), lines.scale)
            return _Lines(self._units.stored_scale(scale), None, lines.low)
        steps = weighted.sum(axis=0)
        determinant = self._total * squares - steps * steps
        fits = determinant > 1e-6 * self._total * squares
        scale = (self._total * products - steps * self._sum) / np.where(fits, determinant, 1)
        scale = self._units.stored_scale(np.where(fits, scale, lines.scale))
        total = self._total if self._total > 0 else np.float32(1)
        return _Lines(scale, self._units.stored((self._sum - scale * steps) / total), lines.low)

    def _starts(self) -> Iterator[_Lines]:
        low, high = self._x.min(axis=0), self._x.max(axis=0)
        if self._quantization.symmetric:
            largest = np.where(high > -low, high, low)
            if self._quantization.bits == 8:
                largest = np.abs(largest)
            for steps in _STEPS[self._quantization.bits]:
                scale = self._units.stored_scale(largest / np.float32(steps))
                yield _Lines(scale, None, np.float32(self._quantization.levels[0]))
            return
        if not self._quantization.minimum:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
        for below, above in _CUTS:
            scale = self._units.stored_scale(np.float32((1 - below - above) / LEVELS) * (high - low))
            start = low + np.float32(below) * (high - low)
            if self._quantization.minimum:
                yield _Lines(scale, self._units.stored(start), np.float32(0))
            else:
                zero = np.clip(np.rint(-start / np.where(scale > 0, scale, 1)), 0, LEVELS)
                yield _Lines(scale, None, -zero)

    def _exact(self) -> Iterator[_Lines]:
        """Yield grids that represent whole columns exactly, if such grids exist."""
        low, high = self._x.min(axis=0), self._x.max(axis=0)
        if self._quantization.bits == 8:
            return
        if self._quantization.minimum:
            for levels in range(1, LEVELS + 1):
                scale = self._units.stored_scale((high - low) / np.float32(levels))
                for end, sign in ((low, np.float32(1)), (high, np.float32(-1))):
                    if self._is_on_grid(scale, end).any():
                        for before in range(LEVELS + 1 - levels):
                            minimum = self._units.stored(end - sign * np.float32(before) * scale)
                            yield _Lines(sign * scale, minimum, np.float32(0))
            return
        largest = np.where(high > -low, high, low)
        first, last = self._quantization.levels
        for levels in range(first, last + 1) if self._quantization.symmetric else range(1, LEVELS + 1):
            if not levels:
                continue
            scale = self._units.stored_scale(largest / np.float32(levels))
            if not self._quantization.symmetric:
                scale = np.abs(scale)
            if self._is_on_grid(scale, np.float32(0)).any():
                lowest = np.clip(np.rint(low / np.where(scale != 0, scale, 1)), -LEVELS, 0)
                yield _Lines(scale, None, np.float32(first) if self._quantization.symmetric else lowest)

    def _is_on_grid(self, scale: np.ndarray, origin: np.ndarray | np.float32) -> np.ndarray:
        """Return True for columns whose first inputs are integer steps from the origin, up to rounding."""
        steps = (self._x[:_SAMPLE] - origin) / np.where(scale != 0, scale, 1)
        distance = np.abs(steps - np.rint(steps)).max(axis=0)
        return np.asarray((scale != 0) & (distance < 1e-4))
