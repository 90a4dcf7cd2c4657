"""Linear layers with fixed ranges that are not claimed: the reported reasons, which name the node."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortolan.provider import options_with

from ..passes.int8_layers import MICROSOFT, Int8Layer
from .int8_models import FLOAT, dense_integers
from .sessions import needs_provider

pytestmark = needs_provider

node, value = helper.make_node, helper.make_tensor_value_info
K, N = 64, 24
Models = Callable[[], onnx.ModelProto]


def model_of(form: str, bias: bool = False, opset: int = 21, **changes: Any) -> onnx.ModelProto:
    layer = Int8Layer(form, q=dense_integers(K, N), bias=bias, changes=changes)
    return layer.model(opset=opset, ir_version=10)


def named(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    (found,) = (one for one in model.graph.node if one.name == name)
    return found


def add(model: onnx.ModelProto, *nodes: onnx.NodeProto, outputs: tuple[str, ...] = (), **tensors: Any) -> None:
    model.graph.node.extend(nodes)
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items())


def with_attributes(form: str, name: str = "linear", bias: bool = False, opset: int = 21, **attributes: Any) -> Models:
    def make() -> onnx.ModelProto:
        model = model_of(form, bias, opset)
        found = named(model, name)
        kept = [one for one in found.attribute if one.name not in attributes]
        del found.attribute[:]
        found.attribute.extend([*kept, *(helper.make_attribute(*one) for one in attributes.items())])
        return model

    return make


def with_tensors(form: str, bias: bool = False, **changes: Any) -> Models:
    return lambda: model_of(form, bias, **changes)


def an_output(form: str, name: str) -> Models:
    def make() -> onnx.ModelProto:
        model = model_of(form)
        add(model, outputs=(name,))
        return model

    return make


def weight_of_two() -> onnx.ModelProto:
    """Return a layer whose dequantized, transposed weight another node reads too."""
    model = model_of("qdq_transpose")
    add(model, node("Neg", ["Wt"], ["z"], name="other"), outputs=("z",))
    return model


def constant_input() -> onnx.ModelProto:
    model = model_of("qdq")
    named(model, "linear").input[0] = "c"
    add(model, c=np.ones((3, K), np.float32))
    return model


def half_floats() -> onnx.ModelProto:
    model = model_of("qdq", scales=np.full(N, 0.5, np.float16))
    del model.graph.node[:2]
    named(model, "linear").input[0] = "x"
    for one in (model.graph.input[0], model.graph.output[0]):
        one.type.tensor_type.elem_type = TensorProto.FLOAT16
    return model


def transposed_input() -> onnx.ModelProto:
    model = with_attributes("qdq_gemm", transA=1)()
    shape = model.graph.input[0].type.tensor_type.shape
    shape.dim[0].dim_value, shape.dim[1].dim_param = K, "batch"
    return model


def computed_bias() -> onnx.ModelProto:
    model = model_of("qdq_gemm", bias=True)
    (tensor,) = (one for one in model.graph.initializer if one.name == "b")
    model.graph.initializer.remove(tensor)
    model.graph.input.append(value("b", FLOAT, [N]))
    return model


def computed_weight() -> onnx.ModelProto:
    model = model_of("qgemm")
    named(model, "linear").input[3] = "V"
    model.graph.node.insert(0, node("Identity", ["W"], ["V"], name="identity"))
    return model


def two_layers_of_one_rounding() -> onnx.ModelProto:
    """Return two layers that share the quantized x; the second has an invalid scale, so it is not claimed."""
    model = model_of("to_float")
    inputs = list(named(model, "linear").input)
    inputs[3] = "zeros_of_scales"
    second = node("MatMulIntegerToFloat", inputs, ["z"], name="second", domain=MICROSOFT)
    add(model, second, outputs=("z",), zeros_of_scales=np.zeros(N, np.float32))
    return model


def numbers_of_another_layer() -> onnx.ModelProto:
    model = model_of("qlinear")
    weight = ["W2", "scale2", "zero2"]
    inputs = ["yq", "y_scale", "y_zero", *weight, "y_scale", "y_zero"]
    second = [
        node("QLinearMatMul", inputs, ["zq"], name="second"),
        node("DequantizeLinear", ["zq", "y_scale", "y_zero"], ["z"], name="floats2"),
    ]
    add(
        model, *second, outputs=("z",), W2=dense_integers(N, 16, 1), scale2=np.float32(2**-7), zero2=np.int8(0)
    )  # fmt: skip
    return model


def blocks() -> onnx.ModelProto:
    model = with_attributes("qdq", "weight", axis=0, block_size=32)()
    for name, array in (("scales", np.ones((K // 32, N), np.float32)), ("zeros", np.zeros((K // 32, N), np.int8))):
        (tensor,) = (one for one in model.graph.initializer if one.name == name)
        tensor.CopyFrom(numpy_helper.from_array(array, name))
    return model


def scales_of_inputs() -> onnx.ModelProto:
    model = with_attributes("qdq", "weight", axis=0)()
    for name, array in (("scales", np.ones(K, np.float32)), ("zeros", np.zeros(K, np.int8))):
        (tensor,) = (one for one in model.graph.initializer if one.name == name)
        tensor.CopyFrom(numpy_helper.from_array(array, name))
    return model


RANGE = (
    "its input must be 8-bit quantized with a constant positive scale, and its quantized value must have no other "
    "consumer"
)
NO_RANGE = "its input has no constant positive scale with a constant 8-bit zero point"
NUMBERS = "its 8-bit output must only be read by DequantizeLinear nodes with the same scale and zero point"
ROWS = np.ones((9, N), np.float32)
REFUSED: dict[str, tuple[Models, str, str]] = {
    "a weight that others read": (weight_of_two, "linear", "its weight has other consumers"),
    "no range": (with_tensors("qdq", x_scale=np.float32(0)), "linear", RANGE),
    "no range of numbers": (with_tensors("qlinear", x_scale=np.float32(0)), "linear", NO_RANGE),
    "an infinite range": (with_tensors("qgemm", x_scale=np.float32(np.inf)), "linear", NO_RANGE),
    "rounded input that is an output": (an_output("qdq", "xq"), "linear", RANGE),
    "a constant input": (constant_input, "linear", "both inputs are constant"),
    "half floats": (half_floats, "linear", "its input 'x' is not float"),
    "a rounding that others keep": (
        two_layers_of_one_rounding, "linear",
        "its input is quantized to a fixed range and is also read outside the claimed layers",
    ),
    "numbers of another layer": (
        numbers_of_another_layer,
        "second",
        "its input is the 8-bit output of another layer without a DequantizeLinear in between",
    ),
    "a computed bias": (computed_bias, "linear", "bias 'b' is computed at run time"),
    "a bias a row": (
        with_tensors("qdq_gemm", True, b=ROWS), "linear", "bias 'b' has shape [9, 24], expected [24]"
    ),
    "blocks": (
        blocks, "linear", "its scales are per block of 32 inputs, expected one scale, or one per output"
    ),
    "scales of inputs": (
        scales_of_inputs, "linear", "its scales are per input, expected one scale, or one per output"
    ),
    "a transposed input": (transposed_input, "linear", "transA is 1, expected 0"),
    "alpha": (with_attributes("qdq_gemm", alpha=0.5), "linear", "alpha is 0.5, expected 1"),
    "beta": (with_attributes("qdq_gemm", bias=True, beta=2.0), "linear", "beta is 2, expected 1"),
    "transA of QGemm": (with_attributes("qgemm", transA=1), "linear", "transA is 1, expected 0"),
    "alpha of QGemm": (with_attributes("qgemm", alpha=0.5), "linear", "alpha is 0.5, expected 1"),
    "numbers that are an output": (an_output("qlinear", "yq"), "linear", NUMBERS),
    "numbers of QGemm that are an output": (an_output("qgemm", "yq"), "linear", NUMBERS),
    "a computed weight": (
        computed_weight, "linear", "its weight 'V' are not constant; export the model with constant weight"
    ),
    "scales of 0": (
        with_tensors("qlinear", scales=np.zeros(N, np.float32)), "linear",
        "its weight has a scale of 0, expected positive scales; quantize the model again",
    ),
}  # fmt: skip


def reasons_of(model: onnx.ModelProto, folder: Path) -> dict[str, str]:
    """Map the nodes that are not claimed to their reasons, with ONNX Runtime's optimizations disabled."""
    file = folder / "claims.jsonl"
    options = options_with({"claims": "all", "claims_file": str(file)})
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options)
    except Exception as error:  # ONNX Runtime may lack a kernel for a node that is not claimed
        assert "NOT_IMPLEMENTED" in str(error), error
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["node"]: line["reason"] for line in lines if not line["taken"]}


@pytest.mark.parametrize("name", REFUSED)
def test_reasons(name: str, tmp_path: Path) -> None:
    make, left, reason = REFUSED[name]
    assert reasons_of(make(), tmp_path).get(left) == reason


@pytest.mark.parametrize("form", ["qdq", "qdq_gemm", "qlinear", "qgemm", "to_float"])
def test_nothing_is_left_without_a_reason(form: str, tmp_path: Path) -> None:
    """The unchanged models of the cases above are claimed completely, so no reason is reported."""
    assert reasons_of(model_of(form), tmp_path) == {}
