"""Verify that the optimized model gives the same answers with standard ONNX operators instead of our kernels."""

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
    """Run the model without the library and compare.

    calls: feeds and the optimized model's answers; one call suffices to find a wrong weight. decoded: the error of
    cache codes, by output. exact: answers to the only call before layers were replaced, if known.

    Raises:
        VerificationError: an output or cache differs; the message names it.
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
            positions = {names.index(name) for name in shapes}
            pair = [without(one, positions) for one in pair]
        for error in measure_errors(names, *([one] for one in pair)):
            if error.name not in found or error.relative_l2 > found[error.name].relative_l2:
                found[error.name] = error
            position = names.index(error.name)
            if exact is not None and (before := exact[position]) is not None:
                rows[error.name] = (array_of(pair[0][position]), array_of(pair[1][position]), before)
        _compare_caches(context, limits, names, answers, alone)
    context.report.portable_error = list(found.values())
    for error in found.values():
        limit, cosine = limits.portable(error.name, decoded.get(error.name, 0.0))
        close = error.relative_l2 <= limit and error.cosine >= cosine
        # For a token with huge activations, the last bit of a sum is a large difference.
        if not close and not (error.name in rows and error_of_most_rows(*rows[error.name], limit) <= limit):
            raise VerificationError(
                f"output {error.name!r} differs between the native kernels and the portable operators: relative "
                f"error {error.relative_l2:.3g}, expected at most {limit:.3g}; cosine {error.cosine:.5f}, "
                f"expected at least {cosine:.5f}; nothing was saved; please report this"
            )


def _compare_caches(
    context: PassContext, limits: Limits, names: Sequence[str], answers: Outputs, alone: Outputs
) -> None:
    hidden = [names.index(name) for name in context.caches.outputs]
    kernel, function = (
        {names[position]: array_of(one[position]) for position in hidden if one[position] is not None}
        for one in (answers, alone)
    )
    uses = [use for use in context.caches.uses.values() if use.present in kernel]
    check_same_contents(uses, kernel, function, limits.portable_contents())
