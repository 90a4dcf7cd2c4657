"""Layers with stored 4-bit weights are replaced by W4A8MatMul with the same integers."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import ModelError, NothingToReplaceError, OptimizationReport, Recipe
from ortolan.benchmarks.matmul_nbits import make_matmul_nbits
from ortolan.models import tiny

from ..pairwise import pairwise
from ..recipes.forms import NAMED, named
from .small_models import make_model, op_types, random_weight, relative_error, run
from .stored_layers import DequantizedLayer, NBitsLayer, unpacked_matrix

FLOAT = TensorProto.FLOAT
NBITS = {"domains": {"com.microsoft": 1}, "opset": 21, "ir_version": 10}


def adopt(model, output=None, *, recipe=NAMED["adopt"], options=None, **arguments) -> OptimizationReport:
    options = {"verify.seconds": 0.0} | (options or {})
    return ortolan.optimize_onnx(model, output, recipe=named(recipe), options=options, **arguments)


def node_of(report: OptimizationReport) -> onnx.NodeProto:
    (node,) = [node for node in report.model.graph.node if node.op_type == "W4A8MatMul"]
    return node


@pytest.mark.parametrize(
    ("k", "n", "block", "zero_points", "dtype"),
    pairwise(
        [(256, 64, 32), (300, 33, 64), (1000, 70, 128), (520, 40, 256), (20, 5, 32), (1, 1, 32)],
        ["", "packed", "float"],
        [np.float32, np.float16],
    ),
)
def test_numbers_are_kept_and_answers_are_as_good_as_onnx_runtimes(k, n, block, zero_points, dtype):
    """The error is at most that of ONNX Runtime's accuracy_level 4, which also rounds inputs to int8."""
    layer = NBitsLayer(k, n, block, zero_points, dtype, accuracy_level=4)
    x = layer.inputs(7)
    report = adopt(layer.model(), calibration={"x": x})
    np.testing.assert_array_equal(unpacked_matrix(report.model), layer.matrix)
    stored_half = any(
        tensor.name == node_of(report).input[2] and tensor.data_type == TensorProto.FLOAT16
        for tensor in report.model.graph.initializer
    )
    assert stored_half == (dtype == np.float16)
    exact = x.astype(np.float64) @ layer.matrix.astype(np.float64)
    (level_0,) = run(dataclasses.replace(layer, accuracy_level=0).model(), {"x": x})
    # ONNX Runtime ignores accuracy_level 4 if zero points are floats. These zero points are integers, so pack them.
    (level_4,) = run(dataclasses.replace(layer, zero_points=zero_points and "packed").model(), {"x": x})
    answers = {
        "ours": run(report.model, {"x": x}, library=True)[0],
        "without the library": run(report.model, {"x": x})[0],
    }
    rounding = {np.float32: 1e-5, np.float16: 1e-3}[dtype]
    assert relative_error(exact, level_0.astype(np.float64)) < rounding
    theirs = relative_error(exact, level_4.astype(np.float64))
    for name, answer in answers.items():
        assert answer.dtype == dtype
        # The same products are summed in a different order; in float16 the last digit may differ.
        assert relative_error(exact, answer.astype(np.float64)) <= 1.0001 * theirs + rounding / 10, name
    (reported,) = report.layers
    assert (reported.status, reported.op, reported.weight_bits) == ("replaced", "MatMulNBits", 4)
    assert (reported.k, reported.n) == (k, n) and reported.reason is None
    assert reported.bytes_before == sum(array.nbytes for array in layer.tensors.values())
    assert any("keeps the model's stored 4-bit weights exactly" in note for note in report.notes)
    assert ("(accuracy_level 4)" in str(report.notes)) == (zero_points != "float")


def test_an_original_that_rounds_no_inputs():
    report = adopt(NBitsLayer(256, 64, 32).model())
    assert any("weights exactly" in note for note in report.notes)
    assert not any("accuracy_level" in note for note in report.notes)


@pytest.mark.parametrize(
    ("form", "signed", "zero_points", "block"),
    pairwise(
        ["matmul", "transpose", "gemm", "gemm_trans_b"],
        [(True, False), (True, True), (False, True), (False, False)],
        [32, 256, None],
    ),
)
def test_dequantize_linear(form, signed, zero_points, block):
    layer = DequantizedLayer(300, 33, block, signed, zero_points, form)
    report = adopt(layer.model())
    np.testing.assert_array_equal(unpacked_matrix(report.model), layer.matrix)
    assert op_types(report.model) == ["W4A8MatMul"]
    old = {"q", "scales", "zeros", "W", "T", "I"}
    assert not names(report.model) & old
    x = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    exact = x @ layer.matrix
    assert relative_error(exact, run(report.model, {"x": x}, library=True)[0]) < 0.02
    (reported,) = report.layers
    assert (reported.op, reported.weight_bits) == ("Gemm" if "gemm" in form else "MatMul", 4)


