"""MoE as an ONNX function: the operator's specification, and the fallback without Ortolan's library.

The function runs every expert on every row, one after the other, so it is slow but needs the memory of one expert only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..find.epilogue import Activation
from ..names import ORTOLAN_DOMAIN
from .function_body import PANEL_COLUMNS, FunctionBody
from .group_function import ROW_INPUTS, GroupRows, rounded_by_groups
from .linear_function import activate
from .w4a8_matmul_function import MIDDLE_ZERO_POINT, Uses, dequantized, nibbles_in_order

OP_TYPE = "MoE"
LAYERS = ("up_", "down_")
# The tensors of a layer that not every format has, and the attributes of a layer.
OPTIONAL_TENSORS = ("bias", "zero_points", "minimums", "subgroup_scales", "high_bits", "subgroup_minimums")
LAYER_ATTRIBUTES = (
    *("bits", "group_size", "zero_point_steps", "subgroup_size", "subgroup_scale_bits", "subgroup_zero_point"),
)
INPUTS = (
    "X", "experts", "routing_weights", "up_weights", "up_scales", "down_weights", "down_scales",
    *(f"{layer}{name}" for name in OPTIONAL_TENSORS for layer in LAYERS),
)  # fmt: skip
INTEGERS = ("format_version", "expert_count", "hidden_size", "inner_size", "gated", "activation")
FLOATS = ("alpha", "beta", "limit")

_BYTE = 256
# Attributes that are 4 for 8-bit weights, which have neither high bits nor subgroups.
_BITS = ("bits", "subgroup_scale_bits")


@dataclass(frozen=True)
class MoEUses:
    """The features that the MoE nodes of a model use: formats of both layers, and whether any has 8 bits."""

    activations: frozenset[Activation] = frozenset({Activation.SILU})
    up: Uses = field(default_factory=Uses)
    down: Uses = field(default_factory=Uses)
    int8: bool = False


def moe_function(opset: int, uses: MoEUses) -> ir.Function:
    """Return the function for a model of this opset."""
    inputs = {name: ir.val(name) for name in INPUTS}
    outer = FunctionBody(opset)
    loop = _LoopBody(outer, opset)
    expert, condition, before = (ir.val(f"{name}_of_loop") for name in ("expert", "condition", "sum"))
    hidden, inner = outer.attribute("hidden_size"), outer.attribute("inner_size")
    columns = outer.op("Mul", outer.divided_up(inner, outer.integer(PANEL_COLUMNS)), outer.integer(PANEL_COLUMNS))
    gated = outer.op("Cast", outer.attribute("gated"), to=ir.DataType.BOOL)
    up_columns = outer.op("Mul", columns, outer.op("Where", gated, outer.integer(2), outer.integer(1)))
    rows = rounded_by_groups(_LayerBody(outer, "up_", hidden, up_columns), inputs["X"])
    zeros = outer.op("ConstantOfShape", outer.op("Shape", rows), value=ir.tensor(np.zeros(1, np.float32)))

    up = _LayerBody(loop, "up_", hidden, up_columns)
    p = _product(up, inputs, uses.up, uses.int8, rows, expert)
    h = _inner_rows(loop, p, uses, inner, columns, gated)
    down = _LayerBody(loop, "down_", inner, hidden)
    y = _product(down, inputs, uses.down, uses.int8, rounded_by_groups(down, h), expert)
    chosen = loop.op("Equal", inputs["experts"], expert)
    weights = loop.op("Where", chosen, inputs["routing_weights"], loop.number(0))
    weight = loop.sum_of(weights)
    is_chosen = loop.op("Greater", loop.sum_of(loop.op("Cast", chosen, to=ir.DataType.FLOAT)), loop.number(0))
    shape = loop.op("Concat", loop.op("Slice", loop.op("Shape", y), loop.ints(0), loop.ints(-1)), loop.ints(1), axis=0)
    added = loop.op("Mul", y, loop.op("Reshape", weight, shape))
    added = loop.op("Where", loop.op("Reshape", is_chosen, shape), added, loop.number(0))
    after, again = loop.op("Add", before, added), loop.op("Identity", condition)
    for index, node in enumerate(loop.nodes):
        node.outputs[0].name = f"of_loop_{index}"  # different from all names outside
    body = ir.Graph([expert, condition, before], [again, after], nodes=loop.nodes, name="one_expert")
    for value, dtype in ((expert, ir.DataType.INT64), (condition, ir.DataType.BOOL), (again, ir.DataType.BOOL)):
        value.type, value.shape = ir.TensorType(dtype), ir.Shape([])
    for value in (before, after):
        value.type = ir.TensorType(ir.DataType.FLOAT)
    always = outer.constant(np.array(True))
    result = outer.op("Loop", outer.attribute("expert_count"), always, zeros, body=body)
    result.name = "Y"
    graph = ir.Graph(list(inputs.values()), [result], nodes=outer.nodes, opset_imports={"": opset}, name=OP_TYPE)
    of_layers = tuple(f"{layer}{name}" for layer in LAYERS for name in LAYER_ATTRIBUTES)
    kinds = dict.fromkeys((*INTEGERS, *of_layers), ir.AttributeType.INT)
    kinds |= dict.fromkeys(FLOATS, ir.AttributeType.FLOAT)
    return ir.Function(
        ORTOLAN_DOMAIN, OP_TYPE, graph=graph, attributes=[ir.Attr(name, kind, None) for name, kind in kinds.items()]
    )


class _LoopBody(FunctionBody):
    """The nodes of a loop. Constants and attributes are outside: ONNX Runtime 1.24 fails on constants in branches."""

    def __init__(self, outer: FunctionBody, opset: int) -> None:
        super().__init__(opset)
        self._outer = outer

    def op(self, op_type: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        """Add a node and return its output."""
        if op_type == "Constant":
            return self._outer.op(op_type, *inputs, **attributes)
        return super().op(op_type, *inputs, **attributes)

    def sum_of(self, x: ir.Value) -> ir.Value:
        """Return the sum over the last axis."""
        return self.op("ReduceSum", x, self.ints(-1), keepdims=1)


class _LayerBody(FunctionBody):
    """Adds the nodes of one layer to a body. The attributes of linear layers get the layer's values."""

    def __init__(self, body: FunctionBody, prefix: str, k: ir.Value, n: ir.Value) -> None:
        super().__init__(body.opset)
        self._body, self.prefix, self._sizes = body, prefix, {"k": k, "n": n}

    def op(self, op_type: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        """Add a node and return its output."""
        return self._body.op(op_type, *inputs, **attributes)

    def attribute(self, name: str) -> ir.Value:
        """Return an attribute of the layer."""
        if name in self._sizes:
            return self._sizes[name]
        value = self._body.attribute(f"{self.prefix}{name}")
        return self.op("Where", self.is_int8(), self.integer(4), value) if name in _BITS else value

    def is_int8(self) -> ir.Value:
        """Return whether the layer has 8-bit weights."""
        return self.op("Equal", self._body.attribute(f"{self.prefix}bits"), self.integer(8))


def _product(
    body: _LayerBody, inputs: dict[str, ir.Value], uses: Uses, int8: bool, rows: ir.Value, expert: ir.Value
) -> ir.Value:
    """Return rows W + bias for one expert."""
    op = body.op

    def of_expert(name: str) -> ir.Value:
        # Neutral tensors have one element for all experts.
        tensor = inputs[f"{body.prefix}{name}"]
        last = op("Sub", op("Gather", op("Shape", tensor), body.integer(0)), body.integer(1))
        return op("Gather", tensor, op("Min", expert, last))

    names = ["weights", "scales"]
    names += [name for name in ("zero_points", "minimums", "high_bits") if getattr(uses, name)]
    names += ["subgroup_scales"] if uses.subgroups else []
    names += ["subgroup_minimums"] if uses.subgroup_minimums else []
    tensors = {name: of_expert(name) for name in names}
    group_rows, zero = GroupRows(body), body.integer(0)
    if int8:  # 64 bytes hold one row of inputs, not two
        shape = body.shape(group_rows.panels, -1, 4 * PANEL_COLUMNS)
        tensors["weights"] = op("Reshape", tensors["weights"], shape)
    q = nibbles_in_order(body, group_rows, tensors["weights"], zero)
    if int8:
        # Without zero points, 8 is subtracted.
        q = _low_bits_or_bytes(body, q, group_rows.inputs, 0 if uses.zero_points else MIDDLE_ZERO_POINT)
    w = dequantized(body, group_rows, tensors, uses, q, zero)
    return op("Add", op("MatMul", rows, w), _cut(body, of_expert("bias")))


def _cut(body: _LayerBody, bias: ir.Value) -> ir.Value:
    """Return the bias without the padding of its last panel, or the neutral bias."""
    flat = body.op("Reshape", bias, body.ints(-1))
    return body.op("Slice", flat, body.ints(0), body.vector(body.attribute("n")))


def _low_bits_or_bytes(body: _LayerBody, nibbles: ir.Value, inputs: ir.Value, shift: int) -> ir.Value:
    """Return nibbles as they are for 4-bit weights; for 8-bit weights, the signed bytes made of them plus `shift`.

    Both nibbles of a byte follow each other in rows of four inputs.
    """
    op = body.op
    int8 = op("Cast", body.is_int8(), to=ir.DataType.INT64)
    row_inputs = body.integer(ROW_INPUTS)
    low = op("Add", inputs, op("Mul", int8, op("Mul", op("Div", inputs, row_inputs), row_inputs)))
    high = op("Add", low, op("Mul", int8, row_inputs))
    whole = op("Add", op("Gather", nibbles, low), op("Mul", op("Gather", nibbles, high), body.number(16)))
    negative = op("Cast", op("Greater", whole, body.number(_BYTE // 2 - 1)), to=ir.DataType.FLOAT)
    signed = op("Sub", whole, op("Mul", negative, body.number(_BYTE)))
    return op("Where", body.is_int8(), op("Add", signed, body.number(shift)), op("Gather", nibbles, low))


def _inner_rows(
    body: FunctionBody, p: ir.Value, uses: MoEUses, inner: ir.Value, columns: ir.Value, gated: ir.Value
) -> ir.Value:
    """Return the inputs of the second layer (ops/moe/plan.h)."""
    op = body.op
    last, begin = body.ints(-1), op("Where", gated, columns, body.integer(0))
    gate = op("Slice", p, body.ints(0), body.vector(inner), last)
    factor = op("Slice", p, body.vector(begin), body.vector(op("Add", begin, inner)), last)
    alpha, beta, limit = (body.float_attribute(name) for name in FLOATS)
    adjusted = op("Mul", op("Where", op("Greater", gate, limit), limit, gate), alpha)
    gate = op("Where", gated, adjusted, gate)
    factor = op("Where", op("Greater", factor, limit), limit, factor)
    factor = op("Where", op("Less", factor, op("Neg", limit)), op("Neg", limit), factor)
    factor = op("Where", gated, op("Div", op("Add", factor, beta), alpha), body.number(1))
    activated = body.by_attribute(
        "activation", {int(kind): activate(body, gate, kind) for kind in sorted(uses.activations)}
    )
    return op("Mul", activated, factor)
