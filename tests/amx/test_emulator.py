"""Test every AMX instruction through simd/amx_tiles.h against NumPy, in the emulator or on a CPU with AMX."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from . import emulator, reference
from .emulator import Emulator, config_bytes

Array = npt.NDArray[np.generic]

PRODUCTS = {
    "tdpbf16ps": (0, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    "tdpbssd": (1, np.int8, np.int8),
    "tdpbsud": (2, np.int8, np.uint8),
    "tdpbusd": (3, np.uint8, np.int8),
    "tdpbuud": (4, np.uint8, np.uint8),
}
INT8_PRODUCTS = [name for name in PRODUCTS if name != "tdpbf16ps"]
# Bytes between rows of a tile in memory; more than the 64 bytes of a row.
STRIDE = 80


class Tiles:
    """Configure the tiles of this thread, and release them at the end."""

    def __init__(self, tiles: dict[int, tuple[int, int]]) -> None:
        self.shapes = tiles
        self.shim = emulator.load_shim()

    def __enter__(self) -> Tiles:
        self.shim.shim_configure(bytes(config_bytes(self.shapes)))
        return self

    def __exit__(self, *_: object) -> None:
        self.shim.shim_release()

    def load(self, tile: int, matrix: Array, stream: bool = False) -> None:
        rows, colsb = self.shapes[tile]
        memory = np.full((rows, STRIDE), 0xA5, np.uint8)
        memory[:, :colsb] = np.ascontiguousarray(matrix).view(np.uint8).reshape(rows, colsb)
        (self.shim.shim_load_stream if stream else self.shim.shim_load)(tile, memory.ctypes.data, STRIDE)

    def store(self, tile: int, dtype: npt.DTypeLike = np.uint8) -> Array:
        """Return the tile as a matrix, and check that no memory outside of it was written."""
        rows, colsb = self.shapes[tile]
        memory = np.full((rows + 2, STRIDE), 0x5A, np.uint8)
        self.shim.shim_store(tile, memory[1:].ctypes.data, STRIDE)
        inside = memory[1 : rows + 1, :colsb].copy()
        memory[1 : rows + 1, :colsb] = 0x5A
        assert np.all(memory == 0x5A)
        return inside.view(dtype)


def product(name: str, c: Array, a: Array, b: Array, first_tile: int = 0) -> Array:
    """Return c + a b, computed by one instruction on the tiles first_tile, +1 and +2 (modulo 8)."""
    m, n, k = len(a), b.shape[1], a.shape[1]
    tile_c, tile_a, tile_b = (first_tile, (first_tile + 1) % 8, (first_tile + 2) % 8)
    colsb = k * a.dtype.itemsize
    with Tiles({tile_c: (m, 4 * n), tile_a: (m, colsb), tile_b: (colsb // 4, 4 * n)}) as tiles:
        tiles.load(tile_c, c)
        tiles.load(tile_a, a)
        tiles.load(tile_b, reference.pack_b(b))
        tiles.shim.shim_multiply(PRODUCTS[name][0], tile_c)
        return tiles.store(tile_c, c.dtype)


def random_bf16(rng: np.random.Generator, shape: tuple[int, int], exponents: tuple[int, int]) -> Array:
    values = rng.standard_normal(shape) * np.exp2(rng.integers(*exponents, size=shape))
    return values.astype(ml_dtypes.bfloat16)


def random_int8(rng: np.random.Generator, shape: tuple[int, int], dtype: npt.DTypeLike) -> Array:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, size=shape, dtype=dtype, endpoint=True)


def assert_same_bits(actual: Array, expected: Array) -> None:
    """Check for equal bits, including the signs of zeros; all NaNs count as equal."""
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(actual.view(np.uint32)[number], expected.view(np.uint32)[number])


# ---- The reference


def test_reference_rounds_a_product_and_sum_once() -> None:
    """The reference agrees with rational arithmetic, also where float64 would round twice."""
    rng = np.random.default_rng(0)
    x = random_bf16(rng, (1, 2000), (-3, 3)).astype(np.float32)[0]
    y = random_bf16(rng, (1, 2000), (-40, 3)).astype(np.float32)[0]
    # Half of the sums are close to the midpoint of two floats, where double rounding would be wrong.
    z = rng.standard_normal(2000).astype(np.float32)
    y[::2] = np.exp2(rng.integers(-80, -20, size=1000))
    x[::2] = np.float32(1.5)
    result = reference.multiply_add(x, y, z)
    for xi, yi, zi, actual in zip(x, y, z, result, strict=True):
        exact = Fraction(float(xi)) * Fraction(float(yi)) + Fraction(float(zi))
        error = abs(Fraction(float(actual)) - exact)
        for towards in (-np.inf, np.inf):
            neighbour = Fraction(float(np.nextafter(actual, np.float32(towards))))
            assert error <= abs(neighbour - exact)


def test_reference_flushes_what_is_tiny_after_rounding() -> None:
    smallest = 2.0**-126
    exact = np.array([smallest, smallest - 2.0**-150, -smallest + 2.0**-150, smallest - 2.0**-152, -(2.0**-140), -0.0])
    expected = np.array([smallest, 0.0, -0.0, smallest, -0.0, -0.0], np.float32)
    assert_same_bits(reference.round_to_float32(exact), expected)


# ---- Configuration


@pytest.mark.parametrize("how", ["configure", "configure_rip", "configure_fs", "configure_indexed"])
@pytest.mark.parametrize("store", ["store_config", "store_config_indexed"])
def test_configuration_round_trip(amx: Emulator | None, how: str, store: str) -> None:
    shim = emulator.load_shim()
    config = config_bytes({0: (16, 64), 1: (1, 4), 3: (7, 20), 7: (16, 12)})
    stored = np.full(66, 0xEE, np.uint8)
    getattr(shim, f"shim_{how}")(bytes(config))
    getattr(shim, f"shim_{store}")(stored[1:].ctypes.data)
    assert bytes(stored) == b"\xee" + config + b"\xee"
    shim.shim_release()
    getattr(shim, f"shim_{store}")(stored[1:].ctypes.data)
    assert bytes(stored) == b"\xee" + bytes(64) + b"\xee"
    shim.shim_release()


def test_palette_0_releases(amx: Emulator | None) -> None:
    shim = emulator.load_shim()
    stored = np.full(64, 0xEE, np.uint8)
    shim.shim_configure(bytes(config_bytes({0: (16, 64)})))
    shim.shim_configure(bytes(64))
    shim.shim_store_config(stored.ctypes.data)
    assert not stored.any()
    if amx is not None:
        assert amx.live_threads_with_config() == 0


def test_configuring_again_zeroes_the_tiles(amx: Emulator | None) -> None:
    with Tiles({0: (16, 64)}) as tiles:
        tiles.load(0, np.ones((16, 64), np.uint8))
        with Tiles({0: (16, 64)}) as again:
            assert not again.store(0).any()


# ---- Loads and stores


@pytest.mark.parametrize("tile", range(8))
@pytest.mark.parametrize("stream", [False, True], ids=["tileloadd", "tileloaddt1"])
def test_load_store_zero_of_every_shape(amx: Emulator | None, tile: int, stream: bool) -> None:
    rng = np.random.default_rng(tile)
    for rows in range(1, 17):
        for colsb in range(4, 65, 4):
            with Tiles({tile: (rows, colsb)}) as tiles:
                matrix = rng.integers(0, 256, (rows, colsb), np.uint8)
                tiles.load(tile, matrix, stream)
                np.testing.assert_array_equal(tiles.store(tile), matrix)
                tiles.shim.shim_zero(tile)
                assert not tiles.store(tile).any()


def test_tiles_are_separate(amx: Emulator | None) -> None:
    rng = np.random.default_rng(0)
    shapes = {tile: (16 - tile, 64 - 4 * tile) for tile in range(8)}
    matrices = {tile: rng.integers(0, 256, shape, np.uint8) for tile, shape in shapes.items()}
    with Tiles(shapes) as tiles:
        for tile, matrix in matrices.items():
            tiles.load(tile, matrix)
        tiles.shim.shim_zero(5)
        matrices[5][:] = 0
        for tile, matrix in matrices.items():
            np.testing.assert_array_equal(tiles.store(tile), matrix)


@pytest.mark.parametrize("stride", [64, -64, 0, 8, 4096])
def test_strides(amx: Emulator | None, stride: int) -> None:
    memory = np.random.default_rng(0).integers(0, 256, 2 * 16 * 4096, np.uint8)
    middle = memory.ctypes.data + len(memory) // 2
    with Tiles({2: (16, 64)}) as tiles:
        tiles.shim.shim_load(2, middle, stride)
        first = len(memory) // 2
        expected = np.stack([memory[first + i * stride : first + i * stride + 64] for i in range(16)])
        np.testing.assert_array_equal(tiles.store(2), expected)
        written = np.zeros_like(memory)
        tiles.shim.shim_store(2, written.ctypes.data + first, stride)
        mask = np.zeros_like(memory)
        for i in range(16):
            mask[first + i * stride : first + i * stride + 64] = 1
        if stride == 0:
            np.testing.assert_array_equal(written[first : first + 64], expected[15])
        else:
            np.testing.assert_array_equal(written, memory * mask)


@pytest.mark.parametrize("form", range(15))
def test_addressing_forms(amx: Emulator | None, form: int) -> None:
    memory = np.random.default_rng(form).integers(0, 256, (64, 64), np.uint8)
    with Tiles({0: (16, 64)}) as tiles:
        assert tiles.shim.shim_form_count() == 15
        for stride in (64, 128, -64, -128):
            tiles.shim.shim_load_by_form(form, memory[32:].ctypes.data, stride)
            rows = [32 + i * stride // 64 for i in range(16)]
            np.testing.assert_array_equal(tiles.store(0), memory[rows])


def test_addressing_without_base_or_index_and_from_the_stack(amx: Emulator | None) -> None:
    memory = np.random.default_rng(0).integers(0, 256, (16, 64), np.uint8)
    with Tiles({0: (16, 64)}) as tiles:
        tiles.shim.shim_load_without_index(memory[3].ctypes.data)
        np.testing.assert_array_equal(tiles.store(0), np.repeat(memory[3:4], 16, axis=0))
        tiles.shim.shim_load_from_stack(memory.ctypes.data)
        np.testing.assert_array_equal(tiles.store(0), memory)
        tiles.shim.shim_zero(0)
        if tiles.shim.shim_load_without_base(memory.ctypes.data):
            np.testing.assert_array_equal(tiles.store(0), memory)


def test_no_byte_behind_a_tile_is_touched(amx: Emulator | None) -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    array = np.frombuffer(memory, np.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(array.ctypes.data + page), page, 0) == 0
    array[:page] = np.random.default_rng(0).integers(0, 256, page, np.uint8)
    for rows, colsb in [(16, 64), (1, 4), (5, 36)]:
        start = page - (rows - 1) * 64 - colsb
        with Tiles({0: (rows, colsb)}) as tiles:
            tiles.shim.shim_load(0, array.ctypes.data + start, 64)
            expected = np.stack([array[start + 64 * i : start + 64 * i + colsb] for i in range(rows)])
            np.testing.assert_array_equal(tiles.store(0), expected)
            tiles.shim.shim_store(0, array.ctypes.data + start, 64)


# ---- Products


@pytest.mark.parametrize("exponents", [(0, 1), (-8, 8), (-30, 30)], ids=str)
def test_bf16_product_to_the_bit(amx: Emulator | None, exponents: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        a, b = random_bf16(rng, (16, 32), exponents), random_bf16(rng, (32, 16), exponents)
        c = rng.standard_normal((16, 16), dtype=np.float32)
        assert_same_bits(product("tdpbf16ps", c, a, b), reference.tdpbf16ps(c, a, b))


def test_bf16_data_tells_orders_of_summation_apart(amx: Emulator | None) -> None:
    """The data of the test above reveals wrong orders of addition: one chain, c first, or rounded products."""
    rng = np.random.default_rng(1)
    a, b = random_bf16(rng, (16, 32), (-8, 8)), random_bf16(rng, (32, 16), (-8, 8))
    c = rng.standard_normal((16, 16), dtype=np.float32)
    actual = product("tdpbf16ps", c, a, b)
    a32, b32 = a.astype(np.float32), b.astype(np.float32)
    one_chain, from_c = np.zeros_like(c), c
    rounded = [np.zeros_like(c), np.zeros_like(c)]
    for k in range(32):
        one_chain = reference.multiply_add(a32[:, k : k + 1], b32[k : k + 1], one_chain)
        from_c = reference.multiply_add(a32[:, k : k + 1], b32[k : k + 1], from_c)
        rounded[k % 2] = rounded[k % 2] + a32[:, k : k + 1] * b32[k : k + 1]
    for other in (c + one_chain, from_c, c + (a32 @ b32)):
        assert np.count_nonzero(actual != other) > 20
    # A product of two bf16 values fits a float32, so a separate product and sum round like a fused multiply-add.
    assert_same_bits(actual, c + (rounded[0] + rounded[1]))


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("first_tile", range(8))
def test_products_of_every_tile_number(amx: Emulator | None, name: str, first_tile: int) -> None:
    check_random_product(name, np.random.default_rng(first_tile), 16, 16, 16, first_tile)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_partial_tiles(amx: Emulator | None, name: str) -> None:
    rng = np.random.default_rng(2)
    for size in range(1, 17):
        check_random_product(name, rng, size, 16, 16)
        check_random_product(name, rng, 16, size, 16)
        check_random_product(name, rng, 16, 16, size)
        check_random_product(name, rng, *(int(d) for d in rng.integers(1, 17, 3)))


def check_random_product(name: str, rng: np.random.Generator, m: int, n: int, words: int, first_tile: int = 0) -> None:
    """Check one instruction on random values; K is `words` pairs of bf16 or quads of int8."""
    _, type_a, type_b = PRODUCTS[name]
    if name == "tdpbf16ps":
        a, b = random_bf16(rng, (m, 2 * words), (-4, 4)), random_bf16(rng, (2 * words, n), (-4, 4))
        c = rng.standard_normal((m, n), dtype=np.float32)
        assert_same_bits(product(name, c, a, b, first_tile), reference.tdpbf16ps(c, a, b))
        return
    a, b = random_int8(rng, (m, 4 * words), type_a), random_int8(rng, (4 * words, n), type_b)
    sums = rng.integers(-(2**31), 2**31, (m, n)).astype(np.int32)
    np.testing.assert_array_equal(product(name, sums, a, b, first_tile), reference.tdp_int8(sums, a, b))


def test_bf16_denormals_are_zeros(amx: Emulator | None) -> None:
    """Denormals are flushed to zero in the operands, in C, within a chain and in the result."""
    rng = np.random.default_rng(3)
    for low, high in [(-136, -120), (-70, -56), (-66, -60)]:
        a, b = random_bf16(rng, (16, 32), (low, high)), random_bf16(rng, (32, 16), (low, high))
        if low < -100:
            b = random_bf16(rng, (32, 16), (-2, 2))
        c = (rng.standard_normal((16, 16)) * np.exp2(rng.integers(-135, -120, (16, 16)))).astype(np.float32)
        actual = product("tdpbf16ps", c, a, b)
        assert_same_bits(actual, reference.tdpbf16ps(c, a, b))
        assert not np.any((actual != 0) & (np.abs(actual) < 2.0**-126))
    # A denormal operand times a large one gives 0, not 2^-33.
    a = np.full((1, 2), 2.0**-133, ml_dtypes.bfloat16)
    b = np.full((2, 1), 2.0**100, ml_dtypes.bfloat16)
    assert product("tdpbf16ps", np.full((1, 1), 2.0**-130, np.float32), a, b) == 0


def test_bf16_inf_nan_and_signed_zeros(amx: Emulator | None) -> None:
    rng = np.random.default_rng(4)
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38, -3e38, 1.0, 2.0**-133], np.float32)
    for _ in range(20):
        shapes = [(16, 16), (16, 8), (8, 16)]
        c, a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
        for matrix in (c, a, b):
            chosen = rng.random(matrix.shape) < 0.15
            matrix[chosen] = rng.choice(special, np.count_nonzero(chosen))
        a, b = a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)
        expected = reference.tdpbf16ps(c, a, b)
        assert_same_bits(product("tdpbf16ps", c, a, b), expected)
        assert np.isnan(expected).any() and np.isinf(expected).any()
    negative_zero = np.full((1, 1), -0.0, np.float32)
    one = np.ones((1, 2), ml_dtypes.bfloat16)
    # The chains start from +0, so the sum is +0 for any signs of its terms.
    assert_same_bits(product("tdpbf16ps", negative_zero, -one, 0 * one.T), np.zeros((1, 1), np.float32))


def test_bf16_ignores_and_keeps_mxcsr(amx: Emulator | None) -> None:
    rng = np.random.default_rng(5)
    a, b = random_bf16(rng, (16, 32), (-4, 4)), random_bf16(rng, (32, 16), (-4, 4))
    a[0], b[:, 0] = 2.0**-130, 2.0**-130
    c = rng.standard_normal((16, 16), dtype=np.float32)
    expected = reference.tdpbf16ps(c, a, b)
    with Tiles(dict.fromkeys(range(3), (16, 64))) as tiles:
        for rounding in range(4):
            for flush in (0, 0x8040):
                tiles.load(0, c)
                tiles.load(1, a)
                tiles.load(2, reference.pack_b(b))
                mxcsr = 0x1F80 | rounding << 13 | flush
                assert tiles.shim.shim_multiply_under_mxcsr(0, mxcsr) == mxcsr
                assert_same_bits(tiles.store(0, np.float32), expected)


@pytest.mark.parametrize("name", INT8_PRODUCTS)
def test_int8_extremes_and_wraparound(amx: Emulator | None, name: str) -> None:
    _, type_a, type_b = PRODUCTS[name]
    for value_a in (np.iinfo(type_a).min, np.iinfo(type_a).max):
        for value_b in (np.iinfo(type_b).min, np.iinfo(type_b).max):
            a, b = np.full((16, 64), value_a, type_a), np.full((64, 16), value_b, type_b)
            for value_c in (-(2**31), -1, 0, 2**31 - 1):
                c = np.full((16, 16), value_c, np.int32)
                expected = (value_c + 64 * int(value_a) * int(value_b) + 2**31) % 2**32 - 2**31
                np.testing.assert_array_equal(product(name, c, a, b), np.full_like(c, expected))


def test_products_accumulate(amx: Emulator | None) -> None:
    rng = np.random.default_rng(6)
    a, b = random_bf16(rng, (16, 160), (-2, 2)), random_bf16(rng, (160, 16), (-2, 2))
    expected = np.zeros((16, 16), np.float32)
    with Tiles(dict.fromkeys(range(3), (16, 64))) as tiles:
        tiles.shim.shim_zero(0)
        for k in range(0, 160, 32):
            tiles.load(1, a[:, k : k + 32])
            tiles.load(2, reference.pack_b(b[k : k + 32]))
            tiles.shim.shim_multiply(0, 0)
            expected = reference.tdpbf16ps(expected, a[:, k : k + 32], b[k : k + 32])
        assert_same_bits(tiles.store(0, np.float32), expected)


def test_compiler_keeps_the_stores_around_tile_instructions(amx: Emulator | None) -> None:
    """Stores that only tile instructions read are kept, and loads of their results are not moved before them."""
    rng = np.random.default_rng(7)
    b = rng.integers(-8, 8, (64, 16)).astype(np.float32)
    c = rng.integers(-8, 8, (16, 16)).astype(np.float32)
    expected = c + b.sum(axis=0)
    emulator.load_shim().shim_multiply_local(b.ctypes.data, c.ctypes.data)
    np.testing.assert_array_equal(c, expected)


# ---- Threads and counts


def test_threads_have_their_own_tiles(amx: Emulator | None) -> None:
    barrier = threading.Barrier(2, timeout=60)
    failures: list[BaseException] = []

    def work(rows: int, colsb: int) -> None:
        try:
            rng = np.random.default_rng(rows)
            for _ in range(50):
                matrix = rng.integers(0, 256, (rows, colsb), np.uint8)
                with Tiles({0: (rows, colsb), 6: (1, 4)}) as tiles:
                    tiles.load(0, matrix)
                    barrier.wait()
                    if amx is not None:
                        assert amx.live_threads_with_config() == 2
                    np.testing.assert_array_equal(tiles.store(0), matrix)
                    barrier.wait()
                barrier.wait()
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=shape) for shape in [(16, 64), (3, 20)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    if amx is not None:
        assert amx.live_threads_with_config() == 0


def test_counts(emulated: Emulator) -> None:
    shim = emulator.load_shim()
    memory = np.zeros((16, 64), np.uint8)
    address = memory.ctypes.data
    assert emulated.counts() == {}
    shim.shim_configure(bytes(config_bytes(dict.fromkeys(range(8), (16, 64)))))
    assert emulated.live_threads_with_config() == 1
    calls: list[Callable[[], object]] = [
        lambda: shim.shim_store_config(address),
        lambda: shim.shim_zero(0),
        lambda: shim.shim_load(1, address, 64),
        lambda: shim.shim_load_stream(2, address, 64),
        lambda: shim.shim_store(3, address, 64),
        *(lambda product=product: shim.shim_multiply(product, 0) for product in range(5)),
    ]
    for times, call in enumerate(calls, start=2):
        for _ in range(times):
            call()
    shim.shim_release()
    assert emulated.live_threads_with_config() == 0
    names = [name for name in emulator.INSTRUCTIONS if name not in ("ldtilecfg", "tilerelease", "vpdpbusd")]
    assert emulated.counts() == {"ldtilecfg": 1, "tilerelease": 1} | {n: i for i, n in enumerate(names, start=2)}
    assert emulated.count("tdpbf16ps", "tdpbssd") == 7 + 8
    emulated.reset_counts()
    assert emulated.counts() == {}
    with pytest.raises(ValueError, match="unknown instruction fadd, expected one of ldtilecfg"):
        emulated.count("fadd")
