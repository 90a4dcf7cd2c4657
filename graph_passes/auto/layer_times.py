"""How long each form of a layer takes on this machine: measured, and kept in a file for some days.

The forms of a layer and the original are timed in turn, each in a session of its own whose graph holds the layer many
times, with weights of other memory each time: as many as it takes to be as much to read as all layers of the model
would be in that form, or four times the last cache. So weights are as cold as they are in the model. (Cold in any case
would not be true: the layers of all-MiniLM fit into an L3 of 32 MiB in int4, and do not in float32.)
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
_DAYS = 7  # for which times are used; then they are measured again
_SECONDS = 0.25  # for each form
_MOST_BYTES = 256 * 1024**2  # of weights in a graph, or less where memory is short
_MOST_COPIES = 64
_STEP = 0.05  # layers whose shares of zeros differ by less take as long


@dataclass(frozen=True)
class LayerCase:
    """Layers that take as long as each other."""

    k: int
    n: int
    rows: int
    dtype: str  # of the activations
    bias: bool
    sparsity: float  # of single weights
    block_sparsity: float  # of blocks of four outputs and one input
    copies: int  # of weights that are read in turn
    two_four: bool = False  # of each four inputs of an output, two weights at most are not zero

    @property
    def key(self) -> str:
        text = f"{self.rows}x{self.k}x{self.n} {self.dtype}{' bias' if self.bias else ''}"
        pattern = " 2:4" if self.two_four else ""
        return f"{text} zeros {self.sparsity:.2f} {self.block_sparsity:.2f}{pattern} copies {self.copies}"


def case_of(matrix: np.ndarray, rows: int, dtype: ir.DataType, bias: bool, weights_of_model: int) -> LayerCase:
    """matrix: the weight [k, n]. weights_of_model: how many numbers the weights of all layers hold."""
    k, n = matrix.shape
    blocks = np.add.reduceat(matrix != 0, np.arange(0, n, 4), axis=1, dtype=np.int64)
    sizes = 4 * matrix.size
    enough = min(-(-weights_of_model // matrix.size), -(-4 * last_level_cache_bytes() * 8 // sizes))
    most = min(_MOST_BYTES, 2 ** (cold_budget() // 4).bit_length() // 2)  # a power of two, as it names stored times
    copies = max(1, min(enough, _MOST_COPIES, most // sizes))
    return LayerCase(
        k, n, rows, dtype.name, bias, _rounded(1 - np.count_nonzero(matrix) / matrix.size),
        _rounded(1 - np.count_nonzero(blocks) / blocks.size), copies, not beyond_two_four(matrix),
    )  # fmt: skip


class LayerTimes:
    """Milliseconds a run of layers, from the file or measured.

    Times that are too old are measured again, and the less of both is kept: another program that ran meanwhile can only
    have made them longer. Times of a busy machine are used once and not kept.
    The file is written after each measurement, to a temporary file that is renamed: a killed run loses one at most.
    """

    def __init__(self, path: Path | None = None) -> None:
        """path: of the file; None: in the cache folder."""
        self.path = default_cache_dir() / _FILE if path is None else path
        self.measured = 0  # so many cases that the file had not
        self._machine = _machine()
        self._unkept: dict[str, dict[str, float]] = {}  # times of a busy machine, for this run alone

    def of(
        self, case: LayerCase, matrix: Callable[[], np.ndarray], candidates: Sequence[Candidate]
    ) -> dict[str, float]:
        """By Candidate.timing, and ORIGINAL; forms that the layer cannot have are left out."""
        able = [candidate for candidate in candidates if case.two_four or not candidate.needs_two_four]
        wanted = list({candidate.timing: for_timing(candidate) for candidate in able}.values())
        # Only times that were taken in turn can be compared, so those of other forms are another entry.
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
    """Milliseconds of one layer of the model, by the candidate's name, and ORIGINAL.

    candidates: without calibration (for_timing). Those that the layer cannot have are left out.
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
    """The graph with all of its layers in this form, or None if they cannot have it."""
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
    """x [rows, k] times each copy of the weight; of each product one number is put out, which takes no time."""
    dtype = _numpy(case)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes, weights = [], []
    weights.append(numpy_helper.from_array(np.array([0, 0], np.int64), "zeros"))
    weights.append(numpy_helper.from_array(np.array([1, 1], np.int64), "ones"))
    if case.bias:
        weights.append(numpy_helper.from_array(np.ones(case.n, dtype), "bias"))
    for number in range(case.copies):
        # Blocks of four outputs stay blocks, and no two weights are the same.
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
    """Names a form in the file, with the sparsity that it is pruned to."""
    sparsity = candidate.prune.get("sparsity")
    return candidate.timing if sparsity is None else f"{candidate.timing} {sparsity:g}"


def _machine() -> str:
    """What times depend on, apart from the layer."""
    cpu, versions = cpu_info(), package_versions()
    parts = [f"{name} {value}" for name, value in sorted(cpu.items()) if isinstance(value, str)]
    parts += [f"{name} {versions.get(name, 'unknown')}" for name in ("onnxruntime", "ortolan")]
    return ", ".join([*parts, f"{session_threads()} threads"])


def _is_table(table: Any) -> bool:
    """Whether a file holds times: by machine and case a date and positive numbers by form."""
    cases = [case for machine in _values(table) for case in _values(machine)]
    times = [time for case in cases for time in _values(case.get("ms") if isinstance(case, dict) else None)]
    return all(isinstance(case.get("date"), str) for case in cases) and all(
        isinstance(time, int | float) and time > 0 for time in times
    )


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _is_recent(date: str) -> bool:
    """Whether an entry's date is at most `_DAYS` ago; one in the future is of a clock that was wrong."""
    try:
        return 0 <= (_today() - datetime.date.fromisoformat(date)).days <= _DAYS
    except ValueError:
        return False


def _values(table: Any) -> list[Any]:
    if not isinstance(table, dict):
        raise ValueError("not a table")
    return list(table.values())


def _rounded(share: float) -> float:
    return float(round(share / _STEP) * _STEP)
