"""Test every kernel of SparseAMXMatMul for int8 and int4 weights against NumPy, within the documented bounds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..sampling import examples
from .quantized import Layer, quantize_rows, runnable_int8_kernels
from .single_node import assert_same_bits, at_odd_address

M = (1, 2, 3, 7, 16, 33)
DIMENSIONS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 288, 384, 1000)
SPARSITIES = (0.0, 0.3, 0.5, 0.9, 1.0)
# Fewer sparsities for dense storage, whose work does not depend on sparsity.
DENSE_SPARSITIES = (0.0, 0.5)
GROUPS = (None, 32, 64, 128)  # None: int8

each_kernel = pytest.mark.parametrize("kernel", runnable_int8_kernels())
each_group = pytest.mark.parametrize("group", GROUPS)


@each_kernel
@each_group
@pytest.mark.parametrize("n", DIMENSIONS)
def test_shapes(kernel: str, group: int | None, n: int) -> None:
    """Use one sparsity for each k and n, so that each sparsity occurs with every k and every n."""
    rng = np.random.default_rng(n)
    for turn, k in enumerate(DIMENSIONS, DIMENSIONS.index(n)):
        sparsity = SPARSITIES[turn % len(SPARSITIES)]
        x = rng.standard_normal((max(M), k), dtype=np.float32)
        bias = rng.standard_normal(n, dtype=np.float32)
        for layer in Layer.random(rng, k, n, sparsity, group).kinds():
            dense = layer.stored_dense()
            expected = layer.expect(x)
            for m in M:
                y = layer.multiply(x[:m], kernel=kernel)
                expected.check(y, m)
                if sparsity in DENSE_SPARSITIES:
                    assert_same_bits(dense.multiply(x[:m], kernel=kernel), y)
            y = layer.multiply(x, bias, kernel)
            layer.check(y, x, bias)
            if sparsity in DENSE_SPARSITIES:
                assert_same_bits(dense.multiply(x, bias, kernel), y)


@each_kernel
@examples(150)
@given(
    m=st.integers(1, 70),
    k=st.integers(1, 1500),
    n=st.integers(1, 80),
    sparsity=st.floats(0, 1),
    group=st.sampled_from(GROUPS),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e12, 1e30]),
    shift=st.sampled_from([0.0, -3.0, 20.0]),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    kernel: str,
    m: int,
    k: int,
    n: int,
    sparsity: float,
    group: int | None,
    scale: float,
    shift: float,
    with_bias: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((m, k), dtype=np.float32) + np.float32(shift)) * np.float32(scale)
    bias = rng.standard_normal(n, dtype=np.float32) if with_bias else None
    for layer in Layer.random(rng, k, n, sparsity, group, scale=1e-3).kinds():
        y = layer.stored_dense().multiply(x, bias, kernel)
        layer.check(y, x, bias)
        assert_same_bits(layer.multiply(x, bias, kernel), y)


@each_kernel
@each_group
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("m", [1, 3, 20])
def test_tensors_at_odd_addresses(kernel: str, group: int | None, dense: bool, m: int) -> None:
    rng = np.random.default_rng(m)
    layer = Layer.random(rng, 200, 40, 0.5, group)
    masks, values, offsets = (layer.stored_dense() if dense else layer).packed
    x = rng.standard_normal((m, 200), dtype=np.float32)
    packed = (at_odd_address(masks), at_odd_address(values), offsets)
    y = layer.multiply_packed(x, packed, at_odd_address(layer.packed_scales()), None, kernel)
    assert_same_bits(y, layer.multiply(x, None, kernel))


@each_kernel
@each_group
@pytest.mark.parametrize("m", [255, 256, 257, 300])
def test_many_rows(kernel: str, group: int | None, m: int) -> None:
    """More rows than a kernel sums at a time."""
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, 1100), dtype=np.float32)
    for layer in Layer.random(rng, 1100, 67, 0.5, group).kinds():
        y = layer.multiply(x, kernel=kernel)
        layer.check(y, x)
        assert_same_bits(layer.stored_dense().multiply(x, kernel=kernel), y)


@each_kernel
def test_rounds_activations_to_nearest_even(kernel: str) -> None:
    # The largest value is 127, so the scale is 1.
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.49, 3.51, -126.5]], np.float32)
    k = x.shape[1]
    packed = _native.pack_bitmap_int8(np.eye(k, dtype=np.int8))
    y = _testing.sparse_amx_matmul_int8(x, *packed, np.ones((1, 1, 16), np.float32), k, k, kernel=kernel)
    np.testing.assert_array_equal(y, [[127, 0, 2, 2, 0, -2, -2, 3, 4, -126]])


@each_kernel
def test_zero_points_of_rows(kernel: str) -> None:
    """Rows above zero, below zero, of both signs, and of a single value; -127 and 127 are the ends of the range."""
    x = np.array([[254, 0, 1, 100.5], [-254, -1.5, -3, -100.5], [-54, 200, 1.5, 2.5], [0, 0, 127, 0]], np.float32)
    packed = _native.pack_bitmap_int8(np.eye(4, dtype=np.int8))
    ones = np.ones((1, 1, 16), np.float32)
    y = _testing.sparse_amx_matmul_int8(x, *packed, ones, 4, 4, kernel=kernel, x_zero_points=True)
    expected = [[254, 0, 1, 100], [-254, -2, -3, -100], [-54, 200, 2, 2], [0, 0, 127, 0]]
    np.testing.assert_array_equal(y, expected)


@each_kernel
@each_group
@pytest.mark.parametrize("m", [1, 3, 20])
def test_rows_that_are_zero_tiny_huge_or_not_finite(kernel: str, group: int | None, m: int) -> None:
    """Special rows do not affect other rows; zeros give the bias, and NaN or Inf makes the whole row NaN."""
    k, n = 300, 40
    rng = np.random.default_rng(m)
    layers = Layer.random(rng, k, n, 0.5, group, scale=1e-4).kinds()
    bias = rng.standard_normal(n, dtype=np.float32)
    specials = (0.0, 1e-45, 1e-38, 1e-30, 1e36, 3e38, -3e38, np.inf, -np.inf, np.nan)
    for special, layer in itertools.product(specials, layers):
        x = rng.standard_normal((m, k), dtype=np.float32)
        x[m // 2] = 0
        x[m // 2, 7] = special
        for added in (None, bias):
            y = layer.multiply(x, added, kernel)
            layer.check(y, x, added)
            if special == 0:
                np.testing.assert_array_equal(y[m // 2], np.zeros(n) if added is None else bias)
            assert np.isnan(y[m // 2]).all() == (not np.isfinite(special))


@each_kernel
@each_group
def test_the_largest_sums_are_exact(kernel: str, group: int | None) -> None:
    """2^17 inputs with the largest weights and activations: the sums just fit an int32."""
    k, n = 2**17, 17
    bits = 8 if group is None else 4
    for weight in (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1):
        q = np.full((k, n), weight, np.int8)
        groups = 1 if group is None else k // group
        scales = np.ones((groups, n), np.float32)
        packed = _native.pack_bitmap_int8(q) if group is None else _native.pack_bitmap_int4(q)
        layer = Layer(q, scales, group, packed)
        for m in (1, 2, 5, 17):
            x = np.full((m, k), 127, np.float32)
            x[m // 2] *= -1
            y = layer.multiply(x, kernel=kernel)
            expected = np.full((m, n), np.float32(127 * weight * k))
            expected[m // 2] *= -1
            np.testing.assert_array_equal(y, expected)


@each_kernel
def test_the_largest_sums_with_zero_points_are_exact(kernel: str) -> None:
    """2^16 inputs that are 254 steps from their zero point, which is at one end of the range."""
    k, n = 2**16, 17
    for weight in (-128, 127):
        q = np.full((k, n), weight, np.int8)
        layer = Layer(q, np.ones((1, n), np.float32), None, _native.pack_bitmap_int8(q), zero_points=True)
        for m in (1, 5, 17):
            x = np.full((m, k), 254, np.float32)
            x[m // 2] *= -1
            expected = np.full((m, n), np.float32(254 * weight * k))
            expected[m // 2] *= -1
            np.testing.assert_array_equal(layer.multiply(x, kernel=kernel), expected)


@each_kernel
def test_the_largest_sums_with_zero_points_of_both_are_exact(kernel: str) -> None:
    """2^15 inputs that are 254 steps from their zero point, and weights that are 255 from theirs."""
    k, n = 2**15, 17
    for weight in (-128, 127):
        q = np.full((k, n), weight, np.int8)
        layer = Layer(
            q, np.ones((1, n), np.float32), None, _native.pack_bitmap_int8(q, dense=True),
            zero_points=True, weight_zeros=np.full(n, -1 - weight, np.int8),
        )  # fmt: skip
        for m in (1, 5, 17):
            x = np.full((m, k), 254, np.float32)
            x[m // 2] *= -1
            expected = np.full((m, n), np.float32(254 * (2 * weight + 1) * k))
            expected[m // 2] *= -1
            np.testing.assert_array_equal(layer.multiply(x, kernel=kernel), expected)


@each_kernel
@pytest.mark.parametrize("sum_of_two", [128, 129, -128, -129])
@pytest.mark.parametrize("m", [1, 4, 7, 300])
def test_sums_of_neighbours_where_kernels_change(kernel: str, sum_of_two: int, m: int) -> None:
    """The bits are equal, whether or not sums of two neighbouring weights are within 128.

    Some kernels use a faster product of bytes if they are; here one pair of many is not.
    """
    k, n = 1100, 40
    rng = np.random.default_rng(m)
    q = rng.integers(-64, 65, (k, n), np.int8)
    q[:2], q[-2:] = [[127], [-128]], [[-128], [127]]
    q[514:516, 17] = sum_of_two // 2, sum_of_two - sum_of_two // 2
    packed = _native.pack_bitmap_int8(q, dense=True)
    layer = Layer(q, np.ones((1, n), np.float32), None, packed, zero_points=True)
    x = rng.choice(np.array([0, 254, 253, 1], np.float32), (m, k))
    x[:, 514:516], x[:, 0] = 254, 0
    y = layer.multiply(x, kernel=kernel)
    np.testing.assert_array_equal(y, (x.astype(np.int64) @ q.astype(np.int64)).astype(np.float32))
    assert_same_bits(y, layer.multiply(x, kernel="scalar"))


@each_kernel
def test_zero_points_of_weights_that_are_zero_change_no_bit(kernel: str) -> None:
    rng = np.random.default_rng(5)
    layer = replace(Layer.random(rng, 200, 40, 0.0, None), zero_points=True)
    zeros = replace(layer, weight_zeros=np.zeros(40, np.int8))
    for m in (1, 3, 20):
        x = rng.standard_normal((m, 200), dtype=np.float32)
        assert_same_bits(zeros.multiply(x, kernel=kernel), layer.multiply(x, kernel=kernel))


@each_kernel
@each_group
def test_rows_do_not_depend_on_their_neighbours(kernel: str, group: int | None) -> None:
    k, n = 1100, 48
    rng = np.random.default_rng(3)
    layers = Layer.random(rng, k, n, 0.5, group).kinds()
    row = rng.standard_normal((1, k), dtype=np.float32)
    for m, layer in itertools.product((2, 5, 16, 37), [*layers, *(layer.stored_dense() for layer in layers)]):
        others = rng.standard_normal((m, k), dtype=np.float32)
        others[0] = others[-1] = row
        y = layer.multiply(others, kernel=kernel)
        alone = layer.multiply(np.repeat(row, m, axis=0), kernel=kernel)
        np.testing.assert_array_equal(y[0], alone[0])
        np.testing.assert_array_equal(y[-1], alone[-1])


@each_group
def test_integer_sums_do_not_depend_on_the_kernel(group: int | None) -> None:
    """Unit scales make the float sums exact, so every kernel gives the same bits."""
    k, n, m = 700, 50, 9
    rng = np.random.default_rng(4)
    random = Layer.random(rng, k, n, 0.5, group)
    x = rng.standard_normal((m, k), dtype=np.float32)
    for layer in Layer(random.weights, np.ones_like(random.scales), group, random.packed).kinds():
        q, s = quantize_rows(x, layer.zero_points)
        expected = (q @ layer.centred()).astype(np.float32) * s
        for kernel in runnable_int8_kernels():
            np.testing.assert_array_equal(layer.multiply(x, kernel=kernel), expected)


def test_stored_zeros_are_zeros() -> None:
    """Packing stores no zeros, but a file may contain them."""
    q = np.full((70, 20), 3, np.int8)
    x = np.ones((3, 70), np.float32)
    for group in (None, 32):
        pack = _native.pack_bitmap_int8 if group is None else _native.pack_bitmap_int4
        masks, values, offsets = pack(q)
        values = values.copy()
        values[: offsets[-1]] = 0 if group is None else 0x88
        zero = Layer(np.zeros_like(q), np.ones((1 if group is None else 3, 20), np.float32), group, None)
        for kernel in runnable_int8_kernels():
            layer = Layer(zero.weights, zero.scales, group, (masks, values, offsets))
            np.testing.assert_array_equal(layer.multiply(x, kernel=kernel), np.zeros((3, 20)))


def test_wrong_shapes_and_kernels_are_refused() -> None:
    layer = Layer.random(np.random.default_rng(1), 70, 20, 0.5, None)
    four = Layer.random(np.random.default_rng(1), 70, 20, 0.5, 32)
    x = np.ones((1, 70), np.float32)
    with pytest.raises(ValueError, match=r"no kernel is called 'Abacus', expected one of: .*scalar"):
        layer.multiply(x, kernel="Abacus")
    with pytest.raises(ValueError, match="x must be"):
        layer.multiply(x[:, 1:])
    with pytest.raises(ValueError, match="bias must be"):
        layer.multiply(x, np.ones(19, np.float32))
    scales = _native.pack_scales(layer.scales, bf16=False)
    with pytest.raises(ValueError, match=r"scales must be \[2, 1, 16\]"):
        _testing.sparse_amx_matmul_int8(x, *layer.packed, scales[1:], 70, 20)
    with pytest.raises(TypeError):
        _testing.sparse_amx_matmul_int8(x, *layer.packed, scales.astype(np.float64), 70, 20)
    zeros = np.zeros((2, 1, 16), np.int8)
    for wrong, x_zero_points in ((zeros, False), (zeros[1:], True)):
        with pytest.raises(ValueError, match=r"zero_points must be \[2, 1, 16\], with x_zero_points"):
            _testing.sparse_amx_matmul_int8(
                x, *layer.packed, scales, 70, 20, x_zero_points=x_zero_points, zero_points=wrong
            )
    scales = _native.pack_scales(four.scales, bf16=True)
    with pytest.raises(ValueError, match=r"scales must be \[2, 3, 16\]"):
        _testing.sparse_amx_matmul_int4(x, *four.packed, scales[:, 1:].copy(), 32, 70, 20)
    with pytest.raises(ValueError, match="group_size is 48"):
        _testing.sparse_amx_matmul_int4(x, *four.packed, scales, 48, 70, 20)
    with pytest.raises(TypeError):
        _testing.sparse_amx_matmul_int4(x, *four.packed, scales.astype(np.float32), 32, 70, 20)
