"""Verification finds wrong models, and reports the errors of correct models."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan import Recipe, SessionError, VerificationError
from ortolan.graph_passes.files import model_file
from ortolan.graph_passes.measure.compare import error_of_most_rows, measure_errors
from ortolan.graph_passes.measure.feeds import SIZES_TO_TRY, synthetic_feeds
from ortolan.graph_passes.operators import sparse_amx_matmul
from ortolan.graph_passes.operators.replacement import LayerWeight, PackedTensor
from ortolan.graph_passes.operators.sparse_amx_matmul import SparseAMXMatMul
from ortolan.graph_passes.operators.sparse_amx_matmul_function import Uses
from ortolan.graph_passes.passes.replace.packing import Packer
from ortolan.graph_passes.passes.verify import reference
from ortolan.models import tiny

from ..recipes.forms import NAMED
from .small_models import branches_model, make_model, matmul_model, optimize, random_weight, relative_error, run


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
    for expected, found in (([], []), ([np.nan], [np.nan])):  # nothing to compare
        assert measure_errors(["y"], [[np.array(expected)]], [[np.array(found)]]) == []
    assert measure_errors(["names"], [[None]], [[None]]) == []


def rows_off(x: np.ndarray, off: dict[int, float], seed: int) -> np.ndarray:
    """Return x with the given relative error in these rows, and 0.01 in all other rows."""
    error = np.random.default_rng(seed).standard_normal(x.shape)
    error *= np.linalg.norm(x, axis=-1, keepdims=True) / np.linalg.norm(error, axis=-1, keepdims=True)
    return x + error * np.array([off.get(row, 0.01) for row in range(16)]).reshape(*x.shape[:-1], 1)


@pytest.mark.parametrize(
    ("portable_off", "native_off", "expected"),
    [
        ({}, {}, 0.014),
        ({3: 0.3}, {}, 0.014),
        ({3: 0.3, 9: 0.4}, {}, 0.014),
        ({3: 0.3, 9: 0.4, 11: 0.3}, {}, 0.08),  # three rows are more than an eighth of 16
        ({15: 1.0}, {}, 0.25),  # the error of the row is larger than 0.5
        ({}, {15: 0.3}, 0.075),  # the row is wrong in the kernel's answer
        ({15: 0.3}, {15: 0.06}, 0.077),
    ],
)
def test_odd_rows_do_not_count(portable_off: Any, native_off: Any, expected: float) -> None:
    """One eighth of the rows may have an error up to 0.5 without the library if the kernel's rows are right."""
    x = np.random.default_rng(0).standard_normal((2, 1, 8, 64))
    zeros = np.zeros((2, 1, 5, 64))
    infinite = np.full((2, 1, 1, 64), -np.inf)
    three = (rows_off(x, portable_off, 1), rows_off(x, native_off, 2), x)
    with np.errstate(invalid="ignore"):
        found = error_of_most_rows(*(np.concatenate([one, zeros, infinite], axis=2) for one in three), 0.05)
    assert found == pytest.approx(expected, rel=0.15)


def test_too_few_rows_have_no_odd_one() -> None:
    x = np.ones((7, 4))
    y = x.copy()
    y[0] *= 1.4
    assert error_of_most_rows(y, x, x, 0.05) == pytest.approx(0.4 / np.sqrt(7))
    assert error_of_most_rows(y * np.nan, x, x, 0.05) != 0.0


def test_report_holds_error_and_latency():
    x = np.random.default_rng(0).standard_normal((2, 3, 20)).astype(np.float32)
    model = matmul_model()
    report = optimize(model, calibration={"x": x}, options={"sparsity": 0.5, "verify.seconds": 0.01})
    (error,) = report.output_error
    expected, found = run(model, {"x": x})[0], run(report.model, {"x": x}, library=True)[0]
    assert error.relative_l2 == pytest.approx(relative_error(expected, found), rel=1e-4)
    assert 0.1 < error.relative_l2 < 1 and error.cosine > 0.8
    assert report.portable_error[0].relative_l2 < 1e-5
    assert report.latency_before.median_ms >= report.latency_before.min_ms > 0
    assert report.latency_after.median_ms >= report.latency_after.min_ms > 0
    assert report.feeds == "1 given input"


def test_a_large_error_is_noted():
    (note,) = optimize(matmul_model(), options={"sparsity": 0.9}).notes
    assert "'y' has relative error 0." in note and "ignore=['heads', 'linear']" in note and "max_error" in note
    assert not optimize(matmul_model(), options={"sparsity": 0.1}).notes
    assert not optimize(matmul_model(), options={"sparsity": 0.9, "max_error": 1}).notes


