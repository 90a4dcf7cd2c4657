"""The answers of one verification, and whether those of the optimized model are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortolan.errors import CalibrationError, VerificationError

from ..measure.compare import measure_errors, other_shapes, refuse_infinite
from ..measure.decoding import without, without_padding
from ..measure.feeds import Feeds, Outputs
from .context import PassContext
from .verify_advice import advice
from .verify_difference import accept_shapes, judge_agreement
from .verify_limits import MASK_FACTOR, Limits


@dataclass(frozen=True)
class Answers:
    """Each an answer to each of the feeds, with None in the place of outputs that hold a compressed cache."""

    names: list[str]  # of the original's outputs
    before: list[Outputs]  # of the original
    # Of the pruned and quantized model before its layers were replaced: the original, where nothing was changed. None:
    # it was changed, and no pass has replaced layers since.
    reference: list[Outputs] | None
    after: list[Outputs]  # of the optimized model
    kinds: dict[str, str]  # by name: dtype.kind

    @classmethod
    def of(
        cls,
        context: PassContext,
        names: list[str],
        feeds: Sequence[Feeds],
        before: list[Outputs],
        after: list[Outputs],
    ) -> Answers:
        """before: with the prompt that becomes part of the model, if any. after: with what the original has not.

        Outputs whose shapes differ become None. Raises VerificationError where they may not differ.
        """
        prompt = context.caches.prompt
        # Without a pass replace there is no model before it to compare with.
        none_before = context.reference is None and context.layers.changed
        reference = before if context.reference is None else context.reference.answers[: len(feeds)]
        if prompt is not None:
            before, reference = ([prompt.cut_from(names, one) for one in runs] for runs in (before, reference))
        after = [answers[: len(names)] for answers in after]
        hidden = [names.index(name) for name in context.caches.outputs]
        before, reference, after = ([without(one, hidden) for one in runs] for runs in (before, reference, after))
        accept_shapes(context, shapes := other_shapes(names, before, after))
        places = {names.index(name) for name in shapes}
        before, after = ([without(one, places) for one in runs] for runs in (before, after))
        places |= {names.index(name) for name in other_shapes(names, reference, after)}
        reference = [without(one, places) for one in reference]
        layers = context.layers
        if context.caches.rounding or layers.zero_at_padding:
            by_tokens = [names.index(name) for name in layers.zero_at_padding] or None
            before, reference, after = (
                [without_padding(*one, layers.pad_token_id, by_tokens) for one in zip(feeds, runs, strict=True)]
                for runs in (before, reference, after)
            )
        kinds: dict[str, str] = {
            name: one.dtype.kind for name, one in zip(names, before[0], strict=True) if one is not None
        }
        return cls(names, before, None if none_before else reference, after, kinds)

    def by_masks(self) -> dict[str, float]:
        """By output, what inputs that count as zero may add to an error, by what the deliberate changes cost."""
        changes = [] if self.reference is None else measure_errors(self.names, self.before, self.reference)
        return {error.name: MASK_FACTOR * error.relative_l2 for error in changes}

    def judge(self, context: PassContext, limits: Limits, cached: bool) -> None:
        """Puts the errors into the report. cached: some of the feeds read a compressed cache.

        Raises VerificationError, naming the output that is wrong.
        """
        report = context.report
        report.output_error = measure_errors(self.names, self.before, self.after)
        errors = [] if self.reference is None else measure_errors(self.names, self.reference, self.after)
        # A rounding may turn a whole number, such as the place of the largest, into any other.
        report.rounding_error = [error for error in errors if self.kinds[error.name] == "f"]
        refuse_infinite(self.names, self.before, self.after)
        for error in report.rounding_error:
            limit = limits.rounding(error.name, cached)
            if not error.relative_l2 <= limit:
                raise VerificationError(
                    f"output {error.name!r} has relative error {error.relative_l2:.3g} against the model before its "
                    f"layers were replaced, expected at most {limit:.3g} from rounding; nothing was saved; "
                    "exclude layers from replacement, or raise verify.max_rounding_error if your task bears it; if "
                    "nothing in the model explains it, please report this"
                )
        in_float = context.reference is not None and context.reference.in_float
        nearer = self._note_float(context) if in_float else frozenset[str]()
        floats = [error for error in report.output_error if self.kinds[error.name] == "f"]
        judge_agreement(context, floats, nearer)
        floats = [error for error in floats if error.name not in nearer]
        limits.judge_size(floats, "", advice(context), report.output_error)

    def _note_float(self, context: PassContext) -> frozenset[str]:
        """Notes how far both models are from the weights in float, where the original rounds activations and the
        optimized model does not; returns the outputs at which the latter is nearer."""
        originals = [] if self.reference is None else measure_errors(self.names, self.reference, self.before)
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


def require_finite(before: Sequence[Outputs], description: str | None) -> None:
    """Raises CalibrationError where the original answers nothing finite. description: of the feeds."""
    answers = [answer for one in before for answer in one if answer is not None]
    if answers and not any(np.isfinite(answer).any() for answer in answers):
        raise CalibrationError(
            "the original model answers with NaN, infinity or empty arrays only, so the feeds "
            f"({description}) leave nothing finite to compare; nothing was saved; give "
            "calibration data of at least one row on which the original model gives finite answers"
        )
