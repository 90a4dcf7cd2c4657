"""Quantizers on arrays: grids with zero points, GPTQ, the scales of AWQ, and HQQ."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan.graph_passes.weights.quantizers import gptq as gptq_module
from ortolan.graph_passes.weights.quantizers.awq import search_scales
from ortolan.graph_passes.weights.quantizers.gptq import choose_damping, prepare
from ortolan.graph_passes.weights.quantizers.grid import (
    Quantization,
    QuantizedMatrix,
    bf16,
    dequantize,
    half,
    round_to_nearest,
)
from ortolan.graph_passes.weights.quantizers.hessian import choose_order, damped, inverse_factor
from ortolan.graph_passes.weights.quantizers.hqq import half_quadratic
from ortolan.graph_passes.weights.quantizers.mse import round_mse

from ..sampling import examples
from .correlated import correlated
from .quantized import INT4, INT8, spread, weights
from .small_models import random_weight, relative_error

REDUCED = Quantization(8, None, reduced=True)
ASYMMETRIC = [Quantization(4, size, symmetric=False) for size in (32, 64, 128)]
MINIMUM = [Quantization(4, size, symmetric=False, minimum=True) for size in (32, 64, 128)]
BF16 = Quantization(4, 64, bf16_scales=True)
INT8_GROUPS = Quantization(8, 32)


def output_error(x: np.ndarray, weight: np.ndarray, rounded: QuantizedMatrix, quantization: Quantization) -> float:
    return relative_error(x @ weight, x @ dequantize(rounded, quantization.group_size))


def check_in_range(rounded: QuantizedMatrix, weight: np.ndarray, quantization: Quantization) -> None:
    k, n = weight.shape
    groups = -(-k // (quantization.group_size or k))
    assert rounded.q.shape == (k, n) and rounded.scales.shape == (groups, n) and rounded.scales.dtype == np.float32
    assert np.isfinite(rounded.scales).all()
    np.testing.assert_array_equal(quantization.short(rounded.scales), rounded.scales)
    if quantization.bf16_scales:
        np.testing.assert_array_equal(rounded.scales.astype(ml_dtypes.bfloat16).astype(np.float32), rounded.scales)
    low, high = quantization.levels
    assert low <= rounded.q.astype(int).min() and rounded.q.astype(int).max() <= high
    if quantization.symmetric:
        assert rounded.zero_points is None and rounded.minimums is None and rounded.q.dtype == np.int8
    elif quantization.minimum:
        assert rounded.zero_points is None and rounded.q.dtype == np.uint8
        assert rounded.minimums.shape == (groups, n) and np.isfinite(rounded.minimums).all()
        np.testing.assert_array_equal(half(rounded.minimums), rounded.minimums)
        return
    else:
        assert rounded.zero_points is not None and rounded.zero_points.shape == (groups, n)
        assert rounded.q.dtype == rounded.zero_points.dtype == np.uint8
        assert rounded.q.max() <= 15 and rounded.zero_points.max() <= 15
    assert (dequantize(rounded, quantization.group_size)[weight == 0] == 0).all()


@examples(200)
@given(weights(), st.sampled_from(ASYMMETRIC), st.sampled_from([-1.0, 0.0, 1.0]))
def test_zero_points_keep_every_weight_within_its_bound(weight, quantization, side):
    weight = np.abs(weight) * np.float32(side) if side else weight
    rounded = round_to_nearest(weight, quantization)
    check_in_range(rounded, weight, quantization)
    k = len(weight)
    steps = spread(rounded.scales, quantization, k)
    zeros = spread(rounded.zero_points, quantization, k)
    error = np.abs(weight - steps * (rounded.q - zeros))
    assert (error <= (0.5 * (1 + 2**-16) + 1 / 17) * steps).all()
    # The scale is no larger than the range of the weights requires.
    for group, start in enumerate(range(0, k, quantization.group_size)):
        part = weight[start : start + quantization.group_size].astype(np.float64)
        width = np.maximum(part.max(axis=0), 0) - np.minimum(part.min(axis=0), 0)
        assert ((rounded.scales[group] == 0) == (width == 0)).all()
        assert (rounded.scales[group] <= np.maximum(width / 15 * (1 + 2**-7), 2.0**-126)).all()


@examples(200)
@given(weights(), st.sampled_from([1, -1]))
def test_neighbours_of_a_reduced_range_fit(weight, sign):
    """Adjacent |q| sum to at most 128, and each weight is rounded by at most half a step.

    Steps are those of the full range, or follow from the largest sum.
    """
    weight = sign * weight
    rounded = round_to_nearest(weight, REDUCED)
    padded = np.zeros((len(weight) + len(weight) % 2, weight.shape[1]))
    padded[: len(weight)] = rounded.q
    assert np.abs(padded[0::2] + padded[1::2]).max() <= 128
    with np.errstate(over="ignore"):
        error = np.abs(weight.astype(np.float64) - rounded.scales[0].astype(np.float64) * rounded.q)
    assert (error <= rounded.scales[0].astype(np.float64) / 2 * (1 + 2**-16)).all()
    padded[: len(weight)] = weight
    largest = np.maximum(np.abs(padded).max(axis=0), np.abs(padded[0::2] + padded[1::2]).max(axis=0))
    np.testing.assert_allclose(
        rounded.scales[0], np.where(largest > 0, np.maximum(largest / 127, 2.0**-126), 0), rtol=1e-6
    )


def test_zero_points_help_where_a_group_leans_to_one_side():
    weight = random_weight(256, 64) + np.float32(0.1)
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    errors = [output_error(x, weight, round_to_nearest(weight, q), q) for q in (INT4[0], ASYMMETRIC[0])]
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize(
    "quantization", [INT4[0], ASYMMETRIC[0], MINIMUM[0]], ids=["symmetric", "asymmetric", "minimum"]
)
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_on_correlated_inputs(quantization, act_order):
    weight = random_weight(256, 128)
    x, unseen = np.split(correlated(4096, 256), 2)
    nearest = output_error(unseen, weight, round_to_nearest(weight, quantization), quantization)
    rounded = gptq(weight, x.T @ x, quantization, act_order=act_order)
    check_in_range(rounded, weight, quantization)
    assert output_error(unseen, weight, rounded, quantization) <= 0.3 * nearest


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("correlation", "most"), [(0.9, 0.45), (0.95, 0.33), (0.99, 0.16)])
def test_gptq_gains_by_correlation(correlation, most, seed):
    weight = random_weight(256, 128, seed=seed)
    x, unseen = np.split(correlated(4096, 256, correlation, seed), 2)
    nearest = output_error(unseen, weight, round_to_nearest(weight, INT4[0]), INT4[0])
    assert output_error(unseen, weight, gptq(weight, x.T @ x, INT4[0]), INT4[0]) <= most * nearest


def gptq(
    weight: np.ndarray, hessian: np.ndarray, quantization: Quantization, act_order: bool = True, damping: float = 0.03
) -> QuantizedMatrix:
    return gptq_module.gptq(weight, prepare(damped(hessian, damping), act_order), quantization)


def greedy(
    weight: np.ndarray, hessian: np.ndarray, sweeps: int = 0, quantization: Quantization = INT4[0]
) -> QuantizedMatrix:
    """Run GPTQ in stored order, by default without refinement."""
    return gptq_module.gptq(weight, prepare(damped(hessian, 0.01), act_order=False), quantization, sweeps)


def lower_factor(hessian: np.ndarray) -> np.ndarray:
    return inverse_factor(hessian).T


def upside_down(hessian: np.ndarray) -> np.ndarray:
    return np.triu(np.linalg.inv(inverse_factor(hessian)).T.copy()).astype(np.float32)


@pytest.mark.parametrize("broken", [lower_factor, upside_down])
def test_the_error_would_tell_a_wrong_factor(monkeypatch, broken):
    monkeypatch.setattr(gptq_module, "inverse_factor", broken)
    weight = random_weight(256, 128)
    x = correlated(2048, 256)
    nearest = output_error(x, weight, round_to_nearest(weight, INT4[0]), INT4[0])
    # With the correct factor, the ratio is at most 0.16.
    assert output_error(x, weight, greedy(weight, x.T @ x), INT4[0]) > 0.5 * nearest


@pytest.mark.parametrize("quantization", [INT4[0], ASYMMETRIC[0], MINIMUM[0]])
def test_refinement_lowers_the_error_it_minimizes(quantization):
    weight, x = random_weight(256, 64), correlated(2048, 256, 0.9)
    hessian = damped(x.T @ x, 0.01)
    losses = []
    for sweeps in (0, 1, 2, 4):
        rounded = greedy(weight, x.T @ x, sweeps, quantization)
        check_in_range(rounded, weight, quantization)
        difference = weight - dequantize(rounded, 32).astype(np.float64)
        losses.append((difference * (hessian @ difference)).sum(axis=0))
    for before, after in itertools.pairwise(losses):
        assert (after <= before * (1 + 1e-4)).all()
    assert losses[-1].sum() < 0.98 * losses[0].sum()


def test_the_order_ends_with_what_is_known_best_from_the_rest():
    """The last input has the smallest variance, the one before it the smallest given the last, and so on."""
    x = correlated(500, 40, 0.9) * np.random.default_rng(0).uniform(0.5, 2, 40).astype(np.float32)
    hessian = damped(x.T @ x, 0.01)
    order = choose_order(hessian)
    assert sorted(order) == list(range(40))
    for place in range(39, 0, -1):
        known = order[place + 1 :]
        left = [i for i in range(40) if i not in known]
        rest = hessian[np.ix_(left, left)]
        if len(known):
            across = hessian[np.ix_(left, known)]
            rest = rest - across @ np.linalg.solve(hessian[np.ix_(known, known)], across.T)
        variance = rest.diagonal()
        assert variance[left.index(order[place])] <= variance.min() * (1 + 1e-6)


def test_the_fewer_inputs_the_more_damping():
    weight = random_weight(128, 64)
    chosen = []
    for rows in (64, 8192):
        halves = [part.T @ part for part in np.split(correlated(rows, 128, 0.9), 2)]
        chosen.append(choose_damping([weight], np.array(halves), INT4[0]))
    assert chosen[0] > chosen[1]


def test_the_factor_of_the_inverse():
    x = correlated(500, 70).astype(np.float64)
    hessian = x.T @ x
    factor = inverse_factor(damped(hessian, 0.01)).astype(np.float64)
    assert (np.tril(factor, -1) == 0).all()
    expected = np.linalg.inv(hessian / hessian.diagonal().mean() + 0.01 * np.eye(70))
    np.testing.assert_allclose(factor.T @ factor, expected, rtol=1e-4, atol=1e-4)


def one_by_one(weight: np.ndarray, hessian: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Run GPTQ as Optimal Brain Surgeon defines it: invert the remaining Hessian again after each input."""
    rest, done = weight.astype(np.float64), np.zeros(weight.shape)
    whole = hessian.astype(np.float64) + 0.01 * hessian.diagonal().mean() * np.eye(len(hessian))
    for i in range(len(weight)):
        scale = scales[i // 32].astype(np.float64)
        done[i] = np.clip(np.rint(rest[i] / scale), -8, 7) * scale
        inverse = np.linalg.inv(whole[i:, i:])
        rest[i:] -= np.outer(inverse[:, 0] / inverse[0, 0], rest[i] - done[i])
    return done


def test_gptq_is_optimal_brain_surgery_with_a_fixed_order():
    weight, x = random_weight(200, 8), correlated(600, 200, 0.9)
    rounded = greedy(weight, x.T @ x)
    found, expected = dequantize(rounded, 32), one_by_one(weight, x.T @ x, rounded.scales)
    # Float32 rounding may move one weight to the next step, which changes all later weights of its column.
    same = np.isclose(found, expected, rtol=1e-3, atol=1e-5).all(axis=0)
    assert same.mean() >= 0.75


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("quantization", [INT8, INT8_GROUPS, INT4[0], INT4[2], BF16, ASYMMETRIC[1], MINIMUM[1]])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (20, 3), (33, 5), (130, 17), (300, 4)])
def test_gptq_of_any_size_keeps_zeros(k, n, quantization, act_order):
    rng = np.random.default_rng(k)
    weight = random_weight(k, n)
    weight[rng.random((k, n)) < 0.5] = 0
    weight[:32] = 0  # whole groups
    x = correlated(50, k)
    x[:, k // 2] = 0  # an input that is always 0
    check_in_range(gptq(weight, x.T @ x, quantization, act_order=act_order), weight, quantization)


def test_gptq_passes_on_the_error_of_pruned_weights():
    weight = random_weight(256, 64)
    weight[np.random.default_rng(0).random(weight.shape) < 0.5] = 0
    x, unseen = np.split(correlated(4096, 256), 2)
    nearest = output_error(unseen, weight, round_to_nearest(weight, INT4[0]), INT4[0])
    rounded = gptq(weight, x.T @ x, INT4[0])
    check_in_range(rounded, weight, INT4[0])
    assert output_error(unseen, weight, rounded, INT4[0]) < 0.5 * nearest


def test_gptq_without_any_input_rounds_each_weight_by_itself():
    weight = random_weight(100, 7)
    for quantization in (INT8, INT4[0], ASYMMETRIC[0], MINIMUM[0]):
        errors = [
            ((weight - dequantize(rounded, quantization.group_size)) ** 2).sum(axis=0)
            for rounded in (gptq(weight, np.zeros((100, 100)), quantization), round_to_nearest(weight, quantization))
        ]
        assert (errors[0] <= errors[1] * (1 + 1e-6)).all()


def test_act_order_helps_where_inputs_differ_in_energy():
    weight = random_weight(256, 128)
    x = correlated(2048, 256, 0.9)
    x *= (10.0 ** np.random.default_rng(0).uniform(-1.5, 0.5, 256)).astype(np.float32)
    errors = [
        output_error(x, weight, gptq(weight, x.T @ x, INT4[0], act_order=act_order), INT4[0])
        for act_order in (False, True)
    ]
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("quantization", [INT4[0], ASYMMETRIC[0]])
def test_awq_on_outlier_channels(quantization):
    weight = random_weight(256, 64)
    x = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    x[:, ::37] *= 30
    scales, least, plain = search_scales(x, [weight], quantization)
    assert scales.dtype == np.float32 and least < 0.5**2 * plain
    rounded = round_to_nearest(weight * scales[:, None], quantization)
    assert relative_error(x @ weight, (x / scales) @ dequantize(rounded, quantization.group_size)) < 0.5 * output_error(
        x, weight, round_to_nearest(weight, quantization), quantization
    )


def test_awq_leaves_alone_what_it_cannot_improve():
    weight = random_weight(64, 16)
    for x in (np.zeros((8, 64), np.float32), np.ones((8, 64), np.float32)):
        scales, least, plain = search_scales(x, [weight], INT4[0])
        assert (scales == 1).all() and least == plain


@examples(100)
@given(weights(), st.sampled_from(ASYMMETRIC + MINIMUM))
def test_hqq_is_never_worse_than_nearest(weight, quantization):
    rounded = half_quadratic(weight, quantization)
    check_in_range(rounded, weight, quantization)
    # If scale times q overflows float32, the error is infinite.
    best, nearest = (
        weight.astype(np.float64) - dequantize(one, quantization.group_size)
        for one in (rounded, round_to_nearest(weight, quantization))
    )
    assert ((best**2).sum(axis=0) <= (nearest**2).sum(axis=0) * (1 + 1e-4) + 1e-70).all()


@pytest.mark.parametrize("quantization", [ASYMMETRIC[2], MINIMUM[2]])
@pytest.mark.parametrize("outliers", [False, True])
def test_hqq_finds_a_better_grid(outliers, quantization):
    weight = random_weight(256, 64)
    if outliers:
        weight[::32] *= 6
    x = np.random.default_rng(1).standard_normal((2048, 256)).astype(np.float32)
    nearest = output_error(x, weight, round_to_nearest(weight, quantization), quantization)
    assert output_error(x, weight, half_quadratic(weight, quantization), quantization) < 0.97 * nearest


SEARCHED = [INT8, INT8_GROUPS, *INT4, BF16, *ASYMMETRIC, *MINIMUM]


def loss(
    weight: np.ndarray, rounded: QuantizedMatrix, quantization: Quantization, importance: np.ndarray
) -> np.ndarray:
    """Return the sum of importance * (w - v)^2 of each group, float64 [groups, n]."""
    error = weight.astype(np.float64) - dequantize(rounded, quantization.group_size)
    starts = range(0, len(weight), quantization.rows(len(weight)))
    return np.add.reduceat(error**2 * importance[:, None], list(starts), axis=0)


@examples(300)
@given(weights(), st.sampled_from(SEARCHED), st.booleans(), st.integers(0, 9))
def test_search_is_never_worse_than_nearest(weight, quantization, weighted, seed):
    importance = np.ones(len(weight), np.float32)
    if weighted:
        importance = (10.0 ** np.random.default_rng(seed).uniform(-3, 3, len(weight))).astype(np.float32)
    found = round_mse(weight, quantization, importance if weighted else None)
    check_in_range(found, weight, quantization)
    losses = [loss(weight, one, quantization, importance) for one in (found, round_to_nearest(weight, quantization))]
    # Scales are at least 2^-126, the smallest normal float32, which allows this additional loss.
    coarse = 2.0**-250 * importance.sum(dtype=np.float64)
    assert (losses[0] <= losses[1] * (1 + 1e-4) + coarse).all()


@pytest.mark.parametrize(
    ("quantization", "most"), [(INT4[0], 0.75), (BF16, 0.75), (ASYMMETRIC[0], 0.95), (MINIMUM[0], 0.85)]
)
def test_search_gains(quantization, most):
    weight = random_weight(256, 64)
    ones = np.ones(256)
    losses = [
        loss(weight, rounded, quantization, ones).sum()
        for rounded in (round_mse(weight, quantization), round_to_nearest(weight, quantization))
    ]
    assert losses[0] < most * losses[1]


def test_search_spends_its_steps_on_what_is_important():
    weight = random_weight(128, 64)
    importance = np.where(np.arange(128) % 4 == 0, 100, 1).astype(np.float32)
    for quantization in (INT4[0], ASYMMETRIC[0], MINIMUM[0]):
        losses = [
            loss(weight, round_mse(weight, quantization, one), quantization, importance).sum()
            for one in (importance, None)
        ]
        assert losses[0] < 0.9 * losses[1]


@examples(200)
@given(
    st.sampled_from([INT4[0], BF16, ASYMMETRIC[0], MINIMUM[0]]),
    st.integers(0, 2**32),
    st.integers(0, 14),
    st.integers(1, 15),
    st.floats(-4, 3),
)
def test_weights_on_a_grid_stay_exactly(quantization, seed, first, levels, magnitude):
    """Weights that are already multiples of a step, as in Q4_0 or Q4_1, are kept exactly, even if few levels occur."""
    rng = np.random.default_rng(seed)
    shape = (2 * quantization.group_size, 5)
    low, high = quantization.levels
    first, last = low + first, min(low + first + levels, high)
    q = rng.integers(first, last + 1, shape)
    short = bf16 if quantization.bf16_scales else half
    scales = short((10**magnitude * rng.uniform(0.1, 1, (2, 5))).astype(np.float32))
    if quantization.symmetric:
        stored = QuantizedMatrix(q.astype(np.int8), scales * rng.choice([-1, 1], (2, 5)).astype(np.float32), None)
    elif quantization.minimum:
        minimums = half((10**magnitude * rng.uniform(-10, 10, (2, 5))).astype(np.float32))
        stored = QuantizedMatrix(q.astype(np.uint8), scales, None, minimums)
    else:
        stored = QuantizedMatrix(q.astype(np.uint8), scales, rng.integers(0, 16, (2, 5)).astype(np.uint8))
    weight = dequantize(stored, quantization.group_size)
    found = round_mse(weight, quantization)
    np.testing.assert_array_equal(dequantize(found, quantization.group_size), weight)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("quantization", [MINIMUM[0], ASYMMETRIC[0]])
def test_symmetric_numbers_with_a_negative_scale_are_exact_in_other_forms(quantization, sign):
    """Grids with negative scales, as in Q4_0, are kept exactly.

    A minimum of 7 steps may have no exact float16 value; 8 steps always have one.
    """
    rng = np.random.default_rng(0)
    q = rng.integers(-8, 8, (64, 7)).astype(np.int8)
    q[::32] = -8
    scales = sign * half(rng.uniform(0.01, 1, (2, 7)).astype(np.float32))
    weight = dequantize(QuantizedMatrix(q, scales, None), 32)
    np.testing.assert_array_equal(dequantize(round_mse(weight, quantization), 32), weight)


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_side_with_the_larger_number_has_the_eighth_level(sign):
    weight = (sign * np.linspace(-1, 0.8, 32)[:, None]).astype(np.float32)
    found = round_mse(weight, INT4[0])
    assert found.q.min() == -8 and np.sign(found.scales[0, 0]) == sign
    assert loss(weight, found, INT4[0], np.ones(32)) < 0.8 * loss(
        weight, round_to_nearest(weight, INT4[0]), INT4[0], np.ones(32)
    )


@pytest.mark.parametrize("quantization", SEARCHED)
@pytest.mark.parametrize("number", [0.0, 0.37, -0.37, 3.4e38, -3.4e38, 1e-30, 1e-45])
def test_groups_of_one_number(quantization, number):
    weight = np.full((70, 3), number, np.float32)
    with np.errstate(all="raise", under="ignore"):
        found = round_mse(weight, quantization)
    check_in_range(found, weight, quantization)
    values = dequantize(found, quantization.group_size)
    short = 2.0**-8 if number else 0  # error of a bfloat16 scale, used if float16 cannot hold it
    assert (np.abs(values - weight) <= np.abs(weight) * short + 2.0**-126).all()


@pytest.mark.parametrize("quantization", SEARCHED)
@pytest.mark.parametrize("magnitude", [np.finfo(np.float32).max, 1e30, 1e5, 1e-6, 2.0**-126, 1e-40])
def test_search_of_extreme_magnitudes(quantization, magnitude):
    if quantization.minimum and magnitude > 1e38:
        magnitude = magnitude / 4  # keep scale times q finite
    weight = (np.linspace(-1, 1, 33)[:, None] * np.float64(magnitude)).astype(np.float32)
    with np.errstate(all="raise", under="ignore"):
        found = round_mse(weight, quantization)
    check_in_range(found, weight, quantization)
    step = magnitude / (7 if quantization.bits == 4 else 127)
    assert (np.abs(weight - dequantize(found, quantization.group_size)) <= 1.5 * step + 2.0**-126).all()
