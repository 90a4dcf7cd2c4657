"""Compute lengths from the graph's inputs.

Exported models read the length of values inside an attention, to cut a mask or to split heads. Such a length is a
dimension of the inputs, or a sum or product of these. Computing it from the inputs lets other passes replace the
attention as a whole, because nothing else then depends on its inner values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ortolan._native import Sum

from ..find.constants import GRAPHS, remove_unused
from ..find.dimensions import Dim, Dimensions, Element
from ..find.node_checks import is_op
from ..operators.nodes import new_initializer

Sources = dict[Dim, list[tuple[ir.Value, int]]]  # axes of the model's inputs with a dimension


def ask_inputs(model: ir.Model, new_name: Callable[[str], str]) -> None:
    """Compute lengths from the model's inputs, in its graph and in branches of an If."""
    behind: dict[ir.Value, frozenset[ir.Value]] = {value: frozenset([value]) for value in model.graph.inputs}
    _trace(model.graph, behind)
    dims = Dimensions(model.graph)
    sources: Sources = {}
    for value in model.graph.inputs:
        for axis, dim in enumerate((not value.is_initializer() and dims.shape(value)) or ()):
            sources.setdefault(dim, []).append((value, axis))
    for graph in [model.graph, *_branches(model.graph)]:
        _ask_inputs(graph, sources, behind, new_name)


