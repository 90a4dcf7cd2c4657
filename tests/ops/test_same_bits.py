"""Kernels of encoders give the same bytes on every instruction set, as their headers promise.

Each kernel is compared with the scalar kernel. All NaNs count as equal.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from ortolan import _testing

from ..sampling import examples
from ..simd.targets import assert_same_bits
from .attention import LOWEST, PRECISION, runnable_kernels

Floats = NDArray[np.float32]

VECTOR_KERNELS = [row["name"] for row in _testing.epilogue_kernels() if row["runs_here"] and row["name"] != "scalar"]
OWN_ORDER = {row["name"] for row in _testing.nomad_attention_kernels() if row["own_order"]}
ATTENTION = [
    name for name in runnable_kernels() if PRECISION[name] == 16 and name not in OWN_ORDER and name != "scalar/16"
]
each_kernel = pytest.mark.parametrize("kernel", VECTOR_KERNELS)
each_attention = pytest.mark.parametrize("kernel", ATTENTION)

# All float32 values, including denormals, Inf and NaN.
ANY_FLOATS = st.floats(width=32)
SEEDS = st.integers(0, 2**32 - 1)


def random_rows(seed: int, rows: int, n: int, magnitude: float) -> Floats:
    """Return values of very different magnitude, which reveal the order of additions."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, n)) * np.exp2(rng.uniform(-8, 8, (rows, n))) * magnitude
    return x.astype(np.float32)


@each_kernel
@examples(200)
@given(rows=st.integers(1, 9), n=st.integers(1, 330), magnitude=st.sampled_from([1e-25, 1e-3, 1.0, 1e10]), seed=SEEDS)
def test_layer_norm(kernel: str, rows: int, n: int, magnitude: float, seed: int) -> None:
    x = random_rows(seed, rows, n, magnitude)
    weight, bias = random_rows(seed + 1, 2, n, 1.0)
    found, expected = (_testing.layer_norm(x, weight, bias, 1e-12, kernel=name) for name in (kernel, "scalar"))
    assert_same_bits(found, expected)


@each_kernel
@examples(100)
@given(x=arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 70)), elements=ANY_FLOATS))
def test_layer_norm_of_any_float(kernel: str, x: Floats) -> None:
    weight, bias = random_rows(0, 2, x.shape[1], 1.0)
    found, expected = (_testing.layer_norm(x, weight, bias, 1e-5, kernel=name) for name in (kernel, "scalar"))
    assert_same_bits(found, expected)


@each_kernel
@pytest.mark.parametrize("activation", range(5))
@examples(100)
@given(
    x=arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 70)),
        elements=st.one_of(ANY_FLOATS, st.floats(-15, 15, width=32)),
    ),
    has_residual=st.booleans(),
    has_factor=st.booleans(),
    seed=SEEDS,
)
def test_epilogue(kernel: str, activation: int, x: Floats, has_residual: bool, has_factor: bool, seed: int) -> None:
    residual = random_rows(seed, *x.shape, 1.0) if has_residual else None
    factor = random_rows(seed + 1, *x.shape, 1.0) if has_factor else None
    found, expected = (_testing.epilogue(x, activation, residual, factor, kernel=name) for name in (kernel, "scalar"))
    assert_same_bits(found, expected)


@each_kernel
@pytest.mark.parametrize("activation", range(5))
def test_activations_of_every_exponent(kernel: str, activation: int) -> None:
    bits = np.arange(0, 2**32, 9973, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32).reshape(1, -1)
    found, expected = (_testing.epilogue(x, activation, kernel=name) for name in (kernel, "scalar"))
    assert_same_bits(found, expected)


MASKS = {"key": (1, 1, 0), "query": (1, 0, 1), "all": (0, 0, 0), "head": (0, 1, 0), "number": (1, 1, 1)}


@each_attention
@examples(150)
@given(
    heads=st.integers(1, 4),
    queries=st.one_of(st.integers(1, 40), st.integers(1, 150)),
    more_keys=st.one_of(st.just(0), st.integers(0, 300)),
    head_dim=st.integers(1, 70),
    mask_form=st.sampled_from([None, *MASKS]),
    hidden=st.sampled_from([LOWEST, -np.inf, -10000.0]),
    causal=st.booleans(),
    zero_hidden_rows=st.booleans(),
    magnitude=st.sampled_from([1e-25, 1.0, 8.0, 1e20]),
    seed=SEEDS,
)
def test_attention_of_bf16(
    kernel, heads, queries, more_keys, head_dim, mask_form, hidden, causal, zero_hidden_rows, magnitude, seed
) -> None:
    """Odd sizes, fully masked rows, and scores from denormal to beyond the largest float."""
    rng = np.random.default_rng(seed)
    keys = queries + more_keys
    q, k, v = (
        (rng.standard_normal(shape) * magnitude).astype(np.float32)
        for shape in ((heads, queries, head_dim), (keys, head_dim), (keys, head_dim))
    )
    mask = None
    if mask_form is not None:
        shape = [1 if one else n for one, n in zip(MASKS[mask_form], (heads, queries, keys), strict=True)]
        mask = np.where(rng.random(shape) < 0.3, hidden, rng.standard_normal(shape) * 4).astype(np.float32)
    found, expected = (
        _testing.nomad_attention(q, k, v, 0.3, mask, causal, zero_hidden_rows, kernel=name)
        for name in (kernel, "scalar/16")
    )
    assert_same_bits(found, expected)


@each_attention
def test_denormal_floats_are_zero_and_stay_so_afterwards(kernel: str) -> None:
    """Denormals are flushed to zero, and afterwards the thread handles denormals as before."""
    largest = np.nextafter(np.float32(2.0**-126), np.float32(0))
    q, k, v = np.ones((1, 3, 7), np.float32), np.full((5, 7), largest), np.full((5, 7), -largest)
    y = _testing.nomad_attention(q, k, v, 1.0, kernel=kernel)
    np.testing.assert_array_equal(y, 0)
    least = np.float32(1e-45)
    assert least + np.float32(0) == least
