"""Builds Llama decoders with a key/value cache as ONNX."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from .graph_builder import ModelBuildError, Weight, check_weights
from .llama_config import LlamaConfig, llama_weight_shapes
from .llama_gqa import GroupQueryLlamaBuilder
from .llama_graph import LlamaBuilder

AttentionForm = Literal["standard", "gqa"]


def build_llama(
    weights: Mapping[str, Weight],
    config: LlamaConfig,
    name: str = "llama",
    attention: AttentionForm = "standard",
    *,
    one_table: bool = False,
    separate_qkv: Collection[int] = (),
) -> ir.Model:
    """Builds a Llama decoder with cache inputs and outputs, opset 17, named as Optimum's exports are.

    weights: Hugging Face names -> arrays of any float dtype, stored as float32, or lazy float32 tensors, which stay
        lazy; see llama_weight_shapes.
    attention: "standard": operators of ONNX alone, as Optimum exports. "gqa": ONNX Runtime's GroupQueryAttention (with
        the rotary embedding inside, q_proj, k_proj and v_proj packed into one qkv_proj) and its fused norms, as its
        GenAI model builder writes them; for max_position_embeddings tokens at most.
    one_table: a tied head multiplies by the Transpose of the embedding's table, in place of a copy of it.
    separate_qkv: layers, by index, whose q_proj, k_proj and v_proj are not packed with "gqa".

    Inputs: input_ids int64 [batch, sequence]; attention_mask int64 [batch, past_sequence + sequence] (1 = attend);
    position_ids int64 [batch, sequence]; for each layer N, past_key_values.N.key and .value float32
    [batch, num_key_value_heads, past_sequence, head_dim], where past_sequence may be 0.
    Outputs: logits float32 [batch, sequence, vocab_size]; for each layer, present.N.key and .value float32
    [batch, num_key_value_heads, past_sequence + sequence, head_dim].
    With "gqa" there is no position_ids input, zeros of attention_mask may only stand at the end of a row, and the cache
    may be shared: where one buffer for at least past_sequence + sequence tokens is given as past and as present,
    the new keys and values are written behind the old ones, and nothing is copied.

    The graph always rotates halves, as Hugging Face's does: interleaved weights get their rows reordered, which changes
    the order inside the cached keys and nothing else.

    Raises ModelBuildError when a weight is missing or has another shape than the configuration says; when `attention`
    is unknown, or is "gqa" and head_dim no multiple of 16.
    """
    if attention not in get_args(AttentionForm):
        raise ModelBuildError(f"attention is {attention!r}; expected one of {', '.join(get_args(AttentionForm))}")
    if attention == "gqa" and config.head_size % 16:
        raise ModelBuildError(
            f"head_dim is {config.head_size}; GroupQueryAttention wants a multiple of 16: build with "
            "attention='standard'"
        )
    shapes = llama_weight_shapes(config)
    check_weights(weights, shapes)
    tensors = {key: _float32(weights[key]) for key in shapes}
    if config.rope_style == "interleaved":
        for layer in range(config.num_hidden_layers):
            for part in rotated_parts(config):
                key = f"model.layers.{layer}.self_attn.{part}"
                tensors[key] = interleaved_to_half(np.asarray(tensors[key]), config.head_size)
        config = replace(config, rope_style="half")
    if attention == "gqa":
        return GroupQueryLlamaBuilder(tensors, config, one_table, separate_qkv).build(name)
    return LlamaBuilder(tensors, config, one_table).build(name)


def _float32(weight: Weight) -> Weight:
    return weight if isinstance(weight, ir.LazyTensor) else np.asarray(weight, dtype=np.float32)


def rotated_parts(config: LlamaConfig) -> list[str]:
    """What the order of rotated pairs is an order of, of each layer's self_attn."""
    parts = ["q_proj.weight", "k_proj.weight"]
    if config.qkv_bias:
        parts += ["q_proj.bias", "k_proj.bias"]
    return parts + (["q_norm.weight", "k_norm.weight"] if config.qk_norm else [])


def interleaved_to_half(weight: np.ndarray, head_size: int) -> np.ndarray:
    """Reorders the rows of each head from (0, 1, 2, 3, …) to (0, 2, …, 1, 3, …)."""
    return weight.reshape(-1, head_size // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
