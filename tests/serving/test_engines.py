"""What a server does with requests, without the server."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import ortolan
from ortolan import SessionError, TextInput
from ortolan.engines import EmbeddingEngine, GenerationEngine, RequestError
from ortolan.graph_passes.text_input import add_text_input
from ortolan.models import tiny

from ..text.wordpiece_file import write_wordpiece


def test_a_model_that_takes_texts_and_one_that_takes_tokens_give_the_same_vectors(tmp_path):
    pytest.importorskip("onnxruntime_extensions")
    tokenizer = write_wordpiece(tmp_path / "tokenizer.json")
    model = tiny.tiny_bert(vocab_size=256)
    ir.save(model, tmp_path / "tokens.onnx")
    add_text_input(model, TextInput(tokenizer, max_tokens=12))
    ir.save(model, tmp_path / "text.onnx")
    texts = ["The cat.", "un\0affable", "x " * 40]
    one = EmbeddingEngine(tmp_path / "text.onnx").embed(texts)
    other = EmbeddingEngine(tmp_path / "tokens.onnx", tokenizer, max_tokens=12).embed(texts)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_tokens_need_a_tokenizer(tmp_path):
    ir.save(tiny.tiny_bert(), tmp_path / "tokens.onnx")
    with pytest.raises(SessionError, match=r"tokenizer\.json"):
        EmbeddingEngine(tmp_path / "tokens.onnx")


class Letters:
    """As ortolan.models.tokenizer.TextTokenizer."""

    start, stop = 1, frozenset({0})

    def encode(self, text):
        return [2 + ord(letter) % 90 for letter in text]

    def decode(self, ids):
        return " ".join(map(str, ids))


def test_generation_and_its_limit(tmp_path, monkeypatch):
    ir.save(tiny.tiny_llama(), tmp_path / "decoder.onnx")
    monkeypatch.setattr("ortolan.models.tokenizer.load_tokenizer", lambda path: Letters())
    engine = GenerationEngine(tmp_path / "decoder.onnx", "tokenizer.json", max_prompt_tokens=5)
    made = engine.generate("abcd", 6)
    session = ortolan.create_session(tmp_path / "decoder.onnx")
    from ortolan.models.generate import generate

    expected = generate(session, [1, *Letters().encode("abcd")], 6, stop=Letters.stop)
    assert made.text == Letters().decode(expected)
    assert (made.tokens, made.finish_reason) == (len(expected), "length" if len(expected) == 6 else "stop")
    with pytest.raises(RequestError, match="6 tokens") as refused:
        engine.generate("abcde", 6)
    assert refused.value.status == 413
