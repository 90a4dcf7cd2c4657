"""The benchmark of the recipe search, on tiny models."""

import json

import numpy as np
import onnx_ir as ir
import pytest

from ortolan.benchmarks import BENCHMARKS, BenchOptions
from ortolan.benchmarks import auto as benchmark
from ortolan.errors import OrtolanError
from ortolan.graph_passes.auto import layer_times, trials
from ortolan.models import tiny

SHAPES = {"all-minilm-l6-v2": ((1, 8), (1, 3)), "stories15m": ((1, 1),)}
FORMS = [benchmark.ORIGINAL, benchmark.INT8, benchmark.NBITS, benchmark.AUTO]


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch, tmp_path):
    """Replace the published models by tiny ones, and measure briefly."""
    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ortolan.graph_passes.measure.timing._WARM_UP_SECONDS", 0.0)
    for module, name in ((layer_times, "_SECONDS"), (trials, "_SECONDS"), (benchmark, "_QUICK_SECONDS")):
        monkeypatch.setattr(module, name, 0.0)

    def open_model(name, quick):
        decoder = name in benchmark.DECODERS
        model = tiny.tiny_llama(hidden_size=64) if decoder else tiny.tiny_bert(hidden_size=64)
        path = tmp_path / f"{name}.onnx"
        ir.save(model, path)
        ids = [{"input_ids": np.random.default_rng(seed).integers(3, 90, (1, 9))} for seed in range(5)]
        feeds = benchmark.read_calibration(ids, ir.load(path))
        return benchmark.Model(name, path, feeds[1:], feeds[:1], SHAPES[name], decoder)

    monkeypatch.setattr(benchmark, "open_model", open_model)


@pytest.mark.slow
def test_one_row_a_form_and_shape():
    result = BENCHMARKS["auto"](BenchOptions(threads=(1,), quick=True), lambda *arguments: None)
    assert not result.interrupted
    assert [(one.model, one.name) for one in result.variants] == [(name, form) for name in SHAPES for form in FORMS]
    for one in result.variants:
        assert list(one.times) == [f"{batch} x {tokens}" for batch, tokens in SHAPES[one.model]]
        assert one.megabytes > 0
        assert (one.perplexity is not None) == (one.model == "stories15m")
    originals = [one for one in result.variants if one.name == benchmark.ORIGINAL]
    assert all(one.cosine == 1 and set(one.speedups.values()) == {1.0} for one in originals)
    assert any(one.cosine < 1 for one in result.variants)
    rows = json.loads(result.to_json())["variants"]
    assert rows[0]["times"]["1 x 8"]["min_ms"] > 0
    assert [note.split(",")[0] for note in result.notes] == list(SHAPES)  # one note on the search per shape


@pytest.mark.slow
def test_an_interrupt_keeps_the_models_that_were_measured(monkeypatch):
    def interrupted(model, *arguments):
        if model.decoder:
            raise KeyboardInterrupt
        return measure(model, *arguments)

    measure = benchmark.measure
    monkeypatch.setattr(benchmark, "measure", interrupted)
    result = benchmark.run(BenchOptions(threads=(1,), quick=True))
    assert result.interrupted
    assert {one.model for one in result.variants} == {"all-minilm-l6-v2"}


@pytest.mark.slow
def test_a_form_that_cannot_be_made_is_left_out(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(benchmark, "make_matmul_nbits", fail)
    result = benchmark.run(BenchOptions(threads=(1,), quick=True, kinds=("all-minilm-l6-v2",)))
    assert [one.name for one in result.variants] == [form for form in FORMS if form != benchmark.NBITS]
    assert "all-minilm-l6-v2: ORT MatMulNBits is left out: no such thing" in result.notes


@pytest.mark.parametrize(
    ("options", "message"),
    [(BenchOptions(kinds=("gpt-5",)), "not measured on 'gpt-5'"), (BenchOptions(batch=(1,)), "leave out --batch")],
)
def test_refuses_what_it_does_not_measure(options, message):
    with pytest.raises(OrtolanError, match=message):
        benchmark.run(options)
