"""The choice and the size of SparseAMXMatMul's weight storage.

    dense     every weight (ops/formats/bitmap.h)
    bitmap    one bit per weight, and the non-zero weights
    2:4       two weights of each four inputs of an output, and their positions (ops/formats/two_four.h)

All storages hold the same weights, but differ in size, and in speed depending on the CPU.
"""

from __future__ import annotations

import numpy as np

from ortolan import _native

from .function_body import PANEL_COLUMNS
from .replacement import Stored
from .sparse_amx_matmul_function import QUAD, QUAD_STORED, TILE_ROWS, row_inputs

DENSE, BITMAP, TWO_FOUR = "dense", "bitmap", "2:4"
# Value of option `storage` of pass replace: the smallest storage, however slow on this CPU.
SMALL = "small"

BF16 = 16  # value of attribute weight_bits for bf16
# Number of padding bytes after the last value in the formats of ops/formats/.
_PADDING_BYTES = 64
# 2:4 storage is fast on every CPU, a bitmap only on some, so 2:4 may be larger by this factor.
_TWO_FOUR_GROWTH = 1.25
_CHUNK = 256  # number of quads of inputs that are checked at once


def beyond_two_four(matrix: np.ndarray) -> str:
    """Describe the first quad of inputs that breaks 2:4 sparsity in a matrix [k, n]; else ""."""
    rows = QUAD * _CHUNK
    for start in range(0, len(matrix), rows):
        part = matrix[start : start + rows] != 0
        part = np.pad(part, ((0, -len(part) % QUAD), (0, 0))).reshape(-1, QUAD, part.shape[1])
        found = np.argwhere(part.sum(axis=1, dtype=np.uint8) > QUAD_STORED)
        if len(found):
            quad, column = found[0]
            first = start + QUAD * int(quad)
            weights = int(part[quad, :, column].sum())
            return f"{weights} of its weights from inputs {first} to {first + QUAD - 1} to output {column} are not zero"
    return ""


def stored_in(matrix: np.ndarray) -> Stored:
    """Return the stored weights of a matrix [k, n] of floats or integers."""
    return Stored(int(np.count_nonzero(matrix)), beyond_two_four(matrix))


def bitmaps_are_fast(bits: int) -> bool:
    """Return whether this CPU multiplies faster by a bitmap than by dense weights of this bit width."""
    return _native.bitmaps_are_fast(bits)


def choose_storage(k: int, n: int, stored: Stored, bits: int, wanted: str | None) -> str:
    """Return the storage for a weight. wanted: option `storage` of pass replace. "2:4" requires 2:4 sparse weights."""
    if wanted == TWO_FOUR and stored.is_two_four:
        return TWO_FOUR
    other = BITMAP if _native.is_worth_bitmap(bits, k, n, stored.count) else DENSE
    if wanted != SMALL and not bitmaps_are_fast(bits):
        other = DENSE
    largest = _TWO_FOUR_GROWTH * storage_bytes(k, n, stored.count, bits, other)
    return TWO_FOUR if stored.is_two_four and storage_bytes(k, n, 0, bits, TWO_FOUR) <= largest else other


def storage_of(masks: int, offsets: int) -> str:
    """Return the storage of a packed weight from the sizes of its masks and offsets."""
    if masks == 0:
        return DENSE
    return BITMAP if offsets else TWO_FOUR


def storage_bytes(k: int, n: int, stored: int, bits: int, storage: str) -> int:
    """Return the bytes of masks, values and offsets for `stored` non-zero weights."""
    padded = _padded_weights(k, n, bits)
    if storage == DENSE:
        return padded * bits // 8
    if storage == TWO_FOUR:
        return padded // 8 + padded * QUAD_STORED // QUAD * bits // 8
    # int4 interleaves two streams and pads the shorter; with random positions their lengths differ little.
    masks, offsets = padded // 8, 8 * (-(-n // PANEL_COLUMNS) + 1)
    return masks + -(-stored * bits // 8) + _PADDING_BYTES + offsets


def _padded_weights(k: int, n: int, bits: int) -> int:
    tile_inputs = TILE_ROWS * row_inputs(bits)
    return -(-n // PANEL_COLUMNS) * PANEL_COLUMNS * -(-k // tile_inputs) * tile_inputs
