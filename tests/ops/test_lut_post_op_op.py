"""Test LutPostOp in ORT with every pair of types: against NumPy and its ONNX function, and on invalid input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortolan.graph_passes.passes.fuse_lut import lut_post_op_function

from .lut_tables import (
    ENTRY_TYPES,
    X_TYPES,
    assert_same_bits,
    expected,
    random_codes,
    random_table,
)
from .single_node import session


def node_model(
    x_type: type,
    table: np.ndarray,
    shape: Sequence[str | int] | None = ("a", "b"),
    opset: int = 17,
    **attributes: int,
) -> onnx.ModelProto:
    """Return a model of one LutPostOp node "lookup" with its function: input x, output y."""
    types = [helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for dtype in (x_type, table.dtype)]
    node = helper.make_node(
        "LutPostOp", ["x", "table"], ["y"], "lookup", domain="ai.ortolan", **({"format_version": 1} | attributes)
    )
    graph = helper.make_graph(
        [node],
        "single",
        [helper.make_tensor_value_info("x", types[0], shape)],
        [helper.make_tensor_value_info("y", types[1], shape)],
        [numpy_helper.from_array(table, "table")],
    )
    return helper.make_model(
        graph,
        functions=[ir.to_proto(lut_post_op_function(opset))],
        ir_version=8,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("ai.ortolan", 1)],
    )


@pytest.mark.parametrize("entry_type", ENTRY_TYPES)
@pytest.mark.parametrize("x_type", X_TYPES)
def test_kernel_and_function_body_look_up_the_same(x_type: type, entry_type: type) -> None:
    """ORT runs the kernel with the library, and the function without it; both must agree with NumPy."""
    rng = np.random.default_rng(1)
    table = random_table(rng, 256 ** np.dtype(x_type).itemsize, entry_type)
    model = node_model(x_type, table)
    onnx.checker.check_model(model)
    for library in (True, False):
        run = session(model, library=library)
        for shape in ((3, 100), (0, 4), (1, 1), (300, 7)):
            x = random_codes(rng, shape, x_type)
            assert_same_bits(run.run(None, {"x": x})[0], expected(x, table))


@pytest.mark.parametrize("opset", [13, 18, 21, 23])
@pytest.mark.parametrize("library", [True, False])
def test_every_opset(opset: int, library: bool) -> None:
    rng = np.random.default_rng(2)
    table, x = random_table(rng, 256, np.int8), random_codes(rng, (2, 70), np.int8)
    y = session(node_model(np.int8, table, opset=opset), library=library).run(None, {"x": x})[0]
    assert_same_bits(y, expected(x, table))


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (2, 1, 3, 1, 2)])
def test_any_rank(shape: tuple[int, ...], library: bool) -> None:
    rng = np.random.default_rng(3)
    table, x = random_table(rng, 256, np.float32), random_codes(rng, shape, np.uint8)
    y = session(node_model(np.uint8, table, shape=shape), library=library).run(None, {"x": x})[0]
    assert_same_bits(y, expected(x, table))


def test_unknown_shape() -> None:
    rng = np.random.default_rng(4)
    table, x = random_table(rng, 256, np.uint8), random_codes(rng, (2, 3), np.uint8)
    assert_same_bits(session(node_model(np.uint8, table, shape=None)).run(None, {"x": x})[0], expected(x, table))


def test_shape_is_inferred() -> None:
    model = node_model(np.uint8, np.zeros(256, np.float32), shape=("batch", 7))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert session(model).get_outputs()[0].shape == ["batch", 7]


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_share_many_elements(threads: int) -> None:
    rng = np.random.default_rng(5)
    for x_type, entry_type in ((np.uint8, np.uint8), (np.int8, np.float32), (np.uint16, np.int16)):
        table = random_table(rng, 256 ** np.dtype(x_type).itemsize, entry_type)
        x = random_codes(rng, (1001, 1003), x_type)
        y = session(node_model(x_type, table), threads=threads).run(None, {"x": x})[0]
        assert_same_bits(y, expected(x, table))


@pytest.mark.parametrize(
    ("x_type", "table", "attributes", "message"),
    [
        (np.uint8, np.zeros(255, np.uint8), {}, r"table 'table' has shape \[255\], expected \[256\]"),
        (np.uint8, np.zeros(0, np.uint8), {}, r"has shape \[0\], expected \[256\]"),
        (np.int8, np.zeros((256, 1), np.int8), {}, r"has shape \[256, 1\], expected \[256\]"),
        (np.uint8, np.zeros((), np.uint8), {}, r"has shape \[\], expected \[256\]"),
        (np.uint16, np.zeros(256, np.uint8), {}, r"expected \[65536\] for 16-bit X"),
        (np.uint8, np.zeros(65536, np.uint8), {}, r"expected \[256\] for 8-bit X"),
        (np.uint8, np.zeros(256, np.int32), {}, "table 'table' is int32, expected uint8 or int8 or uint16 or int16"),
        (np.uint8, np.zeros(256, np.float64), {}, "expected uint8 or int8 or uint16 or int16 or float"),
        (np.uint8, np.zeros(256, np.uint8), {"format_version": 2}, "format_version is 2, this library reads 1"),
    ],
)
def test_refuses(x_type: type, table: np.ndarray, attributes: dict[str, int], message: str) -> None:
    with pytest.raises(Exception, match=message) as error:
        session(node_model(x_type, table, **attributes))
    assert "LutPostOp node 'lookup'" in str(error.value)


def test_refuses_a_table_that_is_computed() -> None:
    model = node_model(np.uint8, np.zeros(256, np.uint8))
    model.graph.initializer.pop()
    model.graph.input.append(helper.make_tensor_value_info("table", TensorProto.UINT8, [256]))
    with pytest.raises(Exception, match=r"input 1 \(table\) 'table' is computed at run time"):
        session(model)


@pytest.mark.parametrize("x_type", [np.int32, np.float32, np.int64, np.bool_])
def test_refuses_other_types_of_x(x_type: type) -> None:
    model = node_model(x_type, np.zeros(256, np.uint8))
    del model.functions[:]
    with pytest.raises(Exception, match="lookup"):
        session(model)


def test_refuses_missing_inputs_and_attributes() -> None:
    for change in ("table", "version"):
        model = node_model(np.uint8, np.zeros(256, np.uint8))
        del model.functions[:]
        if change == "table":
            model.graph.node[0].input.pop()
        else:
            model.graph.node[0].attribute.pop()
        with pytest.raises(Exception, match="lookup"):
            session(model)


def test_damaged_nodes_fail_or_answer() -> None:
    """A table with any length, element type and shape, declared correctly or not, gives an error or an output."""
    rng = np.random.default_rng(6)
    types = [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 16]
    for _ in range(300):
        x_type = X_TYPES[rng.integers(4)]
        table = random_table(rng, 256 ** np.dtype(x_type).itemsize, ENTRY_TYPES[rng.integers(5)])
        model = node_model(x_type, table)
        del model.functions[:]
        tensor = model.graph.initializer[0]
        for _ in range(rng.integers(1, 3)):
            match rng.integers(4):
                case 0:
                    tensor.raw_data = tensor.raw_data[: rng.integers(len(tensor.raw_data) + 1)]
                case 1:
                    tensor.dims[0] = rng.integers(0, 70000)
                case 2:
                    tensor.data_type = types[rng.integers(len(types))]
                case 3:
                    model.graph.input[0].type.tensor_type.elem_type = types[rng.integers(len(types))]
        try:
            run = session(model)
        except Exception as error:  # ONNX Runtime's exceptions have no common base class
            assert str(error)
            continue
        declared = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
        x = random_codes(rng, (40, 3), declared.type)
        assert run.run(None, {"x": x})[0].shape == x.shape
