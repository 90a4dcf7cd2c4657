"""Run code with fewer CPU features in separate processes, because ORTOLAN_ISA is read once per process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortolan import _native

each_isa = pytest.mark.parametrize("isa", _native.cpu_info()["detected_features"])


def run_with_isa(isa: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    # The working folder and sys.path must not put the source tree before the installed package.
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(root)!r})\n{script}", *arguments],
        env={**os.environ, "ORTOLAN_ISA": isa},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def check_with_isa(isa: str, script: str) -> None:
    """Run a script whose assertions must hold with this feature set."""
    check = "from ortolan import _native\nassert _native.cpu_info()['isa'] == sys.argv[1], _native.cpu_info()\n"
    done = run_with_isa(isa, check + script, isa)
    assert done.returncode == 0, done.stderr
