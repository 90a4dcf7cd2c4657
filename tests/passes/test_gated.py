"""Two layers with the same input whose outputs are multiplied are joined to one node, or stay separate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import NodeProto, TensorProto, helper

import ortolan
from ortolan.models import tiny

from ..recipes.forms import NAMED
from .small_models import FAST, make_model, op_types, optimize, random_weight, relative_error, run

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
K, N = 40, 21
RECIPES = {"sparse-bf16": {"sparsity": 0.0}, "sparse-int8": {"sparsity": 0.0}, "int4": {"subgroup_size": 32}}
ERROR = {"sparse-bf16": 2e-2, "sparse-int8": 5e-2, "int4": 0.3}

GATE = helper.make_node("MatMul", ["x", "G"], ["gate"], name="gate_proj")
UP = helper.make_node("MatMul", ["x", "U"], ["up"], name="up_proj")
NEGATE = helper.make_node("Neg", ["x"], ["other"], name="negate")
UP_OF_OTHER = helper.make_node("MatMul", ["other", "U"], ["up"], name="up_proj")
SIGMOID = helper.make_node("Sigmoid", ["gate"], ["s"], name="sigmoid")
SILU = helper.make_node("Mul", ["gate", "s"], ["a"], name="silu")


def multiply(a: str, b: str, y: str = "y") -> NodeProto:
    return helper.make_node("Mul", [a, b], [y], name="multiply")


def gated_model(
    nodes: Sequence[NodeProto], outputs: Sequence[str] = ("y",), dtype: type = np.float32, **weights: np.ndarray
) -> onnx.ModelProto:
    kind = FLOAT if dtype == np.float32 else FLOAT16
    all_weights = {"G": random_weight(K, N), "U": random_weight(K, N, seed=1)} | weights
    used = {name for node in nodes for name in node.input}
    return make_model(
        nodes,
        {"x": (kind, ["batch", K])},
        {name: (kind, ["batch", None]) for name in outputs},
        {name: array.astype(dtype) for name, array in all_weights.items() if name in used},
    )


def check(model: onnx.ModelProto, recipe: str, nodes: int) -> onnx.ModelProto:
    """Check the answers with the library and without it, and the number of Ortolan's nodes."""
    report = optimize(model, recipe=recipe, options=RECIPES[recipe])
    assert report.model is not None
    onnx.checker.check_model(report.model)
    x = np.random.default_rng(0).standard_normal((5, K)).astype(run_type(model))
    for library in (True, False):
        for expected, found in zip(run(model, {"x": x}), run(report.model, {"x": x}, library), strict=True):
            assert relative_error(expected, found) < ERROR[recipe]
    assert sum(node.domain == "ai.ortolan" for node in report.model.graph.node) == nodes
    return report.model


def run_type(model: onnx.ModelProto) -> type:
    return np.float32 if model.graph.input[0].type.tensor_type.elem_type == FLOAT else np.float16


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "nodes",
    [
        [GATE, SIGMOID, SILU, UP, multiply("a", "up")],
        [UP, GATE, SIGMOID, SILU, multiply("up", "a")],
        [GATE, UP, SIGMOID, SILU, multiply("a", "up")],
        [GATE, UP, helper.make_node("Relu", ["gate"], ["a"], name="relu"), multiply("a", "up")],
        [GATE, UP, multiply("gate", "up")],
    ],
    ids=["gate first", "up first", "both first", "relu", "bilinear"],
)
def test_every_order_becomes_one_node(recipe: str, nodes: list[NodeProto]) -> None:
    optimized = check(gated_model(nodes), recipe, 1)
    assert len(optimized.graph.node) == 1
    assert optimized.graph.node[0].name in ("gate_proj", "up_proj")
    names = {initializer.name for initializer in optimized.graph.initializer}
    assert not names & {"G", "U"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_biases_and_residual(recipe: str) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "G", "b"], ["gate"], name="gate_proj"),
        helper.make_node("Gemm", ["x", "U"], ["up"], name="up_proj"),
        SIGMOID,
        SILU,
        multiply("a", "up", "product"),
        helper.make_node("MatMul", ["x", "R"], ["r"], name="r"),
        helper.make_node("Add", ["product", "r"], ["y"], name="add"),
    ]
    model = gated_model(nodes, b=random_weight(N, seed=3), R=random_weight(K, N, seed=4))
    check(model, recipe, 2)


