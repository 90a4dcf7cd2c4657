"""Writes the nodes of an operator's ONNX function."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from ..find.epilogue import Activation

PANEL_COLUMNS = 16  # as in ops/formats


class FunctionBody:
    """The nodes in the order written. Uses of it read like the formulas."""

    def __init__(self, opset: int) -> None:
        self._opset = opset
        self._tape = ir.tape.Tape()

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        return tuple(self._tape.nodes)

    def op(self, op_type: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        return self._tape.op(op_type, inputs, attributes)  # type: ignore[arg-type]

    def constant(self, array: np.ndarray) -> ir.Value:
        return self.op("Constant", value=ir.tensor(array))

    def ints(self, *numbers: int) -> ir.Value:
        return self.constant(np.array(numbers, np.int64))

    def integer(self, number: int) -> ir.Value:
        return self.constant(np.array(number, np.int64))

    def number(self, number: float) -> ir.Value:
        return self.constant(np.array(number, np.float32))

    def vector(self, scalar: ir.Value) -> ir.Value:
        return self.op("Unsqueeze", scalar, self.ints(0))

    def shape(self, *parts: ir.Value | int) -> ir.Value:
        """A shape of numbers and int64 scalars."""
        return self.op(
            "Concat", *(self.ints(part) if isinstance(part, int) else self.vector(part) for part in parts), axis=0
        )

    def divided_up(self, number: ir.Value, by: ir.Value) -> ir.Value:
        return self.op("Div", self.op("Add", number, self.op("Sub", by, self.integer(1))), by)

    def attribute(self, name: str) -> ir.Value:
        """The function's integer attribute as an int64 scalar."""
        return self.op("Constant", value_int=ir.RefAttr("value_int", name, ir.AttributeType.INT))

    def float_attribute(self, name: str) -> ir.Value:
        """The function's float attribute as a float32 scalar."""
        return self.op("Constant", value_float=ir.RefAttr("value_float", name, ir.AttributeType.FLOAT))

    def reduce_max(self, x: ir.Value, axis: int) -> ir.Value:
        """The maximum over an axis, which stays with length 1."""
        return self._reduce("ReduceMax", x, axis)

    def reduce_mean(self, x: ir.Value, axis: int) -> ir.Value:
        """The mean over an axis, which stays with length 1."""
        return self._reduce("ReduceMean", x, axis)

    def _reduce(self, op_type: str, x: ir.Value, axis: int) -> ir.Value:
        if self._opset >= 18:
            return self.op(op_type, x, self.ints(axis), keepdims=1)
        return self.op(op_type, x, axes=[axis], keepdims=1)

    def by_attribute(self, name: str, values: Mapping[int, ir.Value]) -> ir.Value:
        """The value that belongs to the attribute's number. All of them are computed.

        (No If: ONNX Runtime 1.24 fails on constants in its branches, and computes those of both anyway.)
        """
        *others, (_, chosen) = values.items()
        for number, value in others:
            chosen = self.op("Where", self.op("Equal", self.attribute(name), self.integer(number)), value, chosen)
        return chosen


def end_of_layer(
    body: FunctionBody,
    product: ir.Value,
    inputs: Mapping[str, ir.Value],
    activations: Collection[Activation],
    gated: bool,
    residual: bool,
) -> ir.Value:
    """What ops/matmul/linear_plan.h makes of X W, for all nodes of a model: with those activations; gated: some of them
    have gated_columns; residual: all have one."""
    op = body.op
    p = op("Add", product, _bias_or_zeros(body, inputs["bias"]))
    if gated:
        # Where nothing is gated, the factors are ones behind all columns.
        n, gated_columns = body.attribute("n"), body.attribute("gated_columns")
        is_gated = op("Cast", gated_columns, to=ir.DataType.BOOL)
        columns = op("Where", is_gated, gated_columns, n)
        begin = op("Where", is_gated, op("Div", n, body.integer(2)), n)
        ones = op("ConstantOfShape", op("Shape", p), value=ir.tensor(np.ones(1, np.float32)))
        last = body.ints(-1)
        end = op("Add", begin, columns)
        factor = op("Slice", op("Concat", p, ones, axis=-1), body.vector(begin), body.vector(end), last)
        p = op("Slice", p, body.ints(0), body.vector(columns), last)
    y = body.by_attribute("activation", {int(kind): activate(body, p, kind) for kind in sorted(activations)})
    if gated:
        y = op("Mul", y, factor)
    if residual:
        y = op("Add", y, inputs["residual"])
    y.name = "Y"
    return y


def _bias_or_zeros(body: FunctionBody, bias: ir.Value) -> ir.Value:
    """The function's input bias [n], or zeros where there is none; n is an attribute."""
    # Gemm's C may be missing and Add's input may not: this is the bias as a row, or zeros where there is none.
    zeros = ir.tensor(np.zeros(1, np.float32))
    no_rows = body.op("ConstantOfShape", body.shape(1, body.attribute("n")), value=zeros)
    return body.op(
        "Reshape", body.op("Gemm", body.constant(np.zeros((1, 1), np.float32)), no_rows, bias), body.ints(-1)
    )


def activate(body: FunctionBody, y: ir.Value, activation: Activation) -> ir.Value:
    op = body.op
    if activation == Activation.RELU:
        return op("Relu", y)
    if activation == Activation.SILU:
        return op("Mul", y, op("Sigmoid", y))
    if activation == Activation.GELU:
        twice_phi = op("Add", op("Erf", op("Mul", y, body.number(0.5**0.5))), body.number(1))
    elif activation == Activation.GELU_TANH:
        cube = op("Mul", op("Mul", y, y), op("Mul", y, body.number(0.044715)))
        inner = op("Mul", op("Add", y, cube), body.number((2 / np.pi) ** 0.5))
        twice_phi = op("Add", op("Tanh", inner), body.number(1))
    else:
        return y
    return op("Mul", op("Mul", y, body.number(0.5)), twice_phi)
