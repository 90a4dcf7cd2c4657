"""MLPs as one VNNISpMM node with calibrated ranges, and reasons for keeping the layers separate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

import ortolan
from ortolan import CalibrationError, Recipe
from ortolan.graph_passes.weights.quantizers.fixed_range import FixedRange, choose_range
from ortolan.models import tiny

from ..recipes.forms import NAMED
from .small_models import make_model, op_types, optimize, random_weight, relative_error, run

FLOAT = TensorProto.FLOAT
K, HIDDEN, N = 24, 40, 17
RECIPE = NAMED["sparse-int8-4x1-static"]
DENSE: dict[str, Any] = {"sparsity": 0.0}

FIRST = helper.make_node("Gemm", ["x", "A", "a"], ["u"], name="first")
SECOND = helper.make_node("MatMul", ["v", "B"], ["y"], name="second")
GELU = [
    helper.make_node("Div", ["u", "root"], ["d"], name="div"),
    helper.make_node("Erf", ["d"], ["e"], name="erf"),
    helper.make_node("Add", ["e", "one"], ["f"], name="add"),
    helper.make_node("Mul", ["u", "f"], ["g"], name="mul"),
    helper.make_node("Mul", ["g", "half"], ["v"], name="halve"),
]


def unary(op_type: str, **attributes: Any) -> list[NodeProto]:
    return [helper.make_node(op_type, ["u"], ["v"], name="activation", **attributes)]


def mlp_model(between: Sequence[NodeProto], outputs: Sequence[str] = ("y",), *more: NodeProto) -> onnx.ModelProto:
    weights = {
        "A": random_weight(K, HIDDEN),
        "a": random_weight(HIDDEN, seed=5),
        "B": random_weight(HIDDEN, N, seed=1),
        "root": np.float32(np.sqrt(2)),
        "one": np.float32(1),
        "half": np.float32(0.5),
    }
    nodes = [FIRST, *between, SECOND, *more]
    used = {name for node in nodes for name in node.input}
    return make_model(
        nodes,
        {"x": (FLOAT, ["batch", K])},
        {name: (FLOAT, ["batch", None]) for name in outputs},
        {name: array for name, array in weights.items() if name in used},
    )


def inputs(rows: int = 64, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((rows, K), dtype=np.float32)}


def optimized(model: onnx.ModelProto, **arguments: Any) -> ortolan.OptimizationReport:
    arguments = {"recipe": RECIPE, "calibration": inputs(512), "options": DENSE} | arguments
    return optimize(model, **arguments)


def check(model: onnx.ModelProto, report: ortolan.OptimizationReport, nodes: int, tolerance: float = 0.03) -> None:
    onnx.checker.check_model(report.model)
    assert op_types(report.model).count("VNNISpMM") == nodes
    for library in (True, False):  # use calibration inputs, because larger values are clipped
        for expected, found in zip(run(model, inputs(512)), run(report.model, inputs(512), library), strict=True):
            assert relative_error(expected, found) < tolerance


@pytest.mark.parametrize(
    "between",
    [GELU, unary("Relu"), unary("Sigmoid"), unary("Tanh"), unary("LeakyRelu", alpha=0.2), unary("HardSigmoid")],
    ids=["gelu", "relu", "sigmoid", "tanh", "leaky relu", "hard sigmoid"],
)
def test_an_mlp_is_one_node(between: list[NodeProto]) -> None:
    model = mlp_model(between)
    report = optimized(model)
    check(model, report, 1)
    assert len(report.model.graph.node) == 1 and report.model.graph.node[0].name == "second"
    first, second = report.layers
    named = {5: ["gelu"]}.get(len(between), ["relu"] if between[0].op_type == "Relu" else [between[0].op_type])
    assert first.fused == named and first.new_op == second.new_op == "VNNISpMM"
    assert first.output_error is not None and second.output_error is not None
    assert first.output_error < 0.03 and second.output_error < 0.03


def test_residual_and_pruning() -> None:
    project = helper.make_node("Add", ["y", "x"], ["z"], name="residual")
    weights = {"A": random_weight(K, HIDDEN), "B": random_weight(HIDDEN, K, seed=1)}
    model = make_model(
        [helper.make_node("MatMul", ["x", "A"], ["u"], name="first"), *unary("Relu"), SECOND, project],
        {"x": (FLOAT, ["batch", K])},
        {"z": (FLOAT, ["batch", K])},
        weights,
    )
    check(model, optimized(model), 1)
    report = optimized(model, options={"sparsity": 0.5})
    assert op_types(report.model).count("VNNISpMM") == 1
    kernel, portable = (run(report.model, inputs(), library)[0] for library in (True, False))
    assert relative_error(portable, kernel) < 0.01


@pytest.mark.parametrize(
    ("between", "outputs", "more"),
    [
        (GELU, ("y", "u"), ()),
        (GELU, ("y", "v"), ()),
        (GELU, ("y", "z"), (helper.make_node("Neg", ["v"], ["z"], name="neg"),)),
        ([helper.make_node("Softmax", ["u"], ["v"], name="softmax")], ("y",), ()),
        ([helper.make_node("Mul", ["u", "a"], ["v"], name="scale")], ("y",), ()),
    ],
    ids=["output is seen", "activation is seen", "activation is used twice", "no element-wise one", "by column"],
)
def test_what_keeps_layers_apart(between: list[NodeProto], outputs: Sequence[str], more: Sequence[NodeProto]) -> None:
    model = mlp_model(between, outputs, *more)
    check(model, optimized(model), 2)


def test_not_without_ranges_or_fusing() -> None:
    model = mlp_model(GELU)
    check(model, optimized(model, recipe=NAMED["sparse-int8-4x1"]), 2)
    check(model, optimized(model, options=DENSE | {"fuse": False}), 2)


def test_a_layer_that_stays_leaves_the_other() -> None:
    model = mlp_model(GELU)
    for name in ("first", "second"):
        report = optimized(model, options=DENSE | {"replace.exclude": [name]})
        check(model, report, 1)
        assert len(report.model.graph.node) > 1


def test_all_layers_may_have_fixed_ranges() -> None:
    model = mlp_model([*unary("Softmax", axis=-1)])
    for choice, count in (("mlp", 0), ("all", 2)):
        report = optimized(model, options=DENSE | {"fixed_ranges": choice})
        names = {tensor.name for tensor in report.model.graph.initializer}
        assert sum(name.endswith("x_scale") for name in names) == count
        check(model, report, 2, 0.05)


def test_bert_in_every_mode_and_back() -> None:
    """One ONNX function serves nodes with and without a hidden layer."""
    model = ir.to_proto(tiny.tiny_bert())
    ids = np.random.default_rng(0).integers(5, 30, (4, 12))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    report = optimized(model, calibration=feeds)
    assert op_types(report.model).count("VNNISpMM") == 6  # of two layers
    kernel, portable = (run(report.model, feeds, library)[0] for library in (True, False))
    assert relative_error(portable, kernel) < 0.02


def test_made_up_inputs_are_refused() -> None:
    with pytest.raises(CalibrationError, match="'ranges' needs calibration inputs"):
        optimized(mlp_model(GELU), calibration=None)


def test_a_dry_run_tells_the_same() -> None:
    model = mlp_model(GELU)
    dry, real = optimized(model, dry_run=True), optimized(model)
    assert [layer.fused for layer in dry.layers] == [layer.fused for layer in real.layers]


@pytest.mark.parametrize(("x", "message"), [(np.zeros((0, K)), "is empty"), (np.zeros((5, K)), "are zero on all")])
def test_inputs_that_tell_nothing_are_refused(x: np.ndarray, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        optimized(mlp_model(GELU), calibration={"x": x.astype(np.float32)})


def test_values_that_are_not_finite_are_refused() -> None:
    steps = [step for step in RECIPE.to_dict()["pass"] if step["name"] in ("normalize", "ranges")]
    feeds = inputs()
    feeds["x"][3, 2] = np.inf
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        ortolan.optimize_onnx(mlp_model(GELU), recipe=Recipe.from_dict({"name": "r", "pass": steps}), calibration=feeds)


@pytest.mark.parametrize("numbers", [np.zeros((3, 4)), np.empty((0, 4)), np.full((2, 2), -7.0), np.array([[1e-42]])])
def test_a_range_holds_whatever_there_is(numbers: np.ndarray) -> None:
    found = choose_range(numbers.astype(np.float32))
    assert found.scale > 0 and np.isfinite(found.scale)
    assert np.allclose(found.rounded(numbers), numbers, rtol=0.01, atol=1e-6)


def test_a_range_cuts_off_what_is_rare() -> None:
    numbers = np.random.default_rng(0).standard_t(4, 60000).astype(np.float32)
    low, high = numbers.min(), numbers.max()
    whole = FixedRange(np.float32((high - low) / 255), np.uint8(np.rint(-low / (high - low) * 255)))
    found = choose_range(numbers)
    assert found.scale < whole.scale
    found_error, whole_error = (np.mean((one.rounded(numbers) - numbers) ** 2) for one in (found, whole))
    assert found_error < 0.98 * whole_error


def test_a_range_serves_what_is_computed_next() -> None:
    """Relu discards the negative half, so the range covers only positive values."""
    numbers = np.random.default_rng(0).standard_normal((500, 60)).astype(np.float32)
    found = choose_range(numbers, lambda x: np.maximum(x, 0))
    assert found.zero_point < 30 < choose_range(numbers).zero_point


def reshaped_model(first: Sequence[int], *, gemm: bool = True) -> onnx.ModelProto:
    """Return Hugging Face's Conv1D: x is 3-D and reshaped to 2-D for each layer."""
    op_type = "Gemm" if gemm else "MatMul"
    nodes = [
        helper.make_node(op_type, ["x", "A"], ["t"], name="first"),
        helper.make_node("Reshape", ["t", "apart"], ["u"], name="apart"),
        *GELU,
        helper.make_node("Reshape", ["v", "together"], ["w"], name="together"),
        helper.make_node(op_type, ["w", "B"], ["y"], name="second"),
    ]
    weights = {
        "A": random_weight(K, HIDDEN),
        "B": random_weight(HIDDEN, N, seed=1),
        "apart": np.array(first),
        "together": np.array([-1, HIDDEN]),
        "root": np.float32(np.sqrt(2)),
        "one": np.float32(1),
        "half": np.float32(0.5),
    }
    return make_model(nodes, {"x": (FLOAT, ["batch", K])}, {"y": (FLOAT, ["batch", N])}, weights)


