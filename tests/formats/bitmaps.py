"""Malformed packed bitmaps."""

from __future__ import annotations

import numpy as np

from ortolan import _native

from ..ops.single_node import Packed, sparse_weight


def packed_example(dense: bool = False) -> tuple[Packed, int, int]:
    k, n = 70, 40
    return _native.pack_bitmap(sparse_weight(np.random.default_rng(1), k, n, 0.5), dense), k, n


def malformed_bf16() -> dict[str, tuple[Packed, int, int, str]]:
    bitmap, k, n = packed_example()
    dense, _, _ = packed_example(dense=True)
    return malformed(bitmap, dense, k, n, row_bytes=4, too_many=2**62)


def malformed(
    bitmap: Packed, dense: Packed, k: int, n: int, row_bytes: int, too_many: int
) -> dict[str, tuple[Packed, int, int, str]]:
    """Map the name of each malformed case to its tensors, k, n and the pattern of the error message.

    Args:
        bitmap: A packed weight [k, n] with 3 panels, whose last tile and last panel are partly filled.
        dense: The same weight in dense storage.
        k: Rows of the weight (inputs).
        n: Columns of the weight (outputs).
        row_bytes: Bytes of one mask row.
        too_many: A value of k above the limit.
    """
    (masks, values, offsets), (none, every, no_offsets) = bitmap, dense
    row_inputs = row_bytes * 8 // 16
    popcount, outside, too_deep = masks.copy(), masks.copy(), masks.copy()
    popcount[1, 0, : 2 * row_bytes] = 0  # in two rows, because int4 stores one count for both: the larger
    outside[2, 0, row_bytes - 1] |= 0x80  # row 0, column 15 of panel 2, which has 8 columns
    tile, inside = divmod(k, 16 * row_inputs)
    row, place = divmod(inside, row_inputs)
    too_deep[0, tile, row * row_bytes] |= 1 << place  # column 0 of input k, one past the last input
    beyond, falling, not_zero, negative, huge = (offsets.copy() for _ in range(5))
    beyond[-1] += 1
    falling[1], falling[2] = offsets[2], offsets[1]
    not_zero[0] = 1
    negative[1] = -5
    huge[1] = np.iinfo(np.int64).max
    size = every.size
    return {
        "masks short": ((masks[:, :, :-4].copy(), values, offsets), k, n, "masks hold .* expected"),
        "values short": ((masks, values[:-1].copy(), offsets), k, n, "offsets.*padding"),
        "values long": ((masks, np.append(values, values[:1]), offsets), k, n, "values hold .* expected"),
        "values empty": ((masks, values[:0].copy(), offsets), k, n, "offsets"),
        "offsets short": ((masks, values, offsets[:-1].copy()), k, n, "offsets hold .* expected"),
        "offsets empty": ((masks, values, offsets[:0].copy()), k, n, "values hold .* expected .*2:4 storage"),
        "offsets beyond": ((masks, values, beyond), k, n, "offsets"),
        "offsets falling": ((masks, values, falling), k, n, "less than the previous"),
        "offsets not from zero": ((masks, values, not_zero), k, n, "offsets.0. is 1"),
        "offsets negative": ((masks, values, negative), k, n, "less than the previous"),
        "offsets huge": ((masks, values, huge), k, n, "offsets"),
        "popcount": ((popcount, values, offsets), k, n, "panel 1 have .* bits set"),
        "bits outside of the columns": ((outside, values, offsets), k, n, "outside"),
        "bits outside of the inputs": ((too_deep, values, offsets), k, n, "outside"),
        "k zero": ((masks, values, offsets), 0, n, "k and n"),
        "n negative": ((masks, values, offsets), k, -1, "k and n"),
        "k huge": ((masks, values, offsets), too_many, n, "k and n"),
        "other k": ((masks, values, offsets), 200, n, "masks hold"),
        "masks empty, offsets not": ((none, every, offsets), k, n, "masks hold 0 bytes, expected"),
        "offsets empty, masks not": ((masks, every, no_offsets), k, n, "values hold .* expected .*2:4 storage"),
        "values of a bitmap without it": ((none, values, no_offsets), k, n, f"values hold .* expected {size}"),
        "dense values short": ((none, every[:-1].copy(), no_offsets), k, n, f"values hold {size - 1} .* {size}"),
        "dense values long": ((none, np.append(every, every[:1]), no_offsets), k, n, f"{size + 1} .* {size}"),
        "dense values empty": ((none, every[:0].copy(), no_offsets), k, n, f"values hold 0 .* expected {size}"),
        "dense with other k": ((none, every, no_offsets), 200, n, f"values hold {size} .* expected"),
        "dense with k zero": ((none, every, no_offsets), 0, n, "k and n"),
        "dense with k huge": ((none, every, no_offsets), too_many, n, "k and n"),
    }


def mutate(rng: np.random.Generator, packed: Packed, k: int, n: int) -> tuple[Packed, int, int]:
    """Make one to three random changes: flip bytes, edit offsets, cut, grow or swap tensors, change k and n."""
    masks, values, offsets = (a.copy() for a in packed)
    for _ in range(rng.integers(1, 4)):
        match rng.integers(0, 8):
            case 0 if masks.size:
                masks.reshape(-1)[rng.integers(masks.size)] ^= rng.integers(1, 256, dtype=np.uint8)
            case 1 if values.size:
                values[rng.integers(values.size)] = rng.integers(0, 2**16)
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
                k, n = int(k + rng.integers(-40, 41)), int(n + rng.integers(-20, 21))
    return (masks, values, offsets), k, n
