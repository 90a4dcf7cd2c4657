"""Recipes as they are named on the benchmarks' command lines."""

from pathlib import Path

from ortolan.benchmarks.variants import file_megabytes, read_recipe, read_recipes


def options_of(recipe):
    return {name: getattr(step.options, name) for step in recipe.passes for name in step.options.names()}


def test_recipes_with_settings():
    int4 = "int4:ignore=none"
    texts = [int4, f"{int4},group_size=128,symmetric=true", ":weights=int4,group_size=64,pattern=unstructured"]
    texts += [":weights=bf16,sparsity=0.25", "sparse-encoder", ":weights=int4,sparsity=0.5,method=wanda+gptq"]
    recipes = {name: options_of(recipe) for name, recipe in read_recipes(texts, [0.0, 0.5]).items()}
    assert list(recipes) == [
        "int4 ignore=none",
        "int4 ignore=none,group_size=128,symmetric=true",
        "weights=int4,group_size=64,pattern=unstructured 0%",
        "weights=int4,group_size=64,pattern=unstructured 50%",
        "weights=bf16,sparsity=0.25",
        "sparse-encoder 0%",
        "sparse-encoder 50%",
        "weights=int4,sparsity=0.5,method=wanda+gptq",
    ]
    assert [options["group_size"] for options in list(recipes.values())[:4]] == [256, 128, 64, 64]
    assert [options["symmetric"] for options in list(recipes.values())[:2]] == [None, True]
    shares = [options.get("sparsity") for options in list(recipes.values())[2:]]
    assert shares == [None, 0.5, 0.25, 0.0, 0.5, 0.5]
    assert list(recipes.values())[-1]["method"] == "gptq"  # option of the last pass


def test_without_a_sparsity_it_is_the_recipes_own():
    recipes = {name: options_of(recipe) for name, recipe in read_recipes(["sparse-encoder", "int4"], []).items()}
    assert list(recipes) == ["sparse-encoder", "int4"]
    assert recipes["sparse-encoder"]["sparsity"] == 0.5


def test_a_pass_can_be_added():
    recipe = read_recipe(":sparsity=0.8,pattern=4x1,ranges=true")
    assert [step.name for step in recipe.passes if step.name in ("ranges", "replace")] == ["ranges", "replace"]


def test_external_data_counts(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(bytes(2_000_000))
    assert file_megabytes(path) == 2
    (tmp_path / "model.onnx.data").write_bytes(bytes(500_000))
    assert file_megabytes(path) == 2.5
