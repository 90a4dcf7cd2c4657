"""The linear layers that benchmarks know by name."""

from __future__ import annotations

from collections.abc import Mapping

# Llama 3 8B, (k, n) of each projection: SparAMX, Table 2.
LLAMA_3_8B: Mapping[str, tuple[int, int]] = {
    "q": (4096, 4096),
    "k": (4096, 1024),
    "v": (4096, 1024),
    "o": (4096, 4096),
    "gate": (4096, 14336),
    "up": (4096, 14336),
    "down": (14336, 4096),
}
