"""Test SparseAMXMatMul and W4A8MatMul with a LayerNormalization after the product in ORT.

Compared are the nodes without LayerNormalization, and the ONNX functions; also tested on invalid input. VNNISpMM:
test_vnni_spmm_op_norm.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ortolan import _native
from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.operators.sparse_amx_matmul_function import INPUTS as SPARSE_INPUTS
from ortolan.graph_passes.operators.sparse_amx_matmul_function import sparse_amx_matmul_function
from ortolan.graph_passes.operators.w4a8_matmul_function import INPUTS as W4A8_INPUTS
from ortolan.graph_passes.operators.w4a8_matmul_function import Uses as W4A8Uses

from ..pairwise import pairwise
from .group_node import node_model
from .groups import GroupLayer
from .linear_kinds import GROUPS, RESIDUALS, attributes, packed, scales, uses
from .quantized import Layer
from .single_node import session, sparse_amx_matmul_model, sparse_weight
from .vnni_spmm_node import LayerNorm

KINDS = ["bf16", "int8", "int4 g32", "W4A8", "W4A8 zero points"]
K, N = 90, 37
each_kind = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("library", [True, False])


def layer_model(
    kind: str,
    norm: LayerNorm | None = None,
    residual: Sequence[int] | None = None,
    activation: Activation = Activation.NONE,
    rank: int = 2,
    norms: bool | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    """Return a one-node model; its weights are the same in each call.

    norms: True if the function supports a norm; None: True if `norm` is given.
    """
    rng = np.random.default_rng(0)
    norms = norm is not None if norms is None else norms
    if kind.startswith("W4A8"):
        layer = GroupLayer.random(rng, K, N, 32, zero_points=kind.endswith("points"))
        used: Any = W4A8Uses(
            layer.zero_points is not None, activations=frozenset({activation}), residual=residual is not None,
            norm=norms,
        )  # fmt: skip
        model = node_model(layer, rank=rank, uses=used, opset=opset, residual=residual, activation=activation)
        names = W4A8_INPUTS
    else:
        dense = kind != "int4 g32"
        used = dataclasses.replace(uses(kind, dense, activation, residual is not None), norm=norms)
        body = ir.to_proto(sparse_amx_matmul_function(opset, used))
        quantized = None if kind == "bf16" else Layer.random(rng, K, N, 0.3, GROUPS[kind])
        weight = _native.pack_bitmap(sparse_weight(rng, K, N, 0.3), dense=dense) if quantized is None else None
        model = sparse_amx_matmul_model(
            weight or packed(quantized, dense), K, N, np.ones(N, np.float32), rank, (body,), opset,
            None if quantized is None else scales(quantized), residual, **attributes(kind, activation),
        )  # fmt: skip
        names = SPARSE_INPUTS
    return with_norm(model, norm, names) if norms else model


def with_norm(model: onnx.ModelProto, norm: LayerNorm | None, names: Sequence[str]) -> onnx.ModelProto:
    """Add the inputs and attribute of a norm to the node.

    norm: None adds neutral weights and an epsilon of -1, which means that there is no norm.
    """
    node = model.graph.node[0]
    node.input.extend([""] * (names.index("norm_weight") - len(node.input)))
    node.input.extend(["norm_weight", "norm_bias"])
    next(one for one in node.attribute if one.name == "norm_epsilon").f = -1.0 if norm is None else norm.epsilon
    norm = norm or LayerNorm(np.ones(N, np.float32), np.zeros(N, np.float32), 0.0)
    for name, array in (("norm_weight", norm.weight), ("norm_bias", norm.bias)):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def run(model: onnx.ModelProto, library: bool, **feeds: np.ndarray) -> np.ndarray:
    y: np.ndarray = session(model, library=library).run(None, feeds)[0]
    return y


@both
@each_kind
@pytest.mark.parametrize("m", [1, 5, 130, 300])
def test_the_product_is_normalized(m: int, kind: str, library: bool) -> None:
    rng = np.random.default_rng(m)
    norm, x = LayerNorm.random(rng, N), rng.standard_normal((m, K), dtype=np.float32)
    model = layer_model(kind, norm)
    onnx.checker.check_model(model)
    norm.check(run(model, library, x=x), run(layer_model(kind), library, x=x))


@pytest.mark.parametrize(
    ("form", "activation", "kind", "library"),
    pairwise(list(RESIDUALS), [Activation.NONE, Activation.GELU], list(KINDS), [True, False]),
)
def test_the_sum_with_any_residual_is_normalized(form: str, activation: Activation, kind: str, library: bool) -> None:
    rng = np.random.default_rng(3)
    norm, shape = LayerNorm.random(rng, N, 1e-12), RESIDUALS[form](20, N)
    x = rng.standard_normal((2, 20, K), dtype=np.float32)
    feeds = {"x": x, "residual": rng.standard_normal(shape).astype(np.float32)}
    rest: dict[str, Any] = {"rank": 3, "residual": shape, "activation": activation}
    norm.check(run(layer_model(kind, norm, **rest), library, **feeds), run(layer_model(kind, **rest), library, **feeds))


@both
@each_kind
@pytest.mark.parametrize("m", [1, 20])
def test_a_node_without_norm_where_others_have_one(m: int, kind: str, library: bool) -> None:
    x = np.random.default_rng(m).standard_normal((m, K), dtype=np.float32)
    expected = run(layer_model(kind), library, x=x)
    np.testing.assert_array_equal(run(layer_model(kind, norms=True), library, x=x), expected)


@each_kind
@pytest.mark.parametrize("opset", [13, 18, 23])
def test_function_body_serves_every_opset(opset: int, kind: str) -> None:
    rng = np.random.default_rng(opset)
    norm, x = LayerNorm.random(rng, N), rng.standard_normal((4, K), dtype=np.float32)
    for library in (True, False):
        norm.check(run(layer_model(kind, norm, opset=opset), library, x=x), run(layer_model(kind), library, x=x))


@each_kind
@pytest.mark.parametrize(
    ("weight", "epsilon", "message"),
    [
        (N - 1, 1e-5, r"norm_weight 'norm_weight' has shape \[36\], expected \[37\]"),
        (N, float("nan"), "norm_epsilon is nan, expected a finite number"),
        (N, -0.5, "norm_epsilon is -0.5, expected a finite number from 0 on, or -1"),
    ],
)
def test_malformed_nodes_are_refused(weight: int, epsilon: float, message: str, kind: str) -> None:
    norm = LayerNorm(np.ones(weight, np.float32), np.ones(N, np.float32), epsilon)
    with pytest.raises(Exception, match="'linear': .*" + message):
        session(layer_model(kind, norm))
