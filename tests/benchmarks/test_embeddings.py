"""The benchmark of texts of mixed lengths, its parts and the whole on a tiny model."""

import subprocess
import sys

import numpy as np
import onnx_ir as ir
import pytest

from ortolan.benchmarks import embeddings as benchmark
from ortolan.benchmarks.embeddings import batches_of, read_lengths, same_alone
from ortolan.benchmarks.encoder import FP32, INT8, Encoder, word_feeds
from ortolan.models import tiny

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def texts_of(*lengths: int):
    return [word_feeds(INPUTS, 1, tokens, seed) for seed, tokens in enumerate(lengths)]


def test_batches_are_padded_to_their_longest_text():
    texts = texts_of(3, 5, 2)
    first, second = batches_of(texts, 2, in_order=False)
    assert first["input_ids"].shape == (2, 5) and second["input_ids"].shape == (1, 2)
    assert first["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    np.testing.assert_array_equal(first["input_ids"][0, :3], texts[0]["input_ids"][0])
    assert not first["input_ids"][0, 3:].any()


def test_batches_in_order_have_texts_of_like_length():
    assert [one["input_ids"].shape for one in batches_of(texts_of(9, 2, 8, 3), 2, in_order=True)] == [(2, 3), (2, 9)]


class Session:
    """Each token's answer is its id, plus `shift` where the batch has several texts."""

    def __init__(self, shift: float) -> None:
        self._shift = shift

    def run(self, _, feeds):
        ids = feeds["input_ids"]
        return [(ids + self._shift * (len(ids) > 1)).astype(np.float32)[:, :, None]]


def test_the_same_alone():
    assert same_alone(Session(0), texts_of(3, 5))
    assert not same_alone(Session(1), texts_of(3, 5))


def test_lengths():
    assert read_lengths("8:256") == (8, 256)


def test_the_whole_of_it(tmp_path, monkeypatch, capsys):
    model = tiny.tiny_bert(hidden_size=64, intermediate_size=128, vocab_size=30001)
    ir.save(model, tmp_path / "model.onnx")
    encoder = Encoder(tmp_path / "model.onnx", None, tuple(value.name for value in model.graph.inputs))
    monkeypatch.setattr(benchmark, "open_model", lambda name, folder: encoder)
    arguments = ["--texts", "5", "--batch", "2", "--lengths", "4:9", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["embeddings", *arguments])
    benchmark.main()
    printed = capsys.readouterr().out
    for words in ("5 texts in batches of 2", FP32, INT8, "int8, padded", "int8, unpad", "sorted by length"):
        assert words in " ".join(printed.split())
    assert next(line for line in printed.splitlines() if "int8, unpad" in line).count("same") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sts", "none.csv"), "--sts: file 'none.csv' does not exist"),
        (("--lengths", "8"), "expected LEAST:MOST, 1 to 512 tokens, found '8'"),
        (("--lengths", "9:8"), "expected LEAST:MOST, 1 to 512 tokens, found '9:8'"),
        (("--batch", "0"), "--batch: expected 1 or more, found 0"),
    ],
)
def test_what_there_is_none_of_is_refused(arguments, words, tmp_path):
    command = [sys.executable, "-P", "-m", "ortolan.benchmarks.embeddings", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 2
    assert words in result.stderr
