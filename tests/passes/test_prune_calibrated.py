"""Wanda, SparseGPT and repair: the inputs that weights are fitted to, results, and refusals."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan import CalibrationError, ModelError, OptimizationReport
from ortolan.graph_passes.weights.pruners.least_squares import repair
from ortolan.graph_passes.weights.pruners.masks import Pattern
from ortolan.graph_passes.weights.pruners.sparsegpt import sparsegpt, sparsegpt_rounded
from ortolan.graph_passes.weights.quantizers.grid import Quantization, dequantize
from ortolan.graph_passes.weights.quantizers.hessian import damped
from ortolan.models import tiny

from ..recipes.forms import NAMED
from .correlated import correlated
from .int8_layers import MICROSOFT, Int8Layer, sparse_integers
from .quantized import recipe_of, weights_of
from .small_models import branches_model, make_model, matmul_model, op_types, random_weight, relative_error, run
from .zero_blocks import block_zeros

FLOAT = TensorProto.FLOAT
FIXED = {"method": "sparsegpt", "damping": 0.01}


def pruned(model: onnx.ModelProto, feeds, *more: dict, **options) -> OptimizationReport:
    return ortolan.optimize_onnx(model, recipe=recipe_of({"name": "prune", **options}, *more), calibration=feeds)


def two_layers() -> onnx.ModelProto:
    return make_model(
        [
            helper.make_node("MatMul", ["x", "A"], ["h"], name="/a"),
            helper.make_node("MatMul", ["h", "B"], ["y"], name="/b"),
        ],
        {"x": (FLOAT, ["batch", 40])},
        {"y": (FLOAT, ["batch", 20])},
        {"A": random_weight(40, 30), "B": random_weight(30, 20, seed=1)},
    )


def of(x: np.ndarray, weight: np.ndarray, damping: float = 0.01) -> np.ndarray:
    return sparsegpt(weight, damped(x.T @ x, damping), Pattern(), 0.5)


@pytest.mark.parametrize("inputs", ["pruned", "original"])
def test_what_a_layer_behind_another_is_fitted_to(inputs):
    x = correlated(400, 40, 0.9)
    found = weights_of(pruned(two_layers(), [{"x": x[:150]}, {"x": x[150:]}], inputs=inputs, **FIXED))
    a, b = random_weight(40, 30), random_weight(30, 20, seed=1)
    expected = of(x, a)
    np.testing.assert_allclose(found["A"], expected, atol=1e-4)
    h = x @ (expected if inputs == "pruned" else a)
    np.testing.assert_allclose(found["B"], of(h, b), atol=1e-3)
    assert np.abs(of(x @ a, b) - of(x @ expected, b)).max() > 0.01  # the two differ


def test_wanda_weighs_by_the_norms_of_inputs():
    x = correlated(100, 40) * np.linspace(0.1, 3, 40, dtype=np.float32)
    weight = random_weight(40, 30)
    report = pruned(two_layers(), {"x": x}, method="wanda", sparsity=0.6)
    found = weights_of(report)["A"]
    scores = np.abs(weight) * np.linalg.norm(x, axis=0)[:, None]
    for column, old, score in zip(found.T, weight.T, scores.T, strict=True):
        gone = column == 0
        assert gone.sum() == 24 and score[gone].max() <= score[~gone].min()
        np.testing.assert_array_equal(column[~gone], old[~gone])
    exact = x @ weight
    assert report.layers[0].output_error == pytest.approx(relative_error(exact, x @ found), rel=1e-3)
    assert (report.layers[0].status, report.layers[0].sparsity) == ("pruned", 0.6)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("pattern", ["unstructured", "4x1", "2:4"])
def test_patterns_have_exact_counts_and_repair_keeps_them(method, pattern):
    x = correlated(600, 40, 0.9)
    weights, errors = [], []
    for fit in (False, True):
        report = pruned(two_layers(), {"x": x}, method=method, pattern=pattern, repair=fit)
        weights.append(weights_of(report)["A"])
        errors.append(relative_error(x @ random_weight(40, 30), x @ weights[-1]))
    for weight in weights:
        if pattern == "4x1":
            assert block_zeros(weight) == 40 * 8 // 2
        elif pattern == "2:4":
            assert ((weight.reshape(10, 4, 30) != 0).sum(axis=1) == 2).all()
        else:
            assert np.count_nonzero(weight == 0) == 600
    np.testing.assert_array_equal(weights[0] == 0, weights[1] == 0)
    assert errors[1] < 0.9 * errors[0]


def test_repair_of_the_mask_of_a_global_threshold():
    x = correlated(600, 40, 0.9)
    options = {"scope": "global", "sparsity": 0.6}
    plain = weights_of(pruned(two_layers(), {"x": x}, **options))
    fitted = weights_of(pruned(two_layers(), {"x": x}, repair=True, damping=0.02, **options))
    for name in ("A", "B"):
        np.testing.assert_array_equal(plain[name] == 0, fitted[name] == 0)
    expected = repair(random_weight(40, 30), plain["A"], plain["A"] != 0, damped(x.T @ x, 0.02))
    np.testing.assert_allclose(fitted["A"], expected, atol=1e-5)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_a_mask_that_is_there_stays(method):
    x = correlated(400, 40, 0.9)
    weight = random_weight(40, 24) * (np.random.default_rng(0).random((40, 24)) < 0.4).astype(np.float32)
    gone = weight == 0
    for sparsity in (0.5, 0.7):
        model = matmul_model(40, 24, weight=weight)
        found = weights_of(pruned(model, {"x": x[None]}, method=method, sparsity=sparsity))["W"]
        assert (found[gone] == 0).all()
        assert np.count_nonzero(found == 0) == max(gone.sum(), round(sparsity * weight.size))


@pytest.mark.parametrize("form", ["gemm", "gemm_trans_b", "transpose", "identity", "cast", "dequantize"])
def test_weights_behind_other_operators(form):
    model = ir.to_proto(tiny.mlp((72, 40), form))
    name = model.graph.input[0].name
    x = correlated(300, 72, 0.9)
    plain, fitted = (
        ortolan.optimize_onnx(
            model,
            recipe=recipe_of({"name": "prune", "method": method}, {"name": "verify", "seconds": 0.0}),
            calibration={name: x},
        )
        for method in ("magnitude", "sparsegpt")
    )
    assert fitted.layers[0].sparsity == pytest.approx(0.5, abs=1e-3)
    assert fitted.output_error[0].relative_l2 < 0.7 * plain.output_error[0].relative_l2


@pytest.mark.parametrize(("dtype", "stored"), [(np.float16, np.float16), (ml_dtypes.bfloat16, np.float32)])
def test_the_weight_keeps_the_type_of_its_layer(dtype, stored):
    """Models that compute in bfloat16 are converted to float32 first, including their inputs."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weight = random_weight(40, 24, dtype=dtype)
    model = make_model(
        [helper.make_node("MatMul", ["x", "W"], ["y"], name="linear")],
        {"x": (kind, ["batch", 40])},
        {"y": (kind, ["batch", 24])},
        {"W": weight},
    )
    x = correlated(300, 40, 0.9).astype(dtype).astype(stored)
    found = weights_of(pruned(model, {"x": x}, **FIXED))["W"]
    assert found.dtype == stored
    wide = x.astype(np.float32)
    expected = of(wide, weight.astype(np.float32))
    np.testing.assert_allclose(
        found.astype(np.float32), expected, rtol=2 * float(ml_dtypes.finfo(dtype).eps), atol=1e-4
    )


