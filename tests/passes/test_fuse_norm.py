"""Pass fuse_norm: the LayerNormalizations and Adds that it replaces, with the same answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import NodeProto, TensorProto, helper

import ortolan
from ortolan import OptimizationReport, Recipe
from ortolan.errors import RecipeError
from ortolan.graph_passes.auto.candidates import Candidate, make_recipe
from ortolan.models import tiny

from .padded_models import encoder_feeds
from .small_models import branches_model, make_model, op_types, optimize, random_weight, relative_error, run

N = 24
WEIGHTS = {"w": random_weight(N) + 1, "b": random_weight(N, seed=1)}
CONSTANTS = {
    **WEIGHTS,
    "two": np.array(2, np.float32),
    "small": np.array(1e-12, np.float32),
    "number": np.ones(1, np.float32),
    "rows": np.ones((5, N), np.float32),
}
SHAPES: dict[str, list[int | str]] = {
    "x": ["batch", "tokens", N],
    "p": [1, "tokens", N],
    "t": ["batch", "tokens", N],
    "v": [N],
    "one": ["batch", "tokens", 1],
    "five": ["batch", 5, N],
}
FEEDS = {
    name: np.random.default_rng(place)
    .standard_normal([{"batch": 3, "tokens": 5}.get(d, d) for d in shape])
    .astype("f4")
    for place, (name, shape) in enumerate(SHAPES.items())
}


def node(op_type: str, inputs: str, output: str, **attributes: object) -> NodeProto:
    return helper.make_node(op_type, inputs.split(), [output], name=output, **attributes)


def norm(inputs: str = "s w b", output: str = "y", **attributes: object) -> NodeProto:
    return node("LayerNormalization", inputs, output, **({"epsilon": 1e-12} | attributes))


def formula(x: str = "s", bias: bool = True) -> list[NodeProto]:
    return [
        node("ReduceMean", x, "mean", axes=[-1]),
        node("Sub", f"{x} mean", "d"),
        node("Pow", "d two", "square"),
        node("ReduceMean", "square", "variance", axes=[-1]),
        node("Add", "variance small", "more"),
        node("Sqrt", "more", "root"),
        node("Div", "d root", "z"),
        *([node("Mul", "z w", "scaled"), node("Add", "scaled b", "y")] if bias else [node("Mul", "z w", "y")]),
    ]


def model_of(nodes: Sequence[NodeProto], outputs: Sequence[str] = ("y",), opset: int = 17) -> onnx.ModelProto:
    read = {name for one in nodes for name in one.input}
    return make_model(
        nodes,
        {name: (TensorProto.FLOAT, shape) for name, shape in SHAPES.items() if name in read},
        {name: (TensorProto.FLOAT, ["batch", "tokens", None]) for name in outputs},
        {name: array for name, array in CONSTANTS.items() if name in read},
        opset,
    )


def fuse(model: onnx.ModelProto, dry_run: bool = False) -> OptimizationReport:
    passes = [{"name": "normalize"}, {"name": "fuse_norm"}, {"name": "verify", "seconds": 0.0}]
    return ortolan.optimize_onnx(model, recipe=Recipe.from_dict({"name": "norm", "pass": passes}), dry_run=dry_run)


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the fused model after checking its answers and names, with the library and without it."""
    result = fuse(model).model
    assert result is not None
    onnx.checker.check_model(result)
    feeds = {value.name: FEEDS[value.name] for value in model.graph.input}
    assert result.graph.input == model.graph.input and result.graph.output == model.graph.output
    for library in (True, False):
        for expected, found in zip(run(model, feeds), run(result, feeds, library), strict=True):
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    return result


def operands(model: onnx.ModelProto) -> list[str]:
    """Return the inputs of the only AddLayerNorm: X and the addends, without empty constants."""
    (found,) = (one for one in model.graph.node if one.op_type == "AddLayerNorm")
    return [name for name in found.input[:3] if not name.startswith("no_")]


