"""Rows of a table of words, stored in 8 bits, by standard operators: no op of our own is needed for so little work.

A table [rows, width] lies either as it is, in groups of a row's numbers that share a scale,

    q  int8 [rows, groups, group_size],   scales  [rows, groups, 1]        row(i) = q[i] scales[i]

or it is the weight [width, rows] of a W8A8MatMul, that of the head which is tied to it, and is read there: nothing is
stored twice, and nothing unpacked but the rows that are asked for (the layout: ops/formats/int8_group.h),

    weights  int8 [panels, quads, 16, 4],   scales  [panels, groups, 16]
    row(i) = weights[i / 16, :, i % 16, :] scales[i / 16, 4 quad / group_size, i % 16]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..find.constants import remove_unused
from .function_body import PANEL_COLUMNS
from .nodes import new_initializer

_QUAD = 4  # inputs of a column that lie together
_NEVER = np.iinfo(np.int64).max  # as a divisor: of every id the quotient is 0, and the rest the id


@dataclass
class StoredEmbedding:
    """A table in 8 bits, and the nodes that read it by ids of `rank` dimensions; dtype: of the rows."""

    name: str
    ids: ir.Value
    rows: int
    width: int
    group_size: int
    rank: int
    dtype: ir.DataType
    q: ir.Value
    scales: ir.Value
    nodes: list[ir.Node]  # in order; the last one gives the rows

    def read_rows(self, new_name: Callable[[str], str]) -> None:
        """Puts nodes that read the table as it lies in the place of those that were."""
        write = self._writer(new_name)
        q = write.op("Cast", write.op("Gather", self.q, self.ids), to=ir.DataType.FLOAT)
        scales = write.as_float(write.op("Gather", self.scales, self.ids), self.scales)
        padded = -(-self.width // self.group_size) * self.group_size
        self._put(write, write.op("Mul", q, scales), padded)

    def read_packed(self, weights: ir.Value, scales: ir.Value, new_name: Callable[[str], str]) -> None:
        """Puts nodes that read the weight of a W8A8MatMul, which holds the same numbers, in the place of those that
        were; the table's own are no longer needed."""
        write = self._writer(new_name)
        ids, quads = self.ids, -(-self.width // _QUAD)
        if ids.dtype != ir.DataType.INT64:
            ids = write.op("Cast", ids, to=ir.DataType.INT64)
        # As Gather has it, ids below 0 count from the end.
        from_end = write.op("Add", ids, write.constant(self.rows))
        ids = write.op("Where", write.op("Less", ids, write.constant(0)), from_end, ids)
        ids = write.op("Unsqueeze", ids, write.constant([-2, -1]))
        # [..., 1, 3]: panel, 0, column; then, by adding 0, quad or group, 0: [..., quads, 3].
        place = write.op("Div", ids, write.constant([PANEL_COLUMNS, _NEVER, 1]))
        place = write.op("Mod", place, write.constant([_NEVER, _NEVER, PANEL_COLUMNS]))

        def rows_of(stored: ir.Value, middle: np.ndarray) -> ir.Value:
            offsets = np.zeros((quads, 3), np.int64)
            offsets[:, 1] = middle
            return write.as_float(write.op("GatherND", stored, write.op("Add", place, write.constant(offsets))), stored)

        quad = np.arange(quads)
        q, scale = rows_of(weights, quad), rows_of(scales, quad * _QUAD // self.group_size)
        scale = write.op("Unsqueeze", scale, write.constant([-1]))
        self._put(write, write.op("Mul", q, scale), quads * _QUAD)
        self.q, self.scales = weights, scales

    def _writer(self, new_name: Callable[[str], str]) -> _Writer:
        graph = self.nodes[-1].graph
        assert graph is not None
        return _Writer(graph, self.name, new_name)

    def _put(self, write: _Writer, rows: ir.Value, padded: int) -> None:
        """rows: [..., a, b] with a b = padded."""
        rows = write.op("Reshape", rows, write.constant([0] * self.rank + [-1]))
        if padded != self.width:
            rows = write.op("Slice", rows, *(write.constant([end]) for end in (0, self.width, -1)))
        if self.dtype != ir.DataType.FLOAT:
            rows = write.op("Cast", rows, to=self.dtype)
        last = self.nodes[-1]
        read = [value for node in self.nodes for value in node.inputs if value is not None]
        ir.convenience.replace_nodes_and_values(
            write.graph, last, self.nodes, write.nodes, [last.outputs[0]], [write.nodes[-1].outputs[0]]
        )
        for value in read:
            if value is not self.ids:
                remove_unused(value)
        self.nodes = write.nodes


class _Writer:
    """Makes nodes; whoever asks for them puts them into the graph."""

    def __init__(self, graph: ir.Graph, name: str, new_name: Callable[[str], str]) -> None:
        self.graph, self._name, self._new_name = graph, name, new_name
        self.nodes: list[ir.Node] = []

    def op(self, op_type: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        name = self._new_name(f"{self._name}/{op_type}")
        node = ir.node(op_type, inputs, attributes, name=name)  # type: ignore[arg-type]
        node.outputs[0].name = self._new_name(f"{name}_output")
        self.nodes.append(node)
        return node.outputs[0]

    def as_float(self, value: ir.Value, stored: ir.Value) -> ir.Value:
        return value if stored.dtype == ir.DataType.FLOAT else self.op("Cast", value, to=ir.DataType.FLOAT)

    def constant(self, numbers: Sequence[int] | int | np.ndarray) -> ir.Value:
        array = np.array(numbers, np.int64)
        return new_initializer(self.graph, ir.Tensor(array, name=self._new_name(f"{self._name}/constant")))
