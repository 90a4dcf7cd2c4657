"""sentence-transformers folders: models with text inputs follow the folder's settings."""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import ortolan
from ortolan import ModelError, OrtolanError, TextInput
from ortolan.graph_passes.text import tokenizer_file
from ortolan.graph_passes.text.sentence_folder import read_sentence_folder
from ortolan.graph_passes.text.text_input import add_text_input, plan_text_input
from ortolan.graph_passes.text.text_plan import read_settings
from ortolan.graph_passes.text.tokenizer_file import read_tokenizer_file
from ortolan.models import tiny

from .reranker import write_reranker
from .tokenizer_files import byte_level, xlm_roberta
from .wordpiece_file import write_wordpiece

pytest.importorskip("onnxruntime_extensions")

TEXTS = ["The cat sleeps.", "", "unaffable cats, 中文!", "the " * 40]
BF16: dict[str, Any] = {"weights": "bf16"}
KIND = "sentence_transformers.models."
TRANSFORMER, POOLING = {"path": "", "type": KIND + "Transformer"}, {"path": "1_Pooling", "type": KIND + "Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": KIND + "Normalize"}


def write_json(path: Path, said: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(said), encoding="utf-8")


@pytest.fixture
def folder(tmp_path) -> Path:
    """Write a folder like bge-small-en's, with CLS pooling and normalization."""
    folder = tmp_path / "bge-small"
    folder.mkdir()
    write_wordpiece(folder / "tokenizer.json", truncation=None)
    ir.save(tiny.tiny_bert(vocab_size=256), folder / "model.onnx")
    write_json(folder / "modules.json", [TRANSFORMER, POOLING, NORMALIZE])
    write_json(
        folder / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 12, "do_lower_case": False})
    return folder


def vectors(folder: Path, texts: list[str], **more: Any) -> np.ndarray:
    session = ortolan.create_session(folder)
    assert [one.name for one in session.get_inputs()] == ["text"]
    (found,) = session.run(["sentence_embedding"], {"text": np.array(texts, object), **more})
    for text, row in zip(texts, found, strict=True):
        (alone,) = session.run(None, {"text": np.array([text], object), **more})
        np.testing.assert_allclose(alone[0], row, rtol=1e-4, atol=1e-5)
    return found


@functools.cache
def plain_session(model: bytes) -> Any:
    """Return a session of the optimized model with token inputs."""
    return ortolan.create_session(ortolan.optimize_onnx(onnx.load_from_string(model), **BF16).model)


def token_vectors(folder: Path, texts: list[str], most: int = 12) -> list[np.ndarray]:
    """Return [tokens, hidden] for each text, from the optimized model with token inputs."""
    reader = read_tokenizer_file(folder / "tokenizer.json").tokenizer
    reader.enable_truncation(most)
    session = plain_session((folder / "model.onnx").read_bytes())
    names = {value.name for value in session.get_inputs()}
    found = []
    for text in texts:
        ids = np.array([reader.encode(text).ids])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        (tokens,) = session.run(["last_hidden_state"], {name: feeds[name] for name in names})
        found.append(tokens[0])
    return found


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


POOLED = {
    "cls": lambda rows: rows[0],
    "mean": lambda rows: rows.mean(axis=0),
    "lasttoken": lambda rows: rows[-1],
    "max": lambda rows: rows.max(axis=0),
    "mean_sqrt_len_tokens": lambda rows: rows.sum(axis=0) / np.sqrt(len(rows)),
    "weightedmean": lambda rows: np.average(rows, axis=0, weights=np.arange(1, len(rows) + 1)),
}


def test_a_folder_needs_no_flags(folder, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from ortolan.cli import app

    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))
    done = CliRunner().invoke(app, ["optimize", str(folder), "--texts-in", "-o", str(tmp_path / "fast")])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert "texts in, vectors out, pooling cls, of length 1, WordPiece tokenizer, up to 12 tokens" in shown
    expected = unit(np.stack([POOLED["cls"](rows) for rows in token_vectors(folder, TEXTS)]))
    # The default chooses formats by their speed, within a cosine of 0.99 for all answers together.
    assert (vectors(tmp_path / "fast", TEXTS) * expected).sum(axis=1).mean() > 0.99
    assert (tmp_path / "fast" / "modules.json").is_file()


