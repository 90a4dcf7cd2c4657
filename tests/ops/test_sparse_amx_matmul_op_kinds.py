"""Test SparseAMXMatMul in ORT with every kind of weight, storage, activation and residual: kernel and ONNX function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from ortolan import _native
from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.operators.sparse_amx_matmul_function import Uses, sparse_amx_matmul_function

from .linear_kinds import GROUPS, RESIDUALS, apply, attributes, packed, scales, uses
from .quantized import Layer, quantize_rows
from .single_node import Packed, U, assert_matmul_close, session, sparse_amx_matmul_model, sparse_weight
from .two_four import two_of_four


def function(uses: Uses, opset: int = 17) -> onnx.FunctionProto:
    proto: onnx.FunctionProto = ir.to_proto(sparse_amx_matmul_function(opset, uses))
    return proto


def assert_close_to_float_sums(y: np.ndarray, x: np.ndarray, layer: Layer, bias: np.ndarray | None) -> None:
    """Check y against the product of the quantized rows, within the error of float32 sums in any order."""
    q, s = quantize_rows(x, layer.zero_points)
    added = np.zeros(y.shape[1]) if bias is None else bias.astype(np.float64)
    bound = (len(layer.weights) + 8) * U * (s * (np.abs(q) @ np.abs(layer.dense())) + np.abs(added))
    assert y.shape == (len(x), len(added))
    assert np.all(np.abs(y - (s.astype(np.float64) * (q @ layer.dense()) + added)) <= bound)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("group", GROUPS.values())
def test_quantized_weights(group: int | None, dense: bool) -> None:
    """ORT runs the kernel with the library, and the function without it; both must agree with NumPy."""
    kind = next(name for name, size in GROUPS.items() if size == group)
    rng = np.random.default_rng(0)
    body = function(uses(kind, dense))
    for k, n in ((1, 1), (33, 17), (64, 16), (70, 40), (200, 33), (385, 5)):
        for sparsity in (0.0, 0.5, 1.0):
            layer = Layer.random(rng, k, n, sparsity, group)
            bias = rng.standard_normal(n, dtype=np.float32) if k % 2 else None
            model = sparse_amx_matmul_model(
                packed(layer, dense), k, n, bias, functions=(body,), scales=scales(layer), **attributes(kind)
            )
            onnx.checker.check_model(model)
            kernel, inlined = session(model), session(model, library=False)
            for m in (1, 3, 17):
                x = rng.standard_normal((m, k), dtype=np.float32)
                layer.check(kernel.run(None, {"x": x})[0], x, bias)
                assert_close_to_float_sums(inlined.run(None, {"x": x})[0], x, layer, bias)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_rows_with_zero_points(others: bool, dense: bool) -> None:
    """Rows of x are quantized with zero points.

    others: the function also serves nodes without zero points and with other weights.
    """
    rng = np.random.default_rng(2)
    needed = Uses(frozenset({8}), dense, x_zero_points=frozenset({1}))
    if others:
        needed = Uses(frozenset({16, 8, 4}), True, x_zero_points=frozenset({0, 1}))
    for k, n in ((1, 1), (70, 40), (385, 50)):
        for layer in Layer.random(rng, k, n, 0.3, None).kinds()[1:]:
            zeros = layer.packed_zeros()
            body = function(replace(needed, zero_points=zeros is not None))
            model = sparse_amx_matmul_model(
                packed(layer, dense), k, n, np.ones(n, np.float32), functions=(body,), scales=scales(layer),
                zero_points=zeros, **attributes("int8") | {"x_zero_points": 1},
            )  # fmt: skip
            onnx.checker.check_model(model)
            kernel, inlined = session(model), session(model, library=False)
            for m in (1, 3, 17, 70):
                x = rng.standard_normal((m, k), dtype=np.float32) + 1
                layer.check(kernel.run(None, {"x": x})[0], x, np.ones(n, np.float32))
                assert_close_to_float_sums(inlined.run(None, {"x": x})[0], x, layer, np.ones(n, np.float32))


@pytest.mark.parametrize("library", [True, False])
def test_one_zero_stands_for_no_zero_points(library: bool) -> None:
    """A single zero as `zero_points` means that the weights have none, for each kind of weight."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((3, 70), dtype=np.float32)
    for kind in ("bf16", "int8", "int4 g32"):
        weight, weight_scales = random_packed(rng, kind, 70, 40)
        weight_scales = np.ones((3, 1, 16), np.float32) if weight_scales is None else weight_scales
        plain, zero = (
            sparse_amx_matmul_model(
                weight, 70, 40, functions=(function(replace(uses(kind, False), zero_points=given is not None)),),
                scales=weight_scales, zero_points=given, **attributes(kind),
            )
            for given in (None, np.zeros(1, np.int8))
        )  # fmt: skip
        first, second = (session(model, library=library).run(None, {"x": x})[0] for model in (plain, zero))
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("kind", "k", "x_zero_points", "message"),
    [
        ("bf16", 70, 0, "are given for 16-bit weights with 70 inputs, expected int8"),
        ("int4 g32", 70, 0, "are given for 4-bit weights with 70 inputs, expected int8"),
        ("int8", 70, 0, "are given for 8-bit weights with 70 inputs, expected int8 .*, and x_zero_points 1"),
        (
            "int8",
            2**15 + 1,
            1,
            "are given for 8-bit weights with 32769 inputs, expected int8 weights with at most 32768",
        ),
        ("int8", 70, 1, r"has shape \[2, 1, 16\], expected \[3, 1, 16\]"),
    ],
)
def test_zero_points_of_weights_that_kernels_have_not_are_refused(
    kind: str, k: int, x_zero_points: int, message: str
) -> None:
    weight, weight_scales = random_packed(np.random.default_rng(0), kind, k, 40)
    zeros = np.ones((2 if "shape" in message else 3, 1, 16), np.int8)
    given = attributes(kind) | {"x_zero_points": x_zero_points}
    model = sparse_amx_matmul_model(weight, k, 40, scales=weight_scales, zero_points=zeros, **given)
    with pytest.raises(Exception, match=f"'linear': zero_points 'w.zero_points' {message}"):
        session(model)


