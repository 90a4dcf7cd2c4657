"""K-quants: weights of 4, 5 and 6 bits in subgroups with scales and minimums of 8 bits (ops/formats/k_quant.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ortolan import _native, _testing

from .groups import GroupLayer


@dataclass(frozen=True)
class KQuantKind:
    """A kind of K-quant, with the names of formats/k_quant.h."""

    bits: int
    group: int
    subgroup: int
    zero_point: int
    steps: tuple[int, int] | None  # the range of s; None: no s
    minimums: bool = False
    minimum_steps: int | None = None  # the largest t; None: no t


KINDS = {
    "Q4_K": KQuantKind(4, 256, 32, 0, (0, 63), True, 63),
    "Q5_K": KQuantKind(5, 256, 32, 0, (0, 63), True, 63),
    "Q6_K": KQuantKind(6, 256, 16, 32, (-128, 127)),
    "Q5_0": KQuantKind(5, 32, 32, 16, None),
    "Q5_1": KQuantKind(5, 32, 32, 0, None, True),
    # Combinations that GGUF does not have.
    "4 bits around 8": KQuantKind(4, 128, 16, 8, (-128, 127)),
    "5 bits around 16": KQuantKind(5, 128, 32, 16, (-128, 127)),
    "4 bits, groups of 64": KQuantKind(4, 64, 32, 0, (-128, 127), True, 255),
    "5 bits, subgroups of 16": KQuantKind(5, 64, 16, 0, (-128, 127), True, 255),
}


@dataclass(frozen=True)
class KQuantLayer(GroupLayer):
    """A random linear layer: W = scales s (q - zero_point) + minimums t.

    s, int8, and t, uint8, are [ceil(k / subgroup), n], or None.
    """

    kind: KQuantKind = KINDS["Q4_K"]
    s: np.ndarray | None = None
    t: np.ndarray | None = None

    @classmethod
    def of_kind(
        cls, rng: np.random.Generator, k: int, n: int, kind: KQuantKind, *, half: bool = True, scale: float = 1.0
    ) -> KQuantLayer:
        """Return a random layer."""
        dtype = np.float16 if half else np.float32
        shape, rows = (-(-k // kind.group), n), (-(-k // kind.subgroup), n)
        scales = (rng.random(shape) + 0.1) * rng.choice([-1, 1], shape) * scale
        lows = (rng.uniform(-15, 15, shape) * scale).astype(dtype) if kind.minimums else None
        s = None if kind.steps is None else rng.integers(*kind.steps, rows, dtype=np.int8, endpoint=True)
        t = None
        if kind.minimum_steps is not None:
            t = rng.integers(0, kind.minimum_steps, rows, dtype=np.uint8, endpoint=True)
        q = rng.integers(0, 2**kind.bits, (k, n), dtype=np.uint8)
        return cls(q, scales.astype(dtype), None, kind.group, lows, kind=kind, s=s, t=t)

    @property
    def bits(self) -> int:
        return self.kind.bits

    @property
    def packed_weights(self) -> np.ndarray:
        return _native.pack_int4_group(self.q & 15)

    @property
    def subgroup(self) -> int:
        return self.kind.subgroup

    @property
    def packed_high_bits(self) -> np.ndarray | None:
        return _native.pack_high_bits(self.q, self.bits) if self.bits > 4 else None

    @property
    def packed_subgroup_scales(self) -> np.ndarray | None:
        return self._packed_subgroups(None if self.s is None else self.s.view(np.uint8))

    @property
    def packed_subgroup_minimums(self) -> np.ndarray | None:
        return self._packed_subgroups(self.t)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `_testing.w4a8_matmul`, except x, bias and kernel."""
        k, n = self.q.shape
        return {
            "weights": self.packed_weights,
            "scales": self.packed_scales,
            "group_size": self.group,
            "k": k,
            "n": n,
            "minimums": self.packed_minimums,
            "subgroup_scales": self.packed_subgroup_scales,
            "subgroup_size": self.subgroup,
            "high_bits": self.packed_high_bits,
            "bits": self.bits,
            "subgroup_scale_bits": 8,
            "subgroup_zero_point": self.kind.zero_point,
            "subgroup_minimums": self.packed_subgroup_minimums,
        }

    def multiply(self, x: np.ndarray, bias: np.ndarray | None = None, kernel: str | None = None) -> np.ndarray:
        return _testing.w4a8_matmul(x, bias=bias, kernel=kernel, **self.arguments())

    def matrix(self) -> np.ndarray:
        w = self._centered() * self._of_inputs(self.scales)
        return w if self.minimums is None else w + self._of_subgroups(self.t) * self._of_inputs(self.minimums)

    def _centered(self) -> np.ndarray:
        return self._of_subgroups(self.s) * (self.q.astype(np.float64) - self.kind.zero_point)

    def _of_subgroups(self, rows: np.ndarray | None) -> np.ndarray:
        if rows is None:
            return np.ones(self.q.shape)
        return np.repeat(rows, self.subgroup, axis=0)[: len(self.q)].astype(np.float64)

    def _products(self, q: np.ndarray, g: int) -> list[tuple[np.ndarray, np.ndarray]]:
        part = slice(g * self.group, min(len(self.q), (g + 1) * self.group))
        products = [(q, self._centered()[part] * self.scales[g].astype(np.float64))]
        if self.minimums is not None:
            products.append((q, self._of_subgroups(self.t)[part] * self.minimums[g].astype(np.float64)))
        return products

    def _packed_subgroups(self, rows: np.ndarray | None) -> np.ndarray | None:
        if rows is None:
            return None
        k, n = self.q.shape
        padded = np.zeros((-(-k // 64) * 64 // self.subgroup, n), np.uint8)
        padded[: len(rows)] = rows
        return _native.pack_group_rows(padded)


def runnable_k_quant_kernels() -> list[str]:
    """Return the names of the kernels for K-quants that this CPU can run."""
    return [row["name"] for row in _testing.k_quant_kernels() if row["runs_here"]]
