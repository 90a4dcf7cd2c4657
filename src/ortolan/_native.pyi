"""Native core of Ortolan: packers, unpackers, rules, CPU information."""

from typing import Any, Literal, TypedDict, overload

import numpy as np
from numpy.typing import NDArray

class CpuInfo(TypedDict):
    name: str
    isa: str
    features: list[str]
    detected_features: list[str]
    isa_problem: str
    microarchitecture: str
    l1_bytes: int
    l2_bytes: int

def cpu_info() -> CpuInfo:
    """What ortolan.cpu_info says."""

MOST_FORMULA_NODES: int
LEAST_ZERO_BLOCKS: float  # of the int8 weights that VNNISpMM gains from: the share in blocks that are all zero

def find_activation(
    nodes: list[tuple[str, list[int], int]], values: list[tuple[float | None, bool]]
) -> tuple[int, list[int]]:
    """Which activation of value 0 the nodes compute, and which of them: ops/epilogue/formula.h. 0: none.

    nodes: (type, inputs, output), of ONNX's own operators; inputs that are no values are -1. values: the number of a
    constant, and whether others than the nodes see the value.
    Raises ValueError if a node names a value that is not there.
    """

def int8_range(codes: NDArray[Any], zero_points: NDArray[np.int16], transposed: bool) -> tuple[int, int]:
    """The lowest and the highest of codes - zero_points, 0 among them; where any code would do, of what there may be.

    codes: int8 or uint8 [k, n], or [n, k] if transposed; zero_points [n].
    """

def why_not_int8(k: int, n: int, range: tuple[int, int]) -> str:
    """Why int8 numbers less zero points of this range are not taken over; "": they are."""

def why_not_scales(scales: NDArray[Any]) -> str:
    """Why such scales of int8 numbers are not taken over; "": they are."""

def bitmaps_are_fast(bits: int) -> bool:
    """Whether this CPU multiplies by a bitmap of weights of 16, 8 or 4 bits faster than by dense ones."""

def gains_from_pairs() -> bool:
    """Whether the kernels of this CPU are faster with int8 weights of a reduced range."""

def is_worth_bitmap(bits: int, k: int, n: int, stored: int) -> bool:
    """Whether, where bitmaps are fast, one is better than dense storage for k x n weights, so many of them not zero."""

def pack_bitmap(
    w: NDArray[Any], dense: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.int64]]:
    """Round w [k, n] to bf16 and pack it: masks [panels, tiles, 64], values (bf16 bits), offsets [panels + 1].

    dense: every weight is stored, masks and offsets are [0].
    Raises ValueError unless w is a matrix of 1 to 2^28 rows and columns.
    """

def pack_two_four(w: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.int64]]:
    """Round w [k, n] to bf16 and pack two weights of each four inputs of a column (2:4 storage).

    masks [panels, tiles, 64] (places), values [panels * tiles * 256] (bf16 bits), offsets [0].
    Raises ValueError as pack_bitmap does, and where more than two of four weights are not zero after rounding: it
    names the first such inputs and their column.
    """

def unpack_bitmap(
    masks: NDArray[np.uint8], values: NDArray[np.uint16], offsets: NDArray[np.int64], k: int, n: int
) -> NDArray[np.float32]:
    """The dense [k, n] matrix, from any storage. Raises ValueError if the tensors are malformed."""

def pack_bitmap_int8(
    q: NDArray[np.int8], dense: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.int8], NDArray[np.int64]]:
    """Pack q [k, n]: masks [panels, tiles, 128], values, offsets [panels + 1]; dense as in pack_bitmap.

    Raises ValueError unless q is a matrix of 1 to 2^17 rows and 1 to 2^28 columns.
    """

def pack_two_four_int8(q: NDArray[np.int8]) -> tuple[NDArray[np.uint8], NDArray[np.int8], NDArray[np.int64]]:
    """2:4 storage of q [k, n]: masks [panels, tiles, 128] (places), values [panels * tiles * 512], offsets [0].

    Raises ValueError as pack_bitmap_int8 and pack_two_four do.
    """

def unpack_bitmap_int8(
    masks: NDArray[np.uint8], values: NDArray[np.int8], offsets: NDArray[np.int64], k: int, n: int
) -> NDArray[np.int8]:
    """The dense [k, n] matrix. Raises ValueError if the tensors are malformed."""

