"""Attentions as exporters write them."""

from __future__ import annotations

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
    """Nodes of a model of one attention: x and perhaps mask to y. Its parts are named as they are usually written."""

    nodes: list[NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, tuple[int, list[Any]]] = field(default_factory=lambda: {"x": (FLOAT, ["batch", "rows", W])})
    outputs: dict[str, tuple[int, list[Any]]] = field(default_factory=lambda: {"y": (FLOAT, ["batch", "rows", W])})
    opset: int = 17

    def op(self, op_type: str, *inputs: str | np.ndarray, domain: str = "", **attributes: Any) -> str:
        """Adds a node, and arrays among its inputs as constants; returns its output."""
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
        """Whether a key is hidden, [batch, 1, 1, rows]."""
        self.inputs["mask"] = (INT64, ["batch", "rows"])
        unsqueezed = self.op("Unsqueeze", "mask", np.array([1, 2], np.int64))
        return self.op("Equal", unsqueezed, np.array(0, np.int64))

    def model(self, y: str) -> onnx.ModelProto:
        self.nodes.append(helper.make_node("Identity", [y], ["y"], "/out"))
        domains = {node.domain: 1 for node in self.nodes if node.domain}
        return make_model(self.nodes, self.inputs, self.outputs, self.weights, self.opset, domains=domains)
