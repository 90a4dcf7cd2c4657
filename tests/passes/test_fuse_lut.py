"""Pass fuse_lut: the chains it replaces, their answers, and reasons for chains that stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

import ortolan
from ortolan import OptimizationReport, Recipe
from ortolan.errors import RecipeError

from .lut_chains import CHAINS, NUMBERS, all_codes, answers, between, code_model, microsoft, node
from .small_models import make_model


def fuse(model: onnx.ModelProto, dry_run: bool = False, **options: Any) -> OptimizationReport:
    passes = [{"name": "normalize"}, {"name": "fuse_lut", **options}, {"name": "verify", "seconds": 0.0}]
    return ortolan.optimize_onnx(model, recipe=Recipe.from_dict({"name": "lut", "pass": passes}), dry_run=dry_run)


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    result = fuse(model).model
    assert result is not None
    onnx.checker.check_model(result)
    return result


def op_types(model: onnx.ModelProto) -> list[str]:
    return [one.op_type for one in model.graph.node]


def assert_same_answers(model: onnx.ModelProto, optimized: onnx.ModelProto, x_type: type) -> None:
    """Check the answers for every value of x, with the library and without it."""
    feeds = {"x": all_codes(x_type)}
    before = answers(model, feeds)
    for library in (True, False):
        for expected, found in zip(before, answers(optimized, feeds, library), strict=True):
            assert expected.dtype == found.dtype
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("x_type", [np.uint8, np.int8])
@pytest.mark.parametrize("name", CHAINS)
def test_one_lookup_answers_what_the_chain_answered(name: str, x_type: type) -> None:
    model = code_model(CHAINS[name], x_type, constants={"code": np.array(100, x_type)})
    report = fuse(model)
    assert report.model is not None
    assert op_types(report.model) == ["LutPostOp"]
    last = CHAINS[name][-1]
    assert [one.name for one in report.model.graph.node] == [last.name]
    assert [(one.name, one.status, one.entries) for one in report.lookups] == [(last.name, "replaced", 256)]
    constant = {"n_t", "n_u", "n_r"} if name == "quantized_numbers" else set()
    assert report.lookups[0].operators == [one.op_type for one in CHAINS[name] if one.name not in constant]
    assert len(report.model.graph.initializer) == 1  # only the table is left
    assert_same_answers(model, report.model, x_type)


@pytest.mark.parametrize("x_type", [np.uint16, np.int16])
@pytest.mark.parametrize("name", ["tanh", "gelu_by_erf", "silu", "microsoft", "piecewise"])
def test_lookups_of_16_bits(name: str, x_type: type) -> None:
    model = code_model(CHAINS[name], x_type)
    report = fuse(model)
    assert report.model is not None and op_types(report.model) == ["LutPostOp"]
    assert report.lookups[0].entries == 65536
    assert_same_answers(model, report.model, x_type)
    assert "has more than 8 bits (option bits)" in str(fuse(model, bits=8).lookups[0].reason)


@pytest.mark.parametrize("opset", [13, 17, 19])
def test_16_bits_in_older_opsets_by_microsoft_operators(opset: int) -> None:
    model = code_model(CHAINS["microsoft"], np.uint16, opset=opset)
    optimized = fused(model)
    assert op_types(optimized) == ["LutPostOp"]
    assert_same_answers(model, optimized, np.uint16)


def test_bits_may_change() -> None:
    nodes = [*CHAINS["tanh"][:-1], node("QuantizeLinear", "b y_scale other", "y")]
    for x_type, y_type in ((np.uint8, np.int8), (np.int8, np.uint16), (np.int16, np.uint8)):
        zero = np.array(np.iinfo(y_type).max // 2, y_type)
        model = code_model(nodes, x_type, {"y": y_type}, {"other": zero, "scale": np.array(0.01, np.float32)})
        optimized = fused(model)
        assert op_types(optimized) == ["LutPostOp"]
        assert_same_answers(model, optimized, x_type)


def test_float_output() -> None:
    model = code_model([*CHAINS["gelu_by_erf"][:-2], node("Mul", "half m", "y")], outputs={"y": np.float32})
    optimized = fused(model)
    assert op_types(optimized) == ["LutPostOp"]
    assert_same_answers(model, optimized, np.uint8)


def test_values_that_others_use_stay() -> None:
    """A MatMul also reads the Tanh output, whose DequantizeLinear must stay so that ORT can fuse it."""
    nodes = [
        node("DequantizeLinear", "x scale zero", "a"),
        node("Tanh", "a", "t"),
        node("QuantizeLinear", "t y_scale y_zero", "q"),
        node("DequantizeLinear", "q y_scale y_zero", "d"),
        node("MatMul", "d weight", "y"),
        node("MatMul", "a weight", "z"),
    ]
    weight = np.ones((17, 3), np.float32)
    model = code_model(nodes, outputs={"y": np.float32, "z": np.float32}, constants={"weight": weight})
    optimized = fused(model)
    assert sorted(op_types(optimized)) == ["DequantizeLinear", "DequantizeLinear", "LutPostOp", "MatMul", "MatMul"]
    assert [one.name for one in optimized.graph.node if one.op_type == "LutPostOp"] == ["n_q"]
    assert_same_answers(model, optimized, np.uint8)


def test_every_value_that_is_needed_gets_a_table() -> None:
    nodes = [
        node("DequantizeLinear", "x scale zero", "a"),
        node("Exp", "a", "e"),
        node("QuantizeLinear", "e y_scale y_zero", "y"),
        node("Sqrt", "e", "r"),
        node("QuantizeLinear", "r y_scale y_zero", "z"),
    ]
    model = code_model(nodes, outputs={"y": np.uint8, "z": np.uint8})
    optimized = fused(model)
    assert op_types(optimized) == ["LutPostOp", "LutPostOp"]
    assert_same_answers(model, optimized, np.uint8)


def test_equal_tables_are_stored_once() -> None:
    nodes = []
    for i in range(2):
        nodes += [
            node("DequantizeLinear", "x scale zero", f"a{i}"),
            node("Tanh", f"a{i}", f"t{i}"),
            node("QuantizeLinear", f"t{i} y_scale y_zero", f"y{i}"),
        ]
    model = code_model(nodes, outputs={"y0": np.uint8, "y1": np.uint8})
    optimized = fused(model)
    assert op_types(optimized) == ["LutPostOp", "LutPostOp"]
    assert len(optimized.graph.initializer) == 1
    assert_same_answers(model, optimized, np.uint8)


def test_inside_of_a_branch() -> None:
    branches = []
    for name, op_type in (("then", "Tanh"), ("else", "Sigmoid")):
        nodes = [
            helper.make_node("DequantizeLinear", ["x", "scale", "zero"], [f"{name}_a"], name=f"{name}_dq"),
            helper.make_node(op_type, [f"{name}_a"], [f"{name}_b"], name=f"{name}_f"),
            helper.make_node("QuantizeLinear", [f"{name}_b", "y_scale", "zero"], [f"{name}_y"], name=f"{name}_q"),
        ]
        output = helper.make_tensor_value_info(f"{name}_y", TensorProto.UINT8, ["a", "b"])
        branches.append(helper.make_graph(nodes, name, [], [output]))
    choice = helper.make_node("If", ["which"], ["y"], name="choice", then_branch=branches[0], else_branch=branches[1])
    model = make_model(
        [choice],
        {"x": (TensorProto.UINT8, ["a", "b"]), "which": (TensorProto.BOOL, [])},
        {"y": (TensorProto.UINT8, ["a", "b"])},
        {"scale": NUMBERS["scale"], "y_scale": NUMBERS["y_scale"], "zero": np.array(128, np.uint8)},
    )
    report = fuse(model)
    assert report.model is not None
    assert {one.name for one in report.lookups} == {"then_q", "else_q"}
    for which in (True, False):
        feeds = {"x": all_codes(np.uint8), "which": np.array(which)}
        for library in (True, False):
            np.testing.assert_array_equal(answers(report.model, feeds, library)[0], answers(model, feeds)[0])


REFUSED: dict[str, tuple[list[NodeProto], dict[str, np.ndarray], str]] = {
    "softmax": (between(node("Softmax", "a", "b")), {}, "Softmax is not element-wise"),
    "random": (between(node("Dropout", "a", "b")), {}, "Dropout is random"),
    "unknown_domain": (between(microsoft("BiasGelu", "a row", "b")), {"row": np.ones(17, np.float32)}, "BiasGelu is"),
    "row": (
        between(node("Add", "a row", "b")),
        {"row": np.ones(17, np.float32)},
        "Add has a constant of shape [17], expected a scalar: it computes a different function at each position",
    ),
    "more_axes": (
        between(node("Add", "a deep", "c"), node("Reshape", "c shape", "b")),
        {"deep": np.ones((1, 1, 1), np.float32), "shape": np.array([-1, 17], np.int64)},
        "Add has a constant of shape [1, 1, 1], expected []: 'x' is of rank 2",
    ),
    "per_axis": (
        [node("DequantizeLinear", "x scales zeros", "a", axis=1), node("Tanh", "a", "y")],
        {"scales": np.ones(17, np.float32), "zeros": np.zeros(17, np.uint8)},
        "DequantizeLinear has a constant of shape [17], expected a scalar: it is quantized per axis",
    ),
    "quantized_per_axis": (
        [
            *CHAINS["tanh"][:1],
            node("QuantizeLinear", "a scales zeros", "q", axis=1),
            node("DequantizeLinear", "q scales zeros", "y", axis=1),
        ],
        {"scales": np.ones(17, np.float32), "zeros": np.zeros(17, np.uint8)},
        "QuantizeLinear has a constant of shape [17]",
    ),
    "one_operator": (
        [*CHAINS["tanh"][:1], node("Relu", "a", "r"), node("MatMul", "a weight", "m"), node("Add", "r m", "y")],
        {"weight": np.ones((17, 17), np.float32)},
        "a table for n_r would save only one operator",
    ),
    "whole_numbers": (
        [
            *CHAINS["tanh"][:1],
            node("Cast", "a", "h", to=TensorProto.FLOAT16),
            node("Cast", "h", "i", to=TensorProto.INT64),
            node("Gather", "row i", "y"),
        ],
        {"row": np.ones(1000, np.float32)},
        "n_i has type int64, expected 8 or 16 bits or float32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_says_why_not(name: str) -> None:
    nodes, constants, reason = REFUSED[name]
    float_output = nodes[-1].op_type != "QuantizeLinear"
    model = code_model(nodes, outputs={"y": np.float32 if float_output else np.uint8}, constants=constants)
    for dry_run in (True, False):
        report = fuse_only(model, dry_run=dry_run)
        assert "LutPostOp" not in (op_types(report.model) if report.model is not None else [])
        assert {one.status for one in report.lookups} == {"kept"}
        assert report.lookups[0].name == "n_a"
        assert reason in str(report.lookups[0].reason)
        assert reason[:40] in " ".join(str(report).split())
        assert any("found no chain" in note for note in report.notes)


def fuse_only(model: onnx.ModelProto, dry_run: bool = False, **options: Any) -> OptimizationReport:
    passes = [{"name": "normalize"}, {"name": "fuse_lut", **options}]
    return ortolan.optimize_onnx(model, recipe=Recipe.from_dict({"name": "lut", "pass": passes}), dry_run=dry_run)


def test_number_of_one_axis_where_the_rank_is_unknown() -> None:
    model = code_model(CHAINS["prelu"])
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert "'x' is of unknown rank" in str(fuse_only(model).lookups[0].reason)


def test_operand_that_is_computed_from_something_else() -> None:
    model = code_model(between(node("Mul", "a factor", "b")), constants={"factor": np.array(2, np.float32)})
    model.graph.initializer.remove(next(one for one in model.graph.initializer if one.name == "factor"))
    model.graph.input.append(helper.make_tensor_value_info("factor", TensorProto.FLOAT, []))
    assert "Mul has another input that is neither constant nor" in str(fuse_only(model).lookups[0].reason)


def test_initializers_that_callers_may_override_are_no_constants() -> None:
    model = code_model(CHAINS["tanh"])
    model.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, []))
    assert "has another input that is neither constant" in str(fuse_only(model).lookups[0].reason)


def test_stored_weights_are_left_to_others() -> None:
    nodes = [node("DequantizeLinear", "w scale zero", "a"), node("MatMul", "x a", "y")]
    model = make_model(
        nodes,
        {"x": (TensorProto.FLOAT, [2, 17])},
        {"y": (TensorProto.FLOAT, [2, 3])},
        {"w": np.ones((17, 3), np.uint8), "scale": NUMBERS["scale"], "zero": np.array(1, np.uint8)},
    )
    assert fuse_only(model).lookups == []


def test_selected_nodes_only() -> None:
    model = code_model(CHAINS["tanh"])
    for options in ({"select": ["other"]}, {"exclude": ["n_y"]}):
        assert fuse_only(model, **options).lookups[0].reason == "n_y is not selected"


def test_dry_run_changes_nothing() -> None:
    model = code_model(CHAINS["silu"])
    before = model.SerializeToString()
    report = fuse(model, dry_run=True)
    assert [one.status for one in report.lookups] == ["would replace"]
    assert "would replace 1 chain" in str(report)
    assert model.SerializeToString() == before
    fuse(model)
    assert model.SerializeToString() == before


def test_needs_normalize_for_functions_and_old_opsets() -> None:
    model = code_model(CHAINS["tanh"])
    model.opset_import[0].version = 12
    recipe = Recipe.from_dict({"name": "lut", "pass": [{"name": "fuse_lut"}]})
    with pytest.raises(RecipeError, match="needs pass 'normalize' before it"):
        ortolan.optimize_onnx(model, recipe=recipe)


def test_not_portable_keeps_no_function() -> None:
    passes = [{"name": "normalize"}, {"name": "fuse_lut"}]
    recipe = Recipe.from_dict({"name": "lut", "pass": passes})
    report = ortolan.optimize_onnx(code_model(CHAINS["tanh"]), recipe=recipe, portable=False)
    assert report.model is not None and not report.model.functions


def test_long_chains() -> None:
    """Chains longer than Python's recursion limit, after a MatMul and after a quantized value."""
    nodes = [node("MatMul", "w weight", "v0")]
    nodes += [node("Add", f"v{i} half", f"v{i + 1}") for i in range(1500)]
    model = make_model(
        [*nodes, *between(node("Mul", "a v1500", "b"))],
        {"x": (TensorProto.UINT8, ["rows", 17]), "w": (TensorProto.FLOAT, ["rows", 17])},
        {"y": (TensorProto.UINT8, ["rows", 17])},
        {
            **{name: NUMBERS[name] for name in ("half", "scale", "y_scale")},
            **dict.fromkeys(("zero", "y_zero"), np.array(128, np.uint8)),
            "weight": np.ones((17, 17), np.float32),
        },
    )
    assert "Mul has another input" in str(fuse_only(model).lookups[0].reason)
    chain = [node("DequantizeLinear", "x scale zero", "v0")]
    chain += [node("Add" if i % 2 else "Sub", f"v{i} half", f"v{i + 1}") for i in range(1500)]
    chain.append(node("QuantizeLinear", "v1500 y_scale y_zero", "y"))
    model = code_model(chain)
    optimized = fuse_only(model).model
    assert optimized is not None and op_types(optimized) == ["LutPostOp"]
    assert_same_answers(model, optimized, np.uint8)


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed: int) -> None:
    """Random element-wise graphs with outputs anywhere match within one quantization step.

    If several values of a chain are used, ORT may compute them with other operators than the table.
    """
    rng = np.random.default_rng(seed)
    nodes = [node("DequantizeLinear", "x scale zero", "v0")]
    values, outputs = ["v0"], {}
    for i in range(1, int(rng.integers(3, 14))):
        first, second = (str(rng.choice(values)) for _ in range(2))
        match rng.integers(4):
            case 0:
                nodes.append(node(str(rng.choice(["Tanh", "Sigmoid", "Relu", "Erf", "Neg", "Abs"])), first, f"v{i}"))
            case 1:
                nodes.append(node(str(rng.choice(["Add", "Sub", "Mul", "Max"])), f"{first} {second}", f"v{i}"))
            case 2:
                nodes.append(node(str(rng.choice(["Add", "Mul", "Div"])), f"{first} half", f"v{i}"))
            case 3:
                nodes.append(node("QuantizeLinear", f"{first} y_scale y_zero", f"q{i}"))
                nodes.append(node("DequantizeLinear", f"q{i} y_scale y_zero", f"v{i}"))
                if rng.random() < 0.5:
                    outputs[f"q{i}"] = np.uint8
        values.append(f"v{i}")
        if rng.random() < 0.2:
            outputs[f"v{i}"] = np.float32
    nodes.append(node("QuantizeLinear", f"{values[-1]} y_scale y_zero", "y"))
    outputs["y"] = np.uint8
    model = code_model(nodes, outputs=outputs)
    optimized = fused(model)
    assert "n_y" in [one.name for one in optimized.graph.node if one.op_type == "LutPostOp"]
    feeds = {"x": all_codes(np.uint8)}
    for expected, found in zip(answers(model, feeds), answers(optimized, feeds), strict=True):
        step = 1 if expected.dtype == np.uint8 else float(NUMBERS["y_scale"]) * 8
        assert np.abs(found.astype(np.float64) - expected).max() <= step
