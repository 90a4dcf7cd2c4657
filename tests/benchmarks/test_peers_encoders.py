"""Comparison of text encoders: texts, the quality measure, and a whole run on a tiny model."""

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
from tokenizers import Tokenizer

from ortolan.benchmarks.encoder import FP32, INT8, Encoder, word_feeds
from ortolan.embedding import SentencePairs
from ortolan.models import tiny
from tools.peers import encoders
from tools.peers.comparison import Job, compare
from tools.peers.configuration import WORKERS, Configuration, Runner
from tools.peers.encoder_texts import (
    MIXED,
    SORTED,
    STS,
    EncoderJudge,
    batches_of,
    make_works,
    retrieval_of_pairs,
    write_batches,
)
from tools.peers.environments import REQUIREMENTS
from tools.peers.result import PeersResult
from tools.workers.process import WorkerError

from ..api.word_tokenizer import write_tokenizer

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
STS_LINE = "main\tforum\t2024\t1\t{score}\t{first}\t{second}\n"


def texts_of(*lengths: int):
    return [word_feeds(INPUTS, 1, tokens, seed) for seed, tokens in enumerate(lengths)]


@pytest.fixture
def encoder(tmp_path):
    ir.save(tiny.tiny_bert(hidden_size=64, intermediate_size=128, vocab_size=30001), tmp_path / "model.onnx")
    return Encoder(tmp_path / "model.onnx", write_tokenizer(tmp_path / "tokenizer.json"), INPUTS)


@pytest.fixture
def sts(tmp_path):
    path = tmp_path / "sts.csv"
    pairs = [("one", "three"), ("one", "two"), ("two", "two"), ("three", "three")]
    path.write_text(
        "".join(
            STS_LINE.format(score=i, first=one, second=two) for i, (one, two) in zip((0, 1, 5, 5), pairs, strict=True)
        )
    )
    return path


def job_of(folder, **arguments) -> Job:
    return Job((1,), 0.0, arguments.pop("pythons", {}), folder, lambda line: None, **arguments)


