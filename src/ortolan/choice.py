"""Chooses the recipe from the options of a call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ortolan.graph_passes.auto.bits import BitSettings
from ortolan.graph_passes.auto.budget import Limit, read_limit
from ortolan.graph_passes.files.model_file import ModelFile
from ortolan.graph_passes.find.experts import count_stored_experts
from ortolan.graph_passes.find.linear import count_stored, why_not_kept
from ortolan.graph_passes.forms import ADOPT, PRESETS, Form
from ortolan.graph_passes.names import AUTO
from ortolan.graph_passes.passes.normalize import drop_listed_initializers
from ortolan.graph_passes.recipe import Recipe

from .errors import ModelError, RecipeError
from .optimize_options import OptimizeOptions

_CACHED_PROMPT = "cached-prompt"


@dataclass(frozen=True)
class Choice:
    """The recipe that the arguments name, or how to find a recipe.

    Attributes:
        recipe: The recipe. None: it is chosen later, by measurement or because the model stores quantized weights.
        bits: Settings of a search that chooses the bits of each layer.
        options: Options of passes, for a recipe that is not chosen yet.
        measured: The recipe is to be chosen by measurement.
        note: A note for the report.
        may_stay: If the recipe finds no layer to replace, the model is written unchanged, without an error.
        of_other: The recipe was measured on another model, so it may name layers that this model lacks.
        keeps: No target format was given, so quantized weights that the model stores are kept.
        by_name: The user gave the whole recipe, so each of its passes must run.
        reproducible: As for `Recipe.reproducing`; a given recipe has it already.
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
    reproducible: str | None = None

    @property
    def is_named(self) -> bool:
        """Return True if the user gave this target format or recipe."""
        return self.recipe is not None and not self.keeps and not self.of_other

    def measuring(self, note: str = "") -> Choice:
        """Return the choice, changed so that measurement finds the recipe. note: a note for the report.

        Raises:
            RecipeError: An option is not one of pass verify, the only pass that is known before the measurement.
        """
        steps = [{"name": "normalize"}, {"name": "verify"}]
        try:
            Recipe.from_dict({"name": AUTO, "pass": steps}).with_options(self.options)
        except RecipeError as error:
            raise RecipeError(
                f"{error}; to set options of other passes, also give a recipe, weights or sparsity"
            ) from None
        return replace(self, measured=True, note=note)

    def adopting(self, reason: str) -> Choice:
        """Return the choice with the recipe that keeps stored weights. Raises RecipeError for unknown options."""
        note = f"no recipe was given: {reason}, which are kept exactly"
        try:
            recipe = Recipe.from_dict(ADOPT).reproducing(self.reproducible).with_options(self.options)
        except RecipeError as error:
            raise RecipeError(f"{note}: {error}; or give a recipe") from None
        return replace(self, recipe=recipe, note=note, may_stay=True, keeps=True)


def read_choice(options: OptimizeOptions) -> Choice:
    """Return the choice that the options make.

    Raises:
        RecipeError: The recipe is unknown, or options contradict each other.
        ArgumentTypeError: An option has the wrong type.
    """
    choice = _read_choice(options)
    recipe = None if choice.recipe is None else choice.recipe.reproducing(options.reproducible)
    return replace(choice, recipe=recipe, reproducible=options.reproducible)


def _read_choice(options: OptimizeOptions) -> Choice:
    recipe, prompt = options.recipe, options.prompt is not None
    chosen_format, pass_options = options.target_format(), options.options or {}
    limit = read_limit(options.budget, options.max_perplexity_increase, options.max_bytes)
    if limit is not None:
        form = _mixed_form(recipe, chosen_format, prompt, limit)
        settings = BitSettings(form, limit, options.reproducible, default_ignore=options.ignore is None)
        return Choice(None, settings, pass_options).measuring()
    if recipe is not None and not (isinstance(recipe, str) and (recipe == AUTO or recipe in PRESETS)):
        return Choice(_ready_made(recipe, chosen_format, pass_options, prompt), by_name=True)
    if recipe == AUTO:
        if prompt:
            raise RecipeError(f"prompt cannot be combined with recipe {AUTO!r}; give recipe 'cached-prompt'")
        if chosen_format:
            raise RecipeError(
                f"{next(iter(chosen_format))} cannot be combined with recipe {AUTO!r}, which chooses formats by "
                "measurement; leave one of them out, or call ortolan.search, which takes sparsity, budget and shapes"
            )
    if recipe is None and prompt and not chosen_format:
        recipe = _CACHED_PROMPT
    if recipe == AUTO or (recipe is None and not chosen_format):
        return Choice(None, options=pass_options, measured=recipe == AUTO)
    if set(chosen_format) == {"ignore"} and recipe is None:
        raise RecipeError("ignore needs a target format: also pass weights, sparsity or a preset")
    if prompt and (recipe is None or PRESETS[str(recipe)].form.cache is None):
        chosen_format.setdefault("cache", "float32")
    chosen = Recipe.of(**chosen_format) if recipe is None else Recipe.load(recipe, **chosen_format)
    return Choice((chosen.with_prompt() if prompt else chosen).with_options(pass_options))


