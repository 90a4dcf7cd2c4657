"""Reference answers use exact integer sums, also on CPUs where ONNX Runtime's sums saturate."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan.graph_passes.measure.sessions import int8_products_saturate, open_quietly, open_to_time, sums_are_exact

from .int8_layers import DYNAMIC, FIXED, ROUNDED, Int8Layer, adopt, sparse_integers
from .qlinear_chain import chain_of_qlinear
from .small_models import make_model, relative_error

FORMS = [*DYNAMIC, *FIXED, *ROUNDED]


def full_range(form: str, **arguments) -> tuple[Int8Layer, np.ndarray]:
    """Return a dense layer and inputs in their full range, for which 16-bit sums of two products overflow."""
    layer = Int8Layer(form, q=sparse_integers(64, 48, 0.0), **arguments)
    low, high = (np.array([0, 255] if layer.x_unsigned else [-128, 127]) - layer.x_zero) * layer.x_scale
    return layer, np.random.default_rng(3).uniform(low, high, (6, layer.k)).astype(np.float32)


def answers_of_onnx_runtime(layer: Int8Layer, x: np.ndarray, opener) -> np.ndarray:
    return opener(layer.model().SerializeToString()).run(None, {"x": x})[0]


def rounded_all_at_once(x: np.ndarray) -> np.ndarray:
    """Quantize x with one range, like DynamicQuantizeLinear."""
    low, high = min(x.min(), 0), max(x.max(), 0)
    scale = np.float32((high - low) / 255)
    zero = np.rint(-low / scale)
    return (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale


@pytest.mark.parametrize("bits", ["uint8", "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_sums_are_exact(form, bits):
    layer, x = full_range(form, unsigned=bits == "uint8", zero_point=128 if bits == "uint8" else 0)
    answer = answers_of_onnx_runtime(layer, x, open_quietly)
    if layer.fixed:
        np.testing.assert_array_equal(answer, layer.expected(x))
    else:
        assert relative_error(rounded_all_at_once(x) @ layer.matrix, answer) < 1e-6


def test_whether_products_saturate_is_what_they_do():
    layer, x = full_range("to_float")
    error = relative_error(layer.expected(x), answers_of_onnx_runtime(layer, x, open_to_time))
    assert error > 0.01 if int8_products_saturate() else error == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_model_whose_products_saturate_is_judged_by_its_exact_sums(form):
    layer, x = full_range(form)
    zeros = layer.q.copy()
    zeros[:, :32] = 0  # enough for adopt
    layer = dataclasses.replace(layer, q=zeros)
    report = adopt(layer.model(), calibration={"x": x}, options={"verify.seconds": 0.05})
    (error,) = report.output_error
    assert error.relative_l2 < (0.01 if layer.fixed else 0.03)
    assert report.latency_before is not None and report.latency_after is not None
    assert not any("saturate" in note for note in report.notes)


@pytest.mark.parametrize("form", ROUNDED)
def test_sums_of_layers_that_share_their_weight_are_exact(form, tmp_path):
    """Layers with a shared weight get exact sums, from a file with external data and from bytes."""
    layer, model = chain_of_qlinear(form)
    x, content, path = layer.inputs(), model.SerializeToString(), tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=64)
    codes = (layer.expected(x) / layer.y_scale + layer.y_zero).astype(np.int64)
    sums = (codes - layer.y_zero) @ layer.q.astype(np.int64)
    y = np.clip(np.rint(sums * layer.scales) + layer.y_zero, 0, 255)
    for given in (content, path):
        session = open_quietly(given)
        assert sums_are_exact(session)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], (y - layer.y_zero) * layer.y_scale)


@pytest.mark.parametrize("as_file", [False, True])
def test_blocks_without_zero_points(as_file, tmp_path):
    """The first layer has no zero points; sums of the second layer may saturate."""
    layer, x = full_range("to_float")
    q = np.random.default_rng(5).integers(-128, 128, (64, 64), np.int8)
    constants = {"blocks": q, "scales of blocks": np.full((2, 64), 0.5, np.float32)}
    model = layer.model()
    model.opset_import[0].version, model.ir_version = 21, 10
    model.graph.node.append(helper.make_node("DequantizeLinear", list(constants), ["w"], axis=0, block_size=32))
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    model.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [64, 64]))
    given = model.SerializeToString()
    if as_file:
        given = tmp_path / "model.onnx"
        onnx.save(model, given, save_as_external_data=True, size_threshold=64)
    session = open_quietly(given)
    assert sums_are_exact(session)
    answer, w = session.run(None, {"x": x})
    np.testing.assert_array_equal(answer, layer.expected(x))
    np.testing.assert_array_equal(w, q.astype(np.float32) / 2)


@pytest.mark.parametrize("form", ["to_float", "qlinear", "qgemm"])
def test_a_model_that_has_no_exact_sums_is_judged_all_the_same(form):
    """Exact sums would need uint8 weights, which ONNX Runtime does not support with int8 inputs."""
    layer = Int8Layer(form, x_unsigned=False)
    session = open_quietly(layer.model().SerializeToString())
    report = adopt(layer.model(), calibration={"x": layer.inputs()})
    assert any("saturate" in note for note in report.notes) == (not sums_are_exact(session))
    assert report.output_error[0].relative_l2 < 0.01


def test_a_model_with_branches_has_no_exact_sums():
    """Branches are not converted to exact sums, so their sums may saturate in every session."""
    layer, x = full_range("to_float")
    model = layer.model()
    branch = onnx.GraphProto()
    branch.CopyFrom(model.graph)
    del branch.input[:]
    condition = numpy_helper.from_array(np.array(True), "condition")
    node = helper.make_node("If", ["condition"], [output.name for output in model.graph.output])
    node.attribute.extend(helper.make_attribute(name, branch) for name in ("then_branch", "else_branch"))
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.append(node)
    model.graph.initializer.append(condition)
    session = open_quietly(model.SerializeToString())
    assert sums_are_exact(session) == (not int8_products_saturate())
    (y,) = session.run(None, {"x": x})
    assert np.array_equal(y, layer.expected(x)) == (not int8_products_saturate())


def test_errors_are_those_of_the_model():
    """An invalid model raises the same error with and without exact sums."""
    wrong = make_model(
        [helper.make_node("Relu", ["x"], ["y"], domain="com.example")],
        {"x": (TensorProto.FLOAT, [2])},
        {"y": (TensorProto.FLOAT, [2])},
        domains={"com.example": 1},
    )
    with pytest.raises(ortolan.SessionError, match=r"com\.example"):
        open_quietly(wrong.SerializeToString())