@pytest.mark.parametrize(
    ("form", "wanted", "unwanted"),
    [
        ({"weights": "bf16", "sparsity": 0.5}, ["less sparsity", "ignore="], ["more bits", "replace.exclude"]),
        ({"weights": "int4"}, ["more bits (weights='int8')", "ignore="], ["sparsity", "replace.exclude"]),
        ({"weights": "int8"}, ["more bits (weights='bf16')", "ignore="], ["sparsity", "replace.exclude"]),
        ({"weights": "int8", "sparsity": 0.5}, ["less sparsity", "more bits", "ignore="], ["replace.exclude"]),
        ({"weights": "bf16"}, ["replace.exclude", "calibration"], ["sparsity", "more bits", "ignore="]),
    ],
)
def test_advice_fits_what_was_done(form, wanted, unwanted):
    options = {"may_grow": True, "max_error": 1e-6, "verify.seconds": 0}
    with pytest.raises(VerificationError) as caught:
        ortolan.optimize_onnx(matmul_model(), options=options, **form)
    message = str(caught.value)
    assert "'linear'" in message and "[[pass]]" not in message
    assert all(words in message for words in wanted) and not any(words in message for words in unwanted)


def test_max_error(tmp_path):
    with pytest.raises(VerificationError, match=r"output 'y' has relative error 0\..* expected at most max_error 0.01"):
        optimize(matmul_model(), tmp_path / "fast.onnx", options={"sparsity": 0.5, "max_error": 0.01})
    assert list(tmp_path.iterdir()) == []
    optimize(matmul_model(), tmp_path / "fast.onnx", options={"sparsity": 0.0, "max_error": 0.01})


def test_a_kernel_and_a_body_that_disagree(monkeypatch, tmp_path):
    right = sparse_amx_matmul.sparse_amx_matmul_function

    def wrong(opset: int, uses: Uses, unpack_once: bool) -> ir.Function:
        function = right(opset, uses, unpack_once)
        for node in function:
            if node.op_type == "Transpose":
                node.attributes["perm"] = ir.AttrInt64s("perm", [1, 3, 2, 5, 0, 4])
        return function

    monkeypatch.setattr(sparse_amx_matmul, "sparse_amx_matmul_function", wrong)
    with pytest.raises(VerificationError, match="'y' differs between the native kernels and the portable operators"):
        optimize(matmul_model(), tmp_path / "fast.onnx", options={"sparsity": 0.0})
    assert list(tmp_path.iterdir()) == []


def test_packed_tensors_that_no_kernel_accepts(monkeypatch, tmp_path):
    right = SparseAMXMatMul.pack

    def wrong(self, weight):
        packed = right(self, weight)
        offsets = packed["offsets"]
        return {**packed, "offsets": PackedTensor(offsets.array + 1, offsets.dtype)}

    monkeypatch.setattr(SparseAMXMatMul, "pack", wrong)
    monkeypatch.setattr(SparseAMXMatMul, "run", lambda self, x, packed, weight: x @ weight.matrix)
    with pytest.raises(SessionError, match="offsets"):
        optimize(matmul_model(), tmp_path / "fast.onnx", options={"sparsity": 0.0})
    assert list(tmp_path.iterdir()) == []


def test_answers_that_become_infinite(tmp_path):
    # bf16 rounds 65504, the largest float16, up to 65536, which float16 cannot represent.
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
    report = ortolan.optimize_onnx(matmul_model(), tmp_path / "fast.onnx", recipe=recipe)
    assert report.file_size_after == (tmp_path / "fast.onnx").stat().st_size and not report.output_error


REWRITE_IS_WRONG = r"'y' has relative error 0\..* against the model before its layers were replaced"


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_a_lost_bias(monkeypatch, tmp_path, sparsity, portable):
    monkeypatch.setattr(Packer, "bias", lambda *arguments: None)
    with pytest.raises(VerificationError, match=REWRITE_IS_WRONG):
        optimize(matmul_model(), tmp_path / "fast.onnx", options={"sparsity": sparsity}, portable=portable)
    assert list(tmp_path.iterdir()) == []


def pack_zeros_in_place_of(monkeypatch, weight: np.ndarray) -> None:
    right = SparseAMXMatMul.pack
    monkeypatch.setattr(
        SparseAMXMatMul,
        "pack",
        lambda self, given: right(self, LayerWeight(0 * weight) if (given.matrix == weight).all() else given),
    )


