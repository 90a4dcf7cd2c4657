"""Chains of Reshape and Transpose: the split into heads that View finds matches numpy."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir
from hypothesis import assume, given
from hypothesis import strategies as st

from ortolan.graph_passes.find.dimensions import Dimensions
from ortolan.graph_passes.find.views import View

from ..sampling import examples


def factorizations(draw: st.DrawFn, size: int) -> list[int]:
    """Draw a shape with `size` elements and at most 8 dimensions."""
    shape = []
    while size > 1:
        factors = [one for one in range(1, size + 1) if size % one == 0] if len(shape) < 6 else [size]
        factor = draw(st.sampled_from(factors))
        shape.append(factor)
        size //= factor
    return [*shape, *([1] if draw(st.booleans()) else [])] or [1]


@examples(300)
@given(st.data(), st.sampled_from([(2, 3, 8), (1, 4, 6), (3, 1, 4), (2, 2, 4), (1, 1, 8)]))
def test_same_sources_are_the_same_numbers(data: st.DataObject, shape: tuple[int, int, int]) -> None:
    """If View finds the same sources for a random chain and the usual split, numpy gives the same values."""
    x = ir.val("x", ir.DataType.FLOAT, list(shape))
    value, array, nodes = x, np.arange(prod(shape)).reshape(shape), []
    initializers = []
    for step in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            target = factorizations(data.draw, array.size) if step else [*shape[:2], 2, shape[2] // 2]
            array = array.reshape(target)
            written = list(target)
            if data.draw(st.booleans()):
                written[data.draw(st.integers(0, len(target) - 1))] = -1
            constant = ir.val(f"shape{step}", const_value=ir.tensor(np.array(written, np.int64)))
            initializers.append(constant)
            nodes.append(ir.node("Reshape", [value, constant]))
        else:
            perm = data.draw(st.permutations(range(array.ndim)))
            array = array.transpose(perm)
            nodes.append(ir.node("Transpose", [value], {"perm": list(perm)}))
        value = nodes[-1].outputs[0]
    graph = ir.Graph([x], [value], nodes=nodes, initializers=initializers, opset_imports={"": 17})
    dims = Dimensions(graph)
    assert dims.shape(value) == array.shape
    view = View(shape)
    assume(all(view.apply(node, dims) for node in nodes))
    assert tuple(view.dim(axis) for axis in range(len(view.axes))) == array.shape
    for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 1, 2, 3)):
        split = View(shape).split_heads(2, shape[2] // 2)
        assert split is not None
        expected = np.arange(prod(shape)).reshape(*shape[:2], 2, shape[2] // 2).transpose(perm)
        if array.shape == expected.shape:
            same = split.permuted(*perm).sources() == view.sources()
            assert same == np.array_equal(array, expected)
