"""Compare single linear layers of Llama 3 8B with cold weights, dense and with half of the weights zero.

Weights are random, because their values affect only the error: Student's t with 8 degrees of freedom, with a lognormal
spread per output. The zeros are the weights of least magnitude.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ortolan.benchmarks.shapes import LLAMA_3_8B
from ortolan.graph_passes.measure.machine import cold_budget
from ortolan.graph_passes.measure.timing import copies_to_stay_cold

from ..workers.process import WorkerError
from .comparison import Job, Work, compare
from .configuration import Configuration, Runner
from .result import PeersResult
from .verdict import LAYERS as SECTION

SCRIPT = "layers.py"
ROWS = (1, 8, 128)
JUDGED_ROWS = 8
_MEMORY = 6e9  # bytes for the weights of all configurations; runtimes may need twice as much
_LEAST_COPIES = 4
_MOST_ERROR = 0.5  # a larger relative error is a wrong answer


@dataclass(frozen=True)
class Layer:
    """A weight W [k, n]. `zeros` is the fraction of zero weights."""

    name: str
    k: int
    n: int
    zeros: float = 0.0


@dataclass(frozen=True)
class Variant:
    """A layer in one runtime and format.

    The number of copies for cold weights follows from `bits`, the approximate size of a weight.
    """

    name: str
    engine: str
    bits: float
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False


MODELS = tuple(
    Layer(f"Llama-3-8B {name} ({k} x {n}){', 50 % zeros' if zeros else ''}", k, n, zeros)
    for zeros in (0.0, 0.5)
    for name, (k, n) in LLAMA_3_8B.items()
    if name in ("up", "down", "q")
)

ONNX_RUNTIME = (
    Variant("ONNX Runtime fp32", "onnxruntime", 32, {"form": "fp32"}, True),
    Variant("ONNX Runtime int8", "onnxruntime", 8, {"form": "int8"}),
    Variant(
        "ONNX Runtime MatMulNBits 8 bits, g128", "onnxruntime", 8.25, {"form": "nbits", "bits": 8, "block_size": 128}
    ),
    Variant("ONNX Runtime MatMulNBits 4 bits, g32", "onnxruntime", 5, {"form": "nbits", "bits": 4, "block_size": 32}),
    Variant(
        "ONNX Runtime MatMulNBits 4 bits, g128", "onnxruntime", 4.25, {"form": "nbits", "bits": 4, "block_size": 128}
    ),
)
DENSE = (
    Variant("Ortolan bf16", "ortolan", 16, {"choices": {"weights": "bf16"}}),
    Variant("Ortolan int8", "ortolan", 8, {"choices": {"weights": "int8"}}),
    # Ortolan uses this format for output heads in models with dense int8 layers.
    Variant("Ortolan int8 in groups of 64", "ortolan", 8.25, {"choices": {"weights": "int8", "ignore": "*"}}),
    Variant("Ortolan int4, g16", "ortolan", 4.56, {"choices": {"weights": "int4"}}),
    Variant("Ortolan int4, g32", "ortolan", 4.31, {"choices": {"weights": "int4", "group_size": 32}}),
    Variant("Ortolan int4, g128", "ortolan", 4.2, {"choices": {"weights": "int4", "group_size": 128}}),
)
SPARSE = (
    Variant("Ortolan sparse bf16", "ortolan", 9, {"choices": {"weights": "bf16", "sparsity": 0.5}}),
    Variant("Ortolan sparse int8", "ortolan", 5, {"choices": {"weights": "int8", "sparsity": 0.5}}),
    Variant("Ortolan sparse int4", "ortolan", 3.1, {"choices": {"weights": "int4", "sparsity": 0.5}}),
)
# Maps a label to OpenVINO's settings: the default (bf16 on CPUs with bf16 instructions), or inputs rounded to int8,
# which is faster with few rows.
OPENVINO_PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "int8 inputs": {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "128"},
}
OTHERS = (
    Variant("torch bf16", "torch", 16, {"form": "bf16"}),
    Variant("torch bf16, packed", "torch", 16, {"form": "packed bf16"}),
    Variant("torch int8", "torch", 8, {"form": "int8"}),
    Variant("torch int8 weights", "torch", 8, {"form": "int8 weights"}),
    Variant("torch int4, g32", "torch", 5, {"form": "int4", "group_size": 32}),
    Variant("torch int4, g128", "torch", 4.25, {"form": "int4", "group_size": 128}),
    *(
        Variant(f"{name}, {precision}", "openvino", bits, {**options, "settings": settings})
        for name, bits, options in (
            ("OpenVINO int8 weights", 8, {"weights": "INT8_ASYM"}),
            ("OpenVINO int4 weights, g128", 4.2, {"weights": "INT4_SYM", "group_size": 128}),
        )
        for precision, settings in OPENVINO_PRECISIONS.items()
    ),
    Variant("OpenVINO", "openvino", 16, {"settings": {}}),
    Variant("llama.cpp Q8_0", "llama.cpp", 8.5, {"form": "Q8_0"}),
    Variant("llama.cpp Q4_0", "llama.cpp", 4.5, {"form": "Q4_0"}),
    Variant("llama.cpp Q4_K", "llama.cpp", 4.5, {"form": "Q4_K"}),
)


def measure(job: Job, result: PeersResult) -> None:
    """Add the rows of all layers."""
    for layer in MODELS:
        works = [rows for rows in ROWS if job.takes_work(work_name(rows))]
        if works and job.takes_model(SECTION, layer.name):
            with tempfile.TemporaryDirectory(dir=job.folder) as folder:
                _measure(replace(job, folder=Path(folder)), layer, works, result)


def _measure(job: Job, layer: Layer, rows: Sequence[int], result: PeersResult) -> None:
    weights = job.folder / "weights.npy"
    w = make_weights(layer)
    np.save(weights, w)
    works = [
        Work(work_name(count), {"inputs": str(write_inputs(job.folder, layer.k, count))}, 1, "layers/s")
        for count in rows
    ]
    judge = Judge(w, write_inputs(job.folder, layer.k, JUDGED_ROWS))
    del w
    configurations = list(configurations_of(job, layer, weights))
    compare(job, SECTION, layer.name, SCRIPT, configurations, works, judge, result, openings=0)


def work_name(rows: int) -> str:
    """Return the name of the work with this number of rows."""
    return "1 row" if rows == 1 else f"{rows} rows"


def make_weights(layer: Layer) -> np.ndarray:
    """Return W, float32 [k, n], the same on every call."""
    rng = np.random.default_rng(layer.k * layer.n)
    spread = np.exp(rng.normal(0, 0.2, layer.n)) / np.sqrt(layer.k)
    w = np.empty((layer.k, layer.n), np.float32)
    for row in w:  # row by row: float64 for all would take twice the memory
        row[:] = rng.standard_t(8, layer.n) * spread
    if layer.zeros:
        magnitude = np.abs(w)
        count = round(layer.zeros * w.size)
        w[magnitude <= np.partition(magnitude, count - 1, axis=None)[count - 1]] = 0
    return w


def write_inputs(folder: Path, k: int, rows: int) -> Path:
    """Write normally distributed x, float32 [rows, k], and return the file."""
    path = folder / f"inputs-{rows}.npy"
    np.save(path, np.random.default_rng(rows).standard_normal((rows, k), dtype=np.float32))
    return path


class Judge:
    """The relative error of y = x W, by the Frobenius norm."""

    def __init__(self, weights: np.ndarray, inputs: Path) -> None:
        """Compute the expected answers of the file of inputs."""
        self._inputs = inputs
        self._expected = np.load(inputs) @ weights

    def __call__(self, runner: Runner) -> dict[str, float]:
        """Return the error.

        Raises:
            WorkerError: The error is larger than that of a correct answer.
        """
        y = runner.answer({"inputs": str(self._inputs)})
        if y.shape != self._expected.shape:
            raise WorkerError(f"answer has shape {list(y.shape)}, expected {list(self._expected.shape)}")
        error = float(np.linalg.norm(y - self._expected) / np.linalg.norm(self._expected))
        most = 1e-4 if runner.configuration.exact else _MOST_ERROR
        if not error <= most:
            raise WorkerError(f"answer has a relative error of {error:.2g}, expected at most {most:g}")
        return {"error": error}


def configurations_of(job: Job, layer: Layer, weights: Path) -> Iterator[Configuration]:
    """Yield the configurations of the engines that take part."""
    own = {"onnxruntime": sys.executable, "ortolan": sys.executable}
    pythons = {**job.pythons, **own}
    forms = [form for form in (*ONNX_RUNTIME, *(SPARSE if layer.zeros else DENSE), *OTHERS) if form.engine in pythons]
    for form in forms:
        stored = round(layer.k * layer.n * form.bits / 8)
        copies = cold_copies(stored, len(forms))
        yield Configuration(
            form.name, form.engine, weights, {**form.options, "copies": copies}, pythons[form.engine],
            form.engine == "ortolan", form.exact, copies,
        )  # fmt: skip


def cold_copies(bytes_each: int, configurations: int) -> int:
    """Return the number of copies of a layer that keeps their weights cold, within the memory for all configurations.

    A virtual machine may report the L3 of the whole server, so four times that size may exceed the memory.
    """
    affordable = int(min(_MEMORY, cold_budget()) / configurations / bytes_each)
    return max(_LEAST_COPIES, min(copies_to_stay_cold(bytes_each), affordable))
