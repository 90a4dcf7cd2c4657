"""Models of ONNX Runtime's static quantizer: activations become float, and dense layers keep their integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization

import ortolan
from ortolan import Recipe
from ortolan.models import tiny

from .int8_layers import MICROSOFT, Int8Layer, adopt, outputs
from .ort_quantized import FEEDS, Reader, layers_of
from .small_models import make_model, op_types, random_weight, relative_error, run

FLOAT = TensorProto.FLOAT
RNG = np.random.default_rng(6)
WAYS: dict[str, dict[str, Any]] = {
    "QDQ": {"quant_format": quantization.QuantFormat.QDQ},
    "QDQ, layers": {"quant_format": quantization.QuantFormat.QDQ, "op_types_to_quantize": ["MatMul"]},
    "QDQ, a column, int8": {"per_channel": True, "activation_type": quantization.QuantType.QInt8},
    "QDQ, weights as well": {"extra_options": {"AddQDQPairToWeight": True}},
    "QDQ, uint8": dict.fromkeys(("weight_type", "activation_type"), quantization.QuantType.QUInt8),
    "operators": {"quant_format": quantization.QuantFormat.QOperator},
    "operators, layers": {"quant_format": quantization.QuantFormat.QOperator, "op_types_to_quantize": ["MatMul"]},
}
FREED = Recipe.from_dict({"name": "freed", "pass": [{"name": "normalize"}, {"name": "float_activations"}]})
ROUNDS = {"QuantizeLinear", "DequantizeLinear"}


@pytest.fixture(scope="module", params=WAYS)
def bert(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the paths of a float BERT and its quantized form."""
    folder = tmp_path_factory.mktemp("bert")
    onnx.save(ir.to_proto(tiny.tiny_bert()), folder / "float.onnx")
    quantization.quantize_static(folder / "float.onnx", folder / "int8.onnx", Reader(), **WAYS[request.param])
    return folder / "float.onnx", folder / "int8.onnx"


@pytest.mark.slow
def test_a_model_that_rounds_everywhere(bert: tuple[Path, Path], tmp_path: Path) -> None:
    stored = layers_of(bert[1])
    options = {"verify.seconds": 0.0, "unpad.drop_hidden": True}
    report = ortolan.optimize_onnx(bert[1], tmp_path / "fast.onnx", calibration=FEEDS, options=options)
    kinds = op_types(onnx.load(tmp_path / "fast.onnx"))
    assert kinds.count("PackedNoMADAttention") == 2 and not {"QuantizeLinear", "MatMul"} & set(kinds)
    assert {layer.name for layer in report.layers if layer.weight_bits == 8} == stored.keys() and len(stored) == 12
    assert any("quantizations of activations to fixed ranges removed" in note for note in report.notes)
    assert any("original " in note and "against the original's weights in float" in note for note in report.notes)
    assert "; relative error against float weights: original " in " ".join(str(report).split())
    before, after = report.output_error[0].from_float or (0, 1)
    assert after < before
    assert report.to_dict()["output_error"][0]["from_float"] == [before, after]
    assert not any("against the original, above" in note for note in report.notes)
    ids = RNG.integers(0, 101, (6, 12))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    exact, theirs = (run(str(path), feeds)[0] for path in bert)
    session = ortolan.create_session(tmp_path / "fast.onnx")
    ours = session.run(None, feeds)[0]
    assert relative_error(exact, ours) < relative_error(exact, theirs)
    for row in range(len(ids)):
        alone = session.run(None, {name: array[row : row + 1] for name, array in feeds.items()})[0]
        np.testing.assert_array_equal(alone[0], ours[row])


# --- ranges that clip -------------------------------------------------------------------------------------------------


def mlp(*activation: onnx.NodeProto, **constants: np.ndarray) -> onnx.ModelProto:
    """Return a model of a layer x -> h, the activation h -> a, and a layer a -> y."""
    return make_model(
        [
            helper.make_node("MatMul", ["x", "W"], ["p"], name="up"),
            helper.make_node("Add", ["p", "b"], ["h"], name="bias"),
            *activation,
            helper.make_node("MatMul", ["a", "V"], ["y"], name="down"),
        ],
        {"x": (FLOAT, ["batch", 32])},
        {"y": (FLOAT, ["batch", 32])},
        {"W": random_weight(32, 48), "b": random_weight(48, seed=1), "V": random_weight(48, 32, seed=2)} | constants,
    )


