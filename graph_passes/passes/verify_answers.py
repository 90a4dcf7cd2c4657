"""The answers of one verification, and whether those of the optimized model are right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ortolan.errors import CalibrationError, VerificationError

from ..measure.answers import keep
from ..measure.compare import ErrorSums, compare_shapes, refuse_infinite
from ..measure.decoding import without, without_padding
from ..measure.feeds import Feeds, Outputs
from .context import PassContext
from .verify_limits import MASK_FACTOR, Limits


@dataclass(frozen=True)
class Answers:
    """Errors over all feeds, and the answers to the first one. Answers to one feed at a time are in memory."""

    names: list[str]  # of the original's outputs
    kinds: dict[str, str]  # by name: dtype.kind
    against_original: ErrorSums
    # Against the reference: the pruned and quantized model before its layers were replaced, or the original where
    # nothing was changed. None if the model was changed and no pass has replaced layers since.
    against_reference: ErrorSums | None
    of_reference: ErrorSums  # of the reference against the original
    of_original: ErrorSums  # of the original against the reference
    first_reference: Outputs | None  # None in the place of outputs that hold a compressed cache
    first: Outputs  # of the optimized model

    @classmethod
    def of(
        cls,
        context: PassContext,
        names: list[str],
        feeds: Sequence[Feeds],
        before: Sequence[Outputs],
        after: Iterable[Outputs],
    ) -> Answers:
        """Compare the answers to each feed.

        Args:
            before: of the original, with the prompt that becomes part of the model, if any.
            after: of the optimized model, with outputs that the original has not; each is dropped once compared.

        Raises:
            VerificationError: shapes differ.
        """
        # Without a pass replace there is no model before it to compare with.
        none_before = context.reference is None and context.layers.changed
        reference = before if context.reference is None else context.reference.answers[: len(feeds)]
        original, rounding, changes, reverse = (ErrorSums(names) for _ in range(4))
        first: list[Outputs] = []
        for one, *runs in zip(feeds, before, reference, after, strict=True):
            exact, base, found = _comparable(context, names, one, *runs)
            compare_shapes(names, exact, found)
            original.add(exact, found)
            rounding.add(base, found)
            if base is not exact:
                changes.add(exact, base)
                reverse.add(base, exact)
            first = first or [exact, base, keep(found, context.evidence.folder)]
        exact, base, found = first
        kinds: dict[str, str] = {
            name: answer.dtype.kind for name, answer in zip(names, exact, strict=True) if answer is not None
        }
        if none_before:
            return cls(names, kinds, original, None, changes, reverse, None, found)
        return cls(names, kinds, original, rounding, changes, reverse, base, found)

    def by_masks(self) -> dict[str, float]:
        """By output, what inputs that count as zero may add to an error, by what the deliberate changes cost."""
        return {error.name: MASK_FACTOR * error.relative_l2 for error in self.of_reference.errors()}

    def judge(self, context: PassContext, limits: Limits, cached: bool) -> None:
        """Puts the errors into the report. cached: some of the feeds read a compressed cache.

        Raises VerificationError, naming the output that is wrong.
        """
        report = context.report
        report.output_error = self.against_original.errors()
        errors = [] if self.against_reference is None else self.against_reference.errors()
        # A rounding may turn a whole number, such as the place of the largest, into any other.
        report.rounding_error = [error for error in errors if self.kinds[error.name] == "f"]
        refuse_infinite(self.against_original.first_infinite())
        for error in report.rounding_error:
            limit = limits.rounding(error.name, cached)
            if not error.relative_l2 <= limit:
                raise VerificationError(
                    f"output {error.name!r} has relative error {error.relative_l2:.3g} against the model before its "
                    f"layers were replaced, expected at most {limit:.3g} from rounding; nothing was saved; "
                    "exclude layers from replacement, or raise verify.max_rounding_error if your task bears it; if "
                    "nothing in the model explains it, please report this"
                )
        nearer = self._note_freed(context) if context.layers.freed else frozenset[str]()
        floats = [error for error in report.output_error if self.kinds[error.name] == "f" and error.name not in nearer]
        advice = "try less sparsity or more bits, exclude layers (prune.exclude, quantize.exclude)"
        limits.judge_size(floats, "", advice, report.output_error)

    def _note_freed(self, context: PassContext) -> frozenset[str]:
        """Notes how far both models are from the weights in float, where the original rounds activations and the
        optimized model does not; returns the outputs at which the latter is nearer."""
        originals = self.of_original.errors()
        found = {error.name: error.relative_l2 for error in context.report.rounding_error}
        pairs = [(error, found[error.name]) for error in originals if error.name in found]
        by_name = {error.name: error for error in context.report.output_error}
        for error, ours in pairs:
            by_name[error.name].from_float = (error.relative_l2, ours)
        if pairs:
            error, ours = max(pairs, key=lambda pair: pair[1])
            context.note(
                f"output {error.name!r}: the original is {error.relative_l2:.2g} away from the answers of its weights "
                f"in float, the optimized model {ours:.2g}"
            )
        return frozenset(error.name for error, ours in pairs if ours < error.relative_l2)


def _comparable(
    context: PassContext, names: list[str], feeds: Feeds, before: Outputs, reference: Outputs, after: Outputs
) -> tuple[Outputs, Outputs, Outputs]:
    """The answers to one feed without what need not be equal: a prompt's tokens, compressed caches, and padding."""
    same, prompt = reference is before, context.caches.prompt
    hidden = [names.index(name) for name in context.caches.outputs]

    def kept(answers: Outputs, cuts: bool) -> Outputs:
        answers = prompt.cut_from(names, answers) if cuts and prompt is not None else answers[: len(names)]
        answers = without(answers, hidden)
        hides = context.caches.rounding or context.layers.unpadded
        return without_padding(feeds, answers) if hides else answers

    exact = kept(before, True)
    return exact, exact if same else kept(reference, True), kept(after, False)


def require_finite(before: Sequence[Outputs], description: str | None) -> None:
    """Raises CalibrationError where the original answers nothing finite. description: of the feeds."""
    answers = [answer for one in before for answer in one if answer is not None]
    if answers and not any(np.isfinite(answer).any() for answer in answers):
        raise CalibrationError(
            "the original model answers with NaN, infinity or empty arrays only, so the feeds "
            f"({description}) leave nothing finite to compare; nothing was saved; give "
            "calibration data of at least one row on which the original model gives finite answers"
        )
