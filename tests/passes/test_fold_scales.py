"""Calibrated quantization of a model: where the scales of AWQ are folded, and the report."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan import CalibrationError, ModelError, RecipeError
from ortolan.graph_passes.find.linear import linears_in
from ortolan.graph_passes.measure import layer_inputs, recorder
from ortolan.graph_passes.measure.recorder import _as_outputs
from ortolan.graph_passes.passes.quantize import fold_scales, quantize
from ortolan.graph_passes.weights.quantizers.gptq import Prepared
from ortolan.graph_passes.weights.quantizers.grid import Quantization, dequantize, round_to_nearest
from ortolan.graph_passes.weights.quantizers.hessian import damped
from ortolan.models import get_model, tiny

from .correlated import correlated
from .quantized import quantize_in, recipe_of, weights_of
from .small_models import branches_model, make_model, matmul_model, random_weight, relative_error, run

FLOAT = TensorProto.FLOAT
CALIBRATED = ["gptq", "awq"]


def quantized(model, feeds=None, *steps: dict, **options) -> ortolan.OptimizationReport:
    recipe = recipe_of({"name": "calibrate"}, *steps, {"name": "quantize", "bits": 4, "group_size": 32, **options})
    return ortolan.optimize_onnx(model, recipe=recipe, calibration=feeds)


def mean_error(report: ortolan.OptimizationReport) -> float:
    return float(np.mean([layer.output_error for layer in report.layers if layer.weight_bits]))


def llama_feeds(sequences: int = 8) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    empty = np.zeros((2, 2, 0, 12), np.float32)
    past = {f"past_key_values.{layer}.{part}": empty for layer in range(2) for part in ("key", "value")}
    return [
        {
            "input_ids": rng.integers(0, 97, (2, 30)),
            "attention_mask": np.ones((2, 30), np.int64),
            "position_ids": np.broadcast_to(np.arange(30), (2, 30)).copy(),
            **past,
        }
        for _ in range(sequences)
    ]


def outlier_llama() -> onnx.ModelProto:
    """Return a tiny Llama with a few large channels after its norms, as in real models."""
    model = tiny.tiny_llama()
    for name, value in model.graph.initializers.items():
        if name.endswith("layernorm.weight"):
            array = value.const_value.numpy().copy()
            array[::11] *= 20
            value.const_value = ir.tensor(array, name=name)
    return ir.to_proto(model)


def norm_model(kind: str) -> onnx.ModelProto:
    """Return y = norm(x) A, with different norms and different operators after them."""
    shape, gamma = ["batch", 64], np.linspace(0.5, 1.5, 64, dtype=np.float32)
    gamma[::11] *= 20
    weights = {"G": gamma, "B": np.linspace(-1, 1, 64, dtype=np.float32), "A": random_weight(64, 24)}
    node = helper.make_node
    nodes = {
        "norm": [node("LayerNormalization", ["x", "G", "B"], ["h"], name="/norm")],
        "no_bias": [node("LayerNormalization", ["x", "G"], ["h"], name="/norm")],
        "relu": [
            node("LayerNormalization", ["x", "G", "B"], ["n"], name="/norm"),
            node("Relu", ["n"], ["i"], name="/relu"),
            node("Identity", ["i"], ["h"], name="/identity"),
        ],
        "mul_add": [node("Mul", ["x", "G"], ["m"], name="/mul"), node("Add", ["B", "m"], ["h"], name="/add")],
        "linear": [
            node("Mul", ["x", "G"], ["m"], name="/mul"),
            node("Gemm", ["m", "P", "B"], ["h"], name="/first", transB=1),
        ],
        "tied": [
            node("LayerNormalization", ["x", "G", "B"], ["n"], name="/norm"),
            node("Mul", ["n", "G"], ["h"], name="/again"),
        ],
        "residual": [
            node("LayerNormalization", ["x", "G", "B"], ["h"], name="/norm"),
            node("Neg", ["h"], ["z"], name="/neg"),
        ],
        "output": [node("LayerNormalization", ["x", "G", "B"], ["h"], name="/norm")],
        "sigmoid": [node("Mul", ["x", "G"], ["m"], name="/mul"), node("Sigmoid", ["m"], ["h"], name="/sigmoid")],
        "input": [],
    }[kind]
    if kind == "linear":
        weights["P"] = (random_weight(64, 64) * gamma[:, None]).astype(np.float32)
    outputs = {"y": (FLOAT, ["batch", 24])}
    outputs |= {"residual": {"z": (FLOAT, shape)}, "output": {"h": (FLOAT, shape)}}.get(kind, {})
    used = {name for one in nodes for name in one.input} | {"A"}
    nodes.append(node("MatMul", ["x" if kind == "input" else "h", "A"], ["y"], name="/taker"))
    return make_model(nodes, {"x": (FLOAT, shape)}, outputs, {k: v for k, v in weights.items() if k in used})


def scale_only(model: onnx.ModelProto, monkeypatch, feeds) -> tuple[onnx.ModelProto, ortolan.OptimizationReport]:
    """Return the model after AWQ has folded its scales, with unquantized weights."""
    monkeypatch.setattr(quantize, "put_quantized", lambda *_: None)
    report = quantized(model, feeds, method="awq", exclude=["/first"] if "/first" in str(model) else [])
    assert report.model is not None
    return report.model, report


@pytest.mark.parametrize("kind", ["norm", "no_bias", "relu", "mul_add", "linear", "tied"])
def test_folding_leaves_the_function_as_it_is(monkeypatch, kind):
    model = norm_model(kind)
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    folded, report = scale_only(model, monkeypatch, {"x": x})
    assert not [note for note in report.notes if "not scaled" in note]
    before, after = (weights_of_model(one)["A"] for one in (model, folded))
    assert relative_error(before, after) > 0.1
    assert relative_error(run(model, {"x": x})[0], run(folded, {"x": x})[0]) < 1e-6


def weights_of_model(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("residual", "they, or a value they are computed from, are also read by Neg"),
        ("output", "they are an output of the model"),
        ("sigmoid", "they are computed by Sigmoid, into which a scale cannot be folded"),
        ("input", "they are computed from an input of the model"),
    ],
)
def test_what_cannot_be_folded_is_noted(monkeypatch, kind, reason):
    model = norm_model(kind)
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    folded, report = scale_only(model, monkeypatch, {"x": x})
    (note,) = [note for note in report.notes if "not scaled" in note]
    assert reason in note and "'/taker'" in note
    np.testing.assert_array_equal(weights_of_model(folded)["A"], weights_of_model(model)["A"])


def test_folding_in_a_llama(monkeypatch):
    model, feeds = outlier_llama(), llama_feeds()
    folded, report = scale_only(model, monkeypatch, feeds)
    before, after = weights_of_model(model), weights_of_model(folded)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        names += [f"self_attn.{part}_proj.weight_t" for part in "qkv"] + [
            "mlp.gate_proj.weight_t",
            "mlp.up_proj.weight_t",
        ]
        assert {f"{prefix}.{name}" for name in names} <= changed
        assert f"{prefix}.self_attn.o_proj.weight_t" not in changed
    (note,) = [note for note in report.notes if "not scaled" in note]
    assert note.startswith("the inputs of 2 layers, such as '/model/layers.0/self_attn/o_proj/MatMul', are not scaled")
    assert "Reshape" in note
    for expected, found in zip(run(model, feeds[0]), run(folded, feeds[0]), strict=True):
        assert relative_error(expected, found) < 1e-5


def test_a_bert_normalizes_last_so_nothing_is_folded(monkeypatch):
    model = ir.to_proto(tiny.tiny_bert())
    folded, report = scale_only(model, monkeypatch, None)
    assert [note for note in report.notes if "are also read by Add" in note]
    before, after = weights_of_model(model), weights_of_model(folded)
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_and_gptq_are_better_than_nearest_in_a_llama(symmetric):
    model, feeds = outlier_llama(), llama_feeds()
    reports = {m: quantized(model, feeds, method=m, symmetric=symmetric) for m in ("rtn", "gptq", "awq")}
    errors = {method: mean_error(report) for method, report in reports.items()}
    assert errors["awq"] < 0.8 * errors["rtn"] and errors["gptq"] < 0.8 * errors["rtn"]
    logits = run(model, feeds[0])[0]
    ends = {m: relative_error(logits, run(report.model, feeds[0])[0]) for m, report in reports.items()}
    assert ends["awq"] < ends["rtn"] and ends["gptq"] < ends["rtn"]


@pytest.mark.parametrize("hessian_bytes", [1 << 29, 1])
def test_gptq_sees_all_rows_of_all_feeds(monkeypatch, hessian_bytes):
    monkeypatch.setattr(layer_inputs, "_HESSIAN_BYTES", hessian_bytes)
    monkeypatch.setattr(recorder, "_HESSIAN_ROWS", 37)
    seen = []
    monkeypatch.setattr(quantize, "damped", lambda hessian, damping: seen.append((hessian, damping)) or hessian)
    monkeypatch.setattr(
        quantize, "prepare", lambda hessian, act_order: seen.append(act_order) or Prepared(*[hessian] * 3)
    )
    monkeypatch.setattr(quantize, "gptq", lambda matrix, prepared, quantization: round_to_nearest(matrix, quantization))
    a, b = random_weight(40, 30), random_weight(30, 20, seed=1)
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "A"], ["h"], name="/a"),
            helper.make_node("MatMul", ["h", "B"], ["y"], name="/b"),
        ],
        {"x": (FLOAT, ["batch", 40])},
        {"y": (FLOAT, ["batch", 20])},
        {"A": a, "B": b},
    )
    x = correlated(200, 40)
    report = quantized(model, [{"x": x[:120]}, {"x": x[120:]}], method="gptq", damping=0.05, act_order=True)
    (first, damping), act_order, (second, _), _ = seen
    assert (damping, act_order) == (0.05, True)
    np.testing.assert_allclose(first, x.T @ x, rtol=1e-4, atol=1e-2)
    h = x @ a  # computed with the unquantized A
    np.testing.assert_allclose(second, h.T @ h, rtol=1e-4, atol=1e-2)
    assert not [note for note in report.notes if "calibrat" in note]


def test_shared_weights_are_calibrated_for_all_their_inputs(monkeypatch):
    seen = []
    monkeypatch.setattr(quantize, "damped", lambda hessian, damping: seen.append(hessian) or damped(hessian, damping))
    a = random_weight(40, 40)
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "A"], ["h"], name="/a"),
            helper.make_node("MatMul", ["h", "A"], ["y"], name="/b"),
        ],
        {"x": (FLOAT, ["batch", 40])},
        {"y": (FLOAT, ["batch", 40])},
        {"A": a},
    )
    x = correlated(100, 40)
    quantized(model, {"x": x}, method="gptq")
    (hessian,) = seen
    np.testing.assert_allclose(hessian, x.T @ x + (x @ a).T @ (x @ a), rtol=1e-3, atol=1e-2)


def test_gptq_keeps_what_was_pruned():
    model = matmul_model(256, 24, weight=random_weight(256, 24))
    x = correlated(600, 256).reshape(2, 300, 256)
    prune = {"name": "prune", "sparsity": 0.5}
    pruned = weights_of(ortolan.optimize_onnx(model, recipe=recipe_of(prune)))["W"]
    report = quantized(model, {"x": x}, prune, method="gptq")
    found = weights_of(report)["W"]
    assert (found[pruned == 0] == 0).all()
    nearest = weights_of(quantized(model, {"x": x}, prune))["W"]
    assert relative_error(x @ pruned, x @ found) < 0.5 * relative_error(x @ pruned, x @ nearest)


def test_poor_calibration_is_noted():
    notes = quantized(matmul_model(64, 24), method="gptq").notes
    assert any("synthetic inputs" in note and "give calibration" in note for note in notes)
    assert any("layer 'linear' is calibrated on fewer tokens than the layer has inputs" in note for note in notes)


@pytest.mark.parametrize("method", CALIBRATED)
def test_layers_in_subgraphs_are_rounded_to_nearest(method):
    report = quantized(branches_model(), method=method)
    assert [layer.weight_bits for layer in report.layers] == [4, 4]
    # Both layers read x, which is outside the branches, so it can be recorded.
    assert not [note for note in report.notes if "subgraph" in note]


@pytest.mark.parametrize("method", CALIBRATED)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_weights_and_inputs_are_refused_by_name(method, bad):
    weight = random_weight(64, 24)
    weight[3, 4] = bad
    with pytest.raises(ModelError, match=r"'W' holds NaN or infinity \(1 of .* values\), so it cannot be quantized"):
        quantized(matmul_model(64, 24, weight=weight), method=method)


def test_bad_inputs_are_refused_by_name():
    x = np.ones((1, 5, 64), np.float32)
    x[0, 1, 2] = np.nan
    with pytest.raises(CalibrationError, match="inputs of layer 'linear' hold NaN"):
        quantized(matmul_model(64, 24), {"x": x}, method="gptq")


def test_the_files_of_calibration_go_away(tmp_path):
    quantize_in(matmul_model(64, 24), tmp_path, {"name": "quantize", "bits": 4, "method": "gptq"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed.bin"]


def test_recorded_values_are_no_outputs_afterwards():
    model = tiny.tiny_llama()
    wanted = {linear.x.name: linear for linear in linears_in(model)}
    outputs = list(model.graph.outputs)
    with _as_outputs(model, wanted):
        assert all(linear.x.is_graph_output() for linear in wanted.values())
    assert list(model.graph.outputs) == outputs
    assert not any(linear.x.is_graph_output() for linear in wanted.values())


def test_progress_of_calibrated_methods(monkeypatch):
    monkeypatch.setattr(fold_scales, "_BATCH_BYTES", 1)
    for method, stage in (("gptq", "calibrate"), ("awq", "scale")):
        calls = []
        ortolan.optimize_onnx(
            outlier_llama(),
            recipe=recipe_of({"name": "quantize", "bits": 4, "method": method}),
            progress=lambda *call, calls=calls: calls.append(call),
        )
        stages = {name: [call[1:] for call in calls if call[0] == name] for name in (stage, "quantize")}
        assert all(part[-1][0] == part[-1][1] > 0 for part in stages.values())


@pytest.mark.parametrize("kind", ["integer", "fraction"])
@pytest.mark.parametrize("method", ["rtn", "mse", "gptq", "awq", "hqq"])
def test_a_layer_with_zero_points(tmp_path, method, kind):
    weight = random_weight(100, 40)
    step = {"name": "quantize", "bits": 4, "group_size": 32, "method": method, "symmetric": False, "zero_points": kind}
    context, linears = quantize_in(matmul_model(100, 40, weight=weight), tmp_path, step)
    (linear,) = linears.values()
    stored = context.layers.quantized[linear.weight_key]
    assert not stored.symmetric and stored.zero_points is not None
    assert (stored.q.dtype, stored.zero_points.dtype) == (ir.DataType.UINT8, ir.DataType.UINT8)
    assert tuple(stored.zero_points.shape) == tuple(stored.scales.shape) == (4, 40)
    np.testing.assert_array_equal(linear.matrix(), stored.matrix())
    if method == "rtn":
        quantization = Quantization(4, 32, symmetric=False, fractions=kind == "fraction")
        expected = dequantize(round_to_nearest(weight, quantization), 32)
        np.testing.assert_array_equal(linear.matrix(), expected)
    assert relative_error(weight, linear.matrix()) < 0.2


def test_sparse_amx_matmul_takes_no_zero_points():
    steps = [{"name": "quantize", "bits": 4, "symmetric": False}, {"name": "replace", "may_grow": True}]
    with pytest.raises(RecipeError, match=r"is quantized with zero points.*quantize.symmetric"):
        recipe_of(*steps)


@pytest.mark.parametrize("method", CALIBRATED)
def test_calibrated_weights_run_in_the_operator(method):
    steps = [{"name": "quantize", "bits": 4, "group_size": 32, "method": method}, {"name": "replace", "may_grow": True}]
    recipe = recipe_of({"name": "calibrate"}, *steps, {"name": "verify", "seconds": 0.0})
    report = ortolan.optimize_onnx(outlier_llama(), recipe=recipe, calibration=llama_feeds())
    layers = [layer for layer in report.layers if layer.status == "replaced"]
    assert len(layers) == 15 and all(0 < layer.output_error < 0.2 for layer in layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 8, "symmetric": False}, "symmetric is false, which needs bits = 4"),
        ({"bits": 8, "method": "hqq"}, "method is 'hqq', which needs bits = 4"),
        ({"bits": 4, "method": "hqq", "symmetric": True}, "symmetric is true, expected false"),
        ({"bits": 4, "damping": 0.1}, "damping is 0.1, which needs method = 'gptq'"),
        ({"bits": 4, "reduce_range": True}, "reduce_range is true, which needs bits = 8"),
        ({"reduce_range": True, "method": "gptq"}, "reduce_range is true, which needs bits = 8"),
        ({"bits": 4, "method": "awq", "act_order": True}, "act_order is True, which needs"),
        ({"bits": 4, "method": "gptq", "damping": 0.0}, "damping is 0.0, expected a number from 0.0001"),
        ({"bits": 4, "method": "obq"}, "method is 'obq', expected one of"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(RecipeError, match=message):
        recipe_of({"name": "quantize", **options})


@pytest.mark.slow
@pytest.mark.network
def test_stories15m():
    path = get_model("stories15m").onnx
    feeds = []
    rng = np.random.default_rng(0)
    for _ in range(4):
        ids = rng.integers(259, 2000, (2, 100))
        past = {
            f"past_key_values.{i}.{part}": np.zeros((2, 6, 0, 48), np.float32)
            for i in range(6)
            for part in ("key", "value")
        }
        feeds.append(
            {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "position_ids": np.broadcast_to(np.arange(100), ids.shape).copy(),
                **past,
            }
        )
    left_out = ["*lm_head*", "*layers.[1-5]*"]
    errors = {
        method: mean_error(quantized(path, feeds, method=method, symmetric=False, exclude=left_out))
        for method in ("rtn", "gptq", "awq", "hqq")
    }
    assert errors["gptq"] < 0.85 * errors["rtn"]
    assert errors["awq"] < errors["rtn"] and errors["hqq"] < errors["rtn"]
