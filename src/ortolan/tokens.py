"""The tokens of a text, and the small functions that turn a model's rows for them into vectors and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortolan.graph_passes.text.pooling import Dense

_CHARACTERS_OF_A_TOKEN = 4  # estimate, for models that tokenize texts themselves
_LEAST_NORM = np.float32(1e-12)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text or of a pair of texts.

    len() is the number of tokens, or an estimate if the model tokenizes texts itself.

    Attributes:
        texts: The text, or the pair; empty if only tokens are known.
        ids: Token ids; None if the model tokenizes texts itself.
        type_ids: Token type ids.
        attended: The number of first tokens to which tokens attend; None: all.
        kept: bool [tokens]: whose vectors a late-interaction model returns; None: all.
    """

    texts: tuple[str, ...]
    ids: Sequence[int] | None = None
    type_ids: Sequence[int] = ()
    attended: int | None = None
    kept: np.ndarray | None = None

    def __len__(self) -> int:
        return 2 + sum(map(len, self.texts)) // _CHARACTERS_OF_A_TOKEN if self.ids is None else len(self.ids)


def pool(rows: np.ndarray, pooling: str) -> np.ndarray:
    """Pool float32 [tokens, hidden] to [hidden], as Sentence Transformers does."""
    count = np.float32(len(rows))
    if not len(rows):  # an empty text has no tokens if the tokenizer adds no special tokens
        return np.zeros(rows.shape[1], np.float32)
    if pooling == "cls":
        return np.asarray(rows[0])
    if pooling == "lasttoken":
        return np.asarray(rows[-1])
    if pooling == "max":
        return np.asarray(rows.max(axis=0))
    if pooling == "weightedmean":
        weights = np.arange(1, len(rows) + 1, dtype=np.float32)
        return np.asarray((rows * weights[:, None]).sum(axis=0) / weights.sum())
    return np.asarray(rows.sum(axis=0) / (np.sqrt(count) if pooling == "mean_sqrt_len_tokens" else count))


def apply_dense(layer: Dense, x: np.ndarray) -> np.ndarray:
    """Apply a linear layer and its activation to float32 [in] or [tokens, in]."""
    made = layer.weight @ x if x.ndim == 1 else x @ layer.weight.T
    made = made if layer.bias is None else made + layer.bias
    if layer.activation is None:
        return np.asarray(made)
    if layer.activation == "Sigmoid":
        return sigmoid(made)
    return np.asarray(np.tanh(made) if layer.activation == "Tanh" else np.maximum(made, 0))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return the sigmoid, computed in float64, as float32."""
    return np.asarray(1 / (1 + np.exp(-x.astype(np.float64))), np.float32)


def unit_length(vectors: np.ndarray) -> np.ndarray:
    """Scale float32 [width], or each row of [tokens, width], to length 1."""
    norm = np.sqrt(np.sum(vectors * vectors, axis=-1, keepdims=True))
    return np.asarray(vectors / np.maximum(norm, _LEAST_NORM))
