"""How far answers of the optimized model may be from those of the models that it is compared with.

From layer to layer errors add up as in a random walk: a sum of them is the root of the sum of their squares. How the
limits were found, and what was measured for them: docs/verification.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ortolan.errors import VerificationError

from ...report.optimization import OutputDeviation
from ..context import PassContext

# Against the model before its layers were replaced: times the sum of what these round.
ROUNDING_FACTOR = 9.0
# The same of a token decoded from a cache by attention that was replaced: times the sum of what its attentions lose.
DECODE_FACTOR = 2.0
# Kernels against the portable form: they add up in another order, so a few numbers are rounded up here and down there.
PORTABLE_ERROR = 5e-2
# The same, times the sum of what layers round: behind a few numbers that differ, the two round independently.
PORTABLE_FACTOR = 3.0
# The same of a decoded token, times what codes of keys lose: the kernel's scores are sums of 8-bit numbers.
TABLE_SHARE = 1.0
# The same, of the cosine: it may be less only as far as the limit of the error implies.
PORTABLE_COSINE = 0.998
# Times what thresholds of inputs cost: two models that drop numbers independently are sqrt 2 times as far apart.
MASK_FACTOR = 1.5
# Against the original: more is no failure, but a note says so.
POOR_ERROR = 0.3


@dataclass(frozen=True)
class Limits:
    """Of one verification. Errors are relative L2 errors of an output over all feeds."""

    context: PassContext
    max_error: float | None
    max_rounding_error: float | None
    by_masks: Mapping[str, float] = field(default_factory=dict)  # by output, what thresholds add

    def rounding(self, name: str, cached: bool) -> float:
        """Against the model before its layers were replaced. cached: some of the feeds read a compressed cache."""
        if self.max_rounding_error is not None:
            return self.max_rounding_error
        return ROUNDING_FACTOR * self._rounding_of_layers(cached) + self.by_masks.get(name, 0.0)

    def decoded(self, name: str) -> float:
        """The same, of tokens decoded from a cache by attention that was replaced."""
        limit = self.max_rounding_error
        if limit is None:
            limit = self.contents() + DECODE_FACTOR * self._rounding_of_caches()
        return limit + self.by_masks.get(name, 0.0)

    def contents(self) -> float:
        """What layers may change in keys and values, besides what their codes lose."""
        return ROUNDING_FACTOR * self._rounding_of_layers()

    def portable(self, name: str, decoded: float) -> tuple[float, float]:
        """Without the library: the largest error, and the smallest cosine. decoded: the error of decoded tokens."""
        rounding = {error.name: error.relative_l2 for error in self.context.report.rounding_error}
        layers = PORTABLE_FACTOR * self._rounding_of_layers()
        # Where the two round independently, they are apart by more than either is from the model before.
        most = max(PORTABLE_ERROR, 2 * rounding.get(name, 0.0), layers, TABLE_SHARE * decoded)
        most = max(most, self.by_masks.get(name, 0.0))
        return most, min(PORTABLE_COSINE, 1 - most * most)

    def portable_contents(self) -> float:
        """How far keys and values may be from each other without the library, from which caches are written."""
        return PORTABLE_FACTOR * self._rounding_of_layers() + TABLE_SHARE * self._rounding_of_caches()

    def judge_size(
        self,
        floats: Sequence[OutputDeviation],
        where: str,
        advice: str,
        errors: Sequence[OutputDeviation] | None = None,
    ) -> None:
        """Against the original. where: "", or of which answers. errors: of all outputs, where some are no floats.

        Raises VerificationError, naming the output, past max_error; without one, notes what is much.
        """
        limit = self.max_error
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
                    f"original, expected at most max_error {limit:g}; nothing was saved; {advice}"
                )

    def _rounding_of_layers(self, cached: bool = False) -> float:
        """What all layers round, added up as in a random walk. cached: with caches read."""
        context = self.context
        return _root((context.layers.rounding | (context.caches.rounding if cached else {})).values())

    def _rounding_of_caches(self) -> float:
        return _root(self.context.caches.rounding.values())


def _root(shares: Iterable[float]) -> float:
    return math.sqrt(sum(share * share for share in shares))
