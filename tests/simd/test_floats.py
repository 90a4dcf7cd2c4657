"""Test the vector functions for floats on each SIMD target against NumPy."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from .targets import EDGES, LANES, UNTOUCHED, assert_same_bits, each, each_of, one, pairs, quietly, raw, targets_with

ARITHMETIC = {
    "Add": lambda a, b: a + b,
    "Subtract": lambda a, b: a - b,
    "Multiply": lambda a, b: a * b,
    "Divide": lambda a, b: a / b,
    "Max": lambda a, b: np.where(a > b, a, b),  # b if either is NaN, or if both are zeros
    "Min": lambda a, b: np.where(a < b, a, b),
}


def random_floats(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


@each_of(ARITHMETIC)
def test_arithmetic(target: str, function: str) -> None:
    a, b = pairs()
    assert_same_bits(each(target, function, a, b), quietly(ARITHMETIC[function], a, b))


@targets_with("MultiplyAdd")
def test_multiply_add(target: str) -> None:
    a, b = pairs()
    c = np.resize(EDGES, a.shape)
    # The products are exact in longdouble. The sums are exact too, or too far from a rounding midpoint to round twice.
    fused = quietly(lambda: (a.astype(np.longdouble) * b + c).astype(np.float32))
    assert_same_bits(each(target, "MultiplyAdd", a, b, c), fused)


@targets_with("MultiplyAdd")
def test_multiply_add_is_rounded_once(target: str) -> None:
    """Sums near the midpoint of two floats, including denormals, where rounding to double first would be wrong."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(2**23, 2**24, 4000).astype(np.float32) * rng.choice([-1, 1], 4000) for _ in range(2))
    a, b = a.astype(np.float32), b.astype(np.float32)
    for shift in (-40, -24, 0, 3, 20, 23, 24, 25, 30, 47, 48, 49, 60):
        c = (rng.integers(2**23, 2**24, 4000) * rng.choice([-1, 1], 4000) * 2.0**shift).astype(np.float32)
        for scale in (1.0, 2.0**-170):  # of the result
            scaled_a, scaled_c = (a * scale**0.5).astype(np.float32), (c * scale).astype(np.float32)
            scaled_b = (b * scale**0.5).astype(np.float32)
            exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in
                     zip(scaled_a, scaled_b, scaled_c, strict=True)]  # fmt: skip
            assert_same_bits(each(target, "MultiplyAdd", scaled_a, scaled_b, scaled_c), rounded_once(exact))


def rounded_once(exact: list[Fraction]) -> np.ndarray:
    """Round to float32, nearest even. The values must not overflow."""
    return np.array([_nearest(number) for number in exact], np.float32)


def _nearest(number: Fraction) -> float:
    if number == 0:
        return 0.0
    exponent = max(math.frexp(float(number))[1] - 24, -149)
    return math.ldexp(round(number / Fraction(2) ** exponent), exponent)  # round() rounds ties to even


@each_of(["Load", "Store", "Rounded"])
def test_bits_stay(target: str, function: str) -> None:
    assert_same_bits(each(target, function, EDGES), EDGES)


@targets_with("Set")
def test_set(target: str) -> None:
    for number in EDGES:
        assert_same_bits(one(target, "Set", number.reshape(1)), np.full(LANES[target], number))


@targets_with("LoadFirst", "StoreFirst")
def test_first_lanes(target: str) -> None:
    lanes = LANES[target]
    a = np.arange(1, lanes + 1, dtype=np.float32)
    for count in range(lanes + 1):
        expected = np.where(np.arange(lanes) < count, a, 0)
        assert_same_bits(one(target, "LoadFirst", a, number=count), expected.astype(np.float32))
        stored = raw(target, "StoreFirst", a, number=count)
        np.testing.assert_array_equal(stored[: 4 * count], a[:count].view(np.uint8))
        assert (stored[4 * count :] == UNTOUCHED).all()


@targets_with("Store")
def test_a_store_writes_one_register(target: str) -> None:
    assert (raw(target, "Store", random_floats(0, 16))[4 * LANES[target] :] == UNTOUCHED).all()


@targets_with("Abs")
def test_abs(target: str) -> None:
    assert_same_bits(each(target, "Abs", EDGES), np.abs(EDGES))


@targets_with("HasNan", "NonZero")
def test_questions_about_lanes(target: str) -> None:
    lanes = LANES[target]
    for i in range(len(EDGES)):
        a = np.resize(np.roll(EDGES, i), lanes)
        bits = sum(1 << lane for lane in range(lanes) if a[lane] != 0)
        assert one(target, "NonZero", a, dtype=np.uint32)[0] == bits
        assert one(target, "HasNan", a, dtype=np.uint32)[0] == np.isnan(a).any()
    assert one(target, "HasNan", np.ones(lanes, np.float32), dtype=np.uint32)[0] == 0


