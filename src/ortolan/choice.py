"""From the arguments of a call to the recipe that they choose."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ortolan.graph_passes.auto.bits import BitSettings
from ortolan.graph_passes.auto.budget import Budget, Limit
from ortolan.graph_passes.files.model_file import ModelFile
from ortolan.graph_passes.find.linear import count_stored, why_not_kept
from ortolan.graph_passes.forms import ADOPT, AUTO, CHOICES, PRESETS, Form
from ortolan.graph_passes.options import HEADS
from ortolan.graph_passes.passes.normalize import drop_listed_initializers
from ortolan.graph_passes.recipe import Recipe

from .errors import ModelError, RecipeError

_CACHED_PROMPT = "cached-prompt"


@dataclass(frozen=True)
class Choice:
    """The recipe that the arguments ask for, or how to find one.

    Attributes:
        recipe: None until it is chosen: by the weights that the model stores, or by measurement.
        bits: Measurement chooses 4 or 8 bits for each layer.
        options: Of passes, for a recipe that is chosen later.
        measured: Measurement chooses the recipe.
        note: For the report.
        may_stay: If the recipe finds nothing to replace, the model stays as it is.
        of_other: The recipe was found by measuring another model, and may name layers that this one lacks.
        keeps: No form was asked for, and the few-bit weights that the model stores are kept.
        by_name: The user gave the whole recipe, so each of its passes must run.
    """

    recipe: Recipe | None
    bits: BitSettings | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = False
    note: str = ""
    may_stay: bool = False
    of_other: bool = False
    keeps: bool = False
    by_name: bool = False

    @property
    def is_named(self) -> bool:
        """Whether the user asked for this form or recipe."""
        return self.recipe is not None and not self.keeps and not self.of_other

    def measuring(self, note: str = "") -> Choice:
        """Return the choice with a recipe that measurement finds; note is for the report.

        Raises:
            RecipeError: An option is for another pass than verify; the others are not known yet.
        """
        steps = [{"name": "normalize"}, {"name": "verify"}]
        try:
            Recipe.from_dict({"name": AUTO, "pass": steps}).with_options(self.options)
        except RecipeError as error:
            raise RecipeError(
                f"{error}; others are set in a recipe that is given: recipe, weights, sparsity, …"
            ) from None
        return replace(self, measured=True, note=note)

    def adopting(self, reason: str) -> Choice:
        """Return the choice with the recipe that keeps stored weights. Raises RecipeError for unknown options."""
        note = f"no recipe was given; {reason}, which are kept exactly"
        try:
            recipe = Recipe.from_dict(ADOPT).with_options(self.options)
        except RecipeError as error:
            raise RecipeError(f"{note}: {error}; or give a recipe") from None
        return replace(self, recipe=recipe, note=note, may_stay=True, keeps=True)


def read_choice(
    recipe: str | os.PathLike[str] | Recipe | None,
    form: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    prompt: bool = False,
    budget: Budget | None = None,
) -> Choice:
    """form: the arguments of CHOICES as they were given. prompt: whether one was given. budget: of mixed bits. Raises
    RecipeError."""
    for name in form:
        if name not in CHOICES:
            raise TypeError(f"unexpected argument {name!r}; a form has: {', '.join(CHOICES)}")
    choices = {name: value for name, value in form.items() if value is not None and not _is_default(name, value)}
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise RecipeError(f'options is a {type(options).__name__}, expected a dict such as {{"sparsity": 0.7}}')
    if budget is not None:
        return _mixed_bits(recipe, choices, options, prompt, budget)
    if recipe is not None and not (isinstance(recipe, str) and (recipe == AUTO or recipe in PRESETS)):
        return Choice(_ready_made(recipe, choices, options, prompt), by_name=True)
    if recipe == AUTO:
        if prompt:
            raise RecipeError(f"a prompt was given, which recipe {AUTO!r} does not take; give recipe 'cached-prompt'")
        if choices:
            raise RecipeError(
                f"{next(iter(choices))} was given with recipe {AUTO!r}, which chooses forms by measurement; leave one "
                "of them out, or call ortolan.search, which takes sparsity, budget and shapes"
            )
    if recipe is None and prompt and not choices:
        recipe = _CACHED_PROMPT
    if recipe == AUTO or (recipe is None and not choices):
        return Choice(None, options=options, measured=recipe == AUTO)
    if set(choices) == {"ignore"} and recipe is None:
        raise RecipeError(
            "ignore was given without a form, of which it says what is not part; give weights, sparsity or a preset too"
        )
    if prompt and (recipe is None or PRESETS[str(recipe)].form.cache is None):
        choices.setdefault("cache", "float32")
    chosen = Recipe.of(**choices) if recipe is None else Recipe.load(recipe, **choices)
    return Choice((chosen.with_prompt() if prompt else chosen).with_options(options))


def _mixed_bits(
    recipe: str | os.PathLike[str] | Recipe | None,
    choices: Mapping[str, Any],
    options: Mapping[str, Any],
    prompt: bool,
    budget: Budget,
) -> Choice:
    form = Form(**choices) if recipe is None else PRESETS["int4"].form if recipe == "int4" and not choices else Form()
    if not form.is_dense_int4 or form.cache is not None or prompt:
        raise RecipeError(
            f"budget is {budget!r}, which chooses 4 or 8 bits for each layer; give weights='int4' with it, without "
            "sparsity, pattern, cache or prompt; or call ortolan.search, which chooses among all dense forms"
        )
    return Choice(None, BitSettings(form, Limit.read(budget, sizes=True)), options).measuring()


def _ready_made(
    recipe: str | os.PathLike[str] | Recipe, choices: Mapping[str, Any], options: Mapping[str, Any], prompt: bool
) -> Recipe:
    if isinstance(recipe, Recipe) and choices:
        raise RecipeError(
            f"{next(iter(choices))} was given with a Recipe, which says itself what layers become; leave it out, or "
            f"give it to Recipe.of"
        )
    chosen = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe, **choices)
    if not chosen.passes:
        if options or prompt:
            name = next(iter(options), "a prompt")
            raise RecipeError(f"{name!r} was given, but recipe {chosen.name!r} has no passes; leave it out")
        return chosen
    changed = (chosen.with_prompt() if prompt else chosen).with_options(options)
    return replace(changed, search=chosen.search)


def _is_default(name: str, value: Any) -> bool:
    return name == "ignore" and value in (HEADS, (HEADS,), [HEADS])


def default_recipe(source: ModelFile, choice: Choice) -> Choice:
    """Return the choice with a recipe, or with the decision to measure. Raises RecipeError."""
    if choice.recipe is not None or choice.bits is not None:
        return choice
    if choice.measured:
        return choice.measuring()
    stored, reasons = _count_stored(source)
    if not stored:
        return choice.measuring(_describe_lost(reasons))
    layers = f"{stored} layers store" if stored > 1 else "1 layer stores"
    return choice.adopting(f"{layers} few-bit weights")


def _describe_lost(reasons: Mapping[str, str]) -> str:
    """Return a note on few-bit weights that cannot be kept. reasons: by layer name."""
    if not reasons:
        return ""
    layers = f"{len(reasons)} layers store" if len(reasons) > 1 else "1 layer stores"
    name, reason = next(iter(reasons.items()))
    return f"{layers} few-bit weights that cannot be kept, such as {name!r}: {reason}"


def _count_stored(source: ModelFile) -> tuple[int, dict[str, str]]:
    """Count the layers whose stored few-bit weights can be kept; if there are none, return the reasons by layer."""
    try:
        drop_listed_initializers(source.model)
        stored = count_stored(source.model)
        return stored, {} if stored else why_not_kept(source.model)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # What a malformed model trips over. No recipe may be chosen for a model that could not be read.
        raise ModelError(f"{source.name} is not a well-formed ONNX model: {error!r}") from error
