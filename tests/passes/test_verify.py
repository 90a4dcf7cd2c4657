"""Verification finds wrong models, and says how good right ones are."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from ortolan import Recipe, VerificationError
from ortolan.graph_passes.replace import sparse_amx_matmul
from ortolan.graph_passes.replace.sparse_amx_matmul import SparseAMXMatMul
from ortolan.graph_passes.verify import measure_errors
from ortolan.models import tiny

from .small_models import make_model, matmul_model, optimize, random_weight, relative_error, run


def test_errors_against_numpy():
    rng = np.random.default_rng(0)
    before = [rng.standard_normal((2, 3)), rng.standard_normal((4, 3))]
    after = [array + 0.1 * rng.standard_normal(array.shape) for array in before]
    (error,) = measure_errors(["y"], [[array] for array in before], [[array] for array in after])
    expected, found = (np.concatenate([array.ravel() for array in side]) for side in (before, after))
    assert error.relative_l2 == pytest.approx(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    assert error.cosine == pytest.approx(found @ expected / np.linalg.norm(found) / np.linalg.norm(expected))
    assert error.max_abs == pytest.approx(np.abs(found - expected).max())


def test_errors_of_special_outputs():
    def measure(expected, found):
        (error,) = measure_errors(["y"], [[np.array(expected, np.float32)]], [[np.array(found, np.float32)]])
        return error.relative_l2, error.cosine

    assert measure([0, 0], [0, 0]) == (0, 1)
    assert measure([0, 0], [1, 0]) == (np.inf, 0)
    assert measure([1, 0], [0, 0]) == (1, 0)
    assert measure([np.inf, 1], [np.inf, 1]) == (0, 1)
    assert measure([], []) == (0, 1)
    assert measure_errors(["names"], [[None]], [[None]]) == []


def test_report_holds_error_and_latency():
    x = np.random.default_rng(0).standard_normal((2, 3, 20)).astype(np.float32)
    model = matmul_model()
    report = optimize(model, calibration={"x": x}, options={"sparsity": 0.5})
    (error,) = report.output_error
    expected, found = run(model, {"x": x})[0], run(report.model, {"x": x}, library=True)[0]
    assert error.relative_l2 == pytest.approx(relative_error(expected, found), rel=1e-4)
    assert 0.1 < error.relative_l2 < 1 and error.cosine > 0.8
    assert report.portable_error[0].relative_l2 < 1e-5
    assert report.latency_before_ms.median >= report.latency_before_ms.min > 0
    assert report.latency_after_ms.median >= report.latency_after_ms.min > 0
    assert report.feeds == "1 given feed(s)"


def test_max_error(tmp_path):
    with pytest.raises(VerificationError, match=r"output 'y' has relative error 0\..* expected at most max_error 0.01"):
        optimize(matmul_model(), tmp_path / "fast.onnx", options={"sparsity": 0.5, "max_error": 0.01})
    assert list(tmp_path.iterdir()) == []
    optimize(matmul_model(), tmp_path / "fast.onnx", options={"sparsity": 0.0, "max_error": 0.01})


def test_a_kernel_and_a_body_that_disagree(monkeypatch, tmp_path):
    right = sparse_amx_matmul.sparse_amx_matmul_function

    def wrong(opset: int, unpack_once: bool) -> ir.Function:
        function = right(opset, unpack_once)
        for node in function:
            if node.op_type == "Transpose":
                node.attributes["perm"] = ir.AttrInt64s("perm", [1, 4, 2, 0, 3])
        return function

    monkeypatch.setattr(sparse_amx_matmul, "sparse_amx_matmul_function", wrong)
    with pytest.raises(VerificationError, match="'y' differs between the native kernels and the portable operators"):
        optimize(matmul_model(), tmp_path / "fast.onnx", options={"sparsity": 0.0})
    assert list(tmp_path.iterdir()) == []


def test_packed_tensors_that_no_kernel_accepts(monkeypatch, tmp_path):
    right = SparseAMXMatMul.pack

    def wrong(self, matrix):
        masks, values, (name, offsets, dtype) = right(self, matrix)
        return [masks, values, (name, offsets + 1, dtype)]

    monkeypatch.setattr(SparseAMXMatMul, "pack", wrong)
    monkeypatch.setattr(SparseAMXMatMul, "run", lambda self, x, packed, k, n: np.zeros((len(x), n), np.float32))
    with pytest.raises(Exception, match="offsets"):
        optimize(matmul_model(), tmp_path / "fast.onnx")
    assert list(tmp_path.iterdir()) == []


def test_answers_that_become_infinite(tmp_path):
    # bf16 rounds the largest float16, 65504, up to 65536, which float16 does not have.
    weight = np.array([[1.0]], np.float16)
    model = make_model(
        [helper.make_node("MatMul", ["x", "W"], ["y"], name="linear")],
        {"x": (TensorProto.FLOAT16, ["batch", 1])},
        {"y": (TensorProto.FLOAT16, ["batch", 1])},
        {"W": weight},
    )
    x = np.array([[65504.0]], np.float16)
    assert np.isfinite(run(model, {"x": x})[0]).all()
    with pytest.raises(VerificationError, match="'y' of the optimized model holds NaN or infinity"):
        optimize(model, tmp_path / "fast.onnx", calibration={"x": x}, options={"sparsity": 0.0})
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_are_not_numbers_are_not_compared():
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "W"], ["y"], name="linear"),
            helper.make_node("SequenceConstruct", ["y"], ["s"], name="sequence"),
        ],
        {"x": (TensorProto.FLOAT, ["batch", 8])},
        {"y": (TensorProto.FLOAT, ["batch", 8])},
        {"W": random_weight(8, 8)},
    )
    model.graph.output.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None))
    assert [error.name for error in optimize(model).output_error] == ["y"]


@pytest.mark.parametrize("build", [tiny.tiny_bert, tiny.tiny_llama])
def test_transformers_agree_with_and_without_the_library(build):
    report = optimize(ir.to_proto(build()), options={"sparsity": 0.0})
    assert report.output_error and report.portable_error
    for error in report.output_error:
        assert error.relative_l2 < 2e-2, error
    for error in report.portable_error:
        assert error.relative_l2 < 1e-2, error


def test_a_recipe_without_verification_still_writes(tmp_path):
    recipe = Recipe.from_dict({"name": "r", "pass": [{"name": "normalize"}, {"name": "replace"}]})
    import ortolan

    report = ortolan.optimize_onnx(matmul_model(), tmp_path / "fast.onnx", recipe=recipe)
    assert report.file_size_after == (tmp_path / "fast.onnx").stat().st_size and not report.output_error
