"""Tables of words: what turns the token ids that a model is given into vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, constant_tensor, float_array
from .node_checks import makers, node_input

_LEAST_ROWS = 1024  # smaller tables are of positions and of kinds of tokens, and not worth it
_LEAST_WIDTH = 32
_POSITIONS = ("position", "token_type", "segment")  # ids that are not those of words
_AS_THEY_ARE = ("Cast", "Identity")
_FLOAT_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_ID_TYPES = (ir.DataType.INT32, ir.DataType.INT64)


@dataclass(frozen=True, eq=False)
class Embedding:
    """A Gather of rows of a float table [rows, width] by ids of `rank` dimensions, from the model's input `source`."""

    node: ir.Node
    source: ir.Value
    rows: int
    width: int
    rank: int

    @property
    def name(self) -> str:
        return self.node.name or ""

    @property
    def table_name(self) -> str:
        return self.node.inputs[0].name or ""  # type: ignore[union-attr]

    @property
    def ids(self) -> ir.Value:
        value = self.node.inputs[1]
        assert value is not None
        return value

    @property
    def dtype(self) -> ir.DataType:
        tensor = constant_tensor(self.node.inputs[0])
        assert tensor is not None
        return ir.DataType(tensor.dtype)

    def table(self) -> np.ndarray:
        """float32 [rows, width]; perhaps a read-only view of a mapped file."""
        tensor = constant_tensor(self.node.inputs[0])
        assert tensor is not None
        return float_array(tensor)


def find_embeddings(graph: ir.Graph) -> list[Embedding]:
    """Those of the main graph whose ids come from an input of the model as they are."""
    return [found for node in graph if (found := _embedding(node)) is not None]


def _embedding(node: ir.Node) -> Embedding | None:
    axis = node.attributes.get("axis")
    if (
        node.op_type != "Gather"
        or node.domain not in DEFAULT_DOMAINS
        or (axis is not None and axis.value not in (0, -2))
    ):
        return None
    table, ids = constant_tensor(node_input(node, 0)), node_input(node, 1)
    if table is None or table.dtype not in _FLOAT_TYPES or len(table.shape) != 2 or ids is None:
        return None
    rows, width = table.shape.numpy()
    source = ids
    for maker in makers(ids, _AS_THEY_ARE):
        if maker.op_type in _AS_THEY_ARE:
            source = node_input(maker, 0) or source
    name = (source.name or "").lower()
    if not source.is_graph_input() or any(word in name for word in _POSITIONS):
        return None
    if rows < _LEAST_ROWS or width < _LEAST_WIDTH or source.shape is None or source.dtype not in _ID_TYPES:
        return None
    return Embedding(node, source, rows, width, len(source.shape))
