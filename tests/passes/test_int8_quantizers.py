"""A sparse model quantized in every way that ONNX Runtime offers: its integers and ranges are kept."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnxruntime import quantization

import ortolan
from ortolan import Recipe
from ortolan.models import tiny

from .int8_layers import Int8Layer, optimize, outputs, packed_integers, sparse_integers
from .ort_quantized import FEEDS, Reader, layers_of
from .small_models import make_model, op_types, run


@pytest.fixture(scope="module")
def sparse_bert(tmp_path_factory):
    """Return the path of a BERT in which 80 % of the blocks of four outputs are zero."""
    path = tmp_path_factory.mktemp("bert") / "float.onnx"
    steps = [{"name": "normalize"}, {"name": "prune", "pattern": "4x1", "sparsity": 0.8}]
    report = ortolan.optimize_onnx(ir.to_proto(tiny.tiny_bert()), recipe=Recipe.from_dict({"name": "r", "pass": steps}))
    del report.model.metadata_props[:]  # remove the metadata that marks Ortolan's models
    onnx.save(report.model, path)
    return path


def check_bert(path, tmp_path, most: float, exact: bool) -> None:
    stored = layers_of(path)
    assert len(stored) == 12
    for recipe in ("sparse-int8-4x1", "adopt"):
        # Prevent joined layers, so that each layer keeps its name.
        options = {"fuse": False} if recipe == "sparse-int8-4x1" else {"fuse_attention.exclude": ["*"]}
        report = optimize(path, tmp_path / "fast.onnx", recipe=recipe, calibration=FEEDS, options=options)
        model = onnx.load(tmp_path / "fast.onnx")
        replaced = [layer for layer in report.replaced if layer.new_op == "VNNISpMM"]
        assert len(replaced) == op_types(model).count("VNNISpMM") == 12
        for name, layer in stored.items():
            found, scales = packed_integers(model, name)
            np.testing.assert_array_equal(found * scales, layer.matrix())
            if exact:
                np.testing.assert_array_equal(found, layer.int8.q.numpy())
        (error,) = report.output_error
        assert error.relative_l2 < most
        assert all(layer.output_error < 0.05 for layer in replaced)


@pytest.mark.parametrize("reduce_range", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_quantize_dynamic(sparse_bert, tmp_path, per_channel, reduce_range, fused):
    path = tmp_path / "int8.onnx"
    quantization.quantize_dynamic(sparse_bert, path, per_channel=per_channel, reduce_range=reduce_range)
    if fused:
        path = save_as_optimized(path)
    check_bert(path, tmp_path, 0.03, exact=True)


def test_attention_between_dynamic_layers_is_fused(sparse_bert, tmp_path):
    path = tmp_path / "int8.onnx"
    quantization.quantize_dynamic(sparse_bert, path)
    report = optimize(path, calibration=FEEDS, options={"unpad.drop_hidden": True})
    types = op_types(report.model)
    assert (types.count("PackedNoMADAttention"), types.count("VNNISpMM")) == (2, 8)
    assert report.output_error[0].relative_l2 < 0.03


def save_as_optimized(path):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path.with_name("optimized.onnx"))
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    model = onnx.load(path.with_name("optimized.onnx"))
    # ONNX Runtime adds all operator domains of the process, including Ortolan's.
    kept = [one for one in model.opset_import if one.domain in ("", "com.microsoft")]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    onnx.save(model, path.with_name("optimized.onnx"))
    return path.with_name("optimized.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [False, True])
def test_quantize_dynamic_to_uint8(sparse_bert, tmp_path, per_channel):
    """uint8 weights: with reduce_range all zero points fit into int8, otherwise only some."""
    path = tmp_path / "int8.onnx"
    kind = quantization.QuantType.QUInt8
    quantization.quantize_dynamic(sparse_bert, path, per_channel=per_channel, weight_type=kind, reduce_range=True)
    check_bert(path, tmp_path, 0.03, exact=True)
    quantization.quantize_dynamic(sparse_bert, path, per_channel=per_channel, weight_type=kind)
    beyond = [layer for layer in layers_of(path).values() if not layer.int8.symmetric]
    assert 0 < len(beyond) <= 12
    report = optimize(path, calibration=FEEDS)
    assert sum(layer.new_op == "VNNISpMM" for layer in report.replaced) == 12
    assert report.output_error[0].relative_l2 < 0.05
    assert any("stored in 8 bits, but" in note for note in report.notes)


@pytest.mark.parametrize("reduce_range", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("form", list(quantization.QuantFormat))
@pytest.mark.parametrize("activations", [quantization.QuantType.QUInt8, quantization.QuantType.QInt8])
def test_quantize_static(sparse_bert, tmp_path, form, per_channel, reduce_range, activations):
    path = tmp_path / "int8.onnx"
    quantization.quantize_static(
        sparse_bert,
        path,
        Reader(),
        quant_format=form,
        per_channel=per_channel,
        reduce_range=reduce_range,
        activation_type=activations,
        # Only linear layers are quantized.
        op_types_to_quantize=["MatMul"],
    )
    # Sums in a different order move a few values to the next quantization step.
    check_bert(path, tmp_path, 0.01, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("form", list(quantization.QuantFormat))
def test_everything_quantized(sparse_bert, tmp_path, form):
    path = tmp_path / "int8.onnx"
    quantization.quantize_static(sparse_bert, path, Reader(), quant_format=form)
    check_bert(path, tmp_path, 0.02, exact=True)


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("form", list(quantization.QuantFormat))
def test_quantize_static_of_gemm(tmp_path, form, trans_b):
    """Gemm has an int32 bias."""
    weights = sparse_integers(32, 24).astype(np.float32) / 700
    model = make_model(
        [helper.make_node("Gemm", ["x", "W", "b"], ["y"], name="linear", transB=int(trans_b))],
        {"x": (TensorProto.FLOAT, ["batch", 32])},
        {"y": (TensorProto.FLOAT, ["batch", 24])},
        {"W": np.ascontiguousarray(weights.T) if trans_b else weights, "b": np.linspace(-1, 1, 24, dtype=np.float32)},
    )
    x = Int8Layer("qdq").inputs(50)
    reader = Reader([{"x": x}])
    onnx.save(model, tmp_path / "float.onnx")
    quantization.quantize_static(tmp_path / "float.onnx", tmp_path / "int8.onnx", reader, quant_format=form)
    (layer,) = layers_of(tmp_path / "int8.onnx").values()
    report = optimize(tmp_path / "int8.onnx")
    found, _ = packed_integers(report.model, layer.name)
    np.testing.assert_array_equal(found, layer.int8.q.numpy())
    (original,) = run(str(tmp_path / "int8.onnx"), {"x": x})
    step = np.ptp(original) / 255
    for answer in outputs(report.model, x):
        assert np.abs(answer - original).max() < 1.01 * step
        assert np.mean(answer != original) < 0.02
