"""Hands an onnx-ir graph over to the pattern rules in C++ (ops/match)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan import _native

from .constants import DEFAULT_DOMAINS, constant_tensor, opset_of

_INPUT, _OUTPUT, _CONSTANT, _DEFAULT = 1, 2, 4, 8  # flags of a value
_MOST_ELEMENTS = 16  # limit of tensor attributes
_KINDS = ir.AttributeType
_PLAIN = frozenset((_KINDS.INT, _KINDS.FLOAT, _KINDS.STRING, _KINDS.INTS, _KINDS.FLOATS))
_PACKED = (ir.DataType.INT4, ir.DataType.UINT4)  # NumPy stores a byte for each of them


def native_graph(graph: ir.Graph) -> _native.Graph:
    """Return a graph and its subgraphs in C++, as they are now. Constants are read when a rule needs them."""
    skeleton = _Skeleton(graph)

    def read(value: ir.Value) -> tuple[int, list[int], Any] | None:
        tensor = skeleton.tensors.get(value)
        return None if tensor is None else _array(tensor)

    return _native.Graph(skeleton.values, skeleton.graphs, opset_of(graph), read)


def native_linears(model: ir.Model) -> dict[ir.Node, _native.Linear | tuple[Any, str, bool]]:
    """Return the linear layers and similar nodes of a model, subgraphs included; see _native.find_linears."""
    linears = _native.find_linears(native_graph(model.graph))
    return {one[0] if isinstance(one, tuple) else one.node: one for one in linears}


class _Skeleton:
    """The arguments of _native.Graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self.values: list[tuple[Any, ...]] = []
        self.graphs: list[tuple[list[tuple[Any, ...]], list[int]]] = []
        self._indices: dict[ir.Value, int] = {}
        self._owners: list[int] = []  # graph of each value
        self._constants: set[ir.Value] = set()  # perhaps constant, until they are added
        self.tensors: dict[ir.Value, ir.TensorProtocol] = {}  # of the constants
        # Graphs in order of discovery, each with the graph and the implicit inputs of the node that it belongs to.
        self._waiting: list[tuple[ir.Graph, int, dict[int, None]]] = [(graph, -1, {})]
        for number, (one, _, _) in enumerate(self._waiting):  # grows
            self.graphs.append(self._graph(one, number))

    def _graph(self, graph: ir.Graph, number: int) -> tuple[list[tuple[Any, ...]], list[int]]:
        for value in (*graph.inputs, *graph.initializers.values()):
            self._constants.add(value)
            self._add(value, number)
        nodes = []
        for node in graph:
            inputs = [-1 if value is None else self._seen(value, number) for value in node.inputs]
            implicit: dict[int, None] = {}
            plain, tensors, graphs = {}, {}, {}
            for name, attribute in node.attributes.items():
                kind = attribute.type
                if kind in _PLAIN:
                    if not attribute.is_ref():
                        plain[name] = attribute.value
                elif kind == _KINDS.GRAPH and not attribute.is_ref():
                    graphs[name] = len(self._waiting)
                    self._waiting.append((attribute.value, number, implicit))
                elif kind == _KINDS.TENSOR and node.inputs and not attribute.is_ref():
                    given = _array(attribute.value) if attribute.value.size <= _MOST_ELEMENTS else None
                    if given is not None:
                        tensors[name] = given
            constant = all(value is None or value in self._constants for value in node.inputs)
            if constant and node.domain in DEFAULT_DOMAINS:
                self._constants.update(node.outputs)
            for value in node.outputs:
                self._add(value, number)
            made = [self._indices[value] for value in node.outputs]
            names = node.name or "", node.domain, node.op_type
            nodes.append((node, *names, plain, tensors, graphs, inputs, made, implicit))
        return nodes, [self._seen(value, number) for value in graph.outputs]

    def _seen(self, value: ir.Value, number: int) -> int:
        """Return the index of a value that graph `number` reads; values of outer graphs are implicit inputs."""
        index = self._indices.get(value)
        if index is None:  # a value of a graph around the main graph
            self._constants.add(value)
            index = self._add(value, 0)
        owner_number = self._owners[index]
        while number not in (owner_number, 0):
            _, outer, implicit = self._waiting[number]
            implicit[index] = None
            number = outer
        return index

    def _add(self, value: ir.Value, number: int) -> int:
        index = self._indices.get(value)
        if index is not None:  # an initializer that is also an input
            return index
        tensor = constant_tensor(value, self.tensors) if value in self._constants else None
        shape: list[int | str | None] | None = None
        dtype: ir.DataType | None
        if tensor is not None:
            self.tensors[value] = tensor
            flags, dtype, shape = _CONSTANT, tensor.dtype, list(tensor.shape.numpy())
        else:
            self._constants.discard(value)
            flags, dtype, owner = 0, value.dtype, value.graph
            is_input = value.is_graph_input()
            if is_input:
                flags = _DEFAULT if value.is_initializer() else _INPUT  # callers may leave out an initializer
            if value.shape is not None:
                # Names of dimensions are reliable only at the model's inputs; the name of a Loop body's input describes
                # only the first iteration. Only the main graph imports opsets.
                named = flags == _INPUT and owner is not None and owner.opset_imports
                shape = [dim if isinstance(dim, int) else dim.value if named else None for dim in value.shape]
        if value.is_graph_output():
            flags |= _OUTPUT
        index = self._indices[value] = len(self.values)
        self._owners.append(number)
        self.values.append((value, number, value.name or "", 0 if dtype is None else dtype.value, shape, flags))
        return index


def _array(tensor: ir.TensorProtocol) -> tuple[int, list[int], Any] | None:
    """Return type, shape and bytes of a tensor; None if it has strings."""
    if tensor.dtype == ir.DataType.STRING:
        return None
    data: Any = tensor.tobytes() if tensor.dtype in _PACKED else np.ascontiguousarray(tensor.numpy()).reshape(-1)
    if isinstance(data, np.ndarray):  # NumPy's additional types, such as bfloat16, are no buffers
        data = data.view(np.uint8)
    return tensor.dtype.value, list(tensor.shape.numpy()), data
