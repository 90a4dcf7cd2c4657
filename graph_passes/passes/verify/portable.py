"""Verifies that standard ONNX, without our kernels, gives the answers of the optimized model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ortolan.errors import VerificationError

from ...measure.compare import array_of, error_of_most_rows, measure_errors, other_shapes
from ...measure.decoding import check_same_contents, without, without_padding
from ...measure.feeds import Feeds, Outputs
from ...measure.sessions import open_quietly, run_session
from ...report.optimization import OutputDeviation
from ..context import PassContext
from .difference import accept_shapes
from .limits import Limits


def verify_portable(
    context: PassContext,
    limits: Limits,
    names: Sequence[str],
    calls: Sequence[tuple[Feeds, Outputs]],
    decoded: Mapping[str, float],
    exact: Outputs | None,
) -> None:
    """calls: feeds, and what the optimized model has answered; few are enough to find a wrong weight. decoded: by
    output, the error that codes make. exact: answers to the only call before layers were replaced, if known.

    Raises VerificationError, naming the output or cache that differs.
    """
    portable = open_quietly(context.candidate, fold=False)
    found: dict[str, OutputDeviation] = {}
    rows: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    hidden = [names.index(name) for name in context.caches.outputs]
    for feeds, answers in calls:
        alone = run_session(portable, feeds, "the optimized model without the library", VerificationError)
        pair = [without(one[: len(names)], hidden) for one in (alone, answers)]
        if context.caches.rounding:
            pair = [without_padding(feeds, one) for one in pair]
        if shapes := other_shapes(names, *reversed(pair)):
            accept_shapes(context, shapes, "the optimized model without the library", "the same model with it")
            places = {names.index(name) for name in shapes}
            pair = [without(one, places) for one in pair]
        for error in measure_errors(names, *([one] for one in pair)):
            if error.name not in found or error.relative_l2 > found[error.name].relative_l2:
                found[error.name] = error
            place = names.index(error.name)
            if exact is not None and (before := exact[place]) is not None:
                rows[error.name] = (array_of(pair[0][place]), array_of(pair[1][place]), before)
        _compare_caches(context, limits, names, answers, alone)
    context.report.portable_error = list(found.values())
    for error in found.values():
        most, cosine = limits.portable(error.name, decoded.get(error.name, 0.0))
        close = error.relative_l2 <= most and error.cosine >= cosine
        # A token whose activations are huge makes a large difference of the last bit of a sum.
        if not close and not (error.name in rows and error_of_most_rows(*rows[error.name], most) <= most):
            raise VerificationError(
                f"output {error.name!r} differs between the native kernels and the portable operators: relative "
                f"error {error.relative_l2:.3g}, expected at most {most:.3g}; cosine {error.cosine:.5f}, "
                f"expected at least {cosine:.5f}; nothing was saved; please report this"
            )


def _compare_caches(
    context: PassContext, limits: Limits, names: Sequence[str], answers: Outputs, alone: Outputs
) -> None:
    """What the two have written, as far as answers hold caches."""
    hidden = [names.index(name) for name in context.caches.outputs]
    kernel, function = (
        {names[place]: array_of(one[place]) for place in hidden if one[place] is not None} for one in (answers, alone)
    )
    uses = [use for use in context.caches.uses.values() if use.present in kernel]
    check_same_contents(uses, kernel, function, limits.portable_contents())
