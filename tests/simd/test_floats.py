"""Vectors of floats, each function of each column against numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .columns import EDGES, LANES, UNTOUCHED, assert_same_bits, columns_with, each, each_of, one, pairs, quietly, raw

ARITHMETIC = {
    "Add": lambda a, b: a + b,
    "Subtract": lambda a, b: a - b,
    "Multiply": lambda a, b: a * b,
    "Divide": lambda a, b: a / b,
    "Max": lambda a, b: np.where(a > b, a, b),  # b if either is NaN; of zeros the second
    "Min": lambda a, b: np.where(a < b, a, b),
}


def numbers(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


@each_of(ARITHMETIC)
def test_arithmetic(column: str, function: str) -> None:
    a, b = pairs()
    assert_same_bits(each(column, function, a, b), quietly(ARITHMETIC[function], a, b))


@columns_with("MultiplyAdd")
def test_multiply_add(column: str) -> None:
    a, b = pairs()
    c = np.resize(EDGES, a.shape)
    found = each(column, "MultiplyAdd", a, b, c)
    apart = quietly(lambda: a * b + c)
    fused = quietly(lambda: (a.astype(np.float64) * b + c).astype(np.float32))
    right = np.isclose(found, fused, rtol=2**-23, atol=0, equal_nan=True) | (found == apart)
    assert right.all(), (found[~right], fused[~right])


@each_of(["Load", "Store", "Rounded"])
def test_bits_stay(column: str, function: str) -> None:
    assert_same_bits(each(column, function, EDGES), EDGES)


@columns_with("Set")
def test_set(column: str) -> None:
    for number in EDGES:
        assert_same_bits(one(column, "Set", number.reshape(1)), np.full(LANES[column], number))


@columns_with("LoadFirst", "StoreFirst")
def test_first_lanes(column: str) -> None:
    lanes = LANES[column]
    a = np.arange(1, lanes + 1, dtype=np.float32)
    for count in range(lanes + 1):
        expected = np.where(np.arange(lanes) < count, a, 0)
        assert_same_bits(one(column, "LoadFirst", a, number=count), expected.astype(np.float32))
        stored = raw(column, "StoreFirst", a, number=count)
        np.testing.assert_array_equal(stored[: 4 * count], a[:count].view(np.uint8))
        assert (stored[4 * count :] == UNTOUCHED).all()


@columns_with("Store")
def test_a_store_writes_one_register(column: str) -> None:
    assert (raw(column, "Store", numbers(0, 16))[4 * LANES[column] :] == UNTOUCHED).all()


@columns_with("Abs")
def test_abs(column: str) -> None:
    assert_same_bits(each(column, "Abs", EDGES), np.abs(EDGES))


@columns_with("HasNan", "NonZero")
def test_questions_about_lanes(column: str) -> None:
    lanes = LANES[column]
    for i in range(len(EDGES)):
        a = np.resize(np.roll(EDGES, i), lanes)
        bits = sum(1 << lane for lane in range(lanes) if a[lane] != 0)
        assert one(column, "NonZero", a, dtype=np.uint32)[0] == bits
        assert one(column, "HasNan", a, dtype=np.uint32)[0] == np.isnan(a).any()
    assert one(column, "HasNan", np.ones(lanes, np.float32), dtype=np.uint32)[0] == 0


@columns_with("MaxOfLanes", "SumOfLanes")
def test_over_lanes(column: str) -> None:
    lanes = LANES[column]
    for seed in range(20):
        a = numbers(seed, lanes)
        assert abs(one(column, "SumOfLanes", a)[0] - a.sum(dtype=np.float64)) <= np.abs(a).sum() * lanes * 2**-24
        assert one(column, "MaxOfLanes", a)[0] == a.max()
        whole = np.round(a * 100)
        assert one(column, "SumOfLanes", whole)[0] == whole.sum()
    assert one(column, "MaxOfLanes", np.full(lanes, -np.inf, np.float32))[0] == -np.inf


@columns_with("ExponentFromLowBits")
def test_exponent_from_low_bits(column: str) -> None:
    bits = np.array([0, 1, 127, 254, 255, 256, 0xFFFFFFFF, 0x12345678], np.uint32)
    found = each(column, "ExponentFromLowBits", bits.view(np.float32)).view(np.uint32)
    np.testing.assert_array_equal(found, bits << 23)


@columns_with("SelectLess")
def test_select_less(column: str) -> None:
    a, b = pairs()
    x, y = numbers(1, len(a)), numbers(2, len(a))
    assert_same_bits(each(column, "SelectLess", a, b, x, y), np.where(a < b, x, y))


@columns_with("Exp2")
def test_exp2(column: str) -> None:
    a = np.concatenate([-np.arange(126.4, step=0.0137), -np.arange(126.0), [0.0, -0.0, -1e-45, -1e-8]])
    a = a.astype(np.float32)
    expected = np.exp2(a.astype(np.float64))
    found = each(column, "Exp2", a)
    normal = expected >= 2.0**-126
    assert (np.abs(found - expected)[normal] <= 4 * 2.0**-24 * expected[normal]).all()
    far = np.array([-127, -128, -1000, -3e38, -np.inf], np.float32)
    flushed = each(column, "Exp2", far)
    assert ((flushed == 0) | np.isclose(flushed, np.exp2(far.astype(np.float64)), rtol=1e-6, atol=0)).all()
    assert (flushed[2:] == 0).all()
    assert np.isnan(each(column, "Exp2", np.array([np.nan], np.float32))).all()


# ---- Between lanes


@columns_with("Transpose")
def test_transpose(column: str) -> None:
    lanes = LANES[column]
    a = np.arange(lanes * lanes, dtype=np.float32).reshape(lanes, lanes)
    found = raw(column, "Transpose", a).view(np.float32)[: lanes * lanes]
    np.testing.assert_array_equal(found.reshape(lanes, lanes), a.T)


@columns_with("Transpose4")
def test_transpose_of_four_rows(column: str) -> None:
    lanes = LANES[column]
    a = np.arange(4 * lanes, dtype=np.float32).reshape(4, lanes)
    found = raw(column, "Transpose4", a)
    np.testing.assert_array_equal(found.view(np.float32)[: 4 * lanes].reshape(lanes, 4), a.T)
    assert (found[16 * lanes :] == UNTOUCHED).all()


@columns_with("ReduceFour")
def test_reduce_four(column: str) -> None:
    lanes = LANES[column]
    a = np.round(numbers(0, 4 * lanes) * 100).reshape(4, lanes)
    np.testing.assert_array_equal(one(column, "ReduceFour", a), np.resize(a.sum(axis=1), lanes))


@columns_with("LoadStrided")
def test_strided_loads(column: str) -> None:
    lanes = LANES[column]
    a = numbers(0, 20 * lanes)
    for stride in (1, 2, 3, 17):
        np.testing.assert_array_equal(one(column, "LoadStrided", a, number=stride), a[: lanes * stride : stride])


@columns_with("LoadTwice", "SubtractAdd", "SwapPairs")
def test_pairs_of_lanes(column: str) -> None:
    lanes = LANES[column]
    a, b = numbers(0, lanes), numbers(1, lanes)
    np.testing.assert_array_equal(one(column, "LoadTwice", a), np.repeat(a, 2)[:lanes])
    np.testing.assert_array_equal(one(column, "SwapPairs", a), a.reshape(-1, 2)[:, ::-1].reshape(-1))
    np.testing.assert_array_equal(one(column, "SubtractAdd", a, b), np.where(np.arange(lanes) % 2, a + b, a - b))


@columns_with("Lookup16")
def test_lookup_16(column: str) -> None:
    table = numbers(0, 16)
    index = np.concatenate([np.arange(16), np.arange(16) + 16, [0xFFFFFFF3, 0x80000000]]).astype(np.uint32)
    lanes = LANES[column]
    for i in range(0, len(index), lanes):
        some = np.resize(index[i:], lanes)
        np.testing.assert_array_equal(one(column, "Lookup16", table, some), table[some & 15])


@columns_with("PickFloats")
def test_picked_floats(column: str) -> None:
    four, index = numbers(0, 4), np.random.default_rng(1).integers(0, 2**32, LANES[column], np.uint32)
    np.testing.assert_array_equal(one(column, "PickFloats", four, index), four[index & 3])


# ---- From and to bytes


@columns_with("LoadBf16", "LoadInt8")
def test_loads_of_narrow_numbers(column: str) -> None:
    lanes = LANES[column]
    bf16 = np.resize(EDGES, 32).astype(ml_dtypes.bfloat16)
    for i in range(0, 32, lanes):
        some = bf16[i : i + lanes]
        assert_same_bits(one(column, "LoadBf16", some.view(np.uint16)), some.astype(np.float32))
    int8 = np.arange(-128, 128).astype(np.int8)
    for i in range(0, 256, lanes):
        np.testing.assert_array_equal(one(column, "LoadInt8", int8[i : i + lanes]), int8[i : i + lanes])


@columns_with("StoreBytes")
def test_stores_of_bytes(column: str) -> None:
    lanes = LANES[column]
    a = np.concatenate([np.arange(256), np.arange(255) + 0.5]).astype(np.float32)
    a = np.resize(a, -(-len(a) // lanes) * lanes)
    for i in range(0, len(a), lanes):
        stored = raw(column, "StoreBytes", a[i : i + lanes])
        np.testing.assert_array_equal(stored[:lanes], np.rint(a[i : i + lanes]))
        assert (stored[lanes:] == UNTOUCHED).all()


@each_of(["SignedByte0", "SignedByte3"])
def test_signed_bytes(column: str, function: str) -> None:
    byte = int(function[-1])
    a = np.random.default_rng(0).integers(0, 256, 4 * LANES[column], np.uint8)
    np.testing.assert_array_equal(one(column, function, a), a.view(np.int8)[byte::4])


# ---- Units


@columns_with("MultiplyAddUnits", "PackUnits", "StoreUnits")
def test_units(column: str) -> None:
    """Small whole numbers: products and their sums are exact in any order."""
    lanes = LANES[column]
    a, b, c, d = np.round(np.random.default_rng(0).standard_normal((4, lanes), np.float32) * 10)
    left, right = one(column, "PackUnits", a, b), one(column, "PackUnits", c, d)
    of_pairs = column in ("avx512bf16", "amx")
    expected = a * c + b * d if of_pairs else a * c
    np.testing.assert_array_equal(one(column, "MultiplyAddUnits", left, right, d), expected + d)
    stored = raw(column, "StoreUnits", numbers(0, lanes))
    size = 2 if of_pairs else 4
    assert (stored[size * lanes :] == UNTOUCHED).all()
    if of_pairs:
        rounded = numbers(0, lanes).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(stored[: 2 * lanes].view(np.uint16), rounded.view(np.uint16))
    else:
        np.testing.assert_array_equal(stored[: 4 * lanes].view(np.float32), numbers(0, lanes))
