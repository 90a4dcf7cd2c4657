"""Remove the quantization of activations to fixed 8-bit ranges, which ONNX Runtime's quantize_static inserts.

Layers then quantize their inputs row by row (SparseAMXMatMul), and operators between layers are fused as in a float
model. The result is what these weights give in float. A range that may replace a Relu or Clip becomes a Clip, so values
that it cut off stay cut off (find/qdq_pairs.py).

If any layer becomes VNNISpMM, which uses fixed ranges, all ranges stay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortolan.progress import Stage

from ..find.constants import DEFAULT_DOMAINS, constant_tensor, remove_unused
from ..find.linear import linears_in
from ..find.node_checks import MICROSOFT_DOMAIN, node_input
from ..find.qdq_pairs import QdqPair, find_qdq_pairs
from ..operators.nodes import new_initializer
from .context import PassContext, RecipePass
from .normalize import require_normalized


@dataclass(frozen=True)
class _IntegerOperator:
    """An operator on 8-bit integers and its float counterpart.

    Attributes:
        op_type: the float operator.
        inputs: indices of the first of three inputs (integers, scale, zero point) that form one float input.
        output: index of the output's scale, which is followed by the zero point.
        attributes: attributes that both operators have.
        floats: indices of the inputs that come first and are passed on unchanged.
    """

    op_type: str
    inputs: tuple[int, ...]
    output: int
    attributes: tuple[str, ...] = ()
    floats: tuple[int, ...] = ()


_INTEGER_OPERATORS: Mapping[tuple[str, str], _IntegerOperator] = {
    ("", "QLinearMatMul"): _IntegerOperator("MatMul", (0, 3), 6),
    (MICROSOFT_DOMAIN, "QLinearAdd"): _IntegerOperator("Add", (0, 3), 6),
    (MICROSOFT_DOMAIN, "QLinearMul"): _IntegerOperator("Mul", (0, 3), 6),
    (MICROSOFT_DOMAIN, "QLinearSigmoid"): _IntegerOperator("Sigmoid", (0,), 3),
    (MICROSOFT_DOMAIN, "QLinearLeakyRelu"): _IntegerOperator("LeakyRelu", (0,), 3, ("alpha",)),
    (MICROSOFT_DOMAIN, "QLinearSoftmax"): _IntegerOperator("Softmax", (0,), 3, ("axis",)),
    (MICROSOFT_DOMAIN, "QLinearWhere"): _IntegerOperator("Where", (1, 4), 7, floats=(0,)),
}
_MAX_MASK_ELEMENTS = 1024  # limit of the elements of a constant mask
_CONCAT = (MICROSOFT_DOMAIN, "QLinearConcat")  # inputs: scale and zero point of the output, then three for each input


class FloatActivationsPass(RecipePass):
    """Remove QuantizeLinear and DequantizeLinear around activations, if layers have inputs with fixed ranges."""

    def requires(self, model: ir.Model) -> None:
        """Require a normalized model."""
        require_normalized(model, "float_activations")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Convert activations to floats, unless a layer is replaced by VNNISpMM, which uses fixed ranges."""
        context = self.context
        context.progress(Stage.FLOAT_ACTIVATIONS, 0, 1)
        ranged = [linear for linear in linears_in(model) if linear.x_range is not None]
        keeping = [linear for linear in ranged if context.plan.keeps_range(linear)]
        if keeping:
            context.note(
                f"fixed ranges of activations are kept: {len(keeping)} of {len(ranged)} layers with fixed ranges are "
                "sparse and are replaced by VNNISpMM, which uses them"
            )
        elif ranged:
            context.layers.freed = _free(model, context)
        context.progress(Stage.FLOAT_ACTIVATIONS, 1, 1)
        return ir.passes.PassResult(model, modified=bool(context.layers.freed))


