"""An unmodified encoder on the execution provider, compared with plain ONNX Runtime and the optimized file.

python -m ortolan.benchmarks.provider [--model all-minilm-l6-v2 | FILE] [--kind int8 uint8 nbits bf16 float_int8 …]
    [--shape 1x16 …] [--threads 1]

It reports differences of answers, latency, and time and memory for creating a session. Kinds: int8, uint8 are ONNX
Runtime's quantize_dynamic. nbits is its MatMulNBits with 4 bits, blocks of 32, accuracy_level 4. bf16, float_int8 run
the float model with the provider's option `precision`, and compare it with the file of weights="bf16" or "int8". FILE
is any encoder, used unchanged. Each session is timed in a process of its own, whose peak memory is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization import QuantType, quantize_dynamic
from rich.console import Console
from rich.table import Table

from ortolan.graph_passes.measure.timing import interleave, pinned

from ..models import get_model
from ..optimize import optimize_onnx
from ..provider import options_with
from ..session import create_session
from .encoder import SENTENCES, calibration_feeds, open_model, read_shape, silent_root_logger, word_feeds
from .result import versions_line
from .variants import session_options

KINDS = ("int8", "uint8", "nbits", "bf16", "float_int8")
SHAPES = ((1, 16), (1, 128), (8, 64))
PLAIN, PROVIDER, OPTIMIZED = "ONNX Runtime", "provider", "optimized file"
WAYS = (PLAIN, PROVIDER, OPTIMIZED)
_PRECISIONS = {"bf16": "bf16", "float_int8": "int8"}
_SESSIONS = 5


@dataclass(frozen=True)
class Subject:
    """A model, its optimized file, and the provider's precision for float layers."""

    model: Path
    optimized: Path
    precision: str = "float32"

    def session(self, way: str, threads: int) -> ort.InferenceSession:
        """Open a session in one of WAYS."""
        if way == OPTIMIZED:
            return create_session(self.optimized, session_options(threads))
        if way == PLAIN:
            return ort.InferenceSession(self.model, session_options(threads), providers=["CPUExecutionProvider"])
        options = options_with({"precision": self.precision})
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        return ort.InferenceSession(self.model, options)


def make_subject(kind: str, source: Path, feeds: Sequence[dict[str, np.ndarray]], folder: Path) -> Subject:
    """Make the model of a kind (one of KINDS, or "file") and its optimized file."""
    model, optimized = folder / f"{kind}.onnx", folder / f"{kind}_optimized.onnx"
    if kind in ("int8", "uint8"):
        with silent_root_logger():
            quantize_dynamic(source, model, weight_type=QuantType.QInt8 if kind == "int8" else QuantType.QUInt8)
    elif kind == "nbits":
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        with silent_root_logger():
            quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=32, is_symmetric=True, accuracy_level=4)
            quantizer.process()
        quantizer.model.save_model_to_file(str(model))
    else:
        model = source
    form: dict[str, Any] = {"weights": _PRECISIONS[kind]} if kind in _PRECISIONS else {}
    optimize_onnx(model, optimized, calibration=feeds, options={"verify.seconds": 0.0}, **form)
    return Subject(model, optimized, _PRECISIONS.get(kind, "float32"))


def measure_session(subject: Subject, way: str, threads: int) -> dict[str, float]:
    """Return the ms to create a session (fastest of several) and the peak memory in MB of a separate process."""
    arguments = json.dumps([str(subject.model), str(subject.optimized), subject.precision, way, threads])
    command = [sys.executable, "-m", "ortolan.benchmarks.provider", "--child", arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _child(arguments: str) -> None:
    model, optimized, precision, way, threads = json.loads(arguments)
    subject = Subject(Path(model), Path(optimized), precision)
    times = []
    subject.session(way, threads)
    peak = _peak_megabytes()
    for _ in range(_SESSIONS):
        began = time.perf_counter()
        subject.session(way, threads)
        times.append(time.perf_counter() - began)
    print(json.dumps({"session_ms": min(times) * 1e3, "megabytes": peak}))


def _peak_megabytes() -> float:
    """Return the peak memory of this process; getrusage would include the parent's peak."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1e3


def nearness(found: np.ndarray, expected: np.ndarray) -> str:
    """Return "equal", or the largest difference as text."""
    if found.tobytes() == expected.tobytes():
        return "equal"
    return f"{float(np.abs(found - expected).max()):.2g}"


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine similarity of two vectors."""
    return float(np.vdot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


def table_of(kind: str, subject: Subject, inputs: Sequence[str], arguments: argparse.Namespace) -> Table:
    """Measure one subject and return its table."""
    table = Table(title=f"{kind}: ms, fastest and median; speedup over {PLAIN}, by the fastest")
    for column in ("", *WAYS, "provider / optimized", "answers, provider - optimized", "cosine to float, both"):
        table.add_column(column)
    with pinned(arguments.threads):
        sessions = {way: subject.session(way, arguments.threads) for way in WAYS}
        original = ort.InferenceSession(arguments.source, session_options(arguments.threads))
        for batch, tokens in arguments.shape:
            feeds = word_feeds(inputs, batch, tokens)
            answers = {way: session.run(None, feeds)[0] for way, session in sessions.items()}
            (exact, *_) = original.run(None, feeds)
            calls = {
                way: lambda session=session, feeds=feeds: session.run(None, feeds) for way, session in sessions.items()
            }
            timings = interleave(calls, seconds=arguments.seconds)
            fastest = {way: timing.min_ms for way, timing in timings.items()}
            table.add_row(
                f"{batch}x{tokens}",
                *(f"{timings[way]}  {fastest[PLAIN] / fastest[way]:.2f}x" for way in WAYS),
                f"{fastest[OPTIMIZED] / fastest[PROVIDER]:.3f}x",
                nearness(answers[PROVIDER], answers[OPTIMIZED]),
                f"{cosine(answers[PROVIDER], exact):.5f}  {cosine(answers[PLAIN], exact):.5f}",
            )
    of_sessions = {way: measure_session(subject, way, arguments.threads) for way in WAYS}
    table.add_row("a session", *(f"{of_sessions[way]['session_ms']:.0f} ms" for way in WAYS), "", "", "")
    table.add_row("peak memory", *(f"{of_sessions[way]['megabytes']:.0f} MB" for way in WAYS), "", "", "")
    return table


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="all-minilm-l6-v2", help="a model of the catalogue, or an ONNX file")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--shape", type=read_shape, nargs="+", default=SHAPES, help="BATCHxTOKENS")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="per shape")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return _child(arguments.child)
    console = Console()
    console.print(versions_line())
    with tempfile.TemporaryDirectory() as name:
        folder, is_file = Path(name), arguments.model.endswith(".onnx")
        arguments.source = Path(arguments.model) if is_file else get_model(arguments.model).onnx
        if is_file:
            inputs = tuple(one.name for one in ort.InferenceSession(arguments.source).get_inputs())
            feeds = [word_feeds(inputs, 1, tokens, tokens) for tokens in (7, 16, 33)]
        else:
            encoder = open_model(arguments.model, folder)
            inputs, feeds = encoder.inputs, calibration_feeds(encoder, SENTENCES)
        for kind in ("file",) if is_file else arguments.kind:
            subject = make_subject(kind, arguments.source, feeds, folder)
            console.print(table_of(kind, subject, inputs, arguments))


if __name__ == "__main__":
    main()
