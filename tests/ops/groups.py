"""4-bit and 8-bit weights in groups, and the expected product in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ortolan import _native, _testing

from .single_node import U

# Below this, float32 products lose bits.
SMALLEST = 1.2e-38


def quantize_groups(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return q, int64 [m, k], and s, float32 [m, groups]. Groups with Inf or NaN have s = NaN and q = 0."""
    m, k = x.shape
    groups = -(-k // group)
    padded = np.zeros((m, groups * group), np.float32)
    padded[:, :k] = x
    parts = padded.reshape(m, groups, group)
    finite = np.isfinite(parts).all(axis=2, keepdims=True)
    parts = np.where(finite, parts, np.float32(0))
    largest = np.maximum(np.abs(parts).max(axis=2, keepdims=True), np.float32(2.0**-100))
    q = np.rint(parts * (np.float32(127) / largest)).astype(np.int64).reshape(m, groups * group)[:, :k]
    return q, np.where(finite, largest / np.float32(127), np.float32(np.nan))[:, :, 0]


@dataclass(frozen=True)
class GroupLayer:
    """A random linear layer: q [k, n], uint8 0 to 15 or int8; scales [groups, n], float32 or float16.

    At most one of zero_points [groups, n] and minimums [groups, n] (typed like scales) is set. A zero point is its
    stored integer divided by `steps`, which is 1 or 16.
    """

    q: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None
    group: int
    minimums: np.ndarray | None = None
    steps: int = 1

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        k: int,
        n: int,
        group: int,
        *,
        half: bool = False,
        zero_points: bool = True,
        minimums: bool = False,
        fractions: bool = False,
        bits: int = 4,
        scale: float = 1.0,
    ) -> GroupLayer:
        """Return a random layer.

        fractions: zero points in steps of 1/16; only for 4 bits, like minimums.
        """
        shape = (-(-k // group), n)
        scales = (rng.random(shape) + 0.1) * rng.choice([-1, 1], shape) * scale
        dtype = np.float16 if half else np.float32
        if bits == 8:
            return cls(rng.integers(-128, 128, (k, n)).astype(np.int8), scales.astype(dtype), None, group)
        if fractions:
            zeros = rng.integers(0, 256, shape, dtype=np.uint8)
            return cls(rng.integers(0, 16, (k, n), dtype=np.uint8), scales.astype(dtype), zeros, group, steps=16)
        zeros = rng.integers(0, 16, shape, dtype=np.uint8) if zero_points and not minimums else None
        lows = (rng.uniform(-15, 15, shape) * scale).astype(dtype) if minimums else None
        return cls(rng.integers(0, 16, (k, n), dtype=np.uint8), scales.astype(dtype), zeros, group, lows)

    @property
    def bits(self) -> int:
        return 8 if self.q.dtype == np.int8 else 4

    @property
    def packed_weights(self) -> np.ndarray:
        return _native.pack_int8_group(self.q) if self.bits == 8 else _native.pack_int4_group(self.q)

    @property
    def packed_scales(self) -> np.ndarray:
        """Return the packed scales that the kernel reads: float32, or the bits of float16."""
        return _packed(self.scales)

    @property
    def packed_minimums(self) -> np.ndarray | None:
        return None if self.minimums is None else _packed(self.minimums)

    @property
    def packed_zero_points(self) -> np.ndarray | None:
        return None if self.zero_points is None else _native.pack_group_rows(self.zero_points)

    def multiply(self, x: np.ndarray, bias: np.ndarray | None = None, kernel: str | None = None) -> np.ndarray:
        k, n = self.q.shape
        if self.bits == 8:
            return _testing.w8a8_matmul(x, self.packed_weights, self.packed_scales, self.group, k, n, bias, kernel)
        return _testing.w4a8_matmul(
            x,
            self.packed_weights,
            self.packed_scales,
            self.group,
            k,
            n,
            zero_points=self.packed_zero_points,
            bias=bias,
            kernel=kernel,
            minimums=self.packed_minimums,
            zero_point_steps=self.steps,
        )

    def matrix(self) -> np.ndarray:
        """Return the weight matrix W as float64 [k, n]."""

        if self.minimums is not None:
            return self.q * self._of_inputs(self.scales) + self._of_inputs(self.minimums)
        return self._centered() * self._of_inputs(self.scales)

    def _centered(self) -> np.ndarray:
        if self.bits == 8:
            return self.q.astype(np.float64)
        return self.q - (8.0 if self.zero_points is None else self._of_inputs(self.zero_points) / self.steps)

    def _of_inputs(self, rows: np.ndarray) -> np.ndarray:
        return np.repeat(rows, self.group, axis=0)[: len(self.q)].astype(np.float64)

    def _products(self, q: np.ndarray, g: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return pairs of float factors, [m, inputs] and [inputs, n], whose products make up one group of the layer."""
        part = slice(g * self.group, min(len(self.q), (g + 1) * self.group))
        scales = self.scales[g].astype(np.float64)
        if not self._adds_sums:
            return [(q, self._centered()[part] * scales)]
        if self.minimums is not None:
            added = self.minimums[g] + 8 * scales
        else:
            assert self.zero_points is not None
            added = (8 - self.zero_points[g] / self.steps) * scales
        return [(q, (self.q[part] - 8.0) * scales), (q.sum(axis=1, keepdims=True), added[None])]

    @property
    def _adds_sums(self) -> bool:
        """Return True if a product with the sums of x is added in float."""
        return self.minimums is not None or self.steps != 1

    def check(self, y: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None, *, float_sums: bool = False) -> None:
        """Check y against x W and against the product of the quantized rows, within the documented bounds.

        float_sums: the integer sums may be float32 sums in any order, as in the ONNX function.
        """
        q, s = quantize_groups(x, self.group)
        k, n = self.q.shape
        w = self.matrix()
        added = np.zeros(n) if bias is None else bias.astype(np.float64)
        exact = np.zeros((len(x), n)) + added
        magnitude, steps = np.zeros((len(x), n)), np.zeros((len(x), n))
        for g in range(s.shape[1]):
            part = slice(g * self.group, min(k, (g + 1) * self.group))
            of_x = s[:, g : g + 1].astype(np.float64)
            exact += of_x * (q[:, part] @ w[part])
            for a, b in self._products(q[:, part], g):
                magnitude += of_x * (np.abs(a) @ np.abs(b) if float_sums else np.abs(a @ b))
            steps += of_x / 2 * (1 + 2.0**-14) * np.abs(w[part]).sum(axis=0)
        groups = s.shape[1] * (2 if self._adds_sums else 1)
        count = k + 8 if float_sums else groups + 4
        rounding = count * U * (magnitude + (np.abs(added) if float_sums else 0)) + U * np.abs(exact) * 1.01
        rounding += SMALLEST * (1 + 128 * k)
        rows = np.isfinite(s).all(axis=1)
        assert y.shape == exact.shape and y.dtype == np.float32
        assert np.isnan(y[~rows]).all()
        assert np.all(np.abs(y - exact)[rows] <= rounding[rows]), np.max((np.abs(y - exact) - rounding)[rows])
        ideal = x.astype(np.float64)[rows] @ w + added
        assert np.all(np.abs(y[rows] - ideal) <= (steps + rounding)[rows])


def _packed(rows: np.ndarray) -> np.ndarray:
    return _native.pack_group_rows(rows.view(np.uint16) if rows.itemsize == 2 else rows)


def runnable_kernels(bits: int = 4) -> list[str]:
    """Return the names of the kernels that this CPU can run."""
    rows = _testing.w8a8_matmul_kernels() if bits == 8 else _testing.w4a8_matmul_kernels()
    return [row["name"] for row in rows if row["runs_here"]]


def check_many_rows(kernel: str, group: int, **kind: Any) -> None:
    """Check a kernel with more inputs and rows than it processes at once: the result of a row depends only on that row.

    kind: arguments of GroupLayer.random.
    """
    rng = np.random.default_rng(1)
    for m, k, n in ((600, 96, 70), (64, 1100, 50), (272, 1100, 50)):
        layer = GroupLayer.random(rng, k, n, group, **kind)
        x = rng.standard_normal((m, k), dtype=np.float32)
        x[m // 2, k // 3] = np.nan
        y = layer.multiply(x, kernel=kernel)
        layer.check(y, x)
        for rows in (slice(0, 1), slice(5, 21), slice(m - 40, m)):
            np.testing.assert_array_equal(layer.multiply(x[rows], kernel=kernel), y[rows])