@pytest.mark.parametrize(
    ("pooling", "normalized"), [(pooling, number % 2 == 1) for number, pooling in enumerate(POOLED)] + [("cls", True)]
)
def test_pooling_and_normalize(folder, tmp_path, pooling, normalized):
    write_json(folder / "1_Pooling" / "config.json", {"embedding_dimension": 48, "pooling_mode": pooling})
    write_json(folder / "modules.json", [TRANSFORMER, POOLING, *[NORMALIZE] * normalized])
    ortolan.optimize_onnx(folder, tmp_path / "fast", texts_in=True, **BF16)
    expected = np.stack([POOLED[pooling](rows) for rows in token_vectors(folder, TEXTS)])
    expected = unit(expected) if normalized else expected
    found = vectors(tmp_path / "fast", TEXTS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-2 * np.abs(expected).max())


def test_what_is_given_goes_before_what_the_folder_says(folder, tmp_path):
    text = TextInput(pooling="mean", normalize=False, max_tokens=6)
    ortolan.optimize_onnx(folder, tmp_path / "fast", texts_in=text, **BF16)
    expected = np.stack([rows.mean(axis=0) for rows in token_vectors(folder, TEXTS, 6)])
    np.testing.assert_allclose(vectors(tmp_path / "fast", TEXTS), expected, rtol=0, atol=1e-2 * np.abs(expected).max())


def test_prompts(folder, tmp_path):
    prompts = {"prompts": {"query": "see: ", "document": "", "other": None}, "default_prompt_name": "query"}
    write_json(folder / "config_sentence_transformers.json", prompts)
    ortolan.optimize_onnx(folder, tmp_path / "fast", texts_in=True, **BF16)
    ortolan.optimize_onnx(folder, tmp_path / "bare", texts_in=TextInput(prompt_name=""), **BF16)

    def named(*names: str) -> np.ndarray:
        session = ortolan.create_session(tmp_path / "fast")
        return session.run(None, {"text": np.array(TEXTS, object), "prompt_name": np.array(names, object)})[0]

    plain = vectors(tmp_path / "bare", TEXTS)
    query = vectors(tmp_path / "bare", ["see: " + text for text in TEXTS])
    assert np.abs(plain - query).max() > 0.01
    np.testing.assert_array_equal(vectors(tmp_path / "fast", TEXTS), query)
    np.testing.assert_array_equal(named("document"), plain)
    np.testing.assert_array_equal(named(""), plain)
    mixed = named("query", "document", "", "query")
    np.testing.assert_array_equal(mixed, np.where([[True], [False], [False], [True]], query, plain))
    for names in (("qery",), ("query", "query")):
        with pytest.raises(Exception, match=r"prompt_name_is_known|Expand"):
            named(*names)
    with pytest.raises(ModelError, match=r"no prompt 'quer' .* document, query; did you mean 'query'"):
        ortolan.optimize_onnx(folder, tmp_path / "no", texts_in=TextInput(prompt_name="quer"), **BF16)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "F32") -> None:
    header, data = {}, b""
    for name, array in tensors.items():
        content = array.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    said = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(said)) + said + data)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_dense(folder, tmp_path, dtype):
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(7, 48)).astype(np.float16), rng.normal(size=7).astype(np.float16)
    config = {"in_features": 48, "out_features": 7, "activation_function": "torch.nn.modules.activation.Tanh"}
    write_json(folder / "2_Dense" / "config.json", config)
    write_safetensors(folder / "2_Dense" / "model.safetensors", {"linear.weight": weight, "linear.bias": bias}, dtype)
    dense = {"path": "2_Dense", "type": "sentence_transformers.base.modules.dense.Dense"}
    write_json(folder / "modules.json", [TRANSFORMER, POOLING, dense, NORMALIZE])
    ortolan.optimize_onnx(folder, tmp_path / "fast", texts_in=True, **BF16)
    pooled = np.stack([rows[0] for rows in token_vectors(folder, TEXTS)])
    expected = unit(np.tanh(pooled @ weight.T.astype(np.float32) + bias.astype(np.float32)))
    np.testing.assert_allclose(vectors(tmp_path / "fast", TEXTS), expected, rtol=0, atol=2e-2)


def test_lower_case(folder, tmp_path):
    write_wordpiece(folder / "tokenizer.json", lowercase=False)
    ortolan.optimize_onnx(folder, tmp_path / "kept", texts_in=True, **BF16)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 12, "do_lower_case": True})
    ortolan.optimize_onnx(folder, tmp_path / "fast", texts_in=True, **BF16)
    kept = vectors(tmp_path / "kept", [text.lower() for text in TEXTS])
    np.testing.assert_array_equal(vectors(tmp_path / "fast", TEXTS), kept)


