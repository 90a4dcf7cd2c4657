"""SparseAMXMatMul as an ONNX function: its specification, and what runs where our library is not registered.

It uses only operators that mean the same from opset 13 on (but for ReduceMax), and serves any k, n and rank of X. The
formats of the weight are specified in ops/formats/bitmap.h and its like.

A function sees its node's attributes, not which of its inputs are there or what types they have. So it holds what the
layers of one model need (Uses), and where they differ it computes both and takes one by an attribute. Whatever it then
computes for a layer in vain must be valid all the same: indices are kept in bounds, and numbers of another type cast.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .function_body import PANEL_COLUMNS, FunctionBody
from .linear_function import NORM_INPUTS, LayerUses, end_of_layer, linear_function

OP_TYPE = "SparseAMXMatMul"
INPUTS = ("X", "masks", "values", "offsets", "bias", "residual", "scales", *NORM_INPUTS)
ATTRIBUTES = ("k", "n", "format_version", "weight_bits", "group_size", "activation", "gated_columns", "x_zero_points")

# As in ops/formats/bitmap.h.
TILE_ROWS = 16
INT4_BIAS = 8

_SMALLEST_MAXIMUM = 2.0**-100  # as in ops/matmul/bitmap_weight.h, also of half a range


def row_inputs(weight_bits: int) -> int:
    """The inputs that a row of a tile holds of each column."""
    return 2 if weight_bits == 16 else 4


@dataclass(frozen=True)
class Uses(LayerUses):
    """What the SparseAMXMatMul nodes of a model make use of.

    x_zero_points: of the nodes with int8 weights, the attribute.
    """

    weight_bits: frozenset[int] = frozenset({16})
    dense: bool = False
    x_zero_points: frozenset[int] = frozenset({0})


def sparse_amx_matmul_function(opset: int, uses: Uses, unpack_once: bool = True) -> ir.Function:
    """The function for a model of this opset.

    unpack_once: all of the unpacking has constant inputs, so ONNX Runtime does it when the session is created; while it
    does, it keeps every intermediate result of every layer, 37 bytes a weight or more. False: the unpacking seems to
    depend on X, so it is done layer by layer in each run.
    """
    inputs = {name: ir.val(name) for name in INPUTS if uses.norm or name not in NORM_INPUTS}
    body = FunctionBody(opset)
    k, n = body.attribute("k"), body.attribute("n")
    weight = _Weight(body, inputs, uses, k, n, None if unpack_once else inputs["X"]).matrix()
    product = _product(body, inputs["X"], weight, uses)
    y = end_of_layer(body, product, inputs, uses)
    return linear_function(OP_TYPE, opset, body, inputs, y, ATTRIBUTES)


def unpacked_bitmap(
    body: FunctionBody,
    masks: ir.Value,
    values: ir.Value,
    k: ir.Value,
    n: ir.Value,
    dense: bool,
    seems_to_depend_on: ir.Value | None,
) -> ir.Value:
    """A bf16 bitmap as float32 [k, n]. dense: its storage may be. seems_to_depend_on: see _Weight."""
    return _Weight(body, {"masks": masks, "values": values}, Uses(dense=dense), k, n, seems_to_depend_on).matrix()


class _Weight:
    """Unpacks W to float32.

    seems_to_depend_on: keeps ONNX Runtime from unpacking it once for all.
    """

    def __init__(
        self,
        body: FunctionBody,
        inputs: dict[str, ir.Value],
        uses: Uses,
        k: ir.Value,
        n: ir.Value,
        seems_to_depend_on: ir.Value | None,
    ) -> None:
        self._body = body
        self._inputs = inputs
        self._uses = uses
        self._k, self._n = k, n
        self._zero = body.integer(0)
        if seems_to_depend_on is not None:
            self._zero = body.op("Min", body.op("Size", seems_to_depend_on), self._zero)
        self._row_inputs = body.by_attribute(
            "weight_bits", {bits: body.integer(row_inputs(bits)) for bits in sorted(uses.weight_bits)}
        )
        self._panels = body.divided_up(self._n, body.integer(PANEL_COLUMNS))
        self._row_weights = body.op("Mul", self._row_inputs, body.integer(PANEL_COLUMNS))

    def matrix(self) -> ir.Value:
        """W [k, n], scales included."""
        body, op = self._body, self._body.op
        # Panel, tile, row, column, input of the row -> input, column.
        by_tiles = body.shape(self._panels, -1, TILE_ROWS, PANEL_COLUMNS, self._row_inputs)
        matrix_order = op("Transpose", op("Reshape", self._in_tile_order(), by_tiles), perm=[1, 2, 4, 0, 3])
        padded_n = op("Mul", self._panels, body.integer(PANEL_COLUMNS))
        padded = op("Reshape", matrix_order, body.shape(-1, padded_n))
        if self._uses.weight_bits != {16}:
            padded = op("Mul", padded, self._scales(op("Shape", padded), padded_n))
        return op("Slice", padded, body.ints(0, 0), body.shape(self._k, self._n))

    def _in_tile_order(self) -> ir.Value:
        """The weights as float32, zero where none is stored: [panels, pairs of rows, 2, weights of a row].

        The number of bits before a bit says which value stands there. (NonZero and ScatterElements would do as well,
        but ONNX Runtime does not precompute operators of unknown output size.)
        """
        body, op = self._body, self._body.op
        flat = op("Cast", self._bits(), to=ir.DataType.INT32)
        by_pairs = body.shape(self._panels, -1, 2, self._row_weights)
        stored = op("Reshape", flat, by_pairs)
        places = {}
        if self._uses.weight_bits != {4}:
            places[16] = places[8] = op("Reshape", op("CumSum", flat, body.integer(0), exclusive=1), by_pairs)
        if 4 in self._uses.weight_bits:
            places[4] = self._int4_places(stored)
        weights = {}
        values = self._values_at(self._by_bits(places))
        if self._uses.weight_bits != {4}:
            weights[16] = weights[8] = op("Cast", values, to=ir.DataType.FLOAT)
        if 4 in self._uses.weight_bits:
            shifts = body.constant(np.array([[0], [4]], np.uint8))  # low nibbles in even rows, high ones in odd rows
            shifted = op("BitShift", op("Cast", values, to=ir.DataType.UINT8), shifts, direction="RIGHT")
            nibbles = op("Mod", shifted, body.constant(np.array(16, np.uint8)))
            weights[4] = op("Sub", op("Cast", nibbles, to=ir.DataType.FLOAT), body.number(INT4_BIAS))
        return op("Where", op("Cast", stored, to=ir.DataType.BOOL), self._by_bits(weights), body.number(0))

    def _by_bits(self, values: dict[int, ir.Value]) -> ir.Value:
        used = {bits: values[bits] for bits in sorted(self._uses.weight_bits)}
        return used.popitem()[1] if len(set(used.values())) == 1 else self._body.by_attribute("weight_bits", used)

    def _bits(self) -> ir.Value:
        """Whether each weight is stored, uint8, in the order of the format."""
        body, op = self._body, self._body.op
        # Lowest bit first: mask bit i of a row is bit i % 8 of byte i // 8.
        mask_bytes = op("Unsqueeze", self._inputs["masks"], body.ints(-1))
        shifts = op("Cast", op("Add", body.ints(*range(8)), self._zero), to=ir.DataType.UINT8)
        shifted = op("BitShift", mask_bytes, shifts, direction="RIGHT")
        bits = op("Reshape", op("Mod", shifted, body.constant(np.array(2, np.uint8))), body.ints(-1))
        if not self._uses.dense:
            return bits
        tiles = body.divided_up(self._k, op("Mul", self._row_inputs, body.integer(TILE_ROWS)))
        panel_weights = op("Mul", op("Mul", tiles, body.integer(TILE_ROWS)), self._row_weights)
        missing = op("Sub", op("Mul", self._panels, panel_weights), op("Size", bits))
        ones = op("ConstantOfShape", body.vector(missing), value=ir.tensor(np.ones(1, np.uint8)))
        return op("Concat", bits, ones, axis=0)

    def _int4_places(self, stored: ir.Value) -> ir.Value:
        """The byte of each weight: even and odd rows of a panel are two streams side by side, from the same start."""
        body, op = self._body, self._body.op
        streams = op("Transpose", stored, perm=[0, 2, 1, 3])
        one_axis = op("Reshape", streams, body.shape(self._panels, 2, -1))
        before = op("CumSum", one_axis, body.integer(2), exclusive=1)
        panel_bytes = body.reduce_max(body.reduce_max(op("Add", before, one_axis), 2), 1)
        places = op("Add", before, op("CumSum", panel_bytes, body.integer(0), exclusive=1))
        return op("Transpose", op("Reshape", places, op("Shape", streams)), perm=[0, 2, 1, 3])

    def _values_at(self, places: ir.Value) -> ir.Value:
        body, values = self._body, self._inputs["values"]
        if len(self._uses.weight_bits) > 1:
            last = body.op("Sub", body.op("Shape", values), body.integer(1))  # ONNX Runtime's Size takes no bf16
            places = body.op("Min", places, body.op("Cast", last, to=ir.DataType.INT32))
        return body.op("Gather", values, places)

    def _scales(self, padded_shape: ir.Value, padded_n: ir.Value) -> ir.Value:
        """[panels, groups, 16] -> [padded k, padded n], or one row for all inputs. Behind the last group: any."""
        body, op = self._body, self._body.op
        by_groups = op("Transpose", op("Cast", self._inputs["scales"], to=ir.DataType.FLOAT), perm=[1, 0, 2])
        rows = op("Reshape", by_groups, body.shape(-1, padded_n))
        if 4 not in self._uses.weight_bits:
            return rows
        # Where the weight is not int4, a group_size of 0 and a single group.
        group_size = op("Max", body.attribute("group_size"), body.integer(1))
        padded_k = op("Squeeze", op("Slice", padded_shape, body.ints(0), body.ints(1)), body.ints(0))
        groups = op("Div", op("Range", body.integer(0), padded_k, body.integer(1)), group_size)
        last = op("Sub", op("Slice", op("Shape", rows), body.ints(0), body.ints(1)), body.integer(1))
        return op("Gather", rows, op("Min", groups, last))


def _row_maximum(body: FunctionBody, x: ir.Value) -> ir.Value:
    # ONNX Runtime's reductions leave an x of no rows as wide as it was: the Slice is for that alone.
    return body.op("Slice", body.reduce_max(x, -1), body.ints(0), body.ints(1), body.ints(-1))


def _without_zero_points(body: FunctionBody, x: ir.Value) -> tuple[ir.Value, ...]:
    """The numbers of int8 that rows are rounded to, as floats, and the scale of each row."""
    op = body.op
    largest = op("Max", _row_maximum(body, op("Abs", x)), body.number(_SMALLEST_MAXIMUM))
    q = op("Round", op("Mul", x, op("Div", body.number(127), largest)))
    return q, op("Div", largest, body.number(127))


def _with_zero_points(body: FunctionBody, x: ir.Value) -> tuple[ir.Value, ...]:
    """Likewise, less the zero point of each row."""
    op = body.op
    zero, half = body.number(0), body.number(0.5)
    most = op("Max", _row_maximum(body, x), zero)
    minus_least = op("Max", _row_maximum(body, op("Neg", x)), zero)
    half_range = op("Add", op("Mul", most, half), op("Mul", minus_least, half))
    half_range = op("Max", half_range, body.number(_SMALLEST_MAXIMUM))
    factor = op("Div", body.number(127), half_range)
    steps_to_most = op("Sub", body.number(254), op("Round", op("Mul", minus_least, factor)))
    q = op("Min", op("Round", op("Mul", x, factor)), steps_to_most)
    return q, op("Div", half_range, body.number(127))


def _product(body: FunctionBody, x: ir.Value, w: ir.Value, uses: Uses) -> ir.Value:
    """X W with X rounded to bf16, or row by row to int8 with a scale."""
    op = body.op
    rounded, scales = {}, {}
    if 16 in uses.weight_bits:
        rounded[16] = op("Cast", op("Cast", x, to=ir.DataType.BFLOAT16), to=ir.DataType.FLOAT)
        scales[16] = body.number(1)
    if 4 in uses.weight_bits or (8 in uses.weight_bits and 0 in uses.x_zero_points):
        rounded[8], scales[8] = rounded[4], scales[4] = _without_zero_points(body, x)
    if 8 in uses.weight_bits and 1 in uses.x_zero_points:
        found = _with_zero_points(body, x)
        if 0 in uses.x_zero_points:
            plain = rounded[8], scales[8]
            pairs = zip(plain, found, strict=True)
            found = tuple(body.by_attribute("x_zero_points", dict(enumerate(pair))) for pair in pairs)
        rounded[8], scales[8] = found
    if uses.weight_bits == {16}:
        return op("MatMul", rounded[16], w)
    if uses.weight_bits == {8} or (uses.weight_bits == {4, 8} and uses.x_zero_points == {0}):
        return op("Mul", op("MatMul", rounded[8], w), scales[8])
    if uses.weight_bits == {4}:
        return op("Mul", op("MatMul", rounded[4], w), scales[4])
    kinds = sorted(uses.weight_bits)
    x = body.by_attribute("weight_bits", {bits: rounded[bits] for bits in kinds})
    return op("Mul", op("MatMul", x, w), body.by_attribute("weight_bits", {bits: scales[bits] for bits in kinds}))
