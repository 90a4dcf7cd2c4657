"""Comparison of decoders that serve requests: engines on a tiny model, speeds from times, and the measured rows."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import json
import sys
import zlib
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from ortolan import import_gguf
from ortolan.models.perplexity import score_tokens
from ortolan.session import create_session
from tools.peers import page, serving, serving_table, sizes
from tools.peers.comparison import Job
from tools.peers.configuration import WORKERS, Configuration, Runner
from tools.peers.result import PeersResult, Row, Speed
from tools.peers.serving_times import MIXED, ONE_BY_ONE, Run, percentile
from tools.peers.verdict import SERVING, verdicts
from tools.workers.process import WorkerError

from ..models.gguf_file import CONFIGS, TOKENS, write

IDS = np.random.default_rng(0).integers(0, len(TOKENS), 200).tolist()
WINDOW = 16
APART = "apart"
REQUESTS = {"kind": "serve", "prompts": [IDS[:20], IDS[20:25], IDS[30:70]], "answer": 6}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    write(path, CONFIGS["llama"], architecture="llama", table="Q8_0")
    return path


@pytest.fixture
def source(gguf):
    windows = [IDS[begin : begin + WINDOW] for begin in range(0, len(IDS) - 1, WINDOW - 1)]
    return serving.Source("tiny", gguf, windows)


@pytest.fixture
def script(monkeypatch):
    """Return the worker script."""
    monkeypatch.syspath_prepend(str(WORKERS))
    names = ("decoder_engine", "decoders", "engine", "llama_cpp_decoder", "openvino_decoder", "serving")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("serving")
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(params=[("ortolan", "bfloat16"), ("ortolan", "int8"), ("ortolan-decoder", None)])
def runner(request, gguf, tmp_path):
    engine, cache_type = request.param
    options = {} if cache_type is None else {"cache_type": cache_type}
    configuration = Configuration("ours", engine, gguf, options, ours=True)
    with Runner(configuration, "serving.py", tmp_path / "made") as found:
        found.make(SERVING, "tiny", 1)
        found.open(1, {"kind": "score", "windows": [IDS[:8]]})
        yield found


def test_engines_score_a_text_like_the_imported_model(runner, source, gguf, tmp_path):
    import_gguf(gguf, tmp_path / "folder")
    session = create_session(tmp_path / "folder" / "model.onnx")
    expected = score_tokens(session, IDS, WINDOW, WINDOW - 1).perplexity
    # The engine's caches are bf16 or int8.
    assert serving.judge_for(source)(runner)["perplexity"] == pytest.approx(expected, rel=0.01)


def test_each_request_gets_all_its_tokens(runner):
    runner.give(REQUESTS)
    for _ in range(2):
        reply = runner.serve()
        times = np.array(reply["times"])
        assert times.shape == (3, 6) and (times > 0).all() and (np.diff(times) >= 0).all()
        assert reply["peak_megabytes"] is None or reply["peak_megabytes"] > 1
        if runner.configuration.engine == "ortolan":
            assert reply["order"] == MIXED
        else:
            assert reply["order"] == ONE_BY_ONE
            assert all(before[-1] <= after[0] for before, after in itertools.pairwise(times))


def test_requests_start_when_they_come(runner):
    arrivals = [0.0, 0.1, 0.4]
    runner.give({**REQUESTS, "arrivals": arrivals})
    times = runner.serve()["times"]
    assert all(one[0] >= coming for one, coming in zip(times, arrivals, strict=True))


@pytest.mark.parametrize("lookup", [False, True])
def test_the_engine_looks_up_drafts_if_asked(script, gguf, tmp_path, lookup):
    made = script.OrtolanEngine.make(gguf, tmp_path, 1, cache_type="bfloat16")
    engine = script.OrtolanEngine(1, **made.opened)
    prompt = (IDS[:6] * 4)[:20]  # repeats itself, so that there are drafts
    (given,) = engine.prepare({"kind": "serve", "prompts": [prompt] * 2, "answer": 40, "lookup": lookup})
    engine.forget()
    assert [len(times) for times in engine.serve(given).times] == [40, 40]
    assert (engine._engine.stats().drafted_tokens > 0) == lookup
    engine._close()


def test_requests_share_a_prefix_only_in_the_engine(runner):
    work = {"kind": "prefix", "prefix": IDS[:64], "tails": [IDS[i : i + 8] for i in (80, 90, 100)], "answer": 40}
    if runner.configuration.engine != "ortolan":
        with pytest.raises(WorkerError, match="requests do not find the prefixes of earlier requests"):
            runner.give(work)
        return
    runner.give(work)
    for _ in range(2):  # the cache is empty at the beginning of each
        reply = runner.serve()
        assert reply["cold"] > 0 and reply["warm"] > 0
        assert reply["block_tokens"] == 16 and 0 < reply["blocks"] <= serving.own_blocks(work, 16)


def test_own_blocks_count_the_prefix_once():
    work = {"prefix": IDS[:70], "tails": [IDS[:10], IDS[:20]], "answer": 16}
    # 96 and 106 tokens are 6 and 7 blocks, 4 of them shared.
    assert serving.own_blocks(work, 16) == 4 + 2 + 3


def test_speeds_follow_from_times():
    run = Run([10, 30], [0.0, 0.0], [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]], APART)
    assert run.whole_speed() == 8 / 5 and run.prompt_speed() == 40 / 2
    assert run.decode_speed() is None  # 2 tokens of the first sequence are too few
    assert run.to_first_token() == [1, 2] and run.between_tokens() == [1] * 6


def test_decoding_is_timed_while_all_sequences_decode():
    first, second = np.arange(1.0, 21.0), np.arange(5.0, 25.0)
    run = Run([1, 1], [0.0, 0.0], [first.tolist(), second.tolist()], MIXED)
    assert run.decode_speed() == pytest.approx(2.0)


def test_one_by_one_does_not_count_the_time_without_requests():
    run = Run([4, 4], [0.0, 10.0], [[2.0, 3.0, 4.0], [11.0, 12.0, 13.0]], ONE_BY_ONE)
    assert run.prompt_speed() == 8 / (2 + 1)
    assert run.decode_speed() == 4 / (2 + 2)
    assert run.to_first_token() == [2, 1]


def test_a_percentile_is_one_of_the_values():
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 50), percentile(values, 99), percentile([3.0], 99)) == (50, 99, 3)


def test_each_type_of_the_cache_is_a_configuration(source, tmp_path):
    job = Job((1,), 0.0, {}, tmp_path, print, cache_types=("bfloat16", "int8"))
    found = {one.name: one.options.get("cache_type") for one in serving.configurations_for(job, source)}
    assert found == {"Ortolan, engine": "bfloat16", "Ortolan, engine, int8 cache": "int8", "Ortolan, one by one": None}


def test_ik_llama_cpp_runs_a_file_with_and_without_repacking(source, tmp_path):
    job = Job((1,), 0.0, {"ik_llama.cpp": "python"}, tmp_path, print)
    found = [one for one in serving.configurations_for(job, source) if one.engine == "ik_llama.cpp"]
    assert {one.name: one.options for one in found} == {
        "ik_llama.cpp, as it is": {"repacked": False},
        "ik_llama.cpp, as it is, repacked": {"repacked": True},
        "ik_llama.cpp, Q8_0": {"repacked": False, "form": "Q8_0"},
        "ik_llama.cpp, Q8_0, repacked": {"repacked": True, "form": "Q8_0"},
    }
    of_sizes = [one.name for one in sizes.configurations_for(job, source.gguf)]
    assert of_sizes == ["Ortolan, engine", *(one.name for one in found[:2])]


def test_requests_are_seeded():
    work = serving.requests_work(IDS, 16)
    lengths = [len(prompt) for prompt in work["prompts"]]
    assert work == serving.requests_work(IDS, 16) and work != serving.requests_work(IDS, 16, seed=1)
    assert 100 <= min(lengths) < max(lengths) <= 400 and work["answer"] == 100
    arrivals = serving.arrivals_work(IDS, 2000, 4.0)["arrivals"]
    assert arrivals == sorted(arrivals) and arrivals[-1] == pytest.approx(2000 / 4, rel=0.1)
    prefix = serving.prefix_work(IDS, 0)
    assert len(prefix["prefix"]) == 1000 and len(prefix["tails"]) == 16
    assert prefix["prefix"] != serving.prefix_work(IDS, 1)["prefix"]


class Fake:
    """A configuration that takes `seconds` for each token of all sequences together, in an order."""

    def __init__(self, order, seconds=0.01, arrivals=True, prefix=True, fails=False):
        self.order, self.seconds, self.fails = order, seconds, fails
        self.refused = {name for name, takes in (("arrivals", arrivals), ("prefix", prefix)) if not takes}
        self.given, self.closed = [], False

    def give(self, work):
        if self.refused & work.keys():
            raise WorkerError("not here")
        self.given.append(work)

    def serve(self):
        work = self.given[-1]
        if self.fails:
            raise WorkerError("broken")
        if work["kind"] == "prefix":
            return {"cold": 1.0, "warm": 0.1, "blocks": 166, "block_tokens": 16}
        count, coming = len(work["prompts"]), work.get("arrivals") or [0.0] * len(work["prompts"])
        times = [(come + self.seconds * (1 + np.arange(work["answer"]))).tolist() for come in coming]
        assert len(times) == count
        return {"times": times, "order": self.order, "peak_megabytes": 50.0 + count}

    def close(self):
        self.closed = True


def measured(source, tmp_path, fakes, **job):
    """Return the rows by name, and the reasons for missing works. The first word of a name is the row's engine."""
    quality = {"perplexity": 20.0}
    rows = {
        name: Row(SERVING, "tiny", name, name.split()[0], name.startswith("our"), "call()", {}, 1.0, quality=quality)
        for name in fakes
    }
    left_out = []
    serving.Serving(
        Job((1,), 0.0, {}, tmp_path, print, **job),
        source,
        {name: (None, row) for name, row in rows.items()},
        fakes,
        1,
        lambda name, error: left_out.append(f"{name}: {error}"),
    ).measure()
    assert all(fake.closed for fake in fakes.values())
    return rows, left_out


