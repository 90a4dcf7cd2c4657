"""MaskedMatMul as an ONNX function: the operator's specification, and the fallback without Ortolan's library.

The function uses only operators whose meaning has not changed since opset 13, and supports any rank of A and B. A
function cannot test whether an input is present, so all nodes have all inputs. NO_SCALE and NO_MASK replace a missing
scale and mask.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..names import ORTOLAN_DOMAIN
from .function_body import FunctionBody

OP_TYPE = "MaskedMatMul"
INPUTS = ("A", "B", "b_scale", "a_mask", "b_mask")
ATTRIBUTES = {
    "format_version": ir.AttributeType.INT,
    "a_threshold": ir.AttributeType.FLOAT,
    "b_threshold": ir.AttributeType.FLOAT,
    "group_size": ir.AttributeType.INT,
    "b_finite": ir.AttributeType.INT,
}

NO_SCALE = np.ones((1, 1), np.float32)
NO_MASK = np.ones(1, np.bool_)


def masked_matmul_function(opset: int, unpack_once: bool = True) -> ir.Function:
    """Return the function for a model of this opset.

    unpack_once: see `Replacement.function`; if False, B must not be a scalar.
    """
    inputs = {name: ir.val(name) for name in INPUTS}
    body = FunctionBody(opset)
    a = _masked(body, inputs["A"], inputs["a_mask"], "a_threshold")
    weight = inputs["B"]
    if not unpack_once:  # row indices depend on A, so that ONNX Runtime cannot fold the unpacking
        zero = body.op("Min", body.op("Size", inputs["A"]), body.integer(0))
        rows = body.op("Range", body.integer(0), _rows(body, weight), body.integer(1))
        weight = body.op("Gather", weight, body.op("Add", rows, zero), axis=-2)
    b = _masked(body, _weight(body, weight, inputs["b_scale"]), inputs["b_mask"], "b_threshold")
    y = body.op("MatMul", a, b)
    graph = ir.Graph(list(inputs.values()), [y], nodes=body.nodes, opset_imports={"": opset}, name=OP_TYPE)
    attributes = [ir.Attr(name, kind, None) for name, kind in ATTRIBUTES.items()]
    return ir.Function(ORTOLAN_DOMAIN, OP_TYPE, graph=graph, attributes=attributes)


def _masked(body: FunctionBody, x: ir.Value, mask: ir.Value, threshold: str) -> ir.Value:
    """Return x where the mask is true and |x| is above the threshold or NaN; else 0."""
    op = body.op
    small = op("LessOrEqual", op("Abs", x), body.float_attribute(threshold))
    return op("Where", op("And", mask, op("Not", small)), x, body.number(0))


def _rows(body: FunctionBody, b: ir.Value) -> ir.Value:
    op = body.op
    return op("Squeeze", op("Slice", op("Shape", b), body.ints(-2), body.ints(-1)), body.ints(0))


def _weight(body: FunctionBody, b: ir.Value, scale: ir.Value) -> ir.Value:
    """Return B as float32, its rows scaled group by group."""
    op = body.op
    k = _rows(body, b)
    group_size = body.attribute("group_size")
    one_group = op("Equal", group_size, body.integer(0))
    # A divisor must not be 0, but k may be.
    rows = op("Where", one_group, op("Max", k, body.integer(1)), group_size)
    groups = op("Div", op("Range", body.integer(0), k, body.integer(1)), rows)
    return op("Mul", op("Cast", b, to=ir.DataType.FLOAT), op("Gather", scale, groups))
