"""What the built library shows to the outside, and that no ISA tier leaks out of its files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import ortolan

ROOT = Path(__file__).parents[2]
needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")


def nm(path: Path, *options: str) -> list[list[str]]:
    listing = subprocess.run(["nm", *options, str(path)], capture_output=True, text=True, check=True).stdout
    return [line.split() for line in listing.splitlines() if line.strip()]


@needs_nm
def test_library_exports_one_function() -> None:
    exported = [line[-1] for line in nm(Path(ortolan.get_library_path()), "-D", "--defined-only")]
    assert exported == ["RegisterCustomOps"]


@needs_nm
def test_library_needs_no_python() -> None:
    undefined = [line[-1] for line in nm(Path(ortolan.get_library_path()), "-D", "--undefined-only")]
    assert not [symbol for symbol in undefined if symbol.startswith(("Py", "_Py"))]


@needs_nm
def test_isa_files_define_no_weak_symbols() -> None:
    """A weak (inline) function compiled for AVX-512 may be the copy that the linker keeps for every CPU."""
    objects = [path for path in ROOT.glob("build/*/CMakeFiles/ortolan_*.dir/ops/**/x86_*.o") if "asan" not in str(path)]
    if not objects:
        pytest.skip("no build tree here")
    assert {path.name.split(".")[0] for path in objects} >= {"x86_avx2", "x86_avx512", "x86_avx512bf16", "x86_amx"}
    for path in objects:
        weak = [line for line in nm(path, "--defined-only") if line[-2] in "WVu"]
        assert not weak, f"{path.name}: {weak}"
