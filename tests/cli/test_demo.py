"""The demo on a tiny encoder with a tokenizer made here; once, on the published model."""

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
    return demo.run_demo(sparsity=0.25, model=tiny_encoder)


def rendered(result):
    text = io.StringIO()
    Console(file=text, width=140).print(result)
    return text.getvalue()


def test_the_demo_measures_both_models(result, tiny_encoder):
    assert result.layers_replaced == 12
    assert result.original_bytes == tiny_encoder.onnx.stat().st_size
    assert [row.tokens for row in result.latencies] == [16, 128]
    assert all(row.original.min_ms <= row.original.median_ms for row in result.latencies)
    assert 0.8 < result.agreement.cosine_min <= result.agreement.cosine_mean < 1
    assert [pair.first for pair in result.pairs] == [first for _, first, _ in demo.PAIRS]


def test_the_table_holds_the_figures(result):
    text = rendered(result)
    for expected in (
        "1x16 tokens, minimum",
        "1x128 tokens, median",
        "on 1 thread",
        "weights of these layers",
        "costs accuracy",
    ):
        assert expected in text
    for _, first, second in demo.PAIRS:
        assert first in text
        assert second in text
    assert f"{result.pairs[0].optimized:.3f}" in text


def test_the_json_holds_the_figures(result):
    read = json.loads(result.to_json())
    row = read["latencies"][0]
    assert row["speedup"] == pytest.approx(row["original"]["min_ms"] / row["optimized"]["min_ms"])
    assert read["agreement"]["spearman"] == result.agreement.spearman
    assert read["pairs"][0]["relation"] == demo.PAIRS[0][0]


def test_without_pruning_only_rounding_is_left(tiny_encoder):
    steps = []
    result = demo.run_demo(0, threads=2, model=tiny_encoder, progress=lambda *step: steps.append(step))
    assert result.agreement.cosine_min > 0.999
    assert "rounding to bf16 alone" in rendered(result)
    assert "on 2 threads" in rendered(result)
    assert all(0 <= done <= total for _, done, total in steps)
    assert {"embed sentences", "time both models"} <= {stage for stage, _, _ in steps}


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
    assert demo.compare_pairs(vectors, turned)[1].optimized == pytest.approx(-float(vectors[2] @ vectors[3]), abs=1e-6)


def test_missing_extras_are_named(invoke, assert_one_line, monkeypatch):
    real_import = builtins.__import__

    def without_extras(name, *arguments, **options):
        if name in ("tokenizers", "safetensors"):
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_extras)
    assert_one_line(invoke("demo"), "safetensors and tokenizers", 'pip install "ortolan[demo]"')


def test_values_out_of_range_are_refused(invoke, assert_one_line, tiny_encoder, monkeypatch):
    monkeypatch.setattr("ortolan.models.get_model", lambda name, **options: tiny_encoder)
    assert_one_line(invoke("demo", "--sparsity", "1.5"), "sparsity", "1.5")
    with pytest.raises(OrtolanError, match="threads is 0"):
        demo.run_demo(threads=0, model=tiny_encoder)


def test_the_command_prints_the_table_and_only_json(invoke, tiny_encoder, monkeypatch):
    monkeypatch.setattr("ortolan.models.get_model", lambda name, **options: tiny_encoder)
    result = invoke("demo", "--sparsity", "0.25")
    assert result.exit_code == 0, result.stderr
    assert "Cosine similarity" in result.stdout
    result = invoke("demo", "--sparsity", "0.25", "--json")
    assert json.loads(result.stdout)["model"] == "tiny"


@pytest.mark.network
def test_the_published_model(run_cli):
    result = run_cli("demo", "--sparsity", "0", "--json")
    assert result.returncode == 0, result.stderr
    read = json.loads(result.stdout)
    original = {pair["relation"]: pair["original"] for pair in read["pairs"]}
    assert original["same meaning"] > 0.4 > 0.2 > original["unrelated"]
    assert read["agreement"]["cosine_min"] > 0.999
    assert read["agreement"]["spearman"] > 0.99
    assert read["optimized_bytes"] < read["original_bytes"]
