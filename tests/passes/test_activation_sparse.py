"""Activation sparsity: layer inputs that already contain zeros, chosen thresholds, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import NodeProto, TensorProto, helper

import ortolan
from ortolan import CalibrationError, Recipe, RecipeError
from ortolan.errors import NothingToReplaceError, VerificationError
from ortolan.graph_passes.find.linear import layer_key, linears_in
from ortolan.graph_passes.find.sparse_inputs import is_sparse_by_itself
from ortolan.graph_passes.passes.activations import masked_inputs, quantile
from ortolan.graph_passes.passes.replace import replace
from ortolan.graph_passes.passes.replace.packing import Packer
from ortolan.models import tiny

from .small_models import branches_model, make_model, op_types, optimize, random_weight, relative_error, run

FLOAT = TensorProto.FLOAT
K, HIDDEN, N = 24, 40, 17
ROWS = 50


def node(op_type: str, inputs: str, outputs: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op_type, inputs.split(), outputs.split(), name=outputs.split()[0], **attributes)


RELU = node("Relu", "u", "r")
GELU = [
    node("Div", "u root", "d"),
    node("Erf", "d", "e"),
    node("Add", "e one", "f"),
    node("Mul", "u f", "g"),
    node("Mul", "g half", "v"),
]
# u and t are outputs of two layers that read the same input; v is the input of the last layer.
SPARSE = {
    "relu": [node("Relu", "u", "v")],
    "relu squared, Mul": [RELU, node("Mul", "r r", "v")],
    "relu squared, Pow": [RELU, node("Pow", "r two", "v")],
    "relu, gated": [RELU, node("Mul", "t r", "v")],
    "relu, reshaped": [RELU, node("Reshape", "r like", "v")],
    "relu, halved": [RELU, node("Div", "r two", "v")],
    "relu6": [node("Clip", "u zero six", "v")],
    "max with 0": [node("Max", "u zero", "v")],
}
DENSE = {
    "nothing": [node("Identity", "u", "v")],
    "gelu": GELU,
    "swiglu": [node("Sigmoid", "u", "s"), node("Mul", "u s", "g"), node("Mul", "g t", "v")],
    "relu and more": [RELU, node("Add", "r one", "v")],
    "one over relu": [RELU, node("Div", "one r", "v")],
    "relu to the power of 0": [RELU, node("Pow", "r zero", "v")],
    "max with 1": [node("Max", "u one", "v")],
    "max of layers": [node("Max", "u t", "v")],
    "clip at -1": [node("Clip", "u minus", "v")],
}
NUMBERS = {"zero": 0, "one": 1, "two": 2, "six": 6, "half": 0.5, "minus": -1, "root": np.sqrt(2)}


def mlp_model(between: Sequence[NodeProto]) -> onnx.ModelProto:
    """Return a model x -> u, t (layers with bias) -> v -> y (layer with bias)."""
    weights = {
        "A": random_weight(K, HIDDEN),
        "a": random_weight(HIDDEN, seed=5),
        "C": random_weight(K, HIDDEN, seed=2),
        "B": random_weight(HIDDEN, N, seed=1),
        "b": random_weight(N, seed=6),
        "like": np.array([-1, HIDDEN], np.int64),
    } | {name: np.float32(number) for name, number in NUMBERS.items()}
    nodes = [
        node("Gemm", "x A a", "u"),
        node("MatMul", "x C", "t"),
        *between,
        node("MatMul", "v B", "p"),
        node("Add", "p b", "y"),
    ]
    used = {name for one in nodes for name in one.input}
    return make_model(
        nodes,
        {"x": (FLOAT, ["batch", K])},
        {"y": (FLOAT, ["batch", N])},
        {name: array for name, array in weights.items() if name in used},
    )


def recipe(*others: dict[str, Any], weights: str | None = "float32", **options: Any) -> Recipe:
    steps = [
        {"name": "normalize"},
        {"name": "calibrate"},
        *others,
        {"name": "activations", **options},
        {"name": "replace", "op": "MaskedMatMul", "may_grow": True} | ({"weights": weights} if weights else {}),
        {"name": "verify", "seconds": 0.0},
    ]
    return Recipe.from_dict({"name": "test", "pass": steps})


def sparsify(model: onnx.ModelProto, feeds: Any, *others: dict, **options: Any) -> ortolan.OptimizationReport:
    return ortolan.optimize_onnx(model, recipe=recipe(*others, **options), calibration=feeds)


def some_x(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((rows, K)).astype(np.float32)}


def outputs_of(model: onnx.ModelProto, names: Sequence[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(helper.make_tensor_value_info(name, FLOAT, None) for name in names)
    return run(copy, feeds)


def masked(x: np.ndarray, threshold: float) -> np.ndarray:
    return np.where(np.abs(x) <= np.float32(threshold), np.float32(0), x)


def masked_nodes(report: ortolan.OptimizationReport) -> dict[str, onnx.NodeProto]:
    assert report.model is not None
    return {one.name: one for one in report.model.graph.node if one.op_type == "MaskedMatMul"}


def attribute(of: onnx.NodeProto, name: str) -> Any:
    return next(helper.get_attribute_value(one) for one in of.attribute if one.name == name)


# ---- inputs that already contain zeros -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [*SPARSE, *DENSE])
def test_inputs_behind_a_relu_are_found(form):
    model = ir.from_proto(mlp_model((SPARSE | DENSE)[form]))
    found = {linear.name: is_sparse_by_itself(linear.x) for linear in linears_in(model)}
    assert found == {"u": False, "t": False, "p": form in SPARSE}


def test_a_long_chain_of_squares_is_followed_once():
    squares = [node("Mul", f"q{index} q{index}", f"q{index + 1}") for index in range(60)]
    between = [node("Identity", "u", "q0"), *squares, node("Identity", "q60", "v")]
    model = ir.from_proto(mlp_model(between))
    assert not any(is_sparse_by_itself(linear.x) for linear in linears_in(model))


@pytest.mark.parametrize("form", SPARSE)
def test_they_need_no_threshold_and_nothing_changes(form):
    model, feeds = mlp_model(SPARSE[form]), some_x()
    report = sparsify(model, feeds)
    assert list(masked_nodes(report)) == ["p"]
    layers = {layer.name: layer for layer in report.layers}
    (v,) = outputs_of(model, ["v"], feeds)
    assert layers["p"].threshold == 0.0
    assert layers["p"].density == pytest.approx(np.mean(v != 0), abs=0.02)
    assert 0.3 < layers["p"].density < 0.7
    assert layers["u"].threshold is None and layers["u"].reason == "no pass 'activations' selects it"
    assert relative_error(run(model, feeds)[0], run(report.model, feeds, library=True)[0]) < 1e-6


def test_they_need_no_calibration():
    report = optimize(mlp_model(SPARSE["relu"]), recipe=recipe())
    (layer,) = report.replaced
    assert (layer.name, layer.threshold, layer.density) == ("p", 0.0, None)


def test_a_relu_that_never_bites_is_left_alone():
    model = mlp_model(SPARSE["relu"])
    (bias,) = (one for one in model.graph.initializer if one.name == "a")
    bias.CopyFrom(onnx.numpy_helper.from_array(np.full(HIDDEN, 9, np.float32), "a"))
    with pytest.raises(NothingToReplaceError, match=r"p: only 0\.0% of its input is zero on the feeds"):
        sparsify(model, some_x())


# ---- thresholds for a given sparsity ---------------------------------------------------------------------------------


def test_quantile():
    numbers = np.arange(1, 11, dtype=np.float32)
    assert [quantile(numbers, share) for share in (0.0, 0.01, 0.1, 0.11, 0.5, 0.999)] == [0, 1, 1, 2, 5, 10]


@pytest.mark.parametrize("sparsity", [0.25, 0.4, 0.5, 0.9])
@pytest.mark.parametrize("form", ["relu", "relu squared, Mul", "gelu", "swiglu"])
def test_the_share_of_zeros_is_as_asked(form, sparsity):
    model, feeds = mlp_model((SPARSE | DENSE)[form]), [some_x(40, 1), some_x(60, 2)]
    layers = {layer.name: layer for layer in sparsify(model, feeds, sparsity=sparsity).layers}
    found = [outputs_of(model, ["v"], one)[0] for one in feeds]
    inputs = {"u": np.concatenate([one["x"] for one in feeds]), "p": np.concatenate(found)}
    inputs["t"] = inputs["u"]
    for name, x in inputs.items():
        zero = np.mean(np.abs(x) <= np.float32(layers[name].threshold))
        assert layers[name].density == pytest.approx(1 - zero, abs=0.02)
        natural = np.mean(x == 0)
        assert zero == pytest.approx(max(sparsity, natural), abs=0.02)
    assert layers["u"].threshold == layers["t"].threshold > 0


def test_only_a_sample_is_kept():
    x = np.random.default_rng(0).standard_normal((4000, K)).astype(np.float32)
    report = sparsify(mlp_model(DENSE["gelu"]), [{"x": x[:2000]}, {"x": 3 * x[2000:]}], sparsity=0.4, max_values=4096)
    threshold = next(layer.threshold for layer in report.layers if layer.name == "u")
    assert np.mean(np.abs(np.concatenate([x[:2000], 3 * x[2000:]])) <= threshold) == pytest.approx(0.4, abs=0.02)


def test_select_and_exclude():
    feeds = some_x()
    report = sparsify(mlp_model(DENSE["gelu"]), feeds, sparsity=0.4, select=["u", "B"], exclude=["u"])
    assert list(masked_nodes(report)) == ["p"]
    with pytest.raises(RecipeError, match="pattern 'nothing' of select matches no linear layer"):
        sparsify(mlp_model(DENSE["gelu"]), feeds, sparsity=0.4, select=["nothing"])


# ---- thresholds for a given error ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [0.05, 0.2])
def test_the_error_of_no_layer_is_above_the_budget(error):
    model, feeds = mlp_model(DENSE["swiglu"]), some_x(200)
    layers = {layer.name: layer for layer in sparsify(model, feeds, error=error).layers}
    (v,) = outputs_of(model, ["v"], feeds)
    weights = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}

    def off_by(x: np.ndarray, weight: str, threshold: float) -> float:
        exact = x @ weights[weight]
        lost = exact - masked(x, threshold) @ weights[weight]
        return float(np.sqrt(np.mean((lost**2).sum(1) / (exact**2).sum(1))))

    shared = [off_by(feeds["x"], weight, layers["u"].threshold) for weight in ("A", "C")]
    last = off_by(v, "B", layers["p"].threshold)
    assert max(shared) <= error and last <= error
    # Thresholds are almost the largest possible: 1 % more zeros would exceed the error.
    x = np.sort(np.abs(feeds["x"]).ravel())
    next_one = quantile(x, np.mean(x <= layers["u"].threshold) + 0.01)
    assert max(off_by(feeds["x"], weight, next_one) for weight in ("A", "C")) > error
    assert layers["u"].threshold == layers["t"].threshold


def test_a_huge_token_does_not_decide():
    model = mlp_model(DENSE["gelu"])
    plain, huge = some_x(200), some_x(200)
    huge["x"][0] *= 1000
    thresholds = [
        next(layer.threshold for layer in sparsify(model, feeds, error=0.1).layers if layer.name == "u")
        for feeds in (plain, huge)
    ]
    assert thresholds[1] == pytest.approx(thresholds[0], rel=0.05)


def test_no_budget_takes_nothing_but_zeros():
    model, feeds = mlp_model(SPARSE["relu"]), some_x()
    report = sparsify(model, feeds, error=0.0)
    assert relative_error(run(model, feeds)[0], run(report.model, feeds, library=True)[0]) < 1e-6
    assert {layer.name: layer.threshold for layer in report.layers}["p"] == 0.0


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["float32", "bf16"])
def test_one_layer_by_the_formula(weights):
    feeds = some_x()
    w, b = random_weight(K, N), random_weight(N, seed=1)
    model = make_model(
        [node("MatMul", "x W", "p"), node("Add", "p b", "y")],
        {"x": (FLOAT, ["batch", K])},
        {"y": (FLOAT, ["batch", N])},
        {"W": w, "b": b},
    )
    report = sparsify(model, feeds, sparsity=0.4, weights=weights)
    (made,) = masked_nodes(report).values()
    threshold = attribute(made, "a_threshold")
    assert 0.4 < threshold < 0.65  # the 40 % quantile of |x| is 0.524 for a standard normal distribution
    stored = w if weights == "float32" else w.astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = masked(feeds["x"], threshold) @ stored + b
    for rows in (1, 3, ROWS):  # the operator has a different code path for few rows
        x = {"x": feeds["x"][:rows]}
        assert relative_error(expected[:rows], run(report.model, x, library=True)[0]) < 1e-6
        assert relative_error(expected[:rows], run(report.model, x)[0]) < 1e-6


@pytest.mark.parametrize("weights", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("form", ["relu", "relu squared, Pow", "gelu", "swiglu"])
def test_with_and_without_the_library(form, weights):
    model, feeds = mlp_model((SPARSE | DENSE)[form]), some_x()
    quantize = [{"name": "quantize", "method": "rtn", "bits": 8}] if weights == "int8" else []
    report = sparsify(model, feeds, *quantize, sparsity=0.3, weights=None if weights == "int8" else weights)
    assert len(report.replaced) == 3
    with_library, without = (run(report.model, feeds, library=library)[0] for library in (True, False))
    assert relative_error(without, with_library) < 1e-5
    assert relative_error(run(model, feeds)[0], with_library) < 0.5
    kinds = {one.name: one.data_type for one in report.model.graph.initializer}
    expected = {"float32": FLOAT, "bf16": TensorProto.BFLOAT16, "int8": TensorProto.INT8}[weights]
    assert {kinds[one.input[1]] for one in masked_nodes(report).values()} == {expected}


@pytest.mark.parametrize("forms", [("matmul_add", "gemm", "gemm_trans_b"), ("transpose", "identity", "cast")])
def test_layers_of_every_form(forms):
    model = ir.to_proto(tiny.mlp((24, 40, 33, 16), forms))
    feeds = some_x()
    report = sparsify(model, feeds, sparsity=0.2)
    assert len(report.replaced) == 3
    # With an error of 0 the thresholds are 0, and the answers stay the same.
    same = sparsify(model, feeds, error=0.0)
    assert relative_error(run(model, feeds)[0], run(same.model, feeds, library=True)[0]) < 1e-6


def test_float16_activations():
    model = make_model(
        [node("MatMul", "x W", "y")],
        {"x": (TensorProto.FLOAT16, ["batch", K])},
        {"y": (TensorProto.FLOAT16, ["batch", N])},
        {"W": random_weight(K, N, dtype=np.float16)},
    )
    feeds = {"x": some_x()["x"].astype(np.float16)}
    report = sparsify(model, feeds, sparsity=0.4)
    (made,) = masked_nodes(report).values()
    w = random_weight(K, N, dtype=np.float16).astype(np.float32)
    expected = masked(feeds["x"].astype(np.float32), attribute(made, "a_threshold")) @ w
    assert relative_error(expected, run(report.model, feeds, library=True)[0].astype(np.float32)) < 1e-3


def test_weights_that_are_unpacked_in_each_run(monkeypatch):
    model, feeds = mlp_model(DENSE["gelu"]), some_x()
    once = sparsify(model, feeds, sparsity=0.4, weights="bf16")
    monkeypatch.setattr(replace, "UNPACK_ONCE_LIMIT", 0)
    each = sparsify(model, feeds, sparsity=0.4, weights="bf16")
    assert op_types(each.model) == op_types(once.model)
    assert any("unpacks its weights in each run" in note for note in each.notes)
    assert relative_error(run(once.model, feeds)[0], run(each.model, feeds)[0]) < 1e-6


# ---- the model with thresholds, and verify ---------------------------------------------------------------------------


def test_masked_inputs_show_the_thresholds_and_leave_no_trace():
    model = ir.from_proto(mlp_model(DENSE["gelu"]))
    before = ir.to_proto(model).SerializeToString()
    linears = list(linears_in(model))
    thresholds: dict[ir.Value, float | str] = {layer_key(linear): 0.5 for linear in linears if linear.name == "u"}
    thresholds |= {layer_key(linear): "no reason" for linear in linears if linear.name == "t"}
    numbers = iter(range(100))
    feeds = some_x()
    with masked_inputs(model, thresholds, lambda wanted: f"{wanted}_{next(numbers)}"):
        inside = ir.to_proto(model)
        onnx.checker.check_model(inside)
    assert ir.to_proto(model).SerializeToString() == before
    found_u, found_t = outputs_of(inside, ["u", "t"], feeds)
    u, t = outputs_of(ir.to_proto(model), ["u", "t"], {"x": masked(feeds["x"], 0.5)})
    assert relative_error(u, found_u) < 1e-6
    assert relative_error(t, found_t) > 0.1


@pytest.mark.parametrize("factor", [0.0, 4.0])
def test_verify_notices_another_threshold(factor, monkeypatch):
    """The model gets the chosen thresholds times `factor`; 0 removes them. Verification must notice both."""
    model, feeds = mlp_model(DENSE["gelu"]), some_x()
    sparsify(model, feeds, sparsity=0.2)
    attribute_type = ir.AttrFloat32

    def wrong(name: str, value: float) -> ir.Attr:
        return attribute_type(name, value * factor if name == "a_threshold" else value)

    monkeypatch.setattr(ir, "AttrFloat32", wrong)
    if factor:
        with pytest.raises(VerificationError, match="against the model before its layers were replaced"):
            sparsify(model, feeds, sparsity=0.2)
    else:
        assert sparsify(model, feeds, sparsity=0.2).output_error[0].relative_l2 < 1e-6


def test_verify_notices_a_lost_bias(monkeypatch):
    model = mlp_model(DENSE["gelu"])
    (bias,) = (one for one in model.graph.initializer if one.name == "b")
    bias.CopyFrom(onnx.numpy_helper.from_array(np.full(N, 0.5, np.float32), "b"))
    monkeypatch.setattr(Packer, "bias", lambda *arguments: None)
    with pytest.raises(VerificationError, match="against the model before its layers were replaced"):
        sparsify(model, some_x(), sparsity=0.1)


# ---- refusals, dry runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"sparsity": 0.4}, {"error": 0.05}])
def test_refused_without_calibration(options):
    with pytest.raises(CalibrationError, match="'activations' needs calibration inputs"):
        optimize(mlp_model(DENSE["gelu"]), recipe=recipe(**options))


def test_numbers_that_are_not_finite():
    feeds = some_x()
    feeds["x"][3, 4] = np.inf
    with pytest.raises(CalibrationError, match="'x' holds NaN or infinity on the calibration feeds"):
        sparsify(mlp_model(DENSE["gelu"]), feeds, sparsity=0.4, select=["A"])


def test_feeds_without_rows():
    model = mlp_model(DENSE["gelu"])
    steps = [step for step in recipe(sparsity=0.4).to_dict()["pass"] if step["name"] not in ("verify", "calibrate")]
    with pytest.raises(CalibrationError, match="is empty on the calibration feeds, so no threshold can be chosen"):
        ortolan.optimize_onnx(model, recipe=Recipe.from_dict({"name": "r", "pass": steps}), calibration=some_x(0))


def test_layers_in_subgraphs_are_left_alone():
    feeds = [{"x": np.ones((3, 20), np.float32), "flag": np.array(flag)} for flag in (True, False)]
    # x is a graph input, so it can be recorded; values inside a branch could not.
    report = sparsify(branches_model(), feeds, sparsity=0.4)
    assert {layer.threshold for layer in report.layers} == {1.0}


def test_options():
    with pytest.raises(RecipeError, match=r"sparsity is 0\.4 and error is 0\.05, expected only one"):
        recipe(sparsity=0.4, error=0.05)
    with pytest.raises(RecipeError, match="weights is 'bf16', which needs op = 'MaskedMatMul'"):
        Recipe.from_dict({"name": "r", "pass": [{"name": "replace", "op": "W4A8MatMul", "weights": "bf16"}]})


def test_thresholds_need_an_operator_and_the_operator_thresholds():
    model, feeds = mlp_model(DENSE["gelu"]), some_x()
    steps = recipe(sparsity=0.4).to_dict()["pass"]
    without = [step for step in steps if step["name"] != "replace"]
    with pytest.raises(RecipeError, match="no pass 'replace' applies them"):
        ortolan.optimize_onnx(model, recipe=Recipe.from_dict({"name": "r", "pass": without}), calibration=feeds)
    without = [step for step in steps if step["name"] != "activations"]
    with pytest.raises(NothingToReplaceError, match="no pass 'activations' selects it"):
        ortolan.optimize_onnx(model, recipe=Recipe.from_dict({"name": "r", "pass": without}), calibration=feeds)


def test_another_operator_does_not_drop_thresholds():
    steps = recipe(sparsity=0.4, exclude=["p"]).to_dict()["pass"]
    steps.insert(-2, {"name": "replace", "op": "SparseAMXMatMul", "may_grow": True})
    report = ortolan.optimize_onnx(
        mlp_model(DENSE["gelu"]), recipe=Recipe.from_dict({"name": "r", "pass": steps}), calibration=some_x()
    )
    assert {layer.name: layer.new_op for layer in report.layers} == {
        "u": "MaskedMatMul",
        "t": "MaskedMatMul",
        "p": "SparseAMXMatMul",
    }


def test_four_bits_are_refused():
    with pytest.raises(RecipeError, match="is quantized to 4 bits, which MaskedMatMul does not support"):
        sparsify(mlp_model(DENSE["gelu"]), some_x(), {"name": "quantize", "bits": 4}, sparsity=0.4, weights=None)


@pytest.mark.parametrize("feeds", [None, some_x()])
def test_a_dry_run_says_what_would_be_replaced(feeds):
    model = mlp_model(DENSE["gelu"])
    report = optimize(model, recipe=recipe(sparsity=0.4, exclude=["p"]), dry_run=True, calibration=feeds)
    assert [layer.name for layer in report.replaced] == ["u", "t"]
    assert {layer.status for layer in report.replaced} == {"would replace"}
    assert any("needs calibration inputs" in note for note in report.notes) == (feeds is None)
    assert all(layer.threshold is None for layer in report.layers)
