"""Query, key and value of an attention are joined to one node if all attentions of the model allow it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import ortolan
from ortolan import Recipe

from .attention_graphs import B, Graph, H, S, W, attend
from .small_models import op_types, random_weight, relative_error, run

OPS = {"VNNISpMM": 8, "SparseAMXMatMul": 8, "W4A8MatMul": 4}


def recipe(op: str = "VNNISpMM", **replace: Any) -> Recipe:
    bits = OPS[op]
    steps: list[dict[str, Any]] = [
        {"name": "normalize"},
        {"name": "calibrate"},
        {"name": "quantize", "bits": bits} | ({"group_size": 32} if bits == 4 else {}),
        {"name": "fuse_attention"},
        {"name": "replace", "op": op, "may_grow": True, **replace},
        {"name": "verify", "seconds": 0.0},
    ]
    return Recipe.from_dict({"name": "packed", "pass": steps})


def attention(graph: Graph, x: str = "x", kv_heads: int = H, names: str = "qkv", **inputs: str) -> str:
    """Add an attention whose layers have these names. inputs: values that a layer reads instead of x, by layer name."""
    head = W // H
    q, k, v = (
        graph.linear(name, inputs.get(name, x), W if name == "q" else kv_heads * head) for name in ("q", "key", "value")
    )
    return attend(graph, q, k, v, kv_heads)


def optimized(model: onnx.ModelProto, chosen: Recipe | None = None) -> ortolan.OptimizationReport:
    return ortolan.optimize_onnx(model, recipe=chosen or recipe())


def check(model: onnx.ModelProto, report: ortolan.OptimizationReport, tolerance: float, **others: np.ndarray) -> None:
    """Check the answers with the operator library and without it."""
    onnx.checker.check_model(report.model)
    feeds = {"x": np.random.default_rng(0).standard_normal((B, S, W), dtype=np.float32), **others}
    for library in (True, False):
        for expected, found in zip(run(model, feeds), run(report.model, feeds, library), strict=True):
            assert relative_error(expected, found) < tolerance


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("masked", [False, True])
def test_one_node_makes_all_three(op: str, masked: bool) -> None:
    graph = Graph()
    others = {}
    if masked:
        q, k, v = (graph.linear(name) for name in ("q", "key", "value"))
        scores = graph.op("MatMul", graph.heads(q), graph.transpose(graph.reshape(k, 0, 0, H, W // H), 0, 2, 3, 1))
        scores = graph.op("Add", graph.op("Div", scores, graph.number(3.5)), graph.additive_mask())
        y = graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), graph.heads(v)))
        others["mask"] = np.ones((B, S), np.int64)
        others["mask"][1, 4:] = 0
    else:
        y = attention(graph)
    model = graph.model(y)
    report = optimized(model, recipe(op))
    check(model, report, 0.15 if op == "W4A8MatMul" else 0.02, **others)
    assert op_types(report.model).count(op) == 1
    node = next(node for node in report.model.graph.node if node.op_type == "NoMADAttention")
    assert len(node.input) == 2
    fused = [layer.fused for layer in report.layers if layer.new_op == op]
    assert fused == [["key", "value"], ["into the query"], ["into the query"]]
    assert all(layer.output_error is not None and layer.bytes_after for layer in report.layers if layer.new_op == op)


def test_of_fewer_heads_of_keys_and_values() -> None:
    graph = Graph(opset=23)
    model = graph.model(attention(graph, kv_heads=2))
    report = optimized(model)
    assert op_types(report.model).count("VNNISpMM") == 1
    check_alone = run(report.model, {"x": np.ones((B, S, W), np.float32)}, library=True)[0]
    portable = run(report.model, {"x": np.ones((B, S, W), np.float32)})[0]
    assert relative_error(portable, check_alone) < 1e-3


def test_layers_of_several_inputs_stay_apart() -> None:
    """One attention has two inputs. All attentions stay separate, because they share one ONNX function."""
    graph = Graph()
    one = attention(graph)
    other = graph.op("Neg", one)
    model = graph.model(attention(graph, one, q=other))
    report = optimized(model)
    assert op_types(report.model).count("VNNISpMM") == 6
    check(model, report, 0.05)


def test_a_layer_that_stays_keeps_the_others_apart() -> None:
    graph = Graph()
    model = graph.model(attention(graph))
    name = next(node.name for node in model.graph.node if node.op_type == "MatMul")
    report = optimized(model, recipe(exclude=[name]))
    assert op_types(report.model).count("VNNISpMM") == 2
    check(model, report, 0.02)


def test_a_value_that_others_see_stays() -> None:
    graph = Graph()
    q, k, v = (graph.linear(name) for name in ("q", "key", "value"))
    model = graph.model(graph.op("Add", attend(graph, q, k, v), k))
    report = optimized(model)
    assert op_types(report.model).count("VNNISpMM") == 3
    check(model, report, 0.02)


def test_without_fusing() -> None:
    graph = Graph()
    model = graph.model(attention(graph))
    assert op_types(optimized(model, recipe(fuse=False)).model).count("VNNISpMM") == 3


def test_two_attentions_of_one_weight_share_it() -> None:
    graph = Graph()
    weights = [random_weight(W, W, seed=seed) for seed in range(3)]
    for name, weight in zip("qkv", weights, strict=True):
        graph.weights[name] = weight

    def attention_of(x: str) -> str:
        return attend(graph, *(graph.op("MatMul", x, name) for name in "qkv"))

    model = graph.model(attention_of(attention_of("x")))
    report = optimized(model)
    nodes = [node for node in report.model.graph.node if node.op_type == "VNNISpMM"]
    assert len(nodes) == 2 and nodes[0].input[1:5] == nodes[1].input[1:5]
    check(model, report, 0.05)
