"""Attention as exporters write it becomes NoMADAttention and answers as before; what is none stays, with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan import OptimizationReport, Recipe, RecipeError
from ortolan.models import tiny

from .attention_graphs import (
    BOOL,
    FLOAT,
    INT64,
    LOWEST,
    D,
    Graph,
    H,
    S,
    W,
    feeds,
    plain,
    size_of_rows,
    zeros_for_rows_without_keys,
)
from .small_models import op_types, random_weight, relative_error, run


def recipe(*others: dict[str, Any], **options: Any) -> Recipe:
    steps = [{"name": "normalize"}, *others, {"name": "fuse_attention", **options}, {"name": "verify", "seconds": 0.0}]
    return Recipe.from_dict({"name": "fused", "pass": sorted(steps, key=lambda step: step["name"] == "verify")})


def usual(graph: Graph) -> str:
    return graph.merge(graph.op("MatMul", *plain(graph)))


def no_mask(graph: Graph) -> str:
    return graph.merge(graph.op("MatMul", *plain(graph, mask=False)))


def mask_first_and_scaled_query(graph: Graph) -> str:
    """Queries scaled before they are split, keys transposed twice, the mask in front."""
    q = graph.op("Mul", graph.linear("q"), graph.number(D**-0.5))
    key = graph.transpose(graph.heads(graph.linear("kk")), 0, 1, 3, 2)
    scores = graph.op("Add", graph.additive_mask(), graph.op("MatMul", graph.heads(q), key))
    weights = graph.op("Softmax", scores)
    return graph.merge(graph.op("MatMul", weights, graph.heads(graph.linear("vvv"))), 0, -1, W)


def shape_chains(graph: Graph) -> str:
    """As TorchScript writes scaled_dot_product_attention: shapes asked for, the scale worked out from one of them."""

    def size(x: str, axis: int) -> str:
        one = graph.op("Gather", graph.op("Shape", x), np.array(axis, np.int64), axis=0)
        return graph.op("Unsqueeze", one, np.array([0], np.int64))

    def view(x: str, *last: int) -> str:
        shape = graph.op("Concat", size("x", 0), size("x", 1), np.array(last, np.int64), axis=0)
        return graph.op("Reshape", x, shape, allowzero=0)

    q = graph.transpose(view(graph.linear("q"), -1, D), 0, 2, 1, 3)
    width = graph.op("Slice", graph.op("Shape", q), np.array([-1]), np.array([2**63 - 1]))
    root = graph.op("Sqrt", graph.op("Cast", width, to=FLOAT))
    scale = graph.op("Sqrt", graph.op("Div", np.array([1], np.float32), root))
    key = graph.transpose(view(graph.linear("kk"), -1, D), 0, 2, 3, 1)
    scores = graph.op("MatMul", graph.op("Mul", q, scale), graph.op("Mul", key, scale))
    weights = graph.op("Softmax", graph.op("Add", scores, graph.additive_mask()), axis=-1)
    value = graph.transpose(view(graph.linear("vvv"), -1, D), 0, 2, 1, 3)
    merged = graph.transpose(graph.op("MatMul", weights, value), 0, 2, 1, 3)
    shape = graph.op("Concat", size(merged, 0), size(merged, 1), np.array([W]), axis=0)
    return graph.op("Reshape", merged, shape)


def keys_by_way_of_three_dimensions(graph: Graph) -> str:
    """As the dynamo exporter transposes them."""
    heads = graph.heads(graph.linear("kk"))
    shape = graph.op("Shape", heads)
    rows = graph.op("Slice", shape, np.array([2]), np.array([3]))
    flat = graph.op("Reshape", heads, graph.op("Concat", np.array([-1]), rows, np.array([D]), axis=0))
    batch = graph.op("Shape", heads, start=0, end=1)
    back = graph.op("Concat", batch, np.array([H, D]), rows, axis=0)
    key = graph.op("Reshape", graph.transpose(flat, 0, 2, 1), back)
    scores = graph.op("Mul", graph.op("MatMul", graph.heads(graph.linear("q")), key), graph.number(D**-0.5))
    weights = graph.op("Softmax", graph.op("Add", scores, graph.additive_mask()), axis=-1)
    return graph.merge(graph.op("MatMul", weights, graph.heads(graph.linear("vvv"))))


def filled(hides: bool, fill: float = LOWEST) -> Callable[[Graph], str]:
    """As DistilBERT has it: scores replaced where a mask, made as large as they are, says so."""

    def build(graph: Graph) -> str:
        q, k, v = (graph.linear(name) for name in ("q", "kk", "vvv"))
        query = graph.op("Div", graph.heads(q), graph.number(D**0.5))
        scores = graph.op("MatMul", query, graph.transpose(graph.heads(k), 0, 1, 3, 2))
        condition = graph.hidden() if hides else graph.op("Not", graph.hidden())
        large = graph.op("Cast", graph.op("Expand", condition, graph.op("Shape", scores)), to=BOOL)
        branches = [graph.number(fill), scores] if hides else [scores, graph.number(fill)]
        weights = graph.op("Softmax", graph.op("Where", large, *branches), axis=-1)
        return graph.merge(graph.op("MatMul", weights, graph.heads(v)))

    return build


def zeros_for_nan(graph: Graph) -> str:
    """As PyTorch exports masks of truth values."""
    q, k, v = (graph.linear(name) for name in ("q", "kk", "vvv"))
    scores = graph.op("MatMul", graph.heads(q), graph.transpose(graph.heads(k), 0, 1, 3, 2))
    mask = graph.op("Where", graph.hidden(), graph.number(-np.inf), graph.number(0))
    weights = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
    weights = graph.op("Where", graph.op("IsNaN", weights), graph.number(0), weights)
    return graph.merge(graph.op("MatMul", weights, graph.heads(v)))


def position_bias(graph: Graph) -> str:
    """By the distance of key and query, as TorchScript writes MPNet's and T5's: [batch, H, rows, rows]."""
    batch, rows = (graph.op("Gather", graph.op("Shape", "x"), np.array(axis, np.int64), axis=0) for axis in (0, 1))
    positions = graph.op("Range", np.array(0, np.int64), rows, np.array(1, np.int64))
    distance = graph.op("Sub", *(graph.op("Unsqueeze", positions, np.array([axis], np.int64)) for axis in (0, 1)))
    bucket = graph.op("Add", graph.op("Max", graph.op("Min", distance, np.array(3)), np.array(-3)), np.array(3))
    bias = graph.transpose(graph.op("Gather", random_weight(7, H, seed=5), bucket, axis=0), 2, 0, 1)
    bias = graph.op("Unsqueeze", bias, np.array([0], np.int64))
    sizes = [graph.op("Unsqueeze", size, np.array([0], np.int64)) for size in (batch, rows, rows)]
    wanted = graph.op("Concat", sizes[0], np.array([-1]), *sizes[1:], axis=0)
    ones = graph.op("ConstantOfShape", np.array([4], np.int64), value=helper.make_tensor("one", INT64, [1], [1]))
    whole = graph.op("Equal", wanted, np.array(-1, np.int64))
    return graph.op("Expand", bias, graph.op("Where", whole, ones, wanted))


def masked_by(*makers: Callable[[Graph], str], joined: bool = False) -> Callable[[Graph], str]:
    """These are added to the scores, one after the other; joined: after they were added to each other."""

    def build(graph: Graph) -> str:
        q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
        added = [make(graph) for make in makers]
        if joined:
            added = [graph.op("Add", *added)]
        scores = graph.op("Mul", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), graph.number(D**-0.5))
        for one in added:
            scores = graph.op("Add", scores, one)
        return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))

    return build


def filled_and_biased(graph: Graph) -> str:
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    scores = graph.op("Add", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), position_bias(graph))
    scores = graph.op("Where", graph.hidden(), graph.number(LOWEST), scores)
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))


def no_bias(graph: Graph) -> str:
    graph.weights["zero"] = np.zeros(1, np.float32)
    return "zero"


def causal(graph: Graph) -> str:
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    scores = graph.op("Add", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), causal_mask(graph, q, k))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))


def causal_mask(graph: Graph, *rows_of: str) -> str:
    sizes = [graph.op("Slice", graph.op("Shape", x), np.array([-2]), np.array([-1])) for x in rows_of]
    ones = graph.op("Expand", np.array([1], np.float32), graph.op("Concat", *sizes, axis=0))
    above = graph.op("Equal", graph.op("Trilu", ones, upper=0), np.array([0], np.float32))
    return graph.op("Where", above, np.array([-np.inf], np.float32), np.array([0], np.float32))


def multi_head_attention(graph: Graph) -> str:
    inputs = [graph.linear(name) for name in ("q", "kk", "vvv")]
    shape = graph.op(
        "Concat", graph.op("Shape", "x", start=0, end=1), np.array([H]), *[size_of_rows(graph)] * 2, axis=0
    )
    mask = graph.op("Expand", graph.additive_mask(), shape)
    return graph.op("MultiHeadAttention", *inputs, "", "", mask, domain="com.microsoft", num_heads=H)


def onnx_attention(graph: Graph) -> str:
    """Of the layers' outputs, with fewer heads of keys and values, and a mask of truth values."""
    graph.opset = 23
    q, k, v = graph.linear("q"), graph.linear("kk", width=2 * D), graph.linear("vvv", width=2 * D)
    rows = size_of_rows(graph)
    # ONNX Runtime wants a row for each query.
    shape = graph.op("Concat", graph.op("Shape", "x", start=0, end=1), np.array([1]), rows, rows, axis=0)
    shown = graph.op("Expand", graph.op("Not", graph.hidden()), shape)
    return graph.op("Attention", q, k, v, shown, q_num_heads=H, kv_num_heads=2, scale=0.3)


