"""Linear layers of float16 models: computed in float32, and rounded where the model's values are float16."""

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
from ..passes.small_models import make_model, random_weight, relative_error
from .nbits_models import NBits
from .sessions import claimed, needs_provider, plain_session, provider_session
from .test_context import compile_model, compiled_session

pytestmark = needs_provider

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
node = helper.make_node
K, N = 40, 40


def precise_session(model: onnx.ModelProto, precision: str, threads: int = 1):
    return provider_session(model, threads, ep__ortolanexecutionprovider__precision=precision)


def as_halves(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == FLOAT:
        array = np.clip(numpy_helper.to_array(tensor), -65504, 65504).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def in_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with every float32 replaced by float16."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in model.graph.initializer:
        as_halves(tensor)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == FLOAT:
            value.type.tensor_type.elem_type = HALF
    for one in model.graph.node:
        for attribute in one.attribute:
            if attribute.HasField("t"):
                as_halves(attribute.t)
            if one.op_type == "Cast" and attribute.name == "to" and attribute.i == FLOAT:
                attribute.i = HALF
    return model


def with_rounded_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a float32 model with weights rounded to float16, as in `in_float16`."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in model.graph.initializer:
        if tensor.data_type == FLOAT:
            array = numpy_helper.to_array(tensor).astype(np.float16).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model


def layer_model(kind: str, more: tuple[onnx.NodeProto, ...] = (), y: str = "y", **weights: np.ndarray):
    """Return a float32 model with one linear layer, input x [batch, 40] and output y."""
    w, b = random_weight(K, N, seed=2), random_weight(N, seed=3)
    if kind == "MatMul":
        nodes = [node("MatMul", ["x", "W"], ["p"], name="linear"), node("Add", ["p", "b"], [y], name="bias")]
    else:
        nodes = [node("Gemm", ["x", "W", "b"], [y], name="linear", transB=int(kind == "Gemm transposed"))]
    w = np.ascontiguousarray(w.T) if kind == "Gemm transposed" else w
    return make_model(
        [*nodes, *more], {"x": (FLOAT, ["batch", K])}, {"y": (FLOAT, ["batch", N])}, {"W": w, "b": b, **weights}
    )


def x_of(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, K)).astype(np.float16)


@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "Gemm transposed"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_one_layer(kind: str, precision: str) -> None:
    """The output has the bits of the float32 layer with the same weights and inputs, rounded once."""
    model = layer_model(kind)
    session = precise_session(in_float16(model), precision)
    assert claimed(session)[-1] in ("linear", "linear/MatMulAddFusion")
    other = precise_session(with_rounded_weights(model), precision)
    for rows in (1, 33):
        x = x_of(rows)
        (y,), (expected,) = session.run(None, {"x": x}), other.run(None, {"x": x.astype(np.float32)})
        assert y.dtype == np.float16
        assert_same_bits(y, expected.astype(np.float16))


def test_many_rows_on_many_threads() -> None:
    """Conversions run in chunks of rows; the last chunk is partial."""
    model, x = layer_model("MatMul"), x_of(1700)
    (y,) = precise_session(in_float16(model), "int8", threads=2).run(None, {"x": x})
    (expected,) = precise_session(with_rounded_weights(model), "int8").run(None, {"x": x.astype(np.float32)})
    assert_same_bits(y, expected.astype(np.float16))


def test_casts_around_a_layer() -> None:
    """A Cast after the layer is part of its group. A Cast before it is not, as other nodes may read its output."""
    model = in_float16(layer_model("MatMul"))
    model.graph.input[0].type.tensor_type.elem_type = model.graph.output[0].type.tensor_type.elem_type = FLOAT
    model.graph.node[1].output[0] = "h"
    model.graph.node[0].input[0] = "xh"
    nodes = [node("Cast", ["x"], ["xh"], to=HALF, name="front"), *model.graph.node]
    nodes += [node("Cast", ["h"], ["y"], to=FLOAT, name="behind")]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    session, x = precise_session(model, "int8"), x_of(5).astype(np.float32)
    assert "behind" in claimed(session) and "front" not in claimed(session)
    (expected,) = precise_session(with_rounded_weights(layer_model("MatMul")), "int8").run(None, {"x": x})
    assert_same_bits(session.run(None, {"x": x})[0], expected)


