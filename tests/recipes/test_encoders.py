"""Whole encoders: all linear layers, attentions and the operations after them are replaced."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import ortolan
from ortolan.models import tiny

from ..ops.single_node import session
from ..passes.small_models import op_types, relative_error, run
from .forms import NAMED

SIZES = {"hidden_size": 72, "intermediate_size": 200, "num_attention_heads": 3}
MODELS = {"bert": tiny.tiny_bert, "mpnet": tiny.tiny_mpnet}


def feeds(model: onnx.ModelProto, batch: int, rows: int) -> dict[str, np.ndarray]:
    """Return random sentences of different lengths with padding."""
    rng = np.random.default_rng(rows)
    mask = (np.arange(rows) < np.linspace(rows, 1, batch, dtype=int)[:, None]).astype(np.int64)
    ids = np.where(mask, rng.integers(2, 100, (batch, rows)), 1)
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {value.name: given[value.name] for value in model.graph.input}


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_of_a_layer_is_left(name: str, static: bool) -> None:
    model: onnx.ModelProto = ir.to_proto(MODELS[name](**SIZES))
    calibration = [feeds(model, 3, rows) for rows in (7, 20, 33)]
    report = ortolan.optimize_onnx(
        model,
        recipe=NAMED["sparse-int8-4x1-static" if static else "sparse-int8-4x1"],
        options={"sparsity": 0.0, "may_grow": True, "unpad.drop_hidden": True},
        calibration=calibration,
    )
    assert {layer.status for layer in report.layers} == {"replaced"}
    fused = Counter(part for layer in report.layers for part in layer.fused)
    assert fused["residual"] == 4 and (static or fused["gelu"] == 2)
    left = Counter(op_types(report.model))
    assert left["PackedNoMADAttention"] == 2 and not {"MatMul", "Softmax", "Erf", "Reshape"} & set(left)
    # Per layer: query, key and value in one node, the attention output, and two MLP nodes, or one with static ranges.
    assert left["VNNISpMM"] == 2 * (3 if static else 4)
    for batch, rows in ((1, 1), (1, 13), (3, 33)):
        given = feeds(model, batch, rows)
        shown = given["attention_mask"] == 1
        (expected,) = run(model, given)
        for library in (True, False):
            (found,) = run(report.model, given, library)
            assert relative_error(expected[shown], found[shown]) < 0.05


DENSE = {
    "bf16": ("SparseAMXMatMul", 0.01, {"weights": "bf16"}),
    "int8": ("SparseAMXMatMul", 0.05, {"weights": "int8"}),
    "int4": ("W4A8MatMul", 0.3, {"weights": "int4", "group_size": 32}),
}
each_dense_form = pytest.mark.parametrize("form", DENSE)


def dense(form: str, model: onnx.ModelProto, **options: object) -> ortolan.OptimizationReport:
    return ortolan.optimize_onnx(
        model,
        **DENSE[form][2],
        ignore=(),
        calibration=[feeds(model, 3, rows) for rows in (7, 20, 33)],
        options={"may_grow": True, "verify.seconds": 0.0, **options},
    )


@each_dense_form
@pytest.mark.parametrize("name", MODELS)
def test_dense_forms_leave_nothing_of_a_layer(name: str, form: str) -> None:
    op, tolerance, _ = DENSE[form]
    model: onnx.ModelProto = ir.to_proto(MODELS[name](**SIZES))
    report = dense(form, model, **{"unpad.drop_hidden": True})
    assert {layer.status for layer in report.layers} == {"replaced"}
    fused = Counter(part for layer in report.layers for part in layer.fused)
    assert fused["residual"] == fused["layer norm"] == 4
    assert fused["gelu"] == fused["key"] == fused["value"] == 2
    left = Counter(op_types(report.model))
    assert left["PackedNoMADAttention"] == 2
    assert left[op] == 2 * 4  # query, key and value; the attention output; two MLP layers
    # The LayerNormalization of the embeddings is replaced only in integer formats.
    assert (left["LayerNormalization"], left["AddLayerNorm"]) == ((1, 0) if form == "bf16" else (0, 1))
    assert not {"MatMul", "Softmax", "Erf", "Reshape", "Gelu"} & set(left)
    # On some CPUs, attention multiplies in bf16, but its portable function never does. Compare float32 attention.
    exact = dense(form, model, **{"fuse_attention.precision": "f32"})
    for batch, rows in ((1, 1), (1, 13), (3, 33)):
        given = feeds(model, batch, rows)
        shown = given["attention_mask"] == 1
        (expected,) = run(model, given)
        assert relative_error(expected[shown], run(report.model, given, library=True)[0][shown]) < tolerance
        # A rounding difference between kernel and function may cause further ones in later layers.
        answers = [run(exact.model, given, library)[0][shown] for library in (True, False)]
        assert relative_error(answers[0], answers[1]) < tolerance / 5


@pytest.mark.parametrize("form", ["int8", "int4", "4x1"])
@pytest.mark.parametrize("threads", [1, 3])
def test_answers_depend_on_no_other_sentence_and_no_padding(form: str, threads: int) -> None:
    """The answer for a sentence does not depend on the other sentences and the padding of its batch.

    Only integer formats are tested: bf16 layers with a single row accumulate in a different order.
    """
    model: onnx.ModelProto = ir.to_proto(tiny.tiny_bert(**SIZES))
    if form == "4x1":
        options = {"sparsity": 0.0, "may_grow": True}
        report = ortolan.optimize_onnx(model, recipe=NAMED["sparse-int8-4x1"], options=options)
    else:
        report = dense(form, model, **{"unpad.drop_hidden": True})
    assert report.model is not None
    encoder = session(report.model, threads=threads)
    batch = feeds(model, 5, 45)
    (together,) = encoder.run(None, batch)
    for number, length in enumerate(batch["attention_mask"].sum(axis=1)):
        alone = {name: ids[number : number + 1, :length] for name, ids in batch.items()}
        padded = {name: np.pad(ids, ((0, 0), (0, 64 - length))) for name, ids in alone.items()}
        for given in (alone, padded):
            (found,) = encoder.run(None, given)
            np.testing.assert_array_equal(found[0, :length], together[number, :length])


ACTIVATIONS = {
    "name": "activations behind fused attention",
    "pass": [
        {"name": "normalize"},
        {"name": "calibrate"},
        {"name": "fuse_attention"},
        {"name": "activations", "sparsity": 0.4},
        {"name": "replace", "op": "MaskedMatMul"},
        {"name": "verify"},
    ],
}


@pytest.mark.parametrize(
    ("recipe", "op"),
    [(NAMED["sparse-int8-4x1-static"], "VNNISpMM"), (ortolan.Recipe.from_dict(ACTIVATIONS), "MaskedMatMul")],
    ids=["ranges", "activations"],
)
def test_passes_that_fit_run_attention_without_functions(recipe: str | ortolan.Recipe, op: str) -> None:
    model: onnx.ModelProto = ir.to_proto(tiny.tiny_bert(**SIZES))
    calibration = [feeds(model, 3, rows) for rows in (7, 20, 33)]
    options = {"sparsity": 0.0, "may_grow": True, "unpad.drop_hidden": True} if op == "VNNISpMM" else None
    report = ortolan.optimize_onnx(model, recipe=recipe, options=options, calibration=calibration, portable=False)
    left = Counter(op_types(report.model))
    attentions = "PackedNoMADAttention" if op == "VNNISpMM" else "NoMADAttention"
    assert left[attentions] == 2 and left[op] > 0
    assert not report.model.functions
