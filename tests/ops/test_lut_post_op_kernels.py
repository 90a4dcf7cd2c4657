"""Test each kernel of LutPostOp against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from ortolan import _testing

from .lut_tables import ENTRY_TYPES, X_TYPES, assert_same_bits, expected, random_codes, random_table
from .single_node import at_odd_address

KERNELS = [row["name"] for row in _testing.lut_post_op_kernels() if row["runs_here"]]


def test_the_last_kernel_runs_anywhere() -> None:
    assert _testing.lut_post_op_kernels()[-1]["isa"] == "scalar"


@pytest.mark.parametrize("x_type", X_TYPES)
@pytest.mark.parametrize("entry_type", ENTRY_TYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_looks_up_every_number_at_every_length(kernel: str, x_type: type, entry_type: type) -> None:
    """All codes, and all lengths around multiples of the vector length.

    Arrays end where their memory ends, so that the sanitizer build finds accesses beyond them.
    """
    index_bytes = np.dtype(x_type).itemsize
    rng = np.random.default_rng(index_bytes * np.dtype(entry_type).itemsize)
    entries = 256**index_bytes
    table = random_table(rng, entries, entry_type)
    codes = rng.permutation(np.arange(entries, dtype=f"u{index_bytes}")).view(x_type)
    assert_same_bits(_testing.lut_post_op(codes, table, kernel), expected(codes, table))
    for count in (*range(68), 127, 128, 129, 200, 1000):
        x = random_codes(rng, (count,), x_type)
        assert_same_bits(_testing.lut_post_op(x, table, kernel), expected(x, table))


@pytest.mark.parametrize("entry_type", ["u1", "i2", "f4"])
@pytest.mark.parametrize("x_type", ["u1", "u2"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_need_be_aligned(kernel: str, x_type: str, entry_type: str) -> None:
    rng = np.random.default_rng(1)
    x = random_codes(rng, (1000,), np.dtype(x_type).type)
    table = random_table(rng, 256 ** np.dtype(x_type).itemsize, np.dtype(entry_type).type)
    y = _testing.lut_post_op(at_odd_address(x), at_odd_address(table), kernel)
    assert_same_bits(y, expected(x, table))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 50), (1, 1)])
def test_shapes_and_strides(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    table = random_table(rng, 256, np.uint8)
    x = random_codes(rng, shape, np.int8)
    assert_same_bits(_testing.lut_post_op(x, table), expected(x, table))
    assert_same_bits(_testing.lut_post_op(x.T, table), expected(x.T, table))


@pytest.mark.parametrize(
    ("x", "table", "kernel", "message"),
    [
        (np.zeros(3, np.float32), np.zeros(256, np.uint8), None, "8- or 16-bit"),
        (np.zeros(3, np.int32), np.zeros(256, np.uint8), None, "8- or 16-bit"),
        (np.zeros(3, np.uint8), np.zeros(256, np.float64), None, "8- or 16-bit"),
        (np.zeros(3, np.uint8), np.zeros(256, np.float16), None, "8- or 16-bit"),
        (np.zeros(3, np.uint8), np.zeros(255, np.uint8), None, "255 entries, expected .256."),
        (np.zeros(3, np.uint16), np.zeros(256, np.uint8), None, "256 entries, expected .65536."),
        (np.zeros(3, np.uint8), np.zeros((1, 256), np.uint8), None, "256 entries"),
        (np.zeros(3, np.uint8), np.zeros(256, np.uint8), "Fastest", "no kernel is called 'Fastest'"),
    ],
)
def test_refuses(x: np.ndarray, table: np.ndarray, kernel: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _testing.lut_post_op(x, table, kernel)
