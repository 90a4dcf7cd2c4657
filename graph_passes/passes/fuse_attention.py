"""Puts NoMADAttention in the place of scaled dot-product attention: attention.py finds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortolan.progress import Stage

from ..find.attention import Attention, NotAttention, find_attentions
from ..measure.feeds import has_past
from ..names import ORTOLAN_DOMAIN
from ..operators.nodes import fill_missing, nodes_of, put_function
from ..operators.nomad_attention_function import INPUTS, OP_TYPE, nomad_attention_function, uses_of
from ..options import takes
from .attention_rewrite import AttentionOptions, AttentionRewrite, Refused

_PRECISION = {"f32": 32, "bf16": 16}
# ||Y - exact|| / ||Y|| that an ordinary attention may have, for `verify`: what was measured is in docs/verification.md.
_ROUNDING = {"f32": 5e-6, "bf16": 5e-3}


@dataclass(frozen=True)
class FuseAttentionOptions(AttentionOptions):
    # bf16: products may be computed from bfloat16 where the CPU is faster at that.
    precision: str = field(default="f32", metadata=takes("str", choices=tuple(_PRECISION)))


class FuseAttentionPass(AttentionRewrite[Attention]):
    """Replaces attention without a cache."""

    pass_name = "fuse_attention"
    stage = Stage.FUSE_ATTENTION
    refusal = "attention not fused"
    options_type = FuseAttentionOptions
    options: FuseAttentionOptions

    def find(self, model: ir.Model) -> Sequence[Attention | NotAttention]:
        if self.context.plan.replaces and has_past(model):
            return []  # attention with a cache, which pass compress_cache is for
        return find_attentions(model.graph)

    def announce(self, chosen: Sequence[Attention], refused: Refused) -> None:
        if chosen:
            self.context.note(f"{len(chosen)} attention(s) {self.verb} {OP_TYPE}, products of {self.options.precision}")
        elif not refused and not self.context.plan.replaces:
            self.context.note("no attention was found: nothing to fuse")
        self.note_refused(refused)

    def make_node(self, model: ir.Model, match: Attention, mask: ir.Value | None) -> ir.Node:
        return ir.node(
            OP_TYPE,
            [match.query, mask, match.key, match.value],
            self.attributes(match, _PRECISION[self.options.precision]),
            domain=ORTOLAN_DOMAIN,
            name=match.node.name,
        )

    def placed(self, model: ir.Model, match: Attention, node: ir.Node) -> None:
        self.context.layers.rounding[node.outputs[0]] = _ROUNDING[self.options.precision]

    def finish(self, model: ir.Model, nodes: Sequence[ir.Node]) -> None:
        context = self.context
        nodes = nodes_of(model, OP_TYPE)
        neutral = {"mask": np.zeros(1, np.float32)}
        fill_missing(nodes, INPUTS, (), lambda _: neutral, lambda name: context.new_name(model, name))
        if context.portable:
            put_function(model, nomad_attention_function(model.opset_imports[""], uses_of(nodes)))