def test_layers_that_share_a_weight_are_fitted_to_the_inputs_of_both():
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "A"], ["h"], name="/a"),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("MatMul", ["r", "A"], ["y"], name="/b"),
        ],
        {"x": (FLOAT, ["batch", 40])},
        {"y": (FLOAT, ["batch", 40])},
        {"A": random_weight(40, 40)},
    )
    x = correlated(400, 40, 0.9)
    found = weights_of(pruned(model, {"x": x}, **FIXED))["A"]
    both = np.concatenate([x, np.maximum(x @ random_weight(40, 40), 0)])
    np.testing.assert_allclose(found, of(both, random_weight(40, 40)), atol=1e-4)


def test_layers_in_subgraphs_are_pruned_by_magnitude():
    x = correlated(200, 20)
    report = pruned(branches_model(), {"x": x, "flag": np.array(True)}, method="sparsegpt")
    assert [note for note in report.notes if "pruned by magnitude instead: the inputs are inside a subgraph" in note]
    assert [layer.sparsity for layer in report.layers] == [0.5, 0.5]


@pytest.mark.parametrize(
    "options", [{"method": "wanda"}, {"method": "sparsegpt"}, {"repair": True}, {"scope": "sensitivity"}]
)
def test_without_calibration_it_refuses(options):
    with pytest.raises(CalibrationError, match=r"pass 'prune': .* needs calibration inputs; .*tokenizer"):
        ortolan.optimize_onnx(two_layers(), recipe=recipe_of({"name": "prune", **options}))
    report = ortolan.optimize_onnx(two_layers(), recipe=recipe_of({"name": "prune", **options}), dry_run=True)
    assert [note for note in report.notes if "without them, a run fails" in note]
    assert [(layer.status, layer.sparsity) for layer in report.layers] == [("pruned", 0.5), ("pruned", 0.5)]