def test_lower_case_opens_the_tokenizer_when_it_is_asked_for(folder, monkeypatch):
    write_wordpiece(folder / "tokenizer.json", lowercase=False)
    write_json(folder / "sentence_bert_config.json", {"do_lower_case": True})
    model = folder / "model.onnx"
    with monkeypatch.context() as closed:
        closed.setattr(tokenizer_file, "_open", lambda content, path: pytest.fail("was opened"))
        file = read_settings(ir.load(model).graph.outputs, TextInput(), model).file
    assert file.tokenizer.encode("THE Cat").tokens == ["[CLS]", "the", "cat", "[SEP]"]
    assert [one["type"] for one in file.said["normalizer"]["normalizers"]] == ["Lowercase", "BertNormalizer"]
    kept = read_tokenizer_file(folder / "tokenizer.json")
    assert kept.tokenizer.encode("THE").tokens[1] != "the" and kept.said["normalizer"]["type"] == "BertNormalizer"


def test_a_model_that_pools_itself(tmp_path):
    """Optimum exports models whose output sentence_embedding is already pooled."""
    model = tiny.tiny_bert(vocab_size=256)
    tokens = model.graph.outputs[0]
    made = ir.node("ReduceMax", [tokens], {"axes": [1], "keepdims": 0}, num_outputs=1)
    made.outputs[0].name, made.outputs[0].type = "sentence_embedding", tokens.type
    made.outputs[0].shape = ir.Shape(["batch", 48])
    model.graph.append(made)
    tokens.name = "token_embeddings"
    model.graph.outputs.append(made.outputs[0])
    ir.save(model, tmp_path / "model.onnx")
    write_wordpiece(tmp_path / "tokenizer.json")
    for name, normalize in (("own", None), ("unit", True)):
        text = TextInput(max_tokens=12, normalize=normalize)
        ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / f"{name}.onnx", texts_in=text, **BF16)
    sessions = [ortolan.create_session(tmp_path / f"{name}.onnx") for name in ("own", "unit")]
    own, one = (session.run(None, {"text": np.array(["the cat"], object)})[0] for session in sessions)
    np.testing.assert_allclose(unit(own), one, rtol=1e-4, atol=1e-5)
    assert np.linalg.norm(own) > 1.1


IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("tokenizer", "config", "given", "sigmoid"),
    [
        (write_wordpiece, {}, None, True),
        (xlm_roberta, {"sentence_transformers": {"activation_fn": IDENTITY}}, None, False),
        (byte_level, {"sbert_ce_default_activation_function": IDENTITY}, None, False),
        (byte_level, {"sentence_transformers": {"activation_fn": IDENTITY}}, "sigmoid", True),
    ],
)
def test_rerankers_score_pairs(tmp_path, tokenizer, config, given, sigmoid):
    folder = tmp_path / "reranker"
    write_reranker(folder)
    tokenizer(folder / "tokenizer.json")
    write_json(folder / "tokenizer_config.json", {"model_max_length": 14})
    write_json(folder / "config.json", {"max_position_embeddings": 64, **config})
    report = ortolan.optimize_onnx(folder, tmp_path / "fast", texts_in=TextInput(activation=given), **BF16)
    assert any(note.startswith("pairs of texts in, scores out, activation") for note in report.notes)
    ortolan.optimize_onnx(folder / "model.onnx", tmp_path / "plain.onnx", **BF16)
    session, plain = (ortolan.create_session(path) for path in (tmp_path / "fast", tmp_path / "plain.onnx"))
    assert [one.name for one in session.get_inputs()] == ["text", "text_pair"]
    first, second = TEXTS, ["cats sleep", "the " * 9, "", "中文"]
    (scores,) = session.run(["score"], {"text": np.array(first, object), "text_pair": np.array(second, object)})
    assert scores.shape == (4,)
    with pytest.raises(Exception, match="text_and_text_pair_have_one_length"):
        session.run(None, {"text": np.array(first, object), "text_pair": np.array(second[:2], object)})
    reader = read_tokenizer_file(folder / "tokenizer.json").tokenizer
    reader.enable_truncation(14)
    for one, other, score in zip(first, second, scores, strict=True):
        encoded = reader.encode(one, other)
        feeds = {"input_ids": encoded.ids, "attention_mask": encoded.attention_mask, "token_type_ids": encoded.type_ids}
        ((expected,),) = plain.run(None, {name: np.array([row]) for name, row in feeds.items()})[0]
        expected = 1 / (1 + np.exp(-expected)) if sigmoid else expected
        np.testing.assert_allclose(score, expected, rtol=0.02, atol=0.02)
        alone = session.run(None, {"text": np.array([one], object), "text_pair": np.array([other], object)})[0]
        np.testing.assert_allclose(alone, [score], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("said", "sigmoid"), [({}, True), ({"activation_fn": IDENTITY}, False)])
