"""The picture of speed against quality, on tiny models and on made-up data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from ortolan.benchmarks import picture as benchmark
from ortolan.benchmarks.picture import DECODER, ENCODER, FP32, ModelPoints, Picture, Point
from ortolan.errors import OrtolanError
from ortolan.models import ModelFiles, tiny

from ..docs.pages import ROOT
from ..text.wordpiece_file import write_wordpiece

COMMITTED = ROOT / "docs" / "pictures" / "speed-and-quality.svg"
WORDS = ("the", "cat", "sleeping", "unaffable", "a", "b", "c", "0", "1", "2", ",", ".", "!")


def made_up(*numbers: tuple[str, bool, float, float]) -> Picture:
    points = [Point(form, ours, {}, 1.0, 1.0, speedup, quality, None) for form, ours, speedup, quality in numbers]
    models = [
        ModelPoints(ENCODER, "an encoder", "ms", "correlation", True, points),
        ModelPoints(DECODER, "a decoder", "tokens a second", "perplexity", False, points, ["int4: it failed"]),
    ]
    return Picture("python …", 1, "made up", cpu="a CPU", versions={"onnxruntime": "1.0"}, models=models)


NUMBERS = (
    ("fp32", False, 1.0, 0.8),
    ("int8", True, 2.0, 0.8),
    ("a long name", True, 2.01, 0.8001),
    ("int4", True, 3, 40),
)


def test_data_come_back_from_the_file_and_give_the_same_picture(tmp_path):
    pytest.importorskip("matplotlib")
    picture = made_up(*NUMBERS)
    again = Picture.from_json(picture.to_json())
    assert again == picture
    benchmark.draw(picture, tmp_path / "one.svg")
    benchmark.draw(again, tmp_path / "two.svg")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    for name in ("fp32", "a long name", "perplexity", "an encoder", "made up"):
        assert f"<!-- {name}" in text or f"({name}) -->" in text
    assert "<dc:date>" not in text


def test_names_of_forms_do_not_lie_on_each_other(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    figure = pytest.importorskip("matplotlib.figure").Figure()
    plot = figure.subplots()
    same = [Point(f"form {number}", True, {}, 1.0, 1.0, 2.0, 0.5, None) for number in range(5)]
    benchmark._draw_model(plot, ModelPoints(ENCODER, "", "", "", True, same))
    figure.draw_without_rendering()
    boxes = [
        matplotlib.text.Text.get_window_extent(child)
        for child in plot.get_children()
        if isinstance(child, matplotlib.text.Annotation)
    ]
    assert len(boxes) == 5
    heights = sorted(box.y0 for box in boxes)
    assert min(np.diff(heights)) > 8


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"models": [{"points": [{"form": 1}]}]}'])
def test_other_files_are_refused(text):
    with pytest.raises(OrtolanError, match="not the data of a picture"):
        Picture.from_json(text)


def test_the_committed_picture_shows_the_committed_data():
    picture = Picture.from_json(COMMITTED.with_suffix(".json").read_text(encoding="utf-8"))
    text = COMMITTED.read_text(encoding="utf-8")
    assert [model.name for model in picture.models] == [ENCODER, DECODER]
    for model in picture.models:
        known = {*benchmark.PEERS, *benchmark.FORMS[model.name]}
        assert {point.form for point in model.points} | {line.split(":")[0] for line in model.left_out} == known
        for point in model.points:
            assert point.speedup > 0 and f"<!-- {point.form} -->" in text
            assert point.ours == (point.form not in benchmark.PEERS)
            assert point.ours is False or point.call == dict(benchmark.FORMS[model.name][point.form])


@pytest.fixture
def tiny_models(monkeypatch, tmp_path) -> Path:
    """Tiny models in the place of the real ones, short texts, and no time to measure them."""
    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ortolan.graph_passes.measure.timing._WARM_UP_SECONDS", 0.0)
    for name, value in {
        "_SECONDS": 0.0,
        "_ROUNDS": 1,
        "_DECODED": 2,
        "_SCORED": 60,
        "_WINDOW": 32,
        "_TOKENS": 8,
    }.items():
        monkeypatch.setattr(benchmark, name, value)
    tokenizer = write_wordpiece(tmp_path / "tokenizer.json", truncation=None)
    ir.save(tiny.tiny_bert(hidden_size=64, vocab_size=30001, max_position_embeddings=512), tmp_path / "encoder.onnx")
    ir.save(tiny.tiny_llama(hidden_size=64, vocab_size=128, attention="gqa", head_dim=16), tmp_path / "decoder.onnx")

    def get_model(name, **_):
        kind = "encoder" if name == ENCODER else "decoder"
        return ModelFiles(name, tmp_path / f"{kind}.onnx", tokenizer, "CC0-1.0", kind)

    monkeypatch.setattr(benchmark, "get_model", get_model)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 40)) for _ in range(120)]
    (tmp_path / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    rows = [f"a\tb\tc\td\t{rng.random()}\t{texts[i][:30]}\t{texts[-i - 1][:30]}" for i in range(20)]
    (tmp_path / "sts.csv").write_text("\n".join(rows), encoding="utf-8")
    return tmp_path


def test_every_form_is_measured(tiny_models):
    said: list[str] = []
    picture = benchmark.measure(tiny_models / "sts.csv", tiny_models / "text.txt", 1, "a test", said.append)
    for model in picture.models:
        assert model.left_out == []
        assert [point.form for point in model.points] == [*benchmark.PEERS, *benchmark.FORMS[model.name]]
        fp32 = next(point for point in model.points if point.form == FP32)
        assert fp32.speedup == 1
        assert all(point.speed > 0 and point.quality == point.quality for point in model.points)
    encoder, decoder = picture.models
    assert encoder.points[0].cosine == pytest.approx(1)
    assert all(0.5 < point.cosine < 1.001 for point in encoder.points)
    assert all(point.cosine is None and point.quality > 1 for point in decoder.points)
    assert json.loads(picture.to_json())["note"] == "a test"


def test_a_form_that_cannot_be_made_is_left_out(tiny_models, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(benchmark, "make_matmul_nbits", fail)
    monkeypatch.setattr(benchmark, "FORMS", {DECODER: {}})
    texts = benchmark.calibration_sentences(tiny_models / "text.txt")
    found = benchmark.measure_decoder(tiny_models / "text.txt", texts, 1, tiny_models, lambda line: None)
    assert [point.form for point in found.points] == [FP32, benchmark.INT8]
    assert found.left_out == ["MatMulNBits 4 bit: no such thing"]


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "measure", lambda *_: pytest.fail("it was measured"))
    for name in ("sts.csv", "text.txt"):
        (tmp_path / name).write_text("", encoding="utf-8")
    given = ["--sts", str(tmp_path / "sts.csv"), "--text", str(tmp_path / "text.txt")]
    monkeypatch.setattr("sys.argv", ["picture", *given, "--output", str(tmp_path / "none" / "p.svg")])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "--output: expected a folder to write to" in capsys.readouterr().err
