"""SparseAMXMatMul in ORT sessions on the layers of Llama 3 8B (SparAMX, Table 2), against dense layers elsewhere.

One measurement is one weight kind, shape, batch (m) and number of threads: Ortolan at every sparsity and in dense
storage, and every peer, in the same rounds, weights cold (cold_layers.py). A time is that of one layer. Projections of
equal shape are one layer here: their random weights differ in nothing that takes time.

Peers, by kind:

    bf16   torch_bf16 (where torch is installed)
    int8   ort_matmul_nbits_8 (blocks of 128), ort_dynamic_quantize_matmul
    int4   ort_matmul_nbits_4 (blocks of the same group size)
    all    ortolan_dense         Ortolan's dense storage of the same kind
           ort_matmul_fp32       what a user has before
           stream_read           m = 1: reading the stored bytes at the rate of the run; a ratio of 0.8 is 80 % of it
           ortolan_1_thread      Ortolan itself on one thread

The dense peer of the summary is the fastest of DENSE_PEERS: of the same precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .. import _native
from ..errors import OrtolanError
from ..progress import Progress, no_progress
from . import dense_peers
from .cold_layers import Bind, Candidate, Node, ort_candidate
from .result import BenchOptions, BenchResult, BenchRow, summarize
from .shapes import LLAMA_3_8B
from .timing import StreamReader, Timing, interleave, pinned

OP = "SparseAMXMatMul"
DENSE_PEERS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("torch_bf16", "ortolan_dense"),
    "int8": ("ort_matmul_nbits_8", "ort_dynamic_quantize_matmul"),
    "int4": ("ort_matmul_nbits_4",),
}
SPARSITY = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BATCH = (1, 2, 4, 8, 16, 32)
GROUP_SIZE = 128
# Of one measurement, and how many rounds at least: one of the largest layers takes up to a second.
SECONDS, ROUNDS = 2.5, 5
QUICK_SECONDS, QUICK_ROUNDS = 0.3, 3

_LEVELS = 2**16  # of the random number that decides at which sparsity a weight goes
_MOST_QUANTIZED_INPUTS = 2**17  # ops/formats/bitmap_int8.h


@dataclass(frozen=True)
class _Shape:
    """A weight's shape, the rows of x to measure it with, and the names of the layers that have it ("": none)."""

    k: int
    n: int
    batch: tuple[int, ...]
    names: str = ""


@dataclass(frozen=True)
class _Setup:
    """Everything of one kind and shape: Ortolan by (storage, sparsity), and peers by name."""

    kind: str
    shape: _Shape
    ours: dict[tuple[str, float], Candidate]
    peers: dict[str, Candidate]


def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
    """Measure every kind, shape, number of threads and batch. An interrupt ends it early, with what there is."""
    kinds = _kinds(options)
    shapes = _shapes(options)
    sparsity = options.sparsity or ((0.5,) if options.quick else SPARSITY)
    group_size = options.group_size or GROUP_SIZE
    duration = (QUICK_SECONDS, QUICK_ROUNDS) if options.quick else (SECONDS, ROUNDS)
    result = BenchResult(notes=_notes(kinds, group_size))
    if "bf16" in kinds and dense_peers.has_torch():
        result.versions["torch"] = dense_peers.torch_version()

    total = len(kinds) * len(options.threads) * sum(len(shape.batch) for shape in shapes)
    done = 0
    try:
        for kind in kinds:
            for shape in shapes:
                where = f"{kind} {shape.k} x {shape.n}"
                progress(f"{where}: making weights", done, total)
                setup = _prepare(kind, shape, sparsity, group_size)
                one_thread: dict[tuple[int, str, float], Timing] = {}
                for threads in options.threads:
                    with pinned(threads):
                        ready = _open(setup, threads)
                        for m in shape.batch:
                            progress(f"{where}, {m} rows, threads {threads}", done, total)
                            timings = _time(ready, setup, m, duration)
                            result.rows += _rows(setup, timings, m, threads, one_thread)
                            done += 1
                    del ready
                del setup
        progress("done", total, total)
    except KeyboardInterrupt:
        if not result.rows:
            raise
        result.interrupted = True
        result.notes.append(f"Interrupted: {done} of {total} measurements.")
    result.summary = summarize(result.rows, {kind: DENSE_PEERS[kind] for kind in kinds}, tuple(LLAMA_3_8B))
    return result