def onnx_attention_of_heads(graph: Graph) -> str:
    graph.opset = 23
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    return graph.merge(graph.op("Attention", q, k, v, is_causal=1))


FORMS = {
    "usual": usual,
    "no mask": no_mask,
    "mask first": mask_first_and_scaled_query,
    "shape chains": shape_chains,
    "three dimensions": keys_by_way_of_three_dimensions,
    "filled": filled(hides=True),
    "filled with -Inf": filled(hides=False, fill=-np.inf),
    "zeros for NaN": zeros_for_nan,
    "zeros for rows without keys": zeros_for_rows_without_keys(),
    "position bias": masked_by(position_bias),
    "position bias and mask": masked_by(position_bias, Graph.additive_mask),
    "mask, nothing and position bias": masked_by(Graph.additive_mask, no_bias, position_bias),
    "position bias and mask in one": masked_by(position_bias, Graph.additive_mask, joined=True),
    "filled and biased": filled_and_biased,
    "causal": causal,
    "causal and padding": masked_by(lambda graph: causal_mask(graph, "x", "x"), Graph.additive_mask),
    "MultiHeadAttention": multi_head_attention,
    "Attention": onnx_attention,
    "Attention of heads": onnx_attention_of_heads,
}


def answers(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> list[np.ndarray]:
    """By our kernels, and without the library."""
    return [run(model, given, library=library)[0] for library in (True, False)]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_one_node(form: str) -> None:
    graph = Graph()
    model = graph.model(FORMS[form](graph))
    report = ortolan.optimize_onnx(model, recipe=recipe())
    fused = report.model
    assert fused is not None
    onnx.checker.check_model(fused, full_check=True)
    left = op_types(fused)
    assert left.count("NoMADAttention") == 1
    # Nothing of what it took apart is left, nor what only its shapes were computed with.
    gone = {"Softmax", "Transpose", "Reshape", "Gather", "IsNaN", "Trilu", "MultiHeadAttention", "Attention"}
    # But what makes the mask is.
    gone -= {"Transpose", "Gather"} if "bias" in form else {"Trilu"} if "padding" in form else set()
    assert not gone & set(left) and left.count("MatMul") == 3
    for rows in (1, S, 70):
        given = feeds(model, rows)
        (expected,) = run(model, given)
        for found in answers(fused, given):
            assert relative_error(expected, found) < 1e-5


def test_rows_that_see_nothing_stay_what_they_were() -> None:
    for form in (
        "usual",
        "filled",
        "zeros for NaN",
        "zeros for rows without keys",
        "position bias and mask",
        "filled and biased",
    ):
        graph = Graph()
        model = graph.model(FORMS[form](graph))
        given = feeds(model)
        given["mask"][:] = 0
        (expected,) = run(model, given)
        assert np.isfinite(expected).all()
        for found in answers(ortolan.optimize_onnx(model, recipe=recipe()).model, given):
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_shared_mask_stands_before_all_that_read_it() -> None:
    """The first Softmax's heads are merged last."""
    graph = Graph()
    bias, mask = position_bias(graph), graph.additive_mask()
    contexts = []
    for index in range(2):
        q, k, v = (graph.heads(graph.linear(name)) for name in ("q" * (index + 1), "kkk" * (index + 1), "v"))
        scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
        for one in (bias, mask):
            scores = graph.op("Add", scores, one)
        contexts.append(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))
    second, first = graph.merge(contexts[1]), graph.merge(contexts[0])
    model = graph.model(graph.op("Sub", first, second))
    fused = ortolan.optimize_onnx(model, recipe=recipe()).model
    assert fused is not None and op_types(fused).count("NoMADAttention") == 2
    onnx.checker.check_model(fused, full_check=True)
    given = feeds(model)
    (expected,) = run(model, given)
    for found in answers(fused, given):
        assert relative_error(expected, found) < 1e-5


