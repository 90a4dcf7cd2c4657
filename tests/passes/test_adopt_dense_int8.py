"""Dense int8 models of ONNX Runtime's dynamic quantizer: the call without a recipe keeps their integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper
from onnxruntime import quantization

import ortolan
from ortolan import _native
from ortolan.graph_passes.operators.sparse_amx_matmul_function import INPUTS
from ortolan.models import tiny

from .small_models import op_types, relative_error
from .test_int8_quantizers import FEEDS, layers_of

RNG = np.random.default_rng(3)


def dense_numbers(model: onnx.ModelProto, name: str) -> tuple[np.ndarray, np.ndarray]:
    """What the SparseAMXMatMul of this name multiplies by: int8 [k, n] and float32 [n]."""
    (node,) = [node for node in model.graph.node if node.op_type == "SparseAMXMatMul" and node.name == name]
    sizes = {attribute.name: attribute.i for attribute in node.attribute}
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    of = dict(zip(INPUTS, node.input, strict=False))
    masks, values, offsets, scales = (tensors[of[part]] for part in ("masks", "values", "offsets", "scales"))
    return _native.unpack_bitmap_int8(masks, values, offsets, sizes["k"], sizes["n"]), scales.reshape(-1)[: sizes["n"]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of float, and quantized."""
    folder = tmp_path_factory.mktemp("bert")
    onnx.save(ir.to_proto(tiny.tiny_bert()), folder / "float.onnx")
    quantization.quantize_dynamic(folder / "float.onnx", folder / "int8.onnx", per_channel=True)
    return folder / "float.onnx", folder / "int8.onnx"


def test_the_call_without_a_recipe_takes_every_layer(models: tuple[Path, Path], tmp_path: Path) -> None:
    stored = layers_of(models[1])
    report = ortolan.optimize_onnx(models[1], tmp_path / "fast.onnx", calibration=FEEDS)
    kinds = op_types(onnx.load(tmp_path / "fast.onnx"))
    assert kinds.count("NoMADAttention") == 2 and not {"MatMulInteger", "DynamicQuantizeLinear"} & set(kinds)
    assert {layer.name for layer in report.layers if layer.weight_bits == 8} == stored.keys()
    assert "12 layers keep the 8-bit weights that the model stores, number by number" in report.notes


def test_integers_are_kept(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Without fused attention, so that each layer is a node of its own."""
    stored = layers_of(models[1])
    ortolan.optimize_onnx(
        models[1], tmp_path / "fast.onnx", calibration=FEEDS, options={"fuse_attention.exclude": ["*"]}
    )
    model = onnx.load(tmp_path / "fast.onnx")
    for name, layer in stored.items():
        assert layer.int8 is not None and not isinstance(layer.int8, str)
        q, scales = dense_numbers(model, name)
        np.testing.assert_array_equal(q, layer.int8.q.numpy())
        np.testing.assert_array_equal(q * scales, layer.matrix())


def test_answers_are_nearer_to_the_float_model_and_the_same_in_a_batch(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    ortolan.optimize_onnx(models[1], tmp_path / "fast.onnx", calibration=FEEDS)
    ids = RNG.integers(0, 101, (6, 12))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    exact, theirs = (
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)[0] for path in models
    )
    session = ortolan.create_session(tmp_path / "fast.onnx")
    ours = session.run(None, feeds)[0]
    assert relative_error(exact, ours) < relative_error(exact, theirs)
    for row in range(len(ids)):
        alone = session.run(None, {name: array[row : row + 1] for name, array in feeds.items()})[0]
        np.testing.assert_array_equal(alone[0], ours[row])
