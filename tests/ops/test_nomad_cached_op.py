"""Test NoMADAttention with a cache in ORT, call by call, against NumPy and ORT's GroupQueryAttention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..sampling import examples
from .attention import LOWEST
from .cached_attention import Call, Decoder, Setup, gqa_model, node_model, run_shared
from .single_node import assert_same_bits, session

CALLS = (7, 1, 1, 3, 9, 2, 1, 4, 8, 1)  # tokens per call; 37 in all
kinds = pytest.mark.parametrize("kind", ["float", "codes", "codes_float"])


def gqa_feeds(call: Call) -> dict[str, np.ndarray]:
    total = max(past + call.q.shape[2] for past in call.past)
    return call.feeds | {"total": np.array(total, np.int32)}


@pytest.mark.parametrize("rotary", [None, "half", "interleaved"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("room", [0, 48])
@pytest.mark.parametrize("batch", [1, 3])
def test_float_caches_are_group_query_attention(rotary: str | None, packed: bool, room: int, batch: int) -> None:
    setup = Setup(rotary=rotary, packed=packed)
    ours, ort_session = session(node_model(setup)), session(gqa_model(setup))
    decoder = Decoder(setup, batch, room=room)
    for queries in CALLS:
        call = decoder.call(queries)
        outputs = ours.run(None, call.feeds)
        call.check(outputs)
        if batch > 1 and queries > 1 and call.past[0]:
            continue  # GroupQueryAttention does not support this case
        y, *present = ort_session.run(None, gqa_feeds(call))
        np.testing.assert_allclose(outputs[0], y, rtol=0, atol=2e-6)
        for a, b in zip(outputs[1:], present, strict=True):
            tokens = decoder.tokens[0]
            np.testing.assert_allclose(a[:, :, :tokens], b[:, :, :tokens], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(1, 1, 16), (4, 4, 64), (6, 2, 80), (8, 1, 96), (9, 3, 64), (4, 2, 128), (3, 3, 8), (2, 1, 36)],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_heads_and_threads(heads: int, kv_heads: int, head_dim: int, threads: int) -> None:
    setup = Setup(heads, kv_heads, head_dim, rotary="half")
    ours, decoder = session(node_model(setup), threads=threads), Decoder(setup)
    for queries in CALLS:
        call = decoder.call(queries)
        call.check(ours.run(None, call.feeds))


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "masked"), [(4, 2, 36, False), (4, 2, 36, True), (3, 1, 64, True)]
)
def test_prompts_of_bf16(reproducible: bool, heads: int, kv_heads: int, head_dim: int, masked: bool) -> None:
    """Calls may round to bf16 if they have more than SHORT tokens. Reproducible ones always do."""
    setup = Setup(heads, kv_heads, head_dim, rotary="half", mask=masked, precision=16, reproducible=reproducible)
    ours, decoder = session(node_model(setup), threads=2), Decoder(setup)
    rng = np.random.default_rng(head_dim)
    for queries in (40, 1, 9, 3, 130):
        mask = None
        if masked:
            mask = rng.standard_normal((2, heads, queries, decoder.tokens[0] + queries), dtype=np.float32)
            mask[rng.random(mask.shape) < 0.3] = LOWEST
            mask[..., 0] = 0
        call = decoder.call(queries, mask=mask)
        outputs = ours.run(None, call.feeds)
        call.check(outputs, exact=masked)
        if reproducible:
            with pytest.raises(AssertionError, match="over bound"):
                replace(call, setup=replace(setup, precision=32)).check(outputs, exact=masked)


def test_reproducible_calls_have_the_bits_of_the_scalar_kernel() -> None:
    """Short calls too, which other nodes compute in an order that depends on the CPU."""
    setup = Setup(6, 2, 36, precision=16, reproducible=True)
    ours, decoder = session(node_model(setup), threads=2), Decoder(setup, 2)
    for queries in (40, 1, 3, 9):
        call = decoder.call(queries)
        y = ours.run(None, call.feeds)[0].reshape(2, queries, 6, 36)
        for b in range(2):
            for head in range(6):
                given = call.q[b, head : head + 1], call.k[b][head // 3], call.v[b][head // 3], 36**-0.5
                alone = _testing.nomad_attention(*given, causal=True, kernel="scalar/16")
                assert_same_bits(y[b, :, head], alone[0])


@kinds
def test_reproducible_calls_over_every_kind_of_cache(kind: str) -> None:
    setup = Setup(4, 2, 32, kind, rotary="half", precision=16, reproducible=True)
    ours, decoder = session(node_model(setup), threads=2), Decoder(setup)
    for queries in CALLS:
        call = decoder.call(queries)
        call.check(ours.run(None, call.feeds))


@pytest.mark.parametrize("kind", ["codes", "codes_float"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "d_sub"),
    [(4, 2, 32, 1), (3, 3, 16, 4), (6, 2, 48, 4), (4, 1, 64, 2), (8, 2, 128, 1), (2, 2, 80, 2)],
)
def test_codes(kind: str, heads: int, kv_heads: int, head_dim: int, d_sub: int) -> None:
    for rotary, packed, threads in ((None, True, 3), ("half", False, 1), ("interleaved", True, 1)):
        setup = Setup(heads, kv_heads, head_dim, kind, d_sub, packed, rotary)
        ours, decoder = session(node_model(setup), threads=threads), Decoder(setup)
        for queries in (*CALLS, 27):  # the last call fills the last block of the cache
            call = decoder.call(queries)
            call.check(ours.run(None, call.feeds))


@kinds
@pytest.mark.parametrize("tokens", [30, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("queries", [1, 2, 4, 5, 33])
def test_around_the_ends_of_blocks(kind: str, tokens: int, queries: int) -> None:
    setup = Setup(kind=kind, lengths=queries % 2 == 0)
    ours, decoder = session(node_model(setup)), Decoder(setup, 1)
    for count in (tokens, queries, 1):
        call = decoder.call(count)
        call.check(ours.run(None, call.feeds))


@kinds
@pytest.mark.parametrize("causal", [True, False])
def test_sequences_of_different_lengths(kind: str, causal: bool) -> None:
    """A first prompt with padding at the end, then one token at each sequence's own position."""
    for packed, rotary in ((True, "half"), (False, None)):
        for prompt, added in ((40, (40, 1, 17, 32)), (3, (3, 1, 2, 2)), (4, (1, 1, 1, 1))):
            setup = Setup(kind=kind, packed=packed, rotary=rotary, causal=causal)
            ours, decoder = session(node_model(setup), threads=2), Decoder(setup, 4)
            call = decoder.call(prompt, added)
            call.check(ours.run(None, call.feeds))
            for queries in (1, 1):
                call = decoder.call(queries)
                call.check(ours.run(None, call.feeds))


