"""The benchmark of texts of mixed lengths, its parts and the whole on a tiny model."""

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest

from ortolan.benchmarks import embeddings as benchmark
from ortolan.benchmarks.embedding_result import EmbeddingsResult
from ortolan.benchmarks.embedding_texts import PAIRS, make_texts
from ortolan.benchmarks.embeddings import batches_of, read_lengths, same_alone
from ortolan.benchmarks.encoder import FP32, INT8, Encoder, word_feeds
from ortolan.errors import OrtolanError
from ortolan.models import tiny

from ..api.word_tokenizer import write_tokenizer

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


class Process:
    """Each text's vector is its first id, plus `shift` where the batch has several texts."""

    def __init__(self, shift: float) -> None:
        self._shift = shift

    def vectors(self, batches):
        return np.concatenate([one["input_ids"][:, :1] + self._shift * (len(one["input_ids"]) > 1) for one in batches])


def test_the_same_alone():
    assert same_alone(Process(0), texts_of(3, 5))
    assert not same_alone(Process(1), texts_of(3, 5))


def test_pairs_have_a_query_and_a_text_of_another_type():
    encoder = Encoder(None, None, INPUTS)
    for feeds in make_texts(PAIRS, encoder, 20, None, (8, 512)):
        types = feeds["token_type_ids"][0].tolist()
        query = types.index(1)
        assert types == [0] * query + [1] * (len(types) - query)
        assert 4 <= query <= 24 and 24 <= len(types) - query <= 232


def test_lengths():
    assert read_lengths("8:256") == (8, 256)


def test_the_whole_of_it(tmp_path, monkeypatch, capsys):
    model = tiny.tiny_bert(hidden_size=64, intermediate_size=128, vocab_size=30001)
    ir.save(model, tmp_path / "model.onnx")
    encoder = Encoder(tmp_path / "model.onnx", None, tuple(value.name for value in model.graph.inputs))
    monkeypatch.setattr(benchmark, "open_model", lambda name, folder: encoder)
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setattr(benchmark, "get_model", lambda name: SimpleNamespace(tokenizer=tokenizer))
    monkeypatch.setattr(benchmark, "_WARM_UP_SECONDS", 0.0)
    data, picture = tmp_path / "result.json", tmp_path / "result.svg"
    # A peer whose environment lacks its package is left out; the others are not.
    arguments = ["--texts", "5", "--batch", "2", "--lengths", "4:9", "--seconds", "0", "--json", str(data)]
    arguments += ["--peer", f"ctranslate2={sys.executable}"]
    monkeypatch.setattr("ortolan.benchmarks.encoder_peers._write_checkpoint", lambda model, folder: tmp_path)
    monkeypatch.setattr(sys, "argv", ["embeddings", *arguments])
    benchmark.main()
    printed = capsys.readouterr().out
    assert "left out: CTranslate2 int8: No module named 'ctranslate2'" in " ".join(printed.split())
    result = EmbeddingsResult.from_json(data.read_text())
    assert EmbeddingsResult.from_json(result.to_json()) == result
    assert [row.ours for row in result.models[0].rows] == [False, False, True, True, True]
    assert all(row.cosine > 0.8 and len(row.speeds) == 2 for row in result.models[0].rows)
    if find_spec("matplotlib"):
        monkeypatch.setattr(sys, "argv", ["embeddings", "--from", str(data), "--picture", str(picture)])
        benchmark.main()
        assert "int8, unpad -->" in picture.read_text()
    for words in ("5 texts in batches of 2", FP32, INT8, "int8, padded", "int8, unpad", "sorted by length"):
        assert words in " ".join(printed.split())
    lines = [line for line in printed.splitlines() if "int8, unpad" in line and "same" in line]
    assert len(lines) == 2 and "1024 tokens a call" in lines[1]


def test_other_files_are_refused(tmp_path):
    for text in ("", "[]", '{"models": [{"rows": [{"name": 1}]}]}'):
        with pytest.raises(OrtolanError, match="not the result of a comparison"):
            EmbeddingsResult.from_json(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sts", "none.csv"), "--sts: file 'none.csv' does not exist"),
        (("--lengths", "8"), "expected LEAST:MOST, 1 to 512 tokens, found '8'"),
        (("--lengths", "9:8"), "expected LEAST:MOST, 1 to 512 tokens, found '9:8'"),
        (("--work", "sts"), "--work: sts needs the file"),
        (("--peer", "openvino"), "expected NAME=PYTHON"),
        (("--peer", "openvino=/no/python"), "expected a Python to run openvino with, found '/no/python'"),
        (("--picture", "one.png"), "--picture: expected a name that ends in .svg, found 'one.png'"),
        (("--batch", "0"), "--batch: expected 1 or more, found 0"),
    ],
)
def test_what_there_is_none_of_is_refused(arguments, words, tmp_path):
    command = [sys.executable, "-P", "-m", "ortolan.benchmarks.embeddings", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 2
    assert words in result.stderr
