"""Print how model outputs and kernels on an emulated CPU differ from those on this machine.

`python -m tests.ops.on_another_cpu FOLDER` runs in the emulator, on the models that tests/aarch64/answers.py wrote to
the folder. It prints the CPU's features, the kernels that run, and each difference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import ortolan
from ortolan import _native, _testing, doctor


def distance(there: np.ndarray, here: np.ndarray) -> float:
    """Return the relative error (Euclidean norm), or for integers the fraction of different elements."""
    if there.dtype != np.float32:
        return float(np.mean(there != here))
    return float(np.linalg.norm(here - there) / np.linalg.norm(there))


def model_errors(folder: Path) -> dict[str, float]:
    """Map each model's name to the largest error of its outputs."""
    found = {}
    for path in sorted(folder.glob("*.onnx")):
        session = ortolan.create_session(path)
        with np.load(path.with_suffix(".npz")) as arrays:
            feeds = {key.removeprefix("in."): arrays[key] for key in arrays.files if key.startswith("in.")}
            names = [output.name for output in session.get_outputs()]
            answers = zip(names, session.run(names, feeds), strict=True)
            found[path.stem] = max(distance(arrays[f"out.{name}"], here) for name, here in answers)
    return found


def kernel_errors() -> dict[str, float]:
    """Map operators that the models lack to their errors. Integer inputs make the expected results exact."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) * rng.integers(0, 2, shape) for shape in ((33, 70), (70, 50)))
    found = {"masked_matmul": distance(np.float32(a @ b), _testing.masked_matmul_plan(a, b)[0])}
    codes, table = rng.integers(0, 256, 1000, np.uint8), rng.integers(0, 256, 256, np.uint8)
    return found | {"lut_post_op": distance(table[codes], _testing.lut_post_op(codes, table))}


def main(folder: Path) -> None:
    doctor.run_tiny_model(ortolan.get_library_path())
    check = doctor.check_cpu()
    kernels = {
        name: [row["name"] for row in getattr(_testing, name)() if row["runs_here"]]
        for name in dir(_testing)
        if name.endswith("_kernels")
    }
    print(
        json.dumps(
            {
                "features": _native.cpu_info()["detected_features"],
                "check": [check.status, check.detail, check.advice],
                "kernels": kernels,
                "distances": kernel_errors() | model_errors(folder),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
