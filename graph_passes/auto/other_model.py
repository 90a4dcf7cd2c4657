"""Adapt a recipe found for one model to another one with the same layer names, such as another part of a decoder."""

from __future__ import annotations

from dataclasses import replace

from ..measure.evidence import Evidence
from ..options import Globs
from ..passes.plan.prune import PruneOptions
from ..passes.plan.quantize import QuantizeOptions
from ..passes.plan.replace import ReplaceOptions
from ..recipe import Recipe, RecipeStep
from ..run import plan, transform
from .candidates import NAME
from .trials import new_context

_OF_LAYERS = (PruneOptions, QuantizeOptions, ReplaceOptions)
_REPLACING = ("replace", "fuse_attention")


def for_other_model(recipe: Recipe, evidence: Evidence) -> Recipe:
    """Return the recipe without patterns that match no layer of this model, and without passes left without patterns.

    If no pass replaces a layer, the result has no passes. Layers that only this model has stay unchanged.
    """
    with new_context(evidence, "model.onnx", portable=False) as context:
        transform(plan(Recipe.from_dict({"name": NAME, "pass": [{"name": "normalize"}]}), context), context)
        linears = context.survey(context.source.model)
        steps: list[RecipeStep] = []
        for step in recipe.passes:
            options = step.options
            if isinstance(options, _OF_LAYERS):
                select: Globs = tuple(glob for glob in options.select if any(one.matches((glob,)) for one in linears))
                if not select:
                    continue
                step = replace(step, options=replace(options, select=select))
            steps.append(step)
    replaces = any(step.name in _REPLACING for step in steps)
    return replace(recipe, passes=tuple(steps) if replaces else ())
