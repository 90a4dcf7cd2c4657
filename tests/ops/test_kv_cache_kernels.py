"""Kernels for KV caches and softmax must give the bytes and bits of the portable kernel on every target."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _testing

from ..sampling import examples

CACHE_KERNELS = [row["name"] for row in _testing.kv_cache_kernels() if row["runs_here"]]
SOFTMAX_KERNELS = [row["name"] for row in _testing.softmax_kernels() if row["runs_here"]]
cache_kernels = pytest.mark.parametrize("kernel", CACHE_KERNELS)
softmax_kernels = pytest.mark.parametrize("kernel", SOFTMAX_KERNELS)
SIZES = st.sampled_from([(16, 1), (16, 4), (48, 1), (48, 2), (64, 4), (80, 4), (112, 4), (128, 1), (144, 2)])


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32)


@pytest.mark.parametrize("rows", [_testing.kv_cache_kernels(), _testing.softmax_kernels()])
def test_tables_are_best_first_and_end_with_the_portable_kernel(rows: list[dict[str, object]]) -> None:
    order = _testing.feature_sets()
    places = [order.index(str(row["isa"])) for row in rows]
    assert places == sorted(places, reverse=True)
    assert rows[-1]["name"] == "scalar"


@cache_kernels
@examples(80)
@given(size=SIZES, tokens=st.integers(1, 300), cut=st.tuples(st.floats(0, 1), st.floats(0, 1)), seed=st.integers(0, 99))
def test_keys_are_the_centroids_of_their_codes(
    kernel: str, size: tuple[int, int], tokens: int, cut: tuple[float, float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    head_dim, d_sub = size
    codebook = floats(rng, head_dim // d_sub, 16, d_sub)
    cache = rng.integers(0, 256, (tokens, head_dim // d_sub // 2), dtype=np.uint8)
    begin, end = sorted(int(part * tokens) for part in cut)
    codes = _testing.key_codes(cache, tokens, codebook)
    keys = codebook[np.arange(head_dim // d_sub), codes].reshape(tokens, head_dim)
    found = _testing.decode_keys(cache, tokens, codebook, begin, end, kernel=kernel)
    np.testing.assert_array_equal(bits(found), bits(keys[begin:end]))


@cache_kernels
@examples(80)
@given(
    head_dim=st.sampled_from([16, 48, 64, 80, 128]),
    splits=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    special=st.sampled_from([[], [np.nan], [np.inf, -np.inf], [1e-45, -3e-42], [3e38, -3e38], [0.0, -0.0]]),
    scale=st.sampled_from([1.0, 1e-38, 1e-42, 1e30]),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 99),
)
def test_values_have_the_bytes_of_the_portable_kernel(
    kernel: str,
    head_dim: int,
    splits: list[int],
    special: list[float],
    scale: float,
    cut: tuple[float, float],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    tokens = sum(splits)
    values = floats(rng, tokens, head_dim) * np.float32(scale)
    for number in special:
        values[rng.random(values.shape) < 0.01] = number
    caches = [np.full((tokens + 3, head_dim + 2), 0x5A, np.uint8) for _ in range(2)]
    for cache, name in zip(caches, [kernel, "scalar"], strict=True):
        done = 0
        for count in splits:
            _testing.append_values(cache, done, values[done : done + count], kernel=name)
            done += count
    np.testing.assert_array_equal(*caches)
    begin, end = sorted(int(part * tokens) for part in cut)
    found = _testing.decode_values(caches[0], tokens, begin, end, kernel=kernel)
    np.testing.assert_array_equal(found, _testing.decode_values(caches[0], tokens, kernel="scalar")[begin:end])


@cache_kernels
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [2, 6, 16, 30, 32, 34, 64, 80, 128])
def test_rotation_rounds_products_and_sums_one_by_one(kernel: str, interleaved: bool, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    x, cos, sin = floats(rng, head_dim), floats(rng, head_dim // 2), floats(rng, head_dim // 2)
    pairs = x.reshape(-1, 2).T if interleaved else x.reshape(2, -1)
    first, second = pairs[0] * cos - pairs[1] * sin, pairs[1] * cos + pairs[0] * sin
    expected = np.stack([first, second], 1).ravel() if interleaved else np.concatenate([first, second])
    np.testing.assert_array_equal(bits(_testing.rotate(x, cos, sin, interleaved, kernel=kernel)), bits(expected))


@softmax_kernels
@pytest.mark.parametrize("head_dim", [1, 7, 16, 24, 128])
def test_partial_results_add_up_with_the_bits_of_the_portable_kernel(kernel: str, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)

    def partial(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        draw = np.random.default_rng(seed)
        return floats(draw, 2, 3) * 9, np.abs(floats(draw, 2, 3)) + 1, floats(draw, 2, 3, head_dim)

    for seed in rng.integers(0, 2**31, 10):
        merged = _testing.merge_decode(partial(seed), partial(seed + 1), kernel=kernel)
        expected = _testing.merge_decode(partial(seed), partial(seed + 1), kernel="scalar")
        for found, number in zip(merged, expected, strict=True):
            np.testing.assert_array_equal(bits(found), bits(number))
        np.testing.assert_array_equal(
            bits(_testing.finish_decode(merged, kernel=kernel)), bits(_testing.finish_decode(expected, kernel="scalar"))
        )


@softmax_kernels
@examples(300)
@given(
    pieces=st.lists(
        st.tuples(st.sampled_from([0.0, -0.0, -1e9, -1e30, -np.inf, -999999936.0, 1.0, np.nan]), st.integers(0, 300)),
        max_size=4,
    )
)
def test_the_visible_range_of_a_mask(kernel: str, pieces: list[tuple[float, int]]) -> None:
    mask = np.concatenate([np.zeros(0, np.float32), *(np.full(count, number, np.float32) for number, count in pieces)])
    begin, end, plain = _testing.visible_range(mask, kernel=kernel)
    seen = np.flatnonzero(~(mask <= -1e9))
    if len(seen) == 0:
        assert begin == end
        return
    assert (begin, end) == (seen[0], seen[-1] + 1)
    assert plain == bool((mask[begin:end] == 0).all())
