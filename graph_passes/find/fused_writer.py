"""Writes the nodes that replace one fused operator (fused_forms.py)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import onnx_ir as ir

from ..names import ORTOLAN_DOMAIN
from .constants import constant_tensor, lazy, opset_of, remove_unused
from .dimensions import Dimensions
from .node_checks import MICROSOFT_DOMAIN, UnfitError, expect, node_input

_LAYER_NORMALIZATION = 17  # first opset with LayerNormalization

# Adds nodes to a Writer and returns the replacements of the old node's outputs, in order; None for unused outputs.
Write = Callable[["Writer"], Sequence[ir.Value | None]]


class Writer:
    """Collects new nodes and constants; put() replaces the fused node with them."""

    def __init__(self, node: ir.Node, made: dict[Hashable, ir.Value], new_name: Callable[[str], str]) -> None:
        """made: values shared by several new nodes of the model, by key."""
        assert isinstance(node.graph, ir.Graph)
        self.node, self.opset = node, opset_of(node.graph)
        self._graph, self._made, self._new_name = node.graph, made, new_name
        self._name = node.name or node.op_type
        self._nodes: list[ir.Node] = []

    def put(self, write: Write) -> None:
        """Replace the node by what `write` adds; if `write` raises UnfitError, the graph is unchanged."""
        node = self.node
        unused = [value for value in node.inputs if value is not None]
        pairs = [(old, new) for old, new in zip(node.outputs, write(self), strict=False) if new is not None]
        for old, new in pairs:
            new.type, new.shape = old.type or new.type, old.shape or new.shape
        olds, news = ([pair[index] for pair in pairs] for index in (0, 1))
        ir.convenience.replace_nodes_and_values(self._graph, node, [node], self._nodes, olds, news)
        for value in unused:
            remove_unused(value)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        name: str | None = None,
        domain: str = "",
        dtype: ir.DataType | None = None,
        **attributes: int | float | Sequence[int],
    ) -> ir.Value:
        """Add a node and return its first output. name: suffix of the fused node's name; "" keeps that name."""
        given = list(inputs)
        while given[-1] is None:
            given.pop()
        return self._add(ir.node(op_type, given, attributes, domain=domain), name, dtype)[0]

    def top_k(self, x: ir.Value, k: int) -> tuple[ir.Value, ir.Value]:
        """Add a TopK over the last axis and return the values, float32, and their indices."""
        values, indices = self._add(ir.node("TopK", [x, self.ints(k)], num_outputs=2), None, ir.DataType.FLOAT)
        indices.dtype = ir.DataType.INT64
        return values, indices

    def operator(self, op_type: str, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr]) -> ir.Value:
        """Add one of Ortolan's operators under the fused node's name and return its output, float32."""
        return self._add(ir.Node(ORTOLAN_DOMAIN, op_type, inputs, attributes), "", ir.DataType.FLOAT)[0]

    def _add(self, node: ir.Node, name: str | None, dtype: ir.DataType | None) -> Sequence[ir.Value]:
        node.name = self._name if name == "" else self._new_name(f"{self._name}/{name or node.op_type}")
        for index, output in enumerate(node.outputs):
            output.name = self._new_name(f"{node.name}_output_{index}")
        if dtype is not None:
            node.outputs[0].dtype = dtype
        self._nodes.append(node)
        return node.outputs

    def contrib(self, op_type: str, *inputs: ir.Value | None, name: str = "", **attributes: int | float) -> ir.Value:
        """Add a com.microsoft operator and return its first output, float32."""
        return self.op(op_type, *inputs, name=name, domain=MICROSOFT_DOMAIN, dtype=ir.DataType.FLOAT, **attributes)

    def layer_norm(self, x: ir.Value, weight: ir.Value, bias: ir.Value | None, epsilon: float) -> ir.Value:
        """Add a LayerNormalization over the last axis; below opset 17, the operators of its formula."""
        if self.opset >= _LAYER_NORMALIZATION:
            return self.op("LayerNormalization", x, weight, bias, name="", axis=-1, epsilon=epsilon)
        mean = self.op("ReduceMean", x, axes=[-1], keepdims=1)
        centred = self.op("Sub", x, mean)
        square = self.op("Pow", centred, self.number(2.0))
        variance = self.op("ReduceMean", square, axes=[-1], keepdims=1)
        root = self.op("Sqrt", self.op("Add", variance, self.number(epsilon)))
        scaled = self.op("Mul", self.op("Div", centred, root), weight, name="" if bias is None else None)
        return scaled if bias is None else self.op("Add", scaled, bias, name="")

    def shared(self, key: Hashable, make: Callable[[], ir.Value]) -> ir.Value:
        """Return the value stored under `key` for this graph, made on first use."""
        place = self._graph, key
        if place not in self._made:
            self._made[place] = make()
        return self._made[place]

    def number(self, number: float) -> ir.Value:
        """Add a constant float32 scalar."""
        return self.constant(np.array(number, np.float32))

    def ints(self, *numbers: int) -> ir.Value:
        """Add a constant int64 vector."""
        return self.constant(np.array(numbers, np.int64))

    def constant(self, array: np.ndarray) -> ir.Value:
        """Add a small initializer, or return the equal one of this graph."""

        def make() -> ir.Value:
            return self._initializer(ir.Tensor(array, name=self._new_name(f"{self._name}/constant")))

        return self.shared((array.dtype.str, array.shape, array.tobytes()), make)

    def columns(self, value: ir.Value, name: str, start: int, stop: int) -> ir.Value:
        """Return columns of a constant [..., n], read from it when needed."""
        tensor = constant_tensor(value)
        assert tensor is not None
        shape = ir.Shape([*tensor.shape.numpy()[:-1], stop - start])

        def make() -> ir.Value:
            wanted = self._new_name(f"{value.name}/{name}")
            return self._initializer(lazy(lambda: tensor.numpy()[..., start:stop], tensor.dtype, shape, wanted))

        return self.shared((value, start, stop), make)

    def _initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
        )
        self._graph.register_initializer(value)
        return value


def required(node: ir.Node, index: int) -> ir.Value:
    """Return an input that must be present."""
    value = node_input(node, index)
    if value is None:
        raise UnfitError(f"its input {index} is missing")
    return value


def unused(node: ir.Node, *outputs: int) -> None:
    """Raise UnfitError if one of these outputs is used."""
    for index in outputs:
        expect(not is_used(node, index), f"its output {index} is used")


def is_used(node: ir.Node, index: int) -> bool:
    """Return whether an output has a consumer or is an output of the graph."""
    if index >= len(node.outputs):
        return False
    return bool(node.outputs[index].uses()) or node.outputs[index].is_graph_output()


def only_attributes(node: ir.Node, *names: str) -> None:
    """Raise UnfitError if the node has another attribute than these."""
    for name in node.attributes:
        expect(name in names, f"its attribute {name!r} is not supported")


def real_number(node: ir.Node, name: str, default: float) -> float:
    """Return a float attribute, or the default."""
    attr = node.attributes.get(name)
    if attr is None:
        return default
    expect(attr.type == ir.AttributeType.FLOAT and not attr.is_ref(), f"its attribute {name!r} is not a float")
    return attr.as_float()


def expect_floats(dims: Dimensions, value: ir.Value) -> None:
    """Check that a value is float32."""
    dtype = dims.dtype(value)
    found = "of unknown type" if dtype is None else dtype.name
    expect(dtype == ir.DataType.FLOAT, f"its input {value.name!r} is {found}, expected FLOAT")