def _kinds(options: BenchOptions) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(options.kinds or DENSE_PEERS))
    for kind in kinds:
        if kind not in DENSE_PEERS:
            raise OrtolanError(f"--kind: there are no {kind!r} weights; known kinds: {', '.join(DENSE_PEERS)}")
    if options.group_size not in (None, 32, 64, 128):
        raise OrtolanError(f"--group-size: int4 weights have groups of 32, 64 or 128, not of {options.group_size}")
    if options.group_size is not None and "int4" not in kinds:
        raise OrtolanError("--group-size is for int4 weights; add int4 to --kind, or leave it out")
    most = max((k for _, k, _ in options.cases or ()), default=0)
    if most > _MOST_QUANTIZED_INPUTS and set(kinds) != {"bf16"}:
        raise OrtolanError(
            f"--shape: k is {most}; int8 and int4 weights have at most {_MOST_QUANTIZED_INPUTS} inputs, "
            "so measure --kind bf16"
        )
    return kinds


def _shapes(options: BenchOptions) -> list[_Shape]:
    """The named layers, equal shapes as one, then the given m x k x n, equal k x n as one."""
    names = options.layers or (() if options.cases else tuple(LLAMA_3_8B))
    batch = options.batch or ((1,) if options.quick else BATCH)
    by_shape: dict[tuple[int, int], list[str]] = {}
    for name in dict.fromkeys(names):
        by_shape.setdefault(LLAMA_3_8B[name], []).append(name)
    shapes = [_Shape(k, n, batch, ", ".join(equal)) for (k, n), equal in by_shape.items()]
    by_weight: dict[tuple[int, int], list[int]] = {}
    for m, k, n in dict.fromkeys(options.cases or ()):
        by_weight.setdefault((k, n), []).append(m)
    return shapes + [_Shape(k, n, tuple(rows)) for (k, n), rows in by_weight.items()]


def _notes(kinds: Sequence[str], group_size: int) -> list[str]:
    notes = [
        "Times are of one layer. storage: bitmap, or dense with every weight stored. stream_read: the stored bytes at "
        "the memory rate of the same run (ratio 0.8: 80 % of it)."
    ]
    if "int4" in kinds:
        notes.append(f"int4: groups of {group_size}, ORT's and Ortolan's.")
    if "bf16" in kinds and not dense_peers.has_torch():
        notes.append("torch is not installed, so bf16 has Ortolan's dense storage as its only dense peer.")
    return notes


def _prepare(kind: str, shape: _Shape, sparsity: Sequence[float], group_size: int) -> _Setup:
    k, n = shape.k, shape.n
    rng = np.random.default_rng(k * n)
    ours = dict(_ours(rng, kind, k, n, sparsity, group_size))
    peers: dict[str, Candidate] = {}
    if kind == "int8":
        peers["ort_matmul_nbits_8"] = dense_peers.ort_matmul_nbits(rng, k, n, 8, 128)
        peers["ort_dynamic_quantize_matmul"] = dense_peers.ort_dynamic_quantize_matmul(rng, k, n)
    elif kind == "int4":
        peers["ort_matmul_nbits_4"] = dense_peers.ort_matmul_nbits(rng, k, n, 4, group_size)
    elif dense_peers.has_torch():
        peers["torch_bf16"] = dense_peers.torch_bf16(rng, k, n)
    # Behind torch, whose threads go on spinning for some milliseconds, the run that takes longest.
    peers["ort_matmul_fp32"] = dense_peers.ort_matmul_fp32(rng, k, n)
    return _Setup(kind, shape, ours, peers)


