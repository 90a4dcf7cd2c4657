"""Skip tests whose instructions neither the CPU nor the emulator in tests/amx supports, and report the reasons.

`python -m tests.instructions [SET]` prints the feature sets that the sanitizer build tests: all sets that tests can run
on this CPU, or on a CPU that supports at most SET. avx512vnni is left out if avx512 also runs (see `sanitized`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

import pytest

from ortolan import _native, _testing

# First value: the feature set that AMX kernels use besides AMX. Second value: the feature set that the emulator of tile
# and AVX-VNNI instructions needs.
AMX_KERNELS, AMX_EMULATOR = _testing.AMX_VECTORS, "avx2"
# Maps an emulated feature set to the feature set that the CPU must have.
_EMULATED = {"amx": AMX_KERNELS, "avxvnni": AMX_EMULATOR}
# AMX kernels that tests run in the emulator, and the file of tests/amx that runs each. Other AMX kernels are untested.
AMX_ROWS = {
    "k_quant amx": "test_k_quants.py",
    "nomad_attention amx/16 in tiles": "attention_in_tiles.py",
    "sparse_amx_matmul amx": "test_sparse_amx_matmul.py",
    "sparse_amx_matmul_int8 amx": "test_sparse_amx_matmul_int8.py",
    "subgroup amx": "test_group_matmul.py",
    "w4a8_matmul amx": "test_group_matmul.py",
    "w8a8_matmul amx": "test_group_matmul.py",
}
_REASON = "missing instructions: "


def cpu_has(feature_set: str) -> bool:
    """Return True if the CPU, as detected, supports a feature set."""
    return feature_set in _native.cpu_info()["detected_features"]


def require(feature_set: str, who: str) -> None:
    """Skip the test if the CPU lacks a feature set; `who` names the part that needs it."""
    if not cpu_has(feature_set):
        pytest.skip(f"{_REASON}{who} needs {feature_set}, this CPU has {_cpu()}")


def summary(reasons: Iterable[str]) -> list[str]:
    """Return the lines to print at the end of a run, from the skip reasons of all skipped tests."""
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
    """Return True if the CPU or the emulator can run a feature set and, if given, the kernel."""
    if feature_set == "amx" and kernel is not None and kernel not in AMX_ROWS:
        return False
    return cpu_has(_EMULATED.get(feature_set, feature_set))


def sanitized(most: str | None = None) -> list[str]:
    """Return the feature sets up to `most` (None: this CPU's) and the sets that the emulator runs on such a CPU.

    avx512vnni is left out if avx512 also runs: all code of an avx512vnni build is also in the avx512 or avx512bw build.
    """
    sets = [name for name in _testing.feature_sets() if _runs(name)]
    if most is not None:
        behind = _testing.feature_sets()[_testing.feature_sets().index(most) + 1 :]
        sets = [name for name in sets if name not in behind or _EMULATED.get(name) == most]
    return [name for name in sets if name != "avx512vnni" or "avx512" not in sets]


if __name__ == "__main__":
    print(";".join(sanitized(*sys.argv[1:])))
