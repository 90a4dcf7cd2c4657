"""Attention of opset 23 after Ortolan's operators, and the shapes that the written models declare for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortolan

from .small_models import make_model, optimize, random_weight, relative_error, run

_WIDTH, _HEADS, _KV_HEADS, _HEAD = 64, 4, 2, 16
_FEEDS = {"ids": np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])}


def _capped_attention(by_heads: bool) -> onnx.ModelProto:
    """Return an embedding, linear layers and an attention with capped scores, which no operator supports.

    No value has a declared shape.
    """
    nodes = [helper.make_node("Gather", ["table", "ids"], ["x"])]
    weights = {"table": random_weight(100, _WIDTH)}
    last = dict.fromkeys("qkv", "")
    for seed, (name, heads) in enumerate((("q", _HEADS), ("k", _KV_HEADS), ("v", _KV_HEADS))):
        weights[f"W{name}"] = random_weight(_WIDTH, heads * _HEAD, seed=seed)
        nodes.append(helper.make_node("MatMul", ["x", f"W{name}"], [name], name=f"{name}_proj"))
        last[name] = name
        if by_heads:  # only the layer's width gives the last dimension
            weights[f"{name}_shape"] = np.array([0, 0, heads, -1])
            nodes.append(helper.make_node("Reshape", [name, f"{name}_shape"], [f"{name}_heads"]))
            last[name] = f"{name}_by_heads"
            nodes.append(helper.make_node("Transpose", [f"{name}_heads"], [last[name]], perm=[0, 2, 1, 3]))
    counts: dict[str, Any] = {} if by_heads else {"q_num_heads": _HEADS, "kv_num_heads": _KV_HEADS}
    attended = "attended_by_heads" if by_heads else "attended"
    nodes.append(helper.make_node("Attention", list(last.values()), [attended], "attention", softcap=2.0**21, **counts))
    if by_heads:
        weights["joined_shape"] = np.array([0, 0, -1])
        nodes.append(helper.make_node("Transpose", [attended], ["attended_by_tokens"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", ["attended_by_tokens", "joined_shape"], ["attended"]))
    weights["Wo"] = random_weight(_HEADS * _HEAD, _WIDTH, seed=3)
    nodes.append(helper.make_node("MatMul", ["attended", "Wo"], ["y"], name="o_proj"))
    inputs = {"ids": (TensorProto.INT64, ["batch", "tokens"])}
    outputs = {"y": (TensorProto.FLOAT, ["batch", "tokens", _WIDTH])}
    return make_model(nodes, inputs, outputs, weights, opset=23, ir_version=10)


@pytest.mark.parametrize("by_heads", [False, True])
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_attention_of_opset_23_stays(weights: str, by_heads: bool) -> None:
    model = _capped_attention(by_heads)
    report = optimize(model, recipe=None, weights=weights)
    assert report.model is not None and len(report.replaced) == 4
    expected = run(model, _FEEDS)[0]
    for library in (True, False):
        assert relative_error(expected, run(report.model, _FEEDS, library=library)[0]) < (
            0.3 if weights == "int4" else 0.05
        )


def test_declares_the_outputs_of_operators() -> None:
    report = optimize(_capped_attention(False), recipe=None, weights="bf16")
    assert report.model is not None
    declared = {value.name: value.type.tensor_type for value in report.model.graph.value_info}
    for name, width in (("q", _HEADS * _HEAD), ("k", _KV_HEADS * _HEAD), ("v", _KV_HEADS * _HEAD)):
        assert declared[name].elem_type == TensorProto.FLOAT
        assert [dim.dim_value for dim in declared[name].shape.dim] == [0, 0, width]


def test_a_model_without_functions_gets_no_reshape() -> None:
    report = ortolan.optimize_onnx(
        _capped_attention(False), weights="bf16", portable=False, options={"verify.seconds": 0.0, "may_grow": True}
    )
    assert report.model is not None
    assert "Reshape" not in [node.op_type for node in report.model.graph.node]
