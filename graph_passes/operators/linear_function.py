"""The part of the ONNX functions that all linear operators share: everything after X W (ops/matmul/linear_plan.h)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..find.convolutions import WINDOW_DEFAULTS
from ..find.epilogue import Activation
from ..names import ORTOLAN_DOMAIN
from .function_body import FunctionBody
from .nodes import input_of

NORM_INPUTS = ("norm_weight", "norm_bias")
_EPSILON = "norm_epsilon"


@dataclass(frozen=True, kw_only=True)
class LayerUses:
    """The features after X W that the nodes of a model use.

    Nodes without a feature that other nodes use get neutral inputs: `neutral_inputs_of_layer`.
    """

    activations: frozenset[Activation] = frozenset({Activation.NONE})
    residual: bool = False
    gated: bool = False
    norm: bool = False  # some nodes have a LayerNormalization
    windows: bool = False  # some nodes have the attributes of windows (find/convolutions.py)

    def needed_inputs(self) -> set[str]:
        """Return the inputs that all nodes must have."""
        return ({"residual"} if self.residual else set()) | (set(NORM_INPUTS) if self.norm else set())


def uses_of_layers(nodes: Sequence[ir.Node], input_names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of LayerUses for nodes of an operator with these inputs."""
    return {
        "activations": frozenset(Activation(node.attributes["activation"].as_int()) for node in nodes),
        "residual": any(input_of(node, input_names, "residual") is not None for node in nodes),
        "gated": any(node.attributes["gated_columns"].as_int() != 0 for node in nodes),
        "norm": any(node.attributes[_EPSILON].as_float() >= 0 for node in nodes),
        "windows": any("window" in node.attributes for node in nodes),
    }


def neutral_inputs_of_layer(n: int, gated_columns: int = 0) -> dict[str, np.ndarray]:
    """Return neutral constants for inputs that a node with n weight columns lacks but must have."""
    columns = gated_columns or n
    return {
        "bias": np.zeros(n, np.float32),
        "residual": np.zeros(1, np.float32),
        # One element per column, because ONNX Runtime fuses the formula into a node that does not broadcast its weight.
        "norm_weight": np.ones(columns, np.float32),
        "norm_bias": np.zeros(columns, np.float32),
    }


def set_missing(nodes: Sequence[ir.Node], attributes: Mapping[str, int]) -> None:
    """Set attributes that nodes lack, because an ONNX function cannot test whether a node has an attribute."""
    for node in nodes:
        for name, value in attributes.items():
            if name not in node.attributes:
                node.attributes.add(ir.AttrInt64(name, value))


def rows_of_product(body: FunctionBody, x: ir.Value, uses: LayerUses) -> ir.Value:
    """Return the rows that are multiplied by W: X [..., k], or windows over X [..., frames, k / window]."""
    if not uses.windows:
        return x
    op = body.op
    window, stride, begin, end = (body.attribute(name) for name in WINDOW_DEFAULTS)
    k, shape = body.attribute("k"), op("Shape", x)
    # Ones replace the axes that an X of rank 1 lacks.
    full = op("Concat", body.ints(1, 1), shape, axis=0)
    sequences = op("ReduceProd", op("Slice", full, body.ints(0), body.ints(-2)), keepdims=0)
    frames = op("Squeeze", op("Slice", full, body.ints(-2), body.ints(-1)), body.ints(0))
    rows = op("Reshape", x, body.shape(sequences, frames, op("Div", k, window)))
    padded = op("Pad", rows, body.shape(0, begin, 0, 0, end, 0))
    room = op("Sub", op("Add", frames, op("Add", begin, end)), window)
    count = op("Add", op("Div", room, stride), body.integer(1))
    starts = op("Mul", op("Range", body.integer(0), count, body.integer(1)), stride)
    steps = op("Range", body.integer(0), window, body.integer(1))
    indices = op("Add", op("Unsqueeze", starts, body.ints(1)), op("Unsqueeze", steps, body.ints(0)))
    # An X of rank 1 is [k].
    tail = op("Slice", body.shape(count, k), op("Neg", op("Shape", shape)), body.ints(2))
    outer = op("Slice", shape, body.ints(0), body.ints(-2))
    return op("Reshape", op("Gather", padded, indices, axis=1), op("Concat", outer, tail, axis=0))


