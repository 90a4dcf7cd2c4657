"""Insert an operator's node where layers were, and remove what it replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from ...find.constants import remove_unused
from ...find.convolutions import windows_of
from ...find.linear import Linear
from ...find.lut import graph_order
from ...find.stored_int8 import dynamic_source, layer_input, remove_unused_dynamic
from ...names import ORTOLAN_DOMAIN
from ...operators.joined import take_packed
from ...operators.replacement import Replacement
from .packing import Target


def put_node(
    replacement: Replacement,
    target: Target,
    constants: Mapping[str, ir.Value],
    bias: ir.Value | None,
    new_name: Callable[[str], str],
) -> None:
    """Insert the operator in the layer's position, under its node's name; the output keeps its name.

    With an epilogue the position is the end of that epilogue, after the node that computes the residual.
    """
    linear, first, epilogue = target.linears[0], target.replaced[0], target.epilogue
    graph, given = linear.node.graph, first.node.inputs[0]
    assert graph is not None and given is not None
    weights = [value for layer in target.replaced for value in (*layer.weight_values, layer.bias_value)]
    node, around = _make_node(replacement, target, constants, bias)
    nodes = [*around[0], node, *around[1]]
    for made in nodes[:-1]:
        made.outputs[0].name = new_name(f"{made.name}_output")
    own = [old for layer in target.replaced for old in (layer.node, layer.add) if old is not None]
    between = () if target.hidden is None else target.hidden.mlp.between.nodes
    fused = (*between, *epilogue.nodes)
    read = [value for old in fused for value in old.inputs if value is not epilogue.residual]
    last = epilogue.nodes[-1] if epilogue.nodes else own[-1]
    old_values, new_values = [epilogue.output], [nodes[-1].outputs[0]]
    if target.attention is not None:  # the packed output has a new shape, so it gets a new name
        node.outputs[0].name = new_name(f"{linear.name}/packed_output")
        take_packed(target.attention, node.outputs[0])
        last = max(own, key=graph_order(graph).__getitem__)
        old_values, new_values = [], []
    ir.convenience.replace_nodes_and_values(graph, last, [*own, *fused], nodes, old_values, new_values)
    for value in (*weights, *read, *([given] if windows_of(given) else ())):
        if value is not None:
            remove_unused(value)
    _remove_rounding(first, given)


def _make_node(
    replacement: Replacement, target: Target, constants: Mapping[str, ir.Value], bias: ir.Value | None
) -> tuple[ir.Node, tuple[list[ir.Node], list[ir.Node]]]:
    """Return the operator's node, and the nodes that must run before and after it."""
    linear, first, epilogue = target.linears[0], target.replaced[0], target.epilogue
    before, behind = list[ir.Node](), list[ir.Node]()
    # The node that computes the layer's input may have been replaced.
    x = layer_input(first.node)
    assert x is not None
    rounding = first.rounding if replacement.takes_ranges else None
    if rounding is not None and rounding.graph is not None and x is first.x:
        x = rounding.inputs[0]
        assert x is not None
    windows = windows_of(x) if replacement.takes_windows and target.hidden is None else None
    if windows is not None:
        x = windows[1]
    narrow = linear.dtype != ir.DataType.FLOAT
    if narrow:  # the operator computes on float32
        before.append(ir.node("Cast", [x], {"to": ir.DataType.FLOAT}, name=f"{linear.name}/to_float"))
        x = before[-1].outputs[0]
    epsilon = -1.0 if epilogue.norm is None else epilogue.norm.epsilon
    inside = bias if replacement.has_epilogue else None
    node = ir.Node(
        ORTOLAN_DOMAIN,
        replacement.op_type,
        replacement.inputs(x, constants, inside, epilogue.residual),
        replacement.node_attributes(target.weight, epilogue.activation, target.gated_columns, epsilon),
        name=linear.name,
    )
    for name, value in windows[0].attributes().items() if windows is not None else ():
        node.attributes.add(ir.AttrInt64(name, value))
    if target.hidden is not None:
        node.attributes["hidden_k"] = ir.AttrInt64("hidden_k", target.hidden.mlp.hidden.k)
    y = node.outputs[0]
    if bias is not None and inside is None:
        behind.append(ir.node("Add", [y, bias], name=f"{linear.name}/bias"))
        y = behind[-1].outputs[0]
    if narrow:
        behind.append(ir.node("Cast", [y], {"to": linear.dtype}, name=f"{linear.name}/from_float"))
    return node, (before, behind)


def _remove_rounding(first: Linear, given: ir.Value) -> None:
    if (rounding := dynamic_source(given)) is not None:
        remove_unused_dynamic(rounding)
    elif first.x_range is not None:
        remove_unused(given)
