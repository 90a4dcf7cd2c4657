"""A tokenizer in the model: the vectors equal those of `tokenizers`, a session and separate pooling."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import ortolan
from ortolan import ArgumentTypeError, LibraryError, ModelError, TextInput
from ortolan.graph_passes.auto import layer_times, search
from ortolan.graph_passes.auto.candidates import ORIGINAL
from ortolan.graph_passes.report.figures import Timing
from ortolan.graph_passes.text.text_input import PROBES, add_text_input, plan_text_input, tokenizer_model
from ortolan.graph_passes.text.texts import feeds_of_texts
from ortolan.graph_passes.text.tokenizer_file import load_tokenizer
from ortolan.models import tiny

from ..external_weights import put_weights_outside
from ..recipes.forms import NAMED
from .wordpiece_file import write_wordpiece

pytest.importorskip("onnxruntime_extensions")

MPNET = ("<pad>", "[UNK]", "<s>", "</s>", "<mask>")


def tokenizer_alone(path: Path, most: int) -> ir.Model:
    model = tiny.tiny_bert(vocab_size=256, max_position_embeddings=512)
    return tokenizer_model(plan_text_input(model, TextInput(path, max_tokens=most)))


def open_tokenizer(path: Path, most: int):
    """Return a function that maps texts to lists of ids with the graph's tokenizer."""
    session = ortolan.create_session(ir.to_proto(tokenizer_alone(path, most)))

    def encode(texts: list[str]) -> list[list[int]]:
        ids, mask, _ = session.run(None, {"text": np.array(texts, object)})
        assert ids.shape == mask.shape == (len(texts), max([2, *mask.sum(axis=1)]))
        return [row[kept.astype(bool)].tolist() for row, kept in zip(ids, mask, strict=True)]

    return encode


@pytest.mark.parametrize("lowercase", [True, False])
def test_every_character_is_read_as_tokenizers_reads_it(tmp_path, lowercase):
    path = write_wordpiece(tmp_path / "tokenizer.json", lowercase)
    tokenizer = load_tokenizer(path)
    encode = open_tokenizer(path, 400)
    codes = [code for code in range(1, 0x30000) if not 0xD800 <= code < 0xE000 and (code < 0x600 or code % 23 == 0)]
    codes += range(0x30000, 0x110000, 997)
    texts = []
    for start in range(0, len(codes), 16):
        characters = [chr(code) for code in codes[start : start + 16]]
        texts.append(" ".join(f"a{character}b {character} x{character}" for character in characters))
    for start in range(0, len(texts), 64):
        part = texts[start : start + 64]
        assert encode(part) == [encoding.ids[:399] + encoding.ids[-1:] if len(encoding.ids) > 400 else encoding.ids
                                for encoding in tokenizer.encode_batch(part)]  # fmt: skip


@pytest.mark.parametrize("specials", [("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), MPNET])
def test_texts_of_random_parts(tmp_path, specials):
    path = write_wordpiece(tmp_path / "tokenizer.json", specials=specials)
    tokenizer = load_tokenizer(path)
    tokenizer.enable_truncation(24)
    encode = open_tokenizer(path, 24)
    parts = [*specials, specials[2].lower(), "the ", "cat", "sleeping", "s", "unaffable", "x" * 60, " ", "  ", "\t\n"]
    parts += [*",中丂ΩÄ😀☃-[]’²", "e\u0301", "\u0301", "\u200d", "\ue123", "\u00a0"]
    rng = random.Random(0)
    texts = ["".join(rng.choices(parts, k=rng.randrange(12))) for _ in range(400)]
    assert encode(texts) == [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def test_cut_padded_and_empty(tmp_path):
    path = write_wordpiece(tmp_path / "tokenizer.json")
    encode = open_tokenizer(path, 5)
    assert [len(ids) for ids in encode(["", "the", "the cat sleeps the cat", "the cat sleeping"])] == [2, 3, 5, 5]
    assert encode([]) == []


def pooled(model: Path, tokenizer: Path, texts: list[str], pooling: str, normalize: bool, most: int) -> np.ndarray:
    """Run the tokenizer, the model and the pooling separately."""
    reader = load_tokenizer(tokenizer)
    reader.enable_truncation(most)
    session = ortolan.create_session(model)
    names = {value.name for value in session.get_inputs()}
    rows = []
    for text in texts:
        ids = np.array([reader.encode(text).ids])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        (tokens,) = session.run(["last_hidden_state"], {name: feeds[name] for name in names})
        row = tokens[0, 0] if pooling == "cls" else tokens[0].mean(axis=0)
        rows.append(row / np.linalg.norm(row) if normalize else row)
    return np.stack(rows)


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False)])
def test_an_optimized_encoder_takes_texts(tmp_path, pooling, normalize):
    tokenizer = write_wordpiece(tmp_path / "tokenizer.json")
    ir.save(tiny.tiny_bert(vocab_size=256), tmp_path / "model.onnx")
    options = {"recipe": NAMED["sparse-bf16"], "options": {"sparsity": 0.3}}
    ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "tokens.onnx", **options)
    text = TextInput(tokenizer, pooling, normalize, max_tokens=12)
    report = ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "fast.onnx", texts_in=text, **options)
    assert report.replaced

    session = ortolan.create_session(tmp_path / "fast.onnx")
    assert [(one.name, one.type) for one in session.get_inputs()] == [("text", "tensor(string)")]
    texts = ["The cat sleeps.", "", "unaffable cats, 中文!", "the " * 40]
    (found,) = session.run(["sentence_embedding"], {"text": np.array(texts, object)})
    expected = pooled(tmp_path / "tokens.onnx", tokenizer, texts, pooling, normalize, 12)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-2 * np.abs(expected).max())
    for text_, row in zip(texts, expected, strict=True):
        (alone,) = session.run(None, {"text": np.array([text_], object)})
        np.testing.assert_allclose(alone[0], row, rtol=1e-5, atol=1e-6)
        if text_:  # the empty text has only two tokens, for which bf16 layers sum in a different order
            np.testing.assert_array_equal(alone[0], found[texts.index(text_)])
    assert session.run(None, {"text": np.array([], object)})[0].shape == (0, expected.shape[1])


