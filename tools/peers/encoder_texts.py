"""Batches of token ids that encoders are timed on, and the quality of their vectors.

Each kind of work has a name. "8x64" is 8 texts of 64 tokens, random words. "mixed 8-256" is texts of 8 to 256 random
words, with uniformly distributed lengths; "STS-B" is sentences of the STS-B file. Both are batched in the given order,
or sorted by length first if the name ends in ", sorted".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ortolan.benchmarks.encoder import SENTENCES, Encoder, calibration_feeds, word_feeds
from ortolan.embedding import SentencePairs, read_sentence_pairs, spearman_of_pairs, token_feeds
from ortolan.graph_passes.measure.feeds import Feeds

from ..workers.process import WorkerError
from .comparison import Job, Work
from .configuration import Configuration

BATCH = 32
TEXTS = 64  # number of texts, if their lengths differ
UNIT = "texts/s"
SORTED = ", sorted"
MIXED, STS = "mixed 8-256", "STS-B"
_LENGTHS = (8, 256)
# Maps (texts, tokens) to batches in a pass: enough to make timer resolution and jitter negligible.
SHAPES = {(1, 16): 32, (1, 128): 8, (8, 64): 2, (1, 256): 4, (8, 512): 1}
_RELEVANT = 4.0  # lowest score of a pair whose sentences should find each other
_RANKS = 10
_SAME = 0.9999  # smallest cosine allowed between vectors of two fp32 computations


def random_texts(inputs: Sequence[str], count: int, lengths: tuple[int, int]) -> list[Feeds]:
    """Return one feed per text, without padding."""
    tokens = np.random.default_rng(0).integers(lengths[0], lengths[1] + 1, count)
    return [word_feeds(inputs, 1, int(one), seed) for seed, one in enumerate(tokens)]


def sts_texts(encoder: Encoder, path: Path, count: int) -> list[Feeds]:
    """Return sentences evenly spread over the file, because its parts have different kinds of text."""
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    sentences = [columns[column] for columns in lines for column in (5, 6)]
    chosen = np.linspace(0, len(sentences), min(count, len(sentences)), endpoint=False).astype(int)
    assert encoder.tokenizer is not None
    feeds = token_feeds(encoder.tokenizer, [sentences[number] for number in chosen])
    return [{name: one[name] for name in encoder.inputs} for one in feeds]


def batches_of(texts: Sequence[Feeds], batch: int, in_order: bool) -> list[Feeds]:
    """Return the texts in batches, padded with zeros at the end; `in_order` sorts them by length first."""
    if in_order:
        texts = sorted(texts, key=lambda one: one["input_ids"].shape[1])
    return [padded(texts[start : start + batch]) for start in range(0, len(texts), batch)]


def padded(texts: Sequence[Feeds]) -> Feeds:
    """Return one batch of the texts, padded with zeros to the longest."""
    longest = max(one["input_ids"].shape[1] for one in texts)
    return {
        name: np.concatenate([np.pad(one[name], ((0, 0), (0, longest - one[name].shape[1]))) for one in texts])
        for name in texts[0]
    }


def write_batches(batches: Sequence[Feeds], path: Path) -> Path:
    """Write batches as workers/encoders.py reads them; missing token types become zeros."""
    arrays: dict[str, Any] = {}
    for number, feeds in enumerate(batches):
        ids = feeds["input_ids"]
        arrays[f"ids_{number}"] = ids
        arrays[f"mask_{number}"] = feeds["attention_mask"]
        arrays[f"types_{number}"] = feeds.get("token_type_ids", np.zeros_like(ids))
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def make_works(job: Job, encoder: Encoder, folder: Path, without: Sequence[str] = ()) -> list[Work]:
    """Return the works that the job includes, except `without`; write their batches to `folder`."""
    given = {
        f"{batch}x{tokens}": [word_feeds(encoder.inputs, batch, tokens, seed) for seed in range(count)]
        for (batch, tokens), count in SHAPES.items()
    }
    texts = {MIXED: random_texts(encoder.inputs, TEXTS, _LENGTHS)}
    if job.sts is not None:
        texts[STS] = sts_texts(encoder, job.sts, TEXTS)
    for name, one in texts.items():
        given[name] = batches_of(one, BATCH, in_order=False)
        given[name + SORTED] = batches_of(one, BATCH, in_order=True)
    return [
        Work(name, {"batches": str(write_batches(batches, folder / f"{name}.npz"))}, _count(batches), UNIT)
        for name, batches in given.items()
        if name not in without and job.takes_work(name)
    ]


def _count(batches: Sequence[Feeds]) -> int:
    """Return the number of texts."""
    return sum(len(one["input_ids"]) for one in batches)


class Answers(Protocol):
    """The part of `Runner` that `EncoderJudge` uses."""

    configuration: Configuration

    def answer(self, work: Mapping[str, Any]) -> np.ndarray:
        """Return the answers to the work."""


class EncoderJudge:
    """The quality of an encoder: the mean cosine to the first configuration's vectors, which are computed in fp32.

    With an STS-B file, its sentences are used, and Spearman's correlation and the retrieval of pairs are measured too.
    Otherwise the sentences are built in.
    """

    def __init__(self, job: Job, encoder: Encoder, folder: Path) -> None:
        self._sts, self._encoder, self._folder = job.sts, encoder, folder
        self._expected: np.ndarray | None = None

    def __call__(self, runner: Answers) -> dict[str, float]:
        """Return the qualities of a runner.

        Raises:
            WorkerError: The configuration computes in fp32, but its vectors differ from the reference.
        """
        qualities = {}
        if self._sts is None:
            vectors = self._answer(runner, calibration_feeds(self._encoder, SENTENCES))
        else:
            pairs = read_sentence_pairs(self._sts)
            assert self._encoder.tokenizer is not None
            feeds = token_feeds(self._encoder.tokenizer, pairs.first + pairs.second)
            vectors = self._answer(runner, [{name: one[name] for name in self._encoder.inputs} for one in feeds])
            qualities["Spearman"] = spearman_of_pairs(pairs, vectors)
            if (found := retrieval_of_pairs(pairs, vectors)) is not None:
                qualities["nDCG@10"] = found
        if self._expected is None:
            if not runner.configuration.exact:
                raise WorkerError("reference vectors are missing: the fp32 configuration failed")
            self._expected = vectors
        cosine = mean_cosine(vectors, self._expected)
        if runner.configuration.exact and cosine < _SAME:
            raise WorkerError(f"vectors differ from fp32: cosine {cosine:.4f}, expected {_SAME}")
        return {"cosine": cosine, **qualities}

    def _answer(self, runner: Answers, texts: Sequence[Feeds]) -> np.ndarray:
        """Return the vectors of texts in the order given; the texts are run in batches sorted by length."""
        order = sorted(range(len(texts)), key=lambda index: texts[index]["input_ids"].shape[1])
        batches = batches_of([texts[index] for index in order], BATCH, in_order=False)
        found = runner.answer({"batches": str(write_batches(batches, self._folder / "judged.npz"))})
        if len(found) != len(texts):
            raise WorkerError(f"the engine returned {len(found)} vectors for {len(texts)} texts")
        vectors = np.empty_like(found)
        vectors[order] = found
        return vectors


def retrieval_of_pairs(pairs: SentencePairs, vectors: np.ndarray) -> float | None:
    """Return the mean nDCG@10 of a search for the other sentence of each pair that people scored 4 or higher.

    Documents are all distinct sentences except the query. None if there is no such pair.

    vectors: Unit vectors of all first, then all second sentences, float32 [sentences, width].
    """
    sentences = pairs.first + pairs.second
    position = {sentence: number for number, sentence in reversed(list(enumerate(sentences)))}
    documents = np.array(list(position.values()))
    number_of = {sentence: number for number, sentence in enumerate(position)}
    relevant: dict[int, set[int]] = {}
    for score, *pair in zip(*pairs, strict=True):
        one, two = (number_of[sentence] for sentence in pair)
        if score >= _RELEVANT and one != two:
            relevant.setdefault(one, set()).add(two)
            relevant.setdefault(two, set()).add(one)
    if not relevant:
        return None
    queries = np.array(list(relevant))
    similarities = vectors[documents[queries]] @ vectors[documents].T
    similarities[np.arange(len(queries)), queries] = -np.inf
    discounts = 1 / np.log2(np.arange(_RANKS) + 2)
    gains = []
    for row, wanted in zip(similarities, relevant.values(), strict=True):
        best = np.argsort(-row, kind="stable")[:_RANKS]
        gains.append(discounts[: len(best)][np.isin(best, list(wanted))].sum() / discounts[: len(wanted)].sum())
    return float(np.mean(gains))


def mean_cosine(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the mean cosine between the unit vectors of two arrays."""
    if found.shape != expected.shape:
        raise WorkerError(f"vectors have shape {found.shape}, expected {expected.shape}")
    return float((found * expected).sum(axis=1).mean())