def test_batches_are_padded_to_their_longest_text():
    texts = texts_of(3, 5, 2)
    first, second = batches_of(texts, 2, in_order=False)
    assert first["input_ids"].shape == (2, 5) and second["input_ids"].shape == (1, 2)
    assert first["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    np.testing.assert_array_equal(first["input_ids"][0, :3], texts[0]["input_ids"][0])
    assert not first["input_ids"][0, 3:].any()


def test_batches_in_order_have_texts_of_like_length():
    assert [one["input_ids"].shape for one in batches_of(texts_of(9, 2, 8, 3), 2, in_order=True)] == [(2, 3), (2, 9)]


def test_works_are_shapes_and_texts_in_both_orders(encoder, sts, tmp_path):
    works = {work.name: work for work in make_works(job_of(tmp_path, sts=sts), encoder, tmp_path / "works")}
    assert list(works) == ["1x16", "1x128", "8x64", "1x256", "8x512", MIXED, MIXED + SORTED, STS, STS + SORTED]
    with np.load(works["8x64"].given["batches"]) as arrays:
        shapes = {arrays[name].shape for name in arrays.files}
        assert shapes == {(8, 64)} and works["8x64"].count == 8 * len(arrays.files) // 3
    sizes = []
    for name in (MIXED, MIXED + SORTED):
        with np.load(works[name].given["batches"]) as arrays:
            lengths = np.concatenate([arrays[f"mask_{i}"].sum(1) for i in range(2)])
            sizes.append(sum(arrays[f"ids_{i}"].size for i in range(2)))
        assert len(lengths) == works[name].count and lengths.min() >= 8 and lengths.max() <= 256
    assert sizes[1] < sizes[0]


def test_works_that_were_not_asked_for_are_not_made(encoder, tmp_path):
    job = job_of(tmp_path, works=("1x16", MIXED))
    assert [work.name for work in make_works(job, encoder, tmp_path, without=(MIXED,))] == ["1x16"]


class Answers:
    """An engine whose vectors are rotated by the sum of the text's ids plus `turn`."""

    def __init__(self, exact: bool, turn: float = 0.0) -> None:
        self.configuration = Configuration("made up", "none", None, exact=exact)
        self._turn = turn

    def answer(self, work):
        with np.load(work["batches"]) as arrays:
            sums = np.concatenate([arrays[f"ids_{i}"].sum(axis=1) for i in range(len(arrays.files) // 3)])
        angles = sums * 0.1 + self._turn
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def test_all_are_judged_by_the_first_one_which_is_exact(encoder, tmp_path):
    judge = EncoderJudge(job_of(tmp_path), encoder, tmp_path)
    with pytest.raises(WorkerError, match="reference vectors are missing"):
        judge(Answers(exact=False))
    assert judge(Answers(exact=True)) == {"cosine": pytest.approx(1)}
    assert judge(Answers(exact=False, turn=0.5)) == {"cosine": pytest.approx(np.cos(0.5))}
    with pytest.raises(WorkerError, match=r"vectors differ from fp32: cosine 0\.8776, expected 0\.9999"):
        judge(Answers(exact=True, turn=0.5))


def test_with_stsb_there_are_spearmans_correlation_and_the_retrieval_of_pairs(encoder, sts, tmp_path):
    def judged():
        return EncoderJudge(job_of(tmp_path, sts=sts), encoder, tmp_path)(Answers(exact=True))

    qualities = {"cosine": pytest.approx(1), "Spearman": pytest.approx(1)}
    assert judged() == qualities  # no pair to be found
    sts.write_text(sts.read_text() + STS_LINE.format(score=4, first="one one", second="one one one"))
    found = judged()
    assert found.keys() == {*qualities, "nDCG@10"} and 0 < found["nDCG@10"] <= 1


def test_the_retrieval_of_pairs():
    """Pairs below 4 are documents only; the query itself and repeated sentences are not found."""
    pairs = SentencePairs([5.0, 4.0, 1.0, 5.0], ["a", "c", "e", "a"], ["b", "d", "f", "a"])
    angles = {"a": 0.0, "b": 0.2, "c": 0.1, "d": 3.0, "e": 2.5, "f": 1.0}
    vectors = np.array([[np.cos(angles[one]), np.sin(angles[one])] for one in pairs.first + pairs.second])
    # Ranks of the other sentence: 2 for a and b (c is nearer), 5 for c, 4 for d.
    expected = (2 / np.log2(3) + 1 / np.log2(6) + 1 / np.log2(5)) / 4
    assert retrieval_of_pairs(pairs, vectors.astype(np.float32)) == pytest.approx(expected)


def test_vectors_come_back_in_the_order_of_the_texts(encoder, tmp_path):
    judge = EncoderJudge(job_of(tmp_path), encoder, tmp_path)
    texts = texts_of(9, 2, 8)
    expected = np.cos([one["input_ids"].sum() * 0.1 for one in texts])
    np.testing.assert_allclose(judge._answer(Answers(exact=True), texts)[:, 0], expected, atol=1e-6)


FORMS = {form.name: form for form in (*encoders.ONNX_RUNTIME, *encoders.OURS)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_a_form_in_onnx_runtime(encoder, tmp_path, name):
    source = encoders.Source("tiny", encoder, tmp_path)
    (configuration,) = encoders.configurations_of(job_of(tmp_path), source, [FORMS[name]])
    texts = texts_of(7, 3, 5)
    alone, batch = (
        {"batches": str(write_batches(batches, tmp_path / f"{len(batches)}.npz"))}
        for batches in (texts, batches_of(texts, 3, in_order=False))
    )
    with Runner(configuration, encoders.SCRIPT, tmp_path / "runner") as runner:
        row = runner.make("encoders", "tiny", 1)
        runner.open(1, alone)
        found = runner.answer(alone)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
        # ONNX Runtime's int8 uses one scale for all texts of a batch.
        np.testing.assert_allclose(runner.answer(batch), found, atol=1e-6 if name != INT8 else 0.1)
    assert row.versions["onnxruntime"] and row.megabytes > 0 and "intra_op_num_threads=1" in row.call


def test_peers_take_part_where_they_have_an_interpreter(encoder, tmp_path):
    engines = {form.engine for form in encoders.OTHERS}
    assert engines <= REQUIREMENTS.keys()
    source = encoders.Source("tiny", encoder, tmp_path)
    forms = encoders.configurations_of(job_of(tmp_path, pythons={"fastembed": "python"}), source, encoders.OTHERS)
    assert [(form.name, form.python, form.ours) for form in forms] == [("fastembed", "python", False)]


@pytest.fixture
def folder(encoder, tmp_path):
    """Return a transformers folder with an ONNX file."""
    made = tmp_path / "both"
    made.mkdir()
    (made / "model.onnx").write_bytes(encoder.onnx.read_bytes())
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "config.json").write_text("{}")
    return made


@pytest.fixture
def script(monkeypatch):
    """Return the worker script."""
    monkeypatch.syspath_prepend(str(WORKERS))
    names = ("encoders", "engine")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("encoders")
    for name in names:
        sys.modules.pop(name, None)


def vectors_of(texts, folder):
    """Return what a fake engine computes for texts: the ids that the folder's tokenizer returns."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [np.array(sorted(tokenizer.encode(text).ids)[-2:], np.float32) for text in texts]


class FakeInfinity:
    """infinity's engine, which reads the folder that the process is in."""

    @classmethod
    def from_args(cls, settings):
        found = cls()
        found.settings, found.folder = settings, Path.cwd()
        return found

    async def astart(self):
        self.started = True

    async def embed(self, sentences):
        assert self.started and len(sentences) <= self.settings.batch_size
        return vectors_of(sentences, self.folder), 0


def given_to(script, engine, tmp_path):
    """Return the vectors of a batch of texts of 3 and 5 tokens, and the ids that they are made of."""
    texts = texts_of(3, 5)
    path = str(write_batches(batches_of(texts, 2, in_order=False), tmp_path / "texts.npz"))
    (part,) = engine.prepare({"batches": path})
    expected = [sorted(one["input_ids"][0])[-2:] for one in texts]
    ((ids, mask, types),) = (list(np.load(path).values()),)
    with pytest.raises(ValueError, match=f"{engine.packages[0]} supports only token type 0"):
        engine.part(script.Batch(ids, mask, np.ones_like(types)))
    return engine.run(part), expected


@pytest.mark.parametrize("engine", ["torch", "optimum"])
def test_infinity_reads_a_folder_and_takes_ids_as_words(script, folder, tmp_path, monkeypatch, engine):
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "made"
    made.mkdir()
    api = SimpleNamespace(EngineArgs=SimpleNamespace, AsyncEmbeddingEngine=FakeInfinity)
    threads = []
    monkeypatch.setitem(sys.modules, "infinity_emb", api)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=threads.append))
    described = script.Infinity.make(folder, made, 2, engine=engine, dtype="float32")
    assert described.megabytes > 0 and f"engine='{engine}'" in described.call
    encoder = script.Infinity(2, **described.opened)
    found, expected = given_to(script, encoder, tmp_path)
    np.testing.assert_array_equal(found, expected)
    assert threads == [2] and encoder._engine.settings.engine == engine
    models = {"torch": "model.safetensors", "optimum": "model.onnx"}
    assert {path.name for path in made.iterdir()} >= {"config.json", models[engine]}


@pytest.mark.parametrize("engine", ["candle", "onnx"])
def test_embed_anything_finds_the_folder_as_a_cache_of_the_hub(script, folder, tmp_path, monkeypatch, engine):
    made, opened = tmp_path / "made", []
    made.mkdir()

    def files(model_id):
        repository = made / "hub" / f"models--{model_id.replace('/', '--')}"
        return repository / "snapshots" / (repository / "refs" / "main").read_text()

    def from_hf(model_id, pooling):
        assert pooling == "mean" and (files(model_id) / "model.safetensors").is_file()
        return files(model_id)

    def from_onnx(kind, hf_model_id, path_in_repo):
        assert kind == "bert" and (files(hf_model_id) / path_in_repo).is_file()
        return files(hf_model_id)

    def embed(texts, embedder, config):
        opened.append(config.batch_size)
        return [SimpleNamespace(embedding=vector.tolist()) for vector in vectors_of(texts, embedder)]

    api = SimpleNamespace(
        EmbeddingModel=SimpleNamespace(from_pretrained_hf=from_hf, from_pretrained_onnx=from_onnx),
        Pooling=SimpleNamespace(Mean="mean"),
        WhichModel=SimpleNamespace(Bert="bert"),
        TextEmbedConfig=SimpleNamespace,
        embed_query=embed,
    )
    monkeypatch.setitem(sys.modules, "embed_anything", api)
    monkeypatch.setattr("os.environ", dict(os.environ))
    described = script.EmbedAnything.make(folder, made, 2, engine=engine)
    encoder = script.EmbedAnything(2, **described.opened)
    assert os.environ["HF_HOME"] == str(made) and os.environ["RAYON_NUM_THREADS"] == "2"
    found, expected = given_to(script, encoder, tmp_path)
    np.testing.assert_array_equal(found, expected)
    assert opened == [2] and described.megabytes > 0
    assert json.loads((files("local/model") / "config.json").read_text()) == {}


def test_a_folder_has_the_onnx_file_too(encoder, tmp_path, monkeypatch):
    def write_checkpoint(model, folder):
        folder.mkdir()
        return folder

    monkeypatch.setattr(encoders, "write_checkpoint", write_checkpoint)
    folder = encoders.Source("tiny", encoder, tmp_path).path(encoders.BOTH)
    assert (folder / "model.onnx").read_bytes() == encoder.onnx.read_bytes()


@pytest.mark.slow
def test_the_whole_of_it(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "open_model", lambda name, folder: encoder)
    monkeypatch.setattr(encoders, "write_checkpoint", lambda model, folder: tmp_path)
    monkeypatch.setattr(encoders, "OURS", encoders.OURS[:1])
    monkeypatch.setattr("tools.peers.configuration._WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(encoders, "compare", partial(compare, openings=1))
    # A runtime is left out only if its environment lacks the package.
    pythons = {"openvino": sys.executable, "ctranslate2": sys.executable}
    job = job_of(tmp_path / "job", pythons=pythons, models=(encoders.PUBLISHED[0],), works=("1x16",))
    result = PeersResult("command", "2026-11-25")
    encoders.measure(job, result)
    names = [FP32, INT8, *(form.name for form in encoders.OURS)]
    assert [row.name for row in result.rows] == names
    for row in result.rows:
        assert row.quality["cosine"] > 0.8 and row.speed("1x16", 1).best > 0 and row.load_seconds > 0
    assert "encoders, all-minilm-l6-v2: CTranslate2 int8: No module named 'ctranslate2'" in result.left_out
    assert len(result.left_out) == sum(form.engine in pythons for form in encoders.OTHERS)
