"""Sparse int8 and int4 formats on whole models, compared with the pruned and rounded models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import OptimizationReport, Recipe
from ortolan.graph_passes.operators.sparse_amx_matmul_function import INPUTS
from ortolan.models import tiny

from ..external_weights import put_weights_outside
from ..passes.small_models import (
    FAST,
    branches_model,
    make_model,
    matmul_model,
    op_types,
    random_weight,
    relative_error,
    run,
)
from .forms import NAMED

FLOAT = TensorProto.FLOAT
RECIPES = ["sparse-int8", "sparse-int4"]
NO_LAYERS = ("NoMADAttention", "AddLayerNorm")  # operators without packed weights
# Error limit for rounding to int8 and bf16. A lost bias or scale would add 0.2 or more.
ROUNDING = 0.04
# Error limit without the library, which sums in a different order and so rounds some activations differently.
PORTABLE = 0.02


def optimize(model: Any, recipe: str, output: Any = None, **arguments: Any) -> OptimizationReport:
    options = FAST | arguments.pop("options", {})
    return ortolan.optimize_onnx(model, output, recipe=NAMED[recipe], options=options, **arguments)


def rounded(model: onnx.ModelProto, recipe: str, options: Mapping[str, Any]) -> onnx.ModelProto:
    """Return the pruned and quantized model in standard operators, by running the recipe without pass replace."""
    chosen = NAMED[recipe].with_options(options).to_dict()
    steps = [step for step in chosen["pass"] if step["name"] in ("normalize", "prune", "quantize")]
    return ortolan.optimize_onnx(model, recipe=Recipe.from_dict({"name": "rounded", "pass": steps})).model


def nodes_of(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the nodes of the format's operator, including those in branches."""
    graphs = [model.graph]
    for graph in graphs:
        graphs += [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return [node for graph in graphs for node in graph.node if node.domain == "ai.ortolan"]


def attribute(node: onnx.NodeProto, name: str) -> int:
    return next(entry.i for entry in node.attribute if entry.name == name)


def tensor_of(model: onnx.ModelProto, node: onnx.NodeProto, name: str) -> np.ndarray:
    wanted = node.input[INPUTS.index(name)]
    return numpy_helper.to_array(next(tensor for tensor in model.graph.initializer if tensor.name == wanted))


def kinds(model: onnx.ModelProto) -> list[int]:
    return [attribute(node, "weight_bits") for node in nodes_of(model) if node.op_type not in NO_LAYERS]


def check(
    model: onnx.ModelProto, report: OptimizationReport, recipe: str, feeds: Mapping[str, np.ndarray], **options: Any
) -> list[np.ndarray]:
    """Check the outputs with the library and without it against the rounded model, and return them."""
    onnx.checker.check_model(report.model, full_check=True)
    kernels = run(report.model, feeds, library=True)
    alone = run(report.model, feeds)
    reference = run(rounded(model, recipe, FAST | options), feeds)
    for kernel, portable, expected in zip(kernels, alone, reference, strict=True):
        assert kernel.shape == portable.shape == expected.shape
        assert relative_error(portable, kernel) < PORTABLE
        assert relative_error(expected, kernel) < ROUNDING
    return kernels


def mlp_feeds(rows: int = 5, width: int = 24) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)}


