"""Sensitivity: how much an error of each layer changes the outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from ortolan.errors import CalibrationError
from ortolan.graph_passes.auto.sensitivity import measure_sensitivities
from ortolan.graph_passes.find.linear import Linear, find_linears

from .small_models import make_model, random_weight

WIDTH = 64


def branches(dtype: int = TensorProto.FLOAT) -> ir.Model:
    """y = x + 0.1 (x W0) + 0.01 (x W1), z = x W2.

    The weights are orthogonal, so each layer's share of y is known.
    """
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    weights = {f"W{n}": np.linalg.qr(random_weight(WIDTH, WIDTH, seed=n))[0].astype(kind) for n in range(3)}
    weights |= {"tenth": np.array(0.1, kind), "hundredth": np.array(0.01, kind)}
    nodes = [
        helper.make_node("MatMul", ["x", "W0"], ["p0"], name="tenth"),
        helper.make_node("MatMul", ["x", "W1"], ["p1"], name="hundredth"),
        helper.make_node("MatMul", ["x", "W2"], ["z"], name="direct"),
        helper.make_node("Mul", ["p0", "tenth"], ["a"]),
        helper.make_node("Mul", ["p1", "hundredth"], ["b"]),
        helper.make_node("Add", ["x", "a"], ["c"]),
        helper.make_node("Add", ["c", "b"], ["y"]),
    ]
    shape = ["batch", "sequence", WIDTH]
    model = make_model(nodes, {"x": (dtype, shape)}, {"y": (dtype, shape), "z": (dtype, shape)}, weights)
    return ir.from_proto(model)


def measure(model: ir.Model, feeds: list[dict[str, np.ndarray]], outputs: list[str]) -> dict[str, float]:
    linears = [one for one in find_linears(model) if isinstance(one, Linear)]

    def open_model() -> Any:
        return ort.InferenceSession(ir.to_proto(model).SerializeToString())

    def new_name(wanted: str) -> str:
        assert wanted not in model.graph.initializers
        return f"{wanted}.new"

    return measure_sensitivities(model, linears, feeds, outputs, new_name, open_model, lambda done, total: None)


def feeds(*lengths: int, kind: Any = np.float32) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((1, length, WIDTH)).astype(kind)} for length in lengths]


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_a_branch_matters_by_its_share(dtype: int) -> None:
    kind = np.float32 if dtype == TensorProto.FLOAT else np.float16
    found = measure(branches(dtype), feeds(50, kind=kind), ["y"])
    assert found["tenth"] == pytest.approx(0.1, rel=0.1)
    assert found["hundredth"] == pytest.approx(0.01, rel=0.1 if dtype == TensorProto.FLOAT else 0.5)
    assert found["direct"] == 1.0


def test_only_wanted_outputs_count() -> None:
    assert measure(branches(), feeds(50), ["z"])["tenth"] == 0.0


def test_the_smallest_feeds_are_run() -> None:
    """Inputs that the model cannot run are skipped; if it can run none, an error is raised."""
    wrong = {"x": np.zeros((1, 200, WIDTH + 1), np.float32)}
    assert measure(branches(), [wrong, *feeds(2)], ["y"])["tenth"] > 0.05
    with pytest.raises(CalibrationError, match="does not run"):
        measure(branches(), [wrong], ["y"])
