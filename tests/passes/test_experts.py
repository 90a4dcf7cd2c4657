"""Test pass experts: QMoE and MoE nodes become MoE, with the same integers and routing."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import ortolan
from ortolan.graph_passes.report.optimization import OptimizationReport

EXPERTS, SELECTED, HIDDEN, INNER = 6, 2, 64, 32


def mixture(op: str, activation: str = "swiglu", *, bias: bool = False, router_weights: bool = False,
            zero_points: bool = False, dtype: Any = np.float32, **attributes: Any) -> onnx.ModelProto:  # fmt: skip
    """Return a model: router logits = x R, y = QMoE or MoE of x and the logits."""
    rng = np.random.default_rng(4)
    bits, block = attributes.get("expert_weight_bits", 4), attributes.get("block_size", 0)
    tensors: dict[str, np.ndarray] = {"router": rng.standard_normal((HIDDEN, EXPERTS))}
    for name, n, k in (("fc1", INNER * (2 if activation == "swiglu" else 1), HIDDEN), ("fc2", HIDDEN, INNER)):
        if op == "MoE":
            tensors[name] = rng.standard_normal((EXPERTS, n, k)) * 0.1
        else:
            blocks = k // block if block else 1
            tensors[name] = rng.integers(0, 256, (EXPERTS, n, k * bits // 8), dtype=np.uint8)
            tensors[f"{name}_scales"] = rng.random((EXPERTS, n, blocks) if block else (EXPERTS, n)) * 0.3 / 2**bits
            if zero_points:
                tensors[f"{name}_zeros"] = rng.integers(0, 256, (EXPERTS, n, blocks * bits // 8), dtype=np.uint8)
        if bias:
            tensors[f"{name}_bias"] = rng.standard_normal((EXPERTS, n))
    wanted = ["x", "logits", "fc1", "fc1_scales", "fc1_bias", "fc2", "fc2_scales", "fc2_bias", "", "", "", "fc1_zeros",
              "fc2_zeros", "", "weights"]  # fmt: skip
    if op == "MoE":
        wanted = ["x", "logits", "fc1", "fc1_bias", "fc2", "fc2_bias"]
    known = {"x", "logits", *tensors, *(["weights"] if router_weights else [])}
    inputs = [name if name in known else "" for name in wanted]
    while not inputs[-1]:
        inputs.pop()
    if activation == "swiglu":
        attributes["swiglu_fusion"] = 1
    nodes = [helper.make_node("MatMul", ["x", "router"], ["logits"], "router")]
    if router_weights:
        nodes.append(helper.make_node("Sigmoid", ["logits"], ["weights"], "scores"))
    nodes.append(
        helper.make_node(
            op, inputs, ["y"], "moe", domain="com.microsoft", k=SELECTED, activation_type=activation, **attributes
        )
    )
    arrays = {name: array if array.dtype == np.uint8 else array.astype(dtype) for name, array in tensors.items()}
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "mixture",
        [helper.make_tensor_value_info("x", kind, ["tokens", HIDDEN])],
        [helper.make_tensor_value_info("y", kind, ["tokens", HIDDEN])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=9, opset_imports=opsets)


def optimized(model: onnx.ModelProto, **options: Any) -> OptimizationReport:
    return ortolan.optimize_onnx(model, **options)


CASES: dict[str, dict[str, Any]] = {
    "int4 in blocks": {"block_size": 32},
    "int4 in rows": {"activation": "silu"},
    "zero points and bias": {"block_size": 16, "zero_points": True, "bias": True},
    "int8": {"expert_weight_bits": 8, "block_size": 32, "activation": "gelu"},
    "gpt-oss": {"block_size": 32, "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.4, "bias": True},
    "given weights": {"block_size": 32, "router_weights": True},
    "normalized weights": {"block_size": 32, "router_weights": True, "normalize_routing_weights": 1},
    "float16": {"block_size": 32, "dtype": np.float16, "activation": "relu"},
}


@pytest.mark.parametrize("case", [name for name in CASES if name != "zero points and bias"])
def test_integers_of_qmoe_are_kept(case: str) -> None:
    """The answers differ from ONNX Runtime's by the rounding of the inputs of both layers only."""
    report = optimized(mixture("QMoE", **CASES[case]))
    assert report.model is not None and [node.op_type for node in report.model.graph.node].count("MoE") == 1
    (error,) = report.output_error
    assert error.relative_l2 < 0.02
    (layer,) = (layer for layer in report.layers if layer.name == "moe")
    assert (layer.new_op, layer.status, layer.reason) == ("MoE", "replaced", None)
    assert layer.weight_bits == CASES[case].get("expert_weight_bits", 4)


@pytest.mark.parametrize(("weights", "most"), [("int8", 0.02), ("int4", 0.15)])
@pytest.mark.parametrize("normalize", [0, 1])
def test_floats_of_moe_are_rounded(weights: str, most: float, normalize: int) -> None:
    report = optimized(mixture("MoE", normalize_routing_weights=normalize, bias=True), weights=weights)
    assert report.model is not None and "MoE" in {node.op_type for node in report.model.graph.node if node.domain}
    (error,) = report.output_error
    assert error.relative_l2 < most


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 16, "zero_points": True}, "its block_size is 16, expected a multiple of 32"),
        ({"block_size": 32, "use_sparse_mixer": 1}, "its attribute 'use_sparse_mixer' is 1, which is not supported"),
        ({"expert_weight_bits": 8, "block_size": 32, "zero_points": True}, "it has zero points of 8 bits"),
    ],
)
def test_unsupported_nodes_are_left_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    report = optimized(mixture("QMoE", **changes), weights="int8", dry_run=True)
    (layer,) = (layer for layer in report.layers if layer.name == "moe")
    assert (layer.new_op, layer.reason) == (None, reason)
