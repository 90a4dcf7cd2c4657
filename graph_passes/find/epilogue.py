"""Finds operations after a linear layer that fit its epilogue: Y = activation(X W + b) factor + residual.

layer_norm.py also finds the LayerNormalization after that, for operators that compute it.

Exporters write one activation in many ways: ops/epilogue/formula.h recognizes the activation of some nodes, for the
execution provider too. (onnxscript's rewriter would need a pattern for each grouping of the factors, and would commute
each into 8 for GELU by erf and 64 by tanh.)
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
    """The operator's attribute `activation`."""

    NONE = 0
    RELU = 1  # max(x, 0)
    GELU = 2  # x (1 + erf(x / sqrt 2)) / 2
    GELU_TANH = 3  # x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
    SILU = 4  # x sigmoid(x)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """Over the last axis, by constants: (x - mean) / sqrt(variance + epsilon) weight + bias."""

    weight: ir.Value  # float32 [n]
    bias: ir.Value | None  # the same; none: zeros
    epsilon: float
    nodes: tuple[ir.Node, ...]  # in graph order; the last one puts out the result

    def arrays(self) -> dict[str, np.ndarray]:
        """Return weight and bias by the names of our operators' inputs."""
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
    """The operations activation(value) factor + residual, with broadcasting by the rules of ONNX Add.

    With a norm, the LayerNormalization of the result. An operator that replaces layer and epilogue must be placed at
    the last of `nodes`, because the residual may be computed before it. Constants of the nodes may become unused.
    """

    activation: Activation
    residual: ir.Value | None
    nodes: tuple[ir.Node, ...]  # the nodes that it replaces, in graph order
    output: ir.Value  # of the last node, or of the layer without nodes
    factor: ir.Value | None = None  # of the value's shape
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
    """Return the longest epilogue of the linear layer whose output is `output`.

    It is an activation, a multiplication by one of `factors`, and an addition; each part is optional. factors: values
    of the same shape as `output`.

    Only float32 nodes of the layer's own graph count, and no value in between may have another consumer or be an output
    of the graph. Nothing is changed. The graph is read in its present state, so an Add that was replaced with another
    layer is not found again: for Add(y1, y2) of two layers, the first layer to be replaced takes it.
    """
    if _element_type(output) != ir.DataType.FLOAT:
        return Epilogue(Activation.NONE, None, (), output)
    return epilogue_behind(output, factors)


def epilogue_behind(output: ir.Value, factors: Collection[ir.Value] = ()) -> Epilogue:
    """The same of any value that is known to be float32."""
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
        # The value is used once, so that nothing else, and so not the other operand, is computed from it.
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
    """The node in the value's own graph that uses it, once, if there is nothing else that sees it."""
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
    """The activation and its nodes, the last one last."""
    node = only_consumer(x)
    activation = _activation_op(node) if node is not None else Activation.NONE
    if node is not None and activation != Activation.NONE:
        return activation, [node]
    return _find_formula(x)


def _activation_op(node: ir.Node) -> Activation:
    """The activation that this one operator computes of its only input, or NONE."""
    if sum(value is not None for value in node.inputs) != 1:
        return Activation.NONE  # FastGelu with a bias
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
    """The activation that the nodes behind x compute together."""
    region = _Region(x)
    code, chosen = _native.find_activation(region.nodes, region.values)
    return Activation(code), [region.originals[index] for index in chosen]


class _Region:
    """The nodes after a value in the form of find_activation, at most the size of a formula."""

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
        """Adds the nodes that read the value: what they make."""
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
    """Return a constant scalar; a constant with several axes could add axes to the result."""
    tensor = constant_tensor(value)
    if tensor is None or list(tensor.shape) not in ([], [1]) or tensor.dtype == ir.DataType.STRING:
        return None
    return float(tensor.numpy().item())
