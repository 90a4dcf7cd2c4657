"""Weights of 4, 5 and 6 bits in subgroups with integer scales (ops/formats/subgroup.h)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ortolan import _native, _testing

from .groups import GroupLayer


@dataclass(frozen=True)
class SubgroupLayer(GroupLayer):
    """A random linear layer: W[l, j] = scales[l // group, j] * s[h, j] * (q[l, j] - z[h, j]), h = l // subgroup.

    s and z are uint8 [ceil(k / subgroup), n]; q has `bits` bits.
    """

    subgroup: int = 16
    s: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    z: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    stored_bits: int = 4

    @classmethod
    def in_subgroups(
        cls,
        rng: np.random.Generator,
        k: int,
        n: int,
        group: int = 256,
        *,
        subgroup: int = 16,
        bits: int = 4,
        half: bool = True,
        scale: float = 1.0,
    ) -> SubgroupLayer:
        """Return a random layer whose |s (q - z)| are at most 127."""
        scales = (rng.random((-(-k // group), n)) + 0.1) * rng.choice([-1, 1], (-(-k // group), n)) * scale
        rows = -(-k // subgroup)
        z = rng.integers(0, 2**bits, (rows, n), dtype=np.uint8)
        most = np.minimum(2 ** (8 - bits) - 1, 127 // np.maximum(z, 2**bits - 1 - z))
        s = rng.integers(0, most + 1).astype(np.uint8)
        q = rng.integers(0, 2**bits, (k, n), dtype=np.uint8)
        dtype = np.float16 if half else np.float32
        return cls(q, scales.astype(dtype), None, group, subgroup=subgroup, s=s, z=z, stored_bits=bits)

    @property
    def bits(self) -> int:
        return self.stored_bits

    @property
    def packed_weights(self) -> np.ndarray:
        return _native.pack_int4_group(self.q & 15)

    @property
    def packed_high_bits(self) -> np.ndarray | None:
        return _native.pack_high_bits(self.q, self.bits) if self.bits > 4 else None

    @property
    def packed_subgroup_scales(self) -> np.ndarray:
        """Return s + 2^(8 - bits) z, uint8 [panels, padded k / subgroup, 16]."""
        k, n = self.q.shape
        rows = np.zeros((-(-k // 64) * 64 // self.subgroup, n), np.uint8)
        rows[: len(self.s)] = self.s | self.z << (8 - self.bits)
        return _native.pack_group_rows(rows)

    def multiply(self, x: np.ndarray, bias: np.ndarray | None = None, kernel: str | None = None) -> np.ndarray:
        k, n = self.q.shape
        return _testing.w4a8_matmul(
            x,
            self.packed_weights,
            self.packed_scales,
            self.group,
            k,
            n,
            bias=bias,
            kernel=kernel,
            subgroup_scales=self.packed_subgroup_scales,
            subgroup_size=self.subgroup,
            high_bits=self.packed_high_bits,
            bits=self.bits,
        )

    def _centered(self) -> np.ndarray:
        s, z = (np.repeat(rows, self.subgroup, axis=0)[: len(self.q)].astype(np.float64) for rows in (self.s, self.z))
        return s * (self.q - z)


def runnable_subgroup_kernels() -> list[str]:
    """Return the names of the kernels for subgroups that this CPU can run."""
    return [row["name"] for row in _testing.subgroup_kernels() if row["runs_here"]]
