"""Test linear layers in ORT with sizes whose products exceed 64 bits, and with constants at unaligned addresses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from ortolan import _native

from .block_sparse import BlockSparseLayer, HiddenLayer, Range
from .group_node import node_model as group_node_model
from .groups import GroupLayer
from .isa_process import check_with_isa
from .quantized import Layer
from .single_node import (
    assert_same_bits,
    save_at_odd_places,
    session,
    sparse_amx_matmul_model,
    sparse_weight,
    with_constants,
)
from .vnni_spmm_node import LayerNorm, node_model

K, N = 40, 22


def sparse_model(rng: np.random.Generator) -> onnx.ModelProto:
    packed = _native.pack_bitmap(sparse_weight(rng, K, N, 0.5))
    return sparse_amx_matmul_model(packed, K, N, rng.standard_normal(N, dtype=np.float32))


def w8a8_model(rng: np.random.Generator) -> onnx.ModelProto:
    return group_node_model(GroupLayer.random(rng, K, N, 32, bits=8), rng.standard_normal(N, dtype=np.float32))


def w4a8_model(rng: np.random.Generator) -> onnx.ModelProto:
    return group_node_model(GroupLayer.random(rng, K, N, 32), rng.standard_normal(N, dtype=np.float32))


def vnni_model(rng: np.random.Generator) -> onnx.ModelProto:
    layer = BlockSparseLayer.random(rng, K, N, 0.5)
    bias = rng.standard_normal(N, dtype=np.float32)
    return node_model(layer, bias, x_range=Range(0.02, 120), norm=LayerNorm.random(rng, N))


def hidden_model(rng: np.random.Generator) -> onnx.ModelProto:
    layer = BlockSparseLayer.random(rng, 30, N, 0.5)
    hidden = HiddenLayer.random(rng, K, 30, 0.5)
    return node_model(layer, rng.standard_normal(N, dtype=np.float32), hidden=hidden)


def int8_model(rng: np.random.Generator) -> onnx.ModelProto:
    """Return an int8 layer with a residual that has one row."""
    layer = Layer.random(rng, K, N, 0.5, None)
    residual = rng.standard_normal((1, N), dtype=np.float32)
    return sparse_amx_matmul_model(layer.packed, K, N, scales=layer.packed_scales(), residual=residual)


MODELS = [sparse_model, int8_model, w4a8_model, w8a8_model, vnni_model, hidden_model]


@pytest.mark.parametrize("make", MODELS)
def test_constants_at_odd_places_of_a_file(
    make: Callable[[np.random.Generator], onnx.ModelProto], tmp_path: Path
) -> None:
    model = make(np.random.default_rng(0))
    x = np.random.default_rng(1).standard_normal((3, K), dtype=np.float32)
    expected = session(model).run(None, {"x": x})[0]
    # Copy the tensors so that each has its element type and one contiguous data buffer.
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    for constants in ({}, {"x": x}):
        changed = with_constants(model, constants)
        save_at_odd_places(changed, tmp_path)
        feeds = {} if constants else {"x": x}
        assert_same_bits(session(tmp_path / "model.onnx").run(None, feeds)[0], expected)


SCRIPT = """
import tempfile
from pathlib import Path
from tests.ops.test_linear_safety import MODELS, test_constants_at_odd_places_of_a_file
with tempfile.TemporaryDirectory() as folder:
    for make in MODELS:
        test_constants_at_odd_places_of_a_file(make, Path(folder))
"""


def test_odd_places_without_vectors() -> None:
    check_with_isa("scalar", SCRIPT)


def of_shape(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the shape of an all-zero x as input and the shape of y as output.

    NumPy cannot hold arrays of these shapes.
    """
    graph = model.graph
    graph.node.insert(0, helper.make_node("ConstantOfShape", ["shape"], ["x"]))
    graph.node.append(helper.make_node("Shape", ["y"], ["y_shape"]))
    del graph.input[:]
    graph.input.append(helper.make_tensor_value_info("shape", onnx.TensorProto.INT64, [None]))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("y_shape", onnx.TensorProto.INT64, [None]))
    return model


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("leading", [[0], [2**40, 0], [0, 2**40, 2**40], [2**31, 2**31, 0], [2**62, 0, 3]])
def test_no_rows_of_huge_shapes(make: Callable[[np.random.Generator], onnx.ModelProto], leading: list[int]) -> None:
    """The product of the leading dimensions, or the size in bytes, does not fit 64 bits.

    ORT itself rejects [2**40, 2**40, 0].
    """
    loaded = session(of_shape(make(np.random.default_rng(0))))
    y_shape = loaded.run(None, {"shape": np.array([*leading, K])})[0]
    assert y_shape.tolist() == [*leading, N]
