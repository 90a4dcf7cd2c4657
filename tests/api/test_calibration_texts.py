"""Calibration texts: how they are split into inputs, tokenizers, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import ortolan
from ortolan import ArgumentTypeError, CalibrationError
from ortolan.graph_passes.measure.feeds import read_calibration
from ortolan.graph_passes.text.texts import (
    TOKENS_OF_DECODER,
    TOKENS_OF_PIECE,
    count_tokens,
    feeds_of_texts,
    find_tokenizer,
)
from ortolan.models import tiny

from ..passes.small_models import matmul_model
from .word_tokenizer import write_tokenizer

RECIPE = {"name": "r", "pass": [{"name": "normalize"}, {"name": "prune", "method": "wanda"}]}


class Letters:
    """A tokenizer with one token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 50 for letter in text]


@pytest.fixture
def folder(tmp_path) -> Path:
    ir.save(tiny.tiny_bert(), tmp_path / "model.onnx")
    return tmp_path


def optimize(folder: Path, calibration, **arguments) -> ortolan.OptimizationReport:
    recipe = ortolan.Recipe.from_dict(RECIPE)
    return ortolan.optimize_onnx(folder / "model.onnx", recipe=recipe, calibration=calibration, **arguments)


def test_each_text_is_one_feed_and_long_ones_are_cut():
    texts = ["abc", "d" * (2 * TOKENS_OF_PIECE + 3), "e" * (TOKENS_OF_PIECE + 20)]
    feeds = feeds_of_texts(texts, Letters(), tiny.tiny_bert())
    assert [one["input_ids"].shape for one in feeds] == [
        (1, 3), (1, TOKENS_OF_PIECE), (1, TOKENS_OF_PIECE), (1, TOKENS_OF_PIECE), (1, 20),
    ]  # fmt: skip
    np.testing.assert_array_equal(feeds[0]["input_ids"], [[97 % 50, 98 % 50, 99 % 50]])
    assert count_tokens(feeds) == 3 + 3 * TOKENS_OF_PIECE + 20


@pytest.mark.parametrize(("batch", "tokens"), [("batch", 8), (1, 8), (2, 8), (2, "tokens")])
def test_texts_for_models_of_a_fixed_size_are_padded(tmp_path, batch, tokens):
    model = tiny.tiny_bert()
    for value in [*model.graph.inputs, *model.graph.outputs]:
        value.shape = ir.Shape([batch, tokens, *value.shape[2:]])
    texts, tokenizer = ["one two", "three " * 9, "two"], write_tokenizer(tmp_path / "tokenizer.json")
    feeds = feeds_of_texts(texts, tokenizer, model)
    rows, length = 1 if batch == "batch" else batch, None if tokens == "tokens" else tokens
    assert {one["input_ids"].shape for one in feeds if length} == ({(rows, length)} if length else set())
    assert all(len(one["input_ids"]) == rows for one in feeds)
    assert all((one["input_ids"][one["attention_mask"] == 0] == 0).all() for one in feeds)
    assert [int(one["attention_mask"].sum()) for one in feeds] == {
        (1, 8): [3, 8, 2],
        (2, 8): [11, 5],
        (2, None): [13, 5],
    }[rows, length]
    assert read_calibration(feeds, model)
    ir.save(model, tmp_path / "model.onnx")
    report = ortolan.optimize_onnx(
        tmp_path / "model.onnx",
        weights="bf16",
        calibration=texts,
        options={"seconds": 0.0},
        portable=False,
    )
    assert report.replaced and report.tokens


