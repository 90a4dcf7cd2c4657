"""Test NoMADAttention with key codes, where the first tokens (sinks) and recent tokens (window) keep exact keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..pairwise import pairwise
from ..sampling import examples
from .attention import LOWEST
from .cache_function import Both, all_uses_of
from .cached_attention import Decoder, Setup, declare_ranks, node_model, run_shared
from .single_node import session

CALLS = (7, 1, 1, 3, 9, 2, 1, 4, 8, 1, 4, 12, 2, 1)  # tokens per call; 56 in all
KINDS = ["codes", "codes_float"]
kinds = pytest.mark.parametrize("kind", KINDS)
# (window, sinks): ring buffers that wrap within or between calls, are smaller than a call, or hold all tokens; and
# sinks that are filled late.
WINDOWS = [(1, 0), (2, 1), (3, 0), (16, 4), (5, 11), (0, 4), (0, 1), (24, 0), (64, 0), (200, 20), (0, 99)]


@pytest.mark.parametrize(("kind", "window", "sinks", "rotary"), pairwise(KINDS, WINDOWS, [None, "half"]))
def test_calls_one_after_another(kind: str, window: int, sinks: int, rotary: str | None) -> None:
    setup = Setup(kind=kind, window=window, sinks=sinks, rotary=rotary, packed=rotary is None, lengths=rotary is None)
    ours, decoder = session(node_model(setup), threads=2), Decoder(setup)
    for queries in CALLS:
        call = decoder.call(queries)
        call.check(ours.run(None, call.feeds))


@kinds
@pytest.mark.parametrize("first", [1, 4, 7])
def test_a_window_of_everything_is_attention_over_float_keys(kind: str, first: int) -> None:
    setup = Setup(kind=kind, window=64, rotary="half")
    plain = Setup(kind="float", rotary="half")
    ours, exact = session(node_model(setup)), session(node_model(plain))
    decoder, float_decoder = Decoder(setup), Decoder(plain)
    for queries in (first, 1, 3, 6, 2, 4, 1, 33, 1):
        call, float_call = decoder.call(queries), float_decoder.call(queries)
        for name in ("query", "key", "value"):
            np.testing.assert_array_equal(call.feeds[name], float_call.feeds[name])
        y, expected = ours.run(None, call.feeds)[0], exact.run(None, float_call.feeds)[0]
        # Calls of up to 4 tokens leave out tokens of negligible weight, also with float caches. int8 values have an
        # error of up to 1/254.
        most = (2e-3 if queries <= 4 else 2e-6) + (0.02 if kind == "codes" else 0)
        np.testing.assert_allclose(y, expected, rtol=0, atol=most)
        # All keys are exact, so the bound contains no error of quantized tables.
        call.check(ours.run(None, call.feeds))


@kinds
@pytest.mark.parametrize(("window", "sinks"), [(6, 2), (3, 0), (0, 5), (70, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_sequences_of_different_lengths(kind: str, window: int, sinks: int, causal: bool) -> None:
    for prompt, added in ((40, (40, 1, 17, 32)), (3, (3, 1, 2, 2)), (4, (1, 1, 4, 1))):
        setup = Setup(kind=kind, window=window, sinks=sinks, causal=causal, rotary="half")
        ours, decoder = session(node_model(setup), threads=2), Decoder(setup, 4, room=60)
        call = decoder.call(prompt, added)
        call.check(ours.run(None, call.feeds))
        for queries in (1, 1, 3, 1):
            call = decoder.call(queries)
            call.check(ours.run(None, call.feeds))


@kinds
@pytest.mark.parametrize(("window", "sinks"), [(6, 2), (3, 0), (0, 5), (90, 1)])
def test_past_and_present_may_share_memory(kind: str, window: int, sinks: int) -> None:
    """Past and present may share memory, although new keys then overwrite exact keys that the queries still need."""
    setup = Setup(kind=kind, window=window, sinks=sinks, rotary="half")
    ours, decoder = session(node_model(setup), threads=2), Decoder(setup, room=60)
    memory = list(decoder.cache)
    for queries in CALLS:
        call = decoder.call(queries)
        feeds = dict(zip(("past_key", "past_value", "past_exact_key"), memory, strict=True))
        outputs = run_shared(ours, call.feeds | feeds)
        memory = outputs[1:]
        call.check(outputs)


@kinds
@pytest.mark.parametrize(("window", "sinks"), [(6, 2), (2, 0), (0, 5)])
@pytest.mark.parametrize("queries", [1, 3, 4, 6])
def test_arbitrary_masks(kind: str, window: int, sinks: int, queries: int) -> None:
    """Each query of a call of up to 4 tokens has its own window."""
    setup = Setup(kind=kind, window=window, sinks=sinks, mask=True, rotary="half", causal=queries != 3)
    ours, decoder = session(node_model(setup), threads=2), Decoder(setup, 3)
    call = decoder.call(12, (12, 3, 7), mask=np.zeros((1,), np.float32))
    call.check(ours.run(None, call.feeds))
    for count in (queries, queries):
        mask = np.random.default_rng(count).standard_normal((3, 4, count, 12 + 2 * count), dtype=np.float32)
        mask[np.random.default_rng(1).random(mask.shape) < 0.3] = LOWEST
        mask[..., 0] = 0
        decoder_total = max(decoder.cache[0].shape[2], max(decoder.tokens) + count)
        call = decoder.call(count, mask=np.ascontiguousarray(mask[..., :decoder_total]))
        call.check(ours.run(None, call.feeds), exact=True)


@kinds
@pytest.mark.parametrize("window", [3, 30])
def test_left_padding(kind: str, window: int) -> None:
    """Masks of only 0 and LOWEST leave ranges of tokens, which the exact keys divide into pieces."""
    setup = Setup(kind=kind, mask=True, lengths=False, causal=False, window=window, sinks=4)
    ours, decoder = session(node_model(setup)), Decoder(setup, 2)
    for queries in (9, 1, 3, 1):
        total = decoder.tokens[0] + queries
        mask = np.zeros((2, 1, queries, total), np.float32)
        mask[1, ..., :2] = LOWEST
        mask[:, :, ~np.tri(queries, total, total - queries, dtype=bool)] = LOWEST
        call = decoder.call(queries, mask=mask)
        call.check(ours.run(None, call.feeds), exact=call.past[0] == 0)


@kinds
@pytest.mark.parametrize("threads", [1, 3])
def test_long_contexts_are_divided_among_threads(kind: str, threads: int) -> None:
    """The exact keys may be in any thread's part of the tokens."""
    for window, sinks in ((64, 4), (6000, 0), (4100, 4200)):
        setup = Setup(2, 1, 16, kind, window=window, sinks=sinks)
        decoder = Decoder(setup, 1)
        ours = session(node_model(setup), threads=threads)
        decoder.call(8300)
        for queries in (1, 2):
            call = decoder.call(queries)
            call.check(ours.run(None, call.feeds))


