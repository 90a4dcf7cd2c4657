"""Dynamic int8 linear layers of unmodified models: the provider gives the bits of the optimized file."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnxruntime import quantization

import ortolan
from ortolan.models import tiny

from ..ops.single_node import assert_same_bits
from ..passes.int8_layers import DYNAMIC, Int8Layer, adopt
from ..passes.small_models import relative_error, run
from .int8_models import ACTIVATIONS, FLOAT, all_claims, dense_integers, with_nodes
from .sessions import claimed, needs_provider, plain_session, provider_session

pytestmark = needs_provider

node = helper.make_node


def check_as_optimized(model: onnx.ModelProto, *feeds: np.ndarray, threads: int = 1) -> onnxruntime.InferenceSession:
    """Check that the output has the bits of the optimized file, and return the session."""
    session = all_claims(model, threads)
    optimized = adopt(model).model
    for x in feeds:
        (y,) = session.run(None, {"x": x})
        assert_same_bits(y, run(optimized, {"x": x}, library=True)[0])
    return session


@pytest.mark.parametrize("size", [(1, 1), (31, 5), (64, 16), (100, 33), (129, 7), (300, 48)])
@pytest.mark.parametrize("form", DYNAMIC)
def test_every_form(form: str, size: tuple[int, int]) -> None:
    layer = Int8Layer(form, q=dense_integers(*size), per_column=size[1] % 2 == 0, bias=size[0] % 2 == 1)
    session = check_as_optimized(layer.model(), *(layer.inputs(rows) for rows in (1, 7, 33)))
    assert "linear" in claimed(session)
    x = layer.inputs(33)
    assert relative_error(session.run(None, {"x": x})[0], x @ layer.matrix + (layer.b if layer.bias else 0)) < 0.02


@pytest.mark.parametrize("form", DYNAMIC)
@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("zero_point", ["symmetric", "asymmetric"])
def test_zero_points_of_the_weight(form: str, unsigned: bool, zero_point: str) -> None:
    zero = (128 if unsigned else 0) + (12 if zero_point == "asymmetric" else 0)
    codes = np.random.default_rng(4).integers(0, 256, (70, 24)).astype(np.int16) - (0 if unsigned else 128)
    layer = Int8Layer(form, unsigned=unsigned, zero_point=zero, q=codes - zero)
    assert "linear" in claimed(check_as_optimized(layer.model(), layer.inputs(9)))


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_weights_with_zeros(share: float) -> None:
    q = np.where(np.random.default_rng(2).random((150, 40)) < share, 0, dense_integers(150, 40))
    layer = Int8Layer("chain", q=q.astype(np.int8))
    check_as_optimized(layer.model(), layer.inputs(1), layer.inputs(20))


def test_two_four_weights() -> None:
    """The optimized file stores 2:4 weights in another storage, but the bits are the same."""
    lost = np.argsort(np.random.default_rng(3).random((40, 4, 40)), axis=1) < 2
    layer = Int8Layer("chain", q=np.where(lost.reshape(160, 40), 0, dense_integers(160, 40) | 1).astype(np.int8))
    check_as_optimized(layer.model(), layer.inputs(1), layer.inputs(20))
    graph = adopt(layer.model()).model.graph
    (linear,) = (one for one in graph.node if one.op_type == "SparseAMXMatMul")
    sizes = {one.name: np.prod(one.dims) for one in graph.initializer}
    assert sizes[linear.input[1]] > 0 == sizes[linear.input[3]]  # has masks but no offsets, so the storage is 2:4


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_part_of_the_group(name: str) -> None:
    layer = Int8Layer("chain", q=dense_integers(64, 24), bias=True)
    model = with_nodes(layer, [*ACTIVATIONS[name], node("Neg", ["a"], ["y"], name="behind")])
    session = check_as_optimized(model, layer.inputs(1), layer.inputs(40))
    names = claimed(session)
    assert "behind" not in names and len(names) == len(model.graph.node) - 1


@pytest.mark.parametrize("shape, taken", [((24,), True), ((1, 24), True), ((1, 1, 24), False), ((24, 24), False)])
def test_a_bias_of_several_axes(shape: tuple[int, ...], taken: bool) -> None:
    """A bias [1, n], as in heads of BART-like decoders, is fused.

    A bias with more axes than the output is not, because the sum has the shape of the bias.
    """
    layer = Int8Layer("chain", q=dense_integers(64, 24))
    shift = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    model = with_nodes(layer, [node("Add", ["shift", "r"], ["y"], name="sum")], shift=shift)
    session, x = all_claims(model), layer.inputs(24)
    (y,) = session.run(None, {"x": x})
    assert ("sum" in claimed(session)) == taken
    plain = all_claims(with_nodes(layer, [node("Identity", ["r"], ["y"])])).run(None, {"x": x})[0]
    assert_same_bits(y, plain + shift)


@pytest.mark.parametrize("name", ["Relu", "Gelu"])
def test_an_activation_whose_input_others_see_stays(name: str) -> None:
    layer = Int8Layer("dynamic", q=dense_integers(64, 24))
    domain = "com.microsoft" if name == "Gelu" else ""
    more = [node(name, ["r"], ["a"], name="activation", domain=domain), node("Add", ["a", "r"], ["y"], name="sum")]
    session = check_as_optimized(with_nodes(layer, more), layer.inputs(5))
    assert claimed(session) == ["linear"]


@pytest.mark.parametrize(
    "name, inner",
    # Without "g7", for which ONNX Runtime fails: it fuses the other nodes and loses this value.
    [(name, one.output[0]) for name, nodes in ACTIVATIONS.items() for one in nodes[:-1] if one.output != ["g7"]],
)
def test_an_activation_whose_numbers_others_see_stays(name: str, inner: str) -> None:
    layer = Int8Layer("chain", q=dense_integers(64, 24))
    model = with_nodes(layer, [*ACTIVATIONS[name], node("Tanh", [inner], ["t"]), node("Add", ["a", "t"], ["y"])])
    session = check_as_optimized(model, layer.inputs(5))
    assert len(claimed(session)) == len(layer.nodes("r"))


def test_a_layer_that_makes_nothing_stays() -> None:
    layer = Int8Layer("chain", q=dense_integers(64, 24))
    for more in ([], [node("Add", ["r", "x2"], ["s"]), node("Relu", ["s"], ["t"])]):
        model = with_nodes(layer, [*more, node("Neg", ["x2"], ["y"])], ("x2",))
        session, x2 = all_claims(model), np.ones((6, 24), np.float32)
        np.testing.assert_array_equal(session.run(None, {"x": layer.inputs(6), "x2": x2})[0], -x2)


def test_other_functions_stay() -> None:
    layer = Int8Layer("dynamic", q=dense_integers(64, 24))
    for more in (
        [node("Tanh", ["r"], ["y"])],
        [node("Mul", ["r", "half"], ["h"]), node("Sigmoid", ["h"], ["s"]), node("Mul", ["r", "s"], ["y"])],
        [node("QuickGelu", ["r"], ["y"], domain="com.microsoft")],
    ):
        session = check_as_optimized(with_nodes(layer, more), layer.inputs(5))
        assert claimed(session) == ["linear"]


def test_residual_and_layer_norm() -> None:
    layer = Int8Layer("chain", q=dense_integers(64, 32), bias=True)
    rng = np.random.default_rng(7)
    weight, bias = rng.standard_normal((2, 32)).astype(np.float32)
    more = [
        node("Neg", ["z"], ["residual"], name="in front"),
        node("Add", ["residual", "r"], ["s"]),
        node("LayerNormalization", ["s", "weight", "shift"], ["y"], axis=-1, epsilon=1e-6),
    ]
    model = with_nodes(layer, more, ("z",), weight=weight, shift=bias)
    feeds = [{"x": layer.inputs(rows), "z": np.ones((rows, 32), np.float32)} for rows in (3, 5)]
    session, optimized = all_claims(model, threads=2), adopt(model, calibration=feeds).model
    assert "in front" not in claimed(session) and len(claimed(session)) == len(model.graph.node) - 1
    for rows in (1, 9, 70):
        for shape in ((rows, 32), (32,), (1, 32), (1,), (2, rows, 32)):
            feeds = {"x": layer.inputs(rows), "z": rng.standard_normal(shape).astype(np.float32)}
            (y,) = session.run(None, feeds)
            assert_same_bits(y, run(optimized, feeds, library=True)[0])


def test_a_residual_that_does_not_fit_is_an_error() -> None:
    layer = Int8Layer("dynamic", q=dense_integers(64, 32))
    session = all_claims(with_nodes(layer, [node("Add", ["r", "z"], ["y"])], ("z",)))
    with pytest.raises(Exception, match=r"DynamicQuantizeMatMul node 'linear': .* has shape \[5\]"):
        session.run(None, {"x": layer.inputs(3), "z": np.zeros(5, np.float32)})


def test_a_residual_that_hangs_on_the_layer_stays_outside() -> None:
    """A residual computed from another linear layer of the same quantized input is not fused."""
    layer = Int8Layer("chain", q=dense_integers(64, 24))
    second = [
        node("MatMulInteger", ["xq", "W2", "xz", "zeros"], ["sums2"], name="linear2"),
        node("Cast", ["sums2"], ["floats2"], to=FLOAT),
        node("Mul", ["xs", "scales"], ["step2"]),
        node("Mul", ["floats2", "step2"], ["r2"]),
        node("Tanh", ["r2"], ["t"], name="between"),
        node("Add", ["r", "t"], ["y"], name="sum"),
    ]
    model = with_nodes(layer, second, W2=dense_integers(64, 24, seed=1))
    session = all_claims(model)
    assert {"linear", "linear2"} <= set(claimed(session)) and not {"between", "sum"} & set(claimed(session))
    x = layer.inputs(6)
    assert relative_error(session.run(None, {"x": x})[0], run(model, {"x": x})[0]) < 0.02


@pytest.mark.parametrize("with_residual", [False, True])
def test_a_layer_whose_output_nobody_reads(with_residual: bool) -> None:
    """The layer linear2 is claimed, although nothing reads its result."""
    layer = Int8Layer("chain", q=dense_integers(64, 24))
    second = [
        node("MatMulInteger", ["xq", "W2", "xz", "zeros"], ["sums2"], name="linear2"),
        node("Cast", ["sums2"], ["floats2"], to=FLOAT),
        node("Mul", ["floats2", "step"], ["r2"]),
        node("Neg", ["r"], ["y"]),
    ]
    if with_residual:
        second += [node("Neg", ["x2"], ["n"]), node("Add", ["r2", "n"], ["s2"])]
    model = with_nodes(layer, second, ("x2",) if with_residual else (), W2=dense_integers(64, 24, seed=1))
    session, x = all_claims(model), layer.inputs(6)
    assert {"linear", "linear2"} <= set(claimed(session))
    feeds = {"x": x, "x2": np.ones((6, 24), np.float32)} if with_residual else {"x": x}
    assert relative_error(run(model, feeds)[0], session.run(None, feeds)[0]) < 0.02


def test_the_sum_of_two_layers_of_one_input() -> None:
    layer = Int8Layer("chain", q=dense_integers(64, 24))
    second = [
        node("MatMulInteger", ["xq", "W2", "xz", "zeros"], ["sums2"], name="linear2"),
        node("Cast", ["sums2"], ["floats2"], to=FLOAT),
        node("Mul", ["floats2", "step"], ["r2"]),
        node("Add", ["r", "r2"], ["y"], name="sum"),
    ]
    model = with_nodes(layer, second, W2=dense_integers(64, 24, seed=1))
    session = all_claims(model)
    x = layer.inputs(6)
    assert {"linear", "linear2"} <= set(claimed(session))
    assert relative_error(run(model, {"x": x})[0], session.run(None, {"x": x})[0]) < 0.02


def test_numbers_that_others_read_too_stay() -> None:
    layer = Int8Layer("chain", q=dense_integers(64, 24))
    more = [node("Cast", ["xq"], ["c"], to=FLOAT), node("ReduceSum", ["c"], ["n"]), node("Add", ["r", "n"], ["y"])]
    model = with_nodes(layer, more)
    session = all_claims(model)
    assert claimed(session) == []
    x = layer.inputs(6)
    assert_same_bits(session.run(None, {"x": x})[0], plain_session(model).run(None, {"x": x})[0])


def test_without_vnni_int8_layers_stay(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without VNNI, int8 layers are only claimed with claims="all", because ONNX Runtime is faster."""
    features = ortolan._native.cpu_info()["features"]
    layer = Int8Layer("chain", q=dense_integers(64, 24))
    has_vnni = bool({"avx512vnni", "avxvnni"} & set(features))
    assert bool(claimed(provider_session(layer.model(), claims="faster"))) == has_vnni
    assert claimed(all_claims(layer.model()))


