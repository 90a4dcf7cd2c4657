"""How SparseAMXMatMul stores a weight: which storage, and how large it is.

    dense     every weight (ops/formats/bitmap.h)
    bitmap    a bit a weight, and the weights that are not zero
    2:4       of each four inputs of an output two weights, and their places (ops/formats/two_four.h)

The weights are the same in all of them. They differ in size and speed, and in which CPUs are fast with them.
"""

from __future__ import annotations

import numpy as np

from ortolan import _native

from .function_body import PANEL_COLUMNS
from .replacement import Stored
from .sparse_amx_matmul_function import QUAD, QUAD_STORED, TILE_ROWS, row_inputs

DENSE, BITMAP, TWO_FOUR = "dense", "bitmap", "2:4"
# What option `storage` of pass replace says instead: the smallest one, also where this CPU is slow with it.
SMALL = "small"

BF16 = 16  # weight_bits
# As in ops/formats/: bytes behind the last value of a bitmap format.
_PADDING_BYTES = 64
# 2:4 storage is fast on every CPU, where a bitmap may meet one that is not: it may be larger by so much.
_TWO_FOUR_GROWTH = 1.25
_CHUNK = 256  # quads of inputs


def beyond_two_four(matrix: np.ndarray) -> str:
    """The first four inputs of an output of which more than two weights are not zero, [k, n], in words; "": none."""
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
    """What is stored of a matrix of weights or of whole numbers, [k, n]."""
    return Stored(int(np.count_nonzero(matrix)), beyond_two_four(matrix))


def bitmaps_are_fast(bits: int) -> bool:
    """Whether this CPU multiplies by a bitmap of weights of so many bits faster than by dense ones."""
    return _native.bitmaps_are_fast(bits)


def choose_storage(k: int, n: int, stored: Stored, bits: int, wanted: str | None) -> str:
    """wanted: option `storage` of pass replace. What is not 2:4 is not stored so, whatever is wanted."""
    if wanted == TWO_FOUR and stored.is_two_four:
        return TWO_FOUR
    other = BITMAP if _native.is_worth_bitmap(bits, k, n, stored.count) else DENSE
    if wanted != SMALL and not bitmaps_are_fast(bits):
        other = DENSE
    largest = _TWO_FOUR_GROWTH * storage_bytes(k, n, stored.count, bits, other)
    return TWO_FOUR if stored.is_two_four and storage_bytes(k, n, 0, bits, TWO_FOUR) <= largest else other


def storage_of(masks: int, offsets: int) -> str:
    """By the number of elements of these tensors."""
    if masks == 0:
        return DENSE
    return BITMAP if offsets else TWO_FOUR


def storage_bytes(k: int, n: int, stored: int, bits: int, storage: str) -> int:
    """Of masks, values and offsets for so many weights that are not zero."""
    padded = _padded_weights(k, n, bits)
    if storage == DENSE:
        return padded * bits // 8
    if storage == TWO_FOUR:
        return padded // 8 + padded * QUAD_STORED // QUAD * bits // 8
    # int4: two streams side by side, as long as the longer one; at random positions they differ little.
    masks, offsets = padded // 8, 8 * (-(-n // PANEL_COLUMNS) + 1)
    return masks + -(-stored * bits // 8) + _PADDING_BYTES + offsets


def _padded_weights(k: int, n: int, bits: int) -> int:
    tile_inputs = TILE_ROWS * row_inputs(bits)
    return -(-n // PANEL_COLUMNS) * PANEL_COLUMNS * -(-k // tile_inputs) * tile_inputs