@pytest.mark.parametrize(("kind", "k", "value"), [("int4 g32", 70, 1), ("int8", 70, 2), ("int8", 2**16 + 1, 1)])
def test_zero_points_that_kernels_have_not_are_refused(kind: str, k: int, value: int) -> None:
    layer = Layer.random(np.random.default_rng(0), k, 3, 0.5, GROUPS[kind])
    given = attributes(kind) | {"x_zero_points": value}
    model = sparse_amx_matmul_model(packed(layer, False), k, 3, scales=scales(layer), **given)
    with pytest.raises(Exception, match=f"'linear': x_zero_points is {value} with {k} inputs and .*, expected 0, or 1"):
        session(model)


@pytest.mark.parametrize("library", [True, False])
def test_dense_bf16(library: bool) -> None:
    rng = np.random.default_rng(1)
    for k, n in ((1, 1), (33, 17), (70, 40)):
        w, bias = sparse_weight(rng, k, n, 0.3), rng.standard_normal(n, dtype=np.float32)
        weight = _native.pack_bitmap(w, dense=True)
        model = sparse_amx_matmul_model(weight, k, n, bias, functions=(function(uses("bf16", True)),))
        x = rng.standard_normal((5, k), dtype=np.float32)
        assert_matmul_close(session(model, library=library).run(None, {"x": x})[0], x, w, bias)


