"""Cases of LutPostOp and MaskedMatMul."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from onnx import helper

from . import numbers
from .bounds import finite, float_product
from .case import Arrays, Case, one_node

LUT_INDICES = (np.uint8, np.int8, np.uint16, np.int16)
LUT_ENTRIES = (*LUT_INDICES, np.float32)


def lut_cases() -> Iterator[Case]:
    for x_type in LUT_INDICES:
        for entry_type in LUT_ENTRIES:
            name = f"LutPostOp {np.dtype(x_type)} to {np.dtype(entry_type)}"
            rng = numbers.generator(name)
            size = 256 ** np.dtype(x_type).itemsize
            table = rng.integers(0, 2**32, size, np.uint32)
            if entry_type == np.float32:
                table[:4] = np.array([np.inf, -np.inf, np.nan, -0.0], np.float32).view(np.uint32)
                entries = table.view(np.float32)
            else:
                entries = table.astype(entry_type)
            x = rng.integers(0, size, (700, 71)).astype(x_type)
            x[1] = np.resize(np.arange(size), 71).astype(x_type)
            types = {"y": helper.np_dtype_to_tensor_dtype(np.dtype(entry_type))}
            model = one_node("LutPostOp", ["x", "table"], {"table": entries}, {"x": x}, types, format_version=1)
            yield Case(name, model, [{"x": x}], rows=(1, 2, 17, 700))


# Columns: k, n, zeros of A, zeros of B. Zeros are (per cent, rows, columns): the zeros come in tiles of rows x columns.
PATTERNS = {
    "dense": (150, 70, (0, 1, 1), (0, 1, 1)),
    "blocks": (130, 200, (0, 1, 1), (80, 1, 16)),
    "two-sided": (130, 200, (85, 8, 1), (80, 1, 16)),
    "inputs": (200, 97, (90, 1000, 1), (0, 1, 1)),
    "numbers": (200, 300, (85, 1, 1), (0, 1, 1)),
}


def masked_matmul_cases() -> Iterator[Case]:
    for pattern, (k, n, zeros_of_a, zeros_of_b) in PATTERNS.items():
        for constant in (False, True):
            name = f"MaskedMatMul {pattern}, B {'constant' if constant else 'fed'}"
            rng = numbers.generator(name)
            a = _with_zeros(rng, numbers.uniform(rng, (300, k)), *zeros_of_a)
            b = _with_zeros(rng, numbers.uniform(rng, (k, n)), *zeros_of_b)
            yield _masked_matmul(name, a, {"B": b}, b, constant)
    rng = numbers.generator("MaskedMatMul")
    a, b = numbers.rows_of_x(rng, 300, 130), numbers.uniform(rng, (130, 97))
    yield _masked_matmul("MaskedMatMul not finite", _with_zeros(rng, a, 60, 1, 1), {"B": b}, b, True)
    a = _with_zeros(rng, numbers.rows_of_x(rng, 300, 150), 70, 1, 1)
    w = numbers.uniform(rng, (150, 200)).astype(ml_dtypes.bfloat16)
    yield _masked_matmul("MaskedMatMul bf16", a, {"B": w}, w.astype(np.float32), True)
    q = numbers.sparse_integers(rng, 150, 200, 0, -128, 127)
    for group in (0, 32):
        scales = np.abs(numbers.scales(rng, (-(-150 // group) if group else 1, 200)))
        w = q.astype(np.float32) * np.repeat(scales, group or 150, axis=0)[:150]
        yield _masked_matmul(f"MaskedMatMul int8 g{group}", a, {"B": q, "b_scale": scales}, w, True, group)


def _masked_matmul(name: str, a: np.ndarray, given: Arrays, b: np.ndarray, constant: bool, group: int = 0) -> Case:
    feeds: Arrays = {"A": a}
    constants = {"b_scale": np.ones((1, 1), np.float32), "mask": np.ones(1, np.bool_)}
    (constants if constant else feeds).update(given)
    inputs = ["A", "B", "b_scale", "mask", "mask"]
    thresholds = {"a_threshold": 0.0, "b_threshold": 0.0}
    rest = {"format_version": 1, "group_size": group, "b_finite": 0}
    model = one_node("MaskedMatMul", inputs, constants, feeds, **thresholds, **rest)
    return Case(
        name,
        model,
        [feeds],
        frozenset(),
        lambda: float_product(finite(a), b, roundings=16).error,
        (1, 5, 17, 70, 300),
        ("A",),
    )


def _with_zeros(rng: np.random.Generator, x: np.ndarray, zeros: int, rows: int, columns: int) -> np.ndarray:
    """Set about `zeros` per cent of the finite values of x to zero, in tiles of rows x columns."""
    tiles = rng.integers(0, 100, (-(-x.shape[0] // rows), -(-x.shape[1] // columns))) < zeros
    zero = np.repeat(np.repeat(tiles, rows, axis=0), columns, axis=1)[: x.shape[0], : x.shape[1]]
    x[zero & np.isfinite(x)] = 0
    return x


def cases() -> Iterator[Case]:
    yield from lut_cases()
    yield from masked_matmul_cases()
