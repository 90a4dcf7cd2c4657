"""2:4 sparse matrices, and the bf16, int8 and int4 formats of 2:4 storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ortolan import _native

from .single_node import Packed


def two_of_four(rng: np.random.Generator, w: np.ndarray) -> np.ndarray:
    """Return w with at most two nonzero weights, chosen at random, in each group of four inputs of a column."""
    k, n = w.shape
    order = rng.permuted(np.tile(np.arange(4), (-(-k // 4), n, 1)), axis=2)
    kept = rng.integers(0, 3, order.shape[:2]) if rng.random() < 0.5 else np.full(order.shape[:2], 2)
    keep = (order < kept[:, :, None]).transpose(0, 2, 1).reshape(-1, n)[:k]
    return np.where(keep, w, np.zeros_like(w))


@dataclass(frozen=True)
class TwoFourFormat:
    bits: int
    pack: Callable[..., Packed]
    unpack: Callable[..., np.ndarray]

    @property
    def tile_inputs(self) -> int:
        return 32 if self.bits == 16 else 64

    @property
    def mask_bytes(self) -> int:
        return 2 * self.tile_inputs

    def random(self, rng: np.random.Generator, k: int, n: int) -> np.ndarray:
        if self.bits == 16:
            return two_of_four(rng, rng.standard_normal((k, n), dtype=np.float32))
        most = 2 ** (self.bits - 1)
        return two_of_four(rng, rng.integers(-most, most, (k, n), dtype=np.int8))


BF16 = TwoFourFormat(16, _native.pack_two_four, _native.unpack_bitmap)
INT8 = TwoFourFormat(8, _native.pack_two_four_int8, _native.unpack_bitmap_int8)
INT4 = TwoFourFormat(4, _native.pack_two_four_int4, _native.unpack_bitmap_int4)
FORMATS = {"bf16": BF16, "int8": INT8, "int4": INT4}
