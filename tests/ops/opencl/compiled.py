"""Compile and run the C++ sources of the OpenCL tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def compile_test(source: str, *options: str) -> None:
    """Compile a source file of this folder; if that fails, fail the test with the compiler's output."""
    assert COMPILER is not None
    path = Path(__file__).with_name(source)
    command = [COMPILER, "-std=c++20", f"-I{ROOT / 'ops'}", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
