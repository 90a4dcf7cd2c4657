"""Test NoMADAttention with padded caches, whose keys and values have the same width: results as without padding."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from ..pairwise import pairwise
from ..sampling import examples
from .cache_function import Both, all_uses_of, uses_of
from .cached_attention import Call, Decoder, Setup, node_model, run_shared
from .single_node import session

CALLS = (7, 1, 1, 3, 18, 2, 1, 33, 1)  # tokens per call; blocks end inside calls and between them
NODE = "NoMADAttention node 'attention'"
wide = pytest.mark.parametrize("more", [0, 1, 30], ids=lambda more: f"{more}_more")


def setup_of(more: int = 0, head_dim: int = 32, **options) -> Setup:
    """Return a setup whose caches are `more` bytes wider than a row of values."""
    return Setup(head_dim=head_dim, kind="codes", width=head_dim + 2 + more, **options)


@pytest.mark.parametrize(
    ("more", "room", "batch", "options"),
    pairwise(
        [0, 1, 30],
        [0, 80],
        [1, 3],
        [
            {},
            {"rotary": "half", "packed": True, "heads": 6, "kv_heads": 2},
            {"heads": 3, "kv_heads": 3, "head_dim": 16, "d_sub": 4, "causal": False},
            {"heads": 4, "kv_heads": 1, "head_dim": 64, "d_sub": 2, "rotary": "interleaved"},
            {"heads": 8, "kv_heads": 2, "head_dim": 128},
        ],
    ),
)
def test_calls_one_after_another(more: int, room: int, batch: int, options: dict) -> None:
    """Caches that grow, or with unused room: kernel and function must write the same bytes."""
    setup = setup_of(more, **options)
    both, decoder = Both(setup), Decoder(setup, batch, room=room)
    for queries in CALLS:
        both.check(decoder.call(queries))


@pytest.mark.parametrize("threads", [1, 3])
def test_answers_of_narrow_caches(threads: int) -> None:
    """The output has the same bits as with unpadded caches, and the caches begin with the same bytes."""
    narrow, equal = dataclasses.replace(setup_of(rotary="half"), width=0), setup_of(rotary="half")
    runs = [(Decoder(one, 2), session(node_model(one), threads=threads), one) for one in (narrow, equal)]
    for queries in CALLS:
        outputs = []
        for decoder, ours, setup in runs:
            y, *present = ours.run(None, decoder.call(queries).feeds)
            rows = [setup.row_views(kind, head) for kind in range(2) for batch in present[kind] for head in batch]
            outputs.append([y, *rows])
        for a, b in zip(*outputs, strict=True):
            np.testing.assert_array_equal(a, b)


@wide
@pytest.mark.parametrize("causal", [True, False])
def test_sequences_of_different_lengths(more: int, causal: bool) -> None:
    setup = setup_of(more, causal=causal, rotary="half")
    for room in (0, 100):
        both, decoder = Both(setup), Decoder(setup, 5, room=room)
        both.check(decoder.call(40, (40, 1, 17, 31, 32)))
        for queries in (1, 1, 1):
            both.check(decoder.call(queries))


@wide
def test_past_and_present_may_share_memory(more: int) -> None:
    """Caches can be extended in place: the memory after the new tokens' rows stays unchanged."""
    setup = setup_of(more, rotary="half")
    ours, decoder = session(node_model(setup), threads=2), Decoder(setup, room=80)
    memory = [np.full_like(array, 0x5A) for array in decoder.cache]
    for queries in CALLS:
        call = decoder.call(queries)
        outputs = run_shared(ours, call.feeds | dict(zip(("past_key", "past_value"), memory, strict=True)))
        memory = outputs[1:]
        for kind, (array, expected) in enumerate(zip(memory, call.present, strict=True)):
            used = decoder.tokens[0] * setup.rows[kind]
            for found, wanted in zip(array.reshape(4, -1), expected.reshape(4, -1), strict=True):
                np.testing.assert_array_equal(found[:used], wanted[:used])
                assert (found[used:] == 0x5A).all()
        call.check([outputs[0], *call.present])


@pytest.mark.parametrize("lengths", [True, False])
def test_empty_inputs(lengths: bool) -> None:
    setup = setup_of(5, lengths=lengths)
    both = Both(setup)
    for batch in (0, 2):
        decoder = Decoder(setup, batch)
        for queries in (3, 0, 1):
            both.check(decoder.call(queries))


@pytest.mark.parametrize("options", [{"window": 6, "sinks": 2}, {"prompt": 40, "heads": 2, "kv_heads": 2}])
def test_with_exact_keys_and_prompts(options: dict) -> None:
    setup = setup_of(3, **options)
    both, decoder = Both(setup), Decoder(setup)
    for queries in (7, 1, 30, 1):
        both.check(decoder.call(queries))


@pytest.mark.parametrize("opset", [13, 17, 21, 23])
def test_every_opset_and_evaluator(opset: int) -> None:
    setup = setup_of(4, head_dim=48, d_sub=2, rotary="interleaved")
    for uses in (uses_of(setup), all_uses_of(setup)):
        both, decoder = Both(setup, uses, opset), Decoder(setup)
        for queries in (34, 2):
            call = decoder.call(queries)
            both.check(call)
            if opset in (13, 23):
                call.check(ReferenceEvaluator(both.model).run(None, call.feeds), exact=True)


