"""Test find/separate_experts.py: experts that are separate layers become one operator MoE."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import ortolan
from ortolan.graph_passes.find.separate_experts import LeftExperts, find_separate_experts, join_experts
from ortolan.graph_passes.operators.nodes import NewNames
from ortolan.graph_passes.passes.normalize import normalize
from ortolan.graph_passes.recipe import Recipe
from ortolan.session import create_session

from .separate_experts import EXPERTS, FORMS, HIDDEN, ROUTERS, SELECTED, UNUSED, rows_of_x, separate

OPTIONS = {"verify.seconds": 0.0}


def normalized(proto: onnx.ModelProto) -> ir.Model:
    model = ir.from_proto(proto)
    normalize(model, "the model")
    return model


def joined(proto: onnx.ModelProto) -> ir.Model:
    model = normalized(proto)
    assert join_experts(model, NewNames(model)) == []
    return model


def answer(model: Any, x: np.ndarray, *wanted: str) -> list[np.ndarray]:
    session = create_session(model if isinstance(model, onnx.ModelProto) else ir.to_proto(model))
    return session.run(list(wanted) or None, {"x": x})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("form", FORMS)
def test_joined_experts_compute_the_same(form: str, router: str, bias: bool) -> None:
    original = separate(form, router, bias=bias)
    model = joined(original)
    counts = Counter(node.op_type for node in model.graph)
    assert counts["MoE"] == 1 and counts["MatMul"] == 1  # the router
    assert not counts.keys() & {"NonZero", "ScatterElements", "ScatterND", "TopK", "Sigmoid"}
    (node,) = (node for node in model.graph if node.op_type == "MoE")
    assert node.name == "mlp/experts"
    for batch, sequence in ((1, 1), (3, 7), (0, 7)):
        x = rows_of_x(batch, sequence)
        (expected,), (found,) = answer(original, x), answer(model, x)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_tokens_are_spread_unevenly() -> None:
    """The inputs of these tests leave one expert without tokens, and give another a token of each row."""
    proto = separate()
    (indices,) = (node.output[1] for node in proto.graph.node if node.op_type == "TopK")
    proto.graph.output.append(onnx.helper.make_tensor_value_info(indices, onnx.TensorProto.INT64, None))
    found = np.bincount(answer(proto, rows_of_x(3, 7), indices)[0].ravel(), minlength=EXPERTS)
    assert found[UNUSED] == 0 and found[0] == 21 and found.sum() == 21 * SELECTED


@pytest.mark.parametrize(("weights", "most"), [("int8", 0.03), ("int4", 0.15)])
@pytest.mark.parametrize("form", FORMS)
def test_experts_are_replaced(form: str, weights: str, most: float) -> None:
    report = ortolan.optimize_onnx(separate(form), weights=weights, options=OPTIONS)
    assert report.model is not None
    counts = Counter(node.op_type for node in report.model.graph.node)
    assert counts["MoE"] == 1 and not counts["NonZero"]
    (error,) = report.output_error
    assert error.relative_l2 < most
    (layer,) = (layer for layer in report.layers if layer.name == "mlp/experts")
    assert (layer.new_op, layer.weight_bits) == ("MoE", int(weights[3:]))
    assert layer.bytes_before == EXPERTS * 3 * HIDDEN * 32 * 4
    (router,) = (layer for layer in report.layers if layer.name == "mlp/gate/MatMul")
    assert (router.new_op, router.reason) == (None, "it routes tokens to experts, and stays float")
    x = rows_of_x(2, 9)
    (batch,) = answer(report.model, x)
    for one in range(2):
        for token in range(9):
            (alone,) = answer(report.model, x[one : one + 1, token : token + 1])
            assert np.array_equal(alone[0, 0], batch[one, token])


@pytest.mark.parametrize(
    ("form", "wrong", "reason"),
    [
        ("optimum", "index", "it adds results of experts [0, 1, 1, 3, 4]"),
        ("optimum", "shape", "layer 'mlp/experts.2/gate_proj/MatMul' has another shape than that of expert 0"),
        ("optimum", "weights", "expert 2: its weights are those of other tokens"),
        ("optimum", "user", "a result of 'mlp/experts.1/up_proj/MatMul' is used elsewhere, too"),
        ("short", "replaced", "its results are not added to each other"),
    ],
)
def test_other_forms_are_left_with_a_reason(form: str, wrong: str, reason: str) -> None:
    model = normalized(separate(form, wrong=wrong))
    before = [node.name for node in model.graph]
    (left,) = join_experts(model, NewNames(model))
    assert left.reason == reason
    assert [node.name for node in model.graph] == before
    report = ortolan.optimize_onnx(separate(form, wrong=wrong), weights="int8", options=OPTIONS)
    assert f"the experts of {left.name!r} stay separate layers: {reason}" in report.notes
    assert sum(layer.new_op == "SparseAMXMatMul" for layer in report.layers) == 3 * EXPERTS + 1


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "bf16"},
        {"weights": "int8", "sparsity": 0.5},
        {"weights": "int4", "ignore": ["*experts.1*"]},
        {"weights": "int8", "options": {"experts.exclude": ["mlp/*"]}},
    ],
    ids=str,
)
def test_experts_stay_separate_if_layers_are_treated_one_by_one(options: dict[str, Any]) -> None:
    options["options"] = {**OPTIONS, **options.get("options", {})}
    report = ortolan.optimize_onnx(separate(), **options)
    assert report.model is not None
    names = {layer.name for layer in report.layers}
    assert f"mlp/experts.{UNUSED}/down_proj/MatMul" in names and "mlp/experts" not in names
    assert "NonZero" in {node.op_type for node in report.model.graph.node}


def test_a_calibrated_method_does_not_round_experts() -> None:
    calibration = [{"x": rows_of_x(2, 64)}]
    report = ortolan.optimize_onnx(separate(), weights="int4", method="gptq", calibration=calibration, options=OPTIONS)
    assert "experts of mixtures are rounded without calibration, not by gptq" in report.notes


def test_experts_stay_separate_if_one_is_pruned() -> None:
    recipe = Recipe.of(weights="int8").with_pass("prune", select=["*experts.1/up_proj*"])
    report = ortolan.optimize_onnx(separate(), recipe=recipe, options=OPTIONS)
    reason = "layer 'mlp/experts.1/up_proj/MatMul' is pruned"
    assert f"the experts of 'mlp/experts' stay separate layers: {reason}" in report.notes


def damage(proto: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Change an input, an integer attribute or a small integer constant at random."""
    kind, nodes = rng.integers(3), proto.graph.node
    if kind == 0:
        node, other = nodes[rng.integers(len(nodes))], nodes[rng.integers(len(nodes))]
        node.input[rng.integers(len(node.input))] = other.input[rng.integers(len(other.input))]
    elif kind == 1:
        found = [one for node in nodes for one in node.attribute if one.type in (one.INT, one.INTS)]
        one = found[rng.integers(len(found))]
        if one.type == one.INT:
            one.i = int(rng.integers(-2, 4))
        else:
            one.ints[rng.integers(len(one.ints))] = int(rng.integers(0, 3))
    else:
        integers = [one for one in proto.graph.initializer if one.data_type == onnx.TensorProto.INT64]
        one = integers[rng.integers(len(integers))]
        array = onnx.numpy_helper.to_array(one).copy()
        array.reshape(-1)[rng.integers(array.size)] = rng.integers(-6, 7)
        one.CopyFrom(onnx.numpy_helper.from_array(array, one.name))


