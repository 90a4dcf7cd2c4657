"""Reads 4-bit weights that a model stores, in MatMulNBits and in DequantizeLinear of int4 or uint4 tensors.

Integers, scales and zero points are kept exactly if they fit W4A8MatMul's format (ops/formats/int4_group.h): groups of
32, 64 or 128 inputs with zero points from 0 to 15, or with float zero points (as in HQQ), which are converted to
minimums. A larger block is split into several groups with the same scale. If nothing fits, a reason is returned.

A model is untrusted: attributes, types and shapes are checked before any data are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from ortolan import _native
from ortolan.errors import ModelError

from .constants import constant_tensor, float_array, lazy, required_constant
from .node_checks import MICROSOFT_DOMAIN, UnfitError, node_input
from .quantized_weight import QuantizedWeight

MATMUL_NBITS = "MatMulNBits"
# Inputs of MatMulNBits that make up the weight: B, scales, zero_points, g_idx.
WEIGHT_INPUTS = (1, 2, 3, 4)
BIAS_INPUT = 5

_GROUP_SIZES = (128, 64, 32)  # group sizes of W4A8MatMul, fastest first
_MIDDLE = 8  # zero point of uint4 codes if the model gives none
INT4_TYPES = (ir.DataType.INT4, ir.DataType.UINT4)


@dataclass(frozen=True)
class StoredInt4(QuantizedWeight):
    """A 4-bit weight that the model stores. Its tensors are lazy: each access reads the model's tensors."""

    def check_scales(self) -> None:
        """Raise ModelError unless all dequantized weights are finite."""
        with np.errstate(over="ignore"):
            largest = np.abs(self.scales.numpy().astype(np.float32)) * 15
            if self.minimums is not None:
                largest += np.abs(self.minimums.numpy())
        if not np.isfinite(largest).all():
            raise ModelError(
                f"the scales {self.scales.name!r} of a 4-bit weight hold NaN, infinity or values that make weights "
                "overflow; export the model again, or exclude the layer"
            )


def is_matmul_nbits(node: ir.Node) -> bool:
    """Return whether the node is a MatMulNBits."""
    return node.domain == MICROSOFT_DOMAIN and node.op_type == MATMUL_NBITS


def rounds_inputs(node: ir.Node) -> bool:
    """Return whether ONNX Runtime quantizes the node's input to int8 (accuracy_level 4 without float zero points)."""
    level, zero_points = node.attributes.get("accuracy_level"), constant_tensor(node_input(node, 3))
    whole = zero_points is None or zero_points.dtype == ir.DataType.UINT8
    return is_matmul_nbits(node) and level is not None and level.value == 4 and whole


def read_blocks(linear: _native.Linear) -> StoredInt4:
    """Return the 4-bit weight of a MatMulNBits node.

    Codes are uint8 [n, blocks, block_size / 2] with two codes per byte, the first in the low nibble. Scales are
    [n, blocks]. Zero points are uint8 [n, ceil(blocks / 2)], packed like the codes, or [n, blocks] in the type of the
    scales. Scales and zero points may be flattened.
    """
    packed, scales = required_constant(linear.codes), required_constant(linear.scales)
    return blocks_of(linear.k, linear.n, linear.block_size, packed, scales, constant_tensor(linear.zero_points))