@pytest.mark.parametrize(
    ("nodes", "outputs", "count"),
    [
        ([GATE, SIGMOID, SILU, UP, multiply("a", "up")], ["y", "up"], 2),
        ([GATE, SIGMOID, SILU, UP, multiply("a", "up")], ["y", "a"], 2),
        (
            [GATE, UP, SIGMOID, SILU, multiply("a", "up"), helper.make_node("Neg", ["up"], ["z"], name="neg")],
            ["y", "z"],
            2,
        ),
        (
            [NEGATE, GATE, UP_OF_OTHER, SIGMOID, SILU, multiply("a", "up")],
            ["y"],
            2,
        ),
        ([GATE, multiply("gate", "gate")], ["y"], 1),
    ],
    ids=["up is an output", "activation is an output", "up is used twice", "another input", "a square"],
)
def test_what_else_sees_a_value_keeps_the_layers_apart(nodes: list[NodeProto], outputs: list[str], count: int) -> None:
    optimized = check(gated_model(nodes, outputs), "int4", count)
    assert "Mul" in op_types(optimized)


def test_layers_of_different_kinds_stay_apart() -> None:
    model = gated_model([GATE, SIGMOID, SILU, UP, multiply("a", "up")])
    for options in ({"replace.exclude": ["up_proj"]}, {"replace.exclude": ["gate_proj"]}, {"fuse": False}):
        report = optimize(model, recipe=NAMED["int4"], options=RECIPES["int4"] | options)
        assert report.model is not None and "Mul" in op_types(report.model)
    narrow = make_model(
        [GATE, UP, multiply("gate", "up")],
        {"x": (FLOAT, ["batch", K])},
        {"y": (FLOAT, ["batch", N])},
        {"G": random_weight(K, N), "U": random_weight(K, 1, seed=1)},
    )
    report = optimize(narrow, recipe=NAMED["int4"], options=RECIPES["int4"])
    assert report.model is not None and op_types(report.model).count("W4A8MatMul") == 2


def test_float16_layers_stay_apart() -> None:
    """The model rounds the values between the layers to float16; a joined operator would not."""
    check(gated_model([GATE, SIGMOID, SILU, UP, multiply("a", "up")], dtype=np.float16), "int4", 2)


@pytest.mark.parametrize("dry_run", [True, False])
def test_report(dry_run: bool) -> None:
    model = gated_model([GATE, SIGMOID, SILU, UP, multiply("a", "up")])
    options = FAST | RECIPES["int4"]
    report = ortolan.optimize_onnx(model, recipe=NAMED["int4"], options=options, dry_run=dry_run)
    by_name = {layer.name: layer for layer in report.layers}
    assert by_name["gate_proj"].fused == ["silu", "gated"]
    assert by_name["up_proj"].fused == ["into the gate"]
    for layer in report.layers:
        assert layer.status == ("would replace" if dry_run else "replaced") and layer.new_op == "W4A8MatMul"
        assert layer.n == N and layer.bytes_after and (dry_run or layer.output_error is not None)


def test_pairs_that_share_weights_store_them_once() -> None:
    second = [
        helper.make_node(
            node.op_type,
            [f"{name}2" if name not in ("G", "U") else name for name in node.input],
            [f"{node.output[0]}2"],
            name=f"{node.name}2",
        )
        for node in (GATE, SIGMOID, SILU, UP, multiply("a", "up"))
    ]
    negated = helper.make_node("Neg", ["x"], ["x2"], name="neg")
    nodes = [GATE, SIGMOID, SILU, UP, multiply("a", "up"), negated, *second]
    optimized = check(gated_model(nodes, ["y", "y2"]), "int4", 2)
    weights = {node.input[1] for node in optimized.graph.node if node.domain == "ai.ortolan"}
    assert len(weights) == 1


def test_llama() -> None:
    model = tiny.tiny_llama()
    report = optimize(ir.to_proto(model), recipe=NAMED["int4"], options=RECIPES["int4"])
    gates = [layer for layer in report.layers if "gate_proj" in layer.name]
    assert gates and all("gated" in layer.fused for layer in gates)
    packed = [layer for layer in ortolan.inspect_onnx(report.model).linears if "gated" in layer.fused]
    assert len(packed) == len(gates)
    assert packed[0].weight_format == "int4, groups of 32 with integer scales, float scales for 256"
    assert (packed[0].k, packed[0].n) == (gates[0].k, 2 * gates[0].n)


