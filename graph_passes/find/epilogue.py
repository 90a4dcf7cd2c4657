"""Finds what follows a linear layer and can be computed in its epilogue: Y = activation(X W + b) factor + residual.

For operators that compute it too, layer_norm.py finds the LayerNormalization behind that.

Exporters write one activation in many ways: TorchScript GELU as x (1 + erf(x / sqrt 2)) 0.5, others as
(x 0.5) (1 + erf(...)), tf2onnx multiplies by sqrt 0.5. These orders are not listed here. The nodes behind a layer are
worked out as polynomials in x, erf(u), tanh(u) and sigmoid(u), and an activation is told by its coefficients, so that
every order of factors and terms is found, and nothing else. (onnxscript's rewriter would need a pattern for each
grouping of the factors, each of which it commutes into 8 for GELU by erf and 64 by tanh.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import onnx_ir as ir

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
        """By the names of our operators' inputs."""
        weight, bias = (constant_tensor(value) for value in (self.weight, self.bias))
        assert weight is not None
        norm_weight = np.array(float_array(weight))
        return {
            "norm_weight": norm_weight,
            "norm_bias": np.zeros_like(norm_weight) if bias is None else np.array(float_array(bias)),
        }

    @property
    def output(self) -> ir.Value:
        return self.nodes[-1].outputs[0]


@dataclass(frozen=True, eq=False)
class Epilogue:
    """activation(value) factor + residual, by the rules of ONNX Add: the residual may broadcast against the value. With
    a norm, the LayerNormalization of that.

    Whoever puts one operator in the place of layer and epilogue must put it where the last of `nodes` stands: the
    residual may be computed between the layer and there. Constants of the nodes may be without use afterwards.
    """

    activation: Activation
    residual: ir.Value | None
    nodes: tuple[ir.Node, ...]  # what it takes the place of, in graph order
    output: ir.Value  # that of the last node, or of the layer if there is none
    factor: ir.Value | None = None  # of the value's shape
    norm: LayerNorm | None = None


def describe_epilogue(
    activation: Activation, residual: ir.Value | None, gated: bool = False, norm: bool = False
) -> list[str]:
    """For people: ["silu", "gated", "residual", "layer norm"]."""
    parts = {
        activation.name.lower(): activation != Activation.NONE,
        "gated": gated,
        "residual": residual is not None,
        "layer norm": norm,
    }
    return [part for part, there in parts.items() if there]


# A sum of products: factors, sorted -> coefficient. "x" is the layer's value, a function's name stands for its value at
# the one argument that activations have, below; () is the constant term.
_Polynomial = dict[tuple[str, ...], float]

_X: _Polynomial = {("x",): 1.0}
_TANH_SCALE = math.sqrt(2 / math.pi)
_ARGUMENTS: dict[str, _Polynomial] = {
    "Erf": {("x",): math.sqrt(0.5)},
    "Tanh": {("x",): _TANH_SCALE, ("x", "x", "x"): 0.044715 * _TANH_SCALE},
    "Sigmoid": _X,
}
_ACTIVATIONS: dict[Activation, _Polynomial] = {
    Activation.GELU: {("x",): 0.5, ("Erf", "x"): 0.5},
    Activation.GELU_TANH: {("x",): 0.5, ("Tanh", "x"): 0.5},
    Activation.SILU: {("Sigmoid", "x"): 1.0},
}
_MAXIMUM_DEGREE = 3

# Room for the product of a few numbers, each rounded to float32 (by 2^-24 = 6e-8), and for those that people write with
# seven digits. It moves an activation by less than 1e-6 |x|, as the roundings of a formula's float32 operations do.
# Numbers that were rounded to float16 or bfloat16 (by 5e-4, 4e-3) make another function.
_TOLERANCE = 1e-6