def pack_bitmap_int4(
    q: NDArray[np.int8], dense: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
    """Pack q [k, n], which holds -8 to 7: masks [panels, tiles, 128], values (nibbles), offsets [panels + 1] in bytes.

    dense as in pack_bitmap.
    Raises ValueError for other values, and unless q is a matrix of 1 to 2^17 rows and 1 to 2^28 columns.
    """

def pack_two_four_int4(q: NDArray[np.int8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
    """2:4 storage of q [k, n], -8 to 7: masks [panels, tiles, 128], values [panels * tiles * 256], offsets [0].

    Raises ValueError as pack_bitmap_int4 and pack_two_four do.
    """

def unpack_bitmap_int4(
    masks: NDArray[np.uint8], values: NDArray[np.uint8], offsets: NDArray[np.int64], k: int, n: int
) -> NDArray[np.int8]:
    """The dense [k, n] matrix. Raises ValueError if the tensors are malformed."""

@overload
def pack_scales(scales: NDArray[Any], bf16: Literal[False]) -> NDArray[np.float32]:
    """Scales [groups, n] as float32 [panels, groups, 16], zeros beyond n.

    Raises ValueError unless scales is a matrix of 1 or more rows and columns.
    """

@overload
def pack_scales(scales: NDArray[Any], bf16: Literal[True]) -> NDArray[np.uint16]:
    """The same as bf16 bits, rounded to nearest even."""

def append_keys(cache: NDArray[np.uint8], tokens: int, keys: NDArray[Any], codebook: NDArray[Any]) -> None:
    """Append keys [count, head_dim] to a cache of key codes, in place (ops/formats/key_code_cache.h).

    cache [capacity, head_dim / d_sub / 2] holds `tokens` tokens and has room for `count` more; codebook
    [head_dim / d_sub, 16, d_sub]. Raises ValueError for wrong shapes.
    """

def decode_keys(cache: NDArray[np.uint8], tokens: int, codebook: NDArray[Any]) -> NDArray[np.float32]:
    """The centroids [tokens, head_dim] of a cache's codes."""

def append_values(cache: NDArray[np.uint8], tokens: int, values: NDArray[Any]) -> None:
    """Append values [count, head_dim] to a cache of int8 values, in place (ops/formats/value_cache.h).

    cache [capacity, 2 + head_dim] holds `tokens` tokens and has room for `count` more. Raises ValueError for wrong
    shapes.
    """

def decode_values(cache: NDArray[np.uint8], tokens: int) -> NDArray[np.float32]:
    """The values [tokens, head_dim] of a cache."""

def pack_int4_group(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack q [k, n] that holds 0 to 15: weights [panels, pairs of rows, 64] (ops/formats/int4_group.h)."""

def unpack_int4_group(weights: NDArray[np.uint8], k: int, n: int) -> NDArray[np.uint8]:
    """The [k, n] matrix of pack_int4_group."""

def pack_int8_group(q: NDArray[np.int8]) -> NDArray[np.int8]:
    """Pack q [k, n]: weights [panels, rows, 16, 4] (ops/formats/int8_group.h)."""

def unpack_int8_group(weights: NDArray[np.int8], k: int, n: int) -> NDArray[np.int8]:
    """The [k, n] matrix of pack_int8_group."""

def pack_group_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """Rows [groups, n] as [panels, groups, 16], columns beyond n zero: float32, uint16 or uint8."""

def pack_block_sparse(q: NDArray[np.int8]) -> tuple[NDArray[np.int8], NDArray[np.uint16], NDArray[np.int64]]:
    """Pack q [k, n] in blocks of 4 outputs x 1 input (ops/formats/block_sparse_4x1.h).

    values [quads, 4, 4], indices [quads, 4], starts [ceil(n / 4) + 1].
    Raises ValueError unless q is a matrix of 1 to 2^16 rows and 1 to 2^28 columns.
    """

def unpack_block_sparse(
    values: NDArray[np.int8], indices: NDArray[np.uint16], starts: NDArray[np.int64], k: int, n: int
) -> NDArray[np.int8]:
    """The dense [k, n] matrix. Raises ValueError if the tensors are malformed."""
