"""Inputs whose adjacent columns are correlated."""

from __future__ import annotations

import numpy as np


def correlated(rows: int, k: int, correlation: float = 0.99, seed: int = 0) -> np.ndarray:
    """Return float32 [rows, k] with x_j = correlation * x_{j-1} + noise, where each x_j has variance 1."""
    noise = np.random.default_rng(seed).standard_normal((rows, k))
    x = noise.copy()
    for j in range(1, k):
        x[:, j] = correlation * x[:, j - 1] + np.sqrt(1 - correlation**2) * noise[:, j]
    return x.astype(np.float32)