@pytest.mark.parametrize(
    ("first", "message"), [(["calibrate"], "layer 'linear' with its packed weight differs"), ([], REWRITE_IS_WRONG)]
)
def test_a_wrong_packed_weight(monkeypatch, tmp_path, first, message):
    pack_zeros_in_place_of(monkeypatch, random_weight(20, 24))
    steps = [{"name": name} for name in (*first, "replace", "verify")]
    with pytest.raises(VerificationError, match=message):
        ortolan.optimize_onnx(
            matmul_model(), tmp_path / "fast.onnx", recipe=Recipe.from_dict({"name": "r", "pass": steps})
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", [1, 2])
def test_a_wrong_packed_weight_in_either_branch(monkeypatch, seed):
    pack_zeros_in_place_of(monkeypatch, random_weight(20, 24, seed=seed))
    steps = [{"name": "replace"}, {"name": "verify", "seconds": 0}]
    with pytest.raises(VerificationError, match=REWRITE_IS_WRONG):
        ortolan.optimize_onnx(branches_model(), recipe=Recipe.from_dict({"name": "r", "pass": steps}))


def test_rounding_is_told_from_pruning():
    report = optimize(ir.to_proto(tiny.tiny_bert()), options={"sparsity": 0.9})
    (pruning,), (rounding,) = report.output_error, report.rounding_error
    assert rounding.relative_l2 < 1e-2 < 0.5 < pruning.relative_l2
    with pytest.raises(VerificationError, match=r"expected at most 0\.001 from rounding"):
        optimize(ir.to_proto(tiny.tiny_bert()), options={"sparsity": 0.9, "max_rounding_error": 1e-3})


def test_whole_numbers_are_not_judged_for_rounding():
    # The second column is larger until both round to the same bfloat16.
    weight = np.array([[1, 1 + 2**-12]], np.float32)
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "W"], ["p"], name="linear"),
            helper.make_node("ArgMax", ["p"], ["y"], name="largest", axis=1),
        ],
        {"x": (TensorProto.FLOAT, ["batch", 1])},
        {"y": (TensorProto.INT64, ["batch", 1])},
        {"W": weight},
    )
    report = optimize(model, calibration={"x": np.ones((3, 1), np.float32)}, options={"sparsity": 0.0})
    assert report.output_error[0].max_abs == 1 and report.rounding_error == []


def test_no_seconds_no_latency():
    report = optimize(matmul_model(), options={"verify.seconds": 0})
    assert (
        report.latency_before is None
        and report.latency_after is None
        and not {"faster", "slower", "speed"} & set(str(report).split())
    )


@pytest.mark.parametrize("build", [tiny.tiny_bert, tiny.tiny_llama])
def test_the_reference_of_a_large_model_is_run_in_pieces(monkeypatch, build):
    """A whole copy would be as large as the original's weights."""
    model = build()
    feeds = [synthetic_feeds(model, sizes, seed) for seed, sizes in enumerate(SIZES_TO_TRY[:2])]

    def errors():
        report = ortolan.optimize_onnx(
            ir.to_proto(model), weights="int4", calibration=feeds, allow_different=True, options={"verify.seconds": 0}
        )
        return [[one.relative_l2 for one in error] for error in (report.output_error, report.rounding_error)]

    expected = errors()
    monkeypatch.setattr(model_file, "LARGE_MODEL", 1)
    monkeypatch.setattr(reference, "_whole", lambda *_: pytest.fail("the whole model was written"))
    found = errors()
    assert len(found[1]) == len(model.graph.outputs)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_a_large_model_is_neither_timed_nor_unpacked(monkeypatch, tmp_path):
    monkeypatch.setattr(model_file, "LARGE_MODEL", 1)
    model, output = ir.to_proto(tiny.tiny_bert()), tmp_path / "fast.onnx"
    report = ortolan.optimize_onnx(model, output, recipe=NAMED["sparse-bf16"])
    assert report.output_error and report.latency_before is None and not report.portable_error
    assert any("latency was not measured" in note for note in report.notes)
    timed = ortolan.optimize_onnx(model, output, recipe=NAMED["sparse-bf16"], options={"verify.seconds": 0.01})
    assert timed.latency_before is not None
    errors = [[error.relative_l2 for error in one.output_error] for one in (report, timed)]
    assert errors[0] == pytest.approx(errors[1], rel=0.2)
