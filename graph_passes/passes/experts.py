"""Replace mixtures of experts (QMoE and MoE) with Ortolan's operator MoE.

Stored integers are kept exactly. Float experts are rounded if the pass has `expert_bits`. Standard operators route:
TopK, and Softmax over the selected logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError
from ortolan.progress import Stage

from ..find.dimensions import Dimensions
from ..find.experts import MOE, QMOE, Experts, ExpertsLayer, expert_nodes, read_experts, stored_bits
from ..find.fused_writer import Writer, required
from ..find.linear import node_name
from ..find.node_checks import UnfitError, node_input
from ..find.quantized_weight import QuantizedWeight
from ..operators.joined import join_columns
from ..operators.moe import finish_moe, moe_attributes, pack_bias, pack_experts
from ..operators.moe_function import INPUTS, OP_TYPE
from ..operators.nodes import declare_operators, in_order, new_initializer, put_function
from ..operators.replacement import stored_tensor
from ..options import any_matches
from ..report.lines import count
from ..weights.quantizers.grid import (
    Quantization,
    QuantizedMatrix,
    round_to_nearest,
)
from ..weights.quantizers.mse import round_mse
from .context import RecipePass
from .normalize import require_normalized
from .plan.experts import ExpertsOptions
from .verify.reference import keep_reference

# Typical error of rounding the inputs of both layers, relative to the output.
_ROUNDING = 0.01
# Typical error of rounding the weights to b bits, relative to the output, in units of 2^-b.
_WEIGHT_ROUNDING = 1.5
_FLOAT_WEIGHTS = (2, 4)  # inputs of MoE


class ExpertsPass(RecipePass):
    """Replace QMoE and MoE nodes."""

    options_type = ExpertsOptions
    options: ExpertsOptions

    def requires(self, model: ir.Model) -> None:
        """Require a normalized model."""
        require_normalized(model, "experts")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the selected nodes."""
        context = self.context
        context.survey(model)
        nodes = list(expert_nodes(model))
        replaced = rounded = 0
        if nodes and not context.dry_run:
            keep_reference(model, context)
        for number, node in enumerate(nodes):
            context.progress(Stage.EXPERTS, number, len(nodes))
            report = context.layers.reports[node.outputs[0]]
            if report.new_op is not None:
                continue
            try:
                rounded += self._replace(model, node)
            except UnfitError as reason:
                report.reason = str(reason)
                continue
            replaced += 1
            context.release()
        if replaced and not context.dry_run:
            function = finish_moe(model, lambda wanted: context.new_name(model, wanted))
            declare_operators(model)
            if context.portable:
                put_function(model, function)
            context.note(f"{count(replaced, 'mixture')} of experts replaced")
            if rounded and (methods := context.plan.calibrated_methods):
                context.note(f"experts of mixtures are rounded without calibration, not by {' or '.join(methods)}")
        return ir.passes.PassResult(model, modified=bool(replaced) and not context.dry_run)

    def _replace(self, model: ir.Model, node: ir.Node) -> bool:
        """Replace a node, or raise UnfitError with the reason. Return whether weights were rounded."""
        context, options = self.context, self.options
        name = node_name(node)
        if not any_matches([name], options.select):
            raise UnfitError("not selected")
        if any_matches([name], options.exclude):
            raise UnfitError("excluded from replacement")
        dtype = Dimensions(_graph(node)).dtype(required(node, 0))
        if dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            raise UnfitError(f"its input is {'of unknown type' if dtype is None else dtype.name}")
        found = read_experts(node)
        experts = self._with_given(found)
        bits = self._bits(node)
        if bits is None:
            raise UnfitError("its experts are floats; weights='int8' and weights='int4' round them")
        report = context.layers.reports[node.outputs[0]]
        report.reason, report.new_op = None, OP_TYPE
        report.status = "would replace" if context.dry_run else "replaced"
        report.weight_bits = bits
        report.bytes_before = experts.up.nbytes + experts.down.nbytes
        # The model before this pass has float experts, so the check against it sees the rounding of their weights.
        exact = node.op_type == QMOE or experts is not found
        if context.dry_run:
            return not exact
        given, formats = dict[str, ir.Value](), dict[str, Quantization]()
        for prefix, layer in (("up_", experts.up), ("down_", experts.down)):
            tensors, formats[prefix] = self._packed(model, node, prefix, layer)
            given |= tensors
        report.bytes_after = sum(value.const_value.nbytes for value in given.values() if value.const_value is not None)
        output = node.outputs[0]
        writer = Writer(node, {}, lambda wanted: context.new_name(model, wanted))
        writer.put(lambda to: [_write(to, experts, given, formats, dtype)])
        of_weights = 0.0 if exact else _WEIGHT_ROUNDING * 2.0**-bits
        context.layers.rounding[output] = math.hypot(_ROUNDING, of_weights)
        return not exact

    def _bits(self, node: ir.Node) -> int | None:
        """Return the bits of the experts' weights; None: they stay floats."""
        if node.op_type == QMOE:
            return min(stored_bits(node))
        given = self.context.given_experts.get(required(node, _FLOAT_WEIGHTS[0]).name or "")
        return self.options.expert_bits if given is None else given.weights[0].bits

    def _with_given(self, experts: Experts) -> Experts:
        """Return experts with the weights that were given with the model, if any."""
        if experts.node.op_type == QMOE:
            return experts
        given = self.context.given_experts
        up, down = (given.get(required(experts.node, index).name or "") for index in _FLOAT_WEIGHTS)
        if up is None or down is None:
            return experts
        return replace(experts, up=up.of(experts.up), down=down.of(experts.down))

    def _packed(
        self, model: ir.Model, node: ir.Node, prefix: str, layer: ExpertsLayer
    ) -> tuple[dict[str, ir.Value], Quantization]:
        """Return the packed tensors of a layer by input name, and their format."""
        context, graph = self.context, _graph(node)
        weights = [self._integers(node, layer, read) for read in layer.weights[:1]]
        form = weights[0]

        def every() -> Iterator[QuantizedWeight]:
            yield form
            for read in layer.weights[1:]:
                yield self._integers(node, layer, read)

        packed = pack_experts(every())
        halves = 1 if layer.halves is None else 2
        made = {}
        for part, tensor in packed.items():
            name = context.new_name(model, f"{node_name(node)}.{prefix}{part}")
            made[f"{prefix}{part}"] = new_initializer(graph, stored_tensor(context.spill, name, tensor))
        if layer.bias is not None:
            bias = layer.bias
            if layer.halves is not None:
                bias = np.concatenate([bias[:, where] for where in layer.halves], axis=1)
            name = context.new_name(model, f"{node_name(node)}.{prefix}bias")
            made[f"{prefix}bias"] = new_initializer(graph, ir.Tensor(pack_bias(bias, halves), name=name))
        return made, form

    def _integers(
        self, node: ir.Node, layer: ExpertsLayer, read: Callable[[], QuantizedWeight | np.ndarray]
    ) -> QuantizedWeight:
        """Return an expert's weight as integers, gate and factor in the operator's order."""
        weight = read()
        if isinstance(weight, np.ndarray):
            if not np.isfinite(weight).all():
                raise ModelError(f"experts of {node_name(node)!r} hold NaN or infinity; export the model again")
            quantization = self.options.quantization
            assert quantization is not None
            rounded = (round_to_nearest if quantization.bits == 8 else round_mse)(weight, quantization)
            weight = _weight_of(rounded, quantization)
        return weight if layer.halves is None else _in_halves(weight, layer.halves)


