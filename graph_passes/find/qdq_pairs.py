"""Finds QuantizeLinear/DequantizeLinear pairs that round activations to 8-bit codes of a fixed range.

Operators between the two may move elements. If a pair is removed, its consumers read the float input of the
QuantizeLinear. A range also clips: ONNX Runtime's quantizer omits a Relu or Clip whose effect the range has. So a range
that begins at 0 is replaced by a Clip, unless its input is never negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, constant_tensor, float_array
from .node_checks import node_input
from .stored_int8 import FLOAT_TYPES, INT8_TYPES

# Operators that move elements of the first input without changing them.
_MOVES = (
    *("Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
)
_NEVER_NEGATIVE = ("Abs", "Exp", "HardSigmoid", "Relu", "Sigmoid", "Softmax", "Softplus", "Sqrt")
# Operators whose output is not negative if the first input is not negative (_KEEPS_SIGN), or if all inputs are not
# negative (_OF_SIGNS).
_KEEPS_SIGN = (*_MOVES, "Cast", "ReduceMax", "ReduceMean", "ReduceSum", "QuantizeLinear")
_OF_SIGNS = ("Add", "Concat", "Div", "Mul", "Where")
_WITHIN_ONE = ("Erf", "Tanh")  # output in -1 … 1
# Operators that compute attention masks from integers. A mask may be negative, but no Relu was omitted there.
_OF_MASKS = (
    *("Add", "Cast", "Div", "Expand", "Identity", "Mul", "Neg", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze"),
    "Where",
)
_TRUTH_VALUES = ("And", "Equal", "Greater", "Less", "Not", "Or")
_MOST_VISITS = 64  # of values
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class _Range:
    """The range of 8-bit codes q with the values scale (q - zero_point)."""

    scale: float  # above 0
    zero_point: int
    kind: ir.DataType  # type of q: INT8 or UINT8
    floats: ir.DataType

    @property
    def begins_at_zero(self) -> bool:
        return self.zero_point == (-128 if self.kind == ir.DataType.INT8 else 0)


@dataclass(frozen=True, eq=False)
class QdqPair:
    """A QuantizeLinear and the DequantizeLinear nodes after it."""

    node: ir.Node  # QuantizeLinear
    range: _Range
    moves: list[ir.Node]
    ends: list[ir.Node]  # DequantizeLinear

    @property
    def bounds(self) -> tuple[np.float32, np.float32] | None:
        """Bounds to clip the floats to, if necessary."""
        floats = node_input(self.node, 0)
        if not self.range.begins_at_zero or floats is None or _is_never_negative(floats):
            return None
        return np.float32(0), np.float32(min(255 * self.range.scale, _LARGEST))


def qdq_pair_of(node: ir.Node) -> QdqPair | str | None:
    """Return the pair that begins at a QuantizeLinear, or why it cannot be removed.

    None: the node does not quantize to 8 bits, or quantizes a weight.
    """
    if node.op_type != "QuantizeLinear" or node.domain not in DEFAULT_DOMAINS:
        return None
    zero, floats = constant_tensor(node_input(node, 2)), node_input(node, 0)
    if zero is not None and zero.dtype not in INT8_TYPES:
        return None
    found = _range_of(node)
    if found is None or floats is None:
        return "its scale is not a positive constant scalar with a constant 8-bit zero point"
    rounding, waiting = QdqPair(node, found, [], []), [node.outputs[0]]
    for value in waiting:
        if value.is_graph_output():
            return f"its codes {value.name!r} are an output of the model"
        for user, index in value.uses():
            if user.domain not in DEFAULT_DOMAINS or user.graph is not node.graph or index != 0:
                return f"{user.op_type} {user.name!r} reads its codes without a DequantizeLinear"
            if user.op_type == "DequantizeLinear" and _range_of(user, found.kind) == found:
                rounding.ends.append(user)
            elif user.op_type in _MOVES:
                rounding.moves.append(user)
                waiting += user.outputs
            else:
                return f"{user.op_type} {user.name!r} reads its codes without a DequantizeLinear"
    return None if constant_tensor(floats) is not None and _is_weight(rounding) else rounding


def _is_weight(rounding: QdqPair) -> bool:
    """Return whether MatMul, Gemm or Transpose reads the dequantized constant, so that it is a layer's weight."""
    users = [use.node.op_type for end in rounding.ends for use in end.outputs[0].uses()]
    return bool({"MatMul", "Gemm", "Transpose"} & set(users))