@kinds
def test_a_sequence_may_begin_anew(kind: str) -> None:
    """A new sequence does not read exact keys that another sequence left in the cache."""
    setup = Setup(kind=kind, window=6, sinks=3)
    ours, decoder = session(node_model(setup)), Decoder(setup)
    for queries in (30, 1):
        decoder.call(queries)
    left = decoder.cache[2]
    for prompt in (1, 2, 8):
        decoder = Decoder(setup, seed=1)
        decoder.cache[2] = left
        for queries in (prompt, 1):
            call = decoder.call(queries)
            call.check(ours.run(None, call.feeds))


def test_empty_inputs() -> None:
    setup = Setup(kind="codes", rotary="half", window=4, sinks=2)
    ours = session(node_model(setup))
    for batch in (0, 2):
        decoder = Decoder(setup, batch)
        for queries in (3, 0, 1):
            call = decoder.call(queries)
            call.check(ours.run(None, call.feeds))


@pytest.mark.parametrize(("kind", "window", "sinks", "lengths"), pairwise(KINDS, WINDOWS, [True, False]))
def test_the_function(kind: str, window: int, sinks: int, lengths: bool) -> None:
    """The ONNX function gives the same results as the kernel."""
    setup = Setup(kind=kind, window=window, sinks=sinks, lengths=lengths, rotary="half" if lengths else None)
    both, decoder = Both(setup), Decoder(setup)
    for queries in CALLS[:9]:
        both.check(decoder.call(queries))


@kinds
@pytest.mark.parametrize("opset", [13, 18, 23])
def test_the_function_of_other_nodes_and_opsets(kind: str, opset: int) -> None:
    for window, sinks, heads in ((6, 2, 4), (3, 0, 2), (0, 5, 4)):
        setup = Setup(heads=heads, kind=kind, window=window, sinks=sinks, causal=heads == 4, mask=True)
        both, decoder = Both(setup, all_uses_of(setup), opset), Decoder(setup, 4, room=30)
        for queries, added in ((9, (9, 1, 4, 8)), (1, None), (3, None), (0, None), (5, None)):
            mask = np.zeros((4, 1, queries, max(decoder.cache[0].shape[2], max(decoder.tokens) + queries)), np.float32)
            mask[..., 1] = LOWEST  # a hole
            both.check(decoder.call(queries, added, mask=mask), exact=True)


