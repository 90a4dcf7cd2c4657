"""Combine the masks of an attention into one float value that is added to its scores."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ...find.attention import Mask
from ...operators.nodes import new_initializer


class MaskSums:
    """Mask nodes of one graph. The first attention that needs a node creates it, later ones share it."""

    def __init__(self, new_name: Callable[[str], str]) -> None:
        """Use `new_name` to make names that no value of the model has."""
        self._new_name = new_name
        self._made: dict[Hashable, ir.Value] = {}

    def sum_of(self, node: ir.Node, masks: Sequence[Mask], query: ir.Value, made: list[ir.Node]) -> ir.Value | None:
        """Return the sum of the masks as a float value, or None without masks.

        New nodes are named after the attention `node` and appended to `made`; the caller inserts them before the
        attention. The first axis of `query` is the batch.
        """
        if not masks:
            return None
        masks = [self._by_heads(node, mask, made) if mask.heads else mask for mask in masks]
        masks = [self._by_windows(node, mask, query, made) if mask.windows else mask for mask in masks]
        total = self._floats(node, masks[0], made)
        for number in range(2, len(masks) + 1):
            first = tuple(masks[:number])
            if first not in self._made:
                values = [total, self._floats(node, first[-1], made)]
                self._made[first] = self._named(node, ir.node("Add", values), made)
            total = self._made[first]
        return total

    def _by_heads(self, node: ir.Node, mask: Mask, made: list[ir.Node]) -> Mask:
        """Reshape [batch x heads, queries, keys] to [batch, heads, queries, keys]."""
        key = mask.value, mask.heads
        if key not in self._made:
            dtype = ir.DataType.FLOAT if mask.fill is None else ir.DataType.BOOL
            axis, target = (self._constant(node, np.array(dims)) for dims in ([0], [-1, mask.heads, 0, 0]))
            single = self._named(node, ir.node("Unsqueeze", [mask.value, axis]), made, dtype)
            self._made[key] = self._named(node, ir.node("Reshape", [single, target]), made, dtype)
        return replace(mask, value=self._made[key], heads=0)

    def _by_windows(self, node: ir.Node, mask: Mask, query: ir.Value, made: list[ir.Node]) -> Mask:
        """Reshape [1, windows, heads, queries, keys] to [batch x windows, heads, queries, keys]."""
        key = "windows", mask.value, query
        if key not in self._made:
            dtype = ir.DataType.FLOAT if mask.fill is None else ir.DataType.BOOL
            zero, one, two, five, any_size, ones = (
                self._constant(node, np.array(dims)) for dims in ([0], [1], [2], [5], [-1], [1] * 4)
            )

            def int64(op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
                return self._named(node, ir.node(op_type, inputs, attributes), made, ir.DataType.INT64)

            shape = int64("Shape", mask.value)
            batch = int64("Div", int64("Gather", int64("Shape", query), zero), int64("Gather", shape, one))
            whole = int64("Concat", batch, ones, axis=0)
            merged = int64("Concat", any_size, int64("Slice", shape, two, five), axis=0)
            repeated = self._named(node, ir.node("Expand", [mask.value, whole]), made, dtype)
            self._made[key] = self._named(node, ir.node("Reshape", [repeated, merged]), made, dtype)
        return replace(mask, value=self._made[key], windows=False)

    def _floats(self, node: ir.Node, mask: Mask, made: list[ir.Node]) -> ir.Value:
        if mask.fill is None and mask.scale == 1:
            return mask.value
        if mask not in self._made and mask.fill is None:
            product = ir.node("Mul", [mask.value, self._number(node, mask.scale)])
            self._made[mask] = self._named(node, product, made)
        elif mask not in self._made:
            assert mask.fill is not None
            fill, zero = (self._number(node, number) for number in (mask.fill, 0.0))
            branches = [fill, zero] if mask.hides else [zero, fill]
            self._made[mask] = self._named(node, ir.node("Where", [mask.value, *branches]), made)
        return self._made[mask]

    def _named(
        self,
        node: ir.Node,
        new: ir.Node,
        made: list[ir.Node],
        dtype: ir.DataType = ir.DataType.FLOAT,
    ) -> ir.Value:
        output = new.outputs[0]
        output.name = self._new_name(f"{node.name}/mask_{new.op_type}_output_0")
        output.dtype = dtype
        new.name = output.name.removesuffix("_output_0")
        made.append(new)
        return output

    def _number(self, node: ir.Node, number: float) -> ir.Value:
        return self._constant(node, np.array(number, np.float32))

    def _constant(self, node: ir.Node, array: np.ndarray) -> ir.Value:
        assert isinstance(node.graph, ir.Graph)
        return new_initializer(node.graph, ir.Tensor(array, name=self._new_name(f"{node.name}/number")))
