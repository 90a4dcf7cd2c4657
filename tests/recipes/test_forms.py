"""Target formats: their passes, operators and errors; presets."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import ortolan
from ortolan import ArgumentTypeError, Recipe, RecipeError
from ortolan.models import tiny

QUICK = {"verify.seconds": 0.0, "may_grow": True}


def steps(recipe: Recipe) -> list[str]:
    return [step.name for step in recipe.passes if step.name not in ("normalize", "calibrate", "verify")]


def option(recipe: Recipe, pass_name: str, name: str) -> object:
    return next(getattr(step.options, name) for step in recipe.passes if step.name == pass_name)


FUSED = ("fuse_attention", "fuse_cached_attention", "linear_attention")


@pytest.mark.parametrize(
    ("choices", "passes", "op"),
    [
        ({"weights": "bf16"}, [*FUSED, "replace", "unpad"], "SparseAMXMatMul"),
        (
            {"weights": "int8"},
            [
                "float_activations",
                "quantize",
                "quantize",
                "embeddings",
                *FUSED,
                "experts",
                *3 * ["replace"],
                "fuse_norm",
                "unpad",
            ],
            "W4A8MatMul",  # for layers that the model stores in 4 bits
        ),
        (
            {"weights": "int8", "ignore": ()},
            ["float_activations", "quantize", "embeddings", *FUSED, "experts", *3 * ["replace"], "fuse_norm", "unpad"],
            "W4A8MatMul",
        ),
        (
            {"weights": "int4"},
            ["quantize", "quantize", "embeddings", *FUSED, "experts", "replace", "replace", "fuse_norm", "unpad"],
            "W4A8MatMul",
        ),
        (
            {"weights": "int4", "ignore": ()},
            ["quantize", "embeddings", *FUSED, "experts", "replace", "fuse_norm", "unpad"],
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
                "linear_attention",
                "experts",
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
        ({"weights": "int3"}, "weights is 'int3', expected one of 'bf16', 'int8', 'int6', 'int5', 'int4'"),
        ({"weights": "int4", "group_size": 48}, "group_size is 48, expected one of 16, 32, 64, 128"),
        ({"weights": "int5", "group_size": 64}, "group_size is 64, expected 16 or 32 with weights='int5'"),
        ({"weights": "int5", "sparsity": 0.5}, "weights is 'int5', expected 'int8' or 'int4' with sparsity"),
        ({"weights": "int6", "pattern": "2:4"}, "weights is 'int6', expected 'int8' or 'int4' with pattern"),
        ({"weights": "int4", "sparsity": 0.5, "group_size": 16}, "group_size is 16, expected 32, 64 or 128 with prun"),
        ({"weights": "int4", "method": "hqq"}, "method is 'hqq', .*, but group_size=16 has integers; give 64 or 128"),
        ({"weights": "int5", "method": "hqq"}, "but group_size=16 has integers; give another method"),
        ({"group_size": 32}, "group_size is 32, which needs weights='int4'"),
        ({"weights": "int8", "group_size": 32}, "group_size is 32, which needs weights='int4'"),
        ({"weights": "int8", "group_size": 48}, "group_size is 48, which needs weights='int4'"),
        ({"sparsity": 0}, "sparsity is 0, expected a number above 0 and below 1; leave it out to prune no weights"),
        ({"sparsity": 1.0}, "sparsity is 1.0, expected"),
        ({"sparsity": "half"}, "sparsity is 'half', expected"),
        ({"sparsity": 0.5, "pattern": "4:2"}, "pattern is '4:2', expected 'unstructured', '4x1', or 'N:M'"),
        ({"pattern": "unstructured"}, "pattern is 'unstructured', but sparsity is missing"),
        ({"pattern": "unstructured", "weights": "int8"}, "pattern is 'unstructured', but sparsity is missing"),
        ({"pattern": "1:4"}, "sparsity is missing, expected 0.75 with pattern '1:4'"),
        ({"sparsity": 0.3, "pattern": "2:4"}, "sparsity is 0.3, expected 0.5 with pattern '2:4'"),
        ({"pattern": "4x1", "weights": "int4"}, "weights is 'int4', expected 'int8' with pattern '4x1'"),
        ({"method": "gptq"}, "method is 'gptq', which rounds to integers, but weights is None"),
        ({"method": "gptq", "weights": "bf16"}, "but weights is 'bf16'; give weights='int8' or 'int4'"),
        ({"method": "wanda", "weights": "int8"}, "method is 'wanda', which prunes, but sparsity is missing"),
        (
            {"method": ("gptq", "awq"), "weights": "int4"},
            "expected at most one method of rounding: rtn",
        ),
        (
            {"method": "obq", "weights": "int4"},
            "method is 'obq', expected one or more of 'rtn', 'mse', 'gptq', 'awq', 'hqq'",
        ),
        ({"method": 3, "weights": "int4"}, "method is 3, expected one or more of"),
        ({"method": "hqq", "weights": "int8"}, "method is 'hqq', but int8 and pruned weights have no zero points"),
        (
            {"method": "hqq", "weights": "int4", "sparsity": 0.5},
            "method is 'hqq', but int8 and pruned weights have no zero points",
        ),
        ({"cache": "int8"}, "cache is 'int8', expected one of 'codes', 'float32'"),
        ({"weights": "int8", "ignore": 3}, "ignore is 3, expected a list of name patterns"),
        ({"weight": "int8"}, "unknown option 'weight', expected one of: .*; did you mean 'weights'"),
    ],
)
def test_refused(choices: dict, message: str) -> None:
    with pytest.raises((RecipeError, ArgumentTypeError), match=message):
        Recipe.of(**choices)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"sparsity": 0.5}, "sparsity is 0.5, expected no value with the preset 'activation-sparse'"),
        ({"weights": "int4"}, "weights is 'int4', expected 'bf16' or 'int8' with the preset 'activation-sparse'"),
    ],
)
def test_what_a_preset_does_not_take(choices: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.load("activation-sparse", **choices)


def test_auto_is_no_recipe_to_load() -> None:
    with pytest.raises(RecipeError, match=r"measured for each model; call ortolan\.search"):
        Recipe.load("auto")


@pytest.mark.parametrize(
    ("choices", "bits", "op"),
    [
        ({"weights": "int4"}, 8, "W8A8MatMul"),
        ({"weights": "int4", "method": "gptq"}, 8, "W8A8MatMul"),
        ({"weights": "int6"}, 8, "W8A8MatMul"),
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
    assert len(others) == 14 and {layer.weight_bits for layer in others} == {int(choices["weights"][3:])}
    sparsity = choices.get("sparsity", 0.0)
    assert (head.sparsity or 0.0) < 0.2 and all((layer.sparsity or 0.0) >= sparsity for layer in others)
    unmatched = [note for note in report.notes if "matches no layer" in note]
    assert bool(unmatched) == ("*nothing*" in str(choices))


SPARSE = {"sparsity": 0.5}
STATIC = Recipe.of(sparsity=0.8, pattern="4x1").with_pass("ranges")
DECODER_FEEDS = {
    "input_ids": np.random.default_rng(0).integers(0, 97, (1, 40)),
    "attention_mask": np.ones((1, 40), np.int64),
    "position_ids": np.arange(40)[None],
    **{
        f"past_key_values.{n}.{part}": np.zeros((1, 2, 0, 12), np.float32)
        for n in range(2)
        for part in ("key", "value")
    },
}
ENCODER_FEEDS = {
    "input_ids": np.random.default_rng(0).integers(0, 101, (4, 30)),
    "attention_mask": np.ones((4, 30), np.int64),
    "token_type_ids": np.zeros((4, 30), np.int64),
}


@pytest.mark.parametrize(
    ("choices", "op", "stored"),
    [
        ({"weights": "bf16", **SPARSE}, "SparseAMXMatMul", {"uint8", "bfloat16"}),
        ({"weights": "int8", **SPARSE}, "SparseAMXMatMul", {"uint8", "int8"}),
        ({"weights": "int4", **SPARSE}, "SparseAMXMatMul", {"uint8"}),
        ({"weights": "bf16", "method": "sparsegpt", **SPARSE}, "SparseAMXMatMul", {"uint8", "bfloat16"}),
        ({"weights": "int8", "method": "sparsegpt", **SPARSE}, "SparseAMXMatMul", {"uint8", "int8"}),
        ({"weights": "int4", "method": "sparsegpt", **SPARSE}, "SparseAMXMatMul", {"uint8"}),
        ({"recipe": "sparse-encoder"}, "VNNISpMM", {"int8", "uint16"}),
        ({"recipe": STATIC}, "VNNISpMM", {"int8", "uint16"}),
        ({"weights": "int8", "sparsity": 0.8, "pattern": "4x1"}, "VNNISpMM", {"int8", "uint16"}),
        ({"weights": "int4"}, "W4A8MatMul", {"uint8", "float16"}),
        ({"weights": "int4", "method": "gptq"}, "W4A8MatMul", {"uint8", "float16"}),
        ({"weights": "int4", "method": "awq"}, "W4A8MatMul", {"uint8", "float16"}),
        ({"weights": "int4", "method": "hqq", "group_size": 64}, "W4A8MatMul", {"uint8", "float16"}),
        ({"weights": "int5", "group_size": 32}, "W4A8MatMul", {"uint8", "float16"}),
        ({"recipe": "activation-sparse"}, "MaskedMatMul", {"bfloat16"}),
        ({"recipe": "activation-sparse", "weights": "int8"}, "MaskedMatMul", {"int8"}),
    ],
)
def test_operator_and_storage_of_a_form(choices: dict, op: str, stored: set[str]) -> None:
    """All layers except the ignored ones are replaced by one operator, with the constant types of the format."""
    encoder = op == "VNNISpMM"
    model, feeds = (tiny.tiny_bert(), ENCODER_FEEDS) if encoder else (tiny.tiny_llama(), DECODER_FEEDS)
    report = ortolan.optimize_onnx(ir.to_proto(model), calibration=[feeds] * 4, options=QUICK, **choices)
    assert report.model is not None
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in report.model.graph.initializer}
    nodes = [node for node in report.model.graph.node if node.op_type == op]
    assert nodes and {layer.new_op for layer in report.replaced if "lm_head" not in layer.name} >= {op}
    for node in nodes:
        if "lm_head" not in node.name:
            types = {str(constants[name].dtype) for name in node.input if name in constants}
            assert types - {"float32", "int64", "bool"} >= stored
    if "sparsity" in choices:
        pruned = [layer for layer in report.replaced if layer.new_op == op and "lm_head" not in layer.name]
        assert all((layer.sparsity or 0) >= choices["sparsity"] for layer in pruned)
