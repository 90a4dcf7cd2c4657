"""W4A8MatMul as an ONNX function: its specification, and what runs where our library is not registered.

It uses only operators that mean the same from opset 13 on (but for ReduceMax), and serves any k, n and rank of X. The
format of the weight is specified in ops/formats/int4_group.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .function_body import PANEL_COLUMNS, FunctionBody
from .linear_function import NORM_INPUTS, LayerUses, end_of_layer, linear_function

OP_TYPE = "W4A8MatMul"
INPUTS = ("X", "weights", "scales", "bias", "residual", "zero_points", *NORM_INPUTS, "minimums")
ATTRIBUTES = ("k", "n", "format_version", "group_size", "activation", "gated_columns")

# As in ops/formats/int4_group.h.
ROW_INPUTS = 4
TILE_INPUTS = 64
MIDDLE_ZERO_POINT = 8

_SMALLEST_MAXIMUM = 2.0**-100  # as in ops/matmul/group_weight.h


@dataclass(frozen=True)
class Uses(LayerUses):
    """What the W4A8MatMul nodes of a model make use of."""

    zero_points: bool = False  # or minimums, beside which nodes have a zero point of 0
    minimums: bool = False

    def needed_inputs(self) -> set[str]:
        offsets = {"zero_points"} if self.zero_points else set()
        return super().needed_inputs() | offsets | ({"minimums"} if self.minimums else set())

    def takes(self, name: str) -> bool:
        """Whether the function has this input: all in front of one that is used."""
        return self.minimums or ((name not in NORM_INPUTS or self.norm) and name != "minimums")


def w4a8_matmul_function(opset: int, uses: Uses, unpack_once: bool = True) -> ir.Function:
    """The function for a model of this opset. unpack_once: see Replacement.function."""
    inputs = {name: ir.val(name) for name in INPUTS if uses.takes(name)}
    body = FunctionBody(opset)
    product = body.op("MatMul", _rounded(body, inputs["X"]), _matrix(body, inputs, uses, unpack_once))
    y = end_of_layer(body, product, inputs, uses)
    return linear_function(OP_TYPE, opset, body, inputs, y, ATTRIBUTES)


def _matrix(body: FunctionBody, inputs: dict[str, ir.Value], uses: Uses, unpack_once: bool) -> ir.Value:
    """W [k, n]: scales (q - zero_points) + minimums; a zero of one element is that for all."""
    op = body.op
    k, n = body.attribute("k"), body.attribute("n")
    panels = body.divided_up(n, body.integer(PANEL_COLUMNS))
    padded_n = op("Mul", panels, body.integer(PANEL_COLUMNS))
    nothing = body.integer(0)
    if not unpack_once:
        nothing = op("Min", op("Size", inputs["X"]), nothing)
    # Panel, pair of rows, nibble, column, input of the row -> input, column.
    shifts = op("Cast", op("Add", body.constant(np.array([[0], [4]], np.int64)), nothing), to=ir.DataType.UINT8)
    pairs = op("Unsqueeze", inputs["weights"], body.ints(2))
    nibbles = op("Mod", op("BitShift", pairs, shifts, direction="RIGHT"), body.constant(np.array(16, np.uint8)))
    in_order = op("Reshape", nibbles, body.shape(panels, -1, 2, PANEL_COLUMNS, ROW_INPUTS))
    matrix_order = op("Transpose", in_order, perm=[1, 2, 4, 0, 3])
    q = op("Cast", op("Reshape", matrix_order, body.shape(-1, padded_n)), to=ir.DataType.FLOAT)

    # [panels, groups, 16] -> a row for each input. Behind the last group, where no input is, any.
    def of_inputs(tensor: ir.Value) -> ir.Value:
        if uses.minimums:
            tensor = op("Expand", tensor, op("Shape", inputs["scales"]))
        by_groups = op("Transpose", op("Cast", tensor, to=ir.DataType.FLOAT), perm=[1, 0, 2])
        rows = op("Reshape", by_groups, body.shape(-1, padded_n))
        return op("Gather", rows, group)

    tile_inputs = body.integer(TILE_INPUTS)
    padded_k = op("Mul", body.divided_up(k, tile_inputs), tile_inputs)
    group_size = body.attribute("group_size")
    group = op("Div", op("Range", body.integer(0), padded_k, body.integer(1)), group_size)
    group = op("Min", group, op("Div", op("Sub", k, body.integer(1)), group_size))
    zero_points = of_inputs(inputs["zero_points"]) if uses.zero_points else body.number(MIDDLE_ZERO_POINT)
    padded = op("Mul", op("Sub", q, zero_points), of_inputs(inputs["scales"]))
    if uses.minimums:
        padded = op("Add", padded, of_inputs(inputs["minimums"]))
    return op("Slice", padded, body.ints(0, 0), body.shape(k, n))


def _rounded(body: FunctionBody, x: ir.Value) -> ir.Value:
    """X rounded to int8 numbers and a scale, group by group."""
    op = body.op
    k, group_size = body.attribute("k"), body.attribute("group_size")
    groups = body.divided_up(k, group_size)
    missing = op("Sub", op("Mul", groups, group_size), k)
    rank = op("Size", op("Shape", x))
    pads = body.vector(op("Sub", op("Mul", rank, body.integer(2)), body.integer(1)))
    zeros = op("ConstantOfShape", pads, value=ir.tensor(np.zeros(1, np.int64)))
    padded = op("Pad", x, op("Concat", zeros, body.vector(missing), axis=0))
    leading = op("Slice", op("Shape", x), body.ints(0), body.ints(-1))
    by_groups = op("Reshape", padded, op("Concat", leading, body.shape(groups, group_size), axis=0))
    largest = op("Max", body.reduce_max(op("Abs", by_groups), -1), body.number(_SMALLEST_MAXIMUM))
    q = op("Round", op("Mul", by_groups, op("Div", body.number(127), largest)))
    rounded = op("Reshape", op("Mul", q, op("Div", largest, body.number(127))), op("Shape", padded))
    return op("Slice", rounded, body.ints(0), body.vector(k), body.ints(-1))
