"""Layers whose weight is a DequantizeLinear of 4-bit integers: bits as in the optimized file."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

import ortolan

from ..ops.single_node import assert_same_bits
from ..passes.stored_layers import DequantizedLayer
from .sessions import claimed, needs_provider, provider_session

pytestmark = needs_provider

LAYERS = [
    DequantizedLayer(256, 48, 32),
    DequantizedLayer(300, 40, 64, zero_points=True, form="transpose"),
    DequantizedLayer(256, 17, 128, signed=False, form="gemm"),
    DequantizedLayer(100, 33, 256, signed=False, zero_points=True, form="gemm_trans_b"),
    DequantizedLayer(75, 21, None, form="gemm_trans_b"),
    DequantizedLayer(75, 21, None, signed=False, zero_points=True),
    DequantizedLayer(96, 20, 0, zero_points=True, form="transpose"),
    DequantizedLayer(96, 20, 96, signed=False, form="gemm"),
]


def named(layer: DequantizedLayer) -> str:
    return f"{layer.form} {layer.k} {layer.block} {'int4' if layer.signed else 'uint4'} {layer.zero_points}"


@pytest.mark.parametrize("layer", LAYERS, ids=named)
def test_answers_are_those_of_the_optimized_model(layer: DequantizedLayer) -> None:
    model = layer.model()
    report = ortolan.optimize_onnx(model, options={"verify.seconds": 0.0, "may_grow": True})
    assert [one.status for one in report.layers] == ["replaced"]
    optimized, session = ortolan.create_session(report.model), provider_session(model)
    assert "linear" in claimed(session)
    for rows in (1, 20):
        x = np.random.default_rng(rows).standard_normal((rows, layer.k), dtype=np.float32)
        assert_same_bits(session.run(None, {"x": x})[0], optimized.run(None, {"x": x})[0])


def test_scales_that_overflow() -> None:
    """Such a layer is left to ONNX Runtime."""
    model = DequantizedLayer(64, 24, 32).model()
    (scales,) = (one for one in model.graph.initializer if one.name == "scales")
    scales.CopyFrom(numpy_helper.from_array(np.full((2, 24), 3e38, np.float32), "scales"))
    assert claimed(provider_session(model)) == []
