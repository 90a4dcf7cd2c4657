"""Test the 4x1 block-sparse format: packing, and rejection of malformed tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ortolan import _native

from ..ops.block_sparse import random_blocks


def test_layout_of_a_small_matrix() -> None:
    q = np.zeros((9, 6), np.int8)
    q[1, 0], q[2, 3], q[3, :4], q[5, 2], q[8, 1] = 1, 2, [3, 4, 5, 6], 7, 8
    q[4, 5] = 9
    values, indices, starts = _native.pack_block_sparse(q)
    np.testing.assert_array_equal(starts, [0, 2, 3])
    np.testing.assert_array_equal(indices, [[1, 2, 3, 5], [8, 8, 8, 8], [4, 4, 4, 4]])
    np.testing.assert_array_equal(values[0], q[[1, 2, 3, 5], :4].T)
    np.testing.assert_array_equal(values[1], [[0, 0, 0, 0], [8, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(values[2], [[0, 0, 0, 0], [9, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 1.0])
def test_pack_and_unpack(sparsity: float) -> None:
    rng = np.random.default_rng(int(10 * sparsity))
    for k, n in ((1, 1), (4, 4), (5, 7), (64, 16), (200, 50), (65536, 2)):
        q = random_blocks(rng, k, n, sparsity)
        values, indices, starts = _native.pack_block_sparse(q)
        blocks = np.pad(q, ((0, 0), (0, -n % 4))).reshape(k, -1, 4).any(axis=2)
        np.testing.assert_array_equal(np.diff(starts), -(-blocks.sum(axis=0) // 4))
        assert values.shape == (starts[-1], 4, 4) and indices.shape == (starts[-1], 4)
        np.testing.assert_array_equal(_native.unpack_block_sparse(values, indices, starts, k, n), q)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (65537, 1)])
def test_sizes_that_the_format_has_not(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected 1 to 65536 x 1 to"):
        _native.pack_block_sparse(np.zeros(shape, np.int8))


Tensors = dict[str, np.ndarray]
BAD: dict[str, tuple[Callable[[Tensors], None], str]] = {}


def bad(message: str) -> Callable[[Callable[[Tensors], None]], None]:
    def add(change: Callable[[Tensors], None]) -> None:
        BAD[change.__name__] = (change, message)

    return add


@bad("indices hold 40, expected less than k, 40")
def index_outside(tensors: Tensors) -> None:
    last = tensors["starts"][1] - 1
    tensors["indices"][last, 3] = 40


@bad("indices of the group at output 4 do not ascend")
def indices_swapped(tensors: Tensors) -> None:
    quad = tensors["starts"][1]
    tensors["indices"][quad, :2] = tensors["indices"][quad, 1::-1]


@bad("do not ascend: 7 after 7")
def an_index_twice(tensors: Tensors) -> None:
    tensors["indices"][0] = 7


@bad("starts begin with 1, expected 0")
def begins_late(tensors: Tensors) -> None:
    tensors["starts"][0] = 1


@bad("starts end with 3, expected the number of quads")
def ends_early(tensors: Tensors) -> None:
    tensors["starts"][-1] = 3


@bad("starts decrease or exceed the .* quads after element 1")
def starts_fall(tensors: Tensors) -> None:
    tensors["starts"][2] = tensors["starts"][1] - 1


@bad("starts decrease or exceed the .* quads after element 0")
def starts_far_away(tensors: Tensors) -> None:
    tensors["starts"][1] = 2**62


@bad("starts have 4 elements, expected 6")
def too_few_starts(tensors: Tensors) -> None:
    tensors["starts"] = tensors["starts"][:4].copy()


@bad("indices have 5 elements, expected a multiple of 4")
def odd_indices(tensors: Tensors) -> None:
    tensors["indices"] = tensors["indices"].ravel()[:5].copy()


@bad("values have 16 elements, expected")
def too_few_values(tensors: Tensors) -> None:
    tensors["values"] = tensors["values"][:1].copy()


@bad("values hold nonzero weights for outputs from 18 on")
def weights_of_no_output(tensors: Tensors) -> None:
    tensors["values"][-1, 3, 0] = 1


@pytest.mark.parametrize("name", BAD)
def test_malformed_tensors_are_refused(name: str) -> None:
    change, message = BAD[name]
    packed = _native.pack_block_sparse(random_blocks(np.random.default_rng(3), 40, 18, 0.3))
    tensors = dict(zip(("values", "indices", "starts"), packed, strict=True))
    change(tensors)
    with pytest.raises(ValueError, match=message):
        _native.unpack_block_sparse(**tensors, k=40, n=18)


def test_fuzzed_tensors_never_crash() -> None:
    rng = np.random.default_rng(4)
    packed = _native.pack_block_sparse(random_blocks(rng, 60, 30, 0.5))
    refused = 0
    for _ in range(2000):
        values, indices, starts = (tensor.copy() for tensor in packed)
        tensor = (values, indices, starts)[rng.integers(3)].view(np.uint8).reshape(-1)
        tensor[rng.integers(tensor.size)] = rng.integers(256)
        try:
            _native.unpack_block_sparse(values, indices, starts, 60, 30)
        except ValueError:
            refused += 1
    assert refused > 500
