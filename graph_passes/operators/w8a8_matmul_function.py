"""W8A8MatMul as an ONNX function: the operator's specification, and the fallback without Ortolan's library."""

from __future__ import annotations

import onnx_ir as ir

from .function_body import PANEL_COLUMNS, FunctionBody
from .group_function import ATTRIBUTES, ROW_INPUTS, GroupRows, rounded_by_groups, zero_of
from .linear_function import NORM_INPUTS, LayerUses, end_of_layer, linear_function, rows_of_product

OP_TYPE = "W8A8MatMul"
INPUTS = ("X", "weights", "scales", "bias", "residual", *NORM_INPUTS)


def w8a8_matmul_function(opset: int, uses: LayerUses, unpack_once: bool = True) -> ir.Function:
    """Return the function for a model of this opset. unpack_once: see `Replacement.function`."""
    inputs = {name: ir.val(name) for name in INPUTS if uses.norm or name not in NORM_INPUTS}
    body = FunctionBody(opset)
    x = rows_of_product(body, inputs["X"], uses)
    product = body.op("MatMul", rounded_by_groups(body, x), _matrix(body, inputs, unpack_once))
    y = end_of_layer(body, product, inputs, uses)
    return linear_function(OP_TYPE, opset, body, inputs, y, ATTRIBUTES, uses)


def _matrix(body: FunctionBody, inputs: dict[str, ir.Value], unpack_once: bool) -> ir.Value:
    """Return W [k, n] = scales * q."""
    op = body.op
    rows = GroupRows(body)
    panels = op("Add", rows.panels, zero_of(body, inputs["X"], unpack_once))
    # [panel, row, column, input in row] -> [input, column].
    in_order = op("Reshape", inputs["weights"], body.shape(panels, -1, PANEL_COLUMNS, ROW_INPUTS))
    matrix_order = op("Transpose", in_order, perm=[1, 3, 0, 2])
    q = op("Cast", op("Reshape", matrix_order, body.shape(-1, rows.padded_n)), to=ir.DataType.FLOAT)
    return rows.matrix(op("Mul", q, rows.of_inputs(inputs["scales"])))
