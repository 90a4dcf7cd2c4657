"""Codebooks of product quantization: 16 centroids for each part of a key (ops/formats/key_code_cache.h).

Keys are cut into parts of d_sub numbers, and each part is clustered by itself: k-means, for the smallest (weighted) sum
of squared distances to the nearest centroid. Parts of one number are clustered nearly as well as can be: sorted,
k-means in one dimension is a matter of where to cut, solved by dynamic programming over at most _GRID runs of equal
size (exactly, where there are no more numbers); then Lloyd's steps on all numbers move the cuts inside of the runs.
Longer parts begin at k-means++ and take Lloyd's steps. The same samples give the same codebooks.

Text that is unlike the samples has keys beyond theirs, and what attends to a key that is cut off is wrong altogether
(measured in ops/nomad_attention/README.md). So single numbers are clustered together with a copy that lies _FARTHER
from their mean and weighs _SHARE as much. More samples would not do: such tokens are rare.
"""

from __future__ import annotations

import numpy as np

CENTROIDS = 16
_FARTHER, _SHARE = 1.5, 0.1
_GRID = 128
_STEPS = 40  # of Lloyd's, at most
_CHUNK = 1 << 22  # numbers of distances at once


def learn_codebook(keys: np.ndarray, d_sub: int, weights: np.ndarray | None = None) -> np.ndarray:
    """The centroids [head_dim / d_sub, 16, d_sub], float32, for keys [n, head_dim].

    weights: how much each key counts, [n]; all the same when None. n >= 1; d_sub divides head_dim.
    Few different parts give centroids that occur more than once.
    """
    count, head_dim = keys.shape
    weight = np.ones(count) if weights is None else np.asarray(weights, np.float64)
    if d_sub == 1:
        numbers = keys.astype(np.float64)
        mean = np.average(numbers, axis=0, weights=weight)
        numbers = np.concatenate([numbers, mean + _FARTHER * (numbers - mean)])
        return _one_dimension(numbers, np.concatenate([weight, _SHARE * weight]))[:, :, None].astype(np.float32)
    parts = keys.reshape(count, head_dim // d_sub, d_sub).transpose(1, 0, 2).astype(np.float32)
    per_chunk = max(1, _CHUNK // (count * CENTROIDS))
    chunks = [parts[start : start + per_chunk] for start in range(0, len(parts), per_chunk)]
    return np.concatenate([_lloyd(np.ascontiguousarray(chunk), weight.astype(np.float32)) for chunk in chunks])


def _one_dimension(numbers: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """[n, columns] -> centroids [columns, 16], in ascending order."""
    order = np.argsort(numbers, axis=0, kind="stable")
    ordered = np.take_along_axis(numbers, order, axis=0)
    weights = weight[order]
    zero = np.zeros((1, numbers.shape[1]))
    # Sums over all in front of a place: of weights, numbers and squares.
    sums = [np.concatenate([zero, np.cumsum(weights * ordered**power, axis=0)]) for power in range(3)]
    ends = np.unique(np.linspace(0, len(numbers), min(_GRID, len(numbers)) + 1).astype(int))
    columns = [[one[:, column] for one in sums] for column in range(numbers.shape[1])]
    cuts = [_cuts(ends, *of_column) for of_column in columns]
    return np.stack(
        [_refine(ordered[:, i], of_column[0], of_column[1], cuts[i]) for i, of_column in enumerate(columns)]
    )


def _cuts(ends: np.ndarray, weights: np.ndarray, sums: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Where to cut the sorted numbers, at some of the ends of runs, for the smallest error: [17], from 0 to n."""
    w, s, q = weights[ends], sums[ends], squares[ends]
    inside = w[None, :] - w[:, None]
    # What a cluster from one end to another costs; the other way round it is impossible.
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = (q[None, :] - q[:, None]) - (s[None, :] - s[:, None]) ** 2 / inside
    cost = np.where(inside > 0, np.maximum(cost, 0), 0)
    cost[np.tril_indices(len(ends), -1)] = np.inf
    best = cost[0].copy()  # of all in front of an end, in so many clusters
    froms = []
    for _ in range(CENTROIDS - 1):
        totals = best[:, None] + cost
        froms.append(totals.argmin(axis=0))
        best = totals[froms[-1], np.arange(len(ends))]
    cuts = [len(ends) - 1]
    for came_from in reversed(froms):
        cuts.append(came_from[cuts[-1]])
    found: np.ndarray = ends[np.array([0, *cuts[::-1]])]
    return found


def _refine(ordered: np.ndarray, weights: np.ndarray, sums: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Lloyd's steps on sorted numbers, from these cuts on."""
    centroids = np.zeros(CENTROIDS)
    for _ in range(_STEPS):
        inside, total = np.diff(weights[cuts]), np.diff(sums[cuts])
        # A cluster of nothing stays where it is, or where its cut is.
        place = ordered[np.minimum(cuts[:-1], len(ordered) - 1)]
        centroids = np.sort(np.where(inside > 0, total / np.where(inside > 0, inside, 1), place))
        middles = (centroids[1:] + centroids[:-1]) / 2
        new = np.concatenate([[0], np.searchsorted(ordered, middles, side="right"), [len(ordered)]])
        if np.array_equal(new, cuts):
            break
        cuts = new
    return centroids


def _lloyd(parts: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """[subs, n, d] -> centroids [subs, 16, d]."""
    centroids = _first_centroids(parts, weight)
    subs, count, width = parts.shape
    offsets = CENTROIDS * np.arange(subs)[:, None]
    spread = np.broadcast_to(weight, (subs, count)).reshape(-1)
    last = np.inf
    for _ in range(_STEPS):
        nearest, distance = _nearest(parts, centroids)
        total = float((distance * weight).sum(dtype=np.float64))
        if not total < last * (1 - 1e-3):
            break
        last = total
        flat = (nearest + offsets).reshape(-1)
        inside = np.bincount(flat, spread, CENTROIDS * subs)
        sums = np.stack(
            [np.bincount(flat, spread * parts[:, :, i].reshape(-1), CENTROIDS * subs) for i in range(width)], axis=-1
        )
        kept = inside == 0
        moved = sums / np.where(kept, 1, inside)[:, None]
        centroids = np.where(kept[:, None], centroids.reshape(-1, width), moved).reshape(centroids.shape)
        centroids = centroids.astype(np.float32)
    return centroids


def _first_centroids(parts: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """k-means++: each one drawn by the squared distance from those before it."""
    rng = np.random.default_rng(0)
    subs, _, _ = parts.shape
    chosen = np.empty((subs, CENTROIDS, parts.shape[2]), np.float32)
    share = np.broadcast_to(weight, parts.shape[:2]).astype(np.float64)
    distance = np.full(parts.shape[:2], np.inf)
    for number in range(CENTROIDS):
        mass = share if number == 0 else share * distance
        total = np.cumsum(mass, axis=1)
        drawn = rng.random((subs, 1)) * total[:, -1:]
        index = np.minimum((total <= drawn).sum(axis=1), parts.shape[1] - 1)
        chosen[:, number] = parts[np.arange(subs), index]
        to_it = ((parts - chosen[:, number, None]) ** 2).sum(axis=2, dtype=np.float64)
        distance = np.minimum(distance, to_it)
    return chosen


def _nearest(parts: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each part the number of its centroid [subs, n], and the squared distance to it."""
    products = parts @ centroids.transpose(0, 2, 1)
    distances = (centroids**2).sum(axis=2)[:, None] - 2 * products
    nearest = distances.argmin(axis=2)
    own = np.take_along_axis(distances, nearest[:, :, None], axis=2)[:, :, 0]
    return nearest, np.maximum(own + (parts**2).sum(axis=2), 0)
