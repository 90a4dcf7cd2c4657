"""Sentence embeddings and the STS score on a tiny model with a small tokenizer."""

import builtins
import json
import shutil

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file, save_file
from scipy.stats import spearmanr

import ortolan
from ortolan import ModelError, TextInput, embedding
from ortolan.embedding import spearman, spearman_on_sts
from ortolan.errors import OrtolanError
from ortolan.graph_passes.text.text_input import add_text_input, plan_text_input
from ortolan.models import tiny
from ortolan.text_encoder import TextEncoder, batches
from ortolan.tokens import Tokens

from ..text.reranker import write_reranker
from ..text.wordpiece_file import write_wordpiece

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "a", "man", "woman", "is", "plays", "the", "guitar", "flute", "rides", "horse", "red", '"']


def make_session(model):
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


def make_encoder(model, tokenizer_path, max_tokens=32):
    return TextEncoder(make_session(model), tokenizer_path, TextInput(max_tokens=max_tokens))


@pytest.fixture
def tokenizer_path(tmp_path):
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def encoder(tokenizer_path):
    return make_encoder(tiny.tiny_bert(), tokenizer_path)


def test_batches_do_not_change_the_vectors(encoder):
    sentences = ["a man plays the guitar", "a woman", "the red horse is a horse is a horse", "flute", "a man rides"]
    vectors = encoder.encode(sentences, batch_tokens=12)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    alone = np.concatenate([encoder.encode([sentence]) for sentence in sentences])
    np.testing.assert_allclose(vectors, alone, atol=1e-5)


def test_long_sentences_are_cut(tokenizer_path):
    encoder = make_encoder(tiny.tiny_bert(), tokenizer_path, max_tokens=4)
    np.testing.assert_array_equal(encoder.encode(["a man is the horse"]), encoder.encode(["a man is the"]))


def test_feeds_only_the_inputs_that_the_model_has(tokenizer_path):
    model = tiny.tiny_bert()
    zeros = model.graph.inputs.pop(2)
    shape = ir.node("Shape", [model.graph.inputs[0]])
    fill = ir.node("ConstantOfShape", shape.outputs, {"value": ir.tensor(np.zeros(1, np.int64))})
    model.graph.insert_before(model.graph[0], [shape, fill])
    zeros.replace_all_uses_with(fill.outputs[0])
    encoder = make_encoder(model, tokenizer_path)
    expected = make_encoder(tiny.tiny_bert(), tokenizer_path).encode(["a man"])
    np.testing.assert_allclose(encoder.encode(["a man"]), expected, atol=1e-6)


def test_what_cannot_be_encoded_is_refused(encoder, tokenizer_path, tmp_path):
    with pytest.raises(OrtolanError, match="text 1 is an int, expected a str"):
        encoder.encode(["a", 3])
    with pytest.raises(OrtolanError, match="a single text, expected a list"):
        encoder.encode("a man")
    with pytest.raises(OrtolanError, match="batch_tokens is 0"):
        encoder.encode(["a"], batch_tokens=0)
    with pytest.raises(OrtolanError, match="cannot score pairs"):
        encoder.score("a", ["man"])
    with pytest.raises(ModelError, match="the model has inputs x, expected input_ids"):
        make_encoder(tiny.mlp(), tokenizer_path)
    with pytest.raises(ModelError, match="is a decoder with a cache; embed needs an encoder"):
        make_encoder(tiny.tiny_llama(), tokenizer_path)
    (tmp_path / "alone").mkdir()
    ir.save(tiny.tiny_bert(), tmp_path / "alone" / "model.onnx")
    with pytest.raises(ModelError, match=r"no tokenizer\.json beside the model"):
        TextEncoder(tmp_path / "alone")


def test_nothing_to_encode(encoder):
    assert encoder.encode([]).shape == (0, encoder.width) == (0, 48)


def test_a_missing_tokenizers_is_named(monkeypatch, tokenizer_path):
    real_import = builtins.__import__

    def no_tokenizers(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_tokenizers)
    encoder = make_encoder(tiny.tiny_bert(), tokenizer_path)
    assert encoder.run([Tokens((), [1, 2, 3], [0, 0, 0])]).shape == (1, 48)  # inputs of token ids need no tokenizer
    with pytest.raises(OrtolanError, match="pip install tokenizers"):
        encoder.encode(["a man"])


