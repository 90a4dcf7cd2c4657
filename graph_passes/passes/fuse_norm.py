"""Replace LayerNormalizations that pass replace did not fuse, such as that of the embeddings, with AddLayerNorm.

The additions before a norm are included if nothing else reads their sums. Unlike ONNX Runtime's operator, AddLayerNorm
sums in the same order on every CPU.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortolan.progress import Stage

from ..find.constants import remove_unused
from ..find.epilogue import LayerNorm, find_norms
from ..operators.add_layer_norm import ADDENDS, INPUTS, add_layer_norm_function, add_layer_norm_node
from ..operators.nodes import declare_operators, fill_missing, in_order, new_initializer, put_function
from ..report.lines import count
from .context import RecipePass
from .normalize import require_normalized

# Expected relative error from another order of sums, for pass verify.
_ROUNDING = 1e-6


class FuseNormPass(RecipePass):
    """Replace LayerNormalizations and the additions before them."""

    def requires(self, model: ir.Model) -> None:
        """Require a normalized model."""
        require_normalized(model, "fuse_norm")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the LayerNormalizations of every graph."""
        context = self.context
        graphs = list(model.graphs())
        if context.dry_run:
            if any(True for graph in graphs for _ in find_norms(graph)):
                context.note("LayerNormalizations that remain are found after layers have been replaced")
            return ir.passes.PassResult(model, modified=False)
        nodes = list[ir.Node]()
        added = 0
        for number, graph in enumerate(graphs):
            context.progress(Stage.FUSE_NORM, number, len(graphs))
            # Last norm first: the operands of a norm may be outputs of earlier norms.
            for norm, operands, sums in reversed(list(find_norms(graph))):
                nodes.append(self._replace(model, graph, norm, operands, sums))
                added += len(sums)
        context.progress(Stage.FUSE_NORM, len(graphs), len(graphs))
        if nodes:
            neutral = {name: np.zeros(1, np.float32) for name in ADDENDS}
            fill_missing(nodes, INPUTS, (), lambda _: neutral, lambda name: context.new_name(model, name))
            declare_operators(model)
            if context.portable:
                put_function(model, add_layer_norm_function(model.opset_imports[""]))
            context.note(f"{count(len(nodes), 'LayerNormalization')} fused with {count(added, 'addition')}")
        return ir.passes.PassResult(model, modified=bool(nodes))

    def _replace(
        self, model: ir.Model, graph: ir.Graph, norm: LayerNorm, operands: list[ir.Value], sums: list[ir.Node]
    ) -> ir.Node:
        """Insert the operator at the norm's last node, under its name; the output keeps its name."""
        last = norm.nodes[-1]
        given: dict[str, ir.Value] = dict(zip(INPUTS, operands, strict=False))
        for name, array in norm.arrays().items():
            tensor = ir.Tensor(array, name=self.context.new_name(model, f"{last.name}.{name}"))
            given[name] = new_initializer(graph, tensor)
        node = add_layer_norm_node(in_order(INPUTS, given), norm.epsilon, last.name)
        read = [value for one in norm.nodes for value in one.inputs if value is not None]
        old = [*reversed(sums), *norm.nodes]
        ir.convenience.replace_nodes_and_values(graph, last, old, [node], [norm.output], [node.outputs[0]])
        for value in read:
            remove_unused(value)
        self.context.layers.rounding[node.outputs[0]] = _ROUNDING
        return node
