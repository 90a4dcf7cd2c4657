"""Vectors of integers, and lists of bits, each function of each column against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from .columns import EDGES, LANES, UNTOUCHED, assert_same_bits, each_column, one, raw

WORDS = np.array(
    [0, 1, -1, 2**31 - 1, -(2**31), 255, 256, -256, 0x12345678, -0x12345678, 32767, -32768, 65535, 7, -8, 100], np.int32
)


def words(column: str) -> np.ndarray:
    return np.resize(WORDS, LANES[column])


@each_column
def test_constants(column: str) -> None:
    for number in WORDS:
        np.testing.assert_array_equal(one(column, "SetInt", number=int(number), dtype=np.int32), number)


@each_column
@pytest.mark.parametrize("function", ["LoadInt", "StoreInt"])
def test_loads_and_stores(column: str, function: str) -> None:
    stored = raw(column, function, words(column))
    np.testing.assert_array_equal(stored[: 4 * LANES[column]].view(np.int32), words(column))
    assert (stored[4 * LANES[column] :] == UNTOUCHED).all()


@each_column
def test_first_lanes(column: str) -> None:
    lanes = LANES[column]
    for count in range(min(lanes, 1), lanes + 1):
        expected = np.where(np.arange(lanes) < count, words(column), 0)
        np.testing.assert_array_equal(
            one(column, "LoadFirstInt", words(column), number=count, dtype=np.int32), expected
        )


@each_column
def test_floats_and_their_bits(column: str) -> None:
    lanes = LANES[column]
    for i in range(0, len(EDGES), lanes):
        a = np.resize(EDGES[i:], lanes)
        np.testing.assert_array_equal(one(column, "BitsOf", a, dtype=np.uint32), a.view(np.uint32))
        assert_same_bits(one(column, "FloatOf", a), a)
    for i in range(0, len(WORDS), lanes):
        a = np.resize(WORDS[i:], lanes)
        np.testing.assert_array_equal(one(column, "ToFloat", a), a.astype(np.float32))


@each_column
def test_bytes_as_integers(column: str) -> None:
    lanes = LANES[column]
    for i in range(0, 256, lanes):
        a = np.arange(i, i + lanes).astype(np.uint8)
        np.testing.assert_array_equal(one(column, "ExpandBytes", a, dtype=np.int32), a)


@each_column
def test_bits(column: str) -> None:
    lanes = LANES[column]
    rng = np.random.default_rng(0)
    where, a, b = rng.integers(0, 2**32, (3, lanes), np.uint32)
    np.testing.assert_array_equal(one(column, "OrInt", a, b, dtype=np.uint32), a | b)
    chosen = one(column, "SelectBits", where, a, b, dtype=np.uint32)
    np.testing.assert_array_equal(chosen, (where & a) | (~where & b))
    np.testing.assert_array_equal(one(column, "ShiftLeftInt", a, dtype=np.uint32), a << 5)
    np.testing.assert_array_equal(one(column, "ShiftRightInt", a, dtype=np.uint32), a >> 5)


MASKS = [0, 1, 1 << 63, 2**64 - 1, 0xAAAAAAAAAAAAAAAA, 0x00FF00FF0F0F3355, 0x8000000000000001]


@each_column
@pytest.mark.parametrize("mask", MASKS)
def test_lists_of_bits(column: str, mask: int) -> None:
    signed = mask - (mask >> 63 << 64)
    places = np.flatnonzero([mask >> bit & 1 for bit in range(64)])
    for function, dtype in (("ListBits", np.uint16), ("ListBits8", np.uint8)):
        listed = raw(column, function, number=signed)
        assert listed[2048:2056].view(np.int64)[0] == len(places)
        np.testing.assert_array_equal(listed[:2048].view(dtype)[: len(places)], places + 7)
        assert (listed[64 * np.dtype(dtype).itemsize : 2048] == UNTOUCHED).all()
    a = np.random.default_rng(0).standard_normal(64, np.float32)
    kept = raw(column, "CompressFloats", a, number=signed)
    np.testing.assert_array_equal(kept.view(np.float32)[: len(places)], a[places])
