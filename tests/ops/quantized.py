"""Sparse quantized weights, and the expected product in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ortolan import _native, _testing

from .single_node import Packed, U, to_bf16

# Below this, float32 products lose bits.
SMALLEST = 1.2e-38


def sparse_integers(rng: np.random.Generator, k: int, n: int, sparsity: float, bits: int) -> np.ndarray:
    """Return an int8 matrix [k, n] of `bits`-bit weights with a fraction of about `sparsity` zeros (all at 1)."""
    most = 2 ** (bits - 1)
    q = rng.integers(-most, most, (k, n), dtype=np.int8)
    q[q == 0] = 1
    q[rng.random((k, n)) < sparsity] = 0
    return q


def quantize_rows(x: np.ndarray, zero_points: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return q, int64 [m, k], and s, float32 [m, 1].

    If zero_points is set, q is minus the zero point of its row. Rows with Inf or NaN have s = NaN and q = 0.
    """
    finite = np.isfinite(x).all(axis=1, keepdims=True)
    x = np.where(finite, x, np.float32(0))
    if zero_points:
        most, least = x.max(axis=1, keepdims=True, initial=0), x.min(axis=1, keepdims=True, initial=0)
        half = np.maximum(most * np.float32(0.5) - least * np.float32(0.5), np.float32(2.0**-100))
        factor = np.float32(127) / half
        q = np.minimum(np.rint(x * factor), 254 - np.rint(-least * factor)).astype(np.int64)
        return q, np.where(finite, half / np.float32(127), np.float32(np.nan))
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(2.0**-100))
    q = np.rint(x * (np.float32(127) / largest)).astype(np.int64)
    return q, np.where(finite, largest / np.float32(127), np.float32(np.nan))


