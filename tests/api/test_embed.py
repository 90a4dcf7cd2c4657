"""Sentence embeddings and the STS score on a tiny model with a tokenizer made here."""

import builtins

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from scipy.stats import spearmanr

from ortolan.embed import SentenceEncoder, spearman, spearman_on_sts
from ortolan.errors import OrtolanError
from ortolan.models import tiny

WORDS = ["[PAD]", "[UNK]", "a", "man", "woman", "is", "plays", "the", "guitar", "flute", "rides", "horse", "red", '"']


def make_session(model):
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.fixture
def tokenizer_path(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def encoder(tokenizer_path):
    return SentenceEncoder(make_session(tiny.tiny_bert()), tokenizer_path)


def test_batches_do_not_change_the_vectors(encoder):
    sentences = ["a man plays the guitar", "a woman", "the red horse is a horse is a horse", "flute", "a man rides"]
    vectors = encoder.encode(sentences, batch_size=2)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    alone = np.concatenate([encoder.encode([sentence]) for sentence in sentences])
    np.testing.assert_allclose(vectors, alone, atol=1e-5)


def test_long_sentences_are_cut(tokenizer_path):
    encoder = SentenceEncoder(make_session(tiny.tiny_bert()), tokenizer_path, max_length=4)
    np.testing.assert_array_equal(encoder.encode(["a man is the horse"]), encoder.encode(["a man is the"]))


def test_feeds_only_the_inputs_that_the_model_has(tokenizer_path):
    model = tiny.tiny_bert()
    zeros = model.graph.inputs.pop(2)
    shape = ir.node("Shape", [model.graph.inputs[0]])
    fill = ir.node("ConstantOfShape", shape.outputs, {"value": ir.tensor(np.zeros(1, np.int64))})
    model.graph.insert_before(model.graph[0], [shape, fill])
    zeros.replace_all_uses_with(fill.outputs[0])
    encoder = SentenceEncoder(make_session(model), tokenizer_path)
    expected = SentenceEncoder(make_session(tiny.tiny_bert()), tokenizer_path).encode(["a man"])
    np.testing.assert_allclose(encoder.encode(["a man"]), expected, atol=1e-6)


def test_what_cannot_be_encoded_is_refused(encoder, tokenizer_path):
    with pytest.raises(OrtolanError, match="no sentences"):
        encoder.encode([])
    with pytest.raises(OrtolanError, match=r"no float output .* found y tensor\(float\)"):
        SentenceEncoder(make_session(tiny.mlp()), tokenizer_path)


def test_a_missing_tokenizers_names_the_extra(monkeypatch):
    real_import = builtins.__import__

    def no_tokenizers(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_tokenizers)
    with pytest.raises(OrtolanError, match=r"ortolan\[demo\]"):
        SentenceEncoder(make_session(tiny.tiny_bert()), "tokenizer.json")


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
