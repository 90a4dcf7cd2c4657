"""The doctor: all checks pass on this machine; broken installations get advice and never crash it."""

import importlib
import json
import os
import platform
import re
import sys
from pathlib import Path

import pytest

import ortolan
from ortolan import _testing, doctor
from ortolan.errors import LibraryError
from ortolan.opencl import opencl_devices

from ..ops.opencl.devices import needs_opencl


def test_all_is_well_here(invoke):
    result = invoke("doctor")
    assert result.exit_code == 0, result.stdout
    assert ("Everything that Ortolan needs works" in result.stdout) == (doctor.check_provider().status == "ok")
    for name in ("onnxruntime", "onnx-ir", "operator library", "scalar", "avx512bf16", "in use"):
        assert name in result.stdout
    long = [line for line in result.stdout.splitlines() if len(line) > 80]
    assert all(len(line.split()[-1]) > 50 for line in long)  # only lines with long paths exceed 80 columns


def test_json(invoke):
    report = json.loads(invoke("doctor", "--json").stdout)
    assert report["passed"] is True
    assert {check["name"]: check["status"] for check in report["checks"]}["operator library"] == "ok"
    assert [one["name"] for one in report["feature_sets"]] == _testing.feature_sets()
    used = [one["name"] for one in report["feature_sets"] if one["state"] == "in use"]
    assert used == ortolan.cpu_info()["features"]


def test_the_provider_registers():
    assert doctor.check_provider().status == "ok"


def test_an_onnxruntime_without_providers_is_noted(monkeypatch, tmp_path):
    """An old onnxruntime is only noted, because optimized models do not need the provider."""
    package = Path(ortolan.__file__).parent
    (tmp_path / "sitecustomize.py").write_text("import onnxruntime\nonnxruntime.__version__ = '1.22.0'\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{package.parent}")
    check = doctor.check_provider()
    assert check.status == "note"
    assert "needs 1.23 or later" in check.detail


def test_the_last_line_tells_of_a_missing_provider(monkeypatch, invoke):
    monkeypatch.setattr(doctor, "check_provider", lambda: doctor.Check("execution provider", "note", "too old"))
    result = invoke("doctor")
    assert result.exit_code == 0
    assert "Everything" not in result.stdout
    assert "The execution provider is missing" in result.stdout.splitlines()[-1]


@needs_opencl
@pytest.mark.parametrize("value", ["0", "1", "force"])
def test_opencl_devices_are_listed(monkeypatch, value):
    monkeypatch.setenv("ORTOLAN_OPENCL", value)
    check = doctor.check_opencl()
    assert check.status == "ok"
    # PoCL may report slightly different memory in another process.
    found, devices = (re.sub(r"\d+ MiB", "", text) for text in (check.detail, "\n".join(opencl_devices())))
    assert all(device in found for device in devices.splitlines())
    assert check.detail.startswith("not used: ORTOLAN_OPENCL is 0") == (value == "0")


