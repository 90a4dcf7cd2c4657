"""Test VNNISpMM in ORT: against NumPy and its ONNX function, and on invalid input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from ortolan.graph_passes.find.epilogue import Activation

from .block_sparse import BlockSparseLayer
from .linear_kinds import RESIDUALS, apply
from .single_node import session
from .vnni_spmm_node import node_model, set_attribute


@pytest.mark.parametrize("sparsity", [0.0, 0.6, 0.97, 1.0])
def test_kernel_and_function_body_agree(sparsity: float) -> None:
    """ORT runs the kernel with the library, and the function without it; both must agree with NumPy."""
    rng = np.random.default_rng(int(100 * sparsity))
    for k, n in ((1, 1), (33, 17), (128, 16), (200, 42)):
        layer = BlockSparseLayer.random(rng, k, n, sparsity)
        bias = rng.standard_normal(n, dtype=np.float32)
        model = node_model(layer, bias)
        onnx.checker.check_model(model)
        kernel, inlined = session(model), session(model, library=False)
        for m in (1, 5, 40, 130):
            x = rng.standard_normal((m, k), dtype=np.float32)
            layer.check(kernel.run(None, {"x": x})[0], x, bias)
            layer.check(inlined.run(None, {"x": x})[0], x, bias, float_sums=True)


@pytest.mark.parametrize("opset", [13, 17, 18, 21, 23])
@pytest.mark.parametrize("unpack_once", [True, False])
def test_function_body_serves_every_opset(opset: int, unpack_once: bool) -> None:
    rng = np.random.default_rng(opset)
    layer = BlockSparseLayer.random(rng, 100, 30, 0.7)
    model = node_model(layer, opset=opset, unpack_once=unpack_once)
    x = rng.standard_normal((4, 100), dtype=np.float32)
    for library in (True, False):
        layer.check(session(model, library=library).run(None, {"x": x})[0], x, float_sums=not library)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("shift", [-5.0, 0.9, 5.0])
def test_rows_of_one_sign(shift: float, library: bool) -> None:
    rng = np.random.default_rng(11)
    layer = BlockSparseLayer.random(rng, 90, 20, 0.5)
    x = rng.standard_normal((70, 90), dtype=np.float32) + np.float32(shift)
    x[3], x[4, 5], x[5, 6] = 0, np.inf, np.nan
    y = session(node_model(layer), library=library).run(None, {"x": x})[0]
    finite = np.isfinite(x).all(axis=1)
    layer.check(y[finite], x[finite], float_sums=not library)
    assert np.isnan(y[4:6]).all()


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (1, 2, 2), (0,), (300,)])
def test_batched_inputs_of_any_rank(leading: tuple[int, ...], library: bool) -> None:
    rng = np.random.default_rng(len(leading))
    layer = BlockSparseLayer.random(rng, 70, 40, 0.5)
    x = rng.standard_normal((*leading, 70), dtype=np.float32)
    y = session(node_model(layer, rank=len(leading) + 1), library=library).run(None, {"x": x})[0]
    assert y.shape == (*leading, 40)
    if x.size:
        layer.check(y.reshape(-1, 40), x.reshape(-1, 70), float_sums=not library)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("m", [1, 7, 64, 200])
def test_threads_share_the_work(threads: int, m: int) -> None:
    rng = np.random.default_rng(m)
    layer = BlockSparseLayer.random(rng, 700, 1300, 0.3)
    x = rng.standard_normal((m, 700), dtype=np.float32)
    layer.check(session(node_model(layer), threads=threads).run(None, {"x": x})[0], x)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("activation", Activation)
def test_activation_and_residual(activation: Activation, library: bool) -> None:
    """The output equals activation(product) + residual, with the product from a node without them."""
    rng = np.random.default_rng(3)
    layer = BlockSparseLayer.random(rng, 50, 37, 0.4, scale=0.001)
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


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("m", [1, 20, 130])
def test_gated_unit(m: int, library: bool) -> None:
    rng = np.random.default_rng(m)
    layer = BlockSparseLayer.random(rng, 60, 96, 0.5, scale=0.001)
    x = rng.standard_normal((m, 60), dtype=np.float32)
    product = session(node_model(layer), library=library).run(None, {"x": x})[0]
    model = node_model(layer, activation=Activation.SILU, gated_columns=40)
    y = session(model, library=library).run(None, {"x": x})[0]
    expected = apply(Activation.SILU, product[:, :40]) * product[:, 48:88]
    assert y.shape == (m, 40)
    assert np.all(np.abs(y - expected) <= 2.0**-20 * (1 + np.abs(product).max()) ** 2)


BAD: dict[str, tuple[Callable[[onnx.NodeProto, dict[str, onnx.TensorProto]], None], str]] = {}


def bad(message: str) -> Callable[[Callable[..., None]], None]:
    def add(change: Callable[..., None]) -> None:
        BAD[change.__name__] = (change, message)

    return add


@bad("activation is 9, expected 0")
def unknown_activation(node, tensors):
    set_attribute(node, "activation", 9)


@bad("format_version is 7, this library reads 1")
def another_version(node, tensors):
    set_attribute(node, "format_version", 7)


@bad("starts have 11 elements, expected 26")
def another_n(node, tensors):
    set_attribute(node, "n", 100)


@bad("indices hold 6[0-3], expected less than k, 60")
def fewer_inputs(node, tensors):
    set_attribute(node, "k", 60)


@bad("k x n is 0 x 40")
def no_inputs(node, tensors):
    set_attribute(node, "k", 0)


@bad("scales have 10 elements, expected 40")
def scales_cut_short(node, tensors):
    tensors["scales"].dims[0] = 10
    tensors["scales"].raw_data = tensors["scales"].raw_data[:40]


@bad("starts end with 0, expected the number of quads")
def starts_all_zero(node, tensors):
    tensors["starts"].raw_data = bytes(len(tensors["starts"].raw_data))


@bad(r"bias has shape \[39\], expected \[40\]|'bias'.*39")
def bias_of_another_length(node, tensors):
    tensors["bias"].dims[0] = 39
    tensors["bias"].raw_data = tensors["bias"].raw_data[:156]


@pytest.mark.parametrize("name", BAD)
def test_malformed_nodes_are_refused(name: str) -> None:
    change, message = BAD[name]
    layer = BlockSparseLayer.random(np.random.default_rng(7), 64, 40, 0.2)
    model = node_model(layer, bias=np.zeros(40, np.float32))
    change(model.graph.node[0], {tensor.name: tensor for tensor in model.graph.initializer})
    with pytest.raises(Exception, match="'linear': .*" + message):
        session(model)


def test_x_of_another_width_is_refused() -> None:
    layer = BlockSparseLayer.random(np.random.default_rng(7), 64, 40, 0.2)
    model = node_model(layer)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "any"
    with pytest.raises(Exception, match=r"'linear': X 'x' has shape \[2, 63\], expected \[..., 64\]"):
        session(model).run(None, {"x": np.ones((2, 63), np.float32)})


def test_damaged_weights_never_crash() -> None:
    rng = np.random.default_rng(8)
    model = node_model(BlockSparseLayer.random(rng, 100, 22, 0.5))
    original = model.SerializeToString()
    sizes = {TensorProto.INT8: 1, TensorProto.UINT16: 2, TensorProto.INT64: 8}
    for _ in range(300):
        damaged = onnx.ModelProto.FromString(original)
        tensor = damaged.graph.initializer[rng.integers(len(damaged.graph.initializer))]
        data = bytearray(tensor.raw_data)
        if rng.random() < 0.7 and data:
            data[rng.integers(len(data))] = rng.integers(256)
        else:
            size = sizes.get(tensor.data_type, 4)
            count = int(rng.integers(len(data) // size + 1))
            del data[count * size :]
            del tensor.dims[:]
            tensor.dims.append(count)
        tensor.raw_data = bytes(data)
        for attribute in damaged.graph.node[0].attribute:
            if rng.random() < 0.1:
                attribute.i = int(rng.choice([-1, 0, 1, 31, 2**31, 2**62]))
        try:
            session(damaged).run(None, {"x": np.ones((2, 100), np.float32)})
        except Exception as error:
            assert str(error)
