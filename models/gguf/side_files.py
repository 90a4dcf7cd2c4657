"""Configuration files (JSON) beside a model, for onnxruntime-genai, Optimum and transformers."""

from __future__ import annotations

from math import isfinite
from typing import Any

from ..graph_builder import ModelBuildError
from ..llama_config import LlamaConfig
from .architectures import config_extras, find_architecture
from .model import GgufModel
from .tokenizer import TokenizerFacts

_SAMPLING_KEYS = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def side_files(model: GgufModel, facts: TokenizerFacts, tokens: list[str]) -> dict[str, dict[str, Any]]:
    """Return config.json, generation_config.json and tokenizer_config.json, by file name.

    Raises:
        ModelBuildError: No token ends a text.
    """
    return {
        "config.json": {**config_fields(model.config, model.architecture), **_token_ids(model, facts)},
        "generation_config.json": {**_token_ids(model, facts), **_sampling(model)},
        "tokenizer_config.json": _tokenizer_fields(model.config, facts, tokens),
    }


def config_fields(config: LlamaConfig, architecture: str = "llama") -> dict[str, Any]:
    """Return the model's fields of config.json, without token ids."""
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "max_position_embeddings"),
    )
    known = find_architecture(architecture, experts=config.num_experts > 0)
    return {
        "architectures": [known.hugging_face],
        "model_type": known.model_type,
        **{name: getattr(config, name) for name in same},
        "head_dim": config.head_size,
        "hidden_act": _ACTIVATIONS[config.activation],
        **config_extras(config, known),
        "torch_dtype": "float32",
        # The transformers version that defines these fields. Without it, transformers warns about a wrong Mistral
        # pattern in the tokenizer.
        "transformers_version": "4.57.2",
    }


def genai_config(model: GgufModel, facts: TokenizerFacts, file_name: str, library: str | None = None) -> dict[str, Any]:
    """Return genai_config.json for the graph that build_llama makes with attention="gqa".

    file_name: the ONNX file. library: the operator library that sessions load, if any.
    """
    config = model.config
    known = find_architecture(model.architecture, experts=config.num_experts > 0)
    return {
        "model": {
            **_token_ids(model, facts),
            "context_length": config.max_position_embeddings,
            "decoder": {
                "session_options": {
                    "log_id": "onnxruntime-genai",
                    "provider_options": [],
                    **({} if library is None else {"custom_ops_library": library}),
                },
                "filename": file_name,
                "head_size": config.head_size,
                "hidden_size": config.hidden_size,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": config.num_attention_heads,
                "num_hidden_layers": config.num_hidden_layers,
                "num_key_value_heads": config.num_key_value_heads,
            },
            "type": known.genai_type or known.model_type,
            "vocab_size": config.vocab_size,
        },
        "search": {
            "do_sample": False,
            "max_length": config.max_position_embeddings,
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": True,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 50,
            "top_p": 1.0,
        },
    }


def _sampling(model: GgufModel) -> dict[str, Any]:
    """Return the sampling options that the model's author recommends, if the file has any."""
    said = {name: model.file.metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING_KEYS.items()}
    found = {name: value for name, value in said.items() if type(value) in (int, float) and isfinite(value or 0)}
    return {"do_sample": True, **found} if found else {}


def _token_ids(model: GgufModel, facts: TokenizerFacts) -> dict[str, Any]:
    if not facts.ends:
        raise ModelBuildError(f"{model.file.path} names no token that ends a text (tokenizer.ggml.eos_token_id)")
    ends = facts.ends[0] if len(facts.ends) == 1 else list(facts.ends)
    return {
        "bos_token_id": facts.ends[0] if facts.bos is None else facts.bos,
        "eos_token_id": ends,
        "pad_token_id": facts.ends[0] if facts.padding is None else facts.padding,
    }


def _tokenizer_fields(config: LlamaConfig, facts: TokenizerFacts, tokens: list[str]) -> dict[str, Any]:
    ids = {"bos": facts.bos, "eos": facts.eos, "unk": facts.unknown, "pad": facts.padding}
    named = {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
    fields: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "add_bos_token": facts.adds_bos and facts.bos is not None,
        "add_eos_token": facts.adds_eos and facts.eos is not None,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": config.max_position_embeddings,
    }
    return fields if facts.chat_template is None else {**fields, "chat_template": facts.chat_template}
