"""A fixture with an OpenCL loader that fails in a chosen function."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from .compiled import compile_test


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Return a function that turns "function:status:calls" (see broken_loader.cc) into environment variables."""
    folder = tmp_path_factory.mktemp("loader")
    compile_test("broken_loader.cc", "-shared", "-fPIC", "-o", str(folder / "libOpenCL.so.1"), "-ldl")
    maps = Path("/proc/self/maps").read_text()
    real = re.search(r"\S+/libOpenCL\.so\S*", maps)  # libOpenCL is mapped, because devices.py has listed the devices
    assert real is not None
    # LD_LIBRARY_PATH may already name folders with drivers (.ci/pocl).
    folders = os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return lambda what: {"LD_LIBRARY_PATH": folders, "REAL_OPENCL": real[0], "BROKEN_OPENCL": what}
