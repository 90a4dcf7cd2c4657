"""Sentence embeddings from a BERT-like ONNX model, and their score on the STS benchmark."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .errors import OrtolanError

if TYPE_CHECKING:
    import onnxruntime as ort
    from tokenizers import Encoding, Tokenizer


class SentenceEncoder:
    """Turns sentences into unit vectors: tokenize, run the model, average the tokens, normalize."""

    def __init__(
        self, session: ort.InferenceSession, tokenizer_path: str | os.PathLike[str], max_length: int = 256
    ) -> None:
        """session: a model with an input_ids input and a float output [batch, sequence, hidden].

        tokenizer_path: a Hugging Face tokenizer.json.
        max_length: longer sentences are cut to this many tokens.

        Raises OrtolanError when the package `tokenizers` is missing or the model has no such output.
        """
        self._session = session
        self._inputs = [value.name for value in session.get_inputs()]
        self._output = _token_output(session)
        self._tokenizer = _load_tokenizer(tokenizer_path, max_length)
        # As long as the longest of a batch, with the model's own padding token: position ids may depend on it.
        padding = self._tokenizer.padding or {}
        self._tokenizer.enable_padding(**{name: padding[name] for name in ("pad_id", "pad_token") if name in padding})

    def encode(self, sentences: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """float32 [len(sentences), hidden]: one vector of length 1 a sentence, in the order given."""
        if not sentences:
            raise OrtolanError("no sentences to encode; give at least one")
        # Sentences of like length share a batch, so that little is spent on padding.
        order = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))
        vectors: list[np.ndarray] = [np.empty(0)] * len(sentences)
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            for index, vector in zip(batch, self._encode_batch([sentences[i] for i in batch]), strict=True):
                vectors[index] = vector
        return np.stack(vectors)

    def token_vectors(self, sentences: Sequence[str]) -> list[np.ndarray]:
        """Of each sentence, all in one batch, float32 [tokens, hidden] without padding."""
        tokens, mask = self._run(list(sentences))
        return [one[kept != 0] for one, kept in zip(tokens, mask, strict=True)]

    def _run(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """float32 [sentences, tokens, hidden], and the mask of what is no padding, int64 [sentences, tokens]."""
        feeds = _feeds(self._tokenizer.encode_batch(sentences))
        (tokens,) = self._session.run([self._output], {name: feeds[name] for name in self._inputs if name in feeds})
        return tokens, feeds["attention_mask"]

    def _encode_batch(self, sentences: list[str]) -> np.ndarray:
        tokens, kept = self._run(sentences)
        mask = kept[:, :, None].astype(np.float32)
        vectors = (tokens * mask).sum(axis=1) / mask.sum(axis=1)
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def token_feeds(
    tokenizer_path: str | os.PathLike[str], sentences: Sequence[str], max_length: int = 256
) -> list[dict[str, np.ndarray]]:
    """One sentence a feed, without padding, as to calibrate on: input_ids, attention_mask and token_type_ids, int64
    [1, tokens]; leave out those that the model does not have.

    Raises OrtolanError when the package `tokenizers` is missing.
    """
    tokenizer = _load_tokenizer(tokenizer_path, max_length)
    tokenizer.no_padding()
    return [_feeds([encoding]) for encoding in tokenizer.encode_batch(list(sentences))]


def _load_tokenizer(path: str | os.PathLike[str], max_length: int) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise OrtolanError(
            "reading sentences needs the package 'tokenizers'; install it with: pip install 'ortolan[demo]'"
        ) from error
    tokenizer = Tokenizer.from_file(os.fspath(path))
    tokenizer.enable_truncation(max_length)
    return tokenizer


def _feeds(encodings: Sequence[Encoding]) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
        "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
        "token_type_ids": np.array([encoding.type_ids for encoding in encodings], np.int64),
    }


def _token_output(session: ort.InferenceSession) -> str:
    """The name of the output with one vector a token."""
    outputs = session.get_outputs()
    for value in outputs:
        if value.type == "tensor(float)" and len(value.shape) == 3:
            return str(value.name)
    found = ", ".join(f"{value.name} {value.type} {value.shape}" for value in outputs)
    raise OrtolanError(f"the model has no float output [batch, sequence, hidden]; found {found}")


def spearman_on_sts(encoder: SentenceEncoder, csv_path: str | os.PathLike[str], batch_size: int = 32) -> float:
    """Spearman correlation between cosine similarities and human scores, the usual figure for the STS benchmark.

    csv_path: sts-dev.csv or sts-test.csv as published: tab-separated, unquoted, UTF-8; columns 5 to 7 hold the score
        (0 to 5) and the two sentences; more columns may follow.

    Raises OrtolanError naming the line when one does not have that form.
    """
    scores: list[float] = []
    first: list[str] = []
    second: list[str] = []
    # Neither csv nor splitlines(): sentences hold unbalanced quotes and, possibly, Unicode line separators.
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
        scores.append(score)
        first.append(one)
        second.append(two)
    if len(scores) < 2:
        raise OrtolanError(f"{csv_path} holds {len(scores)} pairs of sentences; a correlation needs at least 2")
    vectors = encoder.encode(first + second, batch_size)
    similarities = (vectors[: len(first)] * vectors[len(first) :]).sum(axis=1)
    return spearman(similarities, np.array(scores))


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation of two vectors of one length; ties get their average rank."""
    return float(np.corrcoef(_average_ranks(a), _average_ranks(b))[0, 1])


def _average_ranks(values: np.ndarray) -> np.ndarray:
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    return np.asarray((last - (sizes - 1) / 2)[group])
