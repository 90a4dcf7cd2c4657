"""Splits ONNX Runtime's fused attention operators into linear layers and a MultiHeadAttention without bias.

Masks become floats that are added to the scores: mask_filter_value for masked keys, 0 for other keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from .constants import constant_tensor
from .dimensions import Dimensions
from .fused_writer import Write, Writer, expect_floats, only_attributes, real_number, required, unused
from .node_checks import MICROSOFT_DOMAIN, UnfitError, constant_input, expect, integer_attribute, node_input
from .stored_int8 import INT8_TYPES, MATMUL_INTEGER_TO_FLOAT

_FLOATS = (ir.DataType.FLOAT,)
_PARTS = ("query", "key", "value")
_DEFAULT_FILL = -10000.0
_LOWEST = float(np.finfo(np.float32).min)
_INT64 = ir.DataType.INT64
_TRILU = 14  # first opset with Trilu


@dataclass(frozen=True)
class _Scores:
    """Operations on the scores of an attention operator."""

    heads: int
    scale: float  # 0: 1 / sqrt(head width)
    causal: bool
    mask: int | None  # index of the mask input, or None
    mask_rank: int
    fill: float  # added to the scores of masked keys
    bias: int | None  # index of the input that is added to the scores, or None
    lengths: tuple[Hashable, Hashable]  # keys for sharing nodes: equal for equal numbers of queries, and of keys


def attention(node: ir.Node, dims: Dimensions) -> Write:
    """Rewrite Attention.

    Inputs: input, weights, bias, mask_index, past, attention_bias, past_sequence_length.
    """
    only_attributes(
        node, "num_heads", "unidirectional", "scale", "mask_filter_value", "do_rotary", "past_present_share_buffer",
        "qkv_hidden_sizes", "rotary_embedding_dim",
    )  # fmt: skip
    scores = _scores(node, dims, mask=3, past=(4, 6), bias=5)
    expect_floats(dims, required(node, 0))
    weight = constant_input(node, 1, "weights", _FLOATS)
    expect(len(weight.shape) == 2, f"its weights are {len(weight.shape)}-D, expected 2-D")
    bounds = _bounds(node, int(weight.shape.numpy()[1]))
    has_bias = node_input(node, 2) is not None
    if has_bias:
        constant_input(node, 2, "bias", _FLOATS, (bounds[-1],))

    def write(to: Writer) -> Sequence[ir.Value | None]:
        parts = []
        for name, start, stop in zip(_PARTS, bounds, bounds[1:], strict=False):
            part = to.op("MatMul", required(node, 0), to.columns(required(node, 1), name, start, stop), name=name)
            if has_bias:
                bias = to.columns(required(node, 2), name, start, stop)
                part = to.op("Add", part, bias, name=f"{name}/add_bias")
            parts.append(part)
        return [_heads(to, scores, parts)]

    return write


def count_int8_layers(model: ir.Model) -> int:
    """Return the number of linear layers in QAttention nodes: three per node."""
    count = 0
    for node in model.graph.all_nodes():
        if node.op_type == "QAttention" and node.domain == MICROSOFT_DOMAIN and node_input(node, 8) is None:
            try:
                _int8_bounds(node)
            except UnfitError:
                continue
            count += len(_PARTS)
    return count


def q_attention(node: ir.Node, dims: Dimensions) -> Write:
    """Rewrite QAttention.

    Inputs: input, weight, bias, input_scale, weight_scale, mask_index, input_zero_point, weight_zero_point, past.
    """
    only_attributes(
        node, "num_heads", "unidirectional", "scale", "mask_filter_value", "do_rotary", "past_present_share_buffer"
    )
    scores = _scores(node, dims, mask=5, past=(8,), bias=None)
    bounds = _int8_bounds(node)

    def columns(to: Writer, index: int, name: str, start: int, stop: int) -> ir.Value | None:
        value = node_input(node, index)
        tensor = constant_tensor(value)
        if value is None or tensor is None or tensor.size == 1:
            return value
        return to.columns(value, name, start, stop)

    def write(to: Writer) -> Sequence[ir.Value | None]:
        parts = []
        for name, start, stop in zip(_PARTS, bounds, bounds[1:], strict=False):
            weight, bias, scale, zero = (columns(to, index, name, start, stop) for index in (1, 2, 4, 7))
            x, x_scale, x_zero = (node_input(node, index) for index in (0, 3, 6))
            parts.append(to.contrib(MATMUL_INTEGER_TO_FLOAT, x, weight, x_scale, scale, x_zero, zero, bias, name=name))
        return [_heads(to, scores, parts)]

    return write


def _int8_bounds(node: ir.Node) -> list[int]:
    """Check the weight of a QAttention; return the first columns of query, key and value, and the end."""
    weight = constant_input(node, 1, "weight", INT8_TYPES)
    expect(len(weight.shape) == 2, f"its weight is {len(weight.shape)}-D, expected 2-D")
    bounds = _bounds(node, int(weight.shape.numpy()[1]))
    sizes = (), (1,), (bounds[-1],)
    constant_input(node, 2, "bias", _FLOATS, (bounds[-1],))
    constant_input(node, 4, "weight_scale", _FLOATS, *sizes)
    if node_input(node, 7) is not None:
        constant_input(node, 7, "weight_zero_point", INT8_TYPES, *sizes)
    required(node, 0), required(node, 3)
    return bounds


def multi_head_attention(node: ir.Node, dims: Dimensions) -> Write | None:
    """Rewrite MultiHeadAttention; None if it has neither bias nor key_padding_mask and needs no rewrite.

    Inputs: query, key, value, bias, key_padding_mask, attention_bias, past_key, past_value, past_sequence_length, …
    """
    if node_input(node, 3) is None and node_input(node, 4) is None:
        return None
    only_attributes(node, "num_heads", "unidirectional", "scale", "mask_filter_value")
    scores = _scores(node, dims, mask=4, past=(6, 7, 8, 9), bias=5)
    widths = [_width(dims, required(node, index), name) for index, name in enumerate(_PARTS)]
    bounds = [0, widths[0], sum(widths[:2]), sum(widths)]
    has_bias = node_input(node, 3) is not None
    if has_bias:
        constant_input(node, 3, "bias", _FLOATS, (bounds[-1],))

    def write(to: Writer) -> Sequence[ir.Value | None]:
        parts = [required(node, index) for index in range(3)]
        if has_bias:
            biases = map(partial(to.columns, required(node, 3)), _PARTS, bounds, bounds[1:])
            added = zip(parts, biases, _PARTS, strict=True)
            parts = [to.op("Add", part, bias, name=f"{name}/add_bias") for part, bias, name in added]
        return [_heads(to, scores, parts)]

    return write


def _width(dims: Dimensions, value: ir.Value, name: str) -> int:
    shape = dims.shape(value)
    expect_floats(dims, value)
    if shape is None or len(shape) != 3 or not isinstance(shape[2], int):
        raise UnfitError(f"its {name} {value.name!r} is not known to be 3-D with a fixed width")
    return shape[2]


def _bounds(node: ir.Node, width: int) -> list[int]:
    """Return the first columns of query, key and value, and the end."""
    attr = node.attributes.get("qkv_hidden_sizes")
    sizes = [width // 3] * 3
    if attr is not None:
        expect(attr.type == ir.AttributeType.INTS and not attr.is_ref(), "its qkv_hidden_sizes are not integers")
        sizes = list(attr.as_ints()) or sizes
    expect(len(sizes) == 3 and min(sizes) > 0, f"its qkv_hidden_sizes are {sizes}, expected three positive integers")
    expect(sum(sizes) == width, f"its weights have {width} columns, expected {' + '.join(map(str, sizes))}")
    return [0, sizes[0], sizes[0] + sizes[1], width]


def _scores(node: ir.Node, dims: Dimensions, mask: int, past: Sequence[int], bias: int | None) -> _Scores:
    heads = integer_attribute(node, "num_heads")
    expect(heads > 0, f"its num_heads is {heads}, expected a positive integer")
    expect(all(node_input(node, index) is None for index in past), "it has a cache of keys and values")
    unused(node, *range(1, len(node.outputs)))
    expect(integer_attribute(node, "do_rotary", 0) == 0, "it applies a rotary embedding (do_rotary)")
    causal = integer_attribute(node, "unidirectional", 0) == 1
    value, rank = node_input(node, mask), 0
    if value is not None:
        shape = dims.shape(value)
        rank = 0 if shape is None else len(shape)
        if shape is not None and rank == 1:
            x = dims.shape(node.inputs[0])
            same = x is not None and x[0] == shape[0]
            expect(same, f"its mask {value.name!r} is a vector whose length is not known to be the number of sequences")
        expect(rank in (1, 2, 3), f"its mask {value.name!r} is {rank or 'of unknown rank'}, expected 1-D to 3-D")
        expect(shape is None or shape[-1] != 1 or rank == 1, f"its mask {value.name!r} has one column for all keys")
    fill = real_number(node, "mask_filter_value", _DEFAULT_FILL)
    scale = real_number(node, "scale", 0.0)
    has_bias = bias is not None and node_input(node, bias) is not None
    index = None if value is None else mask
    return _Scores(heads, scale, causal, index, rank, fill, bias if has_bias else None, _lengths(node, dims))


def _lengths(node: ir.Node, dims: Dimensions) -> tuple[Hashable, Hashable]:
    found: list[Hashable] = []
    for value in _rows(node):
        shape = dims.shape(value)
        found.append(shape[1] if shape is not None and len(shape) == 3 else value)
    return found[0], found[1]


def _rows(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Return the values whose second axes are queries and keys."""
    return required(node, 0), required(node, 1 if node.op_type == "MultiHeadAttention" else 0)


