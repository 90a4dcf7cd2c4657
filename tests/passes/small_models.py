"""Small ONNX models for the tests of the passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import OptimizationReport
from ortolan.graph_passes.measure.sessions import open_quietly

from ..recipes.forms import NAMED, named

# Skip the latency measurement, and also replace layers whose weight gets larger.
FAST = {"verify.seconds": 0.0, "may_grow": True}

Shape = Sequence[int | str | None]


def random_weight(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[0])).astype(dtype)


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Shape]],
    outputs: Mapping[str, tuple[int, Shape]],
    weights: Mapping[str, np.ndarray] | None = None,
    opset: int = 17,
    ir_version: int = 8,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """Return a checked model. Inputs and outputs map names to (element type, shape)."""
    initializers = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    values = [
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in side.items()]
        for side in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "test", values[0], values[1], initializers)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(*item) for item in (domains or {}).items())]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version, functions=functions)
    onnx.checker.check_model(model)
    return model


def matmul_model(k: int = 20, n: int = 24, opset: int = 17, weight: np.ndarray | None = None) -> onnx.ModelProto:
    """Return y = x W + b as MatMul and Add, with x [batch, sequence, k]."""
    return make_model(
        [
            helper.make_node("MatMul", ["x", "W"], ["product"], name="linear"),
            helper.make_node("Add", ["product", "b"], ["y"], name="bias"),
        ],
        {"x": (TensorProto.FLOAT, ["batch", "sequence", k])},
        {"y": (TensorProto.FLOAT, ["batch", "sequence", n])},
        {"W": random_weight(k, n) if weight is None else weight, "b": random_weight(n, seed=1)},
        opset,
    )


def optimize(model: Any, output: Any = None, **arguments: Any) -> OptimizationReport:
    """Call optimize_onnx without timing, by default with the recipe sparse-bf16."""
    arguments = {"recipe": NAMED["sparse-bf16"]} | arguments
    options = FAST | arguments.pop("options", {})
    arguments["recipe"] = named(arguments["recipe"])
    return ortolan.optimize_onnx(model, output, options=options, **arguments)


def run(model: onnx.ModelProto | str, feeds: Mapping[str, np.ndarray], library: bool = False) -> list[np.ndarray]:
    """Run the model in ONNX Runtime with integer sums that are exact on every CPU.

    test_quiet_sessions.py checks that they are.
    """
    content = model.SerializeToString() if isinstance(model, onnx.ModelProto) else Path(model)
    return open_quietly(content, library=library).run(None, dict(feeds))


def relative_error(expected: np.ndarray, found: np.ndarray) -> float:
    return float(np.linalg.norm(expected - found) / np.linalg.norm(expected))


def op_types(model: onnx.ModelProto | ir.Model) -> list[str]:
    """Return the operator types of all nodes, including those in subgraphs."""
    loaded = ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model
    return [node.op_type for node in loaded.graph.all_nodes()]


def branches_model(inner: bool = True, opset: int = 17, n: int = 24) -> onnx.ModelProto:
    """Return y = x W, computed in the branch of an If that `flag` selects.

    Both branches use the same value names. inner: each branch has its own W.
    """

    def branch(seed: int) -> onnx.GraphProto:
        weights = [numpy_helper.from_array(random_weight(20, n, seed=seed), "W")] if inner else []
        node = helper.make_node("MatMul", ["x", "W"], ["product"], name="linear")
        return helper.make_graph(
            [node], "branch", [], [helper.make_tensor_value_info("product", TensorProto.FLOAT, ["batch", n])], weights
        )

    return make_model(
        [helper.make_node("If", ["flag"], ["y"], then_branch=branch(1), else_branch=branch(2), name="if")],
        {"x": (TensorProto.FLOAT, ["batch", 20]), "flag": (TensorProto.BOOL, [])},
        {"y": (TensorProto.FLOAT, ["batch", n])},
        {} if inner else {"W": random_weight(20, n)},
        opset,
    )
