"""Embedders and rerankers with a decoder's layers: folders like those of Qwen3-Embedding and Qwen3-Reranker."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import ortolan
from ortolan import ModelError, TextInput
from ortolan.engines import EncoderEngine
from ortolan.graph_passes.text.tokenizer_file import load_tokenizer
from ortolan.models import tiny

from .reranker import QWEN3, QWEN3_CONFIG, write_judge
from .tokenizer_files import qwen3

pytest.importorskip("onnxruntime_extensions")

TEXTS = ["The cat sleeps.", "", "unaffable cats, 中文!", "the cat " * 9, "1234"]
QUERY, TASK = "doesn't the cat sleep?", "Find cats"
YES, NO = 7, 450
INT8: dict[str, Any] = {"weights": "int8"}


def write_json(path: Path, said: Any) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(said), encoding="utf-8")


def write_modules(folder: Path, **modules: dict[str, Any]) -> None:
    kinds = {name: f"sentence_transformers.models.{name}" for name in ("Transformer", *modules)}
    places = {name: f"{number}_{name}" if number else "" for number, name in enumerate(kinds)}
    write_json(folder / "modules.json", [{"type": kind, "path": places[name]} for name, kind in kinds.items()])
    for name, said in modules.items():
        write_json(folder / places[name] / "config.json", said)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of an embedder and of its optimized form."""
    root = tmp_path_factory.mktemp("embedder")
    folder = root / "model"
    write_json(folder / "config.json", QWEN3_CONFIG)
    write_json(folder / "tokenizer_config.json", {"padding_side": "left", "model_max_length": 131072})
    write_modules(folder, Pooling={"pooling_mode_lasttoken": True, "include_prompt": True}, Normalize={})
    prompts = {"query": "Instruct: find it\nQuery:", "document": ""}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    qwen3(folder / "tokenizer.json")
    ir.save(tiny.tiny_llama_encoder(**QWEN3), folder / "model.onnx")
    report = ortolan.optimize_onnx(folder, root / "fast", **INT8)
    assert any(note.startswith("padding is skipped") for note in report.notes), report.notes
    return folder, root / "fast"


def feeds_of(folder: Path, texts: list[str], left: bool) -> dict[str, np.ndarray]:
    """Return padded tokens, and positions as transformers counts them for decoders."""
    encoded = [one.ids for one in load_tokenizer(folder / "tokenizer.json").encode_batch(texts)]
    shape = (len(texts), max(map(len, encoded)) + 2)
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, one in enumerate(encoded):
        where = slice(shape[1] - len(one), None) if left else slice(len(one))
        ids[row, where], mask[row, where] = one, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0)}


def test_vectors_are_those_of_the_last_token(embedder: tuple[Path, Path]) -> None:
    folder, fast = embedder
    found = ortolan.embed(TEXTS, fast)
    feeds = feeds_of(folder, TEXTS, left=False)
    tokens = ortolan.create_session(folder).run(None, feeds)[0]
    last = tokens[np.arange(len(TEXTS)), feeds["attention_mask"].sum(axis=1) - 1]
    assert ((last / np.linalg.norm(last, axis=1, keepdims=True)) * found).sum(axis=1).min() > 0.995
    np.testing.assert_array_equal(found, np.concatenate([ortolan.embed([text], fast) for text in TEXTS]))
    query = ortolan.embed(TEXTS[:1], fast, settings=TextInput(prompt_name="query"))
    np.testing.assert_array_equal(query, ortolan.embed(["Instruct: find it\nQuery:The cat sleeps."], fast))


def test_padding_on_either_side_gives_the_same_bits(embedder: tuple[Path, Path]) -> None:
    _, fast = embedder
    session = ortolan.create_session(fast)
    sides = [feeds_of(fast, TEXTS, left) for left in (False, True)]
    right, left = (session.run(None, feeds)[0][feeds["attention_mask"] != 0] for feeds in sides)
    np.testing.assert_array_equal(right, left)


def test_an_embedder_that_takes_texts(embedder: tuple[Path, Path], tmp_path: Path) -> None:
    folder, fast = embedder
    report = ortolan.optimize_onnx(folder, tmp_path / "texts", texts_in=True, **INT8)
    assert any("pooling lasttoken, of length 1, BPE tokenizer" in note for note in report.notes)
    found = ortolan.embed(TEXTS, tmp_path / "texts")
    np.testing.assert_allclose(found, ortolan.embed(TEXTS, fast), atol=1e-6)
    np.testing.assert_array_equal(found, np.concatenate([ortolan.embed([text], tmp_path / "texts") for text in TEXTS]))


def prompt_of(query: str, text: str, task: str) -> str:
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {text}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}|{% elif m.role == 'query' %}Q: {{ m.content }}"
    "{% elif m.role == 'document' %} D: {{ m.content }}{% endif %}{% endfor %}<|im_end|>\n<think>"
)


def logits_of(folder: Path, prompts: list[str]) -> np.ndarray:
    """Return the logits after the last token of each prompt, [prompts, vocabulary]."""
    session, found = ortolan.create_session(folder), []
    for prompt in prompts:
        ids = np.array([load_tokenizer(folder / "tokenizer.json").encode(prompt, add_special_tokens=False).ids])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}
        found.append(session.run(None, feeds)[0][0, -1])
    return np.stack(found)