def test_rows_get_speeds_and_measures(source, tmp_path):
    fakes = {"ours": Fake(MIXED), "peer": Fake(APART, 0.02, arrivals=False, prefix=False)}
    rows, left_out = measured(source, tmp_path, fakes, requests=(1, 4), arrivals=5)
    assert left_out == [
        "peer, arrivals at 80%, 1 threads: not here",
        "peer, prefix of 1000, 1 threads: not here",
    ]
    ours, peer = rows.values()
    assert ours.speed("4 requests, whole", 1).best == pytest.approx(400)
    assert peer.speed("4 requests, whole", 1).best == pytest.approx(200)
    assert ours.speed("4 requests, decoding", 1).best == pytest.approx(400)
    # Prompts are timed with answers of one token if the engine mixes them with steps.
    assert [work["answer"] for work in fakes["ours"].given[:4]] == [100, 1, 100, 1]
    assert {work["answer"] for work in fakes["peer"].given} == {100}
    first = ours.measure("4 requests", 1, "to first token, p99")
    assert (first.unit, first.value) == ("ms", pytest.approx(10))
    assert ours.measure("4 requests", 1, "peak memory").value == 54
    # The capacity is 4 requests a second.
    assert ours.measure(serving.ARRIVALS_WORK, 1, "arrivals").value == pytest.approx(0.8 * 4)
    assert ours.measure(serving.ARRIVALS_WORK, 1, "between tokens, p50").value == pytest.approx(10)
    assert ours.measure(serving.PREFIX_WORK, 1, serving.COLD).value == pytest.approx(1000)
    assert ours.measure(serving.PREFIX_WORK, 1, serving.WARM).value == pytest.approx(100)
    # 62 shared blocks, and 9 of the 71 blocks of each of 16 requests.
    assert ours.measure(serving.PREFIX_WORK, 1, serving.BLOCKS).value == pytest.approx(166 / (62 + 16 * 9))


