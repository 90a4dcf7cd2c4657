"""bfloat16 models stay unchanged if ONNX Runtime can run them; otherwise they are converted to float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan.errors import ModelError, SessionError

from .small_models import make_model, optimize, random_weight, relative_error, run

_WIDTH = 64


def _weights() -> dict[str, np.ndarray]:
    return {f"w{number}": random_weight(_WIDTH, _WIDTH, seed=number).astype(ml_dtypes.bfloat16) for number in range(2)}


def _model(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    shape = ["batch", _WIDTH]
    return make_model(nodes, {"x": (TensorProto.FLOAT, shape)}, {"y": (TensorProto.FLOAT, shape)}, _weights(), opset=18)


def _computes() -> onnx.ModelProto:
    return _model(
        [
            helper.make_node("Cast", ["x"], ["narrow"], to=TensorProto.BFLOAT16),
            helper.make_node("MatMul", ["narrow", "w0"], ["product"], "first"),
            helper.make_node("Relu", ["product"], ["hidden"]),
            helper.make_node("MatMul", ["hidden", "w1"], ["result"], "second"),
            helper.make_node("Cast", ["result"], ["y"], to=TensorProto.FLOAT),
        ]
    )


def _stores() -> onnx.ModelProto:
    """Return a model that stores weights in bfloat16 and computes in float32."""
    nodes = [helper.make_node("Cast", [f"w{number}"], [f"f{number}"], to=TensorProto.FLOAT) for number in range(2)]
    return _model(
        [
            *nodes,
            helper.make_node("MatMul", ["x", "f0"], ["product"], "first"),
            helper.make_node("Relu", ["product"], ["hidden"]),
            helper.make_node("MatMul", ["hidden", "f1"], ["y"], "second"),
        ]
    )


def _expected(x: np.ndarray) -> np.ndarray:
    first, second = (weight.astype(np.float32) for weight in _weights().values())
    answer: np.ndarray = np.maximum(x @ first, 0) @ second
    return answer


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("as_file", [False, True])
def test_a_model_of_bfloat16_becomes_float32(weights: str, as_file: bool, tmp_path: Path) -> None:
    model: Any = _computes()
    if as_file:
        onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
        model = tmp_path / "model.onnx"
    output = tmp_path / "out.onnx" if as_file else None
    report = optimize(model, output, recipe=None, weights=weights)
    assert any("converted to float32" in note for note in report.notes)
    x = np.random.default_rng(2).standard_normal((3, _WIDTH)).astype(np.float32)
    found = run(str(output) if as_file else report.model, {"x": x}, library=True)[0]  # type: ignore[arg-type]
    assert relative_error(_expected(x), found) < 0.15


def test_a_model_that_nothing_is_done_to_becomes_float32(tmp_path: Path) -> None:
    onnx.save(_computes(), tmp_path / "model.onnx")
    ortolan.optimize_onnx(
        tmp_path / "model.onnx",
        tmp_path / "out.onnx",
        recipe=ortolan.Recipe.from_dict({"name": "nothing", "pass": []}),
    )
    x = np.ones((1, _WIDTH), np.float32)
    assert relative_error(_expected(x), run(str(tmp_path / "out.onnx"), {"x": x})[0]) < 1e-5


def test_weights_of_bfloat16_stay() -> None:
    report = optimize(_stores(), recipe=None, weights="bf16")
    assert not any("float32" in note for note in report.notes)
    assert len(report.replaced) == 2


def test_a_session_says_what_to_do() -> None:
    with pytest.raises(SessionError, match=r"`ortolan optimize` makes a float32 model"):
        ortolan.create_session(_computes())


def test_refuses_sparse_initializers() -> None:
    model = _stores()
    values = onnx.numpy_helper.from_array(np.ones(2, np.float32), "w2")
    indices = onnx.numpy_helper.from_array(np.array([0, 5]), "w2_indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4, 4]))
    for call in (ortolan.optimize_onnx, ortolan.inspect_onnx):
        with pytest.raises(ModelError, match="holds sparse initializers, which Ortolan does not read: w2; store them"):
            call(model)