def _mixed_form(
    recipe: str | os.PathLike[str] | Recipe | None, chosen_format: Mapping[str, Any], prompt: bool, limit: Limit
) -> Form:
    form = Form()
    if recipe is None:
        form = Form(**chosen_format)
    elif recipe == "int4" and not chosen_format:
        form = PRESETS["int4"].form
    if not form.is_dense_int4 or form.cache is not None or prompt:
        raise RecipeError(
            f"{limit.argument} chooses the bits of each layer and needs weights='int4', without sparsity, pattern, "
            "cache or prompt; or call ortolan.search, which chooses among all dense formats"
        )
    return form


def _ready_made(
    recipe: str | os.PathLike[str] | Recipe, choices: Mapping[str, Any], options: Mapping[str, Any], prompt: bool
) -> Recipe:
    if isinstance(recipe, Recipe) and choices:
        raise RecipeError(
            f"{next(iter(choices))} cannot be combined with a Recipe, which defines the target format; leave it out, "
            "or give it to Recipe.of"
        )
    chosen = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe, **choices)
    if not chosen.passes:
        if options or prompt:
            name = next(iter(options), "a prompt")
            raise RecipeError(f"{name!r} cannot be used: recipe {chosen.name!r} has no passes; leave it out")
        return chosen
    changed = (chosen.with_prompt() if prompt else chosen).with_options(options)
    return replace(changed, search=chosen.search)


def default_recipe(source: ModelFile, choice: Choice, serve: bool = False) -> Choice:
    """Return the choice with a recipe, or with the decision to measure.

    Args:
        source: The model.
        choice: The choice that the arguments make.
        serve: The model gets the form for serving, so a recipe must replace attention.

    Raises:
        RecipeError: No pass of the recipe has one of the options.
    """
    if choice.recipe is not None or choice.bits is not None:
        return choice
    if choice.measured:
        return choice.measuring()
    stored, reasons = _count_stored(source)
    if not stored and serve:
        recipe = Recipe.of(weights="int8").reproducing(choice.reproducible).with_options(choice.options)
        return replace(choice, recipe=recipe, note="no target format was given: weights='int8' for serving")
    if not stored:
        return choice.measuring(_describe_lost(reasons))
    layers = f"{stored} layers store" if stored > 1 else "1 layer stores"
    return choice.adopting(f"{layers} quantized weights")


def _describe_lost(reasons: Mapping[str, str]) -> str:
    """Return a note on quantized weights that cannot be kept. reasons: reasons by layer name."""
    if not reasons:
        return ""
    layers = f"{len(reasons)} layers store" if len(reasons) > 1 else "1 layer stores"
    name, reason = next(iter(reasons.items()))
    return f"{layers} quantized weights that cannot be kept, such as {name!r}: {reason}"


def _count_stored(source: ModelFile) -> tuple[int, dict[str, str]]:
    """Return the number of layers whose quantized weights can be kept; if it is 0, also return the reasons by layer."""
    try:
        drop_listed_initializers(source.model)
        stored = count_stored(source.model) + count_stored_experts(source.model)
        return stored, {} if stored else why_not_kept(source.model)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # Malformed models raise errors of many types. If the model cannot be read, no recipe can be chosen.
        raise ModelError(f"{source.name} is not a well-formed ONNX model: {error!r}") from error
