"""Late interaction (ColBERT) and term weights (SPLADE): what folders say, texts in, optimized models, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file
from scipy.sparse import load_npz
from typer.testing import CliRunner

import ortolan
from ortolan import ArgumentError, ModelError, TextEncoder, TextInput
from ortolan.cli import app
from ortolan.engines import EncoderEngine
from ortolan.graph_passes.text.padding import read_padding_id
from ortolan.graph_passes.text.tokenizer_file import load_tokenizer
from ortolan.models import tiny

from .late_folders import DOCUMENT, QUERY, VOCABULARY, write_colbert, write_json, write_splade

TEXTS = ["the cat, unaffable!", "sleep", "", "sleeping cats 中文 the unaffable cat " * 3, "the ’ cat - sleep."]
MARKS = ",.!-"


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_colbert(tmp_path_factory.mktemp("colbert") / "model")


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splade(tmp_path_factory.mktemp("splade") / "model")


def run(folder: Path, ids: list[int], mask: list[int]) -> np.ndarray:
    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": [ids], "attention_mask": [mask], "token_type_ids": [[0] * len(ids)]}
    (found,) = session.run(None, {name: np.array(one, np.int64) for name, one in feeds.items()})
    return np.asarray(found[0])


def late_vectors(folder: Path, text: str, query: bool, expands: bool = True, attends: bool = False) -> np.ndarray:
    """Compute a text's token vectors by the rules of PyLate, with nothing but ONNX Runtime and NumPy."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    length, prefix = (12, QUERY) if query else (20, DOCUMENT)
    tokenizer.enable_truncation(length - 1)
    ids = tokenizer.encode(text).ids
    ids.insert(1, tokenizer.token_to_id(prefix))
    missing = length - len(ids) if query and expands else 0
    mask = [1] * len(ids) + [int(attends)] * missing
    ids += [tokenizer.token_to_id("[MASK]")] * missing
    first, second = (load_file(folder / f"{one}_Dense" / "model.safetensors")["linear.weight"] for one in (1, 2))
    rows = run(folder, ids, mask)
    rows = (rows @ first.T + rows) @ second.T
    marks = {tokenizer.token_to_id(mark) for mark in MARKS}
    rows = rows[[query or one not in marks for one in ids]]
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


@pytest.mark.parametrize("query", [False, True])
@pytest.mark.parametrize("expansion", [{}, {"expands": False}, {"attends": True}])
def test_token_vectors_follow_pylate(tmp_path: Path, query: bool, expansion: dict[str, bool]) -> None:
    names = {"expands": "do_query_expansion", "attends": "attend_to_expansion_tokens"}
    folder = write_colbert(tmp_path / "model", **{names[name]: value for name, value in expansion.items()})
    found = ortolan.embed_tokens(TEXTS, folder, query=query, batch_tokens=40)
    assert found.vectors.dtype == np.float32 and len(found.vectors) == found.lengths.sum()
    for text, rows in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(rows, late_vectors(folder, text, query, **expansion), atol=1e-5)


def test_a_model_may_contain_the_linear_layers(colbert: Path, tmp_path: Path) -> None:
    whole = write_colbert(tmp_path / "whole", in_graph=True)
    expected = ortolan.embed_tokens(TEXTS, colbert)
    np.testing.assert_allclose(ortolan.embed_tokens(TEXTS, whole).vectors, expected.vectors, atol=1e-5)
    lengths = ortolan.embed_tokens(TEXTS, whole, settings=TextInput(max_tokens=6, normalize=False)).lengths
    np.testing.assert_array_equal(lengths, np.minimum(expected.lengths, 6) - [1, 0, 0, 0, 0])  # "the cat ,"


def test_a_folder_of_stanfords_colbert(tmp_path: Path) -> None:
    folder = write_colbert(tmp_path / "model", in_graph=True)
    (folder / "config_sentence_transformers.json").unlink()
    metadata = {"query_token_id": QUERY, "doc_token_id": DOCUMENT, "query_maxlen": 9, "doc_maxlen": 20}
    write_json(folder / "artifact.metadata", metadata | {"mask_punctuation": False, "attend_to_mask_tokens": False})
    documents, queries = (ortolan.embed_tokens(TEXTS[:1], folder, query=query) for query in (False, True))
    assert (len(documents[0]), len(queries[0])) == (10, 9)  # the marks are kept
    write_json(folder / "artifact.metadata", {"query_maxlen": "nine"})
    with pytest.raises(ModelError, match=r"artifact\.metadata' has query_length 'nine', expected a value like 32"):
        TextEncoder(folder)


