"""W4A8MatMul as an ONNX function: the operator's specification, and the fallback without Ortolan's library."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .function_body import PANEL_COLUMNS, FunctionBody
from .group_function import ATTRIBUTES, ROW_INPUTS, GroupRows, rounded_by_groups, zero_of
from .linear_function import NORM_INPUTS, LayerUses, end_of_layer, linear_function

OP_TYPE = "W4A8MatMul"
INPUTS = ("X", "weights", "scales", "bias", "residual", "zero_points", *NORM_INPUTS, "minimums")

MIDDLE_ZERO_POINT = 8  # equals the constant in ops/formats/int4_group.h


@dataclass(frozen=True)
class Uses(LayerUses):
    """The features that the W4A8MatMul nodes of a model use."""

    zero_points: bool = False  # also true if there are minimums; nodes with minimums get the zero point 0
    minimums: bool = False

    def needed_inputs(self) -> set[str]:
        """Return the inputs that all nodes must have."""
        offsets = {"zero_points"} if self.zero_points else set()
        return super().needed_inputs() | offsets | ({"minimums"} if self.minimums else set())

    def takes(self, name: str) -> bool:
        """Return whether the function has this input; it has all inputs up to the last one that a node uses."""
        return self.minimums or ((name not in NORM_INPUTS or self.norm) and name != "minimums")


def w4a8_matmul_function(opset: int, uses: Uses, unpack_once: bool = True) -> ir.Function:
    """Return the function for a model of this opset. unpack_once: see `Replacement.function`."""
    inputs = {name: ir.val(name) for name in INPUTS if uses.takes(name)}
    body = FunctionBody(opset)
    product = body.op("MatMul", rounded_by_groups(body, inputs["X"]), _matrix(body, inputs, uses, unpack_once))
    y = end_of_layer(body, product, inputs, uses)
    return linear_function(OP_TYPE, opset, body, inputs, y, (*ATTRIBUTES, "zero_point_steps"))


def _matrix(body: FunctionBody, inputs: dict[str, ir.Value], uses: Uses, unpack_once: bool) -> ir.Value:
    """Return W [k, n]: scales (q - zero_points / zero_point_steps) + minimums.

    A single zero point or minimum applies to all weights.
    """
    op = body.op
    rows = GroupRows(body)
    # [panel, pair of rows, nibble, column, input in row] -> [input, column].
    shifts = op("Add", body.constant(np.array([[0], [4]], np.int64)), zero_of(body, inputs["X"], unpack_once))
    pairs = op("Unsqueeze", inputs["weights"], body.ints(2))
    shifted = op("BitShift", pairs, op("Cast", shifts, to=ir.DataType.UINT8), direction="RIGHT")
    nibbles = op("Mod", shifted, body.constant(np.array(16, np.uint8)))
    in_order = op("Reshape", nibbles, body.shape(rows.panels, -1, 2, PANEL_COLUMNS, ROW_INPUTS))
    matrix_order = op("Transpose", in_order, perm=[1, 2, 4, 0, 3])
    q = op("Cast", op("Reshape", matrix_order, body.shape(-1, rows.padded_n)), to=ir.DataType.FLOAT)

    def of_inputs(name: str) -> ir.Value:
        tensor = inputs[name]
        if uses.minimums and name != "scales":
            tensor = op("Expand", tensor, op("Shape", inputs["scales"]))
        return rows.of_inputs(tensor)

    zero_points = body.number(MIDDLE_ZERO_POINT)
    if uses.zero_points:
        steps = op("Cast", body.attribute("zero_point_steps"), to=ir.DataType.FLOAT)
        zero_points = op("Div", of_inputs("zero_points"), steps)
    padded = op("Mul", op("Sub", q, zero_points), of_inputs("scales"))
    if uses.minimums:
        padded = op("Add", padded, of_inputs("minimums"))
    return rows.matrix(padded)
