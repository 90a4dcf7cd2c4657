"""Test NoMADAttention's ONNX function for nodes with a cache: it must give the results of the kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from ortolan import _native
from ortolan.graph_passes.operators.nomad_cache_function import nomad_cache_function

from ..pairwise import pairwise
from ..sampling import examples
from .attention import LOWEST
from .cache_function import Both, all_uses_of, uses_of
from .cached_attention import NOTHING, Decoder, Setup, declare_ranks, node_model
from .single_node import session

CALLS = (7, 1, 3, 18, 2, 1, 1)  # tokens per call; the fifth call ends one token before the end of a block
KINDS = ["float", "codes", "codes_float"]
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("rotary", [None, "half", "interleaved"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
def test_calls_one_after_another(kind: str, rotary: str | None, packed: bool, lengths: bool) -> None:
    setup = Setup(kind=kind, rotary=rotary, packed=packed, lengths=lengths, causal=not packed)
    both, decoder = Both(setup), Decoder(setup, 2)
    for queries in CALLS:
        both.check(decoder.call(queries))


@kinds
@pytest.mark.parametrize("rotary", [None, "half", "interleaved"])
def test_windows_sinks_and_a_part_of_the_head_turned(kind: str, rotary: str | None) -> None:
    setup = Setup(kind=kind, rotary=rotary, rotary_dim=8, local_window=6, head_sink=True)
    both, decoder = Both(setup), Decoder(setup, 2, room=64)
    for queries in CALLS:
        both.check(decoder.call(queries))


@pytest.mark.parametrize("kind", ["codes", "codes_float"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "d_sub"),
    [(4, 4, 16, 1), (3, 1, 16, 4), (6, 2, 48, 4), (4, 1, 64, 2), (2, 2, 80, 2), (2, 1, 128, 1), (1, 1, 80, 4)],
)
def test_codes(kind: str, heads: int, kv_heads: int, head_dim: int, d_sub: int) -> None:
    setup = Setup(heads, kv_heads, head_dim, kind, d_sub)
    both, decoder = Both(setup), Decoder(setup, room=40)
    for queries in (*CALLS, 35):
        both.check(decoder.call(queries))


@kinds
@pytest.mark.parametrize("by_heads", [frozenset(), frozenset(("query", "key")), frozenset(("query", "key", "value"))])
def test_a_function_for_both_layouts(kind: str, by_heads: frozenset[str]) -> None:
    setup = Setup(kind=kind, by_heads=by_heads)
    uses = dataclasses.replace(uses_of(setup), by_heads=frozenset(), mixed=frozenset(("query", "key", "value")))
    both, decoder = Both(setup, uses), Decoder(setup, 2)
    for queries in CALLS:
        both.check(decoder.call(queries))


@pytest.mark.parametrize("by_heads", [frozenset(), frozenset(("query", "key", "value"))])
def test_a_function_for_nodes_without_a_cache_too(by_heads: frozenset[str]) -> None:
    setup = Setup(kind="float", by_heads=by_heads, lengths=False)
    uses = dataclasses.replace(uses_of(setup), uncached=True)
    both, decoder = Both(setup, uses), Decoder(setup, 2)
    for queries in CALLS:
        both.check(decoder.call(queries))


@kinds
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("room", [0, 100])
def test_sequences_of_different_lengths(kind: str, causal: bool, room: int) -> None:
    setup = Setup(kind=kind, causal=causal, rotary="half")
    both, decoder = Both(setup), Decoder(setup, 5, room=room)
    both.check(decoder.call(40, (40, 1, 17, 31, 32)))
    for queries in (1, 1, 1):
        both.check(decoder.call(queries))


@kinds
@pytest.mark.parametrize("by_heads", [{"query", "key", "value"}, {"query", "key"}, {"value"}])
def test_inputs_by_heads(kind: str, by_heads: set[str]) -> None:
    setup = Setup(kind=kind, by_heads=frozenset(by_heads), rotary="interleaved")
    both, decoder = Both(setup), Decoder(setup)
    for queries in (6, 1, 3):
        both.check(decoder.call(queries))


@pytest.mark.parametrize(
    ("kind", "queries", "shape"),
    pairwise(KINDS, [1, 3, 6], [((2, 4, "S", "T"),), ((2, 1, "S", 1),), (("S", "T"),), (("T",),), ((),)]),
)
def test_masks(kind: str, queries: int, shape: tuple[int | str, ...]) -> None:
    setup = Setup(kind=kind, mask=True)
    both, decoder = Both(setup), Decoder(setup)
    for count in (40, queries):
        total = decoder.tokens[0] + count
        sizes = [{"S": count, "T": total}.get(size, size) for size in shape]
        mask = np.array(np.random.default_rng(count).standard_normal(sizes), np.float32)
        if "T" in shape:
            mask[np.random.default_rng(1).random(mask.shape) < 0.3] = LOWEST
            mask[..., 0] = 0
        both.check(decoder.call(count, mask=mask), exact=True)


@kinds
@pytest.mark.parametrize("hidden", [LOWEST, -np.inf])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("prompt", [3, 6])
def test_rows_that_see_no_key(kind: str, hidden: float, zero: bool, prompt: int) -> None:
    """Left padding gives NaN, zeros or the mean of the values, equally in kernel and function."""
    setup = Setup(kind=kind, mask=True, zero_hidden_rows=zero)
    both, decoder = Both(setup), Decoder(setup)
    mask = np.zeros((2, 1, 1, prompt), np.float32)
    mask[1, ..., :2] = hidden
    call = decoder.call(prompt, mask=mask)
    ours, body = (one.run(None, call.feeds)[0] for one in (both.kernel, both.body))
    np.testing.assert_allclose(ours[1], body[1], rtol=1e-5, atol=1e-5)
    plain = both.kernel.run(None, call.feeds | {"mask": np.zeros_like(mask)})[0]
    np.testing.assert_array_equal(ours[0], plain[0])
    if hidden == -np.inf:
        assert (ours[1, :2] == 0).all() if zero else np.isnan(ours[1, :2]).all()
    assert np.isfinite(ours[0]).all() and np.isfinite(ours[1, 2:]).all()


@kinds
@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("uses", [uses_of, all_uses_of])
def test_empty_inputs(kind: str, lengths: bool, uses) -> None:
    """Batch 0, calls without tokens, and an empty cache."""
    setup = Setup(kind=kind, lengths=lengths, rotary="half", mask=True)
    both = Both(setup, uses(setup))
    for batch in (0, 2) if lengths or uses is uses_of else (2,):
        decoder = Decoder(setup, batch)
        for queries in (3, 0, 1):
            both.check(decoder.call(queries, mask=NOTHING))
    if not lengths:
        for batch in (0, 2):
            both.check(Decoder(setup, batch).call(0, mask=NOTHING))


@kinds
@pytest.mark.parametrize("opset", [13, 17, 18, 21, 23])
def test_every_opset_and_evaluator(kind: str, opset: int) -> None:
    """The function for this node alone, and the function for all kinds of nodes, run in every opset."""
    for rotary, packed in ((None, True), ("interleaved", False)):
        setup = Setup(kind=kind, rotary=rotary, packed=packed, head_dim=48, d_sub=2 if kind != "float" else 1)
        for uses in (uses_of(setup), all_uses_of(setup)):
            both, decoder = Both(setup, uses, opset), Decoder(setup)
            for queries in (34, 2):
                call = decoder.call(queries)
                both.check(call)
                if opset in (13, 23):
                    call.check(ReferenceEvaluator(both.model).run(None, call.feeds), exact=True)


@kinds
def test_nodes_of_one_function(kind: str) -> None:
    """One function serves nodes with different heads, causality, scale, lengths and head sizes."""
    base = Setup(kind=kind)
    for change in (
        {"heads": 2, "causal": False},
        {"scale": 0.3, "lengths": False},
        {"zero_hidden_rows": True},
        {"head_dim": 64, "d_sub": 1 if kind == "float" else 4},
    ):
        setup = dataclasses.replace(base, **change)
        both, decoder = Both(setup, all_uses_of(setup)), Decoder(setup, 3)
        both.check(decoder.call(9, (9, 4, 1) if setup.lengths else None))
        both.check(decoder.call(1))


@kinds
def test_models_are_valid_and_have_types_and_ranks(kind: str) -> None:
    setup = Setup(kind=kind, rotary="half")
    model = Both(setup).model
    call = Decoder(setup).call(3)
    declare_ranks(model, call.feeds)
    for value in model.graph.input:
        if value.name in ("query", "key", "value"):
            value.type.tensor_type.shape.dim[2].dim_value = call.feeds[value.name].shape[2]
    onnx.checker.check_model(model, full_check=True)
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    found = [(output.type, len(output.shape)) for output in session(model, library=False).get_outputs()]
    cache = ["tensor(uint8)" if dtype == np.uint8 else "tensor(float)" for dtype in setup.dtypes]
    assert found == [("tensor(float)", 3), (cache[0], 4), (cache[1], 4)]
    assert [output.type for output in session(model).get_outputs()] == ["tensor(float)", *cache]
    shape = session(model).get_outputs()[0].shape
    assert shape == ["query0", "query1", 128]


def cached_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cache of values [tokens, D] written by the function, and the one written by the native appender."""
    tokens, head_dim = values.shape
    setup = Setup(1, 1, head_dim, "codes", lengths=False)
    model = node_model(setup, [ir.to_proto(nomad_cache_function(17, uses_of(setup)))])
    body = session(model, library=False)
    feeds = {name: values[None] for name in ("query", "key", "value")}
    past = dict(zip(("past_key", "past_value"), setup.empty_cache(1), strict=True))
    expected = np.zeros((tokens, head_dim + 2), np.uint8)
    _native.append_values(expected, 0, values)
    return body.run(None, feeds | past)[2][0, 0], expected


