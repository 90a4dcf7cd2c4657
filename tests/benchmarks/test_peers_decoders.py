"""Comparison of decoders: the ONNX Runtime engine on a tiny model, workloads and source files."""

import importlib.util
import math
import struct

import numpy as np
import onnx_ir as ir
import pytest

from ortolan.benchmarks.int8_cache import write_int8_cache
from ortolan.errors import OrtolanError
from ortolan.generate import Decoder
from ortolan.last_logits import keep_last_logits
from ortolan.models import tiny
from ortolan.models.gguf import read_gguf, read_gguf_tokenizer
from ortolan.models.llama_config import LlamaConfig, llama_weight_shapes
from ortolan.models.perplexity import score_tokens
from ortolan.session import create_session
from tools.peers import decoder_source, decoders
from tools.peers.comparison import Job
from tools.peers.configuration import Configuration, Runner, interleave
from tools.workers.process import WorkerError

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
IDS = np.random.default_rng(0).integers(3, tiny.TINY_LLAMA.vocab_size, 100).tolist()
NBITS = {"block_size": 32, "accuracy_level": 4, "bits": 8}
WINDOW = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model.onnx"
    ir.save(tiny.tiny_llama(attention="gqa", **SIZES), path)
    keep_last_logits(path, path.with_name("last.onnx"))
    return path


@pytest.fixture
def source(model):
    windows = decoders.windows_of(IDS, WINDOW)
    last = model.with_name("last.onnx")
    return decoders.Source("tiny", model.with_suffix(".gguf"), model, last, 2048, windows, None, None)


FORMS = {
    "fp32": ("onnxruntime", {}),
    "8 bits": ("onnxruntime", {"nbits": NBITS}),
    "8 bits, int8 cache": ("onnxruntime", {"nbits": NBITS, "cache_ids": IDS}),
    "ours": ("ortolan", {"weights": "int8"}),
}


@pytest.fixture(params=FORMS)
def runner(request, model, tmp_path):
    engine, options = FORMS[request.param]
    exact = request.param == "fp32"
    given = model if exact else model.with_name("last.onnx")
    configuration = Configuration(request.param, engine, given, options, exact=exact)
    with Runner(configuration, "decoders.py", tmp_path / "made") as found:
        yield found


def test_what_is_timed_is_judged(runner, source, model):
    row = runner.make("decoders", "tiny", 1)
    assert row.megabytes > 0.01 and row.versions["onnxruntime"] and row.call
    seconds, _ = runner.open(1, {"kind": "prompt", "ids": IDS[:8]})
    assert seconds > 0
    found = decoders.judge_for(source)(runner)["perplexity"]
    exact = score_tokens(create_session(model), IDS, WINDOW, WINDOW - 1).perplexity
    assert found == pytest.approx(exact, rel=1e-4 if runner.configuration.exact else 0.05)
    assert runner.configuration.exact or found != pytest.approx(exact, rel=1e-7)
    step = None if runner.configuration.exact else 1
    again = score_tokens(create_session(runner._opened["model"]), IDS, WINDOW, WINDOW - 1, step)
    assert found == pytest.approx(again.perplexity, rel=1e-5)


def test_decoding_is_greedy_and_begins_anew(runner):
    runner.make("decoders", "tiny", 1)
    runner.open(1, {"kind": "prompt", "ids": IDS[:8]})
    decoder = Decoder(create_session(runner._opened["model"]))
    logits = decoder.step(IDS[:8])[-1]
    np.testing.assert_allclose(runner.answer({"kind": "prompt", "ids": IDS[:8]})[0], logits, atol=1e-4)
    for _ in range(6):
        token = int(logits.argmax())
        logits = decoder.step([token])[-1]
    work = {"kind": "decode", "ids": IDS[:8], "steps": 6}
    for _ in range(2):
        assert runner.answer(work).tolist() == [[logits.argmax()]]
    (speed,) = interleave({"one": runner}, "decode", 1, 6, "tokens/s", 0.0).values()
    assert speed.best >= speed.median > 0


def test_a_step_behind_a_cache_of_any_content(runner):
    runner.make("decoders", "tiny", 1)
    runner.open(1, {"kind": "prompt", "ids": IDS[:8]})
    work = {"kind": "step", "context": 1100, "steps": 3}  # the filled block is repeated more than twice
    assert runner.answer(work).tolist() == runner.answer(work).tolist()
    with pytest.raises(WorkerError, match="the model has 2048 positions, expected at least 2051"):
        runner.give({**work, "context": 2048})