def test_what_follows_a_layer() -> None:
    """GELU with a square root of 2 that is rounded to float16, a residual and a norm."""
    more = (
        node("Div", ["r", "sqrt2"], ["d"], name="divide"),
        node("Erf", ["d"], ["e"]),
        node("Add", ["e", "one"], ["f"]),
        node("Mul", ["r", "f"], ["g"]),
        node("Mul", ["g", "half"], ["gelu"], name="gelu"),
        node("Add", ["gelu", "x"], ["sum"], name="residual"),
        node("LayerNormalization", ["sum", "nw", "nb"], ["y"], name="norm"),
    )
    numbers = {"sqrt2": np.float32(np.sqrt(2)), "one": np.float32(1), "half": np.float32(0.5)}
    norm = {"nw": random_weight(N, seed=5) + 1, "nb": random_weight(N, seed=6)}
    weights = {name: np.asarray(number) for name, number in numbers.items()} | norm
    model = in_float16(layer_model("MatMul", more, "r", **weights))
    session = precise_session(model, "bf16")
    assert {"gelu", "residual", "norm"} <= set(claimed(session))
    x = x_of(7)
    (y,), (expected,) = session.run(None, {"x": x}), plain_session(model).run(None, {"x": x})
    assert y.dtype == np.float16 and relative_error(expected.astype(np.float32), y.astype(np.float32)) < 0.01


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_whole_encoder(precision: str, tmp_path: Path) -> None:
    """The error of outputs is as small as that of the provider on the float32 model, also for the compiled model."""
    floats: onnx.ModelProto = ir.to_proto(tiny.tiny_bert())
    model = in_float16(floats)
    session = precise_session(model, precision, threads=2)
    ids = np.random.default_rng(1).integers(0, 101, (3, 20))
    mask = np.ones_like(ids)
    mask[1, 12:] = 0
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    (y,), (expected,) = session.run(None, feeds), plain_session(floats).run(None, feeds)
    assert len([name for name in claimed(session) if "MatMul" in name or "dense" in name]) >= 12
    assert any("softmax" in name.lower() for name in claimed(session)), claimed(session)
    seen = mask.astype(bool)
    assert relative_error(expected[seen], y[seen].astype(np.float32)) < (0.015 if precision == "bf16" else 0.05)
    compile_model(model, tmp_path, ep__ortolanexecutionprovider__precision=precision)
    assert_same_bits(compiled_session(tmp_path).run(None, feeds)[0], y)


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_of_few_bits(bits: int) -> None:
    """MatMulNBits with scales and activations of float16."""
    layer = NBits(64, 20, 32, bits, bias=True)
    layer.scales = layer.scales.astype(np.float16).astype(np.float32)
    layer.b = layer.b.astype(np.float16).astype(np.float32)
    expected = provider_session(layer.model())
    layer.changed |= {"scales": layer.scales.astype(np.float16), "bias": layer.b.astype(np.float16)}
    session = provider_session(layer.model(HALF))
    assert claimed(session) == ["linear"]
    x = layer.x(3).astype(np.float16)
    (y,), (of_floats,) = session.run(None, {"x": x}), expected.run(None, {"x": x.astype(np.float32)})
    assert_same_bits(y, of_floats.astype(np.float16))


@pytest.mark.parametrize(("kind", "named"), [(TensorProto.BFLOAT16, "bfloat16"), (TensorProto.DOUBLE, "double")])
def test_other_types_are_left_with_a_reason(kind: int, named: str, tmp_path: Path) -> None:
    w = helper.make_tensor("W", kind, (K, N), np.zeros(K * N))
    casts = [node("Cast", ["x"], ["c"], to=kind), node("Cast", ["p"], ["y"], to=FLOAT)]
    graph = helper.make_graph(
        [casts[0], node("MatMul", ["c", "W"], ["p"], name="linear"), casts[1]],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, ["batch", K])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", N])],
        [w],
    )
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)])
    try:
        (found,) = ortolan.inspect_provider(model, precision="int8").nodes
    except ortolan.OrtolanError as error:  # ONNX Runtime has no MatMul for bfloat16
        assert "Could not find an implementation" in str(error) and named == "bfloat16"
        return
    assert (found.node, found.taken) == ("linear", False)
    assert f"is {named.upper()}, expected FLOAT or FLOAT16" in found.reason