def test_cross_encoders_with_modules(tmp_path, said, sigmoid):
    """sentence-transformers 5.7 writes a modules.json with only a Transformer for cross-encoders."""
    write_reranker(tmp_path)
    write_wordpiece(tmp_path / "tokenizer.json")
    write_json(tmp_path / "modules.json", [TRANSFORMER])
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 9})
    write_json(tmp_path / "config_sentence_transformers.json", {"model_type": "CrossEncoder", **said})
    encoder = ortolan.TextEncoder(tmp_path)
    assert (encoder.kind, encoder.max_tokens) == ("reranker", 9)
    raw = ortolan.TextEncoder(tmp_path, settings=TextInput(activation="none")).score("the cat", ["sleeping", "a b c"])
    found = encoder.score("the cat", ["sleeping", "a b c"])
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-raw)) if sigmoid else raw, rtol=1e-6)
    write_json(tmp_path / "config_sentence_transformers.json", {"model_type": "CrossEncoder", "activation_fn": 1})
    with pytest.raises(ModelError, match="activation_fn 1"):
        ortolan.TextEncoder(tmp_path)


def test_rerankers_that_are_none(tmp_path):
    write_reranker(tmp_path / "model", labels=3)
    write_wordpiece(tmp_path / "model" / "tokenizer.json")
    with pytest.raises(ModelError, match="3 labels, expected 1"):
        ortolan.optimize_onnx(tmp_path / "model", tmp_path / "fast", texts_in=True)
    write_reranker(tmp_path / "model")
    for text, match in (
        (TextInput(pooling="mean"), "gives scores, not vectors"),
        (TextInput(activation="tanh"), "activation is 'tanh'"),
    ):
        with pytest.raises(ModelError, match=match):
            ortolan.optimize_onnx(tmp_path / "model", tmp_path / "fast", texts_in=text)
    write_json(tmp_path / "model" / "config.json", {"sentence_transformers": {"activation_fn": "torch.nn.Softplus"}})
    with pytest.raises(ModelError, match=r"torch.nn.Softplus.*--activation"):
        ortolan.optimize_onnx(tmp_path / "model", tmp_path / "fast", texts_in=True)
    assert not (tmp_path / "fast").exists()


@pytest.mark.parametrize(("model_type", "first"), [("xlm-roberta", 2), ("bert", 0)])
def test_positions_begin_where_the_model_counts_from(tmp_path, model_type, first):
    """RoBERTa's positions start after the padding token's id, BERT's at 0. Positions of padding do not matter."""
    names = ("input_ids", "attention_mask", "position_ids")
    ids, mask, places = (
        ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", "tokens"]))
        for name in names
    )
    tape = ir.tape.Tape()
    shown = tape.op("Mul", [places, mask])
    shown = tape.op("Add", [shown, tape.op("Mul", [ids, tape.op("Constant", [], {"value": ir.tensor(np.int64(0))})])])
    axes = tape.op("Constant", [], {"value": ir.tensor(np.array([2]))})
    made = tape.op("Unsqueeze", [tape.op("Cast", [shown], {"to": 1}), axes])
    made.name, made.type = "last_hidden_state", ir.TensorType(ir.DataType.FLOAT)
    made.shape = ir.Shape(["batch", "tokens", 1])
    graph = ir.Graph([ids, mask, places], [made], nodes=list(tape.nodes), opset_imports={"": 17}, name="positions")
    model = ir.Model(graph, ir_version=8)
    write_json(tmp_path / "config.json", {"model_type": model_type, "max_position_embeddings": 20})
    xlm_roberta(tmp_path / "tokenizer.json")
    plan = plan_text_input(model, TextInput(pooling="max", normalize=False), tmp_path / "model.onnx")
    assert plan.max_tokens == 20 - first
    add_text_input(model, plan)
    session = ortolan.create_session(ir.to_proto(model))
    texts = ["", "the cat", "the " * 99]
    (last,) = session.run(None, {"text": np.array(texts, object)})
    counts = [min(len(one.ids), plan.max_tokens) for one in plan.file.tokenizer.encode_batch(texts)]
    assert last[:, 0].tolist() == [first + count - 1 for count in counts]


