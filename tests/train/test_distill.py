"""Training of tiny encoders: learning, stopping, resuming, and use of the trained models in the passes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import ortolan
from ortolan import ModelError, OutputError, RecipeError
from ortolan.graph_passes.find.linear import linears_in
from ortolan.models import tiny

from .letters import Letters

torch = pytest.importorskip("torch")

from ortolan.train import checkpoint, distill  # noqa: E402
from ortolan.train.training import relative_error  # noqa: E402

RNG = np.random.default_rng(0)
TEXTS = ["".join(chr(97 + letter) for letter in RNG.integers(0, 26, RNG.integers(5, 20))) for _ in range(120)]
STEPS = 24


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, so that sums have a fixed order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bert(tmp_path) -> Path:
    ir.save(tiny.tiny_bert(), tmp_path / "bert.onnx")
    return tmp_path / "bert.onnx"


def run(model: Path, output: str, **arguments) -> ortolan.train.DistillReport:
    settings = {"steps": STEPS, "batch_tokens": 64, "bfloat16": False} | arguments
    return distill(model, model.with_name(output), texts=TEXTS, tokenizer=Letters(), **settings)


def weights(path: Path) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy() for name, value in ir.load(path).graph.initializers.items()}


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def stop_after(step: int):
    """Return a progress callback that sends SIGINT at this step."""

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "distill" and done == step:
            os.kill(os.getpid(), signal.SIGINT)

    return progress


def test_layers_are_sparse_in_blocks_and_the_rest_of_the_graph_stays(bert):
    report = run(bert, "out.onnx", sparsity=0.75, steps=12)
    out, original = ir.load(bert.with_name("out.onnx")), ir.load(bert)
    assert [str(node) for node in out.graph] == [str(node) for node in original.graph]
    layers = list(linears_in(out))
    assert len(layers) == len(report.sparsity) == 12
    for linear in layers:
        blocks = linear.matrix().reshape(linear.k, -1, 4)
        dead = (blocks == 0).all(axis=2)
        assert dead.mean() == pytest.approx(0.75, abs=0.01) == report.sparsity[linear.name]
        assert (blocks[~dead] != 0).mean() > 0.999
    word = "embeddings.word_embeddings.weight"
    np.testing.assert_array_equal(weights(bert)[word], weights(bert.with_name("out.onnx"))[word])
    assert json.loads(out.metadata_props["ortolan.distilled"])["sparsity"] == 0.75


def test_it_learns(bert):
    """Training with a useful rate recovers from pruning, compared with a run that only prunes."""
    little = run(bert, "little.onnx", steps=12, rate=1e-9, batch_tokens=256).curve[-1].loss
    much = run(bert, "much.onnx", steps=240, rate=3e-3, batch_tokens=256).curve[-1].loss
    assert much < 0.7 * little


def test_a_run_that_goes_on_equals_one_that_was_never_stopped(bert):
    points = []
    run(bert, "whole.onnx", evaluate_every=6, tell=points.append)
    assert [point.step for point in points] == [6, 12, 18, 24]
    for step in (3, 17):
        with pytest.raises(KeyboardInterrupt):
            run(bert, "parts.onnx", evaluate_every=6, progress=stop_after(step))
        assert not bert.with_name("parts.onnx").exists()
    report = run(bert, "parts.onnx", evaluate_every=6)
    assert same(bert.with_name("whole.onnx"), bert.with_name("parts.onnx"))
    assert [(point.step, point.sparsity, point.tokens) for point in report.curve] == [
        (point.step, point.sparsity, point.tokens) for point in points
    ]
    assert (bert.with_name("parts.onnx.checkpoint") / "curve.csv").read_text().count("\n") == 5


def test_a_finished_run_only_writes_its_model_again(bert):
    run(bert, "out.onnx")
    bert.with_name("out.onnx").rename(bert.with_name("kept.onnx"))
    stages = []
    run(bert, "out.onnx", progress=lambda stage, done, total: stages.append(stage))
    assert not stages and same(bert.with_name("out.onnx"), bert.with_name("kept.onnx"))


def test_a_checkpoint_of_another_training_is_refused(bert):
    run(bert, "out.onnx", steps=4)
    with pytest.raises(OutputError, match=r"has steps = 4, expected 6; .*resume=False"):
        run(bert, "out.onnx", steps=6)
    run(bert, "out.onnx", steps=6, resume=False)
    file = bert.with_name("out.onnx.checkpoint") / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(OutputError, match="cannot be read"):
        run(bert, "out.onnx", steps=6)


def test_a_crash_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, checkpoint.State({"steps": 4}, step=1))

    def crash(content, file):
        file.write(b"half")
        raise MemoryError

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(MemoryError):
        checkpoint.save(tmp_path, checkpoint.State({"steps": 4}, step=2))
    assert checkpoint.load(tmp_path, {"steps": 4}).step == 1
    assert checkpoint.load(tmp_path / "none", {"steps": 4}) is None


def test_the_model_is_scored_as_it_is_on_the_way(bert):
    seen = []

    def evaluate(path: Path) -> float:
        onnxruntime.InferenceSession(path)
        seen.append(np.mean([float((linear.matrix() == 0).mean()) for linear in linears_in(ir.load(path))]))
        return float(len(seen))

    report = run(bert, "out.onnx", evaluate=evaluate, evaluate_every=12)
    assert report.original_score == 1 and [point.score for point in report.curve] == [2, 3]
    assert seen == pytest.approx([0, report.curve[0].sparsity, 0.8], abs=0.01)


def test_unstructured(bert):
    run(bert, "out.onnx", pattern="unstructured", sparsity=0.5, steps=4)
    layer = next(linears_in(ir.load(bert.with_name("out.onnx")))).matrix()
    assert (layer == 0).mean() == pytest.approx(0.5, abs=0.01)
    assert 0 < (layer.reshape(-1, 4) == 0).all(axis=1).mean() < 0.2


def test_bfloat16(bert):
    report = run(bert, "out.onnx", bfloat16=True, steps=4)
    assert np.isfinite(report.curve[-1].loss)
    assert weights(bert.with_name("out.onnx"))["embeddings.LayerNorm.weight"].dtype == np.float32


def test_a_form_takes_the_sparse_model(bert):
    run(bert, "out.onnx", steps=12)
    options = {"may_grow": True, "verify.seconds": 0.0}
    report = ortolan.optimize_onnx(bert.with_name("out.onnx"), pattern="4x1", options=options)
    replaced = [layer for layer in report.layers if layer.new_op == "VNNISpMM"]
    assert len(replaced) == 12 and all(layer.sparsity == pytest.approx(0.8, abs=0.01) for layer in replaced)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"sparsity": 1.0}, r"sparsity is 1.0, expected a number between 0 and 1"),
        ({"steps": 0}, "steps is 0, expected a number above 0"),
        ({"pattern": "2:4"}, "pattern is '2:4', expected one of '4x1', 'unstructured'"),
    ],
)
def test_options_out_of_range_are_refused(bert, arguments, message):
    with pytest.raises(RecipeError, match=message):
        run(bert, "out.onnx", **arguments)


def test_the_input_is_never_overwritten(bert):
    with pytest.raises(OutputError, match="would overwrite"):
        run(bert, "bert.onnx")


def test_decoders_are_refused(tmp_path):
    ir.save(tiny.tiny_llama(), tmp_path / "llama.onnx")
    with pytest.raises(ModelError, match="expected those of an encoder"):
        run(tmp_path / "llama.onnx", "out.onnx")


def test_relative_error():
    taught = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert float(relative_error(taught, taught)) == 0
    # The squared distances to the mean (2, 4) add up to 10; one value is wrong by 1.
    assert float(relative_error(taught + torch.tensor([[1.0, 0], [0, 0]]), taught)) == pytest.approx(0.1)
    assert float(relative_error(taught.mean(0).expand(2, 2), taught)) == pytest.approx(1)