def test_a_padded_prompt_is_what_group_query_attention_makes_of_it() -> None:
    setup = Setup(rotary="half")
    decoder, ours, ort_session = Decoder(setup, 3), session(node_model(setup)), session(gqa_model(setup))
    added = (9, 4, 1)
    call = decoder.call(9, added)
    for a, b in zip(ours.run(None, call.feeds), ort_session.run(None, gqa_feeds(call)), strict=True):
        for row, count in enumerate(added):
            rows = (row, slice(count)) if a.ndim == 3 else (row, slice(None), slice(count))
            np.testing.assert_allclose(a[rows], b[rows], rtol=0, atol=2e-6)
    call = decoder.call(1)
    y, expected = ours.run(None, call.feeds)[0], ort_session.run(None, gqa_feeds(call))[0]
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6)


@kinds
def test_past_and_present_may_share_memory(kind: str) -> None:
    """Caches can be extended in place: the memory after the new tokens stays unchanged."""
    setup = Setup(kind=kind, rotary="half")
    ours, decoder = session(node_model(setup), threads=2), Decoder(setup, room=50)
    memory = [np.full_like(array, 0x5A) for array in decoder.cache]
    for queries in CALLS:
        call = decoder.call(queries)
        outputs = run_shared(ours, call.feeds | dict(zip(("past_key", "past_value"), memory, strict=True)))
        memory = outputs[1:]
        tokens = decoder.tokens[0]
        for array, expected in zip(memory, call.present, strict=True):
            assert (array[:, :, tokens:] == 0x5A).all()
            np.testing.assert_array_equal(array[:, :, :tokens], expected[:, :, :tokens])
        call.check([outputs[0], *call.present])


