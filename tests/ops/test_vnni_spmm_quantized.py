"""VNNISpMM between quantized layers: u8 token blocks in, float32 or u8 token blocks out, against a numpy oracle."""

from __future__ import annotations

import numpy as np
import pytest

from ortolan import _native

from .block_sparse import BlockSparseLayer
from .single_node import U

KERNELS = [row["name"] for row in _native.vnni_spmm_quantized_kernels() if row["runs_here"]]
COUNTS = (1, 15, 16, 17, 32, 33, 48, 49, 64, 65, 81, 130, 200)


def widths(m: int) -> list[int]:
    """Of the blocks of m tokens."""
    if m <= 0:
        return []
    width = 64 if m > 48 else 32 if m > 16 else 16
    return [width, *widths(m - width)]


def places(width: int) -> np.ndarray:
    """The tokens of a u8 block in the order in which they stand there."""
    tokens = np.arange(width)
    return tokens.reshape(4, 4, 4).transpose(1, 0, 2).ravel() if width == 64 else tokens


def to_blocks(q: np.ndarray, filling: int = 0) -> np.ndarray:
    """q u8 [m, c] as token blocks."""
    parts, first = [], 0
    for width in widths(len(q)):
        block = q[first : first + width]
        padded = np.pad(block, ((0, width - len(block)), (0, 0)), constant_values=filling)
        parts.append(padded[places(width)].T.ravel())
        first += width
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def from_blocks(blocks: np.ndarray, m: int, c: int) -> np.ndarray:
    """Blocks of u8, or of int32 sums, as [m, c]."""
    parts, first = [], 0
    for width in widths(m):
        part = blocks[first * c : (first + width) * c].reshape(c, width).T
        if blocks.dtype == np.uint8:
            part = part[np.argsort(places(width))]
        parts.append(part)
        first += width
    return np.concatenate(parts)[:m]


def run(x: np.ndarray, *arguments, **named) -> np.ndarray:
    product = _native.QuantizedSpmm(*arguments, **named)
    y = product.new_output()
    product.run([product], x, y)
    return y


@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_are_quantized(kernel: str) -> None:
    rng = np.random.default_rng(1)
    for m in COUNTS:
        for k in (1, 3, 62, 64, 67, 200):
            x = (rng.standard_normal((m, k)) * 2).astype(np.float32)
            x[0, 0], x[-1, -1] = 1e30, -1e30
            expected = np.clip(np.rint(x * (np.float32(1) / np.float32(0.02))) + 100, 0, 255).astype(np.uint8)
            blocks = _native.quantize_tokens(x, 0.02, 100, kernel)
            assert blocks.shape == (sum(widths(m)) * k,)
            assert blocks.ctypes.data % 64 == 0
            np.testing.assert_array_equal(from_blocks(blocks, m, k), expected)


