"""NoMADAttention with a cache as an ONNX function: the operator's specification, and the fallback without the library.

The function uses only operators whose meaning has not changed since opset 13 (except ReduceMax). Specified elsewhere:

    cache formats   ops/formats/key_code_cache.h, value_cache.h
    inputs          ops/nomad_attention/op.cc, op_cached.h
    exact keys      ops/attention/kv_cache/ring.h: uncompressed keys of the first tokens (sinks) and the last (window)
    prompt          ops/nomad_attention/prompt_cache.h: a fixed first part of the text, its keys and values constants

Present caches equal the kernel's bit for bit, unless the kernel encodes keys with fused multiply-adds (as on aarch64)
or ONNX Runtime flushes subnormals. Tensors are [B, heads, tokens, …], as in the caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike

from ..names import ORTOLAN_DOMAIN
from .cache_formats_function import SCALE_BYTES, Int8Values, KeyCodes, reshape, size_of
from .function_body import PANEL_COLUMNS, FunctionBody
from .nomad_attention_function import ATTRIBUTES as EXACT_ATTRIBUTES
from .nomad_attention_function import INPUTS as EXACT_INPUTS
from .nomad_attention_function import (
    OP_TYPE,
    capped,
    is_recent,
    optional_attributes,
    rotated,
    scale_of,
    weights_of,
)
from .prompt_cache import MAX_CHUNK, PROMPT_INPUTS, TILE_INPUTS
from .sparse_amx_matmul_function import unpacked_bitmap

_ROTARY = ("cos", "sin")
_CACHE_INPUTS = (*EXACT_INPUTS, "past_key", "past_value", "codebooks", "lengths", *_ROTARY, "past_exact_key")
INPUTS = (*_CACHE_INPUTS, *PROMPT_INPUTS)
OUTPUTS = ("Y", "present_key", "present_value", "present_exact_key")
ATTRIBUTES = EXACT_ATTRIBUTES | {"rotary_interleaved": ir.AttributeType.INT}
_WINDOW_ATTRIBUTES = dict.fromkeys(("window", "sinks"), ir.AttributeType.INT)
_PROMPT_ATTRIBUTES = dict.fromkeys(("prompt_tokens", "prompt_head_dim"), ir.AttributeType.INT)

_SHORT_CALL = 4  # largest number of tokens of a call that reads its own keys from the cache (ops/nomad_attention)


@dataclass(frozen=True)
class CacheUses:
    """The features that the NoMADAttention nodes of a model use. At least one node has a cache.

    All nodes have all inputs up to lengths, and cos and sin if there are rotary positions or exact keys. Unused inputs
    are a float 0 of shape [1] for mask, key, value, cos and sin, a float32 [0] for codebooks, an int32 [0] for lengths.
    """

    d_sub: int = 0  # the largest d_sub of all codebooks; 0: keys are float
    int8_values: bool = False
    packed: bool = False  # all nodes read key and value from their input query, or no node does
    by_heads: frozenset[str] = frozenset()  # operands (query, key, value) that are [B, heads, S, D] in all nodes
    mixed: frozenset[str] = frozenset()  # operands that are [B, heads, S, D] in some nodes, but not in all
    # Some nodes have no cache: a float 0 of shape [1] replaces past_key and past_value. Then all caches are float.
    uncached: bool = False
    mask: bool = True  # some nodes have a mask
    grouped: bool = False  # some nodes have fewer KV heads than query heads
    causal: bool = False  # some nodes are causal
    zero_hidden_rows: bool = False  # some nodes set this attribute
    softcap: bool = False  # some nodes set this attribute
    reproducible: bool = False  # some nodes set this attribute
    sinks: bool = False  # some nodes set the attribute head_sink
    window: bool = False  # some nodes set the attribute local_window_size, and are causal
    lengths: bool = True  # some nodes have this input
    rotary: bool = False  # some nodes have cos and sin
    unrotated: bool = False  # some nodes have no cos and sin: a float 0 of shape [1] replaces each
    # Keys are codes, values are int8, and all caches are padded to one width that fits rows of both kinds.
    equal_rows: bool = False
    exact_keys: bool = False  # all nodes have past_exact_key, window and sinks, or no node does; needs d_sub > 0
    prompt: bool = False  # all nodes have a prompt and all inputs; past_exact_key may be a float 0 of shape [1]
    unpack_prompt_once: bool = True  # see `unpack_once` of sparse_amx_matmul_function

    def inputs(self) -> tuple[str, ...]:
        """Return the inputs of the function."""
        if self.prompt:
            return INPUTS
        if self.exact_keys:
            return _CACHE_INPUTS
        return INPUTS[: INPUTS.index("past_exact_key" if self.rotary else _ROTARY[0])]


def nomad_cache_function(opset: int, uses: CacheUses) -> ir.Function:
    """Return the function for a model of this opset."""
    inputs = {name: ir.val(name) for name in uses.inputs()}
    body = FunctionBody(opset)
    outputs = _CachedAttention(body, inputs, uses).outputs()
    for value, name in zip(outputs, OUTPUTS, strict=False):
        value.name = name
    graph = ir.Graph(list(inputs.values()), outputs, nodes=body.nodes, opset_imports={"": opset}, name=OP_TYPE)
    kinds = ATTRIBUTES | (_WINDOW_ATTRIBUTES if uses.exact_keys else {}) | (_PROMPT_ATTRIBUTES if uses.prompt else {})
    attributes = [ir.Attr(name, kind, None) for name, kind in kinds.items()]
    attributes += optional_attributes(uses.softcap, uses.reproducible, uses.sinks, uses.window)
    return ir.Function(ORTOLAN_DOMAIN, OP_TYPE, graph=graph, attributes=attributes)


class _CachedAttention:
    def __init__(self, body: FunctionBody, inputs: dict[str, ir.Value], uses: CacheUses) -> None:
        self._body, self._inputs, self._uses = body, inputs, uses
        op = body.op
        self._heads = body.attribute("num_heads")
        given = body.attribute("kv_num_heads")
        self._kv_heads = op("Where", op("Equal", given, body.integer(0)), self._heads, given)
        query = inputs["query"]
        self._batch, self._queries = size_of(body, query, 0), size_of(body, query, -2)
        heads = self._heads
        if uses.packed:
            heads = op("Add", heads, op("Mul", self._kv_heads, body.integer(2)))
        width = size_of(body, query, -1)
        self._head_dim = self._by_layout("query", op("Div", width, heads), width)
        if uses.uncached:
            pasts = {name: self._cache_or_empty(inputs[name]) for name in ("past_key", "past_value")}
            self._inputs = inputs | pasts
        self._room = size_of(body, self._inputs["past_key"], 2)
        # Lengths and caches do not count the prompt.
        self._prompt = body.attribute("prompt_tokens") if uses.prompt else body.integer(0)
        self._read_lengths()

    def _read_lengths(self) -> None:
        """Compute the tokens of each sequence before and after this call, [B], and the tokens of the present cache."""
        body, op = self._body, self._body.op
        all_tokens = op("Add", self._room, self._queries)
        every = op("Expand", all_tokens, body.vector(self._batch))
        if not self._uses.lengths:
            self._after, self._total = every, all_tokens
            self._past = op("Expand", self._room, body.vector(self._batch))
            return
        given = op("Reshape", op("Cast", self._inputs["lengths"], to=ir.DataType.INT64), body.ints(-1))
        given = op("Add", given, op("Sub", body.integer(1), self._prompt))
        # If the input lengths is empty, all sequences have the same number of tokens (`every`).
        self._after = op(
            "Slice", op("Concat", given, every, axis=0), body.ints(0), body.vector(self._batch), body.ints(0)
        )
        self._past = op("Max", op("Sub", self._after, self._queries), body.integer(0))
        ends = op("Concat", op("Add", self._past, self._queries), body.vector(self._room), axis=0)
        self._total = op("Squeeze", body.reduce_max(ends, 0))

    def outputs(self) -> list[ir.Value]:
        body, op, uses = self._body, self._body.op, self._uses
        query, key, value = self._operands()
        if uses.rotary:
            query, key = self._rotated(query), self._rotated(key)
        past_key, past_value = self._inputs["past_key"], self._inputs["past_value"]
        is_short = op("Less", self._queries, body.integer(_SHORT_CALL + 1))
        exact_keys: list[ir.Value] = []  # the arguments exact_keys and is_exact of _attention
        present_exact_key: list[ir.Value] = []
        if uses.exact_keys:
            exact_keys = [self._joined(self._past_exact_keys(), key), self._is_exact(is_short)]
            present_exact_key = [self._present_exact_keys(key)]
        if uses.d_sub:
            codes = KeyCodes(body, self._inputs["codebooks"], uses.d_sub)
            past_codes = codes.from_cache(self._narrow(past_key, codes.row_bytes), self._past)
            new_codes = codes.nearest(key)
            present_key = codes.to_cache(self._joined(past_codes, new_codes, np.int32), self._after)
            present_key = self._wide(present_key, codes.row_bytes)
            past_key, key = codes.keys(past_codes), op("Where", is_short, codes.keys(new_codes), key)
            keys = self._joined(past_key, key)
        else:
            keys = present_key = self._joined(past_key, key)
        if uses.int8_values:
            values_of = Int8Values(body)
            row_bytes = op("Add", self._head_dim, body.integer(SCALE_BYTES))
            past_rows = values_of.from_cache(self._narrow(past_value, row_bytes), self._past)
            new_rows = values_of.rows(value)
            present_value = values_of.to_cache(self._joined(past_rows, new_rows, np.uint8), self._after)
            present_value = self._wide(present_value, row_bytes)
            past_value, value = values_of.values(past_rows), op("Where", is_short, values_of.values(new_rows), value)
            values = self._joined(past_value, value)
        else:
            values = present_value = self._joined(past_value, value)
        # Each output of a function must be a separate value.
        present = [op("Identity", cache) for cache in (present_key, present_value)]
        if uses.prompt:
            prompt_keys, prompt_values = self._prompt_keys(), self._prompt_values()
            values = op("Concat", prompt_values, values, axis=2)
            keys = op("Concat", prompt_keys, keys, axis=2)
            exact_keys[:1] = [op("Concat", prompt_keys, one, axis=2) for one in exact_keys[:1]]
        return [self._attention(query, keys, values, *exact_keys), *present, *present_exact_key]

    def _operands(self) -> list[ir.Value]:
        """Return query, key and value as [B, heads, S, D]."""
        body, op, query = self._body, self._body.op, self._inputs["query"]
        heads = {"query": self._heads, "key": self._kv_heads, "value": self._kv_heads}
        if not self._uses.packed:
            return [self._by_heads(name, self._inputs[name], count) for name, count in heads.items()]
        operands = []
        begin = body.ints(0)
        for name, count in heads.items():
            end = op("Add", begin, op("Mul", count, self._head_dim))
            operands.append(self._by_heads(name, op("Slice", query, begin, end, body.ints(2)), count))
            begin = end
        return operands

    def _by_layout(self, name: str, by_rows: ir.Value, by_heads: ir.Value) -> ir.Value:
        """Return by_rows if this input is [B, S, heads D], and by_heads if it is [B, heads, S, D]."""
        if name not in self._uses.mixed:
            return by_heads if name in self._uses.by_heads else by_rows
        return self._body.op("Where", self._has_four_axes(self._inputs[name]), by_heads, by_rows)

    def _has_four_axes(self, x: ir.Value) -> ir.Value:
        return self._body.op("Equal", self._body.op("Size", self._body.op("Shape", x)), self._body.integer(4))

    def _by_heads(self, name: str, x: ir.Value, heads: ir.Value) -> ir.Value:
        body, op, head_dim = self._body, self._body.op, self._head_dim
        if name in self._uses.mixed:
            # Gather the heads of all rows in head-major order.
            rows = size_of(body, x, -2)
            count = op("Mul", rows, heads)
            position = op("Range", body.integer(0), count, body.integer(1))
            swapped = op("Add", op("Mul", op("Mod", position, rows), heads), op("Div", position, rows))
            flat = op("Reshape", x, body.shape(self._batch, count, head_dim))
            flat = op("Gather", flat, self._by_layout(name, swapped, position), axis=1)
            return op("Reshape", flat, body.shape(self._batch, heads, rows, head_dim))
        if name in self._uses.by_heads:
            return x
        return op("Transpose", reshape(body, x, 2, heads, head_dim), perm=[0, 2, 1, 3])

    def _cache_or_empty(self, past: ir.Value) -> ir.Value:
        """Return a past cache; if the node has none (a one-element constant), return an empty cache [B, KV, 0, D]."""
        body, op = self._body, self._body.op
        padded = op("Concat", op("Shape", past), body.ints(1, 1, 1), axis=0)
        shape = op("Slice", padded, body.ints(0), body.ints(4), body.ints(0))
        tokens = op("Gather", shape, body.integer(2), axis=0)
        tokens = op("Where", self._has_four_axes(past), tokens, body.integer(0))
        kept = op("Slice", op("Reshape", past, shape), body.ints(0), body.vector(tokens), body.ints(2))
        return op("Expand", kept, body.shape(self._batch, self._kv_heads, tokens, self._head_dim))

    def _rotated(self, x: ir.Value) -> ir.Value:
        """Rotate pairs (i, i + D / 2), or (2 i, 2 i + 1) if interleaved, by the angles of each token's position."""
        body, op = self._body, self._body.op
        row = op("Range", body.integer(0), self._queries, body.integer(1))
        positions = op("Add", op("Unsqueeze", op("Add", self._past, self._prompt), body.ints(1)), row)
        tables = [self._inputs[name] for name in _ROTARY]
        return rotated(body, x, tables, positions, axis=3, unrotated=self._uses.unrotated)

    def _joined(self, past: ir.Value, new: ir.Value, dtype: DTypeLike = np.float32) -> ir.Value:
        """Return each sequence's past tokens, then the new ones, then zeros; [B, KV, total, row]."""
        body, op = self._body, self._body.op
        if not self._uses.lengths:
            return op("Concat", past, new, axis=2)
        # For each token, its index in the concatenation of the past, the call, and one row of zeros.
        token = op("Range", body.integer(0), self._total, body.integer(1))
        before, after = (op("Unsqueeze", count, body.ints(1)) for count in (self._past, self._after))
        of_call = op("Add", op("Sub", token, before), self._room)
        zero_row = op("Add", self._room, self._queries)
        source = op("Where", op("Less", token, after), of_call, zero_row)
        source = op("Where", op("Less", token, before), token, source)
        sizes = body.shape(self._batch, self._kv_heads, 1, size_of(body, new, 3))
        zeros = op("Expand", body.constant(np.zeros((), dtype)), sizes)
        return self._tokens(op("Concat", past, new, zeros, axis=2), source)

    def _narrow(self, cache: ir.Value, row_bytes: ir.Value) -> ir.Value:
        """Return the rows of a past cache [B, KV, P, W], which are stored contiguously: [B, KV, P, row_bytes]."""
        body, op = self._body, self._body.op
        if not self._uses.equal_rows:
            return cache
        flat = reshape(body, cache, 2, op("Mul", self._room, size_of(body, cache, 3)))
        rows = op("Slice", flat, body.ints(0), body.vector(op("Mul", self._room, row_bytes)), body.ints(2))
        return reshape(body, rows, 2, self._room, row_bytes)

    def _wide(self, rows: ir.Value, row_bytes: ir.Value) -> ir.Value:
        """Widen rows [B, KV, total, row_bytes] to a present cache [B, KV, total, W]; zeros follow each head's rows."""
        body, op = self._body, self._body.op
        if not self._uses.equal_rows:
            return rows
        width = size_of(body, self._inputs["past_key"], 3)
        flat = reshape(body, rows, 2, op("Mul", self._total, row_bytes))
        more = body.shape(self._batch, self._kv_heads, op("Mul", self._total, op("Sub", width, row_bytes)))
        flat = op("Concat", flat, op("Expand", body.constant(np.zeros((), np.uint8)), more), axis=2)
        return reshape(body, flat, 2, self._total, width)

    def _tokens(self, x: ir.Value, positions: ir.Value) -> ir.Value:
        """Return the tokens of x [B, KV, tokens, row] at positions [B, n] of each sequence."""
        body, op = self._body, self._body.op
        rows = op("Transpose", x, perm=[0, 2, 1, 3])
        found = op("GatherND", rows, op("Unsqueeze", positions, body.ints(2)), batch_dims=1)
        return op("Transpose", found, perm=[0, 2, 1, 3])

    # ---- prompt ------------------------------------------------------------------------------------------------------

    def _prompt_keys(self) -> ir.Value:
        """Return the prompt's keys [B, KV, P, D]."""
        body, op = self._body, self._body.op
        head_dim = body.attribute("prompt_head_dim")
        columns = op("Mul", body.divided_up(self._prompt, body.integer(PANEL_COLUMNS)), body.integer(PANEL_COLUMNS))
        matrix = self._prompt_matrix("prompt_key", head_dim, op("Mul", self._kv_heads, columns))
        by_heads = op("Reshape", matrix, body.shape(head_dim, self._kv_heads, columns))
        return self._of_prompt(op("Transpose", by_heads, perm=[1, 2, 0]))

    def _prompt_values(self) -> ir.Value:
        """Return the prompt's values [B, KV, P, D]."""
        body, op = self._body, self._body.op
        head_dim = body.attribute("prompt_head_dim")
        chunks = body.divided_up(self._prompt, body.integer(MAX_CHUNK))
        tiles = body.divided_up(body.divided_up(self._prompt, chunks), body.integer(TILE_INPUTS))
        tokens = op("Mul", tiles, body.integer(TILE_INPUTS))
        matrix = self._prompt_matrix("prompt_value", tokens, op("Mul", op("Mul", self._kv_heads, chunks), head_dim))
        by_chunks = op("Reshape", matrix, body.shape(tokens, self._kv_heads, chunks, head_dim))
        by_heads = op("Transpose", by_chunks, perm=[1, 2, 0, 3])
        return self._of_prompt(op("Reshape", by_heads, body.shape(self._kv_heads, -1, head_dim)))

    def _prompt_matrix(self, name: str, k: ir.Value, n: ir.Value) -> ir.Value:
        inputs = self._inputs
        later = None if self._uses.unpack_prompt_once else inputs["query"]
        masks, values = inputs[f"{name}_masks"], inputs[f"{name}_values"]
        return unpacked_bitmap(self._body, masks, values, k, n, dense=True, seems_to_depend_on=later)

    def _of_prompt(self, rows: ir.Value) -> ir.Value:
        """Return the prompt's tokens, the same for all sequences."""
        body, op = self._body, self._body.op
        tokens = op("Slice", rows, body.ints(0), body.vector(self._prompt), body.ints(1))
        return op("Expand", op("Unsqueeze", tokens, body.ints(0)), body.shape(self._batch, 1, 1, 1))

    # ---- exact keys --------------------------------------------------------------------------------------------------

    def _past_exact_keys(self) -> ir.Value:
        """Return the exact keys [B, KV, P, D]; undefined for tokens without a slot."""
        body, op = self._body, self._body.op
        window, sinks, one = body.attribute("window"), body.attribute("sinks"), body.integer(1)
        token = op("Range", body.integer(0), self._room, one)
        turn = op("Mod", op("Sub", token, sinks), op("Max", window, one))
        slot = op("Where", op("Less", token, sinks), token, op("Add", sinks, turn))
        last = op("Sub", op("Add", sinks, window), one)  # with window 0, tokens after the sinks map to the last slot
        return op("Gather", self._inputs["past_exact_key"], op("Min", slot, last), axis=2)

    def _is_exact(self, is_short: ir.Value) -> ir.Value:
        """Return whether query i of a sequence uses the exact key of its token j, [B, 1, S, P + total].

        For prompt tokens the result does not matter, because both kinds of key are equal.
        """
        body, op = self._body, self._body.op
        zero, one, window = body.integer(0), body.integer(1), body.attribute("window")
        token = op("Range", op("Neg", self._prompt), self._total, one)
        row = op("Unsqueeze", op("Range", zero, self._queries, one), body.ints(1))
        # A long call reads the exact keys that are stored when it begins.
        row = op("Where", is_short, row, body.integer(-1))
        position = op("Add", op("Unsqueeze", self._past, body.ints(1, 2, 3)), row)
        recent = op("And", op("Less", op("Sub", position, window), token), op("Less", zero, window))
        return op("Or", op("Less", token, body.attribute("sinks")), recent)

    def _present_exact_keys(self, keys: ir.Value) -> ir.Value:
        """Return past_exact_key with the keys of this call's tokens in their slots."""
        body, op = self._body, self._body.op
        zero, one = body.integer(0), body.integer(1)
        window, sinks = body.attribute("window"), body.attribute("sinks")
        slot = op("Range", zero, op("Add", sinks, window), one)
        is_sink = op("Less", slot, sinks)
        past, after = (op("Unsqueeze", count, body.ints(1)) for count in (self._past, self._after))
        last = op("Sub", after, one)
        # Compute the last token that maps to each slot.
        token = op("Sub", last, op("Mod", op("Sub", last, slot), op("Max", window, one)))
        token = op("Where", is_sink, slot, token)
        first = op("Max", past, op("Where", is_sink, zero, sinks))
        is_new = op("And", op("Not", op("Less", token, first)), op("Less", token, after))
        source = op("Where", is_new, op("Sub", token, past), op("Add", self._queries, slot))
        return self._tokens(op("Concat", keys, self._inputs["past_exact_key"], axis=2), source)

    # ------------------------------------------------------------------------------------------------------------------

    def _attention(
        self,
        query: ir.Value,
        keys: ir.Value,
        values: ir.Value,
        exact_keys: ir.Value | None = None,
        is_exact: ir.Value | None = None,
    ) -> ir.Value:
        body, op, uses = self._body, self._body.op, self._uses
        if uses.grouped:
            head = op("Range", body.integer(0), self._heads, body.integer(1))
            group = op("Div", head, op("Div", self._heads, self._kv_heads))
            keys, values = (op("Gather", x, group, axis=1) for x in (keys, values))
            if exact_keys is not None:
                exact_keys = op("Gather", exact_keys, group, axis=1)
        scaled = op("Mul", query, scale_of(body, self._head_dim))
        scores = op("MatMul", scaled, op("Transpose", keys, perm=[0, 1, 3, 2]))
        if exact_keys is not None and is_exact is not None:
            exact = op("MatMul", scaled, op("Transpose", exact_keys, perm=[0, 1, 3, 2]))
            scores = op("Where", is_exact, exact, scores)
        if uses.softcap:
            scores = capped(body, scores)
        if uses.mask:
            scores = op("Add", scores, self._inputs["mask"])
        if uses.lengths or uses.causal:
            seen = self._seen_of(keys) if uses.uncached else self._seen()
            scores = op("Where", seen, scores, body.number(-np.inf))
        y = op("MatMul", weights_of(body, scores, uses.zero_hidden_rows, uses.sinks), values)
        width = op("Mul", self._heads, self._head_dim)
        return reshape(body, op("Transpose", y, perm=[0, 2, 1, 3]), 2, width)

    def _seen_of(self, keys: ir.Value) -> ir.Value:
        """Return whether query i sees key j, [S, T], if some nodes have no cache; the last query sees all keys."""
        body, op, one = self._body, self._body.op, self._body.integer(1)
        count = size_of(body, keys, 2)
        token = op("Range", body.integer(0), count, one)
        before = op("Sub", count, self._queries)
        row = op("Unsqueeze", op("Range", before, count, one), body.ints(1))
        is_causal = op("Cast", body.attribute("causal"), to=ir.DataType.BOOL)
        seen = op("Or", op("Not", is_causal), op("Not", op("Less", row, token)))
        return op("And", seen, is_recent(body, token, op("Add", row, one))) if self._uses.window else seen

    def _seen(self) -> ir.Value:
        """Return whether query i of a sequence sees its token j, [B, 1, S, P + total]."""
        body, op = self._body, self._body.op
        one = body.integer(1)
        token = op("Range", op("Neg", self._prompt), self._total, one)
        past, after = (op("Unsqueeze", count, body.ints(1, 2, 3)) for count in (self._past, self._after))
        exists = op("Less", token, after)
        if not self._uses.causal:
            return exists
        row = op("Unsqueeze", op("Range", one, op("Add", self._queries, one), one), body.ints(1))
        is_causal = op("Cast", body.attribute("causal"), to=ir.DataType.BOOL)
        end = op("Add", past, row)
        seen = op("And", exists, op("Or", op("Not", is_causal), op("Less", token, end)))
        return op("And", seen, is_recent(body, token, end)) if self._uses.window else seen
