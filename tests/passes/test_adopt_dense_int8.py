"""Dense int8 models of ONNX Runtime's dynamic quantizer: calls without a recipe keep the stored integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnxruntime import quantization

import ortolan
from ortolan import NothingToReplaceError
from ortolan.models import tiny

from .attention_graphs import B, Graph, S, W, attend
from .int8_layers import DYNAMIC, Int8Layer, adopt, outputs
from .ort_quantized import FEEDS, layers_of
from .small_models import make_model, op_types, relative_error, run
from .stored_layers import NBitsLayer
from .stored_weight import dense_integers

RNG = np.random.default_rng(3)


KINDS = {
    "int8 a column": {"per_channel": True},
    "uint8": {"weight_type": quantization.QuantType.QUInt8},
    "uint8 a column": {"weight_type": quantization.QuantType.QUInt8, "per_channel": True},
}


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the paths of the float model and the quantized model."""
    folder = tmp_path_factory.mktemp("bert")
    onnx.save(ir.to_proto(tiny.tiny_bert()), folder / "float.onnx")
    quantization.quantize_dynamic(folder / "float.onnx", folder / "int8.onnx", **KINDS[request.param])
    return folder / "float.onnx", folder / "int8.onnx"


def test_the_call_without_a_recipe_takes_every_layer(models: tuple[Path, Path], tmp_path: Path) -> None:
    stored = layers_of(models[1])
    options = {"unpad.drop_hidden": True}
    report = ortolan.optimize_onnx(models[1], tmp_path / "fast.onnx", calibration=FEEDS, options=options)
    kinds = op_types(onnx.load(tmp_path / "fast.onnx"))
    assert kinds.count("PackedNoMADAttention") == 2 and not {"MatMulInteger", "DynamicQuantizeLinear"} & set(kinds)
    assert {layer.name for layer in report.layers if layer.weight_bits == 8} == stored.keys()
    assert "12 layers keep the model's stored 8-bit weights exactly" in report.notes


