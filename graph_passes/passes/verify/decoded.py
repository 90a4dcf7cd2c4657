"""Verify tokens that replaced attention decodes from a cache, and the contents of compressed caches.

The method is described in measure/decoding.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ortolan.errors import CalibrationError, VerificationError

from ...measure.compare import ErrorSums, array_of, measure_errors, refuse_infinite
from ...measure.decoding import Decoded, calls_to_decode, check_contents, shorter
from ...measure.feeds import Feeds
from ..context import PassContext
from .limits import Limits
from .reference import decode_calls

_PORTABLE_PROMPT = 40  # tokens: a full block of the cache, and a partial one


@dataclass(frozen=True)
class DecodedTokens:
    """Answers of both models to a prompt and the tokens after it."""

    before: Decoded  # answers of the original
    after: Decoded  # answers of the optimized model
    short_prompt: Feeds  # start of the prompt, as feeds of the original
    errors: dict[str, float]  # errors of the tokens by output, against the model before its attention was replaced


def verify_decoded(
    context: PassContext, limits: Limits, original: Any, optimized: Any, feeds: Sequence[Feeds], names: Sequence[str]
) -> DecodedTokens | None:
    """Decode tokens with both models and compare them. `names` are all outputs.

    Returns:
        None if no attention with a cache was replaced, if all caches stay float and the feeds have read them, or if the
        feeds cannot be decoded.

    Raises:
        VerificationError: tokens or caches are wrong; the message names the output or node.
    """
    if not context.caches.rounding:
        return None
    calls, before = calls_to_decode(feeds, context.caches.uses), None
    if calls is not None:
        before = _of_original(context, original, calls, names)
    if calls is None or before is None:
        if not context.caches.formats and any(_reads_past(one) for one in feeds):
            return None  # all caches are float, and the feeds have already read them
        context.note(
            "the cache was not verified by decoding: the feeds have fewer than two tokens, or inputs besides tokens, "
            "mask, positions and cache, or the model has fixed shapes"
        )
        return None
    prompt = context.caches.prompt
    steps = calls[1:] if prompt is None else map(prompt.counted_in, calls[1:])
    encoded = [context.caches.encode(calls[0]), *steps]
    after = decode_calls(optimized, encoded, context, names, "the optimized model", VerificationError)
    errors = _judge(context, limits, before, after, names, calls[0]["input_ids"].shape[1])
    return DecodedTokens(before, after, shorter(calls, _PORTABLE_PROMPT), errors)


def _reads_past(feeds: Feeds) -> bool:
    """Return True if the feeds contain a cache with tokens."""
    return any(
        "past" in name and array.ndim == 4 and array.shape[2] > 0 and array.any() for name, array in feeds.items()
    )


def _of_original(context: PassContext, original: Any, calls: Sequence[Feeds], names: Sequence[str]) -> Decoded | None:
    prompt = context.caches.prompt
    past = None if prompt is None else prompt.exact_past(original)
    with suppress(CalibrationError):  # the model has fixed shapes
        return decode_calls(original, calls, context, names, "the original model", CalibrationError, past)
    return None


def _judge(
    context: PassContext, limits: Limits, before: Decoded, after: Decoded, names: Sequence[str], tokens: int
) -> dict[str, float]:
    """Report and check the errors of decoded tokens; return them by output.

    They are errors against the model before its attention was replaced. tokens: length of the prompt.
    """
    report = context.report
    sums = ErrorSums(names)
    for one, other in zip(before.steps, after.steps, strict=True):
        sums.add(one, other)
    errors = sums.errors()
    if report.cache is not None:
        report.cache.decoded_tokens, report.cache.prompt_tokens = len(before.steps), tokens
        report.cache.decode_error = errors
    refuse_infinite(sums.first_infinite())
    kept = context.reference
    reference = before if kept is None or kept.decoded is None else kept.decoded
    # Without a reference, part of the error comes from quantization, so the error is not limited.
    known = kept is None or kept.decoded is not None
    positions = {use.present: names.index(use.present) for use in context.caches.uses.values()}
    check_contents(
        context.caches.uses.values(),
        {name: array_of(reference.prompt[position]) for name, position in positions.items()},
        {name: array_of(after.prompt[position]) for name, position in positions.items()},
        limits.contents() if known else math.inf,
    )
    where = f"of a token decoded after a prompt of {tokens} tokens"
    found = measure_errors(names, reference.steps, after.steps)
    for error in found if known else []:
        limit = limits.decoded(error.name)
        if not error.relative_l2 <= limit:
            raise VerificationError(
                f"output {error.name!r} {where} has relative error {error.relative_l2:.3g} against the model "
                f"before its attention was replaced, expected at most {limit:.3g}; nothing was saved; calibrate on "
                "typical text, or raise verify.max_rounding_error if your task tolerates it; if the model does not "
                "explain the error, please report this"
            )
    limits.judge_size(errors, where, "keep more of the cache exact, or exclude some attentions")
    return {error.name: error.relative_l2 for error in found}
