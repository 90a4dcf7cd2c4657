"""Test the plan of a linear layer without ONNX Runtime, for every feature set, against its kernels."""

from __future__ import annotations

import numpy as np
import pytest

import ortolan
from ortolan import _native, _testing

from .single_node import assert_same_bits, sparse_weight

ISAS = ortolan.cpu_info()["detected_features"]
RELU = 1
SHAPES = [(1, 64, 64), (3, 37, 1), (4, 33, 17), (5, 70, 40), (16, 100, 100), (300, 40, 70)]
every_isa = pytest.mark.parametrize("isa", ISAS)
every_shape = pytest.mark.parametrize(("m", "k", "n"), SHAPES)


def best_of(kernels: list[_testing.KernelInfo], isa: str, m: int) -> str:
    """Return the best kernel for m rows on a CPU with these features."""
    allowed = ISAS[: ISAS.index(isa) + 1]
    return next(row["name"] for row in kernels if row["name"] in allowed and row.get("least_rows", 1) <= m)


def product(x: np.ndarray, packed: tuple[np.ndarray, ...], n: int, bias: np.ndarray, isa: str) -> np.ndarray:
    """Return the product from one kernel call on one thread."""
    kernel = best_of(_testing.sparse_amx_matmul_kernels(), isa, len(x))
    return _testing.sparse_amx_matmul(x, *packed, x.shape[1], n, bias=bias, kernel=kernel)


def layer(m: int, k: int, n: int) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
    rng = np.random.default_rng(m + k + n)
    x = rng.standard_normal((m, k), dtype=np.float32)
    return x, _native.pack_bitmap(sparse_weight(rng, k, n, 0.6)), rng.standard_normal(n, dtype=np.float32)


@every_isa
@every_shape
@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_make_the_product(isa: str, m: int, k: int, n: int, threads: int) -> None:
    x, packed, bias = layer(m, k, n)
    y = _testing.linear_layer(x, *packed, k, n, bias=bias, isa=isa, threads=threads)
    assert_same_bits(y, product(x, packed, n, bias, isa))


@every_isa
@every_shape
@pytest.mark.parametrize("form", ["row", "same", "column", "one more axis"])
def test_any_residual(isa: str, m: int, k: int, n: int, form: str) -> None:
    x, packed, bias = layer(m, k, n)
    shape = {"row": (n,), "same": (m, n), "column": (m, 1), "one more axis": (2, 1, n)}[form]
    residual = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    if form == "column" and n == 1:
        pytest.skip("the same as y")
    y = _testing.linear_layer(x, *packed, k, n, bias=bias, residual=residual, activation=RELU, isa=isa, threads=2)
    assert_same_bits(y, np.maximum(product(x, packed, n, bias, isa), 0) + residual)


@every_isa
@pytest.mark.parametrize("m", [1, 7, 300])
@pytest.mark.parametrize("columns", [1, 16, 40])
def test_a_gate_times_the_other_half(isa: str, m: int, columns: int) -> None:
    padded = -(-columns // 16) * 16
    x, packed, bias = layer(m, 50, 2 * padded)
    y = _testing.linear_layer(
        x, *packed, 50, 2 * padded, bias=bias, activation=RELU, gated_columns=columns, isa=isa, threads=2
    )
    both = product(x, packed, 2 * padded, bias, isa)
    assert_same_bits(y, np.maximum(both[:, :columns], 0) * both[:, padded : padded + columns])


@every_isa
@every_shape
@pytest.mark.parametrize("residual_rank", [0, 2, 3])
def test_rows_are_normalized_when_they_are_done(isa: str, m: int, k: int, n: int, residual_rank: int) -> None:
    x, packed, bias = layer(m, k, n)
    rng = np.random.default_rng(1)
    weight, norm_bias = rng.standard_normal((2, n), dtype=np.float32)
    residual = rng.standard_normal((3, m, n)[3 - residual_rank :], dtype=np.float32) if residual_rank else None
    y = _testing.linear_layer(
        x, *packed, k, n, bias=bias, residual=residual, norm=(weight, norm_bias, 1e-5), isa=isa, threads=3
    )
    rows = product(x, packed, n, bias, isa)
    if residual is not None:
        rows = rows + residual
    kernel = best_of(_testing.layer_norm_kernels(), isa, m)
    expected = _testing.layer_norm(rows.reshape(-1, n), weight, norm_bias, 1e-5, kernel).reshape(rows.shape)
    assert_same_bits(y, expected)


def test_no_rows() -> None:
    x, packed, bias = layer(1, 30, 20)
    y = _testing.linear_layer(x[:0], *packed, 30, 20, bias=bias, norm=(bias, bias, 0.0), threads=2)
    assert y.shape == (0, 20)
