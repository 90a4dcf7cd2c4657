"""Functions shared by whole-model benchmarks: recipes from the command line, sessions, model sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from ortolan.graph_passes.names import FORMAT_OPTIONS
from ortolan.graph_passes.recipe import Recipe, parse_setting
from ortolan.graph_passes.registry import PASSES


def read_recipes(texts: Sequence[str], sparsity: Sequence[float]) -> dict[str, Recipe]:
    """Read recipes [PRESET or FILE][:KEY=VALUE,…] into a dict by their names in the table.

    A key is an argument of optimize_onnx that chooses the format, as in weights=int4, the name of a pass to add, as in
    ranges=true, or an option of a pass.

    Args:
        texts: The recipes.
        sparsity: Recipes that prune or name a pattern, but set no sparsity, are made once for each of these; empty: the
            recipe's default.

    Raises:
        RecipeError: A recipe or an option is unknown.
    """
    recipes: dict[str, Recipe] = {}
    for text in texts:
        name, _, settings = text.partition(":")
        given, recipe = _settings_of(settings), read_recipe(text)
        label = f"{name} {settings}".strip()
        prunes = any(step.name == "prune" for step in recipe.passes)
        if not sparsity or not {"sparsity", "prune.sparsity"}.isdisjoint(given) or not (prunes or "pattern" in given):
            recipes[label] = recipe
            continue
        for fraction in sparsity:
            changed = recipe.with_options({"sparsity": fraction}) if prunes else recipe
            pruned = fraction > 0 and not prunes
            recipes[f"{label} {fraction:.0%}"] = read_recipe(f"{text},sparsity={fraction}") if pruned else changed
    return recipes


def read_recipe(text: str) -> Recipe:
    """Read one recipe; see `read_recipes`. Raises RecipeError if it is unknown."""
    name, _, settings = text.partition(":")
    given = _settings_of(settings)
    form = {key: value for key, value in given.items() if key in FORMAT_OPTIONS}
    if "method" in form:
        form["method"] = form["method"].split("+")
    if form.get("ignore") == "none":
        form["ignore"] = ()
    recipe = Recipe.load(name, **form) if name else Recipe.of(**form)
    for key in given.keys() & PASSES.keys():
        recipe = recipe.with_pass(key)
    return recipe.with_options({key: given[key] for key in given.keys() - form.keys() - PASSES.keys()})


def _settings_of(text: str) -> dict[str, Any]:
    return dict(map(parse_setting, text.split(","))) if text else {}


def session_options(threads: int) -> ort.SessionOptions:
    """Return session options with this number of threads."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return options


def file_megabytes(path: Path) -> float:
    """Return the size of an ONNX file and its external data."""
    data = path.with_name(f"{path.name}.data")
    return (path.stat().st_size + (data.stat().st_size if data.is_file() else 0)) / 1e6
