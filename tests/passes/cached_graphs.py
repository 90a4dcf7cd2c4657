"""Attention with a cache as exporters write it for several kinds of decoders, one attention per model.

The models have inputs x, the cache and mask [batch, past + rows], which is 0 for padding. Outputs are y and the cache
with the new tokens appended.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import helper

from .attention_graphs import BOOL, FLOAT, INT64, LOWEST, D, Graph, H, W

CACHE = ("past_key", "past_value")
TABLE = 32  # number of tokens that the constant mask covers


class CachedGraph(Graph):
    def __init__(self, kv_heads: int = H) -> None:
        super().__init__(opset=18)
        past = ["batch", kv_heads, "past", D]
        self.inputs |= {"mask": (INT64, ["batch", "past + rows"])} | {name: (FLOAT, list(past)) for name in CACHE}
        present = ["batch", kv_heads, "past + rows", D]
        self.outputs |= {f"present_{name}": (FLOAT, list(present)) for name in ("key", "value")}

    def appended(self, name: str, new: str) -> str:
        output = f"present_{name}"
        self.nodes.append(helper.make_node("Concat", [f"past_{name}", new], [output], f"/{output}", axis=-2))
        return output

    def size(self, x: str, axis: int) -> str:
        """Return the size of an axis, as [1]."""
        return self.op("Gather", self.op("Shape", x), np.array([axis], np.int64))

    def scalar(self, x: str) -> str:
        return self.op("Squeeze", x, np.array([0], np.int64))

    def visible(self) -> str:
        """Return a boolean mask [batch, 1, rows, past + rows]."""
        zero, one = np.array(0, np.int64), np.array(1, np.int64)
        total, rows = (self.scalar(self.size(name, 1)) for name in ("mask", "x"))
        positions = self.op("Add", self.op("Range", zero, rows, one), self.op("Sub", total, rows))
        earlier = self.op(
            "LessOrEqual", self.op("Range", zero, total, one), self.op("Unsqueeze", positions, np.array([1], np.int64))
        )
        seen = self.op("Cast", self.op("Unsqueeze", "mask", np.array([1, 2], np.int64)), to=BOOL)
        return self.op("And", seen, earlier)

    def masked(self, value: float = LOWEST) -> str:
        return self.op("Where", self.visible(), self.number(0), self.number(value))

    def cut(self, mask: str, like: str = "present_key") -> str:
        """Slice a mask to the number of tokens in the cache."""
        zero, last = np.array([0], np.int64), np.array([3], np.int64)
        return self.op("Slice", mask, zero, self.size(like, 2), last, np.array([1], np.int64))

    def attended(self, scores: str, value: str) -> str:
        return self.merge(self.op("MatMul", self.op("Softmax", scores, axis=-1), value))


def joined_layer(graph: CachedGraph) -> str:
    """GPT-2: one linear layer and a Split give query, key and value; shapes and scale are computed; NaN becomes 0."""
    sizes = np.array([W, W, W], np.int64)
    names = ["q", "k", "v"]
    graph.weights["sizes"] = sizes
    graph.nodes.append(helper.make_node("Split", [graph.linear("qkv", width=3 * W), "sizes"], names, "/split", axis=2))
    q, k, v = (
        graph.transpose(
            graph.op(
                "Reshape",
                name,
                graph.op("Concat", graph.size(name, 0), graph.size(name, 1), np.array([-1, D], np.int64), axis=0),
            ),
            *(0, 2, 1, 3),
        )
        for name in names
    )
    key, value = graph.appended("key", k), graph.appended("value", v)
    width = graph.op("Sqrt", graph.op("Cast", graph.size(q, 3), to=FLOAT))
    root = graph.op("Sqrt", graph.op("Div", graph.number(1), width))
    scores = graph.op("MatMul", graph.op("Mul", q, root), graph.op("Mul", graph.transpose(key, 0, 1, 3, 2), root))
    weights = graph.op("Softmax", graph.op("Add", scores, graph.cut(graph.masked(-np.inf))), axis=-1)
    weights = graph.op("Where", graph.op("IsNaN", weights), graph.number(0), weights)
    product = graph.transpose(graph.op("MatMul", weights, value), 0, 2, 1, 3)
    shape = graph.op("Concat", graph.size(product, 0), graph.size(product, 1), np.array([-1], np.int64), axis=0)
    return graph.op("Reshape", product, shape)


def constant_masks(graph: CachedGraph) -> str:
    """GPT-Neo: a constant mask is sliced to the current lengths, and redundant Casts convert float32 to float32."""
    q, k, v = (graph.heads(graph.linear(name)) for name in ("query", "ke", "value"))
    appended = graph.op("Concat", "past_key", k, axis=-2)
    graph.nodes.append(helper.make_node("Cast", [appended], ["present_key"], "/cache", to=FLOAT))
    value = graph.appended("value", v)
    scores = graph.op("MatMul", graph.op("Cast", q, to=FLOAT), graph.transpose("present_key", 0, 1, 3, 2))
    total, rows = graph.size("present_key", 2), graph.size(q, 2)
    window = np.tril(np.ones((TABLE, TABLE), bool)) & ~np.tril(np.ones((TABLE, TABLE), bool), -6)
    begin, one = graph.op("Sub", total, rows), np.array([1], np.int64)
    table = graph.op("Slice", window[None, None], begin, total, np.array([2], np.int64), one)
    table = graph.op("Slice", table, np.array([0], np.int64), total, np.array([3], np.int64), one)
    scores = graph.op("Where", table, scores, graph.number(LOWEST))
    scores = graph.op("Add", scores, graph.cut(graph.masked()))
    weights = graph.op("Cast", graph.op("Softmax", scores, axis=-1), to=FLOAT)
    return graph.merge(graph.op("MatMul", weights, value))


def heads_of_all_sequences(graph: CachedGraph) -> str:
    """BLOOM: attention computes 3-D MatMuls [batch x heads, …], and each head has a position bias.

    One linear layer gives the query, key and value of each head as adjacent columns.
    """
    qkv = graph.reshape(graph.linear("qkv", width=3 * W), 0, 0, H, 3, D)
    q, k, v = (
        graph.transpose(graph.op("Gather", qkv, np.array(index, np.int64), axis=3), 0, 2, 1, 3) for index in range(3)
    )
    key, value = graph.appended("key", k), graph.appended("value", v)
    every = graph.op("Mul", graph.size("x", 0), np.array([H], np.int64))
    shape = graph.op("Concat", every, np.array([-1, D], np.int64), axis=0)
    q3, k3, v3 = (graph.op("Reshape", one, shape) for one in (q, key, value))
    positions = graph.op("Sub", graph.op("CumSum", "mask", np.array(-1, np.int64)), np.array(1, np.int64))
    positions = graph.op("Cast", graph.op("Mul", positions, "mask"), to=FLOAT)
    slopes = 2.0 ** -np.arange(1, H + 1, dtype=np.float32)[:, None]
    bias = graph.op("Mul", slopes, graph.op("Unsqueeze", positions, np.array([1], np.int64)))
    bias = graph.op("Reshape", bias, graph.op("Concat", every, np.array([1, -1], np.int64), axis=0))
    product = graph.op("MatMul", q3, graph.transpose(k3, 0, 2, 1))
    scores = graph.op("Add", graph.op("Mul", product, graph.number(D**-0.5)), bias)
    by_heads = graph.op("Concat", graph.size("x", 0), np.array([H, -1], np.int64), graph.size("mask", 1), axis=0)
    scores = graph.op("Add", graph.op("Reshape", scores, by_heads), graph.masked())
    weights = graph.op("Softmax", scores, axis=-1)
    flat = graph.op("Concat", every, np.array([-1], np.int64), graph.size("mask", 1), axis=0)
    product = graph.op("MatMul", graph.op("Reshape", weights, flat), v3)
    back = graph.op("Concat", graph.size("x", 0), np.array([H, -1, D], np.int64), axis=0)
    return graph.merge(graph.op("Reshape", product, back))


def one_head_of_keys(graph: CachedGraph) -> str:
    """Falcon: the model has one key head and one value head, which MatMul broadcasts to all query heads."""
    q = graph.heads(graph.linear("query"))
    k, v = (graph.transpose(graph.reshape(graph.linear(name, width=D), 0, 0, 1, D), 0, 2, 1, 3) for name in ("ke", "v"))
    key, value = graph.appended("key", k), graph.appended("value", v)
    scores = graph.op("MatMul", graph.op("Mul", q, graph.number(D**-0.5)), graph.transpose(key, 0, 1, 3, 2))
    return graph.attended(graph.op("Add", scores, graph.cut(graph.masked())), value)


def turned_in_part(graph: CachedGraph) -> str:
    """Phi and GPT-NeoX: only the first half of each head is rotated."""
    q, k, v = (graph.heads(graph.linear(name)) for name in ("query", "ke", "value"))

    def turned(x: str) -> str:
        last, one = np.array([3], np.int64), np.array([1], np.int64)
        half = np.array([D // 2], np.int64)
        first = graph.op("Slice", x, np.array([0], np.int64), half, last, one)
        rest = graph.op("Slice", x, half, np.array([2**63 - 1], np.int64), last, one)
        return graph.op("Concat", graph.op("Sin", first), rest, axis=-1)

    key, value = graph.appended("key", turned(k)), graph.appended("value", v)
    scores = graph.op("MatMul", turned(q), graph.transpose(key, 0, 1, 3, 2))
    return graph.attended(graph.op("Add", graph.op("Mul", scores, graph.number(0.3)), graph.masked()), value)


def scaled_behind_the_mask(graph: CachedGraph) -> str:
    """CodeGen: the masks are added before the scores are scaled."""
    q, k, v = (graph.heads(graph.linear(name)) for name in ("query", "ke", "value"))
    key, value = graph.appended("key", k), graph.appended("value", v)
    scores = graph.op("MatMul", q, graph.transpose(key, 0, 1, 3, 2))
    hidden = graph.op("Not", graph.visible())
    scores = graph.op("Where", hidden, graph.number(LOWEST), graph.op("Add", scores, graph.masked(-3.0)))
    return graph.attended(graph.op("Div", scores, graph.number(D**0.5)), value)


def capped(graph: CachedGraph) -> str:
    """Gemma 2: a Tanh limits the scores."""
    q, k, v = (graph.heads(graph.linear(name)) for name in ("query", "ke", "value"))
    key, value = graph.appended("key", k), graph.appended("value", v)
    scores = graph.op("Div", graph.op("MatMul", q, graph.transpose(key, 0, 1, 3, 2)), graph.number(0.5))
    scores = graph.op("Mul", graph.op("Tanh", scores), graph.number(0.5))
    return graph.attended(graph.op("Add", scores, graph.masked()), value)


def with_sinks(graph: CachedGraph) -> str:
    """gpt-oss: each head has a further score, whose weight is dropped."""
    q, k, v = (graph.heads(graph.linear(name)) for name in ("query", "ke", "value"))
    key, value = graph.appended("key", k), graph.appended("value", v)
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transpose(key, 0, 1, 3, 2)), graph.number(0.3))
    scores = graph.op("Add", scores, graph.masked())
    sinks = np.linspace(-1, 2, H, dtype=np.float32).reshape(1, H, 1, 1)
    sizes = [graph.size("x", 0), np.array([H], np.int64), graph.size(q, 2), np.array([1], np.int64)]
    column = graph.op("Expand", sinks, graph.op("Concat", *sizes, axis=0))
    scores = graph.op("Concat", scores, column, axis=-1)
    largest = graph.op("ReduceMax", scores, np.array([-1], np.int64), keepdims=1)
    weights = graph.op("Softmax", graph.op("Sub", scores, largest), axis=-1)
    zero, last = np.array([0], np.int64), np.array([-1], np.int64)
    weights = graph.op("Slice", weights, zero, last, np.array([3], np.int64))
    return graph.merge(graph.op("MatMul", weights, value))


def attention_operator(graph: CachedGraph) -> str:
    """torch's exporter: ONNX's Attention, then zeros for rows without visible keys."""
    graph.opset = 23
    q, k, v = (graph.heads(graph.linear(name)) for name in ("query", "ke", "value"))
    key, value = graph.appended("key", k), graph.appended("value", v)
    visible = graph.visible()
    mask = graph.op("Mul", graph.op("Cast", graph.op("Not", visible), to=FLOAT), graph.number(LOWEST))
    count = graph.op("ReduceSum", graph.op("Cast", visible, to=FLOAT), np.array([-1], np.int64), keepdims=1)
    product = graph.op("Attention", graph.op("Sin", q), key, value, mask, scale=0.3)
    return graph.merge(graph.op("Where", graph.op("Less", count, graph.number(1)), graph.number(0), product))


def heads_and_rows_merged(graph: CachedGraph) -> str:
    """torch's GPT-2: one Reshape merges heads, and also batch and rows."""
    q, k, v = (graph.heads(graph.linear(name)) for name in ("query", "ke", "value"))
    key, value = graph.appended("key", k), graph.appended("value", v)
    scores = graph.op("Add", graph.op("MatMul", q, graph.transpose(key, 0, 1, 3, 2)), graph.masked())
    rows = graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), value), -1, W)
    shape = graph.op("Concat", graph.size("x", 0), graph.size("x", 1), np.array([W], np.int64), axis=0)
    return graph.op("Reshape", graph.op("Gemm", rows, np.eye(W, dtype=np.float32)), shape)


FORMS: list[Callable[[CachedGraph], str]] = [
    joined_layer,
    constant_masks,
    heads_of_all_sequences,
    one_head_of_keys,
    turned_in_part,
    scaled_behind_the_mask,
    capped,
    with_sinks,
    attention_operator,
    heads_and_rows_merged,
]


def model(form: Callable[[CachedGraph], str]) -> onnx.ModelProto:
    graph = CachedGraph(1 if form is one_head_of_keys else H)
    return graph.model(form(graph))


def feeds(model: onnx.ModelProto, past: int, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return inputs for two sequences, the first with two tokens of left padding."""
    rng = np.random.default_rng(seed)
    heads = (
        next(value for value in model.graph.input if value.name == "past_key").type.tensor_type.shape.dim[1].dim_value
    )
    mask = np.ones((2, past + rows), np.int64)
    mask[0, : min(2, past + rows - 1)] = 0
    cache = {name: rng.standard_normal((2, heads, past, D)).astype(np.float32) for name in CACHE}
    return {"x": rng.standard_normal((2, rows, W)).astype(np.float32), "mask": mask} | cache
