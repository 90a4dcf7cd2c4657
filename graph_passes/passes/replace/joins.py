"""Layers that become one node together: gate and up projection (a gated pair), both layers of an MLP, QKV layers.

A single layer whose two halves are a gated pair is included.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ...find.epilogue import Epilogues
from ...find.linear import Linear
from ...operators.hidden import Mlp, find_mlps
from ...operators.joined import Halves, PackedQkv, can_join, find_gated, find_halves, find_packed_qkv
from ..context import PassContext
from ..plan.replace import ReplaceRule
from .notes import note_apart
from .weights import AcceptedWeights


class Joins:
    """Groups of a model's layers that one pass `replace` can join."""

    def __init__(self, model: ir.Model, linears: Sequence[Linear], context: PassContext, rule: ReplaceRule) -> None:
        self.mlps: dict[Linear, Mlp] = {}  # by their first layer
        self.packed_qkv: dict[Linear, PackedQkv] = {}  # by each of the three layers
        self.epilogues = Epilogues()
        self._fuses = rule.fuses
        self._ups = find_gated(linears, self.epilogues) if rule.fuses else {}  # by the gate
        self._gates = {up: gate for gate, up in self._ups.items()}
        if rule.fuses and context.plan.records_ranges and rule.replacement.takes_ranges:
            free = [linear for linear in linears if linear not in self._ups and linear not in self._gates]
            self.mlps, refused = find_mlps(free, model.graph)
            note_apart(context, refused)
        in_mlps = {linear for mlp in self.mlps.values() for linear in (mlp.hidden, mlp.layer)}
        self.weights = AcceptedWeights(context, rule, in_mlps)
        if rule.fuses:
            self.packed_qkv = {layer: qkv for qkv in self._pack_qkv(model, linears, context) for layer in qkv.layers}

    def gated_with(self, linear: Linear) -> tuple[Linear, Linear] | None:
        """Return the gate and the up projection of a gated pair, given one of them."""
        if linear in self._ups:
            return linear, self._ups[linear]
        return (self._gates[linear], linear) if linear in self._gates else None

    def halves_of(self, linear: Linear) -> Halves | None:
        """Return the halves of a layer that is a gated pair, or None."""
        return find_halves(linear, self.epilogues) if self._fuses else None

    def can_join(self, linears: Sequence[Linear]) -> bool:
        """Return True if one operator can hold the weights of these layers."""
        return can_join([self.weights.quantization(linear) for linear in linears])

    def _pack_qkv(self, model: ir.Model, linears: Sequence[Linear], context: PassContext) -> list[PackedQkv]:
        """Return query, key and value of all attentions, if this pass replaces all of these layers."""
        found = find_packed_qkv([linear for linear in linears if not context.layer(linear).new_op], model)
        for qkv in found:
            if None in map(self.weights.of, qkv.layers) or not self.can_join(qkv.layers):
                return []
            context.release()
        return found
