"""Reads a GGUF file into a decoder's configuration and its weights under their Hugging Face names.

llama.cpp's converter reorders the rows of q_proj and k_proj of architecture "llama" for interleaved rotation, and adds
1 to Gemma's norms. Tensors that Hugging Face's models pack (Phi-3) are packed in the file as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from ..graph_builder import ModelBuildError, Shape
from ..llama import interleaved_to_half, rotated_parts
from ..llama_config import LlamaConfig, llama_weight_shapes
from .file import GgufFile, StoredWeight

_TABLE, _HEAD = "model.embed_tokens", "lm_head"
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
}
_OTHER_WEIGHTS = {"token_embd": _TABLE, "output_norm": "model.norm", "output": _HEAD}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Architecture:
    """The properties in which architectures differ. hugging_face: the name of the class in transformers."""

    hugging_face: str
    rope_style: Literal["half", "interleaved"] = "half"
    activation: Literal["silu", "gelu_tanh"] = "silu"
    scaled_embedding: bool = False
    packed: bool = False  # one tensor holds query, key and value, and another holds gate and up


ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", rope_style="interleaved"),  # Llama and Mistral
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "phi3": _Architecture("Phi3ForCausalLM", packed=True),
    "gemma": _Architecture("GemmaForCausalLM", activation="gelu_tanh", scaled_embedding=True),
}

# Encoder architectures that llama.cpp supports.
_EMBEDDING_ARCHITECTURES = (
    *("bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "modern-bert", "jina-bert-v2", "jina-bert-v3", "eurobert"),
    *("t5encoder", "gemma-embedding"),
)
_NOT_A_DECODER = (
    ", but only decoders can be imported; export the original model to ONNX instead: "
    "optimum-cli export onnx --model MODEL FOLDER, then: ortolan optimize FOLDER"
)

# Metadata keys (without the architecture's name) of unsupported features. They must be missing or 0.
_UNSUPPORTED = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "use_parallel_residual",
)


@dataclass(frozen=True)
class GgufModel:
    """A decoder in a GGUF file.

    Attributes:
        file: The file.
        architecture: The architecture's name in the file.
        config: The configuration.
        weights: The weights by Hugging Face name (see llama_weight_shapes).
        notes: Notes for the user.
    """

    file: GgufFile
    architecture: str
    config: LlamaConfig
    weights: Mapping[str, StoredWeight]
    notes: tuple[str, ...] = ()

    def with_halves(self) -> GgufModel:
        """Return the model with rotated pairs (i, i + head_dim / 2). Rows of weights are reordered if necessary."""
        if self.config.rope_style == "half":
            return self
        weights = dict(self.weights)
        for layer in range(self.config.num_hidden_layers):
            for part in rotated_parts(self.config):
                key = f"model.layers.{layer}.self_attn.{part}"
                order = interleaved_to_half(np.arange(weights[key].shape[0]), self.config.head_size)
                weights[key] = weights[key].reordered(order)
        return replace(self, config=replace(self.config, rope_style="half"), weights=weights)


class GgufWeights(Mapping[str, np.ndarray]):
    """The weights under their Hugging Face names, dequantized to float32 when read."""

    def __init__(self, weights: Mapping[str, StoredWeight]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> np.ndarray:
        return self._weights[name].floats()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def read_gguf(path: str | os.PathLike[str]) -> tuple[LlamaConfig, Mapping[str, np.ndarray]]:
    """Return the configuration and float32 weights of a GGUF file; each weight is dequantized when it is read."""
    model = read_model(path)
    return model.config, GgufWeights(model.weights)


def read_model(path: str | os.PathLike[str]) -> GgufModel:
    """Read a decoder of the Llama family, in any quantization that the package gguf can dequantize.

    Raises:
        OrtolanError: The package gguf is missing.
        ModelBuildError: The file is not a GGUF file, has another architecture, or needs features that build_llama
            lacks.
    """
    file = GgufFile(path, _check_architecture)
    name = file.text("general.architecture")
    architecture = ARCHITECTURES[name]
    _refuse_unsupported(file, name)
    weights = {_hugging_face_name(key): weight for key, weight in file.weights.items()}
    config, notes = _read_config(file, name, architecture, weights)
    if architecture.packed:
        weights = _unpacked(weights, config)
    expected = llama_weight_shapes(config)
    others = [weight.name for key, weight in weights.items() if key not in expected and key != _ROPE_FACTORS]
    if others:
        raise ModelBuildError(
            f"{path} holds {len(others)} tensors that are not supported for architecture {name!r}, such as "
            f"{others[0]!r}"
        )
    _check_tensors(file, name, weights, expected)
    return GgufModel(file, name, config, {key: weights[key] for key in expected}, notes)


def _check_architecture(path: Path, name: str) -> None:
    if name in ARCHITECTURES:
        return
    known = ", ".join(map(repr, ARCHITECTURES))
    if name in _EMBEDDING_ARCHITECTURES:
        raise ModelBuildError(f"{str(path)!r} holds an embedding model (architecture {name!r}){_NOT_A_DECODER}")
    raise ModelBuildError(f"{str(path)!r} holds a model of architecture {name!r}, expected one of {known}")


def _check_tensors(
    file: GgufFile, name: str, weights: Mapping[str, StoredWeight], expected: Mapping[str, Shape]
) -> None:
    """Check that all tensors exist and have the right shapes. Errors use the names in the file."""
    missing = [key for key in expected if key not in weights]
    if missing:
        raise ModelBuildError(
            f"{file.path} lacks {len(missing)} of the {len(expected)} tensors of a decoder of architecture {name!r}, "
            f"such as {_gguf_name(missing[0])!r}; download it again, or merge the parts of a split file first "
            "(llama-gguf-split --merge)"
        )
    for key, shape in expected.items():
        if weights[key].shape != shape:
            raise ModelBuildError(
                f"{file.path}: tensor {weights[key].name!r} has shape {list(weights[key].shape)}, expected "
                f"{list(shape)} by its metadata; the file is damaged, or a variant that is not supported"
            )


def _gguf_name(key: str) -> str:
    """Return the name in the file, the inverse of _hugging_face_name."""
    module, _, part = key.rpartition(".")
    for ours, theirs in _OTHER_WEIGHTS.items():
        if theirs == module:
            return f"{ours}.{part}"
    _, _, layer, module = module.split(".", 3)
    names = {theirs: ours for ours, theirs in _LAYER_WEIGHTS.items()}
    return f"blk.{layer}.{names[module]}.{part}"


def _hugging_face_name(name: str) -> str:
    """Return the Hugging Face name: "model.layers.3.self_attn.q_proj.weight" for "blk.3.attn_q.weight"."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_WEIGHTS:
        return f"model.layers.{parts[1]}.{_LAYER_WEIGHTS[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _OTHER_WEIGHTS:
        return f"{_OTHER_WEIGHTS[parts[0]]}.{parts[1]}"
    return name