SUMS: dict[str, tuple[list[NodeProto], list[str], list[str]]] = {
    "no addition": ([norm("x w b")], ["x"], []),
    "no bias": ([norm("x w")], ["x"], []),
    "one": ([node("Add", "x t", "s"), norm()], ["x", "t"], []),
    "two": ([node("Add", "x t", "s1"), node("Add", "s1 p", "s"), norm()], ["x", "t", "p"], []),
    "two, the sum behind": ([node("Add", "x t", "s1"), node("Add", "p s1", "s"), norm()], ["x", "t", "p"], []),
    "what is repeated in front": ([node("Add", "p v", "s1"), node("Add", "s1 x", "s"), norm()], ["p", "v", "x"], []),
    "a third": (
        [node("Add", "x t", "s1"), node("Add", "s1 p", "s2"), node("Add", "s2 v", "s"), norm()],
        ["s1", "p", "v"],
        ["Add"],
    ),
    "of one column": ([node("Add", "x one", "s"), norm()], ["s"], ["Add"]),
    "twice the same": ([node("Add", "x t", "s1"), node("Add", "s1 s1", "s"), norm()], ["s1", "s1"], ["Add"]),
    "a formula": ([node("Add", "x t", "s"), *formula()], ["x", "t"], []),
    "a formula without bias": ([node("Add", "x t", "s"), *formula(bias=False)], ["x", "t"], []),
    "the last axis by its number": ([node("Add", "x t", "s"), norm(axis=2)], ["x", "t"], []),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_that_nothing_else_reads_become_part(name: str) -> None:
    nodes, expected, left = SUMS[name]
    result = fused(model_of(nodes))
    assert op_types(result) == [*left, "AddLayerNorm"]
    assert operands(result) == expected
    assert result.graph.node[-1].name == "y" and result.graph.node[-1].output == ["y"]
    assert {one.name for one in result.graph.initializer} == {
        "y.norm_weight",
        "y.norm_bias",
        *(one for one in result.graph.node[-1].input if one.startswith("no_")),
    }


@pytest.mark.parametrize("name", ["an output", "a residual", "a formula's residual"])
def test_a_sum_that_others_read_stays(name: str) -> None:
    add = node("Add", "x t", "s")
    nodes, outputs = {
        "an output": ([add, norm()], ["y", "s"]),
        "a residual": ([add, norm(), node("Add", "s y", "out")], ["out"]),
        "a formula's residual": ([add, *formula(), node("Add", "s y", "out")], ["out"]),
    }[name]
    result = fused(model_of(nodes, outputs))
    assert op_types(result)[:2] == ["Add", "AddLayerNorm"]
    assert operands(result) == ["s"]


def test_a_sum_in_front_of_a_sum_stays_where_others_read_it() -> None:
    nodes = [node("Add", "x t", "s1"), node("Add", "s1 p", "s"), norm(), node("Mul", "y s1", "out")]
    result = fused(model_of(nodes, ["out"]))
    assert op_types(result) == ["Add", "AddLayerNorm", "Mul"] and operands(result) == ["s1", "p"]


def test_norms_behind_each_other_and_of_one_value() -> None:
    nodes = [
        node("Add", "x t", "s"),
        norm(output="y1"),
        node("Add", "y1 p", "s2"),
        norm("s2 w b", "y2"),
        norm("y2 w", "y3"),
        norm("y2 b", "y4"),
        node("Add", "y3 y4", "y"),
    ]
    result = fused(model_of(nodes))
    assert op_types(result) == ["AddLayerNorm"] * 4 + ["Add"]
    assert sum(name == "no_addend" for one in result.graph.node for name in one.input) == 2  # the nodes for y3 and y4


LEFT_ALONE = {
    "another axis": [norm("five rows rows", axis=1)],
    "a weight of one number": [norm("x number")],
    "the mean is read": [helper.make_node("LayerNormalization", ["x", "w", "b"], ["z", "m"]), node("Add", "z m", "y")],
    "a weight that is computed": [node("Mul", "v v", "vv"), norm("x vv b")],
    "no LayerNormalization": [node("ReduceMean", "x", "mean", axes=[-1]), node("Sub", "x mean", "y")],
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone(name: str) -> None:
    nodes = LEFT_ALONE[name]
    report = fuse(model_of(nodes))
    assert report.model is not None and op_types(report.model) == [one.op_type for one in nodes]
    assert not report.model.functions and not any("AddLayerNorm" in note for note in report.notes)


def test_rms_norms_stay() -> None:
    report = optimize(ir.to_proto(tiny.tiny_llama()), recipe=Recipe.of(weights="int8"))
    assert report.model is not None and "AddLayerNorm" not in op_types(report.model)


def test_float16_stays() -> None:
    model = model_of([node("Add", "x t", "s"), norm()])
    for value in [*model.graph.input, *model.graph.output]:
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        half = np.frombuffer(tensor.raw_data, np.float32).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(half, tensor.name))
    assert op_types(fuse(model).model) == ["Add", "LayerNormalization"]


def test_branches_have_their_own_nodes_and_constants() -> None:
    model = branches_model(inner=False)
    (choice,) = (one for one in model.graph.node if one.op_type == "If")
    for branch in (attribute.g for attribute in choice.attribute):
        old = branch.output[0].name
        branch.initializer.extend(
            [onnx.numpy_helper.from_array(array, f"{branch.name}.{name}") for name, array in WEIGHTS.items()]
        )
        vectors = [f"{branch.name}.{name}" for name in WEIGHTS]
        branch.node.append(
            helper.make_node("LayerNormalization", [old, *vectors], [f"{old}.normed"], f"{branch.name}.norm")
        )
        branch.output[0].name = f"{old}.normed"
    report = fuse(model)
    assert report.model is not None
    onnx.checker.check_model(report.model)
    assert op_types(report.model).count("AddLayerNorm") == 2


def test_the_report_counts() -> None:
    report = fuse(model_of([node("Add", "x t", "s"), norm(output="y1"), norm("y1 w b")]))
    assert "2 LayerNormalizations fused with 1 addition" in report.notes
    report = fuse(model_of([norm("x w b")]), dry_run=True)
    assert "LayerNormalizations that remain are found after layers have been replaced" in report.notes


def test_needs_normalize_for_old_opsets() -> None:
    model = model_of([norm("x w b")])
    model.opset_import[0].version = 12
    recipe = Recipe.from_dict({"name": "norm", "pass": [{"name": "fuse_norm"}]})
    with pytest.raises(RecipeError, match="'fuse_norm' needs pass 'normalize' before it"):
        ortolan.optimize_onnx(model, recipe=recipe)


ENCODERS: dict[str, tuple[Callable[[], ir.Model], int]] = {
    # Value: number of LayerNormalizations that do not follow a linear layer.
    "bert": (tiny.tiny_bert, 1),
    "mpnet": (tiny.tiny_mpnet, 1),
    "modernbert": (tiny.tiny_modernbert, 6),
}
RECIPES = {
    "int8": Recipe.of(weights="int8"),
    "int4": Recipe.of(weights="int4"),
    "bf16": Recipe.of(weights="bf16"),
    "4x1": Recipe.of(weights="int8", sparsity=0.5, pattern="4x1"),
}


# Each encoder and each recipe is tested with and without pass unpad, but not every pair with both.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "recipe", "unpad"),
    [(name, recipe, (i + j) % 2 == 0) for i, name in enumerate(ENCODERS) for j, recipe in enumerate(RECIPES)],
)
def test_nothing_of_an_encoder_is_normalized_by_onnx_runtime(encoder: str, recipe: str, unpad: bool) -> None:
    make, norms = ENCODERS[encoder]
    plain = RECIPES[recipe].without_pass("fuse_norm")
    steps = plain.without_pass("unpad")
    if unpad:
        steps = steps.with_pass("unpad", drop_hidden=True)
    report = optimize(ir.to_proto(make()), recipe=steps.with_pass("fuse_norm"))
    assert report.model is not None
    left = op_types(report.model)
    assert "LayerNormalization" not in left and left.count("AddLayerNorm") == norms
    # In ModernBERT, VNNISpMM's output has no declared rank, so pass unpad cannot pack tokens.
    assert ("PackTokens" in left) == (unpad and (recipe, encoder) != ("4x1", "modernbert"))
    without = optimize(ir.to_proto(make()), recipe=steps).model
    assert without is not None and "LayerNormalization" in op_types(without)
    feeds = encoder_feeds(without, [[1, 1, 1, 1], [1, 1, 0, 0]])
    for library in (True, False):
        (expected,), (found,) = run(without, feeds, library), run(report.model, feeds, library)
        assert relative_error(expected, found) < 5e-3


