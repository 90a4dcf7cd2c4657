"""NoMADAttention (scaled dot-product attention) without a cache as an ONNX function.

The function is the operator's specification, and the fallback without Ortolan's library.
It uses only operators whose meaning has not changed since opset 13. It ignores the attributes `precision` and
`reproducible`, which choose how the kernel rounds and in which order it sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..names import ORTOLAN_DOMAIN
from .function_body import FunctionBody
from .nodes import input_of
from .packed_tokens import packed, unpacked

OP_TYPE = "NoMADAttention"
PACKED_OP_TYPE = "PackedNoMADAttention"  # the variant for sequences packed without padding
ATTENTIONS = OP_TYPE, PACKED_OP_TYPE
INPUTS = ("query", "mask", "key", "value")
PACKED_INPUTS = (*INPUTS, "kept")
_OPERANDS = ("query", "key", "value")
_LOWEST = float(np.finfo(np.float32).min)
_LAST = np.iinfo(np.int64).max  # end of a Slice
ATTRIBUTES = {
    "num_heads": ir.AttributeType.INT,
    "kv_num_heads": ir.AttributeType.INT,
    "scale": ir.AttributeType.FLOAT,
    "causal": ir.AttributeType.INT,
    "zero_hidden_rows": ir.AttributeType.INT,
    "precision": ir.AttributeType.INT,
}
# With their defaults; functions have them if a node does.
SOFTCAP = ir.AttrFloat32("softcap", 0.0)
REPRODUCIBLE = ir.AttrString("reproducible", "")
WINDOW = ir.AttrInt64("local_window_size", 0)
SINKS = ir.AttrFloat32s("head_sink", (-np.inf,))


@dataclass(frozen=True)
class Uses:
    """The features that the NoMADAttention nodes of a model use.

    A function cannot test which inputs its node has, so all nodes of a model must have the same inputs.
    """

    packed: bool = False  # all nodes read key and value from their input query, or no node does
    mask: bool = True  # all nodes have a mask (a float 0 of shape [1] if there is nothing to add), or no node does
    grouped: bool = False  # some nodes have fewer KV heads than query heads
    causal: bool = False  # some nodes are causal
    zero_hidden_rows: bool = False  # some nodes set this attribute
    kept: bool = False  # all nodes are PackedNoMADAttention with all inputs, or no node is
    by_heads: frozenset[str] = frozenset()  # operands (query, key, value) that are [B, heads, S, D] in some nodes
    by_rows: frozenset[str] = frozenset(_OPERANDS)  # operands that are [B, S, heads D] in some nodes
    softcap: bool = False  # some nodes set this attribute
    reproducible: bool = False  # some nodes set this attribute
    sinks: bool = False  # some nodes set the attribute head_sink
    window: bool = False  # some nodes set the attribute local_window_size, and are causal


def uses_of(nodes: Sequence[ir.Node]) -> Uses:
    """Return the features that these nodes use."""

    def some(name: str) -> bool:
        return any(node.attributes[name].as_int() == 1 for node in nodes)

    def given(by_heads: bool) -> frozenset[str]:
        inputs = ((name, input_of(node, INPUTS, name)) for node in nodes for name in _OPERANDS)
        ranks = ((name, 3 if x.shape is None else len(x.shape)) for name, x in inputs if x is not None)
        return frozenset(name for name, rank in ranks if (rank == 4) == by_heads)

    heads = [[node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads")] for node in nodes]
    by_heads = given(by_heads=True)
    return Uses(
        packed=all(not is_given(input_of(node, INPUTS, "key")) for node in nodes),
        kept=any(node.op_type == PACKED_OP_TYPE for node in nodes),
        mask=any(len(node.inputs) > INPUTS.index("mask") for node in nodes),
        grouped=any(kv_heads not in (0, count) for count, kv_heads in heads),
        causal=some("causal"),
        zero_hidden_rows=some("zero_hidden_rows"),
        softcap=any(SOFTCAP.name in node.attributes for node in nodes),
        reproducible=any(REPRODUCIBLE.name in node.attributes for node in nodes),
        sinks=any(SINKS.name in node.attributes for node in nodes),
        window=any(WINDOW.name in node.attributes for node in nodes),
        by_heads=by_heads,
        by_rows=given(by_heads=False) | (set(_OPERANDS) - by_heads),
    )


def is_given(value: ir.Value | None) -> bool:
    """Return whether the node has this input; a one-element constant counts as missing."""
    return value is not None and (value.const_value is None or value.const_value.size != 1)


def nomad_attention_function(opset: int, uses: Uses) -> ir.Function:
    """Return the function for a model of this opset."""
    names: tuple[str, ...] = PACKED_INPUTS if uses.kept else INPUTS
    if uses.packed and not uses.kept:  # evaluators may require nodes to have all inputs
        names = INPUTS[: 2 if uses.mask else 1]
    inputs = {name: ir.val(name) for name in names}
    body = FunctionBody(opset)
    y = _Attention(body, inputs, uses).output()
    op_type = PACKED_OP_TYPE if uses.kept else OP_TYPE
    graph = ir.Graph(list(inputs.values()), [y], nodes=body.nodes, opset_imports={"": opset}, name=op_type)
    attributes = [ir.Attr(name, kind, None) for name, kind in ATTRIBUTES.items()]
    attributes += optional_attributes(uses.softcap, uses.reproducible, uses.sinks, uses.window)
    return ir.Function(ORTOLAN_DOMAIN, op_type, graph=graph, attributes=attributes)


def optional_attributes(
    softcap: bool = False, reproducible: bool = False, sinks: bool = False, window: bool = False
) -> list[ir.Attr]:
    """Return the attributes that functions declare if a node has them."""
    flags = (SOFTCAP, softcap), (REPRODUCIBLE, reproducible), (SINKS, sinks), (WINDOW, window)
    return [attribute for attribute, is_set in flags if is_set]


def scale_of(body: FunctionBody, head_dim: ir.Value) -> ir.Value:
    """Return the attribute scale, or its default."""
    op = body.op
    given = op("Constant", value_float=ir.RefAttr("value_float", "scale", ir.AttributeType.FLOAT))
    root = op("Sqrt", op("Cast", head_dim, to=ir.DataType.FLOAT))
    return op("Where", op("Equal", given, body.number(0)), op("Reciprocal", root), given)


def capped(body: FunctionBody, scores: ir.Value) -> ir.Value:
    """Return softcap tanh(scores / softcap), or the scores if the attribute softcap is 0."""
    op = body.op
    softcap = op("Constant", value_float=ir.RefAttr("value_float", SOFTCAP.name, SOFTCAP.type))
    is_off = op("Equal", softcap, body.number(0))
    divisor = op("Where", is_off, body.number(1), softcap)
    return op("Where", is_off, scores, op("Mul", op("Tanh", op("Div", scores, divisor)), softcap))


def turned_pairs(
    body: FunctionBody, x: ir.Value, cos: ir.Value, sin: ir.Value, head_dim: ir.Value, axis: int
) -> ir.Value:
    """Return x with the pairs (i, i + D / 2), or (2 i, 2 i + 1) if interleaved, of its last axis rotated.

    cos, sin: The angles of each row, which broadcast to half of x. head_dim: D. axis: The last axis of x.
    """
    op, one, two = body.op, body.integer(1), body.integer(2)
    interleaved = body.attribute("rotary_interleaved")
    is_interleaved = op("Cast", interleaved, to=ir.DataType.BOOL)
    half = op("Div", head_dim, two)
    first = op("Mul", op("Range", body.integer(0), half, one), op("Add", interleaved, one))
    second = op("Add", first, op("Where", is_interleaved, one, half))
    a, b = op("Gather", x, first, axis=axis), op("Gather", x, second, axis=axis)
    turned = op(
        "Concat",
        op("Sub", op("Mul", a, cos), op("Mul", b, sin)),
        op("Add", op("Mul", b, cos), op("Mul", a, sin)),
        axis=axis,
    )
    index = op("Range", body.integer(0), head_dim, one)
    woven = op("Add", op("Mul", op("Mod", index, two), half), op("Div", index, two))
    return op("Gather", turned, op("Where", is_interleaved, woven, index), axis=axis)


def rotated(
    body: FunctionBody,
    x: ir.Value,
    tables: Sequence[ir.Value],
    positions: ir.Value,
    *,
    axis: int,
    unrotated: bool,
) -> ir.Value:
    """Return x after rotary embedding of the first elements of its last axis, two for each column of the tables.

    Args:
        body: The function.
        x: Queries or keys; the head size is the last axis.
        tables: cos and sin [positions, half of the elements to rotate].
        positions: The positions of the tokens, with x's axes except for heads and head size.
        axis: The last axis of x.
        unrotated: Some nodes have no rotary embedding, but constants of one element as tables.
    """
    op, is_missing = body.op, None
    columns = op("Squeeze", op("Slice", op("Shape", tables[0]), body.ints(-1), body.ints(_LAST)), body.ints(0))
    if unrotated:
        # The constants are read as tables of one position and one angle.
        is_missing = op("Equal", op("Size", tables[0]), body.integer(1))
        tables = [op("Reshape", table, body.shape(-1, columns)) for table in tables]
        positions = op("Where", is_missing, body.integer(0), positions)
    cos, sin = (op("Unsqueeze", op("Gather", table, positions, axis=0), body.ints(1)) for table in tables)
    size = op("Mul", columns, body.integer(2))
    rest = op("Slice", x, body.vector(size), body.ints(_LAST), body.ints(axis))
    turned = op("Concat", turned_pairs(body, x, cos, sin, size, axis=axis), rest, axis=axis)
    return turned if is_missing is None else op("Where", is_missing, x, turned)


def is_recent(body: FunctionBody, token: ir.Value, end: ir.Value) -> ir.Value:
    """Return whether tokens are among the last `local_window_size` before `end`; always true if that is 0."""
    op, window = body.op, body.attribute(WINDOW.name)
    recent = op("Not", op("Less", token, op("Sub", end, window)))
    return op("Or", op("Equal", window, body.integer(0)), recent)


def weights_of(body: FunctionBody, scores: ir.Value, zero_hidden_rows: bool, sinks: bool) -> ir.Value:
    """Return the softmax of scores [B, heads, S, T].

    zero_hidden_rows: Some nodes set this attribute. sinks: Some nodes set head_sink, a further score of each head.
    """
    op = body.op
    if sinks:
        given = op("Constant", value_floats=ir.RefAttr("value_floats", SINKS.name, SINKS.type))
        rows = op("Slice", op("Shape", scores), body.ints(0), body.ints(3))
        column = op("Expand", op("Reshape", given, body.ints(1, -1, 1, 1)), op("Concat", rows, body.ints(1), axis=0))
        scores = op("Concat", scores, column, axis=3)
    weights = op("Softmax", scores, axis=-1)
    if sinks:
        weights = op("Slice", weights, body.ints(0), body.ints(-1), body.ints(3))
    if not zero_hidden_rows:
        return weights
    is_set = op("Cast", body.attribute("zero_hidden_rows"), to=ir.DataType.BOOL)
    return op("Where", op("And", op("IsNaN", weights), is_set), body.number(0), weights)


class _Attention:
    def __init__(self, body: FunctionBody, inputs: dict[str, ir.Value], uses: Uses) -> None:
        self._body = body
        self._inputs = inputs
        self._uses = uses
        self._kept: ir.Value | None = None
        if uses.kept:
            self._kept = inputs["kept"]
        self._heads = self._kv_heads = body.attribute("num_heads")
        if uses.grouped:
            given = body.attribute("kv_num_heads")
            self._kv_heads = body.op("Where", body.op("Equal", given, body.integer(0)), self._heads, given)
        all_heads = self._heads
        if uses.packed:
            all_heads = body.op("Add", self._heads, body.op("Mul", self._kv_heads, body.integer(2)))
        width = self._size(self._inputs["query"], -1)
        self._head_dim = self._by_layout("query", body.op("Div", width, all_heads), width)

    def output(self) -> ir.Value:
        body, op = self._body, self._body.op
        query, key, value = self._operands()
        # The axes are [batch, head, row, input], or if grouped [batch, key head, query head of the group, row, input].
        transposed = op("Transpose", key, perm=[0, 1, 2, 4, 3] if self._uses.grouped else [0, 1, 3, 2])
        scores = op("MatMul", op("Mul", query, scale_of(body, self._head_dim)), transposed)
        grouped_shape = op("Shape", scores)
        queries, keys = self._size(scores, -2), self._size(scores, -1)
        if self._uses.grouped:
            scores = op("Reshape", scores, body.shape(0, self._heads, queries, keys))
        if self._uses.softcap:
            scores = capped(body, scores)
        if self._uses.mask:
            scores = op("Add", scores, self._inputs["mask"])
        if self._kept is not None:
            kept = op("Unsqueeze", self._kept, body.ints(1, 2))
            # A token with a negative value in `kept` has a query, but its key is masked.
            unseen = op("Where", op("Cast", kept, to=ir.DataType.BOOL), body.number(_LOWEST), body.number(-np.inf))
            scores = op("Where", op("Greater", kept, body.integer(0)), scores, unseen)
        if self._uses.causal:
            scores = op("Where", self._seen(queries, keys), scores, body.number(-np.inf))
        weights = weights_of(body, scores, self._uses.zero_hidden_rows, self._uses.sinks)
        if self._uses.grouped:
            weights = op("Reshape", weights, grouped_shape)
        y = op("MatMul", weights, value)
        if self._uses.grouped:
            y = op("Reshape", y, body.shape(0, self._heads, queries, self._head_dim))
        width = op("Mul", self._heads, self._head_dim)
        # No size is 0 or -1, for the reason given in `reshape` (cache_formats_function.py).
        of_sequences = self._inputs["query"] if self._kept is None else self._kept
        batch, rows = self._size(of_sequences, 0), self._size(of_sequences, -2 if self._kept is None else 1)
        y = op("Reshape", op("Transpose", y, perm=[0, 2, 1, 3]), body.shape(batch, rows, width))
        if self._kept is not None:
            y = packed(body, self._kept, y)
        y.name = "Y"
        return y

    def _operands(self) -> list[ir.Value]:
        """Return query, key and value as [B, heads, S, D]."""
        body, op, query = self._body, self._body.op, self._inputs["query"]
        heads = [self._heads, self._kv_heads, self._kv_heads]
        if not self._uses.packed:
            values = [query, self._inputs["key"], self._inputs["value"]]
        else:
            ends = [body.integer(0)]
            for count in heads:
                ends.append(op("Add", ends[-1], op("Mul", count, self._head_dim)))
            begin, middle, last, end = map(body.vector, ends)
            axis = body.ints(2)
            bounds = ((begin, middle), (middle, last), (last, end))
            values = [op("Slice", query, start, stop, axis) for start, stop in bounds]
        by_rows = [self._by_rows(*operand) for operand in zip(_OPERANDS, values, heads, strict=True)]
        if self._kept is not None:
            by_rows = [unpacked(body, self._kept, x) for x in by_rows]
        return [
            self._split(x, count, name == "query") for name, x, count in zip(_OPERANDS, by_rows, heads, strict=True)
        ]

    def _by_layout(self, name: str, by_rows: ir.Value, by_heads: ir.Value) -> ir.Value:
        """Return by_rows if this input is [B, S, heads D], and by_heads if it is [B, heads, S, D]."""
        if name not in self._uses.by_heads:
            return by_rows
        if name not in self._uses.by_rows:
            return by_heads
        body, op = self._body, self._body.op
        rank = op("Size", op("Shape", self._inputs[name]))
        return op("Where", op("Equal", rank, body.integer(4)), by_heads, by_rows)

    def _by_rows(self, name: str, x: ir.Value, heads: ir.Value) -> ir.Value:
        """Return [B, S, heads D] unchanged, and [B, heads, S, D] as [B, S, heads, D]."""
        body, op, uses = self._body, self._body.op, self._uses
        if name not in uses.by_heads:
            return x
        if name not in uses.by_rows:
            return op("Transpose", x, perm=[0, 2, 1, 3])
        # Gather the heads of all rows in row-major order. (If is not used: see FunctionBody.by_attribute.)
        batch, rows = self._size(x, 0), self._size(x, -2)
        count = op("Mul", rows, heads)
        # Packed sequences may be empty. Reshape would read a count of 0 as "copy the dimension" (the heads), so use -1.
        flat = op("Reshape", x, body.shape(batch, count if self._kept is None else -1, self._head_dim))
        position = op("Range", body.integer(0), count, body.integer(1))
        row, head = op("Div", position, heads), op("Mod", position, heads)
        swapped = op("Add", op("Mul", head, rows), row)
        flat = op("Gather", flat, self._by_layout(name, position, swapped), axis=1)
        return op("Reshape", flat, body.shape(batch, rows, heads, self._head_dim))

    def _split(self, x: ir.Value, heads: ir.Value, is_query: bool) -> ir.Value:
        body, op = self._body, self._body.op
        if not self._uses.grouped:
            return op("Transpose", op("Reshape", x, body.shape(0, 0, heads, self._head_dim)), perm=[0, 2, 1, 3])
        group = op("Div", heads, self._kv_heads) if is_query else body.integer(1)
        split = op("Reshape", x, body.shape(0, 0, self._kv_heads, group, self._head_dim))
        return op("Transpose", split, perm=[0, 2, 3, 1, 4])

    def _seen(self, queries: ir.Value, keys: ir.Value) -> ir.Value:
        """Return whether query i sees key j, [queries, keys]; always true for a node that is not causal."""
        body, op = self._body, self._body.op
        one = body.integer(1)
        last = op("Unsqueeze", op("Range", op("Sub", keys, queries), keys, one), body.ints(1))
        key = op("Range", body.integer(0), keys, one)
        causal = op("Cast", body.attribute("causal"), to=ir.DataType.BOOL)
        seen = op("Or", op("Not", causal), op("Not", op("Less", last, key)))
        return op("And", seen, is_recent(body, key, op("Add", last, one))) if self._uses.window else seen

    def _size(self, x: ir.Value, axis: int) -> ir.Value:
        return self._body.op("Gather", self._body.op("Shape", x), self._body.integer(axis), axis=0)
