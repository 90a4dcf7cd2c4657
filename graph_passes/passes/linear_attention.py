"""Replace LinearAttention of ONNX Runtime, the recurrence of hybrid decoders, with Ortolan's operator of that name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from ortolan.progress import Stage

from ..find.dimensions import Dimensions
from ..find.linear import node_name
from ..find.node_checks import MICROSOFT_DOMAIN, UnfitError, expect, node_input
from ..operators.linear_attention import (
    ATTRIBUTES,
    INPUTS,
    OP_TYPE,
    UPDATE_RULES,
    linear_attention_function,
    linear_attention_node,
    unused_inputs,
)
from ..operators.nodes import declare_operators, fill_missing, put_function
from ..report.lines import count
from .context import RecipePass
from .normalize import require_normalized

# Expected relative error from another order of sums, for pass verify.
_ROUNDING = 1e-6
_DEFAULTS = {"update_rule": "gated_delta", "scale": 0.0}


class LinearAttentionPass(RecipePass):
    """Replace LinearAttention nodes."""

    def requires(self, model: ir.Model) -> None:
        """Require a normalized model."""
        require_normalized(model, "linear_attention")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the nodes of every graph."""
        context = self.context
        found = list(_recurrences(model.graphs()))
        nodes = list[ir.Node]()
        for number, (graph, node) in enumerate(found):
            context.progress(Stage.LINEAR_ATTENTION, number, len(found))
            try:
                new = _new_node(graph, node)
            except UnfitError as reason:
                context.note(f"LinearAttention {node_name(node)!r} stays in ONNX Runtime: {reason}")
                continue
            nodes.append(new)
            if not context.dry_run:
                outputs = new.outputs[: len(node.outputs)]
                ir.convenience.replace_nodes_and_values(graph, node, [node], [new], node.outputs, outputs)
                for output in outputs:
                    context.layers.rounding[output] = _ROUNDING
        if nodes:
            verb = "would be replaced" if context.dry_run else "replaced"
            context.note(f"{count(len(nodes), 'LinearAttention')} {verb}")
        if not nodes or context.dry_run:
            return ir.passes.PassResult(model, modified=False)
        fill_missing(nodes, INPUTS, INPUTS, unused_inputs, lambda name: context.new_name(model, name))
        declare_operators(model)
        if context.portable:
            put_function(model, linear_attention_function(model.opset_imports[""]))
        return ir.passes.PassResult(model, modified=True)


def _recurrences(graphs: Iterable[ir.Graph]) -> Iterator[tuple[ir.Graph, ir.Node]]:
    for graph in graphs:
        for node in graph:
            if node.op_type == OP_TYPE and node.domain == MICROSOFT_DOMAIN:
                yield graph, node


def _new_node(graph: ir.Graph, node: ir.Node) -> ir.Node:
    """Return the node's replacement, or raise UnfitError with the reason."""
    given = {name: attribute.value for name, attribute in node.attributes.items()}
    given.pop("chunk_size", None)  # changes no answer
    if given.get("state_window") == 0:
        del given["state_window"]
    unknown = sorted(given.keys() - ATTRIBUTES.keys())
    expect(not unknown, f"its attribute {next(iter(unknown), None)!r} is not supported")
    attributes = _DEFAULTS | given
    for name, kind in ATTRIBUTES.items():
        expect(name in attributes, f"its attribute {name!r} is missing")
        expect(name not in given or node.attributes[name].type == kind, f"its attribute {name!r} has another type")
    rule = str(attributes["update_rule"])
    expect(rule in UPDATE_RULES, f"its update_rule {rule!r} is unknown")
    inputs = [node_input(node, index) for index in range(len(INPUTS))]
    for name, value in zip(INPUTS, inputs, strict=True):
        if value is None or not value.name:
            needed = name not in ("decay", "beta") or name in UPDATE_RULES[rule]
            expect(not needed, f"its input {name} is missing")
    dtypes = Dimensions(graph)
    for value in (inputs[0], inputs[3]):
        expect(dtypes.dtype(value) in (None, ir.DataType.FLOAT), f"its input {value and value.name!r} is not float32")
    return linear_attention_node(inputs, attributes, node_name(node))
