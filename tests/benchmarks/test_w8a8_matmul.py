"""`ortolan bench w8a8_matmul`: the measured cases; all compared operators compute the same product."""

import numpy as np
import pytest

from ortolan.benchmarks import w8a8_matmul
from ortolan.benchmarks.cold_layers import layers_session
from ortolan.benchmarks.dense_peers import matmul_nbits_node
from ortolan.benchmarks.result import BenchOptions
from ortolan.benchmarks.w4a8_matmul import GROUP_SIZES, SCALES
from ortolan.benchmarks.w8a8_matmul import PEERS, our_node
from ortolan.errors import OrtolanError


def test_every_group_size_meets_its_peers(short):
    short({})
    result = w8a8_matmul.run(BenchOptions((1,), True, ((1, 70, 33), (5, 70, 33))))
    found = {}
    for row in result.rows:
        found.setdefault((row.case["m"], row.case["group_size"], row.case["scales"]), []).append(row.peer)
        assert row.ours.min_ms > 0 and row.peer_time.min_ms > 0
    assert {case: set(peers) for case, peers in found.items()} == {
        (m, group_size, scales): {*PEERS.values(), *(["stream_read"] if m == 1 else [])}
        for m in (1, 5)
        for group_size in GROUP_SIZES
        for scales in SCALES
    }


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_our_node_and_its_peer_compute_the_same_product(group_size):
    """Results are exact, because rounding does not change these integers and powers of two."""
    rng = np.random.default_rng(group_size)
    k, n = 70, 37
    groups = -(-k // group_size)
    x = rng.integers(-100, 100, (5, k)).astype(np.float32)
    x[:, ::group_size] = 127  # makes the scale of each group 1
    q = rng.integers(-128, 128, (k, n)).astype(np.int8)
    scales = np.exp2(rng.integers(-3, 3, (groups, n))).astype(np.float32)
    exact = x @ (q.astype(np.float32) * np.repeat(scales, group_size, axis=0)[:k])
    nodes = [our_node(q, scales.astype(dtype), group_size) for dtype in SCALES]
    nodes.append(matmul_nbits_node(q, scales, None, group_size, 4))
    session, _keep = layers_session(nodes, k, n, 1)
    for y in session.run(None, {"x": x}):
        np.testing.assert_array_equal(y, exact)


def test_impossible_options_say_what_is_possible():
    impossible = {"symmetric": BenchOptions(kinds=("int4",)), "leave it out": BenchOptions(sparsity=(0.5,))}
    for word, options in impossible.items():
        with pytest.raises(OrtolanError, match=word):
            w8a8_matmul.run(options)
