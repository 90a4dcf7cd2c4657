"""How attention becomes NoMADAttention, with or without a cache."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import onnx_ir as ir

from ortolan.progress import Stage

from ...find.attention import Attention, NotAttention
from ...find.cached_attention import CachedAttention
from ...find.constants import remove_dead
from ...names import ORTOLAN_DOMAIN
from ...operators.nodes import declare_operators
from ...operators.nomad_attention_function import OP_TYPE
from ...options import Globs, PassOptions, any_matches, takes
from ..context import RecipePass
from ..normalize import require_normalized
from ..verify.reference import keep_reference
from .mask import MaskSums

Match = TypeVar("Match", Attention, CachedAttention)
Refused = Mapping[str, Sequence[str]]  # names of what is left alone, by the reason


PRECISION = {"f32": 32, "bf16": 16}
# ||Y - exact|| / ||Y|| that an ordinary attention may have, for `verify`: what was measured is in docs/verification.md.
ROUNDING = {"f32": 5e-6, "bf16": 5e-3}


@dataclass(frozen=True)
class AttentionOptions(PassOptions):
    # By the name of the operator, or of the Softmax or of one of the two MatMuls.
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))
    # bf16: products are computed from bfloat16.
    precision: str = field(default="f32", metadata=takes("str", choices=tuple(PRECISION)))


class AttentionRewrite(RecipePass, Generic[Match]):
    """Replaces attentions, those in branches of an If included, by one node each. Its passes say which ones, and what
    the node has besides query, key, value and mask."""

    pass_name: ClassVar[str]
    stage: ClassVar[Stage]
    refusal: ClassVar[str]  # what a note says of attentions that are left alone
    options: AttentionOptions

    def requires(self, model: ir.Model) -> None:
        require_normalized(model, self.pass_name)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        context = self.context
        context.survey(model)
        chosen, refused = self._choose(model)
        self.announce(chosen, refused)
        for match in chosen:
            self._report(match)
        context.progress(self.stage, 0, len(chosen))
        rewrites = bool(chosen) and not context.dry_run
        if rewrites:
            self.prepare(model, chosen)
            keep_reference(model, context)
            masks: dict[ir.Graph, MaskSums] = {}
            nodes = []
            for number, match in enumerate(chosen):
                graph = match.node.graph
                assert isinstance(graph, ir.Graph)
                sums = masks.setdefault(graph, MaskSums(lambda wanted: context.new_name(model, wanted)))
                nodes.append(self._rewrite(model, match, sums))
                context.progress(self.stage, number + 1, len(chosen))
            declare_operators(model)
            self.finish(model, nodes)
        return ir.passes.PassResult(model, modified=rewrites)

    @abc.abstractmethod
    def find(self, model: ir.Model) -> Sequence[Match | NotAttention]:
        """The attentions that the pass is for."""

    def why_not(self, match: Match) -> str | None:
        """Why the operator cannot take the place of this one, if it cannot."""
        return None

    def why_none(self, model: ir.Model, chosen: Sequence[Match]) -> str | None:
        """Why the operator cannot take the place of any of these, each of which it could, if it cannot."""
        return None

    @abc.abstractmethod
    def announce(self, chosen: Sequence[Match], refused: Refused) -> None:
        """Notes what becomes of the attentions; raises an error where that may not be."""

    def prepare(self, model: ir.Model, chosen: Sequence[Match]) -> None:
        """Finds out what the nodes need, before the model is changed."""

    @abc.abstractmethod
    def make_node(self, model: ir.Model, match: Match, mask: ir.Value | None, made: list[ir.Node]) -> ir.Node:
        """The node that takes the place of the attention; its first outputs are those of outputs_of. Nodes that it
        needs in front of it are appended to `made`."""

    def outputs_of(self, match: Match) -> list[ir.Value]:
        """The values that the node makes instead of the attention."""
        assert match.output is not None
        return [match.output]

    def answers(self, model: ir.Model, match: Match, node: ir.Node, made: list[ir.Node]) -> Sequence[ir.Value]:
        """What takes the place of outputs_of. Nodes that it needs behind the new one are appended to `made`."""
        return node.outputs[: len(self.outputs_of(match))]

    def placed(self, model: ir.Model, match: Match, node: ir.Node) -> None:
        """Called when the node is in its place, and what it replaces is gone."""

    @abc.abstractmethod
    def finish(self, model: ir.Model, nodes: Sequence[ir.Node]) -> None:
        """Completes the inputs of all nodes, and gives the model the operator's function."""

    def attributes(self, match: Match, any_order: bool) -> dict[str, ir.Attr | int | float]:
        """Those that every node of the operator has. any_order: of sums, and so bits, where another one is faster."""
        return {
            "num_heads": match.heads,
            "kv_num_heads": match.kv_heads,
            "scale": float(match.scale),
            "causal": int(match.causal),
            "zero_hidden_rows": int(match.zero_hidden_rows),
            "precision": PRECISION[self.options.precision],
            "any_order": int(any_order),
        }

    @property
    def verb(self) -> str:
        """For notes of what attentions become."""
        return "would become" if self.context.dry_run else "became"

    def note_refused(self, refused: Refused) -> None:
        for reason, names in refused.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.context.note(f"{self.refusal}: {reason}: {names[0]!r}{more}")

    def _choose(self, model: ir.Model) -> tuple[list[Match], Refused]:
        chosen: list[Match] = []
        refused: dict[str, list[str]] = {}
        select, exclude = self.options.select, self.options.exclude
        for match in self.find(model):
            self.context.layers.names += match.names
            if not any_matches(match.names, select):
                reason: str | None = "not selected"
            elif any_matches(match.names, exclude):
                reason = "excluded"
            else:
                reason = match.reason if isinstance(match, NotAttention) else self.why_not(match)
            if reason is None and not isinstance(match, NotAttention) and not _lies_in_one_graph(match):
                reason = "some of its nodes are in a branch or loop, others outside"
            if reason is not None:
                refused.setdefault(reason, []).append(match.names[0])
            elif not isinstance(match, NotAttention):
                chosen.append(match)
        reason = self.why_none(model, chosen) if chosen else None
        if reason is not None:
            refused.setdefault(reason, []).extend(match.names[0] for match in chosen)
            chosen = []
        # The first to be replaced makes the masks that others share: its place must be before theirs.
        places = {node: place for place, node in enumerate(node for graph in model.graphs() for node in graph)}
        chosen.sort(key=lambda match: places[_last(match)])
        return chosen, refused

    def _report(self, match: Match) -> None:
        for product in match.products:
            layer = self.context.layers.reports.get(product.outputs[0])
            if layer is not None:
                layer.new_op, layer.reason = OP_TYPE, None
                layer.status = "would replace" if self.context.dry_run else "replaced"

    def _rewrite(self, model: ir.Model, match: Match, masks: MaskSums) -> ir.Node:
        graph = match.node.graph
        assert graph is not None
        made: list[ir.Node] = []
        mask = masks.sum_of(match.node, match.masks, match.query, made)
        node = self.make_node(model, match, mask, made)
        assert (node.domain, node.op_type) == (ORTOLAN_DOMAIN, OP_TYPE)
        read = [value for old in match.nodes for value in old.inputs if value is not None]
        outputs = self.outputs_of(match)
        made.append(node)
        answers = self.answers(model, match, node, made)
        ir.convenience.replace_nodes_and_values(graph, _last(match), list(match.nodes), made, outputs, answers)
        for value in read:
            remove_dead(value)
        self.placed(model, match, node)
        return node


def _lies_in_one_graph(match: Attention | CachedAttention) -> bool:
    return len({node.graph for node in (match.node, *match.nodes, _last(match))}) == 1


def _last(match: Attention | CachedAttention) -> ir.Node:
    """Of its nodes; the new one takes its place, behind all that it reads."""
    assert match.output is not None
    node = match.output.producer()
    assert node is not None
    return node