def test_models_are_valid() -> None:
    model = Both(GOOD).model
    declare_ranks(model, Decoder(GOOD).call(3).feeds)
    onnx.checker.check_model(model, full_check=True)


GOOD = Setup(kind="codes", window=6, sinks=2)


@pytest.mark.parametrize(
    ("setup", "attributes", "message"),
    [
        (GOOD, {"window": -1}, "window is -1, expected 0 to 16777216"),
        (GOOD, {"sinks": 2**62}, "sinks is 4611686018427387904, expected 0 to"),
        (GOOD, {"window": 0, "sinks": 0}, "window is 0 and sinks 0, but past_exact_key or present_exact_key is given"),
        (
            Setup(kind="codes"),
            {"window": 6},
            r"window is 6 and sinks 0, but input 10 \(past_exact_key\) is missing, .* \[B, 2, 6, 32\]",
        ),
        (Setup(), {"sinks": 1}, "window is 0 and sinks 1, but past_key 'past_key' is float, which is exact"),
    ],
)
def test_bad_attributes(setup: Setup, attributes: dict[str, int], message: str) -> None:
    with pytest.raises(Exception, match=f"NoMADAttention node 'attention': .*{message}"):
        session(node_model(setup, **attributes))


def test_a_missing_output() -> None:
    model = node_model(GOOD)
    del model.graph.node[0].output[3]
    del model.graph.output[3]
    with pytest.raises(Exception, match=r"output 3 \(present_exact_key\) is missing, expected .* \[B, 2, 8, 32\]"):
        session(model)


@pytest.mark.parametrize("name", ["window", "sinks"])
def test_a_window_without_a_cache(name: str) -> None:
    model = node_model(Setup(lengths=False))
    node = model.graph.node[0]
    del node.input[4:], node.output[1:], model.graph.output[1:]
    node.attribute.append(onnx.helper.make_attribute(name, 3))
    with pytest.raises(Exception, match=f"{name} is 3, but past_key is missing"):
        session(model)


@pytest.mark.parametrize(
    "shape", [(2, 2, 7, 32), (2, 2, 0, 32), (1, 2, 8, 32), (2, 4, 8, 32), (2, 2, 8, 16), (2, 8, 32), (0,)]
)
def test_bad_shapes(shape: tuple[int, ...]) -> None:
    decoder = Decoder(GOOD)
    decoder.call(6)
    feeds = decoder.call(3).feeds | {"past_exact_key": np.zeros(shape, np.float32)}
    expected = r"past_exact_key 'past_exact_key' has shape .*, expected \[2, 2, 8, 32\] \(sinks 2 and window 6\)"
    with pytest.raises(Exception, match=f"NoMADAttention node 'attention': {expected}"):
        session(node_model(GOOD)).run(None, feeds)


@examples(100)
@given(
    kind=st.sampled_from(["codes", "codes_float"]),
    window=st.integers(0, 70),
    sinks=st.integers(0, 40),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    head_dim=st.sampled_from([16, 32, 48]),
    rotary=st.sampled_from([None, "half", "interleaved"]),
    lengths=st.booleans(),
    causal=st.booleans(),
    batch=st.integers(1, 3),
    calls=st.lists(st.one_of(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=6),
    room=st.integers(0, 80),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    kind, window, sinks, heads, head_dim, rotary, lengths, causal, batch, calls, room, threads, seed
) -> None:
    kv_heads, group = heads
    setup = Setup(kv_heads * group, kv_heads, head_dim, kind, rotary=rotary, lengths=lengths, causal=causal)
    setup = dataclasses.replace(setup, window=window, sinks=sinks)
    decoder = Decoder(setup, batch, seed, room if lengths else 0, q_magnitude=0.3)
    ours = session(node_model(setup), threads=threads)
    for i, queries in enumerate(calls):
        added: Any = None
        if i == 0 and lengths:
            added = np.random.default_rng(seed).integers(1, queries + 1, batch).tolist()
        call = decoder.call(queries, added)
        call.check(ours.run(None, call.feeds))
