"""The configuration of Llama decoders and close relatives: Mistral, Qwen2 and 3, Phi-3, Gemma, Granite, gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .graph_builder import ModelBuildError, Shape


@dataclass(frozen=True)
class LlamaConfig:
    """The fields that shape a Llama graph, named as in Hugging Face's config.json except for these.

    Attributes:
        head_dim: None means hidden_size / num_attention_heads.
        rope_style: Which rows of a head in q_proj and k_proj are rotated as a pair. "half" (Hugging Face): (i, i +
            head_dim / 2). "interleaved" (llama2.c, Meta, GGUF files of Llama): (2i, 2i + 1). "partial" (Phi-4-mini):
            (i, i + rotary_dim / 2).
        rope_factors: Divisors of the rotary frequencies, one per rotated pair (Llama 3.1).
        rope_magnitude: Factor of rotated queries and keys (LongRoPE, YaRN).
        rotary_dim: Number of elements of a head that are rotated, in the first pairs. None means head_dim.
        local_rope_theta: The rope_theta of layers with a window, without rope_factors (Gemma 3). None: as other layers.
        no_rope_layers: Indices of layers without rotary embedding (SmolLM3).
        windows: Number of latest keys that a token sees in each layer, its own included; 0: all. None: all, in all
            layers.
        qkv_bias: q_proj, k_proj and v_proj have biases (Qwen2).
        output_bias: o_proj has a bias (gpt-oss).
        qk_norm: The query and key of each head are normalized before the rotation (Qwen3, Gemma 3).
        sandwich_norms: The outputs of attention and of the MLP are normalized too (Gemma 2 and 3).
        attention_scale: Factor of the attention's scores. None means 1 / sqrt(head_dim).
        attention_sinks: Each head has a further score without a value, `self_attn.sinks` (gpt-oss).
        attention_softcap: Scores become softcap tanh(scores / softcap) (Gemma 2). 0: they stay.
        logit_softcap: The same for logits.
        activation: Activation of the gate, "silu" or "gelu_tanh" (Gemma).
        num_experts: Number of experts of each MLP, each with an inner width of intermediate_size (Mixtral, Qwen3-MoE).
            0: one MLP.
        num_experts_per_tok: Number of experts that compute a token. The softmax over their router logits is the weight
            of each.
        expert_bias: The router and the experts have biases (gpt-oss).
        swiglu_limit: Limit of the gate and the factor of experts, which are then combined as in gpt-oss:
            min(gate, limit) sigmoid(1.702 min(gate, limit)) (clamp(factor, ±limit) + 1). None: silu(gate) factor.
        embedding_scale: Factor by which embedded tokens are multiplied (Gemma: the square root of hidden_size).
        residual_scale: Factor of what a sublayer adds to the hidden state (Granite).
        logit_scale: Factor of the logits (Granite).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_style: Literal["half", "interleaved", "partial"] = "half"
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 2048
    rope_factors: tuple[float, ...] | None = None
    rope_magnitude: float = 1.0
    rotary_dim: int | None = None
    local_rope_theta: float | None = None
    no_rope_layers: tuple[int, ...] = ()
    windows: tuple[int, ...] | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    attention_scale: float | None = None
    attention_sinks: bool = False
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    num_experts: int = 0
    num_experts_per_tok: int = 0
    expert_bias: bool = False
    swiglu_limit: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelBuildError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ModelBuildError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; give head_dim"
            )
        if self.rope_style not in ("half", "interleaved", "partial"):
            raise ModelBuildError(f"rope_style is {self.rope_style!r}; expected 'half', 'interleaved' or 'partial'")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ModelBuildError(f"activation is {self.activation!r}; expected 'silu' or 'gelu_tanh'")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ModelBuildError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, expected 1 to num_experts ({self.num_experts})"
            )
        if self.num_experts and self.activation != "silu":
            raise ModelBuildError(f"activation is {self.activation!r}, expected 'silu' for a mixture of experts")
        if self.head_size % 2:
            raise ModelBuildError(f"head_dim is {self.head_size}, expected an even number for rotary embeddings")
        if self.rotary_size % 2 or not 0 < self.rotary_size <= self.head_size:
            raise ModelBuildError(
                f"rotary_dim is {self.rotary_size}, expected an even number up to head_dim ({self.head_size})"
            )
        if self.rope_factors is not None and len(self.rope_factors) != self.rotary_size // 2:
            raise ModelBuildError(
                f"rope_factors has {len(self.rope_factors)} values, expected {self.rotary_size // 2} (one per pair)"
            )
        if self.windows is not None and len(self.windows) != self.num_hidden_layers:
            raise ModelBuildError(
                f"windows has {len(self.windows)} values, expected {self.num_hidden_layers} (num_hidden_layers)"
            )

    @property
    def head_size(self) -> int:
        """The value of head_dim, or its default."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """The value of rotary_dim, or its default."""
        return self.head_size if self.rotary_dim is None else self.rotary_dim

    def window(self, layer: int) -> int:
        """Return the window of a layer; 0: none."""
        return 0 if self.windows is None else self.windows[layer]

    def is_local(self, layer: int) -> bool:
        """Return whether a layer has the rotary embedding of `local_rope_theta`."""
        return self.local_rope_theta is not None and self.window(layer) > 0

    def mlp_norm(self, layer: int) -> str:
        """Return the name of the norm before the MLP."""
        name = "pre_feedforward_layernorm" if self.sandwich_norms else "post_attention_layernorm"
        return f"model.layers.{layer}.{name}.weight"


def llama_weight_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """Return the weights that build_llama needs: Hugging Face name -> shape.

    Linear layers are [out, in], those of experts [experts, out, in].
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_size
    key_value = config.num_key_value_heads * config.head_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (query, hidden),
            f"{prefix}.self_attn.k_proj.weight": (key_value, hidden),
            f"{prefix}.self_attn.v_proj.weight": (key_value, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query),
            config.mlp_norm(layer): (hidden,),
        }
        mlp = f"{prefix}.mlp.experts" if config.num_experts else f"{prefix}.mlp"
        if config.num_experts:
            shapes[f"{prefix}.mlp.gate.weight"] = (config.num_experts, hidden)
        for part, sides in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            shapes[f"{mlp}.{part}_proj.weight"] = (config.num_experts, *sides) if config.num_experts else sides
            if config.expert_bias:
                shapes[f"{mlp}.{part}_proj.bias"] = (config.num_experts, sides[0])
        if config.expert_bias:
            shapes[f"{prefix}.mlp.gate.bias"] = (config.num_experts,)
        if config.sandwich_norms:
            for part in ("attention", "feedforward"):
                shapes[f"{prefix}.post_{part}_layernorm.weight"] = (hidden,)
        if config.qkv_bias:
            for part, size in (("q", query), ("k", key_value), ("v", key_value)):
                shapes[f"{prefix}.self_attn.{part}_proj.bias"] = (size,)
        if config.output_bias:
            shapes[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
        if config.attention_sinks:
            shapes[f"{prefix}.self_attn.sinks"] = (config.num_attention_heads,)
        if config.qk_norm:
            for part in ("q", "k"):
                shapes[f"{prefix}.self_attn.{part}_norm.weight"] = (config.head_size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
