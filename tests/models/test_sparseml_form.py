"""SparseML's form of quantized models: it computes what the float model does, and optimize_onnx finds zero blocks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import ortolan
from ortolan.models import tiny
from ortolan.models.sparseml_form import OPSET, float_form, quantized_form

LAYERS, LINEAR = 2, 12  # encoder layers, and linear layers in all of them
KINDS = {"static": {}, "layers alone": {"products": False}, "dynamic": {"activations": "dynamic"}}
# Allowed relative error. Ortolan may round activations per token or keep them in float32.
CLOSE = {"static": 1e-5, "layers alone": 0.02, "dynamic": 0.02}


def feeds_of(*shapes: tuple[int, int]) -> list[dict[str, np.ndarray]]:
    made = []
    for seed, shape in enumerate(shapes):
        ids = np.random.default_rng(seed).integers(0, 100, shape)
        mask = np.ones_like(ids)
        mask[0, shape[1] - 1 :] = 0
        made.append({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})
    return made


FEEDS = feeds_of((1, 9), (2, 12), (3, 7))


def zeroed(weight: np.ndarray, outputs: int, inputs: int) -> np.ndarray:
    """Set about four of five blocks of a weight [k, n] to zero. A block has `outputs` columns and `inputs` rows."""
    k, n = weight.shape
    kept = np.random.default_rng(k + n).random((k // inputs, n // outputs)) < 0.2
    return np.where(np.repeat(np.repeat(kept, inputs, axis=0), outputs, axis=1), weight, np.float32(0))


def sparse_bert(outputs: int = 4, inputs: int = 1) -> onnx.ModelProto:
    made = tiny.tiny_bert(hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS)
    model = ir.to_proto(made)
    linear = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    for tensor in model.graph.initializer:
        if tensor.name in linear:
            sparse = zeroed(numpy_helper.to_array(tensor), outputs, inputs)
            tensor.CopyFrom(numpy_helper.from_array(sparse, tensor.name))
    return model


def answers(model: onnx.ModelProto, feeds=FEEDS) -> np.ndarray:
    """Return the outputs at all tokens except padding."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, one)[0][one["attention_mask"] == 1] for one in feeds])


def ours(model: onnx.ModelProto, feeds=FEEDS) -> np.ndarray:
    session = ortolan.create_session(model)
    return np.concatenate([session.run(None, one)[0][one["attention_mask"] == 1] for one in feeds])


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def kinds_of(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def makers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in model.graph.node for name in node.output}


@pytest.fixture(scope="module")
def sparse() -> onnx.ModelProto:
    return sparse_bert()


def test_floats_have_the_answers_of_the_original(sparse):
    made = float_form(sparse)
    onnx.checker.check_model(made, full_check=True)
    assert [one.version for one in made.opset_import] == [OPSET]
    assert "LayerNormalization" not in kinds_of(made) and kinds_of(made)["ReduceMean"] == 2 * (2 * LAYERS + 1)
    assert error(answers(made), answers(sparse)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_forms_run_and_stay_near_the_floats(sparse, kind):
    made = quantized_form(sparse, FEEDS, **KINDS[kind])
    onnx.checker.check_model(made, full_check=True)
    assert error(answers(made), answers(sparse)) < 0.06
    kinds = kinds_of(made)
    products = LAYERS if kind == "static" else 0
    assert kinds["MatMulInteger"] == LINEAR + products and kinds["QLinearMatMul"] == products
    assert kinds["MatMul"] == 2 * LAYERS - 2 * products
    assert bool(kinds["DynamicQuantizeLinear"]) == (kind == "dynamic")


def test_what_the_exports_have(sparse):
    made = quantized_form(sparse, FEEDS)
    tensors = {one.name: numpy_helper.to_array(one) for one in made.graph.initializer}
    made_by = makers(made)
    tables = [node for node in made.graph.node if node.op_type == "Gather" and node.input[0] in tensors]
    assert [tensors[node.input[0]].dtype for node in tables if tensors[node.input[0]].ndim == 2] == [np.uint8] * 3
    for node in made.graph.node:
        if node.op_type == "MatMulInteger" and node.input[1] in tensors:
            assert tensors[node.input[1]].dtype == np.uint8 and tensors[node.input[3]] == 128
            assert made_by[node.input[0]].op_type == "QuantizeLinear"
    residuals = [
        [made_by[name].op_type for name in node.input if name in made_by]
        for node in made.graph.node
        if node.op_type == "Add" and any("identity_dequantized" in name for name in node.input)
    ]
    assert residuals == [["Mul", "DequantizeLinear"]] * (2 * LAYERS)
    # One QuantizeLinear serves query, key and value.
    assert kinds_of(made)["QuantizeLinear"] == LAYERS * (4 + 4)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_blocks_are_found_and_answers_kept(sparse, kind):
    made = quantized_form(sparse, FEEDS, **KINDS[kind])
    seen = ortolan.inspect_onnx(made)
    assert sum((layer.sparsity or 0) > 0.75 for layer in seen.linears) == LINEAR
    report = ortolan.optimize_onnx(made, calibration=FEEDS, options={"verify.seconds": 0.0, "may_grow": True})
    # If attention computes in float, query, key and value are joined to one node.
    assert kinds_of(report.model)["VNNISpMM"] == (LINEAR if kind == "static" else LINEAR - 2 * LAYERS)
    assert error(ours(report.model), answers(made)) < CLOSE[kind]


def test_blocks_of_four_inputs_are_others(sparse):
    """SparseML's blocks have one output and four inputs. If 80 % of them are zero, few 4x1 blocks are zero."""
    made = quantized_form(sparse_bert(outputs=1, inputs=4), FEEDS, activations="dynamic")
    report = ortolan.optimize_onnx(made, calibration=FEEDS, options={"verify.seconds": 0.0, "may_grow": True})
    kinds = kinds_of(report.model)
    assert kinds["SparseAMXMatMul"] and not kinds["VNNISpMM"]
    assert error(ours(report.model), answers(made)) < CLOSE["dynamic"]
