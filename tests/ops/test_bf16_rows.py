"""A row of a bf16 linear layer has the same bits for any number of rows and any storage of the weight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..sampling import examples
from ..simd.targets import assert_same_bits
from .single_node import Packed, sparse_weight
from .two_four import BF16, two_of_four

# Calls of few rows, row counts for each kernel's blocks, and a few rows more than chunks of 256 and of 252.
M = (1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 31, 64, 253, 257, 258, 259)
each_isa = pytest.mark.parametrize("isa", _native.cpu_info()["detected_features"])


def stored(w: np.ndarray) -> dict[str, Packed]:
    """Return w packed in each storage that can hold it."""
    packed = {"dense": _native.pack_bitmap(w, dense=True), "bitmap": _native.pack_bitmap(w)}
    quads = np.pad(w, ((0, -len(w) % 4), (0, 0))).reshape(-1, 4, w.shape[1])
    if (np.count_nonzero(quads, axis=1) <= 2).all():
        packed["2:4"] = _native.pack_two_four(w)
    return packed


def check(isa: str, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, sizes: tuple[int, ...]) -> None:
    """Check that the first and last m rows, for each m in sizes, have the same bits alone and in the full product."""
    k, n = w.shape
    expected = None
    for storage, packed in stored(w).items():
        among_all = _testing.linear_layer(x, *packed, k, n, bias=bias, isa=isa)
        expected = among_all if expected is None else expected
        assert_same_bits(among_all, expected)
        for m in sizes:
            for rows in (slice(0, m), slice(len(x) - m, len(x))):
                found = _testing.linear_layer(np.ascontiguousarray(x[rows]), *packed, k, n, bias=bias, isa=isa)
                assert found.shape == expected[rows].shape
                try:
                    assert_same_bits(found, expected[rows])
                except AssertionError as error:
                    raise AssertionError(f"{storage}, {m} rows: {error}") from None


def wild(rng: np.random.Generator, shape: tuple[int, int], magnitude: float) -> np.ndarray:
    """Return values of very different magnitude, which reveal the order of additions; some are denormal or -0."""
    a = rng.standard_normal(shape) * np.exp2(rng.uniform(-12, 12, shape)) * magnitude
    a = np.where(rng.random(shape) < 0.02, 2.0**-130, a)
    return np.where(rng.random(shape) < 0.02, -0.0, a).astype(np.float32)


@each_isa
@pytest.mark.parametrize("zeros", ["none", "half", "2:4"])
def test_any_number_of_rows(isa: str, zeros: str) -> None:
    rng = np.random.default_rng(len(zeros))
    k, n = 1100, 150  # 10 panels: two groups of four and one of two
    w = BF16.random(rng, k, n) if zeros == "2:4" else sparse_weight(rng, k, n, 0.0 if zeros == "none" else 0.5)
    x = rng.standard_normal((260, k), dtype=np.float32)
    check(isa, x, w, rng.standard_normal(n, dtype=np.float32), M)


@each_isa
@examples(60)
@given(
    m=st.integers(5, 40),
    k=st.integers(1, 200),
    n=st.integers(1, 150),
    sparsity=st.sampled_from([0.0, 0.5, 0.9]),
    two_four=st.booleans(),
    magnitudes=st.sampled_from([(1.0, 1.0), (1e-19, 1e-19), (1e-22, 1e-22), (1e19, 1e18)]),
    bias_kind=st.sampled_from(["none", "numbers", "-0"]),
    special=st.sampled_from([None, np.inf, -np.inf, np.nan]),
    in_weights=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_numbers(
    isa: str,
    m: int,
    k: int,
    n: int,
    sparsity: float,
    two_four: bool,
    magnitudes: tuple[float, float],
    bias_kind: str,
    special: float | None,
    in_weights: bool,
    seed: int,
) -> None:
    """Sums that cancel, underflow or overflow, and values with Inf or NaN."""
    rng = np.random.default_rng(seed)
    x, w = wild(rng, (m, k), magnitudes[0]), wild(rng, (k, n), magnitudes[1])
    if special is not None:
        of = w if in_weights else x
        of[rng.random(of.shape) < 0.01] = special
    w = two_of_four(rng, w) if two_four else np.where(rng.random(w.shape) < sparsity, np.float32(0), w)
    bias = {"none": None, "numbers": wild(rng, (1, n), 1.0)[0], "-0": np.full(n, -0.0, np.float32)}[bias_kind]
    check(isa, x, w, bias, (1, 2, 3, 4, m))
