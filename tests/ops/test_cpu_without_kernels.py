"""Scalar kernels give correct results on an emulated Nehalem, which no vector kernel supports.

`ortolan doctor` must report scalar there. `make aarch64` runs the same check on a Cortex-A53.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..aarch64 import answers

ROOT = Path(__file__).parents[2]
EMULATOR = "qemu-x86_64-static"
# Single linear layers have the same bits on every CPU. Whole models do not: ONNX Runtime's LayerNormalization after the
# embeddings adds in a different order on each CPU, which can move an activation by one int8 or bf16 step.
EXACT = ("masked_matmul", "lut_post_op", *(f"layer {form}" for form in answers.LAYERS))
BOUND = 0.01

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="an x86 CPU is emulated on x86 alone"),
    pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"{EMULATOR} is not installed (qemu-user-static)"),
    # AddressSanitizer's shadow memory does not fit into an emulated process.
    pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer runs under no emulator"),
]


# Runs ONNX Runtime's own operators. If the emulator cannot, it cannot judge ours either.
WITHOUT_ORTOLAN = """
import numpy as np, onnx, onnxruntime
x = onnx.helper.make_tensor_value_info("x", 1, [64, 64])
nodes = [onnx.helper.make_node("MatMul", ["x", "x"], ["m"]), onnx.helper.make_node("Softmax", ["m"], ["y"])]
y = onnx.helper.make_tensor_value_info("y", 1, [64, 64])
model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y]), ir_version=8)
onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": np.ones((64, 64), np.float32)})
"""
# An instruction that the CPU lacks fails each time. The emulator itself has died of this signal once, in CI.
ATTEMPTS = 3


def emulated(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script in the emulator. Return code -4 means an illegal instruction; the error has the stack."""
    command = [EMULATOR, "-cpu", "Nehalem", sys.executable, "-X", "faulthandler", "-c", script, *arguments]
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode != -signal.SIGILL:
            break
    return done


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of on_another_cpu.py in the emulator."""
    folder = tmp_path_factory.mktemp("answers")
    answers.main(folder, with_real=False)
    script = f"import sys; sys.path.append({str(ROOT)!r})\nfrom pathlib import Path\n"
    script += "from tests.ops.on_another_cpu import main\nmain(Path(sys.argv[1]))"
    done = emulated(script, str(folder))
    if done.returncode == -signal.SIGILL and emulated(WITHOUT_ORTOLAN).returncode == -signal.SIGILL:
        pytest.skip(f"{EMULATOR} does not run plain ONNX Runtime on this machine")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_it_has_scalar_kernels_alone(found: dict[str, Any]) -> None:
    assert found["features"] == ["scalar"]
    assert len(found["kernels"]) > 5
    assert {name: rows for name, rows in found["kernels"].items() if not all("scalar" in row for row in rows)} == {}


def test_the_doctor_says_so(found: dict[str, Any]) -> None:
    status, detail, advice = found["check"]
    assert status == "note"
    assert "Nehalem" in detail and detail.endswith("uses scalar")
    assert "slower than plain ONNX Runtime" in advice


def test_every_answer_is_right(found: dict[str, Any]) -> None:
    distances = found["distances"]
    whole = (form for form in answers.MODELS if form != answers.BF16)
    assert set(distances) >= {*EXACT, *(f"model {form}" for form in whole), "model decoder"}
    assert sum(name.startswith(answers.BF16_NODE) for name in distances) >= 4
    assert {name: distances[name] for name in EXACT} == dict.fromkeys(EXACT, 0.0)
    assert {name: apart for name, apart in distances.items() if apart > BOUND} == {}
