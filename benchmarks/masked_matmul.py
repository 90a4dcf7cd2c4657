"""MaskedMatMul on matrices that are sparse at run time, compared with dense and CSR products.

Kinds of cases (Ortolan's time includes finding the zeros):

    square    n x n x n, A and B sparse (Masked Matrix Multiplication, Table 2): A by elements, B by blocks of 16
    numbers   the same with B also sparse by elements, where few blocks are empty
    deja_vu   OPT-1.3B's MLP: 2048 x 8192 by 8192 x 2048, 88 % of the neurons off for all rows (Table 4)
    decode    one row, partly zero, by weights of 4096 x 14336 in float32, bf16 and int8
    constant  a few rows, with 0 or 80 % zeros, by weights that ORT packs ahead of time
    heat_map  2048^3 for all sparsities of A and B (Figure 13), drawn to heat_map.png; only on request

and peers:

    ort_matmul            ORT MatMul on float32, with or without zeros
    scipy_csr             scipy.sparse, A and B already in CSR; one thread, if scipy is installed and n is small
    ortolan_dense_bf16    SparseAMXMatMul with dense storage
    ortolan_dense_int8    MaskedMatMul without zeros in the row
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from ortolan.graph_passes.measure.timing import describe_cold_copies, interleave, pinned
from ortolan.graph_passes.report.figures import Timing

from .._native import pack_bitmap
from ..errors import OrtolanError
from ..progress import Progress, no_progress
from ..session import register
from .cold_layers import Node, TimedLayer, ort_candidate
from .result import BenchOptions, BenchResult, BenchRow

OP = "MaskedMatMul"
KINDS = ("square", "numbers", "deja_vu", "decode", "constant", "heat_map")
DEFAULT_KINDS = KINDS[:-1]
SIZES, QUICK_SIZES = (256, 512, 1024, 2048, 4096, 8192), (256, 512)
SPARSITY, QUICK_SPARSITY = (0.0, 0.6, 0.8, 0.9), (0.8,)
MAX_SIZE_ALL_SPARSITIES = 2048  # larger sizes are measured at 80 % only, as in the paper
DEJA_VU, QUICK_DEJA_VU = (2048, 8192, 2048), (128, 1024, 256)
DEJA_VU_SPARSITY = 0.88
DECODE, QUICK_DECODE = (4096, 14336), (256, 512)
DECODE_SPARSITY = (0.0, 0.5, 0.7, 0.9)
CONSTANT, QUICK_CONSTANT = ((576, 1536), (2048, 2048)), ((256, 512),)
CONSTANT_ROWS, QUICK_CONSTANT_ROWS = (1, 4, 16, 17, 64, 256), (1, 17)
CONSTANT_SPARSITY = (0.0, 0.8)
HEAT_MAP_SIZE, QUICK_HEAT_MAP_SIZE = 2048, 128
HEAT_MAP_SPARSITY = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
QUICK_HEAT_MAP_SPARSITY = (0.0, 0.8, 0.99)
HEAT_MAP_FILE = "heat_map.png"
MAX_CSR = 1024
SECONDS, QUICK_SECONDS = 2.0, 0.05
ROUNDS = 3
BLOCK = 16

Call = Callable[[], object]
_OPSET = 17


def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
    """Measure every case. An interrupt returns the results so far."""
    for name in ("layers", "batch", "group_size"):
        if getattr(options, name) is not None:
            raise OrtolanError(f"{OP} has its own matrices: leave out options about layers")
    kinds = options.kinds or DEFAULT_KINDS
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise OrtolanError(f"{OP} has no kind {unknown[0]!r}, expected one of {', '.join(KINDS)}")
    if "heat_map" in kinds and find_spec("matplotlib") is None:
        raise OrtolanError("heat_map draws with matplotlib, which is not installed: pip install matplotlib")
    result = BenchResult(
        notes=[
            "Ortolan's time includes finding the zeros. m x k x n; a, b: fractions of zeros.",
            describe_cold_copies(),
        ]
    )
    if find_spec("scipy") is None:
        result.notes.append("scipy is not installed: no CSR product.")
    cases = list(_cases(options, kinds))
    try:
        for done, (text, measure) in enumerate(cases):
            for threads in options.threads:
                progress(f"{text}, threads {threads}", done, len(cases))
                with pinned(threads):
                    result.rows += measure(threads)
    except KeyboardInterrupt:
        if not result.rows:
            raise
        result.interrupted = True
        result.notes.append("Interrupted: not all cases are measured.")
    if "heat_map" in kinds and not result.interrupted:
        draw_heat_map(result.rows, options.threads[0], Path(HEAT_MAP_FILE))
        result.notes.append(f"Heat map: {HEAT_MAP_FILE}")
    progress("done", len(cases), len(cases))
    return result


def _cases(options: BenchOptions, kinds: Sequence[str]) -> Iterator[tuple[str, Callable[[int], Iterator[BenchRow]]]]:
    """Yield the name of each case, and a function that measures it with a number of threads."""
    quick = options.quick
    seconds = QUICK_SECONDS if quick else SECONDS
    sizes = options.cases or tuple((n, n, n) for n in (QUICK_SIZES if quick else SIZES))
    for kind in (kind for kind in kinds if kind in ("square", "numbers")):
        for m, k, n in sizes:
            shares = options.sparsity or (QUICK_SPARSITY if quick else SPARSITY)
            if options.sparsity is None and max(m, k, n) > MAX_SIZE_ALL_SPARSITIES:
                shares = QUICK_SPARSITY
            for share in shares:
                yield f"{kind} {m}x{k}x{n}, {share}", _square(kind, (m, k, n), share, share, seconds)
    if "deja_vu" in kinds:
        yield "deja_vu", _deja_vu(QUICK_DEJA_VU if quick else DEJA_VU, seconds)
    if "decode" in kinds:
        k, n = QUICK_DECODE if quick else DECODE
        for weights in ("float", "bf16", "int8"):
            yield f"decode, {weights}", _decode(weights, k, n, options.sparsity or DECODE_SPARSITY, seconds)
    if "constant" in kinds:
        for k, n in QUICK_CONSTANT if quick else CONSTANT:
            for weights in ("float", "bf16", "int8"):
                rows = QUICK_CONSTANT_ROWS if quick else CONSTANT_ROWS
                shares = options.sparsity or CONSTANT_SPARSITY
                yield f"constant {k}x{n}, {weights}", _constant(weights, rows, k, n, shares, min(seconds, 0.5))
    if "heat_map" in kinds:
        size = QUICK_HEAT_MAP_SIZE if quick else HEAT_MAP_SIZE
        shares = options.sparsity or (QUICK_HEAT_MAP_SPARSITY if quick else HEAT_MAP_SPARSITY)
        for of_a in shares:
            for of_b in shares:
                text = f"heat_map {of_a} x {of_b}"
                yield text, _square("heat_map", (size, size, size), of_a, of_b, min(seconds, 0.2))


# ---- A and B at run time --------------------------------------------------------------------------------------------


def _square(
    kind: str, sizes: tuple[int, int, int], of_a: float, of_b: float, seconds: float
) -> Callable[[int], Iterator[BenchRow]]:
    def measure(threads: int) -> Iterator[BenchRow]:
        m, k, n = sizes
        rng = np.random.default_rng(m + k + n)
        a = sparse_elements(rng, m, k, of_a)
        b = sparse_elements(rng, k, n, of_b) if kind == "numbers" else sparse_blocks(rng, k, n, of_b)
        case = {"kind": kind, "shape": f"{m}x{k}x{n}", "a": of_a, "b": of_b}
        yield from _product(case, a, b, threads, seconds)

    return measure


def _deja_vu(sizes: tuple[int, int, int], seconds: float) -> Callable[[int], Iterator[BenchRow]]:
    def measure(threads: int) -> Iterator[BenchRow]:
        m, k, n = sizes
        rng = np.random.default_rng(k)
        off = rng.random(k) < DEJA_VU_SPARSITY
        a, b = sparse_elements(rng, m, k, 0.0), sparse_elements(rng, k, n, 0.0)
        a[:, off] = 0
        b[off] = 0
        case = {"kind": "deja_vu", "shape": f"{m}x{k}x{n}", "a": DEJA_VU_SPARSITY, "b": DEJA_VU_SPARSITY}
        yield from _product(case, a, b, threads, seconds)

    return measure


def sparse_elements(rng: np.random.Generator, rows: int, columns: int, fraction: float) -> np.ndarray:
    """Return float32 [rows, columns] in which each element is zero with probability `fraction`."""
    x = rng.random((rows, columns), dtype=np.float32) - np.float32(0.5)
    if fraction > 0:
        x[rng.random((rows, columns), dtype=np.float32) < fraction] = 0
    return x


def sparse_blocks(rng: np.random.Generator, rows: int, columns: int, fraction: float) -> np.ndarray:
    """Return float32 [rows, columns] with zeros in blocks of 16 adjacent elements (block-random in the paper)."""
    x = sparse_elements(rng, rows, columns, 0.0)
    zero = rng.random((rows, -(-columns // BLOCK)), dtype=np.float32) < fraction
    x[np.repeat(zero, BLOCK, axis=1)[:, :columns]] = 0
    return x


def _product(case: dict[str, Any], a: np.ndarray, b: np.ndarray, threads: int, seconds: float) -> Iterator[BenchRow]:
    calls = {
        "ours": product_call(OP, a, b, threads),
        "ort_matmul": product_call("MatMul", a, b, threads),
    }
    if case["kind"] != "heat_map" and threads == 1 and max(*a.shape, *b.shape) <= MAX_CSR:
        calls |= csr_call(a, b)
    timings = interleave(calls, seconds=seconds, min_rounds=ROUNDS)
    for peer in calls:
        if peer != "ours":
            yield BenchRow(OP, case, threads, timings["ours"], peer, timings[peer])


def csr_call(a: np.ndarray, b: np.ndarray) -> dict[str, Call]:
    """Return SciPy's product of A and B in CSR, if SciPy is installed."""
    if find_spec("scipy") is None:
        return {}
    sparse: Any = import_module("scipy.sparse")
    a_csr, b_csr = sparse.csr_matrix(a), sparse.csr_matrix(b)
    return {"scipy_csr": lambda: a_csr @ b_csr}


