"""Finds the LayerNormalization after a linear layer and its epilogue, or all of a graph.

Exports of opset 17 and later have one node; earlier ones, and TorchScript below that opset, write

    d = x - ReduceMean(x)
    y = d / Sqrt(ReduceMean(d^2) + epsilon) weight + bias

This order of operations is the only one that exporters write, so no other order is recognized.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, constant_tensor, float_array
from .dimensions import Dimensions
from .epilogue import Epilogue, LayerNorm, graph_of, in_graph_order, only_consumer

_DEFAULT_EPSILON = 1e-5  # default of LayerNormalization


def add_layer_norm(epilogue: Epilogue, n: int) -> Epilogue:
    """Return the epilogue of a layer with n outputs, extended by the LayerNormalization after it, if any."""
    found = find_layer_norm(epilogue.output, n)
    if found is None:
        return epilogue
    return dataclasses.replace(epilogue, norm=found, nodes=(*epilogue.nodes, *found.nodes), output=found.output)


def find_layer_norm(x: ir.Value, n: int) -> LayerNorm | None:
    """Return the LayerNorm of x, float32 [..., n], if x and the intermediate values have no other consumers."""
    if n < 2:  # an added residual could broadcast a single column to several
        return None
    for node in dict.fromkeys(use.node for use in x.uses()):
        found = _norm(node, n)
        if found is not None and _only_seen_by(x, *found.nodes):
            return found
    return None


def find_norms(graph: ir.Graph | ir.Function, dimensions: Dimensions) -> Iterator[tuple[ir.Value, LayerNorm]]:
    """Yield each LayerNorm of a graph, with the value [..., n] that it normalizes, for n of at least 2.

    The value is not constant and may have other consumers.
    """
    for node in graph:
        x = node.inputs[0] if node.inputs else None
        n = _length_of_weight(node)
        if n is None:
            shape = dimensions.shape(x)
            n = shape[-1] if shape and isinstance(shape[-1], int) else None
        if x is None or n is None or n < 2:
            continue
        found = _norm(node, n)
        if found is not None and constant_tensor(x) is None:
            yield x, found


def _length_of_weight(node: ir.Node) -> int | None:
    """Return the length of the operator's weight, which is n unless it is 1."""
    tensor = constant_tensor(node.inputs[1]) if node.op_type == "LayerNormalization" else None
    return tensor.size if tensor is not None else None


def _norm(node: ir.Node, n: int) -> LayerNorm | None:
    """Return the LayerNorm that begins at this node, or None."""
    found = _operator(node, n) or _formula(node, n)
    return found if found is not None and 0 <= found.epsilon < math.inf else None


def _operator(node: ir.Node, n: int) -> LayerNorm | None:
    if node.op_type != "LayerNormalization" or node.domain not in DEFAULT_DOMAINS:
        return None
    weight, bias = (node.inputs[index] if index < len(node.inputs) else None for index in (1, 2))
    attributes = node.attributes
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return None
    if "stash_type" in attributes and attributes["stash_type"].as_int() != ir.DataType.FLOAT:
        return None
    if not is_last_axis(node, attributes["axis"].as_int() if "axis" in attributes else -1):
        return None
    if weight is None or not _is_vector(weight, n) or (bias is not None and not _is_vector(bias, n)):
        return None
    epsilon = attributes["epsilon"].as_float() if "epsilon" in attributes else _DEFAULT_EPSILON
    return LayerNorm(weight, bias, epsilon, (node,))


def _formula(mean: ir.Node, n: int) -> LayerNorm | None:
    subtract = _consumer(mean, "Sub") if _is_mean(mean) else None
    if subtract is None or list(subtract.inputs) != [mean.inputs[0], mean.outputs[0]]:
        return None
    d = subtract.outputs[0]
    square = next((node for node in d.consumers() if _is_square(node, d)), None)
    if square is None:
        return None
    variance = _consumer(square, "ReduceMean")
    add = _consumer(variance, "Add")
    root = _consumer(add, "Sqrt")
    divide = _consumer(root, "Div")
    if variance is None or not _is_mean(variance) or add is None or root is None or divide is None:
        return None
    epsilon = _number(_other(add, variance.outputs[0]))
    if epsilon is None or list(divide.inputs) != [d, root.outputs[0]]:
        return None
    multiply = _consumer(divide, "Mul")
    weight = _other(multiply, divide.outputs[0]) if multiply is not None else None
    if multiply is None or weight is None or not _is_vector(weight, n):
        return None
    nodes = [mean, subtract, square, variance, add, root, divide, multiply]
    # No other node may read an intermediate value.
    if not _only_seen_by(d, square, divide):
        return None
    plus = _consumer(multiply, "Add")
    bias = _other(plus, multiply.outputs[0]) if plus is not None else None
    if plus is None or bias is None or not _is_vector(bias, n):
        return LayerNorm(weight, None, epsilon, tuple(in_graph_order(nodes)))
    return LayerNorm(weight, bias, epsilon, tuple(in_graph_order([*nodes, plus])))


def _consumer(node: ir.Node | None, op_type: str) -> ir.Node | None:
    """Return the only consumer of a node's output if it has this type, else None."""
    consumer = only_consumer(node.outputs[0]) if node is not None else None
    standard = consumer is not None and consumer.domain in DEFAULT_DOMAINS
    return consumer if consumer is not None and standard and consumer.op_type == op_type else None


def _only_seen_by(value: ir.Value, *nodes: ir.Node) -> bool:
    consumers = [use.node for use in value.uses()]
    return not value.is_graph_output() and all(node in nodes and node.graph is graph_of(value) for node in consumers)


def _other(node: ir.Node, operand: ir.Value) -> ir.Value | None:
    """Return the other operand of an Add or Mul."""
    return node.inputs[1] if node.inputs[0] is operand else node.inputs[0]


def _is_mean(node: ir.Node) -> bool:
    """Return whether a node is a ReduceMean over the last axis with keepdims."""
    if node.op_type != "ReduceMean" or node.domain not in DEFAULT_DOMAINS:
        return False
    attributes = node.attributes
    if "keepdims" in attributes and attributes["keepdims"].as_int() != 1:
        return False
    if "axes" in attributes:
        axes = list(attributes["axes"].as_ints())
    else:  # axes are an input from opset 18
        tensor = constant_tensor(node.inputs[1]) if len(node.inputs) > 1 else None
        axes = tensor.numpy().reshape(-1).tolist() if tensor is not None else []
    return len(axes) == 1 and is_last_axis(node, axes[0])


def _is_square(node: ir.Node, x: ir.Value) -> bool:
    if node.domain not in DEFAULT_DOMAINS:
        return False
    if node.op_type == "Mul":
        return list(node.inputs) == [x, x]
    return node.op_type == "Pow" and node.inputs[0] is x and _number(node.inputs[1]) == 2


def is_last_axis(node: ir.Node, axis: int) -> bool:
    """Return whether the axis is the last one, for an operator that keeps the rank of its first input."""
    shapes = [value.shape for value in (node.inputs[0], node.outputs[0]) if value is not None]
    return axis == -1 or any(shape is not None and axis == len(shape) - 1 for shape in shapes)


def _is_vector(value: ir.Value, n: int) -> bool:
    tensor = constant_tensor(value)
    return tensor is not None and tensor.dtype == ir.DataType.FLOAT and list(tensor.shape) == [n]


def _number(value: ir.Value | None) -> float | None:
    tensor = constant_tensor(value)
    # A constant with more than one axis could add axes to the result.
    if tensor is None or list(tensor.shape) not in ([], [1]):
        return None
    return float(float_array(tensor).item())
