"""`ortolan bench nomad_attention`: the compared operators give equal answers; refused options."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import ortolan
from ortolan import _native, _testing
from ortolan.benchmarks import nomad_attention
from ortolan.benchmarks.nomad_attention import GROUP, HEAD_DIM, KV_HEADS, SCALE, cached_attention, group_query_attention
from ortolan.benchmarks.result import BenchOptions
from ortolan.errors import OrtolanError
from ortolan.graph_passes.passes.prompt import prune_prompt


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_both_sides_attend_to_the_same(dtype: type) -> None:
    rng = np.random.default_rng(0)
    context = 70
    caches = [rng.standard_normal((1, KV_HEADS, context, HEAD_DIM), dtype=np.float32) for _ in range(2)]
    if dtype is np.int8:
        caches = [np.clip(np.rint(cache * 30), -127, 127).astype(np.int8) for cache in caches]
    inputs = {
        "query": rng.standard_normal((1, 1, KV_HEADS * GROUP * HEAD_DIM), dtype=np.float32),
        "key": rng.standard_normal((1, 1, KV_HEADS * HEAD_DIM), dtype=np.float32),
        "value": rng.standard_normal((1, 1, KV_HEADS * HEAD_DIM), dtype=np.float32),
    }
    y = np.ones_like(inputs["query"])
    for call in group_query_attention(inputs, [caches], y):
        call()
    keys, values = (np.ascontiguousarray(cache[0] * np.float32(1 if dtype is np.float32 else 0.01)) for cache in caches)
    q = inputs["query"].reshape(KV_HEADS, GROUP, HEAD_DIM)
    expected = _testing.finish_decode(_testing.decode_attention(q, SCALE, keys, values))
    np.testing.assert_allclose(y.reshape(expected.shape), expected, atol=1e-4 if dtype is np.float32 else 0.02)
    # Both caches contain the new token.
    tolerance = 0 if dtype is np.float32 else 0.0051
    clipped = np.clip(inputs["key"].reshape(KV_HEADS, HEAD_DIM), *((-1.28, 1.27) if tolerance else (None, None)))
    np.testing.assert_allclose(keys[:, -1], clipped, atol=tolerance)


@pytest.mark.parametrize("d_sub", [1, 2])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_node_appends_and_attends(d_sub: int, threads: int) -> None:
    rng = np.random.default_rng(d_sub)
    context, tokens = 70, 55
    inputs = nomad_attention._inputs(rng)
    codebooks, keys, values = nomad_attention.compressed_caches(rng, context, d_sub)
    y = np.ones_like(inputs["query"])
    caches = [keys[None].copy(), values[None].copy()]
    for call in cached_attention(inputs, codebooks, [caches], tokens, threads, y):
        call()
    for head in range(KV_HEADS):
        key, value = (inputs[name].reshape(KV_HEADS, 1, HEAD_DIM)[head] for name in ("key", "value"))
        _native.append_keys(keys[head], tokens - 1, key, codebooks[head])
        _native.append_values(values[head], tokens - 1, value)
    np.testing.assert_array_equal(caches[0][0], keys)
    np.testing.assert_array_equal(caches[1][0], values)
    q = inputs["query"].reshape(KV_HEADS, GROUP, HEAD_DIM)
    expected = _testing.finish_decode(_testing.decode_attention(q, SCALE, keys, values, codebooks, tokens))
    np.testing.assert_allclose(y.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_behind_a_prompt(threads: int) -> None:
    rng = np.random.default_rng(0)
    inputs = nomad_attention._inputs(rng)
    prompt = prune_prompt(*rng.standard_normal((2, KV_HEADS, 600, HEAD_DIM), dtype=np.float32), 0.3, 0.5)
    y = np.ones_like(inputs["query"])
    nomad_attention.behind_prompt(inputs, prompt, y, threads)()
    keys, values = (
        np.concatenate([rows, inputs[name].reshape(KV_HEADS, 1, HEAD_DIM)], axis=1)
        for name, rows in (("key", prompt.keys), ("value", prompt.values))
    )
    q = inputs["query"].reshape(KV_HEADS, GROUP, HEAD_DIM)
    expected = _testing.finish_decode(_testing.decode_attention(q, SCALE, keys, values))
    np.testing.assert_allclose(y.reshape(expected.shape), expected, atol=2e-3)


def test_every_peer_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nomad_attention, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(nomad_attention, "QUICK_CONTEXTS", (40,))
    monkeypatch.setattr(nomad_attention, "ROUNDS", 1)
    monkeypatch.setattr(nomad_attention, "last_level_cache_bytes", lambda: 100)
    monkeypatch.setattr("ortolan.graph_passes.measure.timing._WARM_UP_SECONDS", 0.0)
    result = nomad_attention.run(BenchOptions((1, 2), quick=True))
    assert {(row.case["part"], row.peer) for row in result.rows} == {
        *(("step", peer) for peer in ("ort_f32", "ort_int8", "ort_int4", "ortolan_f32", "stream_read")),
        *(("scores", peer) for peer in ("ort_matmul_f32", "ortolan_f32", "stream_read")),
        *(("node", peer) for peer in ("ort_f32", "ort_int8", "ort_int4", "ortolan_step")),
        *(("prompt", peer) for peer in ("ort_f32", "ortolan_float", "ortolan_codes", "stream_read")),
    }
    assert {(row.case["part"], row.threads) for row in result.rows} == {
        ("step", 1), ("scores", 1), ("prompt", 1), ("node", 1), ("node", 2),
    }  # fmt: skip
    assert {row.case["context"] for row in result.rows} == {40}
    assert {row.case.get("d_sub") for row in result.rows} == {1, 2, None}
    pruned = {(row.case["keys"], row.case["values"]) for row in result.rows if row.case["part"] == "prompt"}
    assert pruned == set(nomad_attention.PRUNED)
    assert all(row.ours.min_ms > 0 and row.peer_time.min_ms > 0 for row in result.rows)
    assert '"context": 40' in result.to_json()


@pytest.mark.parametrize("option", [{"cases": ((1, 2, 3),)}, {"sparsity": (0.5,)}, {"layers": ("q",)}, {"batch": (1,)}])
def test_options_about_weights_are_refused(option: dict[str, tuple[object, ...]]) -> None:
    with pytest.raises(OrtolanError, match="NoMADAttention has no weights"):
        nomad_attention.run(BenchOptions(quick=True, **option))


def test_a_package_without_bare_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ortolan, "_testing", raising=False)
    monkeypatch.setitem(sys.modules, "ortolan._testing", None)
    with pytest.raises(OrtolanError, match=r"times bare kernels, .*ORTOLAN_TESTING=ON"):
        nomad_attention.run(BenchOptions(quick=True))
