"""A builder for the nodes of an operator's ONNX function."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

PANEL_COLUMNS = 16  # equals the panel width in ops/formats


class FunctionBody:
    """The nodes of a function, in the order in which they are added."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self._tape = ir.tape.Tape()

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The nodes added so far."""
        return tuple(self._tape.nodes)

    def op(self, op_type: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        """Add a node and return its output."""
        return self._tape.op(op_type, inputs, attributes)  # type: ignore[arg-type]

    def constant(self, array: np.ndarray) -> ir.Value:
        """Add a constant tensor."""
        return self.op("Constant", value=ir.tensor(array))

    def ints(self, *values: int) -> ir.Value:
        """Add a constant int64 vector."""
        return self.constant(np.array(values, np.int64))

    def integer(self, number: int) -> ir.Value:
        """Add a constant int64 scalar."""
        return self.constant(np.array(number, np.int64))

    def number(self, number: float) -> ir.Value:
        """Add a constant float32 scalar."""
        return self.constant(np.array(number, np.float32))

    def vector(self, scalar: ir.Value) -> ir.Value:
        """Return a scalar as a vector of one element."""
        return self.op("Unsqueeze", scalar, self.ints(0))

    def shape(self, *parts: ir.Value | int) -> ir.Value:
        """Return a shape tensor from integers and int64 scalars."""
        return self.op(
            "Concat", *(self.ints(part) if isinstance(part, int) else self.vector(part) for part in parts), axis=0
        )

    def divided_up(self, number: ir.Value, by: ir.Value) -> ir.Value:
        """Return number / by, rounded up."""
        return self.op("Div", self.op("Add", number, self.op("Sub", by, self.integer(1))), by)

    def attribute(self, name: str) -> ir.Value:
        """Return the function's integer attribute as an int64 scalar."""
        return self.op("Constant", value_int=ir.RefAttr("value_int", name, ir.AttributeType.INT))

    def float_attribute(self, name: str) -> ir.Value:
        """Return the function's float attribute as a float32 scalar."""
        return self.op("Constant", value_float=ir.RefAttr("value_float", name, ir.AttributeType.FLOAT))

    def reduce_max(self, x: ir.Value, axis: int) -> ir.Value:
        """Return the maximum over an axis, keeping it with length 1."""
        return self._reduce("ReduceMax", x, axis)

    def reduce_mean(self, x: ir.Value, axis: int) -> ir.Value:
        """Return the mean over an axis, keeping it with length 1."""
        return self._reduce("ReduceMean", x, axis)

    def _reduce(self, op_type: str, x: ir.Value, axis: int) -> ir.Value:
        if self.opset >= 18:
            return self.op(op_type, x, self.ints(axis), keepdims=1)
        return self.op(op_type, x, axes=[axis], keepdims=1)

    def layer_norm(self, x: ir.Value, weight: ir.Value, bias: ir.Value, epsilon: ir.Value) -> ir.Value:
        """Return the LayerNormalization over the last axis."""
        op = self.op
        d = op("Sub", x, self.reduce_mean(x, -1))
        variance = self.reduce_mean(op("Mul", d, d), -1)
        z = op("Div", d, op("Sqrt", op("Add", variance, epsilon)))
        return op("Add", op("Mul", z, weight), bias)

    def by_attribute(self, name: str, values: Mapping[int, ir.Value]) -> ir.Value:
        """Return the value whose key equals the integer attribute. All values are computed.

        An If node would not save work: ONNX Runtime 1.24 fails on constants in its branches, and folds the constants of
        both branches.
        """
        *others, (_, chosen) = values.items()
        for number, value in others:
            chosen = self.op("Where", self.op("Equal", self.attribute(name), self.integer(number)), value, chosen)
        return chosen
