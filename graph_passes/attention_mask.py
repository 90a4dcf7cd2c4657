"""The masks of attention as one value of floats that is added to its scores."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import onnx_ir as ir

from .attention import Mask
from .pipeline import PassContext


class MaskSums:
    """Of one model. The first attention that needs a node for its masks makes it; those that follow share it."""

    def __init__(self, model: ir.Model, context: PassContext) -> None:
        self._model = model
        self._context = context
        self._made: dict[Hashable, ir.Value] = {}

    def sum_of(self, node: ir.Node, masks: Sequence[Mask], made: list[ir.Node]) -> ir.Value | None:
        """None for no masks. New nodes, named after `node`, are appended to `made`: put them in front of the user."""
        if not masks:
            return None
        total = self._floats(node, masks[0], made)
        for number in range(2, len(masks) + 1):
            first = tuple(masks[:number])
            if first not in self._made:
                values = [total, self._floats(node, first[-1], made)]
                self._made[first] = self._named(node, ir.node("Add", values), made)
            total = self._made[first]
        return total

    def _floats(self, node: ir.Node, mask: Mask, made: list[ir.Node]) -> ir.Value:
        if mask.fill is None:
            return mask.value
        if mask not in self._made:
            fill, zero = (self._number(node, number) for number in (mask.fill, 0.0))
            branches = [fill, zero] if mask.hides else [zero, fill]
            self._made[mask] = self._named(node, ir.node("Where", [mask.value, *branches]), made)
        return self._made[mask]

    def _named(self, node: ir.Node, new: ir.Node, made: list[ir.Node]) -> ir.Value:
        output = new.outputs[0]
        output.name = self._context.new_name(self._model, f"{node.name}/mask_{new.op_type}_output_0")
        output.dtype = ir.DataType.FLOAT
        new.name = output.name.removesuffix("_output_0")
        made.append(new)
        return output

    def _number(self, node: ir.Node, number: float) -> ir.Value:
        assert isinstance(node.graph, ir.Graph)
        name = self._context.new_name(self._model, f"{node.name}/number")
        tensor = ir.Tensor(np.array(number, np.float32), name=name)
        value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape([]), const_value=tensor)
        node.graph.register_initializer(value)
        return value
