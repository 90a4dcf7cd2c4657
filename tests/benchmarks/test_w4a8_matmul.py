"""`ortolan bench w4a8_matmul`: the measured cases; all compared operators compute the same product."""

from itertools import product

import numpy as np
import pytest
from typer.testing import CliRunner

from ortolan.benchmarks import w4a8_matmul
from ortolan.benchmarks.cold_layers import layers_session
from ortolan.benchmarks.dense_peers import matmul_nbits_node
from ortolan.benchmarks.result import BenchOptions
from ortolan.benchmarks.shapes import LAYERS
from ortolan.benchmarks.w4a8_matmul import (
    BATCH,
    FIXED_KINDS,
    GROUP_KINDS,
    GROUP_SIZES,
    K_QUANTS,
    KINDS,
    SCALES,
    SUBGROUP_BITS,
    SUBGROUP_GROUP,
    our_node,
)
from ortolan.cli import app
from ortolan.errors import OrtolanError
from ortolan.opencl import opencl_devices

from ..ops.opencl.devices import needs_opencl

PEERS = ["ort_matmul_nbits_4_level_4", "ort_matmul_nbits_4_level_0", "ort_matmul_fp32"]


def peers_by_case(result):
    """Group the compared operators by case and number of threads, without the layer's size."""
    found = {}
    for row in result.rows:
        case = {name: value for name, value in row.case.items() if name not in ("k", "n")}
        found.setdefault((row.threads, *case.values()), []).append(row.peer)
        assert row.ours.min_ms > 0 and row.peer_time.min_ms > 0
    return found


def test_every_form_of_the_weights_meets_its_peers(short):
    short({})
    result = w4a8_matmul.run(BenchOptions((1, 2), True, ((1, 70, 33), (5, 70, 33)), kinds=KINDS))
    assert {(row.case["k"], row.case["n"]) for row in result.rows} == {(70, 33)}
    assert peers_by_case(result) == {
        (threads, m, kind, group_size, scales): [
            *PEERS,
            *(["stream_read"] if m == 1 else []),
            *(["ortolan_1_thread"] if threads == 2 else []),
        ]
        for threads in (1, 2)
        for m in (1, 5)
        for kind, group_size, scales in (
            *product(GROUP_KINDS, GROUP_SIZES, SCALES),
            *((kind, SUBGROUP_GROUP, "float16") for kind in SUBGROUP_BITS),
            *((kind, group_size, "float16") for kind, (group_size, _) in K_QUANTS.items()),
        )
    }
    assert result.summary == []  # only the layers of the models get a summary


@pytest.mark.slow
@needs_opencl
def test_opencl_meets_the_cpu_under_an_honest_title(short):
    short({})
    options = BenchOptions((1,), True, ((1, 70, 33), (9, 70, 33)), kinds=("zero_points",), device="opencl")
    result = w4a8_matmul.run(options)
    assert {tuple(peers) for peers in peers_by_case(result).values()} <= {
        ("ortolan_cpu",),
        ("ortolan_cpu", "stream_read"),
    }
    assert len(peers_by_case(result)) == 2 * len(GROUP_SIZES) * len(SCALES)
    device = opencl_devices()[0]
    assert device in result.notes[0]
    is_none = "no GPU" in device
    assert ("THIS DEVICE IS NOT A GPU" in result.summary_title) == is_none
    assert any("do not apply to any GPU" in note for note in result.notes) == is_none


def test_other_benchmarks_and_devices_are_refused():
    for arguments, message in (
        (("w8a8_matmul", "--device", "opencl"), "needs the operator w4a8_matmul"),
        (("w4a8_matmul", "--device", "cuda"), "'cuda' is not one of 'opencl'"),
    ):
        refused = CliRunner().invoke(app, ["bench", *arguments])
        assert refused.exit_code == 2 and "--device" in refused.output and message in refused.output


