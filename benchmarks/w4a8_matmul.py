"""W4A8MatMul in ORT sessions on layers of Llama 3 8B, SmolLM2-135M and all-MiniLM-L6-v2, compared with ORT MatMulNBits.

For 8-bit weights see w8a8_matmul.py.

A measurement is one shape, batch (m) and number of threads: Ortolan and its peers run in the same rounds
(side_by_side.py) on the same random weights, in groups of every size. Layers of equal shape are measured once.

Kinds of weights:

    symmetric      scales (q - 8): as ORT GenAI's builder writes them
    zero_points    scales (q - zero_points); by default only for ZERO_POINT_LAYERS
    fractions      scales (q - zero_points / 16), for the same layers; MatMulNBits has integer zero points
    minimums       scales q + minimums, for the same layers; MatMulNBits has zero points instead
    int4, int5, int6    scales s (q - z) in subgroups of 16, as optimize_onnx stores these formats, for the same layers;
                   MatMulNBits has groups of 32 with zero points
    q4_k, q5_k, q6_k, q5_0    GGUF's formats, kept exactly (ops/formats/k_quant.h), for the same layers and peers

Scales are float32, as in MatMulNBits, whose scales have the type of x, or float16, which W4A8MatMul stores if that is
exact. Peers:

    ort_matmul_nbits_4_level_4    ORT MatMulNBits, blocks of the same size, x rounded to int8 as in W4A8MatMul
    ort_matmul_nbits_4_level_0    ORT MatMulNBits with x in float32
    ort_matmul_fp32               ORT MatMul on float32 weights: the unoptimized model

With device="opencl", W4A8MatMul runs on an OpenCL device, for all numbers of rows, against the CPU (ortolan_cpu).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ortolan.graph_passes.operators.group_function import TILE_INPUTS
from ortolan.graph_passes.weights.quantizers.grid import FRACTION_STEPS

from .. import _native
from ..errors import OrtolanError
from ..opencl import NO_GPU, VARIABLE, opencl_devices
from ..progress import Progress, no_progress
from . import dense_peers
from .cold_layers import Bind, Node, TimedLayer, ort_candidate
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

OP = "W4A8MatMul"
SUBGROUP_BITS = {"int4": 4, "int5": 5, "int6": 6}
K_QUANTS = {  # group size and attributes
    "q4_k": (256, {"bits": 4, "subgroup_size": 32, "subgroup_zero_point": 0}),
    "q5_k": (256, {"bits": 5, "subgroup_size": 32, "subgroup_zero_point": 0}),
    "q6_k": (256, {"bits": 6, "subgroup_size": 16, "subgroup_zero_point": 32}),
    "q5_0": (32, {"bits": 5, "subgroup_size": 32, "subgroup_zero_point": 16}),
}
GROUP_KINDS = ("symmetric", "zero_points", "fractions", "minimums")
FIXED_KINDS = (*SUBGROUP_BITS, *K_QUANTS)  # whose group sizes are fixed
KINDS = (*GROUP_KINDS, *FIXED_KINDS)
SUBGROUP_GROUP = 256  # inputs of a subgroup kind that share a float scale
SUBGROUP_SIZE = 16  # inputs that share s and z
SUBGROUP_PEER = 32  # group size of the MatMulNBits that subgroup kinds are compared with
GROUP_SIZES = (32, 128)
BATCH = (1, 16, 128)
ROUNDS = 3
QUICK_LAYERS = ("up", "smollm2:gate", "minilm:ffn_up")
ZERO_POINT_LAYERS = QUICK_LAYERS

SCALES = ("float32", "float16")

_PEER = "ort_matmul_nbits_4_level_"


def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
    """Measure every shape, number of threads and batch. An interrupt returns the results so far."""
    plans = _plans(options)
    if options.device is not None:
        return _run_on_opencl(plans, options, progress)
    result = BenchResult(
        notes=[STREAM_NOTE, "Weights, group sizes and zero points are the same as MatMulNBits'."],
        summary_title="Speedup over MatMulNBits with accuracy_level 4 (last columns: over level 0, fp32, reading the "
        "weights), geometric means of layers",
    )
    measure(OP, plans, options, result, progress, ROUNDS)
    others = {"level_0": f"{_PEER}0", "fp32": "ort_matmul_fp32", "stream": "stream_read"}
    result.summary = summarize(result.rows, dict.fromkeys(KINDS, (f"{_PEER}4",)), MODELS, others)
    return result


def _run_on_opencl(plans: Sequence[Plan], options: BenchOptions, progress: Progress) -> BenchResult:
    device = opencl_devices()[0]
    title = "Speedup of the OpenCL device over the CPU"
    notes = [f"On the OpenCL device {device}; ortolan_cpu: the same operator on the CPU, in the same rounds."]
    if NO_GPU in device:
        title = f"{title}; THIS DEVICE IS NOT A GPU"
        notes.append("This device is not a GPU: its kernels run on the CPU, so the times do not apply to any GPU.")
    result = BenchResult(notes=notes, summary_title=title)
    measure(OP, plans, options, result, progress, ROUNDS)
    result.summary = summarize(result.rows, dict.fromkeys(KINDS, ("ortolan_cpu",)), MODELS, {})
    return result


def _plans(options: BenchOptions) -> list[Plan]:
    kinds = chosen_kinds(options, KINDS if options.device is None else GROUP_KINDS)
    if options.group_size is not None:
        fixed = [kind for kind in kinds if kind in FIXED_KINDS]
        if fixed and options.kinds:
            raise OrtolanError(
                f"--group-size is {options.group_size}, but kind {fixed[0]!r} has groups of {_fixed_group(fixed[0])}; "
                "leave one of them out"
            )
        kinds = tuple(kind for kind in kinds if kind not in FIXED_KINDS)
    check_quantized_inputs(options, "")
    if options.sparsity is not None:
        raise OrtolanError(f"--sparsity: {OP} stores every weight, whatever its value; leave it out")
    group_sizes = GROUP_SIZES if options.group_size is None else (options.group_size,)
    plans = []
    for shape in shapes_to_measure(options, QUICK_LAYERS if options.quick else tuple(LAYERS), BATCH):
        symmetric_only = options.kinds is None and (
            options.quick or set(ZERO_POINT_LAYERS).isdisjoint(shape.names.split(", "))
        )
        prepare = _prepare if options.device is None else _prepare_opencl
        plans.append(Plan(OP, shape, partial(prepare, shape, KINDS[:1] if symmetric_only else kinds, group_sizes)))
    return plans


def _prepare(shape: Shape, kinds: Sequence[str], group_sizes: Sequence[int]) -> Setup:
    k, n = shape.k, shape.n
    rng = np.random.default_rng(k * n)
    q = rng.integers(0, 16, (k, n), dtype=np.uint8)
    candidates: dict[str, TimedLayer] = {}
    comparisons = []
    for kind in (kind for kind in kinds if kind in FIXED_KINDS):
        groups = (-(-k // SUBGROUP_PEER), n)
        scales, zeros = rng.random(groups, dtype=np.float32), rng.integers(0, 16, groups, dtype=np.uint8)
        peers = {}
        for level in (4, 0):
            node = dense_peers.matmul_nbits_node(q, scales, zeros, SUBGROUP_PEER, level)
            peers[f"{_PEER}{level}"] = name = f"{_PEER}{level} {kind}"
            candidates[name] = ort_candidate(node, k, n, distinct=True)
        peers["ort_matmul_fp32"] = "ort_matmul_fp32"
        ours = k_quant_node(rng, k, n, kind) if kind in K_QUANTS else subgroup_node(rng, k, n, SUBGROUP_BITS[kind])
        candidates[f"ortolan {kind}"] = ort_candidate(ours, k, n)
        case = {"kind": kind, "group_size": _fixed_group(kind), "scales": "float16"}
        comparisons.append(Comparison(case, f"ortolan {kind}", peers))
    for kind, group_size in product((kind for kind in kinds if kind not in FIXED_KINDS), group_sizes):
        groups = (-(-k // group_size), n)
        scales = rng.random(groups, dtype=np.float32).astype(np.float16)
        zero_points = None if kind == "symmetric" else rng.integers(0, 16, groups, dtype=np.uint8)
        minimums = (rng.random(groups, dtype=np.float32) - 1).astype(np.float16) if kind == "minimums" else None
        of_these = f"{kind} {group_size}"
        peers = {}
        for level in (4, 0):
            node = dense_peers.matmul_nbits_node(q, scales.astype(np.float32), zero_points, group_size, level)
            peers[f"{_PEER}{level}"] = name = f"{_PEER}{level} {of_these}"
            candidates[name] = ort_candidate(node, k, n, distinct=True)
        peers["ort_matmul_fp32"] = "ort_matmul_fp32"
        for dtype in SCALES:
            name = f"ortolan {dtype} {of_these}"
            offsets: dict[str, Any] = {"zero_points": zero_points}
            if kind == "fractions":
                offsets = {"zero_points": rng.integers(0, 256, groups, dtype=np.uint8), "steps": FRACTION_STEPS}
            elif minimums is not None:
                offsets = {"minimums": minimums.astype(dtype)}
            candidates[name] = ort_candidate(our_node(q, scales.astype(dtype), group_size, **offsets), k, n)
            case = {"kind": kind, "group_size": group_size, "scales": dtype}
            comparisons.append(Comparison(case, name, peers))
    candidates["ort_matmul_fp32"] = dense_peers.ort_matmul_fp32(rng, k, n)
    return Setup(candidates, comparisons)


def _prepare_opencl(shape: Shape, kinds: Sequence[str], group_sizes: Sequence[int]) -> Setup:
    """Return Ortolan's candidates, each on the CPU and on the device."""
    on_cpu = _prepare(shape, kinds, group_sizes)
    candidates: dict[str, TimedLayer] = {}
    comparisons = []
    for comparison in on_cpu.comparisons:
        name = f"{comparison.ours} on opencl"
        candidates[comparison.ours] = cpu = on_cpu.candidates[comparison.ours]
        candidates[name] = replace(cpu, open=partial(_open_on_opencl, cpu))
        comparisons.append(Comparison(comparison.case, name, {"ortolan_cpu": comparison.ours}))
    return Setup(candidates, comparisons)


