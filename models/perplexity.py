"""Scores decoders on text: cross-entropy and perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import OrtolanError
from ..generate import Decoder, generate

if TYPE_CHECKING:
    import onnxruntime as ort


@dataclass(frozen=True)
class Score:
    """cross_entropy: nats per token, the mean over `tokens` predicted tokens."""

    cross_entropy: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(cross_entropy)."""
        return math.exp(self.cross_entropy)


def score_tokens(
    session: ort.InferenceSession,
    ids: Sequence[int],
    window: int = 256,
    stride: int | None = None,
    step: int | None = None,
) -> Score:
    """Score how well the model predicts each token of `ids` except the first.

    The text is cut into windows that begin `stride` tokens apart; each runs with an empty cache. A token counts once,
    in the first window that holds it and a token before it, so its context is at least window - stride tokens (less
    at the start of the text).

    Args:
        session: A session on a decoder with a KV cache.
        ids: Token ids of the text.
        window: Tokens per window; at most the context length that the model was trained for.
        stride: Tokens between the starts of windows, from 1 to window - 1. None: half a window.
        step: Tokens per call. None: a whole window. The cache is only read by later calls, so use 1 to judge a cache
            that rounds keys and values.

    Returns:
        The score over all predicted tokens.

    Raises:
        OrtolanError: Fewer than two tokens, a value out of range, or a step above 1 for a model that returns only the
            last token's logits (keep_last_logits).
    """
    stride = window // 2 if stride is None else stride
    step = window if step is None else step
    if len(ids) < 2 or window < 2 or not 1 <= stride < window or step < 1:
        raise OrtolanError(
            f"{len(ids)} tokens, window {window}, stride {stride}, step {step}; expected at least 2 tokens, window >= "
            "2, 1 <= stride < window and step >= 1"
        )
    decoder = Decoder(session)
    if decoder.only_last_logits and step > 1:
        raise OrtolanError(f"the model gives the logits of a call's last token alone, but step is {step}; give step=1")
    total, scored_to = 0.0, 1
    for start in range(0, len(ids), stride):
        part = np.asarray(ids[start : start + window], np.int64)
        if start + len(part) <= scored_to:
            break
        decoder.reset()
        first = scored_to - start  # index of the first scored token in this window
        for begin in range(0, len(part) - 1, step):
            end = min(begin + step, len(part))
            logits = decoder.step(part[begin:end])
            # The logits at one token predict the next token.
            of = np.arange(max(begin, first - 1), min(end, len(part) - 1))
            if len(of):
                total += surprise(logits[of - begin], part[of + 1])
        scored_to = start + len(part)
    return Score(total / (len(ids) - 1), len(ids) - 1)


def score_texts(
    session: ort.InferenceSession,
    texts: Sequence[Sequence[int]],
    window: int = 256,
    stride: int | None = None,
    step: int | None = None,
) -> Score:
    """Return the mean score of several texts, weighted by their numbers of tokens. Each text has its own context."""
    scores = [score_tokens(session, ids, window, stride, step) for ids in texts]
    tokens = sum(score.tokens for score in scores)
    if not tokens:
        raise OrtolanError("no texts to score; give at least one")
    return Score(sum(score.cross_entropy * score.tokens for score in scores) / tokens, tokens)


def surprise(logits: np.ndarray, tokens: np.ndarray) -> float:
    """Return the sum of -log softmax(logits)[token] over the rows."""
    rows = logits.astype(np.float64)
    peak = rows.max(axis=1)
    log_sum = peak + np.log(np.exp(rows - peak[:, None]).sum(axis=1))
    return float((log_sum - rows[np.arange(len(tokens)), tokens]).sum())


def sample_texts(
    session: ort.InferenceSession, start: int, tokens: int, window: int = 256, seed: int = 0
) -> list[list[int]]:
    """Return texts that the model generates (temperature 1, no top-k or top-p), with `tokens` tokens in total.

    Each text begins with the token `start` and has `window` tokens; the last text may have fewer (at least two). A text
    may contain the end of one story and the beginning of the next. On such texts, the generating model has the lowest
    expected cross-entropy of all models. The excess of another model is its Kullback-Leibler divergence from the
    generating model.

    The same seed gives the same texts if the logits are equal. Raises OrtolanError if `tokens` or `window` is below 2.
    """
    if tokens < 2 or window < 2:
        raise OrtolanError(f"{tokens} tokens in windows of {window}; expected at least 2 and 2")
    decoder = Decoder(session)
    texts: list[list[int]] = []
    left = tokens
    while left >= 2:
        decoder.reset()
        of_text = (seed << 32) + len(texts)
        ids = [start, *generate(decoder, [start], min(window, left) - 1, temperature=1.0, seed=of_text)]
        texts.append(ids)
        left -= len(ids)
    return texts
