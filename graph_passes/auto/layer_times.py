"""Times of a layer's formats on this machine: measured, and stored in a file for some days.

The original and all formats of a layer are timed in turn. Each has a session whose graph repeats the layer with
different copies of the weight. Together the copies are as large as all layers of the model in that format, but at most
four times the last-level cache, so weights are as cold as in the model. (Weights that are always cold would be wrong:
the layers of all-MiniLM fit into an L3 of 32 MiB in int4, but not in float32.)
"""

from __future__ import annotations

import datetime
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from ortolan.cache_folder import default_cache_dir
from ortolan.errors import NothingToReplaceError, OutputError
from ortolan.session import cpu_info, package_versions

from ..files.model_file import load_model, to_bytes, to_proto
from ..files.output import write_text
from ..files.spill import TensorSpill
from ..measure.evidence import Evidence
from ..measure.machine import cold_budget, is_busy, last_level_cache_bytes
from ..measure.sessions import open_to_time, session_threads
from ..measure.timing import interleave
from ..operators.sparse_amx_matmul_storage import beyond_two_four
from ..passes.context import PassContext
from ..report.optimization import OptimizationReport
from ..run import plan, transform
from .candidates import ORIGINAL, Candidate, for_timing, make_recipe

_FILE = "layer-times.json"
_DAYS = 7  # times older than this many days are measured again
_SECONDS = 0.25  # measuring time per format, in seconds
_MOST_BYTES = 256 * 1024**2  # upper limit for the copies of one layer's weight, in bytes; lower if memory is short
_MOST_COPIES = 64
_STEP = 0.05  # fractions of zeros are rounded to multiples of 0.05: smaller differences do not change the speed


@dataclass(frozen=True)
class LayerCase:
    """Properties of layers with equal speed: k inputs, n outputs, and `rows` input rows.

    Attributes:
        dtype: The type of the activations.
        sparsity: The fraction of zero weights.
        block_sparsity: The fraction of zero blocks of four outputs and one input.
        copies: The number of weights that are read in turn.
        two_four: The weight is 2:4 sparse.
    """

    k: int
    n: int
    rows: int
    dtype: str
    bias: bool
    sparsity: float
    block_sparsity: float
    copies: int
    two_four: bool = False

    @property
    def key(self) -> str:
        """The key in the file."""
        text = f"{self.rows}x{self.k}x{self.n} {self.dtype}{' bias' if self.bias else ''}"
        pattern = " 2:4" if self.two_four else ""
        return f"{text} zeros {self.sparsity:.2f} {self.block_sparsity:.2f}{pattern} copies {self.copies}"


