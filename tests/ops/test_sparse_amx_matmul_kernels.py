"""Test every kernel of SparseAMXMatMul for bf16 weights against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..sampling import examples
from .linear_sizes import DIMENSIONS, SPARSITIES, M
from .single_node import (
    assert_matmul_close,
    assert_same_bits,
    at_odd_address,
    runnable_kernels,
    sparse_weight,
    to_bf16,
)

# Fewer sparsities for dense storage, whose work does not depend on sparsity.
DENSE_SPARSITIES = (0.0, 0.5)


@pytest.mark.parametrize("kernel", runnable_kernels())
@pytest.mark.parametrize("n", DIMENSIONS)
def test_shapes(kernel: str, n: int) -> None:
    rng = np.random.default_rng(n)
    for k in DIMENSIONS:
        for sparsity in SPARSITIES:
            w = sparse_weight(rng, k, n, sparsity)
            packed, dense = _native.pack_bitmap(w), _native.pack_bitmap(w, dense=True)
            x = rng.standard_normal((max(M), k), dtype=np.float32)
            bias = rng.standard_normal(n, dtype=np.float32)
            for m in M:
                y = _testing.sparse_amx_matmul(x[:m], *packed, k, n, kernel=kernel)
                assert_matmul_close(y, x[:m], w)
                if sparsity in DENSE_SPARSITIES:
                    assert_same_bits(_testing.sparse_amx_matmul(x[:m], *dense, k, n, kernel=kernel), y)
            y = _testing.sparse_amx_matmul(x, *packed, k, n, bias=bias, kernel=kernel)
            assert_matmul_close(y, x, w, bias)
            if sparsity in DENSE_SPARSITIES:
                assert_same_bits(_testing.sparse_amx_matmul(x, *dense, k, n, bias=bias, kernel=kernel), y)


@pytest.mark.parametrize("kernel", runnable_kernels())
@examples(150)
@given(
    m=st.integers(1, 70),
    k=st.integers(1, 700),
    n=st.integers(1, 80),
    sparsity=st.floats(0, 1),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e12]),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    kernel: str, m: int, k: int, n: int, sparsity: float, scale: float, with_bias: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w = sparse_weight(rng, k, n, sparsity)
    x = rng.standard_normal((m, k), dtype=np.float32) * np.float32(scale)
    bias = rng.standard_normal(n, dtype=np.float32) if with_bias else None
    y = _testing.sparse_amx_matmul(x, *_native.pack_bitmap(w, dense=True), k, n, bias=bias, kernel=kernel)
    assert_matmul_close(y, x, w, bias)
    assert_same_bits(_testing.sparse_amx_matmul(x, *_native.pack_bitmap(w), k, n, bias=bias, kernel=kernel), y)


@pytest.mark.parametrize("kernel", runnable_kernels())
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("m", [1, 3, 20])
def test_masks_and_values_at_odd_addresses(kernel: str, dense: bool, m: int) -> None:
    k, n = 100, 40
    rng = np.random.default_rng(m)
    packed = _native.pack_bitmap(sparse_weight(rng, k, n, 0.5), dense)
    x = rng.standard_normal((m, k), dtype=np.float32)
    masks, values, offsets = packed
    y = _testing.sparse_amx_matmul(x, at_odd_address(masks), at_odd_address(values), offsets, k, n, kernel=kernel)
    assert_same_bits(y, _testing.sparse_amx_matmul(x, *packed, k, n, kernel=kernel))


@pytest.mark.parametrize("kernel", runnable_kernels())
def test_rounds_activations_to_nearest_even(kernel: str) -> None:
    # 1 + 2^-8 is halfway between two bf16 values and rounds down to even; 1 + 3 * 2^-8 rounds up to even.
    x = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 3.14159, -2.71828, 1e-3, 65504.0]], np.float32)
    k = x.shape[1]
    y = _testing.sparse_amx_matmul(x, *_native.pack_bitmap(np.eye(k, dtype=np.float32)), k, k, kernel=kernel)
    np.testing.assert_array_equal(y, to_bf16(x))
    assert y[0, 0] == 1.0
    assert y[0, 1] == 1 + 2**-6


@pytest.mark.parametrize("kernel", runnable_kernels())
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("m", [1, 3, 20])
def test_inf_and_nan_spread_as_in_the_dense_product(kernel: str, dense: bool, m: int) -> None:
    k, n = 70, 40
    rng = np.random.default_rng(m)
    w = sparse_weight(rng, k, n, 0.5)
    x = rng.standard_normal((m, k), dtype=np.float32)
    x[0, 5], x[m - 1, 11] = np.inf, np.nan
    y = _testing.sparse_amx_matmul(x, *_native.pack_bitmap(w, dense), k, n, kernel=kernel)
    with np.errstate(invalid="ignore"):
        expected = to_bf16(x) @ to_bf16(w)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(y), np.isinf(expected))


def test_unknown_and_unavailable_kernels_are_refused() -> None:
    packed = _native.pack_bitmap(np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match=r"no kernel is called 'Abacus', expected one of: .*scalar"):
        _testing.sparse_amx_matmul(np.ones((1, 2), np.float32), *packed, 2, 2, kernel="Abacus")