@pytest.mark.parametrize(("attention", "most"), [("standard", TOKENS_OF_PIECE), ("gqa", TOKENS_OF_DECODER)])
def test_texts_of_decoders_are_joined(attention, most):
    """Texts are joined and split into pieces of the default length, or of the context length if that is shorter."""
    for positions in (2048, 64):
        model = tiny.tiny_llama(attention=attention, head_dim=16, max_position_embeddings=positions)
        cut = min(most, positions) if attention == "gqa" else most
        texts = ["a" * 10, "b" * 8 * most, "c" * (most + 30)]
        lengths = [one["input_ids"].shape[1] for one in feeds_of_texts(texts, Letters(), model)]
        left = sum(map(len, texts)) % cut
        assert lengths == [cut] * (sum(map(len, texts)) // cut) + ([left] if left >= 16 else [])


def test_few_tokens_of_a_decoder_make_several_pieces():
    """Few tokens are split into several shorter pieces, so that some can be held out for evaluation."""
    model = tiny.tiny_llama()
    assert len(feeds_of_texts(["ten tokens"] * 100, Letters(), model)) == 8
    assert [one["input_ids"].size for one in feeds_of_texts(["ten tokens"] * 13, Letters(), model)] == [64, 64]


@pytest.mark.parametrize("build", [tiny.tiny_bert, tiny.tiny_llama])
def test_other_inputs_are_filled_in(build):
    model = build()
    feeds = read_calibration(feeds_of_texts(["abc"], Letters(), model), model)
    assert feeds[0].keys() == {value.name for value in model.graph.inputs}


def test_tokens_that_are_masked_do_not_count():
    ids = np.ones((2, 5), np.int64)
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert count_tokens([{"input_ids": ids, "attention_mask": mask}]) == 8
    assert count_tokens([{"x": ids}]) is None


def test_a_tokenizer_json(folder):
    """Special tokens are added; the file's settings for padding and truncation are ignored."""
    path = write_tokenizer(folder / "words.json")
    report = optimize(folder, ["one two three", "three two"], tokenizer=path)
    assert report.tokens == 4 + 3
    assert report.feeds == "2 inputs from 2 texts, 7 tokens"
    assert "7 tokens" in str(report) and report.to_dict()["tokens"] == 7


def test_the_tokenizer_beside_the_model(folder):
    write_tokenizer(folder / "tokenizer.json")
    assert optimize(folder, ["one two three"]).tokens == 4
    (folder / "onnx").mkdir()
    assert find_tokenizer(folder / "onnx" / "model.onnx") == folder / "tokenizer.json"
    assert find_tokenizer(folder / "other" / "model.onnx") is None


def test_a_text_file_has_one_text_a_line(folder):
    texts = folder / "texts.txt"
    texts.write_text("one two\n\n  three \r\n", encoding="utf-8")
    report = optimize(folder, texts, tokenizer=Letters())
    assert report.feeds == "2 inputs from 2 texts, 12 tokens"


def test_an_iterator_of_texts(folder):
    assert optimize(folder, (text for text in ("abc", "de")), tokenizer=Letters()).tokens == 5


@pytest.mark.parametrize(
    ("calibration", "tokenizer", "message"),
    [
        (["abc"], None, r"no tokenizer was given and there is no tokenizer.json beside the model; give tokenizer="),
        (["abc"], "none.json", "tokenizer file 'none.json' does not exist"),
        (["abc"], 3, r"tokenizer is an int, expected the path of a tokenizer.json, or an object with a method encode"),
        (["abc", 3], Letters(), "calibration item 2 is an int, expected a text"),
        ([""], type("Words", (), {"encode": lambda self, text: text.split()})(), "hold no tokens"),
        (["a"], type("Words", (), {"encode": lambda self, text: text.split()})(), "expected token ids"),
        ({"input_ids": np.ones((1, 3), np.int64)}, Letters(), "tokenizer was given, but calibration holds no texts"),
        ("none.txt", Letters(), "calibration file 'none.txt' does not exist"),
        (["abc"] * 2 + [{"x": 1}], Letters(), "calibration item 3 is a dict"),
    ],
)
def test_refused(folder, calibration, tokenizer, message):
    with pytest.raises((CalibrationError, ArgumentTypeError), match=message):
        optimize(folder, calibration, tokenizer=tokenizer)


def test_files_that_hold_something_else_are_refused(folder):
    (folder / "empty.txt").write_text("\n \n")
    with pytest.raises(CalibrationError, match=r"empty.txt' holds no text, expected one a line"):
        optimize(folder, folder / "empty.txt", tokenizer=Letters())
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationError, match="cannot be read as UTF-8 text"):
        optimize(folder, folder / "binary.txt", tokenizer=Letters())
    pytest.importorskip("tokenizers")
    (folder / "bad.json").write_text("{}")
    with pytest.raises(CalibrationError, match=r"bad.json' is not a tokenizer.json"):
        optimize(folder, ["abc"], tokenizer=folder / "bad.json")


def test_models_that_take_no_tokens_are_told():
    with pytest.raises(CalibrationError, match="the model has no input 'input_ids': its inputs are x"):
        ortolan.optimize_onnx(matmul_model(), calibration=["abc"], tokenizer=Letters())


def test_without_the_package_it_says_what_to_install(monkeypatch, folder):
    path = folder / "words.json"
    path.write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(CalibrationError, match=r"pip install tokenizers"):
        optimize(folder, ["abc"], tokenizer=path)
