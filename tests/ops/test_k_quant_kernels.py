"""Test every kernel for K-quants against NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _testing

from ..sampling import examples
from .k_quants import KINDS, KQuantLayer, runnable_k_quant_kernels

KERNELS = runnable_k_quant_kernels()
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kernel
@each_kind
def test_shapes(kernel: str, kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    for k in (1, 15, 33, 64, 65, 200, 256, 257, 520, 1100):
        for n in (1, 16, 50):
            bias = rng.standard_normal(n, dtype=np.float32) if k % 3 else None
            layer = KQuantLayer.of_kind(rng, k, n, KINDS[kind], half=bool(k % 2))
            for m in (1, 2, 5, 8, 16, 33):
                x = rng.standard_normal((m, k), dtype=np.float32)
                layer.check(layer.multiply(x, bias, kernel), x, bias)


@each_kernel
@each_kind
def test_a_row_depends_on_itself_alone(kernel: str, kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    for m, k, n in ((600, 96, 70), (258, 96, 70), (64, 1100, 50)):
        layer = KQuantLayer.of_kind(rng, k, n, KINDS[kind])
        x = rng.standard_normal((m, k), dtype=np.float32)
        x[m // 2, k // 3] = np.nan
        y = layer.multiply(x, kernel=kernel)
        layer.check(y, x)
        for rows in (slice(0, 1), slice(5, 7), slice(5, 21), slice(m - 40, m), slice(m - 2, m)):
            np.testing.assert_array_equal(layer.multiply(x[rows], kernel=kernel), y[rows])


@examples(40)
@given(
    k=st.integers(1, 600),
    n=st.integers(1, 70),
    m=st.integers(1, 40),
    kind=st.sampled_from(sorted(KINDS)),
    half=st.booleans(),
    magnitude=st.sampled_from([1e-20, 1.0, 1e15]),
    seed=st.integers(0, 2**32 - 1),
)
def test_kernels_give_equal_bits(k, n, m, kind, half, magnitude, seed) -> None:
    rng = np.random.default_rng(seed)
    layer = KQuantLayer.of_kind(rng, k, n, KINDS[kind], half=half)
    x = (rng.standard_normal((m, k)) * magnitude).astype(np.float32)
    expected = layer.multiply(x, kernel="scalar")
    layer.check(expected, x)
    for kernel in KERNELS:
        np.testing.assert_array_equal(layer.multiply(x, kernel=kernel), expected)


@each_kernel
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q5_0", "4 bits around 8", "5 bits around 16"])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums_are_exact(kernel: str, kind: str, sign: int) -> None:
    """Activations are all 127 or -127, and products are as large as the format allows."""
    found = KINDS[kind]
    k = 2 * found.group
    for q in (0, 2**found.bits - 1):
        s = None if found.steps is None else np.full((k // found.subgroup, 16), max(found.steps, key=abs), np.int8)
        t = np.zeros((k // found.subgroup, 16), np.uint8) if found.minimum_steps else None
        scales = np.full((2, 16), 2.0**-8, np.float32)
        minimums = np.zeros((2, 16), np.float32) if found.minimums else None
        layer = KQuantLayer(np.full((k, 16), q, np.uint8), scales, None, found.group, minimums, kind=found, s=s, t=t)
        x = np.full((9, k), 127.0 * sign, np.float32)
        product = 127 * sign * found.group * (1 if s is None else int(s[0, 0])) * (q - found.zero_point)
        for m in (1, 2, 9):
            assert (layer.multiply(x[:m], kernel=kernel) == 2 * np.float32(product) / 256).all()


@each_kernel
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_0"])
def test_rows_of_zeros_with_infinity_or_nan(kernel: str, kind: str) -> None:
    rng = np.random.default_rng(2)
    layer = KQuantLayer.of_kind(rng, 300, 20, KINDS[kind])
    bias = rng.standard_normal(20, dtype=np.float32)
    x = rng.standard_normal((4, 300), dtype=np.float32)
    x[0], x[1, 270], x[2, 3] = 0, np.inf, np.nan
    y = layer.multiply(x, bias, kernel)
    np.testing.assert_array_equal(layer.multiply(x[1:2], bias, kernel), y[1:2])
    np.testing.assert_array_equal(y[0], bias)
    assert np.isnan(y[1:3]).all() and np.isfinite(y[3]).all()


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("Q4_K", {"group_size": 48}, "group_size is 48, expected 32, 64, 128 or 256"),
        ("Q4_K", {"subgroup_size": 8}, "subgroup_size is 8, expected 16 or 32"),
        ("Q4_K", {"subgroup_scale_bits": 6}, "subgroup_scale_bits is 6, expected 8 or none"),
        ("Q4_K", {"bits": 7}, "bits is 7, expected 4, 5 or 6"),
        ("Q4_K", {"bits": 6}, "high_bits hold 0 bytes, expected 3072 for 6 bits"),
        ("Q4_K", {"subgroup_zero_point": 8}, "subgroup_zero_point is 8, expected 0 with minimums"),
        ("Q4_K", {"minimums": np.zeros((3, 2, 16), np.uint16)}, "minimums have 96 elements, expected 48 or none"),
        ("Q4_K", {"minimums": None}, "subgroup_minimums have 384 elements, expected 0 or none"),
        ("Q4_K", {"subgroup_minimums": np.zeros(16, np.uint8)}, "subgroup_minimums have 16 elements, expected 384"),
        ("Q4_K", {"subgroup_scales": np.zeros(32, np.uint8)}, "subgroup_scales have 32 elements, expected 384"),
        ("Q4_K", {"zero_points": np.zeros((3, 1, 16), np.uint8)}, "zero_points have 48 elements, expected none with"),
        ("Q6_K", {"subgroup_zero_point": 0}, "subgroup_zero_point is 0, expected 32 with 6 bits"),
        ("Q6_K", {"minimums": np.zeros((3, 1, 16), np.uint16)}, "minimums are present, expected none with 6 bits"),
        ("Q5_0", {"subgroup_zero_point": 8}, "subgroup_zero_point is 8, expected 0 or 16 with 5 bits"),
        ("Q5_0", {"high_bits": None}, "high_bits hold 0 bytes, expected 1536 for 5 bits"),
    ],
)
def test_malformed_weights_are_refused(kind: str, change, message) -> None:
    layer = KQuantLayer.of_kind(np.random.default_rng(5), 200, 40, KINDS[kind])
    given = {"x": np.ones((1, 200), np.float32)} | layer.arguments()
    assert np.isfinite(_testing.w4a8_matmul(**given)).all()
    with pytest.raises(ValueError, match=message):
        _testing.w4a8_matmul(**given | change)


def test_missing_subgroup_values_are_ones() -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((7, 512), dtype=np.float32)
    for kind in ("Q5_0", "Q5_1"):
        layer = KQuantLayer.of_kind(rng, 512, 30, KINDS[kind])
        ones = np.ones((512 // 32, 30), np.int8)
        same = replace(layer, s=ones, t=ones.view(np.uint8) if layer.minimums is not None else None)
        for kernel in KERNELS:
            np.testing.assert_array_equal(same.multiply(x, kernel=kernel), layer.multiply(x, kernel=kernel))
