"""Dimensions of a graph: equal names mean equal sizes, and graphs that are not well-formed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ortolan.graph_passes.find.dimensions import Dimensions
from ortolan.graph_passes.find.sums import named, total_of


@pytest.mark.parametrize(
    ("text", "parts"),
    [("a + b", ["a", "b"]), ("a + 1", ["a", 1]), ("a + \u00b2", ["a", "\u00b2"]), ("a + \u0663", ["a", "\u0663"])],
)
def test_names_that_are_sums(text: str, parts: list[str | int]) -> None:
    assert named(text) == total_of(parts)


def test_a_name_of_too_many_digits_is_a_name() -> None:
    digits = "1" * 5000
    assert named(f"a + {digits}") == total_of(["a", digits])


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