def find_epilogue(output: ir.Value, factors: Collection[ir.Value] = ()) -> Epilogue:
    """The longest epilogue of the linear layer whose output is `output`: an activation, a multiplication by one of
    `factors`, an addition, some of these in this order, or nothing. factors: values of the same shape as `output`.

    Only float32, only nodes of the layer's own graph, and only where nothing else sees a value in between: none has
    another consumer or is an output of the graph. Changes nothing, and asks the graph as it is now, so a layer whose
    Add another layer has taken meanwhile gets none.

    Of Add(y1, y2) with two layers' values, both find the Add: the first to be replaced takes it.
    """
    if _element_type(output) != ir.DataType.FLOAT:
        return Epilogue(Activation.NONE, None, (), output)
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
    """Of a layer's output, which has the type of the weight, its scales or the bias. Models need not say it."""
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
    node = value.producer()
    return node.graph if node is not None else None


def in_graph_order(nodes: list[ir.Node]) -> Iterator[ir.Node]:
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
    """Grows a region of nodes from x until one value is all that leaves it and that value is an activation of x."""
    known = {x: _X}
    nodes: list[ir.Node] = []
    newest = x
    waiting: list[ir.Node] = []  # outside of the region, using a value of it
    while not newest.is_graph_output():
        waiting += [use.node for use in newest.uses() if use.node not in waiting]
        node, polynomial = next(
            ((node, found) for node in waiting if (found := _evaluate(node, known)) is not None), (None, None)
        )
        if node is None or polynomial is None or node.graph is not graph_of(x):
            break
        waiting.remove(node)
        nodes.append(node)
        if not waiting:
            for activation, formula in _ACTIVATIONS.items():
                if _same(polynomial, formula):
                    return activation, nodes
        newest = node.outputs[0]
        known[newest] = polynomial
    return Activation.NONE, []


def _evaluate(node: ir.Node, known: dict[ir.Value, _Polynomial]) -> _Polynomial | None:
    """The node's output, or None if it is no polynomial, or is computed from something that is not known (yet)."""
    if node.domain not in DEFAULT_DOMAINS:
        return None
    first = _operand(node.inputs[0], known) if node.inputs else None
    if first is None:
        return None
    if node.op_type in _ARGUMENTS:
        return {(node.op_type,): 1.0} if _same(first, _ARGUMENTS[node.op_type]) else None
    second = _operand(node.inputs[1], known) if len(node.inputs) == 2 else None
    if second is None:
        return None
    number = second[()] if second.keys() == {()} else None
    match node.op_type:
        case "Add":
            return {term: first.get(term, 0.0) + second.get(term, 0.0) for term in first | second}
        case "Mul":
            return _product(first, second)
        case "Div" if number is not None:
            return {term: coefficient / number for term, coefficient in first.items()}
        case "Pow" if number == 2:
            return _product(first, first)
        case "Pow" if number == 3:
            square = _product(first, first)
            return _product(square, first) if square is not None else None
    return None


def _operand(value: ir.Value | None, known: dict[ir.Value, _Polynomial]) -> _Polynomial | None:
    if value is None or value in known:
        return known[value] if value is not None else None
    tensor = constant_tensor(value)
    # Of more axes than one, a number might add axes to the result.
    if tensor is None or list(tensor.shape) not in ([], [1]):
        return None
    number = float(tensor.numpy().item())
    # All numbers of activations are positive. Without others nothing can cancel out, and so the order of operations,
    # which polynomials forget, changes results by no more than roundings.
    return {(): number} if 0 < number < math.inf else None


def _product(a: _Polynomial, b: _Polynomial) -> _Polynomial | None:
    product: _Polynomial = {}
    for left, p in a.items():
        for right, q in b.items():
            term = tuple(sorted(left + right))
            if len(term) > _MAXIMUM_DEGREE:
                return None
            product[term] = product.get(term, 0.0) + p * q
    return product


def _same(a: _Polynomial, b: _Polynomial) -> bool:
    return a.keys() == b.keys() and all(math.isclose(a[term], b[term], rel_tol=_TOLERANCE) for term in a)
