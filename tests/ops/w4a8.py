"""4-bit weights in groups, and a numpy oracle of their product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ortolan import _native, _testing

from .single_node import U

# Below this, float32 products lose bits.
SMALLEST = 1.2e-38


def quantize_groups(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """q int64 [m, k] and s float32 [m, groups]; s is NaN and q zero for groups that are not finite."""
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
    """q [k, n] 0 … 15, scales [groups, n] of float32 or float16, zero_points [groups, n] or None."""

    q: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None
    group: int

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
        scale: float = 1.0,
    ) -> GroupLayer:
        shape = (-(-k // group), n)
        scales = (rng.random(shape) + 0.1) * rng.choice([-1, 1], shape) * scale
        zeros = rng.integers(0, 16, shape, dtype=np.uint8) if zero_points else None
        return cls(
            rng.integers(0, 16, (k, n), dtype=np.uint8), scales.astype(np.float16 if half else np.float32), zeros, group
        )

    @property
    def packed_scales(self) -> np.ndarray:
        """As the kernel takes them: float32, or the bits of float16."""
        return _native.pack_group_rows(self.scales.view(np.uint16) if self.scales.itemsize == 2 else self.scales)

    @property
    def packed_zero_points(self) -> np.ndarray | None:
        return None if self.zero_points is None else _native.pack_group_rows(self.zero_points)

    def multiply(self, x: np.ndarray, bias: np.ndarray | None = None, kernel: str | None = None) -> np.ndarray:
        k, n = self.q.shape
        return _testing.w4a8_matmul(
            x,
            _native.pack_int4_group(self.q),
            self.packed_scales,
            self.group,
            k,
            n,
            zero_points=self.packed_zero_points,
            bias=bias,
            kernel=kernel,
        )

    def matrix(self) -> np.ndarray:
        """W as float64 [k, n]."""

        def of_inputs(rows: np.ndarray) -> np.ndarray:
            return np.repeat(rows, self.group, axis=0)[: len(self.q)].astype(np.float64)

        zeros = 8.0 if self.zero_points is None else of_inputs(self.zero_points)
        return (self.q - zeros) * of_inputs(self.scales)

    def check(self, y: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None, *, float_sums: bool = False) -> None:
        """y is the product of the quantized rows, and of x itself, within the bounds of the contract.

        float_sums: the inner sums may be float32 ones in any order, as in the ONNX function.
        """
        q, s = quantize_groups(x, self.group)
        k, n = self.q.shape
        w = self.matrix()
        added = np.zeros(n) if bias is None else bias.astype(np.float64)
        exact = np.zeros((len(x), n)) + added
        magnitude, steps = np.zeros((len(x), n)), np.zeros((len(x), n))
        for g in range(s.shape[1]):
            part = slice(g * self.group, min(k, (g + 1) * self.group))
            product = s[:, g : g + 1].astype(np.float64) * (q[:, part] @ w[part])
            exact += product
            terms = s[:, g : g + 1].astype(np.float64) * (np.abs(q[:, part]) @ np.abs(w[part]))
            magnitude += terms if float_sums else np.abs(product)
            steps += s[:, g : g + 1].astype(np.float64) / 2 * (1 + 2.0**-14) * np.abs(w[part]).sum(axis=0)
        count = k + 8 if float_sums else s.shape[1] + 4
        rounding = count * U * (magnitude + (np.abs(added) if float_sums else 0)) + U * np.abs(exact) * 1.01
        rounding += SMALLEST * (1 + 15 * k)
        rows = np.isfinite(s).all(axis=1)
        assert y.shape == exact.shape and y.dtype == np.float32
        assert np.isnan(y[~rows]).all()
        assert np.all(np.abs(y - exact)[rows] <= rounding[rows]), np.max((np.abs(y - exact) - rounding)[rows])
        ideal = x.astype(np.float64)[rows] @ w + added
        assert np.all(np.abs(y[rows] - ideal) <= (steps + rounding)[rows])


def runnable_kernels() -> list[str]:
    """Names of the table's rows that this CPU can run."""
    return [row["name"] for row in _testing.w4a8_matmul_kernels() if row["runs_here"]]