def names(model: onnx.ModelProto) -> set[str]:
    return {tensor.name for tensor in model.graph.initializer}


def test_names_and_tensors():
    layer = NBitsLayer(64, 32, 32, "packed", bias=True)
    report = adopt(layer.model())
    node = node_of(report)
    assert (node.name, node.input[0], list(node.output)) == ("linear", "x", ["y"])
    assert names(report.model) == {"B.weights", "B.scales", "B.zero_points", "bias", "no_residual"}
    assert node.input[3] == "bias" and node.input[5] == "B.zero_points"
    x = layer.inputs()
    expected = x @ layer.matrix + layer.b
    assert relative_error(expected, run(report.model, {"x": x}, library=True)[0]) < 0.02


def test_trivial_g_idx_goes_as_well():
    layer = NBitsLayer(64, 32, 32, extra={"g_idx": np.arange(64, dtype=np.int32) // 32})
    report = adopt(layer.model())
    assert names(report.model) == {"B.weights", "B.scales"}
    np.testing.assert_array_equal(unpacked_matrix(report.model), layer.matrix)


def test_bias_activation_and_residual_are_fused():
    layer = NBitsLayer(32, 32, 32)
    layer.extra = {"c": random_weight(32)}
    more = [
        helper.make_node("Add", ["p", "c"], ["biased"]),
        helper.make_node("Sigmoid", ["biased"], ["s"]),
        helper.make_node("Mul", ["biased", "s"], ["a"]),
        helper.make_node("Add", ["a", "x"], ["y"]),
    ]
    model = layer.model(*more)
    report = adopt(model)
    assert op_types(report.model) == ["W4A8MatMul"]
    assert report.layers[0].fused == ["silu", "residual"] and report.layers[0].op == "MatMulNBits+Add"
    x = layer.inputs()
    assert relative_error(run(model, {"x": x})[0], run(report.model, {"x": x}, library=True)[0]) < 0.02


def test_small_layers_may_grow_by_what_whole_panels_take():
    report = adopt(NBitsLayer(33, 3, 32).model())
    (layer,) = report.layers
    assert layer.status == "replaced" and layer.bytes_after > layer.bytes_before


def test_layers_that_share_a_weight_share_the_packed_one():
    layer = NBitsLayer(64, 64, 32)
    nodes = [layer.node(y="h", name="/a"), layer.node(x="h", name="/b")]
    model = make_model(nodes, {"x": (FLOAT, ["batch", 64])}, {"y": (FLOAT, ["batch", 64])}, layer.tensors, **NBITS)
    report = adopt(model)
    assert op_types(report.model) == ["W4A8MatMul"] * 2
    assert names(report.model) == {"B.weights", "B.scales"}
    # A second layer with the same integers but other scales needs a packed weight of its own.
    nodes[1].input[2] = "others"
    model = make_model(
        nodes,
        {"x": (FLOAT, ["batch", 64])},
        {"y": (FLOAT, ["batch", 64])},
        layer.tensors | {"others": 2 * layer.scales},
        **NBITS,
    )
    report = adopt(model)
    assert len(names(report.model)) == 4
    x = layer.inputs()
    assert relative_error(x @ layer.matrix @ layer.matrix * 2, run(report.model, {"x": x}, library=True)[0]) < 0.03


def test_an_embedding_that_is_also_the_head():
    """ONNX Runtime GenAI's tied embedding: the head's weight is packed, and the embedding reads it from there."""
    layer = NBitsLayer(64, 48, 32)
    nodes = [
        helper.make_node("Reshape", ["B", "shape"], ["table"], name="/reshape"),
        helper.make_node(
            "GatherBlockQuantized",
            ["table", "ids", "scales"],
            ["h"],
            name="/embed",
            domain="com.microsoft",
            block_size=32,
            quantize_axis=1,
            gather_axis=0,
            bits=4,
        ),
        layer.node(x="h", name="/head"),
    ]
    model = make_model(
        nodes,
        {"ids": (TensorProto.INT64, ["batch"])},
        {"y": (FLOAT, ["batch", 48])},
        layer.tensors | {"shape": np.array([48, 32])},
        **NBITS,
    )
    report = adopt(model)
    kinds = op_types(report.model)
    assert "W4A8MatMul" in kinds and not {"GatherBlockQuantized", "MatMulNBits"} & set(kinds)
    assert {"B.weights", "B.scales"} <= names(report.model) and not {"B", "scales"} & names(report.model)
    assert not any("stored twice" in note for note in report.notes)
    ids = {"ids": np.array([3, 47, 0])}
    assert relative_error(run(model, ids)[0], run(report.model, ids, library=True)[0]) < 0.02


def test_layers_in_branches():
    layers = [NBitsLayer(64, 32, 32, "packed", seed=seed) for seed in (1, 2)]

    def branch(layer: NBitsLayer) -> onnx.GraphProto:
        tensors = [numpy_helper.from_array(array, name) for name, array in layer.tensors.items()]
        outputs = [helper.make_tensor_value_info("product", FLOAT, ["batch", 32])]
        return helper.make_graph([layer.node(y="product")], "branch", [], outputs, tensors)

    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch(layers[0]), else_branch=branch(layers[1]))
    model = make_model(
        [node],
        {"x": (FLOAT, ["batch", 64]), "flag": (TensorProto.BOOL, [])},
        {"y": (FLOAT, ["batch", 32])},
        **NBITS,
    )
    report = adopt(model)
    assert op_types(report.model) == ["If", "W4A8MatMul", "W4A8MatMul"]
    x = layers[0].inputs()
    for flag, layer in zip((True, False), layers, strict=True):
        for library in (True, False):
            (answer,) = run(report.model, {"x": x, "flag": np.array(flag)}, library)
            assert relative_error(x @ layer.matrix, answer) < 0.02


def two_layers(second: onnx.NodeProto, **weights: np.ndarray) -> tuple[NBitsLayer, onnx.ModelProto]:
    """Return the first layer and a model x -> MatMulNBits -> h -> second -> y."""
    layer = NBitsLayer(64, 128, 32)
    model = make_model(
        [layer.node(y="h", name="/a"), second],
        {"x": (FLOAT, ["batch", 64])},
        {"y": (FLOAT, ["batch", 96])},
        layer.tensors | weights,
        **NBITS,
    )
    return layer, model


def float_layer() -> tuple[NBitsLayer, onnx.ModelProto]:
    return two_layers(helper.make_node("MatMul", ["h", "W"], ["y"], name="/b"), W=random_weight(128, 96))


def test_adopt_leaves_float_layers_alone():
    _, model = float_layer()
    report = adopt(model)
    assert op_types(report.model) == ["W4A8MatMul", "MatMul"]
    layers = {layer.name: layer for layer in report.layers}
    assert layers["/b"].status == "kept" and "it is not quantized" in layers["/b"].reason


@pytest.mark.parametrize("recipe", ["int4", "int4-gptq", "int4-awq", "int4-hqq"])
def test_other_recipes_quantize_the_rest_and_adopt_what_is_stored(recipe):
    layer, model = float_layer()
    x = layer.inputs(200)
    report = adopt(model, recipe=recipe, calibration={"x": x})
    assert op_types(report.model) == ["W4A8MatMul"] * 2
    assert [found.weight_bits for found in report.layers] == [4, 4]
    assert not any("rounded once more" in note for note in report.notes)
    groups = [{one.name: one.i for one in node.attribute}["group_size"] for node in report.model.graph.node]
    assert groups == [32, 64 if recipe == "int4-hqq" else 256]  # HQQ has no integer scales
    first = onnx.ModelProto()
    first.CopyFrom(report.model)
    del first.graph.node[1]
    del first.graph.output[:]
    # The second layer has zero points, so the first one gets zero points that change nothing.
    np.testing.assert_array_equal(unpacked_matrix(first), layer.matrix)


def test_a_dry_run_tells_what_the_run_does():
    _, model = float_layer()
    for recipe in ("adopt", "int4"):
        planned = adopt(model, recipe=recipe, dry_run=True)
        done = adopt(model, recipe=recipe)
        assert [layer.bytes_after for layer in planned.layers] == [layer.bytes_after for layer in done.layers]
        assert [layer.weight_bits for layer in planned.layers] == [layer.weight_bits for layer in done.layers]
        assert planned.layers[0].status == "would replace" and planned.model is None
        assert [note for note in planned.notes if "weights exactly" in note]


def test_excluded_layers_stay_as_they_are():
    _, model = two_layers(NBitsLayer(128, 96, 32).node(x="h", name="/b", prefix="b_"), **prefixed("b_"))
    report = adopt(model, options={"replace.exclude": ["/b"]})
    assert op_types(report.model) == ["W4A8MatMul", "MatMulNBits"]
    assert report.layers[1].reason == "excluded from replacement"
    assert {"b_B", "b_scales"} <= names(report.model)
    by_weight = adopt(model, options={"replace.exclude": ["b_B"]})
    assert op_types(by_weight.model) == ["W4A8MatMul", "MatMulNBits"]


def prefixed(prefix: str) -> dict[str, np.ndarray]:
    return {f"{prefix}{name}": array for name, array in NBitsLayer(128, 96, 32).tensors.items()}


def test_layers_of_other_forms_stay_as_they_are():
    layer = NBitsLayer(128, 96, 16)
    layer_16 = {f"b_{name}": array for name, array in layer.tensors.items()}
    _, model = two_layers(layer.node(x="h", name="/b", prefix="b_"), **layer_16)
    report = adopt(model)
    assert op_types(report.model) == ["W4A8MatMul", "MatMulNBits"]
    assert "block_size is 16, expected a multiple of 32" in report.layers[1].reason
    with pytest.raises(NothingToReplaceError, match="block_size is 16"):
        adopt(layer.model())


def test_scales_that_are_not_finite_are_refused_by_name():
    layer = NBitsLayer(64, 32, 32)
    layer.scales[3, 1] = np.nan
    for dry_run in (False, True):
        with pytest.raises(ModelError, match="scales 'scales' of a 4-bit weight hold NaN"):
            adopt(layer.model(), dry_run=dry_run)


def test_damaged_tensors_are_an_error_of_ours():
    model = NBitsLayer(64, 32, 32).model()
    for tensor in model.graph.initializer:
        tensor.raw_data = tensor.raw_data[:-3]
        with pytest.raises(ortolan.OrtolanError):
            adopt(model)


# --- recipes that change the weight -----------------------------------------------------------------------------------


def sparse_int4(model: onnx.ModelProto, **arguments) -> OptimizationReport:
    return adopt(model, recipe=NAMED["sparse-int4"], options={"may_grow": True}, **arguments)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_stored_weight_is_pruned_as_a_float_weight_is(bias, dtype):
    layer = NBitsLayer(128, 64, 32, "packed", dtype, bias=bias)
    report = sparse_int4(layer.model())
    assert [op for op in op_types(report.model) if op != "Cast"] == ["SparseAMXMatMul"]
    (found,) = report.layers
    assert found.op == "MatMulNBits" and found.sparsity >= 0.5 and found.output_error > 0.05
    pruned = np.where(np.abs(layer.matrix) < np.median(np.abs(layer.matrix)), 0, layer.matrix)
    x = layer.inputs()
    expected = x.astype(np.float32) @ pruned + (layer.b.astype(np.float32) if bias else 0)
    (answer,) = run(report.model, {"x": x}, library=True)
    assert relative_error(expected, answer.astype(np.float32)) < 0.2


def test_a_pruned_layer_that_stays_is_a_matmul():
    layer = NBitsLayer(64, 32, 32, "packed", bias=True)
    recipe = Recipe.from_dict({"name": "r", "pass": [{"name": "normalize"}, {"name": "prune", "sparsity": 0.25}]})
    model = layer.model(helper.make_node("Relu", ["p"], ["y"]))
    model.graph.output.append(helper.make_tensor_value_info("p", FLOAT, ["batch", 32]))
    report = ortolan.optimize_onnx(model, recipe=recipe)
    assert op_types(report.model) == ["MatMul", "Add", "Relu"]
    assert report.model.graph.node[0].name == "linear"
    assert names(report.model) == {"B_pruned", "bias"}
    (weight,) = [tensor for tensor in report.model.graph.initializer if tensor.name == "B_pruned"]
    pruned = numpy_helper.to_array(weight)
    assert np.count_nonzero(pruned == 0) >= pruned.size // 4
    np.testing.assert_array_equal(pruned[pruned != 0], layer.matrix[pruned != 0])
    x = layer.inputs()
    answers = run(report.model, {"x": x})
    np.testing.assert_allclose(answers[1], x @ pruned + layer.b, atol=1e-5)
    np.testing.assert_array_equal(answers[0], np.maximum(answers[1], 0))


def test_rounding_once_more_is_told():
    """SparseAMXMatMul supports neither zero points nor float32 scales, so it rounds such weights again."""
    steps = [{"name": "normalize"}, {"name": "quantize", "bits": 4}, {"name": "replace", "may_grow": True}]
    recipe = Recipe.from_dict({"name": "r", "pass": steps})
    report = ortolan.optimize_onnx(NBitsLayer(128, 64, 32).model(), recipe=recipe)
    assert op_types(report.model) == ["SparseAMXMatMul"]
    assert any("'linear' is stored in 4 bits, but in a format that no chosen operator" in note for note in report.notes)
    odd = DequantizedLayer(128, 64, 16).model()
    report = adopt(odd, recipe=NAMED["int4"])
    assert op_types(report.model) == ["W4A8MatMul"]
    assert any("rounded once more" in note for note in report.notes)
    with pytest.raises(NothingToReplaceError, match=r"is stored in 4 bits, but its block_size is 16"):
        adopt(odd)


def test_float_recipes_gain_nothing_from_stored_weights():
    with pytest.raises(NothingToReplaceError, match="its packed weight would take"):
        adopt(NBitsLayer(128, 64, 32).model(), recipe=NAMED["sparse-bf16"])


def test_scales_are_not_folded_into_stored_weights():
    """AWQ would have to divide columns of the previous layer's weight, which is stored in 4 bits."""
    layer, model = float_layer()
    x = layer.inputs(200)
    report = adopt(model, recipe=NAMED["int4-awq"], options={"quantize.exclude": ["/a"]}, calibration={"x": x})
    assert any("layer that computes them is stored in 4 bits" in note for note in report.notes)
    assert report.layers[0].status == "replaced"  # pass quantize reports no reason for this layer


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "block_size", "symmetric"), pairwise(["standard", "gqa"], [32, 64, 128], [True, False])
)
def test_a_decoder(tmp_path, attention, block_size, symmetric):
    ir.save(tiny.tiny_llama(attention=attention, head_dim=16), tmp_path / "float.onnx")
    make_matmul_nbits(tmp_path / "float.onnx", tmp_path / "nbits.onnx", block_size, 4, symmetric=symmetric)
    exact = {"fuse_cached_attention.precision": "f32"}
    report = adopt(tmp_path / "nbits.onnx", tmp_path / "fast.onnx", options=exact)
    replaced = [layer for layer in report.replaced if layer.new_op != "NoMADAttention"]
    assert len(replaced) == len([layer for layer in report.layers if layer.op.startswith("MatMulNBits")]) >= 9
    errors = {error.name: error.relative_l2 for error in report.output_error}
    # Both models round inputs to int8 in the same way. Sums in a different order move a few values to the next int8
    # step.
    assert errors["logits"] < 0.02
    loaded = onnx.load(tmp_path / "fast.onnx")
    kinds = op_types(loaded)
    assert "MatMulNBits" not in kinds and kinds.count("NoMADAttention") == 2
    assert report.file_size_after < 1.6 * report.file_size_before


