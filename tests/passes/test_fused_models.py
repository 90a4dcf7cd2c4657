"""Encoders fused by ONNX Runtime's transformers optimizer, and their quantized forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper
from onnxruntime import quantization
from onnxruntime.transformers.fusion_options import AttentionMaskFormat, FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

import ortolan
from ortolan import OptimizationReport, Recipe
from ortolan.graph_passes.find.embedding import count_positions
from ortolan.models import tiny

from .padded_models import MASKS as ATTENTION_MASKS
from .padded_models import PAD, changed, encoder_feeds, with_unpad
from .small_models import op_types, relative_error, run
from .stored_weight import dense_integers

HEADS, WIDTH = 4, 48
QUICK = {"verify.seconds": 0.0, "replace.may_grow": True}
# The mask input that the optimizer gives Attention: lengths from EmbedLayerNormalization, or attention_mask.
MASKS = {"lengths": AttentionMaskFormat.MaskIndexEnd, "raw": AttentionMaskFormat.AttentionMask}


def fuse(folder: Path, mask: str = "raw", **sizes: Any) -> Path:
    onnx.save(ir.to_proto(tiny.tiny_bert(**sizes)), folder / "float.onnx")
    options = FusionOptions("bert")
    options.attention_mask_format = MASKS[mask]
    optimized = optimize_model(
        str(folder / "float.onnx"),
        "bert",
        num_heads=HEADS,
        hidden_size=WIDTH,
        opt_level=0,
        optimization_options=options,
    )
    optimized.save_model_to_file(str(folder / "fused.onnx"))
    kinds = op_types(onnx.load(folder / "fused.onnx"))
    expected = {"Attention": 2, "SkipLayerNormalization": 4, "BiasGelu": 2, "EmbedLayerNormalization": 1}
    assert {kind: kinds.count(kind) for kind in expected} == expected
    return folder / "fused.onnx"


@pytest.fixture(scope="module", params=MASKS)
def fused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fuse(tmp_path_factory.mktemp("fused"), request.param)


@pytest.fixture(scope="module", params=["int8", "uint8"])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    kind = {"int8": quantization.QuantType.QInt8, "uint8": quantization.QuantType.QUInt8}[request.param]
    quantization.quantize_dynamic(
        fuse(folder), folder / "int8.onnx", weight_type=kind, extra_options={"DefaultTensorType": 1}
    )
    kinds = op_types(onnx.load(folder / "int8.onnx"))
    assert kinds.count("QAttention") == 2 and kinds.count("MatMulInteger") == 6
    return folder / "int8.onnx"


def feeds(batch: int = 4, rows: int = 11) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    mask = np.ones((batch, rows), np.int64)
    for row in range(1, batch):
        mask[row, rows - row * 2 :] = 0
    ids = rng.integers(0, 101, (batch, rows))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}


def words(answer: np.ndarray, given: dict[str, np.ndarray]) -> np.ndarray:
    """Feeds without padding."""
    return answer[given["attention_mask"].astype(bool)]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a.reshape(-1) @ b.reshape(-1) / np.linalg.norm(a) / np.linalg.norm(b))


def check_replaced(report: OptimizationReport, model: onnx.ModelProto, op: str) -> None:
    """Check both layers: one NoMADAttention, one node for query, key and value, and three more linear layers."""
    kinds = op_types(model)
    assert kinds.count("NoMADAttention") + kinds.count("PackedNoMADAttention") == 2 and kinds.count(op) == 8
    gone = "Attention", "QAttention", "MultiHeadAttention", "SkipLayerNormalization", "BiasGelu", "MatMul", "Gelu"
    assert not set(gone) & set(kinds)
    assert [layer.status for layer in report.layers] == ["replaced"] * 12
    ends = [["residual", "layer norm"], ["gelu"], ["residual", "layer norm"]]
    assert [layer.fused for layer in report.layers if "ttention_" not in layer.name] == ends * 2
    packed = [layer.fused for layer in report.layers if "ttention_" in layer.name]
    assert packed == [["key", "value"], ["into the query"], ["into the query"]] * 2
    assert "run time" not in " ".join([*report.notes, *(layer.reason or "" for layer in report.layers)])


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_all_of_a_fused_encoder_is_replaced(fused: Path, weights: str, tmp_path: Path) -> None:
    report = ortolan.optimize_onnx(fused, tmp_path / "fast.onnx", weights=weights, calibration=[feeds()], options=QUICK)
    check_replaced(report, onnx.load(tmp_path / "fast.onnx"), "SparseAMXMatMul")
    for rows in (9, 32):
        given = feeds(rows=rows)
        (expected,) = run(str(fused), given)
        for library in (True, False):
            (found,) = run(str(tmp_path / "fast.onnx"), given, library)
            assert cosine(words(expected, given), words(found, given)) > (0.9999 if weights == "bf16" else 0.999)


def test_the_same_as_of_the_model_before_it_was_fused(fused: Path, tmp_path: Path) -> None:
    given = feeds()
    answers = []
    for name in ("float.onnx", "fused.onnx"):
        ortolan.optimize_onnx(fused.parent / name, tmp_path / name, weights="bf16", options=QUICK)
        answers.append(words(run(str(tmp_path / name), given, library=True)[0], given))
    assert relative_error(*answers) < 1e-3  # bf16 sums of attention differ, so some values round to the next step


def test_tables_of_words_of_a_fused_encoder(tmp_path: Path) -> None:
    fused = fuse(tmp_path, vocab_size=2003)
    ortolan.optimize_onnx(fused, tmp_path / "fast.onnx", weights="int8", calibration=[feeds()], options=QUICK)
    tensors = onnx.load(tmp_path / "fast.onnx").graph.initializer
    (table,) = [one for one in tensors if list(one.dims)[:1] == [2003] and len(one.dims) == 2 and one.dims[1] > 1]
    assert table.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    given = feeds()
    (expected,), (found,) = run(str(fused), given), run(str(tmp_path / "fast.onnx"), given, library=True)
    assert cosine(words(expected, given), words(found, given)) > 0.999


def test_positions_of_a_fused_encoder_are_counted(fused: Path) -> None:
    assert count_positions(ir.load(fused).graph) == count_positions(ir.load(fused.parent / "float.onnx").graph) == 64


def test_layers_and_attentions_that_are_not_chosen_answer_as_before(fused: Path, tmp_path: Path) -> None:
    """One attention is replaced; the other fused operators stay as they are."""
    steps = [
        {"name": "normalize"},
        {"name": "fuse_attention", "exclude": ["*_1"]},
        {"name": "replace", "op": "SparseAMXMatMul", "select": ["*layer.0/output/dense/MatMul"], "may_grow": True},
        {"name": "verify", "seconds": 0.0},
    ]
    report = ortolan.optimize_onnx(
        fused, tmp_path / "fast.onnx", recipe=Recipe.from_dict({"name": "one", "pass": steps})
    )
    assert [layer.status for layer in report.layers].count("replaced") == 1
    kinds = op_types(onnx.load(tmp_path / "fast.onnx"))
    assert (kinds.count("NoMADAttention"), kinds.count("MultiHeadAttention")) == (1, 1)
    given = feeds()
    (expected,), (found,) = run(str(fused), given), run(str(tmp_path / "fast.onnx"), given, library=True)
    assert relative_error(words(expected, given), words(found, given)) < 5e-3


def test_weights_in_a_file_beside_the_model(fused: Path, tmp_path: Path) -> None:
    onnx.save(
        onnx.load(fused), tmp_path / "fused.onnx", save_as_external_data=True, location="fused.data", size_threshold=0
    )
    report = ortolan.optimize_onnx(tmp_path / "fused.onnx", tmp_path / "fast.onnx", weights="bf16", options=QUICK)
    check_replaced(report, onnx.load(tmp_path / "fast.onnx"), "SparseAMXMatMul")
    given = feeds()
    (expected,), (found,) = run(str(fused), given), run(str(tmp_path / "fast.onnx"), given, library=True)
    assert cosine(words(expected, given), words(found, given)) > 0.9999


def test_models_of_an_old_opset(fused: Path, tmp_path: Path) -> None:
    """Most published fused models have an old opset."""
    old = onnx.load(fused)
    (standard,) = [one for one in old.opset_import if not one.domain]
    standard.version = 11
    onnx.save(old, tmp_path / "old.onnx")
    ortolan.inspect_onnx(tmp_path / "old.onnx")
    report = ortolan.optimize_onnx(tmp_path / "old.onnx", tmp_path / "fast.onnx", weights="bf16", options=QUICK)
    check_replaced(report, onnx.load(tmp_path / "fast.onnx"), "SparseAMXMatMul")
    given = feeds()
    (expected,), (found,) = run(str(fused), given), run(str(tmp_path / "fast.onnx"), given, library=True)
    assert cosine(words(expected, given), words(found, given)) > 0.9999


@pytest.mark.parametrize("name", ["fused.onnx", "int8.onnx"])
def test_inspection_shows_the_layers_that_are_replaced(quantized: Path, name: str) -> None:
    inspection = ortolan.inspect_onnx(quantized.parent / name)
    report = ortolan.optimize_onnx(quantized.parent / name, dry_run=True, weights="int8", options=QUICK)
    assert [layer.name for layer in inspection.linears] == [layer.name for layer in report.layers]
    assert len(inspection.linears) == 12 and all(layer.replaceable for layer in inspection.linears)
    assert "com.microsoft::SkipLayerNormalization" in inspection.fusions


def test_quantized_encoders_keep_their_integers(quantized: Path, tmp_path: Path) -> None:
    given = feeds()
    report = ortolan.optimize_onnx(
        quantized, tmp_path / "fast.onnx", calibration=[given], options={"verify.seconds": 0.0}
    )
    assert any("12 layers store quantized weights" in note for note in report.notes)
    assert any("12 layers keep the model's stored 8-bit weights" in note for note in report.notes)
    fast = onnx.load(tmp_path / "fast.onnx")
    check_replaced(report, fast, "SparseAMXMatMul")
    tensors = {one.name: numpy_helper.to_array(one) for one in onnx.load(quantized).graph.initializer}
    for number in range(2):
        name = f"Attention_{number}"
        q, scales, zeros = dense_integers(fast, f"{name}_quant/query")
        weight = tensors[f"{name}_qkv_weight_quantized"].astype(np.int16)
        zero = tensors[f"{name}_qkv_weight_zero_point"].astype(np.int16)
        np.testing.assert_array_equal(q.astype(np.int16) - zeros, weight - zero)
        np.testing.assert_array_equal(scales, np.broadcast_to(tensors[f"{name}_qkv_weight_scale"], scales.shape))


def test_answers_of_quantized_encoders_are_nearer_to_float_and_the_same_alone(quantized: Path, tmp_path: Path) -> None:
    given = feeds(6, 12)
    ortolan.optimize_onnx(quantized, tmp_path / "fast.onnx", calibration=[given], options={"verify.seconds": 0.0})
    exact, theirs = (
        words(onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, given)[0], given)
        for path in (quantized.parent / "fused.onnx", quantized)
    )
    session = ortolan.create_session(tmp_path / "fast.onnx")
    (ours,) = session.run(None, given)
    assert relative_error(exact, words(ours, given)) < relative_error(exact, theirs)
    for row in range(6):
        (alone,) = session.run(None, {name: array[row : row + 1] for name, array in given.items()})
        np.testing.assert_array_equal(alone[0], ours[row])


@pytest.mark.parametrize("pad", [None, PAD])
def test_masks_that_count_tokens(tmp_path: Path, pad: int | None) -> None:
    """Masks given as lengths: the first n tokens count, where n is the sum of attention_mask."""
    model = onnx.load(fuse(tmp_path, "lengths"))
    recipe = with_unpad(Recipe.of(weights="bf16"), **({"drop_hidden": True} if pad is None else {"pad_token_id": PAD}))
    unpadded = changed(ortolan.optimize_onnx(model, recipe=recipe, options=QUICK))
    assert "Less" in op_types(unpadded) and op_types(unpadded).count("UnpackTokens") == 1
    for mask in ATTENTION_MASKS.values():
        feeds = encoder_feeds(model, mask)
        read = feeds["attention_mask"] != 0
        for library in (True, False):
            (expected,), (found,) = run(model, feeds), run(unpadded, feeds, library=library)
            assert relative_error(expected[read], found[read]) < 0.02
            first = np.arange(read.shape[1]) < read.sum(axis=1, keepdims=True)
            assert not found[~(read | first)].any()