def test_spearman_equals_scipy_with_ties():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 6, 50).astype(float), rng.standard_normal(50)
    assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert spearman(b, np.exp(b)) == pytest.approx(1)


def test_sts_lines_are_read_unquoted(encoder, tmp_path):
    path = tmp_path / "sts.csv"
    lines = [
        'g\tf\ty\t1\t5.000\tthe " man rides\tthe " man rides',
        "g\tf\ty\t2\t0.5\ta woman plays the flute\tred\tlicence\tsource",
        "g\tf\ty\t3\t2.5\ta man plays the guitar\ta woman plays the flute",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    vectors = encoder.encode([line.split("\t")[column] for column in (5, 6) for line in lines])
    similarities = (vectors[:3] * vectors[3:]).sum(axis=1)
    assert spearman_on_sts(encoder, path) == pytest.approx(spearmanr(similarities, [5, 0.5, 2.5]).statistic)
    path.write_text(lines[0] + "\nnot a pair\n", encoding="utf-8")
    with pytest.raises(OrtolanError, match=r"line 2.*'not a pair'"):
        spearman_on_sts(encoder, path)
    path.write_text(lines[0], encoding="utf-8")
    with pytest.raises(OrtolanError, match="at least 2"):
        spearman_on_sts(encoder, path)


TEXTS = [
    "a man plays the guitar",
    "a woman",
    "",
    "the red horse is a horse is a horse is a horse",
    "flute",
    "a man rides",
]
KIND = "sentence_transformers.models."


def write_json(path, said):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(said), encoding="utf-8")