def test_a_slow_or_broken_configuration_is_skipped(source, tmp_path):
    fakes = {
        "ours": Fake(MIXED),
        "our decoder": Fake(ONE_BY_ONE, 0.02),
        "our slow": Fake(MIXED, 0.02),
        "broken": Fake(APART, fails=True),
    }
    rows, left_out = measured(source, tmp_path, fakes, requests=(1, 4), works=("1 request", "4 requests"))
    assert left_out == [
        "broken, 1 request, 1 threads: broken",
        "our decoder, 4 requests, 1 threads: skipped: at 1 request, whole, ours is at least 1.25 times as fast at "
        "equal quality",
        "broken, 4 requests, 1 threads: broken",
    ]
    assert rows["ours"].speed("4 requests, whole", 1) and rows["our slow"].speed("4 requests, whole", 1)
    assert not rows["our decoder"].speed("4 requests, whole", 1)
    assert not rows["ours"].measure(serving.PREFIX_WORK, 1, serving.COLD)


def test_lookup_is_compared_in_turns(source, tmp_path):
    fakes = {"ortolan": Fake(MIXED), "llama.cpp": Fake(APART), "openvino-genai": Fake(MIXED)}
    works = [
        f"{text}, {count}, {way}"
        for text in ("edit", "story")
        for count in ("1 request", "4 requests")
        for way in ("plain", "lookup")
    ]
    rows, left_out = measured(source, tmp_path, fakes, requests=(1, 4, 64), works=works)
    assert left_out == []
    found = {name: [speed.work for speed in row.speeds if speed.work.endswith("whole")] for name, row in rows.items()}
    assert found == {
        "ortolan": [f"{work}, whole" for work in works],
        "llama.cpp": [f"{work}, whole" for work in works if "4 requests, lookup" not in work],
        "openvino-genai": [],
    }
    given = [(work["lookup"], work["temperature"]) for work in fakes["llama.cpp"].given]
    assert (
        given == [(False, 0), (True, 0)] * 2 + [(False, 0)] * 2 + [(False, 0.8), (True, 0.8)] * 2 + [(False, 0.8)] * 2
    )


