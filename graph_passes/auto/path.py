"""The path of a search: steps from one format of a layer to the next, ordered by time saved per error.

Errors of layers add up in squares, so a step costs the squared error of its format, minus that of the previous format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..report.search import AutoReport, LayerChoice, MeasuredForm, PathPoint
from .candidates import Candidate

_NOISE = 0.02  # smaller time differences, as a fraction of the original's time, count as noise


@dataclass(frozen=True)
class Step:
    """A step of the path: a layer changes to its next format.

    Attributes:
        candidate: The new format.
        saved: The saved fraction of the time of all layers.
        cost: The squared error minus that of the previous format; negative if that was larger.
    """

    layer: str
    candidate: Candidate
    saved: float
    cost: float


def make_path(report: AutoReport, candidates: Sequence[Candidate]) -> list[Step]:
    """Return the path of all layers with known times and errors, and add its points to the report."""
    known = {form.name: form for form in candidates}
    timed = [layer for layer in report.layers if layer.before_ms]
    totals = [sum(column) for column in zip(*(layer.before_ms for layer in timed), strict=True)]
    steps: list[Step] = []
    for layer in timed:
        weight = [old / total for old, total in zip(layer.before_ms, totals, strict=True)]
        forms = {
            name: (
                float(np.dot(weight, _saved(layer, form))) / len(totals),
                (form.error * (1.0 if layer.sensitivity is None else layer.sensitivity)) ** 2,
            )
            for name, form in layer.forms.items()
            if form.error is not None
        }
        if forms:
            layer.reason = "would exceed the budget"
        steps += [Step(layer.name, known[name], gained, cost) for name, gained, cost in convex(forms)]
    # The sort is stable, and the steps of a layer are already in this order.
    steps.sort(key=lambda step: -step.saved / max(step.cost, 1e-12))
    report.path = [
        PathPoint(step.layer, step.candidate.name, *estimate(steps[: number + 1])) for number, step in enumerate(steps)
    ]
    return steps


def estimate(steps: Sequence[Step]) -> tuple[float, float]:
    """Return the estimated time after these steps, as a fraction of that of all layers, and the error."""
    return 1 - sum(step.saved for step in steps), math.sqrt(max(sum(step.cost for step in steps), 0.0))


def worth_measuring(layer: LayerChoice) -> list[str]:
    """Return the formats that are faster than the original at all shapes, and faster than all formats before them."""
    found, best = [], 0.0
    for name, form in layer.forms.items():
        saved = _saved(layer, form)
        mean = sum(saved) / len(saved)
        if min(saved) > 0 and mean > best + _NOISE:
            found.append(name)
            best = mean
    return found


def _saved(layer: LayerChoice, form: MeasuredForm) -> list[float]:
    return [1 - new / old for old, new in zip(layer.before_ms, form.milliseconds, strict=True)]


def convex(forms: Mapping[str, tuple[float, float]]) -> list[tuple[str, float, float]]:
    """Return the formats on the convex hull of saved time and cost, with falling savings per cost.

    forms has saved time and cost of each format against the original; the result has name, saved time and cost against
    the previous format.
    """
    found: list[tuple[str, float, float]] = []
    saved = cost = 0.0
    left = dict(forms)
    while left := {
        name: form for name, form in left.items() if form[0] > saved and name not in {one[0] for one in found}
    }:
        name = max(left, key=lambda name: (left[name][0] - saved) / max(left[name][1] - cost, 1e-12))
        more_saved, more_cost = left[name][0] - saved, max(left[name][1] - cost, 0.0)
        found.append((name, more_saved, more_cost))
        saved, cost = saved + more_saved, cost + more_cost
    return found
