"""Test every LayerNormalization kernel against float64, within the bound of ops/epilogue/layer_norm.h."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from ortolan import _testing

from ..sampling import examples
from .layer_norm import assert_normalized, random_vectors

Floats = NDArray[np.float32]

KERNELS = [row["name"] for row in _testing.layer_norm_kernels() if row["runs_here"]]
all_kernels = pytest.mark.parametrize("kernel", KERNELS)


@all_kernels
@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 384, 768, 1000, 4096])
def test_every_length(kernel: str, n: int) -> None:
    rng = np.random.default_rng(n)
    weight, bias = random_vectors(rng, n)
    for scale, mean in ((1, 0), (1e-3, 1), (50, -20), (1e15, 0), (1e-15, 1e-15)):
        x = (rng.standard_normal((5, n)) * scale + mean).astype(np.float32)
        for epsilon in (1e-12, 1e-5, 3.0):
            y = _testing.layer_norm(x, weight, bias, epsilon, kernel=kernel)
            assert_normalized(y, x, weight, bias, epsilon)


@all_kernels
def test_far_mean_and_outliers(kernel: str) -> None:
    """Residuals like in transformers: a few columns a thousand times larger than the rest, or one of 1e6."""
    rng = np.random.default_rng(1)
    n = 768
    weight, bias = random_vectors(rng, n)
    x = rng.standard_normal((20, n), dtype=np.float32)
    x[:, 5] += 3000
    x[:5, 700] = -1e6
    x[10:] += 100
    y = _testing.layer_norm(x, weight, bias, 1e-12, kernel=kernel)
    assert_normalized(y, x, weight, bias, 1e-12)
    # This is tighter than the documented bound, because rounding errors have both signs and partly cancel.
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(axis=1, keepdims=True)) / wide.std(axis=1, keepdims=True) * weight + bias
    assert np.all(np.abs(y[10:] - exact[10:]) < 1e-6 * (1 + np.abs(exact[10:])))


@all_kernels
@examples(200)
@given(
    x=arrays(
        np.float32,
        st.tuples(st.integers(0, 4), st.integers(1, 70)),
        elements=st.floats(-(2.0**60), 2.0**60, width=32),
    ),
    epsilon=st.sampled_from([2.0**-60, 1e-12, 1e-5, 1.0]),
)
def test_any_float(kernel: str, x: Floats, epsilon: float) -> None:
    weight, bias = random_vectors(np.random.default_rng(0), x.shape[1])
    assert_normalized(_testing.layer_norm(x, weight, bias, epsilon, kernel=kernel), x, weight, bias, epsilon)


@all_kernels
@pytest.mark.parametrize("n", [1, 2, 16, 24, 100])
def test_rows_of_one_number_give_the_bias(kernel: str, n: int) -> None:
    weight, bias = random_vectors(np.random.default_rng(n), n)
    x = np.repeat(np.array([[0.0], [-0.0], [1.0], [-3.5], [2.0**60]], np.float32), n, axis=1)
    x = x if n in (1, 2, 16) else x[:4]  # for other n, sums of 2^60 are not exact
    y = _testing.layer_norm(x, weight, bias, 1e-12, kernel=kernel)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))


@all_kernels
@pytest.mark.parametrize("n", [1, 7, 16, 33, 384])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_infinity_and_nan_fill_their_row(kernel: str, n: int, value: float) -> None:
    rng = np.random.default_rng(n)
    weight, bias = random_vectors(rng, n)
    x = rng.standard_normal((4, n), dtype=np.float32)
    x[1, 0] = x[2, n - 1] = value
    y = _testing.layer_norm(x, weight, bias, 1e-5, kernel=kernel)
    assert np.isnan(y[1:3]).all()
    assert_normalized(y[[0, 3]], x[[0, 3]], weight, bias, 1e-5)


@all_kernels
@pytest.mark.parametrize("n", [1, 17, 64])
def test_rows_of_one_number_without_epsilon_are_no_numbers(kernel: str, n: int) -> None:
    weight, bias = random_vectors(np.random.default_rng(n), n)
    assert np.isnan(_testing.layer_norm(np.ones((1, n), np.float32), weight, bias, 0.0, kernel=kernel)).all()


@all_kernels
def test_weight_and_bias_follow_ieee_rules(kernel: str) -> None:
    x = np.array([[1.0, 2.0, 3.0, 4.0, 2.5]], np.float32)
    weight = np.array([np.inf, np.nan, 0.0, 1.0, np.inf], np.float32)
    bias = np.array([1.0, 1.0, np.inf, np.nan, 0.0], np.float32)
    y = _testing.layer_norm(x, weight, bias, 1e-5, kernel=kernel)
    np.testing.assert_array_equal(y, np.array([[-np.inf, np.nan, np.inf, np.nan, np.nan]], np.float32))


@all_kernels
@pytest.mark.parametrize("n", [1, 7, 8, 15, 16, 17, 40])
def test_rows_do_not_depend_on_where_they_stand(kernel: str, n: int) -> None:
    """A row has the same bits at any row stride and alone; gaps between rows stay unchanged."""
    rng = np.random.default_rng(n)
    weight, bias = random_vectors(rng, n)
    x = rng.standard_normal((4, n + 9), dtype=np.float32)[:, :n]
    y = _testing.layer_norm(x, weight, bias, 1e-5, kernel=kernel)
    for i in range(4):
        np.testing.assert_array_equal(
            y[i : i + 1], _testing.layer_norm(x[i : i + 1], weight, bias, 1e-5, kernel=kernel)
        )
    buffer = y.base
    assert isinstance(buffer, np.ndarray)
    assert buffer.shape == (4, n + 9)
    np.testing.assert_array_equal(buffer[:, n:], 0)


@all_kernels
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0)])
def test_nothing_to_do(kernel: str, shape: tuple[int, int]) -> None:
    vector = np.ones(shape[1], np.float32)
    assert _testing.layer_norm(np.empty(shape, np.float32), vector, vector, 1e-5, kernel=kernel).shape == shape


def test_wrong_arguments_are_refused() -> None:
    x, vector = np.ones((2, 3), np.float32), np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"x has 1 dimensions, expected 2"):
        _testing.layer_norm(x[0], vector, vector, 1e-5)
    with pytest.raises(ValueError, match=r"weight must be \[3\]"):
        _testing.layer_norm(x, vector[:2], vector, 1e-5)
    with pytest.raises(ValueError, match=r"bias must be \[3\]"):
        _testing.layer_norm(x, vector, x, 1e-5)
    with pytest.raises(ValueError, match=r"no kernel is called 'Abacus', expected one of: .*scalar"):
        _testing.layer_norm(x, vector, vector, 1e-5, kernel="Abacus")
