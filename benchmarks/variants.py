"""What benchmarks of whole models share: recipes from the command line, sessions, the size of a model on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from ortolan.graph_passes.names import FORMAT_OPTIONS
from ortolan.graph_passes.recipe import Recipe, parse_setting
from ortolan.graph_passes.registry import PASSES


def read_recipes(texts: Sequence[str], sparsity: Sequence[float]) -> dict[str, Recipe]:
    """[PRESET or FILE][:KEY=VALUE,…] by what the table calls it.

    A key is an argument of optimize_onnx that chooses the form, such as weights, the name of a pass to add, as in
    ranges=true, or an option of a pass. sparsity: recipes that prune, or name a pattern, are made once for each share,
    unless they have one set; if empty, theirs.
    Raises RecipeError for unknown recipes and options.
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
        for share in sparsity:
            changed = recipe.with_options({"sparsity": share}) if prunes else recipe
            pruned = share > 0 and not prunes
            recipes[f"{label} {share:.0%}"] = read_recipe(f"{text},sparsity={share}") if pruned else changed
    return recipes


def read_recipe(text: str) -> Recipe:
    """Of read_recipes, the recipe of one text. Raises RecipeError."""
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
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return options


def file_megabytes(path: Path) -> float:
    """Of an ONNX file and its external data."""
    data = path.with_name(f"{path.name}.data")
    return (path.stat().st_size + (data.stat().st_size if data.is_file() else 0)) / 1e6