def left_padding(batch: int, heads: int, queries: int, total: int, hidden: float) -> np.ndarray:
    """Return a mask [B, 1, 1, T] as exporters write it, in which sequence b begins at token 2 b."""
    mask = np.zeros((batch, 1, 1, total), np.float32)
    for b in range(batch):
        mask[b, ..., : 2 * b] = hidden
    return mask


@kinds
@pytest.mark.parametrize("hidden", [LOWEST, -1e9])
def test_left_padding(kind: str, hidden: float) -> None:
    """Padding rows see only padding: they give the mean of the values or a softmax of very low scores, but not NaN."""
    setup = Setup(kind=kind, mask=True, lengths=False)
    for prompt in (9, 4, 3):
        ours, decoder = session(node_model(setup)), Decoder(setup, 2)
        for queries in (prompt, 1, 2):
            total = decoder.tokens[0] + queries
            call = decoder.call(queries, mask=left_padding(2, 4, queries, total, hidden))
            outputs = ours.run(None, call.feeds)
            call.check(outputs, exact=[False, call.past[0] == 0])  # sequence 0 has no padding
            if call.past[0] == 0 and hidden == LOWEST:  # LOWEST absorbs all scores, so the weights are equal
                y = outputs[0][1, 1].reshape(4, -1)
                np.testing.assert_allclose(y, call.v[1][:, :2].mean(1).repeat(2, 0), rtol=1e-6, atol=1e-6)


@kinds
@pytest.mark.parametrize("queries", [1, 3, 6])
@pytest.mark.parametrize(
    "shape", [(2, 4, "S", "T"), (1, 4, 1, "T"), (2, 1, "S", 1), ("S", "T"), ("T",), (1,), (), (2, 1, 1, 1)]
)
def test_arbitrary_masks(kind: str, queries: int, shape: tuple[int | str, ...]) -> None:
    """Masks of any shape that broadcasts are added to the scores; some hide single keys, or differ between heads."""
    setup = Setup(kind=kind, mask=True, rotary="half")
    ours, decoder = session(node_model(setup), threads=2), Decoder(setup)
    for count in (40, queries):
        total = decoder.tokens[0] + count
        sizes = [{"S": count, "T": total}.get(size, size) for size in shape]
        mask = np.array(np.random.default_rng(count).standard_normal(sizes), np.float32)
        if "T" in shape:
            mask[np.random.default_rng(1).random(mask.shape) < 0.3] = LOWEST
            mask[..., 0] = 0
        call = decoder.call(count, mask=mask)
        call.check(ours.run(None, call.feeds), exact=True)


@kinds
@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("zero", [False, True])
def test_rows_that_see_no_key(kind: str, queries: int, zero: bool) -> None:
    setup = Setup(kind=kind, mask=True, zero_hidden_rows=zero)
    ours, decoder = session(node_model(setup)), Decoder(setup)
    decoder.call(40)
    before = list(decoder.cache)
    call = decoder.call(queries, mask=np.zeros((2, 1, queries, 40 + queries), np.float32))
    assert (before[0] == call.feeds["past_key"]).all()
    (plain, *_) = ours.run(None, call.feeds)
    call.feeds["mask"][1, :, -1] = -np.inf
    y = ours.run(None, call.feeds)[0]
    assert (y[1, -1] == 0).all() if zero else np.isnan(y[1, -1]).all()
    others = np.ones(y.shape[:2], bool)
    others[1, -1] = False
    np.testing.assert_array_equal(y[0], plain[0])
    # Another kernel computes the sequence whose mask is not a plain range of tokens.
    np.testing.assert_allclose(y[others], plain[others], rtol=0, atol=0 if queries > 4 else 0.1)


