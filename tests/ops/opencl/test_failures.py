"""If OpenCL is missing, fails or finds damaged files, W4A8MatMul runs on the CPU and logs one warning."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import ortolan

from ..group_node import node_model
from ..groups import GroupLayer
from ..single_node import session
from .compiled import ROOT, compile_test, needs_compiler
from .devices import Process, asked, needs_opencl

Run = Callable[..., Process]


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """Two W4A8MatMul nodes, so that a warning repeated per node would be noticed."""
    one = node_model(GroupLayer.random(np.random.default_rng(0), 96, 96, 32))
    second = one.graph.node.add()
    second.CopyFrom(one.graph.node[0])
    one.graph.node[0].output[0] = second.input[0] = "between"
    second.name = "second"
    return one


@pytest.fixture
def run(model: onnx.ModelProto, tmp_path: Path) -> Run:
    """Return a function that runs the model in a process, with its program cache in tmp_path."""

    def in_process(asked_for: str = "force", rows: tuple[int, ...] = (1, 9), **environment: str) -> Process:
        environment = {"ORTOLAN_CACHE": str(tmp_path), **environment}
        return Process(model, tmp_path, rows, ORTOLAN_OPENCL=asked_for, **environment)

    return in_process


def test_unasked_nothing_of_it_is_loaded(run: Run) -> None:
    for value in ("0", ""):
        done = run(value)
        assert not done.maps("OpenCL") and not done.maps("ortolan_opencl") and not done.warnings
        assert done.maps("libortolan_ops")


@needs_opencl
def test_asked_it_computes(run: Run) -> None:
    done = run()
    assert done.maps("libOpenCL") and done.maps("libortolan_opencl") and not done.warnings
    done.check(run("0"))


def test_another_value_is_refused(model: onnx.ModelProto) -> None:
    with asked("yes"), pytest.raises(Exception, match=r"ORTOLAN_OPENCL is 'yes', expected 0 .* 1 .* or force"):
        session(model)


@pytest.mark.parametrize("value", ["1", "force"])
def test_without_opencl_the_cpu_answers(run: Run, tmp_path: Path, value: str) -> None:
    (tmp_path / "libOpenCL.so.1").write_bytes(b"no library")
    done = run(value, LD_LIBRARY_PATH=str(tmp_path))
    assert len(done.warnings) == 1
    assert "node 'linear': using the CPU instead of OpenCL: OpenCL is not available" in done.warnings[0]
    done.check(run("0"))


def test_without_the_library_of_opencl_the_cpu_answers(run: Run, tmp_path: Path) -> None:
    alone = shutil.copy(ortolan.get_library_path(), tmp_path)
    done = run(library=str(alone))
    assert len(done.warnings) == 1 and "libortolan_opencl.so: cannot open" in done.warnings[0]
    done.check(run("0"))


# Values: the OpenCL function that fails, its status, and the number of calls that succeed before. Opening the two
# weights creates 3 buffers each and one program.
FAILURES = {
    "no platform": "clGetPlatformIDs:-1001:0",
    "no device": "clGetDeviceIDs:-1:0",
    "no context": "clCreateContext:-6:0",
    "no queue": "clCreateCommandQueue:-6:0",
    "no memory for a weight": "clCreateBuffer:-4:0",
    "no memory for the second weight": "clCreateBuffer:-4:4",
    "no memory for x": "clCreateBuffer:-61:6",
    "no memory for y": "clCreateBuffer:-61:7",
    "no program": "clCreateProgramWithSource:-6:0",
    "a build error": "clBuildProgram:-11:0",
    "no kernel": "clCreateKernel:-46:1",
    "a refused argument": "clSetKernelArg:-51:3",
    "x is not taken": "clEnqueueWriteBuffer:-5:0",
    "a kernel does not start": "clEnqueueNDRangeKernel:-5:0",
    "a kernel does not start later": "clEnqueueNDRangeKernel:-54:3",
    "a lost device": "clEnqueueReadBuffer:-36:1",
}


@needs_opencl
@needs_compiler
@pytest.mark.parametrize("failure", FAILURES)
def test_whatever_fails_the_cpu_answers(run: Run, broken: Callable[[str], dict[str, str]], failure: str) -> None:
    done = run(rows=(1, 9, 2, 40), **broken(FAILURES[failure]))
    assert len(done.warnings) == 1, done.warnings
    function, status, _ = FAILURES[failure].split(":")
    if function.startswith("clGet"):
        assert "OpenCL found no device" in done.warnings[0]
    else:
        assert f"{function} failed with {status}" in done.warnings[0]
    assert ("from now on" in done.warnings[0]) == (function.startswith("clEnqueue") or ":-61:" in FAILURES[failure])
    done.check(run("0", (1, 9, 2, 40)))


def damage(content: bytes, how: str) -> bytes:
    if how == "a flipped bit":
        return content[:500] + bytes([content[500] ^ 4]) + content[501:]
    return {"cut off": content[:-7], "empty": b"", "longer": content + b"!", "other": b"not a program" * 99}[how]


@needs_opencl
@needs_compiler
@pytest.mark.parametrize("how", ["a flipped bit", "cut off", "empty", "longer", "other"])
def test_programs_are_cached_and_damaged_files_made_anew(
    run: Run, broken: Callable[[str], dict[str, str]], tmp_path: Path, how: str
) -> None:
    no_compiler = broken("clCreateProgramWithSource:-6:0")
    assert run(**no_compiler).warnings
    expected = run("0")
    assert not run().warnings
    (file,) = (tmp_path / "opencl").iterdir()
    cached = run(**no_compiler)
    assert not cached.warnings  # nothing was compiled
    cached.check(expected)
    file.write_bytes(damage(file.read_bytes(), how))
    assert run(**no_compiler).warnings
    anew = run()
    assert not anew.warnings
    anew.check(expected)
    assert not run(**no_compiler).warnings
    assert [path.name for path in (tmp_path / "opencl").iterdir()] == [file.name]


@needs_opencl
@needs_compiler
def test_a_binary_that_the_driver_refuses_is_made_anew(
    run: Run, broken: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    assert not run().warnings
    refused = run(**broken("clCreateProgramWithBinary:-42:0"))
    assert refused.maps("libOpenCL") and not refused.warnings
    refused.check(run("0"))


@pytest.mark.slow
@needs_compiler
def test_files_of_programs_are_what_was_stored_or_nothing(tmp_path: Path) -> None:
    """Thousands of damaged files and concurrent writers: a read returns what was stored, or nothing."""
    sanitizers = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-pthread")
    test = tmp_path / "test"
    compile_test("program_cache.cc", str(ROOT / "ops/opencl/program_cache.cc"), "-o", str(test), *sanitizers)
    environment = {"ORTOLAN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([str(test)], env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr


@needs_opencl
def test_a_folder_that_cannot_be_written_costs_the_cache_only(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert not run(ORTOLAN_CACHE=str(tmp_path / "file")).warnings


@needs_compiler
@pytest.mark.skipif(not Path("/usr/include/CL/cl.h").is_file(), reason="no headers of OpenCL (Debian: opencl-headers)")
def test_declarations_are_those_of_opencl() -> None:
    compile_test("declarations.cc", "-fsyntax-only", "-Wno-ignored-attributes")
