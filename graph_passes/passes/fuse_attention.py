"""Puts NoMADAttention in the place of scaled dot-product attention: attention.py finds it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortolan.progress import Stage

from ..find.attention import Attention, find_attentions
from ..find.constants import remove_dead
from ..names import MINIMUM_IR_VERSION, ORTOLAN_DOMAIN
from ..operators.nomad_attention_function import INPUTS, OP_TYPE, nomad_attention_function, uses_of
from ..operators.replacement import fill_missing, nodes_of
from ..options import Globs, PassOptions, any_matches, takes
from .attention_mask import MaskSums
from .context import RecipePass
from .normalize import require_normalized
from .verify import keep_reference

_PRECISION = {"f32": 32, "bf16": 16}
# ||Y - exact|| / ||Y|| of an ordinary attention, for `verify`. Measured: 3e-7 to 9e-7, and 3e-3 to 5e-3.
_ROUNDING = {"f32": 5e-6, "bf16": 5e-3}


@dataclass(frozen=True)
class FuseAttentionOptions(PassOptions):
    # bf16: products may be computed from bfloat16 where the CPU is faster at that.
    precision: str = field(default="f32", metadata=takes("str", choices=tuple(_PRECISION)))
    # By the name of the Softmax or of one of the two MatMuls, or of the operator.
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))


class FuseAttentionPass(RecipePass):
    """Replaces attention without a cache, found in the model's main graph, by one node."""

    options_type = FuseAttentionOptions
    options: FuseAttentionOptions

    def requires(self, model: ir.Model) -> None:
        require_normalized(model, "fuse_attention")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        context = self.context
        context.survey(model)
        found = find_attentions(model.graph)
        chosen = []
        refused: dict[str, list[str]] = {}
        for match in found:
            context.names_of_layers += match.names
            if not any_matches(match.names, self.options.select):
                refused.setdefault("not selected", []).append(match.names[0])
            elif any_matches(match.names, self.options.exclude):
                refused.setdefault("excluded", []).append(match.names[0])
            elif isinstance(match, Attention):
                chosen.append(match)
            else:
                refused.setdefault(match.reason, []).append(match.names[0])
        # The first to be fused makes the masks that others share: its place must be before theirs.
        places = {node: place for place, node in enumerate(model.graph)}
        chosen.sort(key=lambda match: places[_last(match)])
        context.progress(Stage.FUSE_ATTENTION, 0, len(chosen))
        if chosen and not context.dry_run:
            keep_reference(model, context)
        self._masks = MaskSums(model, context)
        for number, match in enumerate(chosen):
            self._report(match)
            if not context.dry_run:
                self._fuse(model, match)
            context.progress(Stage.FUSE_ATTENTION, number + 1, len(chosen))
        self._note(len(chosen), refused)
        if chosen and not context.dry_run:
            self._finish(model)
        return ir.passes.PassResult(model, modified=bool(chosen) and not context.dry_run)

    def _report(self, match: Attention) -> None:
        for product in match.products:
            layer = self.context.layers.get(product.outputs[0])
            if layer is not None:
                layer.new_op, layer.reason = OP_TYPE, None
                layer.status = "would replace" if self.context.dry_run else "replaced"

    def _note(self, fused: int, refused: dict[str, list[str]]) -> None:
        verb = "would become" if self.context.dry_run else "became"
        if fused:
            self.context.note(f"{fused} attention(s) {verb} {OP_TYPE}, products of {self.options.precision}")
        elif not refused:
            self.context.note("no attention was found: nothing to fuse")
        for reason, names in refused.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.context.note(f"attention not fused: {reason}: {names[0]!r}{more}")

    def _fuse(self, model: ir.Model, match: Attention) -> None:
        graph, output = match.node.graph, match.output
        assert graph is not None and output is not None
        made: list[ir.Node] = []
        mask = self._masks.sum_of(match.node, match.masks, made)
        node = ir.node(
            OP_TYPE,
            [match.query, mask, match.key, match.value],
            {
                "num_heads": match.heads,
                "kv_num_heads": match.kv_heads,
                "scale": float(match.scale),
                "causal": int(match.causal),
                "zero_hidden_rows": int(match.zero_hidden_rows),
                "precision": _PRECISION[self.options.precision],
            },
            domain=ORTOLAN_DOMAIN,
            name=match.node.name,
        )
        inputs = [value for old in match.nodes for value in old.inputs if value is not None]
        ir.convenience.replace_nodes_and_values(
            graph, _last(match), list(match.nodes), [*made, node], [output], [node.outputs[0]]
        )
        self.context.rounding[node.outputs[0]] = _ROUNDING[self.options.precision]
        for value in inputs:
            remove_dead(value)

    def _finish(self, model: ir.Model) -> None:
        context = self.context
        nodes = nodes_of(model, OP_TYPE)
        neutral = {"mask": np.zeros(1, np.float32)}
        fill_missing(nodes, INPUTS, (), lambda _: neutral, lambda name: context.new_name(model, name))
        model.opset_imports[ORTOLAN_DOMAIN] = 1
        model.ir_version = max(model.ir_version, MINIMUM_IR_VERSION)
        if context.portable:
            function = nomad_attention_function(model.opset_imports[""], uses_of(nodes))
            model.functions[function.identifier()] = function


def _last(match: Attention) -> ir.Node:
    """Of its nodes; the new one takes its place, behind all that it reads."""
    assert match.output is not None
    node = match.output.producer()
    assert node is not None
    return node
