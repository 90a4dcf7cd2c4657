"""Code shared by W4A8MatMul and W8A8MatMul as ONNX functions: rounding of activations, and expansion of group scales.

The functions use only operators whose meaning has not changed since opset 13 (except ReduceMax). They support any k, n
and rank of X. The weight formats are specified in ops/formats/int4_group.h and int8_group.h.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .function_body import PANEL_COLUMNS, FunctionBody

ATTRIBUTES = ("k", "n", "format_version", "group_size", "activation", "gated_columns")

# As in ops/formats.
ROW_INPUTS = 4
TILE_INPUTS = 64

_SMALLEST_MAXIMUM = 2.0**-100  # equals the constant in ops/matmul/group_weight.h


class GroupRows:
    """Expands tensors [panels, groups, 16] to one row per input: [k padded to tiles, n padded to panels].

    Attributes:
        k: The number of inputs, int64, like all sizes.
        n: The number of columns.
        panels: The number of panels.
        padded_n: n padded to panels.
        tiles: The number of tiles.
        padded_k: k padded to tiles.
        inputs: 0 … padded_k - 1.
    """

    def __init__(self, body: FunctionBody) -> None:
        self._body = body
        op = body.op
        self.k, self.n = body.attribute("k"), body.attribute("n")
        self.panels = body.divided_up(self.n, body.integer(PANEL_COLUMNS))
        self.padded_n = op("Mul", self.panels, body.integer(PANEL_COLUMNS))
        tile_inputs = body.integer(TILE_INPUTS)
        self.tiles = body.divided_up(self.k, tile_inputs)
        self.padded_k = op("Mul", self.tiles, tile_inputs)
        self.inputs = op("Range", body.integer(0), self.padded_k, body.integer(1))
        group_size = body.attribute("group_size")
        # Padding inputs use the scale of the last group; `matrix` cuts off their rows.
        group = op("Div", self.inputs, group_size)
        self._group = op("Min", group, op("Div", op("Sub", self.k, body.integer(1)), group_size))

    def of_inputs(self, tensor: ir.Value) -> ir.Value:
        """Return the expanded tensor as float32."""
        return self.rows_at(tensor, self._group)

    def rows_at(self, tensor: ir.Value, index: ir.Value) -> ir.Value:
        """Return rows of the tensor as float32. index: each input's group, int64 [padded_k]."""
        op = self._body.op
        by_groups = op("Transpose", op("Cast", tensor, to=ir.DataType.FLOAT), perm=[1, 0, 2])
        rows = op("Reshape", by_groups, self._body.shape(-1, self.padded_n))
        return op("Gather", rows, index)

    def matrix(self, padded: ir.Value) -> ir.Value:
        """Return the first k rows and n columns."""
        return self._body.op("Slice", padded, self._body.ints(0, 0), self._body.shape(self.k, self.n))


def zero_of(body: FunctionBody, x: ir.Value, unpack_once: bool) -> ir.Value:
    """Return 0. Without unpack_once it is computed from x, so that ONNX Runtime cannot fold the unpacking."""
    zero = body.integer(0)
    return zero if unpack_once else body.op("Min", body.op("Size", x), zero)


def rounded_by_groups(body: FunctionBody, x: ir.Value) -> ir.Value:
    """Return X rounded to int8 with one scale per group, as float32."""
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
