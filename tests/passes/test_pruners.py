"""Pruning on arrays: masks, SparseGPT against brute force, repair against least squares, joint quantization."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan.graph_passes.weights.pruners.allocation import allocate, levels
from ortolan.graph_passes.weights.pruners.least_squares import repair
from ortolan.graph_passes.weights.pruners.masks import Pattern, keep_by_output, keep_largest
from ortolan.graph_passes.weights.pruners.sparsegpt import sparsegpt, sparsegpt_rounded
from ortolan.graph_passes.weights.quantizers import error_feedback
from ortolan.graph_passes.weights.quantizers.gptq import gptq, prepare
from ortolan.graph_passes.weights.quantizers.grid import Quantization, dequantize
from ortolan.graph_passes.weights.quantizers.hessian import damped

from ..sampling import examples
from .correlated import correlated
from .small_models import random_weight
from .zero_blocks import block_zeros

UNSTRUCTURED, BLOCKS = Pattern(), Pattern(4)
HALF = Pattern(1, 2, 4)


def loss(hessian: np.ndarray, weight: np.ndarray, values: np.ndarray) -> float:
    difference = weight.astype(np.float64) - values
    return float(np.vdot(difference, hessian @ difference))


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("unstructured", UNSTRUCTURED),
        ("4x1", BLOCKS),
        ("2:4", HALF),
        ("1:16", Pattern(1, 1, 16)),
        *((text, None) for text in ("4:4", "4:2", "0:4", "2:129", "2:", "a", "", "2:4 ", "1x4")),
    ],
)
def test_names_of_patterns(text, pattern):
    assert Pattern.read(text) == pattern


@given(
    st.integers(1, 40), st.integers(1, 23), st.floats(0, 0.99), st.floats(0, 1), st.sampled_from([UNSTRUCTURED, BLOCKS])
)
def test_as_many_go_as_asked_for_and_zeros_count(k, n, sparsity, dense, pattern):
    rng = np.random.default_rng(0)
    weight = random_weight(k, n) * (rng.random((k, n)) < dense)
    alive = weight != 0
    kept = keep_by_output(np.abs(weight), alive, pattern, sparsity)
    before = np.count_nonzero(~alive) if pattern.outputs == 1 else block_zeros(weight)
    wanted = max(round(sparsity * pattern.units(k, n)), before)
    zeros = np.count_nonzero(~kept) if pattern.outputs == 1 else block_zeros(kept * 1.0)
    assert zeros == wanted
    assert not (kept & ~alive).any()
    if before == 0 and pattern.outputs == 1:  # each output loses the same number of weights, up to rounding
        counts = (~kept).sum(axis=0)
        assert counts.max() - counts.min() <= 1
    if before == 0:
        for column, stays in zip(np.abs(weight).T, kept.T, strict=True):
            if pattern.outputs == 1 and stays.any() and not stays.all():
                assert column[stays].min() >= column[~stays].max()


@pytest.mark.parametrize(("kept", "of"), [(2, 4), (1, 4), (4, 8), (1, 2), (3, 5)])
@pytest.mark.parametrize("k", [40, 43])
def test_n_of_m_inputs_stay(kept, of, k):
    weight = np.abs(random_weight(k, 7))
    mask = keep_by_output(weight, weight > 0, Pattern(1, kept, of), 0.0)
    for start in range(0, k, of):
        part = mask[start : start + of]
        gone = (of - kept) * len(part) // of
        assert ((~part).sum(axis=0) == gone).all()
        scores = weight[start : start + of]
        assert (np.where(part, scores, np.inf).min(axis=0) >= np.where(part, 0, scores).max(axis=0)).all()
    assert np.count_nonzero(~mask) == Pattern(1, kept, of).zeros(k, 7, 0.0)


def test_of_equal_scores_as_many_go():
    scores = np.ones((10, 12), np.float32)
    for pattern, units in ((UNSTRUCTURED, 120), (BLOCKS, 30)):
        kept = keep_largest(scores, scores > 0, pattern, 7)
        assert np.count_nonzero(~kept) == 7 * (120 // units)


# ---- SparseGPT -------------------------------------------------------------------------------------------------------


def brute_force(
    weight: np.ndarray, hessian: np.ndarray, pattern: Pattern, sparsity: float, span: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prune with Optimal Brain Surgeon, one weight after the other in the order of inputs.

    Each time, the Hessian of the remaining inputs is inverted again. A weight costs w^2 / [H^-1]_ii. In each range of
    `span` inputs, the cheapest units are pruned. Returns the weights, and the mask of pruned weights.
    """
    k, n = weight.shape
    values = weight.astype(np.float64)
    gone = np.zeros((k, n), bool)
    done = 0
    for start in range(0, k, span):
        stop = min(start + span, k)
        costs = np.empty((stop - start, n))
        for i in range(start, stop):
            costs[i - start] = values[i] ** 2 / np.linalg.inv(hessian[i:, i:])[0, 0]
        if pattern.of:
            for column in range(n):
                for first in range(0, stop - start, pattern.of):
                    group = costs[first : first + pattern.of, column]
                    count = (pattern.of - pattern.kept) * len(group) // pattern.of
                    gone[start + first + np.argsort(group)[:count], column] = True
        else:
            firsts = range(0, n, pattern.outputs)
            blocks = [(i, slice(j, j + pattern.outputs)) for i in range(stop - start) for j in firsts]
            until = round(round(sparsity * k * len(firsts)) * stop / k)
            for i, columns in sorted(blocks, key=lambda block: costs[block[0], block[1]].sum())[: until - done]:
                gone[start + i, columns] = True
            done = until
        for i in range(start, stop):
            inverse = np.linalg.inv(hessian[i:, i:])
            for column in np.flatnonzero(gone[i]):
                values[i:, column] -= values[i, column] / inverse[0, 0] * inverse[:, 0]
                values[i, column] = 0
    return values, gone


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("k", "n"), [(16, 12), (13, 10), (1, 4)])
@pytest.mark.parametrize(
    ("pattern", "sparsity", "block"),
    [(UNSTRUCTURED, 0.5, 128), (UNSTRUCTURED, 0.7, 4), (BLOCKS, 0.5, 128), (BLOCKS, 0.75, 8), (HALF, 0.5, 128)],
)
def test_sparsegpt_is_optimal_brain_surgery(monkeypatch, pattern, sparsity, block, k, n, seed):
    monkeypatch.setattr(error_feedback, "BLOCK", block)
    monkeypatch.setattr(Pattern, "span", property(lambda self: self.of or block))
    weight, x = random_weight(k, n, seed=seed), correlated(200, k, 0.9, seed)
    hessian = damped(x.T @ x, 0.01)
    expected, gone = brute_force(weight, hessian, pattern, sparsity, pattern.of or block)
    found = sparsegpt(weight, hessian, pattern, sparsity)
    np.testing.assert_array_equal(found == 0, gone)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(weight).max())


