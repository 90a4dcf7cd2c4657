"""ONNX nodes that read and write compressed KV caches: key codes and int8 values, for nomad_cache_function.py.

Specification: ops/formats/key_code_cache.h and value_cache.h.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike

from .function_body import FunctionBody

# These constants equal those of the C++ code in ops/formats.
_BLOCK = 32  # tokens per block
_CENTROIDS = 16
SCALE_BYTES = 2  # bytes of the bfloat16 scale before each row of int8 values
_NAN_BITS = 0x7FC0  # bits of a bfloat16 NaN
_INT32 = ir.DataType.INT32


def size_of(body: FunctionBody, x: ir.Value, axis: int) -> ir.Value:
    """Return one dimension of x as an int64 scalar."""
    return body.op("Gather", body.op("Shape", x), body.integer(axis), axis=0)


def reshape(body: FunctionBody, x: ir.Value, keep: int, *sizes: ir.Value | int) -> ir.Value:
    """Reshape x, keeping its first `keep` dimensions and replacing the remaining ones by `sizes`."""
    op = body.op
    # Kept dimensions are not written as 0 in Reshape's shape: ONNX Runtime would then turn a later size into -1, which
    # fails for empty tensors.
    kept = op("Slice", op("Shape", x), body.ints(0), body.ints(keep))
    return op("Reshape", x, op("Concat", kept, body.shape(*sizes), axis=0))


def _whole_blocks(body: FunctionBody, rows: ir.Value, dtype: DTypeLike) -> ir.Value:
    """Pad [B, heads, T, row] with zero tokens to whole blocks."""
    op = body.op
    shape = op("Shape", rows)
    more = op("Mod", op("Neg", size_of(body, rows, 2)), body.integer(_BLOCK))
    sizes = op(
        "Concat",
        op("Slice", shape, body.ints(0), body.ints(2)),
        body.vector(more),
        op("Slice", shape, body.ints(3), body.ints(4)),
        axis=0,
    )
    return op("Concat", rows, op("Expand", body.constant(np.zeros((), dtype)), sizes), axis=2)


def _by_position(body: FunctionBody, blocks: ir.Value, rows: ir.Value, tokens: ir.Value) -> ir.Value:
    """Return a cache of `tokens` [B] tokens: full blocks, then the remaining tokens in row layout.

    `blocks` holds all tokens in block layout and may be padded; `rows` holds all tokens in row layout. Both are [B,
    heads, T, …].
    """
    op = body.op
    size = size_of(body, rows, 2)
    blocks = op("Slice", blocks, body.ints(0), body.vector(size), body.ints(2))
    block = body.integer(_BLOCK)
    full = op("Unsqueeze", op("Mul", op("Div", tokens, block), block), body.ints(1, 2, 3))
    token = op("Unsqueeze", op("Range", body.integer(0), size, body.integer(1)), body.ints(1))
    return op("Where", op("Less", token, full), blocks, rows)


class KeyCodes:
    """Keys as product-quantization codes, in the format of ops/formats/key_code_cache.h.

    A key is split into parts of d_sub values; a code is the index of a part's nearest centroid. Codes are int32
    [B, KV, tokens, parts].
    """

    def __init__(self, body: FunctionBody, codebooks: ir.Value, d_sub: int) -> None:
        self._body, self._codebooks, self._largest = body, codebooks, d_sub
        op = body.op
        self._parts, self._d_sub = size_of(body, codebooks, 1), size_of(body, codebooks, 3)
        self.row_bytes = op("Div", self._parts, body.integer(2))
        self._quads = op("Div", self._parts, body.integer(4))
        # Compute the index of each part's nibble in a row. In a byte, the low nibble comes first.
        eight = body.integer(8)
        part = op("Range", body.integer(0), self._parts, body.integer(1))
        in_eight = op("Mod", part, eight)
        is_last = op("Less", op("Mul", op("Div", self._parts, eight), eight), op("Add", part, body.integer(1)))
        # Eight parts fill four bytes; if four parts remain at the end, they fill two bytes.
        lane = op("Where", is_last, body.integer(2), body.integer(4))
        byte = op("Add", op("Mul", op("Div", part, eight), body.integer(4)), op("Mod", in_eight, lane))
        self._nibble = op("Add", op("Mul", byte, body.integer(2)), op("Div", in_eight, lane))
        self._part = op("ScatterElements", part, self._nibble, part, axis=0)  # the inverse map: nibble -> part

    def from_cache(self, cache: ir.Value, tokens: ir.Value) -> ir.Value:
        """Return the codes of a cache with `tokens` [B] tokens. Codes of later tokens are undefined."""
        body, op = self._body, self._body.op
        integers = op("Cast", cache, to=_INT32)
        rows = reshape(body, self._nibbles(integers, 4), 3, self._parts)
        rows = op("Gather", rows, self._nibble, axis=3)
        whole = _whole_blocks(body, integers, np.int32)
        count = op("Div", size_of(body, whole, 2), body.integer(_BLOCK))
        quads = reshape(body, whole, 2, count, self._quads, _BLOCK // 2, 4)
        keys = op("Transpose", self._nibbles(quads, 3), perm=[0, 1, 2, 3, 5, 4, 6])
        blocks = reshape(body, keys, 2, size_of(body, whole, 2), self._parts)
        return _by_position(body, blocks, rows, tokens)

    def to_cache(self, codes: ir.Value, tokens: ir.Value) -> ir.Value:
        """Return the cache of these codes, with `tokens` [B] tokens; the inverse of `from_cache`."""
        body, op = self._body, self._body.op
        nibbles = reshape(body, op("Gather", codes, self._part, axis=3), 3, self.row_bytes, 2)
        rows = self._bytes(nibbles, 4)
        whole = _whole_blocks(body, codes, np.int32)
        count = op("Div", size_of(body, whole, 2), body.integer(_BLOCK))
        keys = reshape(body, whole, 2, count, 2, _BLOCK // 2, self._quads, 4)
        quads = self._bytes(op("Transpose", keys, perm=[0, 1, 2, 3, 5, 4, 6]), 3)
        blocks = reshape(body, quads, 2, size_of(body, whole, 2), self.row_bytes)
        return op("Cast", _by_position(body, blocks, rows, tokens), to=ir.DataType.UINT8)

    def nearest(self, keys: ir.Value) -> ir.Value:
        """Return the codes of the nearest centroids for keys [B, KV, tokens, D]."""
        body, op = self._body, self._body.op
        parts = reshape(body, keys, 3, self._parts, self._d_sub)
        distances = None
        for i in range(self._largest):  # add in the kernel's order, because each sum is rounded
            number = body.integer(i)
            at = op("Min", number, op("Sub", self._d_sub, body.integer(1)))
            key = op("Unsqueeze", op("Gather", parts, at, axis=4), body.ints(4))
            centroid = op("Unsqueeze", op("Gather", self._codebooks, at, axis=3), body.ints(1))
            difference = op("Sub", key, centroid)
            square = op("Mul", difference, difference)
            if distances is None:
                distances = square
            else:
                square = op("Where", op("Less", number, self._d_sub), square, body.number(0))
                distances = op("Add", distances, square)
        assert distances is not None
        infinity = body.number(np.inf)
        known = op("Where", op("Less", distances, infinity), distances, infinity)  # NaN counts as infinity
        return op("Cast", op("ArgMin", known, axis=4, keepdims=0), to=_INT32)

    def keys(self, codes: ir.Value) -> ir.Value:
        """Return the keys [B, KV, tokens, D] that codes represent."""
        body, op = self._body, self._body.op
        kv_heads = size_of(body, self._codebooks, 0)
        part = op("Range", body.integer(0), op("Mul", kv_heads, self._parts), body.integer(1))
        first = op("Cast", op("Mul", part, body.integer(_CENTROIDS)), to=_INT32)
        number = op("Add", codes, op("Reshape", first, body.shape(kv_heads, 1, self._parts)))
        centroids = op("Reshape", self._codebooks, body.shape(-1, self._d_sub))
        head_dim = op("Mul", self._parts, self._d_sub)
        return reshape(body, op("Gather", centroids, number, axis=0), 3, head_dim)

    def _nibbles(self, integers: ir.Value, axis: int) -> ir.Value:
        """Split bytes into low and high nibbles, along a new axis."""
        body, op = self._body, self._body.op
        sixteen, at = body.constant(np.array(16, np.int32)), body.ints(axis)
        low, high = op("Mod", integers, sixteen), op("Div", integers, sixteen)
        return op("Concat", op("Unsqueeze", low, at), op("Unsqueeze", high, at), axis=axis)

    def _bytes(self, nibbles: ir.Value, axis: int) -> ir.Value:
        body, op = self._body, self._body.op
        low, high = (op("Gather", nibbles, body.integer(i), axis=axis) for i in range(2))
        return op("Add", low, op("Mul", high, body.constant(np.array(16, np.int32))))


class Int8Values:
    """Int8 values in the format of ops/formats/value_cache.h.

    Rows are uint8 [B, KV, tokens, 2 + D]: a scale, then integers.

    """

    _QUAD = 4  # number of tokens whose values are interleaved in a block

    def __init__(self, body: FunctionBody) -> None:
        self._body = body

    def from_cache(self, cache: ir.Value, tokens: ir.Value) -> ir.Value:
        """Return the rows of a cache with `tokens` [B] tokens. Rows of later tokens are undefined."""
        body, op = self._body, self._body.op
        whole = _whole_blocks(body, cache, np.uint8)
        scales_bytes, quads = _BLOCK * SCALE_BYTES, _BLOCK // self._QUAD
        row = size_of(body, cache, 3)
        head_dim = op("Sub", row, body.integer(SCALE_BYTES))
        count = op("Div", size_of(body, whole, 2), body.integer(_BLOCK))
        flat = reshape(body, whole, 2, count, op("Mul", row, body.integer(_BLOCK)))
        scales = reshape(body, self._until(flat, scales_bytes), 3, _BLOCK, SCALE_BYTES)
        integers = reshape(body, self._after(flat, scales_bytes), 3, quads, head_dim, self._QUAD)
        integers = op("Transpose", integers, perm=[0, 1, 2, 3, 5, 4])
        integers = reshape(body, integers, 3, _BLOCK, head_dim)
        blocks = reshape(body, op("Concat", scales, integers, axis=4), 2, size_of(body, whole, 2), row)
        return _by_position(body, blocks, cache, tokens)

    def to_cache(self, rows: ir.Value, tokens: ir.Value) -> ir.Value:
        """Return the cache of these rows, with `tokens` [B] tokens; the inverse of `from_cache`."""
        body, op = self._body, self._body.op
        whole = _whole_blocks(body, rows, np.uint8)
        quads = _BLOCK // self._QUAD
        row = size_of(body, rows, 3)
        head_dim = op("Sub", row, body.integer(SCALE_BYTES))
        count = op("Div", size_of(body, whole, 2), body.integer(_BLOCK))
        block = reshape(body, whole, 2, count, _BLOCK, row)
        scales = reshape(body, self._until(block, SCALE_BYTES), 3, _BLOCK * SCALE_BYTES)
        integers = reshape(body, self._after(block, SCALE_BYTES), 3, quads, self._QUAD, head_dim)
        integers = op("Transpose", integers, perm=[0, 1, 2, 3, 5, 4])
        integers = reshape(body, integers, 3, op("Mul", head_dim, body.integer(_BLOCK)))
        blocks = reshape(body, op("Concat", scales, integers, axis=3), 2, size_of(body, whole, 2), row)
        return _by_position(body, blocks, rows, tokens)

    def rows(self, values: ir.Value) -> ir.Value:
        """Quantize values [B, KV, tokens, D] to rows."""
        body, op = self._body, self._body.op
        is_finite = op("Less", op("Abs", values), body.number(np.inf))
        magnitude = op("Where", is_finite, op("Abs", values), body.number(0))
        bits = self._rounded_up(op("Div", self._reduced(body.reduce_max(magnitude, -1)), body.number(127)))
        bad = self._reduced(body.reduce_max(op("Cast", op("Not", is_finite), to=ir.DataType.FLOAT), -1))
        bits = op("Where", op("Greater", bad, body.number(0)), self._int32(_NAN_BITS), bits)
        byte = self._int32(256)
        scale = self._number(bits)
        units = op("Max", op("Min", op("Div", values, scale), body.number(127)), body.number(-127))
        units = op("Where", op("Greater", scale, body.number(0)), units, body.number(0))
        integers = op("Mod", op("Add", op("Cast", op("Round", units), to=_INT32), byte), byte)
        row = op("Concat", op("Mod", bits, byte), op("Div", bits, byte), integers, axis=3)
        return op("Cast", row, to=ir.DataType.UINT8)

    def values(self, rows: ir.Value) -> ir.Value:
        """Dequantize rows to values [B, KV, tokens, D]."""
        body, op = self._body, self._body.op
        integers = op("Cast", rows, to=_INT32)
        low, high = (op("Slice", integers, body.ints(i), body.ints(i + 1), body.ints(3)) for i in range(2))
        scale = self._number(op("Add", low, op("Mul", high, self._int32(256))))
        integers = self._after(integers, SCALE_BYTES)
        negative = op("Less", self._int32(127), integers)
        integers = op("Where", negative, op("Sub", integers, self._int32(256)), integers)
        return op("Mul", op("Cast", integers, to=ir.DataType.FLOAT), scale)

    def _rounded_up(self, x: ir.Value) -> ir.Value:
        """Return the bits of x rounded up to bfloat16, as int32 [B, KV, tokens, 1]; x is finite and not negative.

        The bits are the exponent, then the fraction in 128ths; a full 128/128 carries into the exponent.
        """
        body, op = self._body, self._body.op
        powers = np.ldexp(np.float32(1), np.arange(-126, 128))
        reached = op("Cast", op("Not", op("Less", x, body.constant(powers))), to=_INT32)
        binade = self._reduced(op("ReduceSum", reached, body.ints(3), keepdims=1))
        lead, power = self._lead_and_power(binade)
        steps = op("Ceil", op("Mul", op("Sub", op("Div", x, power), lead), body.number(128)))
        return op("Add", op("Mul", binade, self._int32(128)), op("Cast", steps, to=_INT32))

    def _number(self, bits: ir.Value) -> ir.Value:
        """Return the value of non-negative bfloat16 bits; infinity becomes NaN."""
        body, op = self._body, self._body.op
        binades, steps = op("Div", bits, self._int32(128)), op("Mod", bits, self._int32(128))
        lead, power = self._lead_and_power(op("Mod", binades, self._int32(256)))
        fraction = op("Mul", op("Cast", steps, to=ir.DataType.FLOAT), body.number(1 / 128))
        return op("Mul", op("Add", lead, fraction), power)

    def _lead_and_power(self, binade: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return (lead, power): a value with this exponent is power * (lead + fraction)."""
        body = self._body
        lead = np.ones(256, np.float32)
        lead[0] = 0  # subnormal numbers have no leading 1
        powers = np.ldexp(np.float32(1), np.clip(np.arange(256), 1, 254) - 127)
        powers[255] = np.nan
        first, second = (body.op("Gather", body.constant(table), binade, axis=0) for table in (lead, powers))
        return first, second

    def _int32(self, number: int) -> ir.Value:
        return self._body.constant(np.array(number, np.int32))

    def _reduced(self, x: ir.Value) -> ir.Value:
        """Cut the last axis of a reduction's result to length 1: ONNX Runtime keeps it if another axis is empty."""
        return self._until(x, 1)

    def _until(self, x: ir.Value, count: int) -> ir.Value:
        """Return the first `count` elements of the last axis."""
        return self._body.op("Slice", x, self._body.ints(0), self._body.ints(count), self._body.ints(-1))

    def _after(self, x: ir.Value, count: int) -> ir.Value:
        return self._body.op("Slice", x, self._body.ints(count), self._body.ints(2**31), self._body.ints(-1))
