"""SparseAMXMatMul in an ORT session against ORT's own fp32 MatMul and against what memory allows.

Every candidate is a model of several layers with weights of their own, so that no weight is found in a cache; a time is
that of one layer. Peers:

    ort_matmul_fp32      ORT's MatMul on the same (pruned, dense) weights in float32
    stream_read          reading the packed bytes at the rate measured in the same run: a ratio of 0.8 is 80 % of it
    dense_bf16_stream    reading the matrix as dense bf16, 2 k n bytes, at that rate: the best of a dense bf16 layer
    ortolan_1_thread     Ortolan itself on one thread
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from .._native import pack_bitmap
from ..progress import Progress, no_progress
from ..session import register
from .result import BenchOptions, BenchResult, BenchRow
from .timing import StreamReader, Timing, copies_to_stay_cold, interleave, pinned

OP = "SparseAMXMatMul"
CASES = (
    (1, 4096, 14336),
    (1, 4096, 4096),
    (1, 14336, 4096),
    (1, 768, 3072),
    (16, 384, 1536),
    (128, 384, 384),
    (128, 384, 1536),
    (128, 1536, 384),
    (128, 768, 3072),
)
QUICK_CASES = ((1, 4096, 14336), (128, 384, 1536))
SPARSITY = (0.5, 0.7, 0.9)
QUICK_SPARSITY = (0.5,)


@dataclass(frozen=True)
class _Layer:
    """A random layer in both forms."""

    dense: np.ndarray
    packed: tuple[np.ndarray, np.ndarray, np.ndarray]

    @staticmethod
    def random(rng: np.random.Generator, k: int, n: int, sparsity: float) -> _Layer:
        w = rng.standard_normal((k, n), dtype=np.float32)
        w[rng.random((k, n), dtype=np.float32) < sparsity] = 0
        return _Layer(w, pack_bitmap(w))

    @property
    def packed_bytes(self) -> int:
        return sum(part.nbytes for part in self.packed)


# Op type, constant inputs behind x, attributes.
_Node = tuple[str, list[np.ndarray], dict[str, Any]]


def _session(k: int, n: int, nodes: list[_Node], threads: int) -> ort.InferenceSession:
    """A session over layers that all read x."""
    graph_nodes, initializers = [], []
    for i, (op_type, constants, attributes) in enumerate(nodes):
        names = [f"w{i}.{j}" for j in range(len(constants))]
        initializers += [numpy_helper.from_array(c, name) for c, name in zip(constants, names, strict=True)]
        domain = "ai.ortolan" if op_type == OP else ""
        graph_nodes.append(helper.make_node(op_type, ["x", *names], [f"y{i}"], domain=domain, **attributes))
    graph = helper.make_graph(
        graph_nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", k])],
        [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, ["m", n]) for i in range(len(nodes))],
        initializers,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.ortolan", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _runner(session: ort.InferenceSession, x: np.ndarray, n: int) -> Callable[[], object]:
    """Runs the session on x into outputs that exist already: fresh ones would cost page faults on both sides."""
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    for output in session.get_outputs():
        # Ones: the pages of zeros that nobody has written are not there yet.
        binding.bind_ortvalue_output(output.name, ort.OrtValue.ortvalue_from_numpy(np.ones((len(x), n), np.float32)))
    return lambda: session.run_with_iobinding(binding)


def _measure(case: tuple[int, int, int], sparsity: float, threads: int, seconds: float) -> dict[str, Timing]:
    """Times of one layer: {"ours", "ort_matmul_fp32", "stream_read", "dense_bf16_stream"}."""
    m, k, n = case
    rng = np.random.default_rng(k * n + m)
    first = _Layer.random(rng, k, n, sparsity)
    copies = copies_to_stay_cold(first.packed_bytes)
    x = rng.standard_normal((m, k), dtype=np.float32)
    ours = _runner(_session(k, n, _ours(first, k, n, copies), threads), x, n)
    # ORT shares packed weights of equal content: copies must differ in it, or they are one.
    dense_copies = copies_to_stay_cold(first.dense.nbytes)
    different: list[_Node] = [("MatMul", [np.roll(first.dense, i, 0)], {}) for i in range(dense_copies)]
    dense = _runner(_session(k, n, different, threads), x, n)
    packed_bytes = first.packed_bytes
    del first, different

    stream = StreamReader(threads)
    candidates: dict[str, Callable[[], object]] = {"ours": ours, "ort_matmul_fp32": dense}
    timings = interleave(candidates | stream.candidates(), seconds=seconds)
    return {
        "ours": timings["ours"].scaled(1 / copies),
        "ort_matmul_fp32": timings["ort_matmul_fp32"].scaled(1 / dense_copies),
        "stream_read": stream.time_for(timings, packed_bytes),
        "dense_bf16_stream": stream.time_for(timings, 2 * k * n),
    }


def _ours(layer: _Layer, k: int, n: int, copies: int) -> list[_Node]:
    masks, values, offsets = layer.packed
    bf16 = values.view(ml_dtypes.bfloat16)
    return [(OP, [masks, bf16, offsets], {"k": k, "n": n, "format_version": 1}) for _ in range(copies)]


def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
    """Measure every case at every sparsity and number of threads."""
    cases = options.cases or (QUICK_CASES if options.quick else CASES)
    sparsities = options.sparsity or (QUICK_SPARSITY if options.quick else SPARSITY)
    result = BenchResult()
    result.notes.append(
        "Times are of one layer. stream_read: the packed bytes at the memory rate of the same run (ratio 0.8: 80 % "
        "of it); dense_bf16_stream: the same for dense bf16 bytes."
    )
    steps = [(case, sparsity, t) for case in cases for sparsity in sparsities for t in options.threads]
    one_thread: dict[tuple[tuple[int, int, int], float], Timing] = {}
    for step, (case, sparsity, threads) in enumerate(steps):
        m, k, n = case
        progress(f"{m} x {k} x {n}, {sparsity:.0%} zeros, threads {threads}", step, len(steps))
        with pinned(threads):
            timings = _measure(case, sparsity, threads, seconds=1.0 if options.quick else 3.0)
        description = {"m": m, "k": k, "n": n, "sparsity": sparsity}
        ours = timings.pop("ours")
        if m > 1:  # compute-bound: what memory allows says nothing
            timings = {"ort_matmul_fp32": timings["ort_matmul_fp32"]}
        if threads == 1:
            one_thread[case, sparsity] = ours
        elif (case, sparsity) in one_thread:
            timings["ortolan_1_thread"] = one_thread[case, sparsity]
        result.rows += [BenchRow(OP, description, threads, ours, peer, time) for peer, time in timings.items()]
    progress("done", len(steps), len(steps))
    return result