@kinds
def test_masks_of_single_heads(kind: str) -> None:
    """One head, or one group of heads, sees fewer keys than the rest."""
    setup = Setup(kind=kind, mask=True)
    ours, decoder = session(node_model(setup)), Decoder(setup)
    decoder.call(40)
    for hidden in (slice(1, 2), slice(2, 4), slice(0, 4)):
        mask = np.zeros((2, 4, 1, decoder.tokens[0] + 1), np.float32)
        mask[:, hidden, :, :5] = LOWEST
        call = decoder.call(1, mask=mask)
        call.check(ours.run(None, call.feeds), exact=hidden != slice(0, 4))


@kinds
@pytest.mark.parametrize("by_heads", [{"query", "key", "value"}, {"query", "key"}, {"value"}])
def test_inputs_by_heads(kind: str, by_heads: set[str]) -> None:
    setup = Setup(kind=kind, by_heads=frozenset(by_heads), rotary="half")
    ours, decoder = session(node_model(setup)), Decoder(setup)
    for queries in (6, 1, 3):
        call = decoder.call(queries)
        call.check(ours.run(None, call.feeds))


@kinds
@pytest.mark.parametrize("lengths", [True, False])
def test_empty_inputs(kind: str, lengths: bool) -> None:
    """Batch 0, calls without tokens, and an empty cache."""
    setup = Setup(kind=kind, lengths=lengths, rotary="half")
    ours = session(node_model(setup))
    for batch in (0, 2):
        decoder = Decoder(setup, batch)
        for queries in (3, 0, 1):
            call = decoder.call(queries)
            call.check(ours.run(None, call.feeds))
    empty = Decoder(setup, 0).call(0)
    empty.check(ours.run(None, empty.feeds))
    if not lengths:  # lengths after a call are at least 1
        nothing = Decoder(setup, 2).call(0)
        nothing.check(ours.run(None, nothing.feeds))


@kinds
@pytest.mark.parametrize("threads", [1, 3])
def test_long_contexts_are_divided_among_threads(kind: str, threads: int) -> None:
    setup = Setup(2, 1, 16, kind)
    decoder = Decoder(setup, 1)
    ours = session(node_model(setup), threads=threads)
    decoder.call(8300)
    for queries in (1, 2):
        call = decoder.call(queries)
        call.check(ours.run(None, call.feeds))


@kinds
@pytest.mark.parametrize("queries", [1, 3])
def test_sequences_are_answered_alike_in_any_batch(kind: str, queries: int) -> None:
    """A sequence has the same bits alone and in a batch, for any masks and lengths of the other sequences.

    A gap in a sequence's mask selects another kernel for that sequence only.
    """
    setup = Setup(32, 32, 16, kind, mask=True)
    ours, decoder = session(node_model(setup), threads=2), Decoder(setup, 3)
    decoder.call(8300, added=[100, 8300, 8300])
    call = decoder.call(queries, mask=np.zeros((3, 1, 1, 8300 + queries), np.float32))
    plain = ours.run(None, call.feeds)[0]
    call.feeds["mask"][2, ..., 20:30] = LOWEST
    y = ours.run(None, call.feeds)[0]
    np.testing.assert_array_equal(y[:2], plain[:2])
    for b in range(3):
        feeds = {name: array[b : b + 1] for name, array in call.feeds.items()}
        feeds["mask"] = feeds["mask"][..., : max(8300, call.past[b] + queries)]
        np.testing.assert_array_equal(ours.run(None, feeds)[0][0], y[b])


