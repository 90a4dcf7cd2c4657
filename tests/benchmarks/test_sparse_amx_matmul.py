"""`ortolan bench sparse_amx_matmul`: the measured cases, and the answers of Ortolan's nodes."""

import json

import numpy as np
import pytest

from ortolan.benchmarks import dense_peers, side_by_side, sparse_amx_matmul
from ortolan.benchmarks.cold_layers import Node, cold_copies, layers_session
from ortolan.benchmarks.result import BenchOptions, BenchResult, BenchRow, geometric_mean, summarize
from ortolan.benchmarks.shapes import LLAMA_3_8B
from ortolan.benchmarks.side_by_side import shapes_to_measure
from ortolan.errors import OrtolanError
from ortolan.graph_passes.report.figures import Timing

from ..ops.two_four import two_of_four

TORCH = ["torch_bf16"] if dense_peers.has_torch() else []
# Operators that bitmap and 2:4 storage are compared with for one row. Dense storage is not compared with ortolan_dense.
PEERS = {
    "bf16": [*TORCH, "ort_matmul_fp32", "ortolan_dense", "stream_read"],
    "int8": [
        "ort_matmul_nbits_8",
        "ort_dynamic_quantize_matmul",
        "ort_matmul_fp32",
        "ortolan_dense",
        "stream_read",
    ],
    "int4": ["ort_matmul_nbits_4", "ort_matmul_fp32", "ortolan_dense", "stream_read"],
}


@pytest.fixture
def small_layers(short):
    short({"q": (70, 40), "k": (70, 20), "v": (70, 20)})


def peers_by_case(result):
    found = {}
    for row in result.rows:
        case = row.case
        key = (case.get("layer"), row.threads, case["m"], case["storage"], case["sparsity"])
        found.setdefault(key, []).append(row.peer)
        assert row.ours.min_ms > 0 and row.peer_time.min_ms > 0
    return found


@pytest.mark.parametrize("kind", PEERS)
def test_every_kind_meets_its_peers(small_layers, kind):
    options = BenchOptions(
        (1,), True, ((1, 70, 33), (5, 70, 33)), (0.7, 0.5), kinds=(kind,), group_size=32 if kind == "int4" else None
    )
    result = sparse_amx_matmul.run(options)
    assert {row.case["kind"] for row in result.rows} == {kind}
    assert {(row.case["k"], row.case["n"]) for row in result.rows} == {(70, 33)}
    without = {"ortolan_dense", "stream_read"}
    assert peers_by_case(result) == {
        (None, 1, m, storage, sparsity): [
            peer
            for peer in PEERS[kind]
            if peer not in without or (m == 1 if peer == "stream_read" else storage != "dense")
        ]
        for m in (1, 5)
        for storage, sparsity in (("2:4", 0.5), ("bitmap", 0.5), ("bitmap", 0.7), ("dense", 0.0))
    }
    assert result.summary == []  # only the layers of the paper get a summary


def test_layers_of_one_shape_are_measured_once_and_summed_up_by_name(small_layers):
    options = BenchOptions((1, 2), True, None, (0.5,), ("k", "q", "v"), (1, 2), ("int8",))
    result = sparse_amx_matmul.run(options)
    found = peers_by_case(result)
    assert {key[0] for key in found} == {"k, v", "q"}
    assert all(("ortolan_1_thread" in peers) == (key[1] == 2) for key, peers in found.items())
    summary = {(row.threads, row.case["m"], row.case["storage"]): row for row in result.summary}
    assert sorted(summary) == [
        (t, m, storage) for t in (1, 2) for m in (1, 2) for storage in ("2:4", "bitmap", "dense")
    ]
    row = summary[2, 1, "bitmap"]
    assert list(row.ratios) == ["q", "k", "v"]
    assert row.ratios["k"] == row.ratios["v"]
    fastest = min(
        measured.ratio
        for measured in result.rows
        if measured.case["layer"] == "q"
        and (measured.threads, measured.case["m"], measured.case["storage"]) == (2, 1, "bitmap")
        and measured.peer in ("ort_matmul_nbits_8", "ort_dynamic_quantize_matmul")
    )
    assert row.ratios["q"] == fastest


def test_without_torch_the_dense_peer_of_bf16_is_our_own(small_layers, monkeypatch):
    monkeypatch.setattr(dense_peers, "has_torch", lambda: False)
    options = BenchOptions((1,), True, None, (0.5,), ("q",), (2,), ("bf16",))
    result = sparse_amx_matmul.run(options)
    assert {row.peer for row in result.rows} == {"ort_matmul_fp32", "ortolan_dense"}
    assert [row.case["storage"] for row in result.summary] == ["2:4", "bitmap"]
    assert "torch is not installed" in " ".join(result.notes)
    assert "torch" not in result.versions


