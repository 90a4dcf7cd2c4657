"""Test W4A8MatMul and W8A8MatMul in ORT: against NumPy and their ONNX functions, and on invalid input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortolan.graph_passes.find.epilogue import Activation

from .damages import damage
from .group_node import node_model, subgroup_node_model
from .groups import GroupLayer
from .k_quants import KINDS as K_QUANTS
from .k_quants import KQuantLayer
from .linear_kinds import RESIDUALS, apply
from .single_node import session
from .subgroups import SubgroupLayer

KINDS: Mapping[str, dict[str, Any]] = {
    "int8": {"bits": 8},
    "int4": {"zero_points": False},
    "zero_points": {},
    "fractions": {"fractions": True},
    "minimums": {"minimums": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
with_and_without_library = pytest.mark.parametrize("library", [True, False])


@pytest.mark.parametrize("group", [32, 64, 128])
@each_kind
def test_kernel_and_function_body_agree(group: int, kind: str) -> None:
    """ORT runs the kernel with the library, and the function without it; both must agree with NumPy."""
    rng = np.random.default_rng(group)
    for k, n in ((1, 1), (33, 17), (128, 16), (200, 60)):
        layer = GroupLayer.random(rng, k, n, group, half=k % 2 == 0, **KINDS[kind])
        bias = rng.standard_normal(n, dtype=np.float32)
        model = node_model(layer, bias)
        onnx.checker.check_model(model)
        kernel, inlined = session(model), session(model, library=False)
        for m in (1, 5, 40):
            x = rng.standard_normal((m, k), dtype=np.float32)
            layer.check(kernel.run(None, {"x": x})[0], x, bias)
            layer.check(inlined.run(None, {"x": x})[0], x, bias, float_sums=True)


@pytest.mark.parametrize("opset", [13, 17, 18, 21, 23])
@pytest.mark.parametrize("unpack_once", [True, False])
@pytest.mark.parametrize("kind", ["int8", "zero_points", "minimums"])
def test_function_body_serves_every_opset(kind: str, opset: int, unpack_once: bool) -> None:
    rng = np.random.default_rng(opset)
    x = rng.standard_normal((4, 100), dtype=np.float32)
    layer = GroupLayer.random(rng, 100, 30, 32, **KINDS[kind])
    model = node_model(layer, opset=opset, unpack_once=unpack_once)
    for library in (True, False):
        layer.check(session(model, library=library).run(None, {"x": x})[0], x, float_sums=not library)


@with_and_without_library
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (1, 2, 2), (0,), (300,)])
@pytest.mark.parametrize("kind", ["int8", "zero_points"])
def test_batched_inputs_of_any_rank(kind: str, leading: tuple[int, ...], library: bool) -> None:
    rng = np.random.default_rng(len(leading))
    layer = GroupLayer.random(rng, 70, 40, 64, **KINDS[kind])
    x = rng.standard_normal((*leading, 70), dtype=np.float32)
    y = session(node_model(layer, rank=len(leading) + 1), library=library).run(None, {"x": x})[0]
    assert y.shape == (*leading, 40)
    layer.check(y.reshape(-1, 40), x.reshape(-1, 70), float_sums=not library)


@with_and_without_library
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("bits", "scale"), [(4, 0.01), (8, 0.001)])
def test_activation_and_residual(bits: int, scale: float, activation: Activation, library: bool) -> None:
    """The output equals activation(product) + residual, with the product from a node without them."""
    rng = np.random.default_rng(3)
    layer = GroupLayer.random(rng, 50, 37, 32, scale=scale, bits=bits)
    x = rng.standard_normal((2, 20, 50), dtype=np.float32)
    product = session(node_model(layer, rank=3), library=library).run(None, {"x": x})[0]
    activated = apply(activation, product)
    for make in RESIDUALS.values():
        shape = make(20, 37)
        residual = rng.standard_normal(shape).astype(np.float32)
        model = node_model(layer, rank=3, residual=shape, activation=activation)
        y = session(model, library=library).run(None, {"x": x, "residual": residual})[0]
        expected = activated + residual.astype(np.float64)
        assert y.shape == expected.shape
        assert np.all(np.abs(y - expected) <= 2.0**-20 * (np.abs(product) + np.abs(residual)))


Change = Callable[[onnx.NodeProto, dict[str, onnx.TensorProto]], None]
BAD: dict[str, tuple[Change, str, tuple[int, ...]]] = {}


def bad(message: str, bits: tuple[int, ...] = (4, 8)) -> Callable[[Change], None]:
    """Register a damage and its error message.

    bits: 4 or 8 for the operators to which the message applies.
    """

    def add(change: Change) -> None:
        BAD[change.__name__] = (change, message, bits)

    return add


@bad("group_size is 48, expected 32, 64 or 128")
def odd_group_size(node, tensors):
    next(a for a in node.attribute if a.name == "group_size").i = 48


@bad("scales have 96 elements, expected 48")
def other_group_size(node, tensors):
    next(a for a in node.attribute if a.name == "group_size").i = 64


@bad("activation is 9, expected 0")
def unknown_activation(node, tensors):
    next(a for a in node.attribute if a.name == "activation").i = 9


@bad("zero_points hold 16, expected 0 to 15", (4,))
def zero_point_out_of_range(node, tensors):
    tensors["zero_points"].raw_data = b"\x10" + tensors["zero_points"].raw_data[1:]


@bad("zero_points have 96 elements and minimums 96, expected one of them or neither", (4,))
def zero_points_and_minimums(node, tensors):
    node.input.extend(["bias", "bias", "scales"])


@bad("minimums 'zero_points' is uint8, expected float", (4,))
def minimums_of_another_type(node, tensors):
    node.input.extend(["bias", "bias", "zero_points"])


@bad("minimums have 40 elements, expected 96 or none", (4,))
def minimums_of_another_count(node, tensors):
    node.input[5] = ""
    node.input.extend(["bias", "bias", "bias"])


@bad("weights hold (1024 bytes, expected 1536|2048 bytes, expected 3072)")
def weights_cut_short(node, tensors):
    tensors["weights"].dims[0] = 2
    tensors["weights"].raw_data = tensors["weights"].raw_data[: len(tensors["weights"].raw_data) // 3 * 2]


@bad("scales 'scales' is uint8, expected float or float16")
def scales_of_another_type(node, tensors):
    tensors["scales"].data_type = TensorProto.UINT8
    tensors["scales"].raw_data = tensors["scales"].raw_data[:96]


@bad("format_version is 7, this library reads 1")
def another_version(node, tensors):
    next(a for a in node.attribute if a.name == "format_version").i = 7


@pytest.mark.parametrize(("name", "bits"), [(name, bits) for name, one in BAD.items() for bits in one[2]])
def test_malformed_nodes_are_refused(name: str, bits: int) -> None:
    change, message, _ = BAD[name]
    model = node_model(GroupLayer.random(np.random.default_rng(7), 64, 40, 32, bits=bits))
    change(model.graph.node[0], {tensor.name: tensor for tensor in model.graph.initializer})
    with pytest.raises(Exception, match="'linear': .*" + message):
        session(model)


def five_bits() -> SubgroupLayer:
    return SubgroupLayer.in_subgroups(np.random.default_rng(7), 200, 40, bits=5)


@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("m", [1, 4, 9])
def test_subgroups(bits: int, m: int) -> None:
    rng = np.random.default_rng(bits)
    layer = SubgroupLayer.in_subgroups(rng, 300, 40, bits=bits)
    x = rng.standard_normal((m, 300), dtype=np.float32)
    layer.check(session(subgroup_node_model(layer)).run(None, {"x": x})[0], x)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("subgroup_size", 8, "subgroup_size is 8, expected 0, 16 or 32"),
        ("subgroup_size", -1, "subgroup_size is -1, expected 0, 16 or 32"),
        ("subgroup_size", 2**62, f"subgroup_size is {2**62}, expected 0, 16 or 32"),
        ("subgroup_size", 32, "subgroup_scales have 768 elements, expected 384"),
        ("subgroup_size", 0, "format_version is 2, this library reads 1"),
        ("format_version", 1, "format_version is 1, this library reads 2"),
        ("bits", 3, "bits is 3, expected 4, 5 or 6"),
        ("bits", 7, "bits is 7, expected 4, 5 or 6"),
        ("bits", 2**62, f"bits is {2**62}, expected 4, 5 or 6"),
        ("bits", 4, "high_bits hold 1536 bytes, expected 0 for 4 bits"),
        ("bits", 6, "high_bits hold 1536 bytes, expected 3072 for 6 bits"),
        ("group_size", 0, "group_size is 0, expected 64, 128 or 256 with subgroups"),
        ("group_size", 32, "group_size is 32, expected 64, 128 or 256 with subgroups"),
    ],
)
def test_malformed_subgroups_are_refused(name: str, value: int, message: str) -> None:
    model = subgroup_node_model(five_bits())
    next(a for a in model.graph.node[0].attribute if a.name == name).i = value
    with pytest.raises(Exception, match="'linear': .*" + message):
        session(model)


@pytest.mark.parametrize("name", ["subgroup_scales", "high_bits"])
def test_subgroups_without_an_input_are_refused(name: str) -> None:
    model = subgroup_node_model(five_bits())
    node = model.graph.node[0]
    node.input[list(node.input).index(name)] = ""
    with pytest.raises(Exception, match=f"'linear'.*{name}"):
        session(model)


@pytest.mark.parametrize("name", ["subgroup_scales", "high_bits", "scales", "weights"])
def test_inputs_of_one_element_are_refused(name: str) -> None:
    model = subgroup_node_model(five_bits())
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.ones(1, array.dtype), name))
    with pytest.raises(Exception, match=f"'linear'.*{name}"):
        session(model)


def test_bits_without_subgroups_are_refused() -> None:
    model = node_model(GroupLayer.random(np.random.default_rng(7), 64, 40, 32))
    model.graph.node[0].attribute.append(helper.make_attribute("bits", 5))
    with pytest.raises(Exception, match=r"'linear': .*bits is 5, expected 4 without subgroups"):
        session(model)


def test_eight_bits_have_no_subgroups() -> None:
    model = node_model(GroupLayer.random(np.random.default_rng(7), 64, 40, 64, bits=8))
    model.graph.node[0].attribute.append(helper.make_attribute("subgroup_size", 16))
    with pytest.raises(Exception, match=r"'linear': .*subgroup_size is 16, expected 0 with 8-bit weights"):
        session(model)


@pytest.mark.parametrize("kind", K_QUANTS)
@pytest.mark.parametrize("m", [1, 9])
def test_k_quants(kind: str, m: int) -> None:
    rng = np.random.default_rng(m)
    layer = KQuantLayer.of_kind(rng, 300, 40, K_QUANTS[kind])
    x = rng.standard_normal((m, 300), dtype=np.float32)
    layer.check(session(subgroup_node_model(layer)).run(None, {"x": x})[0], x)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("format_version", 2, "format_version is 2, this library reads 3"),
        ("subgroup_scale_bits", 5, "subgroup_scale_bits is 5, expected 8 or none"),
        ("subgroup_scale_bits", 4, "format_version is 3, this library reads 2"),
        ("subgroup_zero_point", 8, "subgroup_zero_point is 8, expected 0 with minimums"),
        ("subgroup_size", 16, "subgroup_scales have 480 elements, expected 960"),
        ("group_size", 48, "group_size is 48, expected 32, 64, 128 or 256"),
        ("bits", 6, "high_bits hold 0 bytes, expected 3840 for 6 bits"),
    ],
)
def test_malformed_k_quants_are_refused(name: str, value: int, message: str) -> None:
    layer = KQuantLayer.of_kind(np.random.default_rng(7), 300, 40, K_QUANTS["Q4_K"])
    model = subgroup_node_model(layer)
    next(a for a in model.graph.node[0].attribute if a.name == name).i = value
    with pytest.raises(Exception, match="'linear': .*" + message):
        session(model)


@pytest.mark.parametrize(
    "layer", [five_bits(), KQuantLayer.of_kind(np.random.default_rng(7), 200, 40, K_QUANTS["Q5_K"])]
)
def test_damaged_subgroups_give_an_error_or_an_answer(layer: SubgroupLayer | KQuantLayer) -> None:
    rng = np.random.default_rng(11)
    original = subgroup_node_model(layer).SerializeToString()
    for _ in range(300):
        model = onnx.ModelProto.FromString(original)
        damage(rng, model)
        try:
            (y,) = session(model).run(None, {"x": np.ones((5, 200), np.float32)})
        except Exception as error:
            assert str(error)
        else:
            assert len(y) == 5 and 33 <= y.shape[1] <= 48 and y.dtype == np.float32  # n may differ within its panels


@each_kind
def test_damaged_models_give_an_error_or_an_answer(kind: str) -> None:
    rng = np.random.default_rng(list(KINDS).index(kind))
    original = node_model(GroupLayer.random(rng, 100, 20, 32, half=True, **KINDS[kind])).SerializeToString()
    refused = answered = 0
    for _ in range(300):
        model = onnx.ModelProto.FromString(original)
        damage(rng, model)
        try:
            (y,) = session(model).run(None, {"x": np.ones((2, 100), np.float32)})
        except Exception as error:
            assert str(error)
            refused += 1
        else:
            assert y.shape[-2:] == (2, 20) and y.dtype == np.float32
            answered += 1
    assert refused > 20 and answered > 20
