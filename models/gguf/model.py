"""Reads a GGUF file into a decoder's configuration and its weights under their Hugging Face names.

llama.cpp's converter reorders the rows of q_proj and k_proj of architecture "llama" for interleaved rotation, and adds
1 to Gemma's norms. Tensors that Hugging Face's models pack (Phi-3) are packed in the file as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16

from ..graph_builder import ModelBuildError, Shape
from ..llama import reorder_heads, rotated_parts, rows_to_halves
from ..llama_config import LlamaConfig, llama_weight_shapes
from .architectures import (
    ARCHITECTURES,
    EMBEDDING_ARCHITECTURES,
    FEATURES,
    Architecture,
    find_architecture,
    layer_weights,
)
from .file import GgufFile, StoredWeight
from .rotary import TENSORS, read_rotary

_TABLE, _HEAD = "model.embed_tokens", "lm_head"
_OTHER_WEIGHTS = {"token_embd": _TABLE, "output_norm": "model.norm", "output": _HEAD}
_NOT_A_DECODER = (
    ", but only decoders can be imported; export the original model to ONNX instead: "
    "optimum-cli export onnx --model MODEL FOLDER, then: ortolan optimize FOLDER"
)

# Maps fields of LlamaConfig to metadata keys, without the architecture's name.
_OPTIONS = {
    "attention_scale": "attention.scale",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "logit_scale": "logit_scale",
}


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
        weights, rows = dict(self.weights), rows_to_halves(self.config)
        for layer in range(self.config.num_hidden_layers):
            for part in rotated_parts(self.config):
                key = f"model.layers.{layer}.self_attn.{part}"
                order = reorder_heads(np.arange(weights[key].shape[0]), rows)
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
    architecture = find_architecture(name, experts=bool(file.metadata.get(f"{name}.expert_count")))
    _refuse_unsupported(file, name, architecture)
    names = layer_weights(architecture)
    weights = {_hugging_face_name(key, names): weight for key, weight in file.weights.items()}
    config, notes = _read_config(file, name, architecture, weights)
    if architecture.packed:
        weights = _unpacked(weights, config)
    expected = llama_weight_shapes(config)
    others = [weight.name for key, weight in weights.items() if key not in expected and key not in TENSORS]
    if others:
        raise ModelBuildError(
            f"{path} holds {len(others)} tensors that are not supported for architecture {name!r}, such as "
            f"{others[0]!r}"
        )
    _check_tensors(file, name, architecture, weights, expected)
    return GgufModel(file, name, config, {key: weights[key] for key in expected}, notes)


def _check_architecture(path: Path, name: str) -> None:
    if name in ARCHITECTURES:
        return
    known = ", ".join(map(repr, ARCHITECTURES))
    if name in EMBEDDING_ARCHITECTURES:
        raise ModelBuildError(f"{str(path)!r} holds an embedding model (architecture {name!r}){_NOT_A_DECODER}")
    raise ModelBuildError(f"{str(path)!r} holds a model of architecture {name!r}, expected one of {known}")


def _check_tensors(
    file: GgufFile,
    name: str,
    architecture: Architecture,
    weights: Mapping[str, StoredWeight],
    expected: Mapping[str, Shape],
) -> None:
    """Check that all tensors exist and have the right shapes. Errors use the names in the file."""
    missing = [key for key in expected if key not in weights]
    if missing:
        first = _gguf_name(missing[0], layer_weights(architecture))
        raise ModelBuildError(
            f"{file.path} lacks {len(missing)} of the {len(expected)} tensors of a decoder of architecture {name!r}, "
            f"such as {first!r}; download it again, or merge the parts of a split file first (llama-gguf-split --merge)"
        )
    for key, shape in expected.items():
        if weights[key].shape != shape:
            raise ModelBuildError(
                f"{file.path}: tensor {weights[key].name!r} has shape {list(weights[key].shape)}, expected "
                f"{list(shape)} by its metadata; the file is damaged, or a variant that is not supported"
            )


def _gguf_name(key: str, layer_names: Mapping[str, str]) -> str:
    """Return the name in the file, the inverse of _hugging_face_name."""
    module, _, part = (f"{key}.weight" if key.endswith(".sinks") else key).rpartition(".")
    for ours, theirs in _OTHER_WEIGHTS.items():
        if theirs == module:
            return f"{ours}.{part}"
    _, _, layer, module = module.split(".", 3)
    names = {theirs: ours for ours, theirs in layer_names.items()}
    return f"blk.{layer}.{names[module]}.{part}"


def _hugging_face_name(name: str, layer_names: Mapping[str, str]) -> str:
    """Return the Hugging Face name: "model.layers.3.self_attn.q_proj.weight" for "blk.3.attn_q.weight"."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in layer_names:
        found = f"model.layers.{parts[1]}.{layer_names[parts[2]]}.{parts[3]}"
        return found.removesuffix(".weight") if found.endswith(".sinks.weight") else found
    if len(parts) == 2 and parts[0] in _OTHER_WEIGHTS:
        return f"{_OTHER_WEIGHTS[parts[0]]}.{parts[1]}"
    return name


def _refuse_unsupported(file: GgufFile, name: str, architecture: Architecture) -> None:
    if file.metadata.get(f"{name}.pooling_type"):
        raise ModelBuildError(
            f"{str(file.path)!r} holds an embedding model ({name}.pooling_type is set){_NOT_A_DECODER}"
        )
    for key in FEATURES:
        if key == "expert_count" and architecture.experts_field is not None:
            continue
        if key not in architecture.options and (found := file.metadata.get(f"{name}.{key}")):
            raise ModelBuildError(
                f"{file.path} has {name}.{key} = {found!r}, which is not supported for architecture {name!r}"
            )