def test_blocks_of_inputs_do_not_change_what_comes_out(monkeypatch):
    """The block size of updates changes only the order of sums. The mask is chosen over the same span of inputs."""
    weight, x = random_weight(100, 24), correlated(500, 100, 0.9)
    hessian = damped(x.T @ x, 0.01)
    whole = sparsegpt(weight, hessian, HALF, 0.5)
    monkeypatch.setattr(error_feedback, "BLOCK", 12)
    blocked = sparsegpt(weight, hessian, HALF, 0.5)
    np.testing.assert_array_equal(whole == 0, blocked == 0)
    np.testing.assert_allclose(whole, blocked, atol=1e-4)


@pytest.mark.parametrize(
    ("pattern", "sparsity", "share"),
    [(UNSTRUCTURED, 0.5, 0.7), (BLOCKS, 0.5, 0.7), (HALF, 0.5, 0.7), (UNSTRUCTURED, 0.8, 0.8)],
)
def test_sparsegpt_loses_less_than_a_mask_alone(pattern, sparsity, share):
    weight, x = random_weight(300, 50), correlated(3000, 300, 0.9)
    fitted, unseen = x[:2000], x[2000:]
    hessian = damped(fitted.T @ fitted, 0.01)
    values = sparsegpt(weight, hessian, pattern, sparsity)
    norms = np.linalg.norm(fitted, axis=0)[:, None]
    wanda = np.where(keep_by_output(np.abs(weight) * norms, weight != 0, pattern, sparsity), weight, 0)
    zeros = np.count_nonzero(values == 0) if pattern.outputs == 1 else block_zeros(values)
    assert zeros == pattern.zeros(300, 50, sparsity)
    after, before = (np.linalg.norm(unseen @ (weight - one)) for one in (values, wanda))
    assert after < share * before


