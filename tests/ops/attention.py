"""Scaled dot-product attention in NumPy, with the error bound of ops/attention/attention.h."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ortolan import _testing

from .single_node import U

Floats = NDArray[np.float32]

LOWEST = np.finfo(np.float32).min
# Maps a kernel to the bits of its matrix operands: 16 or 32.
PRECISION = {row["name"]: row["precision"] for row in _testing.nomad_attention_kernels()}


def runnable_kernels() -> list[str]:
    """Return the names of the kernels that this CPU can run."""
    return [row["name"] for row in _testing.nomad_attention_kernels() if row["runs_here"]]


def scores(
    q: Floats,
    k: Floats,
    scale: float,
    mask: Floats | None = None,
    causal: bool = False,
    softcap: float = 0,
    window: int = 0,
) -> Floats:
    """Return scale q k^T, capped by softcap, plus mask, [..., queries, keys], rounded once to float32."""
    s = scale * (q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2))
    if softcap:
        s = softcap * np.tanh(s / softcap)
    if mask is not None:
        s = s + mask
    if causal:
        queries, keys = s.shape[-2:]
        seen = np.tri(queries, keys, keys - queries, dtype=bool)
        if window:
            seen &= ~np.tri(queries, keys, keys - queries - window, dtype=bool)
        s = np.where(seen, s, -np.inf)
    with np.errstate(over="ignore"):
        return s.astype(np.float32)


def attention(
    q: Floats, k: Floats, v: Floats, scale: float, mask: Floats | None = None, causal: bool = False
) -> NDArray[np.float64]:
    """Return softmax(scale q k^T + mask) v by the plain formula; q, k and v are [..., rows, head_dim]."""
    with np.errstate(invalid="ignore"):
        return probabilities(scores(q, k, scale, mask, causal)) @ v.astype(np.float64)


def probabilities(s: Floats, sinks: Floats | None = None) -> NDArray[np.float64]:
    """Return the softmax of s [heads, queries, keys]. sinks [heads]: a further score of each head."""
    others = np.float64(-np.inf) if sinks is None else sinks.astype(np.float64)[:, None, None]
    with np.errstate(invalid="ignore"):
        most = np.maximum(s.max(-1, keepdims=True), others)
        p = np.exp(s.astype(np.float64) - most)
        return p / (p.sum(-1, keepdims=True) + np.exp(others - most))


def bounded_attention(
    q: Floats,
    k: Floats,
    v: Floats,
    scale: float,
    mask: Floats | None = None,
    causal: bool = False,
    precision: int = 32,
    softcap: float = 0,
    window: int = 0,
    sinks: Floats | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return attention(...) and the documented bound of its error. All inputs except the mask must be finite."""
    s = scores(q, k, scale, mask, causal, softcap, window)
    p = probabilities(s, sinks)
    dots = np.abs(q.astype(np.float64)) @ np.abs(k.astype(np.float64)).swapaxes(-1, -2)
    head_dim, keys = q.shape[-1], k.shape[-2]
    finite = np.where(np.isinf(s), 0, s.astype(np.float64))
    e = (head_dim + 4) * U * abs(scale) * dots + 4 * U * (np.abs(finite) + np.abs(finite.max(-1, keepdims=True)))
    e += 4 * U * softcap
    relative = (keys + 16) * U
    if precision == 16:
        e += 2.0**-7 * abs(scale) * dots
        relative += 2.0**-7
    if sinks is not None:
        e += 8 * U * np.abs(sinks[:, None, None])
    e = np.where(p > 1e-30, e, 0)
    assert e.max() < 0.5, "the error bound is useless here"
    magnitude = np.abs(v.astype(np.float64))
    mean = (p * e).sum(-1, keepdims=True)
    bound = 2 * ((p * (e + mean + relative)) @ magnitude) + keys * 2.0**-125 * magnitude.max(initial=0)
    return p @ v.astype(np.float64), bound


def assert_attention_close(
    y: NDArray[np.floating],
    q: Floats,
    k: Floats,
    v: Floats,
    scale: float,
    mask: Floats | None = None,
    causal: bool = False,
    precision: int = 32,
    softcap: float = 0,
    window: int = 0,
    sinks: Floats | None = None,
) -> None:
    """Check that y equals attention(...) within the documented bound. All inputs except the mask must be finite."""
    expected, bound = bounded_attention(q, k, v, scale, mask, causal, precision, softcap, window, sinks)
    assert y.shape == expected.shape
    error = np.abs(y - expected)
    assert np.all(error <= bound), f"largest error over bound: {np.max(error - bound)}, error {error.max()}"