def test_a_row_of_zeros_or_with_infinity() -> None:
    rng = np.random.default_rng(2)
    layer = Layer.random(rng, 40, 20, 0.5, None)
    x = rng.standard_normal((4, 40), dtype=np.float32)
    x[0], x[1, 3], x[2, 5] = 0, np.inf, np.nan
    model = sparse_amx_matmul_model(
        layer.packed,
        40,
        20,
        functions=(function(uses("int8", False)),),
        scales=scales(layer),
        **attributes("int8"),
    )
    for library in (True, False):
        y = session(model, library=library).run(None, {"x": x})[0]
        assert (y[0] == 0).all() and np.isnan(y[1:3]).all() and np.isfinite(y[3]).all()


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4 g64"])
@pytest.mark.parametrize("activation", Activation)
def test_activation_and_residual(activation: Activation, kind: str, library: bool) -> None:
    """The output equals activation(product) + residual, with the product from a node without them."""
    k, n = 50, 37
    rng = np.random.default_rng(3)
    weight, weight_scales = random_packed(rng, kind, k, n)
    for m in (1, 20):
        x = rng.standard_normal((2, m, k), dtype=np.float32)
        plain = sparse_amx_matmul_model(
            weight, k, n, rank=3, functions=(function(uses(kind, False)),), scales=weight_scales, **attributes(kind)
        )
        product = session(plain, library=library).run(None, {"x": x})[0]
        activated = apply(activation, product)
        for shape in (None, *(make(m, n) for make in RESIDUALS.values())):
            residual = None if shape is None else rng.standard_normal(shape).astype(np.float32)
            body = function(uses(kind, False, activation, shape is not None))
            model = sparse_amx_matmul_model(
                weight,
                k,
                n,
                rank=3,
                functions=(body,),
                scales=weight_scales,
                residual=shape,
                **attributes(kind, activation),
            )
            feeds = {"x": x} if residual is None else {"x": x, "residual": residual}
            y = session(model, library=library).run(None, feeds)[0]
            added = 0.0 if residual is None else residual.astype(np.float64)
            expected = activated + added
            assert y.shape == expected.shape
            # The bound includes ORT's Erf and Tanh, whose error is a few units of 2^-24.
            bound = 2.0**-20 * (np.abs(product) + np.abs(added))
            assert np.all(np.abs(y - expected) <= bound), np.max(np.abs(y - expected) - bound)


def random_packed(rng: np.random.Generator, kind: str, k: int, n: int) -> tuple[Packed, np.ndarray | None]:
    if kind == "bf16":
        return _native.pack_bitmap(sparse_weight(rng, k, n, 0.5)), None
    layer = Layer.random(rng, k, n, 0.5, GROUPS[kind], scale=0.01)
    return layer.packed, scales(layer)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    k, n = 300, 700
    rng = np.random.default_rng(4)
    for kind in ("bf16", "int8", "int4 g32"):
        weight, weight_scales = random_packed(rng, kind, k, n)
        model = sparse_amx_matmul_model(
            weight, k, n, scales=weight_scales, residual=("m", n), **attributes(kind, Activation.GELU)
        )
        for m in (1, 600):
            feeds = {
                name: rng.standard_normal((m, size), dtype=np.float32) for name, size in (("x", k), ("residual", n))
            }
            one, two, three = (session(model, threads=threads).run(None, feeds)[0] for threads in (1, 2, 3))
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one, three)


def test_a_constant_zero_is_no_residual() -> None:
    """A constant zero replaces the residual in nodes that have none but share the function of nodes that do."""
    rng = np.random.default_rng(5)
    weight, _ = random_packed(rng, "bf16", 40, 20)
    x = rng.standard_normal((3, 40), dtype=np.float32)
    zero, plain = (
        session(sparse_amx_matmul_model(weight, 40, 20, residual=residual)).run(None, {"x": x})[0]
        for residual in (np.zeros((), np.float32), None)
    )
    np.testing.assert_array_equal(zero, plain)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize(
    "leading, residual, expected",
    [
        ((3,), (1, 1, 1), (1, 3, 20)),  # all zeros, but the shape adds a dimension
        ((), (2, 1, 20), (2, 1, 20)),
        ((0,), (1,), (0, 20)),
        ((0,), (4, 1, 20), (4, 0, 20)),
        ((3,), (0, 1, 20), (0, 3, 20)),
    ],
)
def test_residuals_give_the_sum_its_shape(
    leading: tuple[int, ...], residual: tuple[int, ...], expected: tuple[int, ...], library: bool
) -> None:
    rng = np.random.default_rng(8)
    layer = Layer.random(rng, 40, 20, 0.5, None)
    x = rng.standard_normal((*leading, 40), dtype=np.float32)
    model = sparse_amx_matmul_model(
        layer.packed,
        40,
        20,
        rank=len(leading) + 1,
        functions=(function(uses("int8", False, residual=True)),),
        scales=scales(layer),
        residual=np.zeros(residual, np.float32),
        **attributes("int8"),
    )
    y = session(model, library=library).run(None, {"x": x})[0]
    assert y.shape == expected
    assert np.any(y) == (y.size > 0)


