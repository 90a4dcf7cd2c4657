"""Call the vector functions of each SIMD target with NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from ortolan import _testing

LANES = _testing.simd_lanes()
each_target = pytest.mark.parametrize("target", LANES)


def has(target: str, function: str) -> bool:
    return _testing.simd(target, function, number=1) is not None


def targets_with(*functions: str) -> pytest.MarkDecorator:
    """Parametrize a test with the targets that implement all of these functions."""
    return pytest.mark.parametrize("target", [target for target in LANES if all(has(target, one) for one in functions)])


def each_of(functions: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize a test with each pair of a target and a function that it implements."""
    pairs = [(target, function) for target in LANES for function in functions if has(target, function)]
    return pytest.mark.parametrize(("target", "function"), pairs)


# Values that need special care: NaN, zeros, infinities, denormals, the largest value, halves.
EDGES = np.array(
    [np.nan, 0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 1e-39, 3.4028235e38, -3.4028235e38, 0.5, -1.5, 2.5, 1.0],
    np.float32,
)
UNTOUCHED = 0xEE


def raw(target: str, function: str, *arrays: np.ndarray, number: int = 0) -> np.ndarray:
    """Return the output buffer of a vector function. Bytes that the function did not write are UNTOUCHED."""
    found = _testing.simd(target, function, *arrays, number=number)
    assert found is not None, f"{target} has no {function}"
    return found


def one(target: str, function: str, *arrays: np.ndarray, number: int = 0, dtype: type = np.float32) -> np.ndarray:
    """Return the first register that the function wrote."""
    return raw(target, function, *arrays, number=number).view(dtype)[: LANES[target]]


def each(target: str, function: str, *arrays: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """Return the function's results for arrays of any length, computed one register at a time."""
    lanes, size = LANES[target], len(arrays[0])
    padded = [np.resize(array, -(-size // lanes) * lanes) for array in arrays]
    parts = [
        one(target, function, *(array[i : i + lanes] for array in padded), dtype=dtype)
        for i in range(0, len(padded[0]), lanes)
    ]
    return np.concatenate(parts)[:size]


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays with all pairs of edge values, followed by random values."""
    rng = np.random.default_rng(0)
    a, b = (array.reshape(-1) for array in np.meshgrid(EDGES, EDGES))
    return (
        np.concatenate([a, rng.standard_normal(64, np.float32)]),
        np.concatenate([b, rng.standard_normal(64, np.float32)]),
    )


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Check that two arrays have the same bits; all NaNs count as equal."""
    assert found.dtype == expected.dtype
    both_nan = np.isnan(found) & np.isnan(expected) if found.dtype.kind == "f" else np.zeros(found.shape, bool)
    bits = f"u{found.itemsize}"
    different = (found.view(bits) != expected.view(bits)) & ~both_nan
    assert not different.any(), (found[different], expected[different])


def quietly(function: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return function(*arrays)
