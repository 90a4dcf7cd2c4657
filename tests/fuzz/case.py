"""A model that mutations change, and the feeds that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Draw:
    """Feeds by the base model's input names, and a mask [batch, tokens] of positions with a token.

    The mask is None if all positions have one.
    """

    feeds: Feeds
    visible: np.ndarray | None = None


@dataclass
class Case:
    """A model, a function that draws feeds for it, and a record of its mutations.

    `names` maps the base model's inputs to their current names. `extra` holds inputs that mutations have added.
    """

    model: onnx.ModelProto
    draw: Callable[[np.random.Generator, int, int], Draw]
    names: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Callable[[np.random.Generator], np.ndarray]] = field(default_factory=dict)
    external: bool = False  # store the weights in a data file
    done: list[str] = field(default_factory=list)
    counter: int = 0

    def fresh(self, stem: str) -> str:
        """Return an unused name for a value or node."""
        self.counter += 1
        return f"{stem}_fz{self.counter}"

    def feeds(self, rng: np.random.Generator, batch: int, tokens: int) -> tuple[Feeds, np.ndarray | None]:
        """Draw feeds with the current input types, and return them with the mask of visible positions."""
        drawn = self.draw(rng, batch, tokens)
        stored = {one.name for one in self.model.graph.initializer}
        known = {self.names.get(name, name): array for name, array in drawn.feeds.items()}
        given = {}
        for value in self.model.graph.input:
            if value.name in stored:
                continue
            array = known[value.name] if value.name in known else self.extra[value.name](rng)
            given[value.name] = array.astype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        return given, drawn.visible


def graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yield the main graph and all subgraphs, outer graphs first."""
    front = [model.graph]
    while front:
        graph = front.pop()
        yield graph
        front += subgraphs(graph.node)


def subgraphs(nodes: Any) -> list[onnx.GraphProto]:
    """Return the graphs in attributes of these nodes, but not the subgraphs inside them."""
    found = [one.g for node in nodes for one in node.attribute if one.type == onnx.AttributeProto.GRAPH]
    return found + [graph for node in nodes for one in node.attribute for graph in one.graphs]


def reads(node: onnx.NodeProto) -> set[str]:
    """Return all names that a node reads: its inputs, and names that its subgraphs capture or define."""
    names = {name for name in node.input if name}
    for graph in subgraphs([node]):
        for inner in graph.node:
            names |= reads(inner)
        names |= {value.name for value in graph.output}
    return names


def rename(model: onnx.ModelProto, mapping: dict[str, str]) -> None:
    """Rename values in all graphs. One mapping suffices, because names are unique in the model."""
    for graph in graphs(model):
        for node in graph.node:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    names[index] = mapping.get(name, name)
        for values in (graph.input, graph.output, graph.value_info, graph.initializer):
            for value in values:
                value.name = mapping.get(value.name, value.name)


def replace_reads(graph: onnx.GraphProto, old: str, new: str, keep: onnx.NodeProto | None = None) -> None:
    """Make all nodes except `keep` read `new` instead of `old`."""
    for node in graph.node:
        if node is keep:
            continue
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new
        for inner in subgraphs([node]):
            replace_reads(inner, old, new, keep)


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return the element types of the main graph's values, as far as shape inference finds them."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception:  # shape inference fails for unknown operators
        inferred = model
    found = {one.name: one.data_type for one in inferred.graph.initializer}
    for values in (inferred.graph.value_info, inferred.graph.input, inferred.graph.output):
        for value in values:
            kind = value.type.tensor_type.elem_type
            if kind:
                found[value.name] = kind
    return found


def initializers(model: onnx.ModelProto, kind: int = TensorProto.FLOAT, rank: int | None = None) -> list[TensorProto]:
    found = [one for one in model.graph.initializer if one.data_type == kind]
    return [one for one in found if rank is None or len(one.dims) == rank]


def set_nodes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
