"""Limits for the errors of the optimized model against the models it is compared with.

Errors of layers add up as in a random walk: the expected total is the root of the sum of squares. docs/verification.md
explains the factors below and the measurements behind them. The portable form is the model with ONNX functions instead
of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ortolan.errors import VerificationError

from ...report.optimization import OutputDeviation
from ..context import PassContext

# Bound on the error against the model before its layers were replaced, as a multiple of the layers' total rounding
# error.
ROUNDING_FACTOR = 9.0
# Bound on the error of a token decoded from a cache, as a multiple of the total error of the replaced attentions.
DECODE_FACTOR = 2.0
# Largest relative error between outputs of kernels and of the portable form. The two sum in different orders, so a few
# values round differently.
PORTABLE_ERROR = 5e-2
# Bound on the error between kernels and the portable form, as a multiple of the layers' total rounding error: once a
# few values differ, the two round independently.
PORTABLE_FACTOR = 3.0
# The same bound for tokens decoded from a cache, as a multiple of the error of key codes: the kernel's scores are sums
# of 8-bit values.
TABLE_FACTOR = 1.0
# Smallest cosine similarity between an output of kernels and that of the portable form. A larger error bound lowers
# this limit to the cosine that the error implies.
PORTABLE_COSINE = 0.998
# Bound of the error from input thresholds, as a multiple of their cost: two models that drop elements independently are
# sqrt 2 times as far apart.
MASK_FACTOR = 1.5
# Relative error against the original above which the report has a note.
POOR_ERROR = 0.3


@dataclass(frozen=True)
class Limits:
    """Limits of one verification. Errors are relative L2 errors of an output over all feeds."""

    context: PassContext
    max_error: float | None
    max_rounding_error: float | None
    by_masks: Mapping[str, float] = field(
        default_factory=dict
    )  # bound on the error that input thresholds add, by output name

    def rounding(self, name: str, cached: bool) -> float:
        """Return the bound against the model before its layers were replaced. cached: feeds read a compressed cache."""
        if self.max_rounding_error is not None:
            return self.max_rounding_error
        return ROUNDING_FACTOR * self._rounding_of_layers(cached) + self.by_masks.get(name, 0.0)

    def decoded(self, name: str) -> float:
        """Return the bound for tokens decoded from a cache by replaced attention."""
        limit = self.max_rounding_error
        if limit is None:
            limit = self.contents() + DECODE_FACTOR * self._rounding_of_caches()
        return limit + self.by_masks.get(name, 0.0)

    def contents(self) -> float:
        """Return the bound for keys and values in a cache, without the error of their codes."""
        return ROUNDING_FACTOR * self._rounding_of_layers()

    def portable(self, name: str, decoded: float) -> tuple[float, float]:
        """Return the bounds of error and cosine of the portable form. decoded: the error of decoded tokens."""
        rounding = {error.name: error.relative_l2 for error in self.context.report.rounding_error}
        layers = PORTABLE_FACTOR * self._rounding_of_layers()
        # If kernels and the portable form round independently, they differ more from each other than from the
        # reference.
        bound = max(PORTABLE_ERROR, 2 * rounding.get(name, 0.0), layers, TABLE_FACTOR * decoded)
        bound = max(bound, self.by_masks.get(name, 0.0))
        return bound, min(PORTABLE_COSINE, 1 - bound * bound)

    def portable_contents(self) -> float:
        """Return the bound between cached keys and values computed with and without the library."""
        return PORTABLE_FACTOR * self._rounding_of_layers() + TABLE_FACTOR * self._rounding_of_caches()

    def judge_size(
        self,
        floats: Sequence[OutputDeviation],
        where: str,
        advice: str,
        errors: Sequence[OutputDeviation] | None = None,
    ) -> None:
        """Check errors against the original: raise above max_error, or note a large error if there is no max_error.

        where: describes the answers; "" for all feeds. advice: what the user can do. errors: errors of all outputs;
        None: `floats`.

        Raises:
            VerificationError: an error exceeds max_error; the message names the output.
        """
        limit = self.max_error
        where = f" {where}" if where else ""
        poor = [error for error in floats if error.relative_l2 > POOR_ERROR]
        if poor and limit is None:
            worst = max(poor, key=lambda error: error.relative_l2)
            self.context.note(
                f"output {worst.name!r}{where} has relative error {worst.relative_l2:.2g} against the original, above "
                f"{POOR_ERROR:g}: test the model on your task; {advice}, or set max_error to refuse such a result"
            )
        for error in floats if errors is None else errors:
            if limit is not None and not error.relative_l2 <= limit:
                raise VerificationError(
                    f"output {error.name!r}{where} has relative error {error.relative_l2:.3g} against the "
                    f"original, expected at most max_error {limit:g}; nothing was saved; {advice}"
                )

    def _rounding_of_layers(self, cached: bool = False) -> float:
        """Return the total rounding error of all layers, with that of caches if feeds read them."""
        context = self.context
        return _root((context.layers.rounding | (context.caches.rounding if cached else {})).values())

    def _rounding_of_caches(self) -> float:
        return _root(self.context.caches.rounding.values())


def _root(errors: Iterable[float]) -> float:
    return math.sqrt(sum(error * error for error in errors))
