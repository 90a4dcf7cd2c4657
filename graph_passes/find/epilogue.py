"""Finds the operations after a linear layer that its operator can compute: Y = activation(X W + b) factor + residual.

layer_norm.py finds a following LayerNormalization.

Exporters write an activation as many different subgraphs. ops/epilogue/formula.h recognizes them, here and in the
execution provider. onnxscript's rewriter would need one pattern for each grouping of the factors, and for each
commuted order: 8 for GELU by erf and 64 for GELU by tanh.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import onnx_ir as ir

from ortolan import _native

from .constants import DEFAULT_DOMAINS, constant_tensor, float_array


class Activation(IntEnum):
    """Values of the attribute `activation` of the linear layers' operators."""

    NONE = 0
    RELU = 1  # max(x, 0)
    GELU = 2  # x (1 + erf(x / sqrt 2)) / 2
    GELU_TANH = 3  # x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
    SILU = 4  # x sigmoid(x)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """LayerNormalization over the last axis: (x - mean) / sqrt(variance + epsilon) weight + bias, both constant."""

    weight: ir.Value  # float32 [n]
    bias: ir.Value | None  # float32 [n]; None: zeros
    epsilon: float
    nodes: tuple[ir.Node, ...]  # in graph order; the last one computes the result

    def arrays(self) -> dict[str, np.ndarray]:
        """Return weight and bias under the names of the operators' inputs."""
        weight, bias = (constant_tensor(value) for value in (self.weight, self.bias))
        assert weight is not None
        norm_weight = np.array(float_array(weight))
        return {
            "norm_weight": norm_weight,
            "norm_bias": np.zeros_like(norm_weight) if bias is None else np.array(float_array(bias)),
        }

    @property
    def output(self) -> ir.Value:
        """The output of the last node."""
        return self.nodes[-1].outputs[0]


@dataclass(frozen=True, eq=False)
class Epilogue:
    """The operations activation(value) factor + residual, and LayerNormalization of the result if `norm` is set.

    The residual broadcasts by the rules of ONNX Add. An operator that replaces layer and epilogue must be placed at the
    last of `nodes`, because the residual may be computed only shortly before that node.
    """

    activation: Activation
    residual: ir.Value | None
    nodes: tuple[ir.Node, ...]  # nodes that the operator replaces besides the layer, in graph order
    output: ir.Value  # output of the last node; the layer's output if there are no nodes
    factor: ir.Value | None = None  # has the shape of the layer's output
    norm: LayerNorm | None = None


def describe_epilogue(
    activation: Activation, residual: ir.Value | None, gated: bool = False, norm: bool = False
) -> list[str]:
    """Return the operations in words: ["silu", "gated", "residual", "layer norm"]."""
    parts = {
        activation.name.lower(): activation != Activation.NONE,
        "gated": gated,
        "residual": residual is not None,
        "layer norm": norm,
    }
    return [part for part, there in parts.items() if there]


def find_epilogue(output: ir.Value, factors: Collection[ir.Value] = ()) -> Epilogue:
    """Return the longest epilogue of the linear layer whose output is `output`, without changing the graph.

    An epilogue is an activation, a multiplication by one of `factors`, and an addition; each part is optional. Only
    float32 nodes of the layer's own graph are included, and no intermediate value may have another consumer or be a
    graph output. An Add(y1, y2) of two layers becomes the epilogue of the layer that is replaced first, because it is
    then no longer in the graph.

    Args:
        output: the layer's output.
        factors: values of the same shape as `output`.
    """
    if _element_type(output) != ir.DataType.FLOAT:
        return Epilogue(Activation.NONE, None, (), output)
    return epilogue_behind(output, factors)


def epilogue_behind(output: ir.Value, factors: Collection[ir.Value] = ()) -> Epilogue:
    """Return the epilogue after any value that is known to be float32, like find_epilogue."""
    activation, nodes = _find_activation(output)
    value = nodes[-1].outputs[0] if nodes else output
    factor = None
    multiply = only_consumer(value)
    if multiply is not None and multiply.op_type == "Mul" and multiply.domain in DEFAULT_DOMAINS:
        other = multiply.inputs[1] if multiply.inputs[0] is value else multiply.inputs[0]
        if other is not None and other in factors and only_consumer(other) is multiply:
            factor, nodes, value = other, [*nodes, multiply], multiply.outputs[0]
    residual = None
    add = only_consumer(value)
    if add is not None and add.op_type == "Add" and add.domain in DEFAULT_DOMAINS:
        # The other operand cannot depend on `value`, because the Add is the only consumer of `value`.
        residual = add.inputs[1] if add.inputs[0] is value else add.inputs[0]
        nodes, value = [*nodes, add], add.outputs[0]
    return Epilogue(activation, residual, tuple(in_graph_order(nodes)), value, factor)


