"""W4A8MatMul: 4-bit weights in groups, with zero points or minimums (format: ops/formats/int4_group.h).

Groups may have subgroups with integer scales and zero points, and then 4, 5 or 6 bits (ops/formats/subgroup.h).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortolan import _native

from ..find.epilogue import Activation
from ..find.quantized_weight import QuantizedWeight
from ..weights.quantizers.grid import Quantization
from .function_body import PANEL_COLUMNS
from .group_function import TILE_INPUTS
from .group_matmul import GroupMatMul, packed_floats
from .linear_function import neutral_inputs_of_layer, uses_of_layers
from .nodes import fill_missing, input_of, nodes_of
from .replacement import LayerWeight, PackedTensor, PackedWeight
from .w4a8_matmul_function import INPUTS, MIDDLE_ZERO_POINT, OP_TYPE, Uses, w4a8_matmul_function


class W4A8MatMul(GroupMatMul):
    """The operator W4A8MatMul as a replacement of linear layers."""

    op_type = OP_TYPE
    input_names = INPUTS
    largest = 15

    def why_not(self, k: int, quantization: Quantization | None) -> str | None:
        """See `Replacement.why_not`."""
        if quantization is None or (quantization.bits != 4 and quantization.subgroup_size is None):
            return "is not quantized to 4 bits; give weights='int4' (in a recipe file: quantize with bits = 4 before)"
        return None

    def pack(self, weight: LayerWeight) -> PackedWeight:
        """See `Replacement.pack`."""
        quantized = weight.quantized
        assert quantized is not None
        q, scales = quantized.q.numpy(), quantized.scales.numpy()
        if quantized.symmetric:
            q = (q + np.int8(MIDDLE_ZERO_POINT)).view(np.uint8)
        low = np.ascontiguousarray(q if quantized.bits == 4 else q & 15)
        packed = {"weights": PackedTensor(_native.pack_int4_group(low), ir.DataType.UINT8)}
        del low
        if quantized.subgroup_scales is not None:
            packed |= _packed_subgroups(quantized)
            del q, scales
            quantized.release()
            return packed
        if quantized.minimums is None:
            (packed["scales"],) = packed_floats(scales)
        else:
            packed["scales"], packed["minimums"] = packed_floats(scales, quantized.minimums.numpy())
        if quantized.zero_points is not None:
            zero_points = _native.pack_group_rows(quantized.zero_points.numpy())
            packed["zero_points"] = PackedTensor(zero_points, ir.DataType.UINT8)
            del zero_points
        del q, scales
        quantized.release()
        return packed

    def attributes(
        self, k: int, n: int, quantization: Quantization | None, activation: Activation, gated_columns: int
    ) -> list[ir.Attr]:
        """See `Replacement.attributes`."""
        assert quantization is not None
        names = {"zero_point_steps": quantization.zero_point_steps}
        if quantization.subgroup_size is not None:
            names |= {"subgroup_size": quantization.subgroup_size, "bits": quantization.bits}
        own = [ir.AttrInt64(name, value) for name, value in names.items()]
        return [*super().attributes(k, n, quantization, activation, gated_columns), *own]

    def magnitude(self, weight: LayerWeight) -> np.ndarray:
        """See `GroupMatMul.magnitude`."""
        whole = super().magnitude(weight)
        quantized = weight.quantized
        if quantized is None or quantized.group_size is None or not (quantized.minimum or quantized.fractions):
            return whole
        # The kernel sums q - 8, then adds 8 * scale and the minimum per group.
        rows = np.abs(quantized.scales.numpy()).astype(np.float32) * 16
        if quantized.minimums is not None:
            rows += np.abs(quantized.minimums.numpy())
        quantized.release()
        found: np.ndarray = whole + np.repeat(rows, quantized.group_size, axis=0)[: len(whole)]
        return found

    def fill_inputs(self, model: ir.Model, new_name: Callable[[str], str]) -> None:
        """See `Replacement.fill_inputs`."""
        nodes = nodes_of(model, OP_TYPE)
        uses = _uses(nodes)
        if uses.subgroups:  # an ONNX function cannot test whether a node has an attribute
            for node in nodes:
                for name, value in (("subgroup_size", 0), ("bits", 4)):
                    if name not in node.attributes:
                        node.attributes.add(ir.AttrInt64(name, value))

        def neutral(node: ir.Node) -> dict[str, np.ndarray]:
            n, k = node.attributes["n"].as_int(), node.attributes["k"].as_int()
            groups = -(-k // node.attributes["group_size"].as_int())
            middle_step = MIDDLE_ZERO_POINT * node.attributes["zero_point_steps"].as_int()
            middle = np.full((-(-n // PANEL_COLUMNS), groups, PANEL_COLUMNS), middle_step, np.uint8)
            scales = input_of(node, INPUTS, "scales")
            assert scales is not None and scales.dtype is not None
            has_zero = any(input_of(node, INPUTS, name) is not None for name in ("minimums", "subgroup_scales"))
            return {
                **neutral_inputs_of_layer(n, node.attributes["gated_columns"].as_int()),
                "zero_points": np.zeros(1, np.uint8) if has_zero else middle,
                "minimums": np.zeros(1, scales.dtype.numpy()),
                "subgroup_scales": np.ones(1, np.uint8),
                "high_bits": np.zeros(1, np.uint8),
            }

        fill_missing(nodes, INPUTS, uses.needed_inputs(), neutral, new_name)

    def function(self, model: ir.Model, opset: int, unpack_once: bool) -> ir.Function:
        """See `Replacement.function`."""
        return w4a8_matmul_function(opset, _uses(nodes_of(model, OP_TYPE)), unpack_once)


def _packed_subgroups(quantized: QuantizedWeight) -> dict[str, PackedTensor]:
    """Return the packed tensors that only weights with subgroups have, and their scales."""
    assert quantized.subgroup_scales is not None and quantized.zero_points is not None
    assert quantized.subgroup_size is not None
    k, n = quantized.q.shape.numpy()
    rows = -(-k // TILE_INPUTS) * TILE_INPUTS // quantized.subgroup_size
    both = np.zeros((rows, n), np.uint8)
    steps, zero_points = quantized.subgroup_scales.numpy(), quantized.zero_points.numpy()
    np.left_shift(zero_points, 8 - quantized.bits, out=both[: len(steps)])
    both[: len(steps)] |= steps
    (scales,) = packed_floats(quantized.scales.numpy())
    packed = {
        "scales": scales,
        "subgroup_scales": PackedTensor(_native.pack_group_rows(both), ir.DataType.UINT8),
    }
    if quantized.bits > 4:
        q = np.ascontiguousarray(quantized.q.numpy())
        packed["high_bits"] = PackedTensor(_native.pack_high_bits(q, quantized.bits), ir.DataType.UINT8)
    return packed


def _uses(nodes: list[ir.Node]) -> Uses:
    def any_has(name: str) -> bool:
        return any(input_of(node, INPUTS, name) is not None for node in nodes)

    minimums, subgroups = any_has("minimums"), any_has("subgroup_scales")
    return Uses(
        zero_points=minimums or subgroups or any_has("zero_points"),
        minimums=minimums,
        subgroups=subgroups,
        high_bits=any_has("high_bits"),
        **uses_of_layers(nodes, INPUTS),
    )