def test_reshapes_between_the_layers() -> None:
    model = reshaped_model([-1, 2, HIDDEN])
    report = optimized(model)
    check(model, report, 1)
    assert op_types(report.model) == ["VNNISpMM"]


def test_reshapes_that_mix_rows_keep_layers_apart() -> None:
    model = reshaped_model([-1, HIDDEN // 2])
    check(model, optimized(model), 2)


@pytest.mark.parametrize(
    ("between", "outputs", "reason"),
    [
        (GELU, ("y", "u"), "not to a layer|more than one consumer"),
        (GELU, ("y", "v"), "the activation's output has consumers besides the next layer"),
        (
            [*unary("Relu")[:0], *GELU[:-1], helper.make_node("Softmax", ["g"], ["v"], name="s")],
            ("y",),
            "goes to Softmax, not to a layer",
        ),
    ],
)
def test_the_report_says_why_layers_stay_apart(between: list[NodeProto], outputs: Sequence[str], reason: str) -> None:
    report = optimized(mlp_model(between, outputs))
    assert any(
        re.search(f"layer 'first' and the next one stay two operators: .*({reason})", note) for note in report.notes
    )


def test_an_activation_without_numbers_keeps_layers_apart() -> None:
    """Every range contains 0, whose logarithm is -Inf and cannot be quantized."""
    model = mlp_model(unary("Log"))
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(np.abs(numpy_helper.to_array(tensor)), tensor.name))
    feeds = {"x": np.abs(inputs(512)["x"])}
    report = optimized(model, calibration=feeds)
    assert op_types(report.model).count("VNNISpMM") == 2
    assert any("returns NaN or infinity for inputs between 0 and" in note for note in report.notes)
