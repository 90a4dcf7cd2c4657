"""Sizes and sparsities for the tests of linear-layer kernels."""

from __future__ import annotations

M = (1, 2, 3, 7, 16, 33)

DIMENSIONS = (1, 15, 16, 17, 31, 32, 33, 64, 100, 288, 384, 1000)

SPARSITIES = (0.0, 0.3, 0.5, 0.9, 1.0)
