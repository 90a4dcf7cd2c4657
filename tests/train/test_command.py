"""`ortolan distill` from end to end, on a tiny encoder."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from ortolan.cli import app
from ortolan.graph_passes.find.linear import linears_in
from ortolan.models import tiny

from ..api.word_tokenizer import write_tokenizer


@pytest.fixture
def files(tmp_path):
    pytest.importorskip("torch")
    ir.save(tiny.tiny_bert(), tmp_path / "model.onnx")
    write_tokenizer(tmp_path / "tokenizer.json")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["one", "two", "three"], rng.integers(3, 9))) for _ in range(60)]
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    pairs = [f"a\tb\tc\td\t{index % 6}\t{texts[index]}\t{texts[index + 20]}" for index in range(20)]
    (tmp_path / "pairs.csv").write_text("\n".join(pairs), encoding="utf-8")
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_distill_writes_a_sparse_model_and_prints_the_curve(files):
    arguments = ["distill", files / "model.onnx", "-o", files / "out.onnx", "--texts", files / "texts.txt"]
    arguments += ["--steps", 8, "--batch-tokens", 40, "--score", files / "pairs.csv", "--score-every", 4]
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [point["step"] for point in report["curve"]] == [4, 8]
    assert all(-1 <= score <= 1 for score in (report["original_score"], *(one["score"] for one in report["curve"])))
    assert "step 8: sparsity 80.0%" in result.stderr
    zeros = [(linear.matrix() == 0).mean() for linear in linears_in(ir.load(files / "out.onnx"))]
    assert zeros == pytest.approx([0.8] * 12, abs=0.01)
    table = invoke(*arguments)
    assert "80.0% of 4x1 blocks zero" in " ".join(table.stdout.split()) and "original" in table.stdout


def test_distill_says_what_is_wrong(files):
    result = invoke("distill", files / "model.onnx", "-o", files / "out.onnx", "--texts", files / "none.txt")
    assert result.exit_code == 1 and "does not exist" in result.stderr
    (files / "tokenizer.json").unlink()
    arguments = ["distill", files / "model.onnx", "-o", files / "out.onnx", "--texts", files / "texts.txt"]
    result = invoke(*arguments, "--score", files / "pairs.csv")
    assert result.exit_code == 1 and "give --tokenizer" in result.stderr
