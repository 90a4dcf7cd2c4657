"""Weights in subgroups with integer scales and zero points: round to nearest, and the search of better ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan.graph_passes.weights.quantizers.awq import search_scales
from ortolan.graph_passes.weights.quantizers.gptq import choose_damping, gptq, prepare
from ortolan.graph_passes.weights.quantizers.grid import Quantization, QuantizedMatrix, dequantize, round_to_nearest
from ortolan.graph_passes.weights.quantizers.hessian import damped
from ortolan.graph_passes.weights.quantizers.mse import round_mse

from ..sampling import examples
from .correlated import correlated
from .quantized import weights
from .small_models import random_weight, relative_error

FORMATS = [
    Quantization(bits, group, symmetric=False, subgroup_size=size)
    for bits in (4, 5, 6)
    for size in (16, 32)
    for group in (256, 64)
]
FOUR, FIVE, SIX = (Quantization(bits, 256, symmetric=False, subgroup_size=16) for bits in (4, 5, 6))


def values(rounded: QuantizedMatrix, quantization: Quantization) -> np.ndarray:
    """Return the weights by the formula of ops/formats/subgroup.h, float64 [k, n]."""
    k = len(rounded.q)
    assert rounded.subgroup_scales is not None and rounded.zero_points is not None
    s, z, c = (
        np.repeat(rows.astype(np.float64), size, axis=0)[:k]
        for rows, size in (
            (rounded.subgroup_scales, quantization.subgroup_size),
            (rounded.zero_points, quantization.subgroup_size),
            (rounded.scales, quantization.group_size),
        )
    )
    return c * (s * (rounded.q.astype(np.float64) - z))


def check_limits(rounded: QuantizedMatrix, weight: np.ndarray, quantization: Quantization) -> None:
    (k, n), bits = weight.shape, quantization.bits
    assert quantization.group_size is not None and quantization.subgroup_size is not None
    subgroups, groups = -(-k // quantization.subgroup_size), -(-k // quantization.group_size)
    s, z = rounded.subgroup_scales, rounded.zero_points
    assert s is not None and z is not None and s.shape == z.shape == (subgroups, n)
    assert rounded.scales.shape == (groups, n) and rounded.scales.dtype == np.float32 and rounded.q.shape == (k, n)
    assert s.dtype == z.dtype == rounded.q.dtype == np.uint8
    assert rounded.q.max() < 2**bits and z.max() < 2**bits and s.max() < 2 ** (8 - bits)
    assert (np.isfinite(rounded.scales) & (rounded.scales >= 0)).all()
    np.testing.assert_array_equal(quantization.short(rounded.scales), rounded.scales)
    ends = np.arange(0, k, quantization.subgroup_size)
    assert ((s == 0) <= (np.maximum.reduceat(np.abs(weight), ends) == 0)).all()
    v = values(QuantizedMatrix(rounded.q, np.ones_like(rounded.scales), z, None, s), quantization)
    assert np.abs(v).max() <= 127 and (values(rounded, quantization)[weight == 0] == 0).all()
    with np.errstate(over="ignore"):
        found = dequantize(rounded, quantization.group_size, quantization.subgroup_size)
        np.testing.assert_array_equal(found, values(rounded, quantization).astype(np.float32))


def loss(rounded: QuantizedMatrix, weight: np.ndarray, quantization: Quantization) -> np.ndarray:
    """Return the squared error of each column."""
    total: np.ndarray = np.square(values(rounded, quantization) - weight).sum(axis=0)
    return total


@examples(200)
@given(weights(), st.sampled_from(FORMATS))
def test_round_to_nearest_is_within_half_a_step(weight, quantization):
    rounded = round_to_nearest(weight, quantization)
    check_limits(rounded, weight, quantization)
    k = len(weight)
    steps = np.repeat(rounded.subgroup_scales.astype(np.float64), quantization.subgroup_size, axis=0)[:k]
    steps *= np.repeat(rounded.scales.astype(np.float64), quantization.group_size, axis=0)[:k]
    # Weights that would overflow when they are rounded up are rounded down.
    half = np.where(np.abs(weight) > 3e38, 1, 0.5)
    assert (np.abs(values(rounded, quantization) - weight) <= half * steps * (1 + 2**-16)).all()


@examples(200)
@given(weights(), st.sampled_from(FORMATS), st.booleans())
def test_the_search_is_never_worse_than_nearest(weight, quantization, with_importance):
    k = len(weight)
    importance = np.random.default_rng(k).uniform(0.5, 2, k).astype(np.float32) if with_importance else None
    found, nearest = round_mse(weight, quantization, importance), round_to_nearest(weight, quantization)
    check_limits(found, weight, quantization)
    squares = [np.square(values(one, quantization) - weight) for one in (found, nearest)]
    best, plain = (square if importance is None else square * importance[:, None] for square in squares)
    assert (best.sum(axis=0) <= plain.sum(axis=0) * (1 + 1e-4) + 1e-70).all()


def exhaustive(x: np.ndarray, bits: int) -> float:
    """Return the least loss over all s and z, for many scales c, of one column of a group: x [subgroups, 16]."""
    levels, least = 2**bits - 1, np.inf
    s, z = (one.reshape(-1, 1) for one in np.mgrid[1 : 2 ** (8 - bits), 0 : levels + 1].astype(np.float64))
    for c in np.abs(x).max() / np.linspace(85, 170, 120):
        total = 0.0
        for part in x:
            q = np.clip(np.rint(part / (c * s) + z), z - np.minimum(z, 127 // s), z + np.minimum(levels - z, 127 // s))
            total += float(np.square(c * s * (q - z) - part).sum(axis=1).min())
        least = min(least, total)
    return least


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_the_search_is_close_to_exhaustive_search(bits):
    quantization = Quantization(bits, 256, symmetric=False, subgroup_size=16)
    weight = random_weight(128, 12)
    weight[:, ::3] *= np.random.default_rng(0).uniform(0.3, 3, (128, 4)).astype(np.float32)
    found = loss(round_mse(weight, quantization), weight, quantization)
    best = np.array([exhaustive(column.reshape(8, 16).astype(np.float64), bits) for column in weight.T])
    assert found.sum() <= 1.08 * best.sum()


@pytest.mark.parametrize(("quantization", "most"), [(FOUR, 0.0685), (FIVE, 0.0355), (SIX, 0.0200)])
def test_errors_of_normal_weights(quantization, most):
    weight = random_weight(512, 64)
    found = round_mse(weight, quantization)
    assert relative_error(weight, values(found, quantization).astype(np.float32)) <= most
    # An error of a fourth has 2 bits less: formats do not mix up their bits.
    assert relative_error(weight, values(found, quantization).astype(np.float32)) >= most / 2


def test_important_inputs_are_rounded_better():
    weight, importance = random_weight(256, 64), np.ones(256, np.float32)
    importance[::16] = 100
    errors = [
        np.square(values(round_mse(weight, FOUR, given), FOUR) - weight)[::16].sum() for given in (importance, None)
    ]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("quantization", [FOUR, FIVE, SIX, FORMATS[3]])
@pytest.mark.parametrize("number", [0.0, 0.37, -0.37, 3.4e38, -3.4e38, 1e-30, 1e-45])
def test_groups_of_one_number(quantization, number):
    weight = np.full((70, 3), number, np.float32)
    with np.errstate(all="raise", under="ignore"):
        found = round_mse(weight, quantization)
    check_limits(found, weight, quantization)
    # An 8-bit scale of bfloat16 where float16 cannot hold it; and the distance of neighbouring values.
    assert (np.abs(values(found, quantization) - weight) <= abs(number) * 0.005 + 2.0**-126).all()


@pytest.mark.parametrize("quantization", [FOUR, FIVE, SIX])
@pytest.mark.parametrize("magnitude", [float(np.finfo(np.float32).max), 1e30, 1e5, 1e-6, 2.0**-126, 1e-40])
def test_extreme_magnitudes(quantization, magnitude):
    weight = (np.linspace(-1, 1, 65)[:, None] * magnitude).astype(np.float32)
    with np.errstate(all="raise", under="ignore"):
        found = round_mse(weight, quantization)
    check_limits(found, weight, quantization)
    assert np.isfinite(dequantize(found, 256, 16)).all()
    assert (np.abs(weight - values(found, quantization)) <= magnitude / 14 + 2.0**-126).all()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (20, 3), (33, 5), (130, 17), (300, 4)])
def test_gptq_of_any_size_keeps_zeros(k, n, quantization, act_order):
    rng = np.random.default_rng(k)
    weight = random_weight(k, n)
    weight[rng.random((k, n)) < 0.5] = 0
    weight[:32] = 0  # whole subgroups
    x = correlated(50, k)
    x[:, k // 2] = 0  # an input that is always 0
    check_limits(gptq(weight, prepare(damped(x.T @ x, 0.03), act_order), quantization), weight, quantization)


@pytest.mark.parametrize("quantization", [FOUR, FIVE, SIX, FORMATS[2]])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_on_correlated_inputs(quantization, act_order):
    weight = random_weight(512, 64)
    x, unseen = np.split(correlated(4096, 512), 2)
    found = gptq(weight, prepare(damped(x.T @ x, 0.03), act_order), quantization)
    check_limits(found, weight, quantization)
    errors = [
        relative_error(unseen @ weight, unseen @ values(one, quantization))
        for one in (found, round_to_nearest(weight, quantization))
    ]
    assert errors[0] <= 0.3 * errors[1]


@pytest.mark.parametrize("quantization", [FOUR, SIX])
def test_refinement_lowers_the_error_it_minimizes(quantization):
    weight, x = random_weight(512, 32), correlated(2048, 512, 0.9)
    hessian = damped(x.T @ x, 0.01)
    losses = []
    for sweeps in (0, 1, 2):
        difference = weight - values(gptq(weight, prepare(hessian, False), quantization, sweeps), quantization)
        losses.append((difference * (hessian @ difference)).sum(axis=0))
    assert (losses[1] <= losses[0] * (1 + 1e-4)).all() and (losses[2] <= losses[1] * (1 + 1e-4)).all()
    assert losses[2].sum() < 0.997 * losses[0].sum()


def test_damping_and_the_scales_of_awq_know_the_format():
    weight = random_weight(256, 64)
    halves = [part.T @ part for part in np.split(correlated(1024, 256, 0.9), 2)]
    assert 0.01 <= choose_damping([weight], np.array(halves), FOUR) <= 1
    x = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    x[:, ::37] *= 30
    scales, least, plain = search_scales(x, [weight], FOUR)
    rounded = round_to_nearest(weight * scales[:, None], FOUR)
    error = np.square((x / scales) @ dequantize(rounded, 256, 16) - x @ weight).sum()
    assert least < 0.5 * plain and error == pytest.approx(least, rel=1e-3)
