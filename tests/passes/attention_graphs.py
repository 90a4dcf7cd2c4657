"""Builders of attention graphs as exporters write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

from .small_models import make_model, random_weight

B, S, H, D = 2, 9, 4, 12

W = H * D

LOWEST = float(np.finfo(np.float32).min)

FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64


@dataclass
class Graph:
    """A model with one attention, from input x and optionally mask to output y."""

    nodes: list[NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, tuple[int, list[Any]]] = field(default_factory=lambda: {"x": (FLOAT, ["batch", "rows", W])})
    outputs: dict[str, tuple[int, list[Any]]] = field(default_factory=lambda: {"y": (FLOAT, ["batch", "rows", W])})
    opset: int = 17

    def op(self, op_type: str, *inputs: str | np.ndarray, domain: str = "", **attributes: Any) -> str:
        """Add a node whose array inputs become constants, and return its output."""
        names = []
        for one in inputs:
            if not isinstance(one, str):
                name = f"c{len(self.weights)}"
                self.weights[name] = np.asarray(one)
                one = name
            names.append(one)
        output = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, names, [output], f"/{output}", domain=domain, **attributes))
        return output

    def linear(self, name: str, x: str = "x", width: int = W) -> str:
        product = self.op("MatMul", x, random_weight(W, width, seed=len(name)))
        return self.op("Add", product, random_weight(width, seed=len(name) + 9))

    def reshape(self, x: str, *shape: int) -> str:
        return self.op("Reshape", x, np.array(shape, np.int64))

    def transpose(self, x: str, *perm: int) -> str:
        return self.op("Transpose", x, perm=perm)

    def number(self, value: float) -> np.ndarray:
        return np.array(value, np.float32)

    def heads(self, x: str, heads: int = H) -> str:
        return self.transpose(self.reshape(x, 0, 0, heads, W // H), 0, 2, 1, 3)

    def merge(self, context: str, *shape: int) -> str:
        return self.reshape(self.transpose(context, 0, 2, 1, 3), *(shape or (0, 0, W)))

    def additive_mask(self) -> str:
        self.inputs["mask"] = (INT64, ["batch", "rows"])
        floats = self.op("Cast", self.op("Unsqueeze", "mask", np.array([1, 2], np.int64)), to=FLOAT)
        return self.op("Mul", self.op("Sub", self.number(1), floats), self.number(LOWEST))

    def hidden(self) -> str:
        """Return a condition [batch, 1, 1, rows] that is true for masked keys."""
        self.inputs["mask"] = (INT64, ["batch", "rows"])
        unsqueezed = self.op("Unsqueeze", "mask", np.array([1, 2], np.int64))
        return self.op("Equal", unsqueezed, np.array(0, np.int64))

    def model(self, y: str) -> onnx.ModelProto:
        self.nodes.append(helper.make_node("Identity", [y], ["y"], "/out"))
        domains = {node.domain: 1 for node in self.nodes if node.domain}
        return make_model(self.nodes, self.inputs, self.outputs, self.weights, self.opset, domains=domains)


def attend(graph: Graph, q: str, k: str, v: str, kv_heads: int = H) -> str:
    if kv_heads != H:
        return graph.op("Attention", q, k, v, q_num_heads=H, kv_num_heads=kv_heads)
    scores = graph.op("MatMul", graph.heads(q), graph.transpose(graph.reshape(k, 0, 0, H, W // H), 0, 2, 3, 1))
    scores = graph.op("Div", scores, graph.number(np.sqrt(W / H)))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), graph.heads(v)))


def size_of_rows(graph: Graph) -> str:
    return graph.op("Shape", "x", start=1, end=2)


def plain(graph: Graph, mask: bool = True) -> tuple[str, str]:
    """Return (attention weights, values) of the most common form of attention."""
    q, k, v = (graph.linear(name) for name in ("q", "kk", "vvv"))
    key = graph.transpose(graph.reshape(k, 0, 0, H, D), 0, 2, 3, 1)
    scores = graph.op("Div", graph.op("MatMul", graph.heads(q), key), graph.number(D**0.5))
    if mask:
        scores = graph.op("Add", scores, graph.additive_mask())
    return graph.op("Softmax", scores, axis=-1), graph.heads(v)


def zeros_for_rows_without_keys(
    counted: str = "mask", limit: float = 1.0, operator: dict[str, Any] | None = None
) -> Callable[[Graph], str]:
    """scaled_dot_product_attention as transformers 5 exports it, with zeros for rows without keys.

    counted: "mask" counts the visible keys of a row; another value counts the masked keys. operator: attributes
    of ONNX's Attention, which is then used.
    """

    def build(graph: Graph) -> str:
        q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
        rows = size_of_rows(graph)
        shape = graph.op("Concat", graph.op("Shape", "x", start=0, end=1), np.array([1]), rows, rows, axis=0)
        visible = graph.op("Expand", graph.op("Not", graph.hidden()), shape)
        mask = graph.op("Mul", graph.op("Cast", graph.op("Not", visible), to=FLOAT), graph.number(LOWEST))
        if operator is not None:
            graph.opset = 23
            product = graph.op("Attention", q, k, v, mask, **operator)
        else:
            root = graph.number(D**-0.25)
            key = graph.op("Mul", graph.transpose(k, 0, 1, 3, 2), root)
            scores = graph.op("MatMul", graph.op("Mul", q, root), key)
            weights = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
            product = graph.op("MatMul", weights, v)
        judge = visible if counted == "mask" else graph.op("Expand", graph.hidden(), shape)
        count = graph.op("ReduceSum", graph.op("Cast", judge, to=FLOAT), np.array([-1]), keepdims=1)
        nothing = graph.op("Less", count, graph.number(limit))
        return graph.merge(graph.op("Where", nothing, graph.number(0), product))

    return build


def feeds(model: onnx.ModelProto, rows: int = S) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    given: dict[str, np.ndarray] = {"x": rng.standard_normal((B, rows, W), dtype=np.float32)}
    if len(model.graph.input) > 1:
        given["mask"] = np.ones((B, rows), np.int64)
        given["mask"][1, (rows + 1) // 2 :] = 0
    return given
