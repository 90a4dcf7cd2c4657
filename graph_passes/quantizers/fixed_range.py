"""A range of activations that is known before the model runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FixedRange:
    """The number q, 0 … 255, stands for scale (q - zero_point)."""

    scale: np.float32  # above 0
    zero_point: np.uint8