def bert_feeds() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(5).integers(0, 101, (2, 9))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def llama_feeds(model: onnx.ModelProto, past: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(6)
    sizes: dict[str, int] = {"batch": 2, "batch_size": 2, "sequence": 4, "sequence_length": 4}
    feeds = {}
    for value in model.graph.input:
        shape = []
        for dimension in value.type.tensor_type.shape.dim:
            name = dimension.dim_param
            total = "+" in name or "total" in name
            shape.append(
                dimension.dim_value if not name else past + 4 if total else past if "past" in name else sizes[name]
            )
        if value.type.tensor_type.elem_type == FLOAT:
            feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
        elif "mask" in value.name:
            feeds[value.name] = np.ones(shape, np.int64)
        elif "position" in value.name:
            feeds[value.name] = np.broadcast_to(np.arange(past, past + shape[-1]), shape).astype(np.int64)
        else:
            feeds[value.name] = rng.integers(1, 97, shape)
    return feeds


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("recipe", RECIPES)
def test_mlp(recipe: str, sparsity: float) -> None:
    model = ir.to_proto(tiny.mlp((64, 192, 128, 16)))
    report = optimize(model, recipe, options={"sparsity": sparsity})
    check(model, report, recipe, mlp_feeds(width=64), sparsity=sparsity)
    assert [layer.fused for layer in report.layers] == [["relu"], ["relu"], []]
    assert {layer.weight_bits for layer in report.layers} == {8 if recipe == "sparse-int8" else 4}
    assert kinds(report.model) == [layer.weight_bits for layer in report.layers]
    assert op_types(report.model) == ["SparseAMXMatMul"] * 3
    # The storage is dense without pruning, although rounding makes a few weights zero.
    dense = [tensor_of(report.model, node, "masks").size == 0 for node in nodes_of(report.model)]
    assert dense == [sparsity == 0.0] * 3


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_group_sizes(group_size: int) -> None:
    model = ir.to_proto(tiny.mlp((200, 130, 16), "matmul_add"))
    options = {"quantize.group_size": group_size}
    report = optimize(model, "sparse-int4", options=options)
    check(model, report, "sparse-int4", mlp_feeds(width=200), **options)
    for node, k in zip(nodes_of(report.model), (200, 130), strict=True):
        assert attribute(node, "group_size") == group_size
        assert tensor_of(report.model, node, "scales").shape[1:] == (-(-k // group_size), 16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bert(recipe: str) -> None:
    model = ir.to_proto(tiny.tiny_bert())
    report = optimize(model, recipe)
    check(model, report, recipe, bert_feeds())
    assert len(report.replaced) == 12 + 4  # linear layers, and the MatMuls of attention
    fused = [part for layer in report.layers for part in layer.fused]
    assert (fused.count("gelu"), fused.count("residual")) == (2, 4)
    assert "Erf" not in op_types(report.model)
    unfused = optimize(model, recipe, options={"replace.fuse": False})
    check(model, unfused, recipe, bert_feeds())
    assert not [part for layer in unfused.layers for part in layer.fused]
    assert op_types(unfused.model).count("Erf") == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_llama_keeps_its_head_in_bf16(recipe: str) -> None:
    model = ir.to_proto(tiny.tiny_llama())
    report = optimize(model, recipe)
    feeds = llama_feeds(model)
    check(model, report, recipe, feeds)
    bits = 8 if recipe == "sparse-int8" else 4
    weights = [layer for layer in report.replaced if layer.new_op != "NoMADAttention"]
    assert {layer.weight_bits for layer in weights if "lm_head" not in layer.name} == {bits}
    assert [layer.weight_bits for layer in weights if "lm_head" in layer.name] == [None]
    assert sorted(set(kinds(report.model))) == [bits, 16] and kinds(report.model).count(16) == 1
    fused = [part for layer in report.layers for part in layer.fused]
    assert (fused.count("silu"), fused.count("residual")) == (2, 4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_models_that_need_the_library(recipe: str) -> None:
    model = ir.to_proto(tiny.mlp())
    report = optimize(model, recipe, portable=False)
    assert not report.model.functions
    portable = optimize(model, recipe)
    np.testing.assert_array_equal(
        run(report.model, mlp_feeds(), library=True)[0], run(portable.model, mlp_feeds(), library=True)[0]
    )
    with pytest.raises(Exception, match="SparseAMXMatMul"):
        run(report.model, mlp_feeds())


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_in_branches(recipe: str, inner: bool) -> None:
    model = branches_model(inner)
    report = optimize(model, recipe)
    assert len(report.replaced) == 2
    for flag in (True, False):
        check(model, report, recipe, mlp_feeds(width=20) | {"flag": np.array(flag)})


def branches_that_differ() -> onnx.ModelProto:
    """Return an If where only one branch has an activation and a residual, and weight types differ."""

    def branch(name: str, tail: list[onnx.NodeProto], output: str) -> onnx.GraphProto:
        weight = numpy_helper.from_array(random_weight(20, 20, seed=len(name)), f"{name}.W")
        node = helper.make_node("MatMul", ["x", f"{name}.W"], [f"{name}.p"], name=f"{name}/linear")
        values = [helper.make_tensor_value_info(output, FLOAT, ["batch", 20])]
        return helper.make_graph([node, *tail], name, [], values, [weight])

    tail = [helper.make_node("Relu", ["then.p"], ["then.r"]), helper.make_node("Add", ["then.r", "x"], ["then.y"])]
    branches = {"then_branch": branch("then", tail, "then.y"), "else_branch": branch("else", [], "else.p")}
    return make_model(
        [helper.make_node("If", ["flag"], ["y"], name="if", **branches)],
        {"x": (FLOAT, ["batch", 20]), "flag": (TensorProto.BOOL, [])},
        {"y": (FLOAT, ["batch", 20])},
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_branches_that_differ(recipe: str) -> None:
    model = branches_that_differ()
    options = {"quantize.exclude": ["else/*"]}
    report = optimize(model, recipe, options=options)
    assert sorted(layer.fused for layer in report.layers) == [[], ["relu", "residual"]]
    assert len(set(kinds(report.model))) == 2
    for flag in (True, False):
        check(model, report, recipe, mlp_feeds(width=20) | {"flag": np.array(flag)}, **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_weight_of_two_layers_one_with_an_activation(recipe: str) -> None:
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "W"], ["p"], name="first"),
            helper.make_node("Relu", ["p"], ["h"]),
            helper.make_node("MatMul", ["h", "W"], ["y"], name="second"),
        ],
        {"x": (FLOAT, ["batch", 24])},
        {"y": (FLOAT, ["batch", 24])},
        {"W": random_weight(24, 24)},
    )
    report = optimize(model, recipe)
    check(model, report, recipe, mlp_feeds())
    first, second = nodes_of(report.model)
    assert [attribute(node, "activation") for node in (first, second)] == [1, 0]
    weight = [INPUTS.index(name) for name in ("masks", "values", "offsets", "scales")]
    assert [first.input[index] for index in weight] == [second.input[index] for index in weight]


@pytest.mark.parametrize("recipe", RECIPES)
def test_float16_models(recipe: str) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["p"], name="first"),
        helper.make_node("Relu", ["p"], ["h"]),
        helper.make_node("MatMul", ["h", "V"], ["y"], name="second"),
    ]
    weights = {"W": random_weight(24, 40, dtype=np.float16), "V": random_weight(40, 16, seed=1, dtype=np.float16)}
    model = make_model(
        nodes, {"x": (TensorProto.FLOAT16, ["batch", 24])}, {"y": (TensorProto.FLOAT16, ["batch", 16])}, weights
    )
    report = optimize(model, recipe)
    (answer,) = check(model, report, recipe, {"x": mlp_feeds()["x"].astype(np.float16)})
    assert answer.dtype == np.float16 and len(report.replaced) == 2
    assert not [part for layer in report.layers for part in layer.fused]


