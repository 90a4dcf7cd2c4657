"""Shapes declared in the written model, so that ONNX Runtime need not infer them through our operators' functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ..find.constants import DEFAULT_DOMAINS
from ..find.dimensions import Dimensions
from ..names import ORTOLAN_DOMAIN
from .nodes import new_initializer

_VALUE = 2  # index of Attention's input V


def declare_shapes(model: ir.Model, new_name: Callable[[str], str]) -> None:
    """Declare the output shapes of Ortolan's operators, and the width of each value input of a standard Attention.

    Declared shapes become value_info. This is not enough for Attention (opset 23): inlining a function may remove the
    node whose output shape was declared, and ONNX Runtime then assumes that the value input has width 0. So a Reshape
    to a constant shape, which costs nothing and survives inlining, goes before that input.
    """
    for graph in model.graphs():
        if not any(node.domain == ORTOLAN_DOMAIN for node in graph):
            continue
        dims = Dimensions(graph)
        for node in list(graph):
            if (
                node.domain == ORTOLAN_DOMAIN and not node.outputs[0].is_graph_output()
            ):  # graph outputs keep the shapes declared in the given model
                _declare(node.outputs[0], dims)
            elif node.op_type == "Attention" and node.domain in DEFAULT_DOMAINS and model.functions:
                _state_width(graph, node, dims, new_name)


def _declare(output: ir.Value, dims: Dimensions) -> None:
    known = dims.shape(output)
    if known is None or output.dtype not in (None, ir.DataType.FLOAT):
        return
    same_rank = output.shape is not None and len(output.shape) == len(known)
    stated = list(output.shape) if output.shape is not None and same_rank else [None] * len(known)
    output.dtype = ir.DataType.FLOAT
    output.shape = ir.Shape(dim if isinstance(dim, int) else old for dim, old in zip(known, stated, strict=True))


def _state_width(graph: ir.Graph, node: ir.Node, dims: Dimensions, new_name: Callable[[str], str]) -> None:
    """Reshape the value input to its own shape, whose last dimension is a constant."""
    value = node.inputs[_VALUE]
    shape = dims.shape(value)
    if value is None or not shape or not isinstance(shape[-1], int):
        return
    target = np.array([0] * (len(shape) - 1) + [shape[-1]], np.int64)
    constant = new_initializer(graph, ir.Tensor(target, name=new_name(f"{node.name}/value_shape")))
    reshape = ir.node("Reshape", [value, constant], name=new_name(f"{node.name}/value_width"))
    reshape.outputs[0].name = reshape.name
    reshape.outputs[0].type = value.type
    graph.insert_before(node, reshape)
    node.replace_input_with(_VALUE, reshape.outputs[0])