def _heads(to: Writer, scores: _Scores, parts: Sequence[ir.Value]) -> ir.Value:
    """Add a MultiHeadAttention of queries, keys and values [batch, rows, width]."""
    added = None if scores.mask is None else _added(to, scores)
    if scores.bias is not None:
        bias = required(to.node, scores.bias)
        added = bias if added is None else to.shared((bias, added), partial(to.op, "Add", bias, added, name="bias"))
    attributes: dict[str, Any] = {"num_heads": scores.heads}
    if scores.scale:
        attributes["scale"] = scores.scale
    if scores.causal and scores.mask is None:
        attributes["unidirectional"] = 1
    return to.contrib("MultiHeadAttention", *parts, None, None, added, **attributes)


def _added(to: Writer, scores: _Scores) -> ir.Value:
    """Return the mask as floats [batch, heads, queries, keys], expanded from axes of size 1."""
    assert scores.mask is not None
    mask, rank = required(to.node, scores.mask), scores.mask_rank
    queries, keys = scores.lengths

    def length(index: int) -> ir.Value:
        def make() -> ir.Value:
            shape = to.op("Shape", _rows(to.node)[index], dtype=_INT64)
            return to.op("Gather", shape, to.ints(1), dtype=_INT64)

        return to.shared(("length", scores.lengths[index]), make)

    def floats() -> ir.Value:
        whole = to.op("Cast", mask, to=_INT64.value, dtype=_INT64)
        if rank > 1:
            shown = to.op("Greater", whole, to.constant(np.array(0)))
            shown = to.op("Unsqueeze", shown, to.ints(*range(1, 4 - rank + 1)))
        else:
            end = to.op("Squeeze", length(1), to.ints(0))
            places = to.op("Range", to.constant(np.array(0)), end, to.constant(np.array(1)), dtype=_INT64)
            shown = to.op("Less", places, to.op("Unsqueeze", whole, to.ints(1, 2, 3)))
        fills = to.number(0.0), to.number(scores.fill)
        return to.op("Where", shown, *fills, name="mask", dtype=ir.DataType.FLOAT)

    def behind() -> ir.Value:
        """Return the mask of a causal attention: keys after the query are also masked."""
        expect(
            to.opset >= _TRILU,
            f"it is causal and has a mask, which needs opset {_TRILU} (Trilu); export the model again with that opset",
        )
        square = to.op("Concat", length(0), length(1), axis=0)
        ones = to.op("Expand", to.constant(np.array(True)), square, dtype=ir.DataType.BOOL)
        return to.op("Where", to.op("Trilu", ones, upper=0), small, to.number(_LOWEST), dtype=ir.DataType.FLOAT)

    def expanded() -> ir.Value:
        # ONNX Runtime requires heads and queries of full size in the attention bias.
        shape = to.op("Concat", to.ints(1, scores.heads), length(0), to.ints(1), axis=0)
        return to.op("Expand", small, shape, dtype=ir.DataType.FLOAT)

    place: tuple[Hashable, ...] = mask, rank, scores.fill, keys
    small = to.shared(("mask", *place), floats)
    if scores.causal:
        place = *place, "causal", queries
        small = to.shared(place, behind)
    return to.shared(("expanded", *place, queries, scores.heads), expanded)