def test_integers_are_kept(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Attention is not fused here, so that each linear layer is a separate node."""
    stored = layers_of(models[1])
    ortolan.optimize_onnx(
        models[1], tmp_path / "fast.onnx", calibration=FEEDS, options={"fuse_attention.exclude": ["*"]}
    )
    model = onnx.load(tmp_path / "fast.onnx")
    for name, layer in stored.items():
        assert layer.int8 is not None and not isinstance(layer.int8, str)
        q, scales, zeros = dense_integers(model, name)
        np.testing.assert_array_equal(q, layer.int8.q.numpy())
        np.testing.assert_array_equal((q.astype(np.int16) - zeros) * scales, layer.matrix())


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("form", DYNAMIC)
def test_zero_points_that_int8_does_not_hold(form: str, per_column: bool) -> None:
    """Zero points above 127: the file stores integers and zero points minus 128, and answers do not change."""
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (70, 24)).astype(np.int16)
    codes[0], codes[1] = 0, 255
    layer = Int8Layer(form, unsigned=True, zero_point=140, per_column=per_column, bias=True, q=codes - 140)
    model, x = layer.model(), layer.inputs()
    report = adopt(model)
    q, scales, zeros = dense_integers(report.model, "linear")
    np.testing.assert_array_equal(q, codes - 128)
    np.testing.assert_array_equal(zeros, np.full(24, 140 - 128))
    np.testing.assert_array_equal(scales, np.broadcast_to(layer.scales, 24))
    (original,) = run(model, {"x": x})
    exact = x @ layer.matrix + layer.b
    for answer in outputs(report.model, x):
        assert relative_error(exact, answer) <= relative_error(exact, original) < 0.02


def test_layers_that_need_zero_points_and_others_become_one_node(tmp_path: Path) -> None:
    """Query, key and value are joined although only some of them have a symmetric weight."""
    graph = Graph()
    q, k, v = (graph.linear(name) for name in ("q", "key", "value"))
    of_query, _, of_value = (array for array in graph.weights.values() if array.ndim == 2)
    # The query weight gets a zero point at the end of its range, the value weight one in the middle.
    np.abs(of_query, out=of_query)
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


def half_quantized(folder: Path, **layers: int) -> Path:
    """Write a model of consecutive layers with these widths; the first one is stored in int8."""
    rng = np.random.default_rng(5)
    nodes, weights, source, k = [], {}, "x", 64
    for name, n in layers.items():
        nodes.append(onnx.helper.make_node("MatMul", [source, f"{name}_weight"], [f"{name}_y"], name=name))
        weights[f"{name}_weight"] = (rng.standard_normal((k, n)) / 8).astype(np.float32)
        source, k = f"{name}_y", n
    kind = onnx.TensorProto.FLOAT
    model = make_model(nodes, {"x": (kind, ["batch", 64])}, {source: (kind, ["batch", k])}, weights)
    onnx.save(model, folder / "float.onnx")
    quantization.quantize_dynamic(folder / "float.onnx", folder / "half.onnx", nodes_to_quantize=[next(iter(layers))])
    return folder / "half.onnx"


def test_int8_keeps_stored_integers_and_quantizes_the_rest(tmp_path: Path) -> None:
    path = half_quantized(tmp_path, body=96, head=80)
    stored = next(iter(layers_of(path).values()))
    report = ortolan.optimize_onnx(path, tmp_path / "fast.onnx", weights="int8", options={"verify.seconds": 0.0})
    assert [(layer.status, layer.weight_bits) for layer in report.layers] == [("replaced", 8)] * 2
    q, scales, zeros = dense_integers(onnx.load(tmp_path / "fast.onnx"), report.layers[0].name)
    np.testing.assert_array_equal((q.astype(np.int16) - zeros) * scales, stored.matrix())
    assert not any("once more" in note for note in report.notes)
    kept = ortolan.optimize_onnx(path, options={"verify.seconds": 0.0}).layers[1]
    assert kept.status == "kept" and "weights='int8' and weights='int4' quantize it" in (kept.reason or "")


def test_int8_keeps_weights_of_four_bits() -> None:
    report = ortolan.optimize_onnx(NBitsLayer(128, 64, 32).model(), weights="int8", options={"verify.seconds": 0.0})
    assert op_types(report.model) == ["W4A8MatMul"]
    assert "layer 'linear' keeps the model's stored 4-bit weights exactly" in report.notes


def test_bf16_names_its_own_size_and_what_keeps_the_weights(tmp_path: Path) -> None:
    path = half_quantized(tmp_path, body=96)
    with pytest.raises(
        NothingToReplaceError, match=r"in bf16, more than .* \(leave weights out to keep what the model"
    ):
        ortolan.optimize_onnx(path, weights="bf16")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_heads_that_no_operator_takes_are_not_rounded(weights: str) -> None:
    """A packed weight has a multiple of 16 columns, so a head with two labels would get larger than in float32."""
    matrix = np.random.default_rng(6).standard_normal((96, 2)).astype(np.float32)
    kind = onnx.TensorProto.FLOAT
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "body"], ["h"], name="dense"),
        onnx.helper.make_node("MatMul", ["h", "labels"], ["logits"], name="classifier"),
    ]
    body = (np.random.default_rng(7).standard_normal((96, 96)) / 10).astype(np.float32)
    inputs, outputs = {"x": (kind, ["batch", 96])}, {"logits": (kind, ["batch", 2])}
    model = make_model(nodes, inputs, outputs, {"body": body, "labels": matrix})
    options = {"verify.seconds": 0.0, "replace.exclude": []}
    report = ortolan.optimize_onnx(model, weights=weights, options=options)
    planned = ortolan.optimize_onnx(model, weights=weights, options=options, dry_run=True)
    head = report.layers[1]
    if head.status == "replaced":  # bf16, on CPUs where its packed weight is small enough
        assert (head.weights, weights) == ("bf16", "int8")
    else:
        assert (head.status, head.weight_bits) == ("kept", None)
        assert "its packed weight would take" in (head.reason or "") and "in int8" in (head.reason or "")
        kept = next(tensor for tensor in report.model.graph.initializer if tensor.name == "labels")
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(kept), matrix)
    assert planned.layers[1].reason == head.reason and len(planned.replaced) == len(report.replaced)
    assert not any("quantized but not replaced" in note for note in report.notes)
