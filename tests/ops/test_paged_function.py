"""Test PagedNoMADAttention's ONNX function: it must give the results of the kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan.graph_passes.operators.paged_attention_function import (
    PagedUses,
    paged_attention_function,
    paged_uses_of,
)

from ..sampling import examples
from .paged_attention import OPERANDS, Chunk, Node, blocks_of, expected, sequence

ROTARY = {"half": {"rotary": 300}, "interleaved": {"rotary": 300, "attributes": {"rotary_interleaved": 1}}}


def uses_of(node: Node) -> PagedUses:
    """Return the features of the node, read from its model."""
    model = ir.from_proto(node.model())
    return paged_uses_of(list(model.graph))


def all_uses_of(node: Node) -> PagedUses:
    """Return the features for a model that has all kinds of nodes with this node's inputs."""
    uses = dataclasses.replace(
        uses_of(node), by_heads=frozenset(), mixed=frozenset(OPERANDS), window=True, softcap=True
    )
    return dataclasses.replace(uses, rotary=True, unrotated=True) if uses.sinks or uses.rotary else uses


class Both:
    """The node with Ortolan's kernel, and as the ONNX function that plain ONNX Runtime runs."""

    def __init__(self, opset: int = 17, uses: Any = uses_of, **changes: Any) -> None:
        self.kernel = Node(**{"heads": 4, "kv_heads": 2, "dim": 32, "opset": opset} | changes)
        function = ir.to_proto(paged_attention_function(opset, uses(self.kernel)))
        self.body = dataclasses.replace(self.kernel, functions=[function], library=False)
        self.tables: list[list[int]] = []
        self.past: list[int] = []
        self.tensors: list[Chunk] = []
        self._free = iter(np.random.default_rng(5).permutation(self.kernel.blocks).tolist())

    def add(self, tokens: int, shared: tuple[int, int] | None = None) -> None:
        """Add a sequence of this length, which may share the first `shared[1]` blocks of sequence `shared[0]`."""
        new = sequence(self.kernel, tokens, len(self.past))
        blocks: list[int] = []
        past = 0
        if shared is not None:
            other, count = shared
            past = 16 * count
            new = tuple(np.concatenate([a[:past], b[past:]]) for a, b in zip(self.tensors[other], new, strict=True))
            blocks = self.tables[other][:count]
        self.past.append(past)
        self.tensors.append(new)
        self.tables.append(blocks + [next(self._free) for _ in range(blocks_of(tokens) - len(blocks))])

    def call(self, step: Sequence[int], chosen: Sequence[int] | None = None) -> None:
        """Append this number of tokens to the chosen sequences, all by default, and compare all outputs."""
        chosen = range(len(step)) if chosen is None else chosen
        ends = [self.past[i] + count for i, count in zip(chosen, step, strict=True)]
        chunks = [tuple(a[self.past[i] : end] for a in self.tensors[i]) for i, end in zip(chosen, ends, strict=True)]
        past, tables = [self.past[i] for i in chosen], [self.tables[i] for i in chosen]
        ours, body = (node.run(chunks, past, tables) for node in (self.kernel, self.body))
        for i, end, a, b in zip(chosen, ends, ours, body, strict=True):
            exact = expected(self.kernel, tuple(one[:end] for one in self.tensors[i]))
            for y in (a, b):
                assert y.dtype == np.float32
                largest = np.abs(exact).max(initial=0)
                np.testing.assert_allclose(y, exact[self.past[i] :], rtol=0, atol=2e-5 * largest)
            self.past[i] = end
        for pool, other in zip(self.kernel.pools, self.body.pools, strict=True):
            assert_same_pools(pool, other)

    def check(self) -> None:
        """Check prompts and single steps of several sequences, with a shared prefix."""
        for tokens in (5, 90, 33):
            self.add(tokens)
        self.call([5, 40, 1])
        self.add(64, shared=(1, 2))
        for step in ([0, 1, 0, 1], [0, 20, 1, 20], [0, 1, 12, 1]):
            self.call(step)
        self.call([1, 1, 2], [3, 1, 2])


def assert_same_pools(pool: np.ndarray, other: np.ndarray) -> None:
    bits, others = (one.view(f"u{one.dtype.itemsize}") for one in (pool, other))
    are_nan = np.isnan(pool.astype(np.float32)) & np.isnan(other.astype(np.float32))
    np.testing.assert_array_equal(np.where(are_nan, 0, bits), np.where(are_nan, 0, others))


