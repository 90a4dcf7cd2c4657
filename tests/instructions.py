"""Instructions that tests need: what neither the CPU nor the emulator of tests/amx has skips them, with a reason that
the end of the run counts.

python -m tests.instructions [SET] prints the feature sets of the sanitizer build: those that tests can run here, but
for one whose code is that of its neighbours. SET: as on a CPU that has no more than this.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

import pytest

from ortolan import _native, _testing

# What AMX kernels use besides tiles. The emulator knows tile instructions and those of AVX-VNNI, and itself is made of
# AVX2.
AMX_KERNELS, AMX_EMULATOR = "avx512bf16", "avx2"
# What the CPU needs to run a set by the emulator.
_EMULATED = {"amx": AMX_KERNELS, "avxvnni": AMX_EMULATOR}
# The rows of AMX that tests run on such a CPU, by the file of tests/amx that asks for them. One that is not here counts
# as run by no test.
AMX_ROWS = {
    "nomad_attention amx/16 in tiles": "attention_in_tiles.py",
    "sparse_amx_matmul amx": "test_sparse_amx_matmul.py",
    "sparse_amx_matmul_int8 amx": "test_sparse_amx_matmul_int8.py",
    "w4a8_matmul amx": "test_group_matmul.py",
    "w8a8_matmul amx": "test_group_matmul.py",
}
_REASON = "for lack of instructions: "


def cpu_has(feature_set: str) -> bool:
    return feature_set in _native.cpu_info()["detected_features"]


def require(feature_set: str, who: str) -> None:
    """Skips a test on a CPU without these features. who needs them: words for the reason."""
    if not cpu_has(feature_set):
        pytest.skip(f"{_REASON}{who} needs {feature_set}, this CPU has {_cpu()}")


def summary(reasons: Iterable[str]) -> list[str]:
    """Lines for the end of a run. reasons: of all tests that were skipped."""
    counts = Counter(reason.partition(_REASON)[2] for reason in reasons if _REASON in reason)
    lines = [f"{count} skipped {_REASON}{reason}" for reason, count in counts.items()]
    kernels = [name for name, feature_set in kernel_rows().items() if not _runs(feature_set, name)]
    if kernels:
        lines.append(f"{len(kernels)} kernels no test can run, as this CPU has {_cpu()}: {', '.join(kernels)}")
    return lines


def _cpu() -> str:
    return ", ".join(_native.cpu_info()["detected_features"])


def kernel_rows() -> dict[str, str]:
    """The feature set of each row of the kernel tables, by the names of table and row."""
    tables = [name for name in dir(_testing) if name.endswith("_kernels")]
    return {
        f"{table.removesuffix('_kernels')} {row['name']}": row["isa"]
        for table in tables
        for row in getattr(_testing, table)()
    }


def _runs(feature_set: str, kernel: str | None = None) -> bool:
    """By the CPU, or by the emulator on it. kernel: a row that needs it."""
    if feature_set == "amx" and kernel is not None and kernel not in AMX_ROWS:
        return False
    return cpu_has(_EMULATED.get(feature_set, feature_set))


def sanitized(most: str | None = None) -> list[str]:
    """The sets up to `most` and those that an emulator on it runs; None: of this CPU. Where the set behind it runs too,
    avx512vnni has nothing of its own: products as in that, the rest as in the one before it."""
    sets = [name for name in _testing.feature_sets() if _runs(name)]
    if most is not None:
        behind = _testing.feature_sets()[_testing.feature_sets().index(most) + 1 :]
        sets = [name for name in sets if name not in behind or _EMULATED.get(name) == most]
    return [name for name in sets if name != "avx512vnni" or "avx512" not in sets]


if __name__ == "__main__":
    print(";".join(sanitized(*sys.argv[1:])))
