"""Test the vector functions for integers and for bit lists on each SIMD target against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from .targets import EDGES, LANES, UNTOUCHED, assert_same_bits, each_of, one, raw, targets_with

WORDS = np.array(
    [0, 1, -1, 2**31 - 1, -(2**31), 255, 256, -256, 0x12345678, -0x12345678, 32767, -32768, 65535, 7, -8, 100], np.int32
)


def words(target: str) -> np.ndarray:
    return np.resize(WORDS, LANES[target])


@targets_with("SetInt")
def test_constants(target: str) -> None:
    for number in WORDS:
        np.testing.assert_array_equal(one(target, "SetInt", number=int(number), dtype=np.int32), number)


@each_of(["LoadInt", "StoreInt"])
def test_loads_and_stores(target: str, function: str) -> None:
    stored = raw(target, function, words(target))
    np.testing.assert_array_equal(stored[: 4 * LANES[target]].view(np.int32), words(target))
    assert (stored[4 * LANES[target] :] == UNTOUCHED).all()


@targets_with("LoadFirstInt")
def test_first_lanes(target: str) -> None:
    lanes = LANES[target]
    for count in range(min(lanes, 1), lanes + 1):
        expected = np.where(np.arange(lanes) < count, words(target), 0)
        np.testing.assert_array_equal(
            one(target, "LoadFirstInt", words(target), number=count, dtype=np.int32), expected
        )


@targets_with("BitsOf", "FloatOf", "ToFloat")
def test_floats_and_their_bits(target: str) -> None:
    lanes = LANES[target]
    for i in range(0, len(EDGES), lanes):
        a = np.resize(EDGES[i:], lanes)
        np.testing.assert_array_equal(one(target, "BitsOf", a, dtype=np.uint32), a.view(np.uint32))
        assert_same_bits(one(target, "FloatOf", a), a)
    for i in range(0, len(WORDS), lanes):
        a = np.resize(WORDS[i:], lanes)
        np.testing.assert_array_equal(one(target, "ToFloat", a), a.astype(np.float32))


@targets_with("OrInt", "SelectBits", "ShiftLeftInt", "ShiftRightInt")
def test_bits(target: str) -> None:
    lanes = LANES[target]
    rng = np.random.default_rng(0)
    where, a, b = rng.integers(0, 2**32, (3, lanes), np.uint32)
    np.testing.assert_array_equal(one(target, "OrInt", a, b, dtype=np.uint32), a | b)
    chosen = one(target, "SelectBits", where, a, b, dtype=np.uint32)
    np.testing.assert_array_equal(chosen, (where & a) | (~where & b))
    np.testing.assert_array_equal(one(target, "ShiftLeftInt", a, dtype=np.uint32), a << 5)
    np.testing.assert_array_equal(one(target, "ShiftRightInt", a, dtype=np.uint32), a >> 5)


MASKS = [0, 1, 1 << 63, 2**64 - 1, 0xAAAAAAAAAAAAAAAA, 0x00FF00FF0F0F3355, 0x8000000000000001]


@targets_with("CompressFloats", "ListBits", "ListBits8")
@pytest.mark.parametrize("mask", MASKS)
def test_lists_of_bits(target: str, mask: int) -> None:
    signed = mask - (mask >> 63 << 64)
    places = np.flatnonzero([mask >> bit & 1 for bit in range(64)])
    for function, dtype in (("ListBits", np.uint16), ("ListBits8", np.uint8)):
        listed = raw(target, function, number=signed)
        assert listed[2048:2056].view(np.int64)[0] == len(places)
        np.testing.assert_array_equal(listed[:2048].view(dtype)[: len(places)], places + 7)
        assert (listed[64 * np.dtype(dtype).itemsize : 2048] == UNTOUCHED).all()
    a = np.random.default_rng(0).standard_normal(64, np.float32)
    kept = raw(target, "CompressFloats", a, number=signed)
    np.testing.assert_array_equal(kept.view(np.float32)[: len(places)], a[places])


ARITHMETIC = {
    "AddInt": lambda a, b: a + b,
    "SubtractInt": lambda a, b: a - b,
    "MultiplyInt": lambda a, b: a * b,
    "AndInt": lambda a, b: a & b,
    "MaxInt": np.maximum,
    "ShiftRightSigned": lambda a, b: a >> 5,
}


@each_of(ARITHMETIC)
def test_arithmetic(target: str, function: str) -> None:
    lanes = LANES[target]
    for i in range(len(WORDS)):
        a, b = np.resize(np.roll(WORDS, i), lanes), np.resize(np.roll(WORDS, 3 * i + 1), lanes)
        with np.errstate(over="ignore"):
            expected = ARITHMETIC[function](a, b)
        np.testing.assert_array_equal(one(target, function, a, b, dtype=np.int32), expected)


@targets_with("RoundToInt")
def test_rounding(target: str) -> None:
    lanes = LANES[target]
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 1e9, -1e9, 3.49, -0.0], np.float32)
    for i in range(len(values)):
        a = np.resize(np.roll(values, i), lanes)
        np.testing.assert_array_equal(one(target, "RoundToInt", a, dtype=np.int32), np.rint(a))


@targets_with("MaxOfIntLanes", "SumOfIntLanes")
def test_over_lanes(target: str) -> None:
    lanes = LANES[target]
    for seed in range(10):
        a = np.random.default_rng(seed).integers(-(2**31) // lanes, 2**31 // lanes, lanes).astype(np.int32)
        assert one(target, "SumOfIntLanes", a, dtype=np.int32)[0] == a.sum()
        assert one(target, "MaxOfIntLanes", a, dtype=np.int32)[0] == a.max()


@targets_with("LoadUint8", "LoadSignedBytes", "StoreInt8")
def test_narrow_loads_and_stores(target: str) -> None:
    lanes = LANES[target]
    a = np.arange(127, 127 + 5 * lanes, 5).astype(np.uint8)  # of both signs
    np.testing.assert_array_equal(one(target, "LoadUint8", a, dtype=np.int32), a)
    np.testing.assert_array_equal(one(target, "LoadSignedBytes", a, dtype=np.int32), a.view(np.int8))
    stored = raw(target, "StoreInt8", words(target))
    np.testing.assert_array_equal(stored[:lanes].view(np.int8), np.clip(words(target), -128, 127))
    assert (stored[lanes:] == UNTOUCHED).all()


@targets_with("DotPair")
def test_dot_products_of_pairs(target: str) -> None:
    lanes = LANES[target]
    a, b = np.random.default_rng(0).integers(-32768, 32768, (2, 2 * lanes)).astype(np.int16)
    a[:2], b[:2] = 32767, -32768
    sums = np.arange(lanes, dtype=np.int32)
    products = (a.astype(np.int64) * b).reshape(-1, 2).sum(axis=1)
    expected = (sums + products).astype(np.int32)
    np.testing.assert_array_equal(one(target, "DotPair", sums, a, b, dtype=np.int32), expected)


@targets_with("TransposeInt")
def test_transpose_of_integers(target: str) -> None:
    lanes = LANES[target]
    a = np.arange(lanes * lanes, dtype=np.int32).reshape(lanes, lanes)
    found = raw(target, "TransposeInt", a).view(np.int32)[: lanes * lanes]
    np.testing.assert_array_equal(found.reshape(lanes, lanes), a.T)


@targets_with("LoadSome", "StoreSome")
def test_some_lanes(target: str) -> None:
    """Partial loads and stores of up to `left` values, from below zero to more than a register holds."""
    lanes = LANES[target]
    a = np.arange(1, lanes + 1, dtype=np.float32)
    for left in (-3, -2, -1, 0, 1, lanes - 1, lanes, lanes + 5):
        there = min(max(left, 0), lanes)
        expected = np.where(np.arange(lanes) < there, a, 0).astype(np.float32)
        assert_same_bits(one(target, "LoadSome", a, number=left), expected)
        stored = raw(target, "StoreSome", a, number=left)
        np.testing.assert_array_equal(stored[: 4 * there], a[:there].view(np.uint8))
        assert (stored[4 * there :] == UNTOUCHED).all()