def test_the_result_is_kept_and_shown(source, tmp_path):
    rows, _ = measured(source, tmp_path, {"ours": Fake(MIXED), "peer": Fake(APART, 0.02)}, requests=(4,), arrivals=0)
    result = PeersResult(
        ["python …"], "2026-01-02", cpu="a CPU", versions={"onnxruntime": "1.0"}, rows=[*rows.values()]
    )
    assert PeersResult.from_json(result.to_json()) == result
    ratios = {one.work: one.ratio for one in verdicts(result) if one.threads}
    assert ratios == dict.fromkeys(
        ("4 requests, prompts", "4 requests, decoding", "4 requests, whole"), pytest.approx(2)
    )
    assert [line[:4] for line in serving_table.lines(result.rows)] == [
        ["ours", "20.000", "4 requests", "1"],
        ["peer", "20.000", "4 requests", "1"],
        ["ours", "20.000", "prefix of 1000", "1"],
        ["peer", "20.000", "prefix of 1000", "1"],
    ]
    assert all(len(line) == len(serving_table.columns()) for line in serving_table.lines(result.rows))
    text = page.write(result)
    assert "### Serving: tiny" in text and "| 400 | 10 · 10 | 10 · 10 | 54 |" in text


def test_results_without_measures_are_read():
    row = Row("decoders", "tiny", "ours", "any", True, "call()", {}, 1.0, speeds=[Speed("decode", 1, "t/s", 1, 1, 0)])
    result = PeersResult(["python …"], "2026-01-02", cpu="a CPU", versions={}, rows=[row])
    found = json.loads(result.to_json())
    del found["rows"][0]["measures"]
    assert PeersResult.from_json(json.dumps(found)) == result


