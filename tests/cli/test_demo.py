"""The demo on a tiny encoder, and once on the published model."""

import builtins
import io
import json

import numpy as np
import onnx_ir as ir
import pytest
from rich.console import Console

from ortolan import demo
from ortolan.errors import OrtolanError
from ortolan.models import ModelFiles, tiny

TOKENIZERS = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_SECONDS_A_LENGTH", 0.1)
        yield


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    words = sorted({word for pair in demo.PAIRS for text in pair[1:] for word in text.replace(".", "").split()})
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = TOKENIZERS.Tokenizer(TOKENIZERS.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = TOKENIZERS.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    model = tiny.tiny_bert(vocab_size=len(vocabulary), max_position_embeddings=128)
    ir.save(model, folder / "tiny.onnx")
    return ModelFiles("tiny", folder / "tiny.onnx", folder / "tokenizer.json", "CC0-1.0", "bert")


@pytest.fixture(scope="module")
def result(tiny_encoder):
    return demo.run_demo(model=tiny_encoder)


def rendered(result):
    text = io.StringIO()
    Console(file=text, width=140).print(result)
    return text.getvalue()


def test_the_demo_measures_all_models(result, tiny_encoder):
    assert [variant.name for variant in result.variants] == ["original", "ORT dynamic int8", "Ortolan"]
    original, int8, ours = result.variants
    assert original.bytes == tiny_encoder.onnx.stat().st_size > int8.bytes
    assert all(len(variant.times) == len(demo.TOKEN_COUNTS) for variant in result.variants)
    assert all(time.min_ms <= time.median_ms for variant in result.variants for time in variant.times)
    assert original.agreement.cosine_min == pytest.approx(1)
    assert ours.agreement.cosine_min >= 0.98
    assert int8.batch_difference > 1e-4 > original.batch_difference
    assert [len(found) for found in result.similarities] == [3] * len(demo.PAIRS)


def test_the_table_holds_the_figures(result):
    text = rendered(result)
    for expected in ("1 x 16 tokens, minimum", "1 x 128 tokens, median", "alone / in a batch", "No weight was"):
        assert expected in text
    for _, first, second in demo.PAIRS:
        assert first in text
        assert second in text
    assert f"{result.similarities[0][2]:.3f}" in text


def test_the_json_holds_the_figures(result):
    read = json.loads(result.to_json())
    ours = read["variants"][2]
    assert ours["name"] == "Ortolan"
    assert ours["agreement"]["spearman"] == result.variants[2].agreement.spearman
    assert ours["times"][1]["min_ms"] == result.variants[2].times[1].min_ms


def test_threads_and_progress(tiny_encoder):
    steps = []
    result = demo.run_demo(threads=2, model=tiny_encoder, progress=lambda *step: steps.append(step))
    assert "on 2 thread(s)" in rendered(result)
    assert {"embed texts", "time models"} <= {stage for stage, _, _ in steps}


def test_agreement_of_vectors():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((10, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    same = demo.compare_embeddings(vectors, vectors)
    assert (same.cosine_mean, same.cosine_min, same.spearman) == pytest.approx((1, 1, 1))
    turned = vectors.copy()
    turned[3] *= -1
    other = demo.compare_embeddings(vectors, turned)
    assert other.cosine_min == pytest.approx(-1)
    assert other.cosine_mean == pytest.approx(0.8)
    assert other.spearman < 1
    assert demo.pair_similarities(turned)[1] == pytest.approx(-float(vectors[2] @ vectors[3]), abs=1e-6)


def test_missing_extras_are_named(invoke, assert_one_line, monkeypatch):
    real_import = builtins.__import__

    def without_extras(name, *arguments, **options):
        if name in ("tokenizers", "safetensors"):
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_extras)
    assert_one_line(invoke("demo"), "safetensors and tokenizers", "pip install safetensors tokenizers")


def test_values_out_of_range_are_refused(tiny_encoder):
    with pytest.raises(OrtolanError, match="threads is 0"):
        demo.run_demo(threads=0, model=tiny_encoder)


def test_the_command_prints_the_table_and_only_json(invoke, tiny_encoder, monkeypatch):
    monkeypatch.setattr("ortolan.models.get_model", lambda name, **options: tiny_encoder)
    result = invoke("demo")
    assert result.exit_code == 0, result.stderr
    assert "Cosine similarity" in result.stdout
    optimizing, comparing = result.stderr.splitlines()
    assert optimizing.startswith("tiny: optimizing") and comparing.startswith("tiny: comparing")
    result = invoke("demo", "--json")
    assert json.loads(result.stdout)["model"] == "tiny"


@pytest.mark.slow
@pytest.mark.network
def test_the_published_model(invoke):
    result = invoke("demo", "--json")
    assert result.exit_code == 0, result.stderr
    original, _, ours = (read := json.loads(result.stdout))["variants"]
    similar = {relation: found[0] for (relation, _, _), found in zip(demo.PAIRS, read["similarities"], strict=True)}
    assert similar["same meaning"] > 0.4 > 0.2 > similar["unrelated"]
    assert ours["agreement"]["cosine_min"] >= 0.99
    assert ours["agreement"]["spearman"] > 0.98
    assert ours["bytes"] <= original["bytes"]
