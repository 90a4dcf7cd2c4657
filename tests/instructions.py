"""Instructions that tests need: what neither the CPU nor the emulator of tests/amx has skips them, with a reason that
the end of the run counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from ortolan import _native

# Lowest first: a CPU of one tier runs the kernels of every lower tier.
TIERS = ("scalar", "avx2", "avx512", "avx512bf16", "amx")
# What AMX kernels use besides tiles. The emulator knows tile instructions only, and itself is made of AVX2.
AMX_KERNELS, AMX_EMULATOR = "avx512bf16", "avx2"
_REASON = "for lack of instructions: "


def cpu_has(tier: str) -> bool:
    return TIERS.index(_cpu()) >= TIERS.index(tier)


def require(tier: str, who: str) -> None:
    """Skips a test on a CPU below this tier. who needs it: words for the reason."""
    if not cpu_has(tier):
        pytest.skip(f"{_REASON}{who} needs {tier}, this CPU has {_cpu()}")


def summary(reasons: Iterable[str]) -> list[str]:
    """Lines for the end of a run. reasons: of all tests that were skipped."""
    counts = Counter(reason.partition(_REASON)[2] for reason in reasons if _REASON in reason)
    lines = [f"{count} skipped {_REASON}{reason}" for reason, count in counts.items()]
    kernels = list(dict.fromkeys(f"{room} {row['name']}" for room, row in _kernels() if not _runs(row["isa"])))
    if kernels:
        lines.append(f"{len(kernels)} kernels no test can run, as this CPU has {_cpu()}: {', '.join(kernels)}")
    return lines


def _cpu() -> str:
    return _native.cpu_info()["detected_isa"]


def _kernels() -> Iterable[tuple[str, _native.KernelInfo]]:
    for name in dir(_native):
        if name.endswith("_kernels"):
            for row in getattr(_native, name)():
                yield name.removesuffix("_kernels"), row


def _runs(tier: str) -> bool:
    """By the CPU, or by the emulator on it."""
    return cpu_has(AMX_KERNELS if tier == "amx" else tier)
