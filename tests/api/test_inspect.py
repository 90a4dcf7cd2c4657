"""inspect_onnx tells what is there and what could be done."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan.models import tiny

from ..recipes.forms import NAMED


def test_a_plain_model(tmp_path):
    path = tmp_path / "bert.onnx"
    ir.save(tiny.tiny_bert(), path)
    found = ortolan.inspect_onnx(path)
    assert (found.opset, found.optimized, found.fusions, found.file_size) == (17, None, {}, path.stat().st_size)
    assert [value.name for value in found.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert found.inputs[0].shape == ["batch", "sequence"] and found.outputs[0].dtype == "FLOAT"
    assert sum(layer.replaceable for layer in found.linears) == 12
    assert [layer.replaceable for layer in found.linears] == [layer.reason is None for layer in found.linears]
    assert found.operators["MatMul"] == 16
    assert json.loads(found.to_json()) == found.to_dict()
    text = str(found)
    assert "12 of 16" in text and "run time" in text and "input_ids: INT64 [batch, sequence]" in text


def test_formats_and_sparsity():
    model = tiny.mlp((24, 40, 40, 40), ["cast", "dequantize", "gemm_trans_b"])
    layers = ortolan.inspect_onnx(ir.to_proto(model)).linears
    assert [layer.weight_format for layer in layers] == ["FLOAT16", "INT8", "FLOAT"]
    assert [layer.weight_bytes for layer in layers] == [2 * 24 * 40, 40 * 40 + 4 * 40 + 40, 4 * 40 * 40]
    assert [(layer.k, layer.n) for layer in layers] == [(24, 40), (40, 40), (40, 40)]


def test_an_optimized_model():
    report = ortolan.optimize_onnx(
        ir.to_proto(tiny.mlp()), recipe=NAMED["sparse-bf16"], options={"seconds": 0, "sparsity": 0.75}
    )
    found = ortolan.inspect_onnx(report.model)
    assert (found.optimized, found.ortolan_version) == ("weights=bf16, sparsity=0.5", ortolan.__version__)
    assert [layer.weight_format for layer in found.linears] == ["bitmap + bf16"] * 3
    for layer, reported in zip(found.linears, report.layers, strict=True):
        assert layer.sparsity == pytest.approx(reported.sparsity) and layer.weight_bytes == reported.bytes_after
        assert not layer.replaceable
    assert "optimized by Ortolan" in str(found)


@pytest.mark.parametrize("sparsity", [0.0, 0.75])
@pytest.mark.parametrize(
    ("recipe", "kind"), [("sparse-bf16", "bf16"), ("sparse-int8", "int8"), ("sparse-int4", "int4, groups of 128")]
)
def test_kinds_of_packed_weights(recipe, kind, sparsity):
    """bf16 layers between quantized ones too; no column for what is fused where nothing is."""
    options = {"seconds": 0, "sparsity": sparsity, "may_grow": True}
    options |= {"quantize.exclude": ["*layers.1*"]} if kind != "bf16" else {}
    report = ortolan.optimize_onnx(
        ir.to_proto(tiny.mlp((64, 128, 192, 16), "matmul_add")), recipe=NAMED[recipe], options=options
    )
    found = ortolan.inspect_onnx(report.model)
    storage = "bitmap + " if sparsity else "dense "
    assert [layer.weight_format for layer in found.linears] == [storage + kind, storage + "bf16", storage + kind]
    for layer, reported in zip(found.linears, report.layers, strict=True):
        assert layer.weight_bytes == reported.bytes_after
        assert layer.sparsity == pytest.approx(reported.sparsity) and layer.sparsity >= sparsity
        assert layer.fused == reported.fused
    assert [layer.fused for layer in found.linears] == [["relu"], ["relu"], []]
    assert "fused" in str(found) and kind in str(found)
    assert "fused" not in str(ortolan.inspect_onnx(ir.to_proto(tiny.mlp())))


def test_fused_parts_are_told():
    report = ortolan.optimize_onnx(ir.to_proto(tiny.tiny_bert()), recipe=NAMED["sparse-int4"], options={"seconds": 0})
    fused = {layer.name: layer.fused for layer in ortolan.inspect_onnx(report.model).linears}
    assert fused["/encoder/layer.0/intermediate/dense/MatMul"] == ["gelu"]
    assert fused["/encoder/layer.0/output/dense/MatMul"] == ["residual"]
    assert fused["/encoder/layer.0/attention/self/query/MatMul"] == []


def test_functions_and_fusions():
    body = [
        helper.make_node("Constant", [], ["W"], value=numpy_helper.from_array(np.ones((8, 8), np.float32))),
        helper.make_node("MatMul", ["a", "W"], ["b"]),
    ]
    function = helper.make_function("f", "Linear", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 8]) for name in "xy"]
    nodes = [
        helper.make_node("Linear", ["x"], ["h"], domain="f"),
        helper.make_node("Gelu", ["h"], ["y"], domain="com.microsoft"),
    ]
    imports = [helper.make_opsetid(domain, version) for domain, version in (("", 17), ("f", 1), ("com.microsoft", 1))]
    model = helper.make_model(
        helper.make_graph(nodes, "g", values[:1], values[1:]), opset_imports=imports, functions=[function], ir_version=8
    )
    found = ortolan.inspect_onnx(model)
    assert [(layer.k, layer.replaceable) for layer in found.linears] == [(8, True)]
    assert found.fusions == {"com.microsoft::Gelu": 1}
    onnx.checker.check_model(model)
