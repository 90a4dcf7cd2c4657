"""The request handling of a server, without the server."""

from __future__ import annotations

import threading
import time

import numpy as np
import onnx_ir as ir
import pytest

import ortolan
from ortolan import ModelError, TextInput
from ortolan.engines import EncoderEngine, GenerationEngine, RequestError
from ortolan.generate import generate
from ortolan.graph_passes.text.text_input import add_text_input, plan_text_input
from ortolan.models import tiny

from ..text.wordpiece_file import write_wordpiece


def test_a_model_that_takes_texts_and_one_that_takes_tokens_give_the_same_vectors(tmp_path):
    pytest.importorskip("onnxruntime_extensions")
    tokenizer = write_wordpiece(tmp_path / "tokenizer.json")
    model = tiny.tiny_bert(vocab_size=256)
    ir.save(model, tmp_path / "tokens.onnx")
    add_text_input(model, plan_text_input(model, TextInput(tokenizer, max_tokens=12)))
    ir.save(model, tmp_path / "text.onnx")
    texts = ["The cat.", "un\0affable", "x " * 40]
    one = EncoderEngine(tmp_path / "text.onnx").encoder.encode(texts)
    other = EncoderEngine(tmp_path / "tokens.onnx", tokenizer, max_tokens=12).encoder.encode(texts)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_tokens_need_a_tokenizer(tmp_path):
    ir.save(tiny.tiny_bert(), tmp_path / "tokens.onnx")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        EncoderEngine(tmp_path / "tokens.onnx")


def test_a_bad_text_costs_the_others_nothing(tmp_path):
    tokenizer = write_wordpiece(tmp_path / "tokenizer.json")
    ir.save(tiny.tiny_bert(vocab_size=106), tmp_path / "model.onnx")  # the embedding lacks the last token, ’
    engine = EncoderEngine(tmp_path / "model.onnx", tokenizer, max_tokens=12)
    texts = engine.encoder.tokenize(["The cat.", "cat’", "unable"])
    one, bad, other = engine.run_each(texts)
    assert "Gather" in str(bad)
    np.testing.assert_allclose([one, other], engine.encoder.run([texts[0], texts[2]]), atol=1e-5)
    assert isinstance(engine.run_each(texts[1:2])[0], Exception)


def test_vectors_that_are_not_finite_are_failures(tmp_path):
    tokenizer = write_wordpiece(tmp_path / "tokenizer.json")
    model = tiny.tiny_bert(vocab_size=256)
    (table,) = [value for value in model.graph.initializers.values() if value.shape[0] == 256]
    array = table.const_value.numpy().copy()
    array[106] = np.inf
    table.const_value = ir.tensor(array, name=table.name)
    ir.save(model, tmp_path / "model.onnx")
    engine = EncoderEngine(tmp_path / "model.onnx", tokenizer, max_tokens=12)
    good, bad = engine.run_each(engine.encoder.tokenize(["cat", "’"]))
    assert np.isfinite(good).all()
    assert "the model returned NaN or infinity" in str(bad)


class Letters:
    """A simple replacement for ortolan.models.tokenizer.TextTokenizer."""

    prefix, start, stop = (1,), 1, frozenset({0})

    def encode(self, text):
        return [2 + ord(letter) % 90 for letter in text]

    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.fixture
def make_engine(tmp_path, monkeypatch):
    """Return a function (model, **options) that makes a GenerationEngine with tokenizer Letters."""
    monkeypatch.setattr("ortolan.models.tokenizer.load_tokenizer", lambda path: Letters())

    def make(model, **options):
        ir.save(model, tmp_path / "decoder.onnx")
        return GenerationEngine(tmp_path / "decoder.onnx", "tokenizer.json", **options)

    return make


def test_generation(make_engine, tmp_path):
    made = make_engine(tiny.tiny_llama()).generate("abcd", 6)
    session = ortolan.create_session(tmp_path / "decoder.onnx")
    expected = generate(session, [1, *Letters().encode("abcd")], 6, stop=Letters.stop)
    assert made.text == Letters().decode(expected)
    assert (made.tokens, made.finish_reason) == (len(expected), "length" if len(expected) == 6 else "stop")


