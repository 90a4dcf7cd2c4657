"""Test the exports of the built library, and that code for any CPU has no instructions of a specific target."""

from __future__ import annotations

import json
import platform
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import ortolan
from ortolan import _testing
from ortolan.opencl import LIBRARY_NAME

ROOT = Path(__file__).parents[2]
needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")


def nm(path: Path, *options: str) -> list[list[str]]:
    listing = subprocess.run(["nm", *options, str(path)], capture_output=True, text=True, check=True).stdout
    return [line.split() for line in listing.splitlines() if line.strip()]


@needs_nm
def test_library_exports_what_hosts_call() -> None:
    exported = [line[-1] for line in nm(Path(ortolan.get_library_path()), "-D", "--defined-only")]
    assert sorted(exported) == ["CreateEpFactories", "RegisterCustomOps", "ReleaseEpFactory"]


@needs_nm
def test_library_of_opencl_exports_its_functions_and_needs_no_opencl() -> None:
    library = Path(ortolan.get_library_path()).with_name(LIBRARY_NAME)
    assert [line[-1] for line in nm(library, "-D", "--defined-only")] == ["OrtolanGetOpenCl"]
    assert not [line[-1] for line in nm(library, "-D", "--undefined-only") if re.match("cl[A-Z]", line[-1])]


@needs_nm
def test_library_needs_no_python() -> None:
    undefined = [line[-1] for line in nm(Path(ortolan.get_library_path()), "-D", "--undefined-only")]
    assert not [symbol for symbol in undefined if symbol.startswith(("Py", "_Py"))]


def compiled() -> dict[Path, list[str]]:
    """Map the object files of the latest build of all targets in this source tree to their compile commands."""
    partial = ("-fsanitize", "-DORTOLAN_AMX_ON_AVX2")
    trees = [
        path
        for path in ROOT.glob("build/*/compile_commands.json")
        if not any(option in path.read_text() for option in partial)
    ]
    found: dict[Path, list[str]] = {}
    if trees:
        last = max(trees, key=lambda path: path.stat().st_mtime)
        for entry in json.loads(last.read_text()):
            command = shlex.split(entry["command"])
            found[Path(entry["directory"]) / command[command.index("-o") + 1]] = command
    objects = {path: command for path, command in found.items() if path.exists()}
    if not objects:
        pytest.skip("no build tree here")
    return objects


def target_of(path: Path) -> str | None:
    """Return the feature set for which an object file is compiled, or None for any CPU."""
    folder = next(part for part in path.parts if part.endswith(".dir")).removesuffix(".dir")
    target = folder.rpartition("_")[2]
    return target if target in _testing.feature_sets() and target != "scalar" else None


def test_only_targets_have_flags_of_instruction_sets() -> None:
    for path, command in compiled().items():
        has_flags = any(flag.startswith(("-mavx", "-mfma", "-march", "-mcpu")) for flag in command)
        assert has_flags == (target_of(path) is not None), path


@needs_nm
def test_targets_define_no_weak_symbols() -> None:
    """Targets define no weak (inline) functions: the linker could keep an AVX-512 copy for every CPU."""
    targets = {path: target for path in compiled() if (target := target_of(path)) is not None}
    if platform.machine() == "x86_64":
        assert {"avx2", "avxvnni", "avx512bw", "avx512vnni", "avx512", "avx512bf16", "amx"} <= set(targets.values())
    for path in targets:
        weak = [line for line in nm(path, "--defined-only") if line[-2] in "WVu"]
        assert not weak, f"{path}: {weak}"


@pytest.mark.skipif(shutil.which("objdump") is None or platform.machine() != "x86_64", reason="needs objdump, x86-64")
def test_what_runs_on_any_cpu_has_no_avx_instructions() -> None:
    def avx_in(path: Path) -> list[str]:
        listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True)
        return re.findall(r"\t(v[a-z0-9]+ .*%[xyz]mm.*)", listing.stdout)

    baseline = [path for path in compiled() if target_of(path) is None and "_testing.dir" not in path.parts]
    assert len(baseline) > 10
    for path in baseline:
        assert not avx_in(path), f"{path}: {avx_in(path)[:3]}"
    assert any(avx_in(path) for path in compiled() if target_of(path) == "avx2")