@pytest.mark.parametrize("lengths", [True, False])
def test_any_bytes_behind(lengths: bool) -> None:
    """Stale bytes in the padding do not matter and are not copied."""
    setup = setup_of(9, lengths=lengths)
    both, decoder = Both(setup), Decoder(setup)
    both.check(decoder.call(37))
    call = decoder.call(2)
    for kind, name in enumerate(("past_key", "past_value")):
        heads = call.feeds[name] = call.feeds[name].copy()
        heads.reshape(4, -1)[:, 37 * setup.rows[kind] :] = 0xA5
    both.check(call)


KEYS, VALUES = setup_of().rows


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        (
            (VALUES - 1, VALUES - 1),
            rf"'past_value' has shape .*, expected \[2, 2, tokens, {VALUES}\] \(2 heads of 32, or",
        ),
        ((KEYS, KEYS), f"'past_value' has shape .* or both caches with the same width, {VALUES} to 65536 bytes"),
        ((KEYS - 1, KEYS - 1), rf"'past_key' has shape .*, expected \[2, 2, tokens, {KEYS}\] \(2 heads of 32, or"),
        ((VALUES, VALUES + 1), rf"'past_key' has shape .*, expected \[2, 2, tokens, {KEYS}\]"),
        ((KEYS, VALUES + 1), rf"'past_value' has shape .*, expected \[2, 2, tokens, {VALUES}\]"),
        ((KEYS + 1, VALUES), rf"'past_key' has shape .*, expected \[2, 2, tokens, {KEYS}\]"),
        ((0, 0), "'past_key' has shape"),
        ((65537, 65537), "'past_key' has shape .* to 65536 bytes"),
    ],
)
def test_bad_widths(widths: tuple[int, int], message: str) -> None:
    setup = Setup(kind="codes")
    feeds = Decoder(setup).call(3).feeds
    for name, width in zip(("past_key", "past_value"), widths, strict=True):
        feeds[name] = np.zeros((2, 2, 0, width), np.uint8)
    with pytest.raises(Exception, match=f"{NODE}: past cache {message}"):
        session(node_model(setup)).run(None, feeds)


def test_float_values_are_as_wide_as_heads() -> None:
    """Float values with codes as keys are not padded caches, even if the widths happen to be equal."""
    setup = Setup(kind="codes_float")
    call: Call = Decoder(setup).call(3)
    call.feeds["past_key"] = np.zeros((2, 2, 0, 32), np.uint8)
    with pytest.raises(Exception, match=rf"{NODE}: past cache 'past_key' .* tokens, 16\] \(2 heads of 32\)"):
        session(node_model(setup)).run(None, call.feeds)


@examples(100)
@given(
    widths=st.tuples(*[st.sampled_from([0, 1, KEYS, VALUES - 1, VALUES, VALUES + 1, 64, 1000])] * 2),
    room=st.integers(0, 70),
    past=st.lists(st.integers(0, 70), min_size=2, max_size=2),
    queries=st.integers(1, 40),
    use_lengths=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_width_is_answered_or_refused(widths, room, past, queries, use_lengths, seed) -> None:
    """Any widths give an output or an error, with random bytes in the caches."""
    setup = Setup(kind="codes", lengths=use_lengths)
    rng = np.random.default_rng(seed)
    feeds = Decoder(setup, seed=seed).call(queries).feeds
    for name, width in zip(("past_key", "past_value"), widths, strict=True):
        feeds[name] = rng.integers(0, 256, (2, 2, room, width)).astype(np.uint8)
    if use_lengths:
        feeds["lengths"] = (np.array(past) + queries - 1).astype(np.int32)
    ours = session(node_model(setup), threads=2)
    good = widths == (KEYS, VALUES) or (widths[0] == widths[1] >= VALUES)
    if not good or (use_lengths and max(past) > room):
        with pytest.raises(Exception, match=NODE):
            ours.run(None, feeds)
        return
    y, *present = ours.run(None, feeds)
    assert y.shape[:2] == (2, queries)
    total = max(room, max(past) + queries) if use_lengths else room + queries
    assert [x.shape for x in present] == [(2, 2, total, width) for width in widths]


@examples(20)
@given(
    d_sub=st.sampled_from([1, 2, 4]),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    head_dim=st.sampled_from([16, 32, 48, 64]),
    more=st.integers(0, 70),
    packed=st.booleans(),
    lengths=st.booleans(),
    batch=st.integers(1, 3),
    calls=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    room=st.integers(0, 80),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(d_sub, heads, head_dim, more, packed, lengths, batch, calls, room, seed) -> None:
    kv_heads, group = heads
    setup = setup_of(
        more, head_dim, heads=kv_heads * group, kv_heads=kv_heads, d_sub=d_sub, packed=packed, lengths=lengths
    )
    decoder = Decoder(setup, batch, seed, room if lengths else 0, q_magnitude=0.3)
    both = Both(setup)
    for i, queries in enumerate(calls):
        added = np.random.default_rng(seed).integers(1, queries + 1, batch).tolist() if i == 0 and lengths else None
        both.check(decoder.call(queries, added))
