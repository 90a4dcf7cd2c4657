"""optimize_onnx on a folder with an encoder and its decoders, merged or separate."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ortolan
from ortolan import CalibrationError, OutputError, RecipeError
from ortolan.graph_passes.auto import layer_study, layer_times, path, search
from ortolan.graph_passes.auto.candidates import ORIGINAL
from ortolan.graph_passes.report.figures import Timing

from .digests import digests
from .encoder_decoder import DECODER, ENCODER, MERGED, VOCABULARY, WITH_PAST, tokens, write

FAST = {"verify.seconds": 0.0}
FILES = [DECODER, MERGED, WITH_PAST, ENCODER]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "model")


def text() -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(2, VOCABULARY, (3, 9))
    mask = np.ones_like(ids)
    mask[0, 5:] = 0
    return ids, mask


def operators(path: Path) -> Counter[str]:
    found: Counter[str] = Counter()

    def count(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            found[node.op_type] += 1
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    count(attribute.g)

    count(onnx.load(path, load_external_data=False).graph)
    return found


@pytest.mark.parametrize("calibrated", [False, True])
def test_float_caches_give_the_same_tokens(folder: Path, tmp_path: Path, calibrated: bool) -> None:
    before = digests(folder)
    ids, mask = text()
    calibration = [{"input_ids": ids, "attention_mask": mask}] if calibrated else None
    report = ortolan.optimize_onnx(folder, tmp_path / "fast", cache="float32", calibration=calibration, options=FAST)
    assert digests(folder) == before
    after = digests(tmp_path / "fast")
    assert sorted(after) == sorted(before) and after["config.json"] == before["config.json"]
    expected = {ENCODER: 1, DECODER: 2, WITH_PAST: 2, MERGED: 4}
    for name, count in expected.items():
        kinds = operators(tmp_path / "fast" / name)
        assert kinds["NoMADAttention"] == count and kinds["Softmax"] == 0, name
    assert report.portable and list(report.parts) == [ENCODER, DECODER, WITH_PAST, MERGED]
    assert report.file_size_after == sum((tmp_path / "fast" / name).stat().st_size for name in expected)
    for use_merged in (False, True):
        wanted = tokens(folder, ids, mask, use_merged)
        assert len(np.unique(wanted)) > 4
        np.testing.assert_array_equal(tokens(tmp_path / "fast", ids, mask, use_merged), wanted)
    for name, part in report.parts.items():
        assert part.output == str(tmp_path / "fast" / name)
        assert max(error.relative_l2 for error in part.output_error) < 2e-6
    assert "inputs decoded from" in (report.parts[MERGED].feeds or "")


def test_weights_of_all_files(folder: Path, tmp_path: Path) -> None:
    options = FAST | {"may_grow": True, "unpad.drop_hidden": True}
    report = ortolan.optimize_onnx(folder, tmp_path / "fast", weights="int8", options=options)
    for name, part in report.parts.items():
        assert part.replaced and part.feeds, name
        kinds = operators(tmp_path / "fast" / name)
        assert kinds["SparseAMXMatMul"] > 0 and kinds["Softmax"] == 0, name
        assert (
            kinds["NoMADAttention"] == {ENCODER: 0, DECODER: 2, WITH_PAST: 2, MERGED: 4}[name]
        )  # the encoder has PackedNoMADAttention instead
        assert part.portable
    assert len(report.replaced) == sum(len(part.replaced) for part in report.parts.values())
    shown, data = str(report), json.loads(report.to_json())
    assert all(name in shown and name in data["parts"] for name in FILES)


def test_without_a_merged_decoder(folder: Path, tmp_path: Path) -> None:
    for name in (ENCODER, MERGED, "config.json"):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_bytes((folder / name).read_bytes())
    report = ortolan.optimize_onnx(tmp_path / "model", tmp_path / "fast", cache="float32", options=FAST)
    assert list(report.parts) == [ENCODER, MERGED]
    ids, mask = text()
    expected = tokens(folder, ids, mask, use_merged=True)
    np.testing.assert_array_equal(tokens(tmp_path / "fast", ids, mask, use_merged=True), expected)


def test_a_decoder_that_calls_its_logits_otherwise(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for source in folder.iterdir():
        (tmp_path / "model" / source.name).write_bytes(source.read_bytes())
    decoder = onnx.load(folder / DECODER)
    decoder.graph.output[0].name = decoder.graph.node[-1].output[0] = "scores"
    onnx.save(decoder, tmp_path / "model" / DECODER)
    with pytest.raises(
        CalibrationError, match=r"no output 'logits' but scores, present.*optimize each file separately"
    ):
        ortolan.optimize_onnx(tmp_path / "model", tmp_path / "fast", weights="int8", options=FAST)
    assert not (tmp_path / "fast").exists()


def test_dry_run(folder: Path) -> None:
    report = ortolan.optimize_onnx(folder, cache="float32", dry_run=True)
    assert report.dry_run and report.output is None
    assert all("would become one NoMADAttention each" in " ".join(str(part).split()) for part in report.parts.values())


def test_what_is_for_one_model_is_refused(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "fast"
    with pytest.raises(RecipeError, match=r"prompt is for a single model, but .* holds an encoder and decoders"):
        ortolan.optimize_onnx(folder, output, cache="float32", prompt=[1, 2])
    with pytest.raises(RecipeError, match=r"compresses caches, but the files .* give cache=\"float32\""):
        ortolan.optimize_onnx(folder, output, cache="codes")
    with pytest.raises(OutputError, match="holds several models; give an output folder"):
        ortolan.optimize_onnx(folder, cache="float32")
    with pytest.raises(OutputError, match="is inside the input folder"):
        ortolan.optimize_onnx(folder, folder / "fast", cache="float32")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def int8_is_fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make a search choose int8 for all linear layers."""

    def time_models(original: Any, paths: Any, shapes: Any) -> Any:
        return [Timing(10.0, 10.0)] * len(shapes), [[Timing(5.0, 5.0)] * len(shapes) for _ in paths]

    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(layer_times, "measure", lambda *_: {ORIGINAL: 1.0, "int8": 0.5})
    monkeypatch.setattr(search, "time_models", time_models)


