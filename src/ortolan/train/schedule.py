"""Schedules of sparsity and learning rate."""

from __future__ import annotations

import math

PRUNED_BY = 0.6  # fraction of the steps after which masks stay unchanged
EVENTS = 12  # number of times that weights are pruned
_FIRST = 0.5  # sparsity after the first pruning, as a fraction of the target
_WARM_UP = 0.02  # fraction of the steps in which the learning rate rises


def sparsities(target: float, steps: int) -> dict[int, float]:
    """Return a cubic schedule up to the target: maps steps to the sparsity to which weights are pruned before the step.

    Reference: Zhu and Gupta, To prune, or not to prune (arXiv:1710.01878). The weights pruned first matter least, so
        the schedule prunes fast at first.
    """
    events = min(EVENTS, max(steps, 1))
    found: dict[int, float] = {}
    for event in range(events):
        done = event / (events - 1) if events > 1 else 1.0
        step = round(event * PRUNED_BY * steps / events)
        found[step] = target * (1 - (1 - _FIRST) * (1 - done) ** 3)
    return found


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step: it rises linearly to its peak, then falls to 0 along half a cosine."""
    warm_up = max(1, round(_WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * 0.5 * (1 + math.cos(math.pi * done))