@pytest.mark.parametrize("name", [name for name in NAMED if name.startswith("sparsegpt")])
def test_recipes_refuse_without_calibration(name):
    with pytest.raises(CalibrationError, match="needs calibration inputs"):
        ortolan.optimize_onnx(ir.to_proto(tiny.tiny_bert()), recipe=NAMED[name], options={"may_grow": True})


def test_inputs_that_are_not_finite_are_refused():
    x = correlated(100, 40)
    x[3, 4] = np.nan
    with pytest.raises(CalibrationError, match="inputs of layer '/a' hold NaN"):
        pruned(two_layers(), {"x": x}, method="sparsegpt")


@pytest.mark.parametrize("options", [{"method": "wanda"}, {"pattern": "2:4"}])
def test_weights_that_are_not_finite_are_refused(options):
    weight = random_weight(40, 24)
    weight[3, 4] = np.inf
    with pytest.raises(ModelError, match=r"'W' holds NaN or infinity \(1 of .* values\), so it cannot be pruned"):
        pruned(matmul_model(40, 24, weight=weight), {"x": correlated(50, 40)[None]}, **options)


def test_few_inputs_are_noted():
    report = pruned(two_layers(), {"x": correlated(35, 40)}, method="sparsegpt")
    assert [
        note for note in report.notes if "layer '/a' is calibrated on fewer tokens than the layer has inputs" in note
    ]
    report = pruned(two_layers(), {"x": correlated(100, 40)}, method="sparsegpt")
    assert not [note for note in report.notes if "calibrated on fewer" in note]


@pytest.mark.parametrize("inputs", ["pruned", "original"])
def test_layers_that_round_their_inputs_at_run_time(inputs):
    """After pruning, the layer reads its input without int8 rounding, so this value must be recorded as well."""
    layer = Int8Layer("dynamic_to_float", 40, 40, q=sparse_integers(40, 40, 0.0))
    nodes = [
        helper.make_node("MatMul", ["given", "A"], ["x"], name="/a"),
        *layer.nodes("r"),
        helper.make_node("MatMul", ["r", "B"], ["y"], name="/b"),
    ]
    used = {name for node in nodes for name in node.input}
    weights = {name: array for name, array in layer.tensors.items() if name in used}
    weights |= {"A": random_weight(40, 40), "B": random_weight(40, 20, seed=1)}
    model = make_model(
        nodes, {"given": (FLOAT, ["batch", 40])}, {"y": (FLOAT, ["batch", 20])}, weights, domains={MICROSOFT: 1}
    )
    x = correlated(300, 40, 0.9)
    report = pruned(model, {"given": x}, inputs=inputs, **FIXED)
    assert [one.sparsity for one in report.layers] == pytest.approx([0.5] * 3, abs=1e-3)
    assert op_types(report.model) == ["MatMul"] * 3
    assert relative_error(run(model, {"given": x})[0], run(report.model, {"given": x})[0]) < 0.5


