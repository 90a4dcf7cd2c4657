"""Workers: the protocol, with a peer that is made up, and text encoders in ONNX Runtime."""

import numpy as np
import onnx_ir as ir
import pytest

from ortolan.benchmarks.embedding_texts import batches_of
from ortolan.benchmarks.embeddings import interleave
from ortolan.benchmarks.encoder import word_feeds
from ortolan.benchmarks.encoder_process import EncoderProcess, EncoderSpec
from ortolan.benchmarks.workers.process import Worker, WorkerError, cpus_to_use
from ortolan.models import tiny

from ..api.word_tokenizer import write_tokenizer

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# It prints where answers go, fails and ends when it is asked to.
FAKE = """
import os
import sys

import numpy as np


class Worker:
    def __init__(self, threads):
        names = ("load", "give", "time", "vectors", "pinned", "end")
        self.threads, self.actions = threads, {name: getattr(self, name) for name in names}

    def load(self, engine, model, folder, **options):
        print("loading", model)
        os.write(1, b"and more")
        if engine == "none":
            raise ImportError("No module\\nnamed none")
        return {"versions": {engine: "1.0"}, "call": f"threads {self.threads}, {options}", "megabytes": 2.5}

    def give(self, batches):
        with np.load(batches) as arrays:
            count = sum(name.startswith("ids_") for name in arrays.files)
            self.batches = [(arrays[f"ids_{i}"], arrays[f"mask_{i}"], arrays[f"types_{i}"]) for i in range(count)]
        return {"batches": count}

    def time(self, passes, warm_up):
        return {"seconds": [0.5] * passes}

    def vectors(self, answer):
        sums = [(ids * mask).sum(1) + types.sum(1) for ids, mask, types in self.batches]
        np.save(answer, np.concatenate(sums)[:, None].astype(np.float32))
        return {}

    def pinned(self):
        return {"cpus": sorted(os.sched_getaffinity(0)), "omp": os.environ["OMP_NUM_THREADS"]}

    def end(self):
        print("out of luck", file=sys.stderr)
        os._exit(3)
"""


@pytest.fixture
def fake(tmp_path):
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    spec = EncoderSpec("made-up", tmp_path / "model.onnx", {"precision": "f32"})
    with EncoderProcess(spec, 1, tmp_path / "folder", script) as process:
        yield process


def test_a_peer_is_loaded_given_texts_and_timed(fake):
    fake.load()
    assert fake.versions == {"made-up": "1.0"} and fake.megabytes == 2.5
    assert fake.call == "threads 1, {'precision': 'f32'}"
    texts = [word_feeds(INPUTS, 1, tokens, tokens) for tokens in (3, 5, 2)]
    found = fake.vectors(batches_of(texts, 2, in_order=False))
    np.testing.assert_array_equal(found[:, 0], [one["input_ids"].sum() for one in texts])
    assert fake.time(3, 0.0) == [0.5, 0.5, 0.5]
    assert interleave({"one": fake, "two": fake}, 0.0) == {"one": [0.5] * 3, "two": [0.5] * 3}


def test_texts_without_token_types_have_zeros(fake):
    fake.load()
    texts = [word_feeds(INPUTS[:2], 1, 4)]
    assert fake.vectors(texts)[0, 0] == texts[0]["input_ids"].sum()


def test_a_peer_is_pinned(fake):
    assert fake.ask("pinned") == {"cpus": cpus_to_use(1), "omp": "1"}


def test_what_is_not_known_or_fails_is_told_and_the_process_goes_on(fake):
    with pytest.raises(WorkerError, match="cannot do 'fly'; these are known: load, give"):
        fake.ask("fly")
    with pytest.raises(WorkerError, match="unexpected keyword argument"):
        fake.ask("give", nothing=1)
    with pytest.raises(WorkerError, match=r"^No module named none$"):
        fake.ask("load", engine="none", model="", folder="")
    assert fake.ask("time", passes=1, warm_up=0) == {"seconds": [0.5]}


def test_a_process_that_ends_says_why(fake):
    with pytest.raises(WorkerError, match="the process ended with status 3: out of luck"):
        fake.ask("end")
    found = interleave({"gone": fake}, 0.0)  # started again
    assert found == {"gone": [0.5] * 3}


def test_an_interpreter_that_is_none(tmp_path):
    worker = Worker(tmp_path / "none.py", {}, python=str(tmp_path / "python"))
    with pytest.raises(WorkerError, match=r"cannot start .*python: No such file"):
        worker.ask("load")


def test_a_script_that_is_none(tmp_path):
    with (
        Worker(tmp_path / "none.py", {}) as worker,
        pytest.raises(WorkerError, match=r"ended with status 1: .*none\.py"),
    ):
        worker.ask("load")


@pytest.mark.parametrize(
    ("engine", "options"), [("onnxruntime", {}), ("ortolan", {}), ("ortolan", {"batch_tokens": 8})]
)
def test_an_encoder_in_onnx_runtime(tmp_path, engine, options):
    if engine == "ortolan":
        options = {**options, "tokenizer": str(write_tokenizer(tmp_path / "tokenizer.json"))}
    ir.save(tiny.tiny_bert(hidden_size=64, vocab_size=30001), tmp_path / "model.onnx")
    texts = [word_feeds(INPUTS, 1, tokens, tokens) for tokens in (7, 3, 5)]
    with EncoderProcess(EncoderSpec(engine, tmp_path / "model.onnx", options), 1, tmp_path / "folder") as process:
        with pytest.raises(WorkerError, match="load a model first"):
            process.give(texts)
        process.load()
        alone = process.vectors(texts)
        np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(process.vectors(batches_of(texts, 3, in_order=False)), alone, atol=1e-6)
        (seconds,) = process.time(1, 0.0)
        assert seconds > 0 and process.versions["onnxruntime"]


def test_an_engine_that_is_none(tmp_path):
    known = "no engine 'none'; these are known: onnxruntime, ortolan, openvino"
    process = EncoderProcess(EncoderSpec("none", tmp_path), 1, tmp_path / "folder")
    with process, pytest.raises(WorkerError, match=known):
        process.load()