def test_residuals_of_a_wrong_shape_are_refused() -> None:
    weight, _ = random_packed(np.random.default_rng(6), "bf16", 40, 20)
    model = sparse_amx_matmul_model(weight, 40, 20, residual=("r", "c"))
    with pytest.raises(Exception, match=r"'linear': residual has shape \[3, 19\], which does not fit X W of \[3, 20\]"):
        session(model).run(None, {"x": np.ones((3, 40), np.float32), "residual": np.ones((3, 19), np.float32)})


BAD: dict[str, tuple[str, Callable[[onnx.NodeProto, dict[str, onnx.TensorProto]], None], str]] = {}


def bad(kind: str, message: str) -> Callable[[Callable[..., None]], None]:
    def add(change: Callable[..., None]) -> None:
        BAD[change.__name__] = (kind, change, message)

    return add


def set_attribute(node: onnx.NodeProto, name: str, value: int) -> None:
    for attribute in node.attribute:
        if attribute.name == name:
            attribute.i = value


@bad("int8", "group_size is 32, expected 0 for weights that are not int4")
def group_size_of_int8(node, tensors):
    set_attribute(node, "group_size", 32)


@bad("int4 g32", "group_size is 33, expected 32, 64 or 128 for int4 weights")
def odd_group_size(node, tensors):
    set_attribute(node, "group_size", 33)


@bad("int4 g32", r"scales 'w.scales' has shape \[3, 4, 16\], expected \[3, 2, 16\] \(panels, groups, columns\)")
def other_group_size(node, tensors):
    set_attribute(node, "group_size", 64)


@bad("bf16", "scales 'w.offsets' is int64, expected float")
def scales_of_bf16_and_of_another_type(node, tensors):
    node.input.extend(["", "", "w.offsets"])


@bad("bf16", "scales 'twos' holds 2, expected 1 everywhere for bf16 weights")
def scales_of_bf16(node, tensors):
    node.input.extend(["", "", "twos"])


@bad("int8", "activation is 5, expected 0")
def unknown_activation(node, tensors):
    set_attribute(node, "activation", 5)


@bad("int8", "weight_bits is 4, but values 'w.values' hold 8-bit weights")
def wrong_weight_bits(node, tensors):
    set_attribute(node, "weight_bits", 4)


@bad("int8", r"input 6 \(scales\) is missing")
def no_scales(node, tensors):
    del node.input[6]


@bad("int8", "scales 'w.scales' is int8, expected float")
def scales_of_another_type(node, tensors):
    tensors["w.scales"].data_type = onnx.TensorProto.INT8
    tensors["w.scales"].raw_data = b"\1" * 48


@bad("int8", "values 'w.values' is float16, expected bfloat16 or int8 or uint8")
def values_of_another_type(node, tensors):
    tensors["w.values"].data_type = onnx.TensorProto.FLOAT16
    tensors["w.values"].dims[0] //= 2
    tensors["w.values"].raw_data = tensors["w.values"].raw_data[: 2 * tensors["w.values"].dims[0]]


@bad("int8", "malformed weight in tensors 'w.masks'")
def masks_without_elements(node, tensors):
    tensors["w.masks"].ClearField("dims")
    tensors["w.masks"].dims.append(0)
    tensors["w.masks"].raw_data = b""


@pytest.mark.parametrize("name", BAD)
def test_malformed_nodes_are_refused(name: str) -> None:
    kind, change, message = BAD[name]
    k, n = 128, 40
    weight, weight_scales = random_packed(np.random.default_rng(7), kind, k, n)
    model = sparse_amx_matmul_model(weight, k, n, scales=weight_scales, **attributes(kind))
    model.graph.initializer.append(numpy_helper.from_array(np.full((3, 1, 16), 2, np.float32), "twos"))
    change(model.graph.node[0], {tensor.name: tensor for tensor in model.graph.initializer})
    with pytest.raises(Exception, match="'linear': " + message):
        session(model)


