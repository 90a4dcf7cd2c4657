"""Skip tests whose instructions neither the CPU nor the emulator of tests/amx has; report the reasons after the run.

python -m tests.instructions [SET] prints the feature sets of the sanitizer build: all sets that tests can run here,
except a set whose code duplicates its neighbours. With SET, print the sets for a CPU that supports at most SET.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

import pytest

from ortolan import _native, _testing

# AMX kernels also use AVX-512 BF16. The emulator of tile and AVX-VNNI instructions needs AVX2.
AMX_KERNELS, AMX_EMULATOR = "avx512bf16", "avx2"
# Emulated feature set -> the feature set that its emulator needs.
_EMULATED = {"amx": AMX_KERNELS, "avxvnni": AMX_EMULATOR}
# AMX kernels that tests run in the emulator, and the file of tests/amx that runs each. Other AMX kernels are untested.
AMX_ROWS = {
    "nomad_attention amx/16 in tiles": "attention_in_tiles.py",
    "sparse_amx_matmul amx": "test_sparse_amx_matmul.py",
    "sparse_amx_matmul_int8 amx": "test_sparse_amx_matmul_int8.py",
    "w4a8_matmul amx": "test_group_matmul.py",
    "w8a8_matmul amx": "test_group_matmul.py",
}
_REASON = "missing instructions: "


def cpu_has(feature_set: str) -> bool:
    """Return True if the CPU, as detected, supports a feature set."""
    return feature_set in _native.cpu_info()["detected_features"]


def require(feature_set: str, who: str) -> None:
    """Skip the test if the CPU lacks these features; `who` names the part that needs them."""
    if not cpu_has(feature_set):
        pytest.skip(f"{_REASON}{who} needs {feature_set}, this CPU has {_cpu()}")


def summary(reasons: Iterable[str]) -> list[str]:
    """Return the lines for the end of a run, from the reasons of all skipped tests."""
    counts = Counter(reason.partition(_REASON)[2] for reason in reasons if _REASON in reason)
    lines = [f"{count} skipped for {_REASON}{reason}" for reason, count in counts.items()]
    kernels = [name for name, feature_set in kernel_rows().items() if not _runs(feature_set, name)]
    if kernels:
        lines.append(f"{len(kernels)} kernels no test can run, as this CPU has {_cpu()}: {', '.join(kernels)}")
    return lines


def _cpu() -> str:
    return ", ".join(_native.cpu_info()["detected_features"])


def kernel_rows() -> dict[str, str]:
    """Map "TABLE ROW" to the feature set of that row, for all kernel tables."""
    tables = [name for name in dir(_testing) if name.endswith("_kernels")]
    return {
        f"{table.removesuffix('_kernels')} {row['name']}": row["isa"]
        for table in tables
        for row in getattr(_testing, table)()
    }


def _runs(feature_set: str, kernel: str | None = None) -> bool:
    """Return True if the CPU or the emulator can run a feature set, or the given kernel row."""
    if feature_set == "amx" and kernel is not None and kernel not in AMX_ROWS:
        return False
    return cpu_has(_EMULATED.get(feature_set, feature_set))


def sanitized(most: str | None = None) -> list[str]:
    """Return the feature sets up to `most` (None: this CPU's) and the sets that the emulator runs on such a CPU.

    avx512vnni is left out where both neighbours run: its products are those of the next set, the rest those of the
    set before.
    """
    sets = [name for name in _testing.feature_sets() if _runs(name)]
    if most is not None:
        behind = _testing.feature_sets()[_testing.feature_sets().index(most) + 1 :]
        sets = [name for name in sets if name not in behind or _EMULATED.get(name) == most]
    return [name for name in sets if name != "avx512vnni" or "avx512" not in sets]


if __name__ == "__main__":
    print(";".join(sanitized(*sys.argv[1:])))