def _weight_of(rounded: QuantizedMatrix, quantization: Quantization) -> QuantizedWeight:
    return QuantizedWeight(
        quantization.bits,
        quantization.group_size,
        ir.tensor(rounded.q),
        ir.tensor(rounded.scales),
        None if rounded.zero_points is None else ir.tensor(rounded.zero_points.astype(np.uint8)),
        None,
        None if rounded.subgroup_scales is None else ir.tensor(rounded.subgroup_scales),
        subgroup_size=quantization.subgroup_size,
    )


def _in_halves(weight: QuantizedWeight, halves: tuple[slice, slice]) -> QuantizedWeight:
    """Return the columns of gate and factor, each padded to whole panels (linear_plan.h)."""

    def joined(tensor: ir.TensorProtocol | None) -> ir.TensorProtocol | None:
        if tensor is None:
            return None
        array = tensor.numpy()
        return ir.tensor(join_columns([array[:, where] for where in halves]))

    found = weight.with_tensors({name: joined(tensor) for name, tensor in weight.tensors().items()})
    weight.release()
    return found


def _write(
    to: Writer, experts: Experts, given: dict[str, ir.Value], formats: dict[str, Quantization], dtype: ir.DataType
) -> ir.Value:
    """Add the router and the operator; return the node's output."""
    node = experts.node

    def as_float(value: ir.Value, name: str) -> ir.Value:
        if dtype == ir.DataType.FLOAT:
            return value
        return to.op("Cast", value, name=f"{name}_to_float", dtype=ir.DataType.FLOAT, to=ir.DataType.FLOAT)

    logits = as_float(required(node, 1), "router")
    if node.op_type == MOE and not experts.normalizes:
        logits = to.op("Softmax", logits, dtype=ir.DataType.FLOAT, axis=-1)
    top, selected = to.top_k(logits, experts.selected)
    router_weights = node_input(node, 14)
    if router_weights is not None:
        weights = to.op("GatherElements", as_float(router_weights, "router_weights"), selected, axis=-1)
        if experts.normalizes:
            total = to.op("ReduceSum", weights, to.ints(-1), keepdims=1)
            weights = to.op("Div", weights, to.op("Where", to.op("Equal", total, to.number(0)), to.number(1), total))
    elif node.op_type == MOE and not experts.normalizes:
        weights = top
    else:
        weights = to.op("Softmax", top, dtype=ir.DataType.FLOAT, axis=-1)
    inputs = {"X": as_float(required(node, 0), "x"), "experts": selected, "routing_weights": weights, **given}
    y = to.operator(OP_TYPE, in_order(INPUTS, inputs), moe_attributes(experts.form, formats))
    return y if dtype == ir.DataType.FLOAT else to.op("Cast", y, name="from_float", dtype=dtype, to=dtype)


def _graph(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph)
    return node.graph
