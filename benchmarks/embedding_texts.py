"""What encoders are timed on: texts as token ids, of the lengths that they have where embeddings are used.

mixed   random words, 8 to 256 tokens (uniform)
sts     sentences of STS-B
wide    random words, 8 to 512 tokens (uniform)
long    random words, 384 to 512 tokens
pairs   what a reranker reads: a query of 4 to 24 tokens and a text of 24 to 232
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ortolan.graph_passes.measure.feeds import Feeds

from ..embedding import token_feeds
from .encoder import Encoder, word_feeds

RANGES: Mapping[str, tuple[int, int]] = {"mixed": (8, 256), "wide": (8, 512), "long": (384, 512)}
STS, PAIRS = "sts", "pairs"
WORKS = ("mixed", STS, "wide", "long", PAIRS)
_QUERY, _TEXT = (4, 24), (24, 232)


def random_texts(inputs: Sequence[str], count: int, lengths: tuple[int, int]) -> list[Feeds]:
    """One text a feed, without padding."""
    tokens = np.random.default_rng(0).integers(lengths[0], lengths[1] + 1, count)
    return [word_feeds(inputs, 1, int(one), seed) for seed, one in enumerate(tokens)]


def random_pairs(inputs: Sequence[str], count: int) -> list[Feeds]:
    """A query and a text in one feed: token types 0 and 1, where the model has them."""
    rng = np.random.default_rng(0)
    queries, texts = (rng.integers(least, most + 1, count) for least, most in (_QUERY, _TEXT))
    pairs = []
    for seed, (query, text) in enumerate(zip(queries, texts, strict=True)):
        feeds = word_feeds(inputs, 1, int(query + text), seed)
        if "token_type_ids" in feeds:
            feeds["token_type_ids"][:, query:] = 1
        pairs.append(feeds)
    return pairs


def sts_texts(encoder: Encoder, path: Path, count: int) -> list[Feeds]:
    """Sentences from all over the file, whose parts differ."""
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    sentences = [columns[place] for columns in lines for place in (5, 6)]
    chosen = np.linspace(0, len(sentences), min(count, len(sentences)), endpoint=False).astype(int)
    assert encoder.tokenizer is not None
    feeds = token_feeds(encoder.tokenizer, [sentences[number] for number in chosen])
    return [{name: one[name] for name in encoder.inputs} for one in feeds]


def make_texts(work: str, encoder: Encoder, count: int, sts: Path | None, lengths: tuple[int, int]) -> list[Feeds]:
    """lengths: of the work "mixed"."""
    if work == STS:
        assert sts is not None
        return sts_texts(encoder, sts, count)
    if work == PAIRS:
        return random_pairs(encoder.inputs, count)
    return random_texts(encoder.inputs, count, lengths if work == "mixed" else RANGES[work])


def batches_of(texts: Sequence[Feeds], batch: int, in_order: bool) -> list[Feeds]:
    """Padded behind the texts, with zeros."""
    if in_order:
        texts = sorted(texts, key=lambda one: one["input_ids"].shape[1])
    return [padded(texts[start : start + batch]) for start in range(0, len(texts), batch)]


def padded(texts: Sequence[Feeds]) -> Feeds:
    longest = max(one["input_ids"].shape[1] for one in texts)
    return {
        name: np.concatenate([np.pad(one[name], ((0, 0), (0, longest - one[name].shape[1]))) for one in texts])
        for name in texts[0]
    }
