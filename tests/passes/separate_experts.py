"""Builds mixtures of experts in which each expert is separate layers, as exporters write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

EXPERTS, SELECTED, HIDDEN, INNER = 5, 2, 64, 32
UNUSED = 3  # no token selects this expert, and most tokens select expert 0
FORMS = ("optimum", "short")
ROUTERS = ("divided", "not divided", "softmax of selected", "gathered")


class Builder:
    """Collects the nodes of a mixture."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: dict[str, np.ndarray] = {}
        self.rng = np.random.default_rng(7)

    def op(self, op_type: str, *inputs: Any, name: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; inputs that are no names are constants."""
        name = name or f"{op_type}_{len(self.nodes)}"
        made = [f"{name}_output_{index}" for index in range(outputs)]
        given = [one if isinstance(one, str) else self.constant(one) for one in inputs]
        self.nodes.append(helper.make_node(op_type, given, made, name, **attributes))
        return made[0] if outputs == 1 else made

    def constant(self, array: Any) -> str:
        """Add an initializer."""
        array = np.asarray(array)
        name = f"constant_{len(self.tensors)}"
        self.tensors[name] = array.astype(np.int64) if array.dtype.kind == "i" else array
        return name

    def linear(self, x: str, k: int, n: int, name: str, *, bias: bool = False) -> str:
        """Add a MatMul, and an Add of a bias."""
        weight = self.rng.standard_normal((k, n)).astype(np.float32) / np.float32(np.sqrt(k))
        y = self.op("MatMul", x, weight, name=f"{name}/MatMul")
        return self.op("Add", y, self.rng.standard_normal(n).astype(np.float32), name=f"{name}/Add") if bias else y

    def router(self, rows: str, kind: str, slots: int) -> tuple[str, str]:
        """Add the router; return the selected experts and their weights."""
        bias = np.zeros(EXPERTS, np.float32)
        bias[[0, UNUSED]] = 4, -100
        logits = self.op("Add", self.linear(rows, HIDDEN, EXPERTS, "mlp/gate"), bias)
        if kind == "softmax of selected":
            top, indices = self.op("TopK", logits, [slots], outputs=2, axis=-1)
            return indices, self.op("Softmax", top, axis=1)
        every = self.op("Softmax", logits, axis=-1)
        top, indices = self.op("TopK", logits if kind == "gathered" else every, [slots], outputs=2, axis=-1)
        weights = self.op("GatherElements", every, indices, axis=1) if kind == "gathered" else top
        if kind == "not divided":
            return indices, weights
        return indices, self.op("Div", weights, self.op("ReduceSum", weights, [-1], keepdims=1))

    def mlp(self, rows: str, name: str, *, bias: bool, inner: int) -> str:
        """Add the layers of an expert."""
        gate = self.linear(rows, HIDDEN, inner, f"{name}/gate_proj", bias=bias)
        up = self.linear(rows, HIDDEN, inner, f"{name}/up_proj", bias=bias)
        activated = self.op("Mul", gate, self.op("Sigmoid", gate))
        return self.linear(self.op("Mul", activated, up), inner, HIDDEN, f"{name}/down_proj", bias=bias)

    def optimum(self, x: str, router: str, *, bias: bool, wrong: str) -> str:
        """Add the mixture as Optimum exports that of Qwen3-MoE."""
        shape = self.op("Shape", x)
        batch, sequence = (self.op("Gather", shape, np.int64(axis)) for axis in (0, 1))
        rows = self.op("Reshape", x, [-1, HIDDEN])
        indices, weights = self.router(rows, router, SELECTED)
        count = self.op("Unsqueeze", self.op("Mul", batch, sequence), [0])
        total = self.op("ConstantOfShape", self.op("Concat", count, [HIDDEN], axis=0))
        one_hot = self.op("OneHot", indices, np.int64(EXPERTS), [0, 1], axis=-1)
        mask = self.op("Transpose", one_hot, perm=[2, 1, 0])
        flat = self.op("Flatten", self.op("Unsqueeze", weights, [2]), axis=2)
        one = self.op("Unsqueeze", rows, [0])
        for e in range(EXPERTS):
            chosen = 1 if wrong == "index" and e == 2 else e
            number = np.int64(chosen)
            pairs = self.op("NonZero", self.op("Cast", self.op("Gather", mask, number, axis=0), to=9))
            slot, token = self.op("Split", self.op("Transpose", pairs, perm=[1, 0]), [1, 1], outputs=2, axis=1)
            slot, token = self.op("Squeeze", slot, [1]), self.op("Squeeze", token, [1])
            given = self.op("Reshape", self.op("Gather", one, token, axis=1), [-1, HIDDEN])
            y = self.mlp(given, f"mlp/experts.{e}", bias=bias, inner=INNER * (1 + (wrong == "shape" and e == 2)))
            width = SELECTED + (wrong == "weights" and e == 2) * (1 - SELECTED)
            index = self.op("Add", slot, self.op("Mul", token, [width]))
            y = self.op("Mul", y, self.op("Reshape", self.op("Gather", flat, index, axis=0), [-1, 1]))
            first = self.op("Slice", total, [0, 0], [1, np.iinfo(np.int64).max], [0, 1])
            y = self.op("Expand", y, self.op("Shape", first))
            token = self.op("Expand", self.op("Unsqueeze", token, [1]), self.op("Shape", y))
            zeros = self.op("ConstantOfShape", self.op("Shape", total))
            total = self.op("Add", total, self.op("ScatterElements", zeros, token, y, axis=0))
        return self.op("Reshape", total, shape, name="last")

    def short(self, x: str, router: str, *, bias: bool, wrong: str) -> str:
        """Add the same mixture with other operators."""
        rows = self.op("Reshape", x, [-1, HIDDEN])
        indices, weights = self.router(rows, router, SELECTED)
        total = self.op("Expand", np.zeros(1, np.float32), self.op("Shape", rows))
        for e in range(EXPERTS):
            pairs = self.op("NonZero", self.op("Equal", indices, [e]))
            token, slot = (self.op("Gather", pairs, np.int64(row), axis=0) for row in (0, 1))
            y = self.mlp(self.op("Gather", rows, token, axis=0), f"mlp/experts.{e}", bias=bias, inner=INNER)
            columns = self.op("Unsqueeze", token, [1]), self.op("Unsqueeze", slot, [1])
            scale = self.op("GatherND", weights, self.op("Concat", *columns, axis=-1))
            y = self.op("Mul", self.op("Unsqueeze", scale, [1]), y)
            reduction = "none" if wrong == "replaced" and e == 2 else "add"
            total = self.op("ScatterND", total, columns[0], y, reduction=reduction)
        return self.op("Reshape", total, self.op("Shape", x), name="last")


def separate(form: str = "optimum", router: str = "divided", *, bias: bool = False, wrong: str = "") -> onnx.ModelProto:
    """Return a model y = mixture(x) whose experts are separate layers.

    Args:
        form: One of FORMS.
        router: One of ROUTERS.
        bias: The layers of the experts have biases.
        wrong: What differs from a mixture: index, shape, weights, replaced, or another user of an inner value.
    """
    builder = Builder()
    getattr(builder, form)("x", router, bias=bias, wrong=wrong)
    values = {"x": (["batch", "sequence", HIDDEN], 1), "last_output_0": (["batch", "sequence", HIDDEN], 1)}
    if wrong == "user":
        values["mlp/experts.1/up_proj/MatMul_output_0"] = (["tokens", INNER], 1)
    infos = [helper.make_tensor_value_info(name, kind, shape) for name, (shape, kind) in values.items()]
    tensors = [numpy_helper.from_array(array, name) for name, array in builder.tensors.items()]
    graph = helper.make_graph(builder.nodes, "mixture", infos[:1], infos[1:], tensors)
    return helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 18)])


def rows_of_x(batch: int, sequence: int, seed: int = 0) -> np.ndarray:
    """Return an input of the model."""
    return np.random.default_rng(seed).standard_normal((batch, sequence, HIDDEN)).astype(np.float32)