def test_scales_of_every_magnitude() -> None:
    """Scales from the smallest denormal to the largest float, at bfloat16 values and near them."""
    rng = np.random.default_rng(0)
    exponents = np.arange(-149, 128)
    scales = np.ldexp(1.0, exponents)[:, None] * np.array([1, 1 + 2**-7, 1 + 2**-8, 2 - 2**-7, 2 - 2**-20])
    most = np.minimum(scales * 127, np.finfo(np.float32).max).astype(np.float32).ravel()
    most = np.concatenate([most, np.nextafter(most, np.float32(0)), np.nextafter(most[:-9], np.float32(3e38)), [0]])
    values = (rng.uniform(-1, 1, (len(most), 16)) * most[:, None]).astype(np.float32)
    values[:, 5] = most
    np.testing.assert_array_equal(*cached_values(values))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(bad: float) -> None:
    values = np.random.default_rng(0).standard_normal((40, 32), dtype=np.float32)
    values[[2, 35], [1, 7]] = bad
    np.testing.assert_array_equal(*cached_values(values))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -3e38])
@pytest.mark.parametrize("d_sub", [1, 2, 4])
def test_keys_that_float32_cannot_measure(bad: float, d_sub: int) -> None:
    setup = Setup(kind="codes", d_sub=d_sub)
    both, decoder = Both(setup), Decoder(setup)
    call = decoder.call(40)
    call.feeds["key"][:, [3, 39], [5, 40]] = bad
    ours, body = (one.run(None, call.feeds)[1] for one in (both.kernel, both.body))
    np.testing.assert_array_equal(ours, body)
    assert (ours != call.present[0]).any()


