"""VNNISpMM on layers of BERT-Mini, BERT-Base and BERT-Large, compared with ONNX Runtime's dense operators.

A measurement is one weight shape, number of tokens (m) and number of threads: Ortolan at every sparsity, and its peers,
in the same rounds (side_by_side.py).

The operator is a node of an ORT session with float32 input and output, and quantizes each token. The 90 shapes are
those of the paper (sparse-int8-transformers, Table 9): nine weights of the three models, ten numbers of tokens from 16
to 384.

Peers, with dense weights:

    ort_matmul_integer             ORT MatMulInteger: uint8 in, int32 out, without quantization or scaling
    ort_dynamic_quantize_matmul    ORT DynamicQuantizeMatMul: float32 in and out
    ort_matmul_fp32                ORT MatMul on float32 weights
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from .. import _native
from ..errors import OrtolanError
from ..progress import Progress, no_progress
from . import dense_peers
from .cold_layers import Node, ort_candidate
from .result import BenchOptions, BenchResult, BenchRow, SummaryRow, geometric_mean
from .side_by_side import Comparison, Plan, Setup, Shape, measure, shapes_to_measure

OP = "VNNISpMM"
SPARSITY = (0.7, 0.75, 0.8, 0.85, 0.9)
QUICK_SPARSITY = (0.8, 0.9)

WEIGHTS = (
    *((256, 256), (256, 1024), (1024, 256)),
    *((768, 768), (768, 3072), (3072, 768)),
    *((1024, 1024), (1024, 4096), (4096, 1024)),
)
TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384)
QUICK_WEIGHTS = ((768, 3072),)
QUICK_TOKENS = (1, 16, 128)
ROUNDS = 3

_MAX_INPUTS = 2**16  # ops/formats/block_sparse_4x1.h
_GROUP_OUTPUTS = 4
# The peer for the summary's geometric mean, and the peers of its other columns.
_MAIN_PEER = "ort_dynamic_quantize_matmul"
_OTHERS = {"matmul_integer": "ort_matmul_integer", "fp32": "ort_matmul_fp32"}


def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
    """Measure every shape, number of threads and sparsity. An interrupt returns the results so far."""
    result = BenchResult(
        notes=["Times are of one layer, its weights cold. The peers' weights are dense."],
        summary_title="Speedup over DynamicQuantizeMatMul: best, and geometric mean of shapes; last columns: over "
        "other peers",
    )
    measure(OP, _plans(options), options, result, progress, ROUNDS)
    result.summary = summarize(result.rows)
    return result


def summarize(rows: Sequence[BenchRow]) -> list[SummaryRow]:
    """Summarize all shapes by threads and sparsity."""
    found: dict[tuple[int, str], list[BenchRow]] = {}
    for row in rows:
        found.setdefault((row.threads, row.case["sparsity"]), []).append(row)
    summary = []
    for (threads, sparsity), measured in found.items():
        ratios: dict[str, list[float]] = {}
        for row in measured:
            ratios.setdefault(row.peer, []).append(row.ratio)
        main = ratios.get(_MAIN_PEER)
        if main is None:
            continue
        tokens = [row.case["m"] for row in measured]
        batch = str(tokens[0]) if len(set(tokens)) == 1 else f"{min(tokens)}-{max(tokens)}"
        others = {name: geometric_mean(ratios[peer]) for name, peer in _OTHERS.items() if peer in ratios}
        case = {"m": batch, "sparsity": sparsity}
        summary.append(SummaryRow(case, threads, {"best": max(main)}, geometric_mean(main), others))
    return summary


def _plans(options: BenchOptions) -> list[Plan]:
    if options.kinds is not None:
        raise OrtolanError(f"--kind: {OP} has one kind of weights; leave it out")
    if options.group_size is not None:
        raise OrtolanError(f"--group-size: {OP} has one scale per output; leave it out")
    largest = max((k for _, k, _ in options.cases or ()), default=0)
    if largest > _MAX_INPUTS:
        raise OrtolanError(f"--shape: k is {largest}; {OP} has at most {_MAX_INPUTS} inputs")
    sparsity = options.sparsity or (QUICK_SPARSITY if options.quick else SPARSITY)
    weights, tokens = (QUICK_WEIGHTS, QUICK_TOKENS) if options.quick else (WEIGHTS, TOKENS)
    shapes = [Shape(k, n, options.batch or tokens) for k, n in weights]
    if options.layers or options.cases:
        shapes = shapes_to_measure(options, (), tokens)
    return [Plan(OP, shape, partial(_prepare, shape, sparsity)) for shape in shapes]


def random_weight(rng: np.random.Generator, k: int, n: int, sparsity: float) -> np.ndarray:
    """Return int8 [k, n] with the given fraction of zero blocks."""
    q = rng.integers(-127, 128, (k, n), dtype=np.int8)
    kept = rng.random((k, -(-n // _GROUP_OUTPUTS))) >= sparsity
    q[~np.repeat(kept, _GROUP_OUTPUTS, axis=1)[:, :n]] = 0
    return q


def our_node(q: np.ndarray, scales: np.ndarray) -> Node:
    """Return the operator on the weight scales q: q int8 [k, n], scales float32 [n]."""
    k, n = q.shape
    constants: list[np.ndarray | None] = [*_native.pack_block_sparse(q), scales]
    return Node(OP, constants, "ai.ortolan", {"k": k, "n": n, "format_version": 1})


def _prepare(shape: Shape, sparsity: Sequence[float]) -> Setup:
    k, n = shape.k, shape.n
    rng = np.random.default_rng(k * n)
    candidates = {
        "ort_matmul_integer": dense_peers.ort_matmul_integer(rng, k, n),
        "ort_dynamic_quantize_matmul": dense_peers.ort_dynamic_quantize_matmul(rng, k, n),
        "ort_matmul_fp32": dense_peers.ort_matmul_fp32(rng, k, n),
    }
    peers = {name: name for name in candidates}
    comparisons = []
    for fraction in sparsity:
        name = f"ortolan {fraction:g}"
        node = our_node(random_weight(rng, k, n, fraction), rng.random(n, dtype=np.float32))
        candidates[name] = ort_candidate(node, k, n)
        comparisons.append(Comparison({"sparsity": f"{fraction:.0%}"}, name, peers))
    return Setup(candidates, comparisons)
