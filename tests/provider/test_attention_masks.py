"""Attention masks that are conditions, come from linear layers, or have unusual shapes: results as in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ..passes.small_models import relative_error
from .sessions import claimed, needs_provider, plain_session, provider_session

pytestmark = needs_provider

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
BATCH, HEADS, WIDTH, ROWS = 2, 2, 16, 5
D = HEADS * WIDTH
node, value = helper.make_node, helper.make_tensor_value_info


def attention(
    masks: list[tuple[str, str]],
    inputs: list[onnx.ValueInfoProto],
    more: list[onnx.NodeProto] | None = None,
    zero_rows: str = "",
) -> onnx.ModelProto:
    """Return attention with float linear layers.

    masks: ("Add", mask to add) or ("Where", condition that masks), in order.
    """
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {
        "split": np.array([0, 0, HEADS, WIDTH]),
        "merge": np.array([0, 0, D]),
        "scale": np.array(WIDTH**-0.5, np.float32),
        "lowest": np.array(np.finfo(np.float32).min, np.float32),
        "zero": np.array(0, np.float32),
        "w_bias": rng.standard_normal((8, ROWS)).astype(np.float32),
    }
    nodes = []
    for part, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        tensors[f"w_{part}"] = (rng.standard_normal((D, D)) / 6).astype(np.float32)
        nodes += [
            node("MatMul", ["x", f"w_{part}"], [f"y_{part}"], name=f"layer_{part}"),
            node("Reshape", [f"y_{part}", "split"], [f"r_{part}"]),
            node("Transpose", [f"r_{part}"], [part], perm=perm),
        ]
    nodes += [*(more or []), node("MatMul", ["q", "k"], ["s0"]), node("Mul", ["s0", "scale"], ["s"])]
    scores = "s"
    for i, (op, mask) in enumerate(masks):
        operands = [scores, mask] if op == "Add" else [mask, "lowest", scores]
        nodes.append(node(op, operands, [f"masked_{i}"]))
        scores = f"masked_{i}"
    nodes += [node("Softmax", [scores], ["p"], axis=-1, name="softmax"), node("MatMul", ["p", "v"], ["a"])]
    if zero_rows:
        nodes.append(node("Where", [zero_rows, "zero", "a"], ["zeroed"]))
    nodes += [
        node("Transpose", ["zeroed" if zero_rows else "a"], ["t"], perm=[0, 2, 1, 3]),
        node("Reshape", ["t", "merge"], ["y"], name="merge"),
    ]
    used = {name for one in nodes for name in one.input}
    graph = helper.make_graph(
        nodes,
        "attention",
        [value("x", FLOAT, ["batch", "rows", D]), *inputs],
        [value("y", FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in tensors.items() if name in used],
    )
    return helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)])


def check(model: onnx.ModelProto, **feeds: np.ndarray) -> None:
    """Check that layers and attention are claimed, and that the output is within the error of bf16 layers."""
    session = provider_session(model, ep__ortolanexecutionprovider__precision="bf16")
    assert {"layer_q", "layer_k", "layer_v", "softmax"} <= set(claimed(session))
    feeds["x"] = np.random.default_rng(1).standard_normal((BATCH, ROWS, D)).astype(np.float32)
    (y,), (expected,) = session.run(None, feeds), plain_session(model).run(None, feeds)
    assert np.isfinite(expected).all() and relative_error(expected, y) < 0.02


CAUSAL = ~np.tril(np.ones((ROWS, ROWS), bool))[None, None]


@pytest.mark.parametrize("hidden", ["left padding", "everything"])
def test_conditions_one_behind_the_other(hidden: str) -> None:
    """Two conditions in a row. Masked scores are the lowest float, so fully masked rows give the mean of the values."""
    padding = np.zeros((BATCH, 1, 1, ROWS), bool)
    padding[0, ..., : ROWS if hidden == "everything" else 2] = True
    inputs = [value("padding", BOOL, ["batch", 1, 1, "keys"]), value("causal", BOOL, [1, 1, "rows", "keys"])]
    model = attention([("Where", "padding"), ("Where", "causal")], inputs)
    check(model, padding=padding, causal=CAUSAL)


def test_a_condition_behind_a_mask_of_the_lowest_float() -> None:
    mask = np.zeros((BATCH, 1, 1, ROWS), np.float32)
    mask[0, ..., :2] = np.finfo(np.float32).min
    inputs = [value("mask", FLOAT, ["batch", 1, 1, "keys"]), value("causal", BOOL, [1, 1, "rows", "keys"])]
    check(attention([("Add", "mask"), ("Where", "causal")], inputs), mask=mask, causal=CAUSAL)


@pytest.mark.parametrize("first", [False, True])
def test_a_layer_makes_the_mask(first: bool) -> None:
    """A linear layer computes the mask; adding the mask must not be fused into the layer as its residual."""
    layer = node("MatMul", ["f", "w_bias"], ["bias"], name="bias_layer")
    model = attention([("Add", "bias")], [value("f", FLOAT, ["batch", HEADS, "rows", 8])], [layer])
    if first:
        nodes = [layer, *(one for one in model.graph.node if one.name != "bias_layer")]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    check(model, f=np.random.default_rng(2).standard_normal((BATCH, HEADS, ROWS, 8)).astype(np.float32))


@pytest.mark.parametrize("width", [1, WIDTH])
def test_zeros_in_the_place_of_rows(width: int) -> None:
    """A condition per row may set rows to zero; a condition per element stays outside the attention."""
    zero = np.zeros((BATCH, 1, ROWS, width), bool)
    zero[0, 0, 1, -1] = True
    model = attention([], [value("rows_of_zeros", BOOL, ["batch", 1, "rows", width])], zero_rows="rows_of_zeros")
    check(model, rows_of_zeros=zero)


def test_sizes_of_what_hangs_on_a_layer() -> None:
    """A mask that is sliced to a size computed from the query layer, which is then no part of the attention's step."""
    more = [
        node("Relu", ["y_q"], ["positive"]),
        node("Shape", ["positive"], ["sizes"]),
        node("Gather", ["sizes", "one"], ["end"], axis=0),
        node("Slice", ["mask", "start", "end", "axis"], ["cut"]),
    ]
    model = attention([("Add", "cut")], [value("mask", FLOAT, ["batch", 1, 1, "most"])], more)
    for name, number in (("one", 1), ("start", 0), ("axis", 3)):
        model.graph.initializer.append(numpy_helper.from_array(np.array([number]), name))
    check(model, mask=np.zeros((BATCH, 1, 1, 9), np.float32))


@pytest.mark.parametrize("kind", ["condition", "zero rows"])
def test_truth_values_that_are_other_bytes(kind: str) -> None:
    """Callers may feed any bytes as bool; all except 0 mean true."""
    if kind == "condition":
        model = attention([("Where", "hidden")], [value("hidden", BOOL, ["batch", 1, "rows", "keys"])])
        fed = np.zeros((BATCH, 1, ROWS, ROWS), np.uint8)
        fed[:, :, :, :3] = [2, 128, 255]
    else:
        model = attention([], [value("hidden", BOOL, ["batch", 1, "rows", 1])], zero_rows="hidden")
        fed = np.zeros((BATCH, 1, ROWS, 1), np.uint8)
        fed[0, 0, :3, 0] = [2, 128, 255]
    session = provider_session(model, ep__ortolanexecutionprovider__precision="bf16")
    assert "softmax" in claimed(session)
    x = np.random.default_rng(1).standard_normal((BATCH, ROWS, D)).astype(np.float32)
    answers = [session.run(None, {"x": x, "hidden": mask})[0] for mask in (fed.view(bool), fed != 0)]
    np.testing.assert_array_equal(*answers)
