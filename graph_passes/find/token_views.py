"""Follows the token axis through operators that only move elements (views).

Views split heads, move them before the tokens, split head columns for rotary embeddings and join them again. A view
works on packed tokens as on padded ones, unless its second input contains sizes of the padded ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, constant_tensor
from .dimensions import Dim, Dimensions, Shape
from .node_checks import integer_attribute


@dataclass(frozen=True)
class Layout:
    """Rank and token axis of a value whose first axis is the batch."""

    rank: int
    tokens: int = 1


# Operators that move elements: of the first input, or of all inputs for Concat.
_VIEWS = frozenset(
    ("Concat", "Expand", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
)


def viewed(node: ir.Node) -> list[ir.Value]:
    """Return the inputs whose elements a view moves; an empty list for other operators and for constant inputs."""
    if node.op_type not in _VIEWS or node.domain not in DEFAULT_DOMAINS:
        return []
    inputs = [value for value in (node.inputs if node.op_type == "Concat" else node.inputs[:1]) if value is not None]
    return [] if any(constant_tensor(value) is not None for value in inputs) else inputs


def behind_view(dims: Dimensions, node: ir.Node, layout: Layout) -> Layout | None:
    """Return the layout of a view's output for an input of this layout; None if unknown or if tokens are mixed."""
    before, after = dims.shape(node.inputs[0]), dims.shape(node.outputs[0])
    if before is None or after is None or len(before) != layout.rank:
        return None
    tokens = _behind(dims, node, before, after, layout.tokens)
    return None if tokens is None else Layout(len(after), tokens)


def in_front_of_view(dims: Dimensions, node: ir.Node, layout: Layout) -> Layout | None:
    """Return the input layout for which a view's output has this layout, or None."""
    before = dims.shape(node.inputs[0])
    fitting = (Layout(len(before or ()), axis) for axis in range(1, len(before or ())))
    return next((one for one in fitting if behind_view(dims, node, one) == layout), None)


def packed_sizes(dims: Dimensions, node: ir.Node, layout: Layout) -> list[int] | None:
    """Return the second input that a Reshape or Expand needs for packed tokens, if its first input has this layout.

    None for other views.
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
    """Return the token axis of a view's output, or None."""
    rank = len(before)
    if node.op_type == "Transpose":
        axes = tuple(node.attributes["perm"].as_ints()) if "perm" in node.attributes else tuple(reversed(range(rank)))
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
    """Return the `axis` or `axes` of a view as non-negative integers for this rank, or None."""
    if node.op_type in ("Concat", "Gather", "Split"):
        if node.op_type == "Concat" and "axis" not in node.attributes:
            return None
        return [integer_attribute(node, "axis", 0) % rank]
    index = 3 if node.op_type == "Slice" else 1
    given = dims.elements(node.inputs[index]) if len(node.inputs) > index else None
    if given is None or not all(isinstance(axis, int) for axis in given):
        return None
    return [axis % rank for axis in given if isinstance(axis, int)]


def _reshaped(before: Shape, after: Shape, tokens: int) -> int | None:
    """Return the token axis after a Reshape, which may split and merge axes between batch and tokens or after them."""
    sizes = _size(before[1:tokens]), _size(before[tokens + 1 :])
    if None in sizes or not after:
        return None
    for axis in range(1, len(after)):
        same = after[0] == before[0], after[axis] == before[tokens]
        # If batch or tokens is known to be the same, the other one follows from the equal number of elements.
        open_ones = isinstance(after[0], int), isinstance(after[axis], int)
        fits = all(one or not known for one, known in zip(same, open_ones, strict=True)) and any(same)
        if fits and (_size(after[1:axis]), _size(after[axis + 1 :])) == sizes:
            return axis
    return None


def _size(axes: Sequence[Dim]) -> int | None:
    known = [dim for dim in axes if isinstance(dim, int)]
    return math.prod(known) if len(known) == len(axes) else None