def blocks_of(
    k: int,
    n: int,
    block_size: int,
    packed: ir.TensorProtocol,
    scales: ir.TensorProtocol,
    zero_points: ir.TensorProtocol | None,
) -> StoredInt4:
    """Return the 4-bit weight [k, n] of tensors in the layout of MatMulNBits (`read_blocks`)."""
    blocks = -(-k // block_size)
    group_size = group_size_of(k, block_size)
    spread = partial(spread_blocks, blocks=blocks, block_size=block_size, group_size=group_size, k=k)

    def numbers() -> np.ndarray:
        """Return the codes [k, n], 0 … 15."""
        rows = _nibbles(packed.numpy().reshape(n, -1))
        return np.ascontiguousarray(rows[:, :k].T)

    def zeros(tensor: ir.TensorProtocol) -> np.ndarray:
        """Return the zero points [blocks, n], 0 … 15."""
        if tensor.dtype != ir.DataType.UINT8:
            return float_array(tensor).reshape(n, blocks).T.astype(np.uint8)
        return _nibbles(tensor.numpy().reshape(n, -1))[:, :blocks].T

    def minimums() -> np.ndarray:
        """Return -scale * zero point [blocks, n] for float zero points."""
        assert zero_points is not None
        product: np.ndarray = -float_array(scales).reshape(n, blocks) * float_array(zero_points).reshape(n, blocks)
        return product.T

    whole = zero_points is None or _are_whole(zero_points)
    q = numbers if zero_points is not None else lambda: numbers().view(np.int8) - np.int8(_MIDDLE)
    return _stored(
        k,
        n,
        group_size,
        q,
        scales,
        lambda: spread(_scale_array(scales).reshape(n, blocks).T),
        None if zero_points is None or not whole else lambda: spread(zeros(zero_points)),
        None if whole else lambda: spread(minimums()),
    )


def _are_whole(zero_points: ir.TensorProtocol) -> bool:
    """Return whether zero points are integers from 0 to 15."""
    if zero_points.dtype == ir.DataType.UINT8:
        return True
    array = float_array(zero_points)
    return bool(((array == np.rint(array)) & (array >= 0) & (array <= 15)).all())


def read_dequantized(linear: _native.Linear) -> StoredInt4:
    """Return the 4-bit weight of a layer that a DequantizeLinear computes.

    Scales and zero points are scalars, one per column, or one per block of k.
    """
    k, n, transposed, block_size = linear.k, linear.n, linear.codes_transposed, linear.block_size or linear.k
    codes, scales, zero_points = required_constant(linear.codes), required_constant(linear.scales), linear.zero_points
    zero_points = constant_tensor(zero_points)
    blocks, group_size = -(-k // block_size), group_size_of(k, block_size)

    def spread(array: np.ndarray) -> np.ndarray:
        rows = np.broadcast_to(array, (1, n)) if array.ndim < 2 else array.T if transposed else array
        return spread_blocks(rows, blocks, block_size, group_size, k)

    symmetric = codes.dtype == ir.DataType.INT4 and zero_points is None
    # Shifts int4 codes and zero points from -8 … 7 to 0 … 15.
    shift = np.uint8(_MIDDLE if codes.dtype == ir.DataType.INT4 else 0)

    def unsigned(tensor: ir.TensorProtocol) -> np.ndarray:
        return tensor.numpy().astype(np.int8).view(np.uint8) + shift

    def q() -> np.ndarray:
        numbers = codes.numpy().astype(np.int8) if symmetric else unsigned(codes)
        return numbers.T if transposed else numbers

    def zeros() -> np.ndarray:
        return np.zeros((-(-k // group_size), n), np.uint8) if zero_points is None else spread(unsigned(zero_points))

    return _stored(k, n, group_size, q, scales, lambda: spread(_scale_array(scales)), None if symmetric else zeros)


def _stored(
    k: int,
    n: int,
    group_size: int,
    q: Callable[[], np.ndarray],
    scale_tensor: ir.TensorProtocol,
    scales: Callable[[], np.ndarray],
    zero_points: Callable[[], np.ndarray] | None,
    minimums: Callable[[], np.ndarray] | None = None,
) -> StoredInt4:
    by_group = ir.Shape([-(-k // group_size), n])
    # bfloat16 scales are converted to float32 exactly.
    scale_type = ir.DataType.FLOAT16 if scale_tensor.dtype == ir.DataType.FLOAT16 else ir.DataType.FLOAT
    return StoredInt4(
        4,
        group_size,
        lazy(q, ir.DataType.INT8 if zero_points is None and minimums is None else ir.DataType.UINT8, ir.Shape([k, n])),
        lazy(scales, scale_type, by_group, scale_tensor.name),
        None if zero_points is None else lazy(zero_points, ir.DataType.UINT8, by_group),
        None if minimums is None else lazy(minimums, ir.DataType.FLOAT, by_group),
    )


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack each byte to two values, low nibble first: uint8 [rows, bytes] to [rows, 2 bytes]."""
    numbers = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    numbers[:, 0::2] = packed & 15
    numbers[:, 1::2] = packed >> 4
    return numbers


def _scale_array(tensor: ir.TensorProtocol) -> np.ndarray:
    array = tensor.numpy()
    return array if tensor.dtype == ir.DataType.FLOAT16 else float_array(tensor)


def group_size_of(k: int, block_size: int) -> int:
    """Return W4A8MatMul's group size for a block: the block size, or the largest group size that divides it."""
    if block_size in _GROUP_SIZES:
        return block_size
    if block_size >= k:  # a single block
        return _GROUP_SIZES[0]
    for size in _GROUP_SIZES:
        if block_size % size == 0:
            return size
    raise UnfitError(f"its block_size is {block_size}, expected a multiple of 32")


def spread_blocks(rows: np.ndarray, blocks: int, block_size: int, group_size: int, k: int) -> np.ndarray:
    """Expand [blocks, n] to [groups, n]."""
    groups = -(-k // group_size)
    return rows if (blocks, block_size) == (groups, group_size) else rows[np.arange(groups) * group_size // block_size]
