"""Every form in which exporters write a linear layer is replaced by one SparseAMXMatMul with the same answers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import Recipe
from ortolan.graph_passes.files.spill import TensorSpill
from ortolan.graph_passes.find.quantized_weight import QuantizedWeight
from ortolan.graph_passes.operators.replacement import LayerWeight, stored_tensor
from ortolan.graph_passes.operators.sparse_amx_matmul import SparseAMXMatMul
from ortolan.graph_passes.operators.w4a8_matmul import W4A8MatMul
from ortolan.graph_passes.passes.replace import replace
from ortolan.models import tiny

from ..recipes.forms import NAMED
from .small_models import (
    branches_model,
    make_model,
    matmul_model,
    op_types,
    optimize,
    random_weight,
    relative_error,
    run,
)

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
BF16_ERROR = 6e-3  # error bound of a dense layer with bf16 inputs and weights: 2^-9 each, and a margin
DENSE = {"sparsity": 0.0}


def check_same_answers(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], error: float = BF16_ERROR
) -> onnx.ModelProto:
    """Optimize without pruning, and check the answers with the library and without it."""
    report = optimize(model, options=DENSE)
    assert report.model is not None
    onnx.checker.check_model(report.model)
    for library in (False, True):
        for expected, found in zip(run(model, feeds), run(report.model, feeds, library), strict=True):
            assert found.dtype == expected.dtype and found.shape == expected.shape
            assert relative_error(expected, found) < error
    return report.model


@pytest.mark.parametrize(
    "form", ["matmul", "matmul_add", "gemm", "gemm_trans_b", "transpose", "identity", "cast", "dequantize"]
)
def test_every_form_of_a_linear_layer(form):
    model = ir.to_proto(tiny.mlp(widths=(24, 40, 33), forms=form))
    x = np.random.default_rng(1).standard_normal((5, 24)).astype(np.float32)
    optimized = check_same_answers(model, {"x": x}, 1e-2)
    assert op_types(optimized) == ["SparseAMXMatMul", "SparseAMXMatMul"]


@pytest.mark.parametrize("shape", [(7,), (1, 7), (3, 7), (2, 3, 7), (2, 1, 3, 7), (0, 7), (2, 0, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_any_rank(shape, bias):
    nodes = [helper.make_node("MatMul", ["x", "W"], ["product" if bias else "y"], name="linear")]
    if bias:
        nodes.append(helper.make_node("Add", ["b", "product"], ["y"], name="add"))
    weights = {"W": random_weight(7, 5)} | ({"b": random_weight(5)} if bias else {})
    axes = [f"axis{index}" for index in range(len(shape) - 1)]
    model = make_model(nodes, {"x": (FLOAT, [*axes, 7])}, {"y": (FLOAT, [*axes, 5])}, weights)
    report = optimize(model, options=DENSE)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    (expected,) = run(model, {"x": x})
    for library in (False, True):
        (found,) = run(report.model, {"x": x}, library)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=2e-2)


@pytest.mark.parametrize("opset", range(7, 24))
def test_every_opset(opset):
    model = matmul_model(opset=opset)
    x = np.random.default_rng(0).standard_normal((2, 3, 20)).astype(np.float32)
    optimized = check_same_answers(model, {"x": x})
    assert next(entry.version for entry in optimized.opset_import if entry.domain == "") == max(opset, 13)


def test_float16_activations_get_casts():
    weight, bias = random_weight(20, 24, dtype=np.float16), random_weight(24, dtype=np.float16)
    model = make_model(
        [helper.make_node("MatMul", ["x", "W"], ["p"], name="linear"), helper.make_node("Add", ["p", "b"], ["y"])],
        {"x": (FLOAT16, ["batch", 20])},
        {"y": (FLOAT16, ["batch", 24])},
        {"W": weight, "b": bias},
    )
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float16)
    optimized = check_same_answers(model, {"x": x})
    assert op_types(optimized) == ["Cast", "SparseAMXMatMul", "Cast"]
    assert optimized.graph.node[-1].output == ["y"]


@pytest.mark.parametrize("shape", [(24,), (1, 24), (1,), (1, 1), ()])
def test_gemm_bias_shapes(shape):
    model = make_model(
        [helper.make_node("Gemm", ["x", "W", "b"], ["y"], name="linear")],
        {"x": (FLOAT, ["batch", 20])},
        {"y": (FLOAT, ["batch", 24])},
        {"W": random_weight(20, 24), "b": np.random.default_rng(3).standard_normal(shape).astype(np.float32)},
    )
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    optimized = check_same_answers(model, {"x": x})
    assert len(optimized.graph.node[0].input) == 5


def test_names_of_nodes_values_inputs_and_outputs_are_kept():
    optimized = optimize(matmul_model()).model
    (node,) = optimized.graph.node
    assert node.name == "linear" and node.domain == "ai.ortolan" and list(node.output) == ["y"]
    assert [value.name for value in optimized.graph.input] == ["x"]
    assert [value.name for value in optimized.graph.output] == ["y"]
    assert {tensor.name for tensor in optimized.graph.initializer} == {"W.masks", "W.values", "W.offsets", "b"}


def test_product_that_is_an_output_keeps_its_add():
    model = matmul_model()
    model.graph.output.append(helper.make_tensor_value_info("product", FLOAT, ["batch", "sequence", 24]))
    x = np.random.default_rng(0).standard_normal((2, 3, 20)).astype(np.float32)
    assert op_types(check_same_answers(model, {"x": x})) == ["SparseAMXMatMul", "Add"]


def test_add_of_another_activation_is_taken_for_a_residual():
    model = make_model(
        [helper.make_node("MatMul", ["x", "W"], ["p"], name="linear"), helper.make_node("Add", ["p", "x"], ["y"])],
        {"x": (FLOAT, ["batch", 20])},
        {"y": (FLOAT, ["batch", 20])},
        {"W": random_weight(20, 20)},
    )
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    optimized = check_same_answers(model, {"x": x})
    assert op_types(optimized) == ["SparseAMXMatMul"]
    assert list(optimized.graph.node[0].input)[4:] == ["no_bias", "x"]
    assert op_types(optimize(model, options={"fuse": False}).model) == ["SparseAMXMatMul", "Add"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (2, 1, 1, 24)])
@pytest.mark.parametrize("number", [0.0, 1.5])
def test_constant_residuals_of_any_rank(shape, number):
    """A constant residual of zeros only adds axes to the result."""
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["p"], name="linear"),
        helper.make_node("Add", ["c", "p"], ["y"]),
    ]
    weights = {"W": random_weight(20, 24), "c": np.full(shape, number, np.float32)}
    size = [2, 1, 3, 24] if len(shape) == 4 else [1] * (len(shape) - 2) + [3, 24]
    model = make_model(nodes, {"x": (FLOAT, ["batch", 20])}, {"y": (FLOAT, [None] * len(size))}, weights)
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    optimized = check_same_answers(model, {"x": x})
    assert op_types(optimized) == ["SparseAMXMatMul"]
    assert run(optimized, {"x": x}, library=True)[0].shape == tuple(size)
    nothing = number == 0 and len(shape) < 2
    assert ortolan.inspect_onnx(optimized).linears[0].fused == ([] if nothing else ["residual"])


def test_layers_with_and_without_an_epilogue_share_one_function():
    """An ONNX function cannot have an optional residual, so the layer without one gets a zero."""
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["p"], name="first"),
        helper.make_node("Relu", ["p"], ["h"]),
        helper.make_node("MatMul", ["h", "V"], ["q"], name="second"),
        helper.make_node("Add", ["x", "q"], ["y"]),
    ]
    weights = {"W": random_weight(20, 24), "V": random_weight(24, 20)}
    model = make_model(nodes, {"x": (FLOAT, ["batch", 20])}, {"y": (FLOAT, ["batch", 20])}, weights)
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    optimized = check_same_answers(model, {"x": x})
    assert op_types(optimized) == ["SparseAMXMatMul", "SparseAMXMatMul"]
    assert [node.input[5] for node in optimized.graph.node] == ["no_residual", "x"]
    assert [layer.fused for layer in optimize(model).layers] == [["relu"], ["residual"]]


def test_layers_with_one_weight_share_one_packed_weight():
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "W"], ["h"], name="first"),
            helper.make_node("Identity", ["W"], ["W_again"], name="alias"),
            helper.make_node("MatMul", ["h", "W_again"], ["y"], name="second"),
        ],
        {"x": (FLOAT, ["batch", 20])},
        {"y": (FLOAT, ["batch", 20])},
        {"W": random_weight(20, 20)},
    )
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    optimized = check_same_answers(model, {"x": x}, 1e-2)
    first, second = optimized.graph.node
    assert list(first.input[1:]) == list(second.input[1:])
    assert len(optimized.graph.initializer) == 3


def test_a_weight_that_an_embedding_shares_stays_for_the_embedding():
    table = random_weight(30, 16)
    model = make_model(
        [
            helper.make_node("Gather", ["table", "ids"], ["h"], name="embed"),
            helper.make_node("Transpose", ["table"], ["head"], perm=[1, 0], name="tie"),
            helper.make_node("MatMul", ["h", "head"], ["logits"], name="head"),
        ],
        {"ids": (TensorProto.INT64, ["batch", "sequence"])},
        {"logits": (FLOAT, ["batch", "sequence", 30])},
        {"table": table},
    )
    optimized = optimize(model, options={"sparsity": 0.5}).model
    initializers = {tensor.name: tensor for tensor in optimized.graph.initializer}
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(initializers["table"]), table)
    assert op_types(optimized) == ["Gather", "SparseAMXMatMul"]


def test_layers_in_subgraphs():
    def branch(name: str, weight: str) -> onnx.GraphProto:
        return helper.make_graph(
            [helper.make_node("MatMul", ["x", weight], [f"{name}_y"], name=f"{name}/linear")],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", FLOAT, ["batch", 24])],
            [onnx.numpy_helper.from_array(random_weight(20, 24, seed=5), "inner")] if weight == "inner" else [],
        )

    model = make_model(
        [
            helper.make_node(
                "If", ["flag"], ["y"], then_branch=branch("then", "outer"), else_branch=branch("else", "inner")
            )
        ],
        {"x": (FLOAT, ["batch", 20]), "flag": (TensorProto.BOOL, [])},
        {"y": (FLOAT, ["batch", 24])},
        {"outer": random_weight(20, 24)},
    )
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    for flag in (True, False):
        optimized = check_same_answers(model, {"x": x, "flag": np.array(flag)})
        assert op_types(optimized) == ["If", "SparseAMXMatMul", "SparseAMXMatMul"]


def test_layers_in_functions_of_the_model():
    body = [
        helper.make_node("Constant", [], ["W"], value=onnx.numpy_helper.from_array(random_weight(20, 24), "W")),
        helper.make_node("MatMul", ["a", "W"], ["c"], name="inner"),
    ]
    function = helper.make_function("my.domain", "Linear", ["a"], ["c"], body, [helper.make_opsetid("", 17)])
    model = make_model(
        [helper.make_node("Linear", ["x"], ["y"], domain="my.domain", name="call")],
        {"x": (FLOAT, ["batch", 20])},
        {"y": (FLOAT, ["batch", 24])},
        functions=[function],
        domains={"my.domain": 1},
    )
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    assert op_types(check_same_answers(model, {"x": x})) == ["SparseAMXMatMul"]


def test_old_models_whose_weights_are_listed_as_inputs():
    model = matmul_model(opset=9)
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, FLOAT, tensor.dims))
    x = np.random.default_rng(0).standard_normal((2, 3, 20)).astype(np.float32)
    optimized = check_same_answers(model, {"x": x})
    assert [value.name for value in optimized.graph.input] == ["x"]


def test_min_sparsity_keeps_dense_layers():
    model = ir.to_proto(tiny.mlp(widths=(24, 40, 33), forms="matmul"))
    report = optimize(model, options={"layers": {"/layers.0/*": 0.9}, "sparsity": 0.1, "min_sparsity": 0.5})
    assert [layer.status for layer in report.layers] == ["replaced", "kept"]
    assert "below min_sparsity" in report.layers[1].reason


@pytest.mark.parametrize("options", [{"replace.exclude": ["/layers.1/*"]}, {"min_sparsity": 0.4}])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_layers_that_stay_are_not_pruned(options, scope):
    model = ir.to_proto(tiny.mlp(widths=(24, 40, 33), forms="matmul"))
    options = options | {"scope": scope, "layers": {"/layers.0/*": 0.5, "/layers.1/*": 0.3}}
    report = optimize(model, options=options)
    assert [layer.status for layer in report.layers] == ["replaced", "kept"]
    assert report.layers[1].reason and report.layers[1].bytes_after is None
    stored = [numpy_helper.to_array(tensor) for tensor in report.model.graph.initializer]
    given = [numpy_helper.to_array(tensor) for tensor in model.graph.initializer if list(tensor.dims) == [40, 33]]
    assert any(np.array_equal(given[0], array) for array in stored)


def test_patterns_that_match_nothing_are_noted():
    model = ir.to_proto(tiny.mlp(widths=(24, 40, 33), forms="matmul"))
    options = {
        "sparsity": 0.1,
        "prune.exclude": ["heads", "/layer.1/*"],
        "replace.exclude": ["*none", "/layers.1/*"],
    }
    notes = optimize(model, options=options).notes
    assert len(notes) == 2
    assert "'/layer.1/*' of prune.exclude matches no layer" in notes[0]
    assert "'*none' of replace.exclude matches no layer" in notes[1]
    assert not optimize(model, options={"sparsity": 0.1}).notes


@pytest.mark.parametrize("dry_run", [False, True])
def test_layers_that_would_grow_stay_as_they_are(dry_run):
    model = ir.to_proto(tiny.mlp((64, 64, 96, 1), ["matmul", "dequantize", "matmul"]))
    options = {"may_grow": False, "sparsity": 0.1}
    report = optimize(model, options=options, dry_run=dry_run)
    assert [layer.status for layer in report.layers] == ["would replace" if dry_run else "replaced", "kept", "kept"]
    assert all("more than the" in layer.reason and "may_grow" in layer.reason for layer in report.layers[1:])
    if not dry_run:
        assert "DequantizeLinear" in op_types(report.model)


def test_excluded_layers_stay_as_they_are():
    model = ir.to_proto(tiny.mlp(widths=(24, 40, 33), forms="matmul"))
    report = optimize(model, options={"replace.exclude": ["/layers.1/*"], "prune.exclude": ["/layers.1/*"]})
    assert op_types(report.model) == ["SparseAMXMatMul", "MatMul"]
    assert report.layers[1].reason == "excluded from replacement"


@pytest.mark.parametrize("size", [(1, 1), (31, 17), (32, 16), (33, 16), (100, 50)])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.97])
def test_size_is_predicted_exactly(size, sparsity):
    rng = np.random.default_rng(0)
    weight = random_weight(*size) * (rng.random(size) >= sparsity)
    operator = SparseAMXMatMul()
    packed = operator.pack(LayerWeight(weight.astype(np.float32)))
    stored = operator.stored_weights(weight)
    assert operator.packed_bytes(*size, stored, None) == sum(part.array.nbytes for part in packed.values())


def test_output_error_is_that_of_the_layer():
    weight = random_weight(20, 24)
    x = np.random.default_rng(2).standard_normal((1, 9, 20)).astype(np.float32)
    report = optimize(matmul_model(weight=weight), calibration={"x": x}, options={"sparsity": 0.6})
    pruned = np.where(np.abs(weight) > np.sort(np.abs(weight).ravel())[round(0.6 * weight.size) - 1], weight, 0)
    assert report.layers[0].output_error == pytest.approx(relative_error(x @ weight, x @ pruned), rel=0.02)


@pytest.mark.parametrize("x_scale", [1e-30, 1.0, 1e3])
@pytest.mark.parametrize("column_scale", [1e-36, 1e-38, 1e-40, 1e-44])
@pytest.mark.parametrize("recipe", ["sparse-bf16", "sparse-int8", "sparse-int4", "int4"])
def test_weights_of_dead_neurons(recipe, column_scale, x_scale):
    """Weight decay in training leaves denormal columns, which some kernels flush to zero."""
    weight = random_weight(64, 24)
    weight[:, 3] *= np.float32(column_scale)
    x = np.random.default_rng(0).standard_normal((4, 3, 64)).astype(np.float32) * np.float32(x_scale)
    options = {"verify.seconds": 0, "replace.may_grow": True}
    if recipe.startswith("sparse"):
        options["prune.sparsity"] = 0.0
    report = ortolan.optimize_onnx(
        matmul_model(64, weight=weight), recipe=NAMED[recipe], options=options, calibration={"x": x}
    )
    assert [layer.status for layer in report.layers] == ["replaced"]


def test_rounding_of_denormal_scales_is_allowed_for(tmp_path):
    """The product of two denormal scales has only a bit or two, so its relative rounding error is large."""
    q = np.full((64, 24), 7, np.int8)
    scales = np.full((2, 24), 2e-42, np.float32)
    with TensorSpill(tmp_path) as spill:
        quantized = QuantizedWeight(
            4, 32, spill.add("q", q, ir.DataType.INT8), spill.add("scales", scales, ir.DataType.FLOAT)
        )
        weight = LayerWeight(quantized.matrix(), quantized)
        operator, x = W4A8MatMul(), np.full((3, 64), 0.5, np.float32)
        packed = {part: stored_tensor(spill, part, tensor) for part, tensor in operator.pack(weight).items()}
        error = np.abs(operator.run(x, packed, weight) - x @ weight.matrix)
        assert error.max() > 0
        assert (error <= operator.rounding_bound(x, weight)).all()


def recipe_of(*steps: dict) -> Recipe:
    return Recipe.from_dict({"name": "r", "pass": list(steps)})


def test_two_replace_passes(monkeypatch):
    model = ir.to_proto(tiny.mlp(widths=(24, 40, 33), forms="matmul"))
    recipe = recipe_of(
        {"name": "normalize"},
        {"name": "calibrate"},
        {"name": "prune", "sparsity": 0.3},
        {"name": "replace", "select": ["/layers.0/*"]},
        {"name": "replace", "exclude": ["/layers.0/*"]},
        {"name": "verify", "seconds": 0},
    )
    monkeypatch.setattr(replace, "UNPACK_ONCE_LIMIT", 24 * 40 + 1)  # larger than either weight, smaller than their sum
    report = ortolan.optimize_onnx(model, recipe=recipe)
    assert [layer.status for layer in report.layers] == ["replaced", "replaced"]
    assert report.rounding_error[0].relative_l2 < 1e-2 and report.portable_error[0].relative_l2 < 1e-2
    assert "BitShift" in {node.op_type for node in report.model.functions[0].node}
    assert [note for note in report.notes if "unpacks its weights in each run" in note]
    dry = ortolan.optimize_onnx(model, recipe=recipe, dry_run=True)
    assert [layer.status for layer in dry.layers] == ["would replace", "would replace"]
    assert [layer.bytes_after for layer in dry.layers] == [layer.bytes_after for layer in report.layers]


def test_layers_of_equal_names_in_both_branches_are_told_apart():
    report = optimize(branches_model(), options={"layers": {"linear": 0.25}})
    assert [(layer.name, layer.status, layer.sparsity) for layer in report.layers] == [("linear", "replaced", 0.25)] * 2
    assert not report.notes


def test_a_weight_that_both_branches_use_is_stored_for_each():
    report = optimize(branches_model(inner=False))
    assert [note for note in report.notes if note.startswith("1 packed weights are stored again")]
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    for flag in (True, False):
        feeds = {"x": x, "flag": np.array(flag)}
        np.testing.assert_allclose(run(report.model, feeds, True)[0], run(report.model, feeds)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dry_run", [False, True])
def test_pruned_layers_that_take_more_room_than_before_are_noted(dry_run):
    model = ir.to_proto(tiny.mlp((24, 40, 33), ["matmul", "dequantize"]))
    recipe = recipe_of({"name": "normalize"}, {"name": "prune"})
    report = ortolan.optimize_onnx(model, recipe=recipe, dry_run=dry_run)
    assert (report.layers[1].status, report.layers[1].bytes_after) == ("pruned", 4 * 40 * 33)
    (note,) = report.notes
    assert "layer '/layers.1/MatMul' is pruned but stored dense" in note and "prune.exclude" in note
    # Sparsity 0.0 keeps the weight unchanged.
    report = ortolan.optimize_onnx(model, recipe=recipe, options={"sparsity": 0.0}, dry_run=dry_run)
    assert report.layers[1].status == "kept" and not report.notes