def _refuse_unsupported(file: GgufFile, name: str) -> None:
    scaling = file.metadata.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelBuildError(f"{file.path} scales its rotary frequencies ({scaling}), which is not supported")
    if file.metadata.get(f"{name}.pooling_type"):
        raise ModelBuildError(
            f"{str(file.path)!r} holds an embedding model ({name}.pooling_type is set){_NOT_A_DECODER}"
        )
    for key in _UNSUPPORTED:
        if found := file.metadata.get(f"{name}.{key}"):
            raise ModelBuildError(f"{file.path} has {name}.{key} = {found!r}, which is not supported")


def _read_config(
    file: GgufFile, name: str, architecture: _Architecture, weights: Mapping[str, StoredWeight]
) -> tuple[LlamaConfig, tuple[str, ...]]:
    hidden, heads = file.integer(f"{name}.embedding_length"), file.integer(f"{name}.attention.head_count")
    head_dim = file.integer(f"{name}.attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := file.integer(f"{name}.{key}", head_dim)) != head_dim:
            raise ModelBuildError(f"{file.path}: {name}.{key} is {found}, expected {head_dim}, the size of a head")
    if f"{_TABLE}.weight" not in weights:
        raise ModelBuildError(f"{file.path} has no tensor 'token_embd.weight'; is it the first part of a split file?")
    context, notes = file.integer(f"{name}.context_length"), list[str]()
    window = file.metadata.get(f"{name}.attention.sliding_window")
    if isinstance(window, int) and 0 < window < context:
        notes.append(
            f"sliding-window attention is not supported: the context is {window} tokens (the window), not {context}"
        )
        context = window
    config = LlamaConfig(
        vocab_size=weights[f"{_TABLE}.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=file.integer(f"{name}.feed_forward_length"),
        num_hidden_layers=file.integer(f"{name}.block_count", maximum=4096),
        num_attention_heads=heads,
        num_key_value_heads=file.integer(f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        # The file stores float32, and 1e-5 is read as 9.999999747378752e-06; str() restores the short decimal.
        rms_norm_eps=float(str(np.float32(file.positive(f"{name}.attention.layer_norm_rms_epsilon")))),
        rope_theta=file.positive(f"{name}.rope.freq_base", 10000.0),
        rope_style=architecture.rope_style,
        tie_word_embeddings=f"{_HEAD}.weight" not in weights,
        max_position_embeddings=context,
        rope_factors=_rope_factors(weights),
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in weights,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in weights,
        activation=architecture.activation,
        embedding_scale=hidden**0.5 if architecture.scaled_embedding else 1.0,
    )
    return config, tuple(notes)


def _rope_factors(weights: Mapping[str, StoredWeight]) -> tuple[float, ...] | None:
    """Return the rotary factors of Llama 3.1 and later, or None."""
    if _ROPE_FACTORS not in weights:
        return None
    factors = weights[_ROPE_FACTORS].floats().ravel()
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelBuildError(f"tensor {_ROPE_FACTORS!r} holds values that are not positive")
    return tuple(factors.tolist())


def _unpacked(weights: Mapping[str, StoredWeight], config: LlamaConfig) -> dict[str, StoredWeight]:
    """Split Phi-3's packed tensors into query, key and value, and into gate and up."""
    result = dict(weights)
    query, key = (heads * config.head_size for heads in (config.num_attention_heads, config.num_key_value_heads))
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        packed = {
            f"blk.{layer}.attn_qkv.weight": {
                "self_attn.q_proj": query,
                "self_attn.k_proj": key,
                "self_attn.v_proj": key,
            },
            f"{prefix}.mlp.up_proj.weight": dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), config.intermediate_size),
        }
        for name, parts in packed.items():
            if name not in result:
                continue
            whole, start = result.pop(name), 0
            if whole.shape[0] != sum(parts.values()):
                raise ModelBuildError(
                    f"tensor {whole.name!r} has {whole.shape[0]} rows, expected {sum(parts.values())} for "
                    f"{' and '.join(parts)}"
                )
            for part, rows in parts.items():
                result[f"{prefix}.{part}.weight"] = whole.rows(start, start + rows)
                start += rows
    return result
