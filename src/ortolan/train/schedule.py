"""How sparsity and learning rate go over the steps of a training."""

from __future__ import annotations

import math

PRUNED_BY = 0.6  # share of the steps after which the mask stays
EVENTS = 12  # times that weights are pruned
_FIRST = 0.5  # of the target, what is pruned at once in the beginning
_WARM_UP = 0.02  # share of the steps


def sparsities(target: float, steps: int) -> dict[int, float]:
    """Step -> the sparsity that weights are pruned to before it: much in the beginning, ever less towards the target.

    Zhu, Gupta: To prune, or not to prune (arXiv:1710.01878), whose cubic schedule this is: what goes first costs least.
    """
    events = min(EVENTS, max(steps, 1))
    found: dict[int, float] = {}
    for event in range(events):
        done = event / (events - 1) if events > 1 else 1.0
        step = round(event * PRUNED_BY * steps / events)
        found[step] = target * (1 - (1 - _FIRST) * (1 - done) ** 3)
    return found


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rises linearly to its peak, then falls along half a cosine to 0."""
    warm_up = max(1, round(_WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * 0.5 * (1 + math.cos(math.pi * done))
