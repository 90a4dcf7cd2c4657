"""From the tokens of texts, or of pairs of texts, to a model's inputs: cut, with special tokens, padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from .nodes import Nodes, Tokens
from .tokenizer_file import FIRST, Template


@dataclass(frozen=True)
class Batch:
    """int64 [batch, tokens], as long as the longest text's; mask: 1 of tokens, 0 behind them."""

    ids: ir.Value
    mask: ir.Value
    types: ir.Value


@dataclass(frozen=True)
class _Part:
    """Of a template: where its tokens stand among all, where in the row, and how many; int64 [batch, 1] or [1]."""

    source: ir.Value
    start: ir.Value
    count: ir.Value
    type: int


def make_batch(
    nodes: Nodes, tokens: Tokens, template: Template, max_tokens: int, pad_id: int, length: int | None = None
) -> Batch:
    """Build the nodes that make a padded batch of tokens.

    Args:
        tokens: Tokens of texts; with a template of pairs, of all first texts and then of all second texts.
        length: Tokens that each row is padded to; None: those of the longest row.
    """
    sides = sum(not isinstance(part, int) for part, _ in template.parts)
    before = nodes.op("Sub", nodes.op("CumSum", tokens.counts, nodes.integer(0)), tokens.counts)
    counts, starts = _sides(nodes, tokens.counts, sides), _sides(nodes, before, sides)
    counts = _cut(nodes, counts, max_tokens - template.added)
    specials = [part for part, _ in template.parts if isinstance(part, int)]
    pool = nodes.op("Concat", tokens.ids, nodes.ints(*specials, pad_id), axis=0)
    parts, total = _place(nodes, nodes.op("Shape", tokens.ids), starts, counts, template)
    pad = nodes.op("Sub", nodes.op("Shape", pool), nodes.ints(1))
    if length is None:
        # Special tokens are always there; named here for a batch of no text. A row has one place at least.
        totals = nodes.op("Reshape", total, nodes.ints(-1))
        longest = nodes.largest(nodes.op("Concat", totals, nodes.ints(max(1, template.added)), axis=0))
    else:
        longest = nodes.ints(length)
    columns = nodes.op("Unsqueeze", nodes.count_to(longest), nodes.ints(0))  # [1, tokens]
    mask = nodes.cast(nodes.op("Less", columns, total), ir.DataType.INT64)
    types = nodes.op("Mul", mask, nodes.integer(0))
    places = nodes.op("Add", types, pad)
    for part in parts:
        column = nodes.op("Sub", columns, part.start)
        inside = nodes.op("And", nodes.op("Less", nodes.integer(-1), column), nodes.op("Less", column, part.count))
        places = nodes.op("Where", inside, nodes.op("Add", column, part.source), places)
        if part.type:
            types = nodes.op("Where", inside, nodes.integer(part.type), types)
    return Batch(nodes.op("Gather", pool, places, axis=0), mask, types)


def _sides(nodes: Nodes, numbers: ir.Value, sides: int) -> list[ir.Value]:
    """int64 [sides * batch] -> [batch] of each side."""
    if sides == 1:
        return [numbers]
    # Not to -1: of no text, that could be any size.
    batch = nodes.op("Div", nodes.op("Shape", numbers), nodes.ints(sides))
    return nodes.many("Split", sides, numbers, nodes.op("Concat", *[batch] * sides, axis=0), axis=0)


def _place(
    nodes: Nodes, specials: ir.Value, starts: Sequence[ir.Value], counts: Sequence[ir.Value], template: Template
) -> tuple[list[_Part], ir.Value]:
    """The template's parts, and the tokens of a row, int64 [batch, 1]. specials: where those begin among all tokens."""
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
    """How many tokens are kept of each text. Of a pair, the longer text is cut first, as `tokenizers` does it."""
    most = nodes.integer(room)
    if len(counts) == 1:
        return [nodes.op("Min", counts[0], most)]
    first, second = counts
    shorter = nodes.op("Min", nodes.op("Min", first, second), nodes.integer(room // 2))
    longer = nodes.op("Min", nodes.op("Max", first, second), nodes.op("Sub", most, shorter))
    is_first = nodes.op("Greater", first, second)  # the longer one
    return [nodes.op("Where", is_first, longer, shorter), nodes.op("Where", is_first, shorter, longer)]


def positions(nodes: Nodes, batch: Batch, first: int) -> ir.Value:
    """int64 [batch, tokens]: those of tokens, from `first` on; padding has the one before, if there is one."""
    counted = nodes.op("Mul", nodes.op("CumSum", batch.mask, nodes.integer(1)), batch.mask)
    return nodes.op("Max", nodes.op("Add", counted, nodes.integer(first - 1)), nodes.integer(0))
