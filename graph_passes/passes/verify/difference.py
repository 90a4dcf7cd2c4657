"""Limit how much an optimized model may differ if the user has not named a target format.

Then weights that the model stores as integers are kept, so its answers should be those of these weights. The model is
saved only if each output has a cosine similarity of at least context.min_cosine to the original's output, or to that of
the original with dequantized weights (the float reference), or if the optimized model is much closer to the float
reference than the original is. Outputs whose shapes differ, such as speech of another length, cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ortolan.errors import VerificationError

from ...report.optimization import OutputDeviation
from ..context import PassContext
from .limits import POOR_ERROR

# Fraction of the original's own error against its weights in float; an output with a smaller error counts as closer.
CLOSER = 0.7
_ALLOW = "allow_different=True (command line: --allow-different) saves the model anyway"
# shapes of the original and the optimized model, by output
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def accept_shapes(
    context: PassContext, shapes: Shapes, found_by: str = "the optimized model", expected_by: str = "the original"
) -> None:
    """Note outputs whose shapes differ, if the user has named a target format or allows a difference.

    shapes: expected and found shape, by output. found_by, expected_by: names of the two models.

    Raises:
        VerificationError: the user has not named a format and does not allow a difference, or the ranks differ.
    """
    for name, (expected, found) in shapes.items():
        text = f"output {name!r} of {found_by} has shape {list(found)}, expected {list(expected)} as in {expected_by}"
        if len(expected) != len(found):
            raise VerificationError(f"{text}; nothing was saved; please report this")
        text += ", so it cannot be compared: the model computes this length, and rounding changes it"
        if not context.may_differ:
            raise VerificationError(f"{text}; nothing was saved; check the results of both models yourself: {_ALLOW}")
        context.note(f"warning: {text}")


def judge_agreement(context: PassContext, floats: Sequence[OutputDeviation], closer: Set[str]) -> None:
    """Check that each float output has a cosine similarity of at least context.min_cosine to the original's.

    closer: outputs at which the optimized model is closer than the original to the original's weights in float.

    Raises:
        VerificationError: a cosine is smaller. If the user has named a format or allows it, a note is added instead.
    """
    if context.min_cosine is None:
        return
    in_float = context.reference is not None and context.reference.in_float
    exact = {error.name: error.cosine for error in context.report.rounding_error} if in_float else {}
    agreement = {error.name: max(error.cosine, exact.get(error.name, -1.0)) for error in floats}
    # NaN never agrees.
    poor = [error for error in floats if not agreement[error.name] >= context.min_cosine and not _is_closer(error)]
    if not poor:
        return
    worst = min(poor, key=lambda error: agreement[error.name])
    more = f" ({len(poor)} outputs disagree)" if len(poor) > 1 else ""
    text = f"output {worst.name!r} has cosine {worst.cosine:.4f} with the original"
    if worst.from_float is not None:
        original, ours = worst.from_float
        text += (
            f" and {exact[worst.name]:.4f} with the original's weights in float; relative error against the latter: "
            f"optimized model {ours:.2g}, original {original:.2g}, so rounding changes this output a lot"
        )
    text += f"; expected at least {context.min_cosine:g}{more}"
    made_up = context.evidence.made_up
    advice = "synthetic inputs may be harder than real ones: give calibration=… with typical inputs" if made_up else ""
    if not context.may_differ:
        raise VerificationError(f"{text}; nothing was saved; {f'{advice}; or ' if advice else ''}{_ALLOW}")
    if worst.name in closer or worst.relative_l2 <= POOR_ERROR:  # Limits.judge_size notes the other outputs
        context.note(f"warning: {text}; {advice or 'test the model on your task'}")


def _is_closer(error: OutputDeviation) -> bool:
    """Return True if the optimized model is much closer than the original to the original's weights in float."""
    if error.from_float is None:
        return False
    original, ours = error.from_float
    return ours <= CLOSER * original
