"""Splits ONNX Runtime's fused attention operators into linear layers and a MultiHeadAttention without bias.

ops/match/attention.h reads the operators. Masks become floats that are added to the scores: mask_filter_value for
masked keys, 0 for other keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import onnx_ir as ir

from .constants import constant_tensor
from .dimensions import Dimensions
from .fused_writer import Write, Writer, required
from .node_checks import MICROSOFT_DOMAIN, UnfitError, expect, node_input
from .stored_int8 import MATMUL_INTEGER_TO_FLOAT

_PARTS = ("query", "key", "value")
_LOWEST = float(np.finfo(np.float32).min)
_INT64 = ir.DataType.INT64
_TRILU = 14  # first opset with Trilu


@dataclass(frozen=True)
class _Fused:
    """The fields of ops/match/attention.h's FusedAttention; values are indices of inputs, or None."""

    widths: list[int]  # of query, key and value
    heads: int
    scale: float  # 0: 1 / sqrt(head width)
    causal: bool
    mask: int | None
    mask_rank: int
    fill: float  # added to the scores of masked keys
    score_bias: int | None  # added to the scores
    weight: int | None  # of query, key and value; None for MultiHeadAttention
    bias: int | None
    lengths: tuple[Hashable, Hashable]  # keys for sharing nodes: equal for equal numbers of queries, and of keys

    def columns(self, to: Writer, index: int | None) -> list[ir.Value | None]:
        """Split a constant by columns into query, key and value; other values and one number for all stay."""
        value = None if index is None else node_input(to.node, index)
        tensor = constant_tensor(value)
        if value is None or tensor is None or tensor.size == 1:
            return [value] * 3
        bounds = [0, *accumulate(self.widths)]
        return [to.columns(value, *part) for part in zip(_PARTS, bounds, bounds[1:], strict=False)]


def _read(node: ir.Node, dims: Dimensions) -> _Fused:
    found = dims.native.fused_attention(node)
    if isinstance(found, str):
        raise UnfitError(found)
    # Other nodes are replaced before this one is written, so values may change.
    for name in ("mask", "score_bias", "weight", "bias"):
        found[name] = None if found[name] is None else node.inputs.index(found[name])
    return _Fused(**found, lengths=_lengths(node, dims))


def attention(node: ir.Node, dims: Dimensions) -> Write:
    """Rewrite Attention."""
    found = _read(node, dims)

    def write(to: Writer) -> Sequence[ir.Value | None]:
        weights, biases = (found.columns(to, index) for index in (found.weight, found.bias))
        products = [
            to.op("MatMul", required(node, 0), *one, name=name) for *one, name in zip(weights, _PARTS, strict=True)
        ]
        return [_heads(to, found, _with_biases(to, products, biases))]

    return write


def count_int8_layers(model: ir.Model) -> int:
    """Return the number of linear layers in QAttention nodes: three per node."""
    count = 0
    for graph in model.graphs():
        nodes = [node for node in graph if node.op_type == "QAttention" and node.domain == MICROSOFT_DOMAIN]
        if nodes:
            native = Dimensions(graph).native
            count += len(_PARTS) * sum(isinstance(native.fused_attention(node), dict) for node in nodes)
    return count


def q_attention(node: ir.Node, dims: Dimensions) -> Write:
    """Rewrite QAttention."""
    found = _read(node, dims)

    def write(to: Writer) -> Sequence[ir.Value | None]:
        split = [found.columns(to, index) for index in (1, 4, 7, 2)]
        x, x_scale, x_zero = (node_input(node, index) for index in (0, 3, 6))
        parts = [
            to.contrib(MATMUL_INTEGER_TO_FLOAT, x, weight, x_scale, scale, x_zero, zero, bias, name=name)
            for weight, scale, zero, bias, name in zip(*split, _PARTS, strict=True)
        ]
        return [_heads(to, found, parts)]

    return write


def multi_head_attention(node: ir.Node, dims: Dimensions) -> Write | None:
    """Rewrite MultiHeadAttention; None if it has neither bias nor key_padding_mask and needs no rewrite."""
    if node_input(node, 3) is None and node_input(node, 4) is None:
        return None
    found = _read(node, dims)

    def write(to: Writer) -> Sequence[ir.Value | None]:
        parts = [required(node, index) for index in range(3)]
        return [_heads(to, found, _with_biases(to, parts, found.columns(to, found.bias)))]

    return write


def _with_biases(to: Writer, parts: Sequence[ir.Value], biases: Sequence[ir.Value | None]) -> list[ir.Value]:
    return [
        part if bias is None else to.op("Add", part, bias, name=f"{name}/add_bias")
        for part, bias, name in zip(parts, biases, _PARTS, strict=True)
    ]


def _lengths(node: ir.Node, dims: Dimensions) -> tuple[Hashable, Hashable]:
    found: list[Hashable] = []
    for value in _rows(node):
        shape = dims.shape(value)
        found.append(shape[1] if shape is not None and len(shape) == 3 else value)
    return found[0], found[1]


def _rows(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Return the values whose second axes are queries and keys."""
    return required(node, 0), required(node, 1 if node.op_type == "MultiHeadAttention" else 0)


def _heads(to: Writer, scores: _Fused, parts: Sequence[ir.Value]) -> ir.Value:
    """Add a MultiHeadAttention of queries, keys and values [batch, rows, width]."""
    added = None if scores.mask is None else _added(to, scores)
    if scores.score_bias is not None:
        bias = required(to.node, scores.score_bias)
        added = bias if added is None else to.shared((bias, added), partial(to.op, "Add", bias, added, name="bias"))
    attributes: dict[str, Any] = {"num_heads": scores.heads}
    if scores.scale:
        attributes["scale"] = scores.scale
    if scores.causal and scores.mask is None:
        attributes["unidirectional"] = 1
    return to.contrib("MultiHeadAttention", *parts, None, None, added, **attributes)


def _added(to: Writer, scores: _Fused) -> ir.Value:
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
