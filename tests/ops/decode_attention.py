"""Attention of one query token over a cache in NumPy, with the error bounds of ops/attention/decode.h."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ortolan import _native, _testing

from .single_node import U, to_bf16

LOG2E = 1.4426950408889634
Doubles = NDArray[np.float64]


def runnable_kernels() -> list[str]:
    """Return the names of the kernels that this CPU can run."""
    return [row["name"] for row in _testing.decode_attention_kernels() if row["runs_here"]]


@dataclass
class Case:
    """Query heads that share one key/value head, and the contents of its caches.

    keys: decoded keys, float32 [tokens, head_dim]. codes, codebook: set if keys are stored as codes. prompt: number of
    leading tokens that are stored in the model (ops/nomad_attention/prompt_cache.h).
    """

    q: NDArray[np.float32]
    scale: float
    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    key_cache: NDArray[np.generic]
    value_cache: NDArray[np.generic]
    codebook: NDArray[np.float32] | None = None
    codes: NDArray[np.uint8] | None = None
    prompt: int = 0
    softcap: float = 0
    sinks: NDArray[np.float32] | None = None  # [heads]

    @property
    def tokens(self) -> int:
        return len(self.keys)

    def partial(self, kernel: str | None, begin: int = 0, end: int | None = None) -> tuple[np.ndarray, ...]:
        """Return max [1, heads], sum [1, heads] and y [1, heads, head_dim] of a token range from the kernel."""
        codebooks = None if self.codebook is None else self.codebook[None]
        return _testing.decode_attention(
            self.q[None], self.scale, self.key_cache[None], self.value_cache[None], codebooks, self.tokens, begin, end,
            softcap=self.softcap, kernel=kernel,
        )  # fmt: skip

    def scores(self, kernel: str | None, begin: int = 0, end: int | None = None) -> NDArray[np.float32]:
        codebooks = None if self.codebook is None else self.codebook[None]
        return _testing.decode_scores(
            self.q[None], self.scale, self.key_cache[None], codebooks, self.tokens, begin, end,
            softcap=self.softcap, kernel=kernel,
        )[0]  # fmt: skip

    def exact_scores(self) -> Doubles:
        scores = self.q.astype(np.float64) @ self.keys.astype(np.float64).T
        prompt = slice(self.prompt)
        scores[:, prompt] = to_bf16(self.q).astype(np.float64) @ self.keys[prompt].astype(np.float64).T
        if self.softcap:
            return LOG2E * self.softcap * np.tanh(self.scale * scores / self.softcap)
        return LOG2E * self.scale * scores

    def score_error(self) -> Doubles:
        """Return the error bound e of the scores, [heads, tokens] or [heads, 1], defined in ops/attention/decode.h."""
        dots = np.abs(self.q.astype(np.float64)) @ np.abs(self.keys.astype(np.float64)).T
        dots[:, : self.prompt] *= 1 + 2.0**-8
        floats = (self.q.shape[1] + 8) * U * abs(LOG2E * self.scale) * dots + 4 * U * LOG2E * self.softcap
        if self.codebook is None:
            return floats
        step, _, largest = self._products()
        parts = len(self.codebook)
        codes = (parts * (step * (0.5 + 2.0**-12) + 2.0**-100) + (2 * parts + 16) * U * largest)[:, None]
        return np.maximum(codes, floats[:, : self.prompt].max(-1, initial=0, keepdims=True))

    def table_scores(self) -> tuple[Doubles, Doubles]:
        """Return scores from the quantized tables, and their tolerance, both [heads, tokens].

        Table entries halfway between two steps may round either way.
        """
        assert self.codebook is not None and self.codes is not None
        step, products, largest = self._products()
        least = products.min(-1, keepdims=True)
        units = (products - least) / np.maximum(step, 1e-300)[:, None, None]
        parts = np.arange(len(self.codebook))
        chosen = np.rint(units)[:, parts, self.codes].sum(-1)  # [heads, tokens]
        ties = (np.abs(units % 1 - 0.5) < 2.0**-10)[:, parts, self.codes].sum(-1)
        scores = least.sum((-1, -2))[:, None] + step[:, None] * chosen
        return scores, step[:, None] * ties + ((2 * len(parts) + 16) * U * largest)[:, None]

    def _products(self) -> tuple[Doubles, Doubles, Doubles]:
        """Return the table step [heads], the entries t [heads, S, 16] and the magnitude bound A [heads] (decode.h)."""
        assert self.codebook is not None
        parts, _, d_sub = self.codebook.shape
        split = LOG2E * self.scale * self.q.astype(np.float64).reshape(len(self.q), parts, d_sub)
        products = np.einsum("hsd,scd->hsc", split, self.codebook.astype(np.float64))
        magnitudes = np.einsum("hsd,scd->hsc", np.abs(split), np.abs(self.codebook).astype(np.float64))
        step = (products.max(-1) - products.min(-1)).max(-1) / 255
        return step, products, magnitudes.max(-1).sum(-1)

    def expected(self, begin: int = 0, end: int | None = None) -> tuple[Doubles, Doubles]:
        """Return exact attention over a range of decoded tokens, and the documented error bound."""
        at = slice(begin, end)
        scores = self.exact_scores()[:, at]
        sinks = np.full((len(scores), 1), -np.inf) if self.sinks is None else LOG2E * self.sinks[:, None]
        most = np.maximum(scores.max(-1, keepdims=True), sinks)
        p = np.exp2(scores - most)
        p /= p.sum(-1, keepdims=True) + np.exp2(sinks - most)
        v = self.values[at].astype(np.float64)
        error = np.broadcast_to(self.score_error(), self.exact_scores().shape)[:, at].max(-1, keepdims=True)
        assert error.max() < 0.5, "the error bound is useless here"
        tokens = len(v)
        exact = self.codebook is None and self.value_cache.dtype != np.uint8
        left_out = 2.0 ** (-23 if exact else -11) * np.abs(v).max()
        bound = (np.exp2(2 * error) - 1 + (tokens + 32) * 2.0**-22) * (p @ np.abs(v)) + left_out
        prompt = slice(max(self.prompt - begin, 0))
        bound += 2.0**-8 * (p[:, prompt] @ np.abs(v[prompt]))
        if self.value_cache.dtype == np.uint8:
            bound += 2.0**-16 * tokens * p.max(-1, keepdims=True) * np.abs(v).max()
        return p @ v, bound


def make_case(
    rng: np.random.Generator,
    heads: int,
    tokens: int,
    head_dim: int,
    d_sub: int | None = 1,
    int8_values: bool = True,
    q_magnitude: float = 1.0,
) -> Case:
    """Return a case with random queries, keys and values. d_sub None: float32 keys."""
    q = (q_magnitude * rng.standard_normal((heads, head_dim))).astype(np.float32)
    keys = rng.standard_normal((tokens, head_dim), dtype=np.float32)
    values = rng.standard_normal((tokens, head_dim), dtype=np.float32)
    case = Case(q, float(head_dim**-0.5), keys, values, keys, values)
    if d_sub is not None:
        case.codebook = rng.standard_normal((head_dim // d_sub, 16, d_sub), dtype=np.float32)
        case.key_cache = np.zeros((tokens, head_dim // d_sub // 2), np.uint8)
        _native.append_keys(case.key_cache, 0, keys, case.codebook)
        case.keys = _native.decode_keys(case.key_cache, tokens, case.codebook)
        case.codes = _testing.key_codes(case.key_cache, tokens, case.codebook)
    if int8_values:
        case.value_cache = np.zeros((tokens, head_dim + 2), np.uint8)
        _native.append_values(case.value_cache, 0, values)
        case.values = _native.decode_values(case.value_cache, tokens)
    return case
