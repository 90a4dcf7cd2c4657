"""The path of a search: the steps from one form of a layer to the next, those that save the most for their error first.

Errors of layers add up in squares, so a step costs the square of its layer's error, less that of the form before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..report.search import AutoReport, LayerChoice, MeasuredForm, PathPoint
from .candidates import Candidate

_NOISE = 0.02  # of a layer's time: forms that differ by less are as fast as each other


@dataclass(frozen=True)
class Step:
    """A step of the path: the layer takes this form instead of the one before."""

    layer: str
    candidate: Candidate
    saved: float  # share of the time of all layers
    cost: float  # square of its error, less that of the form before; below 0 where the form before has more


def make_path(report: AutoReport, candidates: Sequence[Candidate]) -> list[Step]:
    """Of the layers whose times and errors are known. The report gets the points of the path."""
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
            layer.reason = "a step too far for the budget"
        steps += [Step(layer.name, known[name], gained, cost) for name, gained, cost in convex(forms)]
    # Sorted is stable, and the steps of a layer lie in this order.
    steps.sort(key=lambda step: -step.saved / max(step.cost, 1e-12))
    report.path = [
        PathPoint(step.layer, step.candidate.name, *estimate(steps[: number + 1])) for number, step in enumerate(steps)
    ]
    return steps


def estimate(steps: Sequence[Step]) -> tuple[float, float]:
    """What models of these steps take, as a share of the time of all layers, and the error."""
    return 1 - sum(step.saved for step in steps), math.sqrt(max(sum(step.cost for step in steps), 0.0))


def worth_measuring(layer: LayerChoice) -> list[str]:
    """The forms that are faster than the original at all shapes, and than all forms before them."""
    found, best = [], 0.0
    for name, form in layer.forms.items():
        saved = _saved(layer, form)
        mean = sum(saved) / len(saved)
        if min(saved) > 0 and mean > best + _NOISE:
            found.append(name)
            best = mean
    return found


def _saved(layer: LayerChoice, form: MeasuredForm) -> list[float]:
    """By shape, the share of the original's time."""
    return [1 - new / old for old, new in zip(layer.before_ms, form.milliseconds, strict=True)]


def convex(forms: Mapping[str, tuple[float, float]]) -> list[tuple[str, float, float]]:
    """(name, time saved, cost), each compared with the one before, of the forms that saved and cost more and more, at
    less and less saved for the cost. forms: name -> (time saved, cost) against the original."""
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
