"""Compares a model's answers with those of another: how far they are from each other, and whether they can be compared.

Answers are lists with an array for each output, None for an output that is no array of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ortolan.errors import VerificationError

from ..report.optimization import OutputDeviation
from .feeds import Outputs

ODD_SHARE = 1 / 8  # of the rows: so many may be odd (error_of_most_rows), such as tokens with huge activations
ODD_ERROR = 0.5  # of its norm: so far may an odd row be off


def measure_errors(
    names: Sequence[str], reference: Sequence[Outputs], found: Sequence[Outputs]
) -> list[OutputDeviation]:
    """How far each output is from the reference, over all feeds together, where both are finite."""
    errors = []
    for index, name in enumerate(names):
        # Sums of squares, feed after feed: in float64 all of them at once would take several times their memory.
        exact = new = product = difference = most = 0.0
        count = 0
        for one, other in zip(reference, found, strict=True):
            expected, answer = one[index], other[index]
            if expected is None or answer is None:
                continue
            finite = np.isfinite(expected) & np.isfinite(answer)
            count += int(finite.sum())
            x, y = expected[finite].astype(np.float64), answer[finite].astype(np.float64)
            exact, new, product = exact + float(x @ x), new + float(y @ y), product + float(x @ y)
            y -= x
            difference, most = difference + float(y @ y), max(most, float(np.abs(y).max(initial=0.0)))
        if count:
            relative = math.sqrt(difference / exact) if exact else math.inf
            cosine = product / math.sqrt(exact * new) if exact and new else 0.0
            same = difference == 0.0
            errors.append(OutputDeviation(name, 0.0 if same else relative, 1.0 if same else cosine, max_abs=most))
    return errors


def error_of_most_rows(portable: np.ndarray, native: np.ndarray, exact: np.ndarray, limit: float) -> float:
    """||portable - native|| / ||exact|| without odd rows (along the last axis): up to an ODD_SHARE, those that differ
    most, of which native is within the limit of exact and portable within ODD_ERROR of native.

    Rows that are zero in all three do not count.
    """
    if exact.ndim < 2 or not exact.size:
        return math.inf
    p, x, y = (one.reshape(-1, one.shape[-1]).astype(np.float64) for one in (portable, native, exact))
    same = (p == x) & (x == y)  # of infinities there is no difference
    p, x, y = (np.where(same & ~np.isfinite(y), 0, one) for one in (p, x, y))
    errors, wrong, norms = ((p - x) ** 2).sum(axis=1), ((x - y) ** 2).sum(axis=1), (y**2).sum(axis=1)
    counted = (errors > 0) | (wrong > 0) | (norms > 0)
    errors, wrong, norms = errors[counted], wrong[counted], norms[counted]
    odd = (wrong <= limit**2 * norms) & (errors <= ODD_ERROR**2 * norms)
    most = np.flatnonzero(odd)[np.argsort(-errors[odd])][: int(ODD_SHARE * len(errors))]
    kept = np.delete(np.arange(len(errors)), most)
    total = float(norms[kept].sum())
    return math.sqrt(float(errors[kept].sum()) / total) if total else math.inf


def refuse_infinite(names: Sequence[str], before: Sequence[Outputs], after: Sequence[Outputs]) -> None:
    """Raises VerificationError, naming the output, where before is finite and after is not."""
    for index, name in enumerate(names):
        for reference, found in zip(before, after, strict=True):
            expected, answer = reference[index], found[index]
            if expected is not None and answer is not None and (np.isfinite(expected) & ~np.isfinite(answer)).any():
                raise VerificationError(
                    f"output {name!r} of the optimized model holds NaN or infinity where the "
                    "original does not; nothing was saved; try weights='bf16', or leave out layers (ignore=…)"
                )


def compare_signatures(original: Any, optimized: Any, compressed: Collection[str], added: int) -> None:
    """Raises VerificationError where two sessions differ in names or types of inputs or outputs.

    compressed: inputs and outputs that may have another type. added: so many of each has the optimized model behind
    those of the original.
    """

    def signature(values: Any) -> list[tuple[str, str]]:
        return [(value.name, "" if value.name in compressed else value.type) for value in values]

    for kind, before, after in (
        ("inputs", original.get_inputs(), optimized.get_inputs()),
        ("outputs", original.get_outputs(), optimized.get_outputs()),
    ):
        after = after[: len(after) - added]
        if signature(before) != signature(after):
            raise VerificationError(
                f"{kind} of the optimized model are {signature(after)}, those of the original are "
                f"{signature(before)}; nothing was saved; please report this"
            )


def other_shapes(
    names: Sequence[str], before: Sequence[Outputs], after: Sequence[Outputs]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """By name of an output, the first two answers to the same feeds that differ in shape."""
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for reference, one in zip(before, after, strict=True):
        for name, expected, answer in zip(names, reference, one, strict=True):
            if expected is not None and answer is not None and expected.shape != answer.shape:
                found.setdefault(name, (expected.shape, answer.shape))
    return found


def array_of(answer: np.ndarray | None) -> np.ndarray:
    """The answer of an output that is known to be an array."""
    assert answer is not None
    return answer
