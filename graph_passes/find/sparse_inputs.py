"""Finds layer inputs that are sparse because they keep the zeros of an earlier ReLU."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, constant_tensor

# Operators whose output element is zero if the first input's element is zero.
_KEEPS_ZEROS = {
    *("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Expand", "Dropout", "Cast"),
    *("Abs", "Neg", "Sqrt", "Div"),
}


def is_sparse_by_itself(x: ir.Value | None) -> bool:
    """Return whether x keeps the zeros of a ReLU (or ReLU6, Max with 0, ThresholdedRelu) before it."""
    waiting, seen = [x], set[ir.Node]()
    while waiting:
        value = waiting.pop()
        node = value.producer() if value is not None else None
        if node is None or node in seen or node.domain not in DEFAULT_DOMAINS or not node.inputs:
            continue
        if _makes_zeros(node):
            return True
        seen.add(node)
        waiting += _zeros_from(node)
    return False


def _makes_zeros(node: ir.Node) -> bool:
    if node.op_type == "Clip":  # ReLU6
        low = constant_tensor(node.inputs[1]) if len(node.inputs) > 1 else None
        return low is not None and low.size == 1 and float(low.numpy().item()) == 0
    if node.op_type == "Max":
        constants = [tensor for value in node.inputs if (tensor := constant_tensor(value)) is not None]
        return len(node.inputs) == 2 and len(constants) == 1 and not np.any(constants[0].numpy())
    return node.op_type in ("Relu", "ThresholdedRelu")


def _zeros_from(node: ir.Node) -> list[ir.Value | None]:
    """Return the inputs whose zero elements each make the output element zero."""
    if node.op_type == "Mul":
        return list(node.inputs)
    if node.op_type == "Pow":
        power = constant_tensor(node.inputs[1])
        return [node.inputs[0]] if power is not None and bool(np.all(power.numpy() > 0)) else []
    return [node.inputs[0]] if node.op_type in _KEEPS_ZEROS else []
