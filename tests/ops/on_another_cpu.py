"""Check answers in an emulator of another CPU: `python -m tests.ops.on_another_cpu FOLDER`.

It runs the models that tests/aarch64/answers.py wrote to the folder, and kernels, and prints the CPU's features and
each answer's error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import ortolan
from ortolan import _native, _testing, doctor


def distance(there: np.ndarray, here: np.ndarray) -> float:
    """Return the relative error by norm; for integers the fraction that differs."""
    if there.dtype != np.float32:
        return float(np.mean(there != here))
    return float(np.linalg.norm(here - there) / np.linalg.norm(there))


def of_models(folder: Path) -> dict[str, float]:
    """Return the largest distance of an output, by the model's name."""
    found = {}
    for path in sorted(folder.glob("*.onnx")):
        session = ortolan.create_session(path)
        with np.load(path.with_suffix(".npz")) as arrays:
            feeds = {key.removeprefix("in."): arrays[key] for key in arrays.files if key.startswith("in.")}
            names = [output.name for output in session.get_outputs()]
            answers = zip(names, session.run(names, feeds), strict=True)
            found[path.stem] = max(distance(arrays[f"out.{name}"], here) for name, here in answers)
    return found


def of_kernels() -> dict[str, float]:
    """Check a product that no model has, with small integers, whose sums are exact."""
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
                "distances": of_kernels() | of_models(folder),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