def linear_function(
    op_type: str,
    opset: int,
    body: FunctionBody,
    inputs: Mapping[str, ir.Value],
    y: ir.Value,
    attributes: Sequence[str],
    uses: LayerUses,
) -> ir.Function:
    """Return the ONNX function of a linear operator. attributes: its integer attributes without those of windows."""
    if uses.windows:
        attributes = (*attributes, *WINDOW_DEFAULTS)
    graph = ir.Graph(list(inputs.values()), [y], nodes=body.nodes, opset_imports={"": opset}, name=op_type)
    kinds = dict.fromkeys(attributes, ir.AttributeType.INT) | {_EPSILON: ir.AttributeType.FLOAT}
    listed = [ir.Attr(name, kind, None) for name, kind in kinds.items()]
    return ir.Function(ORTOLAN_DOMAIN, op_type, graph=graph, attributes=listed)


def end_of_layer(body: FunctionBody, product: ir.Value, inputs: Mapping[str, ir.Value], uses: LayerUses) -> ir.Value:
    """Add bias, activation, gate, residual and LayerNormalization to the product X W (ops/matmul/linear_plan.h)."""
    op = body.op
    p = op("Add", product, _bias_or_zeros(body, inputs["bias"]))
    if uses.gated:
        # For nodes without a gate, columns of ones are appended, so that the gate multiplies by 1.
        n, gated_columns = body.attribute("n"), body.attribute("gated_columns")
        is_gated = op("Cast", gated_columns, to=ir.DataType.BOOL)
        columns = op("Where", is_gated, gated_columns, n)
        begin = op("Where", is_gated, op("Div", n, body.integer(2)), n)
        ones = op("ConstantOfShape", op("Shape", p), value=ir.tensor(np.ones(1, np.float32)))
        last = body.ints(-1)
        end = op("Add", begin, columns)
        factor = op("Slice", op("Concat", p, ones, axis=-1), body.vector(begin), body.vector(end), last)
        p = op("Slice", p, body.ints(0), body.vector(columns), last)
    y = body.by_attribute("activation", {int(kind): activate(body, p, kind) for kind in sorted(uses.activations)})
    if uses.gated:
        y = op("Mul", y, factor)
    if uses.residual:
        y = op("Add", y, inputs["residual"])
    if uses.norm:
        y = _normalized(body, inputs, y)
    y.name = "Y"
    return y


def _normalized(body: FunctionBody, inputs: Mapping[str, ir.Value], y: ir.Value) -> ir.Value:
    """Normalize y, unless norm_epsilon is -1."""
    epsilon = body.float_attribute(_EPSILON)
    z = body.layer_norm(y, inputs["norm_weight"], inputs["norm_bias"], epsilon)
    return body.op("Where", body.op("Less", epsilon, body.number(0)), y, z)


def _bias_or_zeros(body: FunctionBody, bias: ir.Value) -> ir.Value:
    """Return the function's input bias [n], or zeros if it is missing; n is an attribute."""
    # Gemm may lack its input C, unlike Add. With k = 0, Gemm returns C, or zeros if C is missing.
    zeros = ir.tensor(np.zeros(1, np.float32))
    no_rows = body.op("ConstantOfShape", body.shape(1, body.attribute("n")), value=zeros)
    return body.op(
        "Reshape", body.op("Gemm", body.constant(np.zeros((1, 1), np.float32)), no_rows, bias), body.ints(-1)
    )


def activate(body: FunctionBody, y: ir.Value, activation: Activation) -> ir.Value:
    """Apply an activation to y."""
    op = body.op
    if activation == Activation.RELU:
        return op("Relu", y)
    if activation == Activation.SILU:
        return op("Mul", y, op("Sigmoid", y))
    if activation == Activation.GELU:
        twice_phi = op("Add", op("Erf", op("Mul", y, body.number(0.5**0.5))), body.number(1))
    elif activation == Activation.GELU_TANH:
        cube = op("Mul", op("Mul", y, y), op("Mul", y, body.number(0.044715)))
        inner = op("Mul", op("Add", y, cube), body.number((2 / np.pi) ** 0.5))
        twice_phi = op("Add", op("Tanh", inner), body.number(1))
    else:
        return y
    return op("Mul", op("Mul", y, body.number(0.5)), twice_phi)
