"""W4A8MatMul: 4-bit weights in groups, with zero points or minimums (format: ops/formats/int4_group.h).

Groups may have subgroups with integer scales and zero points, and then 4, 5 or 6 bits (ops/formats/subgroup.h).
K-quants have subgroups of another kind (ops/formats/k_quant.h).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortolan import _native

from ..find.constants import lazy
from ..find.convolutions import WINDOW_DEFAULTS
from ..find.epilogue import Activation
from ..find.quantized_weight import QuantizedWeight
from ..weights.quantizers.grid import FRACTION_STEPS, Quantization
from .function_body import PANEL_COLUMNS
from .group_function import TILE_INPUTS
from .group_matmul import GroupMatMul, packed_floats
from .linear_function import neutral_inputs_of_layer, set_missing, uses_of_layers
from .nodes import fill_missing, input_of, nodes_of
from .replacement import LayerWeight, PackedTensor, PackedWeight
from .w4a8_matmul_function import INPUTS, MIDDLE_ZERO_POINT, OP_TYPE, Uses, w4a8_matmul_function

K_QUANT_SCALE_BITS = 8  # equals kKQuantScaleBits in ops/formats/k_quant.h


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
        if quantized.symmetric and quantized.k_quant_zero is None:
            q = (q + np.int8(MIDDLE_ZERO_POINT)).view(np.uint8)
        low = np.ascontiguousarray(q if quantized.bits == 4 else q & 15)
        packed = {"weights": PackedTensor(_native.pack_int4_group(low), ir.DataType.UINT8)}
        del low
        if quantized.subgroup_size is not None:
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
        if quantization.k_quant_zero is not None:
            names |= {"subgroup_scale_bits": K_QUANT_SCALE_BITS, "subgroup_zero_point": quantization.k_quant_zero}
        own = [ir.AttrInt64(name, value) for name, value in names.items()]
        return [*super().attributes(k, n, quantization, activation, gated_columns), *own]

    def magnitude(self, weight: LayerWeight) -> np.ndarray:
        """See `GroupMatMul.magnitude`."""
        quantized = weight.quantized
        if quantized is None or quantized.group_size is None or not (quantized.minimum or quantized.fractions):
            return super().magnitude(weight)
        if quantized.k_quant_zero is not None:
            # The kernel adds the products with q and those with minimums.
            shape = quantized.q.shape
            zeros = lazy(lambda: np.zeros(shape.numpy(), np.uint8), ir.DataType.UINT8, ir.Shape(shape.numpy()))
            minimums = dataclasses.replace(quantized, q=zeros).matrix()
            split: np.ndarray = np.abs(weight.matrix - minimums) + np.abs(minimums)
            return split
        # The kernel sums q - 8, then adds 8 * scale and the minimum per group.
        rows = np.abs(quantized.scales.numpy()).astype(np.float32) * 16
        if quantized.minimums is not None:
            rows += np.abs(quantized.minimums.numpy())
        quantized.release()
        whole = np.abs(weight.matrix)
        found: np.ndarray = whole + np.repeat(rows, quantized.group_size, axis=0)[: len(whole)]
        return found

    def fill_inputs(self, model: ir.Model, new_name: Callable[[str], str]) -> None:
        """See `Replacement.fill_inputs`."""
        nodes = nodes_of(model, OP_TYPE)
        uses = _uses(nodes)
        set_missing(nodes, {"subgroup_size": 0, "bits": 4} if uses.subgroups else {})
        if uses.k_quants:
            for node in nodes:
                if "subgroup_zero_point" not in node.attributes:
                    node.attributes.add(ir.AttrInt64("subgroup_scale_bits", 8 - node.attributes["bits"].as_int()))
                    node.attributes.add(ir.AttrInt64("subgroup_zero_point", 0))
        set_missing(nodes, WINDOW_DEFAULTS if uses.windows else {})

        def neutral(node: ir.Node) -> dict[str, np.ndarray]:
            n, k = node.attributes["n"].as_int(), node.attributes["k"].as_int()
            groups = -(-k // node.attributes["group_size"].as_int())
            middle_step = MIDDLE_ZERO_POINT * node.attributes["zero_point_steps"].as_int()
            middle = np.full((-(-n // PANEL_COLUMNS), groups, PANEL_COLUMNS), middle_step, np.uint8)
            scales = input_of(node, INPUTS, "scales")
            assert scales is not None and scales.dtype is not None
            has_zero = input_of(node, INPUTS, "minimums") is not None or _has_subgroups(node)
            return {
                **neutral_inputs_of_layer(n, node.attributes["gated_columns"].as_int()),
                "zero_points": np.zeros(1, np.uint8) if has_zero else middle,
                "minimums": np.zeros(1, scales.dtype.numpy()),
                "subgroup_scales": np.ones(1, np.uint8),
                "high_bits": np.zeros(1, np.uint8),
                "subgroup_minimums": np.ones(1, np.uint8),
            }

        fill_missing(nodes, INPUTS, uses.needed_inputs(), neutral, new_name)

    def function(self, model: ir.Model, opset: int, unpack_once: bool) -> ir.Function:
        """See `Replacement.function`."""
        return w4a8_matmul_function(opset, _uses(nodes_of(model, OP_TYPE)), unpack_once)


def scale_bits(quantization: Quantization) -> int:
    """Return the bits of a subgroup's scale in a byte of subgroup_scales; the other bits are its zero point."""
    return K_QUANT_SCALE_BITS if quantization.k_quant_zero is not None else 8 - quantization.bits


