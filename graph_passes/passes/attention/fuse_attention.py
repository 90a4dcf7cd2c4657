"""Replace scaled dot-product attention with NoMADAttention. find/attention.py finds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortolan.progress import Stage

from ...find.attention import LAYOUTS, Attention, NotAttention, find_attentions
from ...find.cached_attention import CachedAttention, find_cached_attentions
from ...find.dimensions import Dimensions
from ...measure.feeds import has_past
from ...names import ORTOLAN_DOMAIN
from ...operators.nodes import fill_missing, nodes_of, put_function
from ...operators.nomad_attention_function import INPUTS, OP_TYPE, nomad_attention_function, uses_of
from ...report.lines import count
from .rewrite import ROUNDING, AttentionOptions, AttentionRewrite, Refused


class FuseAttentionPass(AttentionRewrite[Attention]):
    """Replace attention without a cache."""

    pass_name = "fuse_attention"
    stage = Stage.FUSE_ATTENTION
    refusal = "attention not fused"
    options_type = AttentionOptions

    def find(self, model: ir.Model) -> Sequence[Attention | NotAttention]:
        """Return the attention without a cache. Passes compress_cache and fuse_cached_attention replace the rest."""
        graphs = [Dimensions(graph) for graph in model.graphs()]
        found = [match for graph in graphs for match in find_attentions(graph)]
        if not has_past(model):
            return found
        matches = [match for graph in graphs for match in find_cached_attentions(graph)]
        cached = {match.node: None for match in matches if isinstance(match, CachedAttention)}  # in order
        found = [match for match in found if match.node not in cached]
        if self.context.plan.fuses_cached:  # the cache passes report the attention that they do not replace
            refused = {match.node for match in matches if isinstance(match, NotAttention) and match.cached}
            return [match for match in found if isinstance(match, Attention) or match.node not in refused]
        if self.context.plan.replaces:
            return found
        return [
            *found,
            *(
                NotAttention(node, "it has a cache; pass fuse_cached_attention or compress_cache can replace it")
                for node in cached
            ),
        ]

    def announce(self, chosen: Sequence[Attention], refused: Refused) -> None:
        """Note the number of replaced attentions, and the refused ones."""
        if chosen:
            self.context.note(
                f"{count(len(chosen), 'attention')} {self.verb} one NoMADAttention each, in {self.options.precision}"
            )
        elif not refused and not self.context.plan.replaces and not self.context.plan.fuses_cached:
            self.context.note("no attention was found")
        self.note_refused(refused)

    def make_node(self, model: ir.Model, match: Attention, mask: ir.Value | None, made: list[ir.Node]) -> ir.Node:
        """Return the NoMADAttention node."""
        operands = {"query": match.query, "key": match.key, "value": match.value}
        for name, value in operands.items():
            layout = match.layouts.get(name, "by_rows")
            if layout == "apart":
                width = match.head_dim * (match.heads if name == "query" else match.kv_heads)
                operands[name] = self.reshaped(model, value, (0, 0, width), f"{match.node.name}/{name}", made)
            elif layout == "by_heads":  # the operator's ONNX function reads the rank
                value.shape, value.dtype = value.shape or ir.Shape([None] * 4), ir.DataType.FLOAT
            elif layout != "by_rows":
                operands[name] = self.transposed(model, value, LAYOUTS[layout], f"{match.node.name}/{name}", made)
        return ir.node(
            OP_TYPE,
            [operands["query"], mask, operands["key"], operands["value"]],
            self.attributes(match),
            domain=ORTOLAN_DOMAIN,
            name=match.node.name,
        )

    def placed(self, model: ir.Model, match: Attention, node: ir.Node) -> None:
        """Record the rounding error to expect, for pass verify."""
        self.context.layers.rounding[node.outputs[0]] = ROUNDING[self.options.precision]

    def finish(self, model: ir.Model, nodes: Sequence[ir.Node]) -> None:
        """Fill in missing inputs, and add the operator's ONNX function to a portable model."""
        context = self.context
        nodes = nodes_of(model, OP_TYPE)
        neutral = {"mask": np.zeros(1, np.float32)}
        fill_missing(nodes, INPUTS, (), lambda _: neutral, lambda name: context.new_name(model, name))
        if context.portable:
            put_function(model, nomad_attention_function(model.opset_imports[""], uses_of(nodes)))