@examples(50)
@given(
    st.integers(1, 300),
    st.integers(1, 9),
    st.floats(0, 0.95),
    st.floats(0, 1),
    st.sampled_from([UNSTRUCTURED, BLOCKS, HALF, Pattern(1, 3, 7)]),
)
def test_counts_are_exact_and_zeros_stay(k, n, sparsity, dense, pattern):
    weight = random_weight(k, n) * (np.random.default_rng(1).random((k, n)) < dense).astype(np.float32)
    values = sparsegpt(weight, damped(np.eye(k), 0.01), pattern, sparsity)
    assert (values[weight == 0] == 0).all()
    if pattern.of:
        for start in range(0, k, pattern.of):
            part = values[start : start + pattern.of]
            assert ((part == 0).sum(axis=0) >= (pattern.of - pattern.kept) * len(part) // pattern.of).all()
    elif pattern.outputs == 1:
        assert np.count_nonzero(values == 0) == max(round(sparsity * k * n), np.count_nonzero(weight == 0))
    else:
        assert block_zeros(values) == max(round(sparsity * pattern.units(k, n)), block_zeros(weight))


# ---- repair ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_repair_is_least_squares_of_each_output(monkeypatch, correlation):
    monkeypatch.setattr("ortolan.graph_passes.weights.pruners.least_squares._TOLERANCE", 1e-6)
    weight, x = random_weight(40, 12), correlated(300, 40, correlation)
    hessian = damped(x.T @ x, 0.01)
    kept = np.random.default_rng(0).random(weight.shape) < 0.5
    kept[:, 3], kept[:, 4] = False, True
    found = repair(weight, weight, kept, hessian)
    root = np.linalg.cholesky(hessian).T
    for j in range(12):
        columns = np.flatnonzero(kept[:, j])
        exact = np.linalg.lstsq(root[:, columns], root @ weight[:, j].astype(np.float64), rcond=None)[0]
        np.testing.assert_allclose(found[columns, j], exact, atol=2e-4)
    assert (found[~kept] == 0).all()
    np.testing.assert_allclose(found[:, 4], weight[:, 4], atol=1e-6)


def test_repair_only_makes_better(monkeypatch):
    weight, x = random_weight(200, 30), correlated(1000, 200, 0.95)
    hessian = damped(x.T @ x, 0.01)
    for values in (sparsegpt(weight, hessian, UNSTRUCTURED, 0.5), weight):
        kept = sparsegpt(weight, hessian, UNSTRUCTURED, 0.5) != 0
        losses = [loss(hessian, weight, np.where(kept, values, 0))]
        for steps in (1, 2, 4, 8, 64):
            monkeypatch.setattr("ortolan.graph_passes.weights.pruners.least_squares._STEPS", steps)
            losses.append(loss(hessian, weight, repair(weight, values, kept, hessian)))
        assert all(after <= before * (1 + 1e-5) for before, after in itertools.pairwise(losses))
        assert losses[-1] < 0.9 * losses[0]


# ---- sparsities of layers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_allocation_is_the_best_of_all(seed):
    """The allocation is the best of all combinations if error curves are convex and layers have equal size."""
    rng = np.random.default_rng(seed)
    shares = np.array([0.3, 0.4, 0.5, 0.6, 0.7])
    curves = [np.cumsum(np.sort(rng.random(5))) for _ in range(4)]
    found = allocate(curves, [100] * 4, shares, 0.5)
    assert sum(found) == pytest.approx(2.0)
    cost = sum(np.interp(share, shares, curve) for share, curve in zip(found, curves, strict=True))
    best = min(
        sum(curve[index] for index, curve in zip(combination, curves, strict=True))
        for combination in itertools.product(range(5), repeat=4)
        if sum(shares[index] for index in combination) >= 2.0 - 1e-9
    )
    assert cost == pytest.approx(best)


def test_the_allocation_of_layers_of_any_size_meets_the_target():
    rng = np.random.default_rng(0)
    for target in (0.05, 0.5, 0.9):
        shares = levels(target)
        sizes = [int(size) for size in rng.integers(10, 10**6, 9)]
        curves = [rng.random(len(shares)) for _ in sizes]  # not even rising
        found = allocate(curves, sizes, shares, target)
        assert np.average(found, weights=sizes) == pytest.approx(target)
        assert min(found) >= shares[0] - 1e-12 and max(found) <= shares[-1] + 1e-12


# ---- pruning and quantization in one step ----------------------------------------------------------------------------


@pytest.mark.parametrize("correlation", [0.5, 0.9])
@pytest.mark.parametrize(
    ("quantization", "share"),
    [(Quantization(4, 32), 0.97), (Quantization(4, 128), 0.97), (Quantization(4, 64, symmetric=False), 0.97)],
)
def test_joint_error_is_below_that_of_one_after_the_other(quantization, share, correlation):
    weight, x = random_weight(256, 60), correlated(4096, 256, correlation)
    fitted, unseen = np.split(x, 2)
    hessian = damped(fitted.T @ fitted, 0.01)
    pruned = sparsegpt(weight, hessian, UNSTRUCTURED, 0.5)
    in_turn = dequantize(gptq(pruned, prepare(hessian), quantization), quantization.group_size)
    joint = dequantize(sparsegpt_rounded(weight, hessian, UNSTRUCTURED, 0.5, quantization), quantization.group_size)
    for rows in (fitted, unseen):
        assert np.linalg.norm(rows @ (weight - joint)) < share * np.linalg.norm(rows @ (weight - in_turn))


@pytest.mark.parametrize(
    "quantization", [Quantization(4, 32), Quantization(8, None), Quantization(4, 64, symmetric=False)]
)
@pytest.mark.parametrize("pattern", [UNSTRUCTURED, BLOCKS, HALF])
def test_joint_weights_have_the_pattern(quantization, pattern):
    weight, x = random_weight(150, 41), correlated(1000, 150, 0.5)
    weight[3], weight[:, 5] = 0, 0
    rounded = sparsegpt_rounded(weight, damped(x.T @ x, 0.01), pattern, 0.5, quantization)
    values = dequantize(rounded, quantization.group_size)
    assert (values[weight == 0] == 0).all()
    if pattern.of:
        groups = np.pad(values, ((0, 2), (0, 0))).reshape(-1, 4, 41)
        assert ((groups != 0).sum(axis=1) <= 2).all()
    else:
        zeros = np.count_nonzero(values == 0) if pattern.outputs == 1 else block_zeros(values)
        assert zeros >= round(0.5 * pattern.units(150, 41))