def _open_on_opencl(candidate: TimedLayer, threads: int) -> Bind:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "force"  # read when kernels are created
    try:
        return candidate.open(threads)
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def our_node(
    q: np.ndarray,
    scales: np.ndarray,
    group_size: int,
    *,
    zero_points: np.ndarray | None = None,
    steps: int = 1,
    minimums: np.ndarray | None = None,
) -> Node:
    """Return the operator on the weight scales (q - zero_points / steps), or scales q + minimums.

    Args:
        q: uint8 [k, n] from 0 to 15.
        scales: float32 or float16 [groups, n].
        group_size: Inputs per scale.
        zero_points: uint8 [groups, n]; None: 8.
        steps: Integer zero-point units in one step of q: 16 if zero points are in sixteenths.
        minimums: [groups, n], of the type of scales.
    """
    k, n = q.shape
    constants: list[np.ndarray | None] = [_native.pack_int4_group(q), packed_rows(scales)]
    if zero_points is not None:
        constants += [None, None, _native.pack_group_rows(zero_points)]
    if minimums is not None:
        constants += [None] * 5 + [packed_rows(minimums)]
    attributes = {"k": k, "n": n, "format_version": 1, "group_size": group_size, "zero_point_steps": steps}
    return Node(OP, constants, "ai.ortolan", attributes)