def quantized(model: onnx.ModelProto, folder: Path, form: quantization.QuantFormat) -> onnx.ModelProto:
    feeds = [{"x": RNG.standard_normal((16, 32)).astype(np.float32)} for _ in range(8)]
    onnx.save(model, folder / "float.onnx")
    quantization.quantize_static(folder / "float.onnx", folder / "int8.onnx", Reader(feeds), quant_format=form)
    return onnx.load(folder / "int8.onnx")


ACTIVATIONS = {
    "Relu": [helper.make_node("Relu", ["h"], ["a"])],
    "Clip": [helper.make_node("Clip", ["h", "zero", "most"], ["a"])],
}


@pytest.mark.parametrize("form", quantization.QuantFormat)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_relu_that_the_quantizer_left_out_is_there_again(
    kind: str, form: quantization.QuantFormat, tmp_path: Path
) -> None:
    bounds = {"zero": np.float32(0), "most": np.float32(0.5)} if kind == "Clip" else {}
    model = mlp(*ACTIVATIONS[kind], **{name: np.array(number) for name, number in bounds.items()})
    stored = quantized(model, tmp_path, form)
    assert kind not in op_types(stored)
    report = adopt(stored)
    assert {layer.new_op for layer in report.layers} == {"SparseAMXMatMul"}
    assert op_types(report.model).count("Clip") == 1 and not ROUNDS & set(op_types(report.model))
    x = RNG.standard_normal((20, 32)).astype(np.float32)
    (exact,) = run(model, {"x": x})
    for answer in outputs(report.model, x):
        assert relative_error(exact, answer) < 0.03


def test_what_is_never_negative_is_not_cut_off(tmp_path: Path) -> None:
    """The quantized range of erf + 1 starts at 0, but GELU is still found; the same for probabilities."""
    gelu = [
        helper.make_node("Div", ["h", "root"], ["scaled"]),
        helper.make_node("Erf", ["scaled"], ["erf"]),
        helper.make_node("Add", ["erf", "one"], ["twice"]),
        helper.make_node("Mul", ["h", "twice"], ["product"]),
        helper.make_node("Mul", ["product", "half"], ["a"]),
    ]
    numbers = {"root": np.sqrt(2), "one": 1, "half": 0.5}
    model = mlp(*gelu, **{name: np.array(number, np.float32) for name, number in numbers.items()})
    report = adopt(quantized(model, tmp_path, quantization.QuantFormat.QDQ))
    assert [layer.fused for layer in report.layers] == [["gelu"], []]
    assert op_types(report.model) == ["SparseAMXMatMul"] * 2 + ["Identity"]
    softmax = mlp(helper.make_node("Softmax", ["h"], ["a"]))
    assert "Clip" not in op_types(adopt(quantized(softmax, tmp_path, quantization.QuantFormat.QDQ)).model)


# --- single QDQ pairs
# ---------------------------------------------------------------------------------------------------


