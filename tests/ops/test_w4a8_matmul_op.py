"""Test W4A8MatMul: several kinds of groups in one model, and packing. Runs in ORT: test_group_matmul_op.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortolan.graph_passes.find.quantized_weight import QuantizedWeight
from ortolan.graph_passes.operators.nodes import put_function
from ortolan.graph_passes.operators.replacement import LayerWeight, Stored
from ortolan.graph_passes.operators.w4a8_matmul import W4A8MatMul

from .group_node import node_model
from .groups import GroupLayer
from .single_node import session


def joined(layers: Sequence[GroupLayer]) -> onnx.ModelProto:
    """Return a model with one node per layer, all with the input x and one shared ONNX function."""
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


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_packed_minimums_have_the_type_of_the_scales(half: bool, exact: bool) -> None:
    """Scales and minimums are packed as float16 if that is exact for both, otherwise both as float32."""
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
