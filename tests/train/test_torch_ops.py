"""Each operator in torch, compared with ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortolan import ModelError
from ortolan.models import tiny

torch = pytest.importorskip("torch")
from ortolan.train.torch_graph import TorchGraph  # noqa: E402
from ortolan.train.torch_ops import OPERATORS  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 4, 6)).astype(np.float32)
POSITIVE = np.abs(X) + np.float32(0.1)
IDS = np.array([[-7, 2, 5], [4, 4, 0]], np.int64)
YES = X > 0
UNARY = ["Abs", "Cos", "Dropout", "Erf", "Exp", "Flatten", "Identity", "Neg", "Relu", "Sigmoid", "Sin", "Softmax"]
UNARY += ["Tanh", "Transpose", "Ceil", "Floor", "Round", "Sign"]
BINARY = ["Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"]


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


# (operator, inputs, attributes). The first input is a graph input, further inputs are constants.
CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    *((op, [X], {}) for op in UNARY),
    *((op, [POSITIVE], {}) for op in ("Log", "Sqrt", "Reciprocal")),
    *((op, [POSITIVE, POSITIVE[:, :1] + np.float32(0.25)], {}) for op in BINARY),
    *((op, [YES, YES[:1]], {}) for op in ("And", "Or", "Xor")),
    ("Not", [YES], {}),
    ("Div", [IDS, ints(3)], {}),
    ("Where", [YES, X, np.zeros_like(X)], {}),
    ("Cast", [X], {"to": TensorProto.INT64}),
    ("Cast", [X], {"to": TensorProto.BOOL}),
    ("Clip", [X, np.float32(-0.5), np.float32(0.5)], {}),
    ("Clip", [X, np.float32(-0.5)], {}),
    ("Concat", [X, X[:, :2]], {"axis": 1}),
    ("ConstantOfShape", [ints(2, 3)], {"value": numpy_helper.from_array(np.array([7], np.int64))}),
    ("ConstantOfShape", [ints(2, 3)], {}),
    ("CumSum", [IDS, np.array(1, np.int64)], {}),
    ("CumSum", [IDS, np.array(1, np.int64)], {"exclusive": 1}),
    ("CumSum", [IDS, np.array(0, np.int64)], {"reverse": 1}),
    ("Expand", [X[:, :1], ints(1, 4, 1)], {}),
    ("Flatten", [X], {"axis": 2}),
    ("Flatten", [X], {"axis": 0}),
    ("Gather", [IDS, ints(0, 1)], {}),
    ("Gather", [X, np.array([[0, -1], [2, 1]], np.int64)], {"axis": 1}),
    ("Gather", [X, np.array(1, np.int64)], {"axis": -1}),
    ("GatherElements", [X[0], np.array([[1, -1, 0], [2, 3, 1]], np.int64)], {"axis": 1}),
    ("IsNaN", [np.where(YES, X, np.float32("nan"))], {}),
    ("Tile", [X, ints(1, 2, 3)], {}),
    ("Gemm", [X[0], X[1]], {"transB": 1, "alpha": 0.5}),
    ("Gemm", [X[0], X[1, :, :4], X[0, 0, :4]], {"transA": 1, "beta": 2.0}),
    ("LayerNormalization", [X, X[0, 0], X[0, 1]], {"epsilon": 1e-3}),
    ("LayerNormalization", [X, X[0]], {"axis": 1}),
    ("MatMul", [X, X[0].T.copy()], {}),
    ("Range", [np.array(1, np.int64), np.array(9, np.int64), np.array(3, np.int64)], {}),
    ("ReduceMax", [X, ints(1)], {"keepdims": 0}),
    ("ReduceMean", [X, ints(-1)], {}),
    ("ReduceMean", [X], {}),
    ("ReduceSum", [X, ints(0, 2)], {"keepdims": 0}),
    ("ReduceSum", [X], {"noop_with_empty_axes": 1}),
    ("Reshape", [X, ints(0, -1, 2)], {}),
    ("Shape", [X], {}),
    ("Shape", [X], {"start": -2}),
    ("Slice", [X, ints(1), ints(2**63 - 1), ints(2)], {}),
    ("Slice", [X, ints(0, -3), ints(-1, 100), ints(1, 2), ints(2, 1)], {}),
    ("Slice", [X, ints(-1), ints(-100), ints(2), ints(-1)], {}),
    ("Slice", [X, ints(1, 1), ints(3, 3)], {}),
    ("Softmax", [X], {"axis": 1}),
    ("Squeeze", [X[:, :1], ints(1)], {}),
    ("Squeeze", [X[:1, :1]], {}),
    ("Transpose", [X], {"perm": [2, 0, 1]}),
    ("Trilu", [X], {}),
    ("Trilu", [X, np.array(1, np.int64)], {"upper": 0}),
    ("Unsqueeze", [X, ints(-1, 0)], {}),
    ("Gelu", [X], {}),
    ("Gelu", [X], {"approximate": "tanh"}),
]


def operator_model(op: str, inputs: list[Any], attributes: dict[str, Any], outputs: int = 1) -> onnx.ModelProto:
    """Return a model of one node, whose first input is a graph input. The opset is 20 for Gelu, otherwise 18."""
    arrays = [np.asarray(array) for array in inputs]
    names = [f"input{index}" for index in range(len(arrays))]
    node = helper.make_node(op, names, [f"output{index}" for index in range(outputs)], name="n", **attributes)
    first = helper.make_tensor_value_info(
        "input0", helper.np_dtype_to_tensor_dtype(arrays[0].dtype), list(arrays[0].shape)
    )
    graph = helper.make_graph(
        [node],
        "test",
        [first],
        [helper.make_empty_tensor_value_info(name) for name in node.output],
        [numpy_helper.from_array(array, name) for name, array in zip(names[1:], arrays[1:], strict=True)],
    )
    opset = 20 if op == "Gelu" else 18
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def compare(model: onnx.ModelProto, first: np.ndarray) -> None:
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"input0": first})
    loaded = ir.from_proto(model)
    graph = TorchGraph(loaded, (), "the model")
    found = graph.run({"input0": torch.from_numpy(np.array(first))}, {}, list(loaded.graph.outputs))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.numpy().dtype == other.dtype and tuple(one.shape) == other.shape
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_operator(case):
    op, inputs, attributes = case
    compare(operator_model(op, inputs, attributes), np.asarray(inputs[0]))


@pytest.mark.parametrize("inputs, outputs", [([X, ints(1, 3)], 2), ([X[:, :3]], 2)])
def test_split(inputs, outputs):
    attributes = {"axis": 1} | ({"num_outputs": 2} if len(inputs) == 1 else {})
    compare(operator_model("Split", inputs, attributes, outputs), inputs[0])


def test_every_operator_is_compared():
    assert {case[0] for case in CASES} | {"Split", "Constant"} == OPERATORS.keys()


@pytest.mark.parametrize("build", [tiny.tiny_bert, tiny.tiny_mpnet])
def test_encoder(build, tmp_path):
    model = build()
    ir.save(model, tmp_path / "model.onnx")
    ids = RNG.integers(3, 90, (3, 11))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    feeds["attention_mask"][1, 7:] = 0
    feeds = {value.name: feeds[value.name] for value in model.graph.inputs}
    (expected,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, feeds)
    tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
    (found,) = TorchGraph(model, (), "the model").run(tensors, {}, list(model.graph.outputs))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("form", ["matmul", "gemm", "gemm_trans_b", "transpose", "identity", "cast", "dequantize"])
def test_forms_of_linear_layers(form, tmp_path):
    model = tiny.mlp(forms=form)
    ir.save(model, tmp_path / "model.onnx")
    x = RNG.standard_normal((5, 24)).astype(np.float32)
    (expected,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"x": x})
    if form == "dequantize":
        with pytest.raises(ModelError, match=r"DequantizeLinear, which training does not support"):
            TorchGraph(model, (), "the model")
        return
    (found,) = TorchGraph(model, (), "the model").run({"x": torch.from_numpy(x)}, {}, list(model.graph.outputs))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_parameters_take_the_place_of_initializers():
    model = tiny.mlp(widths=(4, 3), forms="matmul")
    (name,) = model.graph.initializers
    x, weight = torch.randn(2, 4), torch.randn(4, 3, requires_grad=True)
    (found,) = TorchGraph(model, [name], "the model").run({"x": x}, {name: weight}, list(model.graph.outputs))
    torch.testing.assert_close(found, x @ weight)
    found.sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0)[:, None].expand(4, 3))


def test_unknown_operators_and_old_opsets_are_refused():
    model = ir.from_proto(operator_model("Tan", [X], {}))
    with pytest.raises(ModelError, match=r"node 'n' is a Tan, which training does not support"):
        TorchGraph(model, (), "the model")
    model.opset_imports[""] = 12
    with pytest.raises(ModelError, match="opset 12, but training needs 13"):
        TorchGraph(model, (), "the model")


def test_a_node_that_does_not_run_is_named():
    model = ir.from_proto(operator_model("MatMul", [X, X[0].T.copy()], {}))
    graph = TorchGraph(model, (), "the model")
    with pytest.raises(ModelError, match=r"node 'n' \(MatMul\) does not run in torch"):
        graph.run({"input0": torch.zeros(2, 5)}, {}, list(model.graph.outputs))
