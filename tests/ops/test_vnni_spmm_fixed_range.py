"""Test every kernel of VNNISpMM with fixed ranges and with a hidden layer against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from ortolan import _native, _testing

from .block_sparse import BlockSparseLayer, HiddenLayer, Range, runnable_kernels
from .single_node import U

KERNELS = runnable_kernels()
SHAPES = ((1, 1), (65, 18), (130, 70), (300, 16))
COUNTS = (1, 2, 3, 4, 5, 15, 16, 17, 33, 49, 64, 65, 81, 130)


def check_rows(layer: BlockSparseLayer, y: np.ndarray, q: np.ndarray, given: Range, bias: np.ndarray | None) -> None:
    product = ((q.astype(np.int64) - given.zero_point) @ layer.q.astype(np.int64)) * given.scale64 * layer.scales
    exact = product + (0 if bias is None else bias)
    assert y.shape == exact.shape and y.dtype == np.float32
    assert np.all(np.abs(y - exact) <= 4 * U * np.abs(product) + 1.01 * U * np.abs(exact))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sparsity", [0.0, 0.8, 1.0])
def test_rows_of_one_range(kernel: str, sparsity: float) -> None:
    rng = np.random.default_rng(int(10 * sparsity))
    for k, n in SHAPES:
        layer = BlockSparseLayer.random(rng, k, n, sparsity)
        packed = _native.pack_block_sparse(layer.q)
        bias = rng.standard_normal(n, dtype=np.float32) if k % 2 else None
        for m in COUNTS:
            given = Range(0.02, int(rng.integers(256)))
            x = rng.standard_normal((m, k), dtype=np.float32) * 3  # large enough that some values are clipped
            y = _testing.vnni_spmm(x, *packed, layer.scales, k, n, bias, kernel, given.scale, given.zero_point)
            check_rows(layer, y, given.quantize(x), given, bias)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("m", [1, 5, 20, 70])
def test_numbers_beyond_the_range(kernel: str, m: int) -> None:
    q = np.zeros((6, 6), np.int8)
    np.fill_diagonal(q, 1)
    packed = _native.pack_block_sparse(q)
    x = np.tile(np.array([3e38, -3e38, np.inf, -np.inf, np.nan, -np.nan], np.float32), (m, 1))
    y = _testing.vnni_spmm(x, *packed, np.ones(6, np.float32), 6, 6, None, kernel, 0.5, 100)
    np.testing.assert_array_equal(y, np.tile(np.array([77.5, -50, 77.5, -50, 77.5, 77.5], np.float32), (m, 1)))


@pytest.mark.parametrize("kernel", KERNELS[:-1])
def test_a_hidden_layer_of_the_same_bits_as_the_portable_kernel(kernel: str) -> None:
    rng = np.random.default_rng(3)
    hidden = HiddenLayer.random(rng, 300, 170, 0.8)
    for m in (*range(1, 20), 33, 70):
        x = rng.standard_normal((m, 300), dtype=np.float32)
        np.testing.assert_array_equal(hidden.run(x, kernel), hidden.run(x, KERNELS[-1]))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sparsity", [0.0, 0.8, 1.0])
def test_a_hidden_layer(kernel: str, sparsity: float) -> None:
    rng = np.random.default_rng(int(10 * sparsity))
    for k, n in SHAPES:
        for m in COUNTS:
            hidden = HiddenLayer.random(rng, k, n, sparsity)
            x = rng.standard_normal((m, k), dtype=np.float32)
            y = hidden.run(x, kernel)
            assert y.shape == (m, n) and y.dtype == np.float32
            low, high = hidden.table_indices(x)
            assert np.all(high - low <= 1)
            table_y = hidden.table_y
            either = [table_y.scale64 * (hidden.table[q].astype(float) - table_y.zero_point) for q in (low, high)]
            assert np.all(np.min([np.abs(y - one) for one in either], axis=0) <= 2 * U * np.abs(y))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 20])
def test_a_hidden_layer_of_the_most_inputs(kernel: str, m: int) -> None:
    rng = np.random.default_rng(m)
    hidden = HiddenLayer.random(rng, 65536, 18, 0.999)
    x = rng.standard_normal((m, 65536), dtype=np.float32)
    y = hidden.run(x, kernel)
    low, high = (hidden.table[q].astype(float) for q in hidden.table_indices(x))
    table_y = hidden.table_y
    either = [table_y.scale64 * (numbers - table_y.zero_point) for numbers in (low, high)]
    assert len(np.unique(low)) > 4
    assert np.all(np.min([np.abs(y - one) for one in either], axis=0) <= 2 * U * np.abs(y))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("m", [1, 4, 17, 64])
def test_every_number_through_the_table(kernel: str, m: int) -> None:
    k = 256
    identity = BlockSparseLayer(np.eye(k, dtype=np.int8), np.ones(k, np.float32))
    table = np.random.default_rng(m).permutation(256).astype(np.uint8)
    same = Range(0.5, 0)
    hidden = HiddenLayer(identity, None, same, same, Range(0.25, 3), table)
    x = np.tile(np.arange(256, dtype=np.float32) / 2, (m, 1))
    np.testing.assert_array_equal(hidden.run(x, kernel), np.tile((table.astype(np.float32) - 3) / 4, (m, 1)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("m", [1, 20])
def test_sums_beyond_the_table_are_cut_off(kernel: str, m: int) -> None:
    scales = np.array([1e30, -1e30, 1e3, -1e3, 1e-30], np.float32)
    layer = BlockSparseLayer(np.full((40, 5), 127, np.int8), scales)
    hidden = HiddenLayer(layer, None, Range(1, 0), Range(1e-3, 7), Range(1, 0), np.arange(256, dtype=np.uint8))
    y = hidden.run(np.full((m, 40), 255, np.float32), kernel)
    np.testing.assert_array_equal(y, np.tile(np.array([255, 0, 255, 0, 7], np.float32), (m, 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_scale": 0.0}, "x_scale is 0, expected more than 0"),
        ({"x_zero_point": 256}, "x_zero_point is 256, expected 0 to 255"),
        ({"table_x_scale": -1.0}, "table_x_scale is -1, expected more than 0"),
        ({"table_y_zero_point": -1}, "table_y_zero_point is -1, expected 0 to 255"),
        ({"table": np.zeros(255, np.uint8)}, "table must have 256 elements"),
        ({"bias": np.zeros(3, np.float32)}, r"bias must be \[8\]"),
    ],
)
def test_wrong_arguments_are_refused(change, message) -> None:
    values, indices, starts = _native.pack_block_sparse(np.ones((10, 8), np.int8))
    given = {
        "x": np.zeros((3, 10), np.float32),
        "x_scale": 1.0,
        "x_zero_point": 0,
        "values": values,
        "indices": indices,
        "starts": starts,
        "scales": np.ones(8, np.float32),
        "k": 10,
        "n": 8,
        "bias": None,
        "table_x_scale": 1.0,
        "table_x_zero_point": 0,
        "table_y_scale": 1.0,
        "table_y_zero_point": 0,
        "table": np.zeros(256, np.uint8),
    }
    assert _testing.vnni_spmm_hidden(**given).shape == (3, 8)
    with pytest.raises(ValueError, match=message):
        _testing.vnni_spmm_hidden(**given | change)
