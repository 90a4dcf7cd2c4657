"""Test every kernel of W8A8MatMul against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..sampling import examples
from .groups import GroupLayer, check_many_rows, runnable_kernels

KERNELS = runnable_kernels(8)
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_group = pytest.mark.parametrize("group", [32, 64, 128])


@each_kernel
@each_group
def test_shapes(kernel: str, group: int) -> None:
    rng = np.random.default_rng(group)
    for k in (1, 33, 64, 65, 128, 200, 520):
        for n in (1, 16, 17, 50, 100):
            layer = GroupLayer.random(rng, k, n, group, half=bool(k % 2), bits=8)
            bias = rng.standard_normal(n, dtype=np.float32) if k % 3 else None
            for m in (1, 2, 5, 8, 16, 33):
                x = rng.standard_normal((m, k), dtype=np.float32)
                layer.check(layer.multiply(x, bias, kernel), x, bias)


@each_kernel
@each_group
def test_many_rows(kernel: str, group: int) -> None:
    check_many_rows(kernel, group, bits=8)


@examples(40)
@given(
    k=st.integers(1, 300),
    n=st.integers(1, 70),
    m=st.integers(1, 40),
    group=st.sampled_from([32, 64, 128]),
    half=st.booleans(),
    magnitude=st.sampled_from([1e-20, 1.0, 1e15]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_layer(k, n, m, group, half, magnitude, seed) -> None:
    rng = np.random.default_rng(seed)
    layer = GroupLayer.random(rng, k, n, group, half=half, bits=8)
    x = (rng.standard_normal((m, k)) * magnitude).astype(np.float32)
    for kernel in KERNELS:
        layer.check(layer.multiply(x, kernel=kernel), x)


@each_kernel
@each_group
@pytest.mark.parametrize("weight", [-128, 127])
@pytest.mark.parametrize("sign", [-1, 1])
def test_largest_sums_are_exact(kernel: str, group: int, weight: int, sign: int) -> None:
    """All q are 127 or -127, and all weights are at one end of int8, including -128."""
    k = 1024
    layer = GroupLayer(np.full((k, 50), weight, np.int8), np.ones((k // group, 50), np.float32), None, group)
    x = np.full((48, k), 127 * sign, np.float32)
    for m in (1, 3, 19, 48):
        assert (layer.multiply(x[:m], kernel=kernel) == 127 * sign * k * weight).all()


@each_kernel
@each_group
def test_sums_of_integers_are_exact(kernel: str, group: int) -> None:
    """Integer x with power-of-two scales: all float sums are exact."""
    rng = np.random.default_rng(6)
    k, n = 5 * group - 7, 67
    q = rng.integers(-128, 128, (k, n)).astype(np.int8)
    q[::3, ::2] = -128
    scales = np.ldexp(np.float32(1), rng.integers(-2, 2, (5, n))).astype(np.float32)
    layer = GroupLayer(q, scales, None, group)
    x = rng.integers(-127, 128, (40, k)).astype(np.float32)
    x[:, ::group] = -127
    expected = (x.astype(np.float64) @ layer.matrix()).astype(np.float32)
    for m in (1, 3, 40):
        np.testing.assert_array_equal(layer.multiply(x[:m], kernel=kernel), expected[:m])


@each_kernel
def test_rows_of_zeros_with_infinity_or_nan(kernel: str) -> None:
    rng = np.random.default_rng(2)
    layer = GroupLayer.random(rng, 100, 70, 32, bits=8)
    bias = rng.standard_normal(70, dtype=np.float32)
    x = rng.standard_normal((20, 100), dtype=np.float32)
    x[0], x[1, 70], x[2, 3], x[17, 99] = 0, np.inf, np.nan, -np.inf
    y = layer.multiply(x, bias, kernel)
    np.testing.assert_array_equal(y[0], bias)
    no_numbers = [1, 2, 17]
    assert np.isnan(y[no_numbers]).all() and np.isfinite(np.delete(y, no_numbers, axis=0)).all()


@each_kernel
@each_group
def test_a_row_depends_on_itself_alone(kernel: str, group: int) -> None:
    rng = np.random.default_rng(group)
    layer = GroupLayer.random(rng, 3 * group + 40, 70, group, bits=8)
    x = rng.standard_normal((40, 3 * group + 40), dtype=np.float32)
    y = layer.multiply(x, kernel=kernel)
    for rows in (slice(0, 1), slice(7, 9), slice(3, 20), slice(2, 37), slice(39, 40)):
        np.testing.assert_array_equal(layer.multiply(x[rows], kernel=kernel), y[rows])


def test_pack_and_unpack() -> None:
    rng = np.random.default_rng(3)
    for k, n in ((1, 1), (8, 16), (63, 17), (64, 16), (200, 50)):
        q = rng.integers(-128, 128, (k, n)).astype(np.int8)
        packed = _native.pack_int8_group(q)
        assert packed.shape == (-(-n // 16), -(-k // 64) * 16, 16, 4)
        np.testing.assert_array_equal(_native.unpack_int8_group(packed, k, n), q)
        # The weights of output j are contiguous, so rows can be gathered from the packed weight of an embedding.
        rows = packed[np.arange(n) // 16, :, np.arange(n) % 16].reshape(n, -1)
        np.testing.assert_array_equal(rows[:, :k], q.T)
        assert not rows[:, k:].any()
    with pytest.raises(ValueError, match="weights have 7 bytes, which does not match 3 x 4"):
        _native.unpack_int8_group(np.zeros(7, np.int8), 3, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 48}, "group_size is 48, expected 32, 64 or 128"),
        ({"weights": np.zeros(7, np.int8)}, "weights hold 7 bytes, expected 6144"),
        ({"scales": np.zeros((3, 1, 16), np.float32)}, "scales have 48 elements, expected 144"),
        ({"k": 0}, "k x n is 0 x 40"),
        ({"k": (1 << 17) + 1}, "k x n is 131073 x 40, expected 1 to 131072"),
    ],
)
def test_malformed_weights_are_refused(change, message) -> None:
    layer = GroupLayer.random(np.random.default_rng(5), 70, 40, 32, bits=8)
    given = {
        "x": np.ones((1, 70), np.float32),
        "weights": layer.packed_weights,
        "scales": layer.packed_scales,
        "group_size": 32,
        "k": 70,
        "n": 40,
    }
    with pytest.raises(ValueError, match=message):
        _testing.w8a8_matmul(**given | change)
