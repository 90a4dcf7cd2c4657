"""Short names for the target formats that many tests use."""

from __future__ import annotations

from ortolan import Recipe
from ortolan.graph_passes.forms import ADOPT

NAMED = {
    "adopt": Recipe.from_dict(ADOPT),
    "sparse-bf16": Recipe.of(weights="bf16", sparsity=0.5),
    "sparse-int8": Recipe.of(weights="int8", sparsity=0.5),
    "sparse-int4": Recipe.of(weights="int4", sparsity=0.5),
    "sparse-int8-4x1": Recipe.of(sparsity=0.8, pattern="4x1"),
    "sparse-int8-4x1-static": Recipe.of(sparsity=0.8, pattern="4x1").with_pass("ranges"),
    "sparsegpt-bf16": Recipe.of(weights="bf16", sparsity=0.5, method="sparsegpt"),
    "sparsegpt-int8": Recipe.of(weights="int8", sparsity=0.5, method="sparsegpt"),
    "sparsegpt-int4": Recipe.of(weights="int4", sparsity=0.5, method="sparsegpt"),
    "int8": Recipe.of(weights="int8"),
    "int4": Recipe.of(weights="int4", ignore=()),
    "int4-gptq": Recipe.of(weights="int4", method="gptq", ignore=()),
    "int4-awq": Recipe.of(weights="int4", method="awq", ignore=()),
    "int4-hqq": Recipe.of(weights="int4", method="hqq", group_size=64, ignore=()),
    "activation-sparse": Recipe.load("activation-sparse"),
    "activation-sparse-int8": Recipe.load("activation-sparse", weights="int8"),
    "sparse-encoder": Recipe.load("sparse-encoder"),
    "long-context": Recipe.of(cache="codes"),
}


def named(recipe: str | Recipe) -> str | Recipe:
    """Return the recipe of a short name, or the argument itself if it is a recipe or another name."""
    return NAMED.get(recipe, recipe) if isinstance(recipe, str) else recipe
