"""Codebooks for keys: near the optimum in one dimension, as good as k-means in more, and deterministic."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from ortolan.graph_passes.weights.quantizers.codebooks import CENTROIDS, learn_codebook


def distance(keys: np.ndarray, codebook: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Return the weighted sum of squared distances of each key part to its nearest centroid."""
    parts = keys.reshape(len(keys), codebook.shape[0], -1)
    squares = ((parts[:, :, None] - codebook[None]) ** 2).sum(axis=-1).min(axis=-1).sum(axis=1)
    return float(squares @ (np.ones(len(keys)) if weights is None else weights))


def best_of_all_cuts(numbers: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(numbers)
    numbers, weights = numbers[order], weights[order]
    best = np.inf
    for cuts in combinations(range(1, len(numbers)), CENTROIDS - 1):
        total = 0.0
        for part, w in zip(np.split(numbers, cuts), np.split(weights, cuts), strict=True):
            total += float(w @ (part - w @ part / w.sum()) ** 2)
        best = min(best, total)
    return best


def with_far_ones(keys: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and weights with the outlying samples that learn_codebook adds for d_sub = 1."""
    mean = weights @ keys / weights.sum()
    return np.concatenate([keys, 1.5 * keys - 0.5 * mean]), np.concatenate([weights, 0.1 * weights])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_one_dimension_is_optimal(seed: int, weighted: bool) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((10, 2)) ** 3
    weights = rng.random(10) + 0.1 if weighted else np.ones(10)
    codebook = learn_codebook(keys, 1, weights)
    keys, weights = with_far_ones(keys, weights)
    assert codebook.shape == (2, CENTROIDS, 1) and codebook.dtype == np.float32
    for column in range(2):
        found = distance(keys[:, column : column + 1], codebook[column : column + 1], weights)
        assert found == pytest.approx(best_of_all_cuts(keys[:, column], weights), rel=1e-5)


def test_a_normal_distribution_gives_lloyd_and_max() -> None:
    """The error lies between the optima for 16 levels (0.009497; Max, 1960) and 14 levels (0.0122).

    Outer levels are further out than optimal, to leave room for larger keys.
    """
    keys = np.random.default_rng(0).standard_normal((100_000, 2))
    codebook = learn_codebook(keys, 1)
    assert 0.009497 < distance(keys, codebook) / keys.size < 0.0122
    assert (np.diff(codebook[:, :, 0], axis=1) > 0).all()
    np.testing.assert_allclose(codebook[0, :, 0], -codebook[0, ::-1, 0], atol=0.1)
    # The outermost level of the optimal quantizer is 2.733.
    assert (codebook[:, [0, -1], 0] * [-1, 1] > 3).all()


@pytest.mark.parametrize("d_sub", [2, 4])
def test_clusters_are_found(d_sub: int) -> None:
    rng = np.random.default_rng(d_sub)
    centers = rng.standard_normal((3, CENTROIDS, d_sub)) * 10
    labels = rng.integers(0, CENTROIDS, (2000, 3))
    keys = centers[np.arange(3), labels] + rng.standard_normal((2000, 3, d_sub)) * 0.01
    keys = keys.reshape(2000, 3 * d_sub)
    codebook = learn_codebook(keys, d_sub)
    assert codebook.shape == (3, CENTROIDS, d_sub)
    # k-means++ may merge two clusters, but the codebook still explains most of the variance.
    assert distance(keys, codebook) < 0.05 * ((keys - keys.mean(axis=0)) ** 2).sum()


@pytest.mark.parametrize("d_sub", [1, 2, 4])
def test_moved_centroids_are_worse(d_sub: int) -> None:
    """Random changes of the centroids increase the error, so it is near a minimum."""
    rng = np.random.default_rng(7)
    keys = rng.standard_normal((3000, 8)) @ rng.standard_normal((8, 8))
    codebook = learn_codebook(keys, d_sub)
    here = distance(keys, codebook)
    for _ in range(5):
        assert distance(keys, codebook * (1 + 0.05 * rng.standard_normal(codebook.shape))) > here


@pytest.mark.parametrize("d_sub", [1, 2, 4])
def test_the_same_keys_give_the_same_codebook(d_sub: int) -> None:
    keys = np.random.default_rng(3).standard_normal((500, 16)).astype(np.float32)
    np.testing.assert_array_equal(learn_codebook(keys, d_sub), learn_codebook(keys.copy(), d_sub))


@pytest.mark.parametrize("d_sub", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 8, 15, 17])
def test_few_keys_are_kept_exactly(count: int, d_sub: int) -> None:
    keys = np.random.default_rng(count).standard_normal((count, 16)).astype(np.float32)
    keys = np.concatenate([keys, keys])
    codebook = learn_codebook(keys, d_sub)
    assert np.isfinite(codebook).all()
    assert distance(keys, codebook) == pytest.approx(
        0, abs=1e-9 if count <= CENTROIDS // (2 if d_sub == 1 else 1) else 2.0
    )


def test_weights_draw_centroids_towards_them() -> None:
    keys = np.random.default_rng(0).standard_normal((4000, 4))
    heavy = np.abs(keys[:, 0]) < 0.2
    weights = np.where(heavy, 100.0, 1.0)
    plain, weighted = learn_codebook(keys, 1), learn_codebook(keys, 1, weights)
    assert distance(keys[heavy, :1], weighted[:1]) < 0.2 * distance(keys[heavy, :1], plain[:1])
