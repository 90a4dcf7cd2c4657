"""Forms: the passes that they become, what is refused, and presets."""

from __future__ import annotations

import onnx_ir as ir
import pytest

import ortolan
from ortolan import Recipe, RecipeError
from ortolan.graph_passes import forms
from ortolan.models import tiny

QUICK = {"verify.seconds": 0.0, "may_grow": True}


def steps(recipe: Recipe) -> list[str]:
    return [step.name for step in recipe.passes if step.name not in ("normalize", "calibrate", "verify")]


def option(recipe: Recipe, pass_name: str, name: str) -> object:
    return next(getattr(step.options, name) for step in recipe.passes if step.name == pass_name)


FUSED = ("fuse_attention", "fuse_cached_attention")


@pytest.mark.parametrize(
    ("choices", "passes", "op"),
    [
        ({"weights": "bf16"}, [*FUSED, "replace", "unpad"], "SparseAMXMatMul"),
        (
            {"weights": "int8"},
            ["float_activations", "quantize", "quantize", "embeddings", *FUSED, *3 * ["replace"], "fuse_norm", "unpad"],
            "W4A8MatMul",  # for weights that the model stores in 4 bits
        ),
        (
            {"weights": "int8", "ignore": ()},
            ["float_activations", "quantize", "embeddings", *FUSED, *3 * ["replace"], "fuse_norm", "unpad"],
            "W4A8MatMul",
        ),
        (
            {"weights": "int4"},
            ["quantize", "quantize", "embeddings", *FUSED, "replace", "replace", "fuse_norm", "unpad"],
            "W4A8MatMul",
        ),
        (
            {"weights": "int4", "ignore": ()},
            ["quantize", "embeddings", *FUSED, "replace", "fuse_norm", "unpad"],
            "W4A8MatMul",
        ),
        ({"sparsity": 0.5}, ["prune", *FUSED, "replace", "unpad"], "SparseAMXMatMul"),
        (
            {"weights": "int8", "sparsity": 0.5, "pattern": "2:4"},
            ["prune", "quantize", "embeddings", *FUSED, "replace", "replace", "fuse_norm", "unpad"],
            "SparseAMXMatMul",
        ),
        ({"pattern": "2:4"}, [*FUSED, "replace", "replace", "unpad"], "SparseAMXMatMul"),
        (
            {"pattern": "2:4", "ignore": (), "weights": "int4"},
            ["quantize", "embeddings", *FUSED, "replace", "fuse_norm", "unpad"],
            "SparseAMXMatMul",
        ),
        (
            {"weights": "int4", "sparsity": 0.5},
            ["prune", "quantize", "embeddings", *FUSED, "replace", "fuse_norm", "unpad"],
            "SparseAMXMatMul",
        ),
        (
            {"weights": "int8", "sparsity": 0.5, "method": "sparsegpt"},
            ["prune", "embeddings", *FUSED, "replace", "fuse_norm", "unpad"],
            "SparseAMXMatMul",
        ),
        (
            {"weights": "int4", "sparsity": 0.5, "method": ("sparsegpt", "gptq")},
            ["prune", "quantize", "embeddings", *FUSED, "replace", "fuse_norm", "unpad"],
            "SparseAMXMatMul",
        ),
        ({"pattern": "4x1"}, ["quantize", "embeddings", *FUSED, "replace", "fuse_norm", "unpad"], "VNNISpMM"),
        (
            {"pattern": "4x1", "sparsity": 0.8},
            ["prune", "quantize", "embeddings", *FUSED, "replace", "fuse_norm", "unpad"],
            "VNNISpMM",
        ),
        (
            {"weights": "int8", "cache": "codes"},
            [
                "float_activations",
                "quantize",
                "quantize",
                "embeddings",
                "fuse_attention",
                "compress_cache",
                *3 * ["replace"],
                "fuse_norm",
            ],
            "W4A8MatMul",
        ),
    ],
)
def test_passes_of_a_form(choices: dict, passes: list[str], op: str) -> None:
    recipe = Recipe.of(**choices)
    assert steps(recipe) == passes and option(recipe, "replace", "op") == op
    assert Recipe.from_toml(recipe.to_toml()) == recipe and recipe.description


def test_methods() -> None:
    recipe = Recipe.of(weights="int4", sparsity=0.5, method=("wanda", "gptq"))
    assert option(recipe, "prune", "method") == "wanda" and option(recipe, "quantize", "method") == "gptq"
    assert recipe == Recipe.of(weights="int4", sparsity=0.5, method=["wanda", "gptq"])
    joint = Recipe.of(weights="int4", sparsity=0.5, group_size=32, method="sparsegpt")
    assert option(joint, "prune", "weight_bits") == 4 and option(joint, "prune", "weight_group_size") == 32


