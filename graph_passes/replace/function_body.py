"""Writes the nodes of an operator's ONNX function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx_ir as ir


class FunctionBody:
    """The nodes in the order written. Uses of it read like the formulas."""

    def __init__(self, opset: int, numbers: Iterator[int] | None = None) -> None:
        self.opset = opset
        self._tape = ir.tape.Tape()
        # Of values: those of a branch must not be called like those around it.
        self._numbers = numbers or itertools.count()

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        return tuple(self._tape.nodes)

    def op(self, op_type: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        value = self._tape.op(op_type, inputs, attributes)  # type: ignore[arg-type]
        value.name = f"value_{next(self._numbers)}"
        return value

    def constant(self, array: np.ndarray) -> ir.Value:
        return self.op("Constant", value=ir.tensor(array))

    def ints(self, *numbers: int) -> ir.Value:
        return self.constant(np.array(numbers, np.int64))

    def int(self, number: int) -> ir.Value:
        return self.constant(np.array(number, np.int64))

    def float(self, number: float) -> ir.Value:
        return self.constant(np.array(number, np.float32))

    def attribute(self, name: str) -> ir.Value:
        """The function's integer attribute as an int64 scalar."""
        return self.op("Constant", value_int=ir.RefAttr("value_int", name, ir.AttributeType.INT))

    def reduce_max(self, x: ir.Value, axis: int) -> ir.Value:
        """The maximum over an axis, which stays with length 1."""
        if self.opset >= 18:
            return self.op("ReduceMax", x, self.ints(axis), keepdims=1)
        return self.op("ReduceMax", x, axes=[axis], keepdims=1)

    def one_of(self, attribute: str, cases: Mapping[int, Callable[[FunctionBody], ir.Value]]) -> ir.Value:
        """What the case of the attribute's number writes: an If, for a function of ONNX has no other way to look at it.

        Of one case alone, the nodes stand in the function itself.
        """
        chosen = self.attribute(attribute) if len(cases) > 1 else None
        return self._one_of(chosen, list(cases.items()))

    def _one_of(self, chosen: ir.Value | None, cases: list[tuple[int, Callable[[FunctionBody], ir.Value]]]) -> ir.Value:
        (number, write), *others = cases
        if chosen is None or not others:
            return write(self)
        return self.op(
            "If",
            self.op("Equal", chosen, self.int(number)),
            then_branch=self._branch(write),
            else_branch=self._branch(lambda body: body._one_of(chosen, others)),
        )

    def _branch(self, write: Callable[[FunctionBody], ir.Value]) -> ir.Graph:
        body = FunctionBody(self.opset, self._numbers)
        output = write(body)
        if output.producer() not in body.nodes:
            output = body.op("Identity", output)
        return ir.Graph([], [output], nodes=body.nodes, name="branch")
