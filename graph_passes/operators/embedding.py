"""Embedding lookups in a quantized table, built from standard operators: the work is too small for a custom operator.

The table [rows, width] is stored in one of these formats. 8 bits with a scale per row:

    q  int8 [rows, width],   scales  float32 [rows, 1]                     row(i) = q[i] scales[i]

8 bits with a scale per group of a row:

    q  int8 [rows, groups, group_size],   scales  [rows, groups, 1]        row(i) = q[i] scales[i]

4 bits with a scale per group: low nibbles hold the first half of a group, high nibbles the second half. Zero points are
stored in units of 1/16:

    q  uint8 [rows, groups, group_size / 2],   scales, zero_points  [rows, groups, 1]
    row(i) = (low(q[i]), high(q[i]) - zero_points[i] / 16) scales[i]

If the output head shares the table (tied weights), its weight is the table's transpose [width, rows]. Lookups then read
the head's packed weight, and unpack only the requested rows. Packed weight of W8A8MatMul (ops/formats/int8_group.h):

    weights  int8 [panels, quads, 16, 4],   scales  [panels, groups, 16]
    row(i) = weights[i / 16, :, i % 16, :] scales[i / 16, 4 quad / group_size, i % 16]

Packed weight of W4A8MatMul (ops/formats/int4_group.h, subgroup.h, k_quant.h); low nibbles belong to one quad, high
nibbles to the next:

    weights  uint8 [panels, pairs of quads, 64],   scales, zero_points, minimums  [panels, groups, 16]
    high_bits  uint8 [panels, tiles, 128 (bits - 4)],   subgroup_scales, subgroup_minimums  [panels, subgroups, 16]

Dense storage of SparseAMXMatMul (ops/formats/bitmap.h); d is 2 for bf16 and 4 for int8:

    values  bf16 or int8 [panels, padded width / d, 16, d], flat,   scales of int8  [panels, 1, 16]
    row(i) = values[i / 16, :, i % 16, :] scales[i / 16, 0, i % 16]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..find.constants import remove_unused
from ..find.embedding import Embedding
from ..weights.quantizers.grid import FRACTION_STEPS, Quantization
from .function_body import PANEL_COLUMNS
from .group_function import TILE_INPUTS
from .nodes import new_initializer

_QUAD = 4  # number of inputs of a column that are stored side by side
_PAIR = 2 * _QUAD  # number of inputs of a column in the nibbles of four bytes
_MIDDLE = 8  # the zero point of 4-bit weights without zero points
_NEVER = np.iinfo(np.int64).max  # a divisor larger than every id, so that id / _NEVER is 0 and id % _NEVER is id
NewName = Callable[[str], str]


@dataclass
class _Reader:
    """The nodes that look up rows for ids. rank: the rank of ids, if known."""

    name: str
    ids: ir.Value
    rank: int | None
    nodes: list[ir.Node]  # in execution order; the last node returns the rows


@dataclass
class StoredEmbedding:
    """A quantized table and the nodes that read it. dtype: type of the rows. group_size: None means a scale per row."""

    name: str
    rows: int
    width: int
    bits: int
    group_size: int | None
    dtype: ir.DataType
    q: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None  # only with 4-bit weights
    as_bf16: bytes  # a digest of the table rounded to bf16
    readers: list[_Reader] = field(default_factory=list)
    # The packed weight of a W4A8MatMul that holds the table, by the names of the operator's inputs.
    packed: Mapping[str, ir.Value] = field(default_factory=dict)

    def read_rows(self, graph: ir.Graph, embedding: Embedding, new_name: NewName) -> None:
        """Replace the model's lookups by nodes that read the quantized table. graph: the main graph."""
        for lookup in embedding.lookups:
            reader = _Reader(lookup.name, lookup.ids, lookup.rank, [lookup.node])
            self.readers.append(reader)
            write = _Writer(graph, reader.name, new_name)
            q = write.op("Gather", self.q, reader.ids)
            q = self._four_bits(write, q, reader) if self.bits == 4 else write.op("Cast", q, to=ir.DataType.FLOAT)
            scales = write.as_float(write.op("Gather", self.scales, reader.ids), self.scales)
            rows, padded = write.op("Mul", q, scales), self.width
            if self.group_size is not None:
                padded = -(-self.width // self.group_size) * self.group_size
                rows = self._joined(write, rows, reader, padded)
            self._put(write, reader, rows, padded)

    def _four_bits(self, write: _Writer, q: ir.Value, reader: _Reader) -> ir.Value:
        """Unpack bytes to 4-bit integers minus their zero points, float32."""
        assert self.zero_points is not None
        q = _nibbles(write, q)
        zero = write.op("Cast", write.op("Gather", self.zero_points, reader.ids), to=ir.DataType.FLOAT)
        return write.op("Sub", q, write.op("Mul", zero, write.constant(np.array(1 / FRACTION_STEPS, np.float32))))

    def read_groups(self, weights: ir.Value, scales: ir.Value, graph: ir.Graph, new_name: NewName) -> None:
        """Replace the lookups by nodes that read the weight of a W8A8MatMul with the same integers."""
        assert self.group_size is not None
        quads = -(-self.width // _QUAD)
        quad = np.arange(quads)
        for reader in self.readers:
            write = _Writer(graph, reader.name, new_name)
            place = self._positions(write, reader)
            q = write.as_float(write.op("GatherND", weights, _repeated(write, place, quad)), weights)
            middle = quad * _QUAD // self.group_size
            scale = write.as_float(write.op("GatherND", scales, _repeated(write, place, middle)), scales)
            rows = write.op("Mul", q, write.op("Unsqueeze", scale, write.constant([-1])))
            self._put(write, reader, self._joined(write, rows, reader, quads * _QUAD), quads * _QUAD)
        self.q, self.scales = weights, scales

    def add_lookups(self, nodes: Sequence[ir.Node]) -> None:
        """Register lookup nodes of the model (the second input holds the ids) that will read the head's weight."""
        for node in nodes:
            ids = node.inputs[1]
            assert ids is not None
            self.readers.append(_Reader(node.name or "", ids, None if ids.shape is None else len(ids.shape), [node]))

    def read_few_bits(
        self, packed: Mapping[str, ir.Value], quantization: Quantization, graph: ir.Graph, new_name: NewName
    ) -> None:
        """Replace the lookups by nodes that read the packed weight of a W4A8MatMul.

        Args:
            packed: The operator's constants, by the names of its inputs.
            quantization: Their format.
            graph: The main graph.
            new_name: Makes unique names.
        """
        padded = -(-self.width // TILE_INPUTS) * TILE_INPUTS
        for reader in self.readers:
            write = _Writer(graph, reader.name, new_name)
            rows = _PackedRows(write, packed, quantization, self._positions(write, reader), padded)
            high = None
            if quantization.bits > 4:
                high = self._joined(write, rows.high_bits(), reader, padded // _PAIR, _PAIR)
            self._put(write, reader, self._joined(write, rows.weights(high), reader, padded), padded)
        self.packed = packed

    def read_dense(
        self, values: ir.Value, scales: ir.Value | None, inputs: int, graph: ir.Graph, new_name: NewName
    ) -> None:
        """Replace the lookups by nodes that read the dense storage of a SparseAMXMatMul.

        Args:
            values: Packed weights of the head.
            scales: None for bf16.
            inputs: Number of inputs of a column that are stored side by side.
            graph: The main graph.
            new_name: Makes unique names.
        """
        assert values.shape is not None
        panel = values.shape.numpy()[0] // -(-self.rows // PANEL_COLUMNS)
        number = np.arange(self.width)
        offsets = number // inputs * PANEL_COLUMNS * inputs + number % inputs
        for reader in self.readers:
            write = _Writer(graph, reader.name, new_name)
            place = self._positions(write, reader)
            steps = write.constant(np.array([[panel], [0], [inputs]]))
            start = write.op("Squeeze", write.op("MatMul", place, steps), write.constant([-1]))
            rows = write.op("Gather", values, write.op("Add", start, write.constant(offsets)))
            rows = write.as_float(rows, values)
            if scales is not None:
                scale = write.op("GatherND", scales, place)
                rows = write.op("Mul", rows, write.as_float(scale, scales))
            self._put(write, reader, rows, self.width)
        self.q = values

    def _positions(self, write: _Writer, reader: _Reader) -> ir.Value:
        """Return indices (panel, 0, column) for ids, [..., 1, 3]. Negative ids count from the end, as in Gather."""
        ids = reader.ids
        if ids.dtype != ir.DataType.INT64:
            ids = write.op("Cast", ids, to=ir.DataType.INT64)
        from_end = write.op("Add", ids, write.constant(self.rows))
        ids = write.op("Where", write.op("Less", ids, write.constant(0)), from_end, ids)
        ids = write.op("Unsqueeze", ids, write.constant([-2, -1]))
        place = write.op("Div", ids, write.constant([PANEL_COLUMNS, _NEVER, 1]))
        return write.op("Mod", place, write.constant([_NEVER, _NEVER, PANEL_COLUMNS]))

    def _joined(self, write: _Writer, rows: ir.Value, reader: _Reader, *sizes: int) -> ir.Value:
        """Replace the axes after those of the ids by `sizes`; Reshape with -1 would fail if there are no ids."""
        if reader.rank is not None:
            return write.op("Reshape", rows, write.constant([0] * reader.rank + [*sizes]))
        shape = write.op("Concat", write.op("Shape", reader.ids), write.constant(sizes), axis=0)
        return write.op("Reshape", rows, shape)

    def _put(self, write: _Writer, reader: _Reader, rows: ir.Value, padded: int) -> None:
        """Replace the reader's nodes by the new nodes, which compute `rows` [..., padded]."""
        if padded != self.width:
            rows = write.op("Slice", rows, *(write.constant([end]) for end in (0, self.width, -1)))
        if self.dtype != ir.DataType.FLOAT:
            rows = write.op("Cast", rows, to=self.dtype)
        last = reader.nodes[-1]
        assert last.graph is not None
        read = [value for node in reader.nodes for value in node.inputs if value is not None]
        ir.convenience.replace_nodes_and_values(
            last.graph, last, reader.nodes, write.nodes, [last.outputs[0]], [write.nodes[-1].outputs[0]]
        )
        for value in read:
            if value is not reader.ids:
                remove_unused(value)
        reader.nodes = write.nodes


class _PackedRows:
    """Reads rows from the packed weight of a W4A8MatMul, in pairs of quads: [..., pairs, inputs of a pair].

    Scales are read once for each pair, because groups and subgroups consist of whole pairs. place: from
    StoredEmbedding._positions. padded: the inputs, padded to tiles.
    """

    def __init__(
        self,
        write: _Writer,
        packed: Mapping[str, ir.Value],
        quantization: Quantization,
        place: ir.Value,
        padded: int,
    ) -> None:
        self._write, self._packed, self._format, self._place = write, packed, quantization, place
        self._first = np.arange(0, padded, _PAIR)  # the first input of each pair

    def weights(self, high: ir.Value | None) -> ir.Value:
        """Return the dequantized rows, float32. high: from `high_bits`, one row a pair; None with 4 bits."""
        write = self._write
        q = _nibbles(write, self._bytes("weights", np.arange(len(self._first)), 0 * self._first))
        if high is not None:
            q = write.op("Add", q, write.op("Mul", high, self._number(16)))
        q = self._multiplied(self._centered(q), "subgroup_scales")
        rows = write.op("Mul", q, self._of_groups("scales"))
        if "minimums" not in self._packed:
            return rows
        return write.op("Add", rows, self._multiplied(self._of_groups("minimums"), "subgroup_minimums"))

    def high_bits(self) -> ir.Value:
        """Return the bits of q above the low 4, float32 [..., chunks, quads of a chunk, inputs of a quad]."""
        write, bits = self._write, self._format.bits - 4
        chunk = np.arange(len(self._first) * 2 * bits // 8)  # 64 bytes, the bits of 8 / bits quads
        of_tile = 2 * bits
        found = self._bytes("high_bits", chunk // of_tile, chunk % of_tile * PANEL_COLUMNS * _QUAD)
        # The first quad's bits are the highest of a byte.
        shifts = write.constant(np.arange(0, 8, bits, dtype=np.uint8)[:, None])
        found = write.op("BitShift", write.op("Unsqueeze", found, write.constant([-2])), shifts, direction="LEFT")
        return self._as_float(self._shifted(found, 8 - bits))

    def _centered(self, q: ir.Value) -> ir.Value:
        """Return q minus its zero point, times s of subgroups unless these are K-quants."""
        write, chosen = self._write, self._format
        if chosen.k_quant_zero is not None:
            return q if chosen.k_quant_zero == 0 else write.op("Sub", q, self._number(chosen.k_quant_zero))
        if chosen.subgroup_size is not None:
            both = self._of_subgroups("subgroup_scales")
            steps = self._shifted(write.op("BitShift", both, self._byte(chosen.bits), direction="LEFT"), chosen.bits)
            zero = self._as_float(self._shifted(both, 8 - chosen.bits))
            return write.op("Mul", write.op("Sub", q, zero), self._as_float(steps))
        if "zero_points" in self._packed:
            zero = self._of_groups("zero_points")
            return write.op("Sub", q, write.op("Div", zero, self._number(chosen.zero_point_steps)))
        return q if "minimums" in self._packed else write.op("Sub", q, self._number(_MIDDLE))

    def _multiplied(self, values: ir.Value, factors: str) -> ir.Value:
        """Return the values times the factors of K-quants, if there are any."""
        if self._format.k_quant_zero is None or factors not in self._packed:
            return values
        found = self._of_subgroups(factors)
        if factors == "subgroup_scales":
            found = self._write.op("Cast", found, to=ir.DataType.INT8)
        return self._write.op("Mul", values, self._as_float(found))

    def _of_groups(self, name: str) -> ir.Value:
        """Return the values of the groups, float32 [..., pairs, 1]."""
        size, shape = self._format.group_size, self._packed[name].shape
        assert size is not None and shape is not None
        # The padding of the last tile may begin a group that does not exist.
        found = self._at(name, np.minimum(self._first // size, shape.numpy()[1] - 1))
        return self._write.as_float(found, self._packed[name])

    def _of_subgroups(self, name: str) -> ir.Value:
        """Return the values of the subgroups, uint8 [..., pairs, 1]."""
        assert self._format.subgroup_size is not None
        return self._at(name, self._first // self._format.subgroup_size)

    def _at(self, name: str, middle: np.ndarray) -> ir.Value:
        write = self._write
        found = write.op("GatherND", self._packed[name], _repeated(write, self._place, middle))
        return write.op("Unsqueeze", found, write.constant([-1]))

    def _bytes(self, name: str, middle: np.ndarray, last: np.ndarray) -> ir.Value:
        """Return the four bytes of the column in each line, [..., lines, 4]; a line begins at [panel, middle, last]."""
        write = self._write
        offsets = np.zeros((len(middle), _QUAD, 3), np.int64)
        offsets[..., 1], offsets[..., 2] = middle[:, None], last[:, None] + np.arange(_QUAD)
        column = write.op("Mul", self._place, write.constant([1, 1, _QUAD]))
        index = write.op("Add", write.op("Unsqueeze", column, write.constant([-2])), write.constant(offsets))
        return write.op("GatherND", self._packed[name], index)

    def _shifted(self, value: ir.Value, count: int) -> ir.Value:
        return self._write.op("BitShift", value, self._byte(count), direction="RIGHT")

    def _as_float(self, value: ir.Value) -> ir.Value:
        return self._write.op("Cast", value, to=ir.DataType.FLOAT)

    def _number(self, value: int) -> ir.Value:
        return self._write.constant(np.array(value, np.float32))

    def _byte(self, value: int) -> ir.Value:
        return self._write.constant(np.array(value, np.uint8))


def read_as_float16(graph: ir.Graph, node: ir.Node, table: np.ndarray, new_name: NewName) -> None:
    """Replace a Gather of float32 rows by nodes that read a float16 table [rows, width]. graph: the main graph."""
    before, ids = node.inputs[0], node.inputs[1]
    assert before is not None and ids is not None and node.graph is not None
    write = _Writer(graph, node.name or "positions", new_name)
    stored = new_initializer(graph, ir.Tensor(table, name=new_name(before.name or "positions")))
    rows = write.op("Cast", write.op("Gather", stored, ids), to=ir.DataType.FLOAT)
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], write.nodes, [node.outputs[0]], [rows])
    remove_unused(before)


def _nibbles(write: _Writer, q: ir.Value) -> ir.Value:
    """Unpack bytes [..., n] to low nibbles followed by high nibbles, float32 [..., 2 n]."""
    four = write.constant(np.array(4, np.uint8))
    low = write.op("BitShift", write.op("BitShift", q, four, direction="LEFT"), four, direction="RIGHT")
    high = write.op("BitShift", q, four, direction="RIGHT")
    return write.op("Cast", write.op("Concat", low, high, axis=-1), to=ir.DataType.FLOAT)


def _repeated(write: _Writer, place: ir.Value, middle: np.ndarray) -> ir.Value:
    """Repeat indices [..., 1, 3] to [..., m, 3], and add `middle` [m] to the second of the three."""
    offsets = np.zeros((len(middle), 3), np.int64)
    offsets[:, 1] = middle
    return write.op("Add", place, write.constant(offsets))


class _Writer:
    """Makes nodes; the caller inserts them into the graph. Constants become initializers of the main graph."""

    def __init__(self, graph: ir.Graph, name: str, new_name: NewName) -> None:
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

    def constant(self, value: Sequence[int] | int | np.ndarray) -> ir.Value:
        array = value if isinstance(value, np.ndarray) else np.array(value, np.int64)
        return new_initializer(self.graph, ir.Tensor(array, name=self._new_name(f"{self._name}/constant")))
