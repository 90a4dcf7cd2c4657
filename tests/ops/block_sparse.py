"""int8 weights in blocks of 4 outputs x 1 input, and the expected product in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ortolan import _native, _testing

from .single_node import U

# Below this, float32 products lose bits.
SMALLEST = 1.2e-38


def quantize_tokens(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return q - z, int64 [m, k], and s, float32 [m, 1]. Rows with Inf or NaN have s = NaN and q - z = 0."""
    finite = np.isfinite(x).all(axis=1, keepdims=True)
    x = np.where(finite, x, np.float32(0))
    least = np.minimum(x.min(axis=1, keepdims=True), np.float32(0))
    most = np.maximum(x.max(axis=1, keepdims=True), np.float32(0))
    half = np.maximum(most * np.float32(0.5) - least * np.float32(0.5), np.float32(2.0**-100))
    factor = np.float32(127.5) / half
    zero = np.rint(-least * factor).astype(np.int64)
    q = np.minimum(np.rint(x * factor).astype(np.int64) + zero, 255)
    assert q.min() >= 0 and zero.max() <= 255
    return q - zero, np.where(finite, half / np.float32(127.5), np.float32(np.nan))


def random_blocks(rng: np.random.Generator, k: int, n: int, sparsity: float) -> np.ndarray:
    """Return int8 [k, n] with a fraction of about `sparsity` zero blocks; other weights may be zero too."""
    q = rng.integers(-128, 128, (k, n), dtype=np.int8)
    kept = rng.random((k, -(-n // 4))) >= sparsity
    q[~np.repeat(kept, 4, axis=1)[:, :n]] = 0
    return q


@dataclass(frozen=True)
class BlockSparseLayer:
    """A linear layer with block-sparse weights q, int8 [k, n], and scales, float32 [n]."""

    q: np.ndarray
    scales: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, k: int, n: int, sparsity: float, scale: float = 1.0) -> BlockSparseLayer:
        scales = (rng.random(n) + 0.1) * rng.choice([-1, 1], n) * scale
        return cls(random_blocks(rng, k, n, sparsity), scales.astype(np.float32))

    def multiply(self, x: np.ndarray, bias: np.ndarray | None = None, kernel: str | None = None) -> np.ndarray:
        packed = _native.pack_block_sparse(self.q)
        return _testing.vnni_spmm(x, *packed, self.scales, *self.q.shape, bias=bias, kernel=kernel)

    def check(self, y: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None, *, float_sums: bool = False) -> None:
        """Check y against x W and against the product of the quantized rows, within the documented bounds.

        float_sums: the integer sums may be float32 sums in any order, as in the ONNX function.
        """
        q, s = quantize_tokens(x)
        rows = np.isfinite(s[:, 0])
        sums = q @ self.q.astype(np.int64)
        added = 0.0 if bias is None else bias.astype(np.float64)
        if bias is None and not float_sums:  # one product and one scaling in fixed order: equal bits everywhere
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                expected = sums.astype(np.float32) * (s * self.scales)
            np.testing.assert_array_equal(y, expected)
        s64, w = s.astype(np.float64), self.q * self.scales.astype(np.float64)
        exact = s64 * sums * self.scales + added
        magnitude = np.abs(q) @ np.abs(self.q.astype(np.int64)) if float_sums else np.abs(sums)
        count = len(self.q) + 8 if float_sums else 4
        rounding = count * U * (np.abs(s64 * magnitude * self.scales) + (np.abs(added) if float_sums else 0))
        rounding = rounding + U * np.abs(exact) * 1.01 + SMALLEST * (1 + np.abs(self.q.astype(np.int64)).sum(axis=0))
        assert y.shape == exact.shape and y.dtype == np.float32
        assert np.isnan(y[~rows]).all()
        assert np.all(np.abs(y - exact)[rows] <= rounding[rows])
        steps = s64 / 2 * (1 + 2.0**-14) * np.abs(w).sum(axis=0) + rounding
        ideal = x.astype(np.float64)[rows] @ w + added
        assert np.all(np.abs(y[rows] - ideal) <= steps[rows])


@dataclass(frozen=True)
class Range:
    """An 8-bit quantization range: q in 0 to 255 represents scale (q - zero_point)."""

    scale: float
    zero_point: int

    @property
    def scale64(self) -> float:
        """Return the scale rounded to float32, as in kernels."""
        return float(np.float32(self.scale))

    def quantize(self, x: np.ndarray) -> np.ndarray:
        """Return uint8 q for finite x."""
        steps = np.clip(x * (np.float32(1) / np.float32(self.scale)), -1024, 1024)
        return np.clip(np.rint(steps) + self.zero_point, 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class HiddenLayer:
    """A hidden layer: its output is quantized to `table_x`, then a table maps it to 8-bit values of range `table_y`."""

    layer: BlockSparseLayer
    bias: np.ndarray | None
    x: Range
    table_x: Range
    table_y: Range
    table: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, k: int, n: int, sparsity: float) -> HiddenLayer:
        layer = BlockSparseLayer.random(rng, k, n, sparsity)
        x, table_y = (Range(float(rng.random() / 50 + 0.01), int(rng.integers(100, 150))) for _ in range(2))
        # Small enough that some sums are clipped.
        table_x = Range(float(np.sqrt(k) * 0.5 + 0.1), int(rng.integers(100, 150)))
        table = rng.integers(0, 256, 256, dtype=np.uint8)
        return cls(layer, rng.standard_normal(n, dtype=np.float32), x, table_x, table_y, table)

    def table_indices(self, x: np.ndarray, *, float_sums: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and the highest possible table index of each output; they differ near rounding ties.

        float_sums: the integer sums may be float32 sums in any order.
        """
        q = self.x.quantize(x).astype(np.int64) - self.x.zero_point
        product = q @ self.layer.q.astype(np.int64) * self.x.scale64 * self.layer.scales
        bias = np.zeros(len(self.layer.scales)) if self.bias is None else self.bias.astype(np.float64)
        steps = (product + bias) / self.table_x.scale64
        magnitude, count = np.abs(product), 8
        if float_sums:
            weights = np.abs(self.layer.q.astype(np.int64))
            magnitude, count = np.abs(q) @ weights * self.x.scale64 * np.abs(self.layer.scales), len(weights) + 8
        slack = count * U * (magnitude + np.abs(bias)) / self.table_x.scale64
        zero_point = self.table_x.zero_point
        low, high = (np.clip(np.rint(steps + sign * slack) + zero_point, 0, 255).astype(int) for sign in (-1, 1))
        return low, high

    def run(self, x: np.ndarray, kernel: str | None = None) -> np.ndarray:
        """Return the hidden layer's output from the kernel, as float32."""
        return _testing.vnni_spmm_hidden(
            x,
            self.x.scale,
            self.x.zero_point,
            *_native.pack_block_sparse(self.layer.q),
            self.layer.scales,
            *self.layer.q.shape,
            self.bias,
            self.table_x.scale,
            self.table_x.zero_point,
            self.table_y.scale,
            self.table_y.zero_point,
            self.table,
            kernel,
        )


def runnable_kernels() -> list[str]:
    """Return the names of the kernels that this CPU can run."""
    return list(dict.fromkeys(row["name"] for row in _testing.vnni_spmm_kernels() if row["runs_here"]))
