"""`ortolan bench vnni_spmm`: the measured cases; all compared operators compute the same product."""

import numpy as np
import pytest

from ortolan.benchmarks import dense_peers, vnni_spmm
from ortolan.benchmarks.cold_layers import layers_session, ort_candidate
from ortolan.benchmarks.result import BenchOptions, geometric_mean
from ortolan.benchmarks.vnni_spmm import TOKENS, WEIGHTS, our_node, random_weight
from ortolan.errors import OrtolanError

PEERS = ["ort_matmul_integer", "ort_dynamic_quantize_matmul", "ort_matmul_fp32"]


@pytest.fixture(autouse=True)
def few_copies(short):
    short({"minilm:q": (384, 384)})


def test_every_sparsity_meets_its_peers():
    options = BenchOptions((1, 2), True, ((5, 70, 33), (20, 70, 33)), sparsity=(0.5, 0.9))
    result = vnni_spmm.run(options)
    found = {}
    for row in result.rows:
        case = row.case
        assert (case["k"], case["n"]) == (70, 33) and row.ours.min_ms > 0 and row.peer_time.min_ms > 0
        found.setdefault((row.threads, case["m"], case["sparsity"]), []).append(row.peer)
    expected = {
        (threads, m, share): [*PEERS, *(["ortolan_1_thread"] if threads == 2 else [])]
        for threads in (1, 2)
        for m in (5, 20)
        for share in ("50%", "90%")
    }
    assert found == expected


def test_the_summary_is_by_sparsity():
    result = vnni_spmm.run(BenchOptions((1,), True, ((5, 70, 33), (20, 64, 40)), sparsity=(0.5, 0.9)))
    assert [line.case for line in result.summary] == [{"m": "5-20", "sparsity": share} for share in ("50%", "90%")]
    for line in result.summary:
        ratios = {
            peer: [
                row.ratio for row in result.rows if (row.case["sparsity"], row.peer) == (line.case["sparsity"], peer)
            ]
            for peer in PEERS
        }
        assert all(len(of_peer) == 2 for of_peer in ratios.values())
        means = {peer: geometric_mean(of_peer) for peer, of_peer in ratios.items()}
        assert line.geomean == pytest.approx(means["ort_dynamic_quantize_matmul"])
        assert line.ratios == {"best": max(ratios["ort_dynamic_quantize_matmul"])}
        others = {"matmul_integer": means["ort_matmul_integer"], "fp32": means["ort_matmul_fp32"]}
        assert line.others == pytest.approx(others)


def test_the_default_is_the_papers_table():
    plans = vnni_spmm._plans(BenchOptions())
    assert sum(len(plan.shape.batch) for plan in plans) == 90
    assert [(plan.shape.k, plan.shape.n) for plan in plans] == list(WEIGHTS)
    assert {plan.shape.batch for plan in plans} == {TOKENS}
    plans = vnni_spmm._plans(BenchOptions(layers=("minilm:q",), batch=(7,)))
    assert [(plan.shape.k, plan.shape.n, plan.shape.batch) for plan in plans] == [(384, 384, (7,))]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BenchOptions(kinds=("int4",)), ["--kind", "VNNISpMM", "leave it out"]),
        (BenchOptions(group_size=32), ["--group-size", "VNNISpMM", "leave it out"]),
        (BenchOptions(cases=((1, 65537, 1),)), ["--shape", "65537", "65536"]),
    ],
)
def test_impossible_options_say_what_is_possible(options, words):
    with pytest.raises(OrtolanError) as error:
        vnni_spmm.run(options)
    for word in words:
        assert word in str(error.value)


def test_weights_have_the_zeros_asked_for():
    q = random_weight(np.random.default_rng(0), 400, 400, 0.8)
    blocks = q.reshape(400, 100, 4)
    assert np.mean(np.all(blocks == 0, axis=2)) == pytest.approx(0.8, abs=0.01)


def test_our_node_computes_what_its_peer_does():
    """Results are exact, because quantization does not change integers from 0 to 255."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, (20, 70)).astype(np.float32)
    x[:, 3], x[:, 4] = 0, 255
    q, scales = random_weight(rng, 70, 37, 0.6), np.ones(37, np.float32)
    session, _keep = layers_session([our_node(q, scales)], 70, 37, 1)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x @ q)


def test_our_node_and_its_peers_run():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((40, 70), dtype=np.float32)
    ours = ort_candidate(our_node(random_weight(rng, 70, 37, 0.6), np.ones(37, np.float32)), 70, 37)
    for candidate in (ours, dense_peers.ort_matmul_integer(rng, 70, 37)):
        candidate.open(1)(x)()
