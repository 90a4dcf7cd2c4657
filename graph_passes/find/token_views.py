"""The token axis of values after operators that only move elements.

Heads are split, moved before tokens, taken apart for rotary embeddings and joined again. Such an operator works on
packed tokens as on padded ones, unless its sizes are those of the padded ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, constant_tensor
from .dimensions import Dimensions, int_attribute, permutation
from .sums import Dim, Shape


@dataclass(frozen=True)
class Layout:
    """Layout of a value by tokens: its rank, and the token axis. The first axis is the batch."""

    rank: int
    tokens: int = 1


# What moves numbers; of several inputs, but for Concat, the first has them.
_VIEWS = frozenset(
    ("Concat", "Expand", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
)


def viewed(node: ir.Node) -> list[ir.Value]:
    """The inputs that a node makes a view of; none for an operator of another kind, or of constants."""
    if node.op_type not in _VIEWS or node.domain not in DEFAULT_DOMAINS:
        return []
    inputs = [value for value in (node.inputs if node.op_type == "Concat" else node.inputs[:1]) if value is not None]
    return [] if any(constant_tensor(value) is not None for value in inputs) else inputs


def behind_view(dims: Dimensions, node: ir.Node, layout: Layout) -> Layout | None:
    """The layout of what a view makes of such values; None if tokens do not stay apart, or that is not known."""
    before, after = dims.shape(node.inputs[0]), dims.shape(node.outputs[0])
    if before is None or after is None or len(before) != layout.rank:
        return None
    tokens = _behind(dims, node, before, after, layout.tokens)
    return None if tokens is None else Layout(len(after), tokens)


def in_front_of_view(dims: Dimensions, node: ir.Node, layout: Layout) -> Layout | None:
    """Return the layout of the input of a view whose output has this layout."""
    before = dims.shape(node.inputs[0])
    fitting = (Layout(len(before or ()), axis) for axis in range(1, len(before or ())))
    return next((one for one in fitting if behind_view(dims, node, one) == layout), None)


def packed_sizes(dims: Dimensions, node: ir.Node, layout: Layout) -> list[int] | None:
    """Return the second input of a Reshape or Expand whose first input has packed tokens of this layout.

    None for another view.
    """
    before, after = dims.shape(node.inputs[0]), dims.shape(node.outputs[0])
    behind = behind_view(dims, node, layout)
    if node.op_type not in ("Reshape", "Expand") or before is None or after is None or behind is None:
        return None
    if node.op_type == "Expand":
        own = [dim if old == 1 else 1 for old, dim in zip(before, after, strict=True)]
    else:
        own = list(after)
    known = [dim if isinstance(dim, int) else 1 for dim in own]
    known[0], known[behind.tokens] = 1, -1 if node.op_type == "Reshape" else 1
    return known


def _behind(dims: Dimensions, node: ir.Node, before: Shape, after: Shape, tokens: int) -> int | None:
    """The axis of tokens behind a view."""
    rank = len(before)
    if node.op_type == "Transpose":
        axes = permutation(node, rank)
        return axes.index(tokens) if axes[0] == 0 else None
    if node.op_type == "Reshape":
        return _reshaped(before, after, tokens)
    if node.op_type == "Expand":
        others = [dim for axis, dim in enumerate((*before, *after)) if axis % rank not in (0, tokens)]
        return tokens if len(after) == rank and all(isinstance(dim, int) for dim in others) else None
    moved = _axes(dims, node, len(after) if node.op_type == "Unsqueeze" else rank)
    if moved is None or 0 in moved:
        return None
    if node.op_type == "Unsqueeze":
        stay = [axis for axis in range(len(after)) if axis not in moved]
        return stay[tokens]
    if tokens in moved:
        return None
    if node.op_type == "Squeeze":
        return tokens - sum(axis < tokens for axis in moved)
    if node.op_type == "Gather":
        index = constant_tensor(node.inputs[1])
        if index is None:
            return None
        return tokens + (len(index.shape) - 1 if moved[0] < tokens else 0)
    return tokens


def _axes(dims: Dimensions, node: ir.Node, rank: int) -> list[int] | None:
    """Return the axes of a view, for this rank."""
    if node.op_type in ("Concat", "Gather", "Split"):
        if node.op_type == "Concat" and "axis" not in node.attributes:
            return None
        return [int_attribute(node, "axis", 0) % rank]
    index = 3 if node.op_type == "Slice" else 1
    given = dims.elements(node.inputs[index]) if len(node.inputs) > index else None
    if given is None or not all(isinstance(axis, int) for axis in given):
        return None
    return [axis % rank for axis in given if isinstance(axis, int)]


def _reshaped(before: Shape, after: Shape, tokens: int) -> int | None:
    """Axes in front of tokens, but for the batch, and those behind may be split and merged."""
    sizes = _size(before[1:tokens]), _size(before[tokens + 1 :])
    if None in sizes or not after:
        return None
    for axis in range(1, len(after)):
        same = after[0] == before[0], after[axis] == before[tokens]
        # One of the two that is not known is what the other leaves for it.
        open_ones = isinstance(after[0], int), isinstance(after[axis], int)
        fits = all(one or not known for one, known in zip(same, open_ones, strict=True)) and any(same)
        if fits and (_size(after[1:axis]), _size(after[axis + 1 :])) == sizes:
            return axis
    return None


def _size(axes: Sequence[Dim]) -> int | None:
    known = [dim for dim in axes if isinstance(dim, int)]
    return math.prod(known) if len(known) == len(axes) else None
