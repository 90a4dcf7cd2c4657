"""Store word embedding tables in int8 or int4, with about the same error as linear layers in that format.

8-bit tables have one scale per row, or group scales if an output head that may share the table has them. 4-bit tables
have scales and zero points in groups of 32, chosen by method mse. Standard operators read the rows
(operators/embedding.py). If a layer (a tied head) holds the same integers, pass replace removes the table, and rows are
read from the layer's weight. A table with another consumer that is not replaced stays float: it would be stored twice.
If a word table is stored, tables of positions become float16. Tables of a GGUF file are kept as given; those of 4, 5
and 6 bits are packed like a weight of W4A8MatMul.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ortolan import _native

from ..find.embedding import Embedding, find_embeddings, find_position_lookups
from ..find.linear import Linear
from ..find.quantized_weight import QuantizedWeight
from ..operators import sparse_amx_matmul_function as sparse_amx
from ..operators import w4a8_matmul_function as w4a8
from ..operators import w8a8_matmul_function as w8a8
from ..operators.embedding import StoredEmbedding, read_as_float16
from ..operators.function_body import PANEL_COLUMNS
from ..operators.nodes import input_of, new_initializer, nodes_of
from ..operators.replacement import LayerWeight, stored_tensor
from ..operators.sparse_amx_matmul_storage import BF16, stored_in
from ..operators.w4a8_matmul import W4A8MatMul, quantization_of
from ..options import Globs, PassOptions, any_matches, takes
from ..weights.quantizers.grid import (
    FRACTION_STEPS,
    GROUP_SIZES,
    Quantization,
    QuantizedMatrix,
    narrowed,
    round_to_nearest,
)
from ..weights.quantizers.mse import round_mse
from .context import PassContext, RecipePass
from .normalize import require_normalized

_ROWS = 8192  # rows that are quantized at a time
_BITS = (4, 8)
_POSITION_ERROR = 2.0**-11  # rounding error of float16, relative to the largest value


@dataclass(frozen=True)
class EmbeddingsOptions(PassOptions):
    """Options of pass `embeddings`."""

    table_bits: int = field(default=8, metadata=takes("int", choices=_BITS))
    # Patterns that select embeddings by the name of a Gather node or of its table.
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))


class EmbeddingsPass(RecipePass):
    """Store the selected tables in fewer bits."""

    options_type = EmbeddingsOptions
    options: EmbeddingsOptions

    def requires(self, model: ir.Model) -> None:
        """Require a normalized model."""
        require_normalized(model, "embeddings")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Store word tables as integers, then position tables as float16."""
        context, options = self.context, self.options
        linears = {linear.node: linear for linear in context.survey(model)}
        found = list[Embedding]()
        for embedding in find_embeddings(model.graph):
            context.layers.names += embedding.names
            if any_matches(embedding.names, options.select) and not any_matches(embedding.names, options.exclude):
                found.append(embedding)
        stored = False
        for embedding in found:
            if problem := self._why_not(embedding, linears):
                context.note(f"word embedding {embedding.table_name!r} is not changed: {problem}")
            elif context.dry_run:
                context.note(f"word embedding {embedding.table_name!r} would be stored in int{options.table_bits}")
            else:
                shape = (embedding.width, embedding.rows)
                may_be_tied = any((linear.k, linear.n) == shape for linear in linears.values())
                context.layers.embeddings.append(self._store(model, embedding, may_be_tied))
            stored |= problem is None
            context.release()
        self._narrow_positions(model, stored)
        return ir.passes.PassResult(model, stored and not context.dry_run)

    def _narrow_positions(self, model: ir.Model, wanted: bool) -> None:
        """Store position tables as float16 if `wanted` (a word table is stored as integers)."""
        context, options = self.context, self.options
        for node in find_position_lookups(model.graph):
            value = node.inputs[0]
            assert value is not None and value.const_value is not None
            names = [name for name in (node.name, value.name) if name]
            context.layers.names += names
            if not wanted or not any_matches(names, options.select) or any_matches(names, options.exclude):
                continue
            table = value.const_value.numpy()
            with np.errstate(over="ignore", under="ignore"):
                narrow = table.astype(np.float16)
            if not np.abs(narrow - table).max(initial=0) <= _POSITION_ERROR * np.abs(table).max(initial=0):
                context.note(f"position table {value.name!r} is not changed: float16 cannot hold its values")
            elif context.dry_run:
                context.note(f"position table {value.name!r} would be stored in float16")
            else:
                read_as_float16(model.graph, node, narrow, lambda name: context.new_name(model, name))
                context.note(f"position table {value.name!r} is stored in float16")

    def _why_not(self, embedding: Embedding, linears: dict[ir.Node, Linear]) -> str | None:
        context = self.context
        if not _is_finite(embedding.table()):  # the table is not kept: that of a large vocabulary takes gigabytes
            return "it holds NaN or infinity"
        for node in embedding.other_readers():
            linear = linears.get(node) if node is not None else None
            if linear is not None and context.plan.replaces and context.gains(linear, stored_in(linear.matrix())):
                continue
            reader = "an output of the model" if node is None else f"{node.name!r} ({node.op_type})"
            return f"{reader} also reads the table, so it would be stored twice"
        return None

    def _store(self, model: ir.Model, embedding: Embedding, may_be_tied: bool) -> StoredEmbedding:
        context = self.context
        given = context.given.get(embedding.table_name)
        if given is not None and given.bits < 8:
            return self._store_packed(model, embedding, given)
        table = embedding.table()
        quantization = Quantization(8, given.group_size) if given is not None else self._quantization(table)
        rounded = _Rows(table.shape, quantization)
        if given is not None:
            rounded.take(slice(None), given.q.numpy(), given.scales.numpy().astype(np.float32), None)
            given.release()
        else:
            for start in range(0, len(table), _ROWS):
                part = slice(start, start + _ROWS)
                one = _rounded(np.ascontiguousarray(table[part].T), quantization)
                rounded.take(part, one.q, one.scales, one.zero_points)

        def add(part: str, array: np.ndarray) -> ir.Value:
            name = context.new_name(model, f"{embedding.table_name}.{part}")
            return new_initializer(model.graph, context.spill.add(name, array, ir.DataType.from_numpy(array.dtype)))

        values = {part: add(part, array) for part, array in rounded.arrays().items()}
        context.note(f"word embedding {embedding.table_name!r} is stored in int{quantization.bits}, {rounded.scaled}")
        stored = StoredEmbedding(
            name=embedding.table_name,
            rows=embedding.rows,
            width=embedding.width,
            bits=quantization.bits,
            group_size=quantization.group_size,
            dtype=embedding.dtype,
            q=values["q"],
            scales=values["scales"],
            zero_points=values.get("zero_points"),
            as_bf16=_digest(table) if may_be_tied else b"",
        )
        stored.read_rows(model.graph, embedding, lambda wanted: context.new_name(model, wanted))
        return stored

    def _store_packed(self, model: ir.Model, embedding: Embedding, given: QuantizedWeight) -> StoredEmbedding:
        """Store a given table of few bits as a W4A8MatMul would, so that a tied head may replace it."""
        context = self.context
        packed = {}
        for part, tensor in W4A8MatMul().pack(LayerWeight(embedding.table().T, given)).items():
            name = context.new_name(model, f"{embedding.table_name}.{part}")
            packed[part] = new_initializer(model.graph, stored_tensor(context.spill, name, tensor))
        size = given.subgroup_size or given.group_size
        context.note(f"word embedding {embedding.table_name!r} is stored in int{given.bits}, in groups of {size}")
        stored = StoredEmbedding(
            name=embedding.table_name,
            rows=embedding.rows,
            width=embedding.width,
            bits=given.bits,
            group_size=given.group_size,
            dtype=embedding.dtype,
            q=packed["weights"],
            scales=packed["scales"],
            zero_points=None,
            as_bf16=b"",
            packed=packed,
        )
        stored.add_lookups([lookup.node for lookup in embedding.lookups])
        stored.read_few_bits(packed, given, model.graph, lambda wanted: context.new_name(model, wanted))
        return stored

    def _quantization(self, table: np.ndarray) -> Quantization:
        """Return the table's format: table_bits, or the format of an 8-bit head that can share its copy."""
        rows, width = table.shape
        for head in self.context.layers.quantized.values():
            if head.bits == 8 and head.group_size is not None and head.q.shape.numpy() == (width, rows):
                return Quantization(8, head.group_size)
        if self.options.table_bits == 8:
            return Quantization(8, None)
        return Quantization(4, GROUP_SIZES[0], symmetric=False, fractions=True)


