"""The request handling of a server, without the server."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortolan import ModelError, TextInput
from ortolan.engines import EncoderEngine
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
