"""Compares a model's answers with those of another: how far they are from each other, and whether they can be compared.

Answers are lists with an array for each output, None for an output that is no array of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortolan.errors import VerificationError

from ..report.optimization import OutputDeviation
from .feeds import Outputs

ODD_SHARE = 1 / 8  # of the rows: so many may be odd (error_of_most_rows), such as tokens with huge activations
ODD_ERROR = 0.5  # of its norm: so far may an odd row be off
_BLOCK = 2**20  # values that are compared at a time


class ErrorSums:
    """How far each output is from a reference, over all feeds together, where both are finite. Feeds are added one by
    one, and answers are read in blocks: float64 copies of them would take several times their memory."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._sums = [_Sums() for _ in names]

    def add(self, reference: Outputs, found: Outputs) -> None:
        """Add the answers to one feed."""
        for index, sums in enumerate(self._sums):
            expected, answer = reference[index], found[index]
            if expected is not None and answer is not None:
                sums.add(expected, answer)

    def leave_out(self, indices: Collection[int]) -> None:
        """Forget what was added of these outputs."""
        for index in indices:
            self._sums[index] = _Sums()

    def errors(self) -> list[OutputDeviation]:
        """Errors by output. An output without finite values is left out."""
        return [sums.error(name) for name, sums in zip(self._names, self._sums, strict=True) if sums.count]

    def first_infinite(self) -> str | None:
        """The first output that is finite in the reference and not in what was found, if any."""
        return next((name for name, sums in zip(self._names, self._sums, strict=True) if sums.infinite), None)


@dataclass
class _Sums:
    """Sums of squares of one output."""

    exact: float = 0.0
    new: float = 0.0
    product: float = 0.0
    difference: float = 0.0
    most: float = 0.0
    count: int = 0
    infinite: bool = False

    def add(self, expected: np.ndarray, answer: np.ndarray) -> None:
        flat, other = expected.reshape(-1), answer.reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            self._add_block(flat[start : start + _BLOCK], other[start : start + _BLOCK])

    def _add_block(self, expected: np.ndarray, answer: np.ndarray) -> None:
        known = np.isfinite(expected)
        finite = known & np.isfinite(answer)
        self.infinite = self.infinite or not np.array_equal(known, finite)
        self.count += int(finite.sum())
        x, y = expected[finite].astype(np.float64), answer[finite].astype(np.float64)
        self.exact, self.new = self.exact + float(x @ x), self.new + float(y @ y)
        self.product += float(x @ y)
        y -= x
        self.difference, self.most = self.difference + float(y @ y), max(self.most, float(np.abs(y).max(initial=0.0)))

    def error(self, name: str) -> OutputDeviation:
        relative = math.sqrt(self.difference / self.exact) if self.exact else math.inf
        cosine = self.product / math.sqrt(self.exact * self.new) if self.exact and self.new else 0.0
        same = self.difference == 0.0
        return OutputDeviation(name, 0.0 if same else relative, 1.0 if same else cosine, max_abs=self.most)


def measure_errors(
    names: Sequence[str], reference: Sequence[Outputs], found: Sequence[Outputs]
) -> list[OutputDeviation]:
    """How far each output is from the reference, over all feeds together, where both are finite."""
    sums = ErrorSums(names)
    for one, other in zip(reference, found, strict=True):
        sums.add(one, other)
    return sums.errors()


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


def refuse_infinite(name: str | None) -> None:
    """Raises VerificationError for an output that is finite in the original only. name: ErrorSums.first_infinite."""
    if name is not None:
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
    names: Sequence[str], before: Outputs, after: Outputs
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shapes of outputs whose answers to one feed differ in shape, by name: before's and after's."""
    return {
        name: (expected.shape, answer.shape)
        for name, expected, answer in zip(names, before, after, strict=True)
        if expected is not None and answer is not None and expected.shape != answer.shape
    }


def array_of(answer: np.ndarray | None) -> np.ndarray:
    """The answer of an output that is known to be an array."""
    assert answer is not None
    return answer
