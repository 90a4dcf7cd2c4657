"""Nodes that turn the tokens of texts or pairs into a model's inputs: truncation, special tokens, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from .nodes import Nodes, Tokens
from .tokenizer_file import FIRST, Template


@dataclass(frozen=True)
class Batch:
    """Inputs of a model, int64 [batch, tokens of the longest text]. mask: 1 for tokens, 0 for padding."""

    ids: ir.Value
    mask: ir.Value
    types: ir.Value


@dataclass(frozen=True)
class _Part:
    """One part of a template, as int64 [batch, 1] or [1].

    Attributes:
        source: Index of the part's first token among all tokens.
        start: Column where the part starts.
        count: Number of its tokens.
        type: Its token type.
    """

    source: ir.Value
    start: ir.Value
    count: ir.Value
    type: int


def make_batch(
    nodes: Nodes, tokens: Tokens, template: Template, max_tokens: int, pad_id: int, length: int | None = None
) -> Batch:
    """Build the nodes that make a padded batch of tokens.

    Args:
        nodes: The graph under construction.
        tokens: Tokens of texts; for pairs, of all first texts, then of all second texts.
        template: The special tokens.
        max_tokens: Limit per row.
        pad_id: The padding token.
        length: Length of each padded row; None: that of the longest row.
    """
    sides = sum(not isinstance(part, int) for part, _ in template.parts)
    before = nodes.op("Sub", nodes.op("CumSum", tokens.counts, nodes.integer(0)), tokens.counts)
    counts, starts = _sides(nodes, tokens.counts, sides), _sides(nodes, before, sides)
    counts = _cut(nodes, counts, max_tokens - template.added)
    specials = [part for part, _ in template.parts if isinstance(part, int)]
    pool = nodes.op("Concat", tokens.ids, nodes.ints(*specials, pad_id), axis=0)
    parts, total = _arrange(nodes, nodes.op("Shape", tokens.ids), starts, counts, template)
    pad = nodes.op("Sub", nodes.op("Shape", pool), nodes.ints(1))
    if length is None:
        # The constant gives a batch without texts one column, or one column per special token.
        totals = nodes.op("Reshape", total, nodes.ints(-1))
        longest = nodes.largest(nodes.op("Concat", totals, nodes.ints(max(1, template.added)), axis=0))
    else:
        longest = nodes.ints(length)
    columns = nodes.op("Unsqueeze", nodes.count_to(longest), nodes.ints(0))  # [1, tokens]
    mask = nodes.cast(nodes.op("Less", columns, total), ir.DataType.INT64)
    types = nodes.op("Mul", mask, nodes.integer(0))
    indices = nodes.op("Add", types, pad)
    for part in parts:
        column = nodes.op("Sub", columns, part.start)
        inside = nodes.op("And", nodes.op("Less", nodes.integer(-1), column), nodes.op("Less", column, part.count))
        indices = nodes.op("Where", inside, nodes.op("Add", column, part.source), indices)
        if part.type:
            types = nodes.op("Where", inside, nodes.integer(part.type), types)
    return Batch(nodes.op("Gather", pool, indices, axis=0), mask, types)


def _sides(nodes: Nodes, counts: ir.Value, sides: int) -> list[ir.Value]:
    """Split int64 [sides * batch] into one [batch] for each side of a pair."""
    if sides == 1:
        return [counts]
    # Reshape with -1 would fail for an empty batch, where -1 is ambiguous.
    batch = nodes.op("Div", nodes.op("Shape", counts), nodes.ints(sides))
    return nodes.many("Split", sides, counts, nodes.op("Concat", *[batch] * sides, axis=0), axis=0)


def _arrange(
    nodes: Nodes, specials: ir.Value, starts: Sequence[ir.Value], counts: Sequence[ir.Value], template: Template
) -> tuple[list[_Part], ir.Value]:
    """Return the template's parts and the tokens per row, int64 [batch, 1].

    specials: index of the first special token.
    """
    column = nodes.op("Mul", nodes.op("Unsqueeze", counts[0], nodes.ints(1)), nodes.integer(0))  # zeros [batch, 1]
    parts: list[_Part] = []
    for part, kind in template.parts:
        if isinstance(part, int):
            width = nodes.ints(1)
            parts.append(_Part(specials, column, width, kind))
            specials = nodes.op("Add", specials, width)
        else:
            side = 0 if part == FIRST else 1
            width = nodes.op("Unsqueeze", counts[side], nodes.ints(1))
            parts.append(_Part(nodes.op("Unsqueeze", starts[side], nodes.ints(1)), column, width, kind))
        column = nodes.op("Add", column, width)
    return parts, column


def _cut(nodes: Nodes, counts: Sequence[ir.Value], room: int) -> list[ir.Value]:
    """Return the number of tokens kept of each text. In a pair, the longer text is cut first, as in `tokenizers`."""
    limit = nodes.integer(room)
    if len(counts) == 1:
        return [nodes.op("Min", counts[0], limit)]
    first, second = counts
    shorter = nodes.op("Min", nodes.op("Min", first, second), nodes.integer(room // 2))
    longer = nodes.op("Min", nodes.op("Max", first, second), nodes.op("Sub", limit, shorter))
    is_first = nodes.op("Greater", first, second)
    return [nodes.op("Where", is_first, longer, shorter), nodes.op("Where", is_first, shorter, longer)]


def positions(nodes: Nodes, batch: Batch, first: int) -> ir.Value:
    """Return position ids, int64 [batch, tokens], starting at `first`; padding has `first` - 1, but at least 0."""
    counted = nodes.op("Mul", nodes.op("CumSum", batch.mask, nodes.integer(1)), batch.mask)
    return nodes.op("Max", nodes.op("Add", counted, nodes.integer(first - 1)), nodes.integer(0))