def test_lengths_may_be_of_any_rank() -> None:
    """Lengths may be [B] or [B, 1], as exporters produce it by summing the attention mask."""
    setup = Setup()
    ours, decoder = session(node_model(setup)), Decoder(setup)
    for queries in (5, 1):
        call = decoder.call(queries)
        call.check(ours.run(None, call.feeds | {"lengths": call.feeds["lengths"][:, None]}))


def test_output_types_are_known_without_declaring_them() -> None:
    """ORT infers the output types of each kind of cache for the nodes that follow."""
    for kind in ("float", "codes", "codes_float"):
        setup = Setup(kind=kind)
        model = node_model(setup)
        names = list(model.graph.node[0].output)
        for name in names:
            model.graph.node.append(onnx.helper.make_node("Identity", [name], [f"{name}_copy"]))
        for output in model.graph.output:
            output.name += "_copy"
        call = Decoder(setup).call(3)
        call.check(session(model).run(None, call.feeds))


@examples(120)
@given(
    kind=st.sampled_from(["float", "codes", "codes_float"]),
    d_sub=st.sampled_from([1, 2, 4]),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    head_dim=st.sampled_from([16, 32, 48, 64]),
    packed=st.booleans(),
    rotary=st.sampled_from([None, "half", "interleaved"]),
    lengths=st.booleans(),
    causal=st.booleans(),
    batch=st.integers(1, 3),
    calls=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    room=st.integers(0, 80),
    threads=st.integers(1, 3),
    softcap=st.sampled_from([0.0, 0.8]),
    window=st.sampled_from([0, 1, 7, 30]),
    sink=st.booleans(),
    part=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    kind, d_sub, heads, head_dim, packed, rotary, lengths, causal, batch, calls, room, threads, softcap, window, sink,
    part, seed,
) -> None:  # fmt: skip
    kv_heads, group = heads
    setup = Setup(
        kv_heads * group, kv_heads, head_dim, kind, d_sub if kind != "float" else 1, packed, rotary, lengths, causal,
        softcap=softcap, local_window=window if causal else 0, head_sink=sink, rotary_dim=head_dim // 4 if part else 0,
    )  # fmt: skip
    decoder = Decoder(setup, batch, seed, room if lengths else 0, q_magnitude=0.3)
    ours = session(node_model(setup), threads=threads)
    for i, queries in enumerate(calls):
        added = None
        if i == 0 and lengths:
            added = np.random.default_rng(seed).integers(1, queries + 1, batch).tolist()
        call = decoder.call(queries, added)
        call.check(ours.run(None, call.feeds))


def test_prompts_on_a_past_that_does_not_fit_as_floats() -> None:
    """A long past is converted to float in parts of at most 64 MB: the heads run in several sets."""
    setup = Setup(2, 1, 16, "codes", lengths=False)
    ours, rng = session(node_model(setup)), np.random.default_rng(5)
    batch, tokens, queries = 9, 70000, 6
    values = np.zeros((batch, 1, tokens, 18), np.uint8)
    for cache in values[:, 0]:
        _native.append_values(cache, 0, rng.standard_normal((tokens, 16), dtype=np.float32))
    feeds = {
        "query": rng.standard_normal((batch, queries, 32), dtype=np.float32),
        "key": rng.standard_normal((batch, queries, 16), dtype=np.float32),
        "value": rng.standard_normal((batch, queries, 16), dtype=np.float32),
        "past_key": rng.integers(0, 256, (batch, 1, tokens, 8), np.uint8),
        "past_value": values,
    }
    together = ours.run(None, feeds)
    for i in range(batch):
        alone = ours.run(None, {name: array[i : i + 1] for name, array in feeds.items()})
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a[0], b[i])
