"""Runs a model with the weights that it stores in few bits dequantized to float. The original and the optimized model
are both compared with its answers.

ONNX Runtime rounds the inputs of such layers to int8: of a whole batch (DynamicQuantizeLinear), or of blocks
(accuracy_level 4 of MatMulNBits). Our operators round them row by row. Neither is right, so the errors of both are
measured against products of floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from ...find.constants import lazy
from ...find.linear import Linear, linears_in
from ...find.stored_int4 import StoredInt4, rounds_inputs
from ...find.stored_int8 import StoredInt8Tensors, layer_input, read_int8, stored_inputs
from ..plan.plan import Plan

_LEVEL = "accuracy_level"
_FLOAT_LEVEL = 1  # MatMulNBits computes in float32
NewName = Callable[[str], str]


def rounding_layers(model: ir.Model, plan: Plan) -> list[Linear]:
    """Layers that keep the weights they store, and whose inputs ONNX Runtime rounds."""
    return [linear for linear in linears_in(model) if plan.keeps_stored(linear) and _rounds_inputs(linear)]


def _rounds_inputs(linear: Linear) -> bool:
    # ONNX Runtime makes MatMulNBits of a MatMul behind a DequantizeLinear of int4 blocks.
    fused = isinstance(linear.int4, StoredInt4) and linear.node.op_type == "MatMul"
    return fused or rounds_inputs(linear.node) or stored_inputs(linear.node) is not None


@contextmanager
def computed_in_float(linears: Sequence[Linear], new_name: NewName) -> Iterator[None]:
    """Inside, these layers of a model multiply floats by their dequantized weights. Afterwards it is as it was.

    new_name: makes a name that no value of the model has.
    """
    undo: list[Callable[[], None]] = []
    try:
        for linear in linears:
            if stored_inputs(linear.node) is not None:
                undo.append(_put_float_product(linear, new_name))
            elif rounds_inputs(linear.node):
                undo.append(_put_float_level(linear.node))
        yield
    finally:
        for one in reversed(undo):
            one()


def _put_float_level(node: ir.Node) -> Callable[[], None]:
    level = node.attributes[_LEVEL]
    node.attributes[_LEVEL] = ir.AttrInt64(_LEVEL, _FLOAT_LEVEL)

    def undo() -> None:
        node.attributes[_LEVEL] = level

    return undo


def _put_float_product(linear: Linear, new_name: NewName) -> Callable[[], None]:
    """DequantizeLinear, MatMul and Add instead of a node of int8 products: only one layer's floats exist at a time."""
    node, numbers, inputs = linear.node, read_int8(linear.node), stored_inputs(linear.node)
    # The layer in front may have got another node since `linear` was made.
    graph, x, codes = node.graph, layer_input(node), linear.weight_value
    assert isinstance(numbers, StoredInt8Tensors) and inputs is not None and graph is not None and x is not None
    added: list[ir.Value] = []

    def constant(tensor: ir.TensorProtocol, what: str) -> ir.Value:
        value = ir.Value(name=new_name(f"{linear.name}/{what}"), const_value=tensor)
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        graph.register_initializer(value)
        added.append(value)
        return value

    zeros = numbers.zero_points.astype(numbers.codes.dtype.numpy())
    scales = constant(ir.Tensor(np.ascontiguousarray(numbers.scales)), "scales")
    zero_points = constant(ir.Tensor(zeros), "zero_points")
    if codes.graph is not graph:  # ONNX Runtime fuses DequantizeLinear and MatMul, if all is in one graph
        codes = constant(lazy(numbers.codes.numpy, numbers.codes.dtype, ir.Shape(numbers.codes.shape.numpy())), "codes")
    weight = ir.node(
        "DequantizeLinear", [codes, scales, zero_points], {"axis": 1}, name=new_name(f"{linear.name}/weight")
    )
    nodes = [weight, ir.node("MatMul", [x, weight.outputs[0]], name=new_name(f"{linear.name}/product"))]
    bias = node.inputs[inputs.bias] if len(node.inputs) > inputs.bias else None
    if bias is not None:
        nodes.append(ir.node("Add", [nodes[-1].outputs[0], bias], name=new_name(f"{linear.name}/sum")))
    for one in nodes:
        one.outputs[0].name = new_name(f"{one.name}_output")
    old, new = node.outputs[0], nodes[-1].outputs[0]
    new.type, new.shape = old.type, old.shape
    old_name = old.name
    graph.insert_before(node, nodes)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(node)
    old.name, new.name = new_name(f"{old_name}/int8"), old_name  # it may be an output of the model

    def undo() -> None:
        graph.insert_before(nodes[0], node)
        ir.convenience.replace_all_uses_with(new, old, replace_graph_outputs=True)
        graph.remove(nodes, safe=True)
        new.name, old.name = None, old_name
        for value in added:
            graph.initializers.pop(value.name or "")

    return undo
