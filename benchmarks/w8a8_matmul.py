"""W8A8MatMul on the layers of w4a8_matmul.py, compared with ORT MatMulNBits with 8 bits and dense int8.

Weights are random int8, symmetric, in groups of every size. Peers, in the same rounds:

    ort_matmul_nbits_8_level_4     ORT MatMulNBits on the same weights, x rounded to int8 as in W8A8MatMul
    ort_dynamic_quantize_matmul    ORT DynamicQuantizeMatMul: int8 weights with a scale per column, one scale for x
    ortolan_dense_int8             SparseAMXMatMul, dense int8 weights with a scale per column, and a scale per row of x
    ort_matmul_fp32                ORT MatMul on float32 weights: the unoptimized model
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np

from .. import _native
from ..errors import OrtolanError
from ..progress import Progress, no_progress
from . import dense_peers, sparse_amx_matmul
from .cold_layers import Node, TimedLayer, ort_candidate
from .result import BenchOptions, BenchResult, summarize
from .shapes import LAYERS, MODELS
from .side_by_side import (
    STREAM_NOTE,
    Comparison,
    Plan,
    Setup,
    Shape,
    check_quantized_inputs,
    chosen_kinds,
    measure,
    shapes_to_measure,
)
from .w4a8_matmul import BATCH, GROUP_SIZES, QUICK_LAYERS, ROUNDS, SCALES, packed_rows

OP = "W8A8MatMul"
KIND = "symmetric"
PEERS = {
    "nbits": "ort_matmul_nbits_8_level_4",
    "ort_int8": "ort_dynamic_quantize_matmul",
    "dense_int8": "ortolan_dense_int8",
    "fp32": "ort_matmul_fp32",
}


def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
    """Measure every shape, number of threads and batch. An interrupt returns the results so far."""
    plans = _plans(options)
    result = BenchResult(
        notes=[STREAM_NOTE, "Weights and group sizes are the same as MatMulNBits'."],
        summary_title="Speedup over MatMulNBits with 8 bits and accuracy_level 4 (last columns: over ORT's "
        "dynamic int8, SparseAMXMatMul's dense int8, fp32, reading the weights), geometric means of layers",
    )
    measure(OP, plans, options, result, progress, ROUNDS)
    others = {name: peer for name, peer in PEERS.items() if name != "nbits"} | {"stream": "stream_read"}
    result.summary = summarize(result.rows, {KIND: (PEERS["nbits"],)}, MODELS, others)
    return result


def _plans(options: BenchOptions) -> list[Plan]:
    chosen_kinds(options, (KIND,))
    check_quantized_inputs(options, "")
    if options.sparsity is not None:
        raise OrtolanError(f"--sparsity: {OP} stores every weight, whatever its value; leave it out")
    group_sizes = GROUP_SIZES if options.group_size is None else (options.group_size,)
    shapes = shapes_to_measure(options, QUICK_LAYERS if options.quick else tuple(LAYERS), BATCH)
    return [Plan(OP, shape, partial(_prepare, shape, group_sizes)) for shape in shapes]


def _prepare(shape: Shape, group_sizes: Sequence[int]) -> Setup:
    k, n = shape.k, shape.n
    rng = np.random.default_rng(k * n)
    q = rng.integers(-128, 128, (k, n)).astype(np.int8)
    column_scales = rng.random((1, n), dtype=np.float32)
    dense = sparse_amx_matmul.our_node("int8", q, column_scales, 0, sparse_amx_matmul.Storage.DENSE)
    candidates: dict[str, TimedLayer] = {
        PEERS["ort_int8"]: dense_peers.ort_dynamic_quantize_matmul(rng, k, n),
        PEERS["dense_int8"]: ort_candidate(dense, k, n),
        PEERS["fp32"]: dense_peers.ort_matmul_fp32(rng, k, n),
    }
    comparisons = []
    all_scales = {size: rng.random((-(-k // size), n), dtype=np.float32).astype(np.float16) for size in group_sizes}
    for group_size, dtype in product(group_sizes, SCALES):
        scales = all_scales[group_size].astype(dtype)
        nbits, name = f"{PEERS['nbits']} {group_size}", f"ortolan {dtype} {group_size}"
        if nbits not in candidates:
            node = dense_peers.matmul_nbits_node(q, scales.astype(np.float32), None, group_size, 4)
            candidates[nbits] = ort_candidate(node, k, n, distinct=True)
        candidates[name] = ort_candidate(our_node(q, scales, group_size), k, n)
        case = {"kind": KIND, "group_size": group_size, "scales": dtype}
        comparisons.append(Comparison(case, name, {peer: peer for peer in PEERS.values()} | {PEERS["nbits"]: nbits}))
    return Setup(candidates, comparisons)


def our_node(q: np.ndarray, scales: np.ndarray, group_size: int) -> Node:
    """Return the operator on the weight scales q: q int8 [k, n], scales float32 or float16 [groups, n]."""
    k, n = q.shape
    attributes = {"k": k, "n": n, "format_version": 1, "group_size": group_size}
    return Node(OP, [_native.pack_int8_group(q), packed_rows(scales)], "ai.ortolan", attributes)
