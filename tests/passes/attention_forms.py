"""Attention subgraphs as exporters write them, and subgraphs that only look like attention."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper

from .attention_graphs import (
    BOOL,
    FLOAT,
    INT64,
    LOWEST,
    D,
    Graph,
    H,
    W,
    plain,
    size_of_rows,
    zeros_for_rows_without_keys,
)
from .small_models import random_weight


def usual(graph: Graph) -> str:
    return graph.merge(graph.op("MatMul", *plain(graph)))


def no_mask(graph: Graph) -> str:
    return graph.merge(graph.op("MatMul", *plain(graph, mask=False)))


def mask_first_and_scaled_query(graph: Graph) -> str:
    """Scale queries before the heads are split, transpose keys twice, and add the mask as first operand."""
    q = graph.op("Mul", graph.linear("q"), graph.number(D**-0.5))
    key = graph.transpose(graph.heads(graph.linear("kk")), 0, 1, 3, 2)
    scores = graph.op("Add", graph.additive_mask(), graph.op("MatMul", graph.heads(q), key))
    weights = graph.op("Softmax", scores)
    return graph.merge(graph.op("MatMul", weights, graph.heads(graph.linear("vvv"))), 0, -1, W)


def shape_chains(graph: Graph) -> str:
    """TorchScript's scaled_dot_product_attention: Shape nodes compute the sizes and the scale at run time."""

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
    """Transpose the keys as a three-dimensional tensor, as the dynamo exporter does."""
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
    """DistilBERT's mask: a Where node replaces the scores of masked keys by `fill`."""

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
    """PyTorch's boolean mask: -Inf is added for masked keys, and NaN attention weights become zero."""
    q, k, v = (graph.linear(name) for name in ("q", "kk", "vvv"))
    scores = graph.op("MatMul", graph.heads(q), graph.transpose(graph.heads(k), 0, 1, 3, 2))
    mask = graph.op("Where", graph.hidden(), graph.number(-np.inf), graph.number(0))
    weights = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
    weights = graph.op("Where", graph.op("IsNaN", weights), graph.number(0), weights)
    return graph.merge(graph.op("MatMul", weights, graph.heads(v)))


def position_bias(graph: Graph) -> str:
    """Position bias [batch, H, rows, rows] by the distance of key and query, as TorchScript exports MPNet and T5."""
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
    """Add the masks to the scores one after the other, or their sum if `joined`."""

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
    """Attention of opset 23 with fewer key and value heads than query heads, and a boolean mask."""
    graph.opset = 23
    q, k, v = graph.linear("q"), graph.linear("kk", width=2 * D), graph.linear("vvv", width=2 * D)
    rows = size_of_rows(graph)
    # ONNX Runtime requires a mask with one row per query.
    shape = graph.op("Concat", graph.op("Shape", "x", start=0, end=1), np.array([1]), rows, rows, axis=0)
    shown = graph.op("Expand", graph.op("Not", graph.hidden()), shape)
    return graph.op("Attention", q, k, v, shown, q_num_heads=H, kv_num_heads=2, scale=0.3)


def onnx_attention_of_heads(graph: Graph) -> str:
    graph.opset = 23
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    return graph.merge(graph.op("Attention", q, k, v, is_causal=1))


def capped(graph: Graph) -> str:
    graph.opset = 23
    q, k, v = (graph.linear(name) for name in ("q", "kk", "vvv"))
    return graph.op("Attention", q, k, v, q_num_heads=H, kv_num_heads=H, softcap=0.5)


def capped_by_tanh(mask_first: bool = False, caps: int = 1) -> Callable[[Graph], str]:
    """Gemma 2: a Tanh limits the scores."""

    def build(graph: Graph) -> str:
        q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
        scores = graph.op("Mul", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), graph.number(D**-0.5))
        if mask_first:
            scores = graph.op("Add", scores, graph.additive_mask())
        for _ in range(caps):
            scores = graph.op("Tanh", graph.op("Div", scores, graph.number(0.5)))
            scores = graph.op("Mul", scores, graph.number(0.5))
        if not mask_first:
            scores = graph.op("Add", scores, graph.additive_mask())
        return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))

    return build


def with_sinks(scaled: bool = False) -> Callable[[Graph], str]:
    """gpt-oss: each head has a further score, whose weight is dropped. scaled: all scores are scaled together."""

    def build(graph: Graph) -> str:
        q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
        scores = graph.op("Mul", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), graph.number(0.3))
        scores = graph.op("Add", scores, graph.additive_mask())
        column = graph.op("Reshape", np.linspace(-1, 2, H, dtype=np.float32), np.array([1, H, 1, 1], np.int64))
        rows = graph.op("Slice", graph.op("Shape", q), np.array([0], np.int64), np.array([3], np.int64))
        column = graph.op("Expand", column, graph.op("Concat", rows, np.array([1], np.int64), axis=0))
        scores = graph.op("Concat", scores, column, axis=-1)
        if scaled:
            scores = graph.op("Mul", scores, graph.number(0.5))
        largest = graph.op("ReduceMax", scores, axes=[-1], keepdims=1)
        weights = graph.op("Softmax", graph.op("Sub", scores, largest), axis=-1)
        zero, last = np.array([0], np.int64), np.array([-1], np.int64)
        weights = graph.op("Slice", weights, zero, last, np.array([3], np.int64))
        return graph.merge(graph.op("MatMul", weights, v))

    return build


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
    "Attention with softcap": capped,
    "Attention with zeros for rows without keys": zeros_for_rows_without_keys(operator={"scale": 0.3}),
    "capped": capped_by_tanh(),
    "sinks": with_sinks(),
}


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


def divided_by_infinity(graph: Graph) -> str:
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    scores = graph.op("Tanh", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)))
    scores = graph.op("Div", scores, graph.number(np.inf))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))


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


def capped_below_zero(graph: Graph) -> str:
    graph.opset = 23
    q, k, v = (graph.linear(name) for name in ("q", "kk", "vvv"))
    return graph.op("Attention", q, k, v, q_num_heads=H, kv_num_heads=H, softcap=-1.0)
