"""Test that .ci/check_wheel.py finds defects of wheels and libraries."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "check_wheel.py"
needs_tools = pytest.mark.skipif(not (shutil.which("cc") and shutil.which("readelf")), reason="needs cc and readelf")


@pytest.fixture(scope="module")
def check_wheel() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_wheel", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library(path: Path, source: str, *options: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *options]
    subprocess.run(command, input=source, text=True, check=True)
    return path


@needs_tools
def test_a_library_needs_nothing_but_the_systems(check_wheel: ModuleType, tmp_path: Path) -> None:
    library(tmp_path / "libother.so", "void other(void) {}", "-Wl,-soname,libother.so.1")
    source = "void other(void); void* malloc(unsigned long); void* shown(void) { other(); return malloc(1); }"
    path = library(tmp_path / "libone.so", source, f"-L{tmp_path}", "-lother")
    assert check_wheel.library_problems(path, None) == ["needs libother.so.1"]
    assert check_wheel.library_problems(path, 99) == ["needs libother.so.1"]
    # malloc needs glibc 2.2.5 on x86-64 and 2.17 on Arm.
    assert any(problem.startswith("needs malloc@GLIBC_2.") for problem in check_wheel.library_problems(path, 1))


@needs_tools
def test_the_operator_library_shows_what_hosts_call(check_wheel: ModuleType, tmp_path: Path) -> None:
    source = "void RegisterCustomOps(void) {} void std_string(void) {}"
    (problem,) = check_wheel.library_problems(library(tmp_path / "libortolan_ops.so", source), None)
    assert problem.startswith("exports std_string, expected only CreateEpFactories, RegisterCustomOps")


@needs_tools
def test_a_wheel_is_of_no_test_build(check_wheel: ModuleType, tmp_path: Path) -> None:
    path = library(tmp_path / "files" / "_testing.so", 'const char text[] = "ORTOLAN_ASSUME_AMX";')
    wheel = tmp_path / "ortolan-1-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, "ortolan/_testing.so")
    assert check_wheel.problems(str(wheel)) == [
        "ortolan/libortolan_ops.so is missing",
        "ortolan/libortolan_opencl.so is missing",
        "ortolan/_native. is missing",
        "ortolan/_testing.so belongs to test builds",
        "ortolan/_testing.so contains ORTOLAN_ASSUME_, which only test builds may",
    ]
    assert f"{wheel.name} 0.0 MiB, _testing.so 0.0 MiB" == check_wheel.sizes(str(wheel))
