"""Replace LayerNormalizations that pass replace did not fuse, such as that of the embeddings, with AddLayerNorm.

The additions before a norm are included if nothing else reads their sums. Unlike ONNX Runtime's operator, AddLayerNorm
sums in the same order on every CPU.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortolan.progress import Stage

from ..find.constants import DEFAULT_DOMAINS, remove_unused
from ..find.dimensions import Dimensions
from ..find.epilogue import LayerNorm, only_consumer
from ..find.layer_norm import find_norms
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
            if any(True for graph in graphs for _ in find_norms(graph, Dimensions(graph))):
                context.note("LayerNormalizations that remain are found after layers have been replaced")
            return ir.passes.PassResult(model, modified=False)
        nodes = list[ir.Node]()
        added = 0
        for number, graph in enumerate(graphs):
            context.progress(Stage.FUSE_NORM, number, len(graphs))
            dimensions = Dimensions(graph)
            # Last norm first, so that `dimensions` still knows the values that earlier norms read.
            for x, norm in reversed(list(find_norms(graph, dimensions))):
                operands, sums = _operands(x, norm, dimensions)
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


def _operands(x: ir.Value, norm: LayerNorm, dimensions: Dimensions) -> tuple[list[ir.Value], list[ir.Node]]:
    """Return the operands that add up to x from left to right, and the Add nodes, last one first.

    If x has other consumers, the only operand is x.
    """
    operands, sums = [x], list[ir.Node]()
    if x.is_graph_output() or any(use.node not in norm.nodes for use in x.uses()):
        return operands, sums
    while len(operands) <= len(ADDENDS):
        # Either of the first two operands may be a sum: addition commutes.
        found = [value for value in operands[:2] if value is x or only_consumer(value) is not None]
        add = next((add for value in found if (add := _sum_of_rows(value, dimensions)) is not None), None)
        if add is None or add.graph is not norm.nodes[0].graph:
            break
        operands.remove(add.outputs[0])
        operands[:0] = [value for value in add.inputs if value is not None]
        sums.append(add)
    return operands, sums


def _sum_of_rows(value: ir.Value, dimensions: Dimensions) -> ir.Node | None:
    """Return the Add that computes the value from two operands of its width, if there is one."""
    add, shape = value.producer(), dimensions.shape(value)
    if add is None or add.op_type != "Add" or add.domain not in DEFAULT_DOMAINS or shape is None:
        return None
    shapes = [dimensions.shape(operand) for operand in add.inputs]
    return add if all(one and one[-1] == shape[-1] for one in shapes) else None