@pytest.mark.parametrize("uses", [uses_of, all_uses_of])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 4, "kv_heads": 4},
        {"heads": 9, "kv_heads": 3, "dim": 64},
        {"heads": 8, "kv_heads": 1, "dim": 128},
        {"heads": 2, "kv_heads": 1, "dim": 80, "attributes": {"scale": 0.25}},
        ROTARY["half"],
        ROTARY["interleaved"],
        {"rotary": 300, "rotary_dim": 12},
        {"rotary": 300, "rotary_dim": 12, "attributes": {"rotary_interleaved": 1}},
        {"attributes": {"window": 20}},
        {"attributes": {"window": 1}},
        {"sinks": True},
        {"heads": 1, "kv_heads": 1, "sinks": True},
        {"sinks": True, "rotary": 300, "attributes": {"window": 40}},
        {"attributes": {"softcap": 2.0}},
        {"sinks": True, "attributes": {"softcap": 2.0, "window": 30}},
        {"by_tokens": True},
        {"by_tokens": True, "heads": 9, "kv_heads": 3, "dim": 64},
        {"int8": True},
        {"int8": True, "heads": 9, "kv_heads": 3, "dim": 64, "attributes": {"window": 40, "softcap": 2.0}},
        {"int8": True, "by_tokens": True, "sinks": True},
    ],
    ids=str,
)
def test_chunks_of_several_sequences(changes: dict[str, Any], uses: Any) -> None:
    Both(uses=uses, **changes).check()


@pytest.mark.parametrize("uses", [uses_of, all_uses_of])
@pytest.mark.parametrize("changes", [{}, *ROTARY.values(), {"heads": 3, "kv_heads": 3, "sinks": True}], ids=str)
def test_packed_queries(changes: dict[str, Any], uses: Any) -> None:
    Both(uses=uses, packed=True, **changes).check()


@pytest.mark.parametrize("uses", [uses_of, all_uses_of])
@pytest.mark.parametrize("by_heads", [("query", "key", "value"), ("query", "key"), ("value",), ("key",)], ids=str)
def test_operands_by_heads(by_heads: set[str], uses: Any) -> None:
    Both(uses=uses, by_heads=frozenset(by_heads), **ROTARY["half"]).check()


@pytest.mark.parametrize("opset", [17, 18, 21, 23])
def test_every_opset(opset: int) -> None:
    Both(opset, sinks=True, rotary=300, attributes={"window": 40, "softcap": 3.0}).check()
    Both(opset, packed=True).check()
    Both(opset, int8=True).check()


@pytest.mark.parametrize("uses", [uses_of, all_uses_of])
@pytest.mark.parametrize(
    "changes",
    [{}, {"packed": True}, {"by_heads": frozenset(OPERANDS)}, {"by_tokens": True}, {"int8": True}],
    ids=["by rows", "packed", "by heads", "pools by tokens", "int8"],
)
@pytest.mark.parametrize("blocks", [0, 3])
def test_calls_without_tokens_or_sequences(changes: dict[str, Any], blocks: int, uses: Any) -> None:
    both = Both(uses=uses, blocks=blocks, sinks=True, rotary=10, **changes)
    both.call([], [])
    for _ in range(2):
        both.add(0)
    both.call([0, 0])
    if blocks:
        both.add(9)
        both.call([0, 0, 9])
        both.call([0, 0, 0])
        both.call([], [])


def test_unused_entries_of_the_block_table_are_ignored() -> None:
    both = Both()
    chunk = sequence(both.kernel, 20)
    none = tuple(one[:0] for one in chunk)
    # Sequence 1 has no token in the call, so none of its blocks is read.
    tables = [[3, 7, -5, 2**62], [-1, 1000, 64, 0]]
    ours, body = (node.run([chunk, none], [0, 500], tables)[0] for node in (both.kernel, both.body))
    np.testing.assert_allclose(ours, body, rtol=0, atol=2e-5 * np.abs(body).max())
    for pool, other in zip(both.kernel.pools, both.body.pools, strict=True):
        assert_same_pools(pool, other)
        changed = ~np.isnan(pool.astype(np.float32)).all(axis=(1, 2, 3))
        assert np.flatnonzero(changed).tolist() == [3, 7]


def test_nan_of_one_sequence_reaches_no_other() -> None:
    both = Both()
    chunks = [sequence(both.kernel, 20, seed) for seed in range(2)]
    chunks[0][2][7] = np.nan
    ours, body = (node.run(chunks, [0, 0], [[0, 1], [2, 3]]) for node in (both.kernel, both.body))
    np.testing.assert_allclose(ours[1], body[1], rtol=0, atol=2e-5 * np.abs(body[1]).max())
    assert np.isnan(body[0][7:]).all() and np.isnan(ours[0][7:]).all() and np.isfinite(ours[0][:7]).all()


def test_rounding_of_keys_and_values() -> None:
    """Ties, and values next to a tie, of all magnitudes of normal numbers."""
    both = Both(heads=1, kv_heads=1, dim=16, blocks=64)
    scales = np.ldexp(np.float32(1), np.arange(-126, 127)).astype(np.float32)
    ties = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7, 2 - 2**-8, 1 + 2**-9], np.float32)
    numbers = np.outer(scales, ties).ravel()
    numbers = np.concatenate([numbers, np.nextafter(numbers, np.float32(0)), np.nextafter(numbers, np.float32(3e38))])
    numbers = np.resize(np.concatenate([numbers, -numbers]), (500, 1, 16))
    chunk = (np.zeros_like(numbers), numbers, numbers)
    for node in (both.kernel, both.body):
        node.run([chunk], [0], [list(range(blocks_of(500)))])
    for pool, other in zip(both.kernel.pools, both.body.pools, strict=True):
        assert_same_pools(pool, other)
    keys = both.body.pools[0][:32, 0].astype(np.float32).swapaxes(1, 2).reshape(-1, 16)[:500]
    np.testing.assert_array_equal(keys, numbers[:, 0].astype(ml_dtypes.bfloat16).astype(np.float32))