def names(recipe: Recipe) -> list[str]:
    return [step.name for step in recipe.passes]


def test_forms_of_whole_numbers_have_it() -> None:
    """Integer formats include the pass, so that encoders give the same bits on every CPU.

    Other formats include it only on request.
    """
    for name, recipe in RECIPES.items():
        assert names(recipe).count("fuse_norm") == (name != "bf16")
    others = [{"weights": "bf16"}, {"sparsity": 0.5}, {"cache": "codes"}]
    assert not any("fuse_norm" in names(Recipe.of(**choices)) for choices in others)
    assert "fuse_norm" not in names(Recipe.load("activation-sparse", weights="int8"))
    assert names(Recipe.of(weights="int8", cache="codes"))[-2:] == ["fuse_norm", "verify"]
    assert names(RECIPES["bf16"].with_pass("fuse_norm"))[-3:] == ["fuse_norm", "unpad", "verify"]


@pytest.mark.parametrize(("bits", "expected"), [(None, 0), (8, 1)])
def test_what_auto_picks_has_it_with_whole_numbers(bits: int | None, expected: int) -> None:
    candidate = Candidate("timing", "SparseAMXMatMul", {"bits": bits} if bits else {})
    recipe = make_recipe({candidate: ["layer"]}, attention=True)
    assert names(recipe).count("fuse_norm") == expected


def test_a_dry_run_says_nothing_of_a_model_without_norms() -> None:
    report = fuse(model_of([node("Add", "x t", "y")]), dry_run=True)
    assert not any("LayerNormalization" in note for note in report.notes)