def _ours(
    rng: np.random.Generator, kind: str, k: int, n: int, sparsity: Sequence[float], group_size: int
) -> Iterator[tuple[tuple[str, float], Candidate]]:
    """One weight in dense storage, then pruned more and more."""
    weight = dense_peers.random_floats(rng, k, n) if kind == "bf16" else _random_integers(rng, kind, k, n)
    groups = -(-k // group_size) if kind == "int4" else 1
    scales = rng.random((groups, n), dtype=np.float32)
    fate = rng.integers(0, _LEVELS, (k, n), dtype=np.uint16)
    yield ("dense", 0.0), ort_candidate(our_node(kind, weight, scales, group_size, dense=True), k, n)
    for share in sorted(set(sparsity)):
        np.copyto(weight, 0, where=fate < share * _LEVELS)
        yield ("bitmap", share), ort_candidate(our_node(kind, weight, scales, group_size, dense=False), k, n)


def _random_integers(rng: np.random.Generator, kind: str, k: int, n: int) -> np.ndarray:
    """int8 [k, n] without zeros: -127 to 127, or -7 to 7."""
    most = 127 if kind == "int8" else 7
    q = rng.integers(-most, most, (k, n), dtype=np.int8)
    q += q >= 0
    return q


def our_node(kind: str, weight: np.ndarray, scales: np.ndarray, group_size: int, *, dense: bool) -> Node:
    """The operator on a weight [k, n], float32 (bf16) or int8, and scales [1 or groups, n] unless bf16."""
    k, n = weight.shape
    attributes = {"k": k, "n": n, "format_version": 1}
    constants: list[np.ndarray | None]
    if kind == "bf16":
        masks, values, offsets = _native.pack_bitmap(weight, dense=dense)
        constants = [masks, values.view(ml_dtypes.bfloat16), offsets]
    elif kind == "int8":
        constants = [
            *_native.pack_bitmap_int8(weight, dense=dense),
            None,
            None,
            _native.pack_scales(scales, bf16=False),
        ]
    else:
        packed_scales = _native.pack_scales(scales, bf16=True).view(ml_dtypes.bfloat16)
        constants = [*_native.pack_bitmap_int4(weight, dense=dense), None, None, packed_scales]
        attributes["group_size"] = group_size
    return Node(OP, constants, "ai.ortolan", attributes)


@dataclass(frozen=True)
class _Ready:
    ours: dict[tuple[str, float], Bind]
    peers: dict[str, Bind]
    stream: StreamReader


def _open(setup: _Setup, threads: int) -> _Ready:
    ours = {key: candidate.open(threads) for key, candidate in setup.ours.items()}
    peers = {name: candidate.open(threads) for name, candidate in setup.peers.items()}
    return _Ready(ours, peers, StreamReader(threads))


@dataclass(frozen=True)
class _Timings:
    """Of one layer; stream: reading the bytes of Ortolan's weights, where memory is what bounds."""

    ours: dict[tuple[str, float], Timing]
    peers: dict[str, Timing]
    stream: dict[tuple[str, float], Timing]


def _time(ready: _Ready, setup: _Setup, m: int, duration: tuple[float, int]) -> _Timings:
    x = np.random.default_rng(m).standard_normal((m, setup.shape.k), dtype=np.float32)
    calls = {f"ours {storage} {sparsity}": bind(x) for (storage, sparsity), bind in ready.ours.items()}
    calls |= {name: bind(x) for name, bind in ready.peers.items()}
    with_stream = m == 1  # more rows are bound by the core: what memory allows says nothing
    calls |= ready.stream.candidates() if with_stream else {}
    timings = interleave(calls, seconds=duration[0], min_rounds=duration[1])
    ours = {
        (storage, sparsity): timings[f"ours {storage} {sparsity}"].scaled(1 / candidate.copies)
        for (storage, sparsity), candidate in setup.ours.items()
    }
    peers = {name: timings[name].scaled(1 / candidate.copies) for name, candidate in setup.peers.items()}
    stream = {
        key: ready.stream.time_for(timings, candidate.stored_bytes)
        for key, candidate in setup.ours.items()
        if with_stream
    }
    return _Timings(ours, peers, stream)


def _rows(
    setup: _Setup, timings: _Timings, m: int, threads: int, one_thread: dict[tuple[int, str, float], Timing]
) -> Iterator[BenchRow]:
    """Dense storage last; one_thread keeps Ortolan's times for the rows of more threads."""
    shape = setup.shape
    for (storage, sparsity), ours in sorted(timings.ours.items()):
        case: dict[str, Any] = {"kind": setup.kind}
        if shape.names:
            case["layer"] = shape.names
        case |= {"m": m, "k": shape.k, "n": shape.n, "storage": storage, "sparsity": sparsity}
        against = dict(timings.peers)
        if storage == "bitmap":
            against["ortolan_dense"] = timings.ours["dense", 0.0]
        if (storage, sparsity) in timings.stream:
            against["stream_read"] = timings.stream[storage, sparsity]
        if threads == 1:
            one_thread[m, storage, sparsity] = ours
        elif (m, storage, sparsity) in one_thread:
            against["ortolan_1_thread"] = one_thread[m, storage, sparsity]
        for peer, time in against.items():
            yield BenchRow(OP, case, threads, ours, peer, time)
