"""Dense int8 models of ONNX Runtime's dynamic quantizer: the call without a recipe keeps their integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnxruntime import quantization

import ortolan
from ortolan.models import tiny

from .attention_graphs import B, Graph, S, W, attend
from .int8_layers import DYNAMIC, Int8Layer, adopt, outputs
from .ort_quantized import FEEDS, layers_of
from .small_models import op_types, relative_error, run
from .stored_numbers import dense_numbers

RNG = np.random.default_rng(3)


KINDS = {
    "int8 a column": {"per_channel": True},
    "uint8": {"weight_type": quantization.QuantType.QUInt8},
    "uint8 a column": {"weight_type": quantization.QuantType.QUInt8, "per_channel": True},
}


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of float, and quantized."""
    folder = tmp_path_factory.mktemp("bert")
    onnx.save(ir.to_proto(tiny.tiny_bert()), folder / "float.onnx")
    quantization.quantize_dynamic(folder / "float.onnx", folder / "int8.onnx", **KINDS[request.param])
    return folder / "float.onnx", folder / "int8.onnx"


def test_the_call_without_a_recipe_takes_every_layer(models: tuple[Path, Path], tmp_path: Path) -> None:
    stored = layers_of(models[1])
    report = ortolan.optimize_onnx(models[1], tmp_path / "fast.onnx", calibration=FEEDS)
    kinds = op_types(onnx.load(tmp_path / "fast.onnx"))
    assert kinds.count("PackedNoMADAttention") == 2 and not {"MatMulInteger", "DynamicQuantizeLinear"} & set(kinds)
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
        q, scales, zeros = dense_numbers(model, name)
        np.testing.assert_array_equal(q, layer.int8.q.numpy())
        np.testing.assert_array_equal((q.astype(np.int16) - zeros) * scales, layer.matrix())


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("form", DYNAMIC)
def test_zero_points_that_int8_does_not_hold(form: str, per_column: bool) -> None:
    """The file keeps the numbers, less 128, and their zero points; answers are those of them."""
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (70, 24)).astype(np.int16)
    codes[0], codes[1] = 0, 255
    layer = Int8Layer(form, unsigned=True, zero_point=140, per_column=per_column, bias=True, q=codes - 140)
    model, x = layer.model(), layer.inputs()
    report = adopt(model)
    q, scales, zeros = dense_numbers(report.model, "linear")
    np.testing.assert_array_equal(q, codes - 128)
    np.testing.assert_array_equal(zeros, np.full(24, 140 - 128))
    np.testing.assert_array_equal(scales, np.broadcast_to(layer.scales, 24))
    (original,) = run(model, {"x": x})
    exact = x @ layer.matrix + layer.b
    for answer in outputs(report.model, x):
        assert relative_error(exact, answer) <= relative_error(exact, original) < 0.02


def test_layers_that_need_zero_points_and_others_become_one_node(tmp_path: Path) -> None:
    """Query, key and value of one attention."""
    graph = Graph()
    q, k, v = (graph.linear(name) for name in ("q", "key", "value"))
    of_query, _, of_value = (array for array in graph.weights.values() if array.ndim == 2)
    np.abs(of_query, out=of_query)  # its zero point is at the end of its range, that of the value in the middle
    of_value[0, :2] = np.abs(of_value).max() * np.array([-1, 1])
    onnx.save(graph.model(attend(graph, q, k, v)), tmp_path / "float.onnx")
    quantization.quantize_dynamic(
        tmp_path / "float.onnx", tmp_path / "int8.onnx", weight_type=quantization.QuantType.QUInt8
    )
    kept = [layer.int8.symmetric for layer in layers_of(tmp_path / "int8.onnx").values()]
    assert not kept[0] and kept[-1]
    report = adopt(onnx.load(tmp_path / "int8.onnx"))
    assert op_types(report.model).count("SparseAMXMatMul") == 1
    x = RNG.standard_normal((B, S, W)).astype(np.float32)
    exact, theirs = (run(str(tmp_path / name), {"x": x})[0] for name in ("float.onnx", "int8.onnx"))
    for answer in outputs(report.model, x):
        assert relative_error(exact, answer) < relative_error(exact, theirs)


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
