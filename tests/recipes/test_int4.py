"""The recipes int4, int4-gptq, int4-awq and int4-hqq: 4-bit weights in groups, by W4A8MatMul."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import ortolan
from ortolan.models import tiny

from .forms import NAMED

RECIPES = ["int4", "int4-gptq", "int4-awq", "int4-hqq"]


def model() -> ir.Model:
    return tiny.mlp(widths=(200, 160, 33), forms="matmul")


def calibration(rows: int = 400) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((rows, 200)).astype(np.float32)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_become_w4a8(recipe, tmp_path):
    path = tmp_path / "fast.onnx"
    name = model().graph.inputs[0].name
    feeds = {name: calibration()["x"]}
    report = ortolan.optimize_onnx(
        ir.to_proto(model()), path, recipe=NAMED[recipe], calibration=feeds, options={"verify.seconds": 0}
    )
    assert [layer.new_op for layer in report.layers] == ["W4A8MatMul"] * 2
    assert [layer.weight_bits for layer in report.layers] == [4, 4]
    assert all(layer.bytes_after < layer.bytes_before / 5 for layer in report.layers if layer.n != 33)
    with_library = ortolan.create_session(path).run(None, feeds)[0]
    without = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    assert np.linalg.norm(with_library - without) <= 0.02 * np.linalg.norm(with_library)
    assert report.output_error[0].relative_l2 < 0.2


def test_gptq_is_closer_than_round_to_nearest():
    name = model().graph.inputs[0].name
    rng = np.random.default_rng(1)
    mixing = np.cumsum(rng.standard_normal((200, 200)), axis=1).astype(np.float32) / 20  # correlated inputs
    feeds = {name: (rng.standard_normal((1200, 200)).astype(np.float32) @ mixing)}
    errors = {
        recipe: ortolan.optimize_onnx(
            ir.to_proto(model()),
            recipe=NAMED[recipe],
            calibration=feeds,
            options={"verify.seconds": 0},
        )
        .layers[0]
        .output_error
        for recipe in ("int4", "int4-gptq")
    }
    assert errors["int4-gptq"] < 0.6 * errors["int4"]


def test_weights_that_are_not_quantized_stay_as_they_are():
    recipe = ortolan.Recipe.from_dict(
        {"name": "r", "pass": [{"name": "normalize"}, {"name": "replace", "op": "W4A8MatMul"}]}
    )
    with pytest.raises(ortolan.OrtolanError, match="is not quantized to 4 bits"):
        ortolan.optimize_onnx(ir.to_proto(model()), recipe=recipe)
