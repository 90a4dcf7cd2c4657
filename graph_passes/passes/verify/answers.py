"""Compare the answers of the optimized model with those of the original and the reference model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ortolan.errors import CalibrationError, VerificationError

from ...measure.answers import keep
from ...measure.compare import ErrorSums, other_shapes, refuse_infinite
from ...measure.decoding import without, without_padding
from ...measure.feeds import Feeds, Outputs
from ..context import PassContext
from .advice import advice
from .difference import accept_shapes, judge_agreement
from .limits import MASK_FACTOR, Limits


@dataclass(frozen=True)
class Answers:
    """Errors over all feeds, and the answers to the first feed. Only one feed's answers are in memory at a time."""

    names: list[str]  # names of the original's outputs
    kinds: dict[str, str]  # dtype.kind by output name
    against_original: ErrorSums
    # Errors against the reference: the pruned and quantized model before its layers were replaced, or the original if
    # no weight was changed. None if no pass replaced layers of a changed model.
    against_reference: ErrorSums | None
    of_reference: ErrorSums  # errors of the reference against the original
    of_original: ErrorSums  # errors of the original against the reference
    first_reference: Outputs | None  # without outputs that hold a compressed cache
    first: Outputs  # answers of the optimized model

    @classmethod
    def of(
        cls,
        context: PassContext,
        names: list[str],
        feeds: Sequence[Feeds],
        before: Sequence[Outputs],
        after: Iterable[Outputs],
    ) -> Answers:
        """Compare the answers to each feed. Outputs whose shapes differ are not compared.

        before: answers of the original, with the prompt that becomes part of the model, if any. after: answers of the
        optimized model, which may have more outputs.

        Raises:
            VerificationError: shapes differ, and the user has not allowed a difference.
        """
        # Without a pass replace there is no reference model.
        none_before = context.reference is None and context.layers.changed
        reference = before if context.reference is None else context.reference.answers[: len(feeds)]
        original, rounding, changes, reverse = (ErrorSums(names) for _ in range(4))
        first: list[Outputs] = []
        different: set[int] = set()  # outputs whose shapes differ
        for one, *runs in zip(feeds, before, reference, after, strict=True):
            exact, base, found = _comparable(context, names, one, *runs)
            shapes = other_shapes(names, exact, found)
            accept_shapes(context, {name: shapes[name] for name in shapes if names.index(name) not in different})
            different |= {names.index(name) for name in shapes}
            same = base is exact
            unlike = different | {names.index(name) for name in other_shapes(names, base, found)}
            exact, base, found = without(exact, different), without(base, unlike), without(found, different)
            original.add(exact, found)
            rounding.add(base, found)
            if not same:
                changes.add(exact, base)
                reverse.add(base, exact)
            first = first or [exact, base, keep(found, context.evidence.folder)]
        for sums in (original, rounding, changes, reverse):
            sums.leave_out(different)
        exact, base, found = (without(one, different) for one in first)
        kinds: dict[str, str] = {
            name: answer.dtype.kind for name, answer in zip(names, exact, strict=True) if answer is not None
        }
        if none_before:
            return cls(names, kinds, original, None, changes, reverse, None, found)
        return cls(names, kinds, original, rounding, changes, reverse, base, found)

    def by_masks(self) -> dict[str, float]:
        """Return a bound on the error that input thresholds add, by output, from the error of the reference."""
        return {error.name: MASK_FACTOR * error.relative_l2 for error in self.of_reference.errors()}

    def judge(self, context: PassContext, limits: Limits, cached: bool) -> None:
        """Report the errors, and check them against the limits. cached: some of the feeds read a compressed cache.

        Raises:
            VerificationError: an output is wrong; the message names it.
        """
        report = context.report
        report.output_error = self.against_original.errors()
        errors = [] if self.against_reference is None else self.against_reference.errors()
        # Rounding can change an integer output, such as an argmax, to any value, so only floats are judged.
        report.rounding_error = [error for error in errors if self.kinds[error.name] == "f"]
        refuse_infinite(self.against_original.first_infinite())
        for error in report.rounding_error:
            limit = limits.rounding(error.name, cached)
            if not error.relative_l2 <= limit:
                raise VerificationError(
                    f"output {error.name!r} has relative error {error.relative_l2:.3g} against the model before its "
                    f"layers were replaced, expected at most {limit:.3g} from rounding; nothing was saved; exclude "
                    "layers from replacement, or raise verify.max_rounding_error if your task tolerates it; if the "
                    "model does not explain the error, please report this"
                )
        in_float = context.reference is not None and context.reference.in_float
        closer = self._note_float(context) if in_float else frozenset[str]()
        floats = [error for error in report.output_error if self.kinds[error.name] == "f"]
        judge_agreement(context, floats, closer)
        floats = [error for error in floats if error.name not in closer]
        limits.judge_size(floats, "", advice(context), report.output_error)

    def _note_float(self, context: PassContext) -> frozenset[str]:
        """Note the errors of both models against the float reference.

        The float reference has the original's weights in float and does not round activations.

        Returns:
            The outputs for which the optimized model has the smaller error.
        """
        originals = self.of_original.errors()
        found = {error.name: error.relative_l2 for error in context.report.rounding_error}
        pairs = [(error, found[error.name]) for error in originals if error.name in found]
        by_name = {error.name: error for error in context.report.output_error}
        for error, ours in pairs:
            by_name[error.name].from_float = (error.relative_l2, ours)
        if pairs:
            error, ours = max(pairs, key=lambda pair: pair[1])
            context.note(
                f"output {error.name!r}: relative error against the original's weights in float: original "
                f"{error.relative_l2:.2g}, optimized model {ours:.2g}"
            )
        return frozenset(error.name for error, ours in pairs if ours < error.relative_l2)


def _comparable(
    context: PassContext, names: list[str], feeds: Feeds, before: Outputs, reference: Outputs, after: Outputs
) -> tuple[Outputs, Outputs, Outputs]:
    """Return the answers to one feed without a prompt's tokens, compressed caches and padding."""
    same, prompt, layers = reference is before, context.caches.prompt, context.layers
    hidden = [names.index(name) for name in context.caches.outputs]
    by_tokens = [names.index(name) for name in layers.zero_at_padding] or None

    def kept(answers: Outputs, cuts: bool) -> Outputs:
        answers = prompt.cut_from(names, answers) if cuts and prompt is not None else answers[: len(names)]
        answers = without(answers, hidden)
        if not (context.caches.rounding or layers.zero_at_padding):
            return answers
        return without_padding(feeds, answers, layers.pad_token_id, by_tokens)

    exact = kept(before, True)
    return exact, exact if same else kept(reference, True), kept(after, False)


def require_finite(before: Sequence[Outputs], description: str | None) -> None:
    """Raise CalibrationError if the original has no finite answer. `description` names the feeds."""
    answers = [answer for one in before for answer in one if answer is not None]
    if answers and not any(np.isfinite(answer).any() for answer in answers):
        raise CalibrationError(
            f"the original model returns only NaN, infinity or empty arrays on the feeds ({description}), so no answer "
            "can be compared; nothing was saved; give calibration data of at least one row on which the original "
            "model returns finite values"
        )
