"""Attention whose heads cannot be traced to linear layers: NoMADAttention then reads inputs split into heads.

The file also has graphs that only look like attention.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import ortolan
from ortolan import Recipe

from .attention_graphs import FLOAT, D, Graph, H, S, W, feeds, plain, zeros_for_rows_without_keys
from .small_models import op_types, random_weight, relative_error, run

PASSES = [{"name": "normalize"}, {"name": "fuse_attention"}, {"name": "verify", "seconds": 0.0}]


def interleaved(graph: Graph) -> str:
    """Use a layout where heads are the last axis: [batch, rows, head width, heads]."""
    q, k, v = (graph.transpose(graph.reshape(graph.linear(n), 0, 0, D, H), 0, 3, 1, 2) for n in ("q", "kk", "vvv"))
    scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))


def scaled_mask(graph: Graph) -> str:
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    scores = graph.op("Add", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), graph.additive_mask())
    return graph.merge(graph.op("MatMul", graph.op("Softmax", graph.op("Mul", scores, graph.number(2)), axis=-1), v))


def heads_stay(graph: Graph) -> str:
    graph.outputs["y"] = (FLOAT, ["batch", H, "rows", D])
    return graph.op("Neg", graph.op("MatMul", *plain(graph)))


def rotated(graph: Graph) -> str:
    """A Sin node changes the query heads before they are multiplied by the keys."""
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    scores = graph.op("MatMul", graph.op("Sin", q), graph.transpose(k, 0, 1, 3, 2))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))


def rotated_for_attention(graph: Graph) -> str:
    """torch's exporter: ONNX's Attention of rotated queries and keys, which are shared by two query heads each."""
    graph.opset = 23
    q = graph.op("Sin", graph.heads(graph.linear("q")))
    k, v = (
        graph.transpose(graph.reshape(graph.linear(name, width=2 * D), 0, 0, 2, D), 0, 2, 1, 3) for name in ("kk", "vv")
    )
    return graph.merge(graph.op("Attention", q, graph.op("Cos", k), v, scale=0.3))


def columns(graph: Graph) -> str:
    """Compute query, key and value as [batch, width, rows], as from convolutions."""
    q, k, v = (graph.reshape(graph.transpose(graph.linear(name), 0, 2, 1), 0, H, D, -1) for name in ("q", "kk", "vvv"))
    scores = graph.op("MatMul", graph.transpose(q, 0, 1, 3, 2), k)
    context = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), graph.transpose(v, 0, 1, 3, 2))
    return graph.transpose(graph.reshape(graph.transpose(context, 0, 1, 3, 2), 0, W, -1), 0, 2, 1)


def sequences_last(graph: Graph) -> str:
    """Use the layout of torch.nn.MultiheadAttention: [rows, batch x heads, head width]."""
    q, k, v = (
        graph.op("Reshape", graph.transpose(graph.linear(name), 1, 0, 2), np.array([9, -1, D])) for name in "qkv"
    )
    graph.inputs["x"] = (FLOAT, ["batch", 9, W])
    graph.outputs["y"] = (FLOAT, ["batch", 9, W])
    scores = graph.op("MatMul", graph.transpose(q, 1, 0, 2), graph.transpose(k, 1, 2, 0))
    context = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), graph.transpose(v, 1, 0, 2))
    return graph.transpose(graph.reshape(graph.transpose(context, 1, 0, 2), 9, -1, W), 1, 0, 2)


def windows(graph: Graph) -> str:
    """Swin's windows: each image has three windows, which attend separately and have their own masks."""
    split = graph.reshape("x", -1, 3, W)
    q, k, v = (graph.heads(graph.linear(name, split)) for name in ("q", "kk", "vvv"))
    scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
    mask = np.where(np.random.default_rng(2).random((1, 3, 1, 3, 3)) < 0.3, -100, 0).astype(np.float32)
    scores = graph.op("Add", graph.reshape(scores, -1, 3, H, 3, 3), mask)
    weights = graph.op("Softmax", graph.reshape(scores, -1, H, 3, 3), axis=-1)
    merged = graph.merge(graph.op("MatMul", weights, v))
    graph.inputs["x"] = (FLOAT, ["batch", 9, W])
    graph.outputs["y"] = (FLOAT, ["batch", 9, W])
    return graph.reshape(merged, -1, 9, W)


def bias_of_queries(graph: Graph) -> str:
    """DeBERTa: the bias is the product of queries and position embeddings."""
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    scaled = graph.op("Div", q, graph.number(2.5))
    positions = graph.op("MatMul", scaled, random_weight(D, 5, seed=8))
    bias = graph.op("ReduceMax", positions, axes=[-1], keepdims=1)
    scores = graph.op("Add", graph.op("MatMul", scaled, graph.transpose(k, 0, 1, 3, 2)), bias)
    weights = graph.op("Softmax", graph.op("Add", scores, graph.additive_mask()), axis=-1)
    return graph.merge(graph.op("MatMul", weights, v))


def keys_shown(graph: Graph) -> str:
    """A decoder's prompt call, which also outputs keys and values for later calls."""
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    for name, value in (("keys", k), ("values", v)):
        graph.nodes.append(helper.make_node("Identity", [value], [name], f"/{name}"))
        graph.outputs[name] = (FLOAT, ["batch", H, "rows", D])
    scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))


def one_head_of_keys(graph: Graph) -> str:
    q = graph.heads(graph.linear("q"))
    k, v = (graph.op("Unsqueeze", graph.linear(name, width=D), np.array([1])) for name in ("kk", "vvv"))
    scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))