def product_model(op_type: str) -> onnx.ModelProto:
    """Return a model of y = a b by `op_type`, whose inputs are both matrices."""
    attributes: dict[str, Any] = {"domain": "ai.ortolan", "format_version": 1} if op_type == OP else {}
    graph = helper.make_graph(
        [helper.make_node(op_type, ["a", "b"], ["y"], "product", **attributes)],
        "product",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", "columns"]) for name in "ab"],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("ai.ortolan", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def product_call(op_type: str, a: np.ndarray, b: np.ndarray, threads: int) -> Call:
    """Return a call of a product in a session with bound inputs and output."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # The threads of one candidate must not spin while another is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    register(options)
    model = product_model(op_type).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    given = [ort.OrtValue.ortvalue_from_numpy(x) for x in (a, b)]
    answer = ort.OrtValue.ortvalue_from_numpy(np.ones((len(a), b.shape[1]), np.float32))
    binding.bind_ortvalue_input("a", given[0])
    binding.bind_ortvalue_input("b", given[1])
    binding.bind_ortvalue_output("y", answer)

    def call(_keep: object = (given, answer)) -> None:
        session.run_with_iobinding(binding)

    return call


# ---- one row, constant weights --------------------------------------------------------------------------------------


def _decode(
    weights: str, k: int, n: int, shares: Sequence[float], seconds: float
) -> Callable[[int], Iterator[BenchRow]]:
    def measure(threads: int) -> Iterator[BenchRow]:
        rng = np.random.default_rng(k + n)
        ours, peer_name, peer = decode_candidates(rng, weights, k, n)
        rows = {share: sparse_elements(rng, 1, k, share) for share in (0.0, *shares)}
        bind = ours.open(threads)
        calls: dict[str, Call] = {f"ours {share}": bind(x) for share, x in rows.items()}
        if peer is not None:
            calls["peer"] = peer.open(threads)(rows[0.0])
        timings = interleave(calls, seconds=seconds * len(calls), min_rounds=ROUNDS)
        for share in shares:
            time = timings[f"ours {share}"].scaled(1 / ours.copies)
            against: Timing = (
                timings["ours 0.0"].scaled(1 / ours.copies) if peer is None else timings["peer"].scaled(1 / peer.copies)
            )
            case = {"kind": "decode", "shape": f"1x{k}x{n}", "weights": weights, "a": share}
            yield BenchRow(OP, case, threads, time, peer_name, against)

    return measure


def _constant(
    weights: str, rows: Sequence[int], k: int, n: int, shares: Sequence[float], seconds: float
) -> Callable[[int], Iterator[BenchRow]]:
    def measure(threads: int) -> Iterator[BenchRow]:
        rng = np.random.default_rng(k + n)
        ours, dense = masked_candidate(rng, weights, k, n), matmul_candidate(rng, k, n)
        bind_ours, bind_dense = ours.open(threads), dense.open(threads)
        for m in rows:
            for share in shares:
                x = sparse_elements(rng, m, k, share)
                calls = {"ours": bind_ours(x), "ort_matmul": bind_dense(x)}
                timings = interleave(calls, seconds=seconds, min_rounds=ROUNDS)
                case = {"kind": "constant", "shape": f"{m}x{k}x{n}", "weights": weights, "a": share}
                time, against = timings["ours"].scaled(1 / ours.copies), timings["ort_matmul"].scaled(1 / dense.copies)
                yield BenchRow(OP, case, threads, time, "ort_matmul", against)

    return measure


def masked_candidate(rng: np.random.Generator, weights: str, k: int, n: int) -> TimedLayer:
    """Return MaskedMatMul with weights float, bf16 or int8."""
    constants: list[np.ndarray | None]
    if weights == "int8":
        constants = [rng.integers(-127, 128, (k, n), dtype=np.int8), rng.random((1, n), dtype=np.float32)]
    else:
        dtype = np.float32 if weights == "float" else ml_dtypes.bfloat16
        constants = [sparse_elements(rng, k, n, 0.0).astype(dtype)]
    return ort_candidate(Node(OP, constants, "ai.ortolan", {"format_version": 1}), k, n)


def matmul_candidate(rng: np.random.Generator, k: int, n: int) -> TimedLayer:
    """Return ORT's MatMul, which packs these weights once."""
    return ort_candidate(Node("MatMul", [sparse_elements(rng, k, n, 0.0)]), k, n, distinct=True)


def decode_candidates(
    rng: np.random.Generator, weights: str, k: int, n: int
) -> tuple[TimedLayer, str, TimedLayer | None]:
    """Return MaskedMatMul, the peer's name, and the peer (None: MaskedMatMul on rows without zeros)."""
    ours = masked_candidate(rng, weights, k, n)
    if weights == "int8":
        return ours, "ortolan_dense_int8", None
    if weights == "float":
        return ours, "ort_matmul", matmul_candidate(rng, k, n)
    w = sparse_elements(rng, k, n, 0.0)
    masks, values, offsets = pack_bitmap(w, dense=True)
    dense = Node(
        "SparseAMXMatMul",
        [masks, values.view(ml_dtypes.bfloat16), offsets],
        "ai.ortolan",
        {"k": k, "n": n, "format_version": 1},
    )
    return ours, "ortolan_dense_bf16", ort_candidate(dense, k, n)


# ---- picture --------------------------------------------------------------------------------------------------------


def draw_heat_map(rows: Sequence[BenchRow], threads: int, path: Path) -> None:
    """Draw the speedup over ORT MatMul by the sparsities of A and B."""
    found = {
        (row.case["a"], row.case["b"]): row.ratio
        for row in rows
        if row.case["kind"] == "heat_map" and row.threads == threads
    }
    of_a, of_b = (sorted({key[side] for key in found}) for side in (0, 1))
    ratios = np.array([[found[a, b] for b in of_b] for a in of_a])
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(8, 7), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.log2(ratios), cmap="RdYlGn", vmin=-3, vmax=3, origin="lower")
    axes.set_xticks(range(len(of_b)), [f"{share:g}" for share in of_b])
    axes.set_yticks(range(len(of_a)), [f"{share:g}" for share in of_a])
    axes.set_xlabel("zeros of B, blocks of 16")
    axes.set_ylabel("zeros of A")
    shape = next(row.case["shape"] for row in rows if row.case["kind"] == "heat_map")
    axes.set_title(f"{OP} {shape}: speedup over ONNX Runtime's MatMul, {threads} thread(s)")
    for i, a_ratios in enumerate(ratios):
        for j, ratio in enumerate(a_ratios):
            axes.text(j, i, f"{ratio:.1f}", ha="center", va="center", fontsize=8)
    figure.colorbar(image, label="log2")
    figure.savefig(path)