@pytest.fixture
def folder(tmp_path, tokenizer_path):
    """A sentence-transformers folder: mean pooling, a dense layer, and normalization."""
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    ir.save(tiny.tiny_bert(), folder / "onnx" / "model.onnx")
    shutil.copy(tokenizer_path, folder)
    places = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    write_json(folder / "modules.json", [{"type": KIND + name, "path": place} for name, place in places.items()])
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 10})
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    dense = {
        "in_features": 48,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write_json(folder / "2_Dense" / "config.json", dense)
    rng = np.random.default_rng(0)
    weights = {"linear.weight": rng.standard_normal((8, 48)), "linear.bias": rng.standard_normal(8)}
    save_file(
        {name: array.astype(np.float32) for name, array in weights.items()}, folder / "2_Dense" / "model.safetensors"
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": {"query": "the guitar ", "none": ""}, "default_prompt_name": None},
    )
    return folder


POOLED = {
    "cls": lambda rows: rows[0],
    "mean": lambda rows: rows.mean(axis=0),
    "lasttoken": lambda rows: rows[-1],
    "max": lambda rows: rows.max(axis=0),
    "mean_sqrt_len_tokens": lambda rows: rows.sum(axis=0) / np.sqrt(len(rows)),
    "weightedmean": lambda rows: np.average(rows, axis=0, weights=np.arange(1, len(rows) + 1)),
}


@pytest.mark.parametrize("pooling", POOLED)
def test_what_a_folder_says_is_done(folder, pooling):
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": pooling})
    found = ortolan.embed(TEXTS[:2] + TEXTS[3:], folder)
    weights = load_file(folder / "2_Dense" / "model.safetensors")
    tokens = ortolan.TextEncoder(folder).token_vectors(TEXTS[:2] + TEXTS[3:])
    assert max(map(len, tokens)) == 10
    expected = [np.tanh(weights["linear.weight"] @ POOLED[pooling](rows) + weights["linear.bias"]) for rows in tokens]
    expected = np.stack([row / np.linalg.norm(row) for row in expected])
    assert found.dtype == np.float32 and found.shape == (5, 8)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_prompts_and_settings(folder):
    asked = ortolan.embed(["a man"], folder, settings=TextInput(prompt_name="query", normalize=False))
    written = ortolan.embed(["the guitar a man"], folder, settings=TextInput(normalize=False))
    np.testing.assert_array_equal(asked, written)
    assert np.linalg.norm(asked) != pytest.approx(1)
    with pytest.raises(ModelError, match=r"there is no prompt 'quary'.*did you mean 'query'"):
        ortolan.embed(["a man"], folder, settings=TextInput(prompt_name="quary"))


@pytest.mark.parametrize("weights", ["int8", "bf16"])
def test_vectors_know_nothing_of_other_texts(folder, tmp_path, weights):
    """A text has the same bits alone, in any batch and order, and with one or two threads.

    Texts that are processed in several windows are included.
    """
    words = WORDS[2:]
    rng = np.random.default_rng(1)
    texts = [" ".join(rng.choice(words, size)) for size in rng.integers(1, 10, 40)]
    ortolan.optimize_onnx(
        folder / "onnx" / "model.onnx", tmp_path / "fast.onnx", weights=weights, options={"verify.seconds": 0.0}
    )
    shutil.copy(tmp_path / "fast.onnx", folder / "onnx" / "model.onnx")
    together = ortolan.embed(texts, folder)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    encoder = ortolan.TextEncoder(folder, session_options=options)
    for batch_tokens in (1, 30, 1000):
        np.testing.assert_array_equal(encoder.encode(texts, batch_tokens), together)
    np.testing.assert_array_equal(ortolan.embed(texts[::-1], encoder)[::-1], together)
    np.testing.assert_array_equal(np.concatenate([ortolan.embed([text], encoder) for text in texts]), together)


def test_streams_are_read_window_by_window(folder, monkeypatch):
    monkeypatch.setattr(embedding, "_WINDOW_TEXTS", 3)
    read = []

    def texts():
        for text in TEXTS:
            read.append(text)
            yield text

    told = []
    pieces = ortolan.embed_stream(texts(), folder, progress=lambda *call: told.append(call))
    assert not read
    first = next(pieces)
    assert len(read) == len(first) == 3
    np.testing.assert_allclose(np.concatenate([first, *pieces]), ortolan.embed(TEXTS, folder), atol=1e-6)
    assert told[-1] == ("embed texts", 6, 6)
    monkeypatch.setattr(embedding, "_WINDOW_CHARACTERS", 1)
    assert [len(piece) for piece in ortolan.embed_stream(TEXTS, folder)] == [1, 1, 2, 1, 1]


def test_batches_keep_to_their_tokens():
    tokens = [Tokens((), range(size)) for size in (3, 9, 0, 5, 20, 4, 4)]
    found = list(batches(tokens, 10))
    assert sorted(index for batch in found for index in batch) == list(range(7))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(len(tokens[index]) for index in batch) <= 10
    assert found[0] == [4]


@pytest.fixture(params=["batch x 1", "batch x 1 x 1"])
def reranker(request, tmp_path, tokenizer_path):
    folder = tmp_path / "reranker"
    write_reranker(folder, vocab_size=len(WORDS), by_tokens=request.param == "batch x 1 x 1")
    shutil.copy(tokenizer_path, folder)
    write_json(folder / "config.json", {"num_labels": 1, "max_position_embeddings": 64, "model_type": "bert"})
    return folder


def test_rerank(reranker):
    query, texts = "a man plays", TEXTS[:2] + TEXTS[3:]
    found = ortolan.rerank(query, texts, reranker)
    session = ortolan.create_session(reranker)
    tokenizer = tokenizers.Tokenizer.from_file(str(reranker / "tokenizer.json"))
    logits = []
    for text in texts:
        one = tokenizer.encode(query, text)
        feeds = {"input_ids": [one.ids], "attention_mask": [one.attention_mask], "token_type_ids": [one.type_ids]}
        logits.append(session.run(None, {name: np.array(ids, np.int64) for name, ids in feeds.items()})[0].item())
    order = np.argsort(-np.array(logits))
    assert [one.index for one in found] == order.tolist()
    np.testing.assert_allclose([one.score for one in found], 1 / (1 + np.exp(-np.array(logits)[order])), rtol=1e-5)
    assert ortolan.rerank(query, texts, reranker, top_k=2, batch_tokens=1) == found[:2]
    raw = ortolan.rerank(query, texts, reranker, settings=TextInput(activation="none"))
    np.testing.assert_allclose([one.score for one in raw], np.array(logits)[order], rtol=1e-5)
    assert ortolan.rerank(query, [], reranker) == []
    with pytest.raises(OrtolanError, match="is a reranker, which scores pairs of texts"):
        ortolan.embed(texts, reranker)
    with pytest.raises(OrtolanError, match="top_k is 0"):
        ortolan.rerank(query, texts, reranker, top_k=0)


def test_models_that_take_texts(folder, tmp_path):
    pytest.importorskip("onnxruntime_extensions")
    tokenizer = write_wordpiece(tmp_path / "wordpiece.json")
    model = tiny.tiny_bert(vocab_size=256)
    ir.save(model, tmp_path / "tokens.onnx")
    settings = TextInput(tokenizer, max_tokens=12)
    add_text_input(model, plan_text_input(model, settings))
    ir.save(model, tmp_path / "texts.onnx")
    texts = ["The cat.", "unaffable", "x " * 40]
    expected = ortolan.embed(texts, tmp_path / "tokens.onnx", settings=settings)
    np.testing.assert_allclose(ortolan.embed(texts, tmp_path / "texts.onnx", batch_tokens=8), expected, atol=1e-5)
    with pytest.raises(ModelError, match="already contains its pooling"):
        ortolan.embed(texts, tmp_path / "texts.onnx", settings=TextInput(pooling="cls"))


def test_texts_are_cut_to_256_tokens_where_nothing_says_it(tokenizer_path):
    assert TextEncoder(make_session(tiny.tiny_bert()), tokenizer_path).max_tokens == 256


def fix_sizes(model, batch, tokens):
    for value in [*model.graph.inputs, *model.graph.outputs]:
        value.shape = ir.Shape([batch, tokens, *value.shape[2:]])
    return model


@pytest.mark.parametrize(("batch", "tokens"), [("batch", 12), (1, 12), (3, 12), (3, "tokens")])
def test_models_of_a_fixed_size_get_padded_texts(tokenizer_path, batch, tokens):
    sentences = ["a man plays the guitar", "a woman", "the red horse is a horse is a horse", "flute " * 20]
    encoder = make_encoder(fix_sizes(tiny.tiny_bert(), batch, tokens), tokenizer_path, max_tokens=None)
    free = make_encoder(tiny.tiny_bert(), tokenizer_path, max_tokens=encoder.max_tokens)
    if tokens == 12:
        assert (encoder.length, encoder.max_tokens) == (12, 12)
    np.testing.assert_allclose(encoder.encode(sentences), free.encode(sentences), atol=1e-5)
    for found, expected in zip(encoder.token_vectors(sentences), free.token_vectors(sentences), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert encoder.encode([]).shape == (0, 48)


def test_batches_count_the_padding_of_a_fixed_length(tokenizer_path):
    encoder = make_encoder(fix_sizes(tiny.tiny_bert(), "batch", 12), tokenizer_path, max_tokens=None)
    tokens = encoder.tokenize(["a man"] * 5)
    assert [len(batch) for batch in batches(tokens, 24, encoder.pads, encoder.length)] == [2, 2, 1]


def test_more_tokens_than_a_fixed_length_are_refused(tokenizer_path):
    with pytest.raises(ModelError, match=r"max_tokens is 32, but the model takes only texts of 12 tokens.*at most 12"):
        make_encoder(fix_sizes(tiny.tiny_bert(), 1, 12), tokenizer_path)


def test_a_reranker_of_a_fixed_size(reranker):
    texts = ["a woman plays the flute", "a man", "red horse"]
    expected = TextEncoder(reranker).score("the man", texts)
    model = ir.load(reranker / "model.onnx")
    for value in model.graph.inputs:
        value.shape = ir.Shape([1, 24])
    model.graph.outputs[0].shape = ir.Shape([1, 1])
    ir.save(model, reranker / "model.onnx")
    np.testing.assert_allclose(TextEncoder(reranker).score("the man", texts), expected, atol=1e-5)
