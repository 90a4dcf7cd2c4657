"""Test every kernel of NoMADAttention against NumPy, within the bounds of ops/attention/attention.h."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _testing

from ..sampling import examples
from .attention import LOWEST, PRECISION, Floats, assert_attention_close, attention, runnable_kernels

KERNELS = runnable_kernels()
all_kernels = pytest.mark.parametrize("kernel", KERNELS)


def random(rng: np.random.Generator, heads: int, queries: int, keys: int, head_dim: int) -> tuple[Floats, ...]:
    return tuple(
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((heads, queries, head_dim), (keys, head_dim), (keys, head_dim))
    )


def check(
    kernel: str,
    q: Floats,
    k: Floats,
    v: Floats,
    mask: Floats | None = None,
    causal: bool = False,
    softcap: float = 0,
    window: int = 0,
    sinks: Floats | None = None,
) -> None:
    scale = float(q.shape[-1] ** -0.5)
    y = _testing.nomad_attention(
        q, k, v, scale, mask, causal, softcap=softcap, window=window, sinks=sinks, kernel=kernel
    )
    assert_attention_close(y, q, k[None], v[None], scale, mask, causal, PRECISION[kernel], softcap, window, sinks)


@all_kernels
@pytest.mark.parametrize("head_dim", [1, 3, 8, 16, 17, 32, 33, 48, 64, 80, 96, 128, 160])
def test_head_sizes(kernel: str, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    for queries, keys in ((1, 1), (5, 9), (33, 70)):
        check(kernel, *random(rng, 1, queries, keys, head_dim))


@all_kernels
@pytest.mark.parametrize("queries", [1, 2, 15, 16, 17, 31, 32, 40, 48, 63, 64, 65, 127, 128, 129, 200])
def test_row_blocks(kernel: str, queries: int) -> None:
    rng = np.random.default_rng(queries)
    check(kernel, *random(rng, 1, queries, 20, 24))


@all_kernels
@pytest.mark.parametrize("keys", [1, 2, 7, 63, 64, 65, 127, 128, 129, 300])
def test_key_blocks(kernel: str, keys: int) -> None:
    rng = np.random.default_rng(keys)
    check(kernel, *random(rng, 2, 11, keys, 24))


MASKS = {"key": (1, 1, 0), "query": (1, 0, 1), "all": (0, 0, 0), "head": (0, 1, 0), "number": (1, 1, 1)}


@all_kernels
@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_masks(kernel: str, form: str, causal: bool) -> None:
    rng = np.random.default_rng(0)
    for heads, queries, keys in ((1, 20, 20), (3, 37, 90), (2, 70, 130)):
        q, k, v = random(rng, heads, queries, keys, 16)
        full = (heads, queries, keys)
        shape = [1 if one else size for one, size in zip(MASKS[form], full, strict=True)]
        mask = rng.standard_normal(shape, dtype=np.float32)
        check(kernel, q, k, v, mask, causal)
        if form != "number":
            for hidden in (LOWEST, -np.inf, np.float32(-10000)):
                # Key 0 stays visible, so that no row is fully masked.
                masked = np.where(rng.random(shape) < 0.4, hidden, mask).astype(np.float32)
                masked[..., 0] = 0
                check(kernel, q, k, v, masked, causal)


@examples(60)
@given(
    heads=st.integers(1, 4),
    queries=st.integers(1, 140),
    more_keys=st.integers(0, 150),
    head_dim=st.integers(1, 70),
    mask=st.sampled_from([None, *MASKS]),
    causal=st.booleans(),
    magnitude=st.sampled_from([1e-20, 1.0, 3.0]),
    softcap=st.sampled_from([0, 0.5, 20.0]),
    window=st.sampled_from([0, 0, 1, 5, 64, 150]),
    sink=st.sampled_from([None, -3.0, 0.0, 40.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(heads, queries, more_keys, head_dim, mask, causal, magnitude, softcap, window, sink, seed) -> None:
    rng = np.random.default_rng(seed)
    keys = queries + more_keys
    q, k, v = random(rng, heads, queries, keys, head_dim)
    values = None
    if mask is not None:
        shape = [1 if one else size for one, size in zip(MASKS[mask], (heads, queries, keys), strict=True)]
        values = rng.standard_normal(shape, dtype=np.float32)
    sinks = None if sink is None else (sink + np.arange(heads)).astype(np.float32)
    for kernel in KERNELS:
        check(kernel, (q * magnitude).astype(np.float32), k, v, values, causal, softcap, window * causal, sinks)


@all_kernels
def test_fewer_keys_than_queries(kernel: str) -> None:
    check(kernel, *random(np.random.default_rng(1), 2, 50, 3, 20))


@all_kernels
@pytest.mark.parametrize("keys", [5, 150])
@pytest.mark.parametrize("by_row", [False, True])
def test_rows_that_see_nothing(kernel: str, keys: int, by_row: bool) -> None:
    """Fully masked rows give the mean if all scores are the lowest or largest float, and NaN if all are -Inf.

    ONNX Softmax does the same.
    """
    q, k, v = random(np.random.default_rng(2), 1, 20, keys, 24)
    mask = np.zeros((1, 20 if by_row else 1, keys), np.float32)
    tolerance = 2.0**-7 if PRECISION[kernel] == 16 else 1e-5
    for absorbing in (-LOWEST, LOWEST):
        mask[:, -1] = absorbing
        y = _testing.nomad_attention(q, k, v, 0.5, mask, kernel=kernel)
        np.testing.assert_allclose(y[0, -1], v.astype(np.float64).mean(0), atol=tolerance)
    mask[:, -1, : keys // 2] = -np.inf
    y = _testing.nomad_attention(q, k, v, 0.5, mask, kernel=kernel)
    np.testing.assert_allclose(y[0, -1], v[keys // 2 :].astype(np.float64).mean(0), atol=tolerance)
    mask[:, -1] = -np.inf
    y = _testing.nomad_attention(q, k, v, 0.5, mask, kernel=kernel)
    assert np.isnan(y[0, -1]).all() and (np.isfinite(y[0, :-1]).all() or not by_row)
    zeros = _testing.nomad_attention(q, k, v, 0.5, mask, zero_hidden_rows=True, kernel=kernel)
    np.testing.assert_array_equal(zeros, np.nan_to_num(y))


@all_kernels
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.uint32(0x7F800001).view(np.float32), np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "mask"])
@pytest.mark.parametrize("keys", [6, 100])
def test_nan_and_infinity_spread_as_by_the_formula(kernel: str, where: str, bad: float, keys: int) -> None:
    rng = np.random.default_rng(3)
    for at in (0, keys - 1):
        q, k, v = random(rng, 2, 18, keys, 20)
        mask = rng.standard_normal((2, 18, keys), dtype=np.float32)
        {"q": q[0, 7], "k": k[at], "v": v[at], "mask": mask[1, 3, at : at + 1]}[where][0] = bad
        y = _testing.nomad_attention(q, k, v, 0.25, mask, kernel=kernel)
        expected = attention(q, k[None], v[None], 0.25, mask)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
        same = ~np.isnan(expected)
        np.testing.assert_allclose(y[same], expected[same], atol=0.1 if PRECISION[kernel] == 16 else 1e-5)


@all_kernels
def test_hidden_keys_weigh_nothing(kernel: str) -> None:
    """Finite keys and values at masked positions do not change any bit."""
    q, k, v = random(np.random.default_rng(4), 1, 40, 90, 24)
    mask = np.zeros((1, 1, 90), np.float32)
    mask[..., 50:] = LOWEST
    y = _testing.nomad_attention(q, k, v, 0.2, mask, kernel=kernel)
    k[50:], v[50:] = 1e3, 3e38
    np.testing.assert_array_equal(_testing.nomad_attention(q, k, v, 0.2, mask, kernel=kernel), y)
    np.testing.assert_array_equal(_testing.nomad_attention(q, k[:50], v[:50], 0.2, kernel=kernel), y)


@all_kernels
def test_hidden_scores_that_overflow(kernel: str) -> None:
    """Keys masked by causality do not matter: the first query sees key 0, but not the +Inf in the next key."""
    q, k = np.full((1, 70, 8), 1e20, np.float32), np.full((70, 8), 1e20, np.float32)
    k[0] = 0
    v = np.round(np.random.default_rng(7).standard_normal((70, 8)) * 8).astype(np.float32)
    y = _testing.nomad_attention(q, k, v, 1.0, causal=True, kernel=kernel)
    np.testing.assert_array_equal(y[0, 0], v[0])
    assert np.isnan(y[0, 1:]).all()


@all_kernels
@pytest.mark.parametrize("form", [None, *MASKS])
def test_softcap(kernel: str, form: str | None) -> None:
    """Scores are capped before the mask is added, and keys that the mask hides stay hidden."""
    rng = np.random.default_rng(8)
    for heads, queries, keys, causal in ((1, 3, 5, True), (2, 37, 150, False), (2, 70, 130, True)):
        q, k, v = random(rng, heads, queries, keys, 16)
        mask = None
        if form is not None:
            shape = [1 if one else size for one, size in zip(MASKS[form], (heads, queries, keys), strict=True)]
            mask = rng.standard_normal(shape, dtype=np.float32)
            if form != "number":
                mask[..., keys // 2 :] = -np.inf
        check(kernel, q, k, v, mask, causal, softcap=1.5)
        y = _testing.nomad_attention(q * 1e19, k * 1e18, v, 1.0, mask, causal, softcap=1.5, kernel=kernel)
        assert np.isfinite(y).all(), "a score of Inf is capped"


@all_kernels
def test_one_key_gives_its_value(kernel: str) -> None:
    q, k, v = random(np.random.default_rng(5), 3, 20, 1, 40)
    v = v.astype(np.float16).astype(np.float32) if PRECISION[kernel] == 32 else np.round(v)
    y = _testing.nomad_attention(q, k, v, 1.0, kernel=kernel)
    np.testing.assert_array_equal(y, np.broadcast_to(v[0], y.shape))


@all_kernels
def test_large_scores(kernel: str) -> None:
    """If scores differ by more than exp's range, the largest score has all the weight."""
    q = np.full((1, 4, 16), 1e8, np.float32)
    k = np.zeros((100, 16), np.float32)
    k[70] = 1e8
    v = np.round(np.random.default_rng(6).standard_normal((100, 16)) * 8).astype(np.float32)
    y = _testing.nomad_attention(q, k, v, 1.0, kernel=kernel)
    np.testing.assert_array_equal(y, np.broadcast_to(v[70], y.shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": np.ones((4, 3), np.float32)}, "q must be"),
        ({"v": np.ones((3, 2), np.float32)}, "q must be"),
        ({"mask": np.ones((1, 1, 3), np.float32)}, "mask must broadcast to"),
        ({"mask": np.ones((4,), np.float32)}, "mask must broadcast to"),
        ({"q": np.ones((1, 9, 2), np.float32), "causal": True}, "causal needs"),
        ({"kernel": "Avx1024"}, "no kernel is called"),
    ],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    given = {"q": np.ones((1, 3, 2)), "k": np.ones((4, 2)), "v": np.ones((4, 2)), "scale": 1.0}
    _testing.nomad_attention(**given)
    with pytest.raises(ValueError, match=message):
        _testing.nomad_attention(**given | change)


@all_kernels
@pytest.mark.parametrize("window", [1, 30, 64, 100, 128, 200])
def test_windows(kernel: str, window: int) -> None:
    """A row has the bits of a call with that row alone, although its block begins with keys that it does not see."""
    rng = np.random.default_rng(window)
    q, k, v = random(rng, 2, 150, 400, 32)
    sinks = rng.standard_normal(2, dtype=np.float32)

    def run(rows: slice, keys: int, **more: object) -> Floats:
        given = q[:, rows], k[:keys], v[:keys], 0.2, None, True
        return _testing.nomad_attention(*given, window=window, sinks=sinks, kernel=kernel, **more)

    check(kernel, q, k, v, None, True, 0, window, sinks)
    whole = run(slice(None), 400)
    for row in (0, 63, 149):
        np.testing.assert_array_equal(run(slice(row, row + 1), 251 + row)[:, 0], whole[:, row])
    # The value of a key that no query sees does not matter.
    v[: 251 - window] = np.inf
    k[: 251 - window] = np.nan
    block = 64 if PRECISION[kernel] == 32 else 128
    if 251 - window >= block:
        v[(251 - window) // block * block : 251 - window] = 0
        k[(251 - window) // block * block : 251 - window] = 0
        np.testing.assert_array_equal(run(slice(None), 400), whole)


@all_kernels
def test_a_sink_takes_all_where_nothing_is_seen(kernel: str) -> None:
    q, k, v = random(np.random.default_rng(3), 2, 20, 30, 16)
    mask = np.full((1, 20, 30), -np.inf, np.float32)
    y = _testing.nomad_attention(q, k, v, 0.5, mask, sinks=np.zeros(2, np.float32), kernel=kernel)
    np.testing.assert_array_equal(y, np.zeros_like(q))
    # A sink of -Inf is no sink.
    none = np.full(2, -np.inf, np.float32)
    np.testing.assert_array_equal(
        _testing.nomad_attention(q, k, v, 0.5, sinks=none, kernel=kernel),
        _testing.nomad_attention(q, k, v, 0.5, kernel=kernel),
    )
