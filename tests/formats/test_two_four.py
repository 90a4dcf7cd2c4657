"""Test 2:4 storage: layout, round trip, and rejection of malformed tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native

from ..ops.single_node import Packed, to_bf16
from ..ops.two_four import BF16, FORMATS, INT4, INT8, TwoFourFormat
from ..sampling import examples

each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def stored_slots(form: TwoFourFormat, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and weights, [panels, spans, quads of a span, columns, slots], of w padded to whole tiles."""
    k, n = w.shape
    padded = np.zeros((-(-k // form.tile_inputs) * form.tile_inputs, -(-n // 16) * 16), w.dtype)
    padded[:k, :n] = w
    quads = padded.reshape(-1, 8, 4, padded.shape[1] // 16, 16).transpose(3, 0, 1, 4, 2)
    # Choose nonzero positions first, then the lowest free positions, and sort the two in ascending order.
    positions = np.sort(np.argsort(quads == 0, axis=-1, kind="stable")[..., :2], axis=-1)
    return positions, np.take_along_axis(quads, positions, axis=-1)


def expected_packed(form: TwoFourFormat, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    positions, weights = stored_slots(form, w)
    panels, spans = positions.shape[:2]
    if form.bits == 16:  # each row has one quad
        rows = 8
        bits = positions.reshape(panels, spans, rows, 32).astype(np.uint32)
        stored = weights.reshape(panels, spans, rows, 32).astype(np.float32)
        values = (np.ascontiguousarray(to_bf16(stored)).view(np.uint32) >> 16).astype(np.uint16)
    else:  # each row has two quads
        rows = 4

        def by_rows(a: np.ndarray) -> np.ndarray:
            return a.reshape(panels, spans, rows, 2, 16, 2).transpose(0, 1, 2, 4, 3, 5).reshape(panels, spans, rows, 64)

        bits, values = by_rows(positions).astype(np.uint32), by_rows(weights)
        if form.bits == 4:
            nibbles = (values + 8).astype(np.uint8)
            values = nibbles[:, :, 0::2] | nibbles[:, :, 1::2] << 4
    shifts = 2 * np.arange(rows, dtype=np.uint32)[:, None]
    words = (bits << shifts).sum(axis=2, dtype=np.uint32)
    masks = words.astype("<u2" if form.bits == 16 else np.uint8)
    tiles = spans * 32 // form.tile_inputs
    return masks.view(np.uint8).reshape(panels, tiles, form.mask_bytes), values.reshape(-1)


def test_int8_layout_of_a_small_matrix() -> None:
    q = np.zeros((70, 17), np.int8)
    q[1, 0], q[3, 0] = 5, -6  # row 0, slots 0 and 1 of column 0
    q[6, 1] = 7  # row 0, slots 2 and 3 of column 1; the other slot has position 0
    q[28, 15], q[31, 15] = -128, 127  # row 3
    q[64, 16] = 9  # span 2 of panel 1
    masks, values, offsets = _native.pack_two_four_int8(q)
    assert masks.shape == (2, 2, 128) and offsets.shape == (0,) and offsets.dtype == np.int64
    spans = values.reshape(2, 4, 4, 64)
    assert spans[0, 0, 0, :8].tolist() == [5, -6, 0, 0, 0, 0, 0, 7]
    assert spans[0, 0, 3, 60:].tolist() == [0, 0, -128, 127]
    assert spans[1, 2, 0, :2].tolist() == [9, 0]
    assert np.count_nonzero(values) == 6
    positions = masks.reshape(2, 4, 64)
    # Quads without weights have positions 0 and 1 in each of the four rows.
    assert positions[0, 1, :4].tolist() == [0, 0b01010101, 0, 0b01010101]
    assert positions[0, 0, :2].tolist() == [0b00000001, 0b01010111]
    assert positions[0, 0, 6:8].tolist() == [0, 0b01010110]
    assert positions[0, 0, 62:].tolist() == [0, 0b11010101]


@each_format
def test_layout(form: TwoFourFormat) -> None:
    for k, n in ((1, 1), (70, 40), (129, 33)):
        w = form.random(np.random.default_rng(k), k, n)
        masks, values, offsets = form.pack(w)
        expected_masks, expected_values = expected_packed(form, w)
        np.testing.assert_array_equal(masks, expected_masks)
        np.testing.assert_array_equal(values, expected_values)
        assert values.dtype == {16: np.uint16, 8: np.int8, 4: np.uint8}[form.bits]
        assert offsets.shape == (0,)


@each_format
@examples(200)
@given(k=st.integers(1, 200), n=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
def test_round_trip(form: TwoFourFormat, k: int, n: int, seed: int) -> None:
    w = form.random(np.random.default_rng(seed), k, n)
    expected = to_bf16(w) if form.bits == 16 else w
    np.testing.assert_array_equal(form.unpack(*form.pack(w), k, n), expected)


@each_format
@pytest.mark.parametrize("count", [3, 4])
def test_refuses_more_than_two_of_four(form: TwoFourFormat, count: int) -> None:
    w = form.random(np.random.default_rng(1), 70, 20)
    w[64:68, 19] = 0
    w[64 : 64 + count, 19] = 1
    with pytest.raises(ValueError, match=f"{count} weights of inputs 64 to 67 of column 19 are nonzero"):
        form.pack(w)
    short = np.ones((3, 1), w.dtype)
    with pytest.raises(ValueError, match="3 weights of inputs 0 to 2 of column 0"):
        form.pack(short)


def test_bf16_counts_what_is_not_zero_after_rounding() -> None:
    w = np.array([[1.0], [1e-45], [-0.0], [2.0]], np.float32)
    packed = _native.pack_two_four(w)
    np.testing.assert_array_equal(_native.unpack_bitmap(*packed, 4, 1), [[1], [0], [0], [2]])


@each_format
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3,), (1, 2, 3)])
def test_refuses_what_is_no_matrix(form: TwoFourFormat, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        form.pack(np.zeros(shape, np.float32 if form.bits == 16 else np.int8))


def test_int4_refuses_other_weights() -> None:
    with pytest.raises(ValueError, match="q holds 8, expected -8 to 7"):
        INT4.pack(np.array([[0, 8]], np.int8))


def malformed(form: TwoFourFormat) -> dict[str, tuple[Packed, int, int, str]]:
    """Map the name of each malformed case to its tensors, k, n and the pattern of the error message."""
    k, n = 133, 40
    masks, values, offsets = form.pack(form.random(np.random.default_rng(1), k, n))
    equal, falling = masks.copy(), masks.copy()
    if form.bits == 16:
        equal.view("<u2")[1, 1, 4:6] = 0  # both slots of a quad have position 0
        falling.view("<u2")[2, 0, 0:2] = 0x6666, 0x5555  # first positions 2 1 2 1 …, second positions 1 1 1 1 …
    else:
        equal[1, 1, 4:6] = 0
        falling[2, 0, 0:2] = 0x66, 0x55
    return {
        "masks short": ((masks[:, :, :60].copy(), values, offsets), k, n, "masks hold .* expected"),
        "values short": ((masks, values[:-1].copy(), offsets), k, n, "values hold .* expected .*2:4 storage"),
        "values long": ((masks, np.append(values, values[:1]), offsets), k, n, "values hold .* expected"),
        "values empty": ((masks, values[:0].copy(), offsets), k, n, "values hold 0 entries, expected"),
        "masks empty": ((masks.reshape(-1)[:0].copy(), values, offsets), k, n, "values hold .* expected"),
        "some offsets": ((masks, values, np.zeros(1, np.int64)), k, n, "offsets hold 1 entries, expected 4"),
        "positions equal": ((equal, values, offsets), k, n, "masks .positions.* of panel 1, inputs .* do not ascend"),
        "positions falling": (
            (falling, values, offsets),
            k,
            n,
            "masks .positions.* of panel 2, inputs 0 to 31, do not",
        ),
        "k zero": ((masks, values, offsets), 0, n, "k and n"),
        "n negative": ((masks, values, offsets), k, -1, "k and n"),
        "k huge": ((masks, values, offsets), 2**62, n, "k and n"),
        "other k": ((masks, values, offsets), 200, n, "masks hold"),
        "other n": ((masks, values, offsets), k, 50, "masks hold"),
    }


@each_format
@pytest.mark.parametrize("case", malformed(INT8))
def test_malformed_tensors_are_refused(form: TwoFourFormat, case: str) -> None:
    tensors, k, n, message = malformed(form)[case]
    with pytest.raises(ValueError, match=message):
        form.unpack(*tensors, k, n)


@pytest.mark.parametrize("form", [BF16, INT8], ids=["bf16", "int8"])
def test_of_all_places_those_that_ascend_are_taken(form: TwoFourFormat) -> None:
    """Unpacking accepts a pair of positions only if it ascends, in each row and each column."""
    masks, values, offsets = form.pack(np.zeros((32, 16), np.float32 if form.bits == 16 else np.int8))
    unit = "<u2" if form.bits == 16 else np.uint8
    for slot in range(0, 64 // np.dtype(unit).itemsize, 2):
        for row in range(8 if form.bits == 16 else 4):
            for pair in range(16):
                other = masks.copy()
                units = other.reshape(-1).view(unit)
                for i in range(2):
                    units[slot + i] &= ~np.array(3 << 2 * row).astype(unit)
                    units[slot + i] |= (pair >> 2 * i & 3) << 2 * row
                if pair & 3 < pair >> 2:
                    form.unpack(other, values, offsets, 32, 16)
                else:
                    with pytest.raises(ValueError, match="do not ascend"):
                        form.unpack(other, values, offsets, 32, 16)
