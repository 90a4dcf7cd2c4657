"""Choose the range that quantizes activations to uint8 with the smallest mean squared error.

A range up to the largest sample spends its 256 steps on a few large values. Clipping them makes the steps finer for all
other values. The clipped fraction is found by trial.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_LEVELS = 255
# Fractions of the smallest and of the largest sample that are tried as ends of the range.
_FRACTIONS = (
    1.0,
    0.95,
    0.9,
    0.85,
    0.8,
    0.75,
    0.7,
    0.65,
    0.6,
    0.55,
    0.5,
    0.45,
    0.4,
    0.35,
    0.3,
    0.25,
    0.2,
    0.15,
    0.1,
    0.05,
)
_MAX_SAMPLES = 1 << 16  # limit of the samples used to evaluate one range
_SMALLEST_SCALE = np.float32(2.0**-100)


@dataclass(frozen=True)
class FixedRange:
    """A range of uint8 activations: q represents scale (q - zero_point)."""

    scale: np.float32  # above 0
    zero_point: np.uint8

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """Return x quantized and dequantized, float32."""
        zero_point = np.float32(self.zero_point)
        q = np.clip(np.rint(x * (1 / self.scale)) + zero_point, 0, _LEVELS)
        return np.asarray((q - zero_point) * self.scale, np.float32)


def choose_range(x: np.ndarray, function: Callable[[np.ndarray], np.ndarray] | None = None) -> FixedRange:
    """Return the range for values like the finite samples x, of any shape.

    function: element-wise function of the values; then the error of its result is minimized.
    """
    samples = np.asarray(x, np.float32).reshape(-1)
    low, high = min(float(samples.min(initial=0)), 0.0), max(float(samples.max(initial=0)), 0.0)
    # A subset of the samples represents all, except for the two ends.
    step = max(1, samples.size // _MAX_SAMPLES)
    samples = np.append(samples[::step], np.asarray([low, high], np.float32))
    exact = samples if function is None else function(samples)

    def error(low_fraction: float, high_fraction: float) -> float:
        found = _range(low * low_fraction, high * high_fraction).rounded(samples)
        found = found if function is None else function(found)
        return float(np.square(found - exact, dtype=np.float64).mean())

    best = min(_FRACTIONS, key=lambda fraction: error(fraction, fraction))
    best_low = min(_FRACTIONS, key=lambda fraction: error(fraction, best))
    best_high = min(_FRACTIONS, key=lambda fraction: error(best_low, fraction))
    return _range(low * best_low, high * best_high)


def _range(low: float, high: float) -> FixedRange:
    scale = max(np.float32((high - low) / _LEVELS), _SMALLEST_SCALE)
    return FixedRange(scale, np.uint8(np.clip(np.rint(-low / scale), 0, _LEVELS)))
