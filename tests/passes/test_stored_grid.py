"""Weights that were rounded to 4 bits before keep that format in int4 models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ortolan
from ortolan.graph_passes.weights.quantizers.grid import Quantization, dequantize, round_to_nearest
from ortolan.graph_passes.weights.quantizers.stored_grid import find_stored_grid

SUBGROUPS = Quantization(4, 256, symmetric=False, subgroup_size=16)
FORMATS = [
    Quantization(4, size, symmetric=kind == "symmetric", minimum=kind == "minimum")
    for size in (32, 64, 128)
    for kind in ("symmetric", "zero points", "minimum")
]


def _weights(form: Quantization | None, k: int = 576, n: int = 200, seed: int = 0) -> np.ndarray:
    matrix = np.random.default_rng(seed).standard_normal((k, n), dtype=np.float32)
    return matrix if form is None else dequantize(round_to_nearest(matrix, form), form.group_size, form.subgroup_size)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("k", [576, 200])
def test_finds_the_format(form: Quantization, k: int) -> None:
    assert find_stored_grid(_weights(form, k), SUBGROUPS) == form


@pytest.mark.parametrize("form", [None, SUBGROUPS, Quantization(5, 256, symmetric=False, subgroup_size=16)], ids=str)
def test_finds_none_in_other_weights(form: Quantization | None) -> None:
    assert find_stored_grid(_weights(form), SUBGROUPS) is None


def test_finds_none_if_one_run_is_off_the_grid() -> None:
    weights = _weights(FORMATS[0])
    weights[-64:] *= np.linspace(1, 1.1, 64, dtype=np.float32)[:, None]
    assert find_stored_grid(weights, SUBGROUPS) is None


@pytest.mark.parametrize("method", ["mse", "rtn"])
def test_models_keep_the_weights_exactly(method: str, tmp_path: Path) -> None:
    form = Quantization(4, 32, symmetric=False, minimum=True)
    layers = [_weights(form, 256, 256, seed) for seed in range(2)]
    source, kept, rounded = (tmp_path / f"{name}.onnx" for name in ("source", "kept", "rounded"))
    _save(layers, source)
    x = np.random.default_rng(9).integers(-127, 128, (3, 256)).astype(np.float32)
    x[:, ::32] = 127  # groups of inputs that W4A8MatMul quantizes without error
    exact = x @ layers[0]

    report = ortolan.optimize_onnx(source, kept, weights="int4", method=method, allow_different=True)
    assert any("already rounded to 4 bits" in note for note in report.notes)
    (found,) = ortolan.create_session(kept).run(["y0"], {"x": x})
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-4 * np.abs(exact).max())

    ortolan.optimize_onnx(
        source, rounded, weights="int4", method=method, options={"requantize": True}, allow_different=True
    )
    (other,) = ortolan.create_session(rounded).run(["y0"], {"x": x})
    assert np.abs(other - exact).max() > 1e-2 * np.abs(exact).max()


def _save(layers: list[np.ndarray], path: Path) -> None:
    import onnx
    from onnx import helper, numpy_helper

    count, (k, n) = len(layers), layers[0].shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"], name=f"layer{i}") for i in range(count)],
        "layers",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", k])],
        [helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.FLOAT, ["rows", n]) for i in range(count)],
        [numpy_helper.from_array(layer, f"w{i}") for i, layer in enumerate(layers)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