def test_all_layers_and_kinds_are_the_default():
    shapes = shapes_to_measure(BenchOptions(), tuple(LLAMA_3_8B), sparse_amx_matmul.BATCH)
    assert sorted(name for shape in shapes for name in shape.names.split(", ")) == sorted(LLAMA_3_8B)
    assert {shape.batch for shape in shapes} == {(1, 2, 4, 8, 16, 32)}
    assert sparse_amx_matmul._kinds(BenchOptions()) == ("bf16", "int8", "int4")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BenchOptions(kinds=("fp8",)), ["--kind", "'fp8'", "bf16, int8, int4"]),
        (BenchOptions(group_size=100), ["--group-size", "100", "32, 64 or 128"]),
        (BenchOptions(group_size=32, kinds=("bf16",)), ["--group-size", "int4", "--kind"]),
        (BenchOptions(quick=True, cases=((1, 131073, 1),), kinds=("int8",)), ["131073", "131072", "--kind bf16"]),
    ],
)
def test_impossible_options_say_what_is_possible(options, words):
    with pytest.raises(OrtolanError) as error:
        sparse_amx_matmul.run(options)
    for word in words:
        assert word in str(error.value)


def test_an_interrupt_keeps_what_was_measured(small_layers, monkeypatch):
    interleave = side_by_side.interleave
    calls = []

    def interrupted(*arguments, **named):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return interleave(*arguments, **named)

    monkeypatch.setattr(side_by_side, "interleave", interrupted)
    options = BenchOptions((1,), True, None, (0.5,), ("q", "k"), (2,), ("int4",))
    result = sparse_amx_matmul.run(options)
    assert result.interrupted
    assert {row.case["layer"] for row in result.rows} == {"q"}
    assert [list(row.ratios) for row in result.summary] == [["q"], ["q"], ["q"]]
    assert json.loads(result.to_json())["interrupted"] is True
    calls[:] = [()]
    with pytest.raises(KeyboardInterrupt):  # nothing to keep
        sparse_amx_matmul.run(options)


def row(peer, ours_ms, peer_ms, layer="q", **case):
    case = {"kind": "int8", "layer": layer, "m": 1, "storage": "bitmap", "sparsity": 0.5} | case
    return BenchRow("Op", case, 1, Timing(ours_ms, ours_ms), peer, Timing(peer_ms, peer_ms))


def approx_all(**numbers):
    return pytest.approx(numbers)


def test_a_column_of_the_summary_may_be_several_layers():
    rows = [row("a", 1.0, ratio, layer=name) for name, ratio in (("q", 2.0), ("k, v", 8.0), ("o", 3.0))]
    rows += [row("a", 1.0, 1.0, layer="o", m=2), row("a", 1.0, 5.0, layer="q", kind="int4")]
    peers = {"int8": ("a",), "int4": ("a",)}
    lines = summarize(rows, peers, {"first": ("q", "k"), "second": ("v", "o"), "none": ("up",)}, {})
    assert [(line.case["kind"], line.case["m"]) for line in lines] == [("int8", 1), ("int8", 2), ("int4", 1)]
    assert lines[0].ratios == approx_all(first=4, second=24**0.5)
    assert lines[0].geomean == pytest.approx((2 * 8 * 8 * 3) ** 0.25)
    assert [line.ratios for line in lines[1:]] == [approx_all(second=1), approx_all(first=5)]


def test_the_summary_takes_the_fastest_dense_peer_and_the_geometric_mean():
    rows = [
        row("a", 1.0, 8.0),
        row("b", 1.0, 4.0),
        row("other", 1.0, 1.0),
        row("ort_matmul_fp32", 1.0, 9.0),
        row("a", 1.0, 0.5, layer="k, v"),
        row("ort_matmul_fp32", 1.0, 3.0, layer="k, v"),
        row("a", 1.0, 2.0, sparsity=0.9),
        row("ort_matmul_fp32", 1.0, 3.0, sparsity=0.9),
        row("other", 1.0, 1.0, sparsity=0.7),  # has no dense measurement, so it is left out
    ]
    columns = {name: (name,) for name in ("v", "q", "k", "o")}
    summary = summarize(rows, {"int8": ("a", "b")}, columns, {"fp32": "ort_matmul_fp32", "none": "c"})
    assert [line.case["sparsity"] for line in summary] == [0.5, 0.9]
    assert [line.ratios for line in summary] == [approx_all(v=0.5, q=4, k=0.5), approx_all(q=2)]
    assert list(summary[0].ratios) == ["v", "q", "k"]
    assert summary[0].geomean == pytest.approx(1.0)
    assert summary[0].others == approx_all(fp32=(9 * 3 * 3) ** (1 / 3))
    assert summary[0].to_dict() == {
        "kind": "int8",
        "m": 1,
        "storage": "bitmap",
        "sparsity": 0.5,
        "threads": 1,
        "ratios": {"v": 0.5, "q": 4, "k": 0.5},
        "geomean": 1.0,
        "fp32_geomean": 4.3267,
    }
    assert geometric_mean([2, 8]) == pytest.approx(4)


