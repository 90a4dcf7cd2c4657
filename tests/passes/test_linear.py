"""Linear layers that are found, and reasons for MatMuls that are not linear layers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from ortolan.graph_passes.find.linear import Linear, find_linears
from ortolan.models import tiny

from .small_models import make_model, matmul_model, random_weight

FLOAT = TensorProto.FLOAT


def find(nodes, weights, inputs=None, outputs=None, **arguments) -> list:
    model = make_model(
        nodes, inputs or {"x": (FLOAT, ["batch", 8])}, outputs or {"y": (FLOAT, ["batch", None])}, weights, **arguments
    )
    return find_linears(ir.from_proto(model))


def reason(*arguments, **keywords) -> str:
    (found,) = find(*arguments, **keywords)
    assert not isinstance(found, Linear)
    return found.reason


def gemm(**attributes) -> onnx.NodeProto:
    return helper.make_node("Gemm", ["x", "W", "b"], ["y"], name="g", **attributes)


WEIGHTS = {"W": random_weight(8, 8), "b": random_weight(8)}


@pytest.mark.parametrize(
    ("attributes", "text"),
    [({"alpha": 0.5}, "alpha is 0.5"), ({"beta": 2.0}, "beta is 2"), ({"transA": 1}, "transA is 1")],
)
def test_gemm_with_other_attributes(attributes, text):
    inputs = {"x": (FLOAT, [8, 8])}
    assert text in reason([gemm(**attributes)], WEIGHTS, inputs)


def test_gemm_with_a_bias_for_each_row():
    assert "has shape [3, 8], expected [8]" in reason(
        [gemm()], {"W": random_weight(8, 8), "b": random_weight(3, 8)}, {"x": (FLOAT, [3, 8])}
    )


def test_gemm_with_a_computed_bias():
    inputs = {"x": (FLOAT, ["batch", 8]), "b": (FLOAT, [8])}
    assert "bias 'b' is computed at run time" in reason([gemm()], {"W": random_weight(8, 8)}, inputs)


def test_gemm_without_bias_may_have_any_beta():
    (found,) = find([helper.make_node("Gemm", ["x", "W"], ["y"], beta=0.0)], {"W": random_weight(8, 8)})
    assert isinstance(found, Linear) and found.bias() is None


def test_attention_scores():
    inputs = {"x": (FLOAT, ["batch", 8]), "z": (FLOAT, [8, 8])}
    assert "run time" in reason([helper.make_node("MatMul", ["x", "z"], ["y"], name="m")], {}, inputs)


def test_weight_as_first_input():
    assert "first input" in reason(
        [helper.make_node("MatMul", ["W", "x"], ["y"], name="m")], {"W": random_weight(8, 8)}, {"x": (FLOAT, [8, 3])}
    )


def test_batched_weight():
    node = helper.make_node("MatMul", ["x", "W"], ["y"], name="m")
    assert "is 3-D, expected 2-D" in reason(
        [node], {"W": random_weight(2, 8, 8)}, outputs={"y": (FLOAT, [2, None, None])}
    )


def test_weight_that_callers_may_replace():
    inputs = {"x": (FLOAT, ["batch", 8]), "W": (FLOAT, [8, 8])}
    node = helper.make_node("MatMul", ["x", "W"], ["y"], name="m")
    assert "also a graph input" in reason([node], {"W": random_weight(8, 8)}, inputs)


def test_double_weights():
    node = helper.make_node("MatMul", ["x", "W"], ["y"], name="m")
    types = {"x": (TensorProto.DOUBLE, ["batch", 8])}, {"y": (TensorProto.DOUBLE, ["batch", 8])}
    assert "is DOUBLE" in reason([node], {"W": random_weight(8, 8, dtype=np.float64)}, *types)


def test_fused_operators_are_named_with_the_reason():
    node = helper.make_node("FusedMatMul", ["x", "W"], ["y"], domain="com.microsoft", name="f", alpha=0.5)
    text = reason([node], {"W": random_weight(8, 8)}, domains={"com.microsoft": 1})
    assert "com.microsoft::FusedMatMul" in text and "run the pass normalize first" in text


def test_bias_on_either_side_of_the_add():
    for inputs in (["p", "b"], ["b", "p"]):
        nodes = [helper.make_node("MatMul", ["x", "W"], ["p"], name="m"), helper.make_node("Add", inputs, ["y"])]
        (found,) = find(nodes, WEIGHTS)
        np.testing.assert_array_equal(found.bias(), WEIGHTS["b"])
        assert found.op == "MatMul+Add" and found.output.name == "y"


@pytest.mark.parametrize("shape", [(1,), (1, 8), ()])
def test_other_additions_are_left_alone(shape):
    nodes = [helper.make_node("MatMul", ["x", "W"], ["p"], name="m"), helper.make_node("Add", ["p", "c"], ["y"])]
    (found,) = find(nodes, {"W": random_weight(8, 8), "c": np.ones(shape, np.float32)})
    assert found.add is None and found.output.name == "p"


@pytest.mark.parametrize("form", ["gemm", "gemm_trans_b", "transpose", "identity", "cast", "dequantize"])
def test_matrix_is_k_by_n_in_every_form(form):
    expected = next(find_linears(tiny.mlp((24, 40), "matmul")).__iter__()).matrix()
    (found,) = find_linears(tiny.mlp((24, 40), form))
    assert (found.k, found.n) == (24, 40)
    # Errors: 2^-11 for float16; for int8, half of 1/127 of the largest weight.
    atol = {"cast": 1e-3, "dequantize": 5e-3}.get(form, 0)
    np.testing.assert_allclose(found.matrix(), expected, atol=atol)


@pytest.mark.parametrize("axis", [0, 1])
def test_dequantized_in_blocks(axis):
    codes = np.random.default_rng(0).integers(-8, 8, (8, 6)).astype(np.int8)
    scales = np.random.default_rng(1).random((8, 3) if axis else (4, 6)).astype(np.float32)
    node = helper.make_node("DequantizeLinear", ["codes", "scales"], ["W"], axis=axis, block_size=2)
    product = helper.make_node("MatMul", ["x", "W"], ["y"])
    (found,) = find([node, product], {"codes": codes, "scales": scales}, opset=21)
    np.testing.assert_allclose(found.matrix(), codes * np.repeat(scales, 2, axis))


def test_patterns_match_names_of_nodes_and_weights_by_case():
    model = ir.from_proto(matmul_model())
    (found,) = find_linears(model)
    assert found.matches(("lin*",)) and found.matches(("W",)) and not found.matches(("LIN*",))
