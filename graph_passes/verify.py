"""Runs the optimized model before anything is saved, and compares its answers, on the same feeds, with those of

- the original: what the user gets for the price; a limit only if the recipe sets max_error;
- the pruned and quantized model before its layers were replaced (the original, where nothing was changed): only what
  an operator rounds, activations above all, may tell them apart. For each layer `replace` has measured by what share of
  the norm (bf16: 0.0023, a number loses 0.0016 in the root mean square; int8: 0.01 or more, by how far the largest
  number of a row stands out). From layer to layer these errors add up as in a random walk, to the root of the sum of
  their squares. Measured in bf16: 0.006 for all-MiniLM (36 layers), 0.019 for stories15M (43), 0.05 for a random Llama
  with 449. ROUNDING_FACTOR times that sum is allowed. What goes wrong in all layers alike makes more (lost biases 0.2
  to 1.3); what goes wrong in a single one of many may not, so `replace` checks each packed weight by itself;
- the optimized model without our kernels, if it is portable. Kernels and portable body compute the same formula on the
  same bf16 numbers and differ only in the order of fp32 sums; but a sum that lies near the middle of two bf16 numbers
  may then be rounded up by one and down by the other in the next layer: 0.0023 in the norm of an output of a 6-layer
  BERT, 0.017 in a 64-layer Llama. PORTABLE_ERROR allows three times the latter. In int8 a step is larger (0.03 for
  all-MiniLM); past one such step the two round independently, so twice what rounding costs is allowed as well, or
  PORTABLE_FACTOR times the sum above (0.054 for SmolLM2-135M in bf16, whose sum is 0.03).

Where inputs below a threshold are taken for zero (activations.py), the pruned and quantized model does so, too. But
any rounding turns some numbers near the threshold into zeros, or back, and each of them turns others in the next
layers; in the end the two drop numbers independently, and are sqrt 2 times as far from each other as each is from the
model without thresholds. MASK_FACTOR times what the deliberate changes cost, as measured on the feeds, is allowed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.benchmarks.timing import interleave
from ortolan.errors import CalibrationError, VerificationError
from ortolan.session import one_line, open_session, register

from .activations import masked_inputs
from .calibrate import feeds_for, open_original, quiet_options
from .feeds import Feeds
from .model_file import data_path, write_model
from .options import PassOptions, takes
from .pipeline import Outputs, PassContext, RecipePass
from .report import OutputError

ROUNDING_FACTOR = 9.0
PORTABLE_ERROR = 5e-2
PORTABLE_FACTOR = 3.0
MASK_FACTOR = 1.5
POOR_ERROR = 0.3  # against the original: the report warns
PORTABLE_COSINE = 0.998


@dataclass(frozen=True)
class VerifyOptions(PassOptions):
    # The largest relative L2 error that any output may have against the original.
    max_error: float | None = field(default=None, metadata=takes("float", low=0.0, none=True))
    # The same against the pruned and quantized model before its layers were replaced; None: by what each layer rounds.
    max_rounding_error: float | None = field(default=None, metadata=takes("float", low=0.0, none=True))
    feeds: int = field(default=8, metadata=takes("int", low=1))  # how many of the given feeds are run
    # Spent on measuring latency; 0: it is not measured.
    seconds: float = field(default=2.0, metadata=takes("float", low=0.0, below=3600.0))


class VerifyPass(RecipePass):
    """Raises VerificationError if the optimized model is wrong; else records its error and latency in the report."""

    options_type = VerifyOptions
    options: VerifyOptions

    def __init__(self, options: PassOptions, context: PassContext) -> None:
        super().__init__(options, context)
        context.feeds_to_verify = max(context.feeds_to_verify, self.options.feeds)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if not self.context.dry_run:
            self._verify(model)
        return ir.passes.PassResult(model, modified=False)

    def _verify(self, model: ir.Model) -> None:
        context, report = self.context, self.context.report
        steps = 5 if context.portable else 4

        def progress(done: int) -> None:
            context.progress("verify", done, steps)

        progress(0)
        write_model(model, context.candidate, lambda done, total: context.progress("write", done, total))
        context.release()
        progress(1)
        original = open_original(context)
        feeds = feeds_for(context, original)[: self.options.feeds]
        before = [_run(original, one, "the original model", CalibrationError) for one in feeds]
        answers = [answer for one in before for answer in one if answer is not None]
        if answers and not any(np.isfinite(answer).any() for answer in answers):
            raise CalibrationError(
                "the original model answers with NaN, infinity or empty arrays only, so the feeds "
                f"({report.feeds}) leave nothing finite to compare; nothing was saved; give calibration data of at "
                "least one row on which the original model gives finite answers"
            )
        reference = before if context.reference is None else context.reference[: len(feeds)]
        options = quiet_options()
        register(options)
        optimized = open_session(context.candidate, options)
        compressed = context.compressed_outputs
        _compare_signatures(original, optimized, {*context.past_formats, *compressed})
        progress(2)
        encoded = [context.encoded(one) for one in feeds]
        after = [_run(optimized, one, "the optimized model", VerificationError) for one in encoded]
        names = [output.name for output in original.get_outputs()]
        before, reference, after = (
            [_without(answers, names, compressed) for answers in runs] for runs in (before, reference, after)
        )
        _compare_shapes(names, before, after)
        report.output_error = measure_errors(names, before, after)
        # A rounding may turn a whole number, such as the place of the largest, into any other.
        kinds: dict[str, str] = {
            name: one.dtype.kind for name, one in zip(names, before[0], strict=True) if one is not None
        }
        self._by_masks: dict[str, float] = {}
        if context.masks_inputs:
            changes = measure_errors(names, before, reference)
            self._by_masks = {error.name: MASK_FACTOR * error.relative_l2 for error in changes}
        errors = measure_errors(names, reference, after)
        report.rounding_error = [error for error in errors if kinds[error.name] == "f"]
        progress(3)
        if self.options.seconds:
            # In turn, so that whatever else the machine does hits both alike.
            calls = {"before": partial(original.run, None, feeds[0]), "after": partial(optimized.run, None, encoded[0])}
            timings = interleave(calls, seconds=self.options.seconds, min_rounds=3)
            report.latency_before, report.latency_after = timings["before"], timings["after"]
            report.latency_cpus = len(os.sched_getaffinity(0))
            del calls
        del original, optimized
        if context.portable:
            progress(4)
            portable = open_session(context.candidate, quiet_options())
            # One feed is enough to find a wrong weight, and large models are slow without the library.
            alone = [_run(portable, encoded[0], "the optimized model without the library", VerificationError)]
            report.portable_error = measure_errors(names, alone, after[:1])
        self._judge(names, kinds, before, after)
        progress(steps)

    def _judge(
        self, names: Sequence[str], kinds: dict[str, str], before: Sequence[Outputs], after: Sequence[Outputs]
    ) -> None:
        report = self.context.report
        for index, name in enumerate(names):
            for reference, found in zip(before, after, strict=True):
                expected, answer = reference[index], found[index]
                if expected is not None and answer is not None and (np.isfinite(expected) & ~np.isfinite(answer)).any():
                    raise VerificationError(
                        f"output {name!r} of the optimized model holds NaN or infinity where the "
                        "original does not; nothing was saved; try less sparsity"
                    )
        rounding = {error.name: error.relative_l2 for error in report.rounding_error}
        for error in report.portable_error:
            most = max(PORTABLE_ERROR, 2 * rounding.get(error.name, 0.0), PORTABLE_FACTOR * self._rounding_of_layers())
            most = max(most, self._by_masks.get(error.name, 0.0))
            cosine = min(PORTABLE_COSINE, 1 - most * most)
            if not (error.relative_l2 <= most and error.cosine >= cosine):
                raise VerificationError(
                    f"output {error.name!r} differs between the native kernels and the portable operators: relative "
                    f"error {error.relative_l2:.3g}, expected at most {most:.3g}; cosine {error.cosine:.5f}, "
                    f"expected at least {cosine:.5f}; nothing was saved; please report this"
                )
        for error in report.rounding_error:
            limit = self.options.max_rounding_error
            if limit is None:
                limit = ROUNDING_FACTOR * self._rounding_of_layers() + self._by_masks.get(error.name, 0.0)
            if not error.relative_l2 <= limit:
                raise VerificationError(
                    f"output {error.name!r} has relative error {error.relative_l2:.3g} against the model before its "
                    f"layers were replaced, expected at most {limit:.3g} from rounding; nothing was saved; "
                    "exclude layers from replacement, or raise verify.max_rounding_error if your task bears it; if "
                    "nothing in the model explains it, please report this"
                )
        limit = self.options.max_error
        poor = [error for error in report.output_error if kinds[error.name] == "f" and error.relative_l2 > POOR_ERROR]
        if poor and limit is None:
            worst = max(poor, key=lambda error: error.relative_l2)
            self.context.note(
                f"output {worst.name!r} has relative error {worst.relative_l2:.2g} against the original, which is much "
                f"(above {POOR_ERROR:g}): test the model on your task; try less sparsity, exclude layers from pruning "
                "(prune.exclude), or set max_error to refuse such a result"
            )
        for error in report.output_error:
            if limit is not None and not error.relative_l2 <= limit:
                raise VerificationError(
                    f"output {error.name!r} has relative error {error.relative_l2:.3g} against the "
                    f"original, expected at most max_error {limit:g}; nothing was saved; try less "
                    "sparsity, or exclude the layers with the largest error"
                )

    def _rounding_of_layers(self) -> float:
        """What all layers round, added up as in a random walk."""
        return math.sqrt(sum(share * share for share in self.context.rounding.values()))


def keep_reference(model: ir.Model, context: PassContext) -> None:
    """Runs a model that is pruned, quantized or has thresholds, and whose layers are about to be replaced, for a pass
    verify that comes later."""
    changed = any(layer.status in ("pruned", "quantized") for layer in context.layers.values())
    changed = changed or context.masks_inputs
    if not changed or not context.feeds_to_verify or context.reference is not None:
        return
    path = context.candidate.with_name("reference.onnx")
    with masked_inputs(model, context.thresholds, lambda wanted: context.new_name(model, wanted)):
        write_model(model, path, lambda done, total: None)
    context.release()
    feeds = feeds_for(context)[: context.feeds_to_verify]
    session = open_session(path, quiet_options())
    context.reference = [
        _run(session, one, "the model before its layers were replaced", VerificationError) for one in feeds
    ]
    del session
    for file in (path, data_path(path)):
        file.unlink(missing_ok=True)


def measure_errors(names: Sequence[str], reference: Sequence[Outputs], found: Sequence[Outputs]) -> list[OutputError]:
    """How far each output is from the reference, over all feeds together, where both are finite."""
    errors = []
    for index, name in enumerate(names):
        pairs = [
            (expected.astype(np.float64).ravel(), answer.astype(np.float64).ravel())
            for expected, answer in ((one[index], other[index]) for one, other in zip(reference, found, strict=True))
            if expected is not None and answer is not None
        ]
        if not pairs:
            continue
        expected = np.concatenate([pair[0] for pair in pairs])
        answer = np.concatenate([pair[1] for pair in pairs])
        finite = np.isfinite(expected) & np.isfinite(answer)
        if not finite.any():
            continue
        expected, answer = expected[finite], answer[finite]
        difference = answer - expected
        norms = float(np.linalg.norm(expected)), float(np.linalg.norm(answer))
        distance = float(np.linalg.norm(difference))
        same = distance == 0.0
        errors.append(
            OutputError(
                name,
                relative_l2=0.0 if same else distance / norms[0] if norms[0] else float("inf"),
                cosine=1.0 if same else float(expected @ answer) / (norms[0] * norms[1]) if all(norms) else 0.0,
                max_abs=float(np.abs(difference).max(initial=0.0)),
            )
        )
    return errors


def _run(session: Any, feeds: Feeds, who: str, error_type: type[Exception]) -> Outputs:
    try:
        answers = session.run(None, feeds)
    except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
        raise error_type(f"{who} does not run on the feeds: {one_line(error)}; nothing was saved") from error
    return [answer if isinstance(answer, np.ndarray) and answer.dtype.kind in "fiub" else None for answer in answers]


def _without(answers: Outputs, names: Sequence[str], compressed: Collection[str]) -> Outputs:
    """The outputs that can be compared: a compressed cache holds other numbers."""
    return [None if name in compressed else answer for name, answer in zip(names, answers, strict=True)]


def _compare_signatures(original: Any, optimized: Any, compressed: Collection[str]) -> None:
    def signature(values: Any) -> list[tuple[str, str]]:
        return [(value.name, "" if value.name in compressed else value.type) for value in values]

    for kind, before, after in (
        ("inputs", original.get_inputs(), optimized.get_inputs()),
        ("outputs", original.get_outputs(), optimized.get_outputs()),
    ):
        if signature(before) != signature(after):
            raise VerificationError(
                f"{kind} of the optimized model are {signature(after)}, those of the original are "
                f"{signature(before)}; nothing was saved; please report this"
            )


def _compare_shapes(names: Sequence[str], before: Sequence[Outputs], after: Sequence[Outputs]) -> None:
    for reference, found in zip(before, after, strict=True):
        for name, expected, answer in zip(names, reference, found, strict=True):
            if expected is not None and answer is not None and expected.shape != answer.shape:
                raise VerificationError(
                    f"output {name!r} of the optimized model has shape {answer.shape}, that of the "
                    f"original {expected.shape}; nothing was saved; please report this"
                )
