"""SparseAMXMatMul: bf16, int8 or int4 weights as a bitmap and their non-zeros, or dense (ops/formats/bitmap.h)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortolan import _native

from ..find.constants import constant_tensor
from ..find.epilogue import Activation
from ..find.stored_int4 import StoredInt4
from ..find.stored_int8 import StoredInt8
from ..weights.quantizers.grid import Quantization
from .function_body import PANEL_COLUMNS
from .linear_function import neutral_inputs_of_layer, uses_of_layers
from .nodes import fill_missing, input_of, nodes_of
from .replacement import LayerWeight, PackedTensor, PackedWeight, Replacement
from .sparse_amx_matmul_function import INPUTS, OP_TYPE, TILE_ROWS, Uses, row_inputs, sparse_amx_matmul_function

_BF16 = 16  # weight_bits

# As in ops/formats/: bytes behind the last value of a bitmap format.
_PADDING_BYTES = 64
# Of the packed tensors; the kernel refuses any other.
_FORMAT_VERSION = 1
_MOST_INPUTS_WITH_ZERO_POINTS = 1 << 16  # as kMostInputsWithZeroPoints in ops/matmul/bitmap_weight.h
_LARGEST_BF16 = float(np.uint32(0x7F7F0000).view(np.float32))

# Below this sparsity dense storage is faster, by weight_bits. Measured: README of ops/sparse_amx_matmul.
DENSE_BELOW = {_BF16: 0.07, 8: 0.11, 4: 0.3}

# Of float32 arithmetic, as a share of |x| |W|: 2^-8 for each x and each w in bf16; any order of sums.
_BF16_ROUNDING = 1.2 * 2**-7
_FLOAT_ROUNDING = 2**-12
# Of numbers below it, which processors may take for zero, as the bf16 instructions do. Dead neurons have such weights.
_SMALLEST_NORMAL = 2.0**-126


class SparseAMXMatMul(Replacement):
    """Y = activation(X W + bias) + residual, or the LayerNormalization of that; X is rounded to bf16, or row by row to
    int8 for quantized weights: with zero points for int8 ones."""

    op_type = OP_TYPE
    input_names = INPUTS

    def why_not(self, k: int, quantization: Quantization | None) -> str | None:
        if isinstance(quantization, StoredInt4):
            return "has scales, and perhaps zero points, that SparseAMXMatMul does not take"
        if isinstance(quantization, StoredInt8):  # it would round activations also where a recipe promises bf16 ones
            return "is stored in int8, which SparseAMXMatMul does not take over; give pattern='4x1'"
        if quantization is not None and not quantization.symmetric:
            return "is quantized with zero points, which SparseAMXMatMul does not take; set quantize.symmetric to true"
        return None

    def why_not_matrix(self, matrix: np.ndarray) -> str | None:
        # NaN fails every comparison.
        if matrix.max() <= _LARGEST_BF16 and matrix.min() >= -_LARGEST_BF16:
            return None
        return "holds NaN, infinity or numbers beyond bfloat16"

    def pack(self, weight: LayerWeight) -> PackedWeight:
        k, n = weight.matrix.shape
        quantized = weight.quantized
        if quantized is None:
            dense = _is_dense(k, n, int(np.count_nonzero(weight.matrix)), _BF16)
            masks, values, offsets = _native.pack_bitmap(np.ascontiguousarray(weight.matrix), dense=dense)
            return _bitmap(masks, PackedTensor(values, ir.DataType.BFLOAT16), offsets)
        q, scales = quantized.q.numpy(), quantized.scales.numpy()
        dense = _is_dense(k, n, int(np.count_nonzero(q)), quantized.bits)
        if quantized.bits == 8:
            masks, int8, offsets = _native.pack_bitmap_int8(q, dense=dense)
            packed = _bitmap(masks, PackedTensor(int8, ir.DataType.INT8), offsets)
            packed["scales"] = PackedTensor(_native.pack_scales(scales, bf16=False), ir.DataType.FLOAT)
        else:
            masks, nibbles, offsets = _native.pack_bitmap_int4(q, dense=dense)
            packed = _bitmap(masks, PackedTensor(nibbles, ir.DataType.UINT8), offsets)
            packed["scales"] = PackedTensor(_native.pack_scales(scales, bf16=True), ir.DataType.BFLOAT16)
        del q, scales
        quantized.release()
        return packed

    def packed_bytes(self, k: int, n: int, stored: int, quantization: Quantization | None) -> int:
        bits = weight_bits(quantization)
        groups = 1 if quantization is None or quantization.group_size is None else -(-k // quantization.group_size)
        scales = {_BF16: 0, 8: 4, 4: 2}[bits] * -(-n // PANEL_COLUMNS) * groups * PANEL_COLUMNS
        if _is_dense(k, n, stored, bits):
            return _dense_bytes(k, n, bits) + scales
        return _bitmap_bytes(k, n, stored, bits) + scales

    def attributes(
        self, k: int, n: int, quantization: Quantization | None, activation: Activation, gated_columns: int
    ) -> list[ir.Attr]:
        numbers = {
            "k": k,
            "n": n,
            "format_version": _FORMAT_VERSION,
            "weight_bits": weight_bits(quantization),
            "group_size": 0 if quantization is None or quantization.group_size is None else quantization.group_size,
            "activation": int(activation),
            "gated_columns": gated_columns,
            "x_zero_points": int(_has_zero_points(k, quantization)),
        }
        return [ir.AttrInt64(name, number) for name, number in numbers.items()]

    def rounding_bound(self, x: np.ndarray, weight: LayerWeight) -> np.ndarray:
        magnitude = np.abs(weight.matrix)
        product: np.ndarray = np.abs(x) @ magnitude
        k = len(magnitude)
        if weight.quantized is None:
            # Each weight, each x w, each sum.
            lost = _SMALLEST_NORMAL * (np.abs(x).sum(axis=1, keepdims=True) + 2 * k)
            bound: np.ndarray = _BF16_ROUNDING * product + lost
            return bound
        # Half a step of each x (ops/matmul/bitmap_weight.h).
        if weight.quantized.bits == 8 and k <= _MOST_INPUTS_WITH_ZERO_POINTS:
            half_steps = (np.maximum(x.max(axis=1), 0) - np.minimum(x.min(axis=1), 0))[:, None] / 508
        else:
            half_steps = np.abs(x).max(axis=1, keepdims=True) / 254
        steps: np.ndarray = half_steps * magnitude.sum(axis=0) * (1 + _FLOAT_ROUNDING)
        # The scale of x times that of w.
        lost = _SMALLEST_NORMAL * 254 * 127 * k
        return steps + _FLOAT_ROUNDING * product + lost

    def typical_rounding(self, quantization: Quantization | None) -> float:
        # bf16: 2^-8 / sqrt 6 for each x and each w. int8: a step of max|x| / 127 over sqrt 12, for rows whose largest
        # number is six times their root mean square.
        return 0.0023 if quantization is None else 0.014

    def fill_inputs(self, model: ir.Model, new_name: Callable[[str], str]) -> None:
        nodes = nodes_of(model, OP_TYPE)
        uses = _uses(nodes)

        def neutral(node: ir.Node) -> dict[str, np.ndarray]:
            n = node.attributes["n"].as_int()
            return {
                **neutral_inputs_of_layer(n, node.attributes["gated_columns"].as_int()),
                "scales": np.ones((-(-n // PANEL_COLUMNS), 1, PANEL_COLUMNS), np.float32),
            }

        needed = uses.needed_inputs() | ({"scales"} if len(uses.weight_bits) > 1 else set())
        fill_missing(nodes, INPUTS, needed, neutral, new_name)

    def function(self, model: ir.Model, opset: int, unpack_once: bool) -> ir.Function:
        return sparse_amx_matmul_function(opset, _uses(nodes_of(model, OP_TYPE)), unpack_once)


def weight_bits(quantization: Quantization | None) -> int:
    """Of a stored weight: 16 is bf16."""
    return _BF16 if quantization is None else quantization.bits


def _has_zero_points(k: int, quantization: Quantization | None) -> bool:
    """Whether each row of x is quantized with a zero point: where kernels can, as that is more exact."""
    return weight_bits(quantization) == 8 and k <= _MOST_INPUTS_WITH_ZERO_POINTS


def _bitmap(masks: np.ndarray, values: PackedTensor, offsets: np.ndarray) -> dict[str, PackedTensor]:
    return {
        "masks": PackedTensor(masks, ir.DataType.UINT8),
        "values": values,
        "offsets": PackedTensor(offsets, ir.DataType.INT64),
    }


def _is_dense(k: int, n: int, stored: int, bits: int) -> bool:
    """Whether dense storage is the faster one, and not much larger: it needs no masks, but stores all of a tile."""
    larger = _dense_bytes(k, n, bits) > 1.1 * _bitmap_bytes(k, n, stored, bits)
    return 1 - stored / (k * n) < DENSE_BELOW[bits] and not larger


def _padded_weights(k: int, n: int, bits: int) -> int:
    tile_inputs = TILE_ROWS * row_inputs(bits)
    return -(-n // PANEL_COLUMNS) * PANEL_COLUMNS * -(-k // tile_inputs) * tile_inputs


def _dense_bytes(k: int, n: int, bits: int) -> int:
    return _padded_weights(k, n, bits) * bits // 8


def _bitmap_bytes(k: int, n: int, stored: int, bits: int) -> int:
    # int4: two streams side by side, as long as the longer one; at random positions they differ little.
    masks, offsets = _padded_weights(k, n, bits) // 8, 8 * (-(-n // PANEL_COLUMNS) + 1)
    return masks + -(-stored * bits // 8) + _PADDING_BYTES + offsets


def _uses(nodes: list[ir.Node]) -> Uses:
    return Uses(
        weight_bits=frozenset(node.attributes["weight_bits"].as_int() for node in nodes),
        dense=any(_is_empty(input_of(node, INPUTS, "masks")) for node in nodes),
        x_zero_points=frozenset(
            node.attributes["x_zero_points"].as_int() for node in nodes if node.attributes["weight_bits"].as_int() == 8
        ),
        **uses_of_layers(nodes, INPUTS),
    )


def _is_empty(value: ir.Value | None) -> bool:
    tensor = constant_tensor(value)
    return tensor is not None and tensor.size == 0
