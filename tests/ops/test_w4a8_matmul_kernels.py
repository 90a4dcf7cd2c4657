"""Test every kernel of W4A8MatMul against NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..sampling import examples
from .groups import GroupLayer, check_many_rows, runnable_kernels

KERNELS = runnable_kernels()
OFFSETS: tuple[dict[str, bool], ...] = ({}, {"minimums": True}, {"fractions": True})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_shapes(kernel: str, group: int) -> None:
    rng = np.random.default_rng(group)
    for k in (1, 33, 64, 65, 128, 200, 520):
        for n in (1, 16, 17, 50):
            bias = rng.standard_normal(n, dtype=np.float32) if k % 3 else None
            for offsets in OFFSETS:
                layer = GroupLayer.random(rng, k, n, group, half=bool(k % 2), **{"zero_points": bool(n % 2)} | offsets)
                for m in (1, 2, 5, 8, 16, 33):
                    x = rng.standard_normal((m, k), dtype=np.float32)
                    layer.check(layer.multiply(x, bias, kernel), x, bias)


@pytest.mark.parametrize("offsets", [{"zero_points": False}, *OFFSETS])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_many_rows(kernel: str, group: int, offsets: dict[str, bool]) -> None:
    check_many_rows(kernel, group, **offsets)


@examples(40)
@given(
    k=st.integers(1, 300),
    n=st.integers(1, 70),
    m=st.integers(1, 40),
    group=st.sampled_from([32, 64, 128]),
    half=st.booleans(),
    zero_points=st.booleans(),
    offsets=st.sampled_from(OFFSETS),
    magnitude=st.sampled_from([1e-20, 1.0, 1e15]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_layer(k, n, m, group, half, zero_points, offsets, magnitude, seed) -> None:
    rng = np.random.default_rng(seed)
    layer = GroupLayer.random(rng, k, n, group, half=half, **{"zero_points": zero_points} | offsets)
    x = (rng.standard_normal((m, k)) * magnitude).astype(np.float32)
    for kernel in KERNELS:
        layer.check(layer.multiply(x, kernel=kernel), x)


@pytest.mark.parametrize("kernel", KERNELS)
def test_largest_sums_are_exact(kernel: str) -> None:
    """All q are 127, and all weights are as far from their zero point as possible."""
    for q, zero in ((15, 0), (0, 15)):
        layer = GroupLayer(
            np.full((4096, 16), q, np.uint8),
            np.ones((32, 16), np.float32),
            np.full((32, 16), zero, np.uint8),
            128,
        )
        x = np.full((3, 4096), 127, np.float32)
        assert (layer.multiply(x, kernel=kernel) == 127 * 4096 * (q - zero)).all()


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_zeros_with_infinity_or_nan(kernel: str, offsets: dict[str, bool]) -> None:
    rng = np.random.default_rng(2)
    layer = GroupLayer.random(rng, 100, 20, 32, **offsets)
    bias = rng.standard_normal(20, dtype=np.float32)
    x = rng.standard_normal((4, 100), dtype=np.float32)
    x[0], x[1, 70], x[2, 3] = 0, np.inf, np.nan
    y = layer.multiply(x, bias, kernel)
    np.testing.assert_array_equal(y[0], bias)
    assert np.isnan(y[1:3]).all() and np.isfinite(y[3]).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group", [32, 128])
def test_minimums_of_integers_are_exact(kernel: str, group: int) -> None:
    """Integer x with power-of-two scales and minimums: all float sums are exact."""
    rng = np.random.default_rng(6)
    k, n = 5 * group - 7, 33
    q = rng.integers(0, 16, (k, n), dtype=np.uint8)
    shape = (5, n)
    layer = GroupLayer(
        q,
        np.ldexp(np.float32(1), rng.integers(-2, 2, shape)).astype(np.float32),
        None,
        group,
        np.ldexp(np.float32(-1), rng.integers(-2, 5, shape)).astype(np.float32),
    )
    x = rng.integers(-127, 128, (40, k)).astype(np.float32)
    x[:, ::group] = -127
    expected = (x.astype(np.float64) @ layer.matrix()).astype(np.float32)
    for m in (1, 3, 40):
        np.testing.assert_array_equal(layer.multiply(x[:m], kernel=kernel), expected[:m])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("half", [False, True])
def test_minimums_of_no_finite_number(kernel: str, half: bool) -> None:
    """A non-finite minimum affects only its own column."""
    rng = np.random.default_rng(7)
    layer = GroupLayer.random(rng, 100, 20, 32, half=half, minimums=True)
    assert layer.minimums is not None
    x = rng.standard_normal((6, 100), dtype=np.float32)
    expected = layer.multiply(x, kernel=kernel)
    layer.minimums[0, 3], layer.minimums[2, 5], layer.minimums[1, 18] = np.inf, np.nan, -np.inf
    y = layer.multiply(x, kernel=kernel)
    others = [j for j in range(20) if j not in (3, 5, 18)]
    np.testing.assert_array_equal(y[:, others], expected[:, others])
    assert np.isinf(y[:, [3, 18]]).all() and np.isnan(y[:, 5]).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_row_depends_on_itself_alone(kernel: str, group: int) -> None:
    rng = np.random.default_rng(group)
    for offsets in OFFSETS:
        layer = GroupLayer.random(rng, 3 * group + 40, 50, group, **offsets)
        x = rng.standard_normal((40, 3 * group + 40), dtype=np.float32)
        y = layer.multiply(x, kernel=kernel)
        for rows in (slice(0, 1), slice(7, 9), slice(3, 20), slice(39, 40)):
            np.testing.assert_array_equal(layer.multiply(x[rows], kernel=kernel), y[rows])


@pytest.mark.parametrize("kernel", KERNELS)
def test_sixteen_sixteenths_are_a_whole_zero_point(kernel: str) -> None:
    rng = np.random.default_rng(8)
    layer = GroupLayer.random(rng, 200, 40, 32)
    layer.scales[:] = np.ldexp(np.float32(1), rng.integers(-2, 2, layer.scales.shape))
    assert layer.zero_points is not None
    same = replace(layer, zero_points=layer.zero_points * 16, steps=16)
    x = rng.integers(-127, 128, (9, 200)).astype(np.float32)
    x[:, ::32] = 127
    np.testing.assert_array_equal(same.multiply(x, kernel=kernel), layer.multiply(x, kernel=kernel))


def test_pack_and_unpack() -> None:
    rng = np.random.default_rng(3)
    for k, n in ((1, 1), (8, 16), (63, 17), (64, 16), (200, 50)):
        q = rng.integers(0, 16, (k, n), dtype=np.uint8)
        packed = _native.pack_int4_group(q)
        assert packed.shape == (-(-n // 16), -(-k // 64) * 8, 64)
        np.testing.assert_array_equal(_native.unpack_int4_group(packed, k, n), q)


def test_the_order_is_that_of_dense_int4() -> None:
    q = np.random.default_rng(4).integers(0, 16, (128, 32), dtype=np.uint8)
    _, values, _ = _native.pack_bitmap_int4(q.astype(np.int8) - np.int8(8), dense=True)
    np.testing.assert_array_equal(_native.pack_int4_group(q).ravel(), values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 48}, "group_size is 48, expected 32, 64 or 128"),
        ({"weights": np.zeros(7, np.uint8)}, "weights hold 7 bytes, expected 3072"),
        ({"scales": np.zeros((3, 1, 16), np.float32)}, "scales have 48 elements, expected 144"),
        ({"zero_points": np.zeros((3, 1, 16), np.uint8)}, "zero_points have 48 elements, expected 144 or none"),
        ({"zero_points": np.full((3, 3, 16), 16, np.uint8)}, "zero_points hold 16, expected 0 to 15"),
        ({"k": 0}, "k x n is 0 x 40"),
        (
            {"minimums": np.zeros((3, 3, 16), np.float32)},
            "zero_points have 144 elements and minimums 144, expected one of them or neither",
        ),
        (
            {"zero_points": None, "minimums": np.zeros((3, 1, 16), np.float32)},
            "minimums have 48 elements, expected 144 or none",
        ),
        ({"zero_point_steps": 8}, "zero_point_steps is 8, expected 1 or 16"),
    ],
)
def test_malformed_weights_are_refused(change, message) -> None:
    layer = GroupLayer.random(np.random.default_rng(5), 70, 40, 32)
    given = {
        "x": np.ones((1, 70), np.float32),
        "weights": _native.pack_int4_group(layer.q)[:, :, :],
        "scales": layer.packed_scales,
        "group_size": 32,
        "k": 70,
        "n": 40,
        "zero_points": layer.packed_zero_points,
    }
    with pytest.raises(ValueError, match=message):
        _testing.w4a8_matmul(**given | change)
