"""Test every kernel for weights in subgroups against NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..sampling import examples
from .subgroups import SubgroupLayer, runnable_subgroup_kernels

KERNELS = runnable_subgroup_kernels()
GROUPS = (64, 128, 256)
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_bits = pytest.mark.parametrize("bits", [4, 5, 6])


@each_kernel
@each_bits
@pytest.mark.parametrize("subgroup", [16, 32])
def test_shapes(kernel: str, bits: int, subgroup: int) -> None:
    rng = np.random.default_rng(bits)
    for k in (1, 15, 17, 33, 64, 65, 128, 200, 256, 257, 520, 1100):
        for n in (1, 16, 17, 50):
            bias = rng.standard_normal(n, dtype=np.float32) if k % 3 else None
            group = GROUPS[(k + n) % 3]
            layer = SubgroupLayer.in_subgroups(rng, k, n, group, subgroup=subgroup, bits=bits, half=bool(k % 2))
            for m in (1, 2, 5, 8, 16, 33):
                x = rng.standard_normal((m, k), dtype=np.float32)
                layer.check(layer.multiply(x, bias, kernel), x, bias)


@each_kernel
@each_bits
@pytest.mark.parametrize("group", GROUPS)
def test_a_row_depends_on_itself_alone(kernel: str, bits: int, group: int) -> None:
    rng = np.random.default_rng(group)
    for subgroup, (m, k, n) in zip((16, 32, 16), ((600, 96, 70), (64, 1100, 50), (272, 1100, 50)), strict=True):
        layer = SubgroupLayer.in_subgroups(rng, k, n, group, subgroup=subgroup, bits=bits)
        x = rng.standard_normal((m, k), dtype=np.float32)
        x[m // 2, k // 3] = np.nan
        y = layer.multiply(x, kernel=kernel)
        layer.check(y, x)
        for rows in (slice(0, 1), slice(5, 7), slice(5, 21), slice(m - 40, m)):
            np.testing.assert_array_equal(layer.multiply(x[rows], kernel=kernel), y[rows])


@examples(40)
@given(
    k=st.integers(1, 600),
    n=st.integers(1, 70),
    m=st.integers(1, 40),
    group=st.sampled_from(GROUPS),
    subgroup=st.sampled_from([16, 32]),
    bits=st.sampled_from([4, 5, 6]),
    half=st.booleans(),
    magnitude=st.sampled_from([1e-20, 1.0, 1e15]),
    seed=st.integers(0, 2**32 - 1),
)
def test_kernels_give_equal_bits(k, n, m, group, subgroup, bits, half, magnitude, seed) -> None:
    rng = np.random.default_rng(seed)
    layer = SubgroupLayer.in_subgroups(rng, k, n, group, subgroup=subgroup, bits=bits, half=half)
    x = (rng.standard_normal((m, k)) * magnitude).astype(np.float32)
    expected = layer.multiply(x, kernel="scalar")
    layer.check(expected, x)
    for kernel in KERNELS:
        np.testing.assert_array_equal(layer.multiply(x, kernel=kernel), expected)


def extreme(bits: int, q: int, z: int, s: int) -> SubgroupLayer:
    """Return a layer of 4096 inputs whose weights all have the same q, z and s."""
    full = np.full((256, 16), 0, np.uint8)
    ones = np.ones((16, 16), np.float32)
    return SubgroupLayer(
        np.full((4096, 16), q, np.uint8), ones, None, 256, s=full + np.uint8(s), z=full + np.uint8(z), stored_bits=bits
    )


@each_kernel
@pytest.mark.parametrize(
    ("bits", "q", "z", "s"),
    [
        *((4, 15, 0, 8), (4, 0, 15, 8), (4, 15, 7, 15), (4, 0, 8, 15), (4, 15, 15, 15), (4, 8, 15, 15)),
        *((5, 31, 0, 4), (5, 0, 31, 4), (5, 31, 13, 7), (5, 31, 31, 7), (6, 63, 0, 2), (6, 0, 63, 2), (6, 63, 21, 3)),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums_are_exact(kernel: str, bits: int, q: int, z: int, s: int, sign: int) -> None:
    """Activations are all 127 or -127, and products are as large as the format allows."""
    layer = extreme(bits, q, z, s)
    x = np.full((9, 4096), 127.0 * sign, np.float32)
    for m in (1, 2, 9):
        assert (layer.multiply(x[:m], kernel=kernel) == 127 * 4096 * s * (q - z) * sign).all()


@each_kernel
@each_bits
def test_rows_of_zeros_with_infinity_or_nan(kernel: str, bits: int) -> None:
    rng = np.random.default_rng(2)
    layer = SubgroupLayer.in_subgroups(rng, 300, 20, bits=bits)
    bias = rng.standard_normal(20, dtype=np.float32)
    x = rng.standard_normal((4, 300), dtype=np.float32)
    x[0], x[1, 270], x[2, 3] = 0, np.inf, np.nan
    for rows in (slice(0, 4), slice(0, 1), slice(1, 2)):
        y = layer.multiply(x[rows], bias, kernel)
        np.testing.assert_array_equal(y, layer.multiply(x, bias, "scalar")[rows])
    y = layer.multiply(x, bias, kernel)
    np.testing.assert_array_equal(y[0], bias)
    assert np.isnan(y[1:3]).all() and np.isfinite(y[3]).all()


@pytest.mark.parametrize("bits", [5, 6])
def test_packed_high_bits(bits: int) -> None:
    """Each byte holds the high bits of 8 rows (5 bits) or 4 rows (6 bits), the first row in the highest bits."""
    rng = np.random.default_rng(3)
    for k, n in ((1, 1), (8, 16), (63, 17), (64, 16), (200, 50)):
        q = rng.integers(0, 2**bits, (k, n), dtype=np.uint8)
        packed = _native.pack_high_bits(q, bits)
        assert packed.shape == (-(-n // 16), -(-k // 64), 128 * (bits - 4))
        together = 8 // (bits - 4)
        lines = packed.reshape(packed.shape[0], -1, 16, 4)  # [panel, line, column, input in row]
        found = np.zeros((lines.shape[0] * 16, lines.shape[1] * together * 4), np.uint8)
        for row in range(together):
            high = lines >> (8 - (bits - 4) * (row + 1)) & (2 ** (bits - 4) - 1)
            for within in range(4):
                columns = high[:, :, :, within].transpose(0, 2, 1).reshape(-1, lines.shape[1])
                found[:, row * 4 + within :: together * 4] = columns
        expected = np.zeros_like(found)
        expected[:n, :k] = (q >> 4).T
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 32}, "group_size is 32, expected 64, 128 or 256 with subgroups"),
        ({"subgroup_size": 8}, "subgroup_size is 8, expected 0, 16 or 32"),
        ({"bits": 7}, "bits is 7, expected 4, 5 or 6"),
        ({"bits": 4}, "high_bits hold 1536 bytes, expected 0 for 4 bits"),
        ({"high_bits": None}, "high_bits hold 0 bytes, expected 1536 for 5 bits"),
        ({"subgroup_scales": np.zeros((3, 1, 16), np.uint8)}, "subgroup_scales have 48 elements, expected 768"),
        ({"weights": np.zeros(7, np.uint8)}, "weights hold 7 bytes, expected 6144"),
        ({"scales": np.zeros((3, 2, 16), np.float32)}, "scales have 96 elements, expected 48"),
        ({"zero_points": np.zeros((3, 1, 16), np.uint8)}, "zero_points have 48 elements and minimums 0, expected ne"),
        ({"minimums": np.zeros((3, 1, 16), np.uint16)}, "zero_points have 0 elements and minimums 48, expected ne"),
    ],
)
def test_malformed_weights_are_refused(change, message) -> None:
    layer = SubgroupLayer.in_subgroups(np.random.default_rng(5), 200, 40, bits=5)
    given = {
        "x": np.ones((1, 200), np.float32),
        "weights": layer.packed_weights,
        "scales": layer.packed_scales,
        "group_size": 256,
        "k": 200,
        "n": 40,
        "subgroup_scales": layer.packed_subgroup_scales,
        "subgroup_size": 16,
        "high_bits": layer.packed_high_bits,
        "bits": 5,
    }
    assert np.isfinite(_testing.w4a8_matmul(**given)).all()
    with pytest.raises(ValueError, match=message):
        _testing.w4a8_matmul(**given | change)


def test_a_layer_keeps_its_answer_in_the_other_subgroup_size() -> None:
    """Subgroups of 32 equal two subgroups of 16 with the same s and z."""
    rng = np.random.default_rng(6)
    layer = SubgroupLayer.in_subgroups(rng, 512, 30, subgroup=32)
    same = replace(layer, subgroup=16, s=np.repeat(layer.s, 2, axis=0), z=np.repeat(layer.z, 2, axis=0))
    x = rng.standard_normal((7, 512), dtype=np.float32)
    for kernel in KERNELS:
        np.testing.assert_array_equal(same.multiply(x, kernel=kernel), layer.multiply(x, kernel=kernel))
