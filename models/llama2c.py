"""Reader for llama2.c checkpoints."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import numpy as np

from .graph_builder import ModelBuildError
from .llama_config import LlamaConfig, llama_weight_shapes


def read_llama2c(path: str | os.PathLike[str]) -> tuple[LlamaConfig, dict[str, np.ndarray]]:
    """Read a checkpoint in llama2.c's first format: 7 int32, then the float32 weights in a fixed order.

    Returns:
        The configuration, and the weights under their Hugging Face names, memory-mapped.

    Raises:
        ModelBuildError: The header is implausible, or the file has another size.
    """
    path = Path(path)
    header_size = struct.calcsize("<7i")
    with path.open("rb") as stream:
        header = stream.read(header_size)
    if len(header) < header_size:
        raise ModelBuildError(f"{path} has {len(header)} bytes; expected a llama2.c checkpoint with 7 int32 first")
    dim, inner, layers, heads, kv_heads, vocab, max_positions = struct.unpack("<7i", header)
    # A negative vocabulary size means that the output head has separate weights.
    tied, vocab = vocab > 0, abs(vocab)
    sizes = (dim, inner, layers, heads, kv_heads, vocab, max_positions)
    if min(sizes) <= 0 or max(sizes) > 1 << 24 or layers > 1 << 12:
        raise ModelBuildError(f"{path} has the header {sizes}; expected a llama2.c checkpoint (version 0)")
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rope_style="interleaved",
        tie_word_embeddings=tied,
        max_position_embeddings=max_positions,
    )

    shapes = llama_weight_shapes(config)
    # The file holds one kind of weight for all layers, then the next kind.
    kinds = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    kinds += ["post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"]
    order = ["model.embed_tokens.weight"]
    order += [f"model.layers.{layer}.{kind}.weight" for kind in kinds for layer in range(layers)]
    order += ["model.norm.weight"]
    tables = max_positions * config.head_size  # the file's tables of cos and sin are skipped: the graph computes them
    count = sum(math.prod(shapes[key]) for key in order) + tables + (0 if tied else vocab * dim)
    expected = header_size + 4 * count
    if path.stat().st_size != expected:
        raise ModelBuildError(f"{path} has {path.stat().st_size} bytes; expected {expected} for its header {sizes}")

    values = np.memmap(path, dtype="<f4", mode="r", offset=header_size)
    weights: dict[str, np.ndarray] = {}
    start = 0
    for key in order:
        size = math.prod(shapes[key])
        weights[key] = values[start : start + size].reshape(shapes[key])
        start += size
    if not tied:
        weights["lm_head.weight"] = values[start + tables :].reshape(vocab, dim)
    return config, weights
