"""Test when an activation range that begins at 0 needs clipping before a layer: as in the optimized file."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ..ops.single_node import assert_same_bits
from ..passes.int8_layers import Int8Layer, adopt
from ..passes.small_models import op_types, run
from .int8_models import dense_integers
from .sessions import claimed, needs_provider
from .test_static_int8 import LEVELS, session_at

pytestmark = needs_provider

K = 32
FLOAT = TensorProto.FLOAT
node = helper.make_node
CONSTANTS: dict[str, Any] = {
    "zero": np.float32(0), "one": np.float32(1), "most": np.float32(100), "minus": np.float32(-1),
    "two": np.float32(2), "three": np.float32(3), "positive": np.linspace(0, 1, K).astype(np.float32),
    "signed": np.linspace(-1, 1, K).astype(np.float32), "parts": np.array([K // 2, K // 2]),
    "order": np.arange(K)[::-1].copy(), "true": np.arange(K) % 2 == 0, "axis": np.array([-1]), "all": np.array([-1, K]),
    "codes": np.arange(K).astype(np.uint8), "step": np.float32(2**-6), "lowest": np.uint8(0), "middle": np.uint8(16),
    "mask_scale": np.float32(-3), "half": np.float32(0.5),
}  # fmt: skip
MASK = [
    node("Greater", ["in", "half"], ["m1"]),
    node("Cast", ["m1"], ["m2"], to=FLOAT),
    node("Sub", ["one", "m2"], ["m3"]),
    node("Mul", ["m3", "mask_scale"], ["x"]),
]
POSITIVE = {  # nodes that compute a non-negative x from `in`
    "relu": [node("Relu", ["in"], ["x"])],
    "clip": [node("Clip", ["in", "zero", "most"], ["x"])],
    "even power": [node("Pow", ["in", "two"], ["x"])],
    "square": [node("Mul", ["in", "in"], ["x"])],
    "softmax": [node("Softmax", ["in"], ["x"], axis=-1)],
    "sigmoid": [node("Sigmoid", ["in"], ["x"])],
    "sum": [node("Relu", ["in"], ["a"]), node("Exp", ["in"], ["e"]), node("Add", ["a", "e"], ["x"])],
    "sum with a constant": [node("Abs", ["in"], ["a"]), node("Add", ["positive", "a"], ["x"])],
    "sum with a dequantized constant": [
        node("DequantizeLinear", ["codes", "step", "lowest"], ["c"]),
        node("Abs", ["in"], ["a"]),
        node("Add", ["a", "c"], ["x"]),
    ],
    "joined": [
        node("Split", ["in", "parts"], ["a", "e"], axis=-1),
        node("Relu", ["a"], ["c"]),
        node("Sigmoid", ["e"], ["d"]),
        node("Concat", ["c", "d"], ["x"], axis=-1),
    ],
    "maximum": [node("Max", ["in", "positive"], ["x"])],
    "chosen": [node("Abs", ["in"], ["a"]), node("Where", ["true", "a", "positive"], ["x"])],
    "divided": [node("Softplus", ["in"], ["a"]), node("Exp", ["in"], ["e"]), node("Div", ["a", "e"], ["x"])],
    "one more than erf": [node("Erf", ["in"], ["a"]), node("Add", ["a", "one"], ["x"])],
    "moved": [
        node("Abs", ["in"], ["a"]),
        node("Gather", ["a", "order"], ["e"], axis=1),
        node("Transpose", ["e"], ["c"], perm=[1, 0]),
        node("Transpose", ["c"], ["d"], perm=[1, 0]),
        node("Reshape", ["d", "all"], ["x"]),
    ],
    "mean": [
        node("Relu", ["in"], ["a"]),
        node("ReduceMean", ["a"], ["e"], axes=[-1], keepdims=1),
        node("Expand", ["e", "shape"], ["x"]),
    ],
    "mask": MASK,
}
SIGNED = {
    "itself": [node("Identity", ["in"], ["x"])],
    "clip below 0": [node("Clip", ["in", "minus", "most"], ["x"])],
    "odd power": [node("Pow", ["in", "three"], ["x"])],
    "sum": [node("Relu", ["in"], ["a"]), node("Add", ["a", "in"], ["x"])],
    "sum with a constant": [node("Abs", ["in"], ["a"]), node("Add", ["signed", "a"], ["x"])],
    "sum with a dequantized constant": [
        node("DequantizeLinear", ["codes", "step", "middle"], ["c"]),
        node("Sigmoid", ["in"], ["a"]),
        node("Add", ["a", "c"], ["x"]),
    ],
    "product": [node("Relu", ["in"], ["a"]), node("Mul", ["a", "in"], ["x"])],
    "joined": [
        node("Split", ["in", "parts"], ["a", "e"], axis=-1),
        node("Relu", ["a"], ["c"]),
        node("Concat", ["c", "e"], ["x"], axis=-1),
    ],
    "maximum": [node("Max", ["in", "signed"], ["x"])],
    "difference": [node("Relu", ["in"], ["a"]), node("Sub", ["a", "one"], ["x"])],
    "tanh": [node("Tanh", ["in"], ["x"])],
    "silu": [node("Sigmoid", ["in"], ["a"]), node("Mul", ["a", "in"], ["x"])],
}


def model_of(nodes: list[onnx.NodeProto], x_unsigned: bool) -> onnx.ModelProto:
    """Return a model in which `nodes` compute x, and a layer quantizes x to a narrow range that begins at 0.

    Many values of x are above the range.
    """
    layer = Int8Layer("qdq", q=dense_integers(K, 24), x_unsigned=x_unsigned)
    layer.x_zero, layer.x_scale = 0 if x_unsigned else -128, np.float32(2**-11)
    everything = [*nodes, *layer.nodes()]
    tensors = layer.tensors | {name: np.asarray(one) for name, one in CONSTANTS.items()}
    tensors["shape"] = np.array([1, K])
    read = {name for one in everything for name in one.input}
    graph = helper.make_graph(
        everything,
        "a range that begins at 0",
        [helper.make_tensor_value_info("in", FLOAT, ["batch", K])],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in tensors.items() if name in read],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def check(nodes: list[onnx.NodeProto], is_cut: bool, x_unsigned: bool) -> None:
    model = model_of(nodes, x_unsigned)
    x = Int8Layer("qdq", k=K).inputs(9)
    optimized = adopt(model, calibration=[{"in": x}]).model
    own = sum(one.op_type == "Clip" for one in nodes)
    assert (op_types(optimized).count("Clip") > own) == is_cut
    (expected,) = run(optimized, {"in": x}, library=True)
    # ONNX Runtime's optimizer would add a quantization before each Transpose and Reshape.
    levels = LEVELS[1:] if any(one.op_type in ("Transpose", "Reshape") for one in nodes) else LEVELS
    for level in levels:
        session = session_at(model, level)
        assert "linear" in claimed(session)
        assert_same_bits(session.run(None, {"in": x})[0], expected)


@pytest.mark.parametrize("name", POSITIVE)
def test_what_is_never_negative_is_not_cut_off(name: str) -> None:
    check(POSITIVE[name], is_cut=False, x_unsigned=len(name) % 2 == 0)


@pytest.mark.parametrize("name", SIGNED)
def test_what_may_be_negative_is_cut_off(name: str) -> None:
    check(SIGNED[name], is_cut=True, x_unsigned=len(name) % 2 == 0)
