"""Search the scale of each group, and step and zero point of its subgroups, with the least squared error.

A weight is scale step (q - zero), with an integer step and zero for each subgroup (grid.py). For a given scale, the
subgroups are independent, so the search tries several scales and takes the best subgroups of each:

    scale    fractions of the largest weight over 127, and that of round to nearest
    step     the step that just holds the range of the subgroup, and the steps around it
    zero     q covers at most 2^bits values: from the smallest weight on, up to the largest weight, or the middle

Then the best grid of each column is improved: the least squares scale for its q, and steps and zero points around those
found. Every grid is evaluated with its scale in stored precision, and round to nearest is one of them, so the result is
never worse. The error is the sum of importance (w - v)^2, where the importance of an input is that of mse.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .grid import LARGEST_VALUE, Grid, Quantization, group_scale, nearest_step
from .units import Units

COLUMNS = 512  # number of columns searched together: a compromise between NumPy's overhead and the caches
# By bits: fractions of max |W| / 127 that are tried as scales, and steps that are tried, relative to the rounded step
# that just holds the range. With fewer steps, the scale matters more.
_TRIED: Mapping[int, tuple[tuple[float, ...], tuple[int, ...]]] = {
    4: ((1.05, 1.2), (-1, 0, 1, 2)),
    5: ((0.8, 0.9, 1.0, 1.1, 1.2), (0, 1)),
    6: ((0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5), (0, 1)),
}


def subgroup_grids(part: np.ndarray, importance: np.ndarray | None, quantization: Quantization) -> list[Grid]:
    """Return the best grids found for the subgroups of a group, W float32 [rows, n], finite.

    importance: float32 [rows], not negative; None: all equal.
    """
    found = [
        _Search(part[:, first : first + COLUMNS], importance, quantization).best()
        for first in range(0, part.shape[1], COLUMNS)
    ]
    scale = np.concatenate([lines.scale for lines in found])
    step, zero = (np.concatenate([getattr(lines, name) for lines in found], axis=1) for name in ("step", "zero"))
    return [Grid(quantization.bits, scale, zero[h], None, step[h]) for h in range(len(step))]


@dataclass
class _Lines:
    """Grids of a group's columns."""

    scale: np.ndarray  # float32 [n], in units of the search
    step: np.ndarray  # float32 [subgroups, n]
    zero: np.ndarray  # float32 [subgroups, n]
    loss: np.ndarray  # float32 [n]

    def take(self, other: _Lines) -> None:
        """Copy the columns in which the other grids are better."""
        better = other.loss < self.loss
        if not better.any():
            return
        self.scale, self.loss = (
            np.where(better, new, old) for new, old in ((other.scale, self.scale), (other.loss, self.loss))
        )
        self.step, self.zero = (
            np.where(better, new, old) for new, old in ((other.step, self.step), (other.zero, self.zero))
        )