def reasons(report: OptimizationReport) -> list[str]:
    return [note for note in report.notes if "attention not fused" in note]


def other_axis(graph: Graph) -> str:
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=1), v))


def shown_weights(graph: Graph) -> str:
    weights, value = plain(graph)
    graph.nodes.append(helper.make_node("Identity", [weights], ["weights"], "/shown"))
    graph.outputs["weights"] = (FLOAT, ["batch", H, "rows", "rows"])
    return graph.merge(graph.op("MatMul", weights, value))


def used_scores(graph: Graph) -> str:
    weights, value = plain(graph)
    y = graph.merge(graph.op("MatMul", weights, value))
    return graph.op("Add", y, graph.op("ReduceMax", weights))


def learned_scale(graph: Graph) -> str:
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
    scores = graph.op("Mul", scores, np.full((H, 1, 1), 0.2, np.float32))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))


def unknown_heads(graph: Graph) -> str:
    graph.inputs["shape"] = (INT64, [4])
    q, k, v = (
        graph.transpose(graph.op("Reshape", graph.linear(name), "shape"), 0, 2, 1, 3) for name in ("q", "kk", "vvv")
    )
    scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))


def other_width_of_values(graph: Graph) -> str:
    q, k = (graph.heads(graph.linear(name)) for name in ("q", "kk"))
    v = graph.transpose(graph.reshape(graph.linear("vvv", width=2 * W), 0, 0, H, 2 * D), 0, 2, 1, 3)
    graph.outputs["y"] = (FLOAT, ["batch", "rows", 2 * W])
    scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v), 0, 0, 2 * W)


