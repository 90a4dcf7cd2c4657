"""Base class of the passes that replace attention with NoMADAttention, with or without a cache."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import numpy as np
import onnx_ir as ir

from ortolan.errors import RecipeError
from ortolan.progress import Stage

from ...find.attention import LAYOUTS, Attention, NotAttention
from ...find.cached_attention import CachedAttention
from ...find.constants import remove_unused
from ...names import EVERYWHERE, ORTOLAN_DOMAIN
from ...operators.nodes import declare_operators, new_initializer
from ...operators.nomad_attention_function import OP_TYPE, REPRODUCIBLE, SINKS, SOFTCAP, WINDOW
from ...options import Globs, PassOptions, any_matches, takes
from ..context import RecipePass
from ..normalize import require_normalized
from ..verify.reference import keep_reference
from .mask import MaskSums

Match = TypeVar("Match", Attention, CachedAttention)
Refused = Mapping[str, Sequence[str]]  # names of the attentions that are not replaced, by reason


PRECISION = {"f32": 32, "bf16": 16}
# Expected ||Y - exact|| / ||Y|| of a typical attention, for pass verify; measured in docs/verification.md.
ROUNDING = {"f32": 5e-6, "bf16": 5e-3}


@dataclass(frozen=True)
class AttentionOptions(PassOptions):
    """Options of all passes that replace attention."""

    # Patterns that select attention by the name of its attention operator, its Softmax or one of its two MatMuls.
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))
    # bf16: the inputs of both MatMuls are rounded to bfloat16.
    precision: str = field(default="f32", metadata=takes("str", choices=tuple(PRECISION)))
    # everywhere: the same bits on every CPU. None: the fastest order of sums, which depends on the CPU.
    reproducible: str | None = field(default=None, metadata=takes("str", choices=(EVERYWHERE,), none=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reproducible is not None and self.precision != "bf16":
            raise RecipeError(
                f'reproducible = "{self.reproducible}" needs precision = "bf16"; precision is "{self.precision}", '
                "whose bits depend on the CPU; leave reproducible out"
            )


class AttentionRewrite(RecipePass, Generic[Match]):
    """Replace each attention with one node, also in branches of an If.

    Subclasses choose the attentions, and the node's inputs besides query, key, value and mask.
    """

    pass_name: ClassVar[str]
    stage: ClassVar[Stage]
    refusal: ClassVar[str]  # start of the note about attentions that are not replaced
    options: AttentionOptions

    def requires(self, model: ir.Model) -> None:
        """Require a normalized model."""
        require_normalized(model, self.pass_name)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the selected attentions."""
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
        """Return the attentions that this pass handles."""

    def why_not(self, match: Match) -> str | None:
        """Explain why the operator cannot replace this attention; None if it can."""
        return None

    def why_none(self, model: ir.Model, chosen: Sequence[Match]) -> str | None:
        """Explain why the attentions cannot be replaced, although each passed `why_not`; None if they can."""
        return None

    @abc.abstractmethod
    def announce(self, chosen: Sequence[Match], refused: Refused) -> None:
        """Note what happens to the attentions. Raise an error if the pass cannot continue."""

    def prepare(self, model: ir.Model, chosen: Sequence[Match]) -> None:
        """Collect what the nodes need before the model is changed."""

    @abc.abstractmethod
    def make_node(self, model: ir.Model, match: Match, mask: ir.Value | None, made: list[ir.Node]) -> ir.Node:
        """Return the node whose first outputs replace `outputs_of`. Append nodes that must run before it to `made`."""

    def outputs_of(self, match: Match) -> list[ir.Value]:
        """Return the values of the attention that the new node computes."""
        assert match.output is not None
        return [match.output]

    def answers(self, model: ir.Model, match: Match, node: ir.Node, made: list[ir.Node]) -> Sequence[ir.Value]:
        """Return the values that replace `outputs_of`. Append nodes that run after `node` to `made`."""
        answers = list(node.outputs[: len(self.outputs_of(match))])
        layout = match.layouts.get("output")
        if layout is not None:  # the operator's own layout is [batch, rows, width]
            answers[0].name = self.context.new_name(model, f"{match.node.name}/merged")
            answers[0].dtype = ir.DataType.FLOAT
            shape = (0, 0, match.heads, match.head_dim)
            answers[0] = self.reshaped(model, answers[0], shape, f"{match.node.name}/heads", made)
            if layout == "by_heads":
                answers[0] = self.transposed(model, answers[0], LAYOUTS["apart"], f"{match.node.name}/by_heads", made)
        return answers

    def transposed(
        self, model: ir.Model, value: ir.Value, axes: Sequence[int], name: str, made: list[ir.Node]
    ) -> ir.Value:
        """Append a Transpose to `made` and return its output."""
        node = ir.node("Transpose", [value], {"perm": axes}, name=f"{name}_transpose")
        return self._named(model, node, len(axes), f"{name}_transposed", made)

    def reshaped(
        self, model: ir.Model, value: ir.Value, shape: Sequence[int], name: str, made: list[ir.Node]
    ) -> ir.Value:
        """Append a Reshape to `made` and return its output."""
        constant = ir.Tensor(np.array(shape, np.int64), name=self.context.new_name(model, f"{name}_shape"))
        node = ir.node("Reshape", [value, new_initializer(model.graph, constant)], name=f"{name}_reshape")
        return self._named(model, node, len(shape), f"{name}_reshaped", made)

    def _named(self, model: ir.Model, node: ir.Node, rank: int, name: str, made: list[ir.Node]) -> ir.Value:
        (value,) = node.outputs
        value.name = self.context.new_name(model, name)
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape([None] * rank)
        made.append(node)
        return value

    def placed(self, model: ir.Model, match: Match, node: ir.Node) -> None:
        """Run after the node is inserted and the replaced nodes are removed."""

    @abc.abstractmethod
    def finish(self, model: ir.Model, nodes: Sequence[ir.Node]) -> None:
        """Fill in missing inputs of all nodes, and add the operator's ONNX function."""

    def attributes(self, match: Match) -> dict[str, ir.Attr | int | float | str]:
        """Return the attributes of nodes with and without a cache."""
        attributes: dict[str, ir.Attr | int | float | str] = {
            "num_heads": match.heads,
            "kv_num_heads": match.kv_heads,
            "scale": float(match.scale),
            "causal": int(match.causal),
            "zero_hidden_rows": int(match.zero_hidden_rows),
            "precision": PRECISION[self.options.precision],
        }
        if match.softcap:
            attributes[SOFTCAP.name] = float(match.softcap)
        if match.window:
            attributes[WINDOW.name] = match.window
        if match.sinks:
            attributes[SINKS.name] = ir.AttrFloat32s(SINKS.name, match.sinks)
        if self.options.reproducible is not None:
            attributes[REPRODUCIBLE.name] = self.options.reproducible
        return attributes

    @property
    def verb(self) -> str:
        """Return the verb of notes: "became", or "would become" in a dry run."""
        return "would become" if self.context.dry_run else "became"

    def note_refused(self, refused: Refused) -> None:
        """Note the attentions that are not replaced, by reason."""
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
            if reason is not None:
                refused.setdefault(reason, []).append(match.names[0])
            elif not isinstance(match, NotAttention):
                chosen.append(match)
        reason = self.why_none(model, chosen) if chosen else None
        if reason is not None:
            refused.setdefault(reason, []).extend(match.names[0] for match in chosen)
            chosen = []
        # Graph order: the first replaced attention creates the mask nodes that later ones share.
        positions = {node: position for position, node in enumerate(node for graph in model.graphs() for node in graph)}
        chosen.sort(key=lambda match: positions[_last(match)])
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
            remove_unused(value)
        self.placed(model, match, node)
        return node


def _last(match: Attention | CachedAttention) -> ir.Node:
    """Return the last node of an attention. The new node takes its position, where all its inputs are available."""
    assert match.output is not None
    node = match.output.producer()
    assert node is not None
    return node
