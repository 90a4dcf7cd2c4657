"""Shorten the shared caches of a decoder, in place.

Layouts: ops/formats/key_code_cache.h, ops/formats/value_cache.h, ops/attention/kv_cache/ring.h.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortolan.graph_passes.names import OPTIONS_KEY

from .errors import ArgumentError

_BLOCK = 32  # tokens
_SCALE_BYTES = 2  # size of the scale in a row of int8 values
_KEY, _VALUE, _EXACT_KEY = "key", "value", "exact_key"
_D_SUBS = (1, 2, 4)


class Rewinder:
    """Shortens shared caches.

    Only two kinds of caches change. Compressed caches of NoMADAttention store full blocks of 32 tokens in another
    layout than an incomplete last block. Its exact keys are a ring, in which tokens replace earlier ones; the keys that
    a rewind needs again are copied before each step.
    """

    def __init__(
        self,
        caches: Mapping[str, np.ndarray],
        capacity: int,
        metadata: Mapping[str, str],
        head_size: int | None,
        rewindable: int,
    ) -> None:
        """Create a rewinder of empty caches.

        Args:
            caches: The memory of the caches [1, heads, tokens, width], by input name.
            capacity: The number of tokens for which they have room.
            metadata: The model's metadata.
            head_size: The number of elements of a key, if known.
            rewindable: The number of latest tokens whose exact keys can be restored.

        Raises:
            ArgumentError: `rewindable` is above 0, and these caches cannot be rewound.
        """
        self._caches, self._capacity, self._head_size = caches, capacity, head_size
        self._passes = _cache_passes(metadata)
        self._rings: list[_Ring] = []
        if rewindable:
            self._check_capacities()
            self._row_bytes()
            self._rings = [_Ring(array, *self._window(name), rewindable) for name, array in self._exact_keys().items()]

    def before_step(self, length: int, total: int) -> None:
        """Copy the exact keys that a step from `length` to `total` tokens replaces."""
        for ring in self._rings:
            ring.save(length, total)

    def rewind(self, length: int, to: int) -> None:
        """Shorten caches of `length` tokens to `to` tokens.

        Raises:
            ArgumentError: A layout is unknown, or exact keys are lost. The caches are unchanged.
        """
        self._check_capacities()
        rows = self._row_bytes()
        rings = self._rings or [_Ring(array, *self._window(name)) for name, array in self._exact_keys().items()]
        for ring in rings:
            ring.check(length, to)
        for ring in rings:
            ring.restore(length, to)
        first, kept = to - to % _BLOCK, to % _BLOCK
        if kept == 0 or length < first + _BLOCK:
            return  # no full block becomes incomplete
        for name, row_bytes in rows.items():
            array = self._caches[name]
            heads = array.reshape(array.shape[1], -1)  # a view: the rows of a head are contiguous
            block = heads[:, first * row_bytes : (first + _BLOCK) * row_bytes]
            to_rows = key_block_to_rows if name.endswith(_KEY) else value_block_to_rows
            block[:, : kept * row_bytes] = to_rows(block)[:, :kept].reshape(len(heads), -1)

    def _exact_keys(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in self._caches.items() if name.endswith(f".{_EXACT_KEY}")}

    def _check_capacities(self) -> None:
        exact = self._exact_keys()
        for name, array in self._caches.items():
            if name not in exact and array.shape[2] != self._capacity:
                raise ArgumentError(
                    f"{name!r} has room for {array.shape[2]} tokens, expected the cache's {self._capacity}; a cache "
                    "of another size cannot be rewound: use reset"
                )

    def _row_bytes(self) -> dict[str, int]:
        """Return the bytes of a row of each cache whose full blocks have another layout."""
        found = {}
        for name, keys in self._caches.items():
            values = self._caches.get(name.removesuffix(_KEY) + _VALUE)
            if not name.endswith(f".{_KEY}") or keys.dtype != np.uint8 or values is None:
                continue
            width = keys.shape[3]
            if values.dtype != np.uint8:  # codes of keys, float values
                found[name] = width
                continue
            value_width = values.shape[3]
            size = value_width - _SCALE_BYTES
            if any(size == 2 * d_sub * width for d_sub in _D_SUBS):
                found[name], found[name.removesuffix(_KEY) + _VALUE] = width, value_width
            elif self._equal_rows(width, value_width):
                size = self._size_of_heads(name, width)
                found[name] = size // self._d_sub(name) // 2
                found[name.removesuffix(_KEY) + _VALUE] = size + _SCALE_BYTES
        return found

    def _equal_rows(self, width: int, value_width: int) -> bool:
        """Return True for caches of pass compress_cache with `equal_rows`.

        Its widths are the largest head size + 2, and head sizes are multiples of 16. The 4-bit caches of
        GroupQueryAttention, which have no blocks, have half the head size.
        """
        named = any(step.get("equal_rows") is True for step in self._passes)
        return width == value_width and (named or width % 16 == _SCALE_BYTES)

    def _size_of_heads(self, name: str, width: int) -> int:
        exact = self._caches.get(name.removesuffix(_KEY) + _EXACT_KEY)
        size = self._head_size if exact is None else exact.shape[3]
        if size is None or size % 16 or not 0 < size <= width - _SCALE_BYTES:
            raise ArgumentError(
                f"head_size is {size}, expected the model's, a multiple of 16 up to {width - _SCALE_BYTES}: the rows "
                f"of {name!r} are padded (equal_rows); give it to Decoder, or use reset"
            )
        return size

    def _d_sub(self, name: str) -> int:
        named = [step.get("d_sub") for step in self._passes if step.get("equal_rows") is True]
        found = [d_sub for d_sub in _D_SUBS if d_sub in named]
        if len(found) != 1:
            raise ArgumentError(
                f"the model's metadata do not state d_sub of {name!r}, whose rows are padded (equal_rows), so that it "
                "cannot be rewound: use reset, or optimize the original model again"
            )
        return found[0]

    def _window(self, name: str) -> tuple[int, int]:
        """Return the sizes (window, sinks) of a cache of exact keys."""
        slots = self._caches[name].shape[2]
        sizes = [(step.get("window"), step.get("sinks")) for step in self._passes]
        found = {
            (window, sinks)
            for window, sinks in sizes
            if isinstance(window, int) and isinstance(sinks, int) and min(window, sinks) >= 0
            if window + sinks == slots
        }
        if len(found) != 1:
            raise ArgumentError(
                f"the model's metadata do not state window and sinks of {name!r} ({slots} slots), so that it cannot be "
                "rewound: use reset, or optimize the original model again"
            )
        return found.pop()


def _cache_passes(metadata: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the options of the passes compress_cache that made a model; empty if its metadata do not have them."""
    try:
        steps = json.loads(metadata.get(OPTIONS_KEY, "[]"))
    except (ValueError, RecursionError):
        return []
    steps = steps if isinstance(steps, list) else []
    return [step for step in steps if isinstance(step, dict) and step.get("name") == "compress_cache"]


