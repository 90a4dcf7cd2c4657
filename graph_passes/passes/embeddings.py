"""Stores tables of words in 8 bits: a quarter of their size or half of it, for an error like that of int8 layers.

Each row is rounded in groups of its numbers, whose scales are float16 as a rule, and read by standard operators
(operators/embedding.py). Where a layer's weight holds the same numbers, that of a head which is tied to the table,
pass replace lets the table go, and rows are read from the weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortolan import _native
from ortolan.errors import ModelError

from ..find.embedding import Embedding, find_embeddings
from ..find.quantized_weight import QuantizedWeight
from ..operators.embedding import StoredEmbedding
from ..operators.nodes import input_of, new_initializer, nodes_of
from ..operators.w8a8_matmul_function import INPUTS, OP_TYPE
from ..options import Globs, PassOptions, any_matches, takes
from ..weights.quantizers.grid import EIGHT_BIT_GROUP, GROUP_SIZES, Quantization, narrowed, round_to_nearest
from .context import PassContext, RecipePass
from .normalize import require_normalized

_BITS = 8
_ROWS = 8192  # that are rounded at once


@dataclass(frozen=True)
class EmbeddingsOptions(PassOptions):
    # By the name of the operator, or of its table.
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))


class EmbeddingsPass(RecipePass):
    """See the top of this file."""

    options_type = EmbeddingsOptions
    options: EmbeddingsOptions

    def requires(self, model: ir.Model) -> None:
        require_normalized(model, "embeddings")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        context, options = self.context, self.options
        found = list[Embedding]()
        for embedding in find_embeddings(model.graph):
            names = (embedding.name, embedding.table_name)
            context.layers.names += names
            if any_matches(names, options.select) and not any_matches(names, options.exclude):
                found.append(embedding)
        for embedding in found:
            doing = "would be stored" if context.dry_run else "is stored"
            context.note(f"word embedding {embedding.table_name!r} {doing} in int8, in groups")
            if not context.dry_run:
                context.layers.embeddings.append(self._store(model, embedding))
                context.release()
        return ir.passes.PassResult(model, modified=bool(found) and not context.dry_run)

    def _store(self, model: ir.Model, embedding: Embedding) -> StoredEmbedding:
        context = self.context
        table = embedding.table()
        if not (np.isfinite(table.max()) and np.isfinite(table.min())):
            raise ModelError(
                f"word embedding {embedding.table_name!r} holds NaN or infinity, so it cannot be stored in int8; "
                'export the model again, or leave it out: embeddings.exclude = ["*"]'
            )
        given = context.given.get(embedding.table_name)
        if given is not None and given.symmetric and given.bits == _BITS and given.group_size is not None:
            q, scales = _as_rows(given, given.group_size)
        else:
            q, scales = _rounded(table, self._group_size(table))

        def add(part: str, array: np.ndarray) -> ir.Value:
            name = context.new_name(model, f"{embedding.table_name}.{part}")
            return new_initializer(model.graph, context.spill.add(name, array, ir.DataType.from_numpy(array.dtype)))

        stored = StoredEmbedding(
            name=embedding.name,
            ids=embedding.ids,
            rows=embedding.rows,
            width=embedding.width,
            group_size=q.shape[2],
            rank=embedding.rank,
            dtype=embedding.dtype,
            q=add("q", q),
            scales=add("scales", narrowed(scales)),
            nodes=[embedding.node],
        )
        stored.read_rows(lambda wanted: context.new_name(model, wanted))
        return stored

    def _group_size(self, table: np.ndarray) -> int:
        """That of a head which may be tied to the table; else one by which no row becomes longer."""
        rows, width = table.shape
        for head in self.context.layers.quantized.values():
            if head.bits == _BITS and head.group_size is not None and head.q.shape.numpy() == (width, rows):
                return head.group_size
        return EIGHT_BIT_GROUP if width % EIGHT_BIT_GROUP == 0 else GROUP_SIZES[0]


def read_from_heads(model: ir.Model, context: PassContext) -> None:
    """Tables that a W8A8MatMul of the main graph holds as well are read there, and not stored once more."""
    for table in context.layers.embeddings:
        for node in nodes_of(model, OP_TYPE):
            sizes = [node.attributes[name].as_int() for name in ("k", "n", "group_size")]
            if node.graph is not model.graph or sizes != [table.width, table.rows, table.group_size]:
                continue
            weights, scales = (input_of(node, INPUTS, name) for name in ("weights", "scales"))
            if weights is not None and scales is not None and _is_weight(table, weights, scales):
                table.read_packed(weights, scales, lambda wanted: context.new_name(model, wanted))
                context.note(
                    f"word embedding of {table.name!r} is read from the weight of {node.name!r}, its tied head"
                )
                break


def _is_weight(table: StoredEmbedding, weights: ir.Value, scales: ir.Value) -> bool:
    """Whether a packed weight holds the numbers of the table."""
    q, own_scales = (_numbers(value).reshape(table.rows, -1) for value in (table.q, table.scales))
    packed_scales = _numbers(scales)
    if own_scales.dtype != packed_scales.dtype:
        return False
    columns = np.ascontiguousarray(own_scales.T)
    columns = columns.view(np.uint16) if columns.dtype == np.float16 else columns
    if _native.pack_group_rows(columns).tobytes() != packed_scales.tobytes():
        return False
    packed = _native.pack_int8_group(np.ascontiguousarray(q[:, : table.width].T))
    return np.array_equal(packed.reshape(-1), _numbers(weights).reshape(-1))


def _numbers(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def _as_rows(given: QuantizedWeight, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """As _rounded, of numbers [width, rows] that are known."""
    width, rows = given.q.shape.numpy()
    groups = given.groups(width)
    q = np.zeros((rows, groups * group_size), np.int8)
    q[:, :width] = given.q.numpy().T
    scales = given.scales.numpy().T.astype(np.float32)
    given.release()
    return q.reshape(rows, groups, group_size), scales[:, :, None]


def _rounded(table: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """q, int8 [rows, groups, inputs of a group], zeros behind the end of a row; scales, float32 [rows, groups, 1]."""
    (rows, width), quantization = table.shape, Quantization(_BITS, group_size)
    groups = quantization.groups(width)
    q = np.zeros((rows, groups * group_size), np.int8)
    scales = np.empty((rows, groups), np.float32)
    for start in range(0, rows, _ROWS):
        part = slice(start, start + _ROWS)
        rounded = round_to_nearest(np.ascontiguousarray(table[part].T), quantization)
        q[part, :width], scales[part] = rounded.q.T, rounded.scales.T
    return q.reshape(rows, groups, group_size), scales[:, :, None]