def test_a_start_that_the_tokenizer_gives_is_not_given_twice(make_engine, monkeypatch):
    engine = make_engine(tiny.tiny_llama())
    expected = engine.generate("abcd", 6)
    encode = Letters.encode
    monkeypatch.setattr(Letters, "encode", lambda self, text: [1, *encode(self, text)])
    assert engine.generate("abcd", 6) == expected


def test_a_model_without_a_start_token_gets_the_prompt_alone(make_engine, monkeypatch, tmp_path):
    monkeypatch.setattr(Letters, "prefix", ())
    engine = make_engine(tiny.tiny_llama())
    session = ortolan.create_session(tmp_path / "decoder.onnx")
    for prompt, ids in (("abcd", Letters().encode("abcd")), ("", [Letters.start])):
        assert engine.generate(prompt, 6).text == Letters().decode(generate(session, ids, 6, stop=Letters.stop))


def test_the_model_file_is_parsed_once(make_engine, monkeypatch):
    loads = []
    load = ir.load
    monkeypatch.setattr(ir, "load", lambda *given, **options: loads.append(given) or load(*given, **options))
    engine = make_engine(tiny.tiny_llama(attention="gqa", head_dim=16, max_position_embeddings=24))
    assert engine.context == 24
    assert len(loads) == 1


def test_a_prompt_of_too_many_tokens(make_engine):
    engine = make_engine(tiny.tiny_llama(), max_prompt_tokens=5)
    engine.generate("abcd", 6)
    with pytest.raises(RequestError, match="6 tokens, expected at most 5") as refused:
        engine.generate("abcde", 6)
    assert refused.value.status == 413


@pytest.mark.parametrize(
    ("model", "options", "context"),
    [
        (tiny.tiny_llama(), {}, None),
        (tiny.tiny_llama(), {"max_context": 20}, 20),
        (tiny.tiny_llama(attention="gqa", head_dim=16, max_position_embeddings=24), {}, 24),
        (tiny.tiny_llama(attention="gqa", head_dim=16, max_position_embeddings=24), {"max_context": 20}, 20),
        (tiny.tiny_llama(attention="gqa", head_dim=16, max_position_embeddings=24), {"max_context": 30}, 24),
    ],
)
def test_context(make_engine, model, options, context):
    engine = make_engine(model, **options)
    assert engine.context == context
    if context is None:
        return
    assert engine.generate("abcd", context - 5).tokens == context - 5
    message = f"is {context - 4}, expected at most {context - 5} after a prompt of 5 tokens in a context of {context};"
    with pytest.raises(RequestError, match=f"max_new_tokens {message}") as refused:
        engine.generate("abcd", context - 4)
    assert refused.value.status == 422
    with pytest.raises(RequestError, match=f"{context} tokens, expected at most {context - 1}") as refused:
        engine.generate("a" * (context - 1), 1)
    assert refused.value.status == 413


def test_a_deadline_and_a_cancelled_request(make_engine, monkeypatch):
    engine = make_engine(tiny.tiny_llama())
    with pytest.raises(RequestError, match="the deadline passed in the queue; request more") as refused:
        engine.generate("abcd", 6, deadline=time.monotonic())
    assert refused.value.status == 504
    cancelled = threading.Event()
    cancelled.set()
    made = engine.generate("abcd", 6, cancelled=cancelled)
    assert (made.text, made.tokens, made.finish_reason) == ("", 0, "cancelled")
    clock = iter(range(100))  # each call of the clock adds one second
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    made = engine.generate("abcd", 6, deadline=4)
    assert (made.tokens, made.finish_reason) == (3, "deadline")
    clock = iter(range(100))
    with pytest.raises(RequestError, match="tokenizing the prompt \\(5 tokens\\) took the remaining 1 s; request more"):
        engine.generate("abcd", 6, deadline=1)


def test_pieces_of_the_text_are_whole_characters(make_engine, monkeypatch):
    engine = make_engine(tiny.tiny_llama())
    # Each character consists of three tokens; an incomplete one decodes to U+FFFD.
    whole = "αβγδ"
    monkeypatch.setattr(Letters, "decode", lambda self, ids: whole[: len(ids) // 3] + "\ufffd" * (len(ids) % 3 > 0))
    pieces = []
    made = engine.generate("abcd", 8, on_text=pieces.append)
    assert made.tokens == 8
    assert pieces == ["α", "β", "\ufffd"]
    assert made.text == "αβ\ufffd"
