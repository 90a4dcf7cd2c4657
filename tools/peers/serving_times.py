"""Speeds and latencies of a run that served requests, from the times of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ONE_BY_ONE, MIXED = "one by one", "mixed"  # values of `order` in tools/workers/serving.py
_LEAST_STEPS = 8  # tokens of each sequence that a speed of decoding needs


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        prompts: Tokens of each prompt.
        coming: The second at which each request came.
        times: The seconds of each request's tokens.
        order: How the engine ordered prompts and steps (tools/workers/serving.py).
        peak_megabytes: The process's peak memory during the run, None if unknown.
    """

    prompts: Sequence[int]
    coming: Sequence[float]
    times: Sequence[Sequence[float]]
    order: str
    peak_megabytes: float | None = None

    @classmethod
    def of(cls, work: Mapping[str, Any], reply: Mapping[str, Any]) -> Run:
        """Return the run of a work, from the worker's reply."""
        prompts = [len(prompt) for prompt in work["prompts"]]
        coming = work.get("arrivals") or [0.0] * len(prompts)
        return cls(prompts, coming, reply["times"], reply["order"], reply["peak_megabytes"])

    @property
    def seconds(self) -> float:
        """The time until the last token."""
        return max(times[-1] for times in self.times)

    @property
    def tokens(self) -> int:
        """The tokens of all answers."""
        return sum(map(len, self.times))

    def whole_speed(self) -> float:
        """Return the tokens of answers per second of the whole run, prompts included."""
        return self.tokens / self.seconds

    def prompt_speed(self) -> float:
        """Return the tokens of prompts per second until first tokens.

        An engine that mixes prompts with steps is only judged correctly by a run with answers of one token.
        """
        if self.order == ONE_BY_ONE:
            ends = [0.0, *(times[-1] for times in self.times)]
            spent = sum(
                times[0] - max(end, come) for times, end, come in zip(self.times, ends, self.coming, strict=False)
            )
        else:
            spent = max(times[0] for times in self.times)
        return sum(self.prompts) / spent

    def decode_speed(self) -> float | None:
        """Return the tokens per second while no prompt is computed and no answer is complete.

        None if sequences get too few tokens in this time.
        """
        if self.order == ONE_BY_ONE:
            spent = sum(times[-1] - times[0] for times in self.times)
            return (self.tokens - len(self.times)) / spent if spent else None
        begin, end = max(times[0] for times in self.times), min(times[-1] for times in self.times)
        found = [sum(begin < time <= end for time in times) for times in self.times]
        return sum(found) / (end - begin) if min(found) >= _LEAST_STEPS else None

    def to_first_token(self) -> list[float]:
        """Return the seconds from each request's arrival to its first token."""
        return [times[0] - come for times, come in zip(self.times, self.coming, strict=True)]

    def between_tokens(self) -> list[float]:
        """Return the seconds between successive tokens of a request, for all requests."""
        return [float(gap) for times in self.times for gap in np.diff(times)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that is not below `percent` of the values."""
    return float(np.percentile(values, percent, method="inverted_cdf"))
