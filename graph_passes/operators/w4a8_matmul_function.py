"""W4A8MatMul as an ONNX function: the operator's specification, and the fallback without Ortolan's library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .function_body import PANEL_COLUMNS, FunctionBody
from .group_function import ATTRIBUTES, ROW_INPUTS, TILE_INPUTS, GroupRows, rounded_by_groups, zero_of
from .linear_function import NORM_INPUTS, LayerUses, end_of_layer, linear_function, rows_of_product

OP_TYPE = "W4A8MatMul"
_SUBGROUP_INPUTS = ("subgroup_scales", "high_bits", "subgroup_minimums")
INPUTS = (
    "X", "weights", "scales", "bias", "residual", "zero_points", *NORM_INPUTS, "minimums", *_SUBGROUP_INPUTS
)  # fmt: skip

MIDDLE_ZERO_POINT = 8  # equals the constant in ops/formats/int4_group.h


@dataclass(frozen=True)
class Uses(LayerUses):
    """The features that the W4A8MatMul nodes of a model use."""

    # Also true if there are minimums or subgroups; nodes with either get the zero point 0.
    zero_points: bool = False
    minimums: bool = False
    subgroups: bool = False  # some nodes have subgroups; others get the scale 1 and zero point 0
    high_bits: bool = False  # some nodes have 5 or 6 bits
    k_quants: bool = False  # some nodes have K-quants; others get the scale bits of their format and zero point 0
    subgroup_minimums: bool = False  # some nodes have them; others get the factor 1

    def needed_inputs(self) -> set[str]:
        """Return the inputs that all nodes must have."""
        own = {
            "zero_points": self.zero_points,
            "minimums": self.minimums,
            "subgroup_scales": self.subgroups,
            "high_bits": self.high_bits,
            "subgroup_minimums": self.subgroup_minimums,
        }
        return super().needed_inputs() | {name for name, used in own.items() if used}

    def takes(self, name: str) -> bool:
        """Return whether the function has this input; it has all inputs up to the last one that a node uses."""
        later = (
            ("subgroup_minimums", self.subgroup_minimums),
            ("high_bits", self.high_bits),
            ("subgroup_scales", self.subgroups),
            ("minimums", self.minimums),
            (NORM_INPUTS[-1], self.norm),
        )
        last = next((one for one, used in later if used), "zero_points")
        return INPUTS.index(name) <= INPUTS.index(last)


def w4a8_matmul_function(opset: int, uses: Uses, unpack_once: bool = True) -> ir.Function:
    """Return the function for a model of this opset. unpack_once: see `Replacement.function`."""
    inputs = {name: ir.val(name) for name in INPUTS if uses.takes(name)}
    body = FunctionBody(opset)
    x = rows_of_product(body, inputs["X"], uses)
    product = body.op("MatMul", rounded_by_groups(body, x), _matrix(body, inputs, uses, unpack_once))
    y = end_of_layer(body, product, inputs, uses)
    own = ["zero_point_steps"]
    own += ["subgroup_size", "bits"] if uses.subgroups else []
    own += ["subgroup_scale_bits", "subgroup_zero_point"] if uses.k_quants else []
    return linear_function(OP_TYPE, opset, body, inputs, y, (*ATTRIBUTES, *own), uses)


def _matrix(body: FunctionBody, inputs: dict[str, ir.Value], uses: Uses, unpack_once: bool) -> ir.Value:
    """Return W [k, n]."""
    rows = GroupRows(body)
    zero = zero_of(body, inputs["X"], unpack_once)
    return dequantized(body, rows, inputs, uses, nibbles_in_order(body, rows, inputs["weights"], zero), zero)


def nibbles_in_order(body: FunctionBody, rows: GroupRows, weights: ir.Value, zero: ir.Value) -> ir.Value:
    """Return the nibbles of packed weights as float32 [input, column]."""
    # [panel, pair of rows, nibble, column, input in row] -> [input, column].
    shifts = body.op("Add", body.constant(np.array([[0], [4]], np.int64)), zero)
    pairs = body.op("Unsqueeze", weights, body.ints(2))
    return _in_order(body, rows, _bits_at(body, pairs, shifts, body.constant(np.array(16, np.uint8))))


def dequantized(
    body: FunctionBody, rows: GroupRows, inputs: Mapping[str, ir.Value], uses: Uses, q: ir.Value, zero: ir.Value
) -> ir.Value:
    """Return W [k, n]: scales (s (q - z) - zero_points / zero_point_steps) + minimums subgroup_minimums.

    s and z are the two parts of the input subgroup_scales; with K-quants z is an attribute. A single value of an input
    applies to all weights. q: the low 4 bits, float32 [input, column].
    """
    op = body.op
    if uses.high_bits:
        q = op("Add", q, op("Mul", _high_bits(body, rows, inputs["high_bits"], zero), body.number(16)))

    def of_inputs(name: str) -> ir.Value:
        tensor = inputs[name]
        if (uses.minimums or uses.subgroups) and name != "scales":
            tensor = op("Expand", tensor, op("Shape", inputs["scales"]))
        return rows.of_inputs(tensor)

    subgroups = Subgroups(body, rows, zero) if uses.subgroups else None
    if subgroups:
        q = subgroups.scaled(inputs["subgroup_scales"], q, uses.k_quants)
    zero_points = body.number(MIDDLE_ZERO_POINT)
    if uses.zero_points:
        steps = op("Cast", body.attribute("zero_point_steps"), to=ir.DataType.FLOAT)
        zero_points = op("Div", of_inputs("zero_points"), steps)
    padded = op("Mul", op("Sub", q, zero_points), of_inputs("scales"))
    if uses.minimums:
        minimums = of_inputs("minimums")
        if uses.subgroup_minimums:
            assert subgroups is not None
            minimums = op("Mul", minimums, subgroups.of_inputs(inputs["subgroup_minimums"]))
        padded = op("Add", padded, minimums)
    return rows.matrix(padded)


def _bits_at(body: FunctionBody, tensor: ir.Value, shifts: ir.Value, modulus: ir.Value) -> ir.Value:
    """Return tensor >> shifts modulo `modulus`, uint8. shifts: int64."""
    shifted = body.op("BitShift", tensor, body.op("Cast", shifts, to=ir.DataType.UINT8), direction="RIGHT")
    return body.op("Mod", shifted, modulus)


def _in_order(body: FunctionBody, rows: GroupRows, packed: ir.Value) -> ir.Value:
    """Return values in packed order, uint8, as float32 [input, column]."""
    in_order = body.op("Reshape", packed, body.shape(rows.panels, -1, 2, PANEL_COLUMNS, ROW_INPUTS))
    matrix_order = body.op("Transpose", in_order, perm=[1, 2, 4, 0, 3])
    return body.op("Cast", body.op("Reshape", matrix_order, body.shape(-1, rows.padded_n)), to=ir.DataType.FLOAT)


def _power_of_two(body: FunctionBody, exponent: ir.Value) -> ir.Value:
    """Return 2^exponent as uint8."""
    one = body.constant(np.array(1, np.uint8))
    return body.op("BitShift", one, body.op("Cast", exponent, to=ir.DataType.UINT8), direction="LEFT")


def _high_bits(body: FunctionBody, rows: GroupRows, tensor: ir.Value, zero: ir.Value) -> ir.Value:
    """Return the bits above the low 4 of all weights, float32 [input, column]; zeros for nodes with 4 bits."""
    op = body.op
    more = op("Max", op("Sub", body.attribute("bits"), body.integer(4)), body.integer(1))
    row_bytes = PANEL_COLUMNS * ROW_INPUTS
    chunks = op("Mul", op("Mul", rows.tiles, more), body.integer(2))
    whole = op("Expand", tensor, body.shape(rows.panels, rows.tiles, op("Mul", more, body.integer(2 * row_bytes))))
    by_chunk = op("Reshape", whole, body.shape(rows.panels, chunks, 1, row_bytes))
    # The first row's bits are the highest of a byte.
    first = op("Sub", body.integer(8), more)
    shifts = op("Unsqueeze", op("Range", first, body.integer(-1), op("Neg", more)), body.ints(1))
    return _in_order(body, rows, _bits_at(body, by_chunk, op("Add", shifts, zero), _power_of_two(body, more)))


class Subgroups:
    """Expands the values of subgroups to one row for each input."""

    def __init__(self, body: FunctionBody, rows: GroupRows, zero: ir.Value) -> None:
        self._body, self._rows = body, rows
        op = body.op
        size = body.attribute("subgroup_size")
        # Without subgroups, all subgroups of a tile's size have the one scale.
        size = op("Where", op("Equal", size, body.integer(0)), body.integer(TILE_INPUTS), size)
        self._count = op("Div", rows.padded_k, size)
        self._index = op("Add", op("Div", rows.inputs, size), zero)

    def of_inputs(self, tensor: ir.Value) -> ir.Value:
        """Return the expanded tensor, float32 [input, column]."""
        shape = self._body.shape(self._rows.panels, self._count, PANEL_COLUMNS)
        return self._rows.rows_at(self._body.op("Expand", tensor, shape), self._index)

    def scaled(self, tensor: ir.Value, q: ir.Value, k_quants: bool) -> ir.Value:
        """Return s (q - z), float32 [input, column]. tensor: the input subgroup_scales."""
        body, op = self._body, self._body.op
        both = self.of_inputs(tensor)  # s + 2^(bits of s) z; K-quants: s modulo 256
        scale_bits = (
            body.attribute("subgroup_scale_bits") if k_quants else op("Sub", body.integer(8), body.attribute("bits"))
        )
        power = op("Pow", body.number(2), op("Cast", scale_bits, to=ir.DataType.FLOAT))
        zero_points = op("Floor", op("Div", both, power))
        scales = op("Sub", both, op("Mul", zero_points, power))
        if k_quants:
            negative = op("Cast", op("Greater", scales, body.number(127)), to=ir.DataType.FLOAT)
            scales = op("Sub", scales, op("Mul", negative, body.number(256)))
            shared = op("Cast", body.attribute("subgroup_zero_point"), to=ir.DataType.FLOAT)
            zero_points = op("Add", zero_points, shared)
        return op("Mul", op("Sub", q, zero_points), scales)
