"""Test each kernel of MaskedMatMul against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _testing

from ..sampling import examples
from .masked import PATTERNS, assert_product_close, random_matrix

KERNELS = [row["name"] for row in _testing.masked_matmul_kernels() if row["runs_here"]]
WAYS = ["blocks", "two_sided", "values"]
SPARSITIES = [0.0, 0.3, 0.8, 0.97, 1.0]


@pytest.mark.parametrize("kernel", KERNELS)
@examples(40)
@given(
    sizes=st.tuples(*[st.integers(1, 200)] * 3),
    patterns=st.tuples(st.sampled_from(PATTERNS), st.sampled_from(PATTERNS)),
    sparsity=st.tuples(*[st.sampled_from(SPARSITIES)] * 2),
    way=st.sampled_from(WAYS),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_at_every_size_and_pattern(
    kernel: str,
    sizes: tuple[int, int, int],
    patterns: tuple[str, str],
    sparsity: tuple[float, float],
    way: str,
    seed: int,
) -> None:
    m, k, n = sizes
    rng = np.random.default_rng(seed)
    a, b = random_matrix(rng, m, k, patterns[0], sparsity[0]), random_matrix(rng, k, n, patterns[1], sparsity[1])
    y = _testing.masked_matmul(a, b, way, kernel)
    assert y is not None
    assert_product_close(y, a, b)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_of_many_inputs_take_several_passes(kernel: str, way: str) -> None:
    rng = np.random.default_rng(1)
    for k in (3071, 3073, 6500):
        a, b = random_matrix(rng, 30, k, "random", 0.7), random_matrix(rng, k, 40, "blocks", 0.7)
        y = _testing.masked_matmul(a, b, way, kernel)
        assert y is not None
        assert_product_close(y, a, b)


@pytest.mark.parametrize("kernel", KERNELS)
def test_numbers_of_many_rows_and_columns(kernel: str) -> None:
    """Sizes with more rows than a list of nonzeros holds, several panels and a narrow last block."""
    rng = np.random.default_rng(5)
    for m, k, n in ((1030, 70, 20), (513, 130, 391), (4100, 33, 17)):
        a, b = random_matrix(rng, m, k, "random", 0.8), rng.standard_normal((k, n), dtype=np.float32)
        a[rng.random(m) < 0.1] = 0
        a[7] = 1
        y = _testing.masked_matmul(a, b, "values", kernel)
        assert y is not None
        assert_product_close(y, a, b)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_blocks_find_what_is_not_finite(kernel: str, special: float) -> None:
    """Inf and NaN are found anywhere, also in the last columns and opposite zeros of the other matrix."""
    rng = np.random.default_rng(2)
    for i, j in ((0, 0), (36, 30), (5, 17), (20, 15)):
        a, b = random_matrix(rng, 37, 31, "random", 0.9), random_matrix(rng, 37, 31, "blocks", 0.9).T.copy()
        a[i, j] = special
        assert _testing.masked_matmul(a, b, "blocks", kernel) is None
        a[i, j] = 0
        b[j, i] = special
        assert _testing.masked_matmul(a, b, "two_sided", kernel) is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_and_denormal_numbers_are_finite(kernel: str) -> None:
    a, b = np.full((9, 20), 1e-40, np.float32), np.full((20, 20), np.finfo(np.float32).max, np.float32)
    y = _testing.masked_matmul(a, b, "blocks", kernel)
    assert y is not None
    np.testing.assert_allclose(y, np.full((9, 20), 20 * 1e-40 * 3.4028235e38), rtol=1e-4)


def weight(rng: np.random.Generator, kind: str, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return B in the storage of this kind, and its values as float32."""
    if kind == "int8":
        q = rng.integers(-128, 128, (k, n), dtype=np.int8)
        return q, q.astype(np.float32)
    b = rng.standard_normal((k, n), dtype=np.float32)
    if kind == "float":
        return b, b
    rounded = b.astype(ml_dtypes.bfloat16)
    return rounded.view(np.uint16), rounded.astype(np.float32)


@pytest.mark.parametrize("kind", ["float", "bf16", "int8"])
@pytest.mark.parametrize("kernel", KERNELS)
@examples(25)
@given(
    m=st.integers(1, 20),
    k=st.integers(1, 200),
    n=st.integers(1, 200),
    sparsity=st.sampled_from(SPARSITIES),
    group=st.sampled_from([0, 1, 32, 200]),
    panels=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_at_every_size(
    kernel: str, kind: str, m: int, k: int, n: int, sparsity: float, group: int, panels: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a = random_matrix(rng, m, k, "columns", sparsity)
    a[rng.random((m, k)) < 0.2] = 0
    b, meaning = weight(rng, kind, k, n)
    scales = None
    if group > 0:
        scales = rng.random((-(-k // group), n), dtype=np.float32)
        meaning = meaning * scales[np.arange(k) // group]
    y = _testing.masked_rows(a, b, scales, max(group, 1), None, kernel, panels)
    assert_product_close(y, a, meaning, products=2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_wide_rows_are_taken_in_strips(kernel: str) -> None:
    rng = np.random.default_rng(3)
    for m in (1, 3, 4, 7, 16):
        a = random_matrix(rng, m, 30, "random", 0.5)
        b = rng.standard_normal((30, 40_003), dtype=np.float32)
        assert_product_close(_testing.masked_rows(a, b, kernel=kernel), a, b)


@pytest.mark.parametrize("kind", ["float", "bf16", "int8"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_panels_of_many_rows(kernel: str, kind: str) -> None:
    """More rows than are summed at a time, several passes over k, and last panels of every width."""
    rng = np.random.default_rng(6)
    for m, k, n in [(520, 70, 20), (37, 300, 391)] + [(7, 65, 16 * blocks) for blocks in range(1, 10)]:
        a = random_matrix(rng, m, k, "columns", 0.3)
        b, meaning = weight(rng, kind, k, n)
        assert_product_close(_testing.masked_rows(a, b, kernel=kernel, panels=True), a, meaning)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_are_never_skipped(kernel: str) -> None:
    rng = np.random.default_rng(4)
    a, b = random_matrix(rng, 3, 50, "random", 0.9), rng.standard_normal((50, 40), dtype=np.float32)
    b[20, 5], b[49, 39] = np.nan, np.inf
    always = (~np.isfinite(b).all(1)).astype(np.uint8)
    assert_product_close(_testing.masked_rows(a, b, always=always, kernel=kernel), a, b)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_do_not_read_what_they_skip(kernel: str) -> None:
    """A skipped row is not read, so a NaN in it does not reach the output."""
    a, b = np.zeros((2, 30), np.float32), np.full((30, 20), np.nan, np.float32)
    a[0, 7], b[7] = 2, 3
    y = _testing.masked_rows(a, b, kernel=kernel)
    np.testing.assert_array_equal(y, np.outer([6, 0], np.ones(20)).astype(np.float32))


def test_refuses() -> None:
    a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    with pytest.raises(ValueError, match="no kernel is called 'None2'"):
        _testing.masked_matmul(a, b, kernel="None2")
    with pytest.raises(ValueError, match="a and b do not fit"):
        _testing.masked_matmul(a, a)
    with pytest.raises(ValueError, match="way is 'rows', expected blocks"):
        _testing.masked_matmul(a, b, "rows")
    with pytest.raises(ValueError, match="a and b do not fit"):
        _testing.masked_rows(a, a)
    with pytest.raises(ValueError, match="scales must be"):
        _testing.masked_rows(a, b, np.ones((2, 4), np.float32), 3)
