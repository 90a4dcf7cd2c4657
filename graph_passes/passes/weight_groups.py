"""Select the layers whose weights a pass changes, and give them the changed weight. Shared by prune and quantize."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortolan.errors import RecipeError

from ..find.constants import remove_unused
from ..find.linear import Linear
from ..find.node_checks import node_input
from ..find.stored_int4 import BIAS_INPUT, is_matmul_nbits
from ..find.stored_int8 import dynamic_source, layer_input, remove_unused_dynamic, stored_inputs
from ..operators.replacement import Stored
from ..options import WORDS, Globs
from ..report.optimization import LayerStatus
from ..weights.pruners.masks import Pattern
from .context import PassContext


@dataclass
class WeightGroup:
    """Layers that share one weight, which is changed once."""

    linears: list[Linear]

    @property
    def weight(self) -> ir.TensorProtocol:
        """Return the weight."""
        return self.linears[0].weight

    @property
    def weight_name(self) -> str:
        """Return the weight's name."""
        return self.linears[0].weight_names[-1]

    def put(self, model: ir.Model, context: PassContext, tensor: ir.TensorProtocol, status: LayerStatus) -> ir.Value:
        """Give the layers another weight, and return its value. Other consumers keep the old weight."""
        value = self.linears[0].weight_value
        nodes = {linear.node for linear in self.linears}
        own = all(use.node in nodes and use.idx == 1 for use in value.uses()) and not value.is_graph_output()
        if value.is_initializer() and own and not _is_fused(self.linears[0].node):
            target = value
        else:
            target = ir.Value(name=context.new_name(model, f"{value.name}_{status}"))
            target.type, target.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        tensor.name = target.name
        target.const_value = tensor
        if target is not value:
            model.graph.register_initializer(target)
        for linear in self.linears:
            if target is not value:
                old_values = linear.weight_values
                if _is_fused(linear.node):
                    _turn_into_matmul(linear.node, lambda wanted: context.new_name(model, wanted))
                linear.node.replace_input_with(1, target)
                for old in old_values:
                    remove_unused(old)
            layer = context.layer(linear)
            layer.status, layer.bytes_after = status, tensor.nbytes
        return target


@dataclass
class PruneGroup(WeightGroup):
    """Layers that are pruned together."""

    sparsity: float | None  # None: part of the global threshold
    pattern: Pattern
    keeps_stored: bool = False  # stored int8 weights are kept exactly, except pruned ones


def _is_fused(node: ir.Node) -> bool:
    return is_matmul_nbits(node) or stored_inputs(node) is not None


def _turn_into_matmul(node: ir.Node, new_name: Callable[[str], str]) -> None:
    """Change an operator with a quantized weight into MatMul (and Add for a bias). The caller replaces input 1.

    Passes identify a layer by its node's output, so the MatMul keeps that value; the Add gets its name and consumers.
    """
    int8 = stored_inputs(node)
    bias = node_input(node, BIAS_INPUT if int8 is None else int8.bias)
    x, rounded = layer_input(node), dynamic_source(node.inputs[0])
    node.resize_inputs(2)
    node.replace_input_with(0, x)
    if rounded is not None:
        remove_unused_dynamic(rounded)
    node.domain, node.op_type = "", "MatMul"
    node.attributes.clear()
    if bias is None:
        return
    product, graph = node.outputs[0], node.graph
    assert graph is not None
    add = ir.node("Add", [bias, bias], name=new_name(f"{node.name}/bias"))
    total = add.outputs[0]
    total.name, total.type, total.shape = product.name, product.type, product.shape
    graph.insert_after(node, add)
    ir.convenience.replace_all_uses_with(product, total, replace_graph_outputs=True)
    add.replace_input_with(0, product)
    product.name = new_name(f"{total.name}_product")


def group_layers(
    context: PassContext, linears: Sequence[Linear], select: Globs, exclude: Globs, pass_name: str, doing: str
) -> list[WeightGroup]:
    """Return the layers that the patterns select and that a pass `replace` would replace, grouped by weight.

    Raises:
        RecipeError: a pattern of `select` matches no layer.
    """
    check_patterns(linears, "select", select, pass_name)
    groups: dict[Hashable, WeightGroup] = {}
    for linear in linears:
        if not linear.matches(select):
            continue
        if linear.matches(exclude):
            context.layer(linear).reason = f"excluded from {doing}"
        elif context.gains(linear, Stored(0, "")):
            groups.setdefault(linear.weight_key, WeightGroup([])).linears.append(linear)
        elif reason := context.why_not_quantized(linear):
            context.leave(linear, reason)
    return list(groups.values())


def check_patterns(linears: Sequence[Linear], option_name: str, globs: Globs, pass_name: str) -> None:
    """Raise RecipeError for a pattern that matches no layer, unless it is a word such as "heads"."""
    for glob in globs:
        if linears and glob not in WORDS and not any(linear.matches((glob,)) for linear in linears):
            raise RecipeError(
                f"pass {pass_name!r}: pattern {glob!r} of {option_name} matches no linear layer; layers have names "
                f"like {linears[0].name!r}, weights like {linears[0].weight_names[-1]!r}"
            )


def fit_key(group: WeightGroup, options: Hashable) -> Hashable:
    """Return the key of a stored fit: the weight, the selected layers that share it, and the options."""
    return (group.weight_name, *(linear.name for linear in group.linears), options)


def note_inputs(context: PassContext, without: Sequence[str], poor: Sequence[str], instead: str) -> None:
    """Note layers whose inputs cannot be recorded, with what was done `instead`, and layers with too few inputs."""
    if without:
        context.note(
            f"{count_layers(without)} {instead} instead: the inputs are inside a subgraph, or missing from the feeds, "
            "so they cannot be recorded"
        )
    if poor:
        context.note(
            f"{count_layers(poor)} calibrated on fewer tokens than the layer has inputs, so the weights may not fit "
            "other text; give calibration=… with several times more tokens than the inputs of the widest layer"
        )


def count_layers(names: Sequence[str]) -> str:
    """Return the layers and a verb: "3 layers, such as 'a', are" or "layer 'a' is"."""
    return f"{len(names)} layers, such as {names[0]!r}, are" if len(names) > 1 else f"layer {names[0]!r} is"
