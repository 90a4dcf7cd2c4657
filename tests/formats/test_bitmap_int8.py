"""Test the bitmap formats of int8 and int4 weights: layout, round trip, and rejection of malformed tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..ops.quantized import sparse_integers
from ..ops.single_node import Packed
from ..sampling import examples
from .bitmaps import malformed


@dataclass(frozen=True)
class Format:
    bits: int
    pack: Callable[..., Packed]
    unpack: Callable[..., np.ndarray]

    def multiply(self, x: np.ndarray, packed: Packed, k: int, n: int, kernel: str | None) -> np.ndarray:
        if self.bits == 8:
            scales = _native.pack_scales(np.ones((1, n), np.float32), bf16=False)
            return _testing.sparse_amx_matmul_int8(x, *packed, scales, k, n, kernel=kernel)
        bf16_scales = _native.pack_scales(np.ones((-(-k // 32), n), np.float32), bf16=True)
        return _testing.sparse_amx_matmul_int4(x, *packed, bf16_scales, 32, k, n, kernel=kernel)


INT8 = Format(8, _native.pack_bitmap_int8, _native.unpack_bitmap_int8)
INT4 = Format(4, _native.pack_bitmap_int4, _native.unpack_bitmap_int4)
each_format = pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])


def small_matrix() -> np.ndarray:
    w = np.zeros((70, 17), np.int8)
    w[0, 0], w[3, 0], w[1, 1], w[4, 15], w[69, 0], w[2, 16], w[8, 0] = 1, -2, 3, -4, 5, -8, 7
    return w


@each_format
def test_masks_of_a_small_matrix(form: Format) -> None:
    masks, _, _ = form.pack(small_matrix())
    assert masks.shape == (2, 2, 128)
    rows = masks.reshape(-1).view("<u8").reshape(2, 2, 16)
    expected = np.zeros((2, 2, 16), np.uint64)
    expected[0, 0, 0] = 0b101001  # inputs 0 and 3 of column 0, input 1 of column 1
    expected[0, 0, 1] = 1 << 60  # input 4 of column 15
    expected[0, 0, 2] = 1  # input 8 of column 0
    expected[0, 1, 1] = 0b10  # input 69 of column 0
    expected[1, 0, 0] = 0b100  # input 2 of column 16
    np.testing.assert_array_equal(rows, expected)


def test_int8_values_of_a_small_matrix() -> None:
    _, values, offsets = INT8.pack(small_matrix())
    assert values.dtype == np.int8
    np.testing.assert_array_equal(offsets, [0, 6, 7])
    np.testing.assert_array_equal(values[:7], [1, -2, 3, -4, 7, 5, -8])
    assert values.size == 7 + 64 and not values[7:].any()


def test_int4_values_of_a_small_matrix() -> None:
    _, values, offsets = INT4.pack(small_matrix())
    assert values.dtype == np.uint8
    np.testing.assert_array_equal(offsets, [0, 4, 5])
    # Panel 0 stores 1 -2 3 7 in even rows and -4 5 in odd rows. Panel 1 stores -8 in an even row.
    low, high = [1 + 8, -2 + 8, 3 + 8, 7 + 8, 0], [-4 + 8, 5 + 8, 0, 0, 0]
    np.testing.assert_array_equal(values[:5], np.array(low) + 16 * np.array(high))
    assert values.size == 5 + 64 and not values[5:].any()


@each_format
@examples(200)
@given(k=st.integers(1, 200), n=st.integers(1, 70), sparsity=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_round_trip(form: Format, k: int, n: int, sparsity: float, seed: int) -> None:
    q = sparse_integers(np.random.default_rng(seed), k, n, sparsity, form.bits)
    masks, values, offsets = form.pack(q)
    np.testing.assert_array_equal(form.unpack(masks, values, offsets, k, n), q)
    assert np.unpackbits(masks).sum() == np.count_nonzero(q)
    if form.bits == 8:
        assert offsets[-1] == np.count_nonzero(q)


def test_dense_int8_values_of_a_small_matrix() -> None:
    masks, values, offsets = _native.pack_bitmap_int8(small_matrix(), dense=True)
    assert masks.shape == offsets.shape == (0,)
    expected = np.zeros((2, 2, 16, 64), np.int8)  # [panel, tile, row, weight]
    expected[0, 0, 0, [0, 3, 5]] = 1, -2, 3
    expected[0, 0, 1, 60] = -4
    expected[0, 0, 2, 0] = 7
    expected[0, 1, 1, 1] = 5
    expected[1, 0, 0, 2] = -8
    np.testing.assert_array_equal(values, expected.reshape(-1))


def test_dense_int4_values_of_a_small_matrix() -> None:
    masks, values, offsets = _native.pack_bitmap_int4(small_matrix(), dense=True)
    assert masks.shape == offsets.shape == (0,)
    int8 = _native.pack_bitmap_int8(small_matrix(), dense=True)[1].reshape(2, 2, 8, 2, 64)
    expected = (int8[:, :, :, 0] + 8) + 16 * (int8[:, :, :, 1] + 8).astype(np.uint8)
    np.testing.assert_array_equal(values, expected.astype(np.uint8).reshape(-1))


@each_format
@examples(200)
@given(k=st.integers(1, 200), n=st.integers(1, 70), sparsity=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_dense_round_trip(form: Format, k: int, n: int, sparsity: float, seed: int) -> None:
    q = sparse_integers(np.random.default_rng(seed), k, n, sparsity, form.bits)
    masks, values, offsets = form.pack(q, dense=True)
    assert values.size == -(-n // 16) * -(-k // 64) * 128 * form.bits
    np.testing.assert_array_equal(form.unpack(masks, values, offsets, k, n), q)


def test_size_of_int4_is_half_a_byte_a_weight() -> None:
    q = sparse_integers(np.random.default_rng(2), 4096, 64, 0.5, 4)
    _, _, offsets = INT4.pack(q)
    assert np.count_nonzero(q) / 2 <= offsets[-1] <= 1.01 * np.count_nonzero(q) / 2


@each_format
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3,), (1, 2, 3), (2**17 + 1, 1)])
def test_refuses_what_is_no_matrix_or_too_deep(form: Format, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="q "):
        form.pack(np.zeros(shape, np.int8))


@pytest.mark.parametrize("weight", [-9, 8, 127])
def test_int4_refuses_other_weights(weight: int) -> None:
    with pytest.raises(ValueError, match=f"q holds {weight}, expected -8 to 7"):
        INT4.pack(np.array([[0, weight]], np.int8))


def cases(form: Format) -> dict[str, tuple[Packed, int, int, str]]:
    k, n = 133, 40
    bitmap = form.pack(sparse_integers(np.random.default_rng(1), k, n, 0.5, form.bits))
    dense = form.pack(form.unpack(*bitmap, k, n), dense=True)
    return malformed(bitmap, dense, k, n, row_bytes=8, too_many=2**17 + 1)


@each_format
@pytest.mark.parametrize("case", cases(INT8))
def test_malformed_tensors_are_refused(form: Format, case: str) -> None:
    tensors, k, n, message = cases(form)[case]
    with pytest.raises(ValueError, match=message):
        form.unpack(*tensors, k, n)


def mutate(rng: np.random.Generator, packed: Packed, k: int, n: int) -> tuple[Packed, int, int]:
    """Make one to three random changes: flip bytes, edit offsets, cut, grow or swap tensors, change k and n."""
    masks, values, offsets = (a.copy() for a in packed)
    for _ in range(rng.integers(1, 4)):
        match rng.integers(0, 8):
            case 0 if masks.size:
                masks.reshape(-1)[rng.integers(masks.size)] ^= rng.integers(1, 256, dtype=np.uint8)
            case 1 if values.size:
                values.view(np.uint8)[rng.integers(values.size)] = rng.integers(0, 256)
            case 2 if offsets.size:
                offsets[rng.integers(offsets.size)] += rng.integers(-40, 41)
            case 3 if offsets.size:
                offsets[rng.integers(offsets.size)] = rng.integers(-(2**63), 2**63 - 1)
            case 4:
                values = values[: rng.integers(0, values.size + 1)].copy()
            case 5:
                offsets = rng.choice(np.append(offsets, 0), rng.integers(0, offsets.size + 2))
            case 6:
                masks = masks.reshape(-1)[: rng.integers(0, masks.size + 1)].copy()
            case _:
                k, n = int(k + rng.integers(-70, 71)), int(n + rng.integers(-20, 21))
    return (masks, values, offsets), k, n


@each_format
@pytest.mark.parametrize("dense", [False, True])
def test_ten_thousand_mutations_neither_crash_nor_slip_through(form: Format, dense: bool) -> None:
    rng = np.random.default_rng(20)
    kernels = [row["name"] for row in _testing.sparse_amx_matmul_int8_kernels() if row["runs_here"]]
    refused = accepted = 0
    for i in range(10_000):
        k, n = int(rng.integers(1, 200)), int(rng.integers(1, 50))
        packed = form.pack(sparse_integers(rng, k, n, rng.random(), form.bits), dense)
        tensors, k, n = mutate(rng, packed, k, n)
        try:
            w = form.unpack(*tensors, k, n)
        except ValueError:
            refused += 1
            continue
        accepted += 1
        # Accepted tensors must run on all kernels and give the product with the unpacked matrix.
        x = np.full((1 + i % 20, k), 127, np.float32)
        y = form.multiply(x, tensors, k, n, kernels[i % len(kernels)])
        np.testing.assert_array_equal(y, x @ w.astype(np.float32))
    assert refused > 5_000 and accepted > 500
