"""Matrices with patterns of zeros, and the expected products, for MaskedMatMul."""

from __future__ import annotations

import numpy as np

from .single_node import U

BLOCK = 16
PATTERNS = ("random", "blocks", "columns", "rows", "tiles")


def random_matrix(rng: np.random.Generator, rows: int, columns: int, pattern: str, sparsity: float) -> np.ndarray:
    """Return float32 [rows, columns] with a fraction of about `sparsity` zeros.

    pattern: which elements become zero together: random (single elements), blocks (16 of a row, the unit that
    MaskedMatMul skips), columns, rows, or tiles (8 rows of a column).
    """
    x = rng.standard_normal((rows, columns), dtype=np.float32)
    shape, repeats = {
        "random": ((rows, columns), (1, 1)),
        "blocks": ((rows, -(-columns // BLOCK)), (1, BLOCK)),
        "columns": ((1, columns), (rows, 1)),
        "rows": ((rows, 1), (1, columns)),
        "tiles": ((-(-rows // 8), columns), (8, 1)),
    }[pattern]
    zero = np.kron(rng.random(shape) < sparsity, np.ones(repeats, np.bool_))[:rows, :columns]
    x[zero] = 0
    return x


def expected_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the dense product in float64."""
    with np.errstate(invalid="ignore"):
        product: np.ndarray = (a.astype(np.float64)[:, :, None] * b.astype(np.float64)[None]).sum(1)
    return product


def assert_product_close(y: np.ndarray, a: np.ndarray, b: np.ndarray, products: int = 1) -> None:
    """Check that y is a @ b within the rounding of float32 sums in any order, with NaN and Inf at the same positions.

    products: number of roundings of each product before it is added.
    """
    assert y.dtype == np.float32 and y.shape == (a.shape[0], b.shape[1])
    with np.errstate(invalid="ignore"):
        a64, b64 = a.astype(np.float64), b.astype(np.float64)
        all_finite = np.isfinite(a64).all() and np.isfinite(b64).all()
        expected = a64 @ b64 if all_finite else expected_product(a, b)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
        np.testing.assert_array_equal(y[np.isinf(expected)], expected[np.isinf(expected)].astype(np.float32))
        magnitude = np.abs(np.where(np.isfinite(a64), a64, 0)) @ np.abs(np.where(np.isfinite(b64), b64, 0))
    bound = (a.shape[1] + 8 * products) * U * magnitude + 1e-37
    error = np.abs(np.where(finite, y, 0) - np.where(finite, expected, 0))
    assert np.all(error <= bound), f"largest error over bound: {np.max(error - bound)}"
