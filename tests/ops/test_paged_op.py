"""PagedNoMADAttention: against a float64 oracle, and the same bits however sequences are cut, mixed and stored."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

from ortolan import _native

from .isa_process import run_with_isa
from .paged_attention import NAMES, SCALES, Node, blocks_of, expected, sequence

CASES: dict[str, dict[str, Any]] = {
    "heads 4": {"heads": 4, "kv_heads": 4, "dim": 32},
    "group of 3": {"heads": 9, "kv_heads": 3, "dim": 64},
    "group of 8, dim 128": {"heads": 8, "kv_heads": 1, "dim": 128},
    "dim 80, scale": {"heads": 2, "kv_heads": 1, "dim": 80, "attributes": {"scale": 0.25}},
    "rotary": {"heads": 4, "kv_heads": 2, "dim": 32, "rotary": 600},
    "rotary, interleaved": {
        "heads": 4,
        "kv_heads": 2,
        "dim": 48,
        "rotary": 600,
        "attributes": {"rotary_interleaved": 1},
    },
    "a part of the head turned": {"heads": 4, "kv_heads": 2, "dim": 32, "rotary": 600, "rotary_dim": 12},
    "softcap": {"heads": 4, "kv_heads": 2, "dim": 32, "attributes": {"softcap": 3.0}},
    "window": {"heads": 4, "kv_heads": 2, "dim": 32, "attributes": {"window": 40}},
    "window of 1": {"heads": 4, "kv_heads": 2, "dim": 16, "attributes": {"window": 1}},
    "sinks": {"heads": 6, "kv_heads": 2, "dim": 32, "sinks": True, "rotary": 600},
    "sinks and window": {"heads": 6, "kv_heads": 2, "dim": 32, "sinks": True, "attributes": {"window": 100}},
}
CASES |= {f"int8, {name}": CASES[name] | {"int8": True} for name in list(CASES)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_matches_the_oracle(case: str, tokens: int) -> None:
    node = Node(**CASES[case])
    tensors = sequence(node, tokens)
    table = np.random.default_rng(1).permutation(node.blocks)[: blocks_of(tokens)]
    (y,) = node.run([tensors], [0], [table.tolist()])
    exact = expected(node, tensors)
    np.testing.assert_allclose(y, exact, rtol=0, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("case", CASES)
def test_chunks_give_the_same_bits(case: str) -> None:
    whole = Node(**CASES[case])
    tensors = sequence(whole, 300)
    table = list(range(blocks_of(300)))
    (y,) = whole.run([tensors], [0], [table])
    for cuts in ([1], [64, 65], [15, 16, 200], [*range(280, 300)]):
        node = Node(**CASES[case])
        edges = [0, *cuts, 300]
        parts = [node.run([tuple(one[a:b] for one in tensors)], [a], [table])[0] for a, b in itertools.pairwise(edges)]
        assert np.concatenate(parts).tobytes() == y.tobytes(), cuts
        for pool, other in zip(node.pools, whole.pools, strict=True):
            assert pool.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    "case", ["group of 3", "rotary", "sinks and window", "int8, group of 3", "int8, sinks and window"]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_other_sequences_change_nothing(case: str, threads: int) -> None:
    """Chunks of prompts and single steps of several sequences in one call, in scattered blocks, one with a prefix."""
    lengths = [5, 150, 33, 64]
    alone = Node(**CASES[case])
    tensors = [sequence(alone, tokens, seed) for seed, tokens in enumerate(lengths)]
    for one in tensors[1:2]:  # sequence 2 shares the first two blocks of sequence 1
        tensors[2] = tuple(np.concatenate([a[:32], b[32:]]) for a, b in zip(one, tensors[2], strict=True))
    answers = []
    for one in tensors:
        node = Node(**CASES[case])
        answers.append(node.run([one], [0], [list(range(blocks_of(len(one[0]))))])[0])

    node = Node(**CASES[case], threads=threads)
    free = iter(np.random.default_rng(5).permutation(node.blocks).tolist())
    tables = [[next(free) for _ in range(blocks_of(tokens))] for tokens in lengths]
    tables[2][:2] = tables[1][:2]
    done = [0, 0, 32, 0]
    found: list[list[np.ndarray]] = [[], [], [answers[2][:32]], []]
    steps = [[5, 40, 0, 1], [0, 1, 0, 1], [0, 100, 1, 50], [0, 9, 0, 12]]
    for step in steps:
        chosen = [i for i, count in enumerate(step) if count]
        chunks = [tuple(a[done[i] : done[i] + step[i]] for a in tensors[i]) for i in chosen]
        results = node.run(chunks, [done[i] for i in chosen], [tables[i] for i in chosen])
        for i, y in zip(chosen, results, strict=True):
            found[i].append(y)
            done[i] += step[i]
    assert done == [5, 150, 33, 64]
    for parts, y in zip(found, answers, strict=True):
        assert np.concatenate(parts).tobytes() == y.tobytes()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "layout",
    [
        {"packed": True},
        {"by_heads": frozenset({"query", "key", "value"})},
        {"by_heads": frozenset({"key"})},
        {"by_tokens": True},
    ],
    ids=["packed", "by heads", "key by heads", "pools by tokens"],
)
def test_layouts_give_the_same_bits(case: str, layout: dict[str, Any]) -> None:
    """A packed query, operands by heads, and pools by tokens, in chunks of two sequences."""
    nodes = [Node(**CASES[case]), Node(**CASES[case] | layout)]
    first, second = (sequence(nodes[0], tokens, tokens) for tokens in (70, 20))
    tables = [[9, 2, 5, 0, 30], [1, 7]]
    cuts = [(0, 37, 0, 1), (37, 38, 1, 19), (38, 70, 19, 20)]
    for a, b, c, d in cuts:
        chunks = [tuple(one[a:b] for one in first), tuple(one[c:d] for one in second)]
        results = [node.run(chunks, [a, c], tables) for node in nodes]
        for y, other in zip(*results, strict=True):
            assert y.tobytes() == other.tobytes()
    for pool, other in zip(nodes[0].pools, nodes[1].pools, strict=True):
        assert pool.tobytes() == other.tobytes()


def test_long_sequences_are_merged_by_parts() -> None:
    node = Node(heads=2, kv_heads=1, dim=16, blocks=640, threads=2)
    tensors = sequence(node, 9000)
    table = list(range(blocks_of(9000)))
    parts = [
        node.run([tuple(one[a:b] for one in tensors)], [a], [table])[0]
        for a, b in ((0, 4000), (4000, 8995), (8995, 9000))
    ]
    y, exact = np.concatenate(parts), expected(node, tensors)
    np.testing.assert_allclose(y, exact, rtol=0, atol=2e-5 * np.abs(exact).max())
    other = Node(heads=2, kv_heads=1, dim=16, blocks=640)
    assert other.run([tensors], [0], [table])[0].tobytes() == y.tobytes()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_calls_in_several_rounds(threads: int, int8: bool) -> None:
    """Partial results of the call take 39 MB, more than a round has; the first round ends in the long sequence."""
    case: dict[str, Any] = {"heads": 32, "kv_heads": 2, "dim": 128, "int8": int8}
    past, lengths = [0] * 40 + [9000] + [0] * 5, [50] * 40 + [40] + [50] * 5
    ends = np.cumsum([blocks_of(sum(one)) for one in zip(past, lengths, strict=True)]).tolist()
    tables = [list(range(begin, end)) for begin, end in itertools.pairwise([0, *ends])]
    nodes = [Node(**case, blocks=ends[-1], threads=threads) for _ in range(2)]
    for node in nodes:
        rng = np.random.default_rng(3)
        for pool in node.pools:  # int8 keys and values, and scales; or bfloat16
            values = rng.integers(-127, 128, pool[tables[40]].shape)
            pool[tables[40]] = values if pool.dtype == np.int8 else abs(values) / 10_000 if int8 else values / 64
    chunks = [sequence(nodes[0], tokens, seed) for seed, tokens in enumerate(lengths)]
    found = nodes[0].run(chunks, past, tables)
    alone = [
        y
        for part in (slice(0, 40), slice(40, 41), slice(41, 46))
        for y in nodes[1].run(chunks[part], past[part], tables[part])
    ]
    assert [y.tobytes() for y in found] == [y.tobytes() for y in alone]
    assert all(np.isfinite(y).all() for y in found)


def test_sinks_count_once_in_any_part() -> None:
    """Late tokens see no key of the first part, because of a window, and some windows cross two parts."""
    case: dict[str, Any] = {"heads": 2, "kv_heads": 1, "dim": 16, "blocks": 288, "sinks": True}
    node = Node(**case, attributes={"window": 40})
    tensors = sequence(node, 4400)
    table = list(range(blocks_of(4400)))
    (y,) = node.run([tensors], [0], [table])
    exact = expected(node, tensors)
    np.testing.assert_allclose(y, exact, rtol=0, atol=2e-5 * np.abs(exact).max())
    other = Node(**case, attributes={"window": 40})
    edges = [0, 4090, 4150, 4399, 4400]
    parts = [other.run([tuple(one[a:b] for one in tensors)], [a], [table])[0] for a, b in itertools.pairwise(edges)]
    assert np.concatenate(parts).tobytes() == y.tobytes()


def test_pools_may_be_separate_buffers() -> None:
    node = Node(heads=2, kv_heads=1, dim=16)
    tensors = sequence(node, 20)
    (y,) = node.run([tensors], [0], [[3, 1]])
    feeds = {name: one.reshape(1, 20, -1) for name, one in zip(NAMES[:3], tensors, strict=True)}
    feeds |= {
        "sequence_starts": np.array([0, 20]),
        "past_lengths": np.array([0]),
        "block_table": np.array([[3, 1]]),
    }
    pools = [np.zeros_like(pool) for pool in node.pools]
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, pool in zip(NAMES[3:5], pools, strict=True):
        values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(pool.view(np.uint16), TensorProto.BFLOAT16)
    (other,) = node.session.run_with_ort_values(["Y"], values)
    assert other.numpy().tobytes() == y.tobytes()
    assert not any(pool.view(np.uint16).any() for pool in pools)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "starts": ({"sequence_starts": np.array([0, 3])}, "sequence_starts begins with 0 and ends with 3"),
    "decreasing": (
        {
            "sequence_starts": np.array([0, 5, 4]),
            "past_lengths": np.array([0, 0]),
            "block_table": np.zeros((2, 1), np.int64),
        },
        "decreases from 5 to 4 at sequence 1",
    ),
    "decreasing below all": (
        {
            "sequence_starts": np.array([0, 5, -(2**63), 4]),
            "past_lengths": np.array([0, 0, 0]),
            "block_table": np.zeros((3, 1), np.int64),
        },
        "decreases from 5 to -9223372036854775808 at sequence 1",
    ),
    "counts": ({"past_lengths": np.array([0, 0])}, "a row for each of 2 sequences"),
    "past": ({"past_lengths": np.array([-1])}, "past_lengths is -1 for sequence 0"),
    "overflow": ({"past_lengths": np.array([2**63 - 1])}, "past_lengths is 9223372036854775807"),
    "columns": ({"past_lengths": np.array([16])}, "block_table has 1 columns"),
    "block": ({"block_table": np.array([[64]])}, "block_table is 64 for block 0 of sequence 0, expected 0 to 63"),
    "negative": ({"block_table": np.array([[-1]])}, "block_table is -1"),
    "key": ({"key": np.zeros((1, 4, 32), np.float32)}, "key 'key' has shape"),
    "value": ({"value": np.zeros((1, 3, 16), np.float32)}, "value 'value' has shape"),
}


def test_pools_without_blocks_are_refused() -> None:
    node = Node(heads=2, kv_heads=1, dim=16)
    feeds = {name: one.reshape(1, 4, -1) for name, one in zip(NAMES[:3], sequence(node, 4), strict=True)}
    feeds |= {"sequence_starts": np.array([0, 4]), "past_lengths": np.array([0]), "block_table": np.array([[0]])}
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, pool in zip(NAMES[3:5], node.pools, strict=True):
        empty = np.zeros((0, *pool.shape[1:]), np.uint16)
        values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(empty, TensorProto.BFLOAT16)
    with pytest.raises(
        Exception, match="the pools have 0 blocks, expected at least 1 for the 4 new tokens of sequence 0"
    ):
        node.session.run_with_ort_values(["Y"], values)


@pytest.mark.parametrize("case", BAD)
def test_wrong_inputs_are_refused(case: str) -> None:
    node = Node(heads=2, kv_heads=1, dim=16)
    feeds: dict[str, np.ndarray] = {
        name: one.reshape(1, 4, -1) for name, one in zip(NAMES[:3], sequence(node, 4), strict=True)
    }
    feeds |= {"sequence_starts": np.array([0, 4]), "past_lengths": np.array([0]), "block_table": np.array([[1]])}
    changes, message = BAD[case]
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in (feeds | changes).items()}
    for name, pool in zip(NAMES[3:5], node.pools, strict=True):
        values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(pool.view(np.uint16), TensorProto.BFLOAT16)
    with pytest.raises(Exception, match=r"PagedNoMADAttention node 'attention'") as caught:
        node.session.run_with_ort_values(["Y"], values)
    assert message in str(caught.value)


@pytest.mark.parametrize("shape", [(64, 1, 16, 32), (64, 16, 16, 1), (64, 2, 16, 16), (64, 256)], ids=str)
@pytest.mark.parametrize("name", NAMES[3:5])
def test_wrong_pools_are_refused(name: str, shape: tuple[int, ...]) -> None:
    node = Node(heads=4, kv_heads=1, dim=16)
    feeds = node.feeds([sequence(node, 4)], [0], [[1]])
    values = {one: ort.OrtValue.ortvalue_from_numpy(array) for one, array in feeds.items()}
    for one, pool in zip(NAMES[3:5], node.pools, strict=True):
        bits = np.zeros(shape, np.uint16) if one == name else pool.view(np.uint16)
        values[one] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    message = "has invalid rank|Invalid rank" if len(shape) == 2 else f"{name} '{name}' has shape .* expected .* or "
    with pytest.raises(Exception, match=message):
        node.session.run_with_ort_values(["Y"], values)


@pytest.mark.parametrize(
    "shape, message",
    [
        (
            (2, 4, 64),
            "query 'query' has shape [2, 4, 64], expected [1, tokens, 4 heads], as key and value are part of it",
        ),
        ((1, 4, 66), "query 'query' has shape [1, 4, 66], expected [1, tokens, 4 heads]"),
        ((1, 4, 96), "head size is 24, expected a multiple of 16"),
    ],
)
def test_wrong_packed_queries_are_refused(shape: tuple[int, ...], message: str) -> None:
    node = Node(heads=2, kv_heads=1, dim=16, packed=True)
    feeds = node.feeds([sequence(node, 4)], [0], [[1]]) | {"query": np.zeros(shape, np.float32)}
    with pytest.raises(Exception, match=r"PagedNoMADAttention node 'attention'") as caught:
        node.run_feeds(feeds)
    assert message in str(caught.value)


def test_packed_queries_have_three_axes() -> None:
    node = Node(heads=2, kv_heads=1, dim=16, packed=True, by_heads=frozenset({"query"}))
    feeds = node.feeds([sequence(node, 4)], [0], [[1]])
    with pytest.raises(Exception, match="as key and value are part of it"):
        node.run_feeds(feeds)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"heads": 3, "kv_heads": 2}, "kv_num_heads a divisor"),
        ({"attributes": {"softcap": -1.0}}, "softcap is -1"),
        ({"attributes": {"window": -1}}, "window is -1"),
    ],
)
def test_wrong_attributes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        Node(**{"heads": 2, "kv_heads": 1, "dim": 16} | changes)


def test_head_sizes_are_multiples_of_16() -> None:
    node = Node(heads=1, kv_heads=1, dim=24)
    with pytest.raises(Exception, match="head size is 24, expected a multiple of 16"):
        node.run([sequence(node, 2)], [0], [[0]])


DIGEST = """
import hashlib
import numpy as np
from tests.ops.paged_attention import Node, blocks_of, sequence
from tests.ops.test_paged_op import CASES

