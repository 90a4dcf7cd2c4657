"""How different an optimized model may be where the user has named no form for its layers.

Weights that a model stores in few bits are kept, so its answers should be those of these weights. The model is saved
only if each output agrees with the original or with the original's dequantized weights in float, or is much nearer to
the latter than the original is. Outputs of another shape, such as speech of another length, cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ortolan.errors import VerificationError

from ...report.optimization import OutputDeviation
from ..context import PassContext
from .limits import POOR_ERROR

# Times the original's own error against its weights in float: below that the optimized model is better.
NEARER = 0.7
_ALLOW = "allow_different=True, on the command line --allow-different, saves the model all the same"
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # by output: the original's and the optimized model's


def accept_shapes(
    context: PassContext, shapes: Shapes, found_by: str = "the optimized model", expected_by: str = "the original"
) -> None:
    """Note outputs whose shapes differ, if the user has named a form or allows it.

    Args:
        context: Of this run; it tells what the user allows.
        shapes: By output, the expected shape and the one that was found.
        found_by: The model that was judged, in the words of the note.
        expected_by: The model that it was compared with.

    Raises:
        VerificationError: The user has named no form and does not allow it, or the number of axes differs.
    """
    for name, (expected, found) in shapes.items():
        text = f"output {name!r} of {found_by} has shape {list(found)}, that of {expected_by} {list(expected)}"
        if len(expected) != len(found):
            raise VerificationError(f"{text}; nothing was saved; please report this")
        text += ", so the two cannot be compared: the model computes this length itself, and rounding changes it"
        if not context.may_differ:
            raise VerificationError(
                f"{text}; nothing was saved; listen to or look at the results of both models: {_ALLOW}"
            )
        context.note(f"warning: {text}")


def judge_agreement(context: PassContext, floats: Sequence[OutputDeviation], nearer: Set[str]) -> None:
    """Looks for outputs that agree less than context.min_cosine asks.

    Args:
        floats: Errors against the original, of outputs of floats.
        nearer: Outputs at which the optimized model is nearer than the original to the original's weights in float.

    Raises:
        VerificationError: If one does, unless the user has named a form or allows it; then a note says it.
    """
    if context.min_cosine is None:
        return
    in_float = context.reference is not None and context.reference.in_float
    exact = {error.name: error.cosine for error in context.report.rounding_error} if in_float else {}
    agreement = {error.name: max(error.cosine, exact.get(error.name, -1.0)) for error in floats}
    # NaN agrees with nothing.
    poor = [error for error in floats if not agreement[error.name] >= context.min_cosine and not _is_nearer(error)]
    if not poor:
        return
    worst = min(poor, key=lambda error: agreement[error.name])
    more = f" ({len(poor)} outputs disagree)" if len(poor) > 1 else ""
    text = f"output {worst.name!r} agrees with the original to a cosine of {worst.cosine:.4f} only"
    if worst.from_float is not None:
        original, ours = worst.from_float
        text += (
            f", and with the original's weights in float to {exact[worst.name]:.4f}: the relative error against these "
            f"is {ours:.2g}, that of the original itself {original:.2g}, so rounding changes this output a lot"
        )
    text += f"; expected a cosine of at least {context.min_cosine:g}{more}"
    made_up = context.evidence.made_up
    advice = "made-up inputs may be harder than real ones: give calibration=… with typical inputs" if made_up else ""
    if not context.may_differ:
        raise VerificationError(f"{text}; nothing was saved; {f'{advice}; or ' if advice else ''}{_ALLOW}")
    if worst.name in nearer or worst.relative_l2 <= POOR_ERROR:  # Limits.judge_size notes the others
        context.note(f"warning: {text}; {advice or 'test the model on your task'}")


def _is_nearer(error: OutputDeviation) -> bool:
    """Whether the optimized model is much nearer than the original to the original's weights in float."""
    if error.from_float is None:
        return False
    original, ours = error.from_float
    return ours <= NEARER * original
