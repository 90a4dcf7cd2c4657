"""LutPostOp's kernels, each by itself, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from ortolan import _testing

from .single_node import at_odd_address

X_TYPES = (np.uint8, np.int8, np.uint16, np.int16)
ENTRY_TYPES = (np.uint8, np.int8, np.uint16, np.int16, np.float32)
KERNELS = [row for row in _testing.lut_post_op_kernels() if row["runs_here"]]


def random_table(rng: np.random.Generator, entries: int, dtype: type) -> np.ndarray:
    """Any bits: of float32, NaNs with payloads as well."""
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


def test_every_pair_of_sizes_has_a_kernel_for_any_cpu() -> None:
    rows = {(row["index_bytes"], row["entry_bytes"]) for row in KERNELS if row["isa"] == "scalar"}
    assert rows == {(index, entry) for index in (1, 2) for entry in (1, 2, 4)}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda row: row["name"])
def test_kernel_looks_up_every_number_at_every_length(kernel: _testing.LutKernelInfo) -> None:
    """All codes, then all lengths around the vectors'; nothing beyond them is read or written (arrays end where their
    memory ends: the sanitizer build watches)."""
    rng = np.random.default_rng(kernel["index_bytes"] * kernel["entry_bytes"])
    for x_type in X_TYPES:
        for entry_type in ENTRY_TYPES:
            sizes = (np.dtype(x_type).itemsize, np.dtype(entry_type).itemsize)
            if sizes != (kernel["index_bytes"], kernel["entry_bytes"]):
                continue
            entries = 256 ** sizes[0]
            table = random_table(rng, entries, entry_type)
            codes = rng.permutation(np.arange(entries, dtype=f"u{sizes[0]}")).view(x_type)
            assert_same_bits(_testing.lut_post_op(codes, table, kernel["name"]), expected(codes, table))
            for count in (*range(68), 127, 128, 129, 200, 1000):
                x = random_codes(rng, (count,), x_type)
                assert_same_bits(_testing.lut_post_op(x, table, kernel["name"]), expected(x, table))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda row: row["name"])
def test_nothing_need_be_aligned(kernel: _testing.LutKernelInfo) -> None:
    rng = np.random.default_rng(1)
    x_type = f"u{kernel['index_bytes']}"
    entry_type = {1: "u1", 2: "i2", 4: "f4"}[kernel["entry_bytes"]]
    x = random_codes(rng, (1000,), np.dtype(x_type).type)
    table = random_table(rng, 256 ** kernel["index_bytes"], np.dtype(entry_type).type)
    y = _testing.lut_post_op(at_odd_address(x), at_odd_address(table), kernel["name"])
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
        (np.zeros(3, np.float32), np.zeros(256, np.uint8), None, "8 or 16 bits"),
        (np.zeros(3, np.int32), np.zeros(256, np.uint8), None, "8 or 16 bits"),
        (np.zeros(3, np.uint8), np.zeros(256, np.float64), None, "8 or 16 bits"),
        (np.zeros(3, np.uint8), np.zeros(256, np.float16), None, "8 or 16 bits"),
        (np.zeros(3, np.uint8), np.zeros(255, np.uint8), None, "255 entries, expected .256."),
        (np.zeros(3, np.uint16), np.zeros(256, np.uint8), None, "256 entries, expected .65536."),
        (np.zeros(3, np.uint8), np.zeros((1, 256), np.uint8), None, "256 entries"),
        (np.zeros(3, np.uint8), np.zeros(256, np.uint8), "ScalarFrom8To16", "other sizes"),
        (np.zeros(3, np.uint8), np.zeros(256, np.uint8), "Fastest", "no kernel is called 'Fastest'"),
    ],
)
def test_refuses(x: np.ndarray, table: np.ndarray, kernel: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _testing.lut_post_op(x, table, kernel)
