"""Quantization rounds each weight to the nearest step of its column or group, and changes no other weight."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import ortolan
from ortolan import ModelError, OptimizationReport, RecipeError
from ortolan.graph_passes.files.model_file import load_model
from ortolan.graph_passes.files.spill import TensorSpill
from ortolan.graph_passes.find.linear import Linear, linears_in
from ortolan.graph_passes.find.quantized_weight import MAX_INPUTS, QuantizedWeight, dequantized_tensor
from ortolan.graph_passes.operators.replacement import Stored
from ortolan.graph_passes.passes.context import PassContext
from ortolan.graph_passes.passes.plan.plan import Plan
from ortolan.graph_passes.passes.plan.replace import LayerState
from ortolan.graph_passes.passes.quantize import quantize as quantize_module
from ortolan.graph_passes.weights.quantizers.grid import Quantization, dequantize, round_to_nearest
from ortolan.graph_passes.weights.quantizers.mse import round_mse
from ortolan.models import tiny

from ..sampling import examples
from .quantized import INT4, INT8, quantize_in, recipe_of, spread, weights, weights_of
from .small_models import make_model, matmul_model, random_weight, relative_error, run

FLOAT = TensorProto.FLOAT
BOUND = 0.5 * (1 + 2**-16)  # largest allowed |W - scale * q| / scale


def optimize(model: onnx.ModelProto, **options) -> OptimizationReport:
    return ortolan.optimize_onnx(model, recipe=recipe_of({"name": "quantize", **options}))


def chosen(weight: np.ndarray, quantization: Quantization) -> np.ndarray:
    """Return the weight as pass quantize rounds it by default: mse for 4 bits, nearest for 8 bits."""
    if quantization.bits == 8:
        return nearest(weight, quantization)
    return dequantize(round_mse(weight, replace(quantization, bf16_scales=True)), quantization.group_size)


def nearest(weight: np.ndarray, quantization: Quantization) -> np.ndarray:
    """Return the weight rounded to nearest, computed in float64 from the definition."""
    k, n = weight.shape
    group = quantization.group_size or k
    padded = np.zeros((-(-k // group) * group, n))
    padded[:k] = weight
    parts = padded.reshape(-1, group, n)
    scales = np.abs(parts).max(axis=1, keepdims=True).astype(np.float32) / np.float32(
        127 if quantization.bits == 8 else 7
    )
    scales = quantization.short(scales).astype(np.float64)
    return (np.rint(parts / np.where(scales, scales, 1)) * scales).reshape(-1, n)[:k]


@examples(300)
@given(weights(), st.sampled_from([INT8, *INT4]))
def test_every_weight_is_within_half_a_step(weight, quantization):
    rounded = round_to_nearest(weight, quantization)
    q, scales = rounded.q, rounded.scales
    k, n = weight.shape
    most = quantization.levels[1]
    assert q.dtype == np.int8 and q.shape == (k, n) and scales.dtype == np.float32
    assert scales.shape == (-(-k // (quantization.group_size or k)), n)
    assert np.abs(q.astype(int)).max() <= most
    np.testing.assert_array_equal(quantization.short(scales), scales)
    steps = spread(scales, quantization, k)
    assert (np.abs(weight - steps * q) <= BOUND * steps).all()
    assert (q[weight == 0] == 0).all()
    # The scale is the smallest that can hold the largest weight; this weight has the largest |q|.
    rows = quantization.group_size or k
    for group, start in enumerate(range(0, k, rows)):
        largest = np.abs(weight[start : start + rows].astype(np.float64)).max(axis=0)
        assert ((scales[group] == 0) == (largest == 0)).all()
        normal = largest >= 2.0**-126 * most
        assert (np.abs(q[start : start + rows].astype(int)).max(axis=0)[normal] == most).all()
        assert (scales[group][(largest > 0) & ~normal] == np.float32(2.0**-126)).all()


@examples(100)
@given(weights(), st.sampled_from([INT8, *INT4]), st.booleans())
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_the_lazy_weight_is_finite_and_as_near_as_its_type_allows(tmp_path_factory, dtype, weight, quantization, turn):
    limit = np.float32(dtype.max)
    weight = np.clip(weight, -limit, limit).astype(dtype.numpy()).astype(np.float32)
    rounded = round_to_nearest(weight, quantization)
    q, scales = rounded.q, rounded.scales
    with TensorSpill(tmp_path_factory.mktemp("spill")) as spill:
        stored = QuantizedWeight(
            quantization.bits,
            quantization.group_size,
            spill.add("q", q, ir.DataType.INT8),
            spill.add("scales", scales, ir.DataType.FLOAT),
        )
        tensor = dequantized_tensor(stored, turn, dtype)
        found = tensor.numpy()
        assert found.dtype == dtype.numpy() and found.shape == tuple(tensor.shape)
        assert stored.q.raw is None and stored.scales.raw is None  # unmapped
    found = (found.T if turn else found).astype(np.float64)
    assert np.isfinite(found).all()
    steps = spread(scales, quantization, len(weight))
    # Error of storing a value in its type: 2^-24, 2^-11 or 2^-8 of it, or half of the smallest denormal.
    digits, smallest = {"FLOAT": (24, -149), "FLOAT16": (11, -24), "BFLOAT16": (8, -133)}[dtype.name]
    rounding = 1.01 * (2.0**-digits + 2.0**-24) * np.abs(steps * q) + 2.0 ** (smallest - 1)
    assert (np.abs(weight - found) <= BOUND * steps + rounding).all()
    assert (found[weight == 0] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("magnitude", [np.finfo(np.float32).max, 3.4e38, 1e30, 1e-30, 2.0**-126, 1e-38, 1e-40, 1e-45])
def test_extreme_magnitudes(bits, magnitude):
    weight = (np.linspace(-1, 1, 33)[:, None] * np.float64(magnitude)).astype(np.float32)
    quantization = Quantization(bits, None if bits == 8 else 32)
    with np.errstate(all="raise", under="ignore"):
        rounded = round_to_nearest(weight, quantization)
    q, scales = rounded.q, rounded.scales
    steps = spread(scales, quantization, 33)
    assert np.isfinite(scales).all() and (scales[0] >= 2.0**-126).all()
    assert (np.abs(weight - steps * q) <= BOUND * steps).all()


def test_memory_stays_below_one_layer():
    weight = random_weight(4096, 4096)
    for quantization in (INT8, INT4[2]):
        tracemalloc.start()
        round_to_nearest(weight, quantization)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < weight.nbytes


@pytest.mark.parametrize(
    ("options", "quantization"),
    [({"bits": 8}, INT8), ({"bits": 4}, INT4[2]), ({"bits": 4, "group_size": 32}, INT4[0])],
)
def test_a_layer_holds_rounded_weights(options, quantization):
    weight = random_weight(300, 24)
    model = matmul_model(300, 24, weight=weight)
    report = optimize(model, **options)
    found = weights_of(report)["W"]
    np.testing.assert_allclose(found, chosen(weight, quantization), rtol=2e-7)
    (layer,) = report.layers
    assert (layer.status, layer.weight_bits, layer.bytes_after) == ("quantized", options["bits"], weight.nbytes)
    assert layer.sparsity == np.count_nonzero(found == 0) / found.size
    assert f"int{options['bits']}" in str(report) and "quantized" in str(report)
    assert [note for note in report.notes if "quantized but not replaced" in note and "'linear'" in note]
    x = np.random.default_rng(0).standard_normal((2, 3, 300)).astype(np.float32)
    # Estimate: a step is the largest of 300 (8 bits) or 32 (4 bits) weights, divided by 127 or 7. Rounding adds 0.29
    # steps (root mean square).
    error = relative_error(run(model, {"x": x})[0], run(report.model, {"x": x})[0])
    assert 0 < error < (0.01 if options["bits"] == 8 else 0.15)


def test_sparsity_adds_no_error():
    weight = random_weight(256, 24)
    steps = [{"name": "prune", "sparsity": 0.7}, {"name": "quantize", "bits": 4}]
    pruned = weights_of(ortolan.optimize_onnx(matmul_model(256, 24, weight=weight), recipe=recipe_of(steps[0])))["W"]
    report = ortolan.optimize_onnx(matmul_model(256, 24, weight=weight), recipe=recipe_of(*steps))
    found = weights_of(report)["W"]
    assert np.count_nonzero(pruned == 0) == round(0.7 * weight.size)
    np.testing.assert_allclose(found, chosen(pruned, INT4[2]), rtol=2e-7)
    assert (found[pruned == 0] == 0).all()
    assert report.layers[0].sparsity == np.count_nonzero(found == 0) / found.size >= 0.7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_are_not_finite_are_refused_by_name(bad, bits):
    weight = random_weight(20, 24)
    weight[3, 4] = bad
    with pytest.raises(
        ModelError,
        match=r"'W' holds NaN or infinity \(1 of 480 values\), .* cannot be quantized; .* exclude this layer",
    ):
        optimize(matmul_model(weight=weight), bits=bits)
    kept = weights_of(optimize(matmul_model(weight=weight), bits=bits, exclude=["W"]))["W"]
    np.testing.assert_array_equal(kept, weight)


def two_layers(a: np.ndarray, b: np.ndarray | None = None) -> onnx.ModelProto:
    """Return a model of two layers, which share the weight A if b is None."""
    return make_model(
        [
            helper.make_node("MatMul", ["x", "A"], ["h"], name="/a"),
            helper.make_node("MatMul", ["h", "A" if b is None else "B"], ["y"], name="/b"),
        ],
        {"x": (FLOAT, ["batch", a.shape[0]])},
        {"y": (FLOAT, ["batch", (a if b is None else b).shape[1]])},
        {"A": a} | ({} if b is None else {"B": b}),
    )


def check_stored(context: PassContext, linear: Linear, original: np.ndarray, quantization: Quantization) -> None:
    """Check that the layer's quantized weight has the layout that the packers expect."""
    weight = context.layers.quantized[linear.weight_key]
    k, n = original.shape
    assert (weight.bits, weight.group_size) == (quantization.bits, quantization.group_size)
    assert (weight.q.dtype, tuple(weight.q.shape)) == (ir.DataType.INT8, (k, n))
    groups = -(-k // (quantization.group_size or k))
    assert (weight.scales.dtype, tuple(weight.scales.shape)) == (ir.DataType.FLOAT, (groups, n))
    rounded = round_to_nearest(original, quantization)
    if quantization.bits == 4:
        rounded = round_mse(original, replace(quantization, bf16_scales=True))
    np.testing.assert_array_equal(weight.q.numpy(), rounded.q)
    np.testing.assert_array_equal(weight.scales.numpy(), rounded.scales)
    np.testing.assert_array_equal(linear.matrix(), weight.matrix())


@pytest.mark.parametrize(("options", "quantization"), [({"bits": 8}, INT8), ({"bits": 4, "group_size": 64}, INT4[1])])
def test_what_the_next_passes_find(tmp_path, options, quantization):
    a, b = random_weight(100, 40), random_weight(40, 33, seed=1)
    context, linears = quantize_in(two_layers(a, b), tmp_path, {"name": "quantize", **options})
    assert len(context.layers.quantized) == 2
    check_stored(context, linears["/a"], a, quantization)
    check_stored(context, linears["/b"], b, quantization)


@pytest.mark.parametrize("options", [{"bits": 5}, {"bits": 4, "subgroup_size": 32, "group_size": 128}])
def test_weights_in_subgroups(tmp_path, options):
    a = random_weight(300, 40)
    context, linears = quantize_in(two_layers(a, random_weight(40, 33)), tmp_path, {"name": "quantize", **options})
    weight = context.layers.quantized[linears["/a"].weight_key]
    size, group = options.get("subgroup_size", 16), options.get("group_size", 256)
    assert (weight.bits, weight.group_size, weight.subgroup_size) == (options["bits"], group, size)
    rounded = round_mse(a, Quantization(options["bits"], group, symmetric=False, subgroup_size=size))
    for name in ("q", "scales", "zero_points", "subgroup_scales"):
        np.testing.assert_array_equal(getattr(weight, name).numpy(), getattr(rounded, name))
    np.testing.assert_array_equal(linears["/a"].matrix(), dequantize(rounded, group, size))


@pytest.mark.parametrize("decoder", [False, True])
def test_inputs_of_text_that_a_decoder_generates_have_weights(decoder, monkeypatch):
    """Random inputs have not: their energies differ from those of real inputs."""
    given = []
    plain = quantize_module.round_mse
    monkeypatch.setattr(quantize_module, "round_mse", lambda *one: given.append(one[2:]) or plain(*one))
    monkeypatch.setitem(quantize_module._ROUND, "mse", lambda *one: given.append(()) or plain(*one))
    model = ir.to_proto(tiny.tiny_llama() if decoder else tiny.tiny_bert())
    optimize(model, bits=4, subgroup_size=16, exclude=["heads"])
    assert given and all(len(one) == decoder for one in given)
    for (energies,) in given if decoder else ():
        assert np.isfinite(energies).all() and energies.min() > 0 and energies.mean() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("form", ["gemm", "gemm_trans_b", "transpose", "identity", "cast", "dequantize"])
def test_weights_behind_other_operators(tmp_path, form):
    model = ir.to_proto(tiny.mlp((72, 40), form))
    (before,) = linears_in(load_model(model).model)
    context, linears = quantize_in(model, tmp_path, {"name": "quantize", "bits": 4, "group_size": 32})
    (linear,) = linears.values()
    assert linear.dtype == before.dtype and linear.transposed == before.transposed
    check_stored(context, linear, before.matrix(), INT4[0])


@pytest.mark.parametrize(("dtype", "stored"), [(np.float16, np.float16), (ml_dtypes.bfloat16, np.float32)])
def test_the_weight_keeps_the_type_of_its_layer(dtype, stored):
    """Models that compute in bfloat16 are converted to float32 first."""
    weight = random_weight(20, 24, dtype=dtype)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = make_model(
        [helper.make_node("MatMul", ["x", "W"], ["y"], name="linear")],
        {"x": (kind, ["batch", 20])},
        {"y": (kind, ["batch", 24])},
        {"W": weight},
    )
    found = weights_of(optimize(model))["W"]
    assert found.dtype == stored
    np.testing.assert_allclose(
        found.astype(np.float64), nearest(weight.astype(np.float32), INT8), rtol=float(ml_dtypes.finfo(dtype).eps)
    )


def test_layers_that_share_a_weight_are_quantized_together(tmp_path):
    weight = random_weight(20, 20)
    context, linears = quantize_in(two_layers(weight), tmp_path, {"name": "quantize"})
    assert linears["/a"].weight_key == linears["/b"].weight_key and len(context.layers.quantized) == 1
    check_stored(context, linears["/a"], weight, INT8)


def test_a_layer_that_is_excluded_keeps_the_shared_weight(tmp_path):
    weight = random_weight(20, 20)
    context, linears = quantize_in(two_layers(weight), tmp_path, {"name": "quantize", "exclude": ["/b"]})
    check_stored(context, linears["/a"], weight, INT8)
    assert linears["/b"].weight_key not in context.layers.quantized
    np.testing.assert_array_equal(linears["/b"].matrix(), weight)
    layers = {layer.name: layer for layer in context.report.layers}
    assert (layers["/b"].status, layers["/b"].reason) == ("kept", "excluded from quantization")
    assert layers["/b"].weight_bits is None and linears["/a"].weight_value.name == "A_quantized"


def test_a_weight_that_others_use_is_copied_first():
    table = random_weight(16, 16)
    model = make_model(
        [
            helper.make_node("Gather", ["table", "ids"], ["h"], name="/embed"),
            helper.make_node("MatMul", ["h", "table"], ["y"], name="/linear"),
        ],
        {"ids": (TensorProto.INT64, ["batch"])},
        {"y": (FLOAT, ["batch", 16])},
        {"table": table},
    )
    found = weights_of(optimize(model))
    np.testing.assert_array_equal(found["table"], table)
    np.testing.assert_allclose(found["table_quantized"], nearest(table, INT8), rtol=2e-7)


def test_each_of_two_passes_takes_its_own_layers(tmp_path):
    a, b = random_weight(100, 40), random_weight(40, 33, seed=1)
    steps = [{"name": "quantize", "bits": 4, "select": ["/a"]}, {"name": "quantize", "bits": 8}]
    context, linears = quantize_in(two_layers(a, b), tmp_path, *steps)
    check_stored(context, linears["/a"], a, INT4[2])  # the second pass does not quantize /a again
    check_stored(context, linears["/b"], b, INT8)
    assert [context.plan.quantization(linear) for linear in linears.values()] == [INT4[2], INT8]


def test_the_plan_is_known_before_any_pass_runs():
    source = load_model(two_layers(random_weight(20, 30), random_weight(30, 20)))
    plan = Plan(recipe_of({"name": "quantize", "bits": 4, "exclude": ["B"]}).passes)
    assert [plan.quantization(linear) for linear in linears_in(source.model)] == [INT4[2], None]


def test_layers_that_replace_would_not_take_stay_as_they_are(tmp_path, monkeypatch):
    a, b = random_weight(20, 30), random_weight(30, 20)
    asked = []

    def gains(self: Plan, linear: Linear, stored: Stored, state: LayerState) -> bool:
        asked.append((linear.name, stored.count))
        return linear.name != "/b" or not stored.count

    monkeypatch.setattr(Plan, "gains", gains)
    context, linears = quantize_in(two_layers(a, b), tmp_path, {"name": "quantize", "bits": 4})
    check_stored(context, linears["/a"], a, INT4[2])
    np.testing.assert_array_equal(linears["/b"].matrix(), b)
    assert linears["/b"].weight_key not in context.layers.quantized
    layer = next(layer for layer in context.report.layers if layer.name == "/b")
    assert (layer.status, layer.weight_bits) == ("kept", None)
    # The plan is asked twice: when layers are selected, and with the nonzero weights after rounding.
    rounded = int(np.count_nonzero(chosen(b, INT4[2])))
    assert [stored for name, stored in asked if name == "/b"] == [0, rounded] and rounded < b.size


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_with_too_many_inputs_stay_as_they_are(bits):
    for k, status in ((MAX_INPUTS, "quantized"), (MAX_INPUTS + 1, "kept")):
        weight = np.full((k, 1), 1.1, np.float32)
        weight[0] = 2
        report = optimize(matmul_model(k, 1, weight=weight), bits=bits)
        (layer,) = report.layers
        assert layer.status == status
        assert (weights_of(report)["W"] == weight).all() == (status == "kept")
    assert layer.weight_bits is None and "131073 inputs, expected at most 131072" in layer.reason


def test_a_dry_run_reads_no_weight(tmp_path, monkeypatch):
    monkeypatch.setattr(quantize_module, "round_to_nearest", None)
    a, b = random_weight(20, 30), random_weight(30, 20)
    step = {"name": "quantize", "bits": 4, "exclude": ["/b"]}
    context, linears = quantize_in(two_layers(a, b), tmp_path, step, dry_run=True)
    assert not context.layers.quantized
    np.testing.assert_array_equal(linears["/a"].matrix(), a)
    found = [(layer.status, layer.weight_bits, layer.bytes_after) for layer in context.report.layers]
    assert found == [("quantized", 4, a.nbytes), ("kept", None, None)]


def test_progress():
    calls = []
    ortolan.optimize_onnx(
        two_layers(random_weight(20, 30), random_weight(30, 20)),
        recipe=recipe_of({"name": "quantize"}),
        progress=lambda stage, done, total: calls.append((stage, done, total)),
    )
    assert [call for call in calls if call[0] == "quantize"] == [("quantize", done, 2) for done in range(3)]


def test_quantized_layers_that_take_more_room_than_before_are_noted():
    report = optimize(ir.to_proto(tiny.mlp((24, 40, 33), ["matmul", "dequantize"])))
    (note,) = [note for note in report.notes if "larger than in the original" in note]
    assert "layer '/layers.1/MatMul' is quantized but stored dense, " in note and "quantize.exclude" in note


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(RecipeError, match="pass 'quantize': pattern '/c' of select matches no linear layer"):
        optimize(matmul_model(), select=["/c"])