def test_an_option_that_says_nothing_known_is_an_error() -> None:
    with pytest.raises(Exception, match="claims is 'some', expected 'faster' or 'all'"):
        provider_session(Int8Layer("chain").model(), ep__ortolanexecutionprovider__claims="some")


WRONG: dict[str, dict[str, np.ndarray]] = {
    "scales of zero": {"scales": np.zeros(24, np.float32)},
    "scales of NaN": {"scales": np.full(24, np.nan, np.float32)},
    "negative scales": {"scales": np.full(24, -1, np.float32)},
    "scales of another number": {"scales": np.ones(23, np.float32)},
    "zero points of another type": {"zeros": np.zeros(24, np.uint8)},
    "weight in three dimensions": {"W": np.ones((1, 64, 24), np.int8)},
    "empty weight": {"W": np.ones((64, 0), np.int8)},
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("form", DYNAMIC)
def test_malformed_layers_are_errors_or_left(form: str, name: str) -> None:
    model = Int8Layer(form, q=dense_integers(64, 24)).model()
    for tensor in model.graph.initializer:
        if tensor.name in WRONG[name]:
            tensor.CopyFrom(numpy_helper.from_array(WRONG[name][tensor.name], tensor.name))
    try:
        session = all_claims(model)
    except Exception:  # ONNX Runtime's exceptions only share the base class Exception
        return
    assert "linear" not in claimed(session)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int8 a column"])
def test_a_whole_encoder(kind: str, tmp_path: Any) -> None:
    """A model written by quantize_dynamic, with attention, gives the bits of the optimized file."""
    onnx.save(ir.to_proto(tiny.tiny_bert()), tmp_path / "float.onnx")
    weight_type = quantization.QuantType.QUInt8 if kind == "uint8" else quantization.QuantType.QInt8
    quantization.quantize_dynamic(
        tmp_path / "float.onnx", tmp_path / "int8.onnx", weight_type=weight_type, per_channel="column" in kind
    )
    model = onnx.load(tmp_path / "int8.onnx")
    session = all_claims(model)
    layers = [one.name for one in model.graph.node if one.op_type == "MatMulInteger"]
    norms = [one.name for one in model.graph.node if one.op_type == "LayerNormalization"]
    names = set(claimed(session))
    assert len(layers) == 12 and set(layers) <= names and len(norms) == 5 and set(norms) <= names
    optimized = ortolan.optimize_onnx(model, options={"verify.seconds": 0.0}).model
    rng = np.random.default_rng(1)
    for batch, length in ((1, 1), (1, 16), (3, 40)):
        ids = rng.integers(0, 101, (batch, length))
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        (y,), (expected,) = session.run(None, feeds), run(optimized, feeds, library=True)
        assert_same_bits(y, expected)
