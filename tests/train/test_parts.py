"""Parts of training that need no torch: schedules, batches, pruned weights, and writing weights back."""

from __future__ import annotations

import sys

import numpy as np
import onnx_ir as ir
import pytest

import ortolan
from ortolan import CalibrationError, ModelError, OrtolanError
from ortolan.graph_passes.options import HEADS
from ortolan.graph_passes.weights.pruners.masks import Pattern
from ortolan.models import tiny
from ortolan.train import CurvePoint, DistillReport, distill
from ortolan.train.batches import Batches, feeds_of, token_ids
from ortolan.train.report import write_curve
from ortolan.train.schedule import EVENTS, PRUNED_BY, learning_rate, sparsities
from ortolan.train.student import (
    hidden_states,
    prune_weight,
    pruned_weights,
    trained_names,
    write_back,
)

from .letters import Letters

RNG = np.random.default_rng(0)


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 5, 60, 5000])
def test_sparsity_rises_to_the_target_and_then_stays(steps):
    found = sparsities(0.8, steps)
    assert list(found) == sorted(found) and len(found) <= min(EVENTS, steps)
    shares = list(found.values())
    assert shares == sorted(shares) and shares[-1] == pytest.approx(0.8)
    assert max(found) <= PRUNED_BY * steps and min(found) == 0
    if steps >= 60:
        assert len(found) == EVENTS and (np.diff(shares, n=2) <= 1e-12).all()  # decreasing


def test_learning_rate_warms_up_and_falls_to_zero():
    rates = [learning_rate(step, 1000, 0.5) for step in range(1000)]
    peak = int(np.argmax(rates))
    assert max(rates) == pytest.approx(0.5) and peak == 19
    assert (np.diff(rates[: peak + 1]) > 0).all() and (np.diff(rates[peak + 1 :]) < 0).all()
    assert 0 < rates[0] < 0.1 and 0 < rates[-1] < 1e-4


# --- batches ----------------------------------------------------------------------------------------------------------


def rows() -> list[np.ndarray]:
    return [RNG.integers(0, 50, length) for length in (4, 4, 4, 7, 7, 7, 7, 7, 12)]


def test_an_epoch_holds_every_text_once_and_batches_have_one_length():
    ids = rows()
    batches = Batches(ids, 14, seed=3)
    for epoch in range(3):
        steps = range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)
        made = [batches.batch(step) for step in steps]
        assert max(one.size for one in made) <= 14
        assert sorted(tuple(row) for one in made for row in one) == sorted(map(tuple, ids))
    orders = [[batches.batch(step).tobytes() for step in range(start, start + batches.per_epoch)] for start in (0, 5)]
    assert batches.per_epoch == 5 and orders[0] != orders[1]
    assert batches.tokens == 59


def test_a_batch_follows_from_its_number():
    ids = rows()
    one, other = Batches(ids, 14, seed=3), Batches(ids, 14, seed=3)
    late = other.batch(13)
    for step in range(13):
        one.batch(step)
    np.testing.assert_array_equal(one.batch(13), late)
    assert one.digest == other.digest
    assert one.digest != Batches(ids, 14, seed=4).digest != Batches(ids[:-1], 14, seed=4).digest


def test_texts_are_cut_and_repeated_or_short_ones_left_out():
    found = token_ids(["abc", "abcde", "abcde", "f" * 21], Letters(), tiny.tiny_bert(), 8)
    assert [len(row) for row in found] == [5, 8, 8, 5]
    with pytest.raises(CalibrationError, match="texts have fewer than 4 tokens each"):
        token_ids(["abc"], Letters(), tiny.tiny_bert(), 8)


def test_only_encoders_are_taken():
    with pytest.raises(ModelError, match="expected those of an encoder"):
        token_ids(["abcde"], Letters(), tiny.tiny_llama(), 8)
    with pytest.raises(ModelError, match="expected those of an encoder"):
        token_ids(["abcde"], Letters(), tiny.mlp(), 8)