def test_of_equal_distances_the_first() -> None:
    """If centroids have equal distance to a key, the code is that of the first."""
    setup = Setup(1, 1, 16, "codes", lengths=False)
    books = np.full((1, 16, 16, 1), 7, np.float32)
    books[0, :, :5, 0] = [5, 1, -1, 1, -1]
    model = node_model(setup, [ir.to_proto(nomad_cache_function(17, uses_of(setup)))], {"codebooks": books})
    feeds: dict[str, np.ndarray] = {name: np.zeros((1, 2, 16), np.float32) for name in ("query", "key", "value")}
    feeds["key"][0, 1] = -1
    feeds |= dict(zip(("past_key", "past_value"), setup.empty_cache(1), strict=True))
    for library in (True, False):
        present = session(model, library=library).run(None, feeds)[1]
        np.testing.assert_array_equal(present[0, 0], [[0x11] * 8, [0x22] * 8])


@examples(25)
@given(
    kind=st.sampled_from(["codes", "codes_float"]),
    size=st.sampled_from([(16, 1), (16, 4), (32, 2), (48, 4)]),
    room=st.integers(0, 100),
    share=st.floats(0, 1),
    queries=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bytes_of_the_past(kind, size, room, share, queries, seed) -> None:
    """Any bytes are valid codes and int8 values, and bytes after a sequence's tokens do not matter."""
    setup = Setup(2, 1, size[0], kind, size[1])
    rng = np.random.default_rng(seed)
    past = rng.integers(0, int(share * room) + 1, 2)
    cache = [rng.integers(0, 256, array.shape).astype(array.dtype) for array in setup.empty_cache(2, room)]
    if not setup.int8_values:
        cache[1] = rng.standard_normal(cache[1].shape, dtype=np.float32)
    else:  # random bytes would give NaN and Inf as scales
        for b in range(2):
            tokens = int(past[b])
            values = rng.standard_normal((tokens, size[0]), dtype=np.float32)
            _native.append_values(cache[1][b, 0], 0, values)
    feeds = {
        "query": 0.1 * rng.standard_normal((2, queries, 2 * size[0]), dtype=np.float32),
        "key": rng.standard_normal((2, queries, size[0]), dtype=np.float32),
        "value": rng.standard_normal((2, queries, size[0]), dtype=np.float32),
        "past_key": cache[0],
        "past_value": cache[1],
        "lengths": (past + queries - 1).astype(np.int32),
    }
    model = node_model(setup, [ir.to_proto(nomad_cache_function(17, uses_of(setup)))])
    ours, body = (session(model, library=library).run(None, feeds) for library in (True, False))
    for a, b in zip(ours[1:], body[1:], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(ours[0], body[0], rtol=0, atol=0.05)


@examples(25)
@given(
    kind=st.sampled_from(["float", "codes", "codes_float"]),
    d_sub=st.sampled_from([1, 2, 4]),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    head_dim=st.sampled_from([16, 32, 48, 64]),
    packed=st.booleans(),
    rotary=st.sampled_from([None, "half", "interleaved"]),
    lengths=st.booleans(),
    causal=st.booleans(),
    wide=st.booleans(),
    batch=st.integers(1, 3),
    calls=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    room=st.integers(0, 80),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    kind, d_sub, heads, head_dim, packed, rotary, lengths, causal, wide, batch, calls, room, seed
) -> None:
    kv_heads, group = heads
    setup = Setup(
        kv_heads * group, kv_heads, head_dim, kind, d_sub if kind != "float" else 1, packed, rotary, lengths, causal
    )
    decoder = Decoder(setup, batch, seed, room if lengths else 0, q_magnitude=0.3)
    both = Both(setup, all_uses_of(setup) if wide else None)
    for i, queries in enumerate(calls):
        added = np.random.default_rng(seed).integers(1, queries + 1, batch).tolist() if i == 0 and lengths else None
        both.check(decoder.call(queries, added))


def test_without_graph_optimizations() -> None:
    """The function runs without ONNX Runtime's optimizations."""
    setup = Setup(kind="codes", rotary="half")
    model = node_model(setup, [ir.to_proto(nomad_cache_function(17, uses_of(setup)))])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    body = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    decoder = Decoder(setup)
    for queries in (40, 1):
        call = decoder.call(queries)
        call.check(body.run(None, call.feeds), exact=True)
