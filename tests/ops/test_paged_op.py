"""PagedNoMADAttention: against a float64 oracle, and the same bits however sequences are cut, mixed and stored."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ortolan

BLOCK = 16
NAMES = ("query", "key", "value", "key_pool", "value_pool", "sequence_starts", "past_lengths", "block_table")


@dataclass
class Node:
    """A session of one node, with pools of `blocks` blocks that calls append to."""

    heads: int
    kv_heads: int
    dim: int
    blocks: int = 64
    rotary: int = 0  # positions of cos and sin
    sinks: bool = False
    threads: int = 1
    attributes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = [TensorProto.FLOAT] * 3 + [TensorProto.BFLOAT16] * 2 + [TensorProto.INT64] * 3
        inputs = list(zip(NAMES, kinds, strict=True))
        names = list(NAMES)
        if self.rotary or self.sinks:
            names += ["cos", "sin"] if self.rotary else ["", ""]
        if self.sinks:
            names.append("sinks")
        inputs += [(name, TensorProto.FLOAT) for name in names[len(NAMES) :] if name]
        node = helper.make_node(
            "PagedNoMADAttention",
            names,
            ["Y", "new_key_pool", "new_value_pool"],
            "attention",
            domain="ai.ortolan",
            num_heads=self.heads,
            kv_num_heads=self.kv_heads,
            **self.attributes,
        )
        ranks = {"key_pool": 4, "value_pool": 4, "block_table": 2, "cos": 2, "sin": 2}
        graph = helper.make_graph(
            [node],
            "paged",
            [
                helper.make_tensor_value_info(name, kind, [None] * ranks.get(name, 3 if kind == 1 and i < 3 else 1))
                for i, (name, kind) in enumerate(inputs)
            ],
            [
                helper.make_tensor_value_info("Y", TensorProto.FLOAT, [None] * 3),
                *(
                    helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [None] * 4)
                    for name in ("new_key_pool", "new_value_pool")
                ),
            ],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.ortolan", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        ortolan.register(options)
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        rng = np.random.default_rng(99)
        # Blocks hold NaN, so that reading one that is not the sequence's shows.
        self.pools = [
            np.full((self.blocks, self.kv_heads, *shape), np.nan, ml_dtypes.bfloat16)
            for shape in ((self.dim, BLOCK), (BLOCK, self.dim))
        ]
        angles = rng.uniform(-3, 3, (self.rotary, self.dim // 2)).astype(np.float32)
        self.cos, self.sin = np.cos(angles), np.sin(angles)
        self.sink_scores = rng.normal(size=self.heads).astype(np.float32)

    def run(
        self,
        chunks: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
        past: Sequence[int],
        tables: Sequence[Sequence[int]],
    ) -> list[np.ndarray]:
        """Append chunks (query, key and value [tokens, heads, dim]) to their sequences; return their Y."""
        width = max(map(len, tables), default=0)
        table = np.zeros((len(tables), width), np.int64)
        for row, blocks in zip(table, tables, strict=True):
            row[: len(blocks)] = blocks
        feeds: dict[str, Any] = {
            name: np.concatenate([chunk[i] for chunk in chunks]).reshape(1, sum(len(c[0]) for c in chunks), -1)
            for i, name in enumerate(NAMES[:3])
        }
        starts = np.cumsum([0, *(len(chunk[0]) for chunk in chunks)])
        feeds |= {"sequence_starts": starts, "past_lengths": np.array(past, np.int64), "block_table": table}
        if self.rotary:
            feeds |= {"cos": self.cos, "sin": self.sin}
        if self.sinks:
            feeds["sinks"] = self.sink_scores
        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        values = [
            ort.OrtValue.ortvalue_from_numpy_with_onnx_type(pool.view(np.uint16), TensorProto.BFLOAT16)
            for pool in self.pools
        ]
        for name, value in zip(NAMES[3:5], values, strict=True):
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(f"new_{name}", value)
        binding.bind_output("Y", "cpu")
        self.session.run_with_iobinding(binding)
        (y,) = (value.numpy() for value in binding.get_outputs() if value.element_type() == TensorProto.FLOAT)
        return [part.reshape(-1, self.heads, self.dim) for part in np.split(y[0], starts[1:-1])]


def sequence(node: Node, tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (node.heads, node.kv_heads, node.kv_heads)
    query, key, value = (rng.normal(size=(tokens, heads, node.dim)).astype(np.float32) for heads in shapes)
    return 2 * query, key, value


def stored(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float64)


def rotated(node: Node, array: np.ndarray) -> np.ndarray:
    if not node.rotary:
        return array
    half = node.dim // 2
    cos, sin = node.cos[: len(array), None], node.sin[: len(array), None]
    a, b = array[..., :half], array[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def expected(node: Node, tensors: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
    """Return Y in float64, from keys and values as the pools store them."""
    query, key, value = tensors
    tokens, group = len(query), node.heads // node.kv_heads
    q = rotated(node, query).astype(np.float64)
    k, v = (stored(one).repeat(group, axis=1) for one in (rotated(node, key), value))
    scores = np.einsum("thd,jhd->htj", q, k) * node.attributes.get("scale", node.dim**-0.5)
    if cap := node.attributes.get("softcap"):
        scores = cap * np.tanh(scores / cap)
    t, j = np.arange(tokens)[:, None], np.arange(tokens)
    window = node.attributes.get("window", 0) or tokens
    scores = np.where((j > t) | (j <= t - window), -np.inf, scores)
    if node.sinks:
        sinks = np.broadcast_to(node.sink_scores[:, None, None], (node.heads, tokens, 1))
        scores = np.concatenate([scores, sinks.astype(np.float64)], axis=-1)
        v = np.concatenate([v, np.zeros_like(v[:1])])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("htj,jhd->thd", weights, v)


CASES: dict[str, dict[str, Any]] = {
    "heads 4": {"heads": 4, "kv_heads": 4, "dim": 32},
    "group of 3": {"heads": 9, "kv_heads": 3, "dim": 64},
    "group of 8, dim 128": {"heads": 8, "kv_heads": 1, "dim": 128},
    "dim 80, scale": {"heads": 2, "kv_heads": 1, "dim": 80, "attributes": {"scale": 0.25}},
    "rotary": {"heads": 4, "kv_heads": 2, "dim": 32, "rotary": 600},
    "softcap": {"heads": 4, "kv_heads": 2, "dim": 32, "attributes": {"softcap": 3.0}},
    "window": {"heads": 4, "kv_heads": 2, "dim": 32, "attributes": {"window": 40}},
    "window of 1": {"heads": 4, "kv_heads": 2, "dim": 16, "attributes": {"window": 1}},
    "sinks": {"heads": 6, "kv_heads": 2, "dim": 32, "sinks": True, "rotary": 600},
    "sinks and window": {"heads": 6, "kv_heads": 2, "dim": 32, "sinks": True, "attributes": {"window": 100}},
}


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


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


@pytest.mark.parametrize("case", ["group of 3", "rotary", "sinks and window"])
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
    "counts": ({"past_lengths": np.array([0, 0])}, "a row for each of 2 sequences"),
    "past": ({"past_lengths": np.array([-1])}, "past_lengths is -1 for sequence 0"),
    "overflow": ({"past_lengths": np.array([2**63 - 1])}, "past_lengths is 9223372036854775807"),
    "columns": ({"past_lengths": np.array([16])}, "block_table has 1 columns"),
    "block": ({"block_table": np.array([[64]])}, "block_table is 64 for block 0 of sequence 0, expected 0 to 63"),
    "negative": ({"block_table": np.array([[-1]])}, "block_table is -1"),
    "key": ({"key": np.zeros((1, 4, 32), np.float32)}, "key 'key' has shape"),
    "value": ({"value": np.zeros((1, 3, 16), np.float32)}, "value 'value' has shape"),
}


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
