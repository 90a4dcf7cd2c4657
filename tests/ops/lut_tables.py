"""Random tables for LutPostOp, and its expected output."""

from __future__ import annotations

import numpy as np

X_TYPES = (np.uint8, np.int8, np.uint16, np.int16)

ENTRY_TYPES = (np.uint8, np.int8, np.uint16, np.int16, np.float32)


def random_table(rng: np.random.Generator, entries: int, dtype: type) -> np.ndarray:
    """Return table entries with random bits; float32 entries include NaNs with payloads."""
    return np.frombuffer(rng.bytes(entries * np.dtype(dtype).itemsize), dtype)


def random_codes(rng: np.random.Generator, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def expected(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    answer: np.ndarray = table[x.view(f"u{x.itemsize}")]
    return answer


def assert_same_bits(y: np.ndarray, other: np.ndarray) -> None:
    assert y.dtype == other.dtype and y.shape == other.shape
    np.testing.assert_array_equal(y.view(f"u{y.itemsize}"), other.view(f"u{y.itemsize}"))