@pytest.mark.parametrize("opset", [13, 17, 18, 20, 21, 23])
@pytest.mark.parametrize("unpack_once", [True, False])
def test_one_function_for_layers_that_differ(opset: int, unpack_once: bool) -> None:
    """Nodes with all kinds of weights, storage, activations and residuals share one function."""
    k = 48
    rng = np.random.default_rng(opset)
    nodes, initializers, kinds = [], [], ["bf16", "int8", "int4 g32", "int4 g64"]
    for index in range(8):
        kind, dense = kinds[index % 4], index >= 4
        if kind == "bf16":
            weight = _native.pack_bitmap(sparse_weight(rng, k, k, 0.5) / 5, dense=dense)
            weight_scales = np.ones((3, 1, 16), np.float32)
        else:
            layer = Layer.random(rng, k, k, 0.5, GROUPS[kind], scale=0.01)
            weight, weight_scales = packed(layer, dense), scales(layer)
        residual = np.zeros((), np.float32) if index % 3 == 0 else rng.standard_normal((k,), dtype=np.float32)
        part = sparse_amx_matmul_model(
            weight, k, k, scales=weight_scales, residual=residual, **attributes(kind, Activation(index % 5))
        )
        renamed = {tensor.name: f"{tensor.name}{index}" for tensor in part.graph.initializer}
        renamed |= {"x": "x" if index == 0 else f"h{index}", "y": "y" if index == 7 else f"h{index + 1}"}
        for tensor in part.graph.initializer:
            tensor.name = renamed[tensor.name]
        node = part.graph.node[0]
        node.name = f"linear{index}"
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed[name] for name in node.output]
        nodes.append(node)
        initializers += part.graph.initializer
    everything = Uses(frozenset({16, 8, 4}), True, activations=frozenset(Activation), residual=True)
    body = ir.to_proto(sparse_amx_matmul_function(opset, everything, unpack_once))
    shape = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["m", k]) for name in ("x", "y")]
    model = helper.make_model(
        helper.make_graph(nodes, "all", shape[:1], shape[1:], initializers),
        functions=[body],
        ir_version=8,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("ai.ortolan", 1)],
    )
    onnx.checker.check_model(model)
    x = rng.standard_normal((3, k), dtype=np.float32)
    kernel, inlined = (session(model, library=library).run(None, {"x": x})[0] for library in (True, False))
    # A value near a rounding midpoint may round up in one and down in the other.
    assert np.linalg.norm(kernel - inlined) <= 0.02 * np.linalg.norm(kernel)


@pytest.mark.parametrize("kind", ["bf16", *GROUPS])
@pytest.mark.parametrize("m", [1, 5])
def test_two_four_storage(kind: str, m: int) -> None:
    """The operator recognizes 2:4 storage by its tensors, and gives the results of dense storage."""
    k, n = 300, 40
    rng = np.random.default_rng(m)
    x, bias = rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal(n, dtype=np.float32)
    if kind == "bf16":
        w = two_of_four(rng, rng.standard_normal((k, n), dtype=np.float32))
        y = session(sparse_amx_matmul_model(_native.pack_two_four(w), k, n, bias)).run(None, {"x": x})[0]
        assert_matmul_close(y, x, w, bias)
        return
    random = Layer.random(rng, k, n, 0.1, GROUPS[kind])
    layer = Layer.two_four(two_of_four(rng, random.weights), random.scales, random.group)

    def answer(weight: Packed) -> np.ndarray:
        model = sparse_amx_matmul_model(weight, k, n, bias, scales=scales(layer), **attributes(kind))
        return session(model).run(None, {"x": x})[0]

    y = answer(layer.packed)
    layer.check(y, x, bias)
    np.testing.assert_array_equal(y, answer(layer.stored_dense().packed))


def test_places_that_do_not_ascend_are_refused() -> None:
    masks, values, offsets = _native.pack_two_four_int8(np.zeros((64, 16), np.int8))
    masks[0, 0, :2] = 0
    model = sparse_amx_matmul_model(
        (masks, values, offsets), 64, 16, scales=np.ones((1, 1, 16), np.float32), **attributes("int8")
    )
    with pytest.raises(Exception, match=r"linear.*w\.masks.*do not ascend"):
        session(model)