def quantization_of(node: ir.Node) -> Quantization:
    """Return the format of a node's weight."""

    def attribute(name: str, default: int | None) -> int | None:
        found = node.attributes.get(name)
        return default if found is None else found.as_int()

    minimum = input_of(node, INPUTS, "minimums") is not None
    subgroup_size = attribute("subgroup_size", 0) or None
    whole = input_of(node, INPUTS, "zero_points") is None and subgroup_size is None
    # Beside K-quants, `fill_inputs` adds their attributes to all nodes.
    is_k_quant = attribute("subgroup_scale_bits", None) == K_QUANT_SCALE_BITS
    return Quantization(
        attribute("bits", 4) or 4,
        attribute("group_size", None),
        symmetric=whole and not minimum,
        minimum=minimum,
        fractions=attribute("zero_point_steps", 1) == FRACTION_STEPS,
        subgroup_size=subgroup_size,
        k_quant_zero=attribute("subgroup_zero_point", 0) if is_k_quant else None,
    )


def _packed_subgroups(quantized: QuantizedWeight) -> dict[str, PackedTensor]:
    """Return the packed tensors that only weights with subgroups have, and their scales."""
    packed = {}
    if quantized.minimums is None:
        (packed["scales"],) = packed_floats(quantized.scales.numpy())
    else:
        packed["scales"], packed["minimums"] = packed_floats(quantized.scales.numpy(), quantized.minimums.numpy())
    rows: dict[str, np.ndarray] = {}
    if quantized.k_quant_zero is None:
        assert quantized.subgroup_scales is not None and quantized.zero_points is not None
        zero_points = np.left_shift(quantized.zero_points.numpy(), 8 - quantized.bits)
        rows["subgroup_scales"] = zero_points | quantized.subgroup_scales.numpy()
    else:
        for name in ("subgroup_scales", "subgroup_minimums"):
            tensor = quantized.tensors()[name]
            if tensor is not None:
                rows[name] = tensor.numpy().view(np.uint8)
    for name, array in rows.items():
        packed[name] = PackedTensor(_native.pack_group_rows(_padded_subgroups(array, quantized)), ir.DataType.UINT8)
    if quantized.bits > 4:
        q = np.ascontiguousarray(quantized.q.numpy())
        packed["high_bits"] = PackedTensor(_native.pack_high_bits(q, quantized.bits), ir.DataType.UINT8)
    return packed


def _padded_subgroups(rows: np.ndarray, quantized: QuantizedWeight) -> np.ndarray:
    """Return rows, one for each subgroup, with zeros up to whole tiles of inputs."""
    k, n = quantized.q.shape.numpy()
    assert quantized.subgroup_size is not None
    padded = np.zeros((-(-k // TILE_INPUTS) * TILE_INPUTS // quantized.subgroup_size, n), np.uint8)
    padded[: len(rows)] = rows
    return padded


def _has_subgroups(node: ir.Node) -> bool:
    attribute = node.attributes.get("subgroup_size")
    return attribute is not None and attribute.as_int() != 0


def _uses(nodes: list[ir.Node]) -> Uses:
    def any_has(name: str) -> bool:
        return any(input_of(node, INPUTS, name) is not None for node in nodes)

    minimums, subgroups = any_has("minimums"), any(map(_has_subgroups, nodes))
    return Uses(
        zero_points=minimums or subgroups or any_has("zero_points"),
        minimums=minimums,
        subgroups=subgroups,
        high_bits=any_has("high_bits"),
        k_quants=any("subgroup_zero_point" in node.attributes for node in nodes),
        subgroup_minimums=any_has("subgroup_minimums"),
        **uses_of_layers(nodes, INPUTS),
    )
