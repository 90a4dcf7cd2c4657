"""Decoding with a KV cache, for pass `verify`: a run of the prompt alone writes the cache but does not read it.

Both models run the same calls, each with its own cache: a prompt, then one token per call. The caches after the prompt
are compared directly, because errors of the final outputs do not show where they come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ortolan.errors import VerificationError

from ..weights.cache_format import CacheUse, spread_of
from .feeds import Feeds, Outputs

Run = Callable[[Feeds], Outputs]

_MAX_TOKENS = 1024
_MAX_STEPS = 8
_INPUTS = ("input_ids", "attention_mask", "position_ids")
# Maps d_sub to the limit of ||decoded - key|| / (spread of a head's keys). Correct codebooks stay below the limit;
# wrong codebooks (of another head, order or size) exceed it (docs/verification.md).
_KEY_ERROR = {1: 0.2, 2: 0.5, 4: 0.8}
# The error of an int8 value is at most (1 + 2^-7) / 254 of the token's largest value, so the L2 error of a head of D
# values is at most sqrt(D) times that.
_VALUE_ERROR = 1 / 250
_MAX_ERROR = 0.9  # upper bound of all limits; an error of 1 means that only the mean of the keys is right
# The kernel and the ONNX function write the same bytes for equal keys. Keys that differ because sums were computed in
# another order may round to different centroids, in this fraction of the bytes.
_TIES = 0.02


@dataclass(frozen=True)
class Decoded:
    """Answers of a model to a sequence of calls."""

    prompt: Outputs  # outputs of the first call: the caches
    steps: list[Outputs]  # outputs of each later call, without caches
    last: Outputs
    last_feeds: Feeds


def calls_to_decode(feeds: Sequence[Feeds], caches: Collection[str]) -> list[Feeds] | None:
    """Return the calls that decode the longest sequence in feeds: a prompt, then one token per call.

    The prompt has empty caches; `decode` adds caches to the other calls.

    Args:
        feeds: The model's feeds.
        caches: The cache inputs [batch, kv_heads, tokens, width].

    Returns:
        The calls; None if no sequence has two tokens, or feeds have inputs that are not supported.
    """
    if any(one.keys() - {*_INPUTS, *caches} for one in feeds):
        return None
    ids, one = longest_text(feeds)
    if len(ids) < 2:
        return None
    ids = ids[:_MAX_TOKENS]
    prompt = len(ids) - min(_MAX_STEPS, len(ids) // 2)
    cuts = [0, *range(prompt, len(ids) + 1)]
    calls = [_call(ids, begin, end, one) for begin, end in pairwise(cuts)]
    calls[0] |= {name: np.zeros((1, one[name].shape[1], 0, one[name].shape[3]), one[name].dtype) for name in caches}
    return calls


def longest_text(feeds: Sequence[Feeds]) -> tuple[np.ndarray, Feeds]:
    """Return the longest row of input_ids without padding, [tokens], and its feeds; no tokens without input_ids."""
    longest: tuple[np.ndarray, Feeds] = np.zeros(0, np.int64), {}
    for one in feeds:
        ids = one.get("input_ids")
        if ids is None or ids.ndim != 2:
            continue
        mask = one.get("attention_mask")
        seen = np.ones(ids.shape, bool)
        if mask is not None and mask.ndim == 2 and mask.shape[1] >= ids.shape[1]:
            seen = mask[:, mask.shape[1] - ids.shape[1] :] != 0
        for row, kept in zip(ids, seen, strict=True):
            if kept.sum() > len(longest[0]):
                longest = row[kept], one
    return longest


def _call(ids: np.ndarray, begin: int, end: int, like: Feeds) -> Feeds:
    made = {"input_ids": ids[begin:end], "attention_mask": np.ones(end), "position_ids": np.arange(begin, end)}
    return {name: array[None].astype(like[name].dtype) for name, array in made.items() if name in like}


def shorter(calls: Sequence[Feeds], tokens: int) -> Feeds:
    """Return the calls with the prompt cut to its first tokens."""
    first = calls[0]
    cut = {name: array[:, :tokens] for name, array in first.items() if name in _INPUTS}
    return first | cut


def decode(run: Run, calls: Sequence[Feeds], caches: Mapping[str, int]) -> Decoded:
    """Run the calls, passing each call's caches to the next call.

    Args:
        run: Runs the model.
        calls: From `calls_to_decode`.
        caches: Maps each cache input to the index of the output that becomes this input of the next call.
    """
    prompt: Outputs | None = None
    steps: list[Outputs] = []
    answers: Outputs = []
    feeds = calls[0]
    for call in calls:
        carried = {name: answers[index] for name, index in caches.items()} if answers else {}
        feeds = call | {name: cache for name, cache in carried.items() if cache is not None}
        answers = run(feeds)
        if prompt is None:
            prompt = without(answers, [index for index in range(len(answers)) if index not in caches.values()])
        else:
            steps.append(without(answers, caches.values()))
    assert prompt is not None
    return Decoded(prompt, steps, answers, feeds)


def without(answers: Outputs, indices: Collection[int]) -> Outputs:
    """Return the answers with None at these indices."""
    return [None if index in indices else answer for index, answer in enumerate(answers)]


def without_padding(
    feeds: Feeds, answers: Outputs, pad_token_id: int | None = None, indices: Collection[int] | None = None
) -> Outputs:
    """Return the answers with 0 at padding tokens, for which models may return anything.

    Args:
        feeds: Tokens with attention_mask [batch, tokens] 0 are padding.
        answers: The model's outputs.
        pad_token_id: If given, masked positions that hold another token are not padding.
        indices: The outputs to change; None: all.
    """
    mask, ids = feeds.get("attention_mask"), feeds.get("input_ids")
    if mask is None or mask.ndim != 2 or (ids is not None and ids.ndim != 2) or mask.all():
        return answers
    new = mask if ids is None else mask[:, max(mask.shape[1] - ids.shape[1], 0) :]
    new = new != 0 if ids is None or pad_token_id is None else (new != 0) | (ids != pad_token_id)

    def hide(answer: np.ndarray | None) -> np.ndarray | None:
        if answer is None:
            return None
        if answer.ndim in (2, 3) and answer.shape[:2] == new.shape:
            return np.where(new[:, :, None] if answer.ndim == 3 else new, answer, answer.dtype.type(0))
        if answer.ndim == 4 and (answer.shape[0], answer.shape[2]) == mask.shape:
            return np.where((mask != 0)[:, None, :, None], answer, answer.dtype.type(0))
        return answer

    return [hide(answer) if indices is None or index in indices else answer for index, answer in enumerate(answers)]


def check_contents(uses: Iterable[CacheUse], expected: Mapping[str, np.ndarray], found: Feeds, rounding: float) -> None:
    """Check that compressed caches represent the keys and values of the uncompressed model after the same prompt.

    Args:
        uses: The caches.
        expected: float [1, kv_heads, tokens, head_dim], by output name.
        found: The caches of the compressed model by output name, in their stored format.
        rounding: Relative error of keys and values that other layers may cause.

    Raises:
        VerificationError: A cache does not represent them; the message names node, output and codebooks.
    """
    for use in uses:
        if use.format is None:
            continue
        exact = expected[use.present][0].astype(np.float64)
        known = np.isfinite(exact)
        exact = np.where(known, exact, 0)
        difference = np.where(known, use.format.decode(found[use.present])[0] - exact, 0)
        error, norm = (np.sqrt((one**2).sum(axis=(1, 2))) for one in (difference, exact))
        books = use.format.codebooks
        if books is None:
            size, limit = norm, _VALUE_ERROR * math.sqrt(exact.shape[2])
        else:
            # Relative to the larger of the spreads of these keys and of the calibration's keys, which may differ.
            spread = spread_of(exact)
            size = math.sqrt(exact.shape[1]) * (spread if use.spread is None else np.maximum(spread, use.spread))
            size, limit = np.maximum(size, 1e-3 * norm), _KEY_ERROR[books.shape[3]]
        limit = min(limit + rounding, _MAX_ERROR)
        relative = np.divide(error, size, out=np.where(error > 0, np.inf, 0.0), where=size > 0)
        head = int(relative.argmax())
        if not relative[head] <= limit:
            kind = "values" if books is None else "keys"
            why = f"codebooks {use.codebooks!r} do not represent them; " if books is not None else ""
            raise VerificationError(
                f"node {use.node!r}: the {kind} of head {head} in its cache {use.present!r} are wrong by "
                f"{relative[head]:.3g} of their {'size' if books is None else 'spread'}, expected at most {limit:.3g}: "
                f"{why}nothing was saved; calibrate on other text, exclude the node (compress_cache.exclude), or, if "
                "nothing in the model explains it, please report this"
            )


def check_same_contents(uses: Iterable[CacheUse], kernel: Feeds, function: Feeds, rounding: float) -> None:
    """Check that the ONNX function wrote the kernel's bytes, or bytes that decode to nearly the same keys and values.

    Args:
        uses: The caches.
        kernel: The caches that kernels wrote, by output name.
        function: The caches that ONNX functions wrote, by output name.
        rounding: Relative difference of keys and values that other layers may cause.

    Raises:
        VerificationError: The caches differ more than this; the message names node and output.
    """
    # Two keys that differ by e are quantized to different cells of width w with probability e / w. They then differ by
    # w, so the RMS difference is sqrt(e w).
    limit = max(_TIES, math.sqrt(rounding))
    for use in uses:
        if use.format is None or np.array_equal(kernel[use.present], function[use.present]):
            continue
        one, other = (use.format.decode(cache[use.present]).astype(np.float64) for cache in (kernel, function))
        norm, distance = float(np.linalg.norm(one)), float(np.linalg.norm(one - other))
        if not distance <= limit * norm:
            raise VerificationError(
                f"node {use.node!r}: its cache {use.present!r} differs between the native kernels and the portable "
                f"operators: by {distance / norm if norm else math.inf:.3g} of its norm, expected at most {limit:.3g} "
                "(from values that round to different codes); nothing was saved; please report this"
            )
