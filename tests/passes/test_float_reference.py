"""Models with stored integer weights: both models are compared with these weights computed in float."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import OptimizationReport, VerificationError
from ortolan.graph_passes.find.linear import linears_in
from ortolan.graph_passes.operators.nodes import NewNames
from ortolan.graph_passes.passes.verify.float_reference import computed_in_float

from .int8_layers import DYNAMIC, Int8Layer
from .small_models import make_model, relative_error, run
from .stored_layers import DequantizedLayer, NBitsLayer

FLOAT = TensorProto.FLOAT
QUICK = {"verify.seconds": 0.0}
ANY_ROUNDING = QUICK | {"verify.max_rounding_error": 1e9, "verify.portable": False}
RNG = np.random.default_rng(0)


def check_distances(report: OptimizationReport, model: onnx.ModelProto, x: np.ndarray, exact: np.ndarray) -> None:
    found = report.output_error[0].from_float
    assert found is not None
    (ours,) = run(report.model, {"x": x}, library=True)
    assert found[1] == pytest.approx(relative_error(exact, ours), rel=0.01)
    (theirs,) = run(model, {"x": x})
    assert found[0] == pytest.approx(relative_error(exact, theirs), rel=0.05)  # int16 sums may saturate in this session
    assert any("against the original's weights in float" in note for note in report.notes)


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("form", DYNAMIC)
def test_dynamic_layers(form: str, unsigned: bool) -> None:
    layer = Int8Layer(form, unsigned=unsigned, zero_point=128 * unsigned, bias=True)
    model, x = layer.model(), layer.inputs(200)
    x[:100] /= 64  # dynamic quantization uses one range per batch, so these small rows lose most accuracy
    report = ortolan.optimize_onnx(model, calibration={"x": x}, options=QUICK)
    check_distances(report, model, x, x @ layer.matrix + layer.b)


def test_blocks_that_onnx_runtime_rounds_inputs_of() -> None:
    layer = NBitsLayer(128, 64, 32, accuracy_level=4)
    model, x = layer.model(), layer.inputs(50)
    report = ortolan.optimize_onnx(model, calibration={"x": x}, options=QUICK)
    check_distances(report, model, x, x @ layer.matrix)


def test_blocks_behind_dequantize_linear() -> None:
    layer = DequantizedLayer(128, 64, 32)
    model, x = layer.model(), RNG.standard_normal((50, 128)).astype(np.float32)
    report = ortolan.optimize_onnx(model, calibration={"x": x}, options=QUICK)
    (error,) = report.rounding_error
    (ours,) = run(report.model, {"x": x}, library=True)
    assert error.relative_l2 == pytest.approx(relative_error(x @ layer.matrix, ours), rel=0.01)


def test_an_original_that_computes_in_float_is_the_reference() -> None:
    layer = NBitsLayer(128, 64, 32)
    report = ortolan.optimize_onnx(layer.model(), calibration={"x": layer.inputs(20)}, options=QUICK)
    assert report.output_error[0].from_float is None
    assert report.output_error[0].relative_l2 == report.rounding_error[0].relative_l2


@pytest.mark.parametrize("outside", [False, True])
def test_layers_in_branches(outside: bool) -> None:
    """The weights are stored in the branches or in the outer graph."""
    layer = Int8Layer("dynamic", bias=True)
    nodes = layer.nodes("product")
    used = {name for node in nodes for name in node.input}
    tensors = {name: array for name, array in layer.tensors.items() if name in used}
    result = [helper.make_tensor_value_info("product", FLOAT, ["batch", layer.n])]
    inside = [] if outside else [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    branch = helper.make_graph(nodes, "branch", [], result, inside)
    other = helper.make_graph([helper.make_node("Identity", ["nothing"], ["none"])], "other", [], result[:0])
    other.output.append(helper.make_tensor_value_info("none", FLOAT, ["batch", layer.n]))
    model = make_model(
        [helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=other)],
        {"x": (FLOAT, ["batch", layer.k]), "flag": (TensorProto.BOOL, [])},
        {"y": (FLOAT, ["batch", layer.n])},
        {"nothing": np.zeros((1, layer.n), np.float32)} | (tensors if outside else {}),
        domains={"com.microsoft": 1},
    )
    x = layer.inputs(20)
    feeds = {"x": x, "flag": np.array(True)}
    report = ortolan.optimize_onnx(model, calibration=feeds, options=QUICK)
    (ours,) = run(report.model, feeds, library=True)
    exact = x @ layer.matrix + layer.b
    assert report.rounding_error[0].relative_l2 == pytest.approx(relative_error(exact, ours), rel=0.01)


@pytest.mark.parametrize("layer", [Int8Layer("dynamic", bias=True), NBitsLayer(128, 64, 32, accuracy_level=4)])
def test_the_model_is_as_it_was_afterwards(layer: Any) -> None:
    model = ir.from_proto(layer.model())
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with computed_in_float(list(linears_in(model)), NewNames(model)):
        inside = ir.to_proto(model)
        onnx.checker.check_model(inside)
        assert inside.SerializeToString(deterministic=True) != before
        assert [value.name for value in inside.graph.output] == ["y"]
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


# --- allowed differences ----------------------------------------------------------------------------------------------


def behind_a_layer(*nodes: onnx.NodeProto, kind: int = FLOAT, rank: int = 2, **weights: np.ndarray) -> onnx.ModelProto:
    """Nodes that compute "out" from "y", the output of an int8 layer [64, 48]."""
    q = RNG.integers(-127, 128, (64, 48)).astype(np.int8)
    layer = Int8Layer("dynamic", q=q)
    used = {name for node in layer.nodes("y") for name in node.input}
    return make_model(
        [*layer.nodes("y"), *nodes],
        {"x": (FLOAT, ["batch", 64])},
        {"out": (kind, [None] * rank)},
        {name: array for name, array in layer.tensors.items() if name in used} | weights,
        domains={"com.microsoft": 1},
    )


def test_answers_that_rounding_changes_are_refused_unless_allowed(tmp_path: Path) -> None:
    """The sine of large values amplifies rounding until the answers are almost random."""
    many = [helper.make_node("Mul", ["y", "factor"], ["turns"]), helper.make_node("Sin", ["turns"], ["out"])]
    model = behind_a_layer(*many, factor=np.array(1e4, np.float32))
    path, output = tmp_path / "model.onnx", tmp_path / "fast.onnx"
    onnx.save(model, path)
    x = {"x": RNG.standard_normal((50, 64)).astype(np.float32)}
    with pytest.raises(VerificationError, match=r"output 'out' has cosine .* with the original .*float") as caught:
        ortolan.optimize_onnx(path, output, calibration=x, options=ANY_ROUNDING)
    assert "allow_different=True" in str(caught.value) and not output.exists()
    allowed = ortolan.optimize_onnx(path, output, calibration=x, options=ANY_ROUNDING, allow_different=True)
    assert output.exists() and abs(allowed.output_error[0].cosine) < 0.5
    named = ortolan.optimize_onnx(path, output, weights="int8", calibration=x, options=ANY_ROUNDING)
    assert any(
        "against the original, above" in note or note.startswith("warning: output 'out'") for note in named.notes
    )


def test_answers_that_are_nearer_to_the_weights_are_saved() -> None:
    """ONNX Runtime quantizes all rows with one range, so rows that differ little become equal."""
    nodes = [
        helper.make_node("ReduceL2", ["y"], ["norm"], axes=[1], keepdims=1),
        helper.make_node("Div", ["y", "norm"], ["out"]),
    ]
    x = RNG.standard_normal((50, 64)).astype(np.float32)
    x[1:] /= 300
    report = ortolan.optimize_onnx(behind_a_layer(*nodes), calibration={"x": x}, options=ANY_ROUNDING)
    (error,) = report.output_error
    assert error.from_float is not None and error.cosine < 0.99
    assert error.from_float[1] < 0.05 < 0.3 < error.from_float[0]


def test_outputs_of_another_shape_are_refused_unless_allowed(tmp_path: Path) -> None:
    positive = [helper.make_node("Greater", ["y", "zero"], ["above"]), helper.make_node("NonZero", ["above"], ["out"])]
    model = behind_a_layer(*positive, kind=TensorProto.INT64, zero=np.array(0, np.float32))
    feeds = [{"x": RNG.standard_normal((200, 64)).astype(np.float32)} for _ in range(6)]
    output = tmp_path / "fast.onnx"
    with pytest.raises(VerificationError, match=r"output 'out' of the optimized model has shape .*allow_different"):
        ortolan.optimize_onnx(model, output, calibration=feeds, options=QUICK)
    assert not output.exists()
    for how in ({"allow_different": True}, {"weights": "int8"}):
        report = ortolan.optimize_onnx(model, output, calibration=feeds, options=QUICK, **how)
        assert any(note.startswith("warning: output 'out'") for note in report.notes)
        assert output.exists() and not report.output_error
        output.unlink()
