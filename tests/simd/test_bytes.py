"""Test the vector functions for bytes and their dot products on each SIMD target against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from .targets import EDGES, LANES, UNTOUCHED, assert_same_bits, each_of, one, raw, targets_with


def random_bytes(seed: int, count: int, dtype: type = np.uint8) -> np.ndarray:
    limits = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(limits.min, limits.max, count, dtype, endpoint=True)


def stored_bytes(target: str, function: str, *arrays: np.ndarray, number: int = 0) -> np.ndarray:
    """Return the register of bytes that the function stored, and check that it wrote nothing after them."""
    found = raw(target, function, *arrays, number=number)
    assert (found[4 * LANES[target] :] == UNTOUCHED).all()
    return found[: 4 * LANES[target]]


BITWISE = {
    "AndBytes": lambda a, b: a & b,
    "XorBytes": lambda a, b: a ^ b,
    "SubtractBytes": lambda a, b: a - b,
    "LowNibbles": lambda a, b: a & 15,
    "HighNibbles": lambda a, b: a >> 4,
    "LoadBytes": lambda a, b: a,
}


@each_of(BITWISE)
def test_byte_by_byte(target: str, function: str) -> None:
    a, b = random_bytes(0, 4 * LANES[target]), random_bytes(1, 4 * LANES[target])
    np.testing.assert_array_equal(stored_bytes(target, function, a, b), BITWISE[function](a, b))


@targets_with("RepeatQuad", "SetBytes")
def test_repeated_bytes(target: str) -> None:
    a = random_bytes(0, 64)
    size = 4 * LANES[target]
    for number in (0, 1, 127, -128, -1):
        np.testing.assert_array_equal(stored_bytes(target, "SetBytes", number=number).view(np.int8), number)
    np.testing.assert_array_equal(stored_bytes(target, "RepeatQuad", a), np.resize(a[:4], size))


@targets_with("Repeat16", "RepeatQuadOf16")
def test_repeated_parts_of_16_bytes(target: str) -> None:
    a = random_bytes(0, 64)
    np.testing.assert_array_equal(stored_bytes(target, "Repeat16", a), np.resize(a[:16], 4 * LANES[target]))
    for which in range(4):
        quads = a[: 4 * LANES[target]].reshape(-1, 4, 4)[:, which]
        expected = np.repeat(quads[:, None], 4, axis=1).reshape(-1)
        np.testing.assert_array_equal(stored_bytes(target, "RepeatQuadOf16", a, number=which), expected)


@targets_with("PickBytes")
def test_picked_bytes(target: str) -> None:
    a = random_bytes(0, 64)
    places = random_bytes(1, 4 * LANES[target]) & 7
    np.testing.assert_array_equal(stored_bytes(target, "PickBytes", a, places), a[places])


@targets_with("PickWords")
def test_picked_words(target: str) -> None:
    a = random_bytes(0, 4, np.uint16)
    places = random_bytes(1, 2 * LANES[target], np.uint16)
    np.testing.assert_array_equal(stored_bytes(target, "PickWords", a, places).view(np.uint16), a[places & 3])


@targets_with("LowPositions")
def test_words_of_low_places(target: str) -> None:
    a, places = (random_bytes(seed, 2 * LANES[target], np.uint16) for seed in (0, 1))
    expected = np.where(places & 3 < 2, a, 0)
    np.testing.assert_array_equal(stored_bytes(target, "LowPositions", a, places).view(np.uint16), expected)


PAIRS_OF_PLACES = np.array([(a, b) for b in range(4) for a in range(b)])


@each_of(["SpreadBytes0", "SpreadBytes1"])
def test_spread_bytes(target: str, function: str) -> None:
    quads, half = LANES[target], int(function[-1])
    a = random_bytes(0, 4 * quads)
    rng = np.random.default_rng(1)
    for first in range(len(PAIRS_OF_PLACES)):
        places = PAIRS_OF_PLACES[(first + rng.integers(0, 6, 2 * quads)) % 6].astype(np.uint8)
        places[0] = PAIRS_OF_PLACES[first]
        expected = np.zeros((quads, 4), np.uint8)
        of_half = slice(2 * half, 2 * half + 2)
        np.put_along_axis(
            expected, places.reshape(quads, 4)[:, of_half].astype(np.int64), a.reshape(quads, 4)[:, of_half], axis=1
        )
        np.testing.assert_array_equal(stored_bytes(target, function, a, places.reshape(-1)), expected.reshape(-1))


@each_of(["SpreadWords0", "SpreadWords1"])
def test_spread_words(target: str, function: str) -> None:
    pairs, half = LANES[target], int(function[-1])
    a = random_bytes(0, 2 * pairs, np.uint16)
    for first in range(len(PAIRS_OF_PLACES)):
        places = np.roll(np.resize(PAIRS_OF_PLACES, (max(pairs, 6), 2)), -first, axis=0)[:pairs]
        expected = np.zeros((pairs, 4), np.uint16)
        np.put_along_axis(expected, places, a.reshape(pairs, 2), axis=1)
        found = stored_bytes(target, function, a, places.astype(np.uint16).reshape(-1)).view(np.uint16)
        np.testing.assert_array_equal(found.reshape(pairs, 2), expected[:, 2 * half : 2 * half + 2])


MASKS = [0, 1, 1 << 63, 2**64 - 1, 0xAAAAAAAAAAAAAAAA, 0x00FF00FF0F0F3355, 0x8000000100000001]


EXPANSIONS = {"ExpandBytes": (np.uint8, 0), "ExpandBytesElse": (np.uint8, 0x85), "ExpandWords": (np.uint16, 0)}


@each_of(EXPANSIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_expanded_by_a_mask(target: str, mask: int, function: str) -> None:
    dtype, fill = EXPANSIONS[function]
    places = 64 // np.dtype(dtype).itemsize
    mask &= (1 << places) - 1
    stored = random_bytes(3, 128, dtype)
    bits = np.array([mask >> place & 1 for place in range(places)], bool)
    expected = np.full(places, fill, dtype)
    expected[bits] = stored[: bits.sum()]
    step = 4 * LANES[target] // np.dtype(dtype).itemsize
    for first in range(0, places, step):
        found = stored_bytes(target, function, stored, np.array([first], np.int32), number=mask - (mask >> 63 << 64))
        np.testing.assert_array_equal(found.view(dtype), expected[first : first + step])


def quads(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, 4).astype(np.int64)


@targets_with("DotQuad")
def test_dot_products_of_quads(target: str) -> None:
    size = 4 * LANES[target]
    sums = random_bytes(5, LANES[target], np.int16).astype(np.int32)
    for seed in range(4):
        a, b = random_bytes(seed, size), random_bytes(seed + 9, size, np.int8)
        if seed == 0:
            a[:], b[:] = 255, -128
        expected = sums + (quads(a) * quads(b)).sum(axis=1)
        np.testing.assert_array_equal(one(target, "DotQuad", a, b, sums, dtype=np.int32), expected)


@targets_with("DotPairs")
def test_dot_products_of_quads_whose_pairs_fit(target: str) -> None:
    size = 4 * LANES[target]
    sums = random_bytes(5, LANES[target], np.int16).astype(np.int32)
    for seed in range(4):
        a, b = random_bytes(seed, size), random_bytes(seed + 9, size, np.int8)
        b[1::2] = np.clip(
            b[1::2], -128 - np.minimum(b[0::2], 0), np.minimum(128 - np.maximum(b[0::2].astype(int), 0), 127)
        )
        if seed < 2:
            a[:], b[:] = 255, 64 - 128 * seed
        expected = sums + (quads(a) * quads(b)).sum(axis=1)
        np.testing.assert_array_equal(one(target, "DotPairs", a, b, sums, dtype=np.int32), expected)


@targets_with("MultiplyPairs")
def test_products_of_pairs_of_bytes(target: str) -> None:
    size = 4 * LANES[target]
    a, b = random_bytes(3, size), random_bytes(4, size, np.int8)
    b = np.clip(b, -64, 63).astype(np.int8)  # so that the sums fit
    a[:2], b[:2] = 255, -64
    expected = (a.astype(np.int32) * b).reshape(-1, 2).sum(axis=1)
    found = one(target, "MultiplyPairs", a, b, dtype=np.int32)
    np.testing.assert_array_equal(np.ascontiguousarray(found).view(np.int16), expected)


@targets_with("MultiplyBytes", "RepeatEachByte")
def test_repeated_bytes_and_products_with_them(target: str) -> None:
    factors = random_bytes(5, 64) & 15
    repeated = stored_bytes(target, "RepeatEachByte", factors)
    np.testing.assert_array_equal(repeated, np.repeat(factors[: LANES[target]], 4))
    a = random_bytes(6, 4 * LANES[target]) & 15
    a[:4] = 15
    np.testing.assert_array_equal(stored_bytes(target, "MultiplyBytes", a, repeated), a * repeated)


@targets_with("MultiplyWords")
def test_low_halves_of_products_of_words(target: str) -> None:
    a, b = (random_bytes(seed, 2 * LANES[target], np.int16) for seed in (3, 4))
    a[:3], b[:3] = (-32768, 32767, -1), (-32768, 2, 300)
    found = one(target, "MultiplyWords", a, b, dtype=np.int32)
    np.testing.assert_array_equal(np.ascontiguousarray(found).view(np.int16), a * b)


@targets_with("EvenBytes", "OddBytes")
def test_bytes_as_words(target: str) -> None:
    a = random_bytes(3, 4 * LANES[target], np.int8)
    a[:4] = -128, 127, 0, -1
    for part, function in enumerate(("EvenBytes", "OddBytes")):
        found = one(target, function, a, dtype=np.int32)
        np.testing.assert_array_equal(np.ascontiguousarray(found).view(np.int16), a[part::2])


@targets_with("DotInt8")
def test_dot_products_of_int8(target: str) -> None:
    size = 4 * LANES[target]
    sums = random_bytes(5, LANES[target], np.int16).astype(np.int32)
    for seed in range(4):
        a, b = random_bytes(seed, size, np.int8), random_bytes(seed + 9, size, np.int8)
        b = np.maximum(b, -127)
        if seed == 0:
            a[:], b[:] = -128, -127
        bias = 128 if target in ("avxvnni", "avx512vnni", "avx512", "avx512bf16", "amx") else 0
        expected = sums + ((quads(a) + bias) * quads(b)).sum(axis=1)
        np.testing.assert_array_equal(one(target, "DotInt8", a, b, sums, dtype=np.int32), expected)


@targets_with("DotNibbles")
def test_dot_products_of_nibbles(target: str) -> None:
    lanes = LANES[target]
    sums = random_bytes(5, lanes, np.int16).astype(np.int32)
    for seed in range(4):
        a, b = random_bytes(seed, 32 * lanes) & 15, np.maximum(random_bytes(seed + 9, 32 * lanes, np.int8), -127)
        if seed < 2:
            a[:], b[:] = 15, 127 - 254 * seed
        expected = sums + (quads(a) * quads(b)).sum(axis=1).reshape(8, lanes).sum(axis=0)
        np.testing.assert_array_equal(one(target, "DotNibbles", a, b, sums, dtype=np.int32), expected)


@targets_with("DotInt8OfQuad")
def test_dot_products_with_a_quad_of_16_bytes(target: str) -> None:
    size = 4 * LANES[target]
    sums = random_bytes(5, LANES[target], np.int16).astype(np.int32)
    a, b = random_bytes(0, size, np.int8), np.maximum(random_bytes(9, size, np.int8), -127)
    for which in range(4):
        quad = quads(b)[which]
        for function, weights in (("DotInt8OfQuad", a), ("DotNibblesOfQuad", a.view(np.uint8) & 15)):
            found = raw(target, function, weights, b, sums, number=which).view(np.int32)[: LANES[target]]
            np.testing.assert_array_equal(found, sums + quads(weights) @ quad)


@targets_with("DotEightsInt8")
def test_dot_products_of_pairs_of_rows(target: str) -> None:
    size = 4 * LANES[target]
    sums = random_bytes(5, LANES[target], np.int16).astype(np.int32)
    for seed in range(4):
        b = np.maximum(random_bytes(seed + 9, size, np.int8), -127)
        if seed == 0:
            b[:] = -127
        for function, a in (
            ("DotEightsInt8", random_bytes(seed, size, np.int8)),
            ("DotEightsNibbles", b.view(np.uint8) & 15),
        ):
            if seed == 0:
                a[:] = -128 if function == "DotEightsInt8" else 15
            pairs = a.reshape(2, 8).astype(np.int64) @ b.reshape(2, 8).astype(np.int64).T
            np.testing.assert_array_equal(one(target, function, a, b, sums, dtype=np.int32), sums + pairs.reshape(-1))


@targets_with("InterleaveQuads0")
def test_interleaved_quads_and_ints(target: str) -> None:
    a, b = random_bytes(0, 4 * LANES[target]), random_bytes(1, 4 * LANES[target])
    ints = np.stack([a.view(np.int32), b.view(np.int32)])
    for function, half in zip(("InterleaveQuads0", "InterleaveQuads1"), np.split(ints, 2, axis=1), strict=True):
        np.testing.assert_array_equal(one(target, function, a, b, dtype=np.int32), half.T.reshape(-1))
    for function in ("EvenLanes", "EvenLanesOfFloats"):
        np.testing.assert_array_equal(one(target, function, a, b, dtype=np.int32), ints[:, ::2].reshape(-1))
    for function in ("OddLanes", "OddLanesOfFloats"):
        np.testing.assert_array_equal(one(target, function, a, b, dtype=np.int32), ints[:, 1::2].reshape(-1))


@targets_with("PackBytes")
def test_packed_bytes(target: str) -> None:
    lanes = LANES[target]
    numbers = np.resize(
        np.array([0, 1, -1, 200, 255, 256, -300, 40000, -40000, 2**31 - 1, -(2**31)], np.int32), 4 * lanes
    )
    for offset in (0, 1, 128, 255):
        expected = np.clip(np.clip(numbers, -32768, 32767) + offset, 0, 255)
        np.testing.assert_array_equal(stored_bytes(target, "PackBytes", numbers, number=offset), expected)


@targets_with("Lookup256")
def test_lookup_256(target: str) -> None:
    table, size = random_bytes(0, 256), 4 * LANES[target]
    index = np.resize(np.random.default_rng(1).permutation(256).astype(np.uint8), -(-256 // size) * size)
    for i in range(0, len(index), size):
        some = index[i : i + size]
        np.testing.assert_array_equal(stored_bytes(target, "Lookup256", table, some), table[some])


# ---- Rows of bytes


@each_of(["InterleaveRows1", "InterleaveRows2", "InterleaveRows4"])
def test_rows_of_bytes(target: str, function: str) -> None:
    """Tokens are interleaved to rows; the dot products of the rows with the weights of four outputs are exact."""
    lanes, vectors = LANES[target], int(function[-1])
    for seed in range(3):
        tokens, weights = random_bytes(seed, 4 * vectors * lanes), random_bytes(seed, 16, np.int8)
        if seed == 0:
            tokens[:], weights[:] = 255, -128
        sums = random_bytes(seed, vectors * lanes, np.int16).astype(np.int32)
        found = raw(target, function, tokens, weights, sums).view(np.int32)
        expected = sums + quads(weights) @ quads(tokens).T
        np.testing.assert_array_equal(found[: 4 * vectors * lanes], expected.reshape(-1))


@each_of(["PackRows1", "PackRows2", "PackRows4"])
def test_packed_rows(target: str, function: str) -> None:
    lanes, vectors = LANES[target], int(function[-1])
    numbers = random_bytes(0, 4 * vectors * lanes, np.int16).astype(np.int32) // 64
    identity = np.eye(4, dtype=np.int8).reshape(-1)
    found = raw(target, function, numbers, identity, number=100).view(np.int32)
    np.testing.assert_array_equal(found[: 4 * vectors * lanes], np.clip(numbers + 100, 0, 255))


# ---- Rows of words


@each_of(["DotRows1", "DotRows2", "DotRows4", "DotRows8", "DotRows16"])
def test_rows_of_words(target: str, function: str) -> None:
    """Tokens are interleaved to rows; the dot products of four rows with the weights are exact."""
    lanes, tokens = LANES[target], int(function.removeprefix("DotRows"))
    for seed in range(3):
        inputs = random_bytes(seed, tokens * 2 * lanes, np.int16).astype(np.int32).reshape(tokens, -1) // 64
        weights = random_bytes(seed, 32, np.int8)
        if seed == 0:
            inputs[:], weights[:] = 250, -128
        found = raw(target, function, inputs, weights).view(np.int32)
        apart = (2 * lanes - 1) // 3
        outputs = quads(weights) @ np.clip(inputs, -250, 250)[:, [0, apart, 2 * apart, 3 * apart]].T
        expected = outputs.T if tokens < lanes else outputs[:4]
        np.testing.assert_array_equal(found[: expected.size], expected.reshape(-1))


@each_of(["StoreRows1", "StoreRows2"])
def test_rows_of_words_from_bytes(target: str, function: str) -> None:
    bytes_ = random_bytes(0, 4 * LANES[target])
    found = raw(target, function, bytes_, number=130).view(np.int32)
    np.testing.assert_array_equal(found[: len(bytes_)], bytes_.astype(np.int32) - 130)


@targets_with("GatherBytes")
@pytest.mark.parametrize("count", [1, 3, 16])
def test_gathered_bytes(target: str, count: int) -> None:
    x = random_bytes(0, 2048).reshape(2, 1024)
    indices = np.sort(random_bytes(1, 4 * count, np.uint16) % 1024)
    found = raw(target, "GatherBytes", x, indices, number=count).reshape(-1, 4 * LANES[target])
    np.testing.assert_array_equal(found[:2, : 4 * count], x[:, indices])


@targets_with("LoadSomeQuads", "PermuteQuads", "SumsOfQuarters")
def test_quads_of_registers(target: str) -> None:
    lanes = LANES[target]
    a, order = random_bytes(0, 4 * lanes), np.random.default_rng(1).permutation(lanes).astype(np.int32)
    for left in (1, lanes // 2 + 1, lanes, lanes + 3):
        expected = np.where(np.arange(4 * lanes) < 4 * left, a, 0)
        np.testing.assert_array_equal(stored_bytes(target, "LoadSomeQuads", a, number=left), expected)
    permuted = stored_bytes(target, "PermuteQuads", a, order)
    np.testing.assert_array_equal(permuted.reshape(-1, 4), a.reshape(-1, 4)[order])
    four = random_bytes(2, 4 * lanes, np.int16).astype(np.int32).reshape(4, lanes)
    expected = four.reshape(4, -1, 4).sum(axis=1).reshape(-1)
    np.testing.assert_array_equal(one(target, "SumsOfQuarters", *four, dtype=np.int32), expected)


@pytest.mark.parametrize("parts", [2, 4])
@targets_with("InterleaveBytes2")
def test_bytes_dealt_and_interleaved(target: str, parts: int) -> None:
    a = random_bytes(0, 4 * LANES[target])
    found = raw(target, "InterleaveBytes2" if parts == 2 else "InterleaveBytes4", a)[: parts * len(a)]
    np.testing.assert_array_equal(found.reshape(-1, parts), a[:, None] ^ np.arange(parts, dtype=np.uint8))


# ---- bf16 and float16


@targets_with("LoadF16")
def test_halves(target: str) -> None:
    lanes = LANES[target]
    half = np.concatenate([EDGES.astype(np.float16), np.array([6e-8, -65504, 1 / 3], np.float16)])
    for i in range(0, len(half), lanes):
        some = np.resize(half[i:], lanes)
        assert_same_bits(one(target, "LoadF16", some.view(np.uint16)), some.astype(np.float32))


@targets_with("RoundToBf16", "EvenBf16", "OddBf16")
def test_bf16(target: str) -> None:
    lanes = LANES[target]
    values = np.concatenate([EDGES, np.random.default_rng(0).standard_normal(50, np.float32), [1.00390625, 1.01171875]])
    values = np.resize(values.astype(np.float32), 80)
    bf16 = values.astype(ml_dtypes.bfloat16)
    for i in range(0, 80 - 2 * lanes, lanes):
        pairs = bf16[i : i + 2 * lanes]
        for function, odd in (("EvenBf16", 0), ("OddBf16", 1)):
            assert_same_bits(one(target, function, pairs.view(np.uint16)), pairs[odd::2].astype(np.float32))
        rounded = one(target, "RoundToBf16", values[i : i + lanes])
        assert_same_bits(rounded, bf16[i : i + lanes].astype(np.float32))


@targets_with("DotEightsBf16", "PackBf16")
def test_dot_products_of_pairs_of_rows_of_bf16(target: str) -> None:
    """Small integers are exact in any order. Large values that cancel check the order of the additions."""
    low, high, sums = np.round(np.random.default_rng(0).standard_normal((3, 4), np.float32) * 10)
    packed = stored_bytes(target, "PackBf16", low, high).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(packed, np.concatenate([low, high]).astype(ml_dtypes.bfloat16))
    a, b = (np.round(np.random.default_rng(i).standard_normal((2, 4)) * 10).astype(ml_dtypes.bfloat16) for i in (1, 2))
    expected = sums + (a.astype(np.float32) @ b.astype(np.float32).T).reshape(-1)
    found = one(target, "DotEightsBf16", a.view(np.uint16).reshape(-1), b.view(np.uint16).reshape(-1), sums)
    np.testing.assert_array_equal(found, expected)
    a = np.array([[2.0**100, -(2.0**100), 1, 0], [1, 0, 2.0**100, -(2.0**100)]]).astype(ml_dtypes.bfloat16)
    ones = np.ones((2, 4), ml_dtypes.bfloat16)
    found = one(target, "DotEightsBf16", a.view(np.uint16).reshape(-1), ones.view(np.uint16).reshape(-1), sums)
    np.testing.assert_array_equal(found, sums + 1)


@targets_with("DotBf16", "PackBf16")
def test_dot_products_of_bf16(target: str) -> None:
    """Small integers are exact for any order of the additions."""
    lanes = LANES[target]
    low, high, sums = np.round(np.random.default_rng(0).standard_normal((3, lanes), np.float32) * 10)
    packed = stored_bytes(target, "PackBf16", low, high)
    both = np.concatenate([low, high]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.sort(packed.view(np.int16)), np.sort(both.view(np.int16)))
    a, b = (
        np.round(np.random.default_rng(i).standard_normal(2 * lanes) * 10).astype(ml_dtypes.bfloat16) for i in (1, 2)
    )
    products = (a.astype(np.float32) * b.astype(np.float32)).reshape(-1, 2).sum(axis=1)
    found = one(target, "DotBf16", a.view(np.uint16), b.view(np.uint16), sums)
    np.testing.assert_array_equal(found, sums + products)