def case_of(matrix: np.ndarray, rows: int, dtype: ir.DataType, bias: bool, weights_of_model: int) -> LayerCase:
    """Return the case of a layer with this weight [k, n]. weights_of_model: The number of weights of all layers."""
    k, n = matrix.shape
    blocks = np.add.reduceat(matrix != 0, np.arange(0, n, 4), axis=1, dtype=np.int64)
    sizes = 4 * matrix.size
    enough = min(-(-weights_of_model // matrix.size), -(-4 * last_level_cache_bytes() * 8 // sizes))
    most = min(
        _MOST_BYTES, 2 ** (cold_budget() // 4).bit_length() // 2
    )  # a power of two, because it is part of the key
    copies = max(1, min(enough, _MOST_COPIES, most // sizes))
    return LayerCase(
        k, n, rows, dtype.name, bias, _rounded(1 - np.count_nonzero(matrix) / matrix.size),
        _rounded(1 - np.count_nonzero(blocks) / blocks.size), copies, not beyond_two_four(matrix),
    )  # fmt: skip


class LayerTimes:
    """Times of layers in milliseconds, from the file or measured.

    Old times are measured again, and the smaller one is stored, because other programs can only increase times. Times
    of a busy machine are used only in this run. The file is written after each measurement.

    Attributes:
        measured: The number of cases that were missing in the file.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Use a file; None: the one in the cache folder."""
        self.path = default_cache_dir() / _FILE if path is None else path
        self.measured = 0
        self._machine = _machine()
        self._unkept: dict[str, dict[str, float]] = {}  # times of a busy machine, for this run only

    def of(
        self, case: LayerCase, matrix: Callable[[], np.ndarray], candidates: Sequence[Candidate]
    ) -> dict[str, float]:
        """Return times by Candidate.timing and ORIGINAL, without formats that are impossible for the layer."""
        able = [candidate for candidate in candidates if case.two_four or not candidate.needs_two_four]
        wanted = list({candidate.timing: for_timing(candidate) for candidate in able}.values())
        # Only times of one measurement can be compared, so the key lists all formats.
        key = f"{case.key}: {', '.join(map(_entry, wanted))}"
        if key in self._unkept:
            return self._unkept[key]
        known = self._read().get(self._machine, {}).get(key, {"date": "", "ms": {}})
        times: dict[str, float] = known["ms"]
        if not _is_recent(known["date"]) or ORIGINAL not in times:
            found = measure(case, matrix(), wanted)
            times = {name: min(time, times.get(name, time)) for name, time in found.items()}
            self.measured += 1
            if is_busy():
                self._unkept[key] = times
            else:
                self._write(key, times)
        return times

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return entries {"date": ..., "ms": ...} by machine and case; none if the file is damaged or missing."""
        with suppress(OSError, ValueError):
            table = json.loads(self.path.read_text(encoding="utf-8"))
            if _is_table(table):
                return dict(table)
        return {}

    def _write(self, key: str, times: Mapping[str, float]) -> None:
        """Store one entry. If the file cannot be written, the next run measures again."""
        table = self._read()  # other processes may have written
        table.setdefault(self._machine, {})[key] = {"date": _today().isoformat(), "ms": dict(times)}
        with suppress(OSError, OutputError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(table, indent=1))


def measure(case: LayerCase, matrix: np.ndarray, candidates: Sequence[Candidate]) -> dict[str, float]:
    """Return a layer's milliseconds by the candidate's name and ORIGINAL, without impossible formats.

    matrix: The weight [k, n]. candidates: Formats without calibration (`for_timing`).
    """
    proto = _copies_of_layer(case, matrix)
    x = np.random.default_rng(0).standard_normal((case.rows, case.k)).astype(_numpy(case))
    with tempfile.TemporaryDirectory(prefix="ortolan-") as folder, TensorSpill(Path(folder)) as spill:
        sessions: dict[str, Any] = {ORIGINAL: open_to_time(proto.SerializeToString())}
        for candidate in candidates:
            changed = _in_form(proto, candidate, Path(folder), spill)
            if changed is not None:
                sessions[candidate.name] = open_to_time(changed, library=True)
        calls = {name: lambda session=session: session.run(None, {"x": x}) for name, session in sessions.items()}
        timings = interleave(calls, seconds=_SECONDS * len(calls))
        del sessions, calls
    return {name: timing.min_ms / case.copies for name, timing in timings.items()}


def _in_form(proto: onnx.ModelProto, candidate: Candidate, folder: Path, spill: TensorSpill) -> bytes | None:
    """Return the graph with all layers in this format; None if that is impossible."""
    source = load_model(proto)
    evidence = Evidence(source, folder)
    context = PassContext(evidence, source, OptimizationReport(recipe={}), folder / "model.onnx", spill, portable=False)
    names = [node.name for node in proto.graph.node if node.op_type == "MatMul"]
    recipe = make_recipe({candidate: names}, calibrate=False)
    try:
        transform(plan(recipe, context), context)
    except NothingToReplaceError:
        return None
    return to_bytes(to_proto(source.model))


def _copies_of_layer(case: LayerCase, matrix: np.ndarray) -> onnx.ModelProto:
    """Return a graph that multiplies x [rows, k] by each copy of the weight, and outputs one value of each product."""
    dtype = _numpy(case)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes, weights = [], []
    weights.append(numpy_helper.from_array(np.array([0, 0], np.int64), "zeros"))
    weights.append(numpy_helper.from_array(np.array([1, 1], np.int64), "ones"))
    if case.bias:
        weights.append(numpy_helper.from_array(np.ones(case.n, dtype), "bias"))
    for number in range(case.copies):
        # Rotation by four outputs keeps 4x1 blocks, and makes all copies differ.
        copy = np.ascontiguousarray(np.roll(matrix, 4 * number, axis=1), dtype)
        weights.append(numpy_helper.from_array(copy, f"W{number}"))
        product = f"product{number}"
        nodes.append(helper.make_node("MatMul", ["x", f"W{number}"], [product], name=f"layer{number}"))
        if case.bias:
            nodes.append(helper.make_node("Add", [product, "bias"], [f"y{number}"], name=f"add{number}"))
            product = f"y{number}"
        nodes.append(helper.make_node("Slice", [product, "zeros", "ones"], [f"part{number}"]))
    nodes.append(helper.make_node("Concat", [f"part{number}" for number in range(case.copies)], ["parts"], axis=0))
    x = helper.make_tensor_value_info("x", kind, [case.rows, case.k])
    y = helper.make_tensor_value_info("parts", kind, [case.copies, 1])
    graph = helper.make_graph(nodes, "layer", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _numpy(case: LayerCase) -> Any:
    return np.float16 if case.dtype == "FLOAT16" else np.float32


def _entry(candidate: Candidate) -> str:
    sparsity = candidate.prune.get("sparsity")
    return candidate.timing if sparsity is None else f"{candidate.timing} {sparsity:g}"


def _machine() -> str:
    """Return the properties that times depend on: the CPU, the versions and the number of threads."""
    cpu, versions = cpu_info(), package_versions()
    parts = [f"{name} {value}" for name, value in sorted(cpu.items()) if isinstance(value, str)]
    parts += [f"{name} {versions.get(name, 'unknown')}" for name in ("onnxruntime", "ortolan")]
    return ", ".join([*parts, f"{session_threads()} threads"])


def _is_table(table: Any) -> bool:
    """Return True if a file has, by machine and case, a date and positive times by format."""
    cases = [case for machine in _values(table) for case in _values(machine)]
    times = [time for case in cases for time in _values(case.get("ms") if isinstance(case, dict) else None)]
    return all(isinstance(case.get("date"), str) for case in cases) and all(
        isinstance(time, int | float) and time > 0 for time in times
    )


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _is_recent(date: str) -> bool:
    """Return True if a date is at most `_DAYS` ago. A date in the future comes from a wrong clock."""
    try:
        return 0 <= (_today() - datetime.date.fromisoformat(date)).days <= _DAYS
    except ValueError:
        return False


def _values(table: Any) -> list[Any]:
    if not isinstance(table, dict):
        raise ValueError("not a table")
    return list(table.values())


def _rounded(fraction: float) -> float:
    return float(round(fraction / _STEP) * _STEP)