digest = hashlib.sha256()
for name, case in CASES.items():
    node = Node(**case)
    tensors = sequence(node, 150)
    for begin, end in ((0, 100), (100, 101), (101, 150)):
        chunk = tuple(one[begin:end] for one in tensors)
        digest.update(node.run([chunk], [begin], [list(range(blocks_of(150)))])[0].tobytes())
    for pool in node.pools:
        digest.update(np.nan_to_num(pool.astype(np.float32)).tobytes())
print(digest.hexdigest())
"""


def test_every_instruction_set_gives_the_same_bits() -> None:
    found = {}
    for isa in _native.cpu_info()["detected_features"]:
        done = run_with_isa(isa, DIGEST)
        assert done.returncode == 0, done.stderr
        found[isa] = done.stdout
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("shape", [(64, 2, 8, 4, 16), (64, 2, 32, 16), (64, 2, 8, 16, 5)], ids=str)
def test_wrong_int8_keys_are_refused(shape: tuple[int, ...]) -> None:
    node = Node(heads=2, kv_heads=2, dim=32, int8=True)
    node.pools[0] = np.zeros(shape, np.int8)
    with pytest.raises(Exception, match=r"key_pool|[Ii]nvalid rank"):
        node.run([sequence(node, 4)], [0], [[1]])


def test_wrong_scales_are_refused() -> None:
    node = Node(heads=2, kv_heads=2, dim=32, int8=True)
    node.pools[3] = np.zeros((64, 1, 16), np.float32)
    with pytest.raises(Exception, match=r"value_scales 'value_scales' has shape \[64, 1, 16\], expected \[64, 2, 16\]"):
        node.run([sequence(node, 4)], [0], [[1]])


@pytest.mark.parametrize(
    "int8, scales, message",
    [(True, (), "the pools are int8, expected"), (False, SCALES, "the pools are bfloat16, which have no key_scales")],
)
def test_scales_belong_to_int8_pools(int8: bool, scales: tuple[str, ...], message: str) -> None:
    class Wrong(Node):
        scale_names = scales

    with pytest.raises(Exception, match=message):
        Wrong(heads=2, kv_heads=2, dim=32, int8=int8)
