"""SparseAMXMatMul as an ONNX function: its specification, and what runs where our library is not registered.

It uses only operators that mean the same from opset 13 on (but for ReduceMax), and serves any k, n and rank of X. The
formats of the weight are specified in ops/formats/bitmap.h and its like.

A function sees its node's attributes, not which of its inputs are there or what types they have. So it holds what the
layers of one model need (Uses), and where they differ it looks at attributes; an input that some of them lack is given
to these as a neutral element (SparseAMXMatMul.complete).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..epilogue import Activation
from ..normalize import ORTOLAN_DOMAIN
from .function_body import FunctionBody

OP_TYPE = "SparseAMXMatMul"
INPUTS = ("X", "masks", "values", "offsets", "bias", "scales", "residual")
ATTRIBUTES = ("k", "n", "format_version", "weight_bits", "group_size", "activation")

# As in ops/formats/bitmap.h.
PANEL_COLUMNS = 16
TILE_ROWS = 16
INT4_BIAS = 8

SMALLEST_MAXIMUM = 2.0**-100  # as in ops/sparse_amx_matmul/sparse_amx_matmul_int8.h


def row_inputs(weight_bits: int) -> int:
    """The inputs that a row of a tile holds of each column."""
    return 2 if weight_bits == 16 else 4


@dataclass(frozen=True)
class Uses:
    """What the SparseAMXMatMul nodes of a model make use of."""

    weight_bits: frozenset[int] = frozenset({16})
    dense: bool = False
    activations: frozenset[Activation] = frozenset({Activation.NONE})
    residual: bool = False


def sparse_amx_matmul_function(opset: int, uses: Uses, unpack_once: bool = True) -> ir.Function:
    """The function for a model of this opset.

    unpack_once: all of the unpacking has constant inputs, so ONNX Runtime does it when the session is created; while it
    does, it keeps every intermediate result of every layer, 37 bytes a weight or more. False: the unpacking seems to
    depend on X, so it is done layer by layer in each run.
    """
    inputs = {name: ir.val(name) for name in INPUTS}
    body = FunctionBody(opset)
    writer = _Writer(inputs, uses, body, unpack_once)
    y = body.one_of("weight_bits", writer.products())
    y = writer.add_bias(body, y)
    cases: dict[int, Callable[[FunctionBody], ir.Value]] = {
        int(activation): lambda body, y=y, activation=activation: _activate(body, y, activation)  # type: ignore[misc]
        for activation in sorted(uses.activations)
    }
    y = body.one_of("activation", cases)
    if uses.residual:
        y = body.op("Add", y, inputs["residual"])
    y.name = "Y"
    graph = ir.Graph(inputs.values(), [y], nodes=body.nodes, opset_imports={"": opset}, name=OP_TYPE)
    attributes = [ir.Attr(name, ir.AttributeType.INT, None) for name in ATTRIBUTES]
    return ir.Function(ORTOLAN_DOMAIN, OP_TYPE, graph=graph, attributes=attributes)


class _Writer:
    """Writes X W for each kind of weight."""

    def __init__(self, inputs: dict[str, ir.Value], uses: Uses, body: FunctionBody, unpack_once: bool) -> None:
        self._inputs = inputs
        self._uses = uses
        self._k, self._n = body.attribute("k"), body.attribute("n")
        # Here, because a branch of an If cannot see attributes.
        self._group_size = body.attribute("group_size") if 4 in uses.weight_bits else None
        # A zero that is constant, or that seems to depend on X.
        self._zero = body.int(0)
        if not unpack_once:
            self._zero = body.op("Min", body.op("Size", inputs["X"]), self._zero)
        self._panels = _divided_up(body, self._n, PANEL_COLUMNS)

    def products(self) -> dict[int, Callable[[FunctionBody], ir.Value]]:
        writers = {16: self._bf16_product, 8: self._int8_product, 4: self._int4_product}
        return {bits: writers[bits] for bits in sorted(self._uses.weight_bits)}

    def add_bias(self, body: FunctionBody, y: ir.Value) -> ir.Value:
        # Gemm's C may be missing and Add's input may not: this is the bias as a row, or zeros where there is none.
        shape = body.op("Concat", body.ints(1), _vector(body, self._n), axis=0)
        no_rows = body.op("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, np.float32)))
        row = body.op("Gemm", body.constant(np.zeros((1, 1), np.float32)), no_rows, self._inputs["bias"])
        return body.op("Add", y, body.op("Reshape", row, body.ints(-1)))

    def _bf16_product(self, body: FunctionBody) -> ir.Value:
        bits = self._bits(body, 16)
        w = self._matrix(body, self._in_tile_order(body, bits, self._inputs["values"]), 16)
        rounded = body.op("Cast", self._inputs["X"], to=ir.DataType.BFLOAT16)
        return body.op("MatMul", body.op("Cast", rounded, to=ir.DataType.FLOAT), self._cut(body, w))

    def _int8_product(self, body: FunctionBody) -> ir.Value:
        bits = self._bits(body, 8)
        w = self._matrix(body, self._in_tile_order(body, bits, self._inputs["values"]), 8)
        return self._quantized_product(body, body.op("Mul", w, self._scale_rows(body)))

    def _int4_product(self, body: FunctionBody) -> ir.Value:
        op = body.op
        # Even and odd rows are two streams side by side: counted apart, from the start of each panel.
        by_pairs = op("Concat", _vector(body, self._panels), body.ints(-1, 2, 4 * PANEL_COLUMNS), axis=0)
        pairs = op("Transpose", op("Reshape", self._bits(body, 4), by_pairs), perm=[0, 2, 1, 3])
        streams = op("Concat", _vector(body, self._panels), body.ints(2, -1), axis=0)
        stored = op("Cast", op("Reshape", pairs, streams), to=ir.DataType.INT32)
        before = op("CumSum", stored, body.int(2), exclusive=1)
        lengths = body.reduce_max(op("Add", before, stored), 2)
        panel_bytes = body.reduce_max(lengths, 1)
        at = op("Add", before, op("CumSum", panel_bytes, body.int(0), exclusive=1))
        byte = op("Gather", self._inputs["values"], at)
        shifts = body.constant(np.array([[0], [4]], np.uint8))
        nibble = op("Mod", op("BitShift", byte, shifts, direction="RIGHT"), body.constant(np.array(16, np.uint8)))
        weight = op("Sub", op("Cast", nibble, to=ir.DataType.FLOAT), body.float(INT4_BIAS))
        weight = op("Where", op("Cast", stored, to=ir.DataType.BOOL), weight, body.float(0))
        by_streams = op("Concat", _vector(body, self._panels), body.ints(2, -1, 4 * PANEL_COLUMNS), axis=0)
        in_order = op("Transpose", op("Reshape", weight, by_streams), perm=[0, 2, 1, 3])
        w = self._matrix(body, in_order, 4)
        return self._quantized_product(body, op("Mul", w, self._scales_of_inputs(body)))

    def _bits(self, body: FunctionBody, weight_bits: int) -> ir.Value:
        """Whether each weight is stored, uint8 [panels x tiles x weights of a tile], in the order of the format."""
        op = body.op
        # Lowest bit first: mask bit i of a row is bit i % 8 of byte i // 8.
        mask_bytes = op("Unsqueeze", self._inputs["masks"], body.ints(-1))
        shifts = op("Cast", op("Add", body.ints(*range(8)), self._zero), to=ir.DataType.UINT8)
        shifted = op("BitShift", mask_bytes, shifts, direction="RIGHT")
        bits = op("Reshape", op("Mod", shifted, body.constant(np.array(2, np.uint8))), body.ints(-1))
        if not self._uses.dense:
            return bits
        tiles = _divided_up(body, self._k, TILE_ROWS * row_inputs(weight_bits))
        tile_weights = TILE_ROWS * PANEL_COLUMNS * row_inputs(weight_bits)
        weights = op("Mul", op("Mul", self._panels, tiles), body.int(tile_weights))
        missing = _vector(body, op("Sub", weights, op("Size", bits)))
        ones = op("ConstantOfShape", missing, value=ir.tensor(np.ones(1, np.uint8)))
        return op("Concat", bits, ones, axis=0)

    def _in_tile_order(self, body: FunctionBody, bits: ir.Value, values: ir.Value) -> ir.Value:
        """The weights as float32, zero where none is stored.

        The number of bits before a bit says which value stands there. (NonZero and ScatterElements would do as well,
        but ONNX Runtime does not precompute operators of unknown output size.)
        """
        before = body.op("CumSum", body.op("Cast", bits, to=ir.DataType.INT32), body.int(0), exclusive=1)
        candidates = body.op("Cast", body.op("Gather", values, before), to=ir.DataType.FLOAT)
        return body.op("Where", body.op("Cast", bits, to=ir.DataType.BOOL), candidates, body.float(0))

    def _matrix(self, body: FunctionBody, in_tile_order: ir.Value, weight_bits: int) -> ir.Value:
        """Panel, tile, row, column, input of the row -> [padded k, padded n]."""
        op, inputs = body.op, row_inputs(weight_bits)
        shape = op("Concat", _vector(body, self._panels), body.ints(-1, TILE_ROWS, PANEL_COLUMNS, inputs), axis=0)
        matrix_order = op("Transpose", op("Reshape", in_tile_order, shape), perm=[1, 2, 4, 0, 3])
        padded_n = op("Mul", _vector(body, self._panels), body.ints(PANEL_COLUMNS))
        return op("Reshape", matrix_order, op("Concat", body.ints(-1), padded_n, axis=0))

    def _cut(self, body: FunctionBody, padded: ir.Value) -> ir.Value:
        ends = body.op("Concat", _vector(body, self._k), _vector(body, self._n), axis=0)
        return body.op("Slice", padded, body.ints(0, 0), ends)

    def _scale_rows(self, body: FunctionBody) -> ir.Value:
        """[panels, groups, 16] -> [groups, padded n]."""
        scales = body.op("Cast", self._inputs["scales"], to=ir.DataType.FLOAT)
        rows = body.op("Transpose", scales, perm=[1, 0, 2])
        padded_n = body.op("Mul", _vector(body, self._panels), body.ints(PANEL_COLUMNS))
        return body.op("Reshape", rows, body.op("Concat", body.ints(-1), padded_n, axis=0))

    def _scales_of_inputs(self, body: FunctionBody) -> ir.Value:
        """The scale of each input's group: [padded k, padded n]. Behind the last group, where W is zero, any."""
        op = body.op
        tile_inputs = TILE_ROWS * row_inputs(4)
        padded_k = op("Mul", _divided_up(body, self._k, tile_inputs), body.int(tile_inputs))
        assert self._group_size is not None
        group = op("Div", op("Range", body.int(0), padded_k, body.int(1)), self._group_size)
        last = op("Div", op("Sub", self._k, body.int(1)), self._group_size)
        return op("Gather", self._scale_rows(body), op("Min", group, last))

    def _quantized_product(self, body: FunctionBody, padded: ir.Value) -> ir.Value:
        """Rows of X as int8 with a scale each, times W."""
        op, x = body.op, self._inputs["X"]
        largest = op("Max", body.reduce_max(op("Abs", x), -1), body.float(SMALLEST_MAXIMUM))
        q = op("Round", op("Mul", x, op("Div", body.float(127), largest)))
        return op("Mul", op("MatMul", q, self._cut(body, padded)), op("Div", largest, body.float(127)))


def _activate(body: FunctionBody, y: ir.Value, activation: Activation) -> ir.Value:
    op = body.op
    if activation == Activation.RELU:
        return op("Relu", y)
    if activation == Activation.SILU:
        return op("Mul", y, op("Sigmoid", y))
    if activation == Activation.GELU:
        twice_phi = op("Add", op("Erf", op("Mul", y, body.float(0.5**0.5))), body.float(1))
    elif activation == Activation.GELU_TANH:
        cube = op("Mul", op("Mul", y, y), op("Mul", y, body.float(0.044715)))
        inner = op("Mul", op("Add", y, cube), body.float((2 / np.pi) ** 0.5))
        twice_phi = op("Add", op("Tanh", inner), body.float(1))
    else:
        return y
    return op("Mul", op("Mul", y, body.float(0.5)), twice_phi)


def _divided_up(body: FunctionBody, number: ir.Value, by: int) -> ir.Value:
    return body.op("Div", body.op("Add", number, body.int(by - 1)), body.int(by))


def _vector(body: FunctionBody, scalar: ir.Value) -> ir.Value:
    return body.op("Unsqueeze", scalar, body.ints(0))
