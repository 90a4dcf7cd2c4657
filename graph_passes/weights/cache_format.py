"""Formats of compressed KV caches, and conversion from and to floats.

Layouts: ops/formats/key_code_cache.h, ops/formats/value_cache.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ortolan import _native

_SCALE_BYTES = 2  # size of the scale before each row of int8 values, in bytes


@dataclass(frozen=True, eq=False)
class CacheFormat:
    """Compressed cache, uint8 [batch, kv_heads, tokens, width]: keys as codes with codebooks, or values as int8.

    Each head stores `tokens` rows of row_bytes without gaps; its remaining bytes are 0.
    """

    head_dim: int
    codebooks: np.ndarray | None = None  # float32 [kv_heads, head_dim / d_sub, 16, d_sub]
    equal_width: int | None = None  # common width of the caches of keys and of values; None: row_bytes

    @property
    def row_bytes(self) -> int:
        """Return the bytes per token and head."""
        return self.head_dim + _SCALE_BYTES if self.codebooks is None else self.codebooks.shape[1] // 2

    @property
    def width(self) -> int:
        """Return the last dimension of the cache."""
        return self.row_bytes if self.equal_width is None else self.equal_width

    def encode(self, cache: np.ndarray) -> np.ndarray:
        """Encode float keys or values [batch, kv_heads, tokens, head_dim], without padding tokens."""
        encoded = np.zeros((*cache.shape[:3], self.width), np.uint8)
        for batch, head in np.ndindex(*cache.shape[:2]):
            rows = np.ascontiguousarray(cache[batch, head], np.float32)
            if self.codebooks is None:
                _native.append_values(self._rows(encoded[batch, head]), 0, rows)
            else:
                _native.append_keys(self._rows(encoded[batch, head]), 0, rows, self.codebooks[head])
        return encoded

    def decode(self, cache: np.ndarray) -> np.ndarray:
        """Decode a cache [batch, kv_heads, tokens, width] to float32 [batch, kv_heads, tokens, head_dim]."""
        decoded = np.zeros((*cache.shape[:3], self.head_dim), np.float32)
        for batch, head in np.ndindex(*cache.shape[:2]):
            rows = self._rows(np.ascontiguousarray(cache[batch, head]))
            if self.codebooks is None:
                decoded[batch, head] = _native.decode_values(rows, len(rows))
            else:
                decoded[batch, head] = _native.decode_keys(rows, len(rows), self.codebooks[head])
        return decoded

    def _rows(self, head: np.ndarray) -> np.ndarray:
        """Return a view [tokens, row_bytes] of a head [tokens, width]."""
        tokens = len(head)
        return head.reshape(-1)[: tokens * self.row_bytes].reshape(tokens, self.row_bytes)


@dataclass(frozen=True, eq=False)
class CacheUse:
    """A cache input of the graph, and the output with the same cache after the call."""

    past: str
    present: str
    node: str  # the node that appends tokens
    format: CacheFormat | None = None  # None: an uncompressed float cache
    codebooks: str = ""
    spread: np.ndarray | None = None  # spread_of(keys) of the keys that codebooks were learned from


def spread_of(keys: np.ndarray) -> np.ndarray:
    """Return the root mean square distance of keys [kv_heads, n, head_dim] from their head's mean: [kv_heads]."""
    deviation = keys - keys.mean(axis=1, keepdims=True)
    spread: np.ndarray = np.sqrt((deviation.astype(np.float64) ** 2).sum(axis=2).mean(axis=1))
    return spread


@dataclass(frozen=True)
class ExactKeys:
    """Float keys of some tokens that are kept next to the codes, float32 [batch, kv_heads, slots, head_dim].

    The slots hold the first `sinks` tokens, then a ring of the last `window` tokens (ops/attention/kv_cache/ring.h).
    """

    cache: str  # name of the graph input with the codes of all keys
    window: int
    sinks: int

    @property
    def slots(self) -> int:
        """Return the number of slots."""
        return self.sinks + self.window

    def of(self, cache: np.ndarray) -> np.ndarray:
        """Select the slots' keys from the keys of all tokens, [batch, kv_heads, tokens, head_dim]."""
        exact = np.zeros((*cache.shape[:2], self.slots, cache.shape[3]), np.float32)
        tokens = cache.shape[2]
        for token in range(tokens):
            if token < self.sinks:
                exact[:, :, token] = cache[:, :, token]
            elif token >= tokens - self.window:
                exact[:, :, self.sinks + (token - self.sinks) % self.window] = cache[:, :, token]
        return exact