def subgroup_node(rng: np.random.Generator, k: int, n: int, bits: int) -> Node:
    """Return the operator on random weights in subgroups (ops/formats/subgroup.h)."""
    q = rng.integers(0, 2**bits, (k, n), dtype=np.uint8)
    scales = rng.random((-(-k // SUBGROUP_GROUP), n), dtype=np.float32).astype(np.float16)
    rows = -(-k // TILE_INPUTS) * TILE_INPUTS // SUBGROUP_SIZE
    zeros = rng.integers(0, 2**bits, (rows, n), dtype=np.uint8)
    steps = (127 // np.maximum(zeros, 2**bits - 1 - zeros)).astype(np.uint8)
    constants: list[np.ndarray | None] = [_native.pack_int4_group(q & np.uint8(15)), packed_rows(scales)]
    constants += [None] * 6
    constants.append(_native.pack_group_rows(np.minimum(steps, 2 ** (8 - bits) - 1) | zeros << (8 - bits)))
    if bits > 4:
        constants.append(_native.pack_high_bits(q, bits))
    attributes = {"k": k, "n": n, "format_version": 2, "group_size": SUBGROUP_GROUP}
    return Node(OP, constants, "ai.ortolan", attributes | {"subgroup_size": SUBGROUP_SIZE, "bits": bits})


def k_quant_node(rng: np.random.Generator, k: int, n: int, kind: str) -> Node:
    """Return the operator on random weights of a kind of K_QUANTS (ops/formats/k_quant.h)."""
    group, of_kind = K_QUANTS[kind]
    bits, size = of_kind["bits"], of_kind["subgroup_size"]
    q = rng.integers(0, 2**bits, (k, n), dtype=np.uint8)
    groups, rows = (-(-k // group), n), (-(-k // TILE_INPUTS) * TILE_INPUTS // size, n)
    scales = rng.random(groups, dtype=np.float32).astype(np.float16)
    constants: list[np.ndarray | None] = [_native.pack_int4_group(q & np.uint8(15)), packed_rows(scales)]
    constants += [None] * 5
    has_minimums = of_kind["subgroup_zero_point"] == 0
    constants.append(packed_rows(-scales) if has_minimums else None)
    steps = None if size == group else _native.pack_group_rows(rng.integers(0, 64, rows, dtype=np.uint8))
    constants += [steps, _native.pack_high_bits(q, bits) if bits > 4 else None]
    if has_minimums:
        constants.append(_native.pack_group_rows(rng.integers(0, 64, rows, dtype=np.uint8)))
    attributes = {"k": k, "n": n, "format_version": 3, "group_size": group, "subgroup_scale_bits": 8}
    return Node(OP, constants, "ai.ortolan", attributes | of_kind)


def _fixed_group(kind: str) -> int:
    return K_QUANTS[kind][0] if kind in K_QUANTS else SUBGROUP_GROUP


def packed_rows(rows: np.ndarray) -> np.ndarray:
    """Pack float32 or float16 [groups, n] as [panels, groups, 16]."""
    # Packed as uint16, because the packer does not support float16.
    packed: np.ndarray = _native.pack_group_rows(rows.view(np.uint16) if rows.dtype == np.float16 else rows)
    return packed.view(rows.dtype)
