"""Runs the optimized model before anything is saved, and compares its answers, on the same feeds, with those of

- the original: what the user gets for the price; a limit only if the recipe sets max_error;
- the pruned and quantized model before its layers were replaced (the original, where nothing was changed): only what
  an operator rounds, activations above all, may tell them apart. For each layer `replace` has measured by what share of
  the norm (bf16: 0.0023, a number loses 0.0016 in the root mean square; int8: 0.01 or more, by how far the largest
  number of a row stands out). From layer to layer these errors add up as in a random walk, to the root of the sum of
  their squares. Measured in bf16: 0.006 for all-MiniLM (36 layers), 0.019 for stories15M (43), 0.05 for a random Llama
  with 449. ROUNDING_FACTOR times that sum is allowed. What goes wrong in all layers alike makes more (lost biases 0.2
  to 1.3); what goes wrong in a single one of many may not, so `replace` checks each packed weight by itself;
- likewise, where attention reads keys and values from a cache that compress_cache has put into another form: of a token
  decoded behind a prompt. There attention itself is wrong by what the codes of keys lose (0.1 of the norm at d_sub 1),
  and DECODE_FACTOR times the root of the sum of squares is allowed (measured: 0.2 to 1.1 times; what comes later
  repairs some of it). As that is much in a deep model, the caches themselves are compared as well (decoding.py);
- the optimized model without our kernels, if it is portable. Kernels and portable body compute the same formula on the
  same bf16 numbers and differ only in the order of fp32 sums; but a sum that lies near the middle of two bf16 numbers
  may then be rounded up by one and down by the other in the next layer: 0.0023 in the norm of an output of a 6-layer
  BERT, 0.017 in a 64-layer Llama. PORTABLE_ERROR allows three times the latter. In int8 a step is larger (0.03 for
  all-MiniLM); past one such step the two round independently, so twice what rounding costs is allowed as well, or
  PORTABLE_FACTOR times the sum above (0.054 for SmolLM2-135M in bf16, whose sum is 0.03). Of a decoded token, the
  kernel's scores are sums of 8-bit numbers, the body's of floats, which makes 0.1 to 0.22 of what codes of keys lose
  over many tokens (0.009 for stories15M, 0.03 for SmolLM2-135M, 0.1 at d_sub 2), more for one: TABLE_SHARE of that is
  allowed, and so far may the inputs be from each other of which later layers make keys. A token whose
  activations are huge turns the last bit of a sum into a difference that all can see (SmolLM2-135M, bf16, behind an
  empty cache: 0.27 in the logits of one token, 0.02 or less in those of 15 others). So an ODD_SHARE of the rows may
  differ by up to ODD_ERROR each, if the kernels' answers to them are as near to the model before as all must be.

Where inputs below a threshold are taken for zero (activations.py), the pruned and quantized model does so, too. But
any rounding turns some numbers near the threshold into zeros, or back, and each of them turns others in the next
layers; in the end the two drop numbers independently, and are sqrt 2 times as far from each other as each is from the
model without thresholds. MASK_FACTOR times what the deliberate changes cost, as measured on the feeds, is allowed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, VerificationError
from ortolan.progress import Stage

from ..files.mapped_pages import pages_stay
from ..measure.compare import (
    compare_shapes,
    compare_signatures,
    error_of_most_rows,
    measure_errors,
    refuse_infinite,
)
from ..measure.decoding import (
    Decoded,
    calls_to_decode,
    check_contents,
    check_same_contents,
    shorter,
    without,
    without_padding,
)
from ..measure.feeds import Feeds, Outputs
from ..measure.sessions import int8_products_saturate, open_quietly, open_to_time, run_session, sums_are_exact
from ..measure.timing import interleave
from ..options import PassOptions, takes
from ..report.optimization import OutputDeviation
from .context import RecipePass
from .reference import decode_calls

ROUNDING_FACTOR = 9.0
DECODE_FACTOR = 2.0
PORTABLE_ERROR = 5e-2
PORTABLE_FACTOR = 3.0
TABLE_SHARE = 1.0
MASK_FACTOR = 1.5
TIMED_SECONDS = 2.0
POOR_ERROR = 0.3  # against the original: the report warns
PORTABLE_COSINE = 0.998
_FEW_TOKENS = 4  # which read the cache for their own keys, too
_PORTABLE_PROMPT = 40  # tokens: a full block of the cache, and some more


@dataclass(frozen=True)
class VerifyOptions(PassOptions):
    # The largest relative L2 error that any output may have against the original.
    max_error: float | None = field(default=None, metadata=takes("float", low=0.0, none=True))
    # The same against the pruned and quantized model before its layers were replaced; None: by what each layer rounds.
    max_rounding_error: float | None = field(default=None, metadata=takes("float", low=0.0, none=True))
    feeds: int = field(default=8, metadata=takes("int", low=1))  # how many of the given feeds are run
    # Spent on measuring latency; 0: it is not measured. None: 2, or 0 for a model of more than a gigabyte, as ONNX
    # Runtime then keeps packed copies of all weights, of both models.
    seconds: float | None = field(default=None, metadata=takes("float", low=0.0, below=3600.0, none=True))
    portable: bool = field(default=True, metadata=takes("bool"))  # whether it is run without the library as well


class VerifyPass(RecipePass):
    """Raises VerificationError if the optimized model is wrong; else records its error and latency in the report."""

    options_type = VerifyOptions
    options: VerifyOptions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if not self.context.dry_run:
            self._verify(model)
        return ir.passes.PassResult(model, modified=False)

    def _verify(self, model: ir.Model) -> None:
        context, report = self.context, self.context.report
        steps = 5 if context.portable else 4

        def progress(done: int) -> None:
            context.progress(Stage.VERIFY, done, steps)

        progress(0)
        seconds = self.options.seconds
        if seconds is None:
            seconds = 0.0 if context.source.is_large else TIMED_SECONDS
            if context.source.is_large:
                context.note(
                    "latency was not measured: to time a model of this size takes several times its memory; set "
                    "verify.seconds to have it measured"
                )
        # Sessions that are timed may be those that judge, where they answer the same.
        both = seconds > 0 and not int8_products_saturate()
        original = context.evidence.open_original(timed=both)
        self._note_saturation(original)
        feeds = context.evidence.feeds_to_judge(self.options.feeds, original)
        report.judged_on = self._describe(feeds)
        given = feeds
        if context.caches.prompt is not None:
            past = context.caches.prompt.exact_past(original)
            given = [context.caches.prompt.in_front_of(one, past) for one in feeds]
        if context.caches.prompt is None:
            before = context.evidence.answers(feeds, original)
        else:
            before = [run_session(original, one, "the original model", CalibrationError) for one in given]
        answers = [answer for one in before for answer in one if answer is not None]
        if answers and not any(np.isfinite(answer).any() for answer in answers):
            raise CalibrationError(
                "the original model answers with NaN, infinity or empty arrays only, so the feeds "
                f"({context.evidence.description}) leave nothing finite to compare; nothing was saved; give "
                "calibration data of at least one row on which the original model gives finite answers"
            )
        reference = before if context.reference is None else context.reference.answers[: len(feeds)]
        optimized = self._open_optimized(both)
        compressed = context.caches.outputs
        compare_signatures(original, optimized, {*context.caches.formats, *compressed}, len(context.caches.exact_keys))
        progress(2)
        encoded = [context.caches.encode(one) for one in feeds]
        after = [run_session(optimized, one, "the optimized model", VerificationError) for one in encoded]
        names = [output.name for output in original.get_outputs()]
        if context.caches.prompt is not None:
            before, reference = (
                [context.caches.prompt.cut_from(names, answers) for answers in runs] for runs in (before, reference)
            )
        after = [answers[: len(names)] for answers in after]
        hidden = [names.index(name) for name in compressed]
        before, reference, after = ([without(one, hidden) for one in runs] for runs in (before, reference, after))
        compare_shapes(names, before, after)
        if context.caches.rounding:
            before, reference, after = (
                [without_padding(*one) for one in zip(feeds, runs, strict=True)] for runs in (before, reference, after)
            )
        report.output_error = measure_errors(names, before, after)
        # A rounding may turn a whole number, such as the place of the largest, into any other.
        kinds: dict[str, str] = {
            name: one.dtype.kind for name, one in zip(names, before[0], strict=True) if one is not None
        }
        self._by_masks: dict[str, float] = {}
        if context.layers.masked:
            changes = measure_errors(names, before, reference)
            self._by_masks = {error.name: MASK_FACTOR * error.relative_l2 for error in changes}
        # Without a pass replace there is no model before it to compare with.
        none_before = context.reference is None and context.layers.changed
        errors = [] if none_before else measure_errors(names, reference, after)
        report.rounding_error = [error for error in errors if kinds[error.name] == "f"]
        self._judge(names, kinds, before, after, any(self._reads_cache(one) for one in feeds))
        decoded = self._decode(original, optimized, feeds, names)
        progress(3)
        if seconds > 0:
            if not both:
                original, optimized = context.evidence.open_original(timed=True), self._open_optimized(timed=True)
            timed = (given[0], encoded[0]) if decoded is None else (decoded[0].last_feeds, decoded[1].last_feeds)
            self._time(partial(original.run, None, timed[0]), partial(optimized.run, None, timed[1]), seconds)
        del original
        portable = context.portable and self.options.portable
        if portable and context.source.is_large:
            context.note(
                "the portable form was not run, as ONNX Runtime would unpack all weights of a large model at once"
            )
        elif portable:
            progress(4)
            calls_after = [(encoded[0], after[0])]
            if decoded is not None:
                # A prompt is cut short, as large models are slow without the library.
                begin = context.caches.encode(decoded[2])
                prompt = run_session(optimized, begin, "the optimized model", VerificationError)
                calls_after = [(decoded[1].last_feeds, decoded[1].last), (begin, prompt)]
            exact = None if none_before or context.caches.rounding else reference[0]
            self._compare_portable(names, calls_after, {} if decoded is None else decoded[3], exact)
        progress(steps)

    def _open_optimized(self, timed: bool) -> Any:
        context = self.context
        if timed:
            return open_to_time(context.candidate, library=True)
        return open_quietly(context.candidate, context.source, library=True)

    def _note_saturation(self, original: Any) -> None:
        if not sums_are_exact(original):
            self.context.note(
                "ONNX Runtime's uint8 x int8 products saturate on this CPU, and it has no exact ones for this model: "
                "what they lose of the original's answers counts as error of the optimized model"
            )

    def _time(self, before: Callable[[], Any], after: Callable[[], Any], seconds: float) -> None:
        report = self.context.report
        # In turn, so that whatever else the machine does hits both alike.
        with pages_stay():
            timings = interleave({"before": before, "after": after}, seconds=seconds, min_rounds=3)
        report.latency_before, report.latency_after = timings["before"], timings["after"]
        report.latency_cpus = len(os.sched_getaffinity(0))

    def _describe(self, feeds: Sequence[Feeds]) -> str | None:
        """Which of the user's feeds these are, and whether weights were fitted to them."""
        context = self.context
        if context.evidence.made_up:
            return None
        held_out = len(context.evidence.held_out)
        if held_out:
            return f"errors of the outputs on {len(feeds)} of them" + (
                ", which nothing was fitted to"
                if len(feeds) <= held_out
                else f", {held_out} of which nothing was fitted to"
            )
        every = len(feeds) == len(context.evidence.feeds())
        which = "on all of them" if every else f"on the first {len(feeds)} of them"
        fitted = ", which weights were fitted to" if context.evidence.fitted_to else ""
        return f"errors of the outputs {which}{fitted}" if fitted or not every else None

    def _reads_cache(self, feeds: Feeds) -> bool:
        """Whether attention reads keys and values from a compressed cache: of tokens before, or of a few new ones."""
        formats = self.context.caches.formats
        ids = feeds.get("input_ids")
        few = ids is None or ids.ndim != 2 or ids.shape[1] <= _FEW_TOKENS
        return bool(formats) and (few or any(feeds[name].shape[2] for name in formats if name in feeds))

    # ---- tokens decoded from a cache ---------------------------------------------------------------------------------

    def _decode(
        self, original: Any, optimized: Any, feeds: Sequence[Feeds], names: Sequence[str]
    ) -> tuple[Decoded, Decoded, Feeds, dict[str, float]] | None:
        """What both models answer to a prompt and the tokens behind it, judged; a short prompt; by output, how wrong
        decoded tokens are. None where no attention with a cache was replaced, or the feeds are of another kind."""
        context, report = self.context, self.context.report
        if not context.caches.rounding:
            return None
        calls, before, prompt = calls_to_decode(feeds, context.caches.uses), None, context.caches.prompt
        if calls is not None:
            past = None if prompt is None else prompt.exact_past(original)
            with suppress(CalibrationError):  # the model takes other shapes only
                before = decode_calls(original, calls, context, names, "the original model", CalibrationError, past)
        if calls is None or before is None:
            context.note(
                "no token was decoded from the cache to verify it: the feeds hold no two tokens of a sequence, or have "
                "inputs besides tokens, mask, positions and cache, or the model takes no others of their shapes"
            )
            return None
        steps = calls[1:] if prompt is None else map(prompt.counted_in, calls[1:])
        encoded = [context.caches.encode(calls[0]), *steps]
        after = decode_calls(optimized, encoded, context, names, "the optimized model", VerificationError)
        places = {use.present: names.index(use.present) for use in context.caches.uses.values()}
        tokens = calls[0]["input_ids"].shape[1]
        errors = measure_errors(names, before.steps, after.steps)
        if report.cache is not None:
            report.cache.decoded_tokens, report.cache.prompt_tokens = len(before.steps), tokens
            report.cache.decode_error = errors
        refuse_infinite(names, before.steps, after.steps)
        kept = context.reference
        reference = before if kept is None or kept.decoded is None else kept.decoded
        # Where none was kept, a part of the error is that of quantization.
        known = kept is None or kept.decoded is not None
        layers = ROUNDING_FACTOR * self._rounding_of_layers()
        check_contents(
            context.caches.uses.values(),
            {name: _array(reference.prompt[place]) for name, place in places.items()},
            {name: _array(after.prompt[place]) for name, place in places.items()},
            layers if known else math.inf,
        )
        limit = self.options.max_rounding_error
        if limit is None:
            limit = layers + DECODE_FACTOR * _root(context.caches.rounding.values())
        where = f"of a token decoded behind a prompt of {tokens}"
        found = measure_errors(names, reference.steps, after.steps)
        for error in found if known else []:
            most = limit + self._by_masks.get(error.name, 0.0)
            if not error.relative_l2 <= most:
                raise VerificationError(
                    f"output {error.name!r} {where} has relative error {error.relative_l2:.3g} against the model "
                    f"before its caches were compressed, expected at most {most:.3g}; nothing was saved; calibrate on "
                    "text like that to come, or raise verify.max_rounding_error if your task bears it; if nothing in "
                    "the model explains it, please report this"
                )
        self._judge_size(errors, where, "keep more of the cache exact, or exclude some attentions")
        sizes = {error.name: error.relative_l2 for error in found}
        return before, after, shorter(calls, _PORTABLE_PROMPT), sizes

    # ---- without our library -----------------------------------------------------------------------------------------

    def _compare_portable(
        self,
        names: Sequence[str],
        calls: Sequence[tuple[Feeds, Outputs]],
        decoded: dict[str, float],
        exact: Outputs | None,
    ) -> None:
        """calls: feeds, and what the optimized model has answered; few are enough to find a wrong weight. decoded: by
        output, the error that codes make. exact: answers to the only call before layers were replaced, if known."""
        context = self.context
        portable = open_quietly(context.candidate)
        found: dict[str, OutputDeviation] = {}
        rows: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        rounding = {error.name: error.relative_l2 for error in context.report.rounding_error}
        layers = PORTABLE_FACTOR * self._rounding_of_layers()
        hidden = [names.index(name) for name in context.caches.outputs]
        for feeds, answers in calls:
            alone = run_session(portable, feeds, "the optimized model without the library", VerificationError)
            pair = [without(one[: len(names)], hidden) for one in (alone, answers)]
            for error in measure_errors(names, *([one] for one in pair)):
                if error.name not in found or error.relative_l2 > found[error.name].relative_l2:
                    found[error.name] = error
                if exact is not None:
                    place = names.index(error.name)
                    rows[error.name] = (_array(pair[0][place]), _array(pair[1][place]), _array(exact[place]))
            written = [
                {names[place]: _array(one[place]) for place in hidden if one[place] is not None}
                for one in (answers, alone)
            ]
            uses = [use for use in context.caches.uses.values() if use.present in written[0]]
            tables = TABLE_SHARE * _root(context.caches.rounding.values())
            check_same_contents(uses, written[0], written[1], layers + tables)
        context.report.portable_error = list(found.values())
        for error in found.values():
            codes = TABLE_SHARE * decoded.get(error.name, 0.0)
            most = max(PORTABLE_ERROR, 2 * rounding.get(error.name, 0.0), layers, codes)
            most = max(most, self._by_masks.get(error.name, 0.0))
            cosine = min(PORTABLE_COSINE, 1 - most * most)
            close = error.relative_l2 <= most and error.cosine >= cosine
            if not close and not (error.name in rows and error_of_most_rows(*rows[error.name], most) <= most):
                raise VerificationError(
                    f"output {error.name!r} differs between the native kernels and the portable operators: relative "
                    f"error {error.relative_l2:.3g}, expected at most {most:.3g}; cosine {error.cosine:.5f}, "
                    f"expected at least {cosine:.5f}; nothing was saved; please report this"
                )

    # ------------------------------------------------------------------------------------------------------------------

    def _judge(
        self,
        names: Sequence[str],
        kinds: dict[str, str],
        before: Sequence[Outputs],
        after: Sequence[Outputs],
        cached: bool,
    ) -> None:
        """cached: some of the feeds read a compressed cache."""
        report = self.context.report
        refuse_infinite(names, before, after)
        for error in report.rounding_error:
            limit = self.options.max_rounding_error
            if limit is None:
                limit = ROUNDING_FACTOR * self._rounding_of_layers(cached) + self._by_masks.get(error.name, 0.0)
            if not error.relative_l2 <= limit:
                raise VerificationError(
                    f"output {error.name!r} has relative error {error.relative_l2:.3g} against the model before its "
                    f"layers were replaced, expected at most {limit:.3g} from rounding; nothing was saved; "
                    "exclude layers from replacement, or raise verify.max_rounding_error if your task bears it; if "
                    "nothing in the model explains it, please report this"
                )
        floats = [error for error in report.output_error if kinds[error.name] == "f"]
        self._judge_size(
            floats, "", "try less sparsity, exclude layers from pruning (prune.exclude)", report.output_error
        )

    def _judge_size(
        self,
        floats: Sequence[OutputDeviation],
        where: str,
        advice: str,
        errors: Sequence[OutputDeviation] | None = None,
    ) -> None:
        """Against the original. errors: of all outputs, where some are no floats."""
        limit = self.options.max_error
        where = f" {where}" if where else ""
        poor = [error for error in floats if error.relative_l2 > POOR_ERROR]
        if poor and limit is None:
            worst = max(poor, key=lambda error: error.relative_l2)
            self.context.note(
                f"output {worst.name!r}{where} has relative error {worst.relative_l2:.2g} against the original, which "
                f"is much (above {POOR_ERROR:g}): test the model on your task; {advice}, or set max_error to refuse "
                "such a result"
            )
        for error in floats if errors is None else errors:
            if limit is not None and not error.relative_l2 <= limit:
                raise VerificationError(
                    f"output {error.name!r}{where} has relative error {error.relative_l2:.3g} against the "
                    f"original, expected at most max_error {limit:g}; nothing was saved; try less "
                    "sparsity, or exclude the layers with the largest error"
                )

    def _rounding_of_layers(self, cached: bool = False) -> float:
        """What all layers round, added up as in a random walk. cached: with caches read."""
        context = self.context
        shares = context.layers.rounding | (context.caches.rounding if cached else {})
        return _root(shares.values())


def _root(shares: Iterable[float]) -> float:
    return math.sqrt(sum(share * share for share in shares))


def _array(answer: np.ndarray | None) -> np.ndarray:
    assert answer is not None
    return answer