def test_rounding_to_int8() -> None:
    """Rows of all magnitudes, with ties, zeros, Inf and NaN."""
    both = Both(heads=1, kv_heads=1, dim=16, blocks=64, int8=True)
    rng = np.random.default_rng(3)
    rows = rng.integers(-254, 255, (500, 1, 16)).astype(np.float32) / 2
    rows[:, 0, 0] = 127  # so that halves are ties
    rows *= np.ldexp(np.float32(1), rng.integers(-140, 120, (500, 1, 1))).astype(np.float32)
    rows[3], rows[5, 0, 2], rows[7, 0, 3], rows[9, 0, 0] = 0, np.nan, np.inf, -np.inf
    for node in (both.kernel, both.body):
        node.run([(np.zeros_like(rows), rows, rows)], [0], [list(range(blocks_of(500)))])
    for pool, other in zip(both.kernel.pools, both.body.pools, strict=True):
        assert_same_pools(pool, other)
    scales = both.kernel.pools[2][:32, 0].ravel()[:500]
    assert np.flatnonzero(np.isnan(scales)).tolist() == [5, 7, 9]


def test_one_function_serves_all_nodes_of_a_model() -> None:
    """Nodes with and without rotary embedding, of different heads, windows and layouts, share one function."""
    kinds: list[dict[str, Any]] = [
        {"rotary": 300, "by_heads": frozenset({"query", "key"})},
        {"heads": 3, "kv_heads": 3, "dim": 48, "rotary": 300, "attributes": {"rotary_interleaved": 1, "window": 9}},
        {"dim": 16, "sinks": True},
        {"heads": 1, "kv_heads": 1, "sinks": True},
    ]
    for sinks in (False, True):
        nodes = [Node(**{"heads": 4, "kv_heads": 2, "dim": 32} | kind | {"sinks": sinks}) for kind in kinds]
        uses = paged_uses_of([node for one in nodes for node in ir.from_proto(one.model()).graph])
        assert uses == PagedUses(
            mixed=frozenset({"query", "key"}), rotary=True, unrotated=True, sinks=sinks, window=True
        )
        for kind in kinds:
            # Nodes without rotary embedding get its inputs from `Node.model` if they have sinks.
            if kind.get("rotary") or sinks:
                Both(uses=lambda _node, uses=uses: uses, **kind | {"sinks": sinks}).check()


def test_without_graph_optimizations() -> None:
    """The function runs without ONNX Runtime's optimizations."""
    both = Both(sinks=True, rotary=300, attributes={"window": 40})
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = both.body.model().SerializeToString()
    both.body.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    both.check()


def test_sinks_of_negative_infinity_are_no_sinks() -> None:
    both, other = Both(sinks=True, rotary=300), Both(rotary=300)
    chunk = sequence(both.kernel, 90)
    for node in (both.kernel, both.body):
        node.sink_scores[:] = -np.inf
    results = [node.run([chunk], [0], [list(range(6))])[0] for node in (both.kernel, other.kernel, both.body)]
    assert results[0].tobytes() == results[1].tobytes()
    np.testing.assert_allclose(results[2], results[1], rtol=0, atol=2e-5 * np.abs(results[1]).max())


def test_models_are_valid_and_have_types() -> None:
    both = Both(sinks=True, rotary=300)
    onnx.checker.check_model(both.body.model(), full_check=True)
    outputs = both.body.session.get_outputs()
    assert [output.type for output in outputs] == ["tensor(float)", "tensor(bfloat16)", "tensor(bfloat16)"]


@examples(25)
@given(
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dim=st.sampled_from([16, 32, 48, 80]),
    rotary=st.sampled_from([None, "half", "interleaved"]),
    sinks=st.booleans(),
    packed=st.booleans(),
    window=st.sampled_from([0, 1, 7, 50]),
    softcap=st.sampled_from([0.0, 2.0]),
    wide=st.booleans(),
    tokens=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_calls(heads, dim, rotary, sinks, packed, window, softcap, wide, tokens, seed) -> None:
    changes: dict[str, Any] = {"heads": heads[0] * heads[1], "kv_heads": heads[1], "dim": dim}
    attributes = {"window": window, "softcap": softcap, "rotary_interleaved": int(rotary == "interleaved")}
    changes |= {"rotary": 300 if rotary else 0, "sinks": sinks, "packed": packed, "attributes": attributes}
    both = Both(uses=all_uses_of if wide else uses_of, **changes)
    for count in tokens:
        both.add(count)
    rng = np.random.default_rng(seed)
    left = np.array(tokens)
    while left.any():
        step = np.minimum(rng.integers(0, 40, len(tokens)), left)
        both.call(step.tolist())
        left -= step
