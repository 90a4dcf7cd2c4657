"""SparseAMXMatMul on the layers of Llama 3 8B (SparAMX, Table 2), compared with dense layers of peers.

A measurement is one weight kind, shape, batch (m) and number of threads. Ortolan runs at every sparsity, in dense
storage and, at 50 % sparsity, in 2:4 storage, together with every peer (side_by_side.py). Projections of equal shape
are measured once.

Peers, by kind:

    bf16   torch_bf16 (if torch is installed)
    int8   ort_matmul_nbits_8 (blocks of 128), ort_dynamic_quantize_matmul
    int4   ort_matmul_nbits_4 (blocks of the same group size)
    all    ortolan_dense      Ortolan's dense storage of the same kind
           ort_matmul_fp32    the unoptimized model

The summary's dense peer is the fastest of DENSE_PEERS, with the same precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import partial

import ml_dtypes
import numpy as np

from .. import _native
from ..errors import OrtolanError
from ..progress import Progress, no_progress
from . import dense_peers
from .cold_layers import Node, TimedLayer, ort_candidate
from .result import BenchOptions, BenchResult, summarize
from .shapes import LAYERS, LLAMA_3_8B
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

OP = "SparseAMXMatMul"
DENSE_PEERS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("torch_bf16", "ortolan_dense"),
    "int8": ("ort_matmul_nbits_8", "ort_dynamic_quantize_matmul"),
    "int4": ("ort_matmul_nbits_4",),
}
SPARSITY = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BATCH = (1, 2, 4, 8, 16, 32)
GROUP_SIZE = 128

_TWO_FOUR = 0.5  # sparsity of 2:4 storage
_LEVELS = 2**16  # of random values that decide at which sparsity a weight is pruned


def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
    """Measure every kind, shape, number of threads and batch. An interrupt returns the results so far."""
    kinds = _kinds(options)
    shapes = shapes_to_measure(options, tuple(LLAMA_3_8B), BATCH)
    sparsity = options.sparsity or ((0.5,) if options.quick else SPARSITY)
    group_size = options.group_size or GROUP_SIZE
    result = BenchResult(
        notes=_notes(kinds, group_size),
        summary_title="Speedup over the fastest dense peer (bf16: or our dense storage); last: over ORT fp32, "
        "geometric mean",
    )
    if "bf16" in kinds and dense_peers.has_torch():
        result.versions["torch"] = dense_peers.torch_version()
    plans = [
        Plan(kind, shape, partial(_prepare, kind, shape, sparsity, group_size)) for kind in kinds for shape in shapes
    ]
    measure(OP, plans, options, result, progress)
    columns = {name: (name,) for name in LAYERS}
    result.summary = summarize(result.rows, DENSE_PEERS, columns, {"fp32": "ort_matmul_fp32"})
    return result


def _kinds(options: BenchOptions) -> tuple[str, ...]:
    kinds = chosen_kinds(options, tuple(DENSE_PEERS))
    if set(kinds) != {"bf16"}:
        check_quantized_inputs(options, ", so measure --kind bf16")
    if options.group_size is not None and "int4" not in kinds:
        raise OrtolanError("--group-size is for int4 weights; add int4 to --kind, or leave it out")
    return kinds


def _notes(kinds: Sequence[str], group_size: int) -> list[str]:
    notes = [f"storage: bitmap, 2:4 (two of each four inputs stored), or dense with every weight stored. {STREAM_NOTE}"]
    if "int4" in kinds:
        notes.append(f"int4: groups of {group_size} in ORT and Ortolan.")
    if "bf16" in kinds and not dense_peers.has_torch():
        notes.append("torch is not installed, so bf16 has Ortolan's dense storage as its only dense peer.")
    return notes


def _prepare(kind: str, shape: Shape, sparsity: Sequence[float], group_size: int) -> Setup:
    k, n = shape.k, shape.n
    rng = np.random.default_rng(k * n)
    ours = dict(_ours(rng, kind, k, n, sparsity, group_size))
    peers: dict[str, TimedLayer] = {}
    if kind == "int8":
        peers["ort_matmul_nbits_8"] = dense_peers.ort_matmul_nbits(rng, k, n, 8, 128)
        peers["ort_dynamic_quantize_matmul"] = dense_peers.ort_dynamic_quantize_matmul(rng, k, n)
    elif kind == "int4":
        peers["ort_matmul_nbits_4"] = dense_peers.ort_matmul_nbits(rng, k, n, 4, group_size)
    elif dense_peers.has_torch():
        peers["torch_bf16"] = dense_peers.torch_bf16(rng, k, n)
    # The candidate with the longest runs is timed after torch, whose threads spin for some milliseconds.
    peers["ort_matmul_fp32"] = dense_peers.ort_matmul_fp32(rng, k, n)
    comparisons = []
    for storage, fraction in sorted(ours):
        case = {"kind": kind, "storage": storage, "sparsity": fraction}
        against = {name: name for name in peers}
        if storage != "dense":
            against["ortolan_dense"] = _name("dense", 0.0)
        comparisons.append(Comparison(case, _name(storage, fraction), against))
    return Setup({_name(*key): candidate for key, candidate in ours.items()} | peers, comparisons)


def _name(storage: str, sparsity: float) -> str:
    """Return the name of one of Ortolan's candidates."""
    return f"ortolan {storage} {sparsity}"


