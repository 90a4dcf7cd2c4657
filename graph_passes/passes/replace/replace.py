"""Replace linear layers with Ortolan operators.

plan/replace.py and weights.py choose layers and weights, joins.py finds layers that become one node, packing.py packs
weights, and nodes.py inserts nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from ortolan.errors import NothingToReplaceError
from ortolan.progress import Stage

from ...find.convolutions import fold_convolutions
from ...find.epilogue import Activation, Epilogue, describe_epilogue
from ...find.linear import Linear
from ...find.quantized_forms import fold_back
from ...find.stored_int4 import StoredInt4, rounds_inputs
from ...find.stored_int8 import StoredInt8
from ...operators.hidden import HiddenLayer, Mlp, make_byte_table
from ...operators.joined import Halves, join_weights
from ...operators.nodes import UNPACK_ONCE_LIMIT, declare_operators, nodes_of, put_function
from ...operators.nomad_attention_function import OP_TYPE as NOMAD_ATTENTION
from ...operators.nomad_attention_function import nomad_attention_function, uses_of
from ...operators.replacement import LayerWeight
from ...options import PassOptions
from ..context import PassContext, RecipePass
from ..embeddings import read_from_heads
from ..normalize import require_normalized
from ..plan.replace import ReplaceOptions, ReplaceRule
from ..verify.reference import keep_reference
from .joins import Joins
from .nodes import put_node
from .notes import note_adopted, note_apart, note_copies, note_slow_bitmaps, note_stored_twice, why_nothing
from .packing import Packer, Target
from .shared_lookups import find_shared_tables, read_shared_tables

_STORED = (StoredInt4, StoredInt8)


class ReplacePass(RecipePass):
    """Pack the weights of linear layers, and replace MatMul, Add or Gemm with the operator."""

    options_type = ReplaceOptions
    options: ReplaceOptions

    def __init__(self, options: PassOptions, context: PassContext) -> None:
        super().__init__(options, context)
        self._rule = ReplaceRule(self.options)

    def requires(self, model: ir.Model) -> None:
        """Require a normalized model."""
        require_normalized(model, "replace")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the selected layers.

        Raises:
            NothingToReplaceError: this is the last pass `replace`, and none replaced a layer.
        """
        context = self.context
        self._model = model
        linears = context.survey(model)
        self._joins = Joins(model, linears, context, self._rule)
        self._weights = self._joins.weights
        self._packer = Packer(model, context, self._rule.replacement)
        context.progress(Stage.REPLACE, 0, len(linears))
        if not context.dry_run:
            keep_reference(model, context)
        # Collected before the nodes are replaced.
        values = {linear: linear.weight_values for linear in linears}
        stored = [linear for linear in linears if isinstance(self._weights.quantization(linear), _STORED)]
        rounding = {linear for linear in stored if rounds_inputs(linear.node)}
        shared = [] if context.dry_run else find_shared_tables(model, stored)
        for number, linear in enumerate(linears):
            context.progress(Stage.REPLACE, number, len(linears))
            self._replace(linear)
            context.release()
        context.progress(Stage.REPLACE, len(linears), len(linears))
        note_adopted(context, [linear for linear in stored if context.layer(linear).new_op], rounding)
        read_shared_tables(model, context, self.options.op, shared)
        if not context.dry_run:
            replaced = [linear for linear in linears if context.layer(linear).status == "replaced"]
            note_stored_twice(context, [value for linear in replaced for value in values[linear]])
        if context.plan.is_last(self.options):
            if not context.report.replaced:
                raise NothingToReplaceError(why_nothing(context))
            if not context.dry_run:
                fold_back(model, context.layers.unified)
                fold_convolutions(model, context.layers.unfolded, lambda wanted: context.new_name(model, wanted))
        note_copies(context, self._packer.copies)
        note_slow_bitmaps(context)
        if not context.dry_run and nodes_of(model, self.options.op):
            self._finish(model)
        return ir.passes.PassResult(model, modified=not context.dry_run)

    def _finish(self, model: ir.Model) -> None:
        """Fill in the inputs of all nodes, and add the operator's ONNX function to a portable model."""
        context, replacement, opset = self.context, self._rule.replacement, model.opset_imports[""]
        read_from_heads(model, context)
        replacement.fill_inputs(model, lambda wanted: context.new_name(model, wanted))
        declare_operators(model)
        if not context.portable:
            return
        if self._joins.packed_qkv:
            put_function(model, nomad_attention_function(opset, uses_of(nodes_of(model, NOMAD_ATTENTION))))
        unpack_once = context.layers.packed_weights <= UNPACK_ONCE_LIMIT
        put_function(model, replacement.function(model, opset, unpack_once))
        if not unpack_once:
            context.note("without the library, this model unpacks its weights in each run, which takes seconds")

    def _replace(self, linear: Linear) -> None:
        """Replace one layer, possibly together with others, or report why not."""
        if self._is_done(linear):
            return
        weight = self._weights.of(linear)
        if weight is None:
            return
        mlp, qkv = self._joins.mlps.get(linear), self._joins.packed_qkv.get(linear)
        if mlp is not None and self._replace_mlp(mlp, weight):
            return
        if qkv is not None:
            return self._replace_joined(qkv.layers, "packed", qkv.attention)
        pair = self._joins.gated_with(linear)
        if pair is not None:
            other = pair[1] if pair[0] is linear else pair[0]
            takes_it = not self._is_done(other) and self._weights.of(other) is not None
            if takes_it and self._joins.can_join(pair):
                return self._replace_joined(pair, "gated")
        halves = self._joins.halves_of(linear)
        if halves is not None and not halves.in_place and not self.context.dry_run:
            name = f"{linear.weight_value.name}.gated"
            weight = join_weights([weight, weight], self.context.spill, name, halves.columns)
        self._put([linear], weight, halves=halves)

    def _is_done(self, linear: Linear) -> bool:
        """Return True if the layer is already replaced: by another pass, in a dry run, or with another layer."""
        return bool(self.context.layer(linear).new_op)

    def _replace_joined(self, linears: Sequence[Linear], suffix: str, attention: ir.Node | None = None) -> None:
        """Replace layers of one input with one node: gate and up, or query, key and value of an attention."""
        weights = [weight for linear in linears if (weight := self._weights.of(linear)) is not None]
        assert len(weights) == len(linears)
        joined = weights[0]
        if not self.context.dry_run:
            joined = join_weights(weights, self.context.spill, f"{linears[0].weight_value.name}.{suffix}")
        self._put(linears, joined, attention=attention)

    def _replace_mlp(self, mlp: Mlp, hidden_weight: LayerWeight) -> bool:
        """Replace both layers of an MLP with one node. Return False if that is not possible."""
        context = self.context
        weight = None if self._is_done(mlp.layer) else self._weights.of(mlp.layer)
        if weight is None:
            return False
        if context.dry_run:
            self._mark([mlp.hidden], self._between(mlp))
            self._put([mlp.layer], weight)
            return True
        table = make_byte_table(mlp, context.layers.activations, self._model.opset_imports)
        if isinstance(table, str):
            note_apart(context, {mlp.hidden: table})
            return False
        self._mark([mlp.hidden], self._between(mlp))
        weight = dataclasses.replace(weight, x_range=table.y)
        self._put([mlp.layer], weight, HiddenLayer(mlp, hidden_weight, table))
        return True

    def _put(
        self,
        linears: Sequence[Linear],
        weight: LayerWeight,
        hidden: HiddenLayer | None = None,
        attention: ir.Node | None = None,
        halves: Halves | None = None,
    ) -> None:
        """Insert the operator for a layer, or for layers of one input, with the hidden layer before it.

        attention: the attention that reads the outputs of three layers. halves: gate and up half of a single layer; the
        columns of `weight` are already in the operator's order.
        """
        if attention is not None:
            epilogue = Epilogue(Activation.NONE, None, (), linears[0].output)
            self._mark(linears, ["key", "value"], ["into the query"])
        else:
            epilogue = self._epilogue(*linears) if halves is None else halves.epilogue
            assert len(linears) == 1 or epilogue.factor is not None
            gated, norm = epilogue.factor is not None, epilogue.norm is not None
            fused = describe_epilogue(epilogue.activation, epilogue.residual, gated, norm)
            self._mark(linears, fused, ["into the gate"])
        if self.context.dry_run:
            return
        target = Target(linears, weight, epilogue, hidden, attention, halves)
        constants = self._packer.constants_of(target)
        bias = self._packer.bias(linears, halves)
        put_node(
            self._rule.replacement,
            target,
            constants,
            bias,
            lambda wanted: self.context.new_name(self._model, wanted),
        )

    def _mark(self, linears: Sequence[Linear], fused: list[str], fused_others: list[str] | None = None) -> None:
        """Report that the layers become one node.

        fused: names of the operators fused with the first layer. fused_others: the same for the other layers.
        """
        for linear in linears:
            layer = self.context.layer(linear)
            layer.new_op, layer.status = self.options.op, "would replace" if self.context.dry_run else "replaced"
            quantization = self._weights.quantization(linear)
            if isinstance(quantization, _STORED):
                layer.weight_bits = quantization.bits
            layer.fused = fused if linear is linears[0] else fused_others or []

    def _epilogue(self, linear: Linear, *factors: Linear) -> Epilogue:
        """Return the operators after the layer that the operator also computes, in float32."""
        if not self._rule.fuses:
            return Epilogue(Activation.NONE, None, (), linear.output)
        return self._joins.epilogues.of(linear, *factors)

    def _between(self, mlp: Mlp) -> list[str]:
        """Return the activation's name, or the names of its operators, for the report."""
        found = self._joins.epilogues.of(mlp.hidden)
        named = found.activation != Activation.NONE and found.output is mlp.layer.x and found.residual is None
        return [found.activation.name.lower()] if named else mlp.between.operators
