"""VNNISpMM on layers of BERT-Mini, BERT-Base and BERT-Large against ONNX Runtime's dense operators.

One measurement is one weight's shape, number of tokens (m) and number of threads: Ortolan at every sparsity and its
peers in the same rounds (side_by_side.py).

Kinds:

    node    the operator in an ORT session, float32 in and out, each token quantized: nine weights of the three models
            with ten numbers of tokens from 16 to 384, 90 shapes as in the paper (sparse-int8-transformers, Table 9)
    bare    the product alone, u8 token blocks in, on one thread; out: int32 sums as token blocks, as MatMulInteger has
            them row by row, scaled float32 row by row, or u8 token blocks through a table of 256 bytes (an activation).
            Of BARE_SHAPES

Peers, whose weights are dense:

    ort_matmul_integer             ORT MatMulInteger: u8 in, int32 out; nothing is quantized or scaled
    ort_dynamic_quantize_matmul    ORT DynamicQuantizeMatMul: float32 in and out (node)
    ort_matmul_fp32                ORT MatMul on float32 weights (node)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import _native
from ..errors import OrtolanError
from ..progress import Progress, no_progress
from . import dense_peers
from .cold_layers import Bind, Candidate, Node, Run, cold_copies, ort_candidate, to_bytes
from .result import BenchOptions, BenchResult, BenchRow, SummaryRow, geometric_mean
from .side_by_side import Comparison, Plan, Setup, Shape, chosen_kinds, measure, shapes_to_measure
from .timing import copies_to_stay_cold

OP = "VNNISpMM"
KINDS = ("node", "bare")
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
BARE_SHAPES = (
    Shape(768, 768, (32, 128)),
    Shape(768, 3072, (128,)),
    Shape(3072, 768, (128,)),
    Shape(1024, 1024, (256,)),
    Shape(384, 384, (128,)),
    Shape(384, 1536, (128,)),
)
BARE_OUTPUTS = ("int32", "float32", "uint8")
QUICK_BARE_SHAPES = (Shape(768, 3072, (128,)),)
ROUNDS = 3

_MOST_INPUTS = 2**16  # ops/formats/block_sparse_4x1.h
_GROUP_OUTPUTS = 4
# What the summary's geometric mean is against, and its other columns.
_MAIN_PEERS = {"node": "ort_dynamic_quantize_matmul", "bare": "ort_matmul_integer"}
_OTHERS = {"matmul_integer": "ort_matmul_integer", "fp32": "ort_matmul_fp32"}


def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
    """Measure every shape, number of threads and sparsity. An interrupt ends it early, with what there is."""
    result = BenchResult(
        notes=["Times are of one layer, its weights cold. The peers' weights are dense."],
        summary_title="Times faster than DynamicQuantizeMatMul (node) or MatMulInteger (bare): most, and geometric "
        "mean of shapes; last: than other peers",
    )
    node_plans, bare_plans = _plans(options)
    measure(OP, node_plans, options, result, progress, ROUNDS)
    if not result.interrupted and bare_plans:
        measure(OP, bare_plans, _on_one_thread(options), result, progress, ROUNDS)
    result.summary = summarize(result.rows)
    return result


def summarize(rows: Sequence[BenchRow]) -> list[SummaryRow]:
    """By kind, threads, sparsity and output: over all shapes."""
    found: dict[tuple[str, int, str, str], list[BenchRow]] = {}
    for row in rows:
        key = (row.case["kind"], row.threads, row.case["out"], row.case["sparsity"])
        found.setdefault(key, []).append(row)
    summary = []
    for (kind, threads, out, sparsity), measured in found.items():
        ratios: dict[str, list[float]] = {}
        for row in measured:
            ratios.setdefault(row.peer, []).append(row.ratio)
        main = ratios.get(_MAIN_PEERS[kind])
        if main is None:
            continue
        tokens = [row.case["m"] for row in measured]
        batch = str(tokens[0]) if len(set(tokens)) == 1 else f"{min(tokens)}-{max(tokens)}"
        others = {
            name: geometric_mean(ratios[peer])
            for name, peer in _OTHERS.items()
            if peer in ratios and peer != _MAIN_PEERS[kind]
        }
        case = {"kind": kind, "m": batch, "out": out, "sparsity": sparsity}
        summary.append(SummaryRow(case, threads, {"most": max(main)}, geometric_mean(main), others))
    return summary


def _plans(options: BenchOptions) -> tuple[list[Plan], list[Plan]]:
    """Of nodes, and of bare products."""
    kinds = chosen_kinds(options, KINDS)
    if options.group_size is not None:
        raise OrtolanError(f"--group-size: {OP} has a scale for each output; leave it out")
    most = max((k for _, k, _ in options.cases or ()), default=0)
    if most > _MOST_INPUTS:
        raise OrtolanError(f"--shape: k is {most}; {OP} has at most {_MOST_INPUTS} inputs")
    sparsity = options.sparsity or (QUICK_SPARSITY if options.quick else SPARSITY)
    weights, tokens = (QUICK_WEIGHTS, QUICK_TOKENS) if options.quick else (WEIGHTS, TOKENS)
    defaults: Mapping[str, Sequence[Shape]] = {
        "node": [Shape(k, n, options.batch or tokens) for k, n in weights],
        "bare": QUICK_BARE_SHAPES if options.quick else BARE_SHAPES,
    }
    given = shapes_to_measure(options, (), tokens) if options.layers or options.cases else None

    def plans(kind: str) -> list[Plan]:
        prepare = _prepare_nodes if kind == "node" else _prepare_bare
        shapes = defaults[kind] if given is None else given
        return [Plan(f"{OP} {kind}", shape, partial(prepare, shape, sparsity)) for shape in shapes if kind in kinds]

    return plans("node"), plans("bare")


def _on_one_thread(options: BenchOptions) -> BenchOptions:
    return BenchOptions((1,), options.quick)


def random_weight(rng: np.random.Generator, k: int, n: int, sparsity: float) -> np.ndarray:
    """int8 [k, n] of which this share of the blocks is zero."""
    q = rng.integers(-127, 128, (k, n), dtype=np.int8)
    kept = rng.random((k, -(-n // _GROUP_OUTPUTS))) >= sparsity
    q[~np.repeat(kept, _GROUP_OUTPUTS, axis=1)[:, :n]] = 0
    return q


def our_node(q: np.ndarray, scales: np.ndarray) -> Node:
    """The operator on the weight scales q: q int8 [k, n], scales float32 [n]."""
    k, n = q.shape
    constants: list[np.ndarray | None] = [*_native.pack_block_sparse(q), scales]
    return Node(OP, constants, "ai.ortolan", {"k": k, "n": n, "format_version": 1})


def _prepare_nodes(shape: Shape, sparsity: Sequence[float]) -> Setup:
    k, n = shape.k, shape.n
    rng = np.random.default_rng(k * n)
    candidates = {
        "ort_matmul_integer": dense_peers.ort_matmul_integer(rng, k, n),
        "ort_dynamic_quantize_matmul": dense_peers.ort_dynamic_quantize_matmul(rng, k, n),
        "ort_matmul_fp32": dense_peers.ort_matmul_fp32(rng, k, n),
    }
    peers = {name: name for name in candidates}
    comparisons = []
    for share in sparsity:
        name = f"ortolan {share:g}"
        node = our_node(random_weight(rng, k, n, share), rng.random(n, dtype=np.float32))
        candidates[name] = ort_candidate(node, k, n)
        comparisons.append(Comparison({"kind": "node", "out": "float32", "sparsity": f"{share:.0%}"}, name, peers))
    return Setup(candidates, comparisons)


def _prepare_bare(shape: Shape, sparsity: Sequence[float]) -> Setup:
    k, n = shape.k, shape.n
    rng = np.random.default_rng(k * n)
    candidates = {"ort_matmul_integer": dense_peers.ort_matmul_integer(rng, k, n)}
    peers = {name: name for name in candidates}
    comparisons = []
    for share in sparsity:
        node = our_node(random_weight(rng, k, n, share), rng.random(n, dtype=np.float32))
        for out in BARE_OUTPUTS:
            name = f"ortolan {out} {share:g}"
            candidates[name] = bare_candidate(node, out)
            comparisons.append(Comparison({"kind": "bare", "out": out, "sparsity": f"{share:.0%}"}, name, peers))
    return Setup(candidates, comparisons)


def bare_candidate(node: Node, out: str) -> Candidate:
    """The products of copies of the node's weight with u8 token blocks; out: one of BARE_OUTPUTS."""
    k, n = node.attributes["k"], node.attributes["n"]
    copies = cold_copies(node.arrays, copies_to_stay_cold(node.stored_bytes))
    table = np.arange(256, dtype=np.uint8)[::-1].copy()

    def open_products(_threads: int) -> Bind:
        def bind(x: np.ndarray) -> Run:
            # Numbers of normal distribution, in about the range of a byte.
            y_range: dict[str, Any] = (
                {"y_scale": float(np.sqrt(k)), "y_zero_point": 128, "table": table} if out == "uint8" else {}
            )
            products = [
                _native.QuantizedSpmm(
                    len(x), 1 / 40, 128, values, indices, starts, scales, k, n, sums_only=out == "int32", **y_range
                )
                for values, indices, starts, scales in copies
            ]
            blocks = _native.quantize_tokens((to_bytes(x).astype(np.float32) - 128) / 40, 1 / 40, 128)
            y = products[0].new_output()
            y.fill(1)  # no page of it is new
            return partial(_native.QuantizedSpmm.run, products, blocks, y)

        return bind

    return Candidate(len(copies), node.stored_bytes, open_products)
