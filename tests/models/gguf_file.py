"""A small GGUF file."""

from dataclasses import replace

import pytest

from ortolan.models import tiny
from ortolan.models.llama_config import llama_weight_shapes

gguf = pytest.importorskip("gguf")

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
