"""A recipe that was found for one model, for another with layers of the same names: the next decoder of a folder."""

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
    """The recipe without the patterns that match no layer of this model, and without passes that have none left; where
    nothing is left to replace, without any. Layers that the first model has not are of no pattern: they stay."""
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
