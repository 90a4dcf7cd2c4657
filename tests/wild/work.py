"""Process one model in one way: python -m tests.wild.work STEP WAY MODEL FOLDER.

STEP is `make` (optimize or import the model into FOLDER) or `compare` (run the original and the result, and measure
agreement and speed). The last line of standard output is the result as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ortolan
from ortolan import OrtolanError
from ortolan.errors import NothingToReplaceError
from ortolan.graph_passes.files.model_file import load_model
from ortolan.graph_passes.measure.evidence import make_up_feeds
from ortolan.graph_passes.measure.feeds import SIZES_TO_TRY, synthetic_feeds
from ortolan.graph_passes.measure.sessions import open_quietly
from ortolan.graph_passes.measure.timing import interleave

WAYS = ("default", "int8", "int4", "provider")
_SEEDS = (11, 12, 13)  # seeds of feeds that the optimizer does not use
_SECONDS = 1.5  # time limit for timing both models, in seconds


def make(way: str, model: Path, folder: Path) -> dict[str, Any]:
    """Optimize or import the model, and return a dict whose `outcome` states the result."""
    try:
        if model.suffix == ".gguf":
            if way != "default":
                return {"outcome": "-", "detail": "a GGUF file keeps its weights"}
            ortolan.import_gguf(model, folder / "imported")
            return {"outcome": "imported", "file": str(folder / "imported" / "model.onnx")}
        weights = None if way == "default" else way
        report = ortolan.optimize_onnx(model, folder / "model.onnx", weights=weights)
    except NothingToReplaceError as error:
        return {"outcome": "nothing to replace", "detail": str(error)}
    except OrtolanError as error:
        return {"outcome": "refused", "detail": f"{type(error).__name__}: {error}"}
    except Exception as error:  # every other exception is a defect, which the table shows
        return {"outcome": "FAILED", "detail": f"{type(error).__name__}: {error}"}
    if not report.recipe.get("pass"):
        return {"outcome": "stays as it is", "detail": "; ".join(report.notes)}
    replaced = f"{len(report.replaced)}/{len(report.layers)} layers"
    stated = min((error.cosine for error in report.output_error), default=None)
    return {
        "outcome": "optimized",
        "file": str(folder / "model.onnx"),
        "detail": replaced if stated is None else f"{replaced}, the report's worst cosine {stated:.4f}",
    }


def compare(way: str, model: Path, made: Path) -> dict[str, Any]:
    """Run the original and the optimized model on feeds that the optimizer has not used."""
    if model.suffix == ".gguf":
        model = _floats_of(model, made.parent)
    source = load_model(model)
    before = open_quietly(model, source)
    if way == "provider":
        import onnxruntime

        after: Any = onnxruntime.InferenceSession(str(model), ortolan.session_options(precision="int8"))
    else:
        after = open_quietly(made, library=True)
    make_up_feeds(source.model, before)  # raises an error for models that cannot run at all
    feeds = _feeds(source.model, before)
    names = [one.name for one in before.get_outputs()]
    cosines: dict[str, float] = {}
    for one in feeds:
        for name, x, y in zip(names, before.run(None, one), after.run(None, one), strict=True):
            if isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.size:
                cosines[name] = min(cosines.get(name, 1.0), _cosine(_pooled(x), _pooled(y)))
    times = interleave(
        {"before": lambda: before.run(None, feeds[0]), "after": lambda: after.run(None, feeds[0])}, seconds=_SECONDS
    )
    once, again = (before.run(None, feeds[0]) for _ in range(2))
    if not all(np.array_equal(x, y, equal_nan=True) for x, y in zip(once, again, strict=True)):
        cosines.clear()  # outputs are random, so they cannot be compared
    return {
        "cosine": min(cosines.values(), default=None),
        "worst": min(cosines, key=lambda name: cosines[name], default=None),
        "before_ms": times["before"].min_ms,
        "after_ms": times["after"].min_ms,
    }


def _feeds(model: Any, session: Any) -> list[dict[str, np.ndarray]]:
    """Return feeds of the first sizes that the model supports, with seeds that the optimizer does not use."""
    for sizes in SIZES_TO_TRY:
        found = [synthetic_feeds(model, sizes, seed) for seed in _SEEDS]
        try:
            session.run(None, found[0])
        except Exception:  # Exception is the only common base of ONNX Runtime's errors
            continue
        return found
    raise OrtolanError("no feeds were found that the original runs on")


def _pooled(answer: np.ndarray) -> np.ndarray:
    """Return one row per sequence: the mean over tokens of [batch, tokens, width]; other shapes are flattened."""
    rows = answer.astype(np.float64)
    if rows.ndim == 3 and rows.shape[1] > 1:
        return rows.mean(axis=1)
    return rows.reshape(len(rows) if rows.ndim else 1, -1)


def _cosine(x: np.ndarray, y: np.ndarray) -> float:
    """Return the smallest cosine between rows of x and y; equal rows have cosine 1."""
    if x.shape != y.shape:
        return float("nan")
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    products = (x * y).sum(axis=1)
    same = (x == y).all(axis=1)
    return float(np.where(same, 1.0, products / np.where(norms == 0, np.inf, norms)).min(initial=1.0))


def _floats_of(gguf: Path, folder: Path) -> Path:
    """Write the decoder of a GGUF file as ONNX with float32 weights."""
    import onnx_ir as ir

    from ortolan.models.gguf import read_gguf
    from ortolan.models.llama import build_llama

    config, weights = read_gguf(gguf)
    path = folder / "floats.onnx"
    ir.save(build_llama(weights, config, gguf.stem), path, external_data="floats.onnx.data")
    return path


def main(arguments: Sequence[str]) -> None:
    step, way, model, folder = arguments
    try:
        found = make(way, Path(model), Path(folder)) if step == "make" else compare(way, Path(model), Path(folder))
    except OrtolanError as error:  # raised by `compare` if the original does not run
        found = {"outcome": "not compared", "detail": str(error)}
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # skip closing the provider's sessions, which may take long


if __name__ == "__main__":
    main(sys.argv[1:])
