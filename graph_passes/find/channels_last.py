"""Moves Transposes of rows and channels through elementwise operators until they cancel.

Convolutions read [batch, channels, frames], and linear layers [batch, frames, channels]. A swap is a Transpose from one
to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, constant_tensor, remove_unused
from .dimensions import Dimensions
from .node_checks import MICROSOFT_DOMAIN

SWAP = (0, 2, 1)
_MOST_STEPS = 64  # limit of the elementwise operators between two swaps
_ELEMENTWISE = frozenset((
    "Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity",
    "LeakyRelu", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Sigmoid", "Sin", "Softplus", "Sqrt",
    "Sub", "Swish", "Tanh", "Where",
))  # fmt: skip
_OF_MICROSOFT = frozenset(("FastGelu", "Gelu", "QuickGelu"))


def is_swap(node: ir.Node | None) -> bool:
    """Return whether a node swaps the last two of three axes."""
    if node is None or node.op_type != "Transpose" or node.domain not in DEFAULT_DOMAINS:
        return False
    perm = node.attributes.get("perm")
    return perm is not None and perm.type == ir.AttributeType.INTS and tuple(perm.as_ints()) == SWAP


class Layout:
    """The swaps of a graph. Made before the graph is changed."""

    def __init__(self, graph: ir.Graph, new_name: Callable[[str], str]) -> None:
        self._graph, self._new_name = graph, new_name
        self._dims = Dimensions(graph)
        self._swapped: dict[ir.Value, ir.Value] = {}  # values with an axis of length 1, and constants

    def settle(self, swaps: Sequence[ir.Node]) -> None:
        """Move swaps, and those in front of them, down until they cancel or reach another operator."""
        waiting = [one for swap in swaps for one in (*self._above(swap), swap)]
        while waiting:
            swap = waiting.pop(0)
            if swap.graph is self._graph:
                waiting += self._move(swap)

    def _above(self, swap: ir.Node) -> list[ir.Node]:
        """Return the swaps whose outputs reach this swap through elementwise operators."""
        found, waiting, steps = list[ir.Node](), list(swap.inputs), 0
        while waiting and steps < _MOST_STEPS:
            value = waiting.pop()
            node = None if value is None else value.producer()
            steps += 1
            if node is None or node.graph is not self._graph:
                continue
            if is_swap(node):
                found.append(node)
            elif _is_elementwise(node):
                waiting += node.inputs
        return found

    def _move(self, swap: ir.Node) -> list[ir.Node]:
        """Move a swap below its consumers where possible; return the new swaps."""
        source, output = swap.inputs[0], swap.outputs[0]
        assert source is not None
        made = list[ir.Node]()
        for node in dict.fromkeys(use.node for use in output.uses()):
            if node.graph is not self._graph:
                continue
            if is_swap(node) and self._cancel(node, source):
                continue
            if (inputs := self._swapped_inputs(node)) is not None:
                made += self._below(node, inputs)
        if swap.graph is not None:
            remove_unused(output)
        return made

    def _cancel(self, swap: ir.Node, source: ir.Value) -> bool:
        """Replace the output of a second swap by the value in front of the first one; return False if it must stay."""
        output = swap.outputs[0]
        if not output.is_graph_output():
            output.replace_all_uses_with(source)
            self._graph.remove(swap, safe=True)
        elif source.producer() is None or source.is_graph_output():
            return False
        else:
            ir.convenience.replace_nodes_and_values(self._graph, swap, [swap], [], [output], [source])
        return True

    def _below(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> list[ir.Node]:
        """Let a node compute in the layout of these inputs, and swap its outputs instead."""
        old = list(node.inputs)
        for index, value in enumerate(inputs):
            node.replace_input_with(index, value)
        for value in old:
            if value is not None and is_swap(value.producer()):
                remove_unused(value)
        if node.op_type == "Split":
            node.attributes["axis"] = ir.AttrInt64("axis", 2 if node.attributes["axis"].as_int() in (1, -2) else 1)
        made = []
        for output in node.outputs:
            if not output.uses():
                continue
            uses = list(output.uses())
            swap = self._swap(output)
            swap.outputs[0].type, swap.outputs[0].shape, output.shape = output.type, output.shape, None
            for use in uses:
                use.node.replace_input_with(use.idx, swap.outputs[0])
            self._graph.insert_after(node, swap)
            made.append(swap)
        return made

    def _swapped_inputs(self, node: ir.Node) -> list[ir.Value | None] | None:
        """Return a node's inputs in the other layout; None if the node cannot compute in it."""
        if any(output.is_graph_output() for output in node.outputs):
            return None
        if node.op_type == "Split" and node.domain in DEFAULT_DOMAINS:
            axis = node.attributes.get("axis")
            source = node.inputs[0]
            if axis is None or axis.is_ref() or axis.as_int() not in (1, 2, -1, -2) or source is None:
                return None
            first = self._other(source)
            return None if first is None else [first, *node.inputs[1:]]
        if not _is_elementwise(node):
            return None
        inputs = [None if value is None else self._other(value) for value in node.inputs]
        return None if inputs.count(None) > list(node.inputs).count(None) else inputs

    def _other(self, value: ir.Value) -> ir.Value | None:
        """Return a value in the other layout if that costs nothing, else None."""
        node = value.producer()
        if node is not None and is_swap(node):
            return node.inputs[0]
        if value in self._swapped:
            return self._swapped[value]
        tensor = constant_tensor(value)
        shape = self._dims.shape(value) if tensor is None else tuple(tensor.shape.numpy())
        if shape is None:
            return None
        if all(dim == 1 for dim in shape):
            return value if len(shape) <= len(SWAP) else None
        rank = len(shape)
        if rank > len(SWAP) or rank < 2 or (tensor is None and (rank < len(SWAP) or 1 not in shape[1:])):
            return None
        swap = self._swap(value, SWAP if rank == len(SWAP) else (1, 0))
        if node is None:
            self._graph.insert_before(self._graph[0], swap)
        else:
            self._graph.insert_after(node, swap)
        self._swapped[value] = swap.outputs[0]
        return swap.outputs[0]

    def _swap(self, value: ir.Value, perm: tuple[int, ...] = SWAP) -> ir.Node:
        node = ir.node("Transpose", [value], {"perm": perm}, name=self._new_name(f"{value.name}/swap"))
        node.outputs[0].name = self._new_name(f"{value.name}/swapped")
        return node


def _is_elementwise(node: ir.Node) -> bool:
    if len(node.outputs) != 1:
        return False
    if node.domain == MICROSOFT_DOMAIN:
        return node.op_type in _OF_MICROSOFT and len(node.inputs) == 1
    return node.domain in DEFAULT_DOMAINS and node.op_type in _ELEMENTWISE
