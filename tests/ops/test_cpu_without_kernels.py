"""Scalar kernels give correct results on an emulated Nehalem, which no vector kernel supports.

`ortolan doctor` must report scalar there. `make aarch64` runs the same check on a Cortex-A53.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of on_another_cpu.py in the emulator."""
    folder = tmp_path_factory.mktemp("answers")
    answers.main(folder, with_real=False)
    script = f"import sys; sys.path.append({str(ROOT)!r})\nfrom pathlib import Path\n"
    script += "from tests.ops.on_another_cpu import main\nmain(Path(sys.argv[1]))"
    done = subprocess.run(
        [EMULATOR, "-cpu", "Nehalem", sys.executable, "-c", script, str(folder)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # -4 means an illegal instruction
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
    assert set(distances) >= {*EXACT, *(f"model {form}" for form in answers.MODELS), "model decoder"}
    assert {name: distances[name] for name in EXACT} == dict.fromkeys(EXACT, 0.0)
    assert {name: apart for name, apart in distances.items() if apart > BOUND} == {}
