"""Finds the tables of positions of a decoder."""

from __future__ import annotations

import onnx_ir as ir

from ..names import ORTOLAN_DOMAIN

# Maps operators that read tables of positions to the index of the input with the cosines of the rotary embedding.
_POSITION_TABLES = {
    ("com.microsoft", "GroupQueryAttention"): 7,
    ("com.microsoft", "RotaryEmbedding"): 2,
    ("", "RotaryEmbedding"): 1,
    (ORTOLAN_DOMAIN, "NoMADAttention"): 8,
    (ORTOLAN_DOMAIN, "PagedNoMADAttention"): 8,
}


def count_positions(graph: ir.Graph) -> int | None:
    """Return the rows of a graph's rotary or learned position tables, the smallest number; None without a table."""
    rows: list[int] = []
    for node in graph:
        index = _POSITION_TABLES.get((node.domain, node.op_type))
        if (node.domain, node.op_type) == ("", "Gather") and _is_position_ids(node.inputs[1]):
            index = 0
        table = node.inputs[index] if index is not None and index < len(node.inputs) else None
        # A tensor with three axes holds the cosines of the current tokens, and is not a table.
        if table is not None and table.shape is not None and len(table.shape) == 2 and table.shape.is_static():
            rows.append(int(table.shape.numpy()[0]))
    return min(rows, default=None)


def _is_position_ids(value: ir.Value | None) -> bool:
    while value is not None and (node := value.producer()) is not None and node.op_type in ("Cast", "Reshape"):
        value = node.inputs[0]
    return value is not None and value.name == "position_ids"
