"""Chains of Reshape and Transpose: the split into heads that TensorView finds matches numpy."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from ortolan._testing import tensor_view

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
    """If TensorView finds the same sources for a random chain and the usual split, numpy gives the same values."""
    array, steps = np.arange(prod(shape)).reshape(shape), list[tuple[str, list[int]]]()
    split = [*shape[:2], 2, shape[2] // 2]
    for step in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            target = factorizations(data.draw, array.size) if step else split
            array = array.reshape(target)
            written = list(target)
            if data.draw(st.booleans()):
                written[data.draw(st.integers(0, len(target) - 1))] = -1
            steps.append(("Reshape", written))
        else:
            perm = data.draw(st.permutations(range(array.ndim)))
            array = array.transpose(perm)
            steps.append(("Transpose", list(perm)))
    found = tensor_view(list(shape), steps)
    assume(found is not None)
    assert found is not None and tuple(found[0]) == array.shape
    for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 1, 2, 3)):
        usual = tensor_view(list(shape), [("Reshape", split), ("Transpose", list(perm))])
        assert usual is not None
        expected = np.arange(prod(shape)).reshape(split).transpose(perm)
        if array.shape == expected.shape:
            assert (usual[1] == found[1]) == np.array_equal(array, expected)
