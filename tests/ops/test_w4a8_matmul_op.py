"""W4A8MatMul as ORT runs it: against the oracle and its own ONNX function, and on bad input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto

from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.find.quantized_weight import QuantizedWeight
from ortolan.graph_passes.operators.nodes import put_function
from ortolan.graph_passes.operators.replacement import LayerWeight, Stored
from ortolan.graph_passes.operators.w4a8_matmul import W4A8MatMul

from .group_node import node_model
from .groups import GroupLayer
from .linear_kinds import RESIDUALS, apply
from .single_node import session


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("offset", ["", "zero_points", "fractions", "minimums"])
def test_kernel_and_function_body_agree(group: int, offset: str) -> None:
    """The same file, with the library (our kernel) and without (ORT inlines the function), against the oracle."""
    rng = np.random.default_rng(group)
    for k, n in ((1, 1), (33, 17), (128, 16), (200, 40)):
        layer = GroupLayer.random(
            rng, k, n, group, half=k % 2 == 0, **{"zero_points": False} | ({offset: True} if offset else {})
        )
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
def test_function_body_serves_every_opset(opset: int, unpack_once: bool) -> None:
    rng = np.random.default_rng(opset)
    x = rng.standard_normal((4, 100), dtype=np.float32)
    for minimums in (False, True):
        layer = GroupLayer.random(rng, 100, 30, 32, minimums=minimums)
        model = node_model(layer, opset=opset, unpack_once=unpack_once)
        for library in (True, False):
            layer.check(session(model, library=library).run(None, {"x": x})[0], x, float_sums=not library)


def joined(layers: Sequence[GroupLayer]) -> onnx.ModelProto:
    """A node a layer, all of the same x, with what the operator gives each of them so that one function serves all."""
    whole = node_model(layers[0])
    del whole.functions[:], whole.graph.node[:], whole.graph.initializer[:], whole.graph.output[:]
    for i, layer in enumerate(layers):
        graph = node_model(layer).graph
        for tensor in graph.initializer:
            tensor.name = f"{tensor.name} {i}"
        node = graph.node[0]
        node.input[1:] = [f"{name} {i}" for name in node.input[1:]]
        node.name, node.output[0], graph.output[0].name = f"linear {i}", f"y {i}", f"y {i}"
        whole.graph.node.append(node)
        whole.graph.initializer.extend(graph.initializer)
        whole.graph.output.append(graph.output[0])
    model = ir.from_proto(whole)
    W4A8MatMul().fill_inputs(model, lambda name: name)
    put_function(model, W4A8MatMul().function(model, 17, True))
    proto: onnx.ModelProto = ir.to_proto(model)
    return proto


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("minimums", [True, False])
def test_one_function_for_all_kinds_of_groups(minimums: bool, half: bool, library: bool) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((3, 70), dtype=np.float32)
    layers = [GroupLayer.random(rng, 70, 20, 32, half=half, zero_points=zero_points) for zero_points in (True, False)]
    if minimums:
        layers += [GroupLayer.random(rng, 70, 30, group, half=half, minimums=True) for group in (32, 64)]
    model = joined(layers)
    onnx.checker.check_model(model)
    assert {len(node.input) for node in model.graph.node} == {9 if minimums else 6}
    for layer, y in zip(layers, session(model, library=library).run(None, {"x": x}), strict=True):
        layer.check(y, x, float_sums=not library)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (1, 2, 2), (0,), (300,)])
def test_batched_inputs_of_any_rank(leading: tuple[int, ...], library: bool) -> None:
    rng = np.random.default_rng(len(leading))
    layer = GroupLayer.random(rng, 70, 40, 64)
    x = rng.standard_normal((*leading, 70), dtype=np.float32)
    y = session(node_model(layer, rank=len(leading) + 1), library=library).run(None, {"x": x})[0]
    assert y.shape == (*leading, 40)
    layer.check(y.reshape(-1, 40), x.reshape(-1, 70), float_sums=not library)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("bits", "scale"), [(4, 0.01), (8, 0.001)])
def test_activation_and_residual(bits: int, scale: float, activation: Activation, library: bool) -> None:
    """Of W8A8MatMul too, against activation(what the node without them answers) + residual in float64."""
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


BAD: dict[str, tuple[Callable[[onnx.NodeProto, dict[str, onnx.TensorProto]], None], str]] = {}


def bad(message: str) -> Callable[[Callable[..., None]], None]:
    def add(change: Callable[..., None]) -> None:
        BAD[change.__name__] = (change, message)

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


@bad("zero_points hold 16, expected 0 to 15")
def zero_point_out_of_range(node, tensors):
    tensors["zero_points"].raw_data = b"\x10" + tensors["zero_points"].raw_data[1:]


@bad("zero_points have 96 elements and minimums 96, expected one of them or neither")
def zero_points_and_minimums(node, tensors):
    node.input.extend(["bias", "bias", "scales"])


@bad("minimums 'zero_points' is uint8, expected float")
def minimums_of_another_type(node, tensors):
    node.input.extend(["bias", "bias", "zero_points"])


@bad("minimums have 40 elements, expected 96 or none")
def minimums_of_another_count(node, tensors):
    node.input[5] = ""
    node.input.extend(["bias", "bias", "bias"])


@bad("weights hold 1024 bytes, expected 1536")
def weights_cut_short(node, tensors):
    tensors["weights"].dims[0] = 2
    tensors["weights"].raw_data = tensors["weights"].raw_data[:1024]


@bad("scales 'scales' is uint8, expected float or float16")
def scales_of_another_type(node, tensors):
    tensors["scales"].data_type = TensorProto.UINT8
    tensors["scales"].raw_data = tensors["scales"].raw_data[:96]


@bad("format_version is 7, this library reads 1")
def another_version(node, tensors):
    next(a for a in node.attribute if a.name == "format_version").i = 7


@pytest.mark.parametrize("name", BAD)
def test_malformed_nodes_are_refused(name: str) -> None:
    change, message = BAD[name]
    model = node_model(GroupLayer.random(np.random.default_rng(7), 64, 40, 32))
    change(model.graph.node[0], {tensor.name: tensor for tensor in model.graph.initializer})
    with pytest.raises(Exception, match="'linear': .*" + message):
        session(model)


def test_damaged_weights_never_crash() -> None:
    rng = np.random.default_rng(8)
    originals = [
        node_model(GroupLayer.random(rng, 100, 20, 32, **{offset: True})).SerializeToString()
        for offset in ("zero_points", "fractions", "minimums")
    ]
    for i in range(500):
        damaged = onnx.ModelProto.FromString(originals[i % len(originals)])
        tensor = damaged.graph.initializer[rng.integers(len(damaged.graph.initializer))]
        data = bytearray(tensor.raw_data)
        if rng.random() < 0.5 and data:
            data[rng.integers(len(data))] = rng.integers(256)
        else:
            cut = int(rng.integers(len(data) + 1)) // np.dtype(np.float32).itemsize * 4
            del data[cut:]
            del tensor.dims[:]
            tensor.dims.append(cut // {TensorProto.UINT8: 1, TensorProto.FLOAT16: 2}.get(tensor.data_type, 4))
        tensor.raw_data = bytes(data)
        for attribute in damaged.graph.node[0].attribute:
            if rng.random() < 0.1:
                attribute.i = int(rng.choice([-1, 0, 1, 31, 2**31, 2**62]))
        try:
            session(damaged).run(None, {"x": np.ones((2, 100), np.float32)})
        except Exception as error:
            assert str(error)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_packed_minimums_have_the_type_of_the_scales(half: bool, exact: bool) -> None:
    """float16 where both are, else both float32; the node's answer is x W."""
    rng = np.random.default_rng(9)
    layer = GroupLayer.random(rng, 100, 20, 32, half=True, minimums=True)
    assert layer.minimums is not None
    scales, minimums = layer.scales.astype(np.float32), layer.minimums.astype(np.float32)
    if not exact:
        minimums[1, 2] *= np.float32(1 + 2.0**-20)
    weight = QuantizedWeight(
        4,
        32,
        ir.tensor(layer.q),
        ir.tensor(layer.scales if half else scales),
        None,
        ir.tensor(minimums),
    )
    whole = LayerWeight(weight.matrix(), weight)
    packed = W4A8MatMul().pack(whole)
    dtype = np.float16 if exact else np.float32
    assert packed["scales"].array.dtype == packed["minimums"].array.dtype == dtype
    if exact:
        total = sum(tensor.array.nbytes for tensor in packed.values())
        assert W4A8MatMul().packed_bytes(100, 20, Stored(0), weight) == total
    x = rng.standard_normal((5, 100), dtype=np.float32)
    tensors = {name: ir.Tensor(one.array, dtype=one.dtype, name=name) for name, one in packed.items()}
    y = W4A8MatMul().run(x, tensors, whole)
    GroupLayer(layer.q, scales, None, 32, minimums).check(y, x)
    assert (np.abs(y - x @ whole.matrix) <= W4A8MatMul().rounding_bound(x, whole)).all()
