"""Chains of element-wise nodes that are replaced by lookup tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper

import ortolan

from .small_models import make_model

MICROSOFT = {"com.microsoft": 1}

NUMBERS: dict[str, np.ndarray] = {
    "scale": np.array(0.04, np.float32),
    "y_scale": np.array(0.025, np.float32),
    "half": np.array(0.5, np.float32),
    "one": np.array([1.0], np.float32),
    "two": np.array(2.0, np.float32),
    "three": np.array(3.0, np.float32),
    "root": np.array(0.5**0.5, np.float32),
    "minus": np.array(-1.0, np.float32),
}


def node(op_type: str, inputs: str, output: str, **attributes: Any) -> NodeProto:
    """Return a node named after its output."""
    return helper.make_node(op_type, inputs.split(), [output], name=f"n_{output}", **attributes)


def microsoft(op_type: str, inputs: str, output: str, **attributes: Any) -> NodeProto:
    return node(op_type, inputs, output, domain="com.microsoft", **attributes)


def between(*nodes: NodeProto) -> list[NodeProto]:
    """Put a DequantizeLinear that computes a before the nodes, and a QuantizeLinear that reads b after them."""
    return [
        node("DequantizeLinear", "x scale zero", "a"),
        *nodes,
        node("QuantizeLinear", "b y_scale y_zero", "y"),
    ]


def code_model(
    nodes: Sequence[NodeProto],
    x_type: type = np.uint8,
    outputs: Mapping[str, type] | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
    opset: int = 21,
) -> onnx.ModelProto:
    """Return a model whose input x [rows, 17] is quantized. outputs: by default y in x's type."""
    limits = np.iinfo(x_type)
    numbers = {
        **NUMBERS,
        "zero": np.array((limits.max + limits.min + 1) // 2 + 3, x_type),
        "y_zero": np.array((limits.max + limits.min + 1) // 2 - 20, x_type),
        **(constants or {}),
    }
    if np.dtype(x_type).itemsize == 2 and constants is None:
        numbers |= {"scale": np.array(2e-4, np.float32), "y_scale": np.array(1e-4, np.float32)}
    used = {name for one in nodes for name in one.input}

    def typed(values: Mapping[str, type]) -> dict[str, tuple[int, Sequence[str | int]]]:
        types = {name: helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for name, dtype in values.items()}
        return {name: (kind, ["rows", 17 if name == "x" else "columns"]) for name, kind in types.items()}

    return make_model(
        nodes,
        typed({"x": x_type}),
        typed(outputs or {"y": x_type}),
        {name: array for name, array in numbers.items() if name in used},
        opset,
        ir_version=10,
        domains=MICROSOFT,
    )


def answers(model: onnx.ModelProto, feeds: dict[str, np.ndarray], library: bool = True) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if library:
        ortolan.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def all_codes(dtype: type) -> np.ndarray:
    """Return every value of the type in random order, some of them twice: [n, 17]."""
    limits = np.iinfo(dtype)
    codes = np.arange(limits.min, limits.max + 1)
    codes = np.random.default_rng(0).permutation(np.concatenate([codes, codes[: -len(codes) % 17]]))
    return codes.reshape(-1, 17).astype(dtype)


CHAINS: dict[str, list[NodeProto]] = {
    "nothing": between(node("Identity", "a", "b")),
    "requantize": [node("DequantizeLinear", "x scale zero", "a"), node("QuantizeLinear", "a y_scale y_zero", "y")],
    "relu": between(node("Relu", "a", "b")),
    "tanh": between(node("Tanh", "a", "b")),
    "leaky_relu": between(node("LeakyRelu", "a", "b", alpha=0.1)),
    "prelu": between(node("PRelu", "a one", "b")),
    "gelu": between(node("Gelu", "a", "b")),
    "gelu_by_tanh": between(node("Gelu", "a", "b", approximate="tanh")),
    "gelu_by_erf": between(
        node("Mul", "a root", "u"),
        node("Erf", "u", "e"),
        node("Add", "e one", "p"),
        node("Mul", "a p", "m"),
        node("Mul", "half m", "b"),
    ),
    "silu": between(node("Sigmoid", "a", "s"), node("Mul", "a s", "b")),
    "hard_swish": between(node("HardSwish", "a", "b")),
    "mish": between(node("Softplus", "a", "s"), node("Tanh", "s", "t"), node("Mul", "a t", "b")),
    "clip": between(node("Clip", "a minus two", "b")),
    "clip_one_side": between(helper.make_node("Clip", ["a", "", "two"], ["c"], name="n_c"), node("Neg", "c", "b")),
    "polynomial": between(node("Pow", "a three", "c"), node("Mul", "a a", "d"), node("Sub", "c d", "b")),
    "piecewise": between(
        node("Greater", "a one", "g"), node("Exp", "a", "e"), node("Where", "g one e", "w"), node("Sub", "w half", "b")
    ),
    "float16": between(
        node("Cast", "a", "h", to=TensorProto.FLOAT16), node("Sqrt", "h", "r"), node("Cast", "r", "b", to=1)
    ),
    "reciprocal": between(node("Reciprocal", "a", "b")),  # includes 1 / 0
    "log": between(node("Log", "a", "b")),  # -Inf for 0, NaN for negative values
    "quantized_between": [
        node("DequantizeLinear", "x scale zero", "a"),
        node("Sigmoid", "a", "s"),
        node("QuantizeLinear", "s y_scale zero", "q"),
        node("DequantizeLinear", "q y_scale zero", "d"),
        node("DequantizeLinear", "x scale zero", "a2"),
        node("Mul", "a2 d", "b"),
        node("QuantizeLinear", "b y_scale y_zero", "y"),
    ],
    "quantized_numbers": [  # as ONNX Runtime's quantizer writes them
        node("DequantizeLinear", "x scale zero", "a"),
        node("QuantizeLinear", "two y_scale y_zero", "t"),
        node("DequantizeLinear", "t y_scale y_zero", "u"),
        node("Div", "a u", "c"),
        node("Sqrt", "u", "r"),
        node("Add", "r c", "b"),
        node("QuantizeLinear", "b y_scale y_zero", "y"),
    ],
    "qlinear_sigmoid": [microsoft("QLinearSigmoid", "x scale zero y_scale y_zero", "y")],
    "qlinear_leaky_relu": [microsoft("QLinearLeakyRelu", "x scale zero y_scale y_zero", "y", alpha=0.2)],
    "qlinear_swish": [
        microsoft("QLinearSigmoid", "x scale zero y_scale y_zero", "s"),
        microsoft("QLinearMul", "x scale zero s y_scale y_zero y_scale zero", "y"),
    ],
    "qlinear_add_number": [microsoft("QLinearAdd", "x scale zero code y_scale y_zero scale zero", "y")],
    "microsoft": [
        microsoft("DequantizeLinear", "x scale zero", "a"),
        microsoft("QuickGelu", "a", "b", alpha=1.702),
        microsoft("FastGelu", "b", "c"),
        microsoft("QuantizeLinear", "c y_scale y_zero", "y"),
    ],
}