def half(graph: Graph) -> str:
    x = graph.op("Cast", "x", to=TensorProto.FLOAT16)
    q, k, v = (graph.heads(graph.op("MatMul", x, random_weight(W, W, dtype=np.float16))) for _ in range(3))
    scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
    y = graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))
    return graph.op("Cast", y, to=FLOAT)


def capped(graph: Graph) -> str:
    graph.opset = 23
    q, k, v = (graph.linear(name) for name in ("q", "kk", "vvv"))
    return graph.op("Attention", q, k, v, q_num_heads=H, kv_num_heads=H, softcap=5.0)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (other_axis, "its Softmax is not over the last axis"),
        (shown_weights, "inside of it is an output of the graph, or makes one"),
        (used_scores, "inside of it is also used by ReduceMax|is an output of the graph, or makes one"),
        (learned_scale, "scales its scores by a number that is not known"),
        (filled(hides=True, fill=-10000.0), "replaces scores by something else than -Inf or the lowest float"),
        (unknown_heads, "is not understood"),
        (other_width_of_values, r"are \[12, 12, 24\] wide, expected the same"),
        (half, "is FLOAT16, expected FLOAT"),
        (capped, r"its scores are capped \(softcap\)"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_is_something_else_stays(form: Callable[[Graph], str], reason: str) -> None:
    graph = Graph()
    model = graph.model(form(graph))
    report = ortolan.optimize_onnx(model, recipe=Recipe.from_dict(recipe().to_dict() | {"pass": UNVERIFIED}))
    assert report.model is not None and "NoMADAttention" not in op_types(report.model)
    (note,) = reasons(report)
    assert re.search(reason, note), note


UNVERIFIED = [{"name": "normalize"}, {"name": "fuse_attention"}]


def test_a_classifier_is_no_attention() -> None:
    graph = Graph()
    graph.outputs["y"] = (FLOAT, ["batch", "rows", W])
    model = graph.model(graph.op("Softmax", graph.linear("q"), axis=-1))
    assert ortolan.optimize_onnx(model, recipe=recipe()).notes[0] == "no attention was found: nothing to fuse"


def test_selectors_and_report() -> None:
    model = onnx_model(tiny.tiny_bert())
    report = ortolan.optimize_onnx(model, recipe=recipe(exclude=["*layer.1*"]))
    assert op_types(report.model).count("NoMADAttention") == 1
    assert any("attention not fused: excluded" in note and "layer.1" in note for note in report.notes)
    fused = [layer for layer in report.layers if layer.new_op == "NoMADAttention"]
    assert [layer.status for layer in fused] == ["replaced"] * 2 and all("layer.0" in layer.name for layer in fused)
    kept = [layer for layer in report.layers if "layer.1/attention/self/MatMul" in layer.name]
    assert all(layer.status == "kept" and layer.reason for layer in kept) and len(kept) == 2
    report = ortolan.optimize_onnx(model, recipe=recipe(select=["*nowhere*"]))
    assert any("pattern '*nowhere*' of fuse_attention.select matches no layer" in note for note in report.notes)
    assert "2 more" not in str(report) and "not selected" in str(report)


def onnx_model(model: Any) -> onnx.ModelProto:
    import onnx_ir as ir

    proto: onnx.ModelProto = ir.to_proto(model)
    return proto


def bert_feeds(rows: int = 20) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    mask = np.ones((2, rows), np.int64)
    mask[1, rows // 3 :] = 0
    ids = rng.integers(0, 101, (2, rows))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("portable", [True, False])
def test_an_encoder(precision: str, portable: bool) -> None:
    model = onnx_model(tiny.tiny_bert())
    report = ortolan.optimize_onnx(model, recipe=recipe(precision=precision), portable=portable)
    assert report.model is not None
    assert op_types(report.model).count("NoMADAttention") == 2 and "Softmax" not in op_types(report.model)
    nodes = [node for node in report.model.graph.node if node.op_type == "NoMADAttention"]
    attributes = [{one.name: helper.get_attribute_value(one) for one in node.attribute} for node in nodes]
    assert {one["precision"] for one in attributes} == {32 if precision == "f32" else 16}
    assert [node.name for node in nodes] == [f"/encoder/layer.{index}/attention/self/Softmax" for index in range(2)]
    for rows in (5, 64):
        (expected,) = run(model, bert_feeds(rows))
        (found,) = run(report.model, bert_feeds(rows), library=True)
        assert relative_error(expected, found) < (1e-5 if precision == "f32" else 1e-2)
        if portable:
            assert relative_error(expected, run(report.model, bert_feeds(rows))[0]) < 1e-5


@pytest.mark.parametrize("bits", [8, 4])
def test_with_quantized_layers(bits: int) -> None:
    """The layers around it are found, and replaced, as without it; what the model answers changes by its own part."""
    model = onnx_model(tiny.tiny_bert())
    op = {8: "SparseAMXMatMul", 4: "W4A8MatMul"}[bits]
    quantize: dict[str, Any] = {"name": "quantize", "bits": bits} | ({"group_size": 32} if bits == 4 else {})
    steps = [{"name": "normalize"}, {"name": "calibrate"}, quantize]
    ends = [{"name": "replace", "op": op, "may_grow": True}, {"name": "verify", "seconds": 0.0}]

    def optimized(*middle: dict[str, Any]) -> onnx.ModelProto:
        chosen = Recipe.from_dict({"name": "both", "pass": [*steps, *middle, *ends]})
        result = ortolan.optimize_onnx(model, recipe=chosen).model
        assert result is not None
        return result

    without, fused = optimized(), optimized({"name": "fuse_attention"})
    # Query, key and value become one node.
    assert op_types(without).count(op) == 12 and op_types(fused).count(op) == 8
    assert op_types(fused).count("NoMADAttention") == 2 and "MatMul" not in op_types(fused)
    (expected,), (found,) = (run(one, bert_feeds(), library=True) for one in (without, fused))
    assert relative_error(expected, found) < 0.03  # roundings that fell the other way


def mpnet_feeds(rows: int) -> dict[str, np.ndarray]:
    feeds = bert_feeds(rows)
    return {"input_ids": np.where(feeds["attention_mask"], feeds["input_ids"], 1)} | {
        "attention_mask": feeds["attention_mask"]
    }


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_an_encoder_with_a_position_bias(precision: str) -> None:
    """All layers add the same bias and the same mask: what they share is added once."""
    model = onnx_model(tiny.tiny_mpnet(num_hidden_layers=3))
    report = ortolan.optimize_onnx(model, recipe=recipe(precision=precision))
    assert report.model is not None
    nodes = [node for node in report.model.graph.node if node.op_type == "NoMADAttention"]
    assert len(nodes) == 3 and "Softmax" not in op_types(report.model)
    (shared,) = {node.input[1] for node in nodes}
    (maker,) = (node for node in report.model.graph.node if shared in node.output)
    before = [node for node in model.graph.node if set(maker.input) <= set(node.input)]
    assert maker.op_type == "Add" and set(maker.input) == {"/encoder/Expand_output_0", "/Mul_output_0"} and not before
    for rows in (5, 62):
        (expected,) = run(model, mpnet_feeds(rows))
        (found,) = run(report.model, mpnet_feeds(rows), library=True)
        assert relative_error(expected, found) < (1e-5 if precision == "f32" else 1e-2)
        assert relative_error(expected, run(report.model, mpnet_feeds(rows))[0]) < 1e-5


def test_dry_run_changes_nothing() -> None:
    model = onnx_model(tiny.tiny_bert())
    report = ortolan.optimize_onnx(model, recipe=recipe(), dry_run=True)
    assert any("2 attention(s) would become NoMADAttention" in note for note in report.notes)
    assert [layer.status for layer in report.layers].count("would replace") == 4


def test_it_needs_normalize() -> None:
    graph = Graph(opset=11)
    y = graph.reshape(graph.op("MatMul", "x", random_weight(W, W)), 0, 0, W)
    with pytest.raises(RecipeError, match="needs pass 'normalize' before it"):
        ortolan.optimize_onnx(graph.model(y), recipe=Recipe.from_dict({"name": "r", "pass": UNVERIFIED[1:]}))


def test_decoders_with_rotated_keys_stay() -> None:
    model = onnx_model(tiny.tiny_llama())
    report = ortolan.optimize_onnx(model, recipe=Recipe.from_dict({"name": "r", "pass": UNVERIFIED}))
    assert "NoMADAttention" not in op_types(report.model) and reasons(report)
