"""Chooses the range with which activations become u8 numbers: the one with the smallest mean squared error.

A range that holds the largest number seen spends its 256 steps on the few that are large. Cutting those off makes the
steps finer for all others; how far is found by trial, as for weights (grid.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_LEVELS = 255
# Shares of the lowest and the highest number seen that are tried as ends of the range.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)
_MOST_NUMBERS = 1 << 16  # that take part in a trial
_SMALLEST_SCALE = np.float32(2.0**-100)


@dataclass(frozen=True)
class FixedRange:
    """The number q, 0 … 255, stands for scale (q - zero_point)."""

    scale: np.float32  # above 0
    zero_point: np.uint8

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """What x becomes, as float32."""
        zero_point = np.float32(self.zero_point)
        q = np.clip(np.rint(x * (1 / self.scale)) + zero_point, 0, _LEVELS)
        return np.asarray((q - zero_point) * self.scale, np.float32)


def choose_range(x: np.ndarray, function: Callable[[np.ndarray], np.ndarray] | None = None) -> FixedRange:
    """The range for numbers like x, of any shape, finite.

    function: what is computed from the numbers next, element by element; then its result is what should be near.
    """
    numbers = np.asarray(x, np.float32).reshape(-1)
    low, high = min(float(numbers.min(initial=0)), 0.0), max(float(numbers.max(initial=0)), 0.0)
    # What is tried on some stands for all, but for the ends, of which there is one each.
    step = max(1, numbers.size // _MOST_NUMBERS)
    numbers = np.append(numbers[::step], np.asarray([low, high], np.float32))
    exact = numbers if function is None else function(numbers)

    def error(low_share: float, high_share: float) -> float:
        found = _range(low * low_share, high * high_share).rounded(numbers)
        found = found if function is None else function(found)
        return float(np.square(found - exact, dtype=np.float64).mean())

    best = min(_SHARES, key=lambda share: error(share, share))
    best_low = min(_SHARES, key=lambda share: error(share, best))
    best_high = min(_SHARES, key=lambda share: error(best_low, share))
    return _range(low * best_low, high * best_high)


def _range(low: float, high: float) -> FixedRange:
    scale = max(np.float32((high - low) / _LEVELS), _SMALLEST_SCALE)
    return FixedRange(scale, np.uint8(np.clip(np.rint(-low / scale), 0, _LEVELS)))
