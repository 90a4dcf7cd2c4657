"""Test concurrent OpenCL sessions, any number of threads, and that sessions release their OpenCL objects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

from ..group_node import node_model
from ..groups import GroupLayer
from ..single_node import save_at_odd_places, session
from .compiled import needs_compiler
from .devices import asked, assert_equal_bits, feeds, needs_opencl, sessions

pytestmark = needs_opencl
K, N = 300, 90
# Open four sessions one after another, and print the number of live OpenCL objects during and after each.
_LIVE = """
import ctypes, json, sys
import numpy as np, onnxruntime as ort
import ortolan
def run():
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(ortolan.get_library_path())
    session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
    for m in (1, 40):
        session.run(None, {"x": np.ones((m, session.get_inputs()[0].shape[-1]), np.float32)})
    return ctypes.CDLL("libOpenCL.so.1").live_objects()
print(json.dumps([(run(), ctypes.CDLL("libOpenCL.so.1").live_objects()) for _ in range(4)]))
"""


def model_of(seed: int, group: int = 32) -> onnx.ModelProto:
    return node_model(GroupLayer.random(np.random.default_rng(seed), K, N, group))


@pytest.mark.parametrize("value", ["1", "force"])
def test_calls_at_the_same_time(value: str) -> None:
    """Four threads call two sessions, which share the device; each call must get its own result."""
    models = [model_of(0), model_of(1, 64)]
    with asked("0"):
        cpu = [session(model) for model in models]
    with asked(value):
        device = [session(model) for model in models]
    rows = (1, 2, 7, 8, 33, 64)
    expected = [[one.run(None, feeds(m, K))[0] for m in rows] for one in cpu]

    def call(thread: int) -> None:
        for i in range(60):
            which, at = (thread + i) % 2, (thread + i // 2) % len(rows)
            assert_equal_bits(device[which].run(None, feeds(rows[at], K))[0], expected[which][at])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads(threads: int) -> None:
    """The CPU threads pack x and compute the epilogue, with the same bits for any number of threads."""
    cpu, device = sessions(model_of(2), threads)
    for m in (1, 8, 500):
        assert_equal_bits(device.run(None, feeds(m, K))[0], cpu.run(None, feeds(m, K))[0])


def test_a_session_that_ends_while_another_runs() -> None:
    cpu, device = sessions(model_of(3))
    expected = cpu.run(None, feeds(9, K))[0]

    def come_and_go(_: int) -> None:
        for seed in range(10):
            with asked("force"):
                session(model_of(seed)).run(None, feeds(2, K))

    with ThreadPoolExecutor(1) as pool:
        others = pool.map(come_and_go, range(1))
        for _ in range(50):
            assert_equal_bits(device.run(None, feeds(9, K))[0], expected)
        list(others)


@needs_compiler
@pytest.mark.parametrize(
    ("failure", "kept"),
    [
        ("none:0:0", 5),  # context, queue, program, buffers for x and y stay alive
        ("clCreateBuffer:-4:1", 2),  # fails in the second weight buffer, before there is a program
        ("clCreateKernel:-46:1", 3),
        ("clCreateBuffer:-61:3", 3),  # fails in the first call
    ],
)
def test_what_a_session_holds_goes_with_it(
    broken: Callable[[str], dict[str, str]], tmp_path: Path, failure: str, kept: int
) -> None:
    save_at_odd_places(model_of(4), tmp_path)  # unaligned weights cannot be shared, so the device has copies
    done = subprocess.run(
        [sys.executable, "-c", _LIVE, str(tmp_path / "model.onnx")],
        env={**os.environ, "ORTOLAN_OPENCL": "force", "ORTOLAN_CACHE": str(tmp_path), **broken(failure)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    during, behind = zip(*json.loads(done.stdout), strict=True)
    assert set(behind) == {kept}
    if failure.startswith("none"):
        assert set(during) == {kept + 5}  # three weight buffers and two kernels
