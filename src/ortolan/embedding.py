"""Embeds texts, ranks texts for a query, and scores models on the STS benchmark."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

from ortolan.graph_passes.text.text_plan import TextInput
from ortolan.graph_passes.text.tokenizer_file import load_tokenizer

from .errors import ArgumentError, OrtolanError
from .progress import Progress, Stage, no_progress
from .text_encoder import BATCH_TOKENS, TextEncoder, check_texts

if TYPE_CHECKING:
    import onnxruntime

_T = TypeVar("_T")
_WINDOW_TEXTS, _WINDOW_CHARACTERS = 8192, 2**24  # limits for the texts that are sorted by length together


@dataclass(frozen=True)
class RankedText:
    """A result of `rerank`: the index of a text in the given list, and its score; larger is better."""

    index: int
    score: float


def embed(
    texts: Iterable[str],
    model: str | os.PathLike[str] | onnxruntime.InferenceSession | TextEncoder,
    tokenizer: str | os.PathLike[str] | None = None,
    settings: TextInput | None = None,
    *,
    batch_tokens: int = BATCH_TOKENS,
    session_options: onnxruntime.SessionOptions | None = None,
    progress: Progress = no_progress,
) -> np.ndarray:
    """Return the vectors of texts, float32 [texts, width], in order.

    Args:
        texts: The texts.
        model: A model that embeds, as for `TextEncoder`, or a TextEncoder.
        tokenizer: As for `TextEncoder`.
        settings: As for `TextEncoder`.
        batch_tokens: Largest number of tokens in one call of the session, padding included.
        session_options: As for `TextEncoder`.
        progress: Called with the number of finished texts, and the total as far as it is known.

    Raises:
        ArgumentTypeError: A text is not a string.
        ArgumentError: `batch_tokens` is not positive, or the model is a reranker.
        ModelError: The model is not supported.
        SessionError: The model cannot be opened.
    """
    encoder = open_encoder(model, tokenizer, settings, session_options)
    found = list(embed_stream(texts, encoder, batch_tokens=batch_tokens, progress=progress))
    return np.concatenate(found) if found else encoder.encode([])


def embed_stream(
    texts: Iterable[str],
    model: str | os.PathLike[str] | onnxruntime.InferenceSession | TextEncoder,
    tokenizer: str | os.PathLike[str] | None = None,
    settings: TextInput | None = None,
    *,
    batch_tokens: int = BATCH_TOKENS,
    session_options: onnxruntime.SessionOptions | None = None,
    progress: Progress = no_progress,
) -> Iterator[np.ndarray]:
    """Like `embed`, but yield batches, float32 [texts, width], in order. Only a few thousand texts are in memory.

    Arguments and errors are those of `embed`; `texts` may be any iterable.
    """
    if isinstance(texts, str):
        check_texts(texts)
    if batch_tokens < 1:
        raise ArgumentError(f"batch_tokens is {batch_tokens}, expected at least 1")
    encoder = open_encoder(model, tokenizer, settings, session_options)
    return in_windows(texts, progress, lambda window, tell: encoder.encode(window, batch_tokens, tell))


def in_windows(
    texts: Iterable[str], progress: Progress, encode: Callable[[list[str], Callable[[int], None]], _T]
) -> Iterator[_T]:
    """Yield what `encode` returns for some thousand texts at a time; it also gets a function for its progress."""
    total = len(texts) if isinstance(texts, Sized) else None
    before = 0
    for window in _windows(texts):
        tell = partial(_tell, progress, before, max(before + len(window), total or 0))
        tell(0)
        yield encode(window, tell)
        before += len(window)


def _tell(progress: Progress, before: int, total: int, done: int) -> None:
    progress(Stage.EMBED, before + done, total)


def _windows(texts: Iterable[str]) -> Iterator[list[str]]:
    left = iter(texts)
    window: list[str] = []
    characters = 0
    for text in left:
        check_texts([text])
        window.append(text)
        characters += len(text)
        if len(window) >= _WINDOW_TEXTS or characters >= _WINDOW_CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window


def rerank(
    query: str,
    texts: Sequence[str],
    model: str | os.PathLike[str] | onnxruntime.InferenceSession | TextEncoder,
    tokenizer: str | os.PathLike[str] | None = None,
    settings: TextInput | None = None,
    *,
    top_k: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    session_options: onnxruntime.SessionOptions | None = None,
    progress: Progress = no_progress,
) -> list[RankedText]:
    """Rank texts for a query with a cross-encoder or a late-interaction model.

    Args:
        query: The query.
        texts: The texts.
        model: A model with one score for each pair (output "logits" [batch, 1]), as for `TextEncoder`, or a
            TextEncoder. Scores are between 0 and 1, unless the model's folder or `settings.activation` disables that. A
            late-interaction model gives the sum of the largest similarity of each token of the query (MaxSim).
        tokenizer: As for `TextEncoder`.
        settings: As for `TextEncoder`.
        top_k: Return only the best texts; None: all.
        batch_tokens: As for `embed`.
        session_options: As for `TextEncoder`.
        progress: As for `embed`.

    Returns:
        Indices and scores of the texts, the best first. Texts with equal scores stay in order.

    Raises:
        ArgumentTypeError: A text is not a string.
        ArgumentError: `top_k` or `batch_tokens` is not positive, or the model embeds.
        ModelError: The model is not supported.
        SessionError: The model cannot be opened.
    """
    if top_k is not None and top_k < 1:
        raise ArgumentError(f"top_k is {top_k}, expected at least 1")
    encoder = open_encoder(model, tokenizer, settings, session_options)
    scores = encoder.score(query, texts, batch_tokens, lambda done: progress(Stage.SCORE, done, len(texts)))
    order = np.argsort(-scores, kind="stable")
    return [RankedText(int(index), float(scores[index])) for index in islice(order, top_k)]


def open_encoder(
    model: str | os.PathLike[str] | onnxruntime.InferenceSession | TextEncoder,
    tokenizer: str | os.PathLike[str] | None,
    settings: TextInput | None,
    session_options: onnxruntime.SessionOptions | None,
) -> TextEncoder:
    """Return the model if it is a TextEncoder, else open it with the other arguments."""
    return model if isinstance(model, TextEncoder) else TextEncoder(model, tokenizer, settings, session_options)


def token_feeds(
    tokenizer_path: str | os.PathLike[str], sentences: Sequence[str], max_length: int = 256
) -> list[dict[str, np.ndarray]]:
    """Return one calibration feed per sentence, without padding.

    Returns:
        Dicts of input_ids, attention_mask and token_type_ids, int64 [1, tokens]. Remove what the model does not have.

    Raises:
        ModelError: The package `tokenizers` is missing.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    tokenizer.enable_truncation(max_length)
    return [
        {
            "input_ids": np.array([one.ids], np.int64),
            "attention_mask": np.array([one.attention_mask], np.int64),
            "token_type_ids": np.array([one.type_ids], np.int64),
        }
        for one in tokenizer.encode_batch(list(sentences))
    ]