def _range_of(node: ir.Node, kind: ir.DataType = ir.DataType.UINT8) -> _Range | None:
    """Return the range of a QuantizeLinear or DequantizeLinear with one scale. kind: type of q by default."""
    scale, zero = constant_tensor(node_input(node, 1)), constant_tensor(node_input(node, 2))
    if scale is None or scale.size != 1 or scale.dtype not in FLOAT_TYPES:
        return None
    if {"output_dtype", "precision"} & node.attributes.keys() or (zero is None and node_input(node, 2) is not None):
        return None
    number = float(float_array(scale).reshape(-1)[0])
    if not 0 < number < np.inf or (zero is not None and (zero.size != 1 or zero.dtype not in INT8_TYPES)):
        return None
    zero_point = 0 if zero is None else int(zero.numpy().reshape(-1)[0])
    return _Range(number, zero_point, kind if zero is None else zero.dtype, scale.dtype)


def _is_never_negative(value: ir.Value, visits: int = _MOST_VISITS) -> bool:
    """Return whether a value is certainly not negative, or is a mask, which needs no Clip."""
    return _is_of_mask(value) or _is_above(value, [visits])


def _is_above(value: ir.Value | None, left: list[int]) -> bool:
    """Return whether no element is negative. left: one integer, the number of values that may still be visited."""
    left[0] -= 1
    if value is None or left[0] < 0:
        return False
    tensor = constant_tensor(value)
    if tensor is not None:
        return bool((float_array(tensor) >= 0).all())
    node = value.producer()
    if node is None or node.domain not in DEFAULT_DOMAINS:
        return False
    if node.op_type in _NEVER_NEGATIVE:
        return True
    if node.op_type == "DequantizeLinear":
        found = _range_of(node)
        return found is not None and found.begins_at_zero
    if node.op_type == "Clip":
        low = constant_tensor(node_input(node, 1))
        return low is not None and low.size == 1 and float(float_array(low).reshape(())) >= 0
    if node.op_type == "Pow":
        power = constant_tensor(node_input(node, 1))
        return power is not None and bool((float_array(power) % 2 == 0).all())
    if node.op_type == "Mul" and node.inputs[0] is node.inputs[1]:
        return True
    if node.op_type == "Add" and _is_one_more(node):
        return True
    if node.op_type == "Max":
        return any(_is_above(one, left) for one in node.inputs)
    if node.op_type in _OF_SIGNS:
        of = node.inputs[1:] if node.op_type == "Where" else node.inputs
        return all(_is_above(one, left) for one in of)
    return node.op_type in _KEEPS_SIGN and _is_above(node_input(node, 0), left)


def _makes_truth_values(node: ir.Node | None) -> bool:
    return node is not None and node.op_type in _TRUTH_VALUES and node.domain in DEFAULT_DOMAINS


def _is_one_more(add: ir.Node) -> bool:
    """Return whether an Add adds about 1 (more than 0.99) to the output of Erf or Tanh."""
    for value, other in (add.inputs, reversed(add.inputs)):
        tensor, node = constant_tensor(other), value.producer() if value is not None else None
        if tensor is not None and node is not None and node.op_type in _WITHIN_ONE:
            return bool((float_array(tensor) > 0.99).all())
    return False


def _is_of_mask(value: ir.Value) -> bool:
    """Return whether a value is computed only from integers, booleans and constants, like a mask."""
    waiting, visits = [value], 0
    while waiting:
        one, visits = waiting.pop(), visits + 1
        node = one.producer()
        whole = one.dtype is not None and not one.dtype.is_floating_point()
        if whole or constant_tensor(one) is not None or _makes_truth_values(node):
            continue
        if node is None or visits > _MOST_VISITS or node.op_type not in _OF_MASKS or node.domain not in DEFAULT_DOMAINS:
            return False
        waiting += [source for source in node.inputs if source is not None]
    return True