def test_names() -> None:
    assert Recipe.of(weights="int8", sparsity=0.5).name == "weights=int8, sparsity=0.5"
    assert Recipe.of(weights="int4", method=("gptq",), ignore=()).name == "weights=int4, method=gptq, ignore=none"
    assert Recipe.load("int4").name == "int4"
    assert Recipe.load("int4", group_size=32).name == "int4, group_size=32"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"weights": "int3"}, "weights is 'int3', expected one of 'bf16', 'int8', 'int4'"),
        ({"weights": "int4", "group_size": 48}, "group_size is 48, expected one of 32, 64, 128"),
        ({"group_size": 32}, "group_size is 32, which only weights='int4' has"),
        ({"weights": "int8", "group_size": 32}, "group_size is 32, which only weights='int4' has"),
        ({"weights": "int8", "group_size": 48}, "group_size is 48, which only weights='int4' has"),
        ({"sparsity": 0}, "sparsity is 0, expected a number above 0 and below 1; leave it out to prune nothing"),
        ({"sparsity": 1.0}, "sparsity is 1.0, expected"),
        ({"sparsity": "half"}, "sparsity is 'half', expected"),
        ({"sparsity": 0.5, "pattern": "4:2"}, "pattern is '4:2', expected 'unstructured', '4x1', or 'N:M'"),
        ({"pattern": "unstructured"}, "pattern is 'unstructured', but sparsity is not given"),
        ({"pattern": "unstructured", "weights": "int8"}, "pattern is 'unstructured', but sparsity is not given"),
        ({"pattern": "1:4"}, "sparsity is not given, but pattern '1:4' makes it 0.75; give that"),
        ({"sparsity": 0.3, "pattern": "2:4"}, "sparsity is 0.3, but pattern '2:4' makes it 0.5; give that"),
        ({"pattern": "4x1", "weights": "int4"}, "weights is 'int4', expected 'int8' with pattern '4x1'"),
        ({"method": "gptq"}, "method is 'gptq', which rounds to whole numbers, but weights is None"),
        ({"method": "gptq", "weights": "bf16"}, "but weights is 'bf16'; give weights='int8' or 'int4'"),
        ({"method": "wanda", "weights": "int8"}, "method is 'wanda', which prunes, but sparsity is not given"),
        (
            {"method": ("gptq", "awq"), "weights": "int4"},
            "expected one method of rounding at most: rtn",
        ),
        (
            {"method": "obq", "weights": "int4"},
            "method is 'obq', expected one or more of 'rtn', 'mse', 'gptq', 'awq', 'hqq'",
        ),
        ({"method": 3, "weights": "int4"}, "method is 3, expected one or more of"),
        ({"method": "hqq", "weights": "int8"}, "method is 'hqq', expected another one with int8 or pruned weights"),
        ({"method": "hqq", "weights": "int4", "sparsity": 0.5}, "method is 'hqq', expected another one"),
        ({"cache": "int8"}, "cache is 'int8', expected one of 'codes', 'float32'"),
        ({"weights": "int8", "ignore": 3}, "ignore is 3, expected a list of name patterns"),
        ({"weight": "int8"}, "unknown choice 'weight', known ones are: .*; did you mean 'weights'"),
    ],
)
def test_refused(choices: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.of(**choices)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"sparsity": 0.5}, "sparsity is 0.5, expected none with the preset 'activation-sparse'"),
        ({"weights": "int4"}, "weights is 'int4', expected 'bf16' or 'int8' with the preset 'activation-sparse'"),
    ],
)
def test_what_a_preset_does_not_take(choices: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.load("activation-sparse", **choices)


@pytest.mark.parametrize("name", [*forms._OLD, *forms._OLD_OTHERS])
def test_old_names_tell_the_new_call(name: str) -> None:
    with pytest.raises(RecipeError, match=f"there is no recipe '{name}': (give|leave)"):
        Recipe.load(name)
    call = dict(forms._OLD.get(name, {}))
    if call:
        recipe = Recipe.load(call.pop("recipe"), **call) if "recipe" in call else Recipe.of(**call)
        assert recipe.passes


def test_auto_is_no_recipe_to_load() -> None:
    with pytest.raises(RecipeError, match=r"found by measurement, for one model: ortolan\.search"):
        Recipe.load("auto")


@pytest.mark.parametrize(
    ("choices", "bits", "op"),
    [
        ({"weights": "int4"}, 8, "W8A8MatMul"),
        ({"weights": "int4", "method": "gptq"}, 8, "W8A8MatMul"),
        ({"weights": "int4", "ignore": ()}, 4, "W4A8MatMul"),
        ({"weights": "int4", "ignore": "*nothing*"}, 4, "W4A8MatMul"),
        ({"weights": "int8"}, 8, "W8A8MatMul"),
        ({"weights": "int8", "method": "gptq"}, 8, "W8A8MatMul"),
        ({"weights": "int8", "ignore": ()}, 8, "SparseAMXMatMul"),
        ({"weights": "int8", "sparsity": 0.5}, None, "SparseAMXMatMul"),
        ({"weights": "int8", "sparsity": 0.5, "pattern": "2:4"}, None, "SparseAMXMatMul"),
        ({"weights": "int4", "sparsity": 0.5}, None, "SparseAMXMatMul"),
    ],
)
def test_what_heads_become(choices: dict, bits: int | None, op: str) -> None:
    report = ortolan.optimize_onnx(ir.to_proto(tiny.tiny_llama()), options=QUICK, **choices)
    (head,) = [layer for layer in report.layers if "lm_head" in layer.name]
    assert (head.new_op, head.weight_bits) == (op, bits)
    others = [layer for layer in report.replaced if layer is not head and layer.new_op != "NoMADAttention"]
    assert len(others) == 14 and {layer.weight_bits for layer in others} == {4 if choices["weights"] == "int4" else 8}
    sparsity = choices.get("sparsity", 0.0)
    assert (head.sparsity or 0.0) < 0.2 and all((layer.sparsity or 0.0) >= sparsity for layer in others)
    unmatched = [note for note in report.notes if "matches no layer" in note]
    assert bool(unmatched) == ("*nothing*" in str(choices))
