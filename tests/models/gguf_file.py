"""Small GGUF files."""

from dataclasses import replace

import numpy as np
import pytest

from ortolan.models import tiny
from ortolan.models.llama_config import llama_weight_shapes

gguf = pytest.importorskip("gguf")

CONFIG = replace(
    tiny.TINY_LLAMA, hidden_size=64, intermediate_size=96, rope_style="interleaved", head_dim=16, rope_theta=1e5
)
_HALVES = replace(CONFIG, rope_style="half")
# YaRN with factor 4 for 512 tokens and base 1e5: pairs up to 0.64 stay, pairs from 3.05 are divided by the factor.
YARN = tuple(1 / (blend / 4 + 1 - blend) for blend in (0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0))
FACTORS = (1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0)

_LOCAL = {"sandwich_norms": True, "activation": "gelu_tanh", "embedding_scale": 8.0, "head_dim": 32}
# Configurations by architecture name; "llama, …" are variants of llama.
CONFIGS = {
    "llama": CONFIG,
    "llama, untied": replace(CONFIG, tie_word_embeddings=False),
    "llama, biases": replace(CONFIG, qkv_bias=True),
    "llama, factors": replace(CONFIG, rope_factors=FACTORS),
    "qwen2": replace(_HALVES, qkv_bias=True),
    "qwen3": replace(_HALVES, qk_norm=True, head_dim=32, tie_word_embeddings=False),
    "phi3": replace(_HALVES, tie_word_embeddings=False, num_key_value_heads=4),
    "gemma": replace(_HALVES, activation="gelu_tanh", embedding_scale=8.0, head_dim=32, num_key_value_heads=1),
    "gemma2": replace(_HALVES, **_LOCAL, windows=(4, 0), attention_softcap=5.0, logit_softcap=3.0),
    "gemma3": replace(
        _HALVES,
        **_LOCAL,
        num_hidden_layers=7,
        windows=(4, 4, 4, 4, 4, 0, 4),
        local_rope_theta=1e4,
        qk_norm=True,
        rope_factors=(8.0,) * 16,
    ),
    "gemma3, period": replace(
        _HALVES, **_LOCAL, num_hidden_layers=3, windows=(4, 0, 4), local_rope_theta=500.0, qk_norm=True
    ),
    "granite": replace(CONFIG, embedding_scale=12.0, residual_scale=0.22, attention_scale=0.125, logit_scale=0.125),
    "qwen3moe": replace(_HALVES, intermediate_size=64, qk_norm=True, head_dim=32, num_experts=6, num_experts_per_tok=2),
    "llama, experts": replace(CONFIG, intermediate_size=64, num_experts=4, num_experts_per_tok=3),
    "granitemoe": replace(
        CONFIG, intermediate_size=32, num_experts=4, num_experts_per_tok=3, attention_scale=0.125, logit_scale=0.125
    ),
    "gpt-oss": replace(
        _HALVES,
        num_hidden_layers=3,
        intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        qkv_bias=True,
        output_bias=True,
        expert_bias=True,
        attention_sinks=True,
        swiglu_limit=7.0,
        windows=(4, 0, 4),
    ),
    "smollm3": replace(CONFIG, num_hidden_layers=5, no_rope_layers=(3,)),
    "qwen2, window": replace(_HALVES, qkv_bias=True, windows=(5, 5)),
    "qwen2, yarn": replace(_HALVES, qkv_bias=True, rope_factors=YARN, rope_magnitude=1 + 0.1 * np.log(4.0)),
    "llama, linear": replace(CONFIG, rope_factors=(4.0,) * 8),
    "phi3, short factors": replace(
        _HALVES,
        num_key_value_heads=4,
        rotary_dim=8,
        rope_style="partial",
        rope_factors=FACTORS[:4],
        rope_magnitude=1.25,
        max_position_embeddings=512,
    ),
}
# Metadata of these configurations that `write` does not derive from the configuration.
METADATA = {
    "gemma2": {"gemma2.attn_logit_softcapping": 5.0, "gemma2.final_logit_softcapping": 3.0},
    "gemma3": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
    "gemma3, period": {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 500.0},
    "granite": {
        "granite.embedding_scale": 12.0,
        "granite.residual_scale": 0.22,
        "granite.attention.scale": 0.125,
        "granite.logit_scale": 8.0,
    },
    "granitemoe": {"granitemoe.attention.scale": 0.125, "granitemoe.logit_scale": 8.0},
    "qwen2, yarn": {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 512,
    },
    "llama, linear": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    "phi3, short factors": {
        "phi3.rope.scaling.attn_factor": 1.25,
        "phi3.rope.scaling.original_context_length": 512,
        "phi3.context_length": 2048,
    },
}