def test_the_summary_is_by_model(short):
    short({"k": (70, 20), "v": (70, 20), "o": (64, 40), "minilm:q": (32, 16)})
    options = BenchOptions((1,), True, None, None, ("k", "v", "o", "minilm:q"), (2,), group_size=64)
    result = w4a8_matmul.run(options)
    layers = dict.fromkeys(row.case["layer"] for row in result.rows)
    assert list(layers) == ["k, v", "o", "minilm:q"]
    assert [row.case for row in result.summary] == [
        {"kind": "symmetric", "m": 2, "group_size": 64, "scales": scales} for scales in SCALES
    ]
    for line in result.summary:
        for peer, ratios in (
            ("ort_matmul_nbits_4_level_4", {"geomean": line.geomean, **line.ratios}),
            ("ort_matmul_nbits_4_level_0", {"geomean": line.others["level_0"]}),
            ("ort_matmul_fp32", {"geomean": line.others["fp32"]}),
        ):
            by_layer = {
                row.case["layer"]: row.ratio
                for row in result.rows
                if row.peer == peer and row.case["scales"] == line.case["scales"]
            }
            k, o, minilm = by_layer["k, v"], by_layer["o"], by_layer["minilm:q"]
            expected = {"geomean": (k * k * o * minilm) ** 0.25, "llama": (k * k * o) ** (1 / 3), "minilm": minilm}
            assert ratios == pytest.approx({name: expected[name] for name in ratios})
        assert list(line.ratios) == ["llama", "minilm"]
        assert "stream" not in line.others


@pytest.mark.parametrize(("name", "kinds"), [("up", set(KINDS)), ("o", {"symmetric"})])
def test_some_layers_have_zero_points_unless_told_otherwise(short, monkeypatch, name, kinds):
    short({"up": (32, 16), "o": (32, 16)})
    monkeypatch.setattr("ortolan.benchmarks.side_by_side.SECONDS", 0.0)

    def kinds_of(**options):
        result = w4a8_matmul.run(BenchOptions((1,), layers=(name,), batch=(2,), **options))
        return {row.case["kind"] for row in result.rows}

    assert kinds_of() == kinds
    assert kinds_of(group_size=32) == kinds - set(FIXED_KINDS)
    assert kinds_of(quick=True) == {"symmetric"}
    assert kinds_of(kinds=("zero_points",)) == {"zero_points"}


def test_all_models_are_the_default():
    def shapes(**options):
        return [plan.shape for plan in w4a8_matmul._plans(BenchOptions(**options))]

    names = [name for shape in shapes() for name in shape.names.split(", ")]
    assert sorted(names) == sorted(LAYERS)
    assert {shape.batch for shape in shapes()} == {BATCH}
    assert {(shape.k, shape.n) for shape in shapes()} == set(LAYERS.values())
    assert len(shapes()) == len(set(LAYERS.values()))
    assert [shape.batch for shape in shapes(quick=True)] == [(1,)] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BenchOptions(kinds=("int8",)), ["--kind", "'int8'", "symmetric, zero_points, fractions, minimums"]),
        (BenchOptions(group_size=100), ["--group-size", "100", "32, 64 or 128"]),
        (
            BenchOptions(group_size=32, kinds=("int5",)),
            ["--group-size is 32", "'int5' has groups of 256"],
        ),
        (BenchOptions(sparsity=(0.5,)), ["--sparsity", "W4A8MatMul", "leave it out"]),
        (BenchOptions(cases=((1, 131073, 1),)), ["--shape", "131073", "131072"]),
    ],
)
def test_impossible_options_say_what_is_possible(options, words):
    with pytest.raises(OrtolanError) as error:
        w4a8_matmul.run(options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("with_zero_points", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_our_node_and_its_peers_compute_the_same_product(group_size, with_zero_points):
    """Results are exact, because rounding does not change these integers and powers of two."""
    rng = np.random.default_rng(group_size)
    k, n = 70, 37
    groups = -(-k // group_size)
    x = rng.integers(-100, 100, (5, k)).astype(np.float32)
    x[:, ::group_size] = 127  # makes the scale of each group 1
    q = rng.integers(0, 16, (k, n), dtype=np.uint8)
    scales = np.exp2(rng.integers(-3, 3, (groups, n))).astype(np.float32)
    zero_points = rng.integers(0, 16, (groups, n), dtype=np.uint8) if with_zero_points else None
    middle = np.full((groups, n), 8, np.uint8) if zero_points is None else zero_points
    centered = q.astype(np.float32) - np.repeat(middle, group_size, axis=0)[:k]
    exact = x @ (centered * np.repeat(scales, group_size, axis=0)[:k])
    nodes = [our_node(q, scales.astype(dtype), group_size, zero_points=zero_points) for dtype in SCALES]
    nodes += [matmul_nbits_node(q, scales, zero_points, group_size, level) for level in (4, 0)]
    session, _keep = layers_session(nodes, k, n, 1)
    for y in session.run(None, {"x": x}):
        np.testing.assert_array_equal(y, exact)
