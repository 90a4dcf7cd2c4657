"""The masks of attention as one value of floats that is added to its scores."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ..find.attention import Mask
from ..operators.nodes import new_initializer


class MaskSums:
    """Of one model. The first attention that needs a node for its masks makes it; those that follow share it."""

    def __init__(self, new_name: Callable[[str], str]) -> None:
        """new_name makes a name that no value of the model has."""
        self._new_name = new_name
        self._made: dict[Hashable, ir.Value] = {}

    def sum_of(
        self, node: ir.Node, masks: Sequence[Mask], made: list[ir.Node], keys: Sequence[ir.Value | None] = ()
    ) -> ir.Value | None:
        """None for no masks. New nodes, named after `node`, are appended to `made`: put them in front of the user.

        keys: the past and the new ones, [batch, heads, tokens, width] or [batch, tokens, width], for masks to be cut.
        """
        if not masks:
            return None
        masks = [self._cut(node, mask, made, keys) if mask.cut else mask for mask in masks]
        total = self._floats(node, masks[0], made)
        for number in range(2, len(masks) + 1):
            first = tuple(masks[:number])
            if first not in self._made:
                values = [total, self._floats(node, first[-1], made)]
                self._made[first] = self._named(node, ir.node("Add", values), made)
            total = self._made[first]
        return total

    def _cut(self, node: ir.Node, mask: Mask, made: list[ir.Node], keys: Sequence[ir.Value | None]) -> Mask:
        place = ("cut", mask.value, mask.cut)
        if place not in self._made:
            assert mask.cut is not None
            lengths = []
            for value, place_of_tokens in zip(keys, (2, mask.cut[2]), strict=True):
                axis = self._constant(node, np.array([place_of_tokens]))
                shape = self._named(node, ir.node("Shape", [value]), made, ir.DataType.INT64)
                lengths.append(self._named(node, ir.node("Gather", [shape, axis]), made, ir.DataType.INT64))
            total = self._named(node, ir.node("Add", lengths), made, ir.DataType.INT64)
            begin, last = (self._constant(node, np.array([number])) for number in (0, -1))
            cut = ir.node("Slice", [mask.value, begin, total, last])
            dtype = ir.DataType.FLOAT if mask.fill is None else ir.DataType.BOOL
            self._made[place] = self._named(node, cut, made, dtype)
        return replace(mask, value=self._made[place], cut=None)

    def _floats(self, node: ir.Node, mask: Mask, made: list[ir.Node]) -> ir.Value:
        if mask.fill is None:
            return mask.value
        if mask not in self._made:
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
