"""Codebooks of product quantization: 16 centroids for each part of a key (ops/formats/key_code_cache.h).

Keys are split into parts of d_sub elements. Each part is clustered separately by k-means, which minimizes the
(weighted) sum of squared distances to the nearest centroid. Parts of one element are clustered almost optimally:
k-means of sorted scalars is a choice of cuts, solved by dynamic programming over at most _GRID runs of equal size
(exactly for up to _GRID scalars). Lloyd's steps on all scalars then move the cuts within runs. Longer parts start with
k-means++ and take Lloyd's steps. The result is deterministic.

Other text has keys outside the samples' range, and attention to a clipped key is completely wrong (measured in
ops/nomad_attention/README.md). So scalars are clustered together with a copy of themselves, spread _COPY_SPREAD times
as far around the mean, with weight _COPY_WEIGHT. More samples would not help: such tokens are rare.
"""

from __future__ import annotations

import numpy as np

CENTROIDS = 16
_COPY_SPREAD, _COPY_WEIGHT = 1.5, 0.1
_GRID = 128
_STEPS = 40  # limit of the steps of Lloyd's algorithm
_CHUNK = 1 << 22  # number of distances computed at a time


def learn_codebook(keys: np.ndarray, d_sub: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Return the centroids of keys, float [n >= 1, head_dim]: float32 [head_dim / d_sub, 16, d_sub].

    With few distinct parts, centroids repeat. weights: weight of each key, [n]; None: all equal.
    """
    count, head_dim = keys.shape
    weight = np.ones(count) if weights is None else np.asarray(weights, np.float64)
    if d_sub == 1:
        scalars = keys.astype(np.float64)
        mean = np.average(scalars, axis=0, weights=weight)
        scalars = np.concatenate([scalars, mean + _COPY_SPREAD * (scalars - mean)])
        return _one_dimension(scalars, np.concatenate([weight, _COPY_WEIGHT * weight]))[:, :, None].astype(np.float32)
    parts = keys.reshape(count, head_dim // d_sub, d_sub).transpose(1, 0, 2).astype(np.float32)
    per_chunk = max(1, _CHUNK // (count * CENTROIDS))
    chunks = [parts[start : start + per_chunk] for start in range(0, len(parts), per_chunk)]
    return np.concatenate([_lloyd(np.ascontiguousarray(chunk), weight.astype(np.float32)) for chunk in chunks])


def _one_dimension(scalars: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return centroids [columns, 16], ascending, of scalars [n, columns]."""
    order = np.argsort(scalars, axis=0, kind="stable")
    ordered = np.take_along_axis(scalars, order, axis=0)
    weights = weight[order]
    zero = np.zeros((1, scalars.shape[1]))
    # Prefix sums of weights, scalars and squares.
    sums = [np.concatenate([zero, np.cumsum(weights * ordered**power, axis=0)]) for power in range(3)]
    ends = np.unique(np.linspace(0, len(scalars), min(_GRID, len(scalars)) + 1).astype(int))
    columns = [[one[:, column] for one in sums] for column in range(scalars.shape[1])]
    cuts = [_cuts(ends, *of_column) for of_column in columns]
    return np.stack(
        [_refine(ordered[:, i], of_column[0], of_column[1], cuts[i]) for i, of_column in enumerate(columns)]
    )


def _cuts(ends: np.ndarray, weights: np.ndarray, sums: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return the cuts of the sorted scalars with the smallest error, at ends of runs: [17], from 0 to n."""
    w, s, q = weights[ends], sums[ends], squares[ends]
    inside = w[None, :] - w[:, None]
    # Cost of a cluster from one end to another; infinite if the ends are in the wrong order.
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = (q[None, :] - q[:, None]) - (s[None, :] - s[:, None]) ** 2 / inside
    cost = np.where(inside > 0, np.maximum(cost, 0), 0)
    cost[np.tril_indices(len(ends), -1)] = np.inf
    best = cost[0].copy()  # least cost of the scalars before each end, with the current number of clusters
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
    """Run Lloyd's steps on sorted scalars, starting from these cuts."""
    centroids = np.zeros(CENTROIDS)
    for _ in range(_STEPS):
        inside, total = np.diff(weights[cuts]), np.diff(sums[cuts])
        # An empty cluster keeps the position of its cut.
        position = ordered[np.minimum(cuts[:-1], len(ordered) - 1)]
        centroids = np.sort(np.where(inside > 0, total / np.where(inside > 0, inside, 1), position))
        middles = (centroids[1:] + centroids[:-1]) / 2
        new = np.concatenate([[0], np.searchsorted(ordered, middles, side="right"), [len(ordered)]])
        if np.array_equal(new, cuts):
            break
        cuts = new
    return centroids


def _lloyd(parts: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return centroids [subs, 16, d] of parts [subs, n, d]."""
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
    """Choose initial centroids by k-means++: the probability grows with the squared distance to earlier ones."""
    rng = np.random.default_rng(0)
    subs, _, _ = parts.shape
    chosen = np.empty((subs, CENTROIDS, parts.shape[2]), np.float32)
    weights = np.broadcast_to(weight, parts.shape[:2]).astype(np.float64)
    distance = np.full(parts.shape[:2], np.inf)
    for number in range(CENTROIDS):
        mass = weights if number == 0 else weights * distance
        total = np.cumsum(mass, axis=1)
        drawn = rng.random((subs, 1)) * total[:, -1:]
        index = np.minimum((total <= drawn).sum(axis=1), parts.shape[1] - 1)
        chosen[:, number] = parts[np.arange(subs), index]
        to_it = ((parts - chosen[:, number, None]) ** 2).sum(axis=2, dtype=np.float64)
        distance = np.minimum(distance, to_it)
    return chosen


def _nearest(parts: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each part's nearest centroid [subs, n], and the squared distance."""
    products = parts @ centroids.transpose(0, 2, 1)
    distances = (centroids**2).sum(axis=2)[:, None] - 2 * products
    nearest = distances.argmin(axis=2)
    own = np.take_along_axis(distances, nearest[:, :, None], axis=2)[:, :, 0]
    return nearest, np.maximum(own + (parts**2).sum(axis=2), 0)
