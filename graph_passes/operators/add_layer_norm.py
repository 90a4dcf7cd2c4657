"""AddLayerNorm: LayerNormalization of a sum of up to three tensors, over the last axis.

Inputs:
    X, addend, second_addend: float32 [..., n], broadcast as in Add; an unused addend is a 0 of shape [1].
    norm_weight, norm_bias: float32 [n], initializers.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ..names import ORTOLAN_DOMAIN
from .function_body import FunctionBody
from .linear_function import NORM_INPUTS

OP_TYPE = "AddLayerNorm"
ADDENDS = ("addend", "second_addend")
INPUTS = ("X", *ADDENDS, *NORM_INPUTS)
_FORMAT_VERSION = 1


def add_layer_norm_node(inputs: Sequence[ir.Value | None], epsilon: float, name: str | None) -> ir.Node:
    """Return a node with these inputs, in the order of INPUTS. All inputs are required (see `fill_missing`)."""
    attributes = [ir.AttrFloat32("epsilon", epsilon), ir.AttrInt64("format_version", _FORMAT_VERSION)]
    return ir.Node(ORTOLAN_DOMAIN, OP_TYPE, inputs, attributes, name=name)


def add_layer_norm_function(opset: int) -> ir.Function:
    """Return AddLayerNorm as an ONNX function for a model of this opset."""
    inputs = [ir.val(name) for name in INPUTS]
    x, addend, second_addend, weight, bias = inputs
    body = FunctionBody(opset)
    total = body.op("Add", body.op("Add", x, addend), second_addend)
    y = body.layer_norm(total, weight, bias, body.float_attribute("epsilon"))
    y.name = "Y"
    graph = ir.Graph(inputs, [y], nodes=body.nodes, opset_imports={"": opset}, name=OP_TYPE)
    attributes = [
        ir.Attr("epsilon", ir.AttributeType.FLOAT, None),
        ir.Attr("format_version", ir.AttributeType.INT, None),
    ]
    return ir.Function(ORTOLAN_DOMAIN, OP_TYPE, graph=graph, attributes=attributes)
