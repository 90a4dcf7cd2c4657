"""Test where ONNX Runtime's headers come from (ops/ort/ort_headers.cmake), and which functions operators call."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from .ort_headers import ROOT, headers

NAMES = ("onnxruntime_c_api.h", "onnxruntime_ep_c_api.h", "onnxruntime_error_code.h")
PACKAGE = "com.github.asus4.onnxruntime-0.4.9.tgz"
SCRIPT = """
set(CMAKE_CURRENT_SOURCE_DIR {root})
set(CMAKE_BINARY_DIR {work}/build)
set(ORT_INCLUDE_DIR {work}/named)
include({root}/ops/ort/ort_headers.cmake)
set(ORTOLAN_ORT_NPM_SHA256 {sha256})
ortolan_unpack_npm_headers({work}/unpacked)
"""

CMAKE = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
needs_cmake = pytest.mark.skipif(CMAKE is None or os.name != "posix", reason="there is no cmake, or npm is no script")


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


@needs_cmake
def test_headers_from_a_package_of_npm(tmp_path: Path) -> None:
    unpack(tmp_path)
    found = {path.name: path.read_text() for path in (tmp_path / "unpacked").iterdir()}
    assert found == {name: f"// {name}\n" for name in NAMES}
    assert list((tmp_path / "build").iterdir()) == []  # the downloaded archive is deleted, because it is large


@needs_cmake
def test_a_package_with_another_sum_is_not_unpacked(tmp_path: Path) -> None:
    assert f"{PACKAGE} has sha256" in unpack(tmp_path, is_right=False)
    assert not (tmp_path / "unpacked").exists()


@needs_cmake
def test_without_npm(tmp_path: Path) -> None:
    assert "npm is not installed" in unpack(tmp_path, has_npm=False)


def test_operators_call_functions_of_api_17() -> None:
    """The headers are newer than the API that operators request (kOperatorApi), so the compiler does not check this."""
    include = headers()
    if include is None:
        pytest.skip("there are no headers of ONNX Runtime: set ORT_INCLUDE_DIR")
    table = (include / "onnxruntime_c_api.h").read_text(encoding="utf-8").partition("\nstruct OrtApi {\n")[2]
    of_17, last, _ = table.partition("ORT_API2_STATUS(SessionOptionsAppendExecutionProvider_OpenVINO_V2")
    assert last
    pattern = r"ORT_API2_STATUS\(\s*(\w+)|ORT_CLASS_RELEASE\((\w+)\)|ORT_API_CALL\*\s*(\w+)\)"
    old = {status or other or f"Release{released}" for status, released, other in re.findall(pattern, of_17)}
    files = [path for glob in ("ort/*", "register.cc", "*/op*.*", "*/*_op.*") for path in (ROOT / "ops").glob(glob)]
    sources = "".join(path.read_text(encoding="utf-8") for path in files if path.suffix in (".h", ".cc"))
    called = set(re.findall(r"(?:\bApi\(\)\.|\bort_?\.|\bort->|&OrtApi::)(\w+)", sources))
    assert {"CreateStatus", "ReleaseStatus", "KernelContext_ParallelFor", "InvokeOp", "ReleaseOp"} <= called
    assert called <= old
