"""Helpers for nodes of Ortolan's operators: inputs by name, and the declarations that a model needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ..names import MINIMUM_IR_VERSION, ORTOLAN_DOMAIN

# If Ortolan's library is missing, models with more weight bytes than this are unpacked layer by layer in each run (see
# Replacement.function).
UNPACK_ONCE_LIMIT = 32 * 1024**2


class NewNames:
    """Makes names that are unique in a model, including its subgraphs."""

    def __init__(self, model: ir.Model) -> None:
        self._taken: set[str] = set()
        for graph in model.graphs():
            self._taken.update(graph.initializers)
            self._taken.update(value.name or "" for value in graph.inputs)
        for node in model.graph.all_nodes():
            self._taken.update(value.name or "" for value in node.outputs)

    def __call__(self, wanted: str) -> str:
        """Return `wanted`, or `wanted` with a number if that name is in use."""
        name, number = wanted, 1
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name


def declare_operators(model: ir.Model) -> None:
    """Declare the domain and the IR version that Ortolan's operators need."""
    model.opset_imports[ORTOLAN_DOMAIN] = 1
    model.ir_version = max(model.ir_version, MINIMUM_IR_VERSION)


def put_function(model: ir.Model, function: ir.Function) -> None:
    """Add or replace the ONNX function of one of Ortolan's operators."""
    model.functions[function.identifier()] = function


def constant_value(tensor: ir.TensorProtocol) -> ir.Value:
    """Return a value that holds this constant."""
    return ir.Value(
        name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
    )


def new_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add an initializer with the tensor's name to the graph."""
    value = constant_value(tensor)
    graph.register_initializer(value)
    return value


def in_order(names: Sequence[str], given: Mapping[str, ir.Value | None]) -> list[ir.Value | None]:
    """Return the inputs in the operator's order, without missing inputs at the end."""
    values = [given.get(name) for name in names]
    while values[-1] is None:
        values.pop()
    return values


def nodes_of(model: ir.Model, op_type: str) -> list[ir.Node]:
    """Return all nodes of one of Ortolan's operators, including nodes in subgraphs."""
    return [node for node in model.graph.all_nodes() if node.domain == ORTOLAN_DOMAIN and node.op_type == op_type]


def input_of(node: ir.Node, names: Sequence[str], name: str) -> ir.Value | None:
    """Return a node's input by name. names: the operator's inputs in order."""
    index = names.index(name)
    return node.inputs[index] if index < len(node.inputs) else None


def fill_missing(
    nodes: Sequence[ir.Node],
    names: Sequence[str],
    needed: Collection[str],
    neutral: Callable[[ir.Node], Mapping[str, np.ndarray]],
    new_name: Callable[[str], str],
) -> None:
    """Fill missing inputs of nodes with neutral constants, up to the last input that is needed or present.

    Nodes of one graph share constants of the same name, shape and type.

    Args:
        nodes: The nodes of one operator.
        names: The operator's inputs, in order.
        needed: The inputs that every node must have.
        neutral: Returns a node's neutral constants, by input name.
        new_name: Makes unique names.
    """
    made: dict[Hashable, ir.Value] = {}
    for node in nodes:
        graph = node.graph
        assert graph is not None
        count = max([len(node.inputs), *(names.index(name) + 1 for name in needed)])
        node.resize_inputs(count)
        for name, array in neutral(node).items():
            index = names.index(name)
            if index >= count or node.inputs[index] is not None:
                continue
            key = (id(graph), name, array.shape, array.dtype)
            if key not in made:
                made[key] = new_initializer(graph, ir.Tensor(array, name=new_name(f"no_{name}")))
            node.replace_input_with(index, made[key])
