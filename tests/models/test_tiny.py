"""The tiny random models are reproducible, and the MLP is correct in every form of a linear layer."""

from typing import get_args

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from ortolan.models import tiny
from ortolan.models.graph_builder import ModelBuildError

FORMS = get_args(tiny.LinearForm)


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": x})[0]


@pytest.mark.parametrize("make", [tiny.tiny_bert, tiny.tiny_mpnet, tiny.tiny_modernbert, tiny.tiny_llama, tiny.mlp])
def test_the_seed_decides(make):
    first, again, other = (ir.to_proto(make(seed=seed)).SerializeToString(deterministic=True) for seed in (4, 4, 5))
    assert first == again
    assert first != other


@pytest.mark.parametrize("form", FORMS)
def test_mlp_equals_numpy(form):
    widths = (5, 17, 8)
    model = tiny.mlp(widths, form, seed=2)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    shapes = {"layers.0.weight": (17, 5), "layers.0.bias": (17,), "layers.1.weight": (8, 17), "layers.1.bias": (8,)}
    w = tiny.random_weights(shapes, seed=2)
    x = np.random.default_rng(0).standard_normal((3, 5), np.float32)
    hidden = x
    for layer in (0, 1):
        hidden = hidden @ w[f"layers.{layer}.weight"].T
        if form != "matmul":
            hidden = hidden + w[f"layers.{layer}.bias"]
        hidden = np.maximum(hidden, 0) if layer == 0 else hidden
    # int8 and float16 weights are rounded; all other forms are exact.
    tolerance = {"dequantize": 5e-2, "cast": 5e-3}.get(form, 1e-5)
    np.testing.assert_allclose(run(model, x), hidden, atol=tolerance)


def test_mlp_mixes_forms_and_batch_sizes():
    model = tiny.mlp(range(8, 9 + len(FORMS)), FORMS)
    for batch in (1, 4):
        assert run(model, np.ones((batch, 8), np.float32)).shape == (batch, 8 + len(FORMS))


@pytest.mark.parametrize(("widths", "forms"), [((4, 4), ("gemm", "gemm")), ((4,), "gemm"), ((4, 4), "conv")])
def test_mlp_refuses_what_does_not_fit(widths, forms):
    with pytest.raises(ModelBuildError, match="expected one form per layer"):
        tiny.mlp(widths, forms)


def test_unknown_field_is_refused():
    with pytest.raises(TypeError, match="hiden_size"):
        tiny.tiny_bert(hiden_size=40)
