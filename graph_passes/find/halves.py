"""Finds a Split or two Slices that split a value into the halves of its last axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, constant_tensor


@dataclass(frozen=True, eq=False)
class SplitHalves:
    """The two halves of a value's columns."""

    values: tuple[ir.Value, ir.Value]  # first half, second half
    nodes: tuple[ir.Node, ...]  # the Split or the Slices, in graph order


def split_in_halves(value: ir.Value, columns: int) -> SplitHalves | None:
    """Return the halves of a value [..., columns] if its only consumers are the Split or Slices, else None."""
    nodes = [use.node for use in value.uses()]
    maker = value.producer()
    here = all(maker is not None and node.graph is maker.graph and node.domain in DEFAULT_DOMAINS for node in nodes)
    if columns % 2 or value.is_graph_output() or not here:
        return None
    if len(nodes) == 1:
        (node,) = nodes
        if node.op_type != "Split" or _columns_of_split(node, columns) != [columns // 2] * 2:
            return None
        return SplitHalves((node.outputs[0], node.outputs[1]), (node,))
    if len(nodes) != 2 or any(node.op_type != "Slice" or node.inputs[0] is not value for node in nodes):
        return None
    by_start = {_columns_of_slice(node, columns): node for node in nodes}
    first, second = (by_start.get(range(start, start + columns // 2)) for start in (0, columns // 2))
    if first is None or second is None:
        return None
    return SplitHalves(
        (first.outputs[0], second.outputs[0]), tuple(node for node in first.graph or () if node in nodes)
    )


def _is_last_axis(node: ir.Node, axis: int) -> bool:
    """Return whether the axis is the last one, for an operator that keeps the rank of its first input."""
    shapes = [value.shape for value in (node.inputs[0], node.outputs[0]) if value is not None]
    return axis == -1 or any(shape is not None and axis == len(shape) - 1 for shape in shapes)


def _columns_of_split(node: ir.Node, columns: int) -> list[int] | None:
    """Return the columns of each output; None if unknown, or if another axis is split."""
    if not _is_last_axis(node, node.attributes["axis"].as_int() if "axis" in node.attributes else 0):
        return None
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        return _numbers(node.inputs[1])
    return [columns // len(node.outputs)] * len(node.outputs) if columns % len(node.outputs) == 0 else None


def _columns_of_slice(node: ir.Node, columns: int) -> range | None:
    starts, ends, axes = (_numbers(value) for value in (*node.inputs[1:4], *[None] * 3)[:3])
    steps = _numbers(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else [1]
    if starts is None or ends is None or axes is None or not len(starts) == len(ends) == len(axes) == 1:
        return None
    if steps != [1] or not _is_last_axis(node, axes[0]):
        return None
    return range(columns)[starts[0] : ends[0]]


def _numbers(value: ir.Value | None) -> list[int] | None:
    tensor = constant_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy()).reshape(-1).tolist()