def with_unknown_positions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Rename the table of positions, so that it cannot be found by its name."""
    for node in model.graph.node:
        node.name = node.name.replace("position", "place")
        node.input[:] = [name.replace("position_embeddings.weight", "places") for name in node.input]
    for weight in model.graph.initializer:
        weight.name = weight.name.replace("position_embeddings.weight", "places")
    return model


def test_refusals(tmp_path):
    tokenizer = write_wordpiece(tmp_path / "tokenizer.json", truncation=None)
    ir.save(tiny.tiny_bert(vocab_size=256), tmp_path / "model.onnx")
    ir.save(tiny.tiny_llama(), tmp_path / "decoder.onnx")

    def refused(match: str, model: str = "model.onnx", **text) -> None:
        arguments = {"tokenizer": tokenizer, "max_tokens": 16} | text
        with pytest.raises(ModelError, match=match):
            ortolan.optimize_onnx(tmp_path / model, tmp_path / "out.onnx", texts_in=TextInput(**arguments))
        assert not (tmp_path / "out.onnx").exists()

    onnx.save(with_unknown_positions(onnx.load(tmp_path / "model.onnx")), tmp_path / "unnamed.onnx")
    refused("has no limit of tokens per text; give max_tokens", "unnamed.onnx", max_tokens=None)
    with pytest.raises(ArgumentTypeError, match="texts_in is a str"):
        ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "out.onnx", texts_in="tokenizer.json")
    for few in (2, 0, -5):
        refused(f"max_tokens is {few} .*expected 3 to 65536", max_tokens=few)
    refused("pooling is 'most'", pooling="most")
    refused("activation was given, but the model gives vectors", activation="none")
    refused("activation is 'tanh', expected one of sigmoid, none$", activation="tanh")
    refused("does not exist", tokenizer=tmp_path / "none.json")
    refused("inputs", model="decoder.onnx")
    (tmp_path / "broken.json").write_text("{")
    refused("not a tokenizer.json", tokenizer=tmp_path / "broken.json")
    content = json.loads(tokenizer.read_text())
    content["pre_tokenizer"] = {"type": "Whitespace"}
    (tmp_path / "other.json").write_text(json.dumps(content))
    refused("BertPreTokenizer", tokenizer=tmp_path / "other.json")


def test_a_model_of_a_fixed_length_takes_texts(tmp_path):
    tokenizer = write_wordpiece(tmp_path / "tokenizer.json")
    model = tiny.tiny_bert(vocab_size=256)
    ir.save(model, tmp_path / "free.onnx")
    for value in [*model.graph.inputs, *model.graph.outputs]:
        value.shape = ir.Shape(["batch", 12, *value.shape[2:]])
    ir.save(model, tmp_path / "model.onnx")
    chosen = {"weights": "bf16", "options": {"seconds": 0.0}, "portable": False}
    text = TextInput(tokenizer)
    report = ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "fast.onnx", texts_in=text, **chosen)
    assert any("up to 12 tokens, padded to 12" in note for note in report.notes)
    texts = ["The cat sleeps.", "unaffable cats, 中文!", "the " * 40]
    (found,) = ortolan.create_session(tmp_path / "fast.onnx").run(None, {"text": np.array(texts, object)})
    expected = pooled(tmp_path / "free.onnx", tokenizer, texts, "mean", True, 12)
    assert (found * expected).sum(axis=1).min() > 0.999
    for value in model.graph.inputs:
        value.shape = ir.Shape([1, 12])
    ir.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"has a batch of 1, .* needs a dynamic batch axis; export"):
        ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "no.onnx", texts_in=text, **chosen)


def test_extensions_that_are_not_installed_are_named(tmp_path, monkeypatch):
    path = write_wordpiece(tmp_path / "tokenizer.json")
    model = ir.to_proto(tokenizer_alone(path, 16))
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime_extensions", None)
    with pytest.raises(LibraryError, match="pip install onnxruntime-extensions tokenizers"):
        ortolan.create_session(model)


def test_extensions_are_missed_before_the_work(tmp_path, monkeypatch):
    tokenizer = write_wordpiece(tmp_path / "tokenizer.json")
    ir.save(tiny.tiny_bert(vocab_size=256), tmp_path / "model.onnx")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime_extensions", None)
    stages: list[str] = []
    with pytest.raises(LibraryError, match="pip install onnxruntime-extensions tokenizers"):
        ortolan.optimize_onnx(
            tmp_path / "model.onnx",
            tmp_path / "fast.onnx",
            recipe="auto",
            texts_in=TextInput(tokenizer, max_tokens=12),
            progress=lambda stage, done, total: stages.append(stage),
        )
    assert stages == []


@pytest.mark.parametrize("budget", [0.9, 1.0])
def test_recipe_auto_calibrates_on_texts(tmp_path, monkeypatch, budget):
    """The search makes its feeds with the given tokenizer, and compares the graph's tokenizer on each of its texts."""
    from ortolan.graph_passes.text import text_input

    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))
    tokenizer = write_wordpiece(tmp_path / "tokenizers.json")  # this name is not found automatically
    ir.save(tiny.tiny_bert(vocab_size=256), tmp_path / "model.onnx")
    texts = ["The cat sleeps.", "unaffable cats, 中文!", "the " * 7]
    compared: list[str] = []
    check = text_input.check_tokenizer
    monkeypatch.setattr(text_input, "check_tokenizer", lambda *given: (compared.extend(given[1]), check(*given)))
    found = ortolan.search(
        tmp_path / "model.onnx", budget=budget, shapes=[(1, 16)], calibration=texts, tokenizer=tokenizer
    )
    report = ortolan.optimize_onnx(
        tmp_path / "model.onnx",
        tmp_path / "fast.onnx",
        recipe=found,
        calibration=texts,
        texts_in=TextInput(tokenizer, max_tokens=12),
    )
    assert report.feeds.startswith("3 inputs from 3 texts") and set(texts) <= set(compared)
    session = ortolan.create_session(tmp_path / "fast.onnx")
    (found,) = session.run(None, {"text": np.array(texts, object)})
    expected = pooled(tmp_path / "model.onnx", tokenizer, texts, "mean", True, 12)
    assert (found * expected).sum(axis=1).min() > 0.99


