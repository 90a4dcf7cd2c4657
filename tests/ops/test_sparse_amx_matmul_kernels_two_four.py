"""Every kernel of SparseAMXMatMul gives the same bits for 2:4 storage as for dense storage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..sampling import examples
from .quantized import Layer, runnable_int8_kernels
from .single_node import assert_matmul_close, assert_same_bits, at_odd_address, runnable_kernels, to_bf16
from .two_four import BF16, two_of_four

M = (1, 2, 3, 4, 5, 8, 16, 33)
DIMENSIONS = (1, 4, 15, 16, 17, 31, 32, 33, 64, 65, 100, 288, 1000)
GROUPS = (None, 32, 64, 128)  # None: int8

each_kernel = pytest.mark.parametrize("kernel", runnable_int8_kernels())
each_bf16_kernel = pytest.mark.parametrize("kernel", runnable_kernels())
each_group = pytest.mark.parametrize("group", GROUPS)


def random_layer(rng: np.random.Generator, k: int, n: int, group: int | None, scale: float = 1.0) -> Layer:
    layer = Layer.random(rng, k, n, 0.1, group, scale)
    return Layer.two_four(two_of_four(rng, layer.weights), layer.scales, group)


@each_kernel
@each_group
@pytest.mark.parametrize("n", DIMENSIONS)
def test_shapes(kernel: str, group: int | None, n: int) -> None:
    rng = np.random.default_rng(n)
    for k in DIMENSIONS:
        x = rng.standard_normal((max(M), k), dtype=np.float32)
        bias = rng.standard_normal(n, dtype=np.float32)
        for layer in random_layer(rng, k, n, group).kinds():
            dense = layer.stored_dense()
            expected = layer.expect(x)
            for m in M:
                y = layer.multiply(x[:m], kernel=kernel)
                expected.check(y, m)
                assert_same_bits(y, dense.multiply(x[:m], kernel=kernel))
            y = layer.multiply(x, bias, kernel)
            layer.check(y, x, bias)
            assert_same_bits(y, dense.multiply(x, bias, kernel))


@each_bf16_kernel
@pytest.mark.parametrize("n", DIMENSIONS)
def test_shapes_of_bf16(kernel: str, n: int) -> None:
    rng = np.random.default_rng(n)
    for k in DIMENSIONS:
        w = BF16.random(rng, k, n)
        packed = _native.pack_two_four(w)
        x = rng.standard_normal((max(M), k), dtype=np.float32)
        bias = rng.standard_normal(n, dtype=np.float32)
        dense = _native.pack_bitmap(w, dense=True)
        for m in M:
            y = _testing.sparse_amx_matmul(x[:m], *packed, k, n, kernel=kernel)
            assert_matmul_close(y, x[:m], w)
            assert_same_bits(y, _testing.sparse_amx_matmul(x[:m], *dense, k, n, kernel=kernel))
        assert_matmul_close(_testing.sparse_amx_matmul(x, *packed, k, n, bias=bias, kernel=kernel), x, w, bias)


@each_kernel
@examples(150)
@given(
    m=st.integers(1, 70),
    k=st.integers(1, 1500),
    n=st.integers(1, 80),
    group=st.sampled_from(GROUPS),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    kernel: str, m: int, k: int, n: int, group: int | None, scale: float, with_bias: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    layer = random_layer(rng, k, n, group, 1e-3)
    x = rng.standard_normal((m, k), dtype=np.float32) * np.float32(scale)
    bias = rng.standard_normal(n, dtype=np.float32) if with_bias else None
    y = layer.multiply(x, bias, kernel)
    layer.check(y, x, bias)
    assert_same_bits(y, layer.stored_dense().multiply(x, bias, kernel))


@each_bf16_kernel
@examples(100)
@given(
    m=st.integers(1, 70),
    k=st.integers(1, 700),
    n=st.integers(1, 80),
    scale=st.sampled_from([1e-30, 1.0, 1e12]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_of_bf16(kernel: str, m: int, k: int, n: int, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = BF16.random(rng, k, n)
    x = rng.standard_normal((m, k), dtype=np.float32) * np.float32(scale)
    y = _testing.sparse_amx_matmul(x, *_native.pack_two_four(w), k, n, kernel=kernel)
    assert_matmul_close(y, x, w)
    assert_same_bits(y, _testing.sparse_amx_matmul(x, *_native.pack_bitmap(w, dense=True), k, n, kernel=kernel))


@each_kernel
@each_group
@pytest.mark.parametrize("m", [1, 3, 20])
def test_tensors_at_odd_addresses(kernel: str, group: int | None, m: int) -> None:
    rng = np.random.default_rng(m)
    layer = random_layer(rng, 200, 40, group)
    masks, values, offsets = layer.packed
    x = rng.standard_normal((m, 200), dtype=np.float32)
    packed = (at_odd_address(masks), at_odd_address(values), offsets)
    y = layer.multiply_packed(x, packed, at_odd_address(layer.packed_scales()), None, kernel)
    assert_same_bits(y, layer.multiply(x, None, kernel))


@each_bf16_kernel
@pytest.mark.parametrize("m", [1, 3, 20])
def test_bf16_at_odd_addresses(kernel: str, m: int) -> None:
    k, n = 100, 40
    rng = np.random.default_rng(m)
    masks, values, offsets = _native.pack_two_four(BF16.random(rng, k, n))
    x = rng.standard_normal((m, k), dtype=np.float32)
    y = _testing.sparse_amx_matmul(x, at_odd_address(masks), at_odd_address(values), offsets, k, n, kernel=kernel)
    assert_same_bits(y, _testing.sparse_amx_matmul(x, masks, values, offsets, k, n, kernel=kernel))


@each_kernel
@each_group
@pytest.mark.parametrize("m", [256, 257, 300])
def test_many_rows(kernel: str, group: int | None, m: int) -> None:
    """More rows than a kernel sums at a time, and a single row left over."""
    rng = np.random.default_rng(m)
    layer = random_layer(rng, 1100, 37, group)
    x = rng.standard_normal((m, 1100), dtype=np.float32)
    assert_same_bits(layer.multiply(x, kernel=kernel), layer.stored_dense().multiply(x, kernel=kernel))


@each_bf16_kernel
def test_many_rows_of_bf16(kernel: str) -> None:
    rng = np.random.default_rng(1)
    w = BF16.random(rng, 700, 37)
    x = rng.standard_normal((257, 700), dtype=np.float32)
    assert_matmul_close(_testing.sparse_amx_matmul(x, *_native.pack_two_four(w), 700, 37, kernel=kernel), x, w)


@each_kernel
@each_group
@pytest.mark.parametrize("m", [1, 3, 20])
def test_rows_that_are_zero_tiny_huge_or_not_finite(kernel: str, group: int | None, m: int) -> None:
    rng = np.random.default_rng(m)
    layer = random_layer(rng, 300, 40, group, 1e-4)
    bias = rng.standard_normal(40, dtype=np.float32)
    for special in (0.0, 1e-45, 1e-30, 3e38, np.inf, np.nan):
        x = rng.standard_normal((m, 300), dtype=np.float32)
        x[m // 2] = 0
        x[m // 2, 7] = special
        y = layer.multiply(x, bias, kernel)
        assert_same_bits(y, layer.stored_dense().multiply(x, bias, kernel))


@each_bf16_kernel
@pytest.mark.parametrize("m", [1, 3, 20, 257])
@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_inf_and_nan_spread_as_in_the_dense_product(kernel: str, m: int, special: float) -> None:
    """Non-finite activations reach the output even if no weight is stored: zero times Inf is NaN."""
    k, n = 70, 40
    rng = np.random.default_rng(m)
    w = BF16.random(rng, k, n)
    x = rng.standard_normal((m, k), dtype=np.float32)
    x[m - 1, 11] = special
    y = _testing.sparse_amx_matmul(x, *_native.pack_two_four(w), k, n, kernel=kernel)
    with np.errstate(invalid="ignore"):
        expected = to_bf16(x) @ to_bf16(w)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(y), np.isinf(expected))


@each_kernel
@each_group
def test_the_largest_sums_are_exact(kernel: str, group: int | None) -> None:
    """2^17 inputs, half of them with the largest weights."""
    k, n = 2**17, 17
    bits = 8 if group is None else 4
    for weight in (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1):
        q = np.full((k, n), weight, np.int8)
        q[::4] = q[3::4] = 0
        layer = Layer.two_four(q, np.ones((1 if group is None else k // group, n), np.float32), group)
        for m in (1, 2, 5, 17):
            x = np.full((m, k), 127, np.float32)
            x[m // 2] *= -1
            expected = np.full((m, n), np.float32(127 * weight * (k // 2)))
            expected[m // 2] *= -1
            np.testing.assert_array_equal(layer.multiply(x, kernel=kernel), expected)
