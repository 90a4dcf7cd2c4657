"""Operators on lower tiers: ORTOLAN_ISA is read once a process, so each tier has a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortolan import _testing

every_tier = pytest.mark.parametrize(
    "isa", sorted({row["isa"] for row in _testing.sparse_amx_matmul_kernels() if row["runs_here"]})
)


def run_with_isa(isa: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    # The interpreter's own search path: the repository's folders must not hide the installed package.
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(root)!r})\n{script}", *arguments],
        env={**os.environ, "ORTOLAN_ISA": isa},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def check_with_isa(isa: str, script: str) -> None:
    """Run a script whose assertions must hold on this tier."""
    check = "from ortolan import _native\nassert _native.cpu_info()['isa'] == sys.argv[1], _native.cpu_info()\n"
    done = run_with_isa(isa, check + script, isa)
    assert done.returncode == 0, done.stderr
