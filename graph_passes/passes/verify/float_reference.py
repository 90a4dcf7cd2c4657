"""Run a model with its stored integer weights dequantized to float, as a reference for original and optimized model.

ONNX Runtime rounds the inputs of such layers to int8, per batch (DynamicQuantizeLinear) or per block (accuracy_level 4
of MatMulNBits). Our operators round them per row. No variant is exact, so the errors of both models are measured
against float products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from ...find.constants import lazy
from ...find.linear import Linear, linears_in
from ...find.stored_int4 import StoredInt4, rounds_inputs
from ...find.stored_int8 import layer_input, stored_inputs
from ..plan.plan import Plan

_LEVEL = "accuracy_level"
_FLOAT_LEVEL = 1  # MatMulNBits computes in float32
NewName = Callable[[str], str]


def rounding_layers(model: ir.Model, plan: Plan) -> list[Linear]:
    """Return layers that keep their stored weights and whose inputs ONNX Runtime rounds."""
    return [linear for linear in linears_in(model) if plan.keeps_stored(linear) and _rounds_inputs(linear)]


def _rounds_inputs(linear: Linear) -> bool:
    # ONNX Runtime fuses a DequantizeLinear of int4 blocks and a MatMul to MatMulNBits.
    fused = isinstance(linear.int4, StoredInt4) and linear.node.op_type == "MatMul"
    return fused or rounds_inputs(linear.node) or stored_inputs(linear.node) is not None


@contextmanager
def computed_in_float(linears: Sequence[Linear], new_name: NewName) -> Iterator[None]:
    """Within this context, these layers multiply floats by dequantized weights. The model is restored at the end."""
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
    """Insert DequantizeLinear, MatMul and Add instead of an int8 product. Only one layer's floats exist at a time."""
    node, stored, inputs = linear.node, linear.tensors, stored_inputs(linear.node)
    # The previous layer may have a new node since `linear` was made.
    graph, x, codes = node.graph, layer_input(node), linear.weight_value
    assert stored is not None and inputs is not None and graph is not None and x is not None
    added: list[ir.Value] = []

    def constant(tensor: ir.TensorProtocol, part: str) -> ir.Value:
        value = ir.Value(name=new_name(f"{linear.name}/{part}"), const_value=tensor)
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        graph.register_initializer(value)
        added.append(value)
        return value

    zeros = stored.zero_points.astype(stored.codes.dtype.numpy())
    scales = constant(ir.Tensor(np.ascontiguousarray(stored.scales)), "scales")
    zero_points = constant(ir.Tensor(zeros), "zero_points")
    if codes.graph is not graph:  # ONNX Runtime fuses DequantizeLinear and MatMul, if all is in one graph
        codes = constant(lazy(stored.codes.numpy, stored.codes.dtype, ir.Shape(stored.codes.shape.numpy())), "codes")
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
