"""Test every epilogue kernel against float64, within the bounds of ops/epilogue/epilogue.h."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy.special import expit, ndtr

from ortolan import _testing

from ..sampling import examples
from .single_node import U

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

KERNELS = [row["name"] for row in _testing.epilogue_kernels() if row["runs_here"]]
NONE, RELU, GELU, GELU_TANH, SILU = range(5)
ACTIVATIONS = {"none": NONE, "relu": RELU, "gelu": GELU, "gelu_tanh": GELU_TANH, "silu": SILU}
all_kernels = pytest.mark.parametrize("kernel", KERNELS)
all_activations = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())


def gelu_tanh(x: Doubles) -> Doubles:
    # Use expit(2 t) = (1 + tanh(t)) / 2, which stays accurate if tanh(t) is close to -1.
    return x * expit(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


EXACT: dict[int, Callable[[Doubles], Doubles]] = {
    NONE: lambda x: x,
    RELU: lambda x: np.maximum(x, 0),
    GELU: lambda x: x * ndtr(x),
    GELU_TANH: gelu_tanh,
    SILU: lambda x: x * expit(x),
}
# Largest error of each activation, in units of U |x|.
ERROR = {NONE: 0.0, RELU: 0.0, GELU: 3.0, GELU_TANH: 3.0, SILU: 3.0}


def assert_activation_close(y: Floats, x: Floats, activation: int) -> None:
    """Check that y is activation(x) within the documented bound, for finite x."""
    exact = EXACT[activation](x.astype(np.float64))
    bound = ERROR[activation] * U * np.abs(x.astype(np.float64))
    if ERROR[activation] != 0:
        bound += 2.0**-149
    assert y.dtype == np.float32
    assert y.shape == x.shape
    wrong = np.abs(y - exact) > bound
    assert not wrong.any(), f"x {x[wrong][:5]}: {y[wrong][:5]} instead of {exact[wrong][:5]}"


def every_exponent(mantissas: int) -> Floats:
    """Return finite floats of both signs: all exponents, including denormals, with `mantissas` mantissas each."""
    last = np.uint32(2**23 - 1)
    mantissa = np.unique(np.r_[np.linspace(0, last, mantissas).astype(np.uint32), np.uint32(1), last - np.uint32(1)])
    exponent = np.arange(255, dtype=np.uint32) << np.uint32(23)
    positive = (exponent[:, None] | mantissa).ravel().view(np.float32)
    return np.concatenate([positive, -positive])


@all_kernels
@all_activations
def test_every_exponent(kernel: str, activation: int) -> None:
    x = every_exponent(2000)[None]
    assert_activation_close(_testing.epilogue(x, activation, kernel=kernel), x, activation)


@all_kernels
@all_activations
def test_dense_around_zero(kernel: str, activation: int) -> None:
    """Inputs around the bends of the activations, down to where the activations underflow."""
    x = np.linspace(-110, 110, 1_000_001, dtype=np.float32)[None]
    assert_activation_close(_testing.epilogue(x, activation, kernel=kernel), x, activation)
    x /= 10
    assert_activation_close(_testing.epilogue(x, activation, kernel=kernel), x, activation)


@all_kernels
@all_activations
@examples(60)
@given(x=arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(0, 50)), elements=st.floats(width=32)))
def test_any_float(kernel: str, activation: int, x: Floats) -> None:
    y = _testing.epilogue(x, activation, kernel=kernel)
    finite = np.isfinite(x)
    assert y.shape == x.shape
    assert_activation_close(y[finite], x[finite], activation)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x))


@all_kernels
@all_activations
def test_infinities_nan_and_zeros(kernel: str, activation: int) -> None:
    x = np.array([[np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0]], np.float32)
    y = _testing.epilogue(x, activation, kernel=kernel)
    expected = x.copy()
    if activation != NONE:
        expected[0, 1] = 0
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(np.signbit(y[0, 4:]), [False, True])


@all_kernels
@pytest.mark.parametrize(("activation", "zero_from"), [(RELU, 0.0), (GELU, 13.3), (GELU_TANH, 10.1), (SILU, 88.0)])
def test_far_negative_gives_zero_and_far_positive_itself(kernel: str, activation: int, zero_from: float) -> None:
    x = every_exponent(50)[None]
    y = _testing.epilogue(x, activation, kernel=kernel)
    far = x < -zero_from
    assert np.count_nonzero(far) > 1000
    np.testing.assert_array_equal(y[far], 0)
    far = x > zero_from
    np.testing.assert_array_equal(y[far], x[far])


@all_kernels
@pytest.mark.parametrize("activation", [GELU, GELU_TANH, SILU])
def test_negative_tail_keeps_its_relative_accuracy(kernel: str, activation: int) -> None:
    """Small negative results have a small relative error, although the documented bound does not require it."""
    x = np.linspace(-9, -1, 100_001, dtype=np.float32)[None]
    exact = EXACT[activation](x.astype(np.float64))
    error = np.abs(_testing.epilogue(x, activation, kernel=kernel) - exact)
    assert np.max(error / np.abs(exact)) < 200 * U


@all_kernels
@all_activations
def test_residual_is_added_with_one_rounding(kernel: str, activation: int) -> None:
    rng = np.random.default_rng(1)
    for m, n in [(1, 1), (1, 16), (3, 7), (5, 33), (2, 64), (4, 100)]:
        x = rng.standard_normal((m, n), dtype=np.float32) * 4
        residual = rng.standard_normal((m, n), dtype=np.float32)
        y = _testing.epilogue(x, activation, residual, kernel=kernel)
        np.testing.assert_array_equal(y, _testing.epilogue(x, activation, kernel=kernel) + residual)


@all_kernels
@all_activations
def test_residual_follows_ieee_rules(kernel: str, activation: int) -> None:
    x = np.array([[np.inf, 1.0, 3e38, np.nan, -1e30]], np.float32)
    residual = np.array([[-np.inf, np.inf, 3e38, 1.0, 5.0]], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = _testing.epilogue(x, activation, kernel=kernel) + residual
        np.testing.assert_array_equal(_testing.epilogue(x, activation, residual, kernel=kernel), expected)


@all_kernels
@all_activations
def test_factor_is_multiplied_before_the_residual_is_added(kernel: str, activation: int) -> None:
    rng = np.random.default_rng(2)
    for m, n in [(1, 1), (1, 16), (3, 7), (5, 33), (2, 64), (4, 100)]:
        x, factor, residual = rng.standard_normal((3, m, n), dtype=np.float32) * 4
        activated = _testing.epilogue(x, activation, kernel=kernel)
        np.testing.assert_array_equal(
            _testing.epilogue(x, activation, factor=factor, kernel=kernel), activated * factor
        )
        product = activated.astype(np.float64) * factor
        y = _testing.epilogue(x, activation, residual, factor, kernel)
        assert (np.abs(y - (product + residual)) <= U * (np.abs(product) + np.abs(product + residual)) * 1.01).all()


@all_kernels
@all_activations
def test_factor_follows_ieee_rules(kernel: str, activation: int) -> None:
    x = np.array([[np.inf, 1.0, 3e38, np.nan, 0.0, 2.0]], np.float32)
    factor = np.array([[-1.0, np.inf, 3e38, 1.0, np.inf, np.nan]], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = _testing.epilogue(x, activation, kernel=kernel) * factor
        np.testing.assert_array_equal(_testing.epilogue(x, activation, factor=factor, kernel=kernel), expected)


@all_kernels
@all_activations
@pytest.mark.parametrize("with_residual", [False, True])
def test_results_do_not_depend_on_the_place(kernel: str, activation: int, with_residual: bool) -> None:
    """A value has the same bits in a full vector and in the remainder of a row."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 70), dtype=np.float32) * 3
    residual = rng.standard_normal((3, 70), dtype=np.float32) if with_residual else None
    whole = _testing.epilogue(x, activation, residual, kernel=kernel)
    for first in (0, 1, 5):
        for n in range(70 - first + 1):
            part = np.s_[:, first : first + n]
            y = _testing.epilogue(
                x[part].copy(), activation, None if residual is None else residual[part], kernel=kernel
            )
            np.testing.assert_array_equal(y, whole[part])


