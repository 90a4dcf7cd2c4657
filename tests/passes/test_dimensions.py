"""Dimensions of a graph: equal names mean equal sizes, and graphs that are not well-formed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortolan._native import Sum
from ortolan.graph_passes.find.dimensions import Dimensions


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a + b", ["a", "b"]),
        ("a + 1", ["a", 1]),
        ("a + \u00b2", ["a", "\u00b2"]),
        ("a + \u0663", ["a", "\u0663"]),
        (f"a + {'1' * 5000}", ["a", "1" * 5000]),  # too many digits for an integer
    ],
)
def test_names_that_are_sums(text: str, parts: list[str | int]) -> None:
    parts_of_x = [ir.val(f"x{place}", ir.DataType.FLOAT, [part]) for place, part in enumerate(parts)]
    y = ir.val("y", ir.DataType.FLOAT, [text])
    node = ir.node("Concat", parts_of_x, {"axis": 0})
    graph = ir.Graph([*parts_of_x, y], node.outputs, nodes=[node], opset_imports={"": 17})
    dims = Dimensions(graph)
    assert dims.shape(node.outputs[0]) == dims.shape(y)
    assert isinstance((dims.shape(y) or ())[0], Sum)


@pytest.mark.parametrize(("name", "size"), [("16", 16), *((name, name) for name in ("0", "016", "-16", "9" * 19))])
def test_names_that_are_numbers(name: str, size: int | str) -> None:
    x = ir.val("x", ir.DataType.FLOAT, [name])
    assert Dimensions(ir.Graph([x], [x], nodes=[], opset_imports={"": 17})).shape(x) == (size,)


@pytest.mark.parametrize(
    ("op", "more", "attributes"),
    [
        ("Split", [], {"axis": 0}),
        ("Gather", [0], {"axis": 0}),
        ("ReduceSum", [[0]], {}),
        ("Squeeze", [[0]], {}),
    ],
)
def test_an_axis_of_a_scalar_says_nothing(op: str, more: list[Any], attributes: dict[str, int]) -> None:
    x = ir.val("x", ir.DataType.FLOAT, [])
    constants = [ir.val(f"c{place}", const_value=ir.tensor(np.array(one))) for place, one in enumerate(more)]
    node = ir.node(op, [x, *constants], attributes)
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=constants, opset_imports={"": 17})
    assert Dimensions(graph).shape(node.outputs[0]) is None


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "shape"),
    [
        ("Squeeze", [["n", 1]], {"axes": [1]}, ("n",)),
        ("Unsqueeze", [["n"]], {"axes": [0, -1]}, (1, "n", 1)),
        ("Slice", [["n", 9]], {"starts": [1], "ends": [-1], "axes": [1]}, ("n", 7)),
        ("Split", [["n", 9]], {"axis": 1, "split": [4, 5]}, ("n", 4)),
        ("TopK", [["n", 9]], {"k": 2}, ("n", 2)),
        ("Flatten", [["n", 3, 4]], {}, ("n", 12)),
        ("Conv", [["n", 3, "s"], [8, 3, 3]], {"pads": [1, 1]}, ("n", 8, "s")),
        ("Conv", [["n", 3, 9], [8, 3, 3]], {"strides": [2]}, ("n", 8, 4)),
        ("MaxPool", [["n", 3, 9]], {"kernel_shape": [2], "auto_pad": "SAME_UPPER", "strides": [2]}, ("n", 3, 5)),
        ("Einsum", [["n", 4], [4, "m"]], {"equation": "ij,jk->ik"}, ("n", "m")),
        ("MatMul", [[4], ["n", 4, 5]], {}, ("n", 5)),
        ("Squeeze", [["n", 1]], {"axes": [7]}, None),
        ("Transpose", [["n", 1]], {"perm": [0, 0]}, None),
        ("Concat", [["n"], ["n"]], {"axis": 1.0}, None),
        ("Einsum", [["n", 4], [4, "m"]], {"equation": "ij->i..."}, None),
    ],
)
def test_shapes(op: str, inputs: list[list[int | str]], attributes: dict[str, Any], shape: Any) -> None:
    values = [ir.val(f"x{place}", ir.DataType.FLOAT, one) for place, one in enumerate(inputs)]
    outputs = [ir.val(f"y{place}") for place in range(2 if op in ("Split", "TopK") else 1)]
    node = ir.Node("", op, values, ir.convenience.convert_attributes(attributes), outputs=outputs)
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 11})
    assert Dimensions(graph).shape(node.outputs[0]) == shape


@pytest.mark.parametrize(("filled", "count"), [(2, 14), (1, None)])
def test_elements_that_are_repeated(filled: int, count: int | None) -> None:
    """torch's older exporter writes repeat_interleave(2) so, with a Range up to the largest number of repeats.

    If the tensor that is compared has other elements than that number, the count is not known.
    """
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        graph (float[7, n] x) => (int64[2, c] places) {{
            first = Constant <value_ints = [0]> ()
            last = Constant <value_ints = [1]> ()
            all = Shape (x)
            seven = Slice (all, first, last)
            repeats = ConstantOfShape <value = int64[1] {{2}}> (seven)
            compared = ConstantOfShape <value = int64[1] {{{filled}}}> (seven)
            most = ReduceMax <keepdims = 0> (repeats)
            zero = Constant <value_int = 0> ()
            one = Constant <value_int = 1> ()
            steps = Range (zero, most, one)
            column = Unsqueeze (compared, last)
            repeated = Less (steps, column)
            places = NonZero (repeated)
        }}""")
    graph = ir.from_proto(model).graph
    dims = Dimensions(graph)
    shape = dims.shape(graph.outputs[0])
    assert shape is not None and shape[0] == 2
    assert shape[1] == count or (count is None and not isinstance(shape[1], int))
