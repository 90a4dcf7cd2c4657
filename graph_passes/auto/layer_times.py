"""Times of a layer's formats on this machine: measured, and stored in a file for some days.

The original, all formats of a layer and ONNX Runtime's own operators for them are timed in turn. Each has a session
whose graph repeats the layer with different copies of the weight. Together the copies are as large as all layers of the
model in that format, but at most four times the last-level cache, so weights are as cold as in the model. (Weights that
are always cold would be wrong: the layers of all-MiniLM fit into an L3 of 32 MiB in int4, but not in float32.)
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from ortolan.errors import NothingToReplaceError
from ortolan.times_file import KeptTimes, machine, read_times, times_path, today, write_times

from ..files.model_file import load_model, to_bytes, to_proto
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

_DAYS = 7  # times older than this many days are measured again
_SECONDS = 0.25  # measuring time per format, in seconds
_MOST_BYTES = 256 * 1024**2  # upper limit for the copies of one layer's weight, in bytes; lower if memory is short
_MOST_COPIES = 64
_BLOCKS = {"int4/32": 32, "int4": 128}  # block sizes of MatMulNBits
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
    def columns(self) -> str:
        """The columns in the file."""
        others = f"{'bias, ' if self.bias else ''}{'2:4, ' if self.two_four else ''}{self.copies} copies"
        zeros = f"{self.sparsity:.2f}\t{self.block_sparsity:.2f}"
        return f"{self.rows}x{self.k}x{self.n}\t{self.dtype}\t{zeros}\t{others}"


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
        self.path = times_path() if path is None else path
        self.measured = 0
        self._machine = f"{machine()}\t{session_threads()}"
        self._unkept: dict[str, Mapping[str, float]] = {}  # times of a busy machine, for this run only

    def of(
        self, case: LayerCase, matrix: Callable[[], np.ndarray], candidates: Sequence[Candidate]
    ) -> Mapping[str, float]:
        """Return times by Candidate.timing and ORIGINAL, without formats that are impossible for the layer."""
        able = [candidate for candidate in candidates if case.two_four or not candidate.needs_two_four]
        wanted = list({candidate.timing: for_timing(candidate) for candidate in able}.values())
        # Only times of one measurement can be compared, so the key lists all formats.
        key = f"{self._machine}\t{case.columns}: {', '.join(map(_entry, wanted))}"
        if key in self._unkept:
            return self._unkept[key]
        known = read_times(self.path).get(key)
        if known is not None and known.days <= _DAYS and ORIGINAL in known.ms:
            return known.ms
        found = measure(case, matrix(), wanted)
        times = found if known is None else {name: min(time, known.ms.get(name, time)) for name, time in found.items()}
        self.measured += 1
        if is_busy():
            self._unkept[key] = times
        else:  # read again, because other processes may have written
            write_times(self.path, read_times(self.path) | {key: KeptTimes(today().isoformat(), times)})
        return times


def measure(case: LayerCase, matrix: np.ndarray, candidates: Sequence[Candidate]) -> dict[str, float]:
    """Return a layer's milliseconds by the candidate's name and ORIGINAL, without impossible formats.

    matrix: The weight [k, n]. candidates: Formats without calibration (`for_timing`).
    """
    proto = _copies_of_layer(case, matrix)
    own = own_operators(case.dtype, candidates)
    x = np.random.default_rng(0).standard_normal((case.rows, case.k)).astype(_numpy(case))
    with tempfile.TemporaryDirectory(prefix="ortolan-") as folder, TensorSpill(Path(folder)) as spill:
        sessions: dict[str, Any] = {ORIGINAL: open_to_time(proto.SerializeToString())}
        for candidate in candidates:
            changed = _in_form(proto, candidate, Path(folder), spill)
            if changed is not None:
                sessions[candidate.name] = open_to_time(changed, library=True)
        for name, product in own.items():
            sessions[name] = open_to_time(_copies_of_layer(case, matrix, product).SerializeToString())
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


# Return the nodes of a product of x and a weight [k, n], and their constants. `y` is the product's name.
_Product = Callable[[np.ndarray, str], tuple[onnx.NodeProto, list[onnx.TensorProto]]]


def own_operators(dtype: str, candidates: Sequence[Candidate]) -> dict[str, _Product]:
    """Return ONNX Runtime's own operators for the formats of these candidates; the execution provider compares them.

    Their times do not depend on values, so weights are not really quantized.
    """
    if dtype != "FLOAT":
        return {}
    names = {candidate.name for candidate in candidates}
    own: dict[str, _Product] = {"ort int8": _int8_product} if "int8" in names else {}
    return own | {f"ort {name}": partial(_nbits_product, size) for name, size in _BLOCKS.items() if name in names}


def _float_product(weight: np.ndarray, y: str) -> tuple[onnx.NodeProto, list[onnx.TensorProto]]:
    return helper.make_node("MatMul", ["x", f"W {y}"], [y], name=f"layer_{y}"), [
        numpy_helper.from_array(weight, f"W {y}")
    ]


def _int8_product(weight: np.ndarray, y: str) -> tuple[onnx.NodeProto, list[onnx.TensorProto]]:
    codes = np.round(weight * (127 / max(np.abs(weight).max(), 1e-30))).astype(np.int8)
    constants = [(codes, f"W {y}"), (np.float32(0.01), f"scale {y}")]
    node = helper.make_node(
        "DynamicQuantizeMatMul", ["x", *(name for _, name in constants)], [y], domain="com.microsoft"
    )
    return node, [numpy_helper.from_array(np.asarray(value), name) for value, name in constants]


def _nbits_product(size: int, weight: np.ndarray, y: str) -> tuple[onnx.NodeProto, list[onnx.TensorProto]]:
    k, n = weight.shape
    blocks = -(-k // size)
    codes = np.random.default_rng(0).integers(0, 256, (n, blocks, size // 2), np.uint8)
    constants = [(codes, f"W {y}"), (np.full((n, blocks), 0.01, np.float32), f"scales {y}")]
    attributes = {"K": k, "N": n, "bits": 4, "block_size": size, "accuracy_level": 4}
    node = helper.make_node(
        "MatMulNBits", ["x", *(name for _, name in constants)], [y], domain="com.microsoft", **attributes
    )
    return node, [numpy_helper.from_array(value, name) for value, name in constants]


def _copies_of_layer(case: LayerCase, matrix: np.ndarray, product: _Product = _float_product) -> onnx.ModelProto:
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
        y = f"product{number}"
        node, constants = product(copy, y)
        nodes.append(node)
        weights += constants
        if case.bias:
            nodes.append(helper.make_node("Add", [y, "bias"], [f"y{number}"], name=f"add{number}"))
            y = f"y{number}"
        nodes.append(helper.make_node("Slice", [y, "zeros", "ones"], [f"part{number}"]))
    nodes.append(helper.make_node("Concat", [f"part{number}" for number in range(case.copies)], ["parts"], axis=0))
    x = helper.make_tensor_value_info("x", kind, [case.rows, case.k])
    parts = helper.make_tensor_value_info("parts", kind, [case.copies, 1])
    graph = helper.make_graph(nodes, "layer", [x], [parts], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets[: 1 if product is _float_product else 2], ir_version=8)


def _numpy(case: LayerCase) -> Any:
    return np.float16 if case.dtype == "FLOAT16" else np.float32


def _entry(candidate: Candidate) -> str:
    sparsity = candidate.prune.get("sparsity")
    return candidate.timing if sparsity is None else f"{candidate.timing} {sparsity:g}"


def _rounded(fraction: float) -> float:
    return float(round(fraction / _STEP) * _STEP)
