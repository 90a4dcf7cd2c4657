"""An MLP computed in integers by one operator: two linear layers and the activation between them.

The first layer's output is rounded to u8, a 256-byte table applies the activation, and the second layer multiplies the
result by its weight (ops/matmul/block_sparse_weight.h). This needs fixed quantization ranges, so pass `ranges` must
have recorded the first layer's output and the activation's output.
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

# A chain that consists only of these operators is not an activation function.
_NO_ACTIVATION = ("Cast", "DequantizeLinear", "Div", "Identity", "Mul", "QuantizeLinear")
_SHAPE_OPERATORS = ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_GRID = 1 << 16  # number of points at which the activation is sampled to choose its output range


@dataclass(frozen=True, eq=False)
class Mlp:
    """Two linear layers with an activation between them: layer(activation(hidden(x)))."""

    hidden: Linear
    between: Chain  # all nodes between the two layers: the activation and the reshapes around it
    activation: Chain
    layer: Linear


@dataclass(frozen=True, eq=False)
class ByteTable:
    """The activation as a lookup table: u8 inputs of range x, u8 outputs of range y."""

    table: np.ndarray  # u8 [256]
    x: FixedRange
    y: FixedRange


@dataclass(frozen=True, eq=False)
class HiddenLayer:
    """The data that an operator needs to also compute the hidden layer of an MLP."""

    mlp: Mlp
    weight: LayerWeight  # x_range is set
    table: ByteTable


def find_mlps(linears: Sequence[Linear], graph: ir.Graph) -> tuple[dict[Linear, Mlp], dict[Linear, str]]:
    """Find the MLPs of the main graph whose intermediate values have no other consumer.

    Returns:
        The float32 MLPs by their hidden layer; and for each other layer that is followed by element-wise operators, why
        it is not a hidden layer.
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
            refused[hidden] = "the layer's output has more than one consumer"
            continue
        after = reshapes_behind(chain.output, hidden.n)
        end = after[-1].outputs[0] if after else chain.output
        layer = by_input.get(end)
        if layer is None or layer.node.graph is not graph:
            takers = sorted({use.node.op_type for use in end.uses()})
            refused[hidden] = (
                f"the activation's output goes to {', '.join(takers) or 'an output of the model'}, not to a layer"
            )
        elif len(end.uses()) > 1 or end.is_graph_output():
            refused[hidden] = "the activation's output has consumers besides the next layer"
        elif (before or after) and (hidden.node.op_type, layer.node.op_type) != ("Gemm", "Gemm"):
            refused[hidden] = "there is a reshape between the layers, which is supported for Gemm only"
        else:
            found[hidden] = Mlp(hidden, Chain(hidden.output, (*before, *chain.nodes, *after), end), chain, layer)
    return found, refused


def reshapes_behind(x: ir.Value, width: int) -> list[ir.Node]:
    """Return the chain of shape operators after x that keep rows of this width and have a single consumer each."""
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
    """Return the last dimension of a shape operator's output, if it is known."""
    shape = node.outputs[0].shape
    if shape is not None and len(shape) and isinstance(shape[-1], int):
        return shape[-1]
    target = constant_tensor(node.inputs[1]) if len(node.inputs) > 1 else None
    return int(target.numpy()[-1]) if node.op_type == "Reshape" and target is not None and target.size else None


def make_byte_table(mlp: Mlp, activations: Mapping[str, np.ndarray], opsets: Mapping[str, int]) -> ByteTable | str:
    """Make the activation's table for values in the recorded range.

    Args:
        mlp: The two layers.
        activations: Recorded samples, by value name.
        opsets: Opset imports.

    Returns:
        The table, or the reason why no table can be made.
    """
    outputs = activations[mlp.hidden.output.name or ""]
    grid = np.linspace(min(outputs.min(), 0), max(outputs.max(), 0), _GRID, dtype=np.float32)
    try:
        results = evaluate(mlp.activation, grid, opsets)
        if not np.isfinite(results).all():
            return f"the activation returns NaN or infinity for inputs between {grid[0]:g} and {grid[-1]:g}"
        x = choose_range(outputs, lambda values: np.interp(values, grid, results))
        y = choose_range(activations[mlp.layer.x.name or ""])
        table = make_quantized_table(mlp.activation, float(x.scale), x.zero_point, float(y.scale), y.zero_point, opsets)
    except NoTableError as error:
        return str(error)
    return ByteTable(table, x, y)
