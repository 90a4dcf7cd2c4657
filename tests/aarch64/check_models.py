"""On an emulated Arm CPU: models that were optimized on x86 give the answers that they gave there (answers.py), within
ONNX Runtime for aarch64. `make test-aarch64` names this file; the suite does not collect it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import onnx
import pytest

import ortolan
from ortolan import doctor

FOLDER = Path(os.environ["ORTOLAN_ANSWERS"])
# The best set of features of a CPU, by qemu's name.
BEST = {"cortex-a53": "neon", "cortex-a72": "neon", "neoverse-n1": "dotprod", "max": "i8mm"}
NAMES = sorted(path.stem for path in FOLDER.glob("*.onnx"))
# How far answers may be apart, by norm. Our layers have the same bits. ONNX Runtime's operators between them, as the
# LayerNormalization of embeddings, add up floats in another order, and so do caches.
EXACT = ("layer sparse-int8", "layer sparse-int4", "layer sparse-int8-4x1", "layer int4")
BOUND = 1e-6


def test_this_is_the_cpu_and_the_doctor_says_what_it_has() -> None:
    assert platform.machine() == "aarch64"
    best = BEST[os.environ["CPU"]]
    assert ortolan.cpu_info()["isa"] == best
    check = doctor.check_cpu()
    assert check.status == "ok" and check.detail.endswith(best)
    doctor.run_tiny_model(ortolan.get_library_path())
    assert set(EXACT) < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_gives_the_answers_of_x86(name: str) -> None:
    model = onnx.load(FOLDER / f"{name}.onnx")
    assert any(node.domain == "ai.ortolan" for node in model.graph.node)
    session = ortolan.create_session(FOLDER / f"{name}.onnx")
    with np.load(FOLDER / f"{name}.npz") as arrays:
        feeds = {key.removeprefix("in."): arrays[key] for key in arrays.files if key.startswith("in.")}
        expected = {key.removeprefix("out."): arrays[key] for key in arrays.files if key.startswith("out.")}
    found = dict(zip((output.name for output in session.get_outputs()), session.run(None, feeds), strict=True))
    assert found.keys() == expected.keys()
    for output, there in expected.items():
        here = found[output]
        assert here.shape == there.shape and here.dtype == there.dtype
        if here.dtype != np.float32:  # key codes
            apart = np.mean(here != there)
        else:
            apart = np.linalg.norm(here - there) / np.linalg.norm(there)
        assert apart <= (0.0 if name in EXACT else BOUND), f"{output} of {name}: {apart:.2e} apart"
