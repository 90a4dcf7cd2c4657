"""Count zero blocks of a matrix."""

from __future__ import annotations

import numpy as np


def block_zeros(values: np.ndarray) -> int:
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 4)))
    return int(np.count_nonzero(~padded.reshape(len(values), -1, 4).any(axis=2)))
