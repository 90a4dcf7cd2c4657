"""Test the sources of ONNX Runtime's headers if its release cannot be downloaded (ops/ort/ep_headers.cmake)."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("onnxruntime_c_api.h", "onnxruntime_ep_c_api.h", "onnxruntime_error_code.h")
PACKAGE = "com.github.asus4.onnxruntime-0.4.9.tgz"
SCRIPT = """
set(CMAKE_CURRENT_SOURCE_DIR {root})
set(CMAKE_BINARY_DIR {work}/build)
set(ORT_EP_INCLUDE_DIR {work}/named)
include({root}/ops/ort/ep_headers.cmake)
set(ORTOLAN_EP_NPM_SHA256 {sha256})
ortolan_unpack_npm_ep_headers({work}/unpacked)
"""

CMAKE = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
pytestmark = [
    pytest.mark.skipif(CMAKE is None, reason="there is no cmake"),
    pytest.mark.skipif(os.name != "posix", reason="npm is a shell script here"),
]


def unpack(work: Path, is_right: bool = True, has_npm: bool = True) -> str:
    """Run the build's CMake function with an `npm` that copies a small package, and return what CMake prints."""
    named, package, tools = work / "named", work / PACKAGE, work / "bin"
    for folder in (named, work / "build", tools):
        folder.mkdir()
    (named / NAMES[0]).write_text("#define ORT_API_VERSION 29\n")
    (named / NAMES[1]).touch()
    inside = "package/Plugins/iOS~/onnxruntime.xcframework/ios-arm64_x86_64-simulator/onnxruntime.framework/Headers"
    with tarfile.open(package, "w:gz") as archive:
        for name in NAMES:
            (work / name).write_text(f"// {name}\n")
            archive.add(work / name, f"{inside}/{name}")
    if has_npm:
        (tools / "npm").write_text(f"#!/bin/sh\n/bin/cp {package} .\n")
        (tools / "npm").chmod(0o755)
    sha256 = hashlib.sha256(package.read_bytes()).hexdigest() if is_right else "0" * 64
    (work / "script.cmake").write_text(SCRIPT.format(root=ROOT, work=work, sha256=sha256))
    assert CMAKE is not None
    ran = subprocess.run(
        [CMAKE, "-P", work / "script.cmake"],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout + ran.stderr


def test_headers_from_a_package_of_npm(tmp_path: Path) -> None:
    unpack(tmp_path)
    found = {path.name: path.read_text() for path in (tmp_path / "unpacked").iterdir()}
    assert found == {name: f"// {name}\n" for name in NAMES}
    assert list((tmp_path / "build").iterdir()) == []  # the downloaded archive is deleted, because it is large


def test_a_package_with_another_sum_is_not_unpacked(tmp_path: Path) -> None:
    assert f"{PACKAGE} has sha256" in unpack(tmp_path, is_right=False)
    assert not (tmp_path / "unpacked").exists()


def test_without_npm(tmp_path: Path) -> None:
    assert "npm is not installed" in unpack(tmp_path, has_npm=False)
