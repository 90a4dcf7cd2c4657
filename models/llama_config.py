"""The configuration of Llama decoders and close relatives: Mistral, Qwen2 and 3, Phi-3, Gemma."""

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
            head_dim / 2). "interleaved" (llama2.c, Meta, GGUF files of Llama): (2i, 2i + 1).
        rope_factors: Divisors of the rotary frequencies, one per rotated pair (Llama 3.1).
        qkv_bias: q_proj, k_proj and v_proj have biases (Qwen2).
        qk_norm: The query and key of each head are normalized before the rotation (Qwen3).
        activation: Activation of the gate, "silu" or "gelu_tanh" (Gemma).
        embedding_scale: Factor by which embedded tokens are multiplied (Gemma: the square root of hidden_size).
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
    rope_style: Literal["half", "interleaved"] = "half"
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 2048
    rope_factors: tuple[float, ...] | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0

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
        if self.rope_style not in ("half", "interleaved"):
            raise ModelBuildError(f"rope_style is {self.rope_style!r}; expected 'half' or 'interleaved'")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ModelBuildError(f"activation is {self.activation!r}; expected 'silu' or 'gelu_tanh'")
        if self.rope_factors is not None and len(self.rope_factors) != self.head_size // 2:
            raise ModelBuildError(
                f"rope_factors has {len(self.rope_factors)} values, expected {self.head_size // 2} (half of head_dim)"
            )
        if self.head_size % 2:
            raise ModelBuildError(f"head_dim is {self.head_size}, expected an even number for rotary embeddings")

    @property
    def head_size(self) -> int:
        """The value of head_dim, or its default."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def llama_weight_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """Return the weights that build_llama needs: Hugging Face name -> shape, linear layers as [out, in]."""
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
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
        if config.qkv_bias:
            for part, size in (("q", query), ("k", key_value), ("v", key_value)):
                shapes[f"{prefix}.self_attn.{part}_proj.bias"] = (size,)
        if config.qk_norm:
            for part in ("q", "k"):
                shapes[f"{prefix}.self_attn.{part}_norm.weight"] = (config.head_size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