def _free(model: ir.Model, context: PassContext) -> int:
    writer = _Writer(model, context)
    for node in list(model.graph.all_nodes()):
        writer.in_floats(node)
    for node in list(model.graph.all_nodes()):
        writer.keep_finite(node)
        writer.gather_integers(node)
    freed, clipped, reasons = 0, 0, list[str]()
    for pair in [pair for graph in model.graphs() for pair in find_qdq_pairs(graph)]:
        if pair.reason is None:
            clipped += writer.remove(pair)
            freed += 1
        else:
            reasons.append(f"{pair.node.name!r}: {pair.reason}")
    if freed:
        context.note(
            f"{freed} quantizations of activations to fixed ranges removed: layers quantize their inputs row by row, "
            "and answers are compared with those of the model's weights in float"
            + (
                f"; {clipped} ranges that start at 0 were replaced by a Clip, as they may implement a Relu"
                if clipped
                else ""
            )
        )
    if reasons:
        more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        context.note(f"quantization of activations kept: {reasons[0]}{more}")
    return freed


class _Writer:
    def __init__(self, model: ir.Model, context: PassContext) -> None:
        self._model, self._context = model, context
        self._made: dict[Hashable, ir.Value] = {}  # dequantized values by graph, integers, scale and zero point

    def in_floats(self, node: ir.Node) -> None:
        """Replace an operator on 8-bit integers with DequantizeLinear, its float counterpart and QuantizeLinear.

        An operator with a constant weight is a layer, and is kept.
        """
        kind = (node.domain if node.domain not in DEFAULT_DOMAINS else "", node.op_type)
        operator = _INTEGER_OPERATORS.get(kind)
        if kind == _CONCAT:
            operator = _IntegerOperator("Concat", tuple(range(2, len(node.inputs), 3)), 0, ("axis",))
        if operator is None or not isinstance(node.graph, ir.Graph) or not _is_complete(node, operator):
            return
        nodes: list[ir.Node] = []
        inputs = [node.inputs[index] for index in operator.floats]
        inputs += [self._dequantized(node.graph, node.inputs[index : index + 3], nodes) for index in operator.inputs]
        attributes = {name: node.attributes[name] for name in operator.attributes if name in node.attributes}
        floats = self._add(nodes, operator.op_type, inputs, node.name, attributes)
        inputs = [floats, *node.inputs[operator.output : operator.output + 2]]
        integers = self._add(nodes, "QuantizeLinear", inputs, f"{node.name}/quantize")
        integers.type, integers.shape = node.outputs[0].type, node.outputs[0].shape
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], nodes, [node.outputs[0]], [integers])

    def keep_finite(self, node: ir.Node) -> None:
        """Clamp a dequantized constant that overflows, so that masks hide keys with the lowest float, not -infinity."""
        if node.op_type != "DequantizeLinear" or node.domain not in DEFAULT_DOMAINS or node.graph is None:
            return
        integers = constant_tensor(node_input(node, 0))
        made = None if integers is None or integers.size > _MAX_MASK_ELEMENTS else constant_tensor(node.outputs[0])
        if made is None or node.outputs[0].is_graph_output():
            return
        with np.errstate(over="ignore"):
            array = np.array(made.numpy())
        if np.isinf(array).any():
            largest = made.dtype.max
            value = self._constant(node)(np.clip(array, -largest, largest).astype(array.dtype))
            ir.convenience.replace_all_uses_with(node.outputs[0], value)
            remove_unused(node.outputs[0])

    def gather_integers(self, node: ir.Node) -> None:
        """Gather rows of a table before dequantizing, so that only the gathered rows become floats."""
        table = node.inputs[0] if node.op_type == "Gather" and node.domain in DEFAULT_DOMAINS else None
        dequantize = table.producer() if table is not None else None
        if table is None or dequantize is None or dequantize.op_type != "DequantizeLinear":
            return
        integers, scale = constant_tensor(node_input(dequantize, 0)), constant_tensor(node_input(dequantize, 1))
        if integers is None or scale is None or scale.size != 1 or len(scale.shape) > 1 or node.graph is None:
            return
        nodes: list[ir.Node] = []
        inputs = [dequantize.inputs[0], *node.inputs[1:]]
        rows = self._add(nodes, "Gather", inputs, node.name, dict(node.attributes))
        rows.type = ir.TensorType(integers.dtype)
        floats = self._add(nodes, "DequantizeLinear", [rows, *dequantize.inputs[1:]], f"{node.name}/floats")
        floats.type, floats.shape = node.outputs[0].type, node.outputs[0].shape
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], nodes, [node.outputs[0]], [floats])
        remove_unused(table)

    def remove(self, rounding: QdqPair) -> bool:
        """Remove a QDQ pair. Return True if a Clip replaces it."""
        node, bounds = rounding.node, rounding.bounds
        source, scale = node_input(node, 0), constant_tensor(node_input(node, 1))
        graph = node.graph
        assert source is not None and scale is not None and graph is not None
        constants = [value for one in (node, *rounding.ends) for value in one.inputs[1:] if value is not None]
        if bounds is not None:
            arrays = [np.array(bound).astype(scale.dtype.numpy()) for bound in bounds]
            made: list[ir.Node] = []
            source = self._add(made, "Clip", [source, *map(self._constant(node), arrays)], f"{node.name}/clip")
            source.type, source.shape = ir.TensorType(scale.dtype), node.outputs[0].shape
            graph.insert_before(node, made)
        ir.convenience.replace_all_uses_with(node.outputs[0], source)
        graph.remove(node, safe=True)
        for move in rounding.moves:
            for value in move.outputs:
                value.type = ir.TensorType(scale.dtype)
        for end in rounding.ends:
            floats = end.outputs[0]
            if floats.is_graph_output():
                same = ir.node("Identity", [end.inputs[0]], name=end.name)
                same.outputs[0].type, same.outputs[0].shape = floats.type, floats.shape
                ir.convenience.replace_nodes_and_values(graph, end, [end], [same], [floats], [same.outputs[0]])
            else:
                assert end.inputs[0] is not None
                ir.convenience.replace_all_uses_with(floats, end.inputs[0])
                graph.remove(end, safe=True)
        for value in constants:
            remove_unused(value)
        return bounds is not None

    def _constant(self, node: ir.Node) -> Callable[[np.ndarray], ir.Value]:
        graph = node.graph
        assert isinstance(graph, ir.Graph)

        def make(array: np.ndarray) -> ir.Value:
            name = self._context.new_name(self._model, f"{node.name}/bound")
            return new_initializer(graph, ir.Tensor(array, name=name))

        return make

    def _dequantized(self, graph: ir.Graph, three: Sequence[ir.Value | None], nodes: list[ir.Node]) -> ir.Value:
        key = (id(graph), *three)
        if key not in self._made:
            integers = three[0]
            assert integers is not None
            self._made[key] = self._add(nodes, "DequantizeLinear", list(three), f"{integers.name}/floats")
        return self._made[key]

    def _add(
        self,
        nodes: list[ir.Node],
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str | None,
        attributes: Mapping[str, ir.Attr] | None = None,
    ) -> ir.Value:
        node = ir.Node("", op_type, inputs, (attributes or {}).values(), name=name)
        node.outputs[0].name = self._context.new_name(self._model, f"{name}_floats")
        nodes.append(node)
        return node.outputs[0]


def _is_complete(node: ir.Node, operator: _IntegerOperator) -> bool:
    """Return True if all scales and zero points exist and are constant, and the operator is not a layer."""
    positions = [index + more for index in operator.inputs for more in (1, 2)] + [operator.output, operator.output + 1]
    known = all(constant_tensor(node_input(node, index)) is not None for index in positions)
    integers = [node_input(node, index) for index in operator.inputs]
    given = [value for value in integers if value is not None]
    is_layer = node.op_type == "QLinearMatMul" and any(constant_tensor(value) is not None for value in given)
    later_opset = node.op_type != "QLinearSoftmax" or _softmax_is_of_axis(node)
    return known and len(given) == len(integers) and not is_layer and later_opset


def _softmax_is_of_axis(node: ir.Node) -> bool:
    """Return True if this is the Softmax of opset 13 and later, over one axis."""
    return "opset" in node.attributes and node.attributes["opset"].as_int() >= 13