@dataclass(frozen=True)
class Layer:
    """A linear layer with quantized weights and scales [groups, n].

    int8: group is None, and there is one row of scales. int4: scales are bf16 values.
    """

    weights: np.ndarray
    scales: np.ndarray
    group: int | None
    packed: Packed
    zero_points: bool = False  # rows of x are quantized with zero points; int8 only
    weight_zeros: np.ndarray | None = None  # int8 [n], subtracted from the weights; only with zero_points

    @classmethod
    def random(
        cls, rng: np.random.Generator, k: int, n: int, sparsity: float, group: int | None, scale: float = 1.0
    ) -> Layer:
        q = sparse_integers(rng, k, n, sparsity, 8 if group is None else 4)
        shape = (1 if group is None else -(-k // group), n)
        scales = ((rng.random(shape) + 0.1) * rng.choice([-1, 1], shape) * scale).astype(np.float32)
        if group is not None:
            scales = to_bf16(scales)
        return cls(q, scales, group, _native.pack_bitmap_int8(q) if group is None else _native.pack_bitmap_int4(q))

    @classmethod
    def two_four(cls, weights: np.ndarray, scales: np.ndarray, group: int | None) -> Layer:
        """Return a layer of weights that are 2:4 sparse, in 2:4 storage."""
        pack = _native.pack_two_four_int8 if group is None else _native.pack_two_four_int4
        return cls(weights, scales, group, pack(weights))

    def stored_dense(self) -> Layer:
        """Return the same layer in dense storage."""
        pack = _native.pack_bitmap_int8 if self.group is None else _native.pack_bitmap_int4
        return replace(self, packed=pack(self.weights, dense=True))

    def kinds(self) -> list[Layer]:
        """Return the layer and, for int8, two variants for rows of x with zero points.

        The weights of the last variant have zero points too.
        """
        if self.group is not None:
            return [self]
        weight_zeros = np.resize(np.array([-128, 127, 0, 1, -7], np.int8), self.weights.shape[1])
        with_zeros = replace(self, zero_points=True, weight_zeros=weight_zeros)
        return [self, replace(self, zero_points=True), with_zeros]

    def multiply(self, x: np.ndarray, bias: np.ndarray | None = None, kernel: str | None = None) -> np.ndarray:
        return self.multiply_packed(x, self.packed, self.packed_scales(), bias, kernel)

    def packed_scales(self) -> np.ndarray:
        if self.group is None:
            return _native.pack_scales(self.scales, bf16=False)
        return _native.pack_scales(self.scales, bf16=True)

    def packed_zeros(self) -> np.ndarray | None:
        if self.weight_zeros is None:
            return None
        return _native.pack_scales(self.weight_zeros[None], bf16=False).astype(np.int8)

    def multiply_packed(
        self,
        x: np.ndarray,
        packed: Packed,
        scales: np.ndarray,
        bias: np.ndarray | None = None,
        kernel: str | None = None,
    ) -> np.ndarray:
        k, n = self.weights.shape
        if self.group is None:
            return _testing.sparse_amx_matmul_int8(
                x, *packed, scales, k, n, bias=bias, kernel=kernel,
                x_zero_points=self.zero_points, zero_points=self.packed_zeros(),
            )  # fmt: skip
        return _testing.sparse_amx_matmul_int4(x, *packed, scales, self.group, k, n, bias=bias, kernel=kernel)

    def dense(self) -> np.ndarray:
        """Return the weights as float64 [k, n]."""
        scales = self.scales if self.group is None else np.repeat(self.scales, self.group, axis=0)
        return self.centred() * scales[: self.weights.shape[0]].astype(np.float64)

    def centred(self) -> np.ndarray:
        """Return the weights minus their zero points, int64 [k, n]."""
        return self.weights.astype(np.int64) - (0 if self.weight_zeros is None else self.weight_zeros)

    def expect(self, x: np.ndarray, bias: np.ndarray | None = None) -> Expected:
        """Return the expected products of the quantized rows and of x, with the documented bounds."""
        q, s = quantize_rows(x, self.zero_points)
        s64, added = s.astype(np.float64), 0.0 if bias is None else bias.astype(np.float64)
        dense, whole = self.dense(), self.centred().astype(np.float64)
        exact = s64 * (q @ dense) + added
        bits = None
        if self.group is None:
            sums = q.astype(np.float64) @ whole  # exact, because the integers are below 2^53
            if bias is None:
                with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                    bits = sums.astype(np.float32) * (s * self.scales)
            rounding = 4 * U * np.abs(s64 * sums * self.scales)
        else:
            magnitude = np.zeros(exact.shape)
            for g in range(self.scales.shape[0]):
                part = slice(g * self.group, (g + 1) * self.group)
                magnitude += np.abs(q[:, part] @ dense[part])
            rounding = (self.scales.shape[0] + 4) * U * s64 * magnitude
        rounding = rounding + U * np.abs(exact) * 1.01 + SMALLEST * (1 + np.abs(whole).sum(axis=0))
        theory = s64 / 2 * (1 + 2.0**-14) * np.abs(dense).sum(axis=0) + rounding
        rows = np.isfinite(s[:, 0])
        ideal = np.where(rows[:, None], x, 0).astype(np.float64) @ dense + added
        return Expected(exact, rounding, ideal, theory, rows, bits)

    def check(self, y: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None) -> None:
        self.expect(x, bias).check(y, len(x))


@dataclass(frozen=True)
class Expected:
    """Expected outputs, float64 [m, n]. `rows` [m] marks the rows with finite activations."""

    exact: np.ndarray
    rounding: np.ndarray
    ideal: np.ndarray  # the product with unquantized activations
    theory: np.ndarray  # the largest difference of the product from `ideal`
    rows: np.ndarray
    bits: np.ndarray | None  # float32; None if the order of the additions may differ between kernels

    def check(self, y: np.ndarray, m: int) -> None:
        """Check the output y for the first m rows."""
        rows = self.rows[:m]
        assert y.shape == self.exact[:m].shape and y.dtype == np.float32
        if self.bits is not None:
            np.testing.assert_array_equal(y, self.bits[:m])
        assert np.isnan(y[~rows]).all()
        assert np.all(np.abs(y - self.exact[:m])[rows] <= self.rounding[:m][rows])
        assert np.all(np.abs(y - self.ideal[:m])[rows] <= self.theory[:m][rows])


def runnable_int8_kernels() -> list[str]:
    """Return the names of the int8 kernels that this CPU can run."""
    return [row["name"] for row in _testing.sparse_amx_matmul_int8_kernels() if row["runs_here"]]
