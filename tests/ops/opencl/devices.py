"""Detect OpenCL devices for tests, and open sessions that use them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from ortolan.errors import OrtolanError
from ortolan.opencl import VARIABLE, opencl_devices

from ..single_node import session

# Open a model file, save its outputs for x with each number of rows, and print the shared libraries of the process.
_RUN = """
import json, sys
import numpy as np, onnxruntime as ort
import ortolan
model, answers, library, rows = sys.argv[1:5]
options = ort.SessionOptions()
options.register_custom_ops_library(library or ortolan.get_library_path())
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
k = session.get_inputs()[0].shape[-1]
found = {}
for i, m in enumerate(json.loads(rows)):
    x = np.random.default_rng(m).standard_normal((m, k), dtype=np.float32)
    found[str(i)] = session.run(None, {"x": x})[0]
np.savez(answers, **found)
print(json.dumps(sorted({line.split()[-1] for line in open("/proc/self/maps") if ".so" in line})))
"""


@functools.cache
def _problem() -> str:
    try:
        opencl_devices()
    except OrtolanError as error:
        return str(error)
    return ""


needs_opencl = pytest.mark.skipif(bool(_problem()), reason=f"no OpenCL (Debian: pocl-opencl-icd): {_problem()}")


@contextmanager
def asked(value: str) -> Iterator[None]:
    """Set ORTOLAN_OPENCL inside the block, for sessions opened there."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = value
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def sessions(model: onnx.ModelProto, threads: int = 1) -> tuple[ort.InferenceSession, ort.InferenceSession]:
    """Return two sessions on the model: one on the CPU, and one that runs W4A8MatMul on the OpenCL device."""
    with asked("0"):
        cpu = session(model, threads=threads)
    with asked("force"):
        return cpu, session(model, threads=threads)


def assert_equal_bits(y: np.ndarray, expected: np.ndarray) -> None:
    """Check that both arrays have the same bits; payloads of NaNs may differ."""
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    there = ~np.isnan(y)
    np.testing.assert_array_equal(y[there].view(np.uint32), expected[there].view(np.uint32))


class Process:
    """Run a model in a separate process, because drivers and caches are read once per process."""

    def __init__(
        self,
        model: onnx.ModelProto,
        folder: Path,
        rows: tuple[int, ...] = (1, 9),
        library: str = "",
        **environment: str,
    ) -> None:
        onnx.save(model, folder / "model.onnx")
        answers = folder / "answers.npz"
        arguments = [str(folder / "model.onnx"), str(answers), library, json.dumps(rows)]
        done = subprocess.run(
            [sys.executable, "-c", _RUN, *arguments],
            env={**os.environ, **environment},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self.warnings = [line for line in done.stderr.splitlines() if "OpenCL" in line]
        self.mapped: list[str] = json.loads(done.stdout)
        with np.load(answers) as loaded:
            self.answers = [loaded[str(i)] for i in range(len(rows))]

    def check(self, expected: Process) -> None:
        for y, of_cpu in zip(self.answers, expected.answers, strict=True):
            assert_equal_bits(y, of_cpu)

    def maps(self, name: str) -> bool:
        return any(name in path for path in self.mapped)


def feeds(m: int, k: int, seed: int = 0) -> Mapping[str, Any]:
    return {"x": np.random.default_rng((m, seed)).standard_normal((m, k), dtype=np.float32)}
