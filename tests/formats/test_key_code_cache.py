"""Test the cache of key codes: byte order, nearest centroids, appending (ops/formats/key_code_cache.h)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..sampling import examples

SIZES = [(16, 1), (16, 2), (16, 4), (48, 4), (64, 2), (80, 4), (96, 1), (128, 1)]
KERNELS = [row["name"] for row in _testing.kv_cache_kernels() if row["runs_here"]]
all_sizes = pytest.mark.parametrize(("head_dim", "d_sub"), SIZES)


def codebook_of(rng: np.random.Generator, head_dim: int, d_sub: int) -> np.ndarray:
    return rng.standard_normal((head_dim // d_sub, 16, d_sub), dtype=np.float32)


def encode(keys: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """Return codes [tokens, S] as the header defines them: float32 sums in ascending order of d."""
    parts, _, d_sub = codebook.shape
    split = keys.reshape(len(keys), parts, 1, d_sub)
    distances = np.zeros((len(keys), parts, 16), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for d in range(d_sub):
            distances += (split[..., d] - codebook[None, ..., d]) ** 2
        lost = ~(distances < np.inf).any(-1)
        return np.where(lost, 0, np.argmin(np.where(np.isnan(distances), np.inf, distances), -1)).astype(np.uint8)


def pack(codes: np.ndarray) -> np.ndarray:
    """Return the cache's bytes [tokens, S / 2] for these codes, in the layout that the header draws."""
    tokens, parts = codes.shape
    cache = np.zeros((tokens, parts // 2), np.uint8)
    full = tokens // 32 * 32
    for first in range(0, full, 32):
        block = codes[first : first + 32].reshape(2, 16, parts // 4, 4)  # [half, key, quad, j]
        cache[first : first + 32] = (block[0] | block[1] << 4).transpose(1, 0, 2).reshape(32, parts // 2)
    for token in range(full, tokens):
        whole = codes[token, : parts // 8 * 8].reshape(-1, 2, 4)
        rest = codes[token, parts // 8 * 8 :].reshape(-1, 2, 2)
        cache[token] = np.concatenate([(one[:, 0] | one[:, 1] << 4).ravel() for one in (whole, rest)])
    return cache


def appended(keys: np.ndarray, codebook: np.ndarray, splits: list[int], kernel: str | None = None) -> np.ndarray:
    """Return a cache after appending `splits[i]` tokens in call i, each time to a copy of exactly the needed size."""
    row_bytes = codebook.shape[0] // 2
    cache = np.empty((0, row_bytes), np.uint8)
    for count in splits:
        tokens = len(cache)
        cache = np.concatenate([cache, np.full((count, row_bytes), 0xA5, np.uint8)])
        _testing.append_keys(cache, tokens, keys[tokens : tokens + count], codebook, kernel)
    return cache


@all_sizes
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33, 64, 100])
def test_layout_is_the_headers(head_dim: int, d_sub: int, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    codebook = codebook_of(rng, head_dim, d_sub)
    keys = rng.standard_normal((tokens, head_dim), dtype=np.float32)
    cache = appended(keys, codebook, [tokens])
    codes = encode(keys, codebook)
    np.testing.assert_array_equal(_testing.key_codes(cache, tokens, codebook), codes)
    np.testing.assert_array_equal(cache, pack(codes))


@examples(80)
@given(
    size=st.sampled_from(SIZES),
    splits=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_way_to_append_gives_the_same_bytes(size: tuple[int, int], splits: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    codebook = codebook_of(rng, *size)
    tokens = sum(splits)
    keys = rng.standard_normal((tokens, size[0]), dtype=np.float32)
    grown = appended(keys, codebook, splits)
    np.testing.assert_array_equal(grown, appended(keys, codebook, [tokens]))
    np.testing.assert_array_equal(grown, appended(keys, codebook, [1] * tokens))
    # Append in place to a larger buffer, whose unused part must stay unchanged.
    buffer = np.full((tokens + 40, grown.shape[1]), 0x5A, np.uint8)
    done = 0
    for count in splits:
        _native.append_keys(buffer, done, keys[done : done + count], codebook)
        done += count
    np.testing.assert_array_equal(buffer[:tokens], grown)
    assert (buffer[tokens:] == 0x5A).all()


@examples(60)
@given(size=st.sampled_from(SIZES), tokens=st.integers(1, 80), seed=st.integers(0, 2**32 - 1))
def test_decoding_gives_the_nearest_centroids(size: tuple[int, int], tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codebook = codebook_of(rng, *size)
    keys = rng.standard_normal((tokens, size[0]), dtype=np.float32)
    decoded = _native.decode_keys(appended(keys, codebook, [tokens]), tokens, codebook)
    parts, _, d_sub = codebook.shape
    split = keys.reshape(tokens, parts, 1, d_sub).astype(np.float64)
    least = ((split - codebook[None]) ** 2).sum(-1).min(-1)
    found = ((split - decoded.reshape(split.shape)) ** 2).sum((-1, -2))
    np.testing.assert_allclose(found, least, rtol=1e-5, atol=1e-12)
    # Encoding and decoding a key that consists of centroids must not change it.
    np.testing.assert_array_equal(_native.decode_keys(appended(decoded, codebook, [tokens]), tokens, codebook), decoded)


def test_of_equal_distances_the_first() -> None:
    codebook = np.zeros((16, 16, 1), np.float32)
    codebook[:, :, 0] = [5, 1, -1, 1, -1, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]
    keys = np.zeros((2, 16), np.float32)
    keys[1] = -1
    assert (_testing.key_codes(appended(keys, codebook, [2]), 2, codebook) == [[1] * 16, [2] * 16]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("d_sub", [1, 2, 4])
def test_keys_that_float32_cannot_measure_have_code_0(bad: float, d_sub: int) -> None:
    rng = np.random.default_rng(d_sub)
    codebook = codebook_of(rng, 32, d_sub)
    keys = rng.standard_normal((40, 32), dtype=np.float32)
    expected = encode(keys, codebook)
    keys[[3, 39], 17] = bad
    expected[[3, 39], 17 // d_sub] = 0
    np.testing.assert_array_equal(_testing.key_codes(appended(keys, codebook, [40]), 40, codebook), expected)


@pytest.mark.parametrize("kernel", KERNELS)
@examples(120)
@given(
    size=st.sampled_from([*SIZES, (16, 1), (32, 2), (64, 4), (112, 4), (144, 2), (256, 1)]),
    splits=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    special=st.sampled_from(
        [[], [np.nan], [np.inf, -np.inf], [1e-45, -3e-42], [1e-23, 2e-23], [3e38, -1.9e19], [0.0, -0.0], [np.nan, 1e20]]
    ),
    levels=st.sampled_from([None, 1, 2, 3]),
    scale=st.sampled_from([1.0, 1e-22, 1e-38, 1e15]),
    mirrored=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_kernel_gives_the_same_codes(
    kernel: str,
    size: tuple[int, int],
    splits: list[int],
    special: list[float],
    levels: int | None,
    scale: float,
    mirrored: bool,
    seed: int,
) -> None:
    """All kernels give the same codes for ties and extreme values.

    Few `levels` make many distances equal. Squares of tiny scales are 0, those of huge scales are Inf. `mirrored` makes
    pairs of centroids whose distances to a key differ only in rounding.
    """
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((sum(splits), size[0]), dtype=np.float32)
    codebook = codebook_of(rng, *size)
    if levels is not None:
        keys, codebook = (np.clip(np.round(array), -levels, levels) for array in (keys, codebook))
    if mirrored:
        keys = np.repeat(keys[:, :: codebook.shape[2]], codebook.shape[2], 1)
        codebook[:, 1::2] = codebook[:, ::2, ::-1]
    keys, codebook = keys * np.float32(scale), codebook * np.float32(scale)
    for array in (keys, codebook):
        for value in special:
            array[rng.random(array.shape) < 0.05] = value
    cache = appended(keys, codebook, splits, kernel)
    np.testing.assert_array_equal(cache, pack(encode(keys, codebook)))
    np.testing.assert_array_equal(cache, appended(keys, codebook, [len(keys)], "scalar"))


GOOD = {
    "cache": np.zeros((8, 8), np.uint8),
    "tokens": 3,
    "keys": np.zeros((5, 16), np.float32),
    "codebook": np.zeros((16, 16, 1), np.float32),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codebook": np.zeros((16, 15, 1), np.float32)}, "expected .head_dim / d_sub, 16, d_sub"),
        ({"codebook": np.zeros((16, 16), np.float32)}, "codebook must be"),
        ({"codebook": np.zeros((16, 16, 3), np.float32)}, "d_sub is 3, expected 1, 2 or 4"),
        ({"codebook": np.zeros((24, 16, 1), np.float32)}, "head_dim is 24, expected a multiple of 16 from 16 to 1024"),
        ({"codebook": np.zeros((1040, 16, 1), np.float32)}, "head_dim is 1040"),
        ({"cache": np.zeros((8, 4), np.uint8)}, "cache must be uint8"),
        ({"tokens": 9}, "cache must be uint8 .at least 9 tokens"),
        ({"tokens": -1}, "tokens at least 0"),
        ({"tokens": 4}, "count, 16. with a count of at most 4"),
        ({"keys": np.zeros((1, 15), np.float32)}, "count, 16. with a count"),
        ({"kernel": "Best"}, "Best"),
    ],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    given = {name: np.copy(value) if isinstance(value, np.ndarray) else value for name, value in GOOD.items()}
    _testing.append_keys(**given)
    with pytest.raises(ValueError, match=message):
        _testing.append_keys(**given | change)