@pytest.mark.parametrize(("value", "status"), [("", "ok"), ("1", "note")])
def test_a_machine_without_opencl(monkeypatch, tmp_path, value, status):
    (tmp_path / "libOpenCL.so.1").write_bytes(b"no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("ORTOLAN_OPENCL", value)
    check = doctor.check_opencl()
    assert check.status == status
    if value:
        assert "OpenCL is not available" in check.detail and "ocl-icd-libopencl1" in check.detail
    else:
        assert check.detail == "not used: ORTOLAN_OPENCL is not set"


def test_opencl_that_is_asked_for_by_no_known_word(monkeypatch):
    monkeypatch.setenv("ORTOLAN_OPENCL", "yes")
    check = doctor.check_opencl()
    assert check.status == "failed"
    assert "'yes', expected 0, 1 or force" in check.detail


def test_a_missing_library(invoke, monkeypatch):
    def missing():
        raise LibraryError("libortolan_ops.so is not where it should be")

    monkeypatch.setattr(ortolan, "get_library_path", missing)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "libortolan_ops.so is not where it should be" in result.stdout
    assert "in a source tree: pip install ." in " ".join(result.stdout.split())
    assert "1 check failed" in result.stdout
    assert doctor.check_library("/no/such/libortolan_ops.so").status == "failed"


# With half of its bytes, the library loads and then kills the process.
@pytest.mark.parametrize("keep", [0, 10, 0.5])
def test_a_damaged_library(monkeypatch, tmp_path, keep):
    content = Path(ortolan.get_library_path()).read_bytes()
    damaged = tmp_path / "libortolan_ops.so"
    damaged.write_bytes(content[: int(keep * len(content))] if keep < 1 else b"no library at all " * keep)
    check = doctor.check_library(damaged)
    assert check.status == "failed"
    assert str(damaged) in check.detail
    assert "damaged" in check.advice


@pytest.mark.parametrize(
    ("problem", "advice"),
    [
        ("this ONNX Runtime is version 1.15, Ortolan needs 1.17. Upgrade onnxruntime.", "--upgrade onnxruntime"),
        ("ORTOLAN_ISA is 'foo', expected one that this CPU has: scalar", "unset ORTOLAN_ISA"),
        ("version `GLIBC_2.38' not found", "built for another system"),
        ("ModuleNotFoundError: No module named 'onnx'", "packages above"),
        ("the process that loaded it was killed by signal SIGILL", "ORTOLAN_ISA=scalar"),
        ("SparseAMXMatMul differs from numpy by up to 3, expected no difference", "report"),
        ("something new", "reinstall"),
    ],
)  # fmt: skip
def test_each_problem_has_its_advice(problem, advice):
    assert advice in doctor._library_advice(problem)


# One name is unknown, and the other is an instruction set that this CPU lacks.
@pytest.mark.parametrize("isa", ["avx1024", "neon" if platform.machine() == "x86_64" else "avx2"])
def test_an_impossible_isa_fails(run_cli, isa):
    result = run_cli("doctor", "--json", ORTOLAN_ISA=isa)
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    has = ", ".join(ortolan.cpu_info()["detected_features"])
    for name in ("ORTOLAN_ISA", "operator library"):
        assert checks[name]["status"] == "failed"
        assert f"ORTOLAN_ISA is '{isa}', expected one that this CPU has: {has}" in checks[name]["detail"]
        assert "unset ORTOLAN_ISA" in checks[name]["advice"]


def test_a_lowered_isa_is_noted(run_cli):
    result = run_cli("doctor", "--json", ORTOLAN_ISA="scalar")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.returncode == 0
    assert (checks["ORTOLAN_ISA"]["status"], checks["operator library"]["status"]) == ("note", "ok")
    states = {one["name"]: one["state"] for one in json.loads(result.stdout)["feature_sets"]}
    lacked = [name for name in states if name not in ortolan.cpu_info()["detected_features"]]
    assert states.pop("scalar") == "in use"
    assert all(state == ("" if name in lacked else "available") for name, state in states.items())


@pytest.mark.parametrize("name", ["onnxruntime", "onnx-ir", "numpy"])
def test_a_broken_package(monkeypatch, name):
    real_import = importlib.import_module

    def broken(module, *arguments):
        if module == doctor._PACKAGES[name]:
            raise OSError("libfoo.so: cannot open\nshared object file")
        return real_import(module, *arguments)

    monkeypatch.setattr(importlib, "import_module", broken)
    report = doctor.run_doctor()
    (check,) = [check for check in report.checks if check.name == name]
    assert not report.passed
    assert check.detail == "cannot be imported: libfoo.so: cannot open shared object file"
    assert check.advice.startswith(f'pip install --upgrade "{name}>=')


def test_an_old_package(monkeypatch):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "__version__", "1.2.3")
    check = doctor.check_package("onnxruntime")
    assert check.status == "failed"
    assert "1.2.3 is too old" in check.detail


def test_a_missing_extra_is_no_failure(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check = doctor.check_extra("tokenizers")
    assert check.status == "note"
    assert "pip install tokenizers" in check.advice


def test_a_missing_native_module(monkeypatch):
    monkeypatch.delattr(ortolan, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "ortolan._native", None)
    report = doctor.run_doctor()
    failed = {check.name for check in report.checks if check.status == "failed"}
    assert {"native module", "CPU"} <= failed
    assert all(one.state == "" for one in report.feature_sets)
    assert "pip install" in str([check.advice for check in report.checks if check.name == "native module"])


def test_a_check_that_breaks_does_not_stop_the_others(monkeypatch):
    def broken():
        raise RuntimeError("surprise")

    monkeypatch.setattr(doctor, "check_cpu", broken)
    report = doctor.run_doctor()
    assert [check.detail for check in report.checks if check.name == "CPU"] == ["the check itself failed: surprise"]
    assert report.checks[-1].status == "ok"