@pytest.mark.parametrize("kind", ["model card", "chat template"])
def test_a_decoder_that_answers_yes_or_no(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    write_judge(folder)
    if kind == "model card":
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")
        prompts = [prompt_of(QUERY, text, TASK) for text in TEXTS]
    else:
        yes, no = YES, NO
        write_modules(folder, LogitScore={"true_token_id": YES, "false_token_id": NO})
        write_json(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        prompts = [f"{TASK}|Q: {QUERY} D: {text}<|im_end|>\n<think>" for text in TEXTS]
        with pytest.raises(ModelError, match=r"judges pairs by the logits of two tokens; .*ortolan\.make_reranker"):
            ortolan.rerank(QUERY, TEXTS, folder)
    ortolan.make_reranker(folder, tmp_path / "reranker", instruction=TASK)
    report = ortolan.optimize_onnx(tmp_path / "reranker", tmp_path / "fast", **INT8)
    assert any(note.startswith("padding is skipped") for note in report.notes), report.notes
    pair = logits_of(folder, prompts)[:, [no, yes]].astype(np.float64)
    expected = np.exp(pair[:, 1]) / np.exp(pair).sum(axis=1)
    encoder = ortolan.TextEncoder(tmp_path / "reranker")
    np.testing.assert_allclose(encoder.score(QUERY, TEXTS), expected, atol=1e-5)
    fast = ortolan.TextEncoder(tmp_path / "fast")
    found = fast.score(QUERY, TEXTS)
    np.testing.assert_allclose(found, expected, atol=0.05)
    np.testing.assert_array_equal(found, [fast.score(QUERY, [text])[0] for text in TEXTS])
    ranked = ortolan.rerank(QUERY, TEXTS, tmp_path / "fast")
    assert [one.index for one in ranked] == list(np.argsort(-found, kind="stable"))
    served = EncoderEngine(tmp_path / "fast")
    np.testing.assert_array_equal(served.run_each(served.encoder.tokenize_pairs(QUERY, TEXTS)), found)


def test_a_reranker_that_takes_texts(tmp_path: Path) -> None:
    write_judge(tmp_path / "judge")
    ortolan.make_reranker(tmp_path / "judge", tmp_path / "reranker")
    ortolan.optimize_onnx(tmp_path / "reranker", tmp_path / "fast", **INT8)
    ortolan.optimize_onnx(tmp_path / "reranker", tmp_path / "texts", texts_in=TextInput(max_tokens=200), **INT8)
    expected = ortolan.TextEncoder(tmp_path / "fast", settings=TextInput(max_tokens=200)).score(QUERY, TEXTS)
    texts = ortolan.TextEncoder(tmp_path / "texts")
    np.testing.assert_allclose(texts.score(QUERY, TEXTS), expected, atol=1e-6)
    np.testing.assert_array_equal(texts.score(QUERY, TEXTS), [texts.score(QUERY, [text])[0] for text in TEXTS])


def test_long_texts_are_cut_in_front_of_the_prompts_end(tmp_path: Path) -> None:
    write_judge(tmp_path / "judge")
    ortolan.make_reranker(tmp_path / "judge", tmp_path / "reranker")
    (short,) = ortolan.TextEncoder(tmp_path / "reranker").tokenize_pairs(QUERY, ["cat"])
    most = len(short) + 20
    encoder = ortolan.TextEncoder(tmp_path / "reranker", settings=TextInput(max_tokens=most))
    (long,) = encoder.tokenize_pairs(QUERY, ["cat " * 300])
    assert long.ids is not None and short.ids is not None
    assert len(long) == most and list(long.ids)[-6:] == list(short.ids)[-6:]
    with pytest.raises(ModelError, match="max_tokens is 9, expected more than the"):
        ortolan.TextEncoder(tmp_path / "reranker", settings=TextInput(max_tokens=9)).score(QUERY, ["cat"])


def test_a_conversion_for_sequence_classification(tmp_path: Path) -> None:
    write_judge(tmp_path / "judge", "score", architectures=["Qwen3ForSequenceClassification"])
    ortolan.make_reranker(tmp_path / "judge", tmp_path / "reranker")
    ortolan.optimize_onnx(tmp_path / "reranker", tmp_path / "fast", **INT8)
    found, plain = (ortolan.TextEncoder(tmp_path / name).score(QUERY, TEXTS) for name in ("fast", "reranker"))
    np.testing.assert_allclose(found, plain, atol=0.05)


def test_what_cannot_become_a_reranker(tmp_path: Path) -> None:
    write_judge(tmp_path / "judge", model_type="llama")
    with pytest.raises(ModelError, match="no chat template with the roles 'query' and 'document'"):
        ortolan.make_reranker(tmp_path / "judge", tmp_path / "out")
    (tmp_path / "judge" / "chat_template.jinja").write_text("{{ 'query' }}{{ 'document' }}", encoding="utf-8")
    with pytest.raises(ModelError, match="does not render a query and then a document"):
        ortolan.make_reranker(tmp_path / "judge", tmp_path / "out")
    (tmp_path / "judge" / "chat_template.jinja").unlink()
    write_json(tmp_path / "judge" / "config.json", QWEN3_CONFIG)
    ir.save(tiny.tiny_llama(**QWEN3), tmp_path / "judge" / "model.onnx")
    with pytest.raises(ModelError, match="expected attention_mask and no cache"):
        ortolan.make_reranker(tmp_path / "judge", tmp_path / "out")
    shutil.rmtree(tmp_path / "judge")
    with pytest.raises(ModelError, match="is not a folder"):
        ortolan.make_reranker(tmp_path / "judge", tmp_path / "out")