@dataclass
class _Ring:
    """Exact keys [1, heads, sinks + window, head_dim], and copies of the keys that later tokens have replaced."""

    keys: np.ndarray
    window: int
    sinks: int
    rewindable: int = 0

    def __post_init__(self) -> None:
        shape = (*self.keys.shape[:2], self.rewindable, self.keys.shape[3])
        # The copy of token t is at t % rewindable, if `_copied` has t there.
        self._copies = np.zeros(shape, self.keys.dtype)
        self._copied = np.full(self.rewindable, -1)

    def _slots(self, tokens: np.ndarray) -> np.ndarray:
        return self.sinks + (tokens - self.sinks) % max(self.window, 1)

    def save(self, length: int, total: int) -> None:
        # A rewind to `total - rewindable` tokens or more needs no earlier ones.
        first = max(self.sinks, length - self.window, total - self.window - self.rewindable)
        replaced = np.arange(first, max(first, min(length, total - self.window)))
        at = replaced % max(self.rewindable, 1)
        self._copies[:, :, at] = self.keys[:, :, self._slots(replaced)]
        self._copied[at] = replaced

    def _missing(self, length: int, to: int) -> np.ndarray:
        """Return the tokens that the ring holds after `to` tokens, but not after `length`."""
        first = max(self.sinks, to - self.window)
        return np.arange(first, max(first, min(to, length - self.window)))

    def check(self, length: int, to: int) -> None:
        missing = self._missing(length, to)
        if np.isin(missing, self._copied).all():
            return
        raise ArgumentError(
            f"length is {to}, but exact keys that it needs were replaced: with rewindable={self.rewindable}, a Decoder "
            f"can go back {self.rewindable} tokens from the largest length it had, and not into a step of more than "
            f"{self.window} tokens; use reset, or create the Decoder with a larger rewindable"
        )

    def restore(self, length: int, to: int) -> None:
        missing = self._missing(length, to)
        self.keys[:, :, self._slots(missing)] = self._copies[:, :, missing % max(self.rewindable, 1)]
        self._copied[self._copied >= to] = -1  # the tokens from `to` on will be others


def key_block_to_rows(blocks: np.ndarray) -> np.ndarray:
    """Convert full blocks of key codes, uint8 [heads, 32 row_bytes], to rows [heads, 32, row_bytes]."""
    heads, row_bytes = len(blocks), blocks.shape[1] // _BLOCK
    quads = blocks.reshape(heads, row_bytes // 2, _BLOCK // 2, 4)
    codes = np.concatenate([quads & 15, quads >> 4], axis=2)  # [heads, quads, 32, 4]
    codes = codes.transpose(0, 2, 1, 3).reshape(heads, _BLOCK, 2 * row_bytes)
    rows = np.empty((heads, _BLOCK, row_bytes), np.uint8)
    whole = row_bytes // 4 * 4  # the bytes of whole groups of eight sub-quantizers; two more bytes may follow
    eights = codes[..., : 2 * whole].reshape(heads, _BLOCK, whole // 4, 2, 4)
    rows[..., :whole] = (eights[..., 0, :] | eights[..., 1, :] << 4).reshape(heads, _BLOCK, whole)
    if whole < row_bytes:
        rows[..., whole:] = codes[..., -4:-2] | codes[..., -2:] << 4
    return rows


def value_block_to_rows(blocks: np.ndarray) -> np.ndarray:
    """Convert full blocks of int8 values, uint8 [heads, 32 row_bytes], to rows [heads, 32, row_bytes]."""
    heads = len(blocks)
    scales = blocks[:, : _BLOCK * _SCALE_BYTES].reshape(heads, _BLOCK, _SCALE_BYTES)
    quads = blocks[:, _BLOCK * _SCALE_BYTES :].reshape(heads, _BLOCK // 4, -1, 4)
    values = quads.transpose(0, 1, 3, 2).reshape(heads, _BLOCK, -1)
    return np.concatenate([scales, values], axis=2)
