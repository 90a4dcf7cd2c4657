"""W4A8MatMul: 4-bit weights in groups, with zero points or minimums (the format: ops/formats/int4_group.h)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortolan import _native

from ..find.epilogue import Activation
from ..find.stored_int4 import StoredInt4
from ..weights.quantizers.grid import Quantization
from .function_body import PANEL_COLUMNS
from .linear_function import neutral_inputs_of_layer, uses_of_layers
from .nodes import fill_missing, input_of, nodes_of
from .replacement import LayerWeight, PackedTensor, PackedWeight, Replacement, Stored
from .w4a8_matmul_function import INPUTS, MIDDLE_ZERO_POINT, OP_TYPE, TILE_INPUTS, Uses, w4a8_matmul_function

# Of the packed tensors; the kernel refuses any other.
_FORMAT_VERSION = 1
_FLOAT_ROUNDING = 2**-12  # of float32 arithmetic, as a share of |x| |W|: any order of sums
_SMALLEST_NORMAL = 2.0**-126


class W4A8MatMul(Replacement):
    """Y = activation(X W + bias) + residual, or the LayerNormalization of that; X is rounded to int8 group by group."""

    op_type = OP_TYPE
    input_names = INPUTS

    def why_not(self, k: int, quantization: Quantization | None) -> str | None:
        if quantization is None or quantization.bits != 4:
            return 'is not quantized to 4 bits; put [[pass]] name = "quantize", bits = 4 before this one'
        return None

    def pack(self, weight: LayerWeight) -> PackedWeight:
        quantized = weight.quantized
        assert quantized is not None
        q, scales = quantized.q.numpy(), quantized.scales.numpy()
        if quantized.symmetric:
            q = (q + np.int8(MIDDLE_ZERO_POINT)).view(np.uint8)
        packed = {"weights": PackedTensor(_native.pack_int4_group(np.ascontiguousarray(q)), ir.DataType.UINT8)}
        if quantized.minimums is None:
            (packed["scales"],) = _packed_floats(scales)
        else:
            packed["scales"], packed["minimums"] = _packed_floats(scales, quantized.minimums.numpy())
        if quantized.zero_points is not None:
            zero_points = _native.pack_group_rows(quantized.zero_points.numpy())
            packed["zero_points"] = PackedTensor(zero_points, ir.DataType.UINT8)
            del zero_points
        del q, scales
        quantized.release()
        return packed

    def packed_bytes(self, k: int, n: int, stored: Stored, quantization: Quantization | None) -> int:
        if quantization is None or quantization.group_size is None:
            return 4 * k * n  # why_not refuses it
        panels = -(-n // PANEL_COLUMNS)
        weights = panels * PANEL_COLUMNS * -(-k // TILE_INPUTS) * TILE_INPUTS // 2
        groups = panels * PANEL_COLUMNS * -(-k // quantization.group_size)
        # The scales of our quantizers are float16 numbers as a rule, float32 ones that a model stores are not.
        scale = 4 if isinstance(quantization, StoredInt4) and quantization.scales.dtype == ir.DataType.FLOAT else 2
        offset = scale if quantization.minimum else 0 if quantization.symmetric else 1
        return weights + groups * (scale + offset)

    def attributes(
        self, k: int, n: int, quantization: Quantization | None, activation: Activation, gated_columns: int
    ) -> list[ir.Attr]:
        assert quantization is not None and quantization.group_size is not None
        numbers = {
            "k": k,
            "n": n,
            "format_version": _FORMAT_VERSION,
            "group_size": quantization.group_size,
            "activation": int(activation),
            "gated_columns": gated_columns,
        }
        return [ir.AttrInt64(name, number) for name, number in numbers.items()]

    def rounding_bound(self, x: np.ndarray, weight: LayerWeight) -> np.ndarray:
        assert weight.quantized is not None and weight.quantized.group_size is not None
        group = weight.quantized.group_size
        magnitude = np.abs(weight.matrix)
        if weight.quantized.minimums is not None:
            # What is added up: q - 8 and, for all inputs of a group, 8 scales and a minimum.
            rows = np.abs(weight.quantized.scales.numpy()) * 16 + np.abs(weight.quantized.minimums.numpy())
            magnitude = magnitude + np.repeat(rows, group, axis=0)[: len(magnitude)]
            weight.quantized.release()
        product: np.ndarray = np.abs(x) @ magnitude
        steps = np.zeros_like(product)
        for start in range(0, len(magnitude), group):  # half a step of each x (ops/matmul/group_int4_weight.h)
            half_steps = np.abs(x[:, start : start + group]).max(axis=1, keepdims=True) / 254
            steps += half_steps * magnitude[start : start + group].sum(axis=0)
        # The scale of x times that of W, which multiplies a sum of q (w - zero point).
        lost = _SMALLEST_NORMAL * 127 * 15 * len(magnitude)
        return steps * (1 + _FLOAT_ROUNDING) + _FLOAT_ROUNDING * product + lost

    def typical_rounding(self, quantization: Quantization | None) -> float:
        # A step of max|x| / 127 over sqrt 12, for groups whose largest number is three times their root mean square.
        return 0.007

    def fill_inputs(self, model: ir.Model, new_name: Callable[[str], str]) -> None:
        nodes = nodes_of(model, OP_TYPE)
        uses = _uses(nodes)

        def neutral(node: ir.Node) -> dict[str, np.ndarray]:
            n, k = node.attributes["n"].as_int(), node.attributes["k"].as_int()
            groups = -(-k // node.attributes["group_size"].as_int())
            middle = np.full((-(-n // PANEL_COLUMNS), groups, PANEL_COLUMNS), MIDDLE_ZERO_POINT, np.uint8)
            scales = input_of(node, INPUTS, "scales")
            assert scales is not None and scales.dtype is not None
            has_minimums = input_of(node, INPUTS, "minimums") is not None
            return {
                **neutral_inputs_of_layer(n, node.attributes["gated_columns"].as_int()),
                "zero_points": np.zeros(1, np.uint8) if has_minimums else middle,
                "minimums": np.zeros(1, scales.dtype.numpy()),
            }

        fill_missing(nodes, INPUTS, uses.needed_inputs(), neutral, new_name)

    def function(self, model: ir.Model, opset: int, unpack_once: bool) -> ir.Function:
        return w4a8_matmul_function(opset, _uses(nodes_of(model, OP_TYPE)), unpack_once)


def _packed_floats(*rows: np.ndarray) -> list[PackedTensor]:
    """Scales, and minimums: float16 where that loses nothing of any of them, else float32."""
    with np.errstate(over="ignore"):
        halves = [array.astype(np.float16) for array in rows]
    if any((half != array).any() for half, array in zip(halves, rows, strict=True)):
        wide = [np.ascontiguousarray(array, np.float32) for array in rows]
        return [PackedTensor(_native.pack_group_rows(array), ir.DataType.FLOAT) for array in wide]
    packed = [_native.pack_group_rows(np.ascontiguousarray(half).view(np.uint16)) for half in halves]
    return [PackedTensor(array.view(np.float16), ir.DataType.FLOAT16) for array in packed]


def _uses(nodes: list[ir.Node]) -> Uses:
    minimums = any(input_of(node, INPUTS, "minimums") is not None for node in nodes)
    return Uses(
        zero_points=minimums or any(input_of(node, INPUTS, "zero_points") is not None for node in nodes),
        minimums=minimums,
        **uses_of_layers(nodes, INPUTS),
    )