def freed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with float activations and unchanged layers."""
    return ortolan.optimize_onnx(model, recipe=FREED).model


def beside_a_layer(
    *nodes: onnx.NodeProto, opset: int = 17, kind: int = FLOAT, rank: int = 2, **constants: np.ndarray
) -> onnx.ModelProto:
    """Return a layer x -> y, and nodes that compute z.

    The nodes may read the quantized tensors xq and yr of x and y.
    """
    layer = Int8Layer("qdq")
    everything = [*layer.nodes(), *nodes]
    read = {name for node in everything for name in node.input}
    return make_model(
        everything,
        {"x": (FLOAT, ["batch", layer.k])},
        {"y": (FLOAT, ["batch", layer.n]), "z": (kind, [None] * rank)},
        {name: np.asarray(array) for name, array in (layer.tensors | constants).items() if name in read},
        opset=opset,
        ir_version=10,
        domains={MICROSOFT: 1},
    )


X = Int8Layer("qdq").inputs(7)
RANGE = ["x_scale", "x_zero"]


def dequantize(numbers: str, floats: str, *range_: str) -> onnx.NodeProto:
    return helper.make_node("DequantizeLinear", [numbers, *(range_ or RANGE)], [floats], f"{floats}_floats")


def test_numbers_that_are_moved_about() -> None:
    model = beside_a_layer(
        helper.make_node("Transpose", ["xq"], ["t"], perm=[1, 0]),
        helper.make_node("Split", ["t", "halves"], ["s0", "s1"], axis=0),
        helper.make_node("Unsqueeze", ["s1", "axis"], ["u"]),
        dequantize("u", "z"),
        halves=np.array([12, 20]),
        axis=np.array([0]),
        rank=3,
    )
    changed = freed(model)
    assert not ROUNDS & (set(op_types(changed)) - {"DequantizeLinear"}) and op_types(changed).count("Identity") == 1
    onnx.checker.check_model(changed, full_check=True)
    np.testing.assert_array_equal(run(changed, {"x": X})[1], X.T[None, 12:])


def test_numbers_that_others_take_stay() -> None:
    numbers = helper.make_node("Identity", ["xq"], ["z"])
    cast = [helper.make_node("Cast", ["xq"], ["z"], name="cast", to=FLOAT)]
    other_range = [dequantize("xq", "z", "scales0", "x_zero")]
    for nodes, kind, reason in (
        ([numbers], TensorProto.UINT8, "its codes 'z' are an output of the model"),
        (cast, FLOAT, "Cast 'cast' reads its codes without a DequantizeLinear"),
        (other_range, FLOAT, "DequantizeLinear 'z_floats' reads its codes without a DequantizeLinear"),
    ):
        model = beside_a_layer(*nodes, kind=kind, scales0=np.float32(0.7))
        report = ortolan.optimize_onnx(model, recipe=FREED)
        assert any(f"quantization of activations kept: 'quantize': {reason}" in note for note in report.notes)
        for before, after in zip(run(model, {"x": X}), run(report.model, {"x": X}), strict=True):
            np.testing.assert_array_equal(before, after)


def test_roundings_to_16_bits_stay() -> None:
    model = beside_a_layer(
        helper.make_node("QuantizeLinear", ["x", "fine", "middle"], ["f"], "fine"),
        dequantize("f", "z", "fine", "middle"),
        opset=21,
        fine=np.float32(2**-12),
        middle=np.uint16(2**15),
    )
    assert op_types(freed(model)).count("QuantizeLinear") == 1


TO = ["to_scale", "to_zero"]
ROUNDED = {
    "QLinearAdd": (["xq", *RANGE, "c", "c_scale", "c_zero", *TO], {}, lambda x, c: x + c),
    "QLinearMul": (["xq", *RANGE, "c", "c_scale", "c_zero", *TO], {}, lambda x, c: x * c),
    "QLinearSigmoid": (["xq", *RANGE, *TO], {}, lambda x, c: 1 / (1 + np.exp(-x))),
    "QLinearLeakyRelu": (["xq", *RANGE, *TO], {"alpha": 0.2}, lambda x, c: np.where(x < 0, 0.2 * x, x)),
    "QLinearSoftmax": (
        ["xq", *RANGE, *TO],
        {"axis": 0, "opset": 13},
        lambda x, c: np.exp(x) / np.exp(x).sum(axis=0),
    ),
    "QLinearConcat": (
        [*TO, "xq", *RANGE, "c", "c_scale", "c_zero"],
        {"axis": 0},
        lambda x, c: np.concatenate([x, c]),
    ),
    "QLinearWhere": (["chosen", "xq", *RANGE, "c", "c_scale", "c_zero", *TO], {}, lambda x, c: np.where(CHOSEN, x, c)),
}
CHOSEN = np.arange(32) % 3 == 0


@pytest.mark.parametrize("op_type", ROUNDED)
def test_operators_of_numbers_become_those_of_floats(op_type: str) -> None:
    inputs, attributes, expected = ROUNDED[op_type]
    numbers = RNG.integers(0, 256, (1, 32), np.uint8)
    c = (numbers.astype(np.float32) - 100) * np.float32(2**-6)
    exact = expected(X, c)
    low, step = min(exact.min(), 0), (max(exact.max(), 0) - min(exact.min(), 0)) / 250
    model = beside_a_layer(
        helper.make_node(op_type, inputs, ["zq"], name="of_numbers", domain=MICROSOFT, **attributes),
        dequantize("zq", "z", *TO),
        c=numbers,
        c_scale=np.float32(2**-6),
        c_zero=np.uint8(100),
        to_scale=np.float32(step),
        to_zero=np.uint8(np.rint(-low / step)),
        chosen=CHOSEN,
    )
    changed = freed(model)
    assert op_types(changed).count(op_type.removeprefix("QLinear")) == 1 and "QuantizeLinear" not in op_types(changed)
    np.testing.assert_allclose(run(changed, {"x": X})[1], exact, rtol=1e-5, atol=1e-6)
    assert relative_error(exact, run(model, {"x": X})[1]) < 0.05


def test_products_of_numbers_become_those_of_floats() -> None:
    """A QLinearMatMul of two activations is replaced by a float MatMul."""
    model = beside_a_layer(
        helper.make_node("Transpose", ["xq"], ["t"], perm=[1, 0]),
        helper.make_node("QLinearMatMul", ["t", *RANGE, "xq", *RANGE, *TO], ["zq"], name="scores"),
        dequantize("zq", "z", *TO),
        to_scale=np.float32(0.2),
        to_zero=np.uint8(128),
    )
    np.testing.assert_allclose(run(freed(model), {"x": X})[1], X.T @ X, rtol=1e-4, atol=1e-4)


def test_rows_of_a_table_are_gathered_before_they_are_floats() -> None:
    table = RNG.integers(0, 256, (50, 8), np.uint8)
    model = beside_a_layer(
        helper.make_node("DequantizeLinear", ["table", "t_scale", "t_zero"], ["floats"]),
        helper.make_node("ArgMax", ["x"], ["ids"], axis=1, keepdims=0),
        helper.make_node("Gather", ["floats", "ids"], ["rows"], name="gather"),
        helper.make_node("QuantizeLinear", ["rows", "t_scale", "t_zero"], ["rq"]),
        dequantize("rq", "z", "t_scale", "t_zero"),
        table=table,
        t_scale=np.float32(0.25),
        t_zero=np.uint8(128),
    )
    changed = freed(model)
    (gather,) = [node for node in changed.graph.node if node.op_type == "Gather"]
    assert gather.input[0] == "table" and "QuantizeLinear" not in op_types(changed)
    for before, after in zip(run(model, {"x": X})[1:], run(changed, {"x": X})[1:], strict=True):
        np.testing.assert_array_equal(before, after)


def test_the_lowest_float_stays_finite() -> None:
    """Dequantizing the lowest mask value in float32 overflows to -Inf; the result must stay finite."""
    lowest = np.finfo(np.float32).min
    scale = np.nextafter(np.float32(-lowest / 255), np.float32(np.inf))
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(255) * scale)
    model = beside_a_layer(
        dequantize("hidden", "low", "h_scale", "h_zero"),
        helper.make_node("Mul", ["x", "nothing"], ["none"]),
        helper.make_node("Max", ["low", "none"], ["z"]),
        hidden=np.array([0], np.uint8),
        h_scale=scale,
        h_zero=np.uint8(255),
        nothing=np.float32(0),
    )
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in freed(model).graph.initializer}
    assert any((array == lowest).all() for array in tensors.values() if array.dtype == np.float32)


@pytest.mark.parametrize("form", ["qlinear", "qgemm", "qgemm_trans_b", "qdq", "qdq_gemm", "to_float", "sparse_ml"])
def test_a_dense_layer_of_each_form(form: str) -> None:
    q = RNG.integers(-127, 128, (32, 24)).astype(np.int8)
    layer = Int8Layer(form, q=q, bias=form != "qlinear")
    model, x = layer.model(), layer.inputs(50)
    report = adopt(model)
    assert {"SparseAMXMatMul"} <= set(op_types(report.model)) <= {"SparseAMXMatMul", "Identity"}
    tensors = layer.tensors  # reading `tensors` rounds the layer's bias to whole steps
    exact = x @ layer.matrix + (layer.b if layer.bias else 0)
    assert tensors and relative_error(exact, run(model, {"x": x})[0]) < 0.2
    for answer in outputs(report.model, x):
        assert relative_error(exact, answer) < relative_error(exact, run(model, {"x": x})[0])


def test_fixed_ranges_stay_where_a_layer_is_sparse() -> None:
    """VNNISpMM uses the ranges of the sparse layer; the dense layer after it is not changed."""
    first, second = Int8Layer("qdq"), Int8Layer("qdq", q=RNG.integers(1, 128, (24, 16)).astype(np.int8), seed=1)
    dense = [onnx.NodeProto.FromString(node.SerializeToString()) for node in second.nodes()]
    for node in dense:
        node.name += "_2"
        node.input[:] = ["y" if name == "x" else f"{name}_2" for name in node.input]
        node.output[:] = [f"{name}_2" for name in node.output]
    tensors = first.tensors | {f"{name}_2": array for name, array in second.tensors.items()}
    nodes = [*first.nodes(), *dense]
    read = {name for node in nodes for name in node.input}
    model = make_model(
        nodes,
        {"x": (FLOAT, ["batch", 32])},
        {"y_2": (FLOAT, ["batch", 16])},
        {name: array for name, array in tensors.items() if name in read},
    )
    report = adopt(model)
    assert [layer.new_op for layer in report.layers] == ["VNNISpMM", None]
    assert report.layers[1].reason == "its input has a fixed range, which SparseAMXMatMul does not support"
    note = "fixed ranges of activations are kept: 1 of 2 layers with fixed ranges are sparse"
    assert any(note in one for one in report.notes)
