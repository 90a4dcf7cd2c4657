"""Test AVX-VNNI: the emulator, the vector functions, and kernels, whose results must have the bits of AVX2's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from . import emulator

ROOT = Path(__file__).parents[2]
FORMS = range(4)


@pytest.mark.parametrize("form", FORMS)
def test_the_instruction(form: int, emulated: emulator.Emulator) -> None:
    rng = np.random.default_rng(form)
    a = rng.integers(0, 256, 32, np.uint8)
    b = rng.integers(-128, 128, 32, np.int8)
    c = rng.integers(-(2**31), 2**31, 8, np.int64)
    sums = c.astype(np.int32)
    assert emulator.load_shim().shim_dot_quads(form, *(array.ctypes.data for array in (sums, a, b)))
    products = (a.astype(np.int64) * b).reshape(8, 4).sum(axis=1)
    np.testing.assert_array_equal(sums, (c + products).astype(np.int32))
    if "avxvnni" not in emulator.detected_features():
        assert emulated.count("vpdpbusd") == 1


def test_the_vocabulary() -> None:
    code = f"""
import os, sys
os.chdir({str(ROOT / "tests")!r})
import pytest
plugins = [f"-pno:{{name}}" for name in ("cacheprovider", "xdist", "faulthandler")]
sys.exit(pytest.main(["-q", *plugins, "simd", "-k", "avxvnni"]))
"""
    done = emulator.run_avxvnni(code)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@pytest.mark.slow
def test_its_answers_are_those_of_avx2() -> None:
    code = """
from tests.ops.stored.check import report
print(report("avxvnni", most_rows=5, all_threads=(1,)))
"""
    done = emulator.run_avxvnni(code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    problems = found["problems"] + found["notes"]
    assert not problems, "\n".join(problems)


def test_its_kernels_are_chosen() -> None:
    code = """
from ortolan import _native, _testing
assert _native.cpu_info()["isa"] == "avxvnni", _native.cpu_info()
rooms = ("w4a8_matmul", "w8a8_matmul", "sparse_amx_matmul_int8", "vnni_spmm")
for kernels in (getattr(_testing, f"{room}_kernels") for room in rooms):
    best = next(row for row in kernels() if row["isa"] in _native.cpu_info()["features"])
    assert best["name"] == "avxvnni", best
"""
    done = emulator.run_avxvnni(code)
    assert done.returncode == 0, done.stderr
