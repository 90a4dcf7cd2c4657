"""Several linear layers with the same input, joined in one operator.

Two layers may form a gated linear unit, activation(x Wg + bg) (x Wu + bu): the operator's weight is [Wg Wu], each
padded with zero columns to whole panels (ops/matmul/linear_plan.h). They may be the halves of one layer in the model,
as in ModernBERT and Phi-3. Three layers may be query, key and value of one attention, which reads them from one tensor
(ops/nomad_attention/op.cc).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..files.spill import TensorSpill
from ..find.epilogue import Epilogue, Epilogues
from ..find.linear import Linear
from ..find.quantized_weight import QuantizedWeight
from ..weights.quantizers.grid import Quantization
from .function_body import PANEL_COLUMNS
from .nodes import input_of, nodes_of
from .nomad_attention_function import INPUTS, OP_TYPE
from .replacement import LayerWeight


@dataclass(frozen=True, eq=False)
class PackedQkv:
    """The query, key and value layers of one attention."""

    attention: ir.Node
    layers: tuple[Linear, ...]


@dataclass(frozen=True, eq=False)
class Halves:
    """A layer that is a gated linear unit.

    One half of its columns, perhaps after an activation, multiplies the other.
    """

    columns: tuple[slice, slice]  # the columns of the gate, and the columns that it multiplies
    epilogue: Epilogue  # `nodes` includes the Split of the layer's output

    @property
    def in_place(self) -> bool:
        """True if the operator's weight has the layer's columns in the same order, without padding."""
        return bool(self.columns[0].start == 0 and self.columns[0].stop % PANEL_COLUMNS == 0)

    def packed_columns(self) -> np.ndarray:
        """Return for each of the layer's columns its index in the operator's weight."""
        width = self.columns[0].stop - self.columns[0].start
        positions = np.empty(2 * width, np.int64)
        for where, packed in zip(self.columns, columns_of([width, width]), strict=True):
            positions[where] = np.arange(packed.start, packed.stop)
        return positions


def find_gated(linears: Sequence[Linear], epilogues: Epilogues) -> dict[Linear, Linear]:
    """Find pairs (gate -> multiplied layer) of layers whose outputs are multiplied.

    An activation may follow the gate.
    """
    by_input: dict[tuple[ir.Value, int], list[Linear]] = defaultdict(list)
    for linear in linears:
        if linear.dtype == ir.DataType.FLOAT:
            by_input[linear.x, linear.n].append(linear)
    pairs: dict[Linear, Linear] = {}
    for siblings in by_input.values():
        by_output = {linear.output: linear for linear in siblings}
        for gate in siblings:
            others = [value for value in by_output if value is not gate.output]
            factor = epilogues.find(gate.output, gate.n, others).factor
            if factor is not None and gate not in pairs.values() and by_output[factor] not in pairs:
                pairs[gate] = by_output[factor]
    return pairs


def find_halves(linear: Linear, epilogues: Epilogues) -> Halves | None:
    """Return the halves of a layer if they form a gated linear unit, else None. The graph is not changed."""
    if linear.dtype != ir.DataType.FLOAT:
        return None
    found = epilogues.halves(linear)
    if found is None:
        return None
    *values, nodes = found
    middle = linear.n // 2
    columns = slice(0, middle), slice(middle, linear.n)
    for gate, up in ((0, 1), (1, 0)):
        epilogue = epilogues.find(values[gate], middle, [values[up]])
        if epilogue.factor is not None:
            whole = dataclasses.replace(epilogue, nodes=(*nodes, *epilogue.nodes))
            return Halves((columns[gate], columns[up]), whole)
    return None


def find_packed_qkv(linears: Sequence[Linear], model: ir.Model) -> list[PackedQkv]:
    """Find the query, key and value layers of all NoMADAttention nodes.

    Returns:
        One entry per attention node, or an empty list: either all nodes read packed inputs or no node does
            (nomad_attention_function.py).
    """
    by_output = {linear.output: linear for linear in linears if linear.dtype == ir.DataType.FLOAT}
    found = []
    for attention in nodes_of(model, OP_TYPE):
        if len(attention.inputs) > len(INPUTS):  # the node has a cache
            return []
        values = [input_of(attention, INPUTS, name) for name in ("query", "key", "value")]
        layers = [by_output[value] for value in values if value in by_output]
        alone = all(value is not None and len(value.uses()) == 1 and not value.is_graph_output() for value in values)
        if len(set(layers)) < 3 or not alone or len({layer.x for layer in layers}) > 1:
            return []
        if any(layer.node.graph is not attention.graph for layer in layers):
            return []
        found.append(PackedQkv(attention, tuple(layers)))
    return found


def take_packed(attention: ir.Node, packed: ir.Value) -> None:
    """Make a NoMADAttention read query, key and value from one tensor."""
    attention.replace_input_with(INPUTS.index("query"), packed)
    attention.resize_inputs(INPUTS.index("mask") + 1)


def padded_columns(n: int) -> int:
    """Return n rounded up to whole panels."""
    return -(-n // PANEL_COLUMNS) * PANEL_COLUMNS


def can_join(quantizations: Sequence[Quantization | None]) -> bool:
    """Return whether one operator can hold weights with these quantizations."""
    return len(set(map(_kind, quantizations))) == 1


def _kind(quantization: Quantization | None) -> tuple[int | None, ...] | None:
    if quantization is None:
        return None
    return (
        quantization.bits,
        quantization.group_size,
        quantization.symmetric or _may_lack_zero_points(quantization),
        quantization.minimum,
        quantization.zero_point_steps,
        quantization.subgroup_size,
        quantization.k_quant_zero,
    )


def _may_lack_zero_points(quantization: Quantization) -> bool:
    """Return whether weights in this format may lack zero points, which then count as 0."""
    return quantization.bits == 8 and not quantization.minimum


def join_weights(
    weights: Sequence[LayerWeight], spill: TensorSpill, name: str, columns: Sequence[slice] | None = None
) -> LayerWeight:
    """Return one weight with the columns of all layers; see `can_join`.

    Quantized tensors go to `spill`, with names that start with `name`. columns: the columns to use from each layer;
    None: all.
    """
    columns = [slice(None)] * len(weights) if columns is None else columns
    matrix = join_columns([weight.matrix[:, where] for weight, where in zip(weights, columns, strict=True)])
    quantized = [weight.quantized for weight in weights if weight.quantized is not None]
    whole = _join_quantized(quantized, columns, spill, name) if quantized else None
    return LayerWeight(matrix, whole, weights[0].x_range)


def _join_quantized(
    parts: Sequence[QuantizedWeight], columns: Sequence[slice], spill: TensorSpill, name: str
) -> QuantizedWeight:
    def joined(attribute: str) -> ir.ExternalTensor | None:
        tensors = [getattr(part, attribute) for part in parts]
        if all(tensor is None for tensor in tensors):
            return None
        whole = [
            np.zeros(part.scales.shape.numpy(), np.int8) if tensor is None else tensor.numpy()
            for part, tensor in zip(parts, tensors, strict=True)
        ]
        array = join_columns([part[..., where] for part, where in zip(whole, columns, strict=True)])
        del whole
        return spill.add(f"{name}.{attribute}", array, ir.DataType.from_numpy(array.dtype))

    whole = parts[0].with_tensors({attribute: joined(attribute) for attribute in parts[0].tensors()})
    for part in parts:
        part.release()
    return whole


def columns_of(widths: Sequence[int]) -> list[slice]:
    """Return each layer's columns in the operator's weight, for layers of these widths."""
    room = [padded_columns(width) for width in widths] if len(widths) == 2 else widths
    starts = itertools.accumulate(room, initial=0)
    return [slice(start, start + width) for start, width in zip(starts, widths, strict=False)]


def join_columns(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join arrays [..., n], one per layer, as in the operator's weight, with zeros between them."""
    columns = columns_of([part.shape[-1] for part in parts])
    end = columns[-1].stop if len(parts) != 2 else 2 * columns[1].start
    joined = np.zeros((*parts[0].shape[:-1], end), np.result_type(*parts))
    for part, where in zip(parts, columns, strict=True):
        joined[..., where] = part
    return joined
