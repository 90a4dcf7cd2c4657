"""Parts of the encoder benchmark on tiny models: feeds, variants, the table, and refused options."""

import subprocess
import sys

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from rich.console import Console

from ortolan.benchmarks import encoder as benchmark
from ortolan.benchmarks.encoder import (
    ADOPTED,
    FP32,
    INT8,
    SENTENCES,
    Encoder,
    calibration_feeds,
    make_variants,
    ratio_cell,
    read_shape,
    word_feeds,
)
from ortolan.benchmarks.variants import read_recipes
from ortolan.graph_passes.report.figures import Timing
from ortolan.models import tiny

# Ids up to this size may occur in the feeds.
VOCABULARY = 30001


@pytest.fixture(params=["bert", "mpnet"])
def encoder(request, tmp_path):
    make = {"bert": tiny.tiny_bert, "mpnet": tiny.tiny_mpnet}[request.param]
    model = make(hidden_size=64, intermediate_size=128, vocab_size=VOCABULARY)
    ir.save(model, tmp_path / "model.onnx")
    return Encoder(tmp_path / "model.onnx", None, tuple(value.name for value in model.graph.inputs))


def test_words_are_in_the_vocabulary_and_as_many_as_asked(encoder):
    feeds = word_feeds(encoder.inputs, 3, 7)
    assert list(feeds) == list(encoder.inputs)
    assert all(array.shape == (3, 7) and array.dtype == np.int64 for array in feeds.values())
    assert feeds["attention_mask"].all()
    assert ort.InferenceSession(encoder.onnx).run(None, feeds)[0].shape == (3, 7, 64)


def test_a_model_without_a_tokenizer_is_calibrated_on_words(encoder):
    feeds = calibration_feeds(encoder, ["one two three", "one two"])
    assert [one["input_ids"].shape for one in feeds] == [(1, 3), (1, 2)]
    assert feeds[0]["input_ids"][0, 0] != feeds[1]["input_ids"][0, 0]


def test_sentences_become_feeds_without_padding(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<s>": 0, "<pad>": 1, "a": 2, "cat": 3, "sat": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_padding(pad_id=1, pad_token="<pad>", length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = Encoder(tmp_path, tmp_path / "tokenizer.json", ("input_ids", "attention_mask"))
    feeds = calibration_feeds(encoder, ["a cat sat", "cat"])
    assert [one["input_ids"].tolist() for one in feeds] == [[[2, 3, 4]], [[3]]]
    assert [list(one) for one in feeds] == [["input_ids", "attention_mask"]] * 2


@pytest.mark.slow
def test_variants_answer_as_the_model_does(encoder, tmp_path):
    recipes = read_recipes([":pattern=4x1,ranges=true", ":weights=int4,method=gptq,may_grow=true"], [])
    variants = make_variants(encoder, recipes, calibration_feeds(encoder, SENTENCES), tmp_path, Console(quiet=True))
    assert list(variants) == [FP32, INT8, ADOPTED, "pattern=4x1,ranges=true", "weights=int4,method=gptq,may_grow=true"]
    feeds = word_feeds(encoder.inputs, 2, 11)
    expected, *others = (
        benchmark.create_session(path, benchmark.session_options(1)).run(None, feeds)[0] for path in variants.values()
    )
    for name, found in zip(list(variants)[1:], others, strict=True):
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 1e-5 < error < 0.3, name


def test_ratios_are_those_of_the_minima():
    timings = {FP32: Timing(12, 90), INT8: Timing(6, 91), "ours": Timing(3, 92)}
    assert ratio_cell(timings["ours"], timings) == "3 / 92  4.00x  2.00x"
    assert ratio_cell(timings[INT8], timings) == "6 / 91  2.00x  1.00x"


def test_shapes():
    assert read_shape("8x64") == (8, 64)


def test_the_whole_of_it(encoder, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "open_model", lambda name, folder: encoder)
    arguments = ["--recipe", ":pattern=4x1", "--sparsity", "0.25", "--shape", "1x5", "2x3", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["encoder", *arguments])
    benchmark.main()
    printed = capsys.readouterr().out
    for words in ("all-minilm-l6-v2", "1 x 5", "2 x 3", FP32, INT8, "pattern=4x1 25%"):
        assert words in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sts", "none.csv"), "--sts: file 'none.csv' does not exist"),
        (("--texts", "none.txt"), "--texts: file 'none.txt' does not exist"),
        (("--model", "bert-base", "--sts", __file__), "--sts: bert-base has random weights and no tokenizer"),
        (("--recipe", "int5"), "--recipe: unknown recipe 'int5'"),
        (("--shape", "16"), "expected BATCHxTOKENS such as 1x128, found '16'"),
        (("--shape", "0x16"), "expected BATCHxTOKENS such as 1x128, found '0x16'"),
    ],
)
def test_what_there_is_none_of_is_refused(arguments, words, tmp_path):
    command = [sys.executable, "-P", "-m", "ortolan.benchmarks.encoder", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 2
    assert words in result.stderr