class _Search:
    """Search of one group of some columns.

    Weights and scales are in units of their column. Arrays of weights are [inputs of a subgroup, subgroups, n], so that
    NumPy's inner loops are long.
    """

    def __init__(self, part: np.ndarray, importance: np.ndarray | None, quantization: Quantization) -> None:
        size, (k, n) = quantization.subgroup_size, part.shape
        assert size is not None
        self._quantization = quantization
        self._levels = np.float32(quantization.levels[1])
        self._units = Units(part, quantization)
        subgroups = -(-k // size)
        padded = np.zeros((subgroups * size, n), np.float32)
        padded[:k] = self._units.scaled(part)
        self._x = np.ascontiguousarray(padded.reshape(subgroups, size, n).swapaxes(0, 1))
        self._weights = None
        if importance is not None:
            weights = np.zeros(subgroups * size, np.float32)
            weights[:k] = importance / max(float(importance.max()), 1e-30)
            by_subgroup = weights.reshape(subgroups, size).T[:, :, None]
            self._weights = np.ascontiguousarray(np.broadcast_to(by_subgroup, self._x.shape))
        self._low = np.minimum(self._x.min(axis=0), 0)
        self._high = np.maximum(self._x.max(axis=0), 0)
        self._t, self._q, self._spare = (np.empty_like(self._x) for _ in range(3))

    def best(self) -> _Lines:
        """Return the best grids, with true scales."""
        scale = self._units.of(group_scale(self._units.largest, self._quantization))
        step, zero = nearest_step(self._low, self._high, scale, self._quantization)
        best = _Lines(scale, step, zero, self._loss(scale, step, zero))
        largest = self._units.of(self._units.largest)
        for fraction in _TRIED[self._quantization.bits][0]:
            best.take(self._with_scale(self._units.stored_scale(largest * np.float32(fraction) / LARGEST_VALUE)))
        best.take(self._with_scale(self._refitted(best)))
        best.scale = self._units.true(best.scale)
        nothing = self._high <= self._low
        best.step[nothing] = best.zero[nothing] = 0
        return best

    def _with_scale(self, scale: np.ndarray) -> _Lines:
        """Return the best steps and zero points found for these scales."""
        exact = np.rint((self._high - self._low) / (self._levels * np.where(scale > 0, scale, 1)))
        best_step, best_zero = np.ones_like(exact), np.zeros_like(exact)
        least = np.full_like(exact, np.inf)
        for change in _TRIED[self._quantization.bits][1]:
            step = np.clip(exact + np.float32(change), 1, self._quantization.largest_step)
            for zero, loss in self._zeros(scale, step):
                better = loss < least
                np.copyto(least, loss, where=better)
                np.copyto(best_step, step, where=better)
                np.copyto(best_zero, zero, where=better)
        return _Lines(scale, best_step, best_zero, least.sum(axis=0))

    def _zeros(self, scale: np.ndarray, step: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield zero points for the steps, and the losses of the subgroups."""
        self._divide(scale, step)
        width = _width(scale, step)
        from_low = np.clip(-np.rint(self._low / width), 0, self._levels)
        to_high = np.clip(self._levels - np.rint(self._high / width), 0, self._levels)
        yield from_low, self._rounded_loss(scale, step, from_low)
        if (to_high < from_low).any():
            yield to_high, self._rounded_loss(scale, step, to_high)
            if (to_high < from_low - 1).any():
                middle = np.floor((from_low + to_high) / 2)
                yield middle, self._rounded_loss(scale, step, middle)

    def _divide(self, scale: np.ndarray, step: np.ndarray) -> None:
        """Set self._t to the weights in steps, and self._q to the nearest integers."""
        np.multiply(self._x, 1 / _width(scale, step), out=self._t)
        np.rint(self._t, out=self._q)

    def _clipped(self, scale: np.ndarray, step: np.ndarray, zero: np.ndarray) -> np.ndarray:
        """Return self._q within the limits of q - zero, in self._spare."""
        largest = LARGEST_VALUE
        if self._units.limit is not None:
            largest = np.minimum(largest, np.floor(self._units.limit / np.where(scale > 0, scale, 1)))
        most = np.floor(largest / np.maximum(step, 1))
        clipped: np.ndarray = self._spare
        np.maximum(self._q, np.maximum(-zero, -most), out=clipped)
        np.minimum(clipped, np.minimum(self._levels - zero, most), out=clipped)
        return clipped

    def _rounded_loss(self, scale: np.ndarray, step: np.ndarray, zero: np.ndarray) -> np.ndarray:
        """Return the losses of the subgroups, [subgroups, n], after `_divide`."""
        error = self._clipped(scale, step, zero)
        np.subtract(error, self._t, out=error)
        np.square(error, out=error)
        loss: np.ndarray = self._summed(error) * np.square(_width(scale, step))
        return loss

    def _summed(self, values: np.ndarray) -> np.ndarray:
        """Return the sums of importance times values, [subgroups, n]. Overwrites the values."""
        if self._weights is not None:
            np.multiply(values, self._weights, out=values)
        total: np.ndarray = values.sum(axis=0)
        return total

    def _loss(self, scale: np.ndarray, step: np.ndarray, zero: np.ndarray) -> np.ndarray:
        self._divide(scale, step)
        total: np.ndarray = self._rounded_loss(scale, step, zero).sum(axis=0)
        return total

    def _refitted(self, lines: _Lines) -> np.ndarray:
        """Return the best scales for the q of these grids."""
        self._divide(lines.scale, lines.step)
        values = self._clipped(lines.scale, lines.step, lines.zero)
        products = self._summed(np.multiply(values, self._x, out=self._t)) * lines.step
        squares = self._summed(np.square(values, out=values)) * np.square(lines.step)
        product, square = products.sum(axis=0), squares.sum(axis=0)
        scale = np.where(square > 0, product / np.where(square > 0, square, 1), lines.scale)
        return self._units.stored_scale(np.where(scale > 0, scale, lines.scale))


def _width(scale: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return the distance of neighbouring values, [subgroups, n]; 1 for columns that are zero."""
    width: np.ndarray = scale * step
    return np.where(width > 0, width, np.float32(1))