# ---- layers of different sparsity ------------------------------------------------------------------------------------


def test_layers_that_bear_it_are_sparser():
    """Inputs of B are almost zero, so pruning more of its weights costs almost nothing."""
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["h"], name="/a"),
        helper.make_node("Mul", ["h", "s"], ["m"]),
        helper.make_node("MatMul", ["m", "B"], ["y"], name="/b"),
    ]
    scale = np.where(np.arange(40) % 4 == 0, 1, 1e-3).astype(np.float32)
    weights = {"A": random_weight(40, 40), "B": random_weight(40, 40, seed=1), "s": scale}
    model = make_model(nodes, {"x": (FLOAT, ["batch", 40])}, {"y": (FLOAT, ["batch", 40])}, weights)
    x = correlated(400, 40, 0.5)
    for method in ("magnitude", "wanda", "sparsegpt"):
        reports = [pruned(model, {"x": x}, method=method, scope=scope) for scope in ("layer", "sensitivity")]
        found = weights_of(reports[1])
        zeros = {name: np.count_nonzero(found[name] == 0) for name in "AB"}
        assert abs(sum(zeros.values()) - 1600) <= 1 and zeros["B"] == round(0.7 * 1600)
        assert [layer.sparsity for layer in reports[1].layers] == pytest.approx([0.3, 0.7])
        (exact,) = run(model, {"x": x})
        errors = [relative_error(exact, run(report.model, {"x": x})[0]) for report in reports]
        if method != "magnitude":  # magnitude pruning ignores how large the inputs are
            assert errors[1] < 0.8 * errors[0]


def test_layers_with_a_sparsity_of_their_own_take_no_part():
    x = correlated(400, 40, 0.5)
    report = pruned(two_layers(), {"x": x}, method="wanda", scope="sensitivity", layers={"/b": 0.25})
    assert [layer.sparsity for layer in report.layers] == [0.5, 0.25]


# ---- pruning and quantization in one step ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "quantization"),
    [
        ({"weight_bits": 8}, Quantization(8, None)),
        ({"weight_bits": 4, "weight_group_size": 32}, Quantization(4, 32, bf16_scales=True)),
        ({"weight_bits": 4, "zero_points": True}, Quantization(4, 128, symmetric=False)),
    ],
)
def test_joint_rounding_is_that_of_the_arrays(options, quantization):
    x = correlated(400, 40, 0.9)
    report = pruned(two_layers(), {"x": x}, **FIXED, **options)
    rounded = sparsegpt_rounded(random_weight(40, 30), damped(x.T @ x, 0.01), Pattern(), 0.5, quantization)
    expected = dequantize(rounded, quantization.group_size)
    # The Hessian is summed in a different order, so weights in the middle of two steps may round the other way.
    difference = np.abs(weights_of(report)["A"] - expected)
    assert (difference > 1e-3 * np.abs(expected) + 1e-5).mean() < 0.005
    assert difference.max() < 1.01 * rounded.scales.max()
    layer = report.layers[0]
    assert (layer.status, layer.weight_bits) == ("quantized", options["weight_bits"])
    assert layer.sparsity is not None and layer.sparsity >= 0.5


def test_pass_quantize_takes_what_is_left():
    x = correlated(400, 40, 0.9)
    report = pruned(two_layers(), {"x": x}, {"name": "quantize", "bits": 8}, **FIXED, weight_bits=4, exclude=["/b"])
    assert [layer.weight_bits for layer in report.layers] == [4, 8]


def bert_feeds(model: ir.Model, count: int = 6) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    names = [value.name for value in model.graph.inputs]
    ids = [rng.integers(0, 60, (2, 12)) for _ in range(count)]
    every = [{"input_ids": one, "attention_mask": one * 0 + 1, "token_type_ids": one * 0} for one in ids]
    return [{name: array for name, array in feeds.items() if name in names} for feeds in every]


