"""Builds Llama decoders with a KV cache as ONNX."""

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
    """Build a Llama decoder with cache inputs and outputs, opset 17, with the names of Optimum's exports.

    Inputs: input_ids int64 [batch, sequence]; attention_mask int64 [batch, past_sequence + sequence] (1 = attend);
    position_ids int64 [batch, sequence]; for each layer N, past_key_values.N.key and .value float32 [batch,
    num_key_value_heads, past_sequence, head_dim], where past_sequence may be 0.
    Outputs: logits float32 [batch, sequence, vocab_size]; for each layer, present.N.key and .value float32 [batch,
    num_key_value_heads, past_sequence + sequence, head_dim].

    With "gqa" there is no position_ids input, zeros of attention_mask must be at the end of a row, and past and present
    may share a buffer for at least past_sequence + sequence tokens: new keys and values are then appended in place.

    The graph rotates pairs (i, i + head_dim / 2), as Hugging Face does. Rows of weights for other pairs are reordered;
    this only changes the order of values inside cached keys.

    Args:
        weights: Weights by Hugging Face name (see llama_weight_shapes): arrays of any float dtype, stored as float32;
            or lazy float32 tensors.
        config: The configuration.
        name: Name of the graph.
        attention: "standard": standard ONNX operators, as Optimum exports. "gqa": GroupQueryAttention (with the rotary
            embedding, and q_proj, k_proj and v_proj packed into qkv_proj) and fused norms, as ONNX Runtime's GenAI
            model builder writes them; for at most max_position_embeddings tokens.
        one_table: A tied head multiplies by the Transpose of the embedding table instead of a copy.
        separate_qkv: Indices of layers whose q_proj, k_proj and v_proj are not packed with "gqa".

    Raises:
        ModelBuildError: A weight is missing or does not fit the configuration, `attention` is unknown, or it is "gqa"
            and head_dim is not a multiple of 16.
    """
    if attention not in get_args(AttentionForm):
        raise ModelBuildError(f"attention is {attention!r}; expected one of {', '.join(get_args(AttentionForm))}")
    if attention == "gqa" and config.head_size % 16:
        raise ModelBuildError(
            f"head_dim is {config.head_size}, expected a multiple of 16 for GroupQueryAttention; build with "
            "attention='standard'"
        )
    shapes = llama_weight_shapes(config)
    check_weights(weights, shapes)
    tensors = {key: _float32(weights[key]) for key in shapes}
    if config.rope_style != "half":
        order = rows_to_halves(config)
        for layer in range(config.num_hidden_layers):
            for part in rotated_parts(config):
                key = f"model.layers.{layer}.self_attn.{part}"
                tensors[key] = reorder_heads(np.asarray(tensors[key]), order)
        config = replace(config, rope_style="half")
    if attention == "gqa":
        return GroupQueryLlamaBuilder(tensors, config, one_table, separate_qkv).build(name)
    return LlamaBuilder(tensors, config, one_table).build(name)


def _float32(weight: Weight) -> Weight:
    return weight if isinstance(weight, ir.LazyTensor) else np.asarray(weight, dtype=np.float32)


def rotated_parts(config: LlamaConfig) -> list[str]:
    """Return the parts of self_attn whose rows depend on the order of rotated pairs."""
    parts = ["q_proj.weight", "k_proj.weight"]
    if config.qkv_bias:
        parts += ["q_proj.bias", "k_proj.bias"]
    return parts + (["q_norm.weight", "k_norm.weight"] if config.qk_norm else [])


def rows_to_halves(config: LlamaConfig) -> np.ndarray:
    """Return the indices of a head's rows in the order in which (i, i + head_dim / 2) are rotated as a pair."""
    rows = np.arange(config.head_size)
    if config.rope_style == "half":
        return rows
    rotated, others = rows[: config.rotary_size], rows[config.rotary_size :].reshape(2, -1)
    pairs = rotated.reshape(-1, 2).T if config.rope_style == "interleaved" else rotated.reshape(2, -1)
    return np.concatenate([pairs, others], axis=1).ravel()


def reorder_heads(weight: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Reorder the rows of each head."""
    return weight.reshape(-1, len(order), *weight.shape[1:])[:, order].reshape(weight.shape)