@pytest.mark.parametrize("encoder", [tiny.tiny_bert, tiny.tiny_modernbert])
@pytest.mark.parametrize("query", [False, True])
def test_optimized_token_vectors(tmp_path: Path, encoder: Any, query: bool) -> None:
    """The padding of documents is skipped; a text has the same bits alone and in any batch; scores hardly change."""
    folder = write_colbert(tmp_path / "model", encoder)
    report = ortolan.optimize_onnx(folder, tmp_path / "fast", weights="int8")
    assert any("do not run on masked positions with token 0" in note for note in report.notes)
    fast, exact = TextEncoder(tmp_path / "fast"), TextEncoder(folder)
    found = ortolan.embed_tokens(TEXTS, fast, query=query)
    for text, rows in zip(TEXTS, found, strict=True):
        np.testing.assert_array_equal(ortolan.embed_tokens([text], fast, query=query)[0], rows)
    expected = ortolan.embed_tokens(TEXTS, exact, query=query)
    assert (found.vectors * expected.vectors).sum(axis=1).min() > 0.98
    for text in TEXTS:
        scores, originals = (
            np.array([one.score for one in sorted(ortolan.rerank(text, TEXTS, model), key=lambda one: one.index)])
            for model in (fast, exact)
        )
        np.testing.assert_allclose(scores, originals, atol=0.01 * 12)  # of at most 1 for each of the query's tokens


def test_rerank_is_max_sim(colbert: Path) -> None:
    query, documents = late_vectors(colbert, "the cat", True), [late_vectors(colbert, text, False) for text in TEXTS]
    expected = [float((query @ one.T).max(axis=1).sum()) for one in documents]
    ranked = ortolan.rerank("the cat", TEXTS, colbert, batch_tokens=25)
    np.testing.assert_allclose([one.score for one in ranked], sorted(expected, reverse=True), rtol=1e-5)


def term_weights(folder: Path, text: str, pooling: str = "max", logs: int = 1) -> np.ndarray:
    """Compute the weight of each term as SpladePooling does."""
    ids = load_tokenizer(folder / "tokenizer.json").encode(text).ids
    weights = np.maximum(run(folder, ids, [1] * len(ids)), 0)
    for _ in range(logs):
        weights = np.log1p(weights)
    return np.asarray(weights.max(axis=0) if pooling == "max" else weights.sum(axis=0))


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        ({}, {}),
        ({"modules": False}, {}),
        ({"pooled": True}, {}),
        ({"pooled": True, "modules": False}, {}),
        ({"pooling_strategy": "sum", "activation_function": "log1p_relu"}, {"pooling": "sum", "logs": 2}),
    ],
    ids=str,
)
def test_term_weights_follow_sentence_transformers(splade: Path, tmp_path: Path, made: Any, rule: Any) -> None:
    folder = write_splade(tmp_path / "model", **made)
    found = ortolan.embed_sparse(TEXTS, folder, batch_tokens=60)
    assert (found.indices.dtype, found.values.dtype, found.width) == (np.int32, np.float32, VOCABULARY)
    few = ortolan.embed_sparse(TEXTS, folder, top_k=7)
    for number, (indices, values) in enumerate(found):
        expected = term_weights(splade, TEXTS[number], **rule)
        np.testing.assert_array_equal(indices, np.flatnonzero(expected))
        np.testing.assert_allclose(values, expected[indices], rtol=1e-5, atol=1e-6)
        strongest = np.sort(np.argsort(-expected, kind="stable")[:7])
        np.testing.assert_array_equal(few[number][0], strongest)
        np.testing.assert_array_equal(few[number][1], values[np.isin(indices, strongest)])


@pytest.mark.parametrize("pooled", [False, True])
def test_optimized_term_weights(tmp_path: Path, pooled: bool) -> None:
    """A text has the same bits alone and in any batch. In bf16, the strongest terms are the original's."""
    folder = write_splade(tmp_path / "model", pooled=pooled)
    for weights in ("bf16", "int8"):
        report = ortolan.optimize_onnx(folder, tmp_path / weights, weights=weights)
        assert any(note.startswith("padding is skipped") for note in report.notes)
        fast = TextEncoder(tmp_path / weights)
        found = ortolan.embed_sparse(TEXTS, fast, top_k=16)
        for text, one in zip(TEXTS, found, strict=True):
            np.testing.assert_array_equal(ortolan.embed_sparse([text], fast, top_k=16)[0], one)
    expected = ortolan.embed_sparse(TEXTS, folder, top_k=16)
    for one, other in zip(ortolan.embed_sparse(TEXTS, tmp_path / "bf16", top_k=16), expected, strict=True):
        assert len(np.intersect1d(one[0], other[0])) >= 15