def selected(report: ortolan.OptimizationReport, name: str) -> set[str]:
    """Return the layer patterns that the quantize passes select in one file."""
    steps = report.parts[name].recipe["pass"]
    return {glob for step in steps if step["name"] == "quantize" for glob in step["select"]}


def replaced(report: ortolan.OptimizationReport, name: str) -> list[str]:
    return [layer.name for layer in report.parts[name].replaced]


def test_decoders_get_what_was_found_for_the_one_that_begins_a_text(
    folder: Path, tmp_path: Path, int8_is_fast: None
) -> None:
    """Only the first decoder has the layers that compute keys and values from the encoder's output."""
    report = ortolan.optimize_onnx(folder, tmp_path / "fast", options=FAST)
    first, later = (
        {node.name for node in onnx.load(folder / name).graph.node if node.op_type == "MatMul"}
        for name in (DECODER, WITH_PAST)
    )
    found = selected(report, DECODER)
    assert found and found <= first and found - later and found & later
    assert selected(report, WITH_PAST) == found & later
    assert set(replaced(report, WITH_PAST)) >= found & later
    assert report.parts[DECODER].auto is not None and report.parts[MERGED].auto is None
    assert {file.name for file in (tmp_path / "fast").iterdir()} == {*FILES, "config.json"}


def test_a_decoder_with_none_of_the_layers_that_were_found_stays_as_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int8_is_fast: None
) -> None:
    def make_path(*arguments: Any) -> list[path.Step]:
        return [step for step in path.make_path(*arguments) if "cross.k" in step.layer]

    monkeypatch.setattr(search, "make_path", make_path)
    monkeypatch.setattr(layer_study, "find_attentions", lambda graph: [])
    report = ortolan.optimize_onnx(folder, tmp_path / "fast", options=FAST)
    assert replaced(report, DECODER) == ["/cross.k/MatMul"]
    assert not report.parts[WITH_PAST].recipe["pass"]
    assert any("it has no layer that the recipe changes" in note for note in report.parts[WITH_PAST].notes)
    assert digests(tmp_path / "fast")[WITH_PAST] == digests(folder)[WITH_PAST]


def test_a_recipe_that_was_given_must_match_in_each_file(folder: Path, tmp_path: Path) -> None:
    options = FAST | {"quantize.1.select": "/cross.k/MatMul"}
    with pytest.raises(RecipeError, match="matches no linear layer"):
        ortolan.optimize_onnx(folder, tmp_path / "fast", weights="int8", options=options)