class EncodesTexts(Protocol):
    """A model that embeds texts."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [texts, width]."""


class SentencePairs(NamedTuple):
    """The sentence pairs of an STS benchmark file, with human scores from 0 to 5."""

    scores: list[float]
    first: list[str]
    second: list[str]


def read_sentence_pairs(csv_path: str | os.PathLike[str]) -> SentencePairs:
    """Return the pairs of sts-dev.csv or sts-test.csv as published.

    Args:
        csv_path: Tab-separated, unquoted, UTF-8. Columns 5 to 7 hold the score and the two sentences; more columns may
            follow.

    Raises:
        OrtolanError: A line does not have that format, or there are fewer than two lines.
    """
    pairs = SentencePairs([], [], [])
    # Split by hand: csv would fail on unbalanced quotes, and splitlines() would split at Unicode line separators.
    for number, line in enumerate(Path(csv_path).read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        columns = line.rstrip("\r").split("\t")
        try:
            score, one, two = float(columns[4]), columns[5], columns[6]
        except (IndexError, ValueError) as error:
            raise OrtolanError(
                f"{csv_path}, line {number}: expected tab-separated columns with a score in the 5th and sentences in "
                f"the 6th and 7th, found {line[:80]!r}"
            ) from error
        pairs.scores.append(score)
        pairs.first.append(one)
        pairs.second.append(two)
    if len(pairs.scores) < 2:
        raise OrtolanError(f"{csv_path} has {len(pairs.scores)} pairs of sentences; a correlation needs at least 2")
    return pairs


def spearman_on_sts(encoder: EncodesTexts, csv_path: str | os.PathLike[str]) -> float:
    """Return Spearman's correlation of cosine similarities and human scores, the usual metric of the STS benchmark.

    Args:
        encoder: A TextEncoder or similar, whose vectors have length 1.
        csv_path: As for `read_sentence_pairs`.

    Raises:
        OrtolanError: As for `read_sentence_pairs`.
    """
    pairs = read_sentence_pairs(csv_path)
    return spearman_of_pairs(pairs, encoder.encode(pairs.first + pairs.second))


def spearman_of_pairs(pairs: SentencePairs, vectors: np.ndarray) -> float:
    """Return the correlation for the vectors of all first and then all second sentences."""
    first, second = np.split(vectors, 2)
    return spearman((first * second).sum(axis=1), np.array(pairs.scores))


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's rank correlation of two vectors; ties get their average rank."""
    return float(np.corrcoef(_average_ranks(a), _average_ranks(b))[0, 1])


def _average_ranks(values: np.ndarray) -> np.ndarray:
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    return np.asarray((last - (sizes - 1) / 2)[group])
