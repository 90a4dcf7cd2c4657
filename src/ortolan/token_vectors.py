"""embed_tokens and embed_sparse: vectors of tokens (ColBERT), and weights of terms (SPLADE)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ortolan.graph_passes.text.text_plan import TextInput

from .embedding import in_windows, open_encoder
from .errors import ArgumentError
from .progress import Progress, no_progress
from .text_encoder import BATCH_TOKENS, TextEncoder, check_texts

if TYPE_CHECKING:
    import onnxruntime


@dataclass(frozen=True)
class TokenVectors(Sequence[np.ndarray]):
    """Vectors of the tokens of texts. `vectors[i]` is float32 [tokens, width], the vectors of text i.

    Attributes:
        vectors: float32 [tokens of all texts, width], in the order of the texts.
        lengths: int64 [texts], the number of vectors of each text.
    """

    vectors: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]
        """Return the vectors of one text."""
        end = self._ends[index]
        return np.asarray(self.vectors[end - self.lengths[index] : end])

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.lengths)


@dataclass(frozen=True)
class SparseVectors(Sequence[tuple[np.ndarray, np.ndarray]]):
    """Weights of terms as sparse rows. `vectors[i]` is the pair (indices, values) of text i.

    Attributes:
        indices: int32, the terms of all texts, in the order of the texts and increasing within a text.
        values: float32, their weights.
        lengths: int64 [texts], the number of terms of each text.
        width: The size of the vocabulary.
    """

    indices: np.ndarray
    values: np.ndarray
    lengths: np.ndarray
    width: int

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[override]
        """Return the terms of one text and their weights."""
        end = self.starts[1:][index]
        one = slice(end - self.lengths[index], end)
        return self.indices[one], self.values[one]

    @cached_property
    def starts(self) -> np.ndarray:
        """int64 [texts + 1]: where each text's terms start, as in scipy.sparse.csr_array((values, indices, starts))."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])


def embed_tokens(
    texts: Iterable[str],
    model: str | os.PathLike[str] | onnxruntime.InferenceSession | TextEncoder,
    tokenizer: str | os.PathLike[str] | None = None,
    settings: TextInput | None = None,
    *,
    query: bool = False,
    batch_tokens: int = BATCH_TOKENS,
    session_options: onnxruntime.SessionOptions | None = None,
    progress: Progress = no_progress,
) -> TokenVectors:
    """Return a vector for each token of texts, by a late-interaction model such as ColBERT.

    The model's folder gives the prefix token, the length, the expansion of queries by mask tokens, and the words that
    documents leave out.

    Args:
        texts: The texts.
        model: A late-interaction model, as for `TextEncoder`, or a TextEncoder.
        tokenizer: As for `TextEncoder`.
        settings: As for `TextEncoder`. `max_tokens` limits documents.
        query: The texts are queries, not documents.
        batch_tokens: As for `embed`.
        session_options: As for `TextEncoder`.
        progress: As for `embed`.

    Raises:
        ArgumentTypeError: A text is not a string.
        ArgumentError: `batch_tokens` is not positive, or the model is of another kind.
        ModelError: The model is not supported.
        SessionError: The model cannot be opened.
    """
    encoder = open_encoder(model, tokenizer, settings, session_options)
    pieces = list(stream_tokens(texts, encoder, query, batch_tokens, progress))
    lengths = np.array([len(one) for found in pieces for one in found], np.int64)
    none = np.empty((0, encoder.width or 0), np.float32)
    return TokenVectors(np.concatenate([one for found in pieces for one in found] or [none]), lengths)


def stream_tokens(
    texts: Iterable[str], encoder: TextEncoder, query: bool, batch_tokens: int, progress: Progress
) -> Iterator[list[np.ndarray]]:
    """Like `embed_tokens`, but yield the vectors of some thousand texts at a time."""
    _check(texts, encoder, "late_interaction", batch_tokens)
    return in_windows(texts, progress, lambda window, tell: encoder.encode_late(window, query, batch_tokens, tell))


def embed_sparse(
    texts: Iterable[str],
    model: str | os.PathLike[str] | onnxruntime.InferenceSession | TextEncoder,
    tokenizer: str | os.PathLike[str] | None = None,
    settings: TextInput | None = None,
    *,
    top_k: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    session_options: onnxruntime.SessionOptions | None = None,
    progress: Progress = no_progress,
) -> SparseVectors:
    """Return weights of the vocabulary's terms for texts, by a masked language model such as SPLADE.

    Args:
        texts: The texts.
        model: A masked language model, as for `TextEncoder`, or a TextEncoder.
        tokenizer: As for `TextEncoder`.
        settings: As for `TextEncoder`.
        top_k: Keep only the terms with the largest weights of each text; None: all that are not 0.
        batch_tokens: As for `embed`. A batch's logits need 4 bytes for each token and term.
        session_options: As for `TextEncoder`.
        progress: As for `embed`.

    Raises:
        ArgumentTypeError: A text is not a string.
        ArgumentError: `top_k` or `batch_tokens` is not positive, or the model is of another kind.
        ModelError: The model is not supported.
        SessionError: The model cannot be opened.
    """
    encoder = open_encoder(model, tokenizer, settings, session_options)
    _check(texts, encoder, "sparse", batch_tokens)
    pieces = in_windows(texts, progress, lambda window, tell: encoder.encode_sparse(window, top_k, batch_tokens, tell))
    rows = [row for found in pieces for row in found]
    return SparseVectors(
        indices=np.concatenate([one for one, _ in rows] or [np.empty(0, np.int32)]),
        values=np.concatenate([one for _, one in rows] or [np.empty(0, np.float32)]),
        lengths=np.array([len(one) for one, _ in rows], np.int64),
        width=encoder.width or 0,
    )


def _check(texts: Iterable[str], encoder: TextEncoder, kind: str, batch_tokens: int) -> None:
    if isinstance(texts, str):
        check_texts(texts)
    if batch_tokens < 1:
        raise ArgumentError(f"batch_tokens is {batch_tokens}, expected at least 1")
    encoder.require(kind)
