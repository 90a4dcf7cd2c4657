"""What a cache of keys or values holds in place of floats, and how floats become that.

Formats: ops/formats/key_code_cache.h, ops/formats/value_cache.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ortolan import _native

_SCALE_BYTES = 2  # in front of a row of int8 values


@dataclass(frozen=True, eq=False)
class CacheFormat:
    """uint8 [batch, kv_heads, tokens, width] of keys as codes, where there are codebooks, or of values as int8.

    A head's rows, of row_bytes each, lie one behind the other from its first byte on, and zeros behind all of them.
    """

    head_dim: int
    codebooks: np.ndarray | None = None  # float32 [kv_heads, head_dim / d_sub, 16, d_sub]
    equal_width: int | None = None  # of caches of keys and values alike; None: row_bytes

    @property
    def row_bytes(self) -> int:
        return self.head_dim + _SCALE_BYTES if self.codebooks is None else self.codebooks.shape[1] // 2

    @property
    def width(self) -> int:
        return self.row_bytes if self.equal_width is None else self.equal_width

    def encode(self, cache: np.ndarray) -> np.ndarray:
        """Of floats [batch, kv_heads, tokens, head_dim], all of which are taken as tokens of the sequence."""
        encoded = np.zeros((*cache.shape[:3], self.width), np.uint8)
        for batch, head in np.ndindex(*cache.shape[:2]):
            rows = np.ascontiguousarray(cache[batch, head], np.float32)
            if self.codebooks is None:
                _native.append_values(self._rows(encoded[batch, head]), 0, rows)
            else:
                _native.append_keys(self._rows(encoded[batch, head]), 0, rows, self.codebooks[head])
        return encoded

    def decode(self, cache: np.ndarray) -> np.ndarray:
        """What a cache [batch, kv_heads, tokens, width] stands for, all of it tokens of the sequence: float32
        [batch, kv_heads, tokens, head_dim]."""
        decoded = np.zeros((*cache.shape[:3], self.head_dim), np.float32)
        for batch, head in np.ndindex(*cache.shape[:2]):
            rows = self._rows(np.ascontiguousarray(cache[batch, head]))
            if self.codebooks is None:
                decoded[batch, head] = _native.decode_values(rows, len(rows))
            else:
                decoded[batch, head] = _native.decode_keys(rows, len(rows), self.codebooks[head])
        return decoded

    def _rows(self, head: np.ndarray) -> np.ndarray:
        """Of a head [tokens, width], a view [tokens, row_bytes]."""
        tokens = len(head)
        return head.reshape(-1)[: tokens * self.row_bytes].reshape(tokens, self.row_bytes)


@dataclass(frozen=True, eq=False)
class CacheUse:
    """An input of the graph and the output that holds the same a token later."""

    past: str
    present: str
    node: str  # that appends
    format: CacheFormat | None = None  # None: floats, as in the original
    codebooks: str = ""
    spread: np.ndarray | None = None  # of the keys that codebooks were learned from: see spread_of


def spread_of(keys: np.ndarray) -> np.ndarray:
    """How far keys [kv_heads, n, head_dim] are from the mean of their head, in the root mean square: [kv_heads]."""
    deviation = keys - keys.mean(axis=1, keepdims=True)
    spread: np.ndarray = np.sqrt((deviation.astype(np.float64) ** 2).sum(axis=2).mean(axis=1))
    return spread


@dataclass(frozen=True)
class ExactKeys:
    """float32 [batch, kv_heads, slots, head_dim]: of the first `sinks` tokens and of a ring of the last `window` ones
    (ops/attention/kv_cache/ring.h).
    """

    cache: str  # the input of the graph that holds the codes of all keys
    window: int
    sinks: int

    @property
    def slots(self) -> int:
        return self.sinks + self.window

    def of(self, cache: np.ndarray) -> np.ndarray:
        """Of floats [batch, kv_heads, tokens, head_dim], all of which are taken as tokens of the sequence."""
        exact = np.zeros((*cache.shape[:2], self.slots, cache.shape[3]), np.float32)
        tokens = cache.shape[2]
        for token in range(tokens):
            if token < self.sinks:
                exact[:, :, token] = cache[:, :, token]
            elif token >= tokens - self.window:
                exact[:, :, self.sinks + (token - self.sinks) % self.window] = cache[:, :, token]
        return exact
