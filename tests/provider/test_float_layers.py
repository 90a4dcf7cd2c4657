"""Float linear layers, which the provider converts to the `precision` option: bits as from `ortolan optimize`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan.models import tiny

from ..ops.single_node import assert_same_bits
from ..passes.small_models import make_model, run
from .sessions import claimed, needs_provider, plain_session, provider_session

pytestmark = needs_provider

FLOAT = TensorProto.FLOAT
node = helper.make_node


def precise_session(model: onnx.ModelProto, precision: str, threads: int = 1):
    return provider_session(model, threads, ep__ortolanexecutionprovider__precision=precision)


def optimized(model: onnx.ModelProto, precision: str, **options: object) -> onnx.ModelProto:
    report = ortolan.optimize_onnx(
        model,
        weights=precision,
        ignore=(),
        calibration=[{"x": np.ones((3, 40), np.float32)}] if model.graph.input[0].name == "x" else None,
        options={"may_grow": True, "verify.seconds": 0.0, **options},
    )
    assert report.model is not None
    return report.model


def layer_model(
    kind: str,
    n: int = 24,
    zeros: float = 0.0,
    more: tuple[onnx.NodeProto, ...] = (),
    opset: int = 17,
    **weights: np.ndarray,
) -> onnx.ModelProto:
    """Return a model with one linear layer, input x [batch, 40] and output y."""
    rng = np.random.default_rng(n)
    w = np.where(rng.random((40, n)) < zeros, 0, rng.standard_normal((40, n))).astype(np.float32)
    b = rng.standard_normal(n).astype(np.float32)
    y = "r" if more else "y"
    if kind == "MatMul":
        nodes = [node("MatMul", ["x", "W"], ["p"], name="linear"), node("Add", ["p", "b"], [y], name="bias")]
    else:
        nodes = [node("Gemm", ["x", "W", "b"], [y], name="linear", transB=int(kind == "Gemm transposed"))]
    if kind == "Gemm transposed":
        w = np.ascontiguousarray(w.T)
    outputs = {"y": (FLOAT, ["batch", None if more else n])}
    return make_model([*nodes, *more], {"x": (FLOAT, ["batch", 40])}, outputs, {"W": w, "b": b, **weights}, opset)


@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "Gemm transposed"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize(("n", "zeros"), [(1, 0.0), (24, 0.0), (33, 0.3), (16, 1.0)])
def test_one_layer(kind: str, precision: str, n: int, zeros: float) -> None:
    model = layer_model(kind, n, zeros)
    session = precise_session(model, precision)
    # ONNX Runtime may name the node it fuses "linear/MatMulAddFusion".
    assert claimed(session)[-1] in ("linear", "linear/MatMulAddFusion")
    other = optimized(model, precision)
    for rows in (1, 6, 33):
        x = np.random.default_rng(rows).standard_normal((rows, 40)).astype(np.float32)
        assert_same_bits(session.run(None, {"x": x})[0], run(other, {"x": x}, library=True)[0])


def test_floats_stay_unless_asked_for() -> None:
    for precision in ("float32", ""):
        assert claimed(precise_session(layer_model("MatMul"), precision)) == []
    with pytest.raises(Exception, match="precision is 'int3', expected 'float32', 'bf16' or 'int8'"):
        precise_session(layer_model("MatMul"), "int3")


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_gated_layers(precision: str) -> None:
    more = (
        node("MatMul", ["x", "W2"], ["up"], name="up"),
        node("Sigmoid", ["r"], ["s"]),
        node("Mul", ["r", "s"], ["silu"]),
        node("Mul", ["silu", "up"], ["y"]),
    )
    w2 = np.random.default_rng(9).standard_normal((40, 32)).astype(np.float32)
    model = layer_model("Gemm", 32, more=more, W2=w2)
    session = precise_session(model, precision)
    assert len(claimed(session)) == len(model.graph.node)
    x = np.random.default_rng(1).standard_normal((7, 40)).astype(np.float32)
    assert_same_bits(session.run(None, {"x": x})[0], run(optimized(model, precision), {"x": x}, library=True)[0])


HALVES = {
    "Split": (node("Split", ["r"], ["gate", "up"], axis=-1, num_outputs=2),),
    "Slices": (
        node("Slice", ["r", "half", "end", "last"], ["up"]),
        node("Slice", ["r", "none", "half", "last"], ["gate"]),
    ),
}


@pytest.mark.parametrize("split", HALVES)
@pytest.mark.parametrize(("n", "gated"), [(64, True), (48, False)], ids=["whole panels", "parts of panels"])
def test_one_layer_whose_halves_are_gated(split: str, n: int, gated: bool) -> None:
    more = (*HALVES[split], node("Gelu", ["gate"], ["a"]), node("Mul", ["a", "up"], ["y"], name="factor"))
    numbers = {"none": 0, "half": n // 2, "end": 2**63 - 1, "last": -1} if split == "Slices" else {}
    model = layer_model("Gemm", n, more=more, opset=20, **{name: np.array([one]) for name, one in numbers.items()})
    session = precise_session(model, "bf16")
    assert ("factor" in claimed(session)) is gated
    x = np.random.default_rng(1).standard_normal((7, 40)).astype(np.float32)
    found, expected = session.run(None, {"x": x})[0], run(optimized(model, "bf16"), {"x": x}, library=True)[0]
    if gated:
        assert_same_bits(found, expected)
    else:
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite(bad: float) -> None:
    """Layers with NaN or Inf are claimed as bf16, but not as int8."""
    model = layer_model("MatMul")
    w = numpy_helper.to_array(model.graph.initializer[0]).copy()
    w[3, 2] = bad
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "W"))
    assert "linear" not in claimed(precise_session(model, "int8"))
    session, x = precise_session(model, "bf16"), np.ones((2, 40), np.float32)
    with np.errstate(invalid="ignore"):
        expected = np.isfinite(plain_session(model).run(None, {"x": x})[0])
    np.testing.assert_array_equal(np.isfinite(session.run(None, {"x": x})[0]), expected)


@pytest.mark.parametrize("changes", [{"alpha": 2.0}, {"beta": 0.5}, {"transA": 1}])
def test_gemm_of_other_kinds_stays(changes: dict[str, float]) -> None:
    model = layer_model("Gemm", 40)
    model.graph.node[0].attribute.extend(helper.make_attribute(name, one) for name, one in changes.items())
    session = precise_session(model, "bf16")
    assert claimed(session) == []
    x = np.random.default_rng(1).standard_normal((40, 40)).astype(np.float32)
    assert_same_bits(session.run(None, {"x": x})[0], plain_session(model).run(None, {"x": x})[0])


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_whole_encoder_is_near(precision: str) -> None:
    model: onnx.ModelProto = ir.to_proto(tiny.tiny_bert())
    session, plain = precise_session(model, precision, threads=2), plain_session(model)
    ids = np.random.default_rng(1).integers(0, 101, (3, 20))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    (y,), (expected,) = session.run(None, feeds), plain.run(None, feeds)
    assert len([name for name in claimed(session) if "MatMul" in name or "dense" in name]) >= 12
    assert np.linalg.norm(y - expected) <= (0.01 if precision == "bf16" else 0.05) * np.linalg.norm(expected)


def test_options_that_the_provider_does_not_know_are_errors() -> None:
    known = "precision, claims, reproducible, times_file or claims_file"
    with pytest.raises(Exception, match=f"no option 'Precision', expected {known}"):
        provider_session(layer_model("MatMul"), ep__ortolanexecutionprovider__Precision="bf16")
    with pytest.raises(ValueError, match="precision is 'int3', expected one of float32, bf16, int8"):
        ortolan.session_options(precision="int3")  # type: ignore[arg-type]


def test_inspection_with_a_precision(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(layer_model("Gemm"), path)
    assert ortolan.inspect_provider(path).nodes == []
    (node,) = ortolan.inspect_provider(path, precision="bf16", claims="all").nodes
    assert (node.node, node.taken, node.what) == ("linear", True, "40 x 24, floats as bf16")
