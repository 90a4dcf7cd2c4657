"""Finds the inputs and the output of decomposed attention.

Queries, keys and values are followed from the attention's MatMul back to the output of their projection. The output is
followed forward until its heads are merged.
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
    """A subgraph cannot be replaced; the message becomes the reason in the report."""


@dataclass(frozen=True)
class Operand:
    """Queries, keys or values; normally the output of their projection, before it is split into heads."""

    base: ir.Value
    batch: Dim
    rows: Dim
    heads: int
    head_dim: int
    scale: float = 1.0  # factor that is applied between `base` and the MatMul
    layout: str = "by_rows"  # one of LAYOUTS


# Axes of batch, heads, rows and head_dim in a 4-D value; of batch, rows and the width of all heads in a 3-D value.
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
    """Follow a value back through operators of the types `views` and multiplications by a constant.

    Returns the nodes passed, from the last to the first; the product of the constants; the value reached. If `alone` is
    set, it stops at a value with several consumers.
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
    """Follow split heads [batch, heads, rows, head_dim] back to the output [batch, rows, width] of their projection.

    transposed: the heads are [batch, heads, head_dim, rows].
    """
    chain, scale, value = through_views(dims, value, _VIEWS)
    base, shape = _base(dims, value, meaning)
    view = View(shape)
    for node in reversed(chain):
        if node.op_type in OTHER_VIEWS or not view.apply(node, dims):
            raise RefusedError(f"{describe(node)}, which its {meaning} passes through, is not supported")
    view.sequences_apart()
    heads, head_dim = (view.dim(axis) if len(view.axes) == 4 else None for axis in (1, 2 if transposed else 3))
    if heads is None or head_dim is None:
        raise RefusedError(f"the number of heads of its {meaning} is not known before it runs")
    split = View(shape).split_heads(heads, head_dim)
    if split is None or split.permuted(0, 2, *((3, 1) if transposed else (1, 3))).sources() != view.sources():
        raise RefusedError(f"its {meaning} {name_of(base)} is not reshaped to [batch, rows, heads, head width]")
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
    """Return heads [batch, heads, rows, head_dim] as an operand, or the input of the Transpose that computes them.

    The number of heads must be known. transposed: the heads are [batch, heads, head_dim, rows]. single: the value is
    [batch x heads, rows, head_dim] and counts as one head.
    """
    chain, scale, base = through_views(dims, value, (), alone=True)
    merged = not single and len(dims.shape(base) or ()) == 3  # batch and heads are one axis of the MatMul
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
    """Return the input of a Reshape from [batch, heads, …] to [batch x heads, …]; the value itself otherwise."""
    node = value.producer()
    if node is None or not is_op(node, "Reshape"):
        return value
    before, after = dims.shape(node.inputs[0]), dims.shape(value)
    fits = before is not None and after is not None and len(before) == 4 and before[2:] == after[1:]
    return node.inputs[0] or value if fits else value


def _has_others(value: ir.Value) -> bool:
    return len(value.uses()) > 1 or value.is_graph_output()


def whole_operand(dims: Dimensions, value: ir.Value | None, meaning: str, heads: int) -> Operand:
    """Return the operand of an attention operator that reads [batch, rows, width] and splits the heads itself."""
    base, shape = _base(dims, value, meaning)
    width = shape[2]
    if not isinstance(width, int) or heads < 1 or width % heads:
        raise RefusedError(
            f"its {meaning} {name_of(base)} has a width that is unknown or not a multiple of {heads} heads"
        )
    return Operand(base, shape[0], shape[1], heads, width // heads)


def same_number(one: Dim, other: Dim) -> bool:
    """Return whether two dimensions that the model requires to be equal can be equal.

    A computed dimension can equal any other except 1. An int or a name equals only itself.
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
    """Follow the output [batch, heads, rows, head_dim] forward to the value [batch, rows, width] with merged heads."""
    shape: Shape = (query.batch, query.heads, query.rows, query.head_dim)
    known = dims.shape(value)
    try:
        return _merged(dims, value, shape, nodes)
    except RefusedError:
        # Adding a mask can change the symbolic number of rows: try again with the shape of the value.
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
            raise RefusedError(f"its heads are not merged to [batch, rows, width] after {name_of(value)}")
        if not view.apply(node, dims):
            raise RefusedError(f"{describe(node)}, which its output passes through, is not supported")
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
