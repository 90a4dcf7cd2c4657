"""Reading Llama models and their tokenizers from GGUF files that the package `gguf` wrote."""

from dataclasses import replace

import numpy as np
import pytest

from ortolan.models import tiny
from ortolan.models.gguf import read_gguf, read_gguf_tokenizer
from ortolan.models.graph_builder import ModelBuildError
from ortolan.models.llama import build_llama, llama_weight_shapes
from ortolan.models.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

CONFIG = replace(
    tiny.TINY_LLAMA, hidden_size=64, intermediate_size=96, rope_style="interleaved", head_dim=16, rope_theta=1e5
)
# Byte-level BPE writes a space as Ġ and a line break as Ċ.
TOKENS = ["<|endoftext|>", "<|im_end|>", *"abcdeÃ©ĠĊ123", "ab", "Ġa", "Ġab", "12", "Ã©"]
MERGES = ["a b", "Ġ a", "Ġ ab", "1 2", "Ã ©"]
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(path, config=CONFIG, weights=None, metadata=None, pre="smollm", model="gpt2"):
    weights = weights or tiny.random_weights(llama_weight_shapes(config))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_size)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    others = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, array in weights.items():
        path_of_module = name.removesuffix(".weight")
        if path_of_module in others:
            found = others[path_of_module]
        else:
            _, _, layer, module = path_of_module.split(".", 3)
            found = f"blk.{layer}.{NAMES[module]}"
        if array.ndim == 2 and name != "model.embed_tokens.weight":
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{found}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(f"{found}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


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