@pytest.mark.parametrize(
    ("engine", "module", "options"),
    [
        ("llama.cpp", "llama_cpp", {"form": "Q4_0"}),
        ("ik_llama.cpp", "ik_llama_cpp", {"repacked": True}),
        ("onnxruntime-genai", "onnxruntime_genai", {"how": "by hand"}),
        ("torch", "torch", {"form": "fp32"}),
        ("ctranslate2", "ctranslate2", {"form": "int8"}),
        ("mistralrs", "mistralrs", {"how": "by hand"}),
        ("openvino-genai", "openvino", {}),
    ],
)
def test_a_missing_package_is_told(model, tmp_path, engine, module, options):
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    path = model if engine == "mistralrs" else model.parent
    configuration = Configuration("missing", engine, path, options)
    told = pytest.raises(WorkerError, match=f"No module named '{module}'")
    with Runner(configuration, "decoders.py", tmp_path / "made") as runner, told:
        runner.make("decoders", "tiny", 1)
        runner.open(1, {"kind": "prompt", "ids": IDS})


def test_what_cannot_be_done_is_told(model, tmp_path):
    unknown = Configuration("unknown", "onnxruntime", model, {"cache_ids": IDS})
    told = pytest.raises(WorkerError, match="needs `nbits`")
    with Runner(unknown, "decoders.py", tmp_path / "a") as runner, told:
        runner.make("decoders", "tiny", 1)
    with Runner(Configuration("fp32", "onnxruntime", model), "decoders.py", tmp_path / "b") as runner:
        runner.make("decoders", "tiny", 1)
        with pytest.raises(WorkerError, match="unknown work 'fly'; expected prompt, decode, step or score"):
            runner.open(1, {"kind": "fly"})


def test_an_exact_form_with_other_answers_is_refused(source):
    class Fake:
        def __init__(self, total, exact):
            self.configuration, self.total = Configuration("fake", "onnxruntime", source.onnx, exact=exact), total

        def answer(self, work):
            assert work == {"kind": "score", "windows": source.windows}
            return np.array([[self.total, 2], [1, 2]], np.float32)

    judge = decoders.judge_for(source)
    assert judge(Fake(3, True)) == {"perplexity": pytest.approx(math.e)}
    assert judge(Fake(5, False)) == {"perplexity": pytest.approx(math.exp(1.5))}
    with pytest.raises(WorkerError, match=r"perplexity is 2\.7456, expected the original's 2\.7183"):
        judge(Fake(3.04, True))


def test_the_perplexity_of_a_file_is_told_by_llama_cpp(source):
    class Fake:
        def __init__(self, name, engine):
            self.configuration = Configuration(name, engine, source.gguf)

        def answer(self, work):
            return np.array([[2, 2]], np.float32)

    judge = decoders.judge_for(source)
    with pytest.raises(WorkerError, match=r"llama\.cpp did not measure Q8_0"):
        judge(Fake("mistral.rs Q8_0", "mistralrs"))
    judge(Fake("llama.cpp Q8_0", "llama.cpp"))
    assert judge(Fake("mistral.rs Q8_0", "mistralrs")) == {"perplexity": pytest.approx(math.e)}


def test_the_perplexity_of_ik_llama_cpp_is_that_of_llama_cpp_with_the_same_file(source):
    class Fake:
        def __init__(self, name, engine, total, **options):
            self.configuration, self.total = Configuration(name, engine, source.gguf, options), total

        def answer(self, work):
            return np.array([[self.total, 2]], np.float32)

    judge = decoders.judge_for(source)
    forked = "ik_llama.cpp"
    assert judge(Fake("ik_llama.cpp Q8_0", forked, 3.0)) == {"perplexity": pytest.approx(math.exp(1.5))}
    judge(Fake("llama.cpp Q8_0", "llama.cpp", 2.0))
    judge(Fake("llama.cpp Q8_0, Q8_0 cache", "llama.cpp", 3.0, cache="Q8_0"))
    judge(Fake("ik_llama.cpp Q8_0, repacked", forked, 2.01))
    judge(Fake("ik_llama.cpp Q8_0, Q8_0 cache, repacked", forked, 2.1, cache="Q8_0"))
    judge(Fake("ik_llama.cpp Q6_0", forked, 2.1))
    for total in (1.97, 2.03):
        with pytest.raises(WorkerError, match=r"expected llama\.cpp's 2\.7183 with the same file"):
            judge(Fake("ik_llama.cpp Q8_0, repacked", forked, total))


