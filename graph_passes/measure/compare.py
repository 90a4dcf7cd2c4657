"""Comparison of a model's answers with those of another model.

Answers are lists with one array per output, or None for an output that is not a numeric array.
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

ODD_FRACTION = 1 / 8  # largest fraction of rows left out by error_of_most_rows, such as tokens with huge activations
ODD_ERROR = 0.5  # largest error of a row that is left out, relative to the row's norm
_BLOCK = 2**20  # number of values that are compared at once


class ErrorSums:
    """Errors of each output relative to a reference model's output, over all elements that are finite in both.

    Answers are read in blocks, because float64 copies would take several times their memory.
    """

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
        """Discard the sums of these outputs."""
        for index in indices:
            self._sums[index] = _Sums()

    def errors(self) -> list[OutputDeviation]:
        """Return the errors by output, without outputs that have no finite values."""
        return [sums.error(name) for name, sums in zip(self._names, self._sums, strict=True) if sums.count]

    def first_infinite(self) -> str | None:
        """Return the name of the first output that is finite in the reference only, or None."""
        return next((name for name, sums in zip(self._names, self._sums, strict=True) if sums.infinite), None)


@dataclass
class _Sums:
    """Sums of squares and products for one output, from which its errors follow."""

    exact: float = 0.0
    new: float = 0.0
    product: float = 0.0
    difference: float = 0.0
    largest: float = 0.0
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
        self.difference += float(y @ y)
        self.largest = max(self.largest, float(np.abs(y).max(initial=0.0)))

    def error(self, name: str) -> OutputDeviation:
        relative = math.sqrt(self.difference / self.exact) if self.exact else math.inf
        cosine = self.product / math.sqrt(self.exact * self.new) if self.exact and self.new else 0.0
        same = self.difference == 0.0
        return OutputDeviation(name, 0.0 if same else relative, 1.0 if same else cosine, max_abs=self.largest)


def measure_errors(
    names: Sequence[str], reference: Sequence[Outputs], found: Sequence[Outputs]
) -> list[OutputDeviation]:
    """Return the errors of each output relative to a reference model's, over all elements that are finite in both."""
    sums = ErrorSums(names)
    for one, other in zip(reference, found, strict=True):
        sums.add(one, other)
    return sums.errors()


def error_of_most_rows(portable: np.ndarray, native: np.ndarray, exact: np.ndarray, limit: float) -> float:
    """Return ||portable - native|| / ||exact|| over rows (along the last axis), without odd rows.

    A row may be odd if native differs from exact by at most `limit`, and portable from native by at most ODD_ERROR
    (relative errors). Of these rows, those with the largest difference between portable and native are left out, up to
    ODD_FRACTION of all rows. Rows that are zero in all three arrays do not count.
    """
    if exact.ndim < 2 or not exact.size:
        return math.inf
    p, x, y = (one.reshape(-1, one.shape[-1]).astype(np.float64) for one in (portable, native, exact))
    same = (p == x) & (x == y)  # equal infinities count as no difference
    p, x, y = (np.where(same & ~np.isfinite(y), 0, one) for one in (p, x, y))
    errors, wrong, norms = ((p - x) ** 2).sum(axis=1), ((x - y) ** 2).sum(axis=1), (y**2).sum(axis=1)
    counted = (errors > 0) | (wrong > 0) | (norms > 0)
    errors, wrong, norms = errors[counted], wrong[counted], norms[counted]
    odd = (wrong <= limit**2 * norms) & (errors <= ODD_ERROR**2 * norms)
    most = np.flatnonzero(odd)[np.argsort(-errors[odd])][: int(ODD_FRACTION * len(errors))]
    kept = np.delete(np.arange(len(errors)), most)
    total = float(norms[kept].sum())
    return math.sqrt(float(errors[kept].sum()) / total) if total else math.inf


def refuse_infinite(name: str | None) -> None:
    """Raise VerificationError if `name`, the result of `ErrorSums.first_infinite`, is not None."""
    if name is not None:
        raise VerificationError(
            f"output {name!r} of the optimized model holds NaN or infinity where the original does not; nothing was "
            "saved; try weights='bf16', or leave out layers (ignore=…)"
        )


def compare_signatures(original: Any, optimized: Any, compressed: Collection[str], added: int) -> None:
    """Check that two sessions have the same names and types of inputs and outputs.

    Args:
        original: A session.
        optimized: A session.
        compressed: Names of inputs and outputs whose type may differ.
        added: Number of extra inputs at the end of the optimized model, and of extra outputs.

    Raises:
        VerificationError: They differ.
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
    """Return (shape before, shape after) by output name, for outputs whose answers to one feed differ in shape."""
    return {
        name: (expected.shape, answer.shape)
        for name, expected, answer in zip(names, before, after, strict=True)
        if expected is not None and answer is not None and expected.shape != answer.shape
    }


def array_of(answer: np.ndarray | None) -> np.ndarray:
    """Return the answer of an output that is known to be an array."""
    assert answer is not None
    return answer