def _ours(
    rng: np.random.Generator, kind: str, k: int, n: int, sparsity: Sequence[float], group_size: int
) -> Iterator[tuple[tuple[str, float], TimedLayer]]:
    """Yield one weight in dense storage, then at each sparsity, and in 2:4 storage at a sparsity of one half."""
    weight = dense_peers.random_floats(rng, k, n) if kind == "bf16" else _random_integers(rng, kind, k, n)
    groups = -(-k // group_size) if kind == "int4" else 1
    scales = rng.random((groups, n), dtype=np.float32)
    fate = rng.integers(0, _LEVELS, (k, n), dtype=np.uint16)
    yield ("dense", 0.0), ort_candidate(our_node(kind, weight, scales, group_size, Storage.DENSE), k, n)
    if _TWO_FOUR in sparsity:
        node = our_node(kind, _two_of_four(weight, fate), scales, group_size, Storage.TWO_FOUR)
        yield ("2:4", _TWO_FOUR), ort_candidate(node, k, n)
    for fraction in sorted(set(sparsity)):
        np.copyto(weight, 0, where=fate < fraction * _LEVELS)
        yield ("bitmap", fraction), ort_candidate(our_node(kind, weight, scales, group_size, Storage.BITMAP), k, n)


def _two_of_four(weight: np.ndarray, fate: np.ndarray) -> np.ndarray:
    """Return weight [k, n] with zeros at the two lowest values of `fate` among each four inputs of a column."""
    rows = -len(weight) % 4
    quads = np.pad(fate, ((0, rows), (0, 0))).reshape(-1, 4, weight.shape[1])
    kept = np.argsort(np.argsort(quads, axis=1, kind="stable"), axis=1) >= 2
    return np.where(kept.reshape(-1, weight.shape[1])[: len(weight)], weight, np.zeros_like(weight))


def _random_integers(rng: np.random.Generator, kind: str, k: int, n: int) -> np.ndarray:
    """Return int8 [k, n] without zeros: -127 to 127, or -7 to 7."""
    largest = 127 if kind == "int8" else 7
    q = rng.integers(-largest, largest, (k, n), dtype=np.int8)
    q += q >= 0
    return q


class Storage(Enum):
    """The storage of a packed weight. TWO_FOUR requires a 2:4 sparse weight."""

    BITMAP = "bitmap"
    DENSE = "dense"
    TWO_FOUR = "2:4"


def our_node(kind: str, weight: np.ndarray, scales: np.ndarray, group_size: int, storage: Storage) -> Node:
    """Return the operator on a weight [k, n], float32 (bf16) or int8, with scales [1 or groups, n] unless bf16."""
    k, n = weight.shape
    suffix = "" if kind == "bf16" else f"_{kind}"
    if storage == Storage.TWO_FOUR:
        masks, values, offsets = getattr(_native, f"pack_two_four{suffix}")(weight)
    else:
        masks, values, offsets = getattr(_native, f"pack_bitmap{suffix}")(weight, dense=storage == Storage.DENSE)
    attributes = {"k": k, "n": n, "format_version": 1}
    constants: list[np.ndarray | None]
    if kind == "bf16":
        constants = [masks, values.view(ml_dtypes.bfloat16), offsets]
    elif kind == "int8":
        constants = [masks, values, offsets, None, None, _native.pack_scales(scales, bf16=False)]
    else:
        packed_scales = _native.pack_scales(scales, bf16=True).view(ml_dtypes.bfloat16)
        constants = [masks, values, offsets, None, None, packed_scales]
        attributes["group_size"] = group_size
    return Node(OP, constants, "ai.ortolan", attributes)
