"""Weights that are computed from constants: the computed values, and refusals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan.errors import ModelError
from ortolan.graph_passes.find.linear import Linear, NotLinear, find_linears

from .small_models import make_model

K, N = 64, 48
RNG = np.random.default_rng(0)
W, A, B = (RNG.standard_normal(shape).astype(np.float32) for shape in ((K, N), (K, 2), (2, N)))
Q = RNG.integers(-127, 128, (K, N)).astype(np.int8)
SCALES = RNG.random((1, N), dtype=np.float32) / 100
CENTRE = RNG.integers(0, 9, (1, N)).astype(np.float32)


def node(op_type: str, *inputs: str, to: str | Sequence[str] = "W", **attributes: object) -> onnx.NodeProto:
    outputs = [to] if isinstance(to, str) else to
    return helper.make_node(op_type, list(inputs), list(outputs), name=f"make {outputs[0]}", **attributes)


CASES = {
    "cast and scale": (
        [node("Cast", "q", to="f", to_=TensorProto.FLOAT), node("Mul", "f", "s")],
        {"q": Q, "s": SCALES},
        Q * SCALES,
    ),
    "cast, centre and scale": (
        [node("Cast", "q", to="f", to_=TensorProto.FLOAT), node("Sub", "f", "z", to="c"), node("Mul", "c", "s")],
        {"q": Q, "s": SCALES, "z": CENTRE},
        (Q - CENTRE) * SCALES,
    ),
    "low rank added": (
        [node("MatMul", "a", "b", to="ab"), node("Add", "w", "ab")],
        {"w": W, "a": A, "b": B},
        W + A @ B,
    ),
    "joined": ([node("Concat", "l", "r", axis=1)], {"l": W[:, :2].copy(), "r": W[:, 2:].copy()}, W),
    "cut out": (
        [node("Slice", "w", "starts", "ends", "axes")],
        {
            "w": np.concatenate([A, W], axis=1),
            "starts": np.array([2]),
            "ends": np.array([2 + N]),
            "axes": np.array([1]),
        },
        W,
    ),
    "split": (
        [node("Split", "w", "sizes", to=("other", "W"), axis=1)],
        {"w": np.concatenate([A, W], axis=1), "sizes": np.array([2, N])},
        W,
    ),
    "reshaped": ([node("Reshape", "w", "shape")], {"w": W.reshape(2, -1), "shape": np.array([K, -1])}, W),
    "negative": ([node("Neg", "w", to="n"), node("Identity", "n")], {"w": -W}, W),
}


def model_of(nodes: Sequence[onnx.NodeProto], weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    for one in nodes:
        for attribute in one.attribute:
            attribute.name = attribute.name.removesuffix("_")
    product = helper.make_node("MatMul", ["x", "W"], ["y"], name="product")
    inputs, outputs = {"x": (TensorProto.FLOAT, ["rows", K])}, {"y": (TensorProto.FLOAT, ["rows", None])}
    return make_model([*nodes, product], inputs, outputs, weights)


def find(nodes: Sequence[onnx.NodeProto], weights: dict[str, np.ndarray]) -> Linear | NotLinear:
    products = {"product"}
    return next(one for one in find_linears(ir.from_proto(model_of(nodes, weights))) if one.name in products)


@pytest.mark.parametrize("name", CASES)
def test_weights_made_of_constants(name: str) -> None:
    nodes, weights, expected = CASES[name]
    found = find(nodes, weights)
    assert isinstance(found, Linear) and (found.k, found.n) == (K, N)
    np.testing.assert_allclose(found.matrix(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_they_are_replaced_and_leave_nothing_behind(name: str) -> None:
    nodes, weights, _ = CASES[name]
    report = ortolan.optimize_onnx(model_of(nodes, weights), weights="int8", ignore=())
    assert report.model is not None and [layer.new_op for layer in report.layers if layer.new_op] == ["SparseAMXMatMul"]
    assert [one.op_type for one in report.model.graph.node] == ["SparseAMXMatMul"]
    assert not {tensor.name for tensor in report.model.graph.initializer} & weights.keys()


def test_random_numbers_are_no_constants() -> None:
    found = find([node("RandomNormal", shape=[K, N])], {})
    assert isinstance(found, NotLinear) and "computed at run time" in found.reason


def test_what_cannot_be_worked_out_is_named() -> None:
    """The output shape of NonZero is known only after it has run."""
    found = find([node("NonZero", "w", to="where"), node("Cast", "where", to_=TensorProto.FLOAT)], {"w": W})
    assert isinstance(found, NotLinear)
    assert "weight 'W' is computed by NonZero ('make where') on constants that cannot be evaluated" in found.reason


def test_a_constant_is_not_much_larger_than_what_it_is_made_of() -> None:
    found = find([node("ConstantOfShape", "shape")], {"shape": np.array([1 << 20, 1 << 20])})
    assert isinstance(found, NotLinear) and "ConstantOfShape ('make W')" in found.reason


@pytest.mark.parametrize("op_type", ["Add", "Neg"])
def test_walks_are_short(op_type: str) -> None:
    """A chain of 3001 nodes, and one where each Add reads the same value twice, so paths double."""
    nodes = [
        node(op_type, *([f"w{i}"] * (2 if op_type == "Add" else 1)), to=f"w{i + 1}" if i < 3000 else "W")
        for i in range(3001)
    ]
    assert isinstance(find(nodes, {"w0": W}), NotLinear)


def test_numbers_that_cannot_be_computed_are_an_error_of_the_model() -> None:
    """A Reshape to a wrong size is found only when the values are computed."""
    found = find([node("Reshape", "w", "shape")], {"w": W, "shape": np.array([5, 5])})
    assert isinstance(found, Linear)
    with pytest.raises(ModelError, match=r"node 'make W' \(Reshape\) cannot be computed from its constants: "):
        found.matrix()