def test_onnx_runtimes_own_dequantize_linear_form(tmp_path):
    from onnxruntime.quantization import matmul_nbits_quantizer
    from onnxruntime.quantization.quant_utils import QuantFormat

    float_model = tiny.mlp((200, 160, 33, 48), "matmul_add")
    float_model.opset_imports[""], float_model.ir_version = 21, 10
    for symmetric in (True, False):
        quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(
            ir.to_proto(float_model), block_size=64, is_symmetric=symmetric, quant_format=QuantFormat.QDQ
        )
        quantizer.process()
        model = quantizer.model.model
        report = adopt(model)
        assert op_types(report.model).count("W4A8MatMul") == 3 and "DequantizeLinear" not in op_types(report.model)
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
        exact = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        x = np.random.default_rng(0).standard_normal((6, 200)).astype(np.float32)
        (expected,) = exact.run(None, {"x": x})
        assert relative_error(expected, run(report.model, {"x": x}, library=True)[0]) < 0.03


def test_inspect_shows_stored_weights():
    layer = NBitsLayer(64, 32, 64, "packed")
    (found,) = ortolan.inspect_onnx(layer.model()).linears
    assert (found.op, found.k, found.n, found.replaceable) == ("MatMulNBits", 64, 32, True)
    assert found.weight_format == "int4, groups of 64"
    assert found.weight_bytes == sum(array.nbytes for array in layer.tensors.values())
    assert found.sparsity == pytest.approx(np.mean(layer.matrix == 0))
