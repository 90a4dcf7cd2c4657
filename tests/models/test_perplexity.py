"""Cross-entropy of text against plain NumPy, and on text sampled from the model."""

import math

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from ortolan.errors import OrtolanError
from ortolan.generate import Decoder
from ortolan.models import tiny
from ortolan.models.perplexity import Score, sample_texts, score_texts, score_tokens


def make_session(**overrides):
    model = ir.to_proto(tiny.tiny_llama(head_dim=16, **overrides)).SerializeToString()
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"])


SESSIONS = {attention: make_session(attention=attention) for attention in ("standard", "gqa")}
IDS = np.random.default_rng(5).integers(0, tiny.TINY_LLAMA.vocab_size, 23).tolist()


def surprise(context, token):
    """Return -log of the probability of `token` after `context`, computed in a separate run."""
    logits = Decoder(SESSIONS["standard"]).step(context)[-1].astype(np.float64)
    return -(logits[token] - math.log(np.exp(logits).sum()))


@pytest.mark.parametrize("attention", SESSIONS)
@pytest.mark.parametrize(
    ("window", "stride"), [(64, 32), (23, 1), (8, 4), (8, 7), (8, 1), (5, 3), (2, 1)], ids=lambda value: str(value)
)
def test_every_token_counts_once_with_the_context_of_its_window(attention, window, stride):
    expected = []
    for position in range(1, len(IDS)):
        start = 0
        while start + window <= position:
            start += stride
        expected.append(surprise(IDS[start:position], IDS[position]))
    score = score_tokens(SESSIONS[attention], IDS, window, stride)
    assert score.tokens == len(IDS) - 1
    assert score.cross_entropy == pytest.approx(np.mean(expected), abs=1e-5)
    assert score.perplexity == pytest.approx(math.exp(np.mean(expected)), rel=1e-5)


@pytest.mark.parametrize("attention", SESSIONS)
@pytest.mark.parametrize("step", [1, 2, 3, 7, 8, 30])
@pytest.mark.parametrize(("window", "stride"), [(23, 1), (8, 4), (8, 7), (5, 3)])
def test_steps_of_any_length_score_alike(attention, window, stride, step):
    expected = score_tokens(SESSIONS[attention], IDS, window, stride)
    found = score_tokens(SESSIONS[attention], IDS, window, stride, step)
    assert found.tokens == expected.tokens
    assert found.cross_entropy == pytest.approx(expected.cross_entropy, abs=1e-5)


def test_texts_are_weighted_by_their_tokens():
    session = SESSIONS["standard"]
    parts = [IDS[:5], IDS[5:]]
    scores = [score_tokens(session, part) for part in parts]
    both = score_texts(session, parts)
    assert both.tokens == 4 + 17
    assert both.cross_entropy == pytest.approx((4 * scores[0].cross_entropy + 17 * scores[1].cross_entropy) / 21)
    assert Score(0.0, 1).perplexity == 1


def test_the_model_itself_predicts_its_samples_best():
    session = SESSIONS["standard"]
    texts = sample_texts(session, start=1, tokens=600, window=100, seed=4)
    assert [len(text) for text in texts] == [100] * 6
    assert all(text[0] == 1 for text in texts)
    assert texts == sample_texts(session, start=1, tokens=600, window=100, seed=4)
    assert texts != sample_texts(session, start=1, tokens=600, window=100, seed=5)
    own = score_texts(session, texts, window=100)
    other = make_session(seed=1)
    assert own.cross_entropy < score_texts(other, texts, window=100).cross_entropy - 0.1
    # The expected cross-entropy is the entropy of the model's predictions.
    decoder = Decoder(session)
    entropy = []
    for text in texts:
        decoder.reset()
        rows = decoder.step(text[:-1]).astype(np.float64)
        p = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
        entropy += (-(p * np.log(p)).sum(axis=1)).tolist()
    assert own.cross_entropy == pytest.approx(np.mean(entropy), abs=0.15)


def test_the_rest_makes_a_shorter_text():
    assert [len(text) for text in sample_texts(SESSIONS["gqa"], 1, 25, window=10)] == [10, 10, 5]
    assert [len(text) for text in sample_texts(SESSIONS["gqa"], 1, 21, window=10)] == [10, 10]


@pytest.mark.parametrize(("ids", "window", "stride"), [([1], 8, 4), (IDS, 1, 1), (IDS, 8, 8), (IDS, 8, 0)])
def test_impossible_windows_are_refused(ids, window, stride):
    with pytest.raises(OrtolanError, match="expected at least 2 tokens, window >= 2"):
        score_tokens(SESSIONS["standard"], ids, window, stride)


def test_too_little_text_is_refused():
    with pytest.raises(OrtolanError, match="no texts to score"):
        score_texts(SESSIONS["standard"], [])
    with pytest.raises(OrtolanError, match="1 tokens in windows of 8"):
        sample_texts(SESSIONS["standard"], 1, 1, window=8)
