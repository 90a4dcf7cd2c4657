"""Finds token embeddings: float tables whose rows Gather nodes look up by the token ids of a model input."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, constant_key, constant_tensor, constant_values, float_array
from .node_checks import makers, node_input

_LEAST_ROWS = 1024  # smaller tables hold positions or token types, and saving them is not worthwhile
_LEAST_WIDTH = 32
_POSITIONS = ("position", "token_type", "segment")  # names of inputs that are not token ids
_POSITION_TABLE = re.compile(r"position_embed|embed_positions|\bwpe\b")  # table of absolute positions
_OTHER_POSITIONS = re.compile(r"relative|rel_|rotary|cos|sin", re.IGNORECASE)
_AS_THEY_ARE = ("Cast", "Identity", "Reshape", "Flatten", "Unsqueeze", "Squeeze", "Slice")
_FLOAT_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_ID_TYPES = (ir.DataType.INT32, ir.DataType.INT64)


@dataclass(frozen=True, eq=False)
class Lookup:
    """A Gather of a table's rows by ids with `rank` dimensions; None: the rank is unknown."""

    node: ir.Node
    rank: int | None

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name or ""

    @property
    def ids(self) -> ir.Value:
        """The ids that are looked up."""
        value = self.node.inputs[1]
        assert value is not None
        return value


@dataclass(frozen=True, eq=False)
class Embedding:
    """A float table [rows, width] indexed by token ids, with all Gather nodes that read it."""

    lookups: list[Lookup]
    rows: int
    width: int

    @property
    def value(self) -> ir.Value:
        """The table's value."""
        value = self.lookups[0].node.inputs[0]
        assert value is not None
        return value

    @property
    def table_name(self) -> str:
        """The table's name."""
        return self.value.name or ""

    @property
    def names(self) -> list[str]:
        """Names of the lookups and of the table."""
        return [*(lookup.name for lookup in self.lookups), self.table_name]

    @property
    def tensor(self) -> ir.TensorProtocol:
        """The table."""
        tensor = constant_tensor(self.value)
        assert tensor is not None
        return tensor

    @property
    def dtype(self) -> ir.DataType:
        """The table's element type."""
        return ir.DataType(self.tensor.dtype)

    def table(self) -> np.ndarray:
        """Return the table as float32 [rows, width], perhaps a read-only view of a mapped file."""
        return float_array(self.tensor)

    def other_readers(self) -> Iterator[ir.Node | None]:
        """Yield consumers of the table and of constants computed from it, except `lookups`; None: a model output."""
        own = {lookup.node for lookup in self.lookups}
        waiting = [value for value in constant_values(self.value) if value.is_initializer()]
        seen = set(waiting)
        while waiting:
            value = waiting.pop()
            if value.is_graph_output():
                yield None
            for node in dict.fromkeys(use.node for use in value.uses()):
                if node in own:
                    continue
                if constant_tensor(node.outputs[0]) is None:
                    yield node
                waiting += [one for one in node.outputs if constant_tensor(one) is not None and one not in seen]
                seen.update(node.outputs)


def count_positions(graph: ir.Graph) -> int | None:
    """Return the rows of the model's position table, or None if it has no known table.

    The table is recognized by its name or by the operator that reads it.
    """
    for node in graph.all_nodes():
        fused = node.op_type == "EmbedLayerNormalization"
        value = node_input(node, 3) if fused else _position_table(node)
        table = constant_tensor(value)
        if table is not None and len(table.shape) == 2:
            return int(table.shape.numpy()[0])
    return None


def find_position_lookups(graph: ir.Graph) -> list[ir.Node]:
    """Return the Gathers of float32 position tables: absolute, initializers [rows, width], with no other consumer."""
    found = []
    for node in graph.all_nodes():
        value = _position_table(node)
        if value is None or not value.is_initializer() or value.is_graph_output():
            continue
        if _OTHER_POSITIONS.search(f"{node.name} {value.name}"):
            continue
        table = constant_tensor(value)
        if table is not None and table.dtype == ir.DataType.FLOAT and len(table.shape) == 2 and len(value.uses()) == 1:
            found.append(node)
    return found


def _position_table(node: ir.Node) -> ir.Value | None:
    """Return the table whose rows a Gather reads, if the node's or table's name is that of a position table."""
    value = node_input(node, 0)
    named = value is not None and _POSITION_TABLE.search(f"{node.name} {value.name}")
    return value if named and _takes_rows(node) else None


def find_embeddings(graph: ir.Graph) -> list[Embedding]:
    """Return the tables that a model input of token ids indexes directly.

    Each table's `lookups` include Gathers with other ids and in subgraphs.
    """
    found: dict[Hashable, Embedding] = {}
    of_words = set[Hashable]()
    for node in graph.all_nodes():
        table, ids = constant_tensor(node_input(node, 0)) if _takes_rows(node) else None, node_input(node, 1)
        if table is None or table.dtype not in _FLOAT_TYPES or len(table.shape) != 2 or ids is None:
            continue
        rows, width = table.shape.numpy()
        if rows < _LEAST_ROWS or width < _LEAST_WIDTH:
            continue
        assert node.inputs[0] is not None
        key = constant_key(node.inputs[0])
        found.setdefault(key, Embedding([], rows, width)).lookups.append(Lookup(node, _rank(node, ids)))
        if _are_of_words(ids, graph):
            of_words.add(key)
    return [embedding for key, embedding in found.items() if key in of_words]


def _takes_rows(node: ir.Node) -> bool:
    axis = node.attributes.get("axis")
    return node.op_type == "Gather" and node.domain in DEFAULT_DOMAINS and (axis is None or axis.value in (0, -2))


def _are_of_words(ids: ir.Value, graph: ir.Graph) -> bool:
    source = ids
    for maker in makers(ids, _AS_THEY_ARE):
        if maker.op_type in _AS_THEY_ARE:
            source = node_input(maker, 0) or source
    name = (source.name or "").lower()
    of_others = any(word in name for word in _POSITIONS)
    return source in graph.inputs and not of_others and source.dtype in _ID_TYPES


def _rank(node: ir.Node, ids: ir.Value) -> int | None:
    """Return the rank of the ids, from the ids or from the looked-up rows."""
    if ids.shape is not None:
        return len(ids.shape)
    shape = node.outputs[0].shape
    return None if shape is None else len(shape) - 1