def test_the_summary_is_printed_behind_the_rows():
    from rich.console import Console

    rows = [row("a", 1.0, 3.0, layer="q"), row("ort_matmul_fp32", 1.0, 5.0, layer="q")]
    result = BenchResult(
        rows, summarize(rows, {"int8": ("a",)}, {"q": ("q",), "k": ("k",)}, {"fp32": "ort_matmul_fp32"})
    )
    console = Console(width=200)
    with console.capture() as capture:
        console.print(result)
    text = capture.get()
    assert text.index("ort_matmul_fp32") < text.index("geomean")
    assert [cell.strip() for cell in text.splitlines()[-2].split("│")[1:-1]] == [
        *("int8", "1", "1", "bitmap", "0.5", "3.00", "3.00", "5.00")
    ]


# --- Ortolan's nodes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", sparse_amx_matmul.Storage)
@pytest.mark.parametrize("kind", PEERS)
def test_our_node_computes_the_product(kind, storage):
    """All kinds are exact here, because rounding does not change these integers and powers of two."""
    rng = np.random.default_rng(3)
    k, n, group = 70, 37, 32
    x = rng.integers(-100, 100, (5, k)).astype(np.float32)
    x[:, 0] = 127  # makes the scale of each row 1
    weight = rng.integers(-7, 8, (k, n), dtype=np.int8)
    if storage == sparse_amx_matmul.Storage.TWO_FOUR:
        weight = two_of_four(rng, weight)
    groups = {"bf16": 1, "int8": 1, "int4": -(-k // group)}[kind]
    scales = np.exp2(rng.integers(-3, 3, (groups, n))).astype(np.float32)
    exact = weight * np.repeat(scales, group if kind == "int4" else k, axis=0)[:k]
    given = exact if kind == "bf16" else weight
    node = sparse_amx_matmul.our_node(kind, given, scales, group, storage)
    session, _keep = layers_session([node], k, n, 1)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x @ exact)


@pytest.mark.parametrize(
    "make",
    [
        dense_peers.ort_matmul_fp32,
        dense_peers.ort_dynamic_quantize_matmul,
        lambda rng, k, n: dense_peers.ort_matmul_nbits(rng, k, n, 8, 128),
        lambda rng, k, n: dense_peers.ort_matmul_nbits(rng, k, n, 4, 32),
        pytest.param(dense_peers.torch_bf16, marks=pytest.mark.skipif(not TORCH, reason="torch is not installed")),
    ],
)
def test_every_peer_runs(small_layers, make):
    candidate = make(np.random.default_rng(0), 130, 40)
    assert candidate.copies == 3
    assert candidate.stored_bytes > 130 * 40 / 2
    bind = candidate.open(1)
    for m in (1, 4):
        bind(np.ones((m, 130), np.float32))()


def test_peers_leave_their_results_in_the_outputs_of_one_layer():
    rng = np.random.default_rng(1)
    weights = [rng.integers(-5, 5, (24, 9)).astype(np.float32) for _ in range(2)]
    session, _keep = layers_session([Node("MatMul", [weight]) for weight in weights], 24, 9, 1)
    x = rng.integers(-5, 5, (3, 24)).astype(np.float32)
    for y, weight in zip(session.run(None, {"x": x}), weights, strict=True):
        np.testing.assert_array_equal(y, x @ weight)


def test_copies_have_memory_of_their_own():
    arrays = [np.arange(21, dtype=np.float32).reshape(7, 3), np.empty(0, np.int64), np.arange(5, dtype=np.uint8)]
    copies = cold_copies(arrays, 300)
    for copy in copies:
        for array, original in zip(copy, arrays, strict=True):
            np.testing.assert_array_equal(array, original)
            assert array.dtype == original.dtype
            assert array.size == 0 or array.ctypes.data % 64 == 0
    assert len({copy[0].ctypes.data for copy in copies}) == 300
    different = cold_copies(arrays[:1], 300, distinct=True)
    assert len({copy[0].tobytes() for copy in different}) == 300
    np.testing.assert_array_equal(different[7][0][1:], arrays[0][1:])