def heads_and_rows_merged(graph: Graph) -> str:
    """Merge heads in a Reshape that also merges batch and rows, as torch's exporter does before a Gemm."""
    rows = graph.merge(graph.op("MatMul", *plain(graph)), -1, W)
    return graph.op("Reshape", graph.op("Neg", rows), graph.op("Shape", "x"))


BY_HEADS = {
    "rotated": rotated,
    "interleaved": interleaved,
    "heads stay": heads_stay,
    "scaled mask": scaled_mask,
    "zeros for other rows": zeros_for_rows_without_keys(counted="another"),
    "zeros for rows with few keys": zeros_for_rows_without_keys(limit=2.0),
    "Attention of rotated heads": rotated_for_attention,
    "Attention with zeros for other rows": zeros_for_rows_without_keys(counted="another", operator={}),
    "Attention, causal, with zeros": zeros_for_rows_without_keys(operator={"is_causal": 1}),
    "columns": columns,
    "sequences last": sequences_last,
    "windows": windows,
    "bias of queries": bias_of_queries,
    "keys shown": keys_shown,
    "one head of keys": one_head_of_keys,
    "heads and rows merged": heads_and_rows_merged,
}


@pytest.mark.parametrize("form", BY_HEADS)
def test_what_is_not_followed_to_its_layers_is_read_by_heads(form: str) -> None:
    graph = Graph()
    model = graph.model(BY_HEADS[form](graph))
    report = ortolan.optimize_onnx(model, recipe=Recipe.from_dict({"name": "fused", "pass": PASSES}))
    fused = report.model
    assert fused is not None
    onnx.checker.check_model(fused, full_check=True)
    assert op_types(fused).count("NoMADAttention") == 1 and not {"Softmax", "Attention"} & {*op_types(fused)}
    for rows in (9,) if form in ("sequences last", "windows") else (1, S, 70):
        given = feeds(model, rows)
        expected = run(model, given)
        for library in (True, False):
            for wanted, found in zip(expected, run(fused, given, library=library), strict=True):
                assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)


def joint_softmax(graph: Graph) -> str:
    """Compute one Softmax over all queries and keys of a head."""
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
    weights = graph.op("Softmax", graph.reshape(scores, 0, 0, -1), axis=-1)
    return graph.merge(graph.op("MatMul", graph.op("Reshape", weights, graph.op("Shape", scores)), v))


def over_queries(graph: Graph) -> str:
    """Compute the Softmax over queries: axis 2 of a 4-D tensor."""
    q, k, v = (graph.reshape(graph.heads(graph.linear(name)), -1, S, D) for name in ("q", "kk", "vvv"))
    graph.inputs["x"], graph.outputs["y"] = (FLOAT, ["batch", S, W]), (FLOAT, ["batch", S, W])
    scores = graph.reshape(graph.op("MatMul", q, graph.transpose(k, 0, 2, 1)), -1, H, S, S)
    weights = graph.reshape(graph.op("Softmax", scores, axis=2), -1, S, S)
    return graph.merge(graph.reshape(graph.op("MatMul", weights, v), -1, H, S, D))


def groups_of_heads(graph: Graph) -> str:
    """Reshape scores to [batch, groups, heads per group, queries, keys] and add a bias per group.

    The scores have the shape of windowed attention but are not windowed.
    """
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    graph.inputs["x"], graph.outputs["y"] = (FLOAT, ["batch", S, W]), (FLOAT, ["batch", S, W])
    scores = graph.reshape(graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), -1, 2, H // 2, S, S)
    scores = graph.op("Add", scores, random_weight(2, 1, S, S).reshape(1, 2, 1, S, S))
    weights = graph.op("Softmax", graph.reshape(scores, -1, H, S, S), axis=-1)
    return graph.merge(graph.op("MatMul", weights, v))


NOT_ATTENTION = {"joint softmax": joint_softmax, "over queries": over_queries, "groups of heads": groups_of_heads}


@pytest.mark.parametrize("form", NOT_ATTENTION)
def test_what_is_none_stays(form: str) -> None:
    graph = Graph()
    model = graph.model(NOT_ATTENTION[form](graph))
    report = ortolan.optimize_onnx(model, recipe=Recipe.from_dict({"name": "fused", "pass": PASSES[:2]}))
    assert report.model is not None and "NoMADAttention" not in op_types(report.model)
    given = feeds(model, S)
    assert relative_error(run(model, given)[0], run(report.model, given)[0]) == 0


def test_lengths_are_asked_of_the_input_that_they_come_from() -> None:
    """The mean divides by the length of `memory`, because ONNX Runtime allows a different length for the same name."""
    graph = Graph()
    graph.inputs["memory"] = (FLOAT, ["batch", "rows", W])
    memory = graph.op("Relu", "memory")
    count = graph.op("Gather", graph.op("Shape", memory), np.array(1))
    mean = graph.op("Div", graph.op("ReduceSum", memory, np.array([1])), graph.op("Cast", count, to=FLOAT))
    model = graph.model(graph.op("Add", graph.op("MatMul", "x", random_weight(W, W)), mean))
    report = ortolan.optimize_onnx(model, recipe=Recipe.from_dict({"name": "n", "pass": [{"name": "normalize"}]}))
    assert report.model is not None
    rng = np.random.default_rng(3)
    given = {name: rng.standard_normal((2, rows, W), np.float32) for name, rows in (("x", 9), ("memory", 4))}
    assert relative_error(run(model, given)[0], run(report.model, given)[0]) == 0
