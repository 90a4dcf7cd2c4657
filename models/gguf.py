"""Reads Llama models from GGUF files: configuration, weights and tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import OrtolanError
from .graph_builder import ModelBuildError
from .llama_config import LlamaConfig

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

# GGUF name -> Hugging Face name; the first group after "blk.N.".
_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type


class GgufWeights(Mapping[str, np.ndarray]):
    """The weights of a GGUF file under their Hugging Face names, dequantized to float32 when asked for."""

    def __init__(self, reader: GGUFReader) -> None:
        self._tensors = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}

    def __getitem__(self, name: str) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _hugging_face_name(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; names we do not know stay."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_WEIGHTS:
        return f"model.layers.{parts[1]}.{_LAYER_WEIGHTS[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _OTHER_WEIGHTS:
        return f"{_OTHER_WEIGHTS[parts[0]]}.{parts[1]}"
    return name


def _open(path: str | os.PathLike[str]) -> tuple[GGUFReader, dict[str, Any]]:
    """The reader, and the metadata; arrays are left as fields, for they are slow to read."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise OrtolanError(
            "reading this model needs the package 'gguf'; install it with: pip install 'ortolan[decoder]'"
        ) from error
    try:
        reader = GGUFReader(Path(path))
    except (ValueError, IndexError) as error:
        raise ModelBuildError(f"{path} cannot be read as a GGUF file: {error}") from error
    short = {name: field.contents() for name, field in reader.fields.items() if len(field.types) == 1}
    return reader, short


def _required(metadata: Mapping[str, Any], key: str, path: str | os.PathLike[str]) -> Any:
    if key not in metadata:
        raise ModelBuildError(f"{path} has no metadata {key!r}; is it a GGUF file of a Llama model?")
    return metadata[key]


def read_gguf(path: str | os.PathLike[str]) -> tuple[LlamaConfig, Mapping[str, np.ndarray]]:
    """Reads a Llama model of any quantization that the package `gguf` can undo.

    Returns the configuration and the weights under their Hugging Face names, float32, dequantized one at a time.
    llama.cpp's converter reorders the rows of q_proj and k_proj of Llama models, hence rope_style "interleaved".

    Raises OrtolanError when the package `gguf` is missing; ModelBuildError when the file is no GGUF file of a Llama
    model, or scales its rotary frequencies, which build_llama does not.
    """
    reader, metadata = _open(path)

    def get(key: str) -> Any:
        return _required(metadata, key, path)

    if (architecture := get("general.architecture")) != "llama":
        raise ModelBuildError(f"{path} holds a model of architecture {architecture!r}, expected 'llama'")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    weights = GgufWeights(reader)
    if scaling != "none" or "rope_freqs.weight" in weights:
        raise ModelBuildError(f"{path} scales its rotary frequencies ({scaling}); expected a model that does not")
    hidden, heads = get("llama.embedding_length"), get("llama.attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", hidden // heads)
    if (rotated := metadata.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise ModelBuildError(f"{path} rotates {rotated} of {head_dim} numbers of a head, expected all")
    config = LlamaConfig(
        vocab_size=metadata.get("llama.vocab_size") or len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=hidden,
        intermediate_size=get("llama.feed_forward_length"),
        num_hidden_layers=get("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=metadata.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        # Stored as float32: 1e-5 comes back as 9.999999747378752e-06.
        rms_norm_eps=float(str(np.float32(get("llama.attention.layer_norm_rms_epsilon")))),
        rope_theta=metadata.get("llama.rope.freq_base", 10000.0),
        rope_style="interleaved",
        tie_word_embeddings="lm_head.weight" not in weights,
        max_position_embeddings=get("llama.context_length"),
    )
    return config, weights


def read_gguf_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Builds the byte-level BPE tokenizer described in a GGUF file's metadata, as `tokenizers` has it.

    Raises OrtolanError when the packages `gguf` or `tokenizers` are missing; ModelBuildError when the file describes a
    tokenizer of another kind.
    """
    reader, metadata = _open(path)
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise OrtolanError(
            "text in and out needs the package 'tokenizers'; install it with: pip install 'ortolan[decoder]'"
        ) from error
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind[0] != "gpt2" or kind[1] not in ("smollm", "gpt-2", "default"):
        raise ModelBuildError(
            f"{path} has a tokenizer of kind {kind[0]!r} that splits text as {kind[1]!r}; expected 'gpt2' (byte-level "
            "BPE) with 'smollm' or 'gpt-2'"
        )
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    types = reader.fields["tokenizer.ggml.token_type"].contents()

    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")] if kind[1] == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind_of in zip(tokens, types, strict=True) if kind_of == _CONTROL_TOKEN]
    tokenizer.add_special_tokens(special)
    return tokenizer
