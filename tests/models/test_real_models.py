"""The published models, downloaded for real."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from ortolan.models import get_model
from ortolan.models.embed import SentenceEncoder
from ortolan.models.stories import Llama2cTokenizer, generate

pytestmark = pytest.mark.network


def make_session(path):
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip("safetensors")
    return get_model("all-minilm-l6-v2")


@pytest.mark.parametrize("name", ["all-minilm-l6-v2", "paraphrase-minilm-l3-v2"])
def test_paraphrases_are_closer_than_strangers(minilm, name):
    # Both models share the uncased BERT vocabulary.
    encoder = SentenceEncoder(make_session(get_model(name).onnx), minilm.tokenizer)
    cat, kitten, shares = encoder.encode(
        ["A cat sleeps on the sofa.", "A kitten is napping on the couch.", "Share prices fell sharply on Monday."]
    )
    assert cat @ kitten > 0.6
    assert abs(cat @ shares) < 0.2


def test_minilm_is_a_valid_model(minilm):
    onnx.checker.check_model(str(minilm.onnx), full_check=True)
    tokens = np.array([[101, 7592, 102]])
    feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
    assert make_session(minilm.onnx).run(None, feeds)[0].shape == (1, 3, 384)


def test_stories15m_tells_a_story():
    files = get_model("stories15m")
    tokenizer = Llama2cTokenizer(files.tokenizer)
    prompt = tokenizer.encode("Once upon a time")
    story = tokenizer.decode(prompt + generate(make_session(files.onnx), prompt, max_new_tokens=40))
    assert story.startswith("Once upon a time, there was a little girl named Lily. She loved to play outside")
