"""Attention as exporters write it is replaced by NoMADAttention with the same answers.

Graphs that only look like attention stay unchanged, and a note has the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ortolan
from ortolan import OptimizationReport, Recipe, RecipeError
from ortolan.models import tiny

from .attention_forms import (
    FORMS,
    capped_below_zero,
    capped_by_tanh,
    divided_by_infinity,
    filled,
    half,
    learned_scale,
    other_axis,
    other_width_of_values,
    position_bias,
    shown_weights,
    unknown_heads,
    used_scores,
    with_sinks,
)
from .attention_graphs import FLOAT, Graph, S, W, feeds
from .small_models import op_types, random_weight, relative_error, run


def recipe(*others: dict[str, Any], **options: Any) -> Recipe:
    steps = [{"name": "normalize"}, *others, {"name": "fuse_attention", **options}, {"name": "verify", "seconds": 0.0}]
    return Recipe.from_dict({"name": "fused", "pass": sorted(steps, key=lambda step: step["name"] == "verify")})


def answers(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the model's answers with the operator library, and without it."""
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
    # All nodes of the attention are gone, including nodes that computed its shapes.
    gone = {"Softmax", "Tanh", "Transpose", "Reshape", "Gather", "IsNaN", "Trilu", "MultiHeadAttention", "Attention"}
    # Nodes that compute the mask remain.
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
        "Attention with zeros for rows without keys",
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
    """Two attentions share a mask; the one with the first Softmax merges its heads last."""
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


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (other_axis, "its Softmax is not over the last axis"),
        (shown_weights, "its intermediate value .* is an output of the graph, or computes one"),
        (used_scores, "its intermediate value .* is also used by ReduceMax|is an output of the graph, or computes one"),
        (learned_scale, "scales its scores by a factor that is not constant"),
        (divided_by_infinity, "scales its scores by a factor that is not constant, or not finite and nonzero"),
        (filled(hides=True, fill=-10000.0), "replaces scores by a value other than -Inf or the lowest float"),
        (unknown_heads, "is not supported"),
        (other_width_of_values, r"are \[12, 12, 24\], expected equal widths"),
        (half, "is FLOAT16, expected FLOAT"),
        (capped_below_zero, r"its scores are capped \(softcap\) at -1, expected "),
        (capped_by_tanh(mask_first=True), r"by a Tanh \(softcap\) after a mask is added, expected before"),
        (capped_by_tanh(caps=2), r"by two Tanh \(softcap\)"),
        (with_sinks(scaled=True), r"adds a column to its scores, expected two inputs and no step between it and the"),
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
    assert ortolan.optimize_onnx(model, recipe=recipe()).notes[0] == "no attention was found"


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
    assert "2 more" not in report.details() and "not selected" in str(report)


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
    """Linear layers are replaced as without the pass; only the rounding in attention changes the answers."""
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
    # Query, key and value layers are joined to one node.
    assert op_types(without).count(op) == 12 and op_types(fused).count(op) == 8
    assert op_types(fused).count("NoMADAttention") == 2 and "MatMul" not in op_types(fused)
    (expected,), (found,) = (run(one, bert_feeds(), library=True) for one in (without, fused))
    assert relative_error(expected, found) < 0.03  # caused by activations that round to the next int8 step


def mpnet_feeds(rows: int) -> dict[str, np.ndarray]:
    feeds = bert_feeds(rows)
    return {"input_ids": np.where(feeds["attention_mask"], feeds["input_ids"], 1)} | {
        "attention_mask": feeds["attention_mask"]
    }


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_an_encoder_with_a_position_bias(precision: str) -> None:
    """All layers add the same bias and mask, so their sum is computed once."""
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
    assert any("2 attentions would become one NoMADAttention each" in note for note in report.notes)
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


@pytest.mark.parametrize("where", [None, "everywhere"])
def test_reproducible_reaches_the_nodes(where: str | None) -> None:
    model = onnx_model(tiny.tiny_bert())
    report = ortolan.optimize_onnx(model, recipe=recipe(precision="bf16"), reproducible=where)
    assert report.model is not None
    nodes = [node for node in report.model.graph.node if node.op_type == "NoMADAttention"]
    assert nodes
    for node in nodes:
        told = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        assert (told["precision"], told.get("reproducible")) == (16, where and where.encode())
    (function,) = (one for one in report.model.functions if one.name == "NoMADAttention")
    assert ["reproducible" in {one.name for one in function.attribute_proto}] == [where is not None]


def test_reproducible_needs_bf16() -> None:
    with pytest.raises(RecipeError, match=r'reproducible = "everywhere" needs precision = "bf16"; precision is "f32"'):
        recipe(precision="f32", reproducible="everywhere")