@pytest.mark.parametrize(
    ("file", "said", "match"),
    [
        ("modules.json", [TRANSFORMER], "names the modules Transformer, expected"),
        ("modules.json", [TRANSFORMER, POOLING, {"path": "", "type": KIND + "LSTM"}], "LSTM, expected"),
        ("modules.json", [{"path": "", "type": "custom_st.Transformer"}, POOLING], r"custom_st\.Transformer"),
        ("modules.json", [TRANSFORMER, {**POOLING, "path": "../1_Pooling"}], "leads out of the folder"),
        ("modules.json", [TRANSFORMER, {**POOLING, "path": "/etc"}], "leads out of the folder"),
        ("modules.json", {"a": 1}, "not a list of modules"),
        ("modules.json", [1], "not a list of modules"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "cls.*max"),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "attention"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean"], "include_prompt": False}, "include_prompt"),
        ("1_Pooling/config.json", [], "expected a JSON object"),
        ("sentence_bert_config.json", {"max_seq_length": "12"}, "max_seq_length '12'"),
        ("sentence_bert_config.json", {"max_seq_length": 2}, "max_tokens is 2"),
        ("config_sentence_transformers.json", {"prompts": {"query": 1}}, "prompts"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name 'query'"),
        ("tokenizer_config.json", {"truncation_side": "left"}, "cuts texts at their beginning"),
        ("config.json", {"num_labels": -1}, "num_labels -1"),
    ],
)
def test_folders_that_are_refused(folder, tmp_path, file, said, match):
    write_json(folder / file, said)
    stages: list[str] = []
    with pytest.raises(ModelError, match=match):
        ortolan.optimize_onnx(
            folder, tmp_path / "fast", texts_in=True, progress=lambda stage, done, total: stages.append(stage)
        )
    assert stages == [] and not (tmp_path / "fast").exists()


def test_options_for_texts_need_texts_in(folder, tmp_path):
    from typer.testing import CliRunner

    from ortolan.cli import app

    for option in (["--pooling", "mean"], ["--no-normalize"], ["--max-tokens", "9"], ["--prompt-name", "query"]):
        done = CliRunner().invoke(app, ["optimize", str(folder), "-o", str(tmp_path / "fast"), *option])
        assert done.exit_code == 1 and "--texts-in" in done.stderr, done.output
    (folder / "tokenizer.json").unlink()
    done = CliRunner().invoke(app, ["optimize", str(folder), "-o", str(tmp_path / "fast"), "--texts-in"])
    assert done.exit_code == 1 and "--tokenizer" in done.stderr
    assert not (tmp_path / "fast").exists()


def test_mutated_files_raise_errors_of_ours(folder):
    """Replace values by other types and remove keys, in each file that is read."""
    dense = {"path": "2_Dense", "type": KIND + "Dense"}
    write_json(folder / "modules.json", [TRANSFORMER, POOLING, dense, NORMALIZE])
    write_json(folder / "2_Dense" / "config.json", {"in_features": 48, "out_features": 2, "activation_function": None})
    write_safetensors(folder / "2_Dense" / "model.safetensors", {"linear.weight": np.ones((2, 48))})
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"q": "q: "}, "default_prompt_name": "q"})
    write_json(
        folder / "config.json", {"id2label": {"0": "a"}, "sentence_transformers": {"activation_fn": "a.Sigmoid"}}
    )
    read_sentence_folder(folder)
    rng = np.random.default_rng(0)
    refused = 0
    for path in folder.glob("**/*.json"):
        if path.name == "tokenizer.json":
            continue
        content = path.read_bytes()
        for _ in range(60):
            cut = bytearray(content)
            place = rng.integers(len(cut))
            cut[place : place + rng.integers(1, 9)] = rng.choice(
                [b"", b"0", b"[", b"null", b'"', b"{}", b"-1", b"\xff"]
            )
            path.write_bytes(bytes(cut))
            try:
                read_sentence_folder(folder)
            except OrtolanError:
                refused += 1
        path.write_bytes(content)
    weights = folder / "2_Dense" / "model.safetensors"
    content = weights.read_bytes()
    for _ in range(200):
        cut = bytearray(content)
        cut[rng.integers(120)] = rng.integers(256)
        weights.write_bytes(bytes(cut)[: rng.integers(1, len(cut) + 1)])
        try:
            read_sentence_folder(folder)
        except OrtolanError:
            refused += 1
    assert refused > 200