def _element_type(output: ir.Value) -> ir.DataType | None:
    """Return the type of a layer's output from its weight, scales or bias, if the model does not declare it."""
    node = output.producer()
    constants = [constant_tensor(value) for value in node.inputs] if node is not None else []
    types = (constant.dtype for constant in constants if constant is not None)
    return next((dtype for dtype in types if dtype.is_floating_point()), None)


def only_consumer(value: ir.Value) -> ir.Node | None:
    """Return the consumer of a value if it is the only one, reads it once and is in the same graph, else None."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.graph is not graph_of(value):
        return None
    return uses[0].node


def graph_of(value: ir.Value) -> ir.Graph | ir.Function | None:
    """Return the graph that a value is computed in."""
    node = value.producer()
    return node.graph if node is not None else None


def in_graph_order(nodes: list[ir.Node]) -> Iterator[ir.Node]:
    """Yield nodes in the order of their graph."""
    if len(nodes) < 2:
        return iter(nodes)
    graph = nodes[0].graph
    assert graph is not None
    return (node for node in graph if node in nodes)


def _find_activation(x: ir.Value) -> tuple[Activation, list[ir.Node]]:
    """Return the activation applied to x, and its nodes in the order of computation."""
    node = only_consumer(x)
    activation = _activation_op(node) if node is not None else Activation.NONE
    if node is not None and activation != Activation.NONE:
        return activation, [node]
    return _find_formula(x)


def _activation_op(node: ir.Node) -> Activation:
    """Return the activation that a node with one input computes, or NONE."""
    if sum(value is not None for value in node.inputs) != 1:
        return Activation.NONE  # for example, FastGelu with a bias
    if node.domain in DEFAULT_DOMAINS:
        if node.op_type == "Gelu":
            approximate = node.attributes["approximate"].as_string() if "approximate" in node.attributes else "none"
            return {"none": Activation.GELU, "tanh": Activation.GELU_TANH}.get(approximate, Activation.NONE)
        if node.op_type == "Swish":
            return Activation.SILU if _alpha(node, 1.0) == 1.0 else Activation.NONE
        return Activation.RELU if node.op_type == "Relu" else Activation.NONE
    if node.domain == "com.microsoft":
        if node.op_type == "QuickGelu":
            return Activation.SILU if _alpha(node, 1.702) == 1.0 else Activation.NONE
        return {"Gelu": Activation.GELU, "FastGelu": Activation.GELU_TANH}.get(node.op_type, Activation.NONE)
    return Activation.NONE


def _alpha(node: ir.Node, default: float) -> float:
    return node.attributes["alpha"].as_float() if "alpha" in node.attributes else default


def _find_formula(x: ir.Value) -> tuple[Activation, list[ir.Node]]:
    """Return the activation that several nodes after x compute together, and these nodes."""
    region = _Region(x)
    code, chosen = _native.find_activation(region.nodes, region.values)
    return Activation(code), [region.originals[index] for index in chosen]


class _Region:
    """The nodes after x, at most MOST_FORMULA_NODES, in the format that _native.find_activation reads."""

    def __init__(self, x: ir.Value) -> None:
        self.nodes: list[tuple[str, list[int], int]] = []
        self.values: list[tuple[float | None, bool]] = []
        self.originals: list[ir.Node] = []
        self._graph = graph_of(x)
        self._numbers: dict[ir.Value, int] = {}
        waiting = [x]
        for value in waiting:
            waiting += self._follow(value)

    def _number(self, value: ir.Value | None) -> int:
        if value is None:
            return -1
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append((_number(value), False))
        return self._numbers[value]

    def _follow(self, value: ir.Value) -> list[ir.Value]:
        """Add the consumers of a value and return their outputs."""
        place, made = self._number(value), []
        is_seen = value.is_graph_output()
        for node in dict.fromkeys(use.node for use in value.uses()):
            if node in self.originals:
                continue
            fits = node.graph is self._graph and node.domain in DEFAULT_DOMAINS and len(node.outputs) == 1
            if not fits or len(self.nodes) == _native.MOST_FORMULA_NODES:
                is_seen = True
                continue
            self.originals.append(node)
            self.nodes.append((node.op_type, [self._number(one) for one in node.inputs], self._number(node.outputs[0])))
            made.append(node.outputs[0])
        self.values[place] = (self.values[place][0], is_seen)
        return made


def _number(value: ir.Value) -> float | None:
    """Return a constant with at most one axis; one with more axes could add axes to the result."""
    tensor = constant_tensor(value)
    if tensor is None or list(tensor.shape) not in ([], [1]) or tensor.dtype == ir.DataType.STRING:
        return None
    return float(tensor.numpy().item())
