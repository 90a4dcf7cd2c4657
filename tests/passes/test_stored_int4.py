"""Stored 4-bit weights are read exactly; weights that W4A8MatMul cannot hold have a reason."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ortolan import ModelError, inspect_onnx
from ortolan.graph_passes.find.linear import Linear, NotLinear, find_linears
from ortolan.graph_passes.find.stored_int4 import StoredInt4
from ortolan.models import tiny

from ..sampling import examples
from .small_models import make_model, run
from .stored_layers import DequantizedLayer, NBitsLayer

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def find(model: onnx.ModelProto) -> Linear:
    (found,) = find_linears(ir.from_proto(model))
    assert isinstance(found, Linear), found.reason
    return found


def why_not(model: onnx.ModelProto) -> str:
    (found,) = find_linears(ir.from_proto(model))
    if isinstance(found, NotLinear):
        return found.reason
    assert isinstance(found.int4, str)
    return found.int4


def check(found: Linear, matrix: np.ndarray, dtype, symmetric: bool) -> StoredInt4:
    int4 = found.int4
    assert isinstance(int4, StoredInt4)
    k, n = matrix.shape
    assert (found.k, found.n, found.dtype.numpy()) == (k, n, dtype)
    assert (int4.bits, int4.symmetric) == (4, symmetric) and int4.group_size in (32, 64, 128)
    groups = -(-k // int4.group_size)
    assert int4.q.shape == (k, n) and int4.scales.shape == (groups, n)
    tensors = [int4.q, int4.scales] if symmetric else [int4.q, int4.scales, int4.zero_points]
    for tensor in tensors:
        assert tensor.numpy().shape == tuple(tensor.shape) and tensor.numpy().dtype == tensor.dtype.numpy()
    assert int4.q.dtype == (ir.DataType.INT8 if symmetric else ir.DataType.UINT8)
    assert int4.scales.dtype == (ir.DataType.FLOAT16 if dtype == np.float16 else ir.DataType.FLOAT)
    np.testing.assert_array_equal(found.matrix(), matrix)
    np.testing.assert_array_equal(found.matrix_as_it_is()(), matrix)
    return int4


@examples(150)
@given(
    st.integers(1, 300), st.integers(1, 20), st.sampled_from([32, 64, 128, 256, 512]),
    st.sampled_from(["", "packed", "float"]), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_matmul_nbits(k, n, block, zero_points, dtype, flat, seed):
    layer = NBitsLayer(k, n, block, zero_points, dtype, flat, seed=seed)
    found = find(layer.model())
    int4 = check(found, layer.matrix, dtype, not zero_points)
    assert int4.group_size == min(block, 128)
    assert found.weight_names == ["B"] and found.stored_type == f"int4, groups of {int4.group_size}"
    assert found.stored_bytes == sum(array.nbytes for array in layer.tensors.values())
    # `weight` has the element type of the activations.
    np.testing.assert_array_equal(found.weight.numpy(), layer.matrix.astype(dtype))


@examples(150)
@given(
    st.integers(1, 300), st.integers(1, 20), st.sampled_from([32, 64, 96, 128, 160, 256, None, 0]),
    st.booleans(), st.booleans(), st.sampled_from(["matmul", "transpose", "gemm", "gemm_trans_b"]),
    st.sampled_from(DTYPES), st.integers(0, 99),
)  # fmt: skip
def test_dequantize_linear(k, n, block, signed, zero_points, form, dtype, seed):
    layer = DequantizedLayer(k, n, block, signed, zero_points, form, dtype, seed)
    int4 = check(find(layer.model()), layer.matrix, dtype, signed and not zero_points)
    if not block:  # one block contains all inputs
        expected = k if k in (32, 64) else 128
    elif block in (32, 64, 128):
        expected = block
    else:
        expected = {96: 32, 160: 32, 256: 128}[block] if block < k else 128
    assert int4.group_size == expected


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("zero_points", ["", "packed", "float"])
def test_onnx_runtime_reads_the_numbers_alike(block, zero_points):
    """ONNX Runtime at accuracy_level 0 returns the same weights if the input is the identity matrix."""
    layer = NBitsLayer(150, 40, block, zero_points, accuracy_level=0)
    (answer,) = run(layer.model(), {"x": np.eye(150, dtype=np.float32)})
    # ONNX Runtime may compute q * scale - zero * scale and round each product.
    np.testing.assert_allclose(answer, layer.matrix, rtol=0, atol=2**-23 * 15 * np.abs(layer.scales).max())


@pytest.mark.parametrize("form", ["matmul", "transpose", "gemm", "gemm_trans_b"])
@pytest.mark.parametrize(("signed", "zero_points"), [(True, False), (True, True), (False, True), (False, False)])
def test_onnx_runtime_dequantizes_alike(form, signed, zero_points):
    layer = DequantizedLayer(96, 16, 32, signed, zero_points, form)
    found = find(layer.model())
    np.testing.assert_array_equal(found.matrix(), layer.matrix)
    x = np.random.default_rng(0).standard_normal((3, 96)).astype(np.float32)
    (answer,) = run(layer.model(), {"x": x})
    # ONNX Runtime may replace the nodes by MatMulNBits with accuracy_level 4, which rounds x.
    assert np.abs(answer - x @ layer.matrix).max() < 0.02 * np.abs(answer).max()


def test_blocks_of_odd_sizes_fit_where_one_holds_all_inputs():
    assert find(NBitsLayer(16, 8, 16).model()).int4.group_size == 128
    assert "block_size is 16, expected a multiple of 32" in why_not(NBitsLayer(17, 8, 16).model())
    assert "block_size is 48, expected a multiple of 32" in why_not(DequantizedLayer(49, 8, 48).model())
    assert find(DequantizedLayer(48, 8, 48).model()).int4.group_size == 128


def test_order_by_g_idx():
    order = np.arange(100, dtype=np.int32) // 32
    layer = NBitsLayer(100, 8, 32, extra={"g_idx": order})
    np.testing.assert_array_equal(find(layer.model()).matrix(), layer.matrix)
    padded = np.concatenate([order, np.zeros(28, np.int32)])
    np.testing.assert_array_equal(find(NBitsLayer(100, 8, 32, extra={"g_idx": padded}).model()).matrix(), layer.matrix)
    mixed = order.copy()
    mixed[[3, 70]] = mixed[[70, 3]]
    text = why_not(NBitsLayer(100, 8, 32, extra={"g_idx": mixed}).model())
    assert "g_idx 'g_idx' assigns inputs to groups out of order; quantize without act-order" in text


@pytest.mark.parametrize("zero", [7.5, -1.0, 16.0, 0.1])
@pytest.mark.parametrize("block", [32, 256])
def test_zero_points_that_are_no_whole_numbers_become_minimums(zero, block):
    layer = NBitsLayer(300, 8, block, "float", accuracy_level=0)
    zeros = layer.tensors["zero_points"].copy()
    zeros[3, 1] = zero
    layer.extra = {"zero_points": zeros}
    found = find(layer.model())
    assert isinstance(found.int4, StoredInt4)
    assert found.int4.minimum and not found.int4.symmetric and found.int4.zero_points is None
    (weights,) = run(layer.model(), {"x": np.eye(300, dtype=np.float32)})
    np.testing.assert_allclose(found.matrix(), weights, rtol=0, atol=2**-23 * 16 * np.abs(layer.scales).max())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_zero_points_that_are_no_finite_numbers(bad):
    layer = NBitsLayer(100, 8, 32, "float")
    zeros = layer.tensors["zero_points"].copy()
    zeros[3, 1] = bad
    layer.extra = {"zero_points": zeros}
    assert "zero points 'zero_points' hold NaN or infinity, expected finite numbers" in why_not(layer.model())


def changed(node_change=None, tensor=None, array=None, **layer_arguments) -> onnx.ModelProto:
    model = NBitsLayer(100, 8, 32, "packed", **layer_arguments).model()
    if tensor is not None:
        (old,) = [one for one in model.graph.initializer if one.name == tensor]
        old.CopyFrom(numpy_helper.from_array(array, tensor))
    if node_change is not None:
        node_change(model.graph.node[0])
    return model


def without(name):
    def change(node: onnx.NodeProto) -> None:
        (attribute,) = [one for one in node.attribute if one.name == name]
        node.attribute.remove(attribute)

    return change


def attribute(name, value):
    def change(node: onnx.NodeProto) -> None:
        kept = [one for one in node.attribute if one.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def inputs(*names):
    def change(node: onnx.NodeProto) -> None:
        del node.input[:]
        node.input.extend(names)

    return change


MALFORMED = {
    "no K": ({"node_change": without("K")}, "attribute 'K' is missing"),
    "no N": ({"node_change": without("N")}, "attribute 'N' is missing"),
    "no block_size": ({"node_change": without("block_size")}, "attribute 'block_size' is missing"),
    "K is a text": ({"node_change": attribute("K", "many")}, "attribute 'K' is not an integer"),
    "K is 0": ({"node_change": attribute("K", 0)}, "weight is 0 x 8"),
    "N is negative": ({"node_change": attribute("N", -8)}, "weight is 100 x -8"),
    "K is huge": ({"node_change": attribute("K", 2**62)}, "inputs, expected at most 131072"),
    "N is huge": ({"node_change": attribute("N", 2**62)}, "expected 1 or more"),
    "K is too large": ({"node_change": attribute("K", 160)}, "B 'B' have shape [8, 4, 16], expected [8, 5, 16]"),
    "N is too large": ({"node_change": attribute("N", 9)}, "B 'B' have shape [8, 4, 16], expected [9, 4, 16]"),
    "block_size is 0": ({"node_change": attribute("block_size", 0)}, "block_size is 0"),
    "block_size is negative": ({"node_change": attribute("block_size", -32)}, "block_size is -32"),
    "block_size is huge": ({"node_change": attribute("block_size", 2**40)}, "B 'B' have shape"),
    "2 bits": ({"node_change": attribute("bits", 2)}, "stored in 2 bits, expected 4 or 8"),
    "prepacked": ({"node_change": attribute("weight_prepacked", 1)}, "packed for another device"),
    "no scales": ({"node_change": inputs("x", "B")}, "input scales is missing"),
    "nothing but x": ({"node_change": inputs("x")}, "input B is missing"),
    "no x": ({"node_change": inputs("", "B", "scales")}, "an input is missing"),
    "B at run time": ({"node_change": inputs("x", "x", "scales")}, "B 'x' are not constant"),
    "flat B": ({"tensor": "B", "array": np.zeros(8 * 64, np.uint8)}, "B 'B' have shape [512], expected [8, 4, 16]"),
    "short B": ({"tensor": "B", "array": np.zeros((8, 4, 15), np.uint8)}, "B 'B' have shape [8, 4, 15]"),
    "float B": ({"tensor": "B", "array": np.zeros((8, 4, 16), np.float32)}, "B 'B' are FLOAT, expected UINT8"),
    "few scales": ({"tensor": "scales", "array": np.zeros(31, np.float32)}, "expected [8, 4] or [32]"),
    "turned scales": ({"tensor": "scales", "array": np.zeros((4, 8), np.float32)}, "scales 'scales' have shape [4, 8]"),
    "double scales": ({"tensor": "scales", "array": np.zeros((8, 4))}, "scales 'scales' are DOUBLE"),
    "few zero points": ({"tensor": "zero_points", "array": np.zeros((8, 1), np.uint8)}, "expected [8, 2] or [16]"),
    "int zero points": ({"tensor": "zero_points", "array": np.zeros((8, 4), np.int8)}, "zero_points' are INT8"),
    "half zero points": ({"tensor": "zero_points", "array": np.zeros((8, 4), np.float16)}, "are FLOAT16, expected"),
    "short g_idx": ({"extra": {"g_idx": np.zeros(99, np.int32)}}, "g_idx 'g_idx' have shape [99], expected [100]"),
    "long bias": ({"extra": {"bias": np.zeros(9, np.float32)}}, "bias 'bias' is FLOAT [9], expected FLOAT [8]"),
    "double bias": ({"extra": {"bias": np.zeros(8)}}, "bias 'bias' is DOUBLE [8], expected FLOAT [8]"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_nodes_are_told_by_what_is_wrong(kind):
    arguments, text = MALFORMED[kind]
    model = changed(**arguments)
    assert text in why_not(model)
    (layer,) = inspect_onnx(model).linears
    assert text in layer.reason and not layer.replaceable


def test_bias_at_run_time():
    layer = NBitsLayer(64, 8, 32, bias=True)
    model = layer.model()
    bias = next(tensor for tensor in model.graph.initializer if tensor.name == "bias")
    model.graph.initializer.remove(bias)
    model.graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, [8]))
    assert "bias 'bias' is computed at run time" in why_not(model)


def test_constant_activations():
    layer = NBitsLayer(64, 8, 32)
    nodes = [layer.node(x="c")]
    outputs = {"y": (TensorProto.FLOAT, [2, 8])}
    model = make_model(nodes, {}, outputs, layer.tensors | {"c": layer.inputs(2)}, domains={"com.microsoft": 1})
    assert "both inputs are constant" in why_not(model)


def test_other_domains_have_other_operators():
    model = NBitsLayer(64, 8, 32).model()
    model.graph.node[0].domain = "org.example"
    assert why_not(model) == "org.example::MatMulNBits: its weight is already quantized"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scales_that_are_not_finite(bad, dtype):
    layer = NBitsLayer(64, 8, 32, dtype=dtype)
    with np.errstate(over="ignore"):
        layer.scales[3, 1] = bad
    int4 = find(layer.model()).int4
    with pytest.raises(ModelError, match=r"scales 'scales' of a 4-bit weight hold NaN, infinity or values that"):
        int4.check_scales()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"axis": 1}, "blocks are along the outputs"),
        ({"axis": 5}, "axis of its DequantizeLinear is 5"),
        ({"block_size": 64}, "scales 'scales' have shape [4, 8], expected [2, 8]"),
        ({"block_size": -1}, "block_size is -1"),
        ({"output_dtype": TensorProto.FLOAT16}, "differs from the type of its scales"),
    ],
)
def test_malformed_dequantize_linear(change, text):
    model = DequantizedLayer(100, 8, 32).model()
    model.opset_import[0].version = 23  # which has output_dtype
    for name, value in change.items():
        attribute(name, value)(model.graph.node[0])
    assert text in why_not(model)


def test_scales_for_each_input():
    model = DequantizedLayer(8, 8, None).model()
    attribute("axis", 0)(model.graph.node[0])
    assert "scales 'scales' have shape [8], expected [] or [1]" in why_not(model)


def test_other_weights_are_no_stored_int4():
    for form in ("matmul_add", "gemm", "dequantize", "cast", "transpose"):
        (found,) = find_linears(tiny.mlp((24, 40), form))
        assert found.int4 is None
