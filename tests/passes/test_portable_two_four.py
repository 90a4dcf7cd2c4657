"""2:4 storage in the FunctionProto of SparseAMXMatMul gives the same answers as the kernels."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ortolan import _native
from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.operators.sparse_amx_matmul_function import Uses, sparse_amx_matmul_function

from ..ops.linear_kinds import BITS, GROUPS, attributes, packed, scales
from ..ops.quantized import Layer
from ..ops.single_node import Packed, session, sparse_amx_matmul_model, sparse_weight
from ..ops.two_four import two_of_four
from ..sampling import examples
from .small_models import relative_error

KINDS = ["bf16", *GROUPS]
ALL = Uses(frozenset({16, 8, 4}), dense=True, activations=frozenset(Activation), residual=False, two_four=True)


def alone(kind: str) -> Uses:
    """Return the function's options for a model in which all layers have this kind and 2:4 storage."""
    return Uses(frozenset({BITS[kind]}), bitmap=False, two_four=True)


def stored(rng: np.random.Generator, kind: str, k: int, n: int, storage: str) -> tuple[Packed, np.ndarray]:
    """Return the packed tensors of a weight, and its scales."""
    if kind == "bf16":
        w = sparse_weight(rng, k, n, 0.3)
        weight = (
            _native.pack_two_four(two_of_four(rng, w))
            if storage == "2:4"
            else _native.pack_bitmap(w, storage == "dense")
        )
        return weight, np.ones((-(-n // 16), 1, 16), np.float32)
    layer = Layer.random(rng, k, n, 0.1, GROUPS[kind], scale=0.01)
    if storage == "2:4":
        layer = Layer.two_four(two_of_four(rng, layer.weights), layer.scales, layer.group)
        return layer.packed, scales(layer)
    return packed(layer, storage == "dense"), scales(layer)


def model_of(
    rng: np.random.Generator,
    kind: str,
    k: int,
    n: int,
    uses: Uses,
    storage: str = "2:4",
    opset: int = 17,
    unpack_once: bool = True,
) -> onnx.ModelProto:
    weight, weight_scales = stored(rng, kind, k, n, storage)
    model = sparse_amx_matmul_model(
        weight,
        k,
        n,
        rng.standard_normal(n, dtype=np.float32),
        functions=(ir.to_proto(sparse_amx_matmul_function(opset, uses, unpack_once)),),
        opset=opset,
        scales=weight_scales,
        **attributes(kind),
    )
    onnx.checker.check_model(model)
    return model


def assert_answers_agree(model: onnx.ModelProto, x: np.ndarray) -> None:
    kernel, function = (session(model, library=library).run(None, {"x": x})[0] for library in (True, False))
    assert kernel.shape == function.shape
    np.testing.assert_allclose(function, kernel, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(kernel).max())))


@examples(30)
@given(st.sampled_from(KINDS), st.integers(1, 200), st.integers(1, 40), st.booleans(), st.integers(0, 2**32 - 1))
def test_kernel_and_function_agree(kind: str, k: int, n: int, unpack_once: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, k), dtype=np.float32)
    for uses in (alone(kind), ALL):
        assert_answers_agree(model_of(rng, kind, k, n, uses, unpack_once=unpack_once), x)


@pytest.mark.parametrize("storage", ["dense", "bitmap"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_storages_beside_it(kind: str, storage: str) -> None:
    """The tested layer is dense or a bitmap; the model's function supports 2:4 too (with `ALL`, every storage)."""
    rng = np.random.default_rng(1)
    both = Uses(frozenset({BITS[kind]}), dense=storage == "dense", bitmap=storage == "bitmap", two_four=True)
    for k, n in ((1, 1), (33, 17), (64, 16), (200, 33)):
        for uses in (both, ALL):
            x = rng.standard_normal((3, k), dtype=np.float32)
            assert_answers_agree(model_of(rng, kind, k, n, uses, storage), x)


@pytest.mark.parametrize("opset", range(13, 24))
def test_every_opset(opset: int) -> None:
    rng = np.random.default_rng(opset)
    x = rng.standard_normal((2, 70), dtype=np.float32)
    for kind in ("bf16", "int8", "int4 g32"):
        assert_answers_agree(model_of(rng, kind, 70, 19, ALL, opset=opset), x)


@pytest.mark.parametrize("unpack_once", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_function_in_the_reference_evaluator(kind: str, unpack_once: bool) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 70), dtype=np.float32)
    for uses in (alone(kind), ALL):
        for opset in (13, 18, 23):
            model = model_of(rng, kind, 70, 19, uses, opset=opset, unpack_once=unpack_once)
            model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["d0", 19]))
            onnx.checker.check_model(model, full_check=True)
            found = ReferenceEvaluator(model).run(None, {"x": x})[0]
            assert relative_error(session(model).run(None, {"x": x})[0], found) < 1e-6