def _is_finite(table: np.ndarray) -> bool:
    return bool(np.isfinite(table.max()) and np.isfinite(table.min()))


class _Rows:
    """A table's integers in the layout of operators/embedding.py, filled block of rows by block of rows."""

    def __init__(self, shape: tuple[int, ...], quantization: Quantization) -> None:
        rows, width = shape
        self._width, self._quantization = width, quantization
        self._in_group, self._groups = quantization.rows(width), quantization.groups(width)
        self._q = np.zeros((rows, self._groups * self._in_group), np.uint8 if quantization.bits == 4 else np.int8)
        self._scales = np.empty((rows, self._groups), np.float32)
        self._zero_points = np.empty((rows, self._groups), np.uint8) if quantization.bits == 4 else None

    @property
    def scaled(self) -> str:
        size = self._quantization.group_size
        return "one scale per row" if size is None else f"in groups of {size}"

    def take(self, part: slice, q: np.ndarray, scales: np.ndarray, zero_points: np.ndarray | None) -> None:
        """Store a block of rows: q [width, rows], scales and zero points [groups, rows]."""
        self._q[part, : self._width], self._scales[part] = q.T, scales.T
        if self._zero_points is not None:
            assert zero_points is not None
            self._zero_points[part] = np.rint(zero_points.T * FRACTION_STEPS)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of the table by name: q, scales and zero_points, 4-bit q packed."""
        scales = narrowed(self._scales)
        if self._quantization.group_size is None:
            return {"q": self._q, "scales": scales}
        q = self._q.reshape(len(self._q), self._groups, self._in_group)
        if self._zero_points is None:
            return {"q": q, "scales": scales[:, :, None]}
        half = self._in_group // 2
        return {
            "q": q[:, :, :half] | q[:, :, half:] << 4,
            "scales": scales[:, :, None],
            "zero_points": self._zero_points[:, :, None],
        }


def _rounded(matrix: np.ndarray, quantization: Quantization) -> QuantizedMatrix:
    return round_to_nearest(matrix, quantization) if quantization.bits == 8 else round_mse(matrix, quantization)


def read_from_heads(model: ir.Model, context: PassContext) -> None:
    """Read tables from the tied head that holds the same weights, so that they are stored once."""
    for table in context.layers.embeddings:
        for node in (node for op_type in _READERS for node in nodes_of(model, op_type)):
            sizes = [node.attributes[name].as_int() for name in ("k", "n")]
            if node.graph is not model.graph or sizes != [table.width, table.rows]:
                continue
            if _READERS[node.op_type](model, context, table, node):
                context.note(f"word embedding {table.name!r} is read from the weight of {node.name!r}, its tied head")
                break


def _read_few_bits(model: ir.Model, context: PassContext, table: StoredEmbedding, node: ir.Node) -> bool:
    """Look up rows in the weight of a W4A8MatMul; return False if it differs from the packed table."""
    held = {name: input_of(node, w4a8.INPUTS, name) for name in table.packed}
    values = {name: value for name, value in held.items() if value is not None}
    if not values or len(values) < len(held) or values == table.packed:
        return False
    if not all(np.array_equal(_array(value), _array(table.packed[name])) for name, value in values.items()):
        return False
    table.read_few_bits(values, quantization_of(node), model.graph, lambda wanted: context.new_name(model, wanted))
    return True


def _read_groups(model: ir.Model, context: PassContext, table: StoredEmbedding, node: ir.Node) -> bool:
    """Look up rows in the weight of a W8A8MatMul; return False if its integers or scales differ from the table."""
    weights, scales = (input_of(node, w8a8.INPUTS, name) for name in ("weights", "scales"))
    if weights is None or scales is None or table.q is weights:
        return False
    if table.bits != 8 or table.group_size != node.attributes["group_size"].as_int():
        return False
    q, own_scales = (_array(value).reshape(table.rows, -1) for value in (table.q, table.scales))
    packed_scales = _array(scales)
    if own_scales.dtype != packed_scales.dtype:
        return False
    columns = np.ascontiguousarray(own_scales.T)
    columns = columns.view(np.uint16) if columns.dtype == np.float16 else columns
    if _native.pack_group_rows(columns).tobytes() != packed_scales.tobytes():
        return False
    packed = _native.pack_int8_group(np.ascontiguousarray(q[:, : table.width].T))
    if not np.array_equal(packed.reshape(-1), _array(weights).reshape(-1)):
        return False
    table.read_groups(weights, scales, model.graph, lambda wanted: context.new_name(model, wanted))
    return True


def _read_dense(model: ir.Model, context: PassContext, table: StoredEmbedding, node: ir.Node) -> bool:
    """Look up rows in a dense SparseAMXMatMul; return False unless it stores the table in bf16 or the same int8."""
    masks, values, offsets, scales = (
        input_of(node, sparse_amx.INPUTS, name) for name in ("masks", "values", "offsets", "scales")
    )
    if masks is None or values is None or offsets is None or _array(masks).size or _array(offsets).size:
        return False
    bits = node.attributes["weight_bits"].as_int()
    zero_points = input_of(node, sparse_amx.INPUTS, "zero_points")
    shifted = zero_points is not None and bool(_array(zero_points).any())
    inputs = sparse_amx.row_inputs(bits)
    panels = -(-table.rows // PANEL_COLUMNS)
    packed = (
        _array(values).reshape(panels, -1, PANEL_COLUMNS, inputs).swapaxes(1, 2).reshape(panels * PANEL_COLUMNS, -1)
    )
    held = packed[: table.rows, : table.width]
    if bits == BF16:
        if not table.as_bf16 or _digest(held) != table.as_bf16:
            return False
        scales = None
    elif bits != 8 or table.bits != 8 or table.group_size is not None or scales is None or shifted:
        return False
    else:
        same = np.array_equal(_array(scales).reshape(-1)[: table.rows], _array(table.scales).reshape(-1))
        if not same or not np.array_equal(held, _array(table.q)):
            return False
    table.read_dense(values, scales, inputs, model.graph, lambda wanted: context.new_name(model, wanted))
    return True


_READERS = {w4a8.OP_TYPE: _read_few_bits, w8a8.OP_TYPE: _read_groups, sparse_amx.OP_TYPE: _read_dense}


def _digest(table: np.ndarray) -> bytes:
    found = blake2b(digest_size=16)
    for start in range(0, len(table), _ROWS):
        found.update(table[start : start + _ROWS].astype(ml_dtypes.bfloat16).tobytes())
    return found.digest()


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()