def test_command_line(colbert: Path, splade: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")

    def embed(folder: Path, output: str, *more: str) -> Any:
        given = ["embed", str(folder), str(tmp_path / "texts.txt"), "-o", str(tmp_path / output), *more]
        return CliRunner().invoke(app, given)

    result = embed(colbert, "tokens.npy", "--query", "--json")
    assert result.exit_code == 0, result.output
    expected = ortolan.embed_tokens(TEXTS, colbert, query=True)
    assert json.loads(result.stdout)["tokens"] == len(expected.vectors)
    np.testing.assert_array_equal(np.load(tmp_path / "tokens.npy"), expected.vectors)
    np.testing.assert_array_equal(np.load(tmp_path / "tokens.lengths.npy"), expected.lengths)
    result = embed(splade, "terms.npz", "--top-k", "5")
    assert result.exit_code == 0 and "5 sparse vectors of width 256" in result.stdout, result.output
    rows, few = load_npz(tmp_path / "terms.npz"), ortolan.embed_sparse(TEXTS, splade, top_k=5)
    assert rows.shape == (len(TEXTS), VOCABULARY)
    np.testing.assert_array_equal(rows[2].indices, few[2][0])
    np.testing.assert_array_equal(rows.data, few.values)
    for wrong in (embed(splade, "terms.npy"), embed(colbert, "tokens.npz"), embed(splade, "terms.npz", "--query")):
        assert wrong.exit_code == 1
    assert not (tmp_path / "terms.npy").exists()


def test_no_texts(colbert: Path, splade: Path) -> None:
    tokens, terms = ortolan.embed_tokens([], colbert), ortolan.embed_sparse([], splade)
    assert (tokens.vectors.shape, len(tokens), len(terms), terms.starts.tolist()) == ((0, 16), 0, 0, [0])


def test_what_is_refused(colbert: Path, splade: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"a vector for each token: call embed_tokens or rerank; give a model that"):
        ortolan.embed(TEXTS, colbert)
    with pytest.raises(ArgumentError, match="weights terms: call embed_sparse; give a late-interaction model"):
        ortolan.embed_tokens(TEXTS, splade)
    with pytest.raises(ArgumentError, match="top_k is 0"):
        ortolan.embed_sparse(TEXTS, splade, top_k=0)
    with pytest.raises(ModelError, match="pooling is 'cls', but the model gives weights of terms"):
        TextEncoder(splade, settings=TextInput(pooling="cls"))
    for folder in (colbert, splade):
        with pytest.raises(ModelError, match="expected an embedding model or a reranker"):
            EncoderEngine(folder)
        with pytest.raises(ModelError, match="keep tokens as the model's inputs, and use ortolan"):
            ortolan.optimize_onnx(folder, tmp_path / "out", weights="int8", texts_in=True)
    folder = write_colbert(tmp_path / "no-prefix", query_prefix="[X] ")
    with pytest.raises(ModelError, match=r"no token '\[X\] ', which the model's folder puts before texts"):
        ortolan.embed_tokens(TEXTS, folder, query=True)
    write_json(folder / "1_Dense" / "config.json", {"in_features": 7, "out_features": 48})
    with pytest.raises(ModelError, match=r"expected linear\.weight of shape \(48, 7\)"):
        TextEncoder(folder)
    write_json(splade / "1_SpladePooling" / "config.json", {"pooling_strategy": "mean"})
    with pytest.raises(ModelError, match="has pooling_strategy 'mean'"):
        TextEncoder(splade)


@pytest.mark.parametrize("files", [{"tokenizer_config.json": {"pad_token": "[MASK]", "mask_token": "[MASK]"}}, {}])
def test_the_mask_token_is_never_padding(tmp_path: Path, files: dict[str, Any]) -> None:
    """PyLate pads with the mask token: then the tokenizer's [PAD] is padding, also if no file names the mask token."""
    folder = write_colbert(tmp_path / "model")
    said = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    write_json(folder / "tokenizer.json", said | {"padding": {**said["padding"], "pad_id": 4, "pad_token": "[MASK]"}})
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).unlink()
    for name, content in files.items():
        write_json(folder / name, content)
    assert read_padding_id(folder) == 0
