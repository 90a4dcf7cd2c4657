"""Sizes of synthetic sounds: samples, and the length of a spectrogram that fits a table of positions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ortolan.graph_passes.measure.feeds import Sizes, synthetic_feeds

from .small_models import make_model, op_types, optimize, random_weight

STEPS, WIDTH = 30, 8


def spectrogram_model(frames: str | int = "frames") -> ir.Model:
    """Two convolutions, the second with stride 2, and a table of positions, as in Whisper's encoder."""
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], pads=[1, 1], strides=[1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "second"], ["c"], pads=[1, 1], strides=[2]),
        helper.make_node("Transpose", ["c"], ["d"], perm=[0, 2, 1]),
        helper.make_node("Add", ["d", "table"], ["y"]),
    ]
    shapes = {"first": (WIDTH, 5, 3), "second": (WIDTH, WIDTH, 3), "table": (STEPS, WIDTH)}
    weights = [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 5, frames])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", STEPS, WIDTH])
    return ir.from_proto(helper.make_model(helper.make_graph(nodes, "sound", [x], [y], weights)))


@pytest.mark.parametrize("frames", ["frames", 2 * STEPS])
def test_the_table_gives_the_length(frames: str | int) -> None:
    model = spectrogram_model(frames)
    feeds = synthetic_feeds(model, Sizes(2, 16, 0))
    assert feeds["x"].shape == (2, 5, 2 * STEPS)
    assert ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)[0].shape == (2, STEPS, WIDTH)


@pytest.mark.parametrize("filter_size", [10, 127])
def test_sound_whose_first_convolution_becomes_a_linear_layer(filter_size: int) -> None:
    """Feeds are made after convolutions were rewritten. A filter of 127 samples (Moonshine) is a linear layer."""
    nodes = [
        helper.make_node("Unsqueeze", ["sound", "one"], ["x"]),
        helper.make_node("Conv", ["x", "first"], ["a"], strides=[64]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "second"], ["c"], strides=[3]),
        helper.make_node("Transpose", ["c"], ["y"], perm=[0, 2, 1]),
    ]
    weights = {"first": random_weight(WIDTH, 1, filter_size), "second": random_weight(WIDTH, WIDTH, 7, seed=1)}
    model = make_model(
        nodes,
        {"sound": (TensorProto.FLOAT, ["batch", "samples"])},
        {"y": (TensorProto.FLOAT, ["batch", "steps", WIDTH])},
        {**weights, "one": np.array([1])},
    )
    report = optimize(model, recipe="sparse-bf16", options={"sparsity": 0.0})
    assert report.model is not None
    kinds = op_types(report.model)
    assert (kinds.count("SparseAMXMatMul"), kinds.count("Conv")) == ((2, 0) if filter_size == 127 else (1, 1))