def exact(layer: BlockSparseLayer, q: np.ndarray, zero: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums of products, and of their magnitudes with everything that float32 rounds."""
    weights = layer.q.astype(np.int64)
    return (q.astype(np.int64) - zero) @ weights, np.abs(q.astype(np.int64) - zero) @ np.abs(weights)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sparsity", [0.0, 0.8, 1.0])
def test_floats_out(kernel: str, sparsity: float) -> None:
    rng = np.random.default_rng(2)
    for m in COUNTS:
        for k, n in ((1, 1), (65, 18), (130, 70)):
            layer = BlockSparseLayer.random(rng, k, n, sparsity)
            bias = rng.standard_normal(n, dtype=np.float32)
            q, zero = rng.integers(0, 256, (m, k), dtype=np.uint8), int(rng.integers(256))
            packed = _native.pack_block_sparse(layer.q)
            y = run(to_blocks(q, 77), m, 0.03, zero, *packed, layer.scales, k, n, bias=bias, kernel=kernel)
            sums, _ = exact(layer, q, zero)
            product = sums * float(np.float32(0.03)) * layer.scales
            assert y.shape == (m, n) and y.dtype == np.float32
            assert np.all(np.abs(y - (product + bias)) <= 5 * U * (np.abs(product) + np.abs(bias)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [1024, 1020])
def test_floats_out_at_any_address(kernel: str, n: int) -> None:
    """Rows 4096 bytes apart, and not; aligned to a line of the cache, and not."""
    rng = np.random.default_rng(6)
    m, k = 70, 24
    layer = BlockSparseLayer.random(rng, k, n, 0.5)
    x = to_blocks(rng.integers(0, 256, (m, k), dtype=np.uint8))
    packed = _native.pack_block_sparse(layer.q)
    product = _native.QuantizedSpmm(m, 0.03, 100, *packed, layer.scales, k, n, kernel=kernel)
    expected = product.new_output()
    assert expected.ctypes.data % 64 == 0
    product.run([product], x, expected)
    around = np.full(m * n + 32, 7.0, np.float32)
    first = -(around.ctypes.data // 4) % 16 + 4  # 16 bytes behind a line's start
    y = around[first : first + m * n].reshape(m, n)
    product.run([product], x, y)
    np.testing.assert_array_equal(y, expected)
    assert np.all(around[:first] == 7) and np.all(around[first + m * n :] == 7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_sums_out(kernel: str) -> None:
    rng = np.random.default_rng(5)
    for m in COUNTS:
        for k, n in ((1, 1), (65, 18), (130, 70)):
            layer = BlockSparseLayer.random(rng, k, n, 0.5)
            q, zero = rng.integers(0, 256, (m, k), dtype=np.uint8), int(rng.integers(256))
            packed = _native.pack_block_sparse(layer.q)
            blocks = run(to_blocks(q, 77), m, 1.0, zero, *packed, layer.scales, k, n, sums_only=True, kernel=kernel)
            assert blocks.dtype == np.int32
            np.testing.assert_array_equal(from_blocks(blocks, m, n), exact(layer, q, zero)[0])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("with_table", [False, True])
def test_bytes_out(kernel: str, with_table: bool) -> None:
    rng = np.random.default_rng(3)
    table = rng.permutation(256).astype(np.uint8) if with_table else None
    for m in COUNTS:
        for k, n in ((1, 1), (65, 18), (130, 70)):
            layer = BlockSparseLayer.random(rng, k, n, 0.5)
            bias = rng.standard_normal(n, dtype=np.float32)
            q, zero = rng.integers(0, 256, (m, k), dtype=np.uint8), int(rng.integers(256))
            sums, _ = exact(layer, q, zero)
            product = sums * float(np.float32(0.03)) * layer.scales
            y_scale = np.float32(max(np.abs(product).max() / 100, 0.1))  # some are cut off
            y_zero = int(rng.integers(100, 150))
            packed = _native.pack_block_sparse(layer.q)
            blocks = run(
                to_blocks(q, 77),
                m,
                0.03,
                zero,
                *packed,
                layer.scales,
                k,
                n,
                bias=bias,
                y_scale=float(y_scale),
                y_zero_point=y_zero,
                table=table,
                kernel=kernel,
            )
            assert blocks.dtype == np.uint8 and blocks.shape == (sum(widths(m)) * n,)
            y = from_blocks(blocks, m, n)
            steps = (product + bias) / float(y_scale)
            slack = 8 * U * (np.abs(product) + np.abs(bias)) / float(y_scale)
            low, high = (np.clip(np.rint(steps + sign * slack) + y_zero, 0, 255).astype(int) for sign in (-1, 1))
            assert np.all(high - low <= 1)
            of_table = np.arange(256, dtype=np.uint8) if table is None else table
            assert np.all((y == of_table[low]) | (y == of_table[high]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_byte_through_the_table(kernel: str) -> None:
    """An identity weight: each input is looked up."""
    q = np.zeros((5, 5), np.int8)
    np.fill_diagonal(q, 1)
    packed = _native.pack_block_sparse(q)
    x = np.arange(256, dtype=np.uint8)[:, None].repeat(5, axis=1)
    table = np.random.default_rng(4).integers(0, 256, 256, dtype=np.uint8)
    for m in (256, 250, 200):
        blocks = run(
            to_blocks(x[:m]), m, 0.5, 0, *packed, np.ones(5, np.float32), 5, 5, y_scale=0.5, table=table, kernel=kernel
        )
        np.testing.assert_array_equal(from_blocks(blocks, m, 5), table[x[:m]])


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_beyond_the_range_are_cut_off(kernel: str) -> None:
    packed = _native.pack_block_sparse(np.full((40, 4), 127, np.int8))
    scales = np.array([1e30, -1e30, 1e3, -1e3], np.float32)
    blocks = run(
        to_blocks(np.full((20, 40), 255, np.uint8)), 20, 1.0, 0, *packed, scales, 40, 4, y_scale=1e-3, y_zero_point=7,
        kernel=kernel,
    )  # fmt: skip
    np.testing.assert_array_equal(from_blocks(blocks, 20, 4), np.tile(np.array([255, 0, 255, 0], np.uint8), (20, 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": 17}, "x of 160 bytes is not token blocks of 17 x 10"),
        ({"m": -1}, "m is -1, expected 0 to"),
        ({"x_zero_point": 256}, "x_zero_point is 256, expected 0 to 255"),
        ({"y_scale": 0.0}, "y_scale is 0, expected more than 0"),
        ({"table": np.zeros(256, np.uint8)}, "table must have 256 elements, and needs y_scale"),
        ({"table": np.zeros(255, np.uint8), "y_scale": 1.0}, "table must have 256 elements"),
        ({"bias": np.zeros(3, np.float32)}, r"bias must be \[8\]"),
    ],
)
def test_wrong_arguments_are_refused(change, message) -> None:
    values, indices, starts = _native.pack_block_sparse(np.ones((10, 8), np.int8))
    given = {
        "x": np.zeros(160, np.uint8),
        "m": 3,
        "x_scale": 1.0,
        "x_zero_point": 0,
        "values": values,
        "indices": indices,
        "starts": starts,
        "scales": np.ones(8, np.float32),
        "k": 10,
        "n": 8,
    }
    assert run(**given).shape == (3, 8)
    with pytest.raises(ValueError, match=message):
        run(**given | change)


def test_output_of_another_kind_is_refused() -> None:
    packed = _native.pack_block_sparse(np.ones((10, 8), np.int8))
    product = _native.QuantizedSpmm(3, 1.0, 0, *packed, np.ones(8, np.float32), 10, 8, sums_only=True)
    x, y = np.zeros(160, np.uint8), product.new_output()
    product.run([product, product], x, y)
    for wrong in (y[:-1], y.astype(np.float32), y[::-1]):
        with pytest.raises(ValueError, match="y must be an array as new_output makes it"):
            product.run([product], x, wrong)