@targets_with("MaxOfLanes", "SumOfLanes")
def test_over_lanes(target: str) -> None:
    lanes = LANES[target]
    for seed in range(20):
        a = random_floats(seed, lanes)
        halves = a
        while len(halves) > 1:
            halves = halves[: len(halves) // 2] + halves[len(halves) // 2 :]
        assert one(target, "SumOfLanes", a)[0] == halves[0]
        assert one(target, "MaxOfLanes", a)[0] == a.max()
        whole = np.round(a * 100)
        assert one(target, "SumOfLanes", whole)[0] == whole.sum()
    assert one(target, "MaxOfLanes", np.full(lanes, -np.inf, np.float32))[0] == -np.inf


@targets_with("ExponentFromLowBits")
def test_exponent_from_low_bits(target: str) -> None:
    bits = np.array([0, 1, 127, 254, 255, 256, 0xFFFFFFFF, 0x12345678], np.uint32)
    found = each(target, "ExponentFromLowBits", bits.view(np.float32)).view(np.uint32)
    np.testing.assert_array_equal(found, bits << 23)


@targets_with("SelectLess")
def test_select_less(target: str) -> None:
    a, b = pairs()
    x, y = random_floats(1, len(a)), random_floats(2, len(a))
    assert_same_bits(each(target, "SelectLess", a, b, x, y), np.where(a < b, x, y))


@targets_with("Exp2")
def test_exp2(target: str) -> None:
    a = np.concatenate([-np.arange(126.4, step=0.0137), -np.arange(126.0), [0.0, -0.0, -1e-45, -1e-8]])
    a = a.astype(np.float32)
    expected = np.exp2(a.astype(np.float64))
    found = each(target, "Exp2", a)
    normal = expected >= 2.0**-126
    assert (np.abs(found - expected)[normal] <= 4 * 2.0**-24 * expected[normal]).all()
    far = np.array([-127, -128, -1000, -3e38, -np.inf], np.float32)
    flushed = each(target, "Exp2", far)
    assert ((flushed == 0) | np.isclose(flushed, np.exp2(far.astype(np.float64)), rtol=1e-6, atol=0)).all()
    assert (flushed[2:] == 0).all()
    assert_same_bits(found[normal], each("scalar", "Exp2", a)[normal])
    assert np.isnan(each(target, "Exp2", np.array([np.nan], np.float32))).all()


# ---- Between lanes


@targets_with("Transpose")
def test_transpose(target: str) -> None:
    lanes = LANES[target]
    a = np.arange(lanes * lanes, dtype=np.float32).reshape(lanes, lanes)
    found = raw(target, "Transpose", a).view(np.float32)[: lanes * lanes]
    np.testing.assert_array_equal(found.reshape(lanes, lanes), a.T)


@targets_with("Transpose4")
def test_transpose_of_four_rows(target: str) -> None:
    lanes = LANES[target]
    a = np.arange(4 * lanes, dtype=np.float32).reshape(4, lanes)
    found = raw(target, "Transpose4", a)
    np.testing.assert_array_equal(found.view(np.float32)[: 4 * lanes].reshape(lanes, 4), a.T)
    assert (found[16 * lanes :] == UNTOUCHED).all()


@targets_with("ReduceFour")
def test_reduce_four(target: str) -> None:
    lanes = LANES[target]
    a = np.round(random_floats(0, 4 * lanes) * 100).reshape(4, lanes)
    np.testing.assert_array_equal(one(target, "ReduceFour", a), np.resize(a.sum(axis=1), lanes))


@targets_with("LoadStrided")
def test_strided_loads(target: str) -> None:
    lanes = LANES[target]
    a = random_floats(0, 20 * lanes)
    for stride in (1, 2, 3, 17):
        np.testing.assert_array_equal(one(target, "LoadStrided", a, number=stride), a[: lanes * stride : stride])


@targets_with("LoadTwice", "SubtractAdd", "SwapPairs")
def test_pairs_of_lanes(target: str) -> None:
    lanes = LANES[target]
    a, b = random_floats(0, lanes), random_floats(1, lanes)
    np.testing.assert_array_equal(one(target, "LoadTwice", a), np.repeat(a, 2)[:lanes])
    np.testing.assert_array_equal(one(target, "SwapPairs", a), a.reshape(-1, 2)[:, ::-1].reshape(-1))
    np.testing.assert_array_equal(one(target, "SubtractAdd", a, b), np.where(np.arange(lanes) % 2, a + b, a - b))


@targets_with("Lookup16")
def test_lookup_16(target: str) -> None:
    table = random_floats(0, 16)
    index = np.concatenate([np.arange(16), np.arange(16) + 16, [0xFFFFFFF3, 0x80000000]]).astype(np.uint32)
    lanes = LANES[target]
    for i in range(0, len(index), lanes):
        some = np.resize(index[i:], lanes)
        np.testing.assert_array_equal(one(target, "Lookup16", table, some), table[some & 15])


@targets_with("PickFloats")
def test_picked_floats(target: str) -> None:
    four, index = random_floats(0, 4), np.random.default_rng(1).integers(0, 2**32, LANES[target], np.uint32)
    np.testing.assert_array_equal(one(target, "PickFloats", four, index), four[index & 3])


# ---- From and to bytes


@targets_with("LoadBf16", "LoadInt8")
def test_loads_of_narrow_numbers(target: str) -> None:
    lanes = LANES[target]
    bf16 = np.resize(EDGES, 32).astype(ml_dtypes.bfloat16)
    for i in range(0, 32, lanes):
        some = bf16[i : i + lanes]
        assert_same_bits(one(target, "LoadBf16", some.view(np.uint16)), some.astype(np.float32))
    int8 = np.arange(-128, 128).astype(np.int8)
    for i in range(0, 256, lanes):
        np.testing.assert_array_equal(one(target, "LoadInt8", int8[i : i + lanes]), int8[i : i + lanes])


@targets_with("StoreBytes")
def test_stores_of_bytes(target: str) -> None:
    lanes = LANES[target]
    a = np.concatenate([np.arange(256), np.arange(255) + 0.5]).astype(np.float32)
    a = np.resize(a, -(-len(a) // lanes) * lanes)
    for i in range(0, len(a), lanes):
        stored = raw(target, "StoreBytes", a[i : i + lanes])
        np.testing.assert_array_equal(stored[:lanes], np.rint(a[i : i + lanes]))
        assert (stored[lanes:] == UNTOUCHED).all()


@each_of(["SignedByte0", "SignedByte3"])
def test_signed_bytes(target: str, function: str) -> None:
    byte = int(function[-1])
    a = np.random.default_rng(0).integers(0, 256, 4 * LANES[target], np.uint8)
    np.testing.assert_array_equal(one(target, function, a), a.view(np.int8)[byte::4])


# ---- Units


@targets_with("MultiplyAddUnits", "PackUnits", "StoreUnits")
def test_units(target: str) -> None:
    """Small integers are exact for any order of the additions."""
    lanes = LANES[target]
    a, b, c, d = np.round(np.random.default_rng(0).standard_normal((4, lanes), np.float32) * 10)
    left, right = one(target, "PackUnits", a, b), one(target, "PackUnits", c, d)
    np.testing.assert_array_equal(one(target, "MultiplyAddUnits", left, right, d), a * c + b * d + d)
    stored = raw(target, "StoreUnits", random_floats(0, lanes))
    assert (stored[2 * lanes :] == UNTOUCHED).all()
    rounded = random_floats(0, lanes).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(stored[: 2 * lanes].view(np.uint16), rounded.view(np.uint16))


@targets_with("MultiplyAddUnits")
@pytest.mark.parametrize("exponents", [(-4, 4), (-70, -60), (50, 62)])
def test_units_are_added_one_by_one(target: str, exponents: tuple[int, int]) -> None:
    """The upper value of each pair is added first. Each multiply-add rounds once and flushes denormals to zero."""
    least, most = exponents
    lanes = LANES[target]
    rng = np.random.default_rng(0)
    for _ in range(500):
        mantissas = rng.integers(128, 256, (2, lanes, 2)) * rng.choice([-1, 1], (2, lanes, 2))
        a, b = (mantissas * 2.0 ** (rng.integers(least, most, mantissas.shape) - 7)).astype(ml_dtypes.bfloat16)
        c = (rng.standard_normal(lanes) * 2.0 ** rng.integers(2 * least - 4, 2 * most, lanes)).astype(np.float32)
        c = without_denormals(c)
        expected = c
        for i in (1, 0):
            # In longdouble, the products and sums are exact or round to the same float32.
            total = a[:, i].astype(np.longdouble) * b[:, i].astype(np.longdouble) + expected.astype(np.longdouble)
            expected = without_denormals(total.astype(np.float32))
        found = one(target, "MultiplyAddUnits", a.view(np.float32).reshape(-1), b.view(np.float32).reshape(-1), c)
        assert_same_bits(found, expected)


def without_denormals(a: np.ndarray) -> np.ndarray:
    return np.where(np.abs(a) < 2.0**-126, np.copysign(np.float32(0), a), a)
