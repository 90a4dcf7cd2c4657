"""Test which method MaskedMatMul's plan chooses; all methods are exact."""

from __future__ import annotations

import numpy as np
import pytest

from ortolan import _testing

from .masked import BLOCK, assert_product_close, random_matrix


@pytest.mark.parametrize(
    ("m", "k", "n", "a_zeros", "b_zeros", "ways"),
    [
        (300, 500, 700, ("random", 0.97), ("blocks", 0.9), {"two_sided", "blocks", "compact"}),
        (100, 2300, 700, ("random", 0.2), ("blocks", 0.8), {"blocks"}),
        (600, 400, 500, ("columns", 0.9), ("random", 0.0), {"compact"}),
        (600, 400, 500, ("columns", 1.0), ("random", 0.0), {"compact"}),
        (600, 400, 500, ("random", 0.8), ("random", 0.8), {"values"}),
        (600, 400, 500, ("random", 0.1), ("random", 0.1), {"dense"}),
        (200, 400, 300, ("random", 0.1), ("random", 0.1), {"dense", "panels"}),
        (16, 400, 300, ("random", 0.9), ("random", 0.0), {"dense"}),
    ],
)
def test_ways(
    m: int,
    k: int,
    n: int,
    a_zeros: tuple[str, float],
    b_zeros: tuple[str, float],
    ways: set[str],
) -> None:
    rng = np.random.default_rng(m + k + n)
    a, b = random_matrix(rng, m, k, *a_zeros), random_matrix(rng, k, n, *b_zeros)
    y, way = _testing.masked_matmul_plan(a, b)
    assert way in ways
    assert_product_close(y, a, b)


@pytest.mark.parametrize("m", [1, 16])
def test_few_rows_by_a_weight_that_is_known_to_be_finite(m: int) -> None:
    rng = np.random.default_rng(m)
    a, b = random_matrix(rng, m, 100, "random", 0.5), rng.standard_normal((100, 9000), dtype=np.float32)
    y, way = _testing.masked_matmul_plan(a, b, finite=True)
    assert way == "rows"
    assert_product_close(y, a, b)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_what_is_not_finite_is_multiplied_densely(special: float) -> None:
    rng = np.random.default_rng(2)
    a, b = random_matrix(rng, 600, 130, "random", 0.9), random_matrix(rng, 130, 700, "blocks", 0.9)
    for matrix in (a, b):
        matrix[7, 5] = special
        y, way = _testing.masked_matmul_plan(a, b)
        assert way == "dense"
        assert_product_close(y, a, b)
        matrix[7, 5] = 0


def test_inputs_of_a_are_not_skipped_where_only_b_was_looked_at() -> None:
    """Inputs of A are not skipped if the sampled rows of B make skipping blocks of B look cheapest.

    The sample is every eighth row of B, and these rows have more nonzero blocks than the rest. For all of B, skipping
    inputs of A in addition would be faster.
    """
    k, n = 160, 200
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((32, k), dtype=np.float32), rng.standard_normal((k, n), dtype=np.float32)
    for row in range(k):
        b[row, BLOCK * (6 if row % 8 == 0 else 2) :] = 0
    y, way = _testing.masked_matmul_plan(a, b)
    assert way == "blocks"
    assert_product_close(y, a, b)
