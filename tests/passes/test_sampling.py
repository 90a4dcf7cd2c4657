"""Calibration text sampled from the decoder itself, and the default search that uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import ortolan
from ortolan.graph_passes.auto import budget, search
from ortolan.graph_passes.auto.budget import divergence_rise
from ortolan.graph_passes.files.model_file import load_model
from ortolan.graph_passes.measure import evidence
from ortolan.graph_passes.measure.evidence import Evidence
from ortolan.graph_passes.measure.sampling import sampled_feeds, start_token
from ortolan.graph_passes.report.figures import Timing
from ortolan.models import tiny

from .cached_llama import VOCABULARY, llama
from .small_models import matmul_model, run

_START = 5


def _sampled(model: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    session = ortolan.create_session(model.SerializeToString())
    return sampled_feeds(ir.from_proto(model), session, _START)


@pytest.mark.parametrize("attention", ["standard", "gqa"])
def test_samples_text_with_its_cache(attention: str) -> None:
    model = llama(attention)
    whole, beginning, step = _sampled(model)
    ids = whole["input_ids"]
    assert ids.shape == (2, 64) and (ids[:, 0] == _START).all() and len(np.unique(ids)) > 8
    np.testing.assert_array_equal(beginning["input_ids"], ids[:1, :7])
    np.testing.assert_array_equal(step["input_ids"], ids[:, -1:])
    # The cache contains all earlier tokens, so the last step has the logits of the whole text.
    np.testing.assert_allclose(run(model, step)[0][:, -1], run(model, whole)[0][:, -1], rtol=1e-3, atol=1e-4)
    again = _sampled(model)[0]["input_ids"]
    np.testing.assert_array_equal(again, ids)


def test_a_model_beyond_memory_runs_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "free_memory", lambda: 1000)
    with Evidence(load_model(llama("gqa")), tmp_path) as found:
        whole, beginning, step = found.feeds()
        assert whole["input_ids"].shape == (8, 8) and beginning["input_ids"].shape == (1, 3)
        assert step["input_ids"].shape == (8, 1) and found.sampled


def test_an_encoder_samples_nothing(tmp_path: Path) -> None:
    assert _sampled(matmul_model()) == []
    with Evidence(load_model(matmul_model()), tmp_path) as made:
        assert made.feeds() and not made.sampled
        assert "synthetic" in (made.description or "")


class _Counter:
    """A session of a decoder that is changed to predict the next token id almost always."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._session = ortolan.create_session(model.SerializeToString())

    def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        answers = dict(zip(names, self._session.run(names, feeds), strict=True))
        answers["logits"] = 50.0 * np.eye(VOCABULARY, dtype=np.float32)[(feeds["input_ids"] + 1) % VOCABULARY]
        return list(answers.values())


def test_the_sample_follows_the_model() -> None:
    model = llama("standard")
    ids = sampled_feeds(ir.from_proto(model), _Counter(model), _START)[0]["input_ids"]
    np.testing.assert_array_equal(ids, np.tile(np.arange(_START, _START + 64), (2, 1)))


def test_reads_the_start_token(tmp_path: Path) -> None:
    model = tmp_path / "onnx" / "model.onnx"
    model.parent.mkdir()
    assert start_token(None) == start_token(model) == 1
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": [7, 8]}))
    assert start_token(model) == 7
    (model.parent / "genai_config.json").write_text(json.dumps({"model": {"bos_token_id": 9}}))
    assert start_token(model) == 9
    (model.parent / "generation_config.json").write_text("no JSON")
    assert start_token(model) == 9
    (model.parent / "generation_config.json").write_text(json.dumps({"bos_token_id": None}))
    assert start_token(model) == 9


def test_divergence_of_several_sequences() -> None:
    rng = np.random.default_rng(0)
    logits = {"before": rng.standard_normal((2, 3, 5)), "after": rng.standard_normal((2, 3, 5))}

    def runs(name: str) -> Any:
        return lambda feeds: {"logits": logits[name][feeds["rows"]]}

    p, q = (np.exp(one) / np.exp(one).sum(axis=-1, keepdims=True) for one in logits.values())
    expected = np.exp((p * np.log(p / q)).sum(axis=-1).mean()) - 1
    feeds = [{"rows": np.array([0])}, {"rows": np.array([1])}]
    assert divergence_rise(runs("before"), runs("after"), feeds) == pytest.approx(expected)
    both = [{"rows": np.array([0, 1])}]
    assert divergence_rise(runs("before"), runs("after"), both) == pytest.approx(expected)


@pytest.fixture
def decoder() -> onnx.ModelProto:
    return ir.to_proto(tiny.tiny_llama(attention="gqa", hidden_size=64, intermediate_size=128, head_dim=16))


def _timed(monkeypatch: pytest.MonkeyPatch, milliseconds: float) -> None:
    """Set the times to 10 ms for the original and `milliseconds` for optimized models.

    int4 with random weights is within the budget.
    """

    def time_models(original: Any, paths: Any, shapes: Any) -> Any:
        return [Timing(10.0, 10.0)] * len(shapes), [[Timing(milliseconds, milliseconds)] * len(shapes) for _ in paths]

    monkeypatch.setattr(search, "time_models", time_models)
    monkeypatch.setattr(budget, "DEFAULT_PERPLEXITY", 0.5)


def test_a_decoder_takes_4_bits_without_measuring_its_layers(
    decoder: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    _timed(monkeypatch, 5.0)
    report = ortolan.optimize_onnx(decoder, options={"verify.seconds": 0.0})
    assert report.auto is not None and report.feeds is not None
    assert "sampled from the model itself" in report.feeds and "sampled" in report.auto.budget
    assert len(report.auto.trials) == 1 and report.auto.trials[0].chosen
    assert {layer.weight_bits for layer in report.replaced} == {4, 8}  # the head has 8 bits
    assert "2.00x faster" in report.auto.outcome


def test_a_decoder_that_4_bits_make_no_faster_is_searched_by_layers(
    decoder: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    _timed(monkeypatch, 20.0)
    measured: list[Any] = []
    monkeypatch.setattr(search.LayerStudy, "measure", lambda *arguments: measured.append(arguments))
    report = ortolan.optimize_onnx(decoder)
    assert measured and report.auto is not None and not report.auto.changed
