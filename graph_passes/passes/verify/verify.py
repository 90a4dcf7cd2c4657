"""Run the optimized model before it is saved, and compare its answers on the same feeds with those of other models.

- The original: this error is the price of the optimization. It is limited only if the recipe sets max_error.
- The reference, the pruned and quantized model before its layers were replaced (the original if no weight was changed):
  the two may differ only by what operators round, above all activations (answers.py). This finds errors that all layers
  have in common. An error in one of many layers may be too small, so pass `replace` checks each packed weight.
- The reference again, if pass compress_cache has changed caches: tokens decoded after a prompt, and the contents of the
  caches (decoded.py).
- The optimized model without Ortolan's kernels, if it is portable (portable.py).
- If padding is skipped: a sequence alone, and padded in a batch (padding.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import onnx_ir as ir

from ortolan.errors import CalibrationError, VerificationError
from ortolan.progress import Stage

from ...files.mapped_pages import pages_stay
from ...measure.answers import keep
from ...measure.compare import compare_signatures
from ...measure.feeds import Feeds, Outputs, count_padding
from ...measure.machine import usable_cpus
from ...measure.sessions import (
    int8_products_saturate,
    open_quietly,
    open_to_time,
    run_session,
    session_threads,
    sums_are_exact,
)
from ...measure.timing import interleave
from ...options import PassOptions, takes
from ..context import RecipePass
from .answers import Answers, require_finite
from .decoded import DecodedTokens, verify_decoded
from .limits import Limits
from .padding import verify_padding
from .portable import verify_portable

TIMED_SECONDS = 2.0
_FEW_TOKENS = 4  # largest number of tokens of a call that reads its own keys from the cache


@dataclass(frozen=True)
class VerifyOptions(PassOptions):
    """Options of pass `verify`."""

    # Largest relative L2 error of an output against the original.
    max_error: float | None = field(default=None, metadata=takes("float", low=0.0, none=True))
    # Largest relative L2 error against the pruned and quantized model before its layers were replaced; None: derived
    # from the rounding of each layer.
    max_rounding_error: float | None = field(default=None, metadata=takes("float", low=0.0, none=True))
    feeds: int = field(default=8, metadata=takes("int", low=1))  # number of feeds that are run
    # Seconds spent on measuring latency; 0: not measured. None: 2, or 0 for a model above a gigabyte, for which ONNX
    # Runtime would keep packed copies of all weights of both models.
    seconds: float | None = field(default=None, metadata=takes("float", low=0.0, below=3600.0, none=True))
    portable: bool = field(default=True, metadata=takes("bool"))  # also run the model without the library


class VerifyPass(RecipePass):
    """Raise VerificationError if the optimized model is wrong; otherwise report its error and latency."""

    options_type = VerifyOptions
    options: VerifyOptions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Compare the models, except in a dry run."""
        if not self.context.dry_run:
            self._verify()
        return ir.passes.PassResult(model, modified=False)

    def _verify(self) -> None:
        context, steps = self.context, 5 if self.context.portable else 4
        context.progress(Stage.VERIFY, 0, steps)
        seconds = self._seconds_to_time()
        # Sessions opened for timing also serve for the comparison, if they give the same answers.
        both = seconds > 0 and not int8_products_saturate()
        original = context.evidence.open_original(timed=both)
        self._note_saturation(original)
        feeds = context.evidence.feeds_to_judge(self.options.feeds, original)
        context.report.judged_on = self._describe(feeds)
        if context.evidence.judged_tokens is not None:
            context.note(
                f"answers are compared on {context.evidence.judged_tokens} tokens of each feed: all tokens would need "
                "too much memory"
            )
        given, before = self._ask_original(original, feeds)
        require_finite(before, context.evidence.description)
        optimized = self._open_optimized(both)
        unlike = {*context.caches.formats, *context.caches.outputs}
        compare_signatures(original, optimized, unlike, len(context.caches.exact_keys))
        context.progress(Stage.VERIFY, 2, steps)
        encoded = [context.caches.encode(one) for one in feeds]
        after = (run_session(optimized, one, "the optimized model", VerificationError) for one in encoded)
        names = [output.name for output in original.get_outputs()]
        answers = Answers.of(context, names, feeds, before, after)
        del before
        by_masks = answers.by_masks() if context.layers.masked else {}
        limits = Limits(context, self.options.max_error, self.options.max_rounding_error, by_masks)
        answers.judge(context, limits, cached=any(self._reads_cache(one) for one in feeds))
        if context.layers.unpadded:
            verify_padding(context, optimized, encoded[0], names)
        decoded = verify_decoded(context, limits, original, optimized, feeds, names)
        context.progress(Stage.VERIFY, 3, steps)
        if seconds > 0:
            if not both:
                original, optimized = context.evidence.open_original(timed=True), self._open_optimized(timed=True)
            timed = (given[0], encoded[0]) if decoded is None else (decoded.before.last_feeds, decoded.after.last_feeds)
            self._time(partial(original.run, None, timed[0]), partial(optimized.run, None, timed[1]), seconds)
            context.report.latency_padding = count_padding(timed[0])
        del original
        if context.portable and self.options.portable:
            self._verify_portable(limits, optimized, encoded[0], answers, decoded)
        context.progress(Stage.VERIFY, steps, steps)

    def _seconds_to_time(self) -> float:
        context = self.context
        if self.options.seconds is not None:
            return self.options.seconds
        if not context.source.is_large:
            return TIMED_SECONDS
        context.note(
            "latency was not measured: timing a model of this size needs several times its memory; set verify.seconds "
            "to measure it"
        )
        return 0.0

    def _ask_original(self, original: Any, feeds: list[Feeds]) -> tuple[list[Feeds], list[Outputs]]:
        """Return the feeds, after the model's prompt if there is one, and the original's answers."""
        context, prompt = self.context, self.context.caches.prompt
        if prompt is None:
            return feeds, context.evidence.answers(feeds, original)
        past = prompt.exact_past(original)
        given = [prompt.in_front_of(one, past) for one in feeds]
        runs = (run_session(original, one, "the original model", CalibrationError) for one in given)
        return given, [keep(one, context.evidence.folder) for one in runs]

    def _verify_portable(
        self, limits: Limits, optimized: Any, encoded: Feeds, answers: Answers, decoded: DecodedTokens | None
    ) -> None:
        context = self.context
        if context.source.is_large:
            context.note(
                "the portable form was not run: ONNX Runtime would unpack all weights of a large model at once"
            )
            return
        context.progress(Stage.VERIFY, 4, 5)
        exact = None if context.caches.rounding else answers.first_reference
        calls, errors = [(encoded, answers.first)], {}
        if decoded is not None:
            # The prompt is shortened: large models are slow without the library.
            begin = context.caches.encode(decoded.short_prompt)
            prompt = run_session(optimized, begin, "the optimized model", VerificationError)
            calls, errors = [(decoded.after.last_feeds, decoded.after.last), (begin, prompt)], decoded.errors
        verify_portable(context, limits, answers.names, calls, errors, exact)

    def _open_optimized(self, timed: bool) -> Any:
        context = self.context
        if timed:
            return open_to_time(context.candidate, library=True)
        return open_quietly(context.candidate, context.source, library=True)

    def _note_saturation(self, original: Any) -> None:
        if not sums_are_exact(original):
            self.context.note(
                "ONNX Runtime's uint8 x int8 products saturate on this CPU, and it has no exact ones for this model: "
                "errors of the original's answers count as errors of the optimized model"
            )

    def _time(self, before: Callable[[], Any], after: Callable[[], Any], seconds: float) -> None:
        report = self.context.report
        # Interleaved, so that load on the machine affects both models alike.
        with pages_stay():
            timings = interleave({"before": before, "after": after}, seconds=seconds, min_rounds=3)
        report.latency_before, report.latency_after = timings["before"], timings["after"]
        report.latency_cpus, report.latency_threads = usable_cpus(), session_threads()

    def _describe(self, feeds: Sequence[Feeds]) -> str | None:
        """Describe for the report on how many feeds errors were measured, and whether weights were fitted to them."""
        context = self.context
        if context.evidence.made_up:
            return None
        held_out = len(context.evidence.held_out)
        if held_out:
            return f"output errors on {len(feeds)} feeds" + (
                " (held out from calibration)" if len(feeds) <= held_out else f" ({held_out} held out from calibration)"
            )
        every = len(feeds) == len(context.evidence.feeds())
        which = "on all feeds" if every else f"on the first {len(feeds)} feeds"
        fitted = " (also used for calibration)" if context.evidence.fitted_to else ""
        return f"output errors {which}{fitted}" if fitted or not every else None

    def _reads_cache(self, feeds: Feeds) -> bool:
        """Return True if attention reads a compressed cache: earlier tokens, or the few tokens of a short call."""
        formats = self.context.caches.formats
        ids = feeds.get("input_ids")
        few = ids is None or ids.ndim != 2 or ids.shape[1] <= _FEW_TOKENS
        return bool(formats) and (few or any(feeds[name].shape[2] for name in formats if name in feeds))
