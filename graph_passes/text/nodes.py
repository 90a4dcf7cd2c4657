"""A builder for nodes of standard ONNX and of onnxruntime-extensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from .pieces import END_ID, PieceModel

EXTENSIONS_DOMAIN = "ai.onnx.contrib"
OLDEST_OPSET = 13  # the first opset in which axes of Unsqueeze and ReduceSum are inputs
NAMES = "/ortolan_text"  # prefix of the names of nodes and values
_REDUCE_AXES_OPSET = 18  # the first opset in which axes of ReduceMax and ReduceMin are inputs


@dataclass(frozen=True)
class Tokens:
    """The concatenated tokens of texts: ids int64 [all tokens], counts int64 [batch]."""

    ids: ir.Value
    counts: ir.Value


class Nodes:
    """Nodes in the order in which they are added, with unique names."""

    def __init__(self, opset: int, place: str = NAMES) -> None:
        self._tape = ir.tape.Tape()
        self._opset, self._place = opset, place

    @property
    def nodes(self) -> list[ir.Node]:
        """The nodes added so far."""
        return list(self._tape.nodes)

    def many(self, op_type: str, count: int, *inputs: ir.Value, domain: str = "", **attributes: Any) -> list[ir.Value]:
        """Add a node with several outputs.

        An attribute `name` becomes part of the node's name, which error messages contain.
        """
        name = f"{self._place}/{attributes.pop('name', op_type)}_{len(self.nodes)}"
        values = self._tape.op_multi_out(op_type, inputs, attributes, num_outputs=count, domain=domain, name=name)
        for index, value in enumerate(values):
            value.name = f"{name}_output_{index}"
        return list(values)

    def op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Add a node and return its output."""
        return self.many(op_type, 1, *inputs, **attributes)[0]

    def text_op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Add a node of onnxruntime-extensions."""
        return self.op(op_type, *inputs, domain=EXTENSIONS_DOMAIN, **attributes)

    def constant(self, array: np.ndarray | np.generic) -> ir.Value:
        """Add a constant tensor."""
        return self.op("Constant", value=ir.tensor(np.asarray(array)))

    def integer(self, number: int) -> ir.Value:
        """Add a constant int64 scalar."""
        return self.constant(np.int64(number))

    def ints(self, *values: int) -> ir.Value:
        """Add a constant int64 vector."""
        return self.constant(np.array(values, np.int64))

    def texts(self, *texts: str | bytes) -> ir.Value:
        """Add a constant vector of strings."""
        content = [text if isinstance(text, bytes) else text.encode() for text in texts]
        return self.op("Constant", value=ir.StringTensor(content, shape=ir.Shape([len(content)])))

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Add a Cast."""
        return self.op("Cast", x, to=dtype.value)

    def largest(self, x: ir.Value, axis: int = 0, keepdims: int = 1) -> ir.Value:
        """Return the maximum over an axis."""
        if self._opset >= _REDUCE_AXES_OPSET:
            return self.op("ReduceMax", x, self.ints(axis), keepdims=keepdims)
        return self.op("ReduceMax", x, axes=[axis], keepdims=keepdims)

    def sum(self, x: ir.Value, axis: int, keepdims: int = 0) -> ir.Value:
        """Return the sum over an axis."""
        return self.op("ReduceSum", x, self.ints(axis), keepdims=keepdims)

    def summed_in_order(self, x: ir.Value, axis: int) -> ir.Value:
        """Return the sums along the axis, added from first to last. The axis keeps length 1 (0 if it is empty).

        Unlike with ReduceSum, zeros between and after elements (padding) do not change the sums.
        """
        sums = self.op("CumSum", x, self.integer(axis))
        return self.op("Slice", sums, self.ints(-1), self.ints(np.iinfo(np.int64).max), self.ints(axis))

    def count_to(self, number: ir.Value) -> ir.Value:
        """Return 0, 1, …, number - 1. number: a vector of one element."""
        return self.op("Range", self.integer(0), self.op("Squeeze", number, self.ints(0)), self.integer(1))

    def replace(self, texts: ir.Value, replacements: Iterable[tuple[str, str | bytes]]) -> ir.Value:
        """Apply (RE2 expression, replacement) pairs to texts, one after the other."""
        for pattern, by in replacements:
            texts = self.text_op("StringRegexReplace", texts, self.texts(pattern), self.texts(by), global_replace=1)
        return texts

    def pieces(self, texts: ir.Value, model: PieceModel, ends: bool) -> ir.Value:
        """Return the SentencePiece pieces of all texts, int32 [pieces].

        With `ends`, END_ID follows the pieces of each text.
        """
        no, yes = self.constant(np.array([False])), self.constant(np.array([ends]))
        zero, alpha = self.ints(0), self.constant(np.zeros(1, np.float32))
        return self.many(
            "SentencepieceTokenizer",
            3,
            *(texts, zero, alpha, no, yes, no, no),
            domain=EXTENSIONS_DOMAIN,
            model=model.encoded(),
        )[0]

    def choose(
        self, wanted: ir.Value, make: Callable[[Nodes], ir.Value], other: Callable[[Nodes], ir.Value]
    ) -> ir.Value:
        """Return strings: those of `make` if `wanted` (a bool scalar) is true, else those of `other`."""
        branches = []
        for name, one in (("wanted", make), ("other", other)):
            nodes = Nodes(self._opset, f"{self._place}/{name}_{len(self.nodes)}")
            value = one(nodes)
            value.type = ir.TensorType(ir.DataType.STRING)
            branches.append(ir.Graph([], [value], nodes=nodes.nodes, name=name))
        return self.op("If", wanted, then_branch=branches[0], else_branch=branches[1])

    def rewrite(
        self, texts: ir.Value, model: PieceModel, becomes: Sequence[str | bytes], *, end: str = "", last: str = ""
    ) -> ir.Value:
        """Split all texts into pieces, replace the pieces by `becomes`, and join them into one string, [1].

        Args:
            texts: Strings [batch].
            model: Splits texts into pieces.
            becomes: The replacement of each of the model's pieces.
            end: Added after each text.
            last: Added after all texts.
        """
        return self.join(self.pieces(texts, model, bool(end)), becomes, end=end, last=last)

    def join(self, pieces: ir.Value, becomes: Sequence[str | bytes], *, end: str = "", last: str = "") -> ir.Value:
        """Replace pieces, int32 [pieces], and join the replacements into one string; arguments as for `rewrite`."""
        table = [end if number == END_ID else text for number, text in enumerate(becomes)]
        # `last`, which may be empty, is always appended, because StringJoin fails without elements.
        ids = self.op(
            "Concat",
            pieces,
            self.constant(np.array([len(table)], np.int32)),
            axis=0,
        )
        return self.text_op(
            "StringJoin", self.op("Gather", self.texts(*table, last), ids), self.texts(""), self.ints(0)
        )

    def split_at(self, ids: ir.Value, end: int) -> Tokens:
        """Split ids, int64 [all], at the id `end`, which follows each text."""
        is_end = self.op("Equal", ids, self.integer(end))
        ends = self.op("Reshape", self.op("NonZero", is_end), self.ints(-1))
        before = self.op("Concat", self.ints(-1), self.op("Slice", ends, self.ints(0), self.ints(-1)), axis=0)
        # If there are no texts, `before` must be empty.
        before = self.op("Slice", before, self.ints(0), self.op("Shape", ends))
        counts = self.op("Sub", self.op("Sub", ends, before), self.integer(1))
        return Tokens(self.op("Compress", ids, self.op("Not", is_end)), counts)


def graph_input(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """Return a graph input."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
