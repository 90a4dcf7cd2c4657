"""Hands an onnx-ir graph over to the pattern rules in C++ (ops/match)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan import _native

from .constants import DEFAULT_DOMAINS, constant_tensor
from .shape_inference import opset_of

_INPUT, _OUTPUT, _CONSTANT = 1, 2, 4  # flags of a value
_MOST_ELEMENTS = 16  # limit of tensor attributes
_KINDS = ir.AttributeType
_PLAIN = frozenset((_KINDS.INT, _KINDS.FLOAT, _KINDS.STRING, _KINDS.INTS, _KINDS.FLOATS))
_PACKED = (ir.DataType.INT4, ir.DataType.UINT4)  # NumPy stores a byte for each of them


class MatchGraph:
    """A graph and its subgraphs in C++, as they are now. Values and nodes of the main graph have indices.

    Constants stay where they are until a rule reads them.
    """

    def __init__(self, graph: ir.Graph) -> None:
        skeleton = _Skeleton(graph)
        self.values = skeleton.values
        self.nodes = skeleton.nodes
        self.indices = skeleton.indices
        self.node_indices = {node: index for index, node in enumerate(self.nodes)}
        # `read` must not refer to self: the reference from C++ is not visible to the garbage collector.
        read = partial(_read, skeleton.values)
        self.native = _native.Graph(skeleton.described, skeleton.graphs, opset_of(graph), read)

    def value(self, index: int | None) -> ir.Value | None:
        """Return the value with an index."""
        return None if index is None else self.values[index]


class _Skeleton:
    """The lists that _native.Graph expects."""

    def __init__(self, graph: ir.Graph) -> None:
        self.values: list[ir.Value] = []
        self.indices: dict[ir.Value, int] = {}
        self.described: list[tuple[Any, ...]] = []
        self.nodes = list(graph)
        self.graphs: list[tuple[list[tuple[Any, ...]], list[int]]] = []
        self._constants: set[ir.Value] = set()  # perhaps constant, until they are added
        self._owners: list[int] = []  # graph of each value
        # Graphs in order of discovery, each with the graph and the implicit inputs of the node that it belongs to.
        self._waiting: list[tuple[ir.Graph, int, dict[int, None]]] = [(graph, -1, {})]
        for number, (one, _, _) in enumerate(self._waiting):  # grows
            self.graphs.append(self._graph(one, number))

    def _graph(self, graph: ir.Graph, number: int) -> tuple[list[tuple[Any, ...]], list[int]]:
        outputs = set(graph.outputs)
        named = bool(graph.opset_imports)
        for value in graph.inputs:
            self._add(value, number, _INPUT, outputs, named)
        for value in graph.initializers.values():
            if not value.is_graph_input():
                self._constants.add(value)
            self._add(value, number, 0, outputs, named)
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
                elif kind == _KINDS.GRAPH:
                    graphs[name] = len(self._waiting)
                    self._waiting.append((attribute.as_graph(), number, implicit))
                elif kind == _KINDS.TENSOR and node.inputs:
                    given = _array(attribute.as_tensor()) if attribute.as_tensor().size <= _MOST_ELEMENTS else None
                    if given is not None:
                        tensors[name] = given
            if node.domain in DEFAULT_DOMAINS and all(value is None or value in self._constants for value in node.inputs):
                self._constants.update(node.outputs)
            for value in node.outputs:
                self._add(value, number, 0, outputs, False)
            made = [self.indices[value] for value in node.outputs]
            nodes.append((node.name or "", node.domain, node.op_type, plain, tensors, graphs, inputs, made, implicit))
        return nodes, [self._seen(value, number) for value in graph.outputs]

    def _seen(self, value: ir.Value, number: int) -> int:
        """Return the index of a value that graph `number` reads; values of outer graphs are implicit inputs."""
        index = self.indices.get(value)
        if index is None:  # a value of a graph around the main graph
            owner = value.graph
            named = value.is_graph_input() and owner is not None and bool(owner.opset_imports)
            if constant_tensor(value) is not None:
                self._constants.add(value)
            index = self._add(value, 0, 0, set(), named)
        owner_number = self._owners[index]
        while number not in (owner_number, 0):
            _, outer, implicit = self._waiting[number]
            implicit[index] = None
            number = outer
        return index

    def _add(self, value: ir.Value, number: int, flags: int, outputs: set[ir.Value], named: bool) -> int:
        index = self.indices.get(value)
        if index is not None:  # an initializer that is also an input
            return index
        dtype, dims = value.dtype, value.shape
        tensor = constant_tensor(value) if value in self._constants else None
        shape: list[int | str | None] | None = None
        if tensor is None:
            self._constants.discard(value)
        else:
            flags, dtype, shape = flags | _CONSTANT, tensor.dtype, list(tensor.shape.numpy())
        if tensor is None and dims is not None:
            # Names of dimensions are reliable only at the model's inputs; the name of a Loop body's input describes
            # only the first iteration. Only the main graph imports opsets.
            shape = [dim if isinstance(dim, int) else dim.value if named else None for dim in dims]
        if value.is_initializer():
            flags &= ~_INPUT  # callers may leave it out
        if value in outputs:
            flags |= _OUTPUT
        index = self.indices[value] = len(self.values)
        self.values.append(value)
        self._owners.append(number)
        self.described.append((number, value.name or "", 0 if dtype is None else dtype.value, shape, flags))
        return index


def _read(values: list[ir.Value], index: int) -> tuple[int, list[int], Any] | None:
    tensor = constant_tensor(values[index])
    return None if tensor is None else _array(tensor)


def _array(tensor: ir.TensorProtocol) -> tuple[int, list[int], Any] | None:
    """Return type, shape and bytes of a tensor; None if it has strings."""
    if tensor.dtype == ir.DataType.STRING:
        return None
    array = np.ascontiguousarray(tensor.numpy())
    packed = tensor.dtype in _PACKED
    return tensor.dtype.value, list(tensor.shape.numpy()), tensor.tobytes() if packed else array.reshape(-1).view(np.uint8)
