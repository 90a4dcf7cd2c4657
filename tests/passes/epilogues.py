"""Activations as exporters write them, and a way to run models without ONNX Runtime's own fusions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from .small_models import make_model, random_weight

K, N = 12, 10

WEIGHTS = {"W": random_weight(K, N), "b": random_weight(N, seed=1)}


class Writer:
    """Builds the nodes after the linear layer y = x W + b.

    `choose(n)` returns an integer from 0 to n - 1. It decides the operand order of each Add and Mul, and how constants
    are stored.
    """

    def __init__(self, choose: Callable[[int], int] = lambda n: 0, dtype: type = np.float32) -> None:
        self.choose = choose
        self.dtype = dtype
        self.nodes = [helper.make_node("Gemm", ["x", "W", "b"], ["y"], name="layer")]
        self.weights = {name: array.astype(dtype) for name, array in WEIGHTS.items()}
        self.inputs: dict[str, tuple[int, list[int | str]]] = {}
        self.opset = 20

    @property
    def type(self) -> int:
        return helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))

    def node(self, op: str, *operands: str | float, domain: str = "", **attributes: object) -> str:
        names = [value if isinstance(value, str) else self.number(value) for value in operands]
        if op in ("Add", "Mul") and self.choose(2):
            names.reverse()
        if op == "Swish":
            self.opset = 24
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, names, [output], name=f"node_{output}", domain=domain, **attributes))
        return output

    def number(self, value: float) -> str:
        name, stored = f"c{len(self.nodes)}", self.choose(4)
        array = np.array([value] if stored == 1 else value, self.dtype)
        if stored < 2:
            name = f"{name}_{len(self.weights)}"
            self.weights[name] = array
            return name
        self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        if stored == 2:
            return name
        self.nodes.append(helper.make_node("Identity", [name], [f"{name}_same"]))
        return f"{name}_same"

    def input(self, name: str, *shape: int | str) -> str:
        self.inputs[name] = (self.type, list(shape))
        return name

    def model(self, *outputs: str, rank: int = 2) -> onnx.ModelProto:
        return make_model(
            self.nodes,
            {"x": (self.type, ["batch", K]), **self.inputs},
            {name: (self.type, [f"{name}_{axis}" for axis in range(rank)]) for name in outputs},
            self.weights,
            opset=self.opset,
            domains={"com.microsoft": 1, "com.example": 1},
        )


# GELU as TorchScript and the dynamo exporter write it.
def gelu_torch(w: Writer, x: str) -> str:
    gate = w.node("Add", w.node("Erf", w.node("Div", x, math.sqrt(2))), 1.0)
    return w.node("Mul", w.node("Mul", x, gate), 0.5)


def run_unoptimized(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run the nodes as written. ONNX Runtime's own fusions would replace the nodes under test."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)
