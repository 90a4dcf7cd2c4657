"""Damaged models of SparseAMXMatMul give an error or an output in ORT, never a crash.

`make asan` also runs this test; the sanitizers stop at invalid memory accesses and undefined behavior.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from ortolan import _native
from ortolan.graph_passes.find.epilogue import Activation

from ..sampling import examples
from .damages import damage
from .linear_kinds import GROUPS, apply, attributes, packed, scales
from .quantized import Layer
from .single_node import save_at_odd_places, session, sparse_amx_matmul_model, sparse_weight
from .two_four import two_of_four

KINDS = ["bf16", *GROUPS]


STORAGES = ["bitmap", "dense", "2:4"]


def valid_model(rng: np.random.Generator, kind: str, storage: str) -> onnx.ModelProto:
    """Return a node with all optional inputs: bias, residual, scales, activation, zero points."""
    k, n = int(rng.integers(1, 150)), int(rng.integers(1, 50))
    if kind == "bf16":
        w, weight_scales = sparse_weight(rng, k, n, rng.random()), None
        two_four = storage == "2:4"
        weight = _native.pack_two_four(two_of_four(rng, w)) if two_four else _native.pack_bitmap(w, storage == "dense")
    else:
        layer = Layer.random(rng, k, n, rng.random(), GROUPS[kind])
        weight, weight_scales = packed(layer, storage == "dense"), scales(layer)
        if storage == "2:4":
            weight = Layer.two_four(two_of_four(rng, layer.weights), layer.scales, layer.group).packed
    chosen = attributes(kind, Activation(rng.integers(5)))
    bias = rng.standard_normal(n, dtype=np.float32) if rng.random() < 0.7 else None
    residual = rng.standard_normal((3, n), dtype=np.float32) if rng.random() < 0.7 else None
    zeros = None
    if kind == "int8" and rng.random() < 0.5:
        chosen["x_zero_points"] = 1
        zeros = rng.integers(-128, 128, (-(-n // 16), 1, 16), np.int8)
    return sparse_amx_matmul_model(
        weight, k, n, bias, scales=weight_scales, residual=residual, zero_points=zeros, **chosen
    )


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_models_give_an_error_or_an_answer(kind: str, storage: str) -> None:
    rng = np.random.default_rng([KINDS.index(kind), STORAGES.index(storage)])
    refused = answered = 0
    for _ in range(300):
        model = valid_model(rng, kind, storage)
        k = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
        damage(rng, model)
        try:
            (y,) = session(model).run(None, {"x": np.ones((3, k), np.float32)})
        except Exception:
            refused += 1
        else:
            assert y.dtype == np.float32
            answered += 1
    assert refused > 50 and answered > 10


def broadcast_shapes(sizes: list[int], rank: int) -> st.SearchStrategy[list[int]]:
    """Generate shapes of at most this rank that broadcast with `sizes` in most cases."""
    return st.integers(0, rank).flatmap(
        lambda length: st.tuples(
            *(
                st.sampled_from([1, sizes[axis - length], sizes[axis - length], 2, 0])
                if length - axis <= len(sizes)
                else st.sampled_from([1, 2, 0])
                for axis in range(length)
            )
        ).map(list)
    )


LEADING = st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3)


@examples(150)
@given(LEADING.flatmap(lambda leading: st.tuples(st.just(leading), broadcast_shapes([*leading, 19], 5))), st.booleans())
def test_residuals_broadcast_as_in_numpy(shapes: tuple[list[int], list[int]], constant: bool) -> None:
    leading, shape = shapes
    rng = np.random.default_rng(0)
    k, n = 5, 19
    weight = _native.pack_bitmap(sparse_weight(rng, k, n, 0.5))
    x = rng.standard_normal((*leading, k), dtype=np.float32)
    residual = rng.standard_normal(shape).astype(np.float32)
    rank = len(leading) + 1
    product = session(sparse_amx_matmul_model(weight, k, n, rank=rank)).run(None, {"x": x})[0]
    activated = apply(Activation.RELU, product).astype(np.float32)
    feeds = {"x": x} if constant else {"x": x, "residual": residual}
    model = sparse_amx_matmul_model(
        weight, k, n, rank=rank, residual=residual if constant else [None] * len(shape), activation=1
    )
    try:
        expected = activated + residual
    except ValueError:
        with pytest.raises(Exception, match="residual has shape"):
            session(model).run(None, feeds)
    else:
        np.testing.assert_array_equal(session(model).run(None, feeds)[0], expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_constant_zero_of_any_rank(rank: int, shape: tuple[int, ...]) -> None:
    """A constant zero residual does not change values; it may only add leading axes."""
    k, n = 5, 19
    weight = _native.pack_bitmap(sparse_weight(np.random.default_rng(1), k, n, 0.5))
    x = np.ones((2,) * (rank - 1) + (k,), np.float32)
    plain = session(sparse_amx_matmul_model(weight, k, n, rank=rank)).run(None, {"x": x})[0]
    model = sparse_amx_matmul_model(weight, k, n, rank=rank, residual=np.zeros(shape, np.float32))
    y = session(model).run(None, {"x": x})[0]
    expected = plain + np.zeros(shape, np.float32)
    assert y.shape == expected.shape
    np.testing.assert_array_equal(y, expected)


def test_x_without_axes_is_refused() -> None:
    weight = _native.pack_bitmap(np.ones((1, 3), np.float32))
    for residual in (None, np.ones((1,), np.float32)):
        model = sparse_amx_matmul_model(weight, 1, 3, residual=residual)
        model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, []))
        model.graph.output[0].type.tensor_type.ClearField("shape")
        with pytest.raises(Exception, match=r"X 'x' has shape \[\], expected \[..., 1\]"):
            session(model).run(None, {"x": np.array(1, np.float32)})


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_at_odd_places_of_a_file(kind: str, tmp_path: Path) -> None:
    """External data need not be aligned, and the operator reads the mapped file."""
    rng = np.random.default_rng(2)
    for storage in STORAGES:
        model = valid_model(rng, kind, storage)
        k = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
        x = rng.standard_normal((3, k), dtype=np.float32)
        (expected,) = session(model).run(None, {"x": x})
        save_at_odd_places(model, tmp_path)
        (y,) = session(tmp_path / "model.onnx").run(None, {"x": x})
        np.testing.assert_array_equal(y, expected)
