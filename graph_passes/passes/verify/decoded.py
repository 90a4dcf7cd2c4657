"""Verifies tokens that are decoded from caches, compressed ones or floats, by attention that was replaced, and what
compressed caches hold: measure/decoding.py says how."""

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

_PORTABLE_PROMPT = 40  # tokens: a full block of the cache, and some more


@dataclass(frozen=True)
class DecodedTokens:
    """What both models answer to a prompt and the tokens behind it."""

    before: Decoded  # of the original
    after: Decoded  # of the optimized model
    short_prompt: Feeds  # the prompt's beginning, as the original takes it
    errors: dict[str, float]  # by output: of the tokens, against the model before its attention was replaced


def verify_decoded(
    context: PassContext, limits: Limits, original: Any, optimized: Any, feeds: Sequence[Feeds], names: Sequence[str]
) -> DecodedTokens | None:
    """None where no attention with a cache was replaced, or all caches stay floats and feeds have read some, or the
    feeds are of another kind. names: of all outputs.

    Raises VerificationError, naming output or node, where tokens or caches are wrong.
    """
    if not context.caches.rounding:
        return None
    calls, before = calls_to_decode(feeds, context.caches.uses), None
    if calls is not None:
        before = _of_original(context, original, calls, names)
    if calls is None or before is None:
        if not context.caches.formats and any(_reads_past(one) for one in feeds):
            return None  # floats, which the feeds have read
        context.note(
            "no token was decoded from the cache to verify it: the feeds hold no two tokens of a sequence, or have "
            "inputs besides tokens, mask, positions and cache, or the model takes no others of their shapes"
        )
        return None
    prompt = context.caches.prompt
    steps = calls[1:] if prompt is None else map(prompt.counted_in, calls[1:])
    encoded = [context.caches.encode(calls[0]), *steps]
    after = decode_calls(optimized, encoded, context, names, "the optimized model", VerificationError)
    errors = _judge(context, limits, before, after, names, calls[0]["input_ids"].shape[1])
    return DecodedTokens(before, after, shorter(calls, _PORTABLE_PROMPT), errors)


def _reads_past(feeds: Feeds) -> bool:
    """Whether there are tokens in a cache that is given."""
    return any(
        "past" in name and array.ndim == 4 and array.shape[2] > 0 and array.any() for name, array in feeds.items()
    )


def _of_original(context: PassContext, original: Any, calls: Sequence[Feeds], names: Sequence[str]) -> Decoded | None:
    prompt = context.caches.prompt
    past = None if prompt is None else prompt.exact_past(original)
    with suppress(CalibrationError):  # the model takes other shapes only
        return decode_calls(original, calls, context, names, "the original model", CalibrationError, past)
    return None


def _judge(
    context: PassContext, limits: Limits, before: Decoded, after: Decoded, names: Sequence[str], tokens: int
) -> dict[str, float]:
    """By output, the error against the model before its attention was replaced. tokens: of the prompt."""
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
    # Where none was kept, a part of the error is that of quantization.
    known = kept is None or kept.decoded is not None
    places = {use.present: names.index(use.present) for use in context.caches.uses.values()}
    check_contents(
        context.caches.uses.values(),
        {name: array_of(reference.prompt[place]) for name, place in places.items()},
        {name: array_of(after.prompt[place]) for name, place in places.items()},
        limits.contents() if known else math.inf,
    )
    where = f"of a token decoded behind a prompt of {tokens}"
    found = measure_errors(names, reference.steps, after.steps)
    for error in found if known else []:
        most = limits.decoded(error.name)
        if not error.relative_l2 <= most:
            raise VerificationError(
                f"output {error.name!r} {where} has relative error {error.relative_l2:.3g} against the model "
                f"before its attention was replaced, expected at most {most:.3g}; nothing was saved; calibrate on "
                "text like that to come, or raise verify.max_rounding_error if your task bears it; if nothing in "
                "the model explains it, please report this"
            )
    limits.judge_size(errors, where, "keep more of the cache exact, or exclude some attentions")
    return {error.name: error.relative_l2 for error in found}