def test_a_divisor_that_is_another_sum() -> None:
    """The sum over one column of weights that were reshaped makes every weight 1."""
    proto = separate()
    (total,) = (node for node in proto.graph.node if node.op_type == "ReduceSum")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 1]), "column"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, SELECTED]), "as_before"))
    at = list(proto.graph.node).index(total)
    column = onnx.helper.make_node("Reshape", [total.input[0], "column"], ["one_column"])
    back = onnx.helper.make_node("Reshape", ["sums", "as_before"], [total.output[0]])
    total.input[0], total.output[0] = "one_column", "sums"
    proto.graph.node.insert(at, column)
    proto.graph.node.insert(at + 2, back)
    (left,) = join_experts(model := normalized(proto), NewNames(model))
    assert left.reason == "its weights are divided by another sum"


def test_casts_in_a_circle() -> None:
    proto = separate()
    cast = next(node for node in proto.graph.node if node.op_type == "Cast")
    cast.input[0] = cast.output[0]
    list(find_separate_experts(ir.from_proto(proto)))


@pytest.mark.parametrize("seed", range(4))
def test_damaged_mixtures_are_never_joined_wrongly(seed: int) -> None:
    """A mixture whose wiring, attributes or constants are changed at random is left, or still computes the same."""
    rng, compared = np.random.default_rng(seed), 0
    x = rows_of_x(2, 5)
    for _ in range(60):
        proto = separate(FORMS[rng.integers(2)], ROUTERS[rng.integers(len(ROUTERS))])
        damage(proto, rng)
        try:
            expected = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
        except Exception:  # the damaged model is invalid, for which ONNX Runtime has many exceptions
            continue
        model = normalized(proto)
        if all(isinstance(found, LeftExperts) for found in find_separate_experts(model)):
            continue
        join_experts(model, NewNames(model))
        np.testing.assert_allclose(answer(model, x)[0], expected[0], rtol=1e-5, atol=1e-5)
        compared += 1
    assert compared
