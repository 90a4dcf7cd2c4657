"""Test the cache of int8 values: byte order, error, appending (ops/formats/value_cache.h)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native

from ..sampling import examples

HEAD_DIMS = [16, 48, 64, 80, 128]


def appended(values: np.ndarray, splits: list[int]) -> np.ndarray:
    """Return a cache after appending `splits[i]` tokens in call i, each time to a copy of exactly the needed size."""
    cache = np.empty((0, values.shape[1] + 2), np.uint8)
    for count in splits:
        tokens = len(cache)
        cache = np.concatenate([cache, np.full((count, cache.shape[1]), 0xA5, np.uint8)])
        _native.append_values(cache, tokens, values[tokens : tokens + count])
    return cache


def unpack(cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales [tokens] and q [tokens, head_dim] of a cache in the layout that the header defines."""
    tokens, row_bytes = cache.shape
    head_dim = row_bytes - 2
    scales = np.empty((tokens, 2), np.uint8)
    q = np.empty((tokens, head_dim), np.int8)
    full = tokens // 32 * 32
    for first in range(0, full, 32):
        block = cache[first : first + 32].ravel()
        scales[first : first + 32] = block[:64].reshape(32, 2)
        quads = block[64:].view(np.int8).reshape(8, head_dim, 4)
        q[first : first + 32] = quads.transpose(0, 2, 1).reshape(32, head_dim)
    scales[full:] = cache[full:, :2]
    q[full:] = cache[full:, 2:].view(np.int8)
    return scales.reshape(-1).view(ml_dtypes.bfloat16).astype(np.float32), q


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tokens", [1, 15, 31, 32, 33, 64, 100])
def test_layout_and_error_are_the_headers(head_dim: int, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    values = rng.standard_normal((tokens, head_dim), dtype=np.float32) * np.float32(10) ** rng.integers(-30, 30)
    cache = appended(values, [tokens])
    scales, q = unpack(cache)
    most = np.abs(values).max(1)
    assert (scales >= most / 127 * (1 - 2.0**-23)).all() and (scales <= most / 127 * (1 + 2.0**-7)).all()
    assert (np.abs(q.astype(int)).max(1) <= 127).all()
    decoded = _native.decode_values(cache, tokens)
    np.testing.assert_array_equal(decoded, scales[:, None] * q)
    assert (np.abs(decoded.astype(np.float64) - values) <= scales[:, None] / 2 * (1 + 2.0**-15)).all()


@examples(60)
@given(
    head_dim=st.sampled_from(HEAD_DIMS),
    splits=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_way_to_append_gives_the_same_bytes(head_dim: int, splits: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = sum(splits)
    values = rng.standard_normal((tokens, head_dim), dtype=np.float32)
    grown = appended(values, splits)
    np.testing.assert_array_equal(grown, appended(values, [tokens]))
    np.testing.assert_array_equal(grown, appended(values, [1] * tokens))
    buffer = np.full((tokens + 40, grown.shape[1]), 0x5A, np.uint8)
    done = 0
    for count in splits:
        _native.append_values(buffer, done, values[done : done + count])
        done += count
    np.testing.assert_array_equal(buffer[:tokens], grown)
    assert (buffer[tokens:] == 0x5A).all()


@pytest.mark.parametrize("tokens", [3, 40])
def test_special_values(tokens: int) -> None:
    values = np.ones((tokens, 16), np.float32)
    values[0] = 0
    values[1, 5] = np.nan
    values[2, 3] = -np.inf
    if tokens > 3:
        values[3, 2] = 3.4e38
        values[4] = 1e-45
    decoded = _native.decode_values(appended(values, [tokens]), tokens)
    assert (decoded[0] == 0).all() and np.isnan(decoded[1:3]).all()
    if tokens > 3:
        assert abs(decoded[3, 2] / 3.4e38 - 1) < 0.01 and (decoded[3, 3:] == 0).all()
        assert (np.abs(decoded[4]) <= 1e-44).all()
        np.testing.assert_allclose(decoded[5:], 1, rtol=0.005)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache": np.zeros((8, 19), np.uint8)}, "cache must be uint8 .tokens, 2 . head_dim.; head_dim is 17"),
        ({"tokens": 9}, "cache must be uint8 .at least 9 tokens"),
        ({"tokens": 4}, "count, 16. with a count of at most 4"),
        ({"values": np.zeros((1, 15), np.float32)}, "count, 16. with a count"),
    ],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    given = {"cache": np.zeros((8, 18), np.uint8), "tokens": 3, "values": np.zeros((5, 16), np.float32)}
    _native.append_values(**given)
    with pytest.raises(ValueError, match=message):
        _native.append_values(**given | change)
