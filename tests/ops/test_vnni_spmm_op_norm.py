"""Test VNNISpMM in ORT with a LayerNormalization after the product.

Compared with the node without LayerNormalization and with its ONNX function; also tested on invalid input.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.operators.vnni_spmm_function import INPUTS, Uses

from .block_sparse import BlockSparseLayer
from .damages import TENSOR_DAMAGES, damage_attribute, damage_inputs
from .linear_kinds import RESIDUALS
from .single_node import session
from .vnni_spmm_mlp import Mlp
from .vnni_spmm_node import LayerNorm, node_model

EVERYTHING = Uses(residual=True, norm=True, x_range=True, hidden=True)
both = pytest.mark.parametrize("library", [True, False])


def run(model: onnx.ModelProto, library: bool = True, threads: int = 1, **feeds: np.ndarray) -> np.ndarray:
    y: np.ndarray = session(model, library=library, threads=threads).run(None, feeds)[0]
    return y


def random_layer(rng: np.random.Generator, k: int, n: int) -> BlockSparseLayer:
    return BlockSparseLayer.random(rng, k, n, 0.5, scale=0.001)


@both
@pytest.mark.parametrize("n", [1, 17, 48])
@pytest.mark.parametrize("m", [1, 5, 64, 130])
def test_the_product_is_normalized(m: int, n: int, library: bool) -> None:
    rng = np.random.default_rng([m, n])
    layer, norm, bias = random_layer(rng, 50, n), LayerNorm.random(rng, n), rng.standard_normal(n, dtype=np.float32)
    x = rng.standard_normal((m, 50), dtype=np.float32)
    model = node_model(layer, bias, norm=norm)
    onnx.checker.check_model(model)
    norm.check(run(model, library, x=x), run(node_model(layer, bias), library, x=x))


@both
@pytest.mark.parametrize("activation", [Activation.NONE, Activation.GELU])
@pytest.mark.parametrize("form", RESIDUALS)
def test_the_sum_with_any_residual_is_normalized(form: str, activation: Activation, library: bool) -> None:
    rng = np.random.default_rng(3)
    layer, norm = random_layer(rng, 50, 37), LayerNorm.random(rng, 37, 1e-12)
    x = rng.standard_normal((2, 20, 50), dtype=np.float32)
    shape = RESIDUALS[form](20, 37)
    feeds = {"x": x, "residual": rng.standard_normal(shape).astype(np.float32)}
    rest = {"rank": 3, "residual": shape, "activation": activation}
    norm.check(run(node_model(layer, norm=norm, **rest), library, **feeds), run(node_model(layer, **rest), **feeds))


@both
@pytest.mark.parametrize("m", [1, 20, 130])
def test_a_gated_unit_is_normalized(m: int, library: bool) -> None:
    rng = np.random.default_rng(m)
    layer, norm = random_layer(rng, 60, 96), LayerNorm.random(rng, 40)
    x, residual = rng.standard_normal((m, 60), dtype=np.float32), rng.standard_normal((m, 40), dtype=np.float32)
    rest = {"residual": ("m", 40), "activation": Activation.SILU, "gated_columns": 40}
    feeds = {"x": x, "residual": residual}
    norm.check(run(node_model(layer, norm=norm, **rest), library, **feeds), run(node_model(layer, **rest), **feeds))


@both
@pytest.mark.parametrize("hidden_k", [0, 60])
def test_behind_a_given_range_and_a_hidden_layer(hidden_k: int, library: bool) -> None:
    rng = np.random.default_rng(hidden_k)
    mlp, norm = Mlp.random(rng, hidden_k, 80, 30), LayerNorm.random(rng, 30)
    x = rng.standard_normal((70, mlp.width), dtype=np.float32)
    residual = rng.standard_normal((70, 30), dtype=np.float32)
    rest = {"residual": ("m", 30)}
    # Compare results of the same session kind, because kernel and function may differ by one step in the hidden layer.
    plain = run(mlp.model(**rest), library, x=x, residual=residual)
    norm.check(run(mlp.model(norm=norm, **rest), library, x=x, residual=residual), plain)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("m", [1, 7, 64, 200, 1000])
@pytest.mark.parametrize("gated", [False, True])
def test_threads_share_the_work(gated: bool, m: int, threads: int) -> None:
    """Each row is normalized exactly once, after all threads have computed their columns of it."""
    rng = np.random.default_rng(m)
    n = 1312
    columns = 650 if gated else n
    layer, norm = random_layer(rng, 700, n), LayerNorm.random(rng, columns)
    rest = {"residual": ("m", columns), "gated_columns": 650 if gated else 0}
    x, residual = (rng.standard_normal((m, size), dtype=np.float32) for size in (700, columns))
    expected = run(node_model(layer, **rest), x=x, residual=residual)
    shared = session(node_model(layer, norm=norm, **rest), threads=threads)
    first = shared.run(None, {"x": x, "residual": residual})[0]
    norm.check(first, expected)
    for _ in range(5):
        np.testing.assert_array_equal(shared.run(None, {"x": x, "residual": residual})[0], first)


@pytest.mark.parametrize("opset", [13, 17, 18, 21, 23])
def test_function_body_serves_every_opset(opset: int) -> None:
    rng = np.random.default_rng(opset)
    layer, norm = random_layer(rng, 90, 30), LayerNorm.random(rng, 30)
    x = rng.standard_normal((4, 90), dtype=np.float32)
    for library in (True, False):
        norm.check(run(node_model(layer, opset=opset, norm=norm), library, x=x), run(node_model(layer), library, x=x))


@both
@pytest.mark.parametrize("gated_columns", [0, 40])
@pytest.mark.parametrize("m", [1, 20])
def test_a_node_without_norm_where_others_have_one(m: int, gated_columns: int, library: bool) -> None:
    """A node without a norm gets neutral norm weights, and a negative epsilon, which means that there is no norm."""
    rng = np.random.default_rng(m)
    layer = random_layer(rng, 50, 96)
    x = rng.standard_normal((m, 50), dtype=np.float32)
    uses = Uses(residual=True, gated=gated_columns != 0, norm=True, x_range=True)
    model = node_model(layer, gated_columns=gated_columns, uses=uses)
    expected = run(node_model(layer, gated_columns=gated_columns), library, x=x)
    np.testing.assert_array_equal(run(model, library, x=x), expected)


@both
def test_a_node_with_norm_where_others_have_everything(library: bool) -> None:
    rng = np.random.default_rng(0)
    layer, norm = random_layer(rng, 50, 30), LayerNorm.random(rng, 30)
    x = rng.standard_normal((9, 50), dtype=np.float32)
    norm.check(run(node_model(layer, norm=norm, uses=EVERYTHING), library, x=x), run(node_model(layer), library, x=x))


def test_as_near_to_the_exact_result_as_onnx_runtime() -> None:
    """The error for rows with a mean far from zero is at most about that of ONNX Runtime's LayerNormalization."""
    rng = np.random.default_rng(0)
    layer, norm = random_layer(rng, 64, 384), LayerNorm.random(rng, 384, 1e-12)
    x = rng.standard_normal((128, 64), dtype=np.float32)
    residual = rng.standard_normal((128, 384), dtype=np.float32) + 30
    total = run(node_model(layer, residual=("m", 384)), x=x, residual=residual)
    y = run(node_model(layer, residual=("m", 384), norm=norm), x=x, residual=residual)
    weights = [numpy_helper.from_array(array, name) for name, array in (("w", norm.weight), ("b", norm.bias))]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["m", 384]) for name in "xy"]
    node = helper.make_node("LayerNormalization", ["x", "w", "b"], ["y"], epsilon=norm.epsilon)
    model = helper.make_model(
        helper.make_graph([node], "norm", values[:1], values[1:], weights),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    ort = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (theirs,) = ort.run(None, {"x": total})
    wide = total.astype(np.float64)
    d = wide - wide.mean(axis=1, keepdims=True)
    exact = d / np.sqrt((d * d).mean(axis=1, keepdims=True) + norm.epsilon) * norm.weight + norm.bias
    errors = [float(np.linalg.norm(found - exact)) for found in (y, theirs)]
    assert errors[0] <= 1.1 * errors[1] and errors[1] < 1e-4 * np.linalg.norm(exact)


@pytest.mark.parametrize("shape", [(0, 40), (2, 0, 40)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    model = node_model(random_layer(rng, 40, 30), rank=len(shape), norm=LayerNorm.random(rng, 30))
    assert run(model, x=np.zeros(shape, np.float32)).shape == (*shape[:-1], 30)


BAD: dict[str, tuple[Callable[[onnx.NodeProto, dict[str, onnx.TensorProto]], None], str]] = {}


def bad(message: str) -> Callable[[Callable[..., None]], None]:
    def add(change: Callable[..., None]) -> None:
        BAD[change.__name__] = (change, message)

    return add


def set_epsilon(node: onnx.NodeProto, epsilon: float) -> None:
    next(a for a in node.attribute if a.name == "norm_epsilon").f = epsilon


def put(tensor: onnx.TensorProto, array: np.ndarray) -> None:
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


@bad(r"norm_epsilon is -0.5, expected a finite number from 0 on, or -1")
def a_negative_epsilon(node, tensors):
    set_epsilon(node, -0.5)


@bad(r"norm_epsilon is nan, expected a finite number")
def an_epsilon_that_is_no_number(node, tensors):
    set_epsilon(node, float("nan"))


@bad(r"norm_epsilon is inf, expected a finite number")
def an_infinite_epsilon(node, tensors):
    set_epsilon(node, float("inf"))


@bad(r"norm_weight 'norm_weight' has shape \[29\], expected \[30\]")
def weight_of_another_length(node, tensors):
    put(tensors["norm_weight"], np.ones(29, np.float32))


@bad(r"norm_bias 'norm_bias' has shape \[1, 30\], expected \[30\]")
def bias_of_another_rank(node, tensors):
    put(tensors["norm_bias"], np.ones((1, 30), np.float32))


@bad(r"norm_bias")
def no_bias(node, tensors):
    del node.input[INPUTS.index("norm_bias") :]


@bad(r"norm_weight\) 'x' is computed at run time, expected an initializer")
def weight_of_run_time(node, tensors):
    node.input[INPUTS.index("norm_weight")] = "x"


@pytest.mark.parametrize("name", BAD)
def test_malformed_nodes_are_refused(name: str) -> None:
    change, message = BAD[name]
    rng = np.random.default_rng(7)
    model = node_model(random_layer(rng, 40, 30), norm=LayerNorm.random(rng, 30))
    change(model.graph.node[0], {tensor.name: tensor for tensor in model.graph.initializer})
    with pytest.raises(Exception, match="'linear': .*" + message):
        session(model)


def test_a_residual_that_makes_rows_longer_is_refused() -> None:
    rng = np.random.default_rng(7)
    model = node_model(random_layer(rng, 40, 1), residual=("m", 5), norm=LayerNorm.random(rng, 1))
    feeds = {"x": np.ones((2, 40), np.float32), "residual": np.ones((2, 5), np.float32)}
    with pytest.raises(Exception, match=r"'linear': residual has shape \[2, 5\], expected \[..., 1\], as norm_weight"):
        run(model, **feeds)


def damage(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    node, tensors = model.graph.node[0], {tensor.name: tensor for tensor in model.graph.initializer}
    for _ in range(rng.integers(1, 3)):
        match rng.integers(5):
            case 0:
                damage_attribute(rng, node)
            case 1:
                damage_inputs(rng, node)
            case 2:
                set_epsilon(node, float(rng.choice([-1, -2, 0, 1e-30, 1e30, np.nan, np.inf, -np.inf])))
            case _:
                tensor = tensors[rng.choice(["norm_weight", "norm_bias"])]
                TENSOR_DAMAGES[rng.integers(len(TENSOR_DAMAGES))](rng, tensor)


def test_damaged_models_give_an_error_or_an_answer() -> None:
    rng = np.random.default_rng(8)
    refused = answered = 0
    for _ in range(300):
        model = node_model(random_layer(rng, 60, 22), norm=LayerNorm.random(rng, 22))
        damage(rng, model)
        try:
            y = run(model, x=np.ones((2, 60), np.float32))
        except Exception as error:
            refused += 1
            assert str(error)
        else:
            assert y.dtype == np.float32
            answered += 1
    assert refused > 50 and answered > 10