@pytest.mark.parametrize(
    ("recipe", "op"),
    [
        ("sparsegpt-bf16", "SparseAMXMatMul"),
        ("sparsegpt-int8", "SparseAMXMatMul"),
        ("sparsegpt-int4", "SparseAMXMatMul"),
        ("sparse-encoder", "VNNISpMM"),
    ],
)
def test_recipes_give_models_that_run(tmp_path, recipe, op):
    model = tiny.tiny_bert()
    feeds = bert_feeds(model)
    path = tmp_path / "out.onnx"
    report = ortolan.optimize_onnx(
        ir.to_proto(model),
        path,
        recipe=NAMED[recipe],
        calibration=feeds,
        options={"may_grow": True, "verify.seconds": 0.0},
    )
    assert op in op_types(ir.load(path))
    assert report.tokens == 6 * 24 and "144 tokens" in str(report)
    layers = [layer for layer in report.layers if layer.new_op == op]
    assert layers and all(layer.sparsity is not None and layer.sparsity >= 0.5 for layer in layers)
    assert {layer.weight_bits for layer in layers} == {{"sparsegpt-bf16": None, "sparsegpt-int4": 4}.get(recipe, 8)}


def test_joint_weights_go_into_w4a8(tmp_path):
    x = correlated(500, 72, 0.9)
    model = ir.to_proto(tiny.mlp((72, 40), "gemm"))
    report = ortolan.optimize_onnx(
        model,
        recipe=recipe_of(
            {"name": "prune", **FIXED, "weight_bits": 4, "zero_points": True, "weight_group_size": 32},
            {"name": "replace", "op": "W4A8MatMul", "may_grow": True},
            {"name": "verify", "seconds": 0.0},
        ),
        calibration={model.graph.input[0].name: x},
    )
    assert [layer.new_op for layer in report.layers] == ["W4A8MatMul"]
    assert report.rounding_error[0].relative_l2 < 0.05


def test_sparse_layers_are_only_rounded():
    weight = random_weight(40, 24)
    weight[np.random.default_rng(0).random((40, 6)).repeat(4, axis=1) < 0.6] = 0
    report = pruned(
        matmul_model(40, 24, weight=weight),
        {"x": correlated(300, 40)[None]},
        **FIXED,
        pattern="4x1",
        sparsity=0.8,
        keep_sparse=0.5,
        weight_bits=8,
    )
    found = weights_of(report)["W"]
    assert (found[weight == 0] == 0).all() and np.mean(found == 0) < np.mean(weight == 0) + 0.01
    assert 0 < relative_error(weight, found) < 0.02 and report.layers[0].weight_bits == 8


def test_memory_stays_near_one_layer():
    """Memory for eight layers stays far below eight times the memory for one layer."""
    k, layers = 256, 8
    nodes, weights, last = [], {}, "x"
    for index in range(layers):
        nodes.append(helper.make_node("MatMul", [last, f"W{index}"], [f"h{index}"], name=f"/{index}"))
        nodes.append(helper.make_node("Tanh", [f"h{index}"], [f"t{index}"]))
        weights[f"W{index}"] = random_weight(k, k, seed=index)
        last = f"t{index}"
    model = make_model(nodes, {"x": (FLOAT, ["batch", k])}, {last: (FLOAT, ["batch", k])}, weights)
    feeds = [{"x": correlated(100, k, 0.5, seed)} for seed in range(8)]
    peaks = []
    for last_layer in (1, layers):
        names = [f"/{index}" for index in range(last_layer)]
        tracemalloc.start()
        pruned(model, feeds, **FIXED, select=names)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


def test_progress_names_the_layers_done():
    told = []
    ortolan.optimize_onnx(
        two_layers(),
        recipe=recipe_of({"name": "prune", **FIXED}),
        calibration={"x": correlated(100, 40)},
        progress=lambda stage, done, total: told.append((stage, done, total)),
    )
    assert [one for one in told if one[0] == "prune"] == [("prune", 0, 2), ("prune", 1, 2), ("prune", 2, 2)]


def test_the_pruned_model_runs_in_stock_onnx_runtime():
    x = correlated(300, 40, 0.9)
    report = pruned(two_layers(), {"x": x}, method="sparsegpt", repair=True)
    assert (
        onnxruntime.get_available_providers()
        and relative_error(run(two_layers(), {"x": x})[0], run(report.model, {"x": x})[0]) < 0.5
    )
