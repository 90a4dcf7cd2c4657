"""Settings of models with an output for each token: late interaction (ColBERT) and term weights (SPLADE).

PyLate writes the settings of late interaction to config_sentence_transformers.json, Stanford's ColBERT to
artifact.metadata. Without either file, and for missing settings, PyLate's defaults apply.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ortolan.errors import ModelError, listing

from .pooling import Dense
from .tokenizer_file import read_json

_SENTENCE_CONFIG, _STANFORD_CONFIG = "config_sentence_transformers.json", "artifact.metadata"
_STANFORD_CLASS = "HF_ColBERT"
TERM_POOLINGS = ("max", "sum")
_ACTIVATIONS = {"relu": 1, "log1p_relu": 2}  # SpladePooling's activation -> how often log(1 + x) is applied
_MOST_TOKENS = 65536


@dataclass(frozen=True)
class TokenLayer:
    """A linear layer on token vectors, as PyLate's Dense.

    Attributes:
        layer: Weight, bias and activation.
        adds_input: Add the layer's input to its output.
        residual: float32 [out, in]: multiply the added input by this weight first. None: add it unchanged.
    """

    layer: Dense
    adds_input: bool = False
    residual: np.ndarray | None = None


@dataclass(frozen=True)
class Role:
    """Rules for the tokens of a query or a document.

    Attributes:
        prefix: The token that is inserted behind the first token; empty: none.
        length: The most tokens of a text, with special tokens and prefix.
    """

    prefix: str
    length: int


@dataclass(frozen=True)
class LateInteraction:
    """Settings of a late-interaction model.

    Attributes:
        query: How queries are tokenized.
        document: How documents are tokenized.
        expands: Fill queries up to their length with mask tokens, whose vectors are returned too.
        attends: All tokens attend to these mask tokens. If not, only the mask tokens attend to the text.
        skipped: Words of one token whose vectors are left out of documents.
        layers: Linear layers behind the ONNX model, which apply if it does not contain them.
    """

    query: Role
    document: Role
    expands: bool
    attends: bool
    skipped: tuple[str, ...]
    layers: tuple[TokenLayer, ...] = ()


@dataclass(frozen=True)
class TermPooling:
    """Rules for a text's weight of each term of the vocabulary, computed from the logits of its tokens.

    Attributes:
        pooling: "max" or "sum" over tokens; None: the model's output is already pooled.
        logs: How often log(1 + x) is applied to the positive logits.
    """

    pooling: str | None = "max"
    logs: int = 1


def read_late_interaction(folder: Path, config: Mapping[str, Any]) -> LateInteraction | None:
    """Return the settings of late interaction; None if the folder has another kind of model.

    config: the folder's config.json.

    Raises:
        ModelError: A setting is malformed.
    """
    path = folder / _SENTENCE_CONFIG
    said = read_json(path)
    if said.get("model_type") == "ColBERT" or "query_prefix" in said:
        return _late_interaction(said, path, ("[Q] ", "[D] "))
    if (folder / _STANFORD_CONFIG).is_file() or _STANFORD_CLASS in (config.get("architectures") or ()):
        path = folder / _STANFORD_CONFIG
        said = read_json(path)
        names = {
            "query_prefix": "query_token_id",
            "document_prefix": "doc_token_id",
            "query_length": "query_maxlen",
            "document_length": "doc_maxlen",
            "attend_to_expansion_tokens": "attend_to_mask_tokens",
        }
        found = {name: said.get(stanford) for name, stanford in names.items()}
        if said.get("mask_punctuation") is False:
            found["skiplist_words"] = []
        return _late_interaction(found, path, ("[unused0]", "[unused1]"))
    return None


def _late_interaction(said: Mapping[str, Any], path: Path, prefixes: tuple[str, str]) -> LateInteraction:
    def setting(name: str, default: Any) -> Any:
        found = said.get(name)
        if found is None:
            return default
        is_right = type(found) is type(default)
        if isinstance(default, int) and not isinstance(default, bool):
            is_right = is_right and 0 < found <= _MOST_TOKENS
        if isinstance(default, list):
            is_right = is_right and all(isinstance(one, str) for one in found)
        if not is_right:
            raise ModelError(f"{str(path)!r} has {name} {found!r}, expected a value like {default!r}; restore the file")
        return found

    expands = setting("do_query_expansion", True)
    return LateInteraction(
        query=Role(setting("query_prefix", prefixes[0]), setting("query_length", 32)),
        document=Role(setting("document_prefix", prefixes[1]), setting("document_length", 180)),
        expands=expands,
        attends=expands and setting("attend_to_expansion_tokens", False),
        skipped=tuple(setting("skiplist_words", list(string.punctuation))),
    )


def read_term_pooling(path: Path) -> TermPooling:
    """Read a config.json of SpladePooling.

    Raises:
        ModelError: A setting is not supported.
    """
    said = read_json(path)
    pooling, activation = said.get("pooling_strategy", "max"), said.get("activation_function", "relu")
    if pooling not in TERM_POOLINGS or activation not in _ACTIVATIONS:
        raise ModelError(
            f"{str(path)!r} has pooling_strategy {pooling!r} and activation_function {activation!r}, expected one of "
            f"{listing(TERM_POOLINGS)} and one of {listing(_ACTIVATIONS)}"
        )
    return TermPooling(pooling, _ACTIVATIONS[activation])