@all_kernels
@all_activations
@pytest.mark.parametrize("n", [1, 7, 8, 15, 16, 17, 40])
def test_row_strides(kernel: str, activation: int, n: int) -> None:
    """Gaps between rows stay unchanged, with different row strides of y and residual. A stride of 0 repeats one row."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((4, n + 9), dtype=np.float32)[:, :n]
    residual = rng.standard_normal((4, n + 3), dtype=np.float32)[:, :n]
    y = _testing.epilogue(x, activation, residual, kernel=kernel)
    expected = _testing.epilogue(x.copy(), activation, residual.copy(), kernel=kernel)
    np.testing.assert_array_equal(y, expected)
    buffer = y.base
    assert isinstance(buffer, np.ndarray)
    assert buffer.shape == (4, n + 9)
    np.testing.assert_array_equal(buffer[:, n:], 0)

    one_row = np.broadcast_to(residual[:1], (4, n))
    assert one_row.strides[0] == 0
    y = _testing.epilogue(x, activation, one_row, kernel=kernel)
    np.testing.assert_array_equal(y, _testing.epilogue(x, activation, one_row.copy(), kernel=kernel))


@all_kernels
@all_activations
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0), (0, 16)])
def test_nothing_to_do(kernel: str, activation: int, shape: tuple[int, int]) -> None:
    empty = np.empty(shape, np.float32)
    assert _testing.epilogue(empty, activation, empty, kernel=kernel).shape == shape


def test_wrong_arguments_are_refused() -> None:
    y = np.ones((2, 3), np.float32)
    for activation in (-1, 5, 2**40):
        with pytest.raises(ValueError, match=f"activation is {activation}, expected 0 to 4"):
            _testing.epilogue(y, activation)
    with pytest.raises(ValueError, match=r"y has 1 dimensions, expected 2"):
        _testing.epilogue(y[0], NONE)
    for residual in (y[:1], y[:, :2], y[0]):
        with pytest.raises(ValueError, match=r"residual must be \[2, 3\]"):
            _testing.epilogue(y, NONE, residual)
    with pytest.raises(ValueError, match=r"rows of contiguous float32"):
        _testing.epilogue(y, NONE, np.ones((3, 2), np.float32).T)
    with pytest.raises(ValueError, match=r"no kernel is called 'Abacus', expected one of: .*scalar"):
        _testing.epilogue(y, NONE, kernel="Abacus")
