"""inspect_onnx lists linear layers, and which of them can be replaced."""

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
    assert sum(layer.replaceable for layer in found.linears if layer.k is not None) == 12
    # 12 linear layers and 4 MatMuls of attention, as in the report.
    assert sum(layer.replaceable for layer in found.linears) == 16
    assert [layer.replaceable for layer in found.linears] == [layer.reason is None for layer in found.linears]
    assert found.operators["MatMul"] == 16
    assert json.loads(found.to_json()) == found.to_dict()
    text = str(found)
    assert "16 of 16 matrix products can be replaced, 4 of them in attention" in text
    assert "input_ids: INT64 [batch, sequence]" in text and max(map(len, text.splitlines())) <= 80
    products = {layer.name for layer in found.linears}
    assert all(name in found.details() for name in products if "dense" in name)


def test_products_outside_of_attention_have_a_reason():
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "x"], ["y"], name="square")], "g", *([v] for v in values)
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    text = str(ortolan.inspect_onnx(model))
    assert "0 of 1 matrix products can be replaced\n" in text
    assert "left alone" in text and "run time" in text and text.endswith(": square")


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_inspect_and_the_report_count_alike(weights):
    model = ir.to_proto(tiny.tiny_bert())
    found = ortolan.inspect_onnx(model)
    report = ortolan.optimize_onnx(model, weights=weights, options={"may_grow": True, "verify.seconds": 0})
    assert {layer.name for layer in found.linears if layer.replaceable} == {layer.name for layer in report.replaced}
    (can,) = [line for line in str(found).splitlines() if "matrix products" in line]
    (was,) = [line for line in str(report).splitlines() if "matrix products" in line]
    assert can.replace(" can be replaced", "") == was.removeprefix("layers").strip().removeprefix("replaced ")


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
    """bf16 layers among quantized ones are listed. The column for fused operations appears only if there are any."""
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
    assert "with relu" in str(found) and kind in str(found) and "fused" in found.table()
    assert "fused" not in ortolan.inspect_onnx(ir.to_proto(tiny.mlp())).details()


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


def listed(model: onnx.ModelProto, ir_version: int) -> onnx.ModelProto:
    """Return the model with all initializers also listed as inputs."""
    model.ir_version = ir_version
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return model


def test_old_models_that_list_their_initializers_as_inputs():
    """inspect must predict what optimize replaces, and list stored weights."""
    model = listed(ir.to_proto(tiny.mlp()), 3)
    found = ortolan.inspect_onnx(model)
    report = ortolan.optimize_onnx(model, weights="bf16", options={"verify.seconds": 0.0})
    assert [layer.replaceable for layer in found.linears] == [True] * 3 == [bool(one.new_op) for one in report.layers]
    assert (found.ir_version, len(found.inputs)) == (3, 1)
    stored = listed(ir.to_proto(tiny.mlp((64, 64), ["dequantize"])), 3)
    report = ortolan.optimize_onnx(stored, options={"verify.seconds": 0.0})
    assert any("8-bit weights" in note for note in report.notes) and report.layers[0].status == "replaced"


def test_weights_that_callers_may_replace_have_one_reason():
    model = listed(ir.to_proto(tiny.mlp()), 8)
    (reason,) = {layer.reason for layer in ortolan.inspect_onnx(model).linears}
    assert "is also a graph input" in reason and "keep_initializers_as_inputs=False" in reason
    with pytest.raises(ortolan.NothingToReplaceError, match="keep_initializers_as_inputs=False"):
        ortolan.optimize_onnx(model, weights="bf16")