@pytest.mark.parametrize(
    ("engine", "module", "options"),
    [
        ("llama.cpp", "llama_cpp", {"unified": True}),
        ("ik_llama.cpp", "ik_llama_cpp", {"repacked": True}),
        ("onnxruntime-genai", "onnxruntime_genai", {"how": "by hand"}),
        ("openvino-genai", "openvino", {}),
    ],
)
def test_a_missing_package_is_told(gguf, tmp_path, engine, module, options):
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    path = gguf.parent if engine == "onnxruntime-genai" else gguf
    told = pytest.raises(WorkerError, match=f"No module named '{module}'")
    with Runner(Configuration("missing", engine, path, options), "serving.py", tmp_path / "made") as runner, told:
        runner.make(SERVING, "tiny", 1)
        runner.open(1, {"kind": "score", "windows": [IDS[:8]]})


class FakePipeline:
    """OpenVINO GenAI's pipeline: a step gives a token to each request, and the whole prompt is echoed first."""

    def __init__(self, path, settings, device, properties):
        self.prefix, self.requests = settings.enable_prefix_caching, []

    def add_request(self, number, ids, wanted):
        request = SimpleNamespace(ids=ids[0].tolist(), left=wanted.max_new_tokens, new=[], echo=wanted.echo)
        request.can_read = lambda: bool(request.new)
        request.read = lambda: {0: SimpleNamespace(generated_ids=[request.new.pop()])}
        logprobs = [1.0] + [-0.5] * len(request.ids)
        request.read_all = lambda: [SimpleNamespace(generated_ids=[*request.ids, 7], generated_log_probs=logprobs)]
        self.requests.append(request)
        return request

    def step(self):
        for request in self.requests:
            request.left -= 1
            request.new.append(7)
        self.requests = [request for request in self.requests if request.left]

    def has_non_finished_requests(self):
        return bool(self.requests)