def test_a_tokenizer_graph_reads_calibration_texts(tmp_path):
    path = write_wordpiece(tmp_path / "tokenizer.json")
    ir.save(tokenizer_alone(path, 16), tmp_path / "tokenizer.onnx")
    texts = ["the cat", "sleeping"]
    model = tiny.tiny_bert()
    by_graph, by_file = (feeds_of_texts(texts, tmp_path / f"tokenizer.{kind}", model) for kind in ("onnx", "json"))
    assert [one["input_ids"].tolist() for one in by_graph] == [one["input_ids"].tolist() for one in by_file]


@pytest.mark.network
def test_all_minilm(tmp_path):
    from ortolan.models import get_model

    files = get_model("all-minilm-l6-v2")
    model = ir.load(files.onnx)
    add_text_input(model, plan_text_input(model, TextInput(files.tokenizer, max_tokens=256)))
    ir.save(model, tmp_path / "text.onnx")
    session = ortolan.create_session(tmp_path / "text.onnx")
    (found,) = session.run(None, {"text": np.array(PROBES, object)})
    expected = pooled(files.onnx, files.tokenizer, list(PROBES), "mean", True, 256)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_an_output_of_the_embeddings_name_and_too_few_positions(tmp_path):
    model = tiny.tiny_bert(vocab_size=256)  # of 64 positions
    tokens = model.graph.outputs[0]
    other = ir.node("ReduceMean", [tokens], {"axes": [1], "keepdims": 0}, num_outputs=1)
    other.outputs[0].name = "sentence_embedding"
    other.outputs[0].type, other.outputs[0].shape = tokens.type, ir.Shape(["batch", 48])
    model.graph.append(other)
    tokens.name = "token_embeddings"
    model.graph.outputs.append(other.outputs[0])
    ir.save(model, tmp_path / "model.onnx")
    write_wordpiece(tmp_path / "tokenizer.json")
    chosen = {"weights": "bf16", "sparsity": 0.3, "options": {"seconds": 0.0}}
    text = ortolan.TextInput(tmp_path / "tokenizer.json", pooling="mean", max_tokens=64)
    ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "fast.onnx", texts_in=text, **chosen)
    session = ortolan.create_session(tmp_path / "fast.onnx")
    (vectors,) = session.run(None, {"text": np.array(["a cat", "word " * 100], object)})
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    longer = ortolan.TextInput(tmp_path / "tokenizer.json", pooling="mean", max_tokens=65)
    stages: list[str] = []
    with pytest.raises(
        ModelError, match=r"max_tokens is 65 .* positions for 64 tokens; give max_tokens .* of at most 64"
    ):
        ortolan.optimize_onnx(
            tmp_path / "model.onnx",
            tmp_path / "no.onnx",
            texts_in=longer,
            progress=lambda stage, done, total: stages.append(stage),
            **chosen,
        )
    assert not stages
    # If the table of positions has an unknown name, the error is found only when the model runs.
    onnx.save(with_unknown_positions(onnx.load(tmp_path / "model.onnx")), tmp_path / "unnamed.onnx")
    with pytest.raises(ortolan.VerificationError, match="up to 65 tokens"):
        ortolan.optimize_onnx(tmp_path / "unnamed.onnx", tmp_path / "no.onnx", texts_in=longer, **chosen)
    assert not (tmp_path / "no.onnx").exists()