@pytest.mark.parametrize("opset", [11, 13, 21])
@pytest.mark.parametrize("recipe", RECIPES)
def test_opsets(recipe: str, opset: int) -> None:
    model = matmul_model(opset=opset)
    report = optimize(model, recipe)
    x = np.random.default_rng(2).standard_normal((2, 3, 20)).astype(np.float32)
    check(model, report, recipe, {"x": x})
    assert len(report.replaced) == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_models_with_external_data(recipe: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put_weights_outside(monkeypatch)
    ir.save(tiny.tiny_bert(), tmp_path / "bert.onnx", external_data="bert.data", size_threshold_bytes=0)
    report = optimize(tmp_path / "bert.onnx", recipe, tmp_path / "fast.onnx")
    assert len(report.replaced) == 12 + 4  # linear layers, and the MatMuls of attention
    onnx.checker.check_model(str(tmp_path / "fast.onnx"))
    kernels = run(str(tmp_path / "fast.onnx"), bert_feeds(), library=True)[0]
    assert relative_error(run(str(tmp_path / "fast.onnx"), bert_feeds())[0], kernels) < PORTABLE
    embedded = optimize(onnx.load(tmp_path / "bert.onnx"), recipe)
    np.testing.assert_array_equal(run(embedded.model, bert_feeds(), library=True)[0], kernels)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_tells_the_same(recipe: str, sparsity: float) -> None:
    """A dry run reports upper bounds of sizes, because rounding adds zeros.

    Both int4 streams have the length of the longer one, and masks that are chosen for speed add a few percent.
    """
    model = ir.to_proto(tiny.tiny_llama())
    options = {"sparsity": sparsity}
    dry, real = optimize(model, recipe, options=options, dry_run=True), optimize(model, recipe, options=options)
    for told, done in zip(dry.layers, real.layers, strict=True):
        assert (told.name, told.fused, told.weight_bits) == (done.name, done.fused, done.weight_bits)
        if done.status == "replaced":
            assert (told.status, told.new_op) == ("would replace", done.new_op)
            if done.new_op != "NoMADAttention":  # stores no weight
                assert told.bytes_after * (1.0 if recipe == "sparse-int8" else 1.05) >= done.bytes_after > 0
        else:
            assert (told.status, told.reason) == (done.status, done.reason)