def test_ik_llama_cpp_runs_llama_cpps_files_and_its_own_formats(source, tmp_path, monkeypatch):
    def files(job, gguf, forms, prefix):
        for form in forms:
            yield form, {"opened": {"model": f"{prefix}{form}.gguf"}, "call": f"to {form}; llama_decode"}

    job = Job((1,), 1.0, {"ik_llama.cpp": "python"}, tmp_path, print)
    with pytest.raises(WorkerError, match=r"llama\.cpp, which makes its files, does not take part"):
        list(decoders._ik_llama_cpp(job, source))
    assert not list(decoders._ik_llama_cpp(Job((1,), 1.0, {}, tmp_path, print), source))
    monkeypatch.setattr(decoders, "files_of_llama_cpp", files)
    found = {one.name: one for one in decoders._ik_llama_cpp(job, source)}
    assert list(found)[:2] == ["ik_llama.cpp Q6_0", "ik_llama.cpp Q6_0, repacked"] and len(found) == 2 * (2 + 4)
    assert found["ik_llama.cpp Q6_0"].options == {"form": "Q6_0", "repacked": False}
    assert found["ik_llama.cpp Q8_0, repacked"].options == {"how": "to Q8_0", "repacked": True}
    assert found["ik_llama.cpp Q8_0"].model.name == "ik Q8_0.gguf"
    long = decoders.Source(**{**vars(source), "model": decoders.SMOLLM2, "context": 20000})
    found = {one.name: one for one in decoders._ik_llama_cpp(job, long)}
    assert found["ik_llama.cpp Q4_1"].model == source.gguf and len(found) == 2 * (2 + 4 + 2)
    cached = found["ik_llama.cpp Q4_0, Q8_0 cache, repacked"]
    assert cached.options == {"how": "to Q4_0", "cache": "Q8_0", "repacked": True}


def test_each_token_is_scored_once(source):
    scored = [token for window in source.windows for token in window[1:]]
    assert scored == IDS[1:]
    assert all(before[-1] == after[0] for before, after in zip(source.windows, source.windows[1:], strict=False))


def test_work_is_what_fits(source, tmp_path):
    def names(context):
        return [work.name for work in decoders.works_for(decoders.Source(**{**vars(source), "context": context}))]

    assert names(256) == ["prompt 128", "decode"]
    assert names(8192) == ["prompt 128", "prompt 1024", "decode"]
    steps = ["step at 1024", "step at 4096", "step at 16384"]
    assert names(20000) == ["prompt 128", "prompt 1024", "decode", *steps]
    job = Job((1,), 1.0, {"mistralrs": "python"}, tmp_path, print)
    with pytest.raises(WorkerError, match=r"llama\.cpp, which makes its files, does not take part"):
        list(decoders._mistralrs(job, source))
    engines = {one.name: one.engine for one in decoders.configurations_for(job, source)}
    assert set(engines.values()) == {"onnxruntime", "ortolan"} and next(iter(engines)) == "ORT fp32"


def test_an_int8_cache_is_near_to_floats(model, tmp_path):
    path = tmp_path / "int8.onnx"
    path.write_bytes(model.read_bytes())
    write_int8_cache(path, IDS)
    exact, rounded = (Decoder(create_session(one), 64) for one in (model, path))
    assert all(array.dtype == np.int8 for array in rounded.cache().values())
    for begin, end in ((0, 40), (40, 41), (41, 64)):
        expected, found = exact.step(IDS[begin:end]), rounded.step(IDS[begin:end])
        assert 0 < np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    ir.save(tiny.tiny_llama(**SIZES), path)
    with pytest.raises(OrtolanError, match="has no GroupQueryAttention"):
        write_int8_cache(path, IDS)


def test_a_model_of_llama2c_as_gguf(tmp_path, monkeypatch):
    config = LlamaConfig(**{**vars(tiny.TINY_LLAMA), **SIZES, "vocab_size": 300, "rope_style": "interleaved"})
    weights = tiny.random_weights(llama_weight_shapes(config))
    monkeypatch.setattr(decoder_source, "read_llama2c", lambda path: (config, weights))
    monkeypatch.setattr(decoder_source, "fetch", lambda name: tmp_path / "fetched")
    (tmp_path / "fetched").mkdir()
    pieces = [b"<unk>", b"<s>", b"</s>", *(b"?" for _ in range(256)), *(f" w{i}".encode() for i in range(41))]
    records = [struct.pack("<fi", -float(i), len(piece)) + piece for i, piece in enumerate(pieces)]
    (tmp_path / "fetched" / "tokenizer.bin").write_bytes(struct.pack("<i", 5) + b"".join(records))
    (tmp_path / "fetched" / "model.bin").touch()
    path = decoder_source.write_gguf("tiny", tmp_path, 4000)
    found, read = read_gguf(path)
    assert vars(found) == {**vars(config), "max_position_embeddings": 4000}
    assert read.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(read[name], weight)
    tokenizer = read_gguf_tokenizer(path)
    tokens = {1: "<s>", 3 + 0x41: "<0x41>", 3 + 256 + 7: "\u2581w7"}
    assert {index: tokenizer.id_to_token(index) for index in tokens} == tokens
    (tmp_path / "fetched" / "tokenizer.bin").unlink()
    (tmp_path / "fetched" / "model.bin").unlink()
    with pytest.raises(OrtolanError, match=r"neither as a GGUF file nor as a llama2\.c model"):
        decoder_source.write_gguf("tiny", tmp_path, 0)