def test_a_dry_run_with_two_passes_tells_what_the_run_does() -> None:
    """The first pass replaces only the gate layer, so the second pass finds no pair."""
    model = gated_model([GATE, SIGMOID, SILU, UP, multiply("a", "up")])
    steps = [
        {"name": "normalize"},
        {"name": "quantize", "bits": 4, "group_size": 32},
        {"name": "replace", "op": "W4A8MatMul", "may_grow": True, "select": ["gate_proj"]},
        {"name": "replace", "op": "W4A8MatMul", "may_grow": True},
    ]
    recipe = ortolan.Recipe.from_dict({"name": "two", "pass": steps})
    reports = [ortolan.optimize_onnx(model, recipe=recipe, dry_run=dry_run) for dry_run in (True, False)]
    fused = [{layer.name: layer.fused for layer in report.layers} for report in reports]
    assert fused[0] == fused[1] == {"gate_proj": ["silu"], "up_proj": []}


HALVES = [f"h{number}" for number in range(2)]


def halves_model(split: str, gate: int, columns: int, bias: bool, outputs: Sequence[str] = ("y",)) -> onnx.ModelProto:
    """Return a layer whose output is split in halves; half number `gate` passes through SiLU."""
    numbers = {"begin": [0], "middle": [columns // 2], "end": [np.iinfo(np.int64).max], "last": [-1]}
    sizes = {"sizes": [columns // 2] * 2}
    if split == "Split":
        taken = [helper.make_node("Split", ["p", "sizes"], HALVES, name="split", axis=-1)]
    else:
        ends = (("begin", "middle"), ("middle", "end"))
        taken = [
            helper.make_node("Slice", ["p", *bounds, "last"], [half], name=half)
            for bounds, half in zip(ends, HALVES, strict=True)
        ]
    layer = helper.make_node("Gemm", ["x", "W", "b"], ["p"]) if bias else helper.make_node("MatMul", ["x", "W"], ["p"])
    layer.name = "gate_up_proj"
    nodes = [
        layer,
        *taken,
        helper.make_node("Sigmoid", [HALVES[gate]], ["s"], name="sigmoid"),
        helper.make_node("Mul", [HALVES[gate], "s"], ["a"], name="silu"),
        multiply("a", HALVES[1 - gate], "product"),
        helper.make_node("MatMul", ["x", "R"], ["r"], name="r"),
        helper.make_node("Add", ["product", "r"], ["y"], name="add"),
    ]
    used = {name for node in nodes for name in node.input}
    constants = {name: np.array(value, np.int64) for name, value in (numbers | sizes).items() if name in used}
    weights = {"W": random_weight(K, columns), "R": random_weight(K, columns // 2, seed=4)}
    if bias:
        weights["b"] = random_weight(columns, seed=3)
    return make_model(
        nodes, {"x": (FLOAT, ["batch", K])}, {name: (FLOAT, ["batch", None]) for name in outputs}, weights | constants
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("split", ["Split", "Slice"])
@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize(("columns", "bias"), [(64, True), (42, True), (42, False)])
def test_halves_of_one_layer_become_one_node(recipe: str, split: str, gate: int, columns: int, bias: bool) -> None:
    optimized = check(halves_model(split, gate, columns, bias), recipe, 2)
    assert len(optimized.graph.node) == 2
    node = next(node for node in optimized.graph.node if node.name == "gate_up_proj")
    assert next(a.i for a in node.attribute if a.name == "gated_columns") == columns // 2


@pytest.mark.parametrize("split", ["Split", "Slice"])
@pytest.mark.parametrize("outputs", [["y", "p"], ["y", "h0"], ["y", "h1"]])
def test_halves_that_something_else_sees_stay_apart(split: str, outputs: list[str]) -> None:
    optimized = check(halves_model(split, 0, 64, True, outputs), "int4", 2)
    assert split in op_types(optimized)


def test_halves_in_the_report() -> None:
    for dry_run in (True, False):
        report = ortolan.optimize_onnx(
            halves_model("Slice", 1, 64, False), recipe=NAMED["int4"], options=FAST | RECIPES["int4"], dry_run=dry_run
        )
        layer = next(layer for layer in report.layers if layer.name == "gate_up_proj")
        assert layer.fused == ["silu", "gated", "residual"] and layer.n == 64
        assert dry_run or layer.output_error is not None


def test_unequal_parts_are_no_halves() -> None:
    model = halves_model("Slice", 0, 64, False)
    for initializer in model.graph.initializer:
        if initializer.name == "middle":
            initializer.CopyFrom(onnx.numpy_helper.from_array(np.array([31], np.int64), "middle"))
    model.graph.node[2].input[1] = "other"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([33], np.int64), "other"))
    # Columns 31 and 32 belong to neither half.
    weight = next(initializer for initializer in model.graph.initializer if initializer.name == "R")
    weight.CopyFrom(onnx.numpy_helper.from_array(random_weight(K, 31), "R"))
    optimized = check(model, "int4", 2)
    assert "Slice" in op_types(optimized)
