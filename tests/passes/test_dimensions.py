"""Dimensions of a graph: equal names mean equal sizes, and graphs that are not well-formed."""

from __future__ import annotations

from typing import Any

import numpy as np
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
