"""LinearAttention: a linear recurrence over the tokens of a sequence, with a state per head.

Its inputs, outputs and attributes are those of com.microsoft's LinearAttention, which is also its ONNX function. All
inputs are required: an input that the update rule does not read is a constant (`unused_inputs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ..find.node_checks import MICROSOFT_DOMAIN
from ..names import ORTOLAN_DOMAIN
from .function_body import FunctionBody

OP_TYPE = "LinearAttention"
RECURRENCES = (OP_TYPE, "CausalConvWithState")  # of ONNX Runtime
INPUTS = ("query", "key", "value", "past_state", "decay", "beta")
ATTRIBUTES = {
    "q_num_heads": ir.AttributeType.INT,
    "kv_num_heads": ir.AttributeType.INT,
    "update_rule": ir.AttributeType.STRING,
    "scale": ir.AttributeType.FLOAT,
}
# Inputs that each update rule reads besides query, key, value and past_state.
UPDATE_RULES: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "gated": ("decay",),
    "delta": ("beta",),
    "gated_delta": ("decay", "beta"),
}
_FORMAT_VERSION = 1


def linear_attention_node(inputs: Sequence[ir.Value | None], attributes: Mapping[str, object], name: str) -> ir.Node:
    """Return a node with two outputs. inputs: in the order of INPUTS; attributes: all of ATTRIBUTES."""
    given = [ir.Attr(key, kind, attributes[key]) for key, kind in ATTRIBUTES.items()]
    given.append(ir.AttrInt64("format_version", _FORMAT_VERSION))
    return ir.Node(ORTOLAN_DOMAIN, OP_TYPE, inputs, given, num_outputs=2, name=name)


def unused_inputs(node: ir.Node) -> dict[str, np.ndarray]:
    """Return constants for the inputs that a node's update rule may not read. Their shapes are valid for the rule."""
    heads = node.attributes["kv_num_heads"].as_int()
    return {"decay": np.zeros((1, 1, heads), np.float32), "beta": np.ones((1, 1, 1), np.float32)}


def linear_attention_function(opset: int) -> ir.Function:
    """Return LinearAttention as an ONNX function for a model of this opset: ONNX Runtime's operator."""
    inputs = [ir.val(name) for name in INPUTS]
    body = FunctionBody(opset)
    # ONNX Runtime checks the batch and tokens of inputs that it does not read.
    rows = body.op("Slice", body.op("Shape", inputs[0]), body.ints(0), body.ints(2))
    rows = body.op("Concat", rows, body.ints(1), axis=0)
    given = [body.op("Expand", value, rows) if value.name in ("decay", "beta") else value for value in inputs]
    references = [ir.RefAttr(key, key, kind) for key, kind in ATTRIBUTES.items()]
    node = ir.Node(MICROSOFT_DOMAIN, OP_TYPE, given, references, num_outputs=2)
    for output, name in zip(node.outputs, ("output", "present_state"), strict=True):
        output.name = name
    imports = {"": opset, MICROSOFT_DOMAIN: 1}
    graph = ir.Graph(inputs, node.outputs, nodes=[*body.nodes, node], opset_imports=imports, name=OP_TYPE)
    attributes = [ir.Attr(key, kind, None) for key, kind in ATTRIBUTES.items()]
    attributes.append(ir.Attr("format_version", ir.AttributeType.INT, None))
    return ir.Function(ORTOLAN_DOMAIN, OP_TYPE, graph=graph, attributes=attributes)