@pytest.fixture
def openvino(monkeypatch, script):
    """Return the worker script with a fake of OpenVINO GenAI."""
    api = SimpleNamespace(
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=lambda: SimpleNamespace(echo=False),
        ContinuousBatchingPipeline=FakePipeline,
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", api)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda array: array))
    return script


def test_openvinos_steps_serve_requests_when_they_come(openvino, gguf):
    worker = openvino.Worker(1)
    opening = {"kind": "score", "windows": [IDS[:8]]}
    worker.open("openvino-genai", {"model": str(gguf)}, opening)
    assert worker._engine.run(worker._parts[0]).tolist() == [[3.5, 7]]
    for arrivals in ([], [0.0, 0.02, 0.05]):
        worker.give({**REQUESTS, "arrivals": arrivals})
        reply = worker.serve()
        assert [len(times) for times in reply["times"]] == [6] * 3 and reply["order"] == MIXED
        assert not worker._engine._pipeline.prefix
        assert all(times[0] >= come for times, come in zip(reply["times"], arrivals, strict=False))
    worker.give({"kind": "prefix", "prefix": IDS[:64], "tails": [IDS[:4], IDS[4:9]], "answer": 3})
    assert worker.serve()["blocks"] is None and worker._engine._pipeline.prefix
    worker.give(REQUESTS)
    assert not worker._engine._pipeline.prefix
    worker._engine._pipeline.step = lambda: None
    worker._engine._pipeline.has_non_finished_requests = lambda: False
    with pytest.raises(ValueError, match="3 requests ended before their answers were complete"):
        worker.serve()


class FakeLlama:
    """The part of llama_cpp that serves requests. The next token is a hash of all tokens before it."""

    def __init__(self):
        self.api = MagicMock(llama_decode=self.decode, llama_memory_seq_rm=self.forget)
        self.api.llama_max_parallel_sequences.return_value = 8
        self.api.llama_batch_init = lambda rows, *_: SimpleNamespace(
            token=[0] * rows, pos=[0] * rows, logits=[0] * rows, n_seq_id=[0] * rows, seq_id=[[0] for _ in range(rows)]
        )
        self.api.llama_sampler_sample = lambda sampler, context, row: self.found[row]
        self.cells, self.steps = {}, 0

    def decode(self, context, batch):
        self.found, self.steps = [], self.steps + 1
        for row in range(batch.n_tokens):
            cells = self.cells.setdefault(batch.seq_id[row][0], [])
            assert batch.pos[row] == len(cells)
            cells.append(batch.token[row])
            self.found.append(self.next(cells))
        return 0

    def forget(self, memory, sequence, first, end):
        del self.cells[sequence][first:]

    @staticmethod
    def next(tokens):
        return zlib.crc32(bytes(token % 256 for token in tokens)) % 50

    def draft(self, tokens):
        """Return a draft with some right tokens, and more tokens than the answer needs."""
        right = tokens.tolist()
        for _ in range(len(tokens) % 4):
            right.append(self.next(right))
        return np.array([*right[len(tokens) :], *[99] * 20])


def test_llama_cpps_lookup_keeps_the_right_tokens_of_drafts(script, monkeypatch):
    fakes = {lookup: FakeLlama() for lookup in (False, True)}
    for lookup, fake in fakes.items():
        speculative = SimpleNamespace(LlamaPromptLookupDecoding=lambda num_pred_tokens, fake=fake: fake.draft)
        monkeypatch.setitem(sys.modules, "llama_cpp", fake.api)
        monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
        engine = script.LlamaCppBatch(1, "model.gguf", cache="F16", unified=True)
        (given,) = engine.prepare({"kind": "serve", "prompts": [IDS[:20]], "answer": 30, "lookup": lookup})
        assert [len(times) for times in engine.serve(given).times] == [30]
    plain, lookup = fakes.values()
    assert lookup.cells == plain.cells and len(plain.cells[0]) == 20 + 29
    assert plain.steps == 30 and lookup.steps < 20
    with pytest.raises(ValueError, match="drafts of one sequence only"):
        engine.prepare({**REQUESTS, "lookup": True})


class FakeIk(FakeLlama):
    """ik_llama.cpp's C interface, with the function names that llama.cpp had before."""

    vocabulary = 50

    def __init__(self):
        super().__init__()
        nothing = lambda *given: None  # noqa: E731
        self.loaded = self.context = None
        self.api = SimpleNamespace(
            llama_batch=object,
            llama_token=ctypes.c_int32,
            llama_backend_init=nothing,
            llama_batch_free=nothing,
            llama_batch_init=self.api.llama_batch_init,
            llama_context_default_params=SimpleNamespace,
            llama_decode=self.decode,
            llama_free=nothing,
            llama_get_logits_ith=lambda context, row: self.logits([self.found[row]]),
            llama_init_from_model=self.make_context,
            llama_kv_cache_clear=lambda context: self.cells.clear(),
            llama_model_default_params=SimpleNamespace,
            llama_model_get_vocab=nothing,
            llama_model_load_from_file=self.load,
            llama_vocab_n_tokens=lambda vocabulary: self.vocabulary,
            _lib=SimpleNamespace(
                llama_batch_get_one=lambda tokens, count, first, sequence: SimpleNamespace(
                    n_tokens=count, token=tokens, pos=range(first, first + count), seq_id=[[sequence]] * count
                ),
                llama_get_logits=lambda context: self.logits(self.found),
                llama_kv_cache_seq_rm=lambda *given: self.forget(*given),
                llama_log_set=lambda callback, data: None,
                llama_print_system_info=lambda: b"AVX2 = 1 | AVX512 = 0 | ",
            ),
        )

    def load(self, path, settings):
        self.loaded = path, settings.repack_tensors
        return 1

    def make_context(self, model, settings):
        self.context, self.cells = settings, {}
        return 2

    def forget(self, context, sequence, first, end):
        del self.cells.get(sequence, [])[first:]

    def logits(self, tokens):
        """Return logits whose largest value in each row is that of a token."""
        rows = np.full((len(tokens), self.vocabulary), -1.0, np.float32)
        rows[np.arange(len(tokens)), tokens] = 1.0
        values = rows.reshape(-1).tolist()
        return ctypes.cast((ctypes.c_float * len(values))(*values), ctypes.POINTER(ctypes.c_float))


@pytest.fixture
def ik(script, monkeypatch):
    """Return the worker of the serving section and a fake of ik_llama.cpp."""
    fake = FakeIk()
    monkeypatch.setitem(sys.modules, "ik_llama_cpp", SimpleNamespace(_ctypes_api=fake.api))
    monkeypatch.setitem(sys.modules, "ik_llama_cpp._ctypes_api", fake.api)
    return script.Worker(1), fake


def test_ik_llama_cpp_serves_sequences_that_share_a_cache(ik, gguf, tmp_path):
    worker, fake = ik
    made = worker.make("ik_llama.cpp", str(gguf), str(tmp_path), {"repacked": True})
    assert "repack_tensors=True" in made["call"] and made["call"].endswith("AVX2") and made["megabytes"] > 0
    worker.open("ik_llama.cpp", made["opened"], {"kind": "score", "windows": [IDS[:8]]})
    assert fake.loaded == (str(gguf).encode(), True) and fake.cells == {0: IDS[:7]}
    worker.give(REQUESTS)
    assert fake.context.n_ctx == sum(map(len, REQUESTS["prompts"])) + 3 * 6 and fake.context.n_seq_max == 3
    for _ in range(2):
        reply = worker.serve()
        assert [len(times) for times in reply["times"]] == [6] * 3 and reply["order"] == APART
        for sequence, prompt in enumerate(REQUESTS["prompts"]):
            expected = list(prompt)
            for _ in range(5):
                expected.append(fake.next(expected))
            assert fake.cells[sequence] == expected
    for more, told in (
        ({"lookup": True}, "ik-llama-cpp-python has no prompt lookup"),
        ({"arrivals": [0.0] * 3}, "ik-llama-cpp-python has no scheduler"),
    ):
        with pytest.raises(ValueError, match=told):
            worker.give({**REQUESTS, **more})
    with pytest.raises(ValueError, match=r"ik_llama\.cpp finds no prefixes"):
        worker.give({"kind": "prefix", "prefix": IDS[:64], "tails": [IDS[:4], IDS[4:9]], "answer": 3})


def test_ik_llama_cpp_decodes_greedily_after_the_tokens_in_the_cache(ik, gguf, script):
    _, fake = ik
    engine = script.IkLlamaCpp(1, str(gguf), cache="Q8_0", repacked=False)
    expected = IDS[:20]
    for _ in range(7):
        expected.append(fake.next(expected))
    for _ in range(2):
        (part,) = engine.prepare({"kind": "decode", "ids": IDS[:20], "steps": 6})
        for _ in range(2):
            engine.set_up(part)
            assert engine.run(part).tolist() == [[expected[-1]]] and fake.cells[0] == expected[:-1]
    assert fake.loaded[1] is False and fake.context.type_k == fake.context.type_v == 8
    (part,) = engine.prepare({"kind": "score", "windows": [IDS[:12]], "step": 4})
    engine.set_up(part)
    ((_, scored),) = engine.run(part)
    assert scored == 11 and fake.cells[0] == IDS[:11]
    fake.api.llama_decode = lambda context, batch: 1
    engine = script.IkLlamaCpp(1, str(gguf), cache="F16", repacked=False)
    with pytest.raises(ValueError, match="llama_decode failed with status 1"):
        engine.prepare({"kind": "step", "context": 8, "steps": 1})


def test_ik_llama_cpps_quantizer_makes_its_formats(ik, gguf, script, tmp_path, monkeypatch):
    program = tmp_path / "quantize"
    program.write_text('#!/bin/sh\n[ "$4" = Q6_0 ] || { echo "invalid ftype $4"; exit 1; }\ncp "$2" "$3"\n')
    program.chmod(0o755)
    quantize = SimpleNamespace(find_quantize_bin=lambda: program)
    monkeypatch.setitem(sys.modules, "ik_llama_cpp.quantize", quantize)
    made = script.IkLlamaCpp.make(gguf, tmp_path, 1, form="Q6_0", repacked=False)
    assert made.opened == {"model": str(tmp_path / "Q6_0.gguf"), "cache": "F16", "repacked": False}
    assert (tmp_path / "Q6_0.gguf").read_bytes() == gguf.read_bytes() and "model.gguf to Q6_0; " in made.call
    with pytest.raises(ValueError, match=r"ik_llama\.cpp could not write Q9\.gguf: invalid ftype Q9"):
        script.IkLlamaCpp.make(gguf, tmp_path, 1, form="Q9", repacked=False)
