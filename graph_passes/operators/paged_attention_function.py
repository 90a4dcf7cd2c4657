"""PagedNoMADAttention as an ONNX function: the operator's specification, and the fallback without the library.

ops/nomad_attention/op_paged.cc describes inputs and outputs. The function uses only operators whose meaning has not
changed since opset 13 (except ReduceMax). Its operators on bfloat16 and int8 are Cast, Reshape, Gather and ScatterND,
because ONNX Runtime has few others on CPUs.

The pools equal the kernel's bit for bit, except for the bits of NaN. The function differs from the kernel in two ways:

- Inf and NaN in a value reach all tokens of the sequence in the call, including tokens that do not see the value.
- sequence_starts, past_lengths and block_table are not checked, so results for invalid ones are undefined.

Calls without tokens or sequences are valid. Temporary memory: the float keys and values of the call's sequences, each
padded to the longest, and a score for each of these keys and each query, padded to the longest chunk.

Dimensions in comments: N tokens, B sequences, L tokens of the longest chunk (at least 1), C columns of the block table
that the call needs, T = 16 C, H query heads, KV key heads, G = H / KV, D the head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..names import ORTOLAN_DOMAIN
from .cache_formats_function import size_of
from .function_body import FunctionBody
from .nodes import input_of
from .nomad_attention_function import SOFTCAP, capped, is_given, optional_attributes, rotated, scale_of

OP_TYPE = "PagedNoMADAttention"
BLOCK_TOKENS = 16  # equals kBlockTokens in ops/attention/paged.h
_OPERANDS = ("query", "key", "value")
_POOLS = ("key_pool", "value_pool")
_ROTARY = ("cos", "sin")
_SCALES = ("key_scales", "value_scales")
INPUTS = (*_OPERANDS, *_POOLS, "sequence_starts", "past_lengths", "block_table", *_ROTARY, "sinks", *_SCALES)
OUTPUTS = ("Y", *(f"new_{name}" for name in (*_POOLS, *_SCALES)))
_QUAD = 4  # dimensions of an int8 key that are adjacent
_LARGEST = 127
_SMALLEST_ROW = 2.0**-100  # kSmallestRow of ops/attention/paged_loop.h
_LOG2_E = float(np.float32(1.44269504))
# All nodes must have these attributes. softcap is optional.
ATTRIBUTES = {
    "num_heads": ir.AttributeType.INT,
    "kv_num_heads": ir.AttributeType.INT,
    "scale": ir.AttributeType.FLOAT,
    "rotary_interleaved": ir.AttributeType.INT,
    "window": ir.AttributeType.INT,
}


@dataclass(frozen=True)
class PagedUses:
    """The features that the PagedNoMADAttention nodes of a model use.

    A function cannot test which inputs its node has, so all nodes must have all of `inputs()`. A float 0 of shape [1]
    replaces missing key, value, cos and sin; -Inf of shape [num_heads] replaces missing sinks.
    """

    packed: bool = False  # all nodes read key and value from their input query, or no node does
    by_heads: frozenset[str] = frozenset()  # operands (query, key, value) that are [1, heads, N, D] in all nodes
    mixed: frozenset[str] = frozenset()  # operands that are [1, heads, N, D] in some nodes, but not in all
    rotary: bool = False  # some nodes have cos and sin
    unrotated: bool = False  # some nodes have no cos and sin
    sinks: bool = False  # some nodes have this input
    window: bool = False  # some nodes have a window above 0
    softcap: bool = False  # some nodes set this attribute
    int8: bool = False  # the pools of all nodes are int8

    def inputs(self) -> tuple[str, ...]:
        """Return the inputs of the function."""
        if self.int8:
            return INPUTS
        if self.sinks:
            return INPUTS[: -len(_SCALES)]
        return INPUTS[: INPUTS.index("sinks" if self.rotary else _ROTARY[0])]


def paged_uses_of(nodes: Sequence[ir.Node]) -> PagedUses:
    """Return the features that these nodes use."""

    def given(name: str) -> list[ir.Value]:
        values = (input_of(node, INPUTS, name) for node in nodes)
        return [value for value in values if value is not None and is_given(value)]

    ranks = {name: {3 if x.shape is None else len(x.shape) for x in given(name)} for name in _OPERANDS}
    rotated = len(given(_ROTARY[0]))
    is_int8 = bool(given(_SCALES[0]))
    return PagedUses(
        packed=not given("key"),
        by_heads=frozenset(name for name, found in ranks.items() if found == {4}),
        mixed=frozenset(name for name, found in ranks.items() if len(found) > 1),
        rotary=rotated > 0,
        unrotated=rotated < len(nodes),
        # A single head's sinks may be a constant of one element, which is_given takes for a missing input.
        sinks=any(input_of(node, INPUTS, "sinks") is not None for node in nodes) or is_int8,
        window=any(node.attributes["window"].as_int() > 0 for node in nodes),
        softcap=any(SOFTCAP.name in node.attributes for node in nodes),
        int8=is_int8,
    )


def paged_attention_function(opset: int, uses: PagedUses) -> ir.Function:
    """Return the function for a model of this opset."""
    inputs = {name: ir.val(name) for name in uses.inputs()}
    body = FunctionBody(opset)
    outputs = _PagedAttention(body, inputs, uses).outputs()
    for value, name in zip(outputs, OUTPUTS if uses.int8 else OUTPUTS[: -len(_SCALES)], strict=True):
        value.name = name
    graph = ir.Graph(list(inputs.values()), outputs, nodes=body.nodes, opset_imports={"": opset}, name=OP_TYPE)
    attributes = [ir.Attr(name, kind, None) for name, kind in ATTRIBUTES.items()]
    attributes += optional_attributes(uses.softcap)
    return ir.Function(ORTOLAN_DOMAIN, OP_TYPE, graph=graph, attributes=attributes)


class _PagedAttention:
    # Reshape reads a size of 0 as "copy the input's dimension at this index". Of the sizes below only B, C and T can be
    # 0, and they always have the index of a dimension that is 0 too.

    def __init__(self, body: FunctionBody, inputs: dict[str, ir.Value], uses: PagedUses) -> None:
        self._body, self._inputs, self._uses = body, inputs, uses
        op = body.op
        self._block = body.integer(BLOCK_TOKENS)
        self._heads = body.attribute("num_heads")
        given = body.attribute("kv_num_heads")
        self._kv_heads = op("Where", op("Equal", given, body.integer(0)), self._heads, given)
        self._group = op("Div", self._heads, self._kv_heads)
        # Pools may have the shape [blocks, KV, …] or [blocks, 16, KV, D].
        of_block = op("Slice", op("Shape", inputs["value_pool"]), body.ints(1), body.ints(4))
        elements = op("ReduceProd", of_block, keepdims=0)
        self._head_dim = op("Div", elements, op("Mul", self._kv_heads, self._block))
        self._count = size_of(body, inputs["query"], -2)
        self._sequences = size_of(body, inputs["past_lengths"], 0)
        self._read_sequences()

    def outputs(self) -> list[ir.Value]:
        op = self._body.op
        query, key, value = self._operands()
        if self._uses.rotary:
            query, key = self._rotated(query), self._rotated(key)
        # All tokens are in the pools before any is read.
        scales: list[ir.Value] = []
        if self._uses.int8:
            (key, key_scale), (value, value_scale) = self._rounded(key), self._rounded(value)
            scales = [
                self._scattered_scales(name, scale)
                for name, scale in zip(_SCALES, (key_scale, value_scale), strict=True)
            ]
        pools = self._appended(key, value)
        y = self._attention(self._chunks(query), *self._keys(pools[0], scales), self._values(pools[1], scales))
        y = op("Gather", y, op("Add", op("Mul", self._sequence, self._longest), self._row), axis=0)
        return [op("Unsqueeze", y, self._body.ints(0)), *pools, *scales]

    def _read_sequences(self) -> None:
        """Compute sizes of each sequence [B], and the sequence, row in its chunk, and position of each token [N]."""
        body, op = self._body, self._body.op
        starts, past = self._inputs["sequence_starts"], self._inputs["past_lengths"]
        zero, first_axis = body.integer(0), body.ints(0)
        self._begin = op("Slice", starts, body.ints(0), body.vector(self._sequences), first_axis)
        end = op("Slice", starts, body.ints(1), body.ints(np.iinfo(np.int64).max), first_axis)
        self._added = op("Sub", end, self._begin)
        # Tokens after this call. The block table of a sequence without tokens in the call is ignored.
        self._lengths = op("Where", op("Less", zero, self._added), op("Add", past, self._added), zero)
        self._longest = self._largest(1, self._added)
        self._columns = body.divided_up(self._largest(0, self._lengths), self._block)
        self._tokens = op("Mul", self._columns, self._block)
        token = op("Range", zero, self._count, body.integer(1))
        is_later = op("Not", op("Less", op("Unsqueeze", token, body.ints(1)), end))
        self._sequence = op("ReduceSum", op("Cast", is_later, to=ir.DataType.INT64), body.ints(1), keepdims=0)
        self._row = op("Sub", token, op("Gather", self._begin, self._sequence, axis=0))
        self._position = op("Add", op("Gather", past, self._sequence, axis=0), self._row)

    def _largest(self, least: int, sizes: ir.Value) -> ir.Value:
        """Return the maximum of `least` and all sizes, an int64 scalar."""
        body, op = self._body, self._body.op
        return op("Squeeze", body.reduce_max(op("Concat", body.ints(least), sizes, axis=0), 0), body.ints(0))

    # ---- operands ----------------------------------------------------------------------------------------------------

    def _operands(self) -> list[ir.Value]:
        """Return query, key and value as [N, heads, D]."""
        body, op = self._body, self._body.op
        heads = {"query": self._heads, "key": self._kv_heads, "value": self._kv_heads}
        if not self._uses.packed:
            return [self._by_tokens(name, self._inputs[name], count) for name, count in heads.items()]
        operands = []
        begin = body.ints(0)
        for name, count in heads.items():
            end = op("Add", begin, op("Mul", body.vector(count), body.vector(self._head_dim)))
            part = op("Slice", self._inputs["query"], begin, end, body.ints(2))
            operands.append(self._by_tokens(name, part, count))
            begin = end
        return operands

    def _by_tokens(self, name: str, x: ir.Value, heads: ir.Value) -> ir.Value:
        body, op, head_dim = self._body, self._body.op, self._head_dim
        if name in self._uses.by_heads:
            return op("Transpose", op("Squeeze", x, body.ints(0)), perm=[1, 0, 2])
        flat = op("Reshape", x, body.shape(-1, head_dim))
        if name in self._uses.mixed:
            # Gather the heads of all tokens, token by token.
            index = op("Range", body.integer(0), op("Mul", self._count, heads), body.integer(1))
            swapped = op("Add", op("Mul", op("Mod", index, heads), self._count), op("Div", index, heads))
            has_four_axes = op("Equal", op("Size", op("Shape", x)), body.integer(4))
            flat = op("Gather", flat, op("Where", has_four_axes, swapped, index), axis=0)
        return op("Reshape", flat, body.shape(-1, heads, head_dim))

    def _rotated(self, x: ir.Value) -> ir.Value:
        """Rotate pairs (i, i + D / 2), or (2 i, 2 i + 1) if interleaved, by the angles of each token's position."""
        tables = [self._inputs[name] for name in _ROTARY]
        return rotated(self._body, x, tables, self._position, axis=2, unrotated=self._uses.unrotated)

    # ---- pools -------------------------------------------------------------------------------------------------------

    def _appended(self, key: ir.Value, value: ir.Value) -> list[ir.Value]:
        """Return both pools with key and value [N, KV, D] appended."""
        body, op, dim = self._body, self._body.op, self._head_dim
        zero, one = body.integer(0), body.integer(1)
        slot, head = op("Mod", self._position, self._block), self._head_indices()
        value_row = op("Add", op("Mul", head, self._block), op("Unsqueeze", slot, body.ints(1)))
        quad = body.integer(_QUAD if self._uses.int8 else 1)
        d = op("Range", zero, dim, one)
        # Element (d / quad, slot, d % quad) of the head's part of a block.
        in_head = op("Mul", op("Div", d, quad), op("Mul", quad, self._block))
        in_head = op("Add", in_head, op("Mod", d, quad))
        first = op("Mul", op("Unsqueeze", head, body.ints(2)), op("Mul", dim, self._block))
        of_slot = op("Unsqueeze", op("Mul", slot, quad), body.ints(1, 2))
        key_element = op("Add", op("Add", first, in_head), of_slot)
        return [
            self._scattered("key_pool", body.ints(-1), op("Unsqueeze", key_element, body.ints(3)), key),
            self._scattered("value_pool", body.shape(-1, dim), op("Unsqueeze", value_row, body.ints(2)), value),
        ]

    def _head_indices(self) -> ir.Value:
        """Return the index of each token's head among the heads of all blocks, [N, KV]."""
        body, op = self._body, self._body.op
        table = self._inputs["block_table"]
        at = op("Add", op("Mul", self._sequence, size_of(body, table, 1)), op("Div", self._position, self._block))
        block = op("Gather", op("Reshape", table, body.ints(-1)), at, axis=0)
        first = op("Unsqueeze", op("Mul", block, self._kv_heads), body.ints(1))
        return op("Add", first, op("Range", body.integer(0), self._kv_heads, body.integer(1)))

    def _scattered(self, name: str, shape: ir.Value, indices: ir.Value, new: ir.Value) -> ir.Value:
        """Return a pool in which `new`, in the pool's type, replaces the entries at indices of the reshaped pool."""
        op, pool = self._body.op, self._inputs[name]
        rounded = op("Cast", new, to=ir.DataType.INT8 if self._uses.int8 else ir.DataType.BFLOAT16)
        return op("Reshape", op("ScatterND", op("Reshape", pool, shape), indices, rounded), op("Shape", pool))

    def _rounded(self, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return int8(x) of ops/attention/paged.h as floats: the bytes, and the scales with a last axis of length 1."""
        body, op = self._body, self._body.op
        # NaN in a row with Inf or NaN, otherwise 0.
        check = op("ReduceSum", op("Mul", x, body.number(0)), body.ints(-1), keepdims=1)
        is_finite = op("Not", op("IsNaN", check))
        x = op("Where", is_finite, x, body.number(0))
        largest = body.reduce_max(op("Abs", x), -1)
        is_zero = op("Less", largest, body.number(_SMALLEST_ROW))
        factor = op("Div", body.number(_LARGEST), op("Where", is_zero, body.number(1), largest))
        factor = op("Where", is_zero, body.number(0), factor)
        codes = op("Round", op("Mul", x, factor))
        return codes, op("Add", op("Div", largest, body.number(_LARGEST)), check)

    def _scattered_scales(self, name: str, new: ir.Value) -> ir.Value:
        """Return scales in which `new` [N, KV, 1] replaces those of the call's tokens."""
        body, op = self._body, self._body.op
        pool, slot = self._inputs[name], op("Mod", self._position, self._block)
        element = op("Add", op("Mul", self._head_indices(), self._block), op("Unsqueeze", slot, body.ints(1)))
        flat = op("Reshape", pool, body.ints(-1))
        new = op("Squeeze", new, body.ints(2))
        return op("Reshape", op("ScatterND", flat, op("Unsqueeze", element, body.ints(2)), new), op("Shape", pool))

    def _of_sequences(self, pool: ir.Value, *shape: ir.Value) -> ir.Value:
        """Return the blocks of each sequence, [B, C, KV, *shape] in float; the first block replaces unused ones."""
        body, op, zero = self._body, self._body.op, self._body.integer(0)
        table = op("Slice", self._inputs["block_table"], body.ints(0), body.vector(self._columns), body.ints(1))
        token = op("Mul", op("Range", zero, self._columns, body.integer(1)), self._block)
        is_used = op("Less", token, op("Unsqueeze", self._lengths, body.ints(1)))
        blocks = op("Cast", op("Gather", pool, op("Where", is_used, table, zero), axis=0), to=ir.DataType.FLOAT)
        return op("Reshape", blocks, body.shape(self._sequences, self._columns, self._kv_heads, *shape))

    def _keys(self, pool: ir.Value, scales: list[ir.Value]) -> tuple[ir.Value, ir.Value | None]:
        """Return the keys of each sequence, [B, KV, D, T], and their scales [B, KV, 1, T] if they are int8."""
        body, op = self._body, self._body.op
        if not scales:
            blocks = op("Transpose", self._of_sequences(pool, self._head_dim, self._block), perm=[0, 2, 3, 1, 4])
            shape = body.shape(self._sequences, self._kv_heads, self._head_dim, self._tokens)
            return op("Reshape", blocks, shape), None
        quads = op("Div", self._head_dim, body.integer(_QUAD))
        blocks = self._of_sequences(pool, quads, self._block, body.integer(_QUAD))
        rows = op("Transpose", blocks, perm=[0, 2, 1, 4, 3, 5])
        rows = op("Reshape", rows, body.shape(self._sequences, self._kv_heads, self._tokens, self._head_dim))
        return op("Transpose", rows, perm=[0, 1, 3, 2]), op("Unsqueeze", self._scales(scales[0]), body.ints(2))

    def _scales(self, scales: ir.Value) -> ir.Value:
        """Return the scales of each sequence, [B, KV, T]."""
        body, op = self._body, self._body.op
        blocks = op("Transpose", self._of_sequences(scales, self._block), perm=[0, 2, 1, 3])
        return op("Reshape", blocks, body.shape(self._sequences, self._kv_heads, self._tokens))

    def _values(self, pool: ir.Value, scales: list[ir.Value]) -> ir.Value:
        """Return the values of each sequence, [B, KV, T, D]; 0 beyond its tokens, where the pool may hold NaN."""
        body, op = self._body, self._body.op
        blocks = op("Transpose", self._of_sequences(pool, self._block, self._head_dim), perm=[0, 2, 1, 3, 4])
        shape = body.shape(self._sequences, self._kv_heads, self._tokens, self._head_dim)
        values = op("Reshape", blocks, shape)
        if scales:
            values = op("Mul", values, op("Unsqueeze", self._scales(scales[1]), body.ints(3)))
        token = op("Unsqueeze", op("Range", body.integer(0), self._tokens, body.integer(1)), body.ints(1))
        exists = op("Less", token, op("Unsqueeze", self._lengths, body.ints(1, 2, 3)))
        return op("Where", exists, values, body.number(0))

    # ------------------------------------------------------------------------------------------------------------------

    def _chunks(self, query: ir.Value) -> ir.Value:
        """Return the queries of each sequence, [B, KV, G L, D]; padding holds any queries, its results are not used."""
        body, op = self._body, self._body.op
        row = op("Range", body.integer(0), self._longest, body.integer(1))
        token = op("Min", op("Add", op("Unsqueeze", self._begin, body.ints(1)), row), self._count)
        # A row of zeros follows the last token, so that calls without tokens need no other path.
        zeros = op("Expand", body.number(0), body.shape(1, self._heads, self._head_dim))
        rows = op("Gather", op("Concat", query, zeros, axis=0), token, axis=0)
        split = body.shape(self._sequences, self._longest, self._kv_heads, self._group, self._head_dim)
        by_heads = op("Transpose", op("Reshape", rows, split), perm=[0, 2, 3, 1, 4])
        rows_of_head = op("Mul", self._group, self._longest)
        return op("Reshape", by_heads, body.shape(self._sequences, self._kv_heads, rows_of_head, self._head_dim))

    def _attention(self, query: ir.Value, keys: ir.Value, key_scales: ir.Value | None, values: ir.Value) -> ir.Value:
        """Return the attention of all chunks, [B L, H D]."""
        body, op, uses = self._body, self._body.op, self._uses
        scores = self._scores(query, keys, key_scales)
        by_rows = op("Shape", scores)
        if uses.softcap:
            scores = capped(body, scores)
        scores = op("Reshape", scores, body.shape(self._sequences, self._heads, self._longest, self._tokens))
        scores = op("Where", self._seen(), scores, body.number(-np.inf))
        if uses.sinks:
            sinks = op("Unsqueeze", self._inputs["sinks"], body.ints(1, 2))
            sinks = op("Expand", sinks, body.shape(self._sequences, self._heads, self._longest, 1))
            scores = op("Concat", scores, sinks, axis=3)
        weights = op("Softmax", scores, axis=-1)
        if uses.sinks:
            weights = op("Slice", weights, body.ints(0), body.vector(self._tokens), body.ints(3))
        y = op("MatMul", op("Reshape", weights, by_rows), values)
        split = body.shape(self._sequences, self._kv_heads, self._group, self._longest, self._head_dim)
        y = op("Transpose", op("Reshape", y, split), perm=[0, 3, 1, 2, 4])
        rows, width = op("Mul", self._sequences, self._longest), op("Mul", self._heads, self._head_dim)
        return op("Reshape", y, body.shape(rows, width))

    def _scores(self, query: ir.Value, keys: ir.Value, key_scales: ir.Value | None) -> ir.Value:
        """Return the scores of all chunks before softcap, [B, KV, G L, T]."""
        body, op = self._body, self._body.op
        scale = scale_of(body, self._head_dim)
        if key_scales is None:
            return op("MatMul", op("Mul", query, scale), keys)
        # The kernel rounds queries that are scaled for powers of two.
        codes, query_scale = self._rounded(op("Mul", query, op("Mul", scale, body.number(_LOG2_E))))
        scores = op("Mul", op("MatMul", codes, keys), op("Mul", query_scale, key_scales))
        return op("Div", scores, body.number(_LOG2_E))

    def _seen(self) -> ir.Value:
        """Return whether row i of a chunk sees token j of its sequence, [B, 1, L, T]."""
        body, op, zero, one = self._body, self._body.op, self._body.integer(0), self._body.integer(1)
        row = op("Unsqueeze", op("Range", zero, self._longest, one), body.ints(1))
        position = op("Add", op("Unsqueeze", self._inputs["past_lengths"], body.ints(1, 2, 3)), row)
        token = op("Range", zero, self._tokens, one)
        seen = op("Not", op("Less", position, token))
        if not self._uses.window:
            return seen
        window = body.attribute("window")
        is_recent = op("Less", op("Sub", position, window), token)
        return op("And", seen, op("Or", op("Equal", window, zero), is_recent))
