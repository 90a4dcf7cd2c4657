"""Two layers with an activation between them in one operator: the hidden layer of an MLP, in whole numbers.

What the first layer puts out is rounded to u8, a table of 256 bytes makes the activation of it, and the second layer
multiplies that (ops/matmul/block_sparse_weight.h). This takes fixed ranges, so pass `ranges` must have recorded both
values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..find.constants import constant_tensor
from ..find.linear import Linear
from ..find.lut import Chain, NoTableError, evaluate, find_chain, find_cone, graph_order, make_quantized_table
from ..weights.quantizers.fixed_range import FixedRange, choose_range
from .replacement import LayerWeight

# Alone, these make no hidden layer of what is in front of them.
_NO_ACTIVATION = ("Cast", "DequantizeLinear", "Div", "Identity", "Mul", "QuantizeLinear")
_SHAPE_OPERATORS = ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_GRID = 1 << 16  # numbers that the chain is computed for, to choose a range by what becomes of them


@dataclass(frozen=True, eq=False)
class Mlp:
    """layer(activation(hidden(x)))"""

    hidden: Linear
    between: Chain  # all nodes between the layers: the activation's, and those that only reshape
    activation: Chain
    layer: Linear


@dataclass(frozen=True, eq=False)
class ByteTable:
    """What becomes of the hidden layer's output: numbers of range x are looked up, and are then of range y."""

    table: np.ndarray  # u8 [256]
    x: FixedRange
    y: FixedRange


@dataclass(frozen=True, eq=False)
class HiddenLayer:
    """What an operator needs to compute the hidden layer as well."""

    mlp: Mlp
    weight: LayerWeight  # with a range
    table: ByteTable


def find_mlps(linears: Sequence[Linear], graph: ir.Graph) -> tuple[dict[Linear, Mlp], dict[Linear, str]]:
    """The MLPs of the model's main graph, float32, by their hidden layer: nothing else sees what is computed inside.

    And why other layers, with element-wise operators behind them, are no hidden layers.
    """
    order = graph_order(graph)
    by_input = {linear.x: linear for linear in linears}
    found: dict[Linear, Mlp] = {}
    refused: dict[Linear, str] = {}
    for hidden in linears:
        if hidden.node.graph is not graph or hidden.dtype != ir.DataType.FLOAT:
            continue
        before = reshapes_behind(hidden.output, hidden.n)
        start = before[-1].outputs[0] if before else hidden.output
        cone = find_cone(start, graph, order)
        if not any(node.op_type not in _NO_ACTIVATION for node in cone.nodes):
            continue
        chain = find_chain(cone)
        if chain is None:
            refused[hidden] = "more than one operator takes what the layer puts out"
            continue
        after = reshapes_behind(chain.output, hidden.n)
        end = after[-1].outputs[0] if after else chain.output
        layer = by_input.get(end)
        if layer is None or layer.node.graph is not graph:
            takers = sorted({use.node.op_type for use in end.uses()})
            refused[hidden] = f"the activation goes to {', '.join(takers) or 'an output of the model'}, not to a layer"
        elif len(end.uses()) > 1 or end.is_graph_output():
            refused[hidden] = "not only the next layer takes the activation"
        elif (before or after) and (hidden.node.op_type, layer.node.op_type) != ("Gemm", "Gemm"):
            refused[hidden] = "it is reshaped between the layers, which is understood for Gemm only"
        else:
            found[hidden] = Mlp(hidden, Chain(hidden.output, (*before, *chain.nodes, *after), end), chain, layer)
    return found, refused


def reshapes_behind(x: ir.Value, width: int) -> list[ir.Node]:
    """Shape operators one behind the other that keep rows of this width; nothing else sees x or what is between."""
    found: list[ir.Node] = []
    while len(x.uses()) == 1 and not x.is_graph_output():
        node = next(iter(x.uses())).node
        y = node.outputs[0] if node.outputs else None
        if node.op_type not in _SHAPE_OPERATORS or node.inputs[0] is not x or y is None or _width(node) != width:
            break
        found.append(node)
        x = y
    return found


def _width(node: ir.Node) -> int | None:
    """The last dimension of what a shape operator puts out, if it is known."""
    shape = node.outputs[0].shape
    if shape is not None and len(shape) and isinstance(shape[-1], int):
        return shape[-1]
    target = constant_tensor(node.inputs[1]) if len(node.inputs) > 1 else None
    return int(target.numpy()[-1]) if node.op_type == "Reshape" and target is not None and target.size else None


def make_byte_table(mlp: Mlp, activations: Mapping[str, np.ndarray], opsets: Mapping[str, int]) -> ByteTable | str:
    """The table of the activation for values like these, or why there is none.

    activations: numbers of values, by name. opsets: the model's.
    """
    outputs = activations[mlp.hidden.output.name or ""]
    grid = np.linspace(min(outputs.min(), 0), max(outputs.max(), 0), _GRID, dtype=np.float32)
    try:
        results = evaluate(mlp.activation, grid, opsets)
        if not np.isfinite(results).all():
            return f"the activation puts out NaN or infinity for inputs between {grid[0]:g} and {grid[-1]:g}"
        x = choose_range(outputs, lambda numbers: np.interp(numbers, grid, results))
        y = choose_range(activations[mlp.layer.x.name or ""])
        table = make_quantized_table(mlp.activation, float(x.scale), x.zero_point, float(y.scale), y.zero_point, opsets)
    except NoTableError as error:
        return str(error)
    return ByteTable(table, x, y)
