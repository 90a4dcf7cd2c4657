"""Recipes as the benchmarks' command lines name them."""

from pathlib import Path

from ortolan.benchmarks.variants import file_megabytes, read_recipes


def options_of(recipe):
    return {name: getattr(step.options, name) for step in recipe.passes for name in step.options.names()}


def test_recipes_with_settings():
    texts = ["int4", "int4:group_size=32,symmetric=true", "sparse-int4:group_size=64", "sparse-bf16:sparsity=0.25"]
    recipes = {name: options_of(recipe) for name, recipe in read_recipes(texts, [0.0, 0.5]).items()}
    assert list(recipes) == [
        "int4",
        "int4 group_size=32,symmetric=true",
        "sparse-int4 group_size=64 0%",
        "sparse-int4 group_size=64 50%",
        "sparse-bf16 sparsity=0.25",
    ]
    assert [options["group_size"] for options in list(recipes.values())[:4]] == [128, 32, 64, 64]
    assert [options["symmetric"] for options in list(recipes.values())[:2]] == [False, True]
    assert [options["sparsity"] for options in list(recipes.values())[2:]] == [0.0, 0.5, 0.25]


def test_without_a_sparsity_it_is_the_recipes_own():
    recipes = {name: options_of(recipe) for name, recipe in read_recipes(["sparse-int8-4x1", "int4"], []).items()}
    assert list(recipes) == ["sparse-int8-4x1", "int4"]
    assert recipes["sparse-int8-4x1"]["sparsity"] == 0.8


def test_external_data_counts(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(bytes(2_000_000))
    assert file_megabytes(path) == 2
    (tmp_path / "model.onnx.data").write_bytes(bytes(500_000))
    assert file_megabytes(path) == 2.5
