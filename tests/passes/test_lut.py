"""Tables of element-wise chains, tables of an epilogue's activation, and where chains end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import NodeProto, TensorProto

from ortolan.graph_passes.find.lut import (
    Chain,
    NoTableError,
    code_type,
    find_chain,
    find_cone,
    graph_order,
    make_quantized_table,
    make_table,
)

from .lut_chains import CHAINS, NUMBERS, all_codes, answers, between, code_model, node
from .small_models import make_model

OPSETS = {"": 21}


def graph_of(model: onnx.ModelProto) -> ir.Graph:
    return ir.from_proto(model).graph


def float_model(nodes: Sequence[NodeProto], outputs: Sequence[str] = ("b",)) -> onnx.ModelProto:
    """Return a model with float input a [2, 5]."""
    used = {name for one in nodes for name in one.input}
    return make_model(
        nodes,
        {"a": (TensorProto.FLOAT, [2, 5])},
        {name: (TensorProto.FLOAT, [2, "columns"]) for name in outputs},
        {name: array for name, array in NUMBERS.items() if name in used},
        21,
        ir_version=10,
    )


def chain_of(nodes: Sequence[NodeProto], outputs: Sequence[str] = ("b",), without: Sequence[str] = ()) -> Chain | None:
    graph = graph_of(float_model(nodes, outputs))
    return find_chain(find_cone(graph.inputs[0], graph, graph_order(graph), without))


def test_table_of_a_formula() -> None:
    """The table equals Python arithmetic. Entry 255 of an int8 table is the value for -1."""
    for x_type in (np.uint8, np.int8):
        graph = graph_of(code_model(CHAINS["gelu_by_erf"], x_type))
        chain = find_cone(graph.inputs[0], graph, graph_order(graph)).chain_to(graph.outputs[0])
        dtype = ir.DataType.from_numpy(np.dtype(x_type))
        table = make_table(chain, dtype, OPSETS)
        assert table.dtype == x_type and table.shape == (256,)
        limits = np.iinfo(x_type)
        middle = (limits.max + limits.min + 1) // 2
        for code in range(limits.min, limits.max + 1):
            x = (code - middle - 3) * 0.04
            gelu = x * (1 + math.erf(x / math.sqrt(2))) / 2
            exact = min(max(gelu / 0.025 + middle - 20, limits.min), limits.max)
            assert abs(float(table[code % 256]) - exact) <= 0.501


@pytest.mark.parametrize("x_type", [np.uint8, np.int8, np.uint16, np.int16])
@pytest.mark.parametrize("y_type", [np.uint8, np.int8, np.uint16, np.int16])
@pytest.mark.parametrize("name", ["gelu_by_erf", "silu", "relu"])
def test_quantized_table_is_that_of_the_whole_model(name: str, x_type: type, y_type: type) -> None:
    chain = chain_of(CHAINS[name][1:-1])
    assert chain is not None and chain.operators == [one.op_type for one in CHAINS[name][1:-1]]
    scale = 8 / 2 ** (8 * np.dtype(x_type).itemsize)
    numbers = {
        "scale": np.array(scale, np.float32),
        "y_scale": np.array(scale / 2, np.float32),
        "zero": np.array(np.iinfo(x_type).max // 2, x_type),
        "y_other": np.array(np.iinfo(y_type).max // 4, y_type),
    }
    table = make_quantized_table(chain, scale, numbers["zero"][()], scale / 2, numbers["y_other"][()], {"": 13})
    assert table.dtype == y_type and table.shape == (256 ** np.dtype(x_type).itemsize,)
    nodes = [*CHAINS[name][:-1], node("QuantizeLinear", "b y_scale y_other", "y")]
    model = code_model(nodes, x_type, {"y": y_type}, {**NUMBERS, **numbers})
    x = all_codes(x_type)
    np.testing.assert_array_equal(table[x.view(f"u{x.itemsize}")], answers(model, {"x": x})[0])


def test_longest_chain() -> None:
    """MatMul ends the chain, because it is not element-wise."""
    nodes = [*CHAINS["silu"][1:-1], node("Tanh", "b", "c"), node("MatMul", "c weight", "y")]
    model = make_model(
        nodes,
        {"a": (TensorProto.FLOAT, [2, 5])},
        {"y": (TensorProto.FLOAT, [2, "columns"])},
        {"weight": np.ones((5, 3), np.float32)},
        21,
        ir_version=10,
    )
    graph = graph_of(model)
    cone = find_cone(graph.inputs[0], graph, graph_order(graph))
    chain = find_chain(cone)
    assert chain is not None and chain.operators == ["Sigmoid", "Mul", "Tanh"]
    assert list(cone.refused.values()) == ["MatMul is not element-wise"]


def test_chain_ends_before_a_value_that_others_need() -> None:
    nodes = [node("Neg", "a", "n"), node("Tanh", "n", "t"), node("Exp", "t", "b"), node("Abs", "t", "c")]
    chain = chain_of(nodes, ["b", "c"])
    assert chain is not None and chain.operators == ["Neg", "Tanh"]


def test_no_chain_where_the_value_itself_is_needed() -> None:
    assert chain_of([node("Tanh", "a", "t"), node("Exp", "a", "b"), node("Exp", "t", "c")], ["b", "c"]) is None
    graph = graph_of(float_model([node("Tanh", "a", "b")], ["b", "a"]))
    assert find_chain(find_cone(graph.inputs[0], graph, graph_order(graph))) is None


def test_stops_where_it_is_told_to() -> None:
    graph = graph_of(code_model(between(node("Tanh", "a", "b"))))
    a = graph[0].outputs[0]
    chain = find_chain(find_cone(a, graph, graph_order(graph), without=["QuantizeLinear"]))
    assert chain is not None and chain.operators == ["Tanh"]
    chain = find_chain(find_cone(a, graph, graph_order(graph)))
    assert chain is not None and chain.operators == ["Tanh", "QuantizeLinear"]


def test_what_onnx_runtime_cannot_run_has_no_table() -> None:
    graph = graph_of(code_model(CHAINS["tanh"]))
    chain = find_cone(graph.inputs[0], graph, graph_order(graph)).chain_to(graph.outputs[0])
    with pytest.raises(NoTableError, match="ONNX Runtime cannot run it"):
        make_table(chain, ir.DataType.INT16, OPSETS)  # the zero point has another type


def test_making_a_table_leaves_the_model_alone() -> None:
    model = code_model(CHAINS["gelu_by_erf"])
    before = model.SerializeToString()
    graph = graph_of(model)
    chain = find_cone(graph.inputs[0], graph, graph_order(graph)).chain_to(graph.outputs[0])
    make_table(chain, ir.DataType.UINT8, OPSETS)
    assert model.SerializeToString() == before
    assert all(value.name == name for name, value in graph.initializers.items())


def test_type_of_a_value_without_one() -> None:
    """The type comes from the zero point of the producer or consumer if the model does not declare it."""
    nodes = [node("QuantizeLinear", "a scale zero", "q"), node("DequantizeLinear", "q scale", "b")]
    for dtype in (np.uint8, np.int8):
        model = float_model([node("Neg", "a", "b")])
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        for name, array in (("scale", NUMBERS["scale"]), ("zero", np.array(1, dtype))):
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        graph = graph_of(model)
        assert code_type(graph[0].outputs[0]) == ir.DataType.from_numpy(np.dtype(dtype))
        assert code_type(graph[1].outputs[0]) is ir.DataType.FLOAT
