"""The FunctionProto of SparseAMXMatMul is its specification: it matches numpy in every opset and shape."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import ortolan
from ortolan.graph_passes.operators.replacement import LayerWeight
from ortolan.graph_passes.operators.sparse_amx_matmul import SparseAMXMatMul
from ortolan.graph_passes.operators.sparse_amx_matmul_function import Uses, sparse_amx_matmul_function
from ortolan.graph_passes.passes.replace import replace

from ..sampling import examples
from .small_models import make_model, matmul_model, optimize, run


def node_model(
    weight: np.ndarray, bias: np.ndarray | None, rank: int = 2, opset: int = 17, unpack_once: bool = True
) -> onnx.ModelProto:
    """Return a model of one SparseAMXMatMul with its function."""
    k, n = weight.shape
    packed = SparseAMXMatMul().pack(LayerWeight(weight))
    bf16 = ir.DataType.BFLOAT16
    tensors = {
        name: part.array.view(ml_dtypes.bfloat16) if part.dtype == bf16 else part.array for name, part in packed.items()
    }
    if bias is not None:
        tensors["bias"] = bias
    axes = [f"axis{index}" for index in range(rank - 1)]
    function = ir.to_proto(sparse_amx_matmul_function(opset, Uses(dense=tensors["masks"].size == 0), unpack_once))
    return make_model(
        [
            helper.make_node(
                "SparseAMXMatMul", ["x", *tensors], ["y"], domain="ai.ortolan", name="node", k=k, n=n, format_version=1
            )
        ],
        {"x": (TensorProto.FLOAT, [*axes, k])},
        {"y": (TensorProto.FLOAT, [*axes, n])},
        tensors,
        opset,
        functions=[function],
        domains={"ai.ortolan": 1},
    )


def oracle(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    rounded_x, rounded_weight = (array.astype(ml_dtypes.bfloat16).astype(np.float64) for array in (x, weight))
    y = rounded_x @ rounded_weight
    return (y if bias is None else y + bias).astype(np.float32)


@examples(40)
@given(
    st.integers(1, 70),
    st.integers(1, 40),
    st.lists(st.integers(0, 4), max_size=3),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.integers(0, 2**32 - 1),
)
def test_equals_numpy(k, n, batch, has_bias, sparsity, seed):
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((k, n)) * (rng.random((k, n)) >= sparsity)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32) if has_bias else None
    x = rng.standard_normal((*batch, k)).astype(np.float32)
    expected = oracle(x, weight, bias)
    for unpack_once in (True, False):
        (found,) = run(node_model(weight, bias, x.ndim, unpack_once=unpack_once), {"x": x})
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", range(13, 24))
def test_every_opset_with_and_without_the_library(opset):
    rng = np.random.default_rng(opset)
    weight, bias = rng.standard_normal((33, 17)).astype(np.float32), rng.standard_normal(17).astype(np.float32)
    x = rng.standard_normal((3, 33)).astype(np.float32)
    model = node_model(weight, bias, opset=opset)
    lazy = node_model(weight, bias, opset=opset, unpack_once=False)
    np.testing.assert_allclose(run(lazy, {"x": x})[0], oracle(x, weight, bias), rtol=1e-5, atol=1e-5)
    for library in (False, True):
        np.testing.assert_allclose(run(model, {"x": x}, library)[0], oracle(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_activations_are_rounded_to_nearest_even():
    # Ties when rounding to bfloat16: 1 + 2^-8 rounds down to 1, 1 + 3 x 2^-8 rounds up to 1 + 2^-6.
    x = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20]], np.float32)
    (found,) = run(node_model(np.eye(3, dtype=np.float32), None), {"x": x})
    np.testing.assert_array_equal(found, [[1.0, 1 + 2**-6, 1 + 2**-7]])


def executed_op_types(path, folder, library: bool) -> set[str]:
    """Return the operators that remain after ONNX Runtime has inlined functions and optimized the model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "executed.onnx")
    if library:
        ortolan.register(options)
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return {node.op_type for node in onnx.load(folder / "executed.onnx").graph.node}


def test_the_kernel_runs_where_the_library_is_registered_and_the_body_elsewhere(tmp_path):
    path = tmp_path / "fast.onnx"
    optimize(matmul_model(), path)
    assert executed_op_types(path, tmp_path, library=True) == {"SparseAMXMatMul"}
    without = executed_op_types(path, tmp_path, library=False)
    assert "SparseAMXMatMul" not in without
    # The session unpacks the weight once, when it is created.
    assert without == {"Cast", "MatMul", "Add"}


def test_large_models_are_not_unpacked_when_they_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(replace, "UNPACK_ONCE_LIMIT", 0)
    path = tmp_path / "fast.onnx"
    report = optimize(matmul_model(), path)
    assert any("unpacks its weights in each run" in note for note in report.notes)
    assert executed_op_types(path, tmp_path, library=True) == {"SparseAMXMatMul"}
    assert {"BitShift", "CumSum", "Gather", "MatMul"} <= executed_op_types(path, tmp_path, library=False)


def test_not_portable_models_have_no_function_and_need_the_library():
    report = optimize(matmul_model(), portable=False)
    assert not report.model.functions and not report.portable_error
    with pytest.raises(Exception, match="SparseAMXMatMul"):
        run(report.model, {"x": np.zeros((1, 1, 20), np.float32)})
    run(report.model, {"x": np.zeros((1, 1, 20), np.float32)}, library=True)