def _branches(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Yield all branches of If nodes, but no Loop bodies, where a length may differ in each iteration."""
    for node in graph:
        if is_op(node, "If"):
            for name in ("then_branch", "else_branch"):
                branch = node.attributes[name].as_graph()
                yield branch
                yield from _branches(branch)


def _ask_inputs(
    graph: ir.Graph,
    sources: Sources,
    behind: Mapping[ir.Value, frozenset[ir.Value]],
    new_name: Callable[[str], str],
) -> None:
    dims = Dimensions(graph)
    lengths = _Lengths(graph, sources, behind, new_name)
    found = {value: dims.elements(value) or () for value in _lengths_of_inner_values(graph, dims)}
    found = {value: elements for value, elements in found.items() if elements and lengths.known(elements, value)}
    for value, elements in found.items():
        if value.is_graph_output() or all(node.outputs[0] in found for node in value.consumers()):
            continue  # all consumers are replaced too
        lengths.ask_for(value)
        made = lengths.scalar(elements[0]) if dims.shape(value) == () else lengths.vector(elements)
        value.replace_all_uses_with(made)
        remove_unused(value)
    lengths.place()


def _lengths_of_inner_values(graph: ir.Graph, dims: Dimensions) -> list[ir.Value]:
    """Return int64 scalars and vectors that depend on the shape of a value that is not an input of the graph."""
    found: dict[ir.Value, None] = {}
    for node in graph:
        if is_op(node, "Shape"):
            source = node.inputs[0]
            inner = source is not None and source.producer() is not None
        else:
            inner = any(value in found for value in node.inputs if value is not None)
        value = node.outputs[0] if node.outputs else None
        if value is None or not inner or dims.elements(value) is None or len(dims.shape(value) or (0, 0)) > 1:
            continue
        if dims.dtype(value) == ir.DataType.INT64:
            found[value] = None
    return list(found)


class _Lengths:
    """Nodes at the start of a graph that compute lengths, each created once.

    Inputs may have dimensions of the same name and different lengths, because ONNX Runtime does not compare them. So a
    length is read from an input that the value depends on. If several inputs qualify and may have different lengths,
    the value is not changed.
    """

    def __init__(
        self,
        graph: ir.Graph,
        sources: Sources,
        behind: Mapping[ir.Value, frozenset[ir.Value]],
        new_name: Callable[[str], str],
    ) -> None:
        self._graph = graph
        self._behind = behind
        self._new_name = new_name
        self._sources = sources
        self._asking: ir.Value | None = None
        self._made: dict[object, ir.Value] = {}
        self._nodes: list[ir.Node] = []

    def known(self, elements: Sequence[Element], value: ir.Value) -> bool:
        """Return True if the inputs determine these elements of a value."""
        self.ask_for(value)
        return all(self._is_known(one) for one in elements)

    def ask_for(self, value: ir.Value) -> None:
        """Set the value whose elements are computed next."""
        self._asking = value

    def _source(self, dim: Dim) -> tuple[ir.Value, int] | None:
        behind = self._behind.get(self._asking, frozenset()) if self._asking is not None else frozenset()
        found = [(value, axis) for value, axis in self._sources.get(dim, ()) if value in behind]
        together = {_kind(value) for value, _ in found}
        # The batch, axis 0, is equal for all inputs.
        if not found or (len(together) > 1 and any(axis for _, axis in found)):
            return None
        return found[0]

    def vector(self, elements: Sequence[Element]) -> ir.Value:
        """Return an int64 vector [elements]."""
        parts = [self._one(element) for element in elements]
        return parts[0] if len(parts) == 1 else self._node("Concat", parts, axis=0)

    def scalar(self, element: Element) -> ir.Value:
        return self._node("Squeeze", [self._one(element), self._ints(0)])

    def place(self) -> None:
        first = next(iter(self._graph), None)
        if first is not None:
            self._graph.insert_before(first, self._nodes)

    def _is_known(self, element: Element) -> bool:
        match element:
            case bool() | float() | None:
                return False
            case int():
                return True
            case Sum():
                return all(self._is_known(dim) for dim, _ in element.terms)
        return self._source(element) is not None

    def _one(self, element: Element) -> ir.Value:
        """Return an int64 vector of one element."""
        match element:
            case int():
                return self._ints(element)
            case Sum():
                times = math.gcd(element.number, *(count for _, count in element.terms))
                parts = sorted(element.terms, key=repr)
                terms = [self._product(self._one(dim), count // times) for dim, count in parts]
                terms += [self._ints(element.number // times)] if element.number else []
                total = terms[0]
                for term in terms[1:]:
                    total = self._node("Add", [total, term])
                return self._product(total, times)
        source = self._source(element)
        assert source is not None
        value, axis = source
        shape = self._node("Shape", [value])
        return self._node("Gather", [shape, self._ints(axis)])

    def _product(self, value: ir.Value, times: int) -> ir.Value:
        return self._node("Mul", [value, self._ints(times)]) if times > 1 else value

    def _ints(self, number: int) -> ir.Value:
        if number not in self._made:
            tensor = ir.Tensor(np.array([number], np.int64), name=self._new_name(f"lengths/{number}"))
            self._made[number] = new_initializer(self._graph, tensor)
        return self._made[number]

    def _node(self, op_type: str, inputs: Sequence[ir.Value], **attributes: int) -> ir.Value:
        key = op_type, tuple(inputs), tuple(attributes.items())
        if key not in self._made:
            node = ir.node(op_type, inputs, attributes)
            node.name = self._new_name(f"lengths/{op_type}")
            output = node.outputs[0]
            output.name, output.dtype = self._new_name(f"{node.name}_output_0"), ir.DataType.INT64
            self._nodes.append(node)
            self._made[key] = output
        return self._made[key]


# Inputs with one element per token of a text.
_OF_ONE_TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def _kind(value: ir.Value) -> str:
    """Return the kind of an input. Among inputs of one kind, dimensions of the same name have the same length.

    The kinds are inputs with one element per token of a text, and the caches of all layers.
    """
    name = value.name or ""
    return "text" if name in _OF_ONE_TEXT else re.sub(r"\d+", "", name).removesuffix("key").removesuffix("value")


def _trace(graph: ir.Graph, behind: dict[ir.Value, frozenset[ir.Value]]) -> None:
    """Record, for each value of a graph and its subgraphs, the model inputs that it depends on."""
    for node in graph:
        read = [behind[value] for value in node.inputs if value in behind]
        for attribute in node.attributes.values():
            if attribute.type not in GRAPHS:
                continue
            for inner in [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else attribute.as_graphs():
                _trace(inner, behind)
                read += [behind[value] for one in inner.all_nodes() for value in one.inputs if value in behind]
        found = frozenset().union(*read)
        for output in node.outputs:
            behind[output] = next((one for one in read if len(one) == len(found)), found)
