"""Attention with rotary embedding as exporters write it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from .attention_graphs import FLOAT, D, Graph, H, W, size_of_rows

KV = 2  # number of key and value heads in the forms that have fewer of them than query heads
FREQUENCIES = (100.0 ** -(np.arange(0, D, 2) / D)).astype(np.float32)
END = 2**63 - 1


def _positions(graph: Graph) -> str:
    """Return the position of each token in its sequence, int64 [rows]."""
    rows = graph.op("Squeeze", size_of_rows(graph), np.array([0]))
    return graph.op("Range", np.array(0), rows, np.array(1))


def _of_positions(graph: Graph) -> tuple[str, str]:
    """Return cosine and sine [1, 1, rows, D] that all sequences share."""
    positions = graph.op("Cast", graph.op("Unsqueeze", _positions(graph), np.array([0, 1])), to=FLOAT)
    return _of_angles(graph, graph.transpose(graph.op("MatMul", FREQUENCIES.reshape(1, -1, 1), positions), 0, 2, 1))


def _of_position_ids(graph: Graph) -> tuple[str, str]:
    """Return cosine and sine [batch, 1, rows, D] of the input position_ids."""
    graph.inputs["position_ids"] = (TensorProto.INT64, ["batch", "rows"])
    positions = graph.op("Cast", graph.op("Unsqueeze", "position_ids", np.array([1])), to=FLOAT)
    return _of_angles(graph, graph.transpose(graph.op("MatMul", FREQUENCIES.reshape(1, -1, 1), positions), 0, 2, 1))


def _of_angles(graph: Graph, angles: str) -> tuple[str, str]:
    both = graph.op("Concat", angles, angles, axis=-1)
    cos, sin = (graph.op("Unsqueeze", graph.op(name, both), np.array([1])) for name in ("Cos", "Sin"))
    return cos, sin


def _of_table(graph: Graph) -> tuple[str, str]:
    """Return cosine and sine [1, 1, rows, D], looked up in a table; each value is used twice."""
    angles = np.arange(128)[:, None] * FREQUENCIES
    table = np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
    rows = graph.op("Unsqueeze", graph.op("Gather", table, _positions(graph), axis=0), np.array([0, 1]))
    shape = graph.op("Concat", np.array([1, 1]), size_of_rows(graph), np.array([D]), axis=0)

    def twice(begin: int, end: int) -> str:
        part = graph.op("Slice", rows, np.array([begin]), np.array([end]), np.array([-1]))
        pairs = [graph.op("Unsqueeze", part, np.array([-1])) for _ in range(2)]
        return graph.op("Reshape", graph.op("Concat", *pairs, axis=-1), shape)

    return twice(0, D // 2), twice(D // 2, D)


def _halves(graph: Graph, x: str, cos: str, sin: str) -> str:
    """Rotate pairs of elements that are D / 2 apart. A Shape node gives the end of the Slice."""
    width = graph.op("Slice", graph.op("Shape", x), np.array([3]), np.array([4]))
    half = graph.op("Div", width, np.array([2]))
    first = graph.op("Slice", x, np.array([0]), half, np.array([3]))
    second = graph.op("Neg", graph.op("Slice", x, half, np.array([END]), np.array([3])))
    turned = graph.op("Mul", graph.op("Concat", second, first, axis=-1), sin)
    return graph.op("Add", graph.op("Mul", x, cos), turned)


def _pairs(graph: Graph, x: str, cos: str, sin: str) -> str:
    """Rotate neighbouring pairs."""
    even, odd = (
        graph.op("Slice", x, np.array([begin]), np.array([END]), np.array([3]), np.array([2])) for begin in (0, 1)
    )
    parts = [graph.op("Unsqueeze", one, np.array([-1])) for one in (graph.op("Neg", odd), even)]
    swapped = graph.op("Reshape", graph.op("Concat", *parts, axis=-1), graph.op("Shape", x))
    return graph.op("Add", graph.op("Mul", x, cos), graph.op("Mul", swapped, sin))


def _parts(graph: Graph, x: str, cos: str, sin: str) -> str:
    """Rotate the first half of each head, with cosines and sines of that width."""
    turned, rest = D // 2, D - D // 2
    node = graph.op("Split", x, np.array([turned, rest]), axis=-1)
    graph.nodes[-1].output.append(f"{node}_rest")
    narrow = [graph.op("Slice", one, np.array([0]), np.array([turned]), np.array([-1])) for one in (cos, sin)]
    return graph.op("Concat", _halves(graph, node, *narrow), f"{node}_rest", axis=-1)


def _normed(graph: Graph, x: str) -> str:
    """Normalize each head by its root mean square."""
    mean = graph.op("ReduceMean", graph.op("Mul", x, x), axes=[-1], keepdims=1)
    root = graph.op("Sqrt", graph.op("Add", mean, graph.number(1e-6)))
    return graph.op("Mul", graph.op("Div", x, root), np.linspace(0.5, 1.5, D, dtype=np.float32))


def _attended(graph: Graph, q: str, k: str, v: str) -> str:
    scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
    scores = graph.op("Add", graph.op("Mul", scores, graph.number(D**-0.5)), graph.additive_mask())
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))


Angles = Callable[[Graph], tuple[str, str]]
Turn = Callable[[Graph, str, str, str], str]


def rotary(angles: Angles, turn: Turn, norm: bool = False) -> Callable[[Graph], str]:
    def build(graph: Graph) -> str:
        q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
        q, k = (_normed(graph, x) if norm else x for x in (q, k))
        cos, sin = angles(graph)
        return _attended(graph, turn(graph, q, cos, sin), turn(graph, k, cos, sin), v)

    return build


def joined(take: Callable[[Graph, str], list[str]]) -> Callable[[Graph], str]:
    """Compute query, key and value in one linear layer; the axis that separates them is then moved to the front."""

    def build(graph: Graph) -> str:
        size = graph.op("Shape", "x", start=0, end=1)
        shape = graph.op("Concat", size, np.array([-1, 3, H, D]), axis=0)
        by_heads = graph.transpose(graph.op("Reshape", graph.linear("qkv", width=3 * W), shape), 0, 3, 2, 1, 4)
        q, k, v = take(graph, by_heads)
        cos, sin = _of_positions(graph)
        return _attended(graph, _halves(graph, q, cos, sin), _halves(graph, k, cos, sin), v)

    return build


def _by_gather(graph: Graph, x: str) -> list[str]:
    return [graph.op("Gather", x, np.array(index), axis=2) for index in range(3)]


def _by_split(graph: Graph, x: str) -> list[str]:
    first = graph.op("Split", x, np.array([1, 1, 1]), axis=2)
    names = [first, f"{first}_k", f"{first}_v"]
    graph.nodes[-1].output.extend(names[1:])
    return [graph.op("Squeeze", name, np.array([2])) for name in names]


def shared_keys(graph: Graph) -> str:
    """Use fewer key and value heads than query heads; they are repeated after the rotation."""
    q = graph.heads(graph.linear("q"))
    k, v = (
        graph.transpose(graph.reshape(graph.linear(name, width=KV * D), 0, 0, KV, D), 0, 2, 1, 3)
        for name in ("kk", "vvv")
    )
    cos, sin = _of_positions(graph)
    k = _halves(graph, k, cos, sin)
    size, rows = graph.op("Shape", "x", start=0, end=1), size_of_rows(graph)
    apart = graph.op("Concat", size, np.array([KV, H // KV]), rows, np.array([D]), axis=0)
    merged = graph.op("Concat", size, np.array([H]), rows, np.array([D]), axis=0)
    k, v = (
        graph.op("Reshape", graph.op("Expand", graph.op("Unsqueeze", x, np.array([2])), apart), merged) for x in (k, v)
    )
    return _attended(graph, _halves(graph, q, cos, sin), k, v)


ROTARY = {
    "halves": rotary(_of_positions, _halves),
    "halves of given positions": rotary(_of_position_ids, _halves),
    "pairs of a table": rotary(_of_table, _pairs),
    "parts of heads": rotary(_of_positions, _parts),
    "normed heads": rotary(_of_positions, _halves, norm=True),
    "joined, by Gather": joined(_by_gather),
    "joined, by Split": joined(_by_split),
    "shared keys": shared_keys,
}
