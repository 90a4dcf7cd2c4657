"""Test the bitmap format of bf16 weights: layout, round trip, and rejection of malformed tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..ops.single_node import runnable_kernels, sparse_weight, to_bf16
from ..sampling import examples
from .bitmaps import malformed_bf16, mutate


def test_layout_of_a_small_matrix() -> None:
    w = np.zeros((34, 17), np.float32)
    w[0, 0], w[1, 0], w[0, 1], w[3, 15], w[33, 0], w[2, 16] = 1, 2, 3, 4, 5, 6
    masks, values, offsets = _native.pack_bitmap(w)
    assert masks.shape == (2, 2, 64)
    rows = masks.reshape(-1).view("<u4").reshape(2, 2, 16)
    expected = np.zeros((2, 2, 16), np.uint32)
    expected[0, 0, 0] = 0b111  # inputs 0 and 1 of column 0, input 0 of column 1
    expected[0, 0, 1] = 1 << 31  # input 3 of column 15
    expected[0, 1, 0] = 0b10  # input 33 of column 0
    expected[1, 0, 1] = 0b1  # input 2 of column 16
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(offsets, [0, 5, 6])
    np.testing.assert_array_equal(values[:6], (np.array([1, 2, 3, 4, 5, 6], np.float32).view(np.uint32) >> 16))
    assert values.size == 6 + 32 and not values[6:].any()


@examples(200)
@given(k=st.integers(1, 150), n=st.integers(1, 70), sparsity=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_round_trip_gives_the_weights_rounded_to_bf16(k: int, n: int, sparsity: float, seed: int) -> None:
    w = sparse_weight(np.random.default_rng(seed), k, n, sparsity)
    masks, values, offsets = _native.pack_bitmap(w)
    np.testing.assert_array_equal(_native.unpack_bitmap(masks, values, offsets, k, n), to_bf16(w))
    assert offsets[-1] == np.count_nonzero(to_bf16(w)) == np.unpackbits(masks).sum()


def test_weights_that_round_to_zero_are_not_stored() -> None:
    w = np.array([[1e-45, -0.0, 1.0]], np.float32)
    _, values, offsets = _native.pack_bitmap(w)
    assert offsets[-1] == 1 and values[0] == 0x3F80


def test_dense_layout_of_a_small_matrix() -> None:
    w = np.zeros((34, 17), np.float32)
    w[0, 0], w[1, 0], w[0, 1], w[3, 15], w[33, 0], w[2, 16], w[5, 5] = 1, 2, 3, 4, 5, 6, -0.0
    masks, values, offsets = _native.pack_bitmap(w, dense=True)
    assert masks.shape == offsets.shape == (0,)
    assert (masks.dtype, offsets.dtype) == (np.uint8, np.int64)
    expected = np.zeros((2, 2, 16, 32), np.float32)  # [panel, tile, row, weight]
    expected[0, 0, 0, :3] = 1, 2, 3
    expected[0, 0, 1, 31] = 4
    expected[0, 1, 0, 1] = 5
    expected[1, 0, 1, 0] = 6
    np.testing.assert_array_equal(values, expected.reshape(-1).view(np.uint32) >> 16)


@examples(200)
@given(k=st.integers(1, 150), n=st.integers(1, 70), sparsity=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_dense_round_trip_and_order_of_the_bitmap(k: int, n: int, sparsity: float, seed: int) -> None:
    w = sparse_weight(np.random.default_rng(seed), k, n, sparsity)
    masks, values, offsets = _native.pack_bitmap(w, dense=True)
    assert values.size == -(-n // 16) * -(-k // 32) * 512
    np.testing.assert_array_equal(_native.unpack_bitmap(masks, values, offsets, k, n), to_bf16(w))
    # The bitmap stores the dense values at the set bits; all other dense values are zero.
    masks, stored, _ = _native.pack_bitmap(w)
    bits = np.unpackbits(masks.reshape(-1), bitorder="little").astype(bool)
    np.testing.assert_array_equal(values[bits], stored[:-32])
    assert not values[~bits].any()


def test_takes_transposed_and_other_dtypes() -> None:
    w = np.arange(6, dtype=np.float64).reshape(3, 2)
    np.testing.assert_array_equal(_native.unpack_bitmap(*_native.pack_bitmap(w.T), 2, 3), w.T)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3,), (1, 2, 3)])
def test_refuses_what_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="w "):
        _native.pack_bitmap(np.zeros(shape, np.float32))


@pytest.mark.parametrize("case", malformed_bf16())
def test_malformed_tensors_are_refused(case: str) -> None:
    tensors, k, n, message = malformed_bf16()[case]
    with pytest.raises(ValueError, match=message):
        _native.unpack_bitmap(*tensors, k, n)


@pytest.mark.parametrize("dense", [False, True])
def test_ten_thousand_mutations_neither_crash_nor_slip_through(dense: bool) -> None:
    rng = np.random.default_rng(20)
    kernels = runnable_kernels()
    refused = accepted = 0
    for i in range(10_000):
        k, n = int(rng.integers(1, 100)), int(rng.integers(1, 50))
        packed = _native.pack_bitmap(sparse_weight(rng, k, n, rng.random()), dense)
        tensors, k, n = mutate(rng, packed, k, n)
        try:
            w = _native.unpack_bitmap(*tensors, k, n)
        except ValueError:
            refused += 1
            continue
        accepted += 1
        # Accepted tensors must run on all kernels and give the product with the unpacked matrix.
        x = np.ones((1 + i % 3, k), np.float32)
        y = _testing.sparse_amx_matmul(x, *tensors, k, n, kernel=kernels[i % len(kernels)])
        with np.errstate(over="ignore", invalid="ignore"):
            expected = x.astype(np.float64) @ w
            # In dense storage, a mutation may have put Inf or NaN into the padding outside of the matrix.
            finite = np.isfinite(tensors[1].view(ml_dtypes.bfloat16)).all() and np.abs(expected).max() < 1e37
        if finite:
            np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-4 * max(1.0, np.abs(w).sum()))
    assert refused > 5_000 and accepted > 500
