"""Reading Llama models and their tokenizers from GGUF files that the package `gguf` wrote."""

from dataclasses import replace

import numpy as np
import pytest

from ortolan.models.gguf import read_gguf, read_gguf_tokenizer
from ortolan.models.graph_builder import ModelBuildError
from ortolan.models.llama import build_llama
from ortolan.models.tokenizer import load_tokenizer

from .gguf_file import CONFIG, TOKENS, gguf, write

pytest.importorskip("tokenizers")


@pytest.mark.parametrize("tied", [True, False])
def test_configuration_and_weights(tmp_path, tied):
    config = replace(CONFIG, tie_word_embeddings=tied)
    weights = write(tmp_path / "model.gguf", config)
    found_config, found = read_gguf(tmp_path / "model.gguf")
    assert found_config == config
    assert set(found) == set(weights) and len(found) == len(weights)
    for name, array in weights.items():
        if array.ndim == 1 or name == "model.embed_tokens.weight":
            np.testing.assert_array_equal(found[name], array, err_msg=name)
            continue
        # Q4_1: blocks of 32 along a row, 16 levels between its smallest and largest weight (kept as float16).
        blocks = array.reshape(-1, 32)
        step = np.ptp(blocks, axis=1, keepdims=True) / 15
        error = np.abs(found[name].reshape(-1, 32) - blocks)
        assert found[name].shape == array.shape and found[name].dtype == np.float32
        assert (error <= 0.52 * step + 2e-3 * np.abs(blocks).max()).all(), name
    build_llama(found, found_config)


def test_other_models_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, metadata={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(ModelBuildError, match=r"scales its rotary frequencies \(yarn\)"):
        read_gguf(path)
    gpt = gguf.GGUFWriter(tmp_path / "gpt.gguf", "gpt2")
    gpt.write_header_to_file()
    gpt.write_kv_data_to_file()
    gpt.write_tensors_to_file()
    gpt.close()
    with pytest.raises(ModelBuildError, match="architecture 'gpt2', expected 'llama'"):
        read_gguf(tmp_path / "gpt.gguf")
    path.write_bytes(b"not a model at all, but long enough for a header of one")
    with pytest.raises(ModelBuildError, match="cannot be read as a GGUF file"):
        read_gguf(path)


@pytest.fixture
def tokenizer(tmp_path):
    write(tmp_path / "model.gguf")
    read_gguf_tokenizer(tmp_path / "model.gguf").save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ab", ["ab"]),
        ("ab ab", ["ab", "Ġab"]),
        ("a b", ["a", "Ġ", "b"]),
        ("é", ["Ã©"]),
        ("12", ["1", "2"]),  # each digit alone, though the vocabulary has both
        ("<|endoftext|>ab\n", ["<|endoftext|>", "ab", "Ċ"]),
    ],
)
def test_text_in_and_out(tokenizer, text, tokens):
    assert tokenizer.encode(text) == [TOKENS.index(token) for token in tokens]
    assert tokenizer.decode(tokenizer.encode(text)) == text.removeprefix("<|endoftext|>")


def test_control_tokens(tokenizer):
    assert tokenizer.start == 0
    assert tokenizer.stop == {0, 1}


def test_other_tokenizers_are_refused(tmp_path):
    write(tmp_path / "model.gguf", pre="llama-bpe")
    with pytest.raises(ModelBuildError, match="splits text as 'llama-bpe'"):
        read_gguf_tokenizer(tmp_path / "model.gguf")
