"""W8A8MatMul: symmetric 8-bit weights in groups (format: ops/formats/int8_group.h)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortolan import _native

from ..find.convolutions import WINDOW_DEFAULTS
from ..find.stored_int8 import StoredInt8
from ..weights.quantizers.grid import GROUP_SIZES, Quantization
from .group_matmul import GroupMatMul, packed_floats
from .linear_function import LayerUses, neutral_inputs_of_layer, set_missing, uses_of_layers
from .nodes import fill_missing, nodes_of
from .replacement import LayerWeight, PackedTensor, PackedWeight
from .w8a8_matmul_function import INPUTS, OP_TYPE, w8a8_matmul_function


class W8A8MatMul(GroupMatMul):
    """The operator W8A8MatMul as a replacement of linear layers."""

    op_type = OP_TYPE
    input_names = INPUTS
    largest = 128

    def why_not(self, k: int, quantization: Quantization | None) -> str | None:
        """See `Replacement.why_not`."""
        if quantization is None or quantization.bits != 8:
            return "is not quantized to 8 bits; give weights='int8' (in a recipe file: quantize with bits = 8 before)"
        if isinstance(quantization, StoredInt8) and not self.keeps_stored:
            return "is stored in int8, which W8A8MatMul keeps only if quantized_only is true"
        if quantization.group_size not in GROUP_SIZES:
            found = f"groups of {quantization.group_size}" if quantization.group_size else "one group per column"
            return f"is quantized in {found}, and W8A8MatMul has groups of 32, 64 and 128; set quantize.group_size"
        return None if quantization.symmetric else "has zero points or minimums, which W8A8MatMul does not support"

    def pack(self, weight: LayerWeight) -> PackedWeight:
        """See `Replacement.pack`."""
        quantized = weight.quantized
        assert quantized is not None
        (scales,) = packed_floats(quantized.scales.numpy())
        weights = _native.pack_int8_group(np.ascontiguousarray(quantized.q.numpy()))
        quantized.release()
        return {"weights": PackedTensor(weights, ir.DataType.INT8), "scales": scales}

    def fill_inputs(self, model: ir.Model, new_name: Callable[[str], str]) -> None:
        """See `Replacement.fill_inputs`."""
        nodes = nodes_of(model, OP_TYPE)

        def neutral(node: ir.Node) -> dict[str, np.ndarray]:
            return neutral_inputs_of_layer(node.attributes["n"].as_int(), node.attributes["gated_columns"].as_int())

        uses = _uses(nodes)
        set_missing(nodes, WINDOW_DEFAULTS if uses.windows else {})
        fill_missing(nodes, INPUTS, uses.needed_inputs(), neutral, new_name)

    def function(self, model: ir.Model, opset: int, unpack_once: bool) -> ir.Function:
        """See `Replacement.function`."""
        return w8a8_matmul_function(opset, _uses(nodes_of(model, OP_TYPE)), unpack_once)


def _uses(nodes: list[ir.Node]) -> LayerUses:
    return LayerUses(**uses_of_layers(nodes, INPUTS))
