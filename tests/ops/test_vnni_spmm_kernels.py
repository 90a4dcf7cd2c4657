"""Test every kernel of VNNISpMM against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..sampling import examples
from .block_sparse import BlockSparseLayer, runnable_kernels
from .single_node import at_odd_address

KERNELS = runnable_kernels()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sparsity", [0.0, 0.8, 0.95, 1.0])
def test_shapes(kernel: str, sparsity: float) -> None:
    rng = np.random.default_rng(int(sparsity * 100))
    for k in (1, 3, 4, 63, 64, 65, 130, 300):
        for n in (1, 4, 16, 18, 50):
            layer = BlockSparseLayer.random(rng, k, n, sparsity)
            bias = rng.standard_normal(n, dtype=np.float32) if k % 3 else None
            for m in (1, 2, 3, 4, 5, 8, 16, 17, 33, 48, 49, 64, 65, 66, 67):
                x = rng.standard_normal((m, k), dtype=np.float32)
                layer.check(layer.multiply(x, bias, kernel), x, bias)


@pytest.mark.parametrize("kernel", KERNELS[:-1])
def test_the_same_bits_as_the_portable_kernel(kernel: str) -> None:
    """The bits are equal because the product is not rounded before the bias is added."""
    rng = np.random.default_rng(9)
    layer = BlockSparseLayer.random(rng, 200, 66, 0.8)
    bias = rng.standard_normal(66, dtype=np.float32) * 100
    for m in (*range(1, 20), 33, 70):
        x = rng.standard_normal((m, 200), dtype=np.float32)
        expected = layer.multiply(x, bias, KERNELS[-1]).view(np.int32)
        np.testing.assert_array_equal(layer.multiply(x, bias, kernel).view(np.int32), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_many_rows(kernel: str) -> None:
    rng = np.random.default_rng(1)
    layer = BlockSparseLayer.random(rng, 96, 33, 0.5)
    x = rng.standard_normal((600, 96), dtype=np.float32)
    layer.check(layer.multiply(x, kernel=kernel), x)


@examples(40)
@given(
    k=st.integers(1, 500),
    n=st.integers(1, 70),
    m=st.integers(1, 140),
    sparsity=st.sampled_from([0.1, 0.5, 0.9]),
    magnitude=st.sampled_from([1e-25, 1.0, 1e30]),
    shift=st.sampled_from([-3.0, 0.0, 0.9, 5.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_layer(k, n, m, sparsity, magnitude, shift, seed) -> None:
    rng = np.random.default_rng(seed)
    layer = BlockSparseLayer.random(rng, k, n, sparsity)
    x = ((rng.standard_normal((m, k)) + shift) * magnitude).astype(np.float32)
    for kernel in KERNELS:
        layer.check(layer.multiply(x, kernel=kernel), x)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weight", [-128, 127])
@pytest.mark.parametrize("m", [1, 3, 70])
def test_largest_sums_are_exact(kernel: str, weight: int, m: int) -> None:
    """All q are 255 and all weights have the largest magnitude; the sums must not saturate."""
    layer = BlockSparseLayer(np.full((32768, 5), weight, np.int8), np.ones(5, np.float32))
    x = np.full((m, 32768), 255, np.float32)
    x[1::2] *= -1
    y = layer.multiply(x, kernel=kernel)
    assert (y[::2] == np.float32(255 * 32768 * weight)).all() and (y[1::2] == -np.float32(255 * 32768 * weight)).all()


def test_the_most_inputs() -> None:
    rng = np.random.default_rng(6)
    layer = BlockSparseLayer.random(rng, 65536, 6, 0.999)
    layer.q[[0, 65535]] = -128
    for m in (1, 2, 6, 20):
        x = rng.standard_normal((m, 65536), dtype=np.float32)
        layer.check(layer.multiply(x), x)
        for kernel in KERNELS:
            layer.check(layer.multiply(x, kernel=kernel), x)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_zeros_with_infinity_or_nan(kernel: str) -> None:
    rng = np.random.default_rng(2)
    layer = BlockSparseLayer.random(rng, 100, 20, 0.3)
    bias = rng.standard_normal(20, dtype=np.float32)
    x = rng.standard_normal((40, 100), dtype=np.float32)
    x[0], x[1, 70], x[2, 3], x[3, 99] = 0, np.inf, np.nan, -np.inf
    y = layer.multiply(x, bias, kernel)
    np.testing.assert_array_equal(y[0], bias)
    assert np.isnan(y[1:4]).all() and np.isfinite(y[4:]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_largest_floats(kernel: str) -> None:
    layer = BlockSparseLayer.random(np.random.default_rng(3), 40, 20, 0.3, scale=1e-9)
    x = np.random.default_rng(4).choice(np.array([-3.4e38, 0, 3.4e38, 1e38], np.float32), (9, 40))
    layer.check(layer.multiply(x, kernel=kernel), x)


@pytest.mark.parametrize("kernel", KERNELS)
def test_groups_without_a_block(kernel: str) -> None:
    q = np.zeros((50, 40), np.int8)
    q[7, 21] = 5
    layer = BlockSparseLayer(q, np.ones(40, np.float32))
    for m in (1, 4, 9, 64):
        x = np.random.default_rng(m).standard_normal((m, 50), dtype=np.float32)
        layer.check(layer.multiply(x, kernel=kernel), x)


@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_at_any_address(kernel: str) -> None:
    """Weights may be at any address of a mapped file, and nothing after them may be read."""
    rng = np.random.default_rng(7)
    layer = BlockSparseLayer.random(rng, 80, 22, 0.5)
    values, indices, starts = _native.pack_block_sparse(layer.q)
    for m in (1, 4, 16, 32, 64):
        x = rng.standard_normal((m, 80), dtype=np.float32)
        y = _testing.vnni_spmm(
            x, at_odd_address(values), at_odd_address(indices), starts, layer.scales, 80, 22, kernel=kernel
        )
        layer.check(y, x)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [1024, 1020])
@pytest.mark.parametrize("m", [3, 17, 33, 70])
def test_rows_of_y_a_page_apart(kernel: str, n: int, m: int) -> None:
    """Rows of y are one page apart (n = 1024) or not aligned to cache lines (n = 1020)."""
    rng = np.random.default_rng(8)
    layer = BlockSparseLayer.random(rng, 24, n, 0.5)
    x, bias = rng.standard_normal((m, 24), dtype=np.float32), rng.standard_normal(n, dtype=np.float32)
    layer.check(layer.multiply(x, kernel=kernel), x)
    layer.check(layer.multiply(x, bias, kernel), x, bias)


def test_no_rows() -> None:
    layer = BlockSparseLayer.random(np.random.default_rng(5), 10, 20, 0.3)
    assert layer.multiply(np.zeros((0, 10), np.float32)).shape == (0, 20)


def test_wrong_shapes_are_refused() -> None:
    layer = BlockSparseLayer.random(np.random.default_rng(5), 10, 20, 0.3)
    packed = _native.pack_block_sparse(layer.q)
    with pytest.raises(ValueError, match=r"x must be \[m, 10\]"):
        _testing.vnni_spmm(np.ones((2, 11), np.float32), *packed, layer.scales, 10, 20)
    with pytest.raises(ValueError, match=r"bias must be \[20\]"):
        layer.multiply(np.ones((2, 10), np.float32), bias=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="scales have 3 elements, expected 20"):
        _testing.vnni_spmm(np.ones((2, 10), np.float32), *packed, layer.scales[:3].copy(), 10, 20)
    with pytest.raises(ValueError, match="no kernel is called 'Fast'"):
        layer.multiply(np.ones((2, 10), np.float32), kernel="Fast")
