"""W8A8MatMul as ORT runs it: against the oracle and its own ONNX function, and on bad input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto

from ortolan.graph_passes.find.quantized_weight import QuantizedWeight
from ortolan.graph_passes.operators.replacement import LayerWeight, Stored
from ortolan.graph_passes.operators.w4a8_matmul import W4A8MatMul
from ortolan.graph_passes.operators.w8a8_matmul import W8A8MatMul
from ortolan.graph_passes.passes.replace_rule import REPLACEMENTS
from ortolan.graph_passes.weights.quantizers.grid import Quantization

from .group_node import node_model
from .groups import GroupLayer
from .single_node import session


@pytest.mark.parametrize("group", [32, 64, 128])
def test_kernel_and_function_body_agree(group: int) -> None:
    """The same file, with the library (our kernel) and without (ORT inlines the function), against the oracle."""
    rng = np.random.default_rng(group)
    for k, n in ((1, 1), (33, 17), (128, 16), (200, 60)):
        layer = GroupLayer.random(rng, k, n, group, half=k % 2 == 0, bits=8)
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
    layer = GroupLayer.random(rng, 100, 30, 32, bits=8)
    model = node_model(layer, opset=opset, unpack_once=unpack_once)
    x = rng.standard_normal((4, 100), dtype=np.float32)
    for library in (True, False):
        layer.check(session(model, library=library).run(None, {"x": x})[0], x, float_sums=not library)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (1, 2, 2), (0,), (300,)])
def test_batched_inputs_of_any_rank(leading: tuple[int, ...], library: bool) -> None:
    rng = np.random.default_rng(len(leading))
    layer = GroupLayer.random(rng, 70, 40, 64, bits=8)
    x = rng.standard_normal((*leading, 70), dtype=np.float32)
    y = session(node_model(layer, rank=len(leading) + 1), library=library).run(None, {"x": x})[0]
    assert y.shape == (*leading, 40)
    layer.check(y.reshape(-1, 40), x.reshape(-1, 70), float_sums=not library)


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


@bad("weights hold 2048 bytes, expected 3072")
def weights_cut_short(node, tensors):
    tensors["weights"].dims[0] = 2
    tensors["weights"].raw_data = tensors["weights"].raw_data[:2048]


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
    model = node_model(GroupLayer.random(np.random.default_rng(7), 64, 40, 32, bits=8))
    change(model.graph.node[0], {tensor.name: tensor for tensor in model.graph.initializer})
    with pytest.raises(Exception, match="'linear': .*" + message):
        session(model)


def test_damaged_weights_never_crash() -> None:
    rng = np.random.default_rng(8)
    original = node_model(GroupLayer.random(rng, 100, 20, 32, bits=8)).SerializeToString()
    for _ in range(300):
        damaged = onnx.ModelProto.FromString(original)
        tensor = damaged.graph.initializer[rng.integers(len(damaged.graph.initializer))]
        data = bytearray(tensor.raw_data)
        if rng.random() < 0.5 and data:
            data[rng.integers(len(data))] = rng.integers(256)
        else:
            cut = int(rng.integers(len(data) + 1)) // np.dtype(np.float32).itemsize * 4
            del data[cut:]
            del tensor.dims[:]
            tensor.dims.append(cut // {TensorProto.INT8: 1}.get(tensor.data_type, 4))
        tensor.raw_data = bytes(data)
        for attribute in damaged.graph.node[0].attribute:
            if rng.random() < 0.1:
                attribute.i = int(rng.choice([-1, 0, 1, 31, 2**31, 2**62]))
        try:
            session(damaged).run(None, {"x": np.ones((2, 100), np.float32)})
        except Exception as error:
            assert str(error)


@pytest.mark.parametrize("half", [True, False])
def test_packing(half: bool) -> None:
    """Scales are float16 where that is exact; the node's answer is x W."""
    rng = np.random.default_rng(9)
    layer = GroupLayer.random(rng, 100, 20, 32, half=half, bits=8)
    weight = QuantizedWeight(8, 32, ir.tensor(layer.q), ir.tensor(layer.scales.astype(np.float32)))
    whole = LayerWeight(weight.matrix(), weight)
    packed = W8A8MatMul().pack(whole)
    assert packed["weights"].array.shape == (2, 32, 16, 4)
    assert packed["scales"].array.dtype == (np.float16 if half else np.float32)
    if half:
        total = sum(tensor.array.nbytes for tensor in packed.values())
        assert W8A8MatMul().packed_bytes(100, 20, Stored(0), weight) == total
    x = rng.standard_normal((5, 100), dtype=np.float32)
    tensors = {name: ir.Tensor(one.array, dtype=one.dtype, name=name) for name, one in packed.items()}
    y = W8A8MatMul().run(x, tensors, whole)
    layer.check(y, x)
    assert (np.abs(y - x @ whole.matrix) <= W8A8MatMul().rounding_bound(x, whole)).all()


def test_who_takes_which_numbers() -> None:
    """8 bits in groups are W8A8MatMul's, and it takes nothing else."""
    groups = Quantization(8, 32)
    for name, operator in REPLACEMENTS.items():
        reason = operator().why_not(64, groups)
        assert (reason is None) == (name == "W8A8MatMul"), reason
        if name not in ("W8A8MatMul", "W4A8MatMul"):
            assert reason is not None and "in groups of 32" in reason and "W8A8MatMul does" in reason
    assert W4A8MatMul().why_not(64, groups) is not None
    for other, words in (
        (None, "not quantized to 8 bits"),
        (Quantization(4, 32), "not quantized to 8 bits"),
        (Quantization(8, None), "one group a column"),
        (Quantization(8, 48), "groups of 48"),
        (Quantization(8, 32, symmetric=False), "zero points or minimums"),
    ):
        assert words in str(W8A8MatMul().why_not(64, other))
