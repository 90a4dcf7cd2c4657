"""Test gated_columns: gate and up projection in one W4A8MatMul or SparseAMXMatMul node."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from ortolan import _native
from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.operators.joined import columns_of, join_columns, padded_columns
from ortolan.graph_passes.operators.w4a8_matmul_function import Uses

from .group_node import node_model
from .groups import GroupLayer
from .linear_kinds import apply
from .single_node import U, session, sparse_amx_matmul_model, sparse_weight

K = 70
# One row; fewer rows than a block; more rows than a chunk of 256.
ROWS = (1, 5, 40, 300)


def w4a8_model(rng: np.random.Generator, n: int, activation: Activation, gated: bool) -> onnx.ModelProto:
    layer = GroupLayer.random(rng, K, 2 * padded_columns(n), 32, scale=0.01)
    bias = rng.standard_normal(2 * padded_columns(n), dtype=np.float32)
    uses = Uses(True, activations=frozenset({activation, Activation.NONE}), gated=True)
    return node_model(
        layer, bias, rank=3, uses=uses, activation=activation if gated else Activation.NONE, gated_columns=n * gated
    )


def bf16_model(rng: np.random.Generator, n: int, activation: Activation, gated: bool) -> onnx.ModelProto:
    columns = 2 * padded_columns(n)
    weight = sparse_weight(rng, K, columns, 0.5)
    bias = rng.standard_normal(columns, dtype=np.float32)
    attributes = {"activation": int(activation), "gated_columns": n} if gated else {}
    return sparse_amx_matmul_model(_native.pack_bitmap(weight), K, columns, bias, rank=3, **attributes)


MODELS: dict[str, Callable[[np.random.Generator, int, Activation, bool], onnx.ModelProto]] = {
    "W4A8MatMul": w4a8_model,
    "SparseAMXMatMul": bf16_model,
}
all_operators = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


@all_operators
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("n", [1, 16, 37, 100, 500])
def test_gate_times_the_other_half(make: Callable[..., onnx.ModelProto], activation: Activation, n: int) -> None:
    """The gated output equals activation(gate) * up, with gate and up from the node without gating."""
    products = session(make(np.random.default_rng(n), n, activation, False))
    gated = session(make(np.random.default_rng(n), n, activation, True))
    for m in ROWS:
        x = np.random.default_rng(m).standard_normal((1, m, K), dtype=np.float32)
        product = products.run(None, {"x": x})[0]
        gate, up = (product[..., columns] for columns in columns_of([n, n]))
        (y,) = gated.run(None, {"x": x})
        activated = apply(activation, gate)
        assert y.shape == (1, m, n)
        bound = 4 * U * np.abs(gate * up.astype(np.float64)) + 2.0**-126 * (1 + np.abs(up))
        assert (np.abs(y - activated * up.astype(np.float64)) <= bound).all()


@pytest.mark.parametrize("gated", [True, False])
def test_function_body(gated: bool) -> None:
    """One ONNX function serves nodes with and without gated_columns."""
    activation = Activation.SILU
    model = w4a8_model(np.random.default_rng(0), 21, activation, gated)
    with_library, inlined = session(model), session(model, library=False)
    x = np.random.default_rng(1).standard_normal((2, 3, K), dtype=np.float32)
    expected, found = with_library.run(None, {"x": x})[0], inlined.run(None, {"x": x})[0]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@all_operators
def test_residual_of_gated_columns(make: Callable[..., onnx.ModelProto]) -> None:
    """The residual has as many columns as Y, not as the weight, and may broadcast."""
    n = 21
    rng = np.random.default_rng(0)
    if make is w4a8_model:
        layer = GroupLayer.random(rng, K, 2 * padded_columns(n), 32, scale=0.01)
        models = [
            node_model(layer, rank=3, residual=shape, activation=Activation.SILU, gated_columns=n)
            for shape in ((2, 4, n), (n,), (3, 1, 1, n))
        ]
        plain = node_model(layer, rank=3, activation=Activation.SILU, gated_columns=n)
    else:
        packed = _native.pack_bitmap(sparse_weight(rng, K, 2 * padded_columns(n), 0.5))
        attributes = {"activation": int(Activation.SILU), "gated_columns": n}
        models = [
            sparse_amx_matmul_model(packed, K, 2 * padded_columns(n), rank=3, residual=shape, **attributes)
            for shape in ((2, 4, n), (n,), (3, 1, 1, n))
        ]
        plain = sparse_amx_matmul_model(packed, K, 2 * padded_columns(n), rank=3, **attributes)
    x = rng.standard_normal((2, 4, K), dtype=np.float32)
    (without,) = session(plain).run(None, {"x": x})
    for model, shape in zip(models, ((2, 4, n), (n,), (3, 1, 1, n)), strict=True):
        residual = rng.standard_normal(shape).astype(np.float32)
        (y,) = session(model).run(None, {"x": x, "residual": residual})
        assert y.shape == np.broadcast_shapes(shape, without.shape)
        np.testing.assert_allclose(y, without + residual, rtol=0, atol=4 * U * (np.abs(without).max() + 4))


@pytest.mark.parametrize("columns", [-1, 2**62, 16, 33, 64])
def test_columns_that_do_not_fit_are_refused(columns: int) -> None:
    layer = GroupLayer.random(np.random.default_rng(0), K, 64, 32)
    with pytest.raises(Exception, match=rf"'linear'.*gated_columns is {columns} with 64 columns of weights"):
        session(node_model(layer, gated_columns=columns))


def test_join_columns() -> None:
    gate, up = np.ones((2, 17), np.float32), np.full((2, 17), 2, np.float32)
    joined = join_columns([gate, up])
    assert joined.shape == (2, 64)
    np.testing.assert_array_equal(joined.sum(axis=1), [51, 51])
    for columns, half in zip(columns_of([17, 17]), (gate, up), strict=True):
        part = joined[..., columns]
        np.testing.assert_array_equal(part, half)
