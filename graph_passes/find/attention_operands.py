"""Operands and output of attention, followed to their layers.

Queries, keys and values are followed back from the product, and the output forward until heads are merged.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .constants import DEFAULT_DOMAINS
from .dimensions import Dimensions, permutation
from .sums import Dim, Shape
from .views import View

OTHER_VIEWS = ("Unsqueeze", "Squeeze", "Expand", "Flatten", "Slice", "Gather", "Split")
_VIEWS = ("Reshape", "Transpose", "Identity", *OTHER_VIEWS)


class RefusedError(Exception):
    """The reason reaches the report."""


@dataclass(frozen=True)
class Operand:
    """Queries, keys or values, as a rule before they are split into heads."""

    base: ir.Value
    batch: Dim
    rows: Dim
    heads: int
    head_dim: int
    scale: float = 1.0  # that stands between it and the product
    layout: str = "by_rows"  # one of LAYOUTS


# What axes of a value are batch, heads, rows and head_dim; of three, batch, rows and the width of all heads.
LAYOUTS: dict[str, tuple[int, ...]] = {
    "by_rows": (0, 1, 2),
    "columns": (0, 2, 1),
    "rows_first": (1, 0, 2),
    "by_heads": (0, 1, 2, 3),
    "apart": (0, 2, 1, 3),
    "by_columns": (0, 1, 3, 2),
}


def through_views(
    dims: Dimensions, value: ir.Value | None, views: Collection[str], alone: bool = False
) -> tuple[list[ir.Node], float, ir.Value | None]:
    """Follow a value back through these operators and multiplications by a constant.

    Returns the nodes, the last one first, the product of the constants, and the first value. alone: stop at a value
    with other consumers.
    """
    chain: list[ir.Node] = []
    scale = 1.0
    while value is not None and (node := value.producer()) is not None and node.domain in DEFAULT_DOMAINS:
        if alone and _has_others(value):
            break
        index = 0
        if node.op_type in ("Mul", "Div"):
            index = 1 if scalar(dims, node.inputs[0]) is not None else 0
            number = scalar(dims, node.inputs[1 - index])
            if number is None or number == 0 or (node.op_type == "Div" and index == 1):
                break
            scale = scale / number if node.op_type == "Div" else scale * number
        elif node.op_type not in views and not changes_nothing(dims, node):
            break
        chain.append(node)
        value = node.inputs[index]
    return chain, scale, value


def split_operand(
    dims: Dimensions, value: ir.Value | None, meaning: str, nodes: set[ir.Node], transposed: bool = False
) -> Operand:
    """Follows [batch, heads, rows, head_dim] (transposed: the last two the other way round) back to its layer."""
    chain, scale, value = through_views(dims, value, _VIEWS)
    base, shape = _base(dims, value, meaning)
    view = View(shape)
    for node in reversed(chain):
        if node.op_type in OTHER_VIEWS or not view.apply(node, dims):
            raise RefusedError(f"{describe(node)}, which its {meaning} goes through, is not understood")
    view.sequences_apart()
    heads, head_dim = (view.dim(axis) if len(view.axes) == 4 else None for axis in (1, 2 if transposed else 3))
    if heads is None or head_dim is None:
        raise RefusedError(f"the number of heads of its {meaning} is not known before it runs")
    split = View(shape).split_heads(heads, head_dim)
    if split is None or split.permuted(0, 2, *((3, 1) if transposed else (1, 3))).sources() != view.sources():
        raise RefusedError(f"its {meaning} {name_of(base)} is not split into heads as [batch, rows, heads, head width]")
    nodes.update(chain)
    return Operand(base, shape[0], shape[1], heads, head_dim, scale)


def heads_operand(
    dims: Dimensions,
    value: ir.Value | None,
    meaning: str,
    nodes: set[ir.Node],
    transposed: bool = False,
    single: bool = False,
) -> Operand:
    """Return [batch, heads, rows, head_dim] as an operand, without a Transpose directly before it.

    transposed: the last two axes are swapped. The numbers of heads must be known. single: [batch x heads, rows,
    head_dim] counts as one head.
    """
    chain, scale, base = through_views(dims, value, (), alone=True)
    merged = not single and len(dims.shape(base) or ()) == 3  # sequences and heads are one axis in the product
    rank = 3 if single or merged else 4
    layout = ("columns" if transposed else "by_rows") if rank == 3 else ("by_columns" if transposed else "by_heads")
    node = None if base is None else base.producer()
    if node is not None and is_op(node, "Transpose") and len(dims.shape(base) or ()) == rank:
        before = tuple(permutation(node, rank)[axis] for axis in LAYOUTS[layout])
        known = next((name for name, axes in LAYOUTS.items() if axes == before), None)
        if known is not None and not _has_others(node.outputs[0]):
            layout, base = known, node.inputs[0]
            chain = [*chain, node]
    if merged and layout == "by_rows" and base is not None:
        layout, rank, base = "by_heads", 4, _before_merge(dims, base)
    base, shape = _base(dims, base, meaning, 3 if single else 4)
    sizes = [shape[axis] for axis in LAYOUTS[layout]]
    batch, heads, rows, head_dim = (sizes[0], 1, *sizes[1:]) if single else sizes
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        raise RefusedError(f"the number of heads of its {meaning} is not known before it runs")
    nodes.update(chain)
    return Operand(base, batch, rows, heads, head_dim, scale, layout)


def _before_merge(dims: Dimensions, value: ir.Value) -> ir.Value:
    """[batch, heads, rows, head_dim], where that is reshaped to [batch x heads, rows, head_dim]; else the same."""
    node = value.producer()
    if node is None or not is_op(node, "Reshape"):
        return value
    before, after = dims.shape(node.inputs[0]), dims.shape(value)
    fits = before is not None and after is not None and len(before) == 4 and before[2:] == after[1:]
    return node.inputs[0] or value if fits else value


def _has_others(value: ir.Value) -> bool:
    return len(value.uses()) > 1 or value.is_graph_output()


def whole_operand(dims: Dimensions, value: ir.Value | None, meaning: str, heads: int) -> Operand:
    """An operand that the operator splits into heads itself."""
    base, shape = _base(dims, value, meaning)
    width = shape[2]
    if not isinstance(width, int) or heads < 1 or width % heads:
        raise RefusedError(f"its {meaning} {name_of(base)} is not known to be {heads} heads wide")
    return Operand(base, shape[0], shape[1], heads, width // heads)


def same_number(one: Dim, other: Dim) -> bool:
    """Return whether two dimensions that belong together in the graph may be equal.

    Unknown dimensions may be equal under different names.
    """
    known = [dim for dim in (one, other) if isinstance(dim, int | str)]
    return one == other or (len(known) < 2 and 1 not in known)


def _base(dims: Dimensions, value: ir.Value | None, meaning: str, rank: int = 3) -> tuple[ir.Value, Shape]:
    shape, dtype = dims.shape(value), dims.dtype(value)
    if value is None or shape is None or len(shape) != rank:
        found = "unknown" if shape is None else str(len(shape))
        raise RefusedError(f"its {meaning} comes from {name_of(value)}, whose rank is {found}, expected {rank}")
    if dtype != ir.DataType.FLOAT:
        raise RefusedError(
            f"its {meaning} {name_of(value)} is {dtype.name if dtype else 'of unknown type'}, expected FLOAT"
        )
    return value, shape


def merged_heads(dims: Dimensions, value: ir.Value, query: Operand, nodes: set[ir.Node]) -> ir.Value:
    """Follows [batch, heads, rows, head_dim] to where it is [batch, rows, width], the heads side by side."""
    shape: Shape = (query.batch, query.heads, query.rows, query.head_dim)
    known = dims.shape(value)
    try:
        return _merged(dims, value, shape, nodes)
    except RefusedError:
        # A mask may have hidden that there are as many rows as the query has: then they go by another name.
        if known is None or known == shape or len(known) != 4 or (known[1], known[3]) != (shape[1], shape[3]):
            raise
        return _merged(dims, value, known, nodes)


def _merged(dims: Dimensions, value: ir.Value, shape: Shape, nodes: set[ir.Node]) -> ir.Value:
    found: set[ir.Node] = set()
    view, merged = View(shape), View(shape).permuted(0, 2, 1, 3).merged(2).sources()
    if len(dims.shape(value) or ()) == 3:
        view.merged(0)
    while len(view.axes) != 3 or view.sources() != merged:
        users = [use.node for use in value.uses() if not is_op(use.node, "Shape")]
        node = users[0] if len(users) == 1 else None
        known = node is not None and (is_op(node, *_VIEWS) or changes_nothing(dims, node))
        if node is None or not known or node.op_type in OTHER_VIEWS or node.inputs[0] is not value:
            raise RefusedError(f"its heads are not merged to [batch, rows, width] behind {name_of(value)}")
        if not view.apply(node, dims):
            raise RefusedError(f"{describe(node)}, which its output goes through, is not understood")
        found.add(node)
        value = node.outputs[0]
    nodes |= found
    return value


def scalar(dims: Dimensions, value: ir.Value | None) -> float | None:
    """Return the value of a finite constant scalar, or None."""
    number = dims.number(value)
    return number if number is not None and np.isfinite(np.float32(number)) else None


def is_op(node: ir.Node, *op_types: str) -> bool:
    """Return whether a node is one of these standard operators."""
    return node.op_type in op_types and node.domain in DEFAULT_DOMAINS


def changes_nothing(dims: Dimensions, node: ir.Node) -> bool:
    """Return whether the output equals the input: Identity, or a Cast to the same type."""
    if is_op(node, "Cast"):
        return dims.dtype(node.inputs[0]) == ir.DataType(node.attributes["to"].as_int())
    return is_op(node, "Identity")


def name_of(value: ir.Value | None) -> str:
    """Return a value's name for messages."""
    return repr(value.name) if value is not None else "nothing"


def describe(node: ir.Node) -> str:
    """Return a node's type and name for messages."""
    return f"{node.op_type} {node.name!r}"
