"""Test VNNISpMM in ORT with fixed ranges and with a hidden layer.

Compared with NumPy and its ONNX function; also tested on invalid input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.operators.vnni_spmm_function import INPUTS, Uses

from .damages import damage
from .linear_kinds import RESIDUALS, apply
from .single_node import session
from .vnni_spmm_mlp import Mlp
from .vnni_spmm_node import node_model, set_attribute

EVERYTHING = Uses(residual=True, x_range=True, hidden=True)


SIZES = ((0, 33, 17), (0, 200, 42), (1, 1, 1), (30, 50, 17), (130, 70, 40))


@pytest.mark.parametrize("sparsity", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("sizes", SIZES)
def test_kernel_and_function_body_agree(sizes: tuple[int, int, int], sparsity: float) -> None:
    rng = np.random.default_rng([*sizes, int(10 * sparsity)])
    mlp = Mlp.random(rng, *sizes, sparsity)
    model = mlp.model()
    onnx.checker.check_model(model)
    kernel, inlined = session(model), session(model, library=False)
    for m in (1, 3, 5, 16, 40, 130):
        x = rng.standard_normal((m, mlp.width), dtype=np.float32)
        mlp.check(kernel.run(None, {"x": x})[0], x)
        mlp.check(inlined.run(None, {"x": x})[0], x, float_sums=True)


@pytest.mark.parametrize("opset", [13, 17, 18, 21, 23])
@pytest.mark.parametrize("unpack_once", [True, False])
@pytest.mark.parametrize("hidden_k", [0, 60])
def test_function_body_serves_every_opset(hidden_k: int, unpack_once: bool, opset: int) -> None:
    rng = np.random.default_rng(opset)
    mlp = Mlp.random(rng, hidden_k, 90, 30)
    model = mlp.model(opset=opset, unpack_once=unpack_once)
    x = rng.standard_normal((4, mlp.width), dtype=np.float32)
    for library in (True, False):
        mlp.check(session(model, library=library).run(None, {"x": x})[0], x, float_sums=not library)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("hidden_k", [0, 40])
@pytest.mark.parametrize("m", [1, 20, 70])
def test_one_function_for_nodes_of_every_form(m: int, hidden_k: int, library: bool) -> None:
    """One function serves all nodes; inputs that a node lacks are neutral constants."""
    rng = np.random.default_rng(m)
    mlp = Mlp.random(rng, hidden_k, 50, 30)
    x = rng.standard_normal((m, mlp.width), dtype=np.float32)
    mlp.check(session(mlp.model(uses=EVERYTHING), library=library).run(None, {"x": x})[0], x, float_sums=not library)
    if not hidden_k:  # without x_range, x_scale is 0: each row has its own range
        model = node_model(mlp.layer, mlp.bias, uses=EVERYTHING)
        y = session(model, library=library).run(None, {"x": x})[0]
        mlp.layer.check(y, x, mlp.bias, float_sums=not library)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("m", [1, 7, 64, 200])
@pytest.mark.parametrize("hidden_k", [0, 700])
def test_threads_share_the_work(hidden_k: int, m: int, threads: int) -> None:
    rng = np.random.default_rng(m)
    mlp = Mlp.random(rng, hidden_k, 1300, 900, 0.3)
    x = rng.standard_normal((m, mlp.width), dtype=np.float32)
    mlp.check(session(mlp.model(), threads=threads).run(None, {"x": x})[0], x)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("hidden_k", [0, 40])
def test_activation_residual_and_rank(hidden_k: int, library: bool) -> None:
    rng = np.random.default_rng(3)
    mlp = Mlp.random(rng, hidden_k, 50, 37)
    x = rng.standard_normal((2, 20, mlp.width), dtype=np.float32)
    product = session(mlp.model(rank=3), library=library).run(None, {"x": x})[0]
    activated = apply(Activation.GELU, product)
    for make in RESIDUALS.values():
        shape = make(20, 37)
        residual = rng.standard_normal(shape).astype(np.float32)
        model = mlp.model(rank=3, residual=shape, activation=Activation.GELU)
        y = session(model, library=library).run(None, {"x": x, "residual": residual})[0]
        expected = activated + residual.astype(np.float64)
        assert y.shape == expected.shape
        assert np.all(np.abs(y - expected) <= 2.0**-20 * (np.abs(product) + np.abs(residual)))


@pytest.mark.parametrize("m", [1, 20, 130])
def test_a_gated_unit_behind_a_hidden_layer(m: int) -> None:
    rng = np.random.default_rng(m)
    mlp = Mlp.random(rng, 60, 80, 96)
    x = rng.standard_normal((m, 60), dtype=np.float32)
    for library in (True, False):
        product = session(mlp.model(), library=library).run(None, {"x": x})[0]
        model = mlp.model(activation=Activation.SILU, gated_columns=40)
        y = session(model, library=library).run(None, {"x": x})[0]
        expected = apply(Activation.SILU, product[:, :40]) * product[:, 48:88]
        assert y.shape == (m, 40)
        assert np.all(np.abs(y - expected) <= 2.0**-20 * (1 + np.abs(product).max()) ** 2)


@pytest.mark.parametrize("shape", [(0, 40), (2, 0, 40)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    mlp = Mlp.random(np.random.default_rng(1), 40, 50, 30)
    y = session(mlp.model(rank=len(shape))).run(None, {"x": np.zeros(shape, np.float32)})[0]
    assert y.shape == (*shape[:-1], 30)


def test_a_range_without_bias_and_residual() -> None:
    """Omitted inputs before others: ONNX Runtime up to 1.21 rejects them, later versions accept them."""
    rng = np.random.default_rng(1)
    mlp = Mlp.random(rng, 0, 50, 30)
    model = mlp.model()
    node = model.graph.node[0]
    node.input[INPUTS.index("bias")] = node.input[INPUTS.index("residual")] = ""
    x = rng.standard_normal((3, 50), dtype=np.float32)
    try:
        (y,) = session(model).run(None, {"x": x})
    except Exception as error:
        pytest.skip(f"this ONNX Runtime refuses them: {error}")
    replace(mlp, bias=np.zeros(30, np.float32)).check(y, x)


BAD: dict[str, tuple[Callable[[onnx.NodeProto, dict[str, onnx.TensorProto]], None], str]] = {}


def bad(message: str) -> Callable[[Callable[..., None]], None]:
    def add(change: Callable[..., None]) -> None:
        BAD[change.__name__] = (change, message)

    return add


def put(tensor: onnx.TensorProto, array: np.ndarray) -> None:
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


@bad(r"x_scale 'x_scale' is 0, expected a normal float above 0")
def a_hidden_layer_without_range(node, tensors):
    put(tensors["x_scale"], np.zeros((), np.float32))


@bad(r"x_scale 'x_scale' is nan, expected a normal float above 0")
def a_scale_that_is_no_number(node, tensors):
    put(tensors["x_scale"], np.array(np.nan, np.float32))


@bad(r"table_x_scale 'table_x_scale' is inf, expected a normal float above 0")
def an_infinite_scale(node, tensors):
    put(tensors["table_x_scale"], np.array(np.inf, np.float32))


@bad(r"table_y_scale 'table_y_scale' is -1, expected a normal float above 0")
def a_negative_scale(node, tensors):
    put(tensors["table_y_scale"], np.array(-1, np.float32))


@bad(r"table_y_scale 'table_y_scale' has shape \[2\], expected 1 element")
def two_scales(node, tensors):
    put(tensors["table_y_scale"], np.ones(2, np.float32))


@bad(r"x_zero_point 'x_zero_point' has shape \[0\], expected 1 element")
def no_zero_point(node, tensors):
    put(tensors["x_zero_point"], np.zeros(0, np.uint8))


@bad(r"table 'table' has shape \[255\], expected 256 elements")
def a_table_cut_short(node, tensors):
    put(tensors["table"], np.zeros(255, np.uint8))


@bad(r"hidden_bias 'hidden_bias' has shape \[51\], expected 50 elements")
def hidden_bias_of_another_length(node, tensors):
    put(tensors["hidden_bias"], np.zeros(51, np.float32))


@bad(r"malformed weight in tensors 'hidden_values', 'hidden_indices', .*: indices hold 3\d, expected less than k, 30")
def fewer_hidden_inputs(node, tensors):
    set_attribute(node, "hidden_k", 30)


@bad(r"malformed weight in tensors 'hidden_values'.*k x n is -1 x 50")
def a_negative_hidden_k(node, tensors):
    set_attribute(node, "hidden_k", -1)


@bad("hidden_scales")
def no_hidden_inputs(node, tensors):
    del node.input[INPUTS.index("hidden_scales") :]


@pytest.mark.parametrize("name", BAD)
def test_malformed_nodes_are_refused(name: str) -> None:
    change, message = BAD[name]
    model = Mlp.random(np.random.default_rng(7), 40, 50, 30, 0.2).model()
    change(model.graph.node[0], {tensor.name: tensor for tensor in model.graph.initializer})
    with pytest.raises(Exception, match="'linear': .*" + message):
        session(model)


@pytest.mark.parametrize("scale", [-1.0, np.nan, np.inf])
def test_a_range_that_is_none_is_refused(scale: float) -> None:
    model = Mlp.random(np.random.default_rng(7), 0, 50, 30).model()
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    put(tensors["x_scale"], np.array(scale, np.float32))
    with pytest.raises(Exception, match=r"'linear': x_scale 'x_scale' is .*, expected a normal float above 0"):
        session(model)


def test_x_of_another_width_is_refused() -> None:
    model = Mlp.random(np.random.default_rng(7), 40, 50, 30).model()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "any"
    with pytest.raises(Exception, match=r"'linear': X 'x' has shape \[2, 50\], expected \[..., 40\]"):
        session(model).run(None, {"x": np.ones((2, 50), np.float32)})


@pytest.mark.parametrize("hidden_k", [0, 60])
def test_damaged_models_give_an_error_or_an_answer(hidden_k: int) -> None:
    rng = np.random.default_rng(8)
    refused = answered = 0
    for _ in range(300):
        model = Mlp.random(rng, hidden_k, 100, 22).model(uses=EVERYTHING if rng.random() < 0.3 else None)
        damage(rng, model)
        try:
            (y,) = session(model).run(None, {"x": np.ones((2, hidden_k or 100), np.float32)})
        except Exception as error:
            refused += 1
            assert str(error)
        else:
            assert y.dtype == np.float32
            answered += 1
    assert refused > 50 and answered > 10