# Byte-level BPE writes a space as Ġ and a line break as Ċ.
TOKENS = ["<|endoftext|>", "<|im_end|>", *"abcdeÃ©ĠĊ123", "ab", "Ġa", "Ġab", "12", "Ã©"]
TYPES = [3, 3, *[1] * (len(TOKENS) - 2)]
MERGES = ["a b", "Ġ a", "Ġ ab", "1 2", "Ã ©"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn": "attn_sinks",  # self_attn.sinks
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


# Types that the package gguf cannot quantize to: bytes per block of 256 weights, byte offsets of its float16 values.
K_BLOCKS = {
    "Q2_K": (84, (80, 82)),
    "Q3_K": (110, (108,)),
    "Q4_K": (144, (0, 2)),
    "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)),
}


def quantized(weight, kind):
    """Return a weight [n, k] in a type of GGUF. Types of K_BLOCKS have random blocks."""
    if kind not in K_BLOCKS:
        return gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    size, halves = K_BLOCKS[kind]
    n, k = weight.shape
    seed = weight[0, :4].view(np.uint32)  # other blocks for other weights
    blocks = np.random.default_rng(seed).integers(0, 256, (n, k // 256, size), np.uint8)
    for place in halves:
        blocks[..., place : place + 2] = np.array([3e-3], np.float16).view(np.uint8)
    return blocks.reshape(n, -1)


def write(
    path,
    config=CONFIG,
    weights=None,
    metadata=None,
    pre="smollm",
    model="gpt2",
    architecture="llama",
    kinds=("Q4_1",),
    table="F32",
    tensors=None,
):
    """Write a file; return the weights before they were quantized.

    kinds: types of the matrices, repeated in order.
    table: type of the embedding and the head.
    tensors: additional tensors by name.
    """
    weights = weights or tiny.random_weights(llama_weight_shapes(config))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_rope_dimension_count(config.rotary_size)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if f"{architecture}.context_length" not in (metadata or {}):
        writer.add_context_length(config.max_position_embeddings)
    if config.windows is not None:
        writer.add_sliding_window(max(config.windows))
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types(TYPES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for key, value in (metadata or {}).items():
        adders = {str: writer.add_string, float: writer.add_float32, list: writer.add_array, bool: writer.add_bool}
        add = adders.get(type(value), writer.add_uint32)
        add(key, value)
    count = 0
    for name, array in in_file(weights, architecture, config).items():
        kind = "F32"
        if array.ndim > 1 and "ffn_gate_inp" not in name and not name.endswith(".bias"):
            is_table = name in ("token_embd.weight", "output.weight")
            kind = table if is_table else kinds[count % len(kinds)]
            count += not is_table
        writer.add_tensor(name, quantized(array, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def in_file(weights, architecture, config):
    """Return the weights with GGUF names, and joined if the architecture stores them jointly."""
    others = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    found = {}
    names = NAMES | (SANDWICH if config.sandwich_norms else {})
    if config.attention_sinks:
        names["post_attention_layernorm"] = "post_attention_norm"
    for name, array in weights.items():
        module, _, part = name.rpartition(".")
        if module in others:
            found[f"{others[module]}.{part}"] = array
        else:
            _, _, layer, module = module.split(".", 3)
            found[f"blk.{layer}.{names[module]}.{'weight' if part == 'sinks' else part}"] = array
    if architecture == "phi3":
        for layer in range(config.num_hidden_layers):
            prefix = f"blk.{layer}"
            parts = [found.pop(f"{prefix}.attn_{part}.weight") for part in "qkv"]
            found[f"{prefix}.attn_qkv.weight"] = np.concatenate(parts)
            gate, up = (found.pop(f"{prefix}.ffn_{part}.weight") for part in ("gate", "up"))
            found[f"{prefix}.ffn_up.weight"] = np.concatenate([gate, up])
    if config.rope_factors in (FACTORS, FACTORS[:4]):
        kind = "freqs" if config.rope_style == "interleaved" else "factors_short"
        found[f"rope_{kind}.weight"] = np.array(config.rope_factors, np.float32)
    return found
