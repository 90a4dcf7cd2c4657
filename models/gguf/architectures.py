"""Differences of the architectures of GGUF files from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..llama_config import LlamaConfig


@dataclass(frozen=True)
class Architecture:
    """The properties in which architectures differ.

    Attributes:
        hugging_face: The name of the class in transformers.
        model_type: The name of the architecture in transformers.
        packed: One tensor holds query, key and value, and another holds gate and up.
        gemma: The embedding is scaled by the square root of its width, and the gate's activation is GELU.
        sandwich_norms: See LlamaConfig.
        window: The window if the file states none; 0: no window.
        window_period: Every n-th layer sees all keys, the other layers have a window. 0: all layers have it.
        local_rope_theta: See LlamaConfig; the default of rope.freq_base_swa.
        layers_by_width: The number of layers of the model whose attention is scaled by 1 / sqrt(hidden_size / heads).
        no_rope_period: Every n-th layer has no rotary embedding. 0: all layers have it.
        experts_field: The name of the field of config.json with the number of experts. None: no mixtures of experts.
        swiglu_limit: See LlamaConfig.
        genai_type: The name of the architecture in onnxruntime-genai, if it differs from `model_type`.
        options: Metadata keys, without the architecture's name, that other architectures may not set, with the values
            that a missing key means; 0: the feature is not used.
    """

    hugging_face: str
    model_type: str
    rope_style: Literal["half", "interleaved"] = "half"
    packed: bool = False
    gemma: bool = False
    sandwich_norms: bool = False
    window: int = 0
    window_period: int = 0
    local_rope_theta: float | None = None
    layers_by_width: int = 0
    no_rope_period: int = 0
    experts_field: str | None = None
    swiglu_limit: float | None = None
    genai_type: str | None = None
    options: Mapping[str, float] = field(default_factory=dict)


_GRANITE = dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "attention.scale"), 0.0)
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", rope_style="interleaved"),  # Llama and Mistral
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", experts_field="num_experts", genai_type="decoder"),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        window_period=2,
        experts_field="num_local_experts",
        swiglu_limit=7.0,
        genai_type="gptoss",
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", packed=True),  # Phi-3, Phi-4 and Phi-4-mini
    "gemma": Architecture("GemmaForCausalLM", "gemma", gemma=True),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        gemma=True,
        sandwich_norms=True,
        window=4096,
        window_period=2,
        layers_by_width=46,
        options={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},  # old files state neither
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        gemma=True,
        sandwich_norms=True,
        window_period=6,
        local_rope_theta=10000.0,
        layers_by_width=62,
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        "granite",
        rope_style="interleaved",
        options=_GRANITE,
    ),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        "granitemoe",
        rope_style="interleaved",
        experts_field="num_local_experts",
        genai_type="decoder",
        options=_GRANITE,
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", rope_style="interleaved", no_rope_period=4),
}
# Files of Mixtral have the architecture "llama".
_MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    rope_style="interleaved",
    experts_field="num_local_experts",
    genai_type="decoder",
)

# Encoder architectures that llama.cpp supports.
EMBEDDING_ARCHITECTURES = (
    *("bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "modern-bert", "jina-bert-v2", "jina-bert-v3", "eurobert"),
    *("t5encoder", "gemma-embedding"),
)

# Metadata keys (without the architecture's name) of features that only some architectures support. Elsewhere they must
# be missing or 0.
FEATURES = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.key_length_swa",
    "rope.dimension_count_swa",
    "use_parallel_residual",
)

# Maps the GGUF name, after "blk.N.", to the Hugging Face name of a layer's weight.
_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GPT_OSS = {"attn_sinks": "self_attn.sinks", "post_attention_norm": "post_attention_layernorm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def find_architecture(name: str, experts: bool) -> Architecture:
    """Return the architecture with this name in a file. experts: the file has mixtures of experts."""
    return _MIXTRAL if experts and name == "llama" else ARCHITECTURES[name]


def layer_weights(architecture: Architecture) -> dict[str, str]:
    """Return the Hugging Face names of a layer's weights by their GGUF names, after the layer's prefix."""
    if architecture.model_type == "gpt_oss":
        return _LAYER_WEIGHTS | _GPT_OSS
    return _LAYER_WEIGHTS | (_SANDWICH if architecture.sandwich_norms else {})


def config_extras(config: LlamaConfig, architecture: Architecture) -> dict[str, object]:
    """Return the fields of config.json that only some architectures have."""
    fields: dict[str, object] = {}
    model_type = architecture.model_type
    if config.windows is not None:
        fields["sliding_window"] = max(config.windows)
        if model_type.startswith("gemma") or model_type == "gpt_oss":
            kinds = {True: "sliding_attention", False: "full_attention"}
            fields["layer_types"] = [kinds[window > 0] for window in config.windows]
    if config.local_rope_theta is not None:
        fields["rope_local_base_freq"] = config.local_rope_theta
    if model_type.startswith("gemma"):
        fields["hidden_activation"] = "gelu_pytorch_tanh"
    if model_type in ("gemma2", "gemma3_text"):
        scale = config.attention_scale or config.head_size**-0.5
        fields["query_pre_attn_scalar"] = scale**-2
        fields["attn_logit_softcapping"] = config.attention_softcap or None
        fields["final_logit_softcapping"] = config.logit_softcap or None
    if model_type in ("granite", "granitemoe"):
        fields["embedding_multiplier"] = config.embedding_scale
        fields["residual_multiplier"] = config.residual_scale
        fields["logits_scaling"] = 1 / config.logit_scale
        fields["attention_multiplier"] = config.attention_scale or config.head_size**-0.5
    if architecture.experts_field is not None:
        fields[architecture.experts_field] = config.num_experts
        fields["num_experts_per_tok"] = config.num_experts_per_tok
    if model_type == "gpt_oss":
        fields |= {"swiglu_limit": config.swiglu_limit, "attention_bias": True}
    if model_type == "qwen3_moe":
        fields |= {"moe_intermediate_size": config.intermediate_size, "norm_topk_prob": True}
        fields |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if model_type == "smollm3":
        layers = range(config.num_hidden_layers)
        fields["no_rope_layers"] = [int(layer not in config.no_rope_layers) for layer in layers]
    if config.rotary_dim is not None:
        fields["partial_rotary_factor"] = config.rotary_dim / config.head_size
    return fields