def test_texts_are_cut_to_the_positions_that_the_model_has(tmp_path):
    model = tiny.tiny_bert(vocab_size=256)
    tokenizer = write_wordpiece(tmp_path / "tokenizer.json", truncation=None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512}))
    plan = plan_text_input(model, TextInput(tokenizer))
    assert plan.max_tokens == 64
    # Positions start after the padding token's id.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    behind = plan_text_input(model, TextInput(tokenizer), tmp_path / "model.onnx")
    assert behind.max_tokens == 63 - plan.file.pad_id


@pytest.mark.parametrize("damage", ["pooling", "inputs"])
def test_the_file_that_is_saved_is_compared_with_the_verified_model(tmp_path, monkeypatch, damage):
    from ortolan import optimize
    from ortolan.graph_passes.text import text_input

    tokenizer = write_wordpiece(tmp_path / "tokenizer.json")
    ir.save(tiny.tiny_bert(vocab_size=256), tmp_path / "model.onnx")
    if damage == "pooling":
        pool = text_input.pool
        monkeypatch.setattr(text_input, "pool", lambda nodes, tokens, mask, pooling: pool(nodes, tokens, mask, "cls"))
    else:
        add = text_input.add_text_input

        def add_and_damage(model, *given):
            add(model, *given)
            weight = next(one for one in model.graph.initializers.values() if "word_embeddings" in (one.name or ""))
            weight.const_value = ir.tensor(weight.const_value.numpy()[::-1].copy(), name=weight.name)

        monkeypatch.setattr(optimize, "add_text_input", add_and_damage)
    with pytest.raises(ortolan.VerificationError, match="with its tokenizer answers differently than without"):
        ortolan.optimize_onnx(
            tmp_path / "model.onnx",
            tmp_path / "fast.onnx",
            weights="bf16",
            texts_in=TextInput(tokenizer, max_tokens=12),
            options={"seconds": 0.0},
        )
    assert not (tmp_path / "fast.onnx").exists()


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_a_search_has_written_in_two_files_takes_texts(tmp_path, monkeypatch, in_memory):
    """The search result has external weights, and adding the tokenizer replaces both of its files."""
    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))
    put_weights_outside(monkeypatch)
    monkeypatch.setattr(
        layer_times, "measure", lambda case, matrix, forms: {ORIGINAL: 1.0} | {form.name: 0.5 for form in forms}
    )
    times = [Timing(10.0, 10.0)], [Timing(5.0, 5.0)]
    monkeypatch.setattr(
        search, "time_models", lambda _, paths, shapes: (times[0] * len(shapes), [times[1] * len(shapes)] * len(paths))
    )
    tokenizer = write_wordpiece(tmp_path / "tokenizer.json")
    ir.save(tiny.tiny_bert(vocab_size=256), tmp_path / "model.onnx")
    text = TextInput(tokenizer, max_tokens=12)
    output = None if in_memory else tmp_path / "fast.onnx"
    report = ortolan.optimize_onnx(tmp_path / "model.onnx", output, texts_in=text)
    assert report.auto is not None and report.auto.changed
    session = ortolan.create_session(report.model if in_memory else output)
    (vectors,) = session.run(None, {"text": np.array(["the cat", "a b c"], object)})
    expected = pooled(tmp_path / "model.onnx", tokenizer, ["the cat", "a b c"], "mean", True, 12)
    assert ((vectors * expected).sum(axis=1) > 0.95).all()
