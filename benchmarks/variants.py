"""What benchmarks of whole models share: recipes from the command line, sessions, the size of a model on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnxruntime as ort

from ortolan.graph_passes.recipe import Recipe, parse_setting


def read_recipes(texts: Sequence[str], sparsity: Sequence[float]) -> dict[str, Recipe]:
    """NAME or NAME:KEY=VALUE,… by what the table calls it: recipes that prune once for each sparsity, unless set.

    sparsity: if empty, that of the recipe.
    Raises RecipeError for unknown recipes and options.
    """
    recipes: dict[str, Recipe] = {}
    for text in texts:
        name, _, settings = text.partition(":")
        options = dict(map(parse_setting, settings.split(","))) if settings else {}
        recipe = Recipe.load(name).with_options(options)
        name = f"{name} {settings}".strip()
        prunes = any(step.name == "prune" for step in recipe.passes)
        if sparsity and prunes and {"sparsity", "prune.sparsity"}.isdisjoint(options):
            recipes |= {f"{name} {share:.0%}": recipe.with_options({"sparsity": share}) for share in sparsity}
        else:
            recipes[name] = recipe
    return recipes


def session_options(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return options


def file_megabytes(path: Path) -> float:
    """Of an ONNX file and its external data."""
    data = path.with_name(f"{path.name}.data")
    return (path.stat().st_size + (data.stat().st_size if data.is_file() else 0)) / 1e6