def test_feeds_hold_what_the_model_wants():
    feeds = feeds_of(np.ones((2, 5), np.int64), tiny.tiny_bert())
    assert set(feeds) == {"input_ids", "attention_mask", "token_type_ids"}
    assert feeds["attention_mask"].sum() == 10 and feeds["token_type_ids"].sum() == 0
    assert "token_type_ids" not in feeds_of(np.ones((2, 5), np.int64), tiny.tiny_mpnet())


# --- the student ------------------------------------------------------------------------------------------------------


def test_layers_of_an_encoder():
    model = tiny.tiny_bert()
    weights = pruned_weights(model, ("*",), (HEADS,), "m")
    assert len(weights) == 12 and all(len(weight.linears) == 1 for weight in weights)
    assert len(pruned_weights(model, ("*query*",), (HEADS,), "m")) == 2
    names = trained_names(model, weights)
    assert len(set(names)) == len(names) == 12 + 12 + 2 * 5  # weights, biases, and two tensors per LayerNormalization
    # The hidden states that residuals also read: inputs of attention and feed-forward.
    assert [value.producer().op_type for value in hidden_states(weights)] == ["LayerNormalization"] * 4
    with pytest.raises(ModelError, match="has no linear layer that has a float32 weight"):
        pruned_weights(model, ("*nothing*",), (HEADS,), "m")


@pytest.mark.parametrize("form", ["matmul", "gemm", "gemm_trans_b", "transpose", "identity"])
def test_blocks_are_of_four_outputs_as_the_passes_see_them(form):
    model = tiny.mlp(widths=(24, 40), forms=form)
    (weight,) = pruned_weights(model, ("*",), (), "m")
    assert hidden_states([weight]) == weight.inputs == [model.graph.inputs[0]]
    stored = model.graph.initializers[weight.name].const_value.numpy()
    x = RNG.standard_normal((100, 24)).astype(np.float32)
    pruned = prune_weight(stored, weight, x.T @ x, Pattern.read("4x1"), 0.75)
    write_back(model, {weight.name: pruned})
    (seen,) = (linear.matrix() for linear in ortolan.graph_passes.find.linear.linears_in(model))
    blocks = seen.reshape(24, 10, 4)
    dead = (blocks == 0).all(axis=2)
    assert dead.sum() == 180 and (blocks[~dead] != 0).all()


def test_write_back_changes_nothing_else(tmp_path):
    model, untouched = tiny.tiny_bert(), tiny.tiny_bert()
    weights = pruned_weights(model, ("*",), (HEADS,), "m")
    name = weights[0].name
    new = RNG.standard_normal(untouched.graph.initializers[name].const_value.shape.numpy()).astype(np.float32)
    write_back(model, {name: new})
    assert [str(node) for node in model.graph] == [str(node) for node in untouched.graph]
    for key, value in untouched.graph.initializers.items():
        expected = new if key == name else value.const_value.numpy()
        np.testing.assert_array_equal(model.graph.initializers[key].const_value.numpy(), expected)


def test_layers_that_are_not_float32_are_left_out():
    model = tiny.mlp(widths=(8, 8, 8), forms=["cast", "matmul"])
    (weight,) = pruned_weights(model, ("*",), (), "m")
    assert weight.name == "layers.1.weight_t"


# --- report and errors ------------------------------------------------------------------------------------------------


def test_report(tmp_path):
    point = CurvePoint(step=10, sparsity=0.5, tokens=100, seconds=60.0, loss=0.25, score=None)
    report = DistillReport("a", "b", "4x1", 10, curve=[point], original_score=0.5, sparsity={"layer": 0.5})
    assert '"loss": 0.25' in report.to_json()
    assert str(point) == "step 10: sparsity 50.0%, 100 tokens, 1.0 min, loss 0.2500"
    write_curve(tmp_path / "curve.csv", [point])
    assert (tmp_path / "curve.csv").read_text().split() == [
        "step,sparsity,tokens,seconds,loss,score",
        "10,0.5,100,60.0,0.25,",
    ]


def test_without_torch_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    ir.save(tiny.tiny_bert(), tmp_path / "m.onnx")
    with pytest.raises(OrtolanError, match=r"pip install torch"):
        distill(tmp_path / "m.onnx", tmp_path / "out.onnx", texts=["abcde"], tokenizer=Letters())
