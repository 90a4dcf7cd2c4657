"""Columns of weights in units in which no square overflows or vanishes, for searches of grids."""

from __future__ import annotations

import numpy as np

from .grid import LARGEST_FLOAT, SMALLEST_SCALE, Quantization

_LARGEST_SAFE = 120  # below this exponent, no value of a grid overflows


class Units:
    """Powers of two, one per column, by which the column's largest value becomes 0.5 to 1.

    Attributes:
        largest: The largest |W| of each column, float32 [n].
        limit: The largest value of a grid, in units, that does not overflow, float32 [n]; None if no column is that
            large.
    """

    def __init__(self, part: np.ndarray, quantization: Quantization) -> None:
        """Choose the units of W, float32 [rows, n], finite."""
        self._quantization = quantization
        self.largest = np.maximum(part.max(axis=0), -part.min(axis=0))
        self._exponent = np.frexp(self.largest)[1]
        huge = (self._exponent >= _LARGEST_SAFE).any()
        self.limit = np.ldexp(LARGEST_FLOAT, np.minimum(-self._exponent, 0)) if huge else None

    def scaled(self, part: np.ndarray) -> np.ndarray:
        """Return W in units, a new array."""
        # Two factors, because a single power of two may overflow float32.
        first = self._exponent // 2
        result: np.ndarray = part * np.ldexp(np.float32(1), -first) * np.ldexp(np.float32(1), first - self._exponent)
        return result

    def of(self, values: np.ndarray) -> np.ndarray:
        """Return values of the columns, [n], in units."""
        scaled: np.ndarray = np.ldexp(values, -self._exponent)
        return scaled

    def true(self, values: np.ndarray) -> np.ndarray:
        """Return the values, [n], that these are in units."""
        with np.errstate(over="ignore"):
            true: np.ndarray = np.clip(np.ldexp(values, self._exponent), -LARGEST_FLOAT, LARGEST_FLOAT)
        return true

    def stored(self, values: np.ndarray) -> np.ndarray:
        """Round values in units to stored precision."""
        return self.of(self._quantization.short(self.true(values)))

    def stored_scale(self, scale: np.ndarray) -> np.ndarray:
        """Round scales in units to stored precision. 0 stays 0; others are at least SMALLEST_SCALE in magnitude."""
        true = self.true(scale)
        short = self._quantization.short(true)
        short = np.where(np.abs(short) < SMALLEST_SCALE, np.copysign(SMALLEST_SCALE, true), short)
        return self.of(np.where(scale == 0, np.float32(0), short))
