"""Inputs and weights that every NumPy version reproduces: integers from PCG64, times powers of two."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

HUGE = 40  # binary exponent of the largest values; their products and sums stay finite


def generator(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))


def uniform(rng: np.random.Generator, shape: tuple[int, ...], bits: int = 24) -> Floats:
    """Return values from -2 to 2 with `bits` significant bits: 24 fill a float32, 8 a bfloat16, 11 a float16."""
    half = 1 << (bits - 1)
    return np.ldexp(rng.integers(-half, half, shape).astype(np.float32), 2 - bits)


def scales(rng: np.random.Generator, shape: tuple[int, ...], bits: int = 24) -> Floats:
    """Return scales of both signs: most near 2^-6, some zero, some much smaller."""
    numbers = np.ldexp(uniform(rng, shape, bits), -6)
    numbers[rng.integers(0, 37, shape) == 0] = 0
    small = rng.integers(0, 29, shape) == 0
    return np.where(small, np.ldexp(numbers, -8), numbers).astype(np.float32)


def rows_of_x(rng: np.random.Generator, rows: int, k: int) -> Floats:
    """Return float32 [rows, k]. Most of the first 13 rows, and rows 40 and 260, have special values."""
    x = uniform(rng, (rows, k))
    specials = {
        1: 0.0 * x[0],
        2: _with(x[0], k // 2, np.inf),
        3: np.ldexp(x[0], HUGE),
        4: _with(x[0], 0, np.nan),
        5: np.ldexp(x[0], -110),  # below the smallest quantization range
        6: np.ldexp(x[0], -140),  # denormal
        7: _with(np.ldexp(x[0], -10), k - 1, 3.0),  # most values round to zero
        8: _with(rng.integers(-254, 255, k).astype(np.float32) / 2, 0, 127.0),  # rounding ties, because the scale is 1
        9: np.abs(x[0]),
        10: -np.abs(x[0]),
        11: np.full(k, -0.0, np.float32),
        12: _with(x[0], k // 3, -np.inf),
        40: _with(x[0], k - 1, np.nan),
        260: _with(x[0], k - 1, np.inf),
    }
    for row, numbers in specials.items():
        if row < rows:
            x[row] = numbers
    return x


def _with(row: Floats, place: int, number: float) -> Floats:
    row = row.copy()
    row[place] = number
    return row


def sparse_integers(
    rng: np.random.Generator, k: int, n: int, zeros: int, least: int, most: int, outputs: int = 1
) -> NDArray[np.int8]:
    """Return int8 [k, n] from `least` to `most`, with about `zeros` per cent zeros in blocks of `outputs` columns.

    Nonzero values of the first input and of the last output are all `least`.
    """
    q = rng.integers(least, most + 1, (k, n)).astype(np.int8)
    q[0], q[:, -1] = least, least
    zero = rng.integers(0, 100, (k, -(-n // outputs))) < zeros
    q[np.repeat(zero, outputs, axis=1)[:, :n]] = 0
    return q
