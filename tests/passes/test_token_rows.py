"""The part of a model that processes tokens independently, and masks that hide only padding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from ortolan.graph_passes.find.dimensions import Dimensions
from ortolan.graph_passes.find.token_rows import NotByTokensError, TokenRows, find_token_rows
from ortolan.graph_passes.find.token_views import Layout, behind_view, in_front_of_view, packed_sizes
from ortolan.graph_passes.measure.padding_masks import MaskError, PaddingMasks

from .attention_graphs import FLOAT, LOWEST, Graph, W
from .small_models import run

BEHIND = "behind"


def rows_around(
    front: Callable[[Graph], str] | None = None, back: Callable[[Graph, str], str] | None = None
) -> tuple[ir.Model, TokenRows]:
    """Build a graph with one attention, and find its part that processes tokens independently."""
    graph = Graph()
    query = "x" if front is None else front(graph)
    y = graph.op("NoMADAttention", query, domain="ai.ortolan", num_heads=4)
    if back is not None:
        y = back(graph, y)
    nodes = [*graph.nodes, helper.make_node("Identity", [y], ["y"], "/out")]
    inputs = [helper.make_tensor_value_info(name, *about) for name, about in graph.inputs.items()]
    outputs = [helper.make_tensor_value_info("y", FLOAT, None)]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in graph.weights.items()]
    imports = [helper.make_opsetid("", graph.opset), helper.make_opsetid("ai.ortolan", 1)]
    proto = helper.make_graph(nodes, "test", inputs, outputs, constants)
    model = ir.from_proto(helper.make_model(proto, opset_imports=imports))
    attentions = [node for node in model.graph if node.op_type == "NoMADAttention"]
    return model, find_token_rows(attentions)


def taken(found: TokenRows) -> list[str]:
    return sorted(node.op_type for node in found.nodes if node.op_type not in ("NoMADAttention", "Identity"))


def constant(*shape: int) -> np.ndarray:
    return np.full(shape, 2, np.float32)


BACK: dict[str, tuple[Callable[[Graph, str], str], list[str]]] = {
    "layer": (lambda g, y: g.op("MatMul", y, constant(W, 8)), ["MatMul"]),
    "layer and bias": (lambda g, y: g.op("Add", g.op("MatMul", y, constant(W, 8)), constant(8)), ["Add", "MatMul"]),
    "residual": (lambda g, y: g.op("Add", y, "x"), []),
    "activation": (lambda g, y: g.op("Mul", y, g.op("Sigmoid", y)), ["Mul", "Sigmoid"]),
    "norm": (
        lambda g, y: g.op("LayerNormalization", y, constant(W), constant(W), axis=-1),
        ["LayerNormalization"],
    ),
    "norm over tokens too": (lambda g, y: g.op("LayerNormalization", y, constant(1, W), axis=1), []),
    "norm in parts": (
        lambda g, y: g.op("Sub", y, g.op("ReduceMean", y, axes=[-1], keepdims=1)),
        ["ReduceMean", "Sub"],
    ),
    "mean without its axis": (lambda g, y: g.op("ReduceMean", y, axes=[-1], keepdims=0), []),
    "mean over tokens": (lambda g, y: g.op("ReduceMean", y, axes=[1], keepdims=1), []),
    "sum over all": (lambda g, y: g.op("ReduceSum", y), []),
    "sum by an input": (lambda g, y: g.op("ReduceSum", y, np.array([-1])), ["ReduceSum"]),
    "softmax": (lambda g, y: g.op("Softmax", y), ["Softmax"]),
    "softmax over tokens": (lambda g, y: g.op("Softmax", y, axis=1), []),
    "constant by tokens": (lambda g, y: g.op("Add", y, constant(9, W)), []),
    "constant of one row": (lambda g, y: g.op("Add", y, constant(1, 1, W)), ["Add"]),
    "matrices by batch": (lambda g, y: g.op("MatMul", y, constant(1, W, 8)), []),
    "gathered": (lambda g, y: g.op("Gather", y, np.array(0), axis=1), []),
    "reshaped": (lambda g, y: g.reshape(y, 0, -1, 4, 12), []),
    "another domain": (lambda g, y: g.op("Relu", y, domain="mine"), []),
    "of ONNX Runtime": (lambda g, y: g.op("BiasGelu", y, constant(W), domain="com.microsoft"), ["BiasGelu"]),
    "of its own product": (lambda g, y: g.op("MatMul", y, g.transpose(y, 0, 2, 1)), []),
}


@pytest.mark.parametrize("name", BACK)
def test_what_is_taken_behind_attention(name: str) -> None:
    back, wanted = BACK[name]
    _, found = rows_around(back=back)
    assert taken(found) == sorted(wanted)
    assert set(found.layouts.values()) == {Layout(3)}
    # The part reads only x.
    assert [value.name for value in found.entries] == ["x"] and found.exits


FRONT: dict[str, tuple[Callable[[Graph], str], list[str], dict[str, tuple[int, Layout]]]] = {
    "layer": (lambda g: g.op("MatMul", "x", constant(W, W)), ["MatMul"], {"x": (3, Layout(3))}),
    "embedding": (
        lambda g: g.op("Gather", constant(10, W), _ids(g, "batch", "rows"), axis=0),
        ["Gather"],
        {"ids": (2, Layout(2))},
    ),
    "position that all share": (
        lambda g: g.op("Add", "x", g.op("Gather", constant(10, W), _ids(g, "rows"), axis=0)),
        ["Add"],
        {"x": (3, Layout(3)), "Gather_0": (2, Layout(3))},
    ),
    "integers that are cast": (
        lambda g: g.op("Cast", _ids(g, "batch", "rows", W), to=FLOAT),
        ["Cast"],
        {"ids": (3, Layout(3))},
    ),
    "what all share": (
        lambda g: g.op("Add", "x", g.op("Neg", g.op("Unsqueeze", _rows_of_table(g), np.array([0])))),
        ["Add"],
        {"x": (3, Layout(3)), "Neg_2": (3, Layout(3))},
    ),
    "heads in front of tokens": (lambda g: g.heads("x"), ["Reshape", "Transpose"], {"x": (3, Layout(3))}),
    "tokens behind": (
        lambda g: g.transpose(g.op("CumSum", g.transpose("x", 0, 2, 1), np.array(1)), 0, 2, 1),
        ["Transpose"],
        {"CumSum_1": (3, Layout(3, 2))},
    ),
    "from other tokens": (lambda g: g.op("CumSum", "x", np.array(1)), [], {"CumSum_0": (3, Layout(3))}),
}


def _rows_of_table(graph: Graph) -> str:
    return graph.op("Gather", constant(10, W), _ids(graph, "rows"), axis=0)


def _ids(graph: Graph, *shape: str | int) -> str:
    graph.inputs["ids"] = (TensorProto.INT64, list(shape))
    return "ids"


@pytest.mark.parametrize("name", FRONT)
def test_what_is_taken_in_front_of_attention(name: str) -> None:
    front, wanted, entries = FRONT[name]
    _, found = rows_around(front)
    assert taken(found) == wanted
    assert {value.name: about for value, about in found.entries.items()} == entries


def test_what_is_not_known_is_refused() -> None:
    """A value has unknown rank."""

    def front(graph: Graph) -> str:
        graph.inputs["shape"] = (TensorProto.INT64, ["axes"])
        return graph.op("Reshape", "x", "shape")

    with pytest.raises(NotByTokensError, match="'Reshape_0' has an unsupported or unknown rank, expected at most 3"):
        rows_around(front)


def test_what_also_leaves_is_an_exit() -> None:
    def back(graph: Graph, y: str) -> str:
        graph.op("ReduceMean", y, axes=[1])
        return graph.op("Relu", y)

    _, found = rows_around(back=back)
    assert len(found.exits) == 2


def masks_of(*makers: Callable[[Graph], str]) -> tuple[PaddingMasks, list[ir.Value]]:
    """Return masks computed from attention_mask by the given functions."""
    graph = Graph()
    graph.inputs["attention_mask"] = (TensorProto.INT64, ["batch", "rows"])
    names = []
    for make in makers:
        name = make(graph)
        names.append(graph.op("Add", names[-1], name) if names else name)
    graph.nodes.append(helper.make_node("Identity", [names[-1]], ["y"]))
    inputs = [helper.make_tensor_value_info(name, *about) for name, about in graph.inputs.items()]
    outputs = [helper.make_tensor_value_info("y", FLOAT, None)]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in graph.weights.items()]
    proto = helper.make_graph(graph.nodes, "test", inputs, outputs, constants)
    model = ir.from_proto(helper.make_model(proto, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    values = {value.name: value for node in model.graph for value in node.outputs}
    given = next(value for value in model.graph.inputs if value.name == "attention_mask")
    return PaddingMasks(model, given), [values[name] for name in names]


def hides(number: float = LOWEST) -> Callable[[Graph], str]:
    def build(graph: Graph) -> str:
        floats = graph.op("Cast", graph.op("Unsqueeze", "attention_mask", np.array([1, 2])), to=FLOAT)
        return graph.op("Mul", graph.op("Sub", graph.number(1), floats), graph.number(number))

    return build


def bias(graph: Graph) -> str:
    places = graph.op("Cast", graph.op("Shape", "x", start=1, end=2), to=FLOAT)
    return graph.op("Reshape", graph.op("Mul", places, graph.number(0.1)), np.array([1, 1, 1, 1]))


@pytest.mark.parametrize("number", [LOWEST, -65504.0, -1e4, -np.inf])
def test_a_mask_of_padding_goes(number: float) -> None:
    if number == -np.inf:  # 0 * -Inf would be NaN, so this mask uses Where

        def make(graph: Graph) -> str:
            there = graph.op("Cast", graph.op("Unsqueeze", "attention_mask", np.array([1, 2])), to=TensorProto.BOOL)
            return graph.op("Where", there, graph.number(0), graph.number(number))
    else:
        make = hides(number)
    masks, (mask,) = masks_of(make)
    assert masks.beside_padding(mask) is None


@pytest.mark.parametrize("number", [-9e3, 0.0, 1e9])
def test_a_mask_that_does_not_hide_is_refused(number: float) -> None:
    masks, (mask,) = masks_of(hides(number))
    with pytest.raises(MaskError, match=f"mask '{mask.name}' does not mask all tokens that attention_mask masks"):
        masks.beside_padding(mask)


def test_what_a_mask_is_added_to_is_left() -> None:
    masks, (own, both) = masks_of(bias, hides())
    assert masks.beside_padding(both) is own
    masks, (_, both) = masks_of(hides(), bias)
    left = masks.beside_padding(both)
    assert left is not None and left is not both and left.producer().op_type == "Reshape"


def test_a_mask_that_is_made_in_one_stays() -> None:
    masks, (mask,) = masks_of(
        lambda graph: graph.op(
            "Where", graph.op("Less", hides()(graph), graph.number(-1)), graph.number(LOWEST), bias(graph)
        )
    )
    assert masks.beside_padding(mask) is mask


def test_no_mask_and_a_constant_one() -> None:
    masks, (constant_mask,) = masks_of(lambda graph: graph.op("Constant", value_floats=[0.0]))
    for mask in (None, constant_mask):
        with pytest.raises(MaskError, match="attention has no mask that depends on attention_mask"):
            masks.beside_padding(mask)


@pytest.mark.parametrize("axes", [[0, 1, 2], [2]])
def test_masks_of_other_shapes(axes: list[int]) -> None:
    """The mask has five axes, or three axes with heads first."""
    masks, (mask,) = masks_of(lambda graph: graph.op("Unsqueeze", hides()(graph), np.array(axes)))
    with pytest.raises(MaskError, match="does not mask all tokens"):
        masks.beside_padding(mask)


def far(graph: Graph) -> str:
    """A mask that also hides keys more than 20 positions away; trials use shorter sequences."""
    rows = graph.op("Squeeze", graph.op("Shape", "x", start=1, end=2), np.array([0]))
    places = graph.op("Range", np.array(0), rows, np.array(1))
    apart = graph.op("Abs", graph.op("Sub", graph.op("Unsqueeze", places, np.array([1])), places))
    return graph.op("Where", graph.op("Less", np.array(20), apart), graph.number(LOWEST), hides()(graph))


def a_table(graph: Graph) -> str:
    """A mask with a constant table that is 0 for the short lengths of the trials and 1 beyond 40."""
    table = np.zeros((1, 1, 64, 64), np.float32)
    table[..., 40:] = 1
    rows = graph.op("Shape", "x", start=1, end=2)
    own = graph.op("Slice", table, np.array([0, 0]), graph.op("Concat", rows, rows, axis=0), np.array([2, 3]))
    return graph.op("Add", own, hides()(graph))


@pytest.mark.parametrize("maker", [far, a_table])
def test_a_mask_that_tells_places_apart_stays(maker: Callable[[Graph], str]) -> None:
    masks, (mask,) = masks_of(maker)
    kept = masks.beside_padding(mask)
    assert kept is not None and (kept is mask or maker is a_table)


SPLIT = ["batch", "rows", 3, 4, 12]
VIEWS: dict[str, tuple[list[int | str], Callable[[Graph], str], Layout, Layout | None]] = {
    "heads split": (["batch", "rows", W], lambda g: g.reshape("x", 0, 0, 4, 12), Layout(3), Layout(4)),
    "rows left open": (["batch", "rows", W], lambda g: g.reshape("x", 0, -1, 4, 12), Layout(3), Layout(4)),
    "batch left open": (["batch", "rows", W], lambda g: g.reshape("x", -1, 9, 4, 12), Layout(3), None),
    "rows merged with the batch": (["batch", "rows", W], lambda g: g.reshape("x", -1, W), Layout(3), None),
    "rows merged with heads": (["batch", "rows", 4, 12], lambda g: g.reshape("x", 0, -1, 12), Layout(4), None),
    "heads merged": (["batch", 2, 2, "rows", 12], lambda g: g.reshape("x", 0, 4, -1, 12), Layout(5, 3), Layout(4, 2)),
    "of fixed sizes": ([2, 4, 4, 4], lambda g: g.reshape("x", 2, 4, 16), Layout(4), Layout(3)),
    "heads in front": (SPLIT, lambda g: g.transpose("x", 0, 3, 2, 1, 4), Layout(5), Layout(5, 3)),
    "the batch moved": (["batch", "rows", W], lambda g: g.transpose("x", 1, 0, 2), Layout(3), None),
    "axes turned round": (["batch", "rows", W], lambda g: g.op("Transpose", "x"), Layout(3), None),
    "one of three": (SPLIT, lambda g: g.op("Gather", "x", np.array(1), axis=2), Layout(5), Layout(4)),
    "one in front of rows": (
        ["batch", 3, "rows", W],
        lambda g: g.op("Gather", "x", np.array(1), axis=1),
        Layout(4, 2),
        Layout(3),
    ),
    "some in front of rows": (
        ["batch", 3, "rows", W],
        lambda g: g.op("Gather", "x", np.array([1, 2]), axis=1),
        Layout(4, 2),
        Layout(4, 2),
    ),
    "a token": (["batch", "rows", W], lambda g: g.op("Gather", "x", np.array(0), axis=1), Layout(3), None),
    "a sequence": (["batch", "rows", W], lambda g: g.op("Gather", "x", np.array([0]), axis=0), Layout(3), None),
    "a part": (
        ["batch", "rows", W],
        lambda g: g.op("Slice", "x", np.array([0]), np.array([5]), np.array([-1])),
        Layout(3),
        Layout(3),
    ),
    "some tokens": (
        ["batch", "rows", W],
        lambda g: g.op("Slice", "x", np.array([0]), np.array([5]), np.array([1])),
        Layout(3),
        None,
    ),
    "a part of unsaid axes": (
        ["batch", "rows", W],
        lambda g: g.op("Slice", "x", np.array([0]), np.array([5])),
        Layout(3),
        None,
    ),
    "an axis in front": (
        ["batch", "rows", W],
        lambda g: g.op("Unsqueeze", "x", np.array([1])),
        Layout(3),
        Layout(4, 2),
    ),
    "an axis behind": (["batch", "rows", W], lambda g: g.op("Unsqueeze", "x", np.array([-1])), Layout(3), Layout(4)),
    "another batch": (["batch", "rows", W], lambda g: g.op("Unsqueeze", "x", np.array([0])), Layout(3), None),
    "an axis less": (
        ["batch", 1, "rows", 1, W],
        lambda g: g.op("Squeeze", "x", np.array([1, 3])),
        Layout(5, 2),
        Layout(3),
    ),
    "a token less": (["batch", 1, W], lambda g: g.op("Squeeze", "x", np.array([1])), Layout(3), None),
    "joined": (["batch", "rows", W], lambda g: g.op("Concat", "x", "x", axis=-1), Layout(3), Layout(3)),
    "more tokens": (["batch", "rows", W], lambda g: g.op("Concat", "x", "x", axis=1), Layout(3), None),
    "repeated": (
        ["batch", 2, 1, "rows", W],
        lambda g: g.op("Expand", "x", np.array([1, 2, 3, 1, 1])),
        Layout(5, 3),
        Layout(5, 3),
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_where_tokens_are_behind_a_view(name: str) -> None:
    """A Reshape or Transpose maps the token axes from `before` to `after`, and back."""
    shape, make, before, after = VIEWS[name]
    graph = Graph()
    graph.inputs["x"] = (FLOAT, shape)
    make(graph)
    inputs = [helper.make_tensor_value_info(one, *about) for one, about in graph.inputs.items()]
    outputs = [helper.make_tensor_value_info(graph.nodes[-1].output[0], FLOAT, None)]
    constants = [onnx.numpy_helper.from_array(array, one) for one, array in graph.weights.items()]
    graph_proto = helper.make_graph(graph.nodes, "test", inputs, outputs, constants)
    padded = helper.make_model(graph_proto, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model = ir.from_proto(padded)
    node, dims = model.graph[-1], Dimensions(model.graph)
    assert behind_view(dims, node, before) == after
    if after is None:
        return
    assert in_front_of_view(dims, node, after) == before
    # Run on packed tokens, the node gives the same values as on padded ones.
    sizes = packed_sizes(dims, node, before)
    if sizes is not None:
        node.replace_input_with(1, ir.Value(name="sizes", const_value=ir.tensor(np.array(sizes), name="sizes")))
        model.graph.register_initializer(node.inputs[1])
    named = {"batch": (3, 1), "rows": (5, 7)}
    x = [np.zeros([named.get(size, (size, size))[packed] for size in shape], np.float32) for packed in (0, 1)]
    if name == "of fixed sizes":
        x[1] = x[0][:1]
        model.graph.inputs[0].shape = None
    expected = list(run(padded, {"x": x[0]})[0].shape)
    expected[0], expected[after.tokens] = 1, x[1].shape[before.tokens]
    assert list(run(ir.to_proto(model), {"x": x[1]})[0].shape) == expected