def _read_config(
    file: GgufFile, name: str, architecture: Architecture, weights: Mapping[str, StoredWeight]
) -> tuple[LlamaConfig, tuple[str, ...]]:
    hidden, heads = file.integer(f"{name}.embedding_length"), file.integer(f"{name}.attention.head_count")
    head_dim = file.integer(f"{name}.attention.key_length", max(1, hidden // heads))
    if (found := file.integer(f"{name}.attention.value_length", head_dim)) != head_dim:
        raise ModelBuildError(
            f"{file.path}: {name}.attention.value_length is {found}, expected {head_dim}, the size of a head"
        )
    if f"{_TABLE}.weight" not in weights:
        raise ModelBuildError(f"{file.path} has no tensor 'token_embd.weight'; is it the first part of a split file?")
    layers = file.integer(f"{name}.block_count", maximum=4096)
    context = file.integer(f"{name}.context_length")
    rotary, notes = read_rotary(file, name, weights, head_dim, context)
    windows = _windows(file, name, architecture, layers, context)
    experts = 0 if architecture.experts_field is None else file.integer(f"{name}.expert_count")
    config = LlamaConfig(
        vocab_size=weights[f"{_TABLE}.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=file.integer(f"{name}.{_inner_key(file, name)}"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=file.integer(f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=_decimal(file.positive(f"{name}.attention.layer_norm_rms_epsilon")),
        rope_theta=rotary.theta,
        rope_style="partial"
        if rotary.dim < head_dim and architecture.rope_style == "half"
        else architecture.rope_style,
        rotary_dim=rotary.dim if rotary.dim < head_dim else None,
        tie_word_embeddings=f"{_HEAD}.weight" not in weights,
        max_position_embeddings=rotary.context,
        rope_factors=rotary.factors,
        rope_magnitude=rotary.magnitude,
        windows=windows,
        no_rope_layers=_layers_without_rope(file, name, architecture, layers),
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in weights,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in weights,
        output_bias="model.layers.0.self_attn.o_proj.bias" in weights,
        attention_sinks="model.layers.0.self_attn.sinks" in weights,
        sandwich_norms=architecture.sandwich_norms,
        activation="gelu_tanh" if architecture.gemma else "silu",
        num_experts=experts,
        expert_bias="model.layers.0.mlp.gate.bias" in weights,
        swiglu_limit=architecture.swiglu_limit,
        num_experts_per_tok=file.integer(f"{name}.expert_used_count", maximum=experts) if experts else 0,
        **_factors(file, name, architecture, layers, hidden, heads),
        **_local_rope(file, name, architecture, windows),
    )
    return config, tuple(notes)


def _inner_key(file: GgufFile, name: str) -> str:
    """Return the key of the inner width of the MLP, or of each expert."""
    own = "expert_feed_forward_length"
    return own if file.has(f"{name}.{own}") else "feed_forward_length"


def _decimal(number: float) -> float:
    """Return a number of the file, which stores float32: 1e-5 is read as 9.999999747378752e-06, str() restores it."""
    return float(str(np.float32(number)))


def _windows(
    file: GgufFile, name: str, architecture: Architecture, layers: int, context: int
) -> tuple[int, ...] | None:
    """Return the window of each layer, 0 for layers without one; None: no layer has one."""
    found = file.metadata.get(f"{name}.attention.sliding_window", architecture.window)
    if not isinstance(found, int) or found <= 0:
        return None
    # Layers with a window may have another rotary embedding, even if the window hides nothing.
    if found >= context and architecture.local_rope_theta is None:
        return None
    key = f"{name}.attention.sliding_window_pattern"
    period = file.integer(key) if file.has(key) else architecture.window_period
    return tuple(0 if period and layer % period == period - 1 else found for layer in range(layers))


def _layers_without_rope(file: GgufFile, name: str, architecture: Architecture, layers: int) -> tuple[int, ...]:
    # llama.cpp's converter uses this key for Granite models without a rotary embedding.
    if architecture.model_type == "granite" and file.metadata.get(f"{name}.rope.scaling.finetuned") is False:
        return tuple(range(layers))
    period = architecture.no_rope_period
    return tuple(layer for layer in range(layers) if period and layer % period == period - 1)


def _local_rope(
    file: GgufFile, name: str, architecture: Architecture, windows: tuple[int, ...] | None
) -> dict[str, float]:
    if windows is None or architecture.local_rope_theta is None:
        return {}
    return {"local_rope_theta": file.positive(f"{name}.rope.freq_base_swa", architecture.local_rope_theta)}


def _factors(
    file: GgufFile, name: str, architecture: Architecture, layers: int, hidden: int, heads: int
) -> dict[str, float]:
    """Return the scales and caps of LlamaConfig."""
    found: dict[str, float] = {}
    if architecture.gemma:
        # Gemma was trained with this factor in bfloat16, and transformers rounds it too.
        found["embedding_scale"] = float(np.float32(hidden**0.5).astype(bfloat16))
    if layers == architecture.layers_by_width:
        found["attention_scale"] = (hidden // heads) ** -0.5
    for field, key in _OPTIONS.items():
        default = architecture.options.get(key, 0.0)
        if key in architecture.options and file.metadata.get(f"{name}.{key}", default):
            found[field] = _decimal(file.positive(f"{name}.{key}", default))
    if "logit_scale" in found:  # the file states the divisor of the logits
        found["logit_scale"] = 1 / found["logit_scale"]
    return found


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
