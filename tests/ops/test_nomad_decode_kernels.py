"""Test every kernel of attention for one token against NumPy, within the bounds of ops/attention/decode.h."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan import _native, _testing

from ..sampling import examples
from .attention import attention
from .decode_attention import Case, make_case, runnable_kernels

KERNELS = runnable_kernels()
all_kernels = pytest.mark.parametrize("kernel", KERNELS)
# (d_sub of the key codes, or None for float32 keys; True for int8 values)
KINDS = [(1, True), (2, True), (4, True), (1, False), (None, True), (None, False)]
all_kinds = pytest.mark.parametrize(("d_sub", "int8_values"), KINDS)


def check(case: Case, kernel: str, begin: int = 0, end: int | None = None) -> None:
    y = _testing.finish_decode(case.partial(kernel, begin, end))[0]
    expected, bound = case.expected(begin, end)
    error = np.abs(y - expected)
    assert np.all(error <= bound), f"error {error.max()}, largest over bound {np.max(error - bound)}"
    exact = case.exact_scores()[:, begin:end]
    allowed = np.broadcast_to(case.score_error(), case.exact_scores().shape)[:, begin:end]
    assert np.all(np.abs(case.scores(kernel, begin, end) - exact) <= allowed)


@all_kernels
@all_kinds
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 256])
def test_head_sizes(kernel: str, d_sub: int | None, int8_values: bool, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    for tokens in (3, 150):
        check(make_case(rng, 4, tokens, head_dim, d_sub, int8_values, 0.1), kernel)


@all_kernels
@all_kinds
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 1000])
def test_tokens(kernel: str, d_sub: int | None, int8_values: bool, tokens: int) -> None:
    check(make_case(np.random.default_rng(tokens), 3, tokens, 64, d_sub, int8_values, 0.1), kernel)


@all_kernels
@all_kinds
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 19])
def test_heads_of_a_group(kernel: str, d_sub: int | None, int8_values: bool, heads: int) -> None:
    check(make_case(np.random.default_rng(heads), heads, 170, 32, d_sub, int8_values, 0.1), kernel)


@all_kernels
@pytest.mark.parametrize("head_dim", [384, 1024])
def test_large_heads(kernel: str, head_dim: int) -> None:
    """Heads with more sub-quantizers than 16-bit sums can hold; all table entries have the largest value."""
    case = make_case(np.random.default_rng(0), 2, 70, head_dim, 1, True, 0.01)
    check(case, kernel)
    assert case.codebook is not None
    case.q[:] = 1
    codebook = np.zeros_like(case.codebook)
    codebook[:, 5] = 1
    keys = np.ones((70, head_dim), np.float32)
    keys[::3] = 0
    _native.append_keys(case.key_cache, 0, keys, codebook)
    case.codebook, case.keys = codebook, keys
    expected = case.exact_scores()
    np.testing.assert_allclose(case.scores(kernel), expected, rtol=1e-5)


@all_kernels
@pytest.mark.parametrize("tokens", [2047, 2048, 2049, 5000])
def test_chunks(kernel: str, tokens: int) -> None:
    """More tokens than a kernel computes scores for at a time."""
    for kind in ((1, True), (None, False)):
        case = make_case(np.random.default_rng(tokens), 2, tokens, 16, *kind, 0.2)
        check(case, kernel)
        # The largest score comes last in the first order, and first in the second.
        for order in (np.argsort(case.exact_scores()[0]), np.argsort(-case.exact_scores()[0])):
            keys, values = case.keys[order], np.random.default_rng(1).standard_normal((tokens, 16), dtype=np.float32)
            other = Case(case.q[:1] * 10, case.scale, keys, values, keys, values)
            check(other, kernel)


@all_kernels
@pytest.mark.parametrize(("d_sub", "int8_values"), [(None, False), (None, True), (1, True)])
@pytest.mark.parametrize("tokens", [1, 37, 2100])
def test_softcap(kernel: str, d_sub: int | None, int8_values: bool, tokens: int) -> None:
    case = make_case(np.random.default_rng(tokens), 3, tokens, 32, d_sub, int8_values, 0.2 if d_sub else 3.0)
    case.softcap = 0.7
    check(case, kernel)
    case.q *= 1e30
    if d_sub is None:
        assert np.isfinite(case.partial(kernel)[2]).all(), "a score of Inf is capped"


@all_kernels
@pytest.mark.parametrize("d_sub", [1, 2, 4])
def test_scores_are_sums_of_the_tables(kernel: str, d_sub: int) -> None:
    """Scores equal the sums of the quantized tables, within much less than the documented error bound."""
    rng = np.random.default_rng(d_sub)
    for heads, tokens, head_dim, magnitude in ((4, 70, 128, 30.0), (1, 200, 80, 1.0), (5, 33, 16, 1e-3)):
        case = make_case(rng, heads, tokens, head_dim, d_sub, True, magnitude)
        expected, tolerance = case.table_scores()
        assert np.all(np.abs(case.scores(kernel) - expected) <= tolerance)
        np.testing.assert_array_equal(case.scores(kernel, 5, 31), case.scores(kernel)[:, 5:31])


@examples(80)
@given(
    heads=st.integers(1, 6),
    tokens=st.integers(1, 400),
    head_dim=st.sampled_from([16, 48, 64, 80]),
    kind=st.sampled_from(KINDS),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_parts_add_up(heads, tokens, head_dim, kind, cuts, seed) -> None:
    """Results of any split of the tokens, including empty parts, can be merged; all kernels agree."""
    case = make_case(np.random.default_rng(seed), heads, tokens, head_dim, *kind, 0.1)
    edges = [0, *sorted(int(cut * tokens) for cut in cuts), tokens]
    expected, bound = case.expected()
    for kernel in KERNELS:
        parts = [case.partial(kernel, *edges[i : i + 2]) for i in range(len(edges) - 1)]
        merged = parts[0]
        for part in parts[1:]:
            merged = _testing.merge_decode(merged, part)
        y = _testing.finish_decode(merged)[0]
        assert np.all(np.abs(y - expected) <= bound)


@all_kernels
def test_ranges(kernel: str) -> None:
    """Ranges may begin and end inside a block; values outside the range do not matter."""
    case = make_case(np.random.default_rng(7), 4, 300, 32, 1, True, 0.1)
    for begin, end in ((0, 1), (5, 9), (31, 33), (40, 300), (250, 299), (290, 300), (288, 300), (1, 289)):
        check(case, kernel, begin, end)
        values = case.values.copy()
        values[:begin] = values[end:] = np.nan
        spoiled = np.zeros_like(case.value_cache)
        _native.append_values(spoiled, 0, values)
        other = Case(case.q, case.scale, case.keys, case.values, case.key_cache, spoiled, case.codebook, case.codes)
        check(other, kernel, begin, end)
        rows = Case(case.q, case.scale, case.keys, values, case.key_cache, values, case.codebook, case.codes)
        check(rows, kernel, begin, end)


@all_kernels
def test_no_tokens(kernel: str) -> None:
    case = make_case(np.random.default_rng(8), 2, 40, 32)
    most, total, y = case.partial(kernel, 7, 7)
    assert (most == np.finfo(np.float32).min).all() and (total == 0).all() and (y == 0).all()
    whole = case.partial(kernel)
    for merged in (_testing.merge_decode(whole, (most, total, y)), _testing.merge_decode((most, total, y), whole)):
        np.testing.assert_array_equal(merged[2], whole[2])


@all_kernels
def test_exact_window_and_codes_merge(kernel: str) -> None:
    """Float keys for the first and last tokens, and codes for the rest, can be merged; values come from one cache."""
    rng = np.random.default_rng(9)
    case = make_case(rng, 4, 200, 64, 1, True, 0.1)
    exact = rng.standard_normal(case.keys.shape, dtype=np.float32)
    merged = case.partial(kernel, 4, 150)
    for begin, end in ((0, 4), (150, 200)):
        part = _testing.decode_attention(
            case.q[None], case.scale, exact[None, begin:end], case.value_cache[None], None, 200, begin, end, begin,
            kernel=kernel,
        )  # fmt: skip
        merged = _testing.merge_decode(merged, part)
    mixed = Case(case.q, case.scale, case.keys.copy(), case.values, case.keys, case.value_cache)
    mixed.keys[:4], mixed.keys[150:] = exact[:4], exact[150:]
    expected = attention(mixed.q[:, None], mixed.keys[None], mixed.values[None], mixed.scale)[:, 0]
    _, bound = case.expected()
    assert np.all(np.abs(_testing.finish_decode(merged)[0] - expected) <= 2 * bound)


@all_kernels
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_queries_that_are_not_finite(kernel: str, bad: float) -> None:
    """A non-finite score makes its head NaN; other heads keep their bits."""
    case = make_case(np.random.default_rng(10), 5, 100, 32, 1, True, 0.1)
    case.scale = 10.0
    good = case.partial(kernel)
    case.q[2, 7] = bad
    most, total, y = case.partial(kernel)
    others = [0, 1, 3, 4]
    assert np.isnan(_testing.finish_decode((most, total, y))[0, 2]).all() and np.isnan(total[0, 2])
    np.testing.assert_array_equal(y[0, others], good[2][0, others])
    np.testing.assert_array_equal(most[0, others], good[0][0, others])


@all_kernels
def test_flat_queries(kernel: str) -> None:
    """Zero or tiny queries make all table entries equal, so all tokens have equal weight."""
    case = make_case(np.random.default_rng(11), 3, 100, 32, 2, True)
    for magnitude in (0, 1e-38, 1e-33):
        case.q[:] = magnitude
        check(case, kernel)
        np.testing.assert_allclose(
            _testing.finish_decode(case.partial(kernel))[0], np.tile(case.values.mean(0), (3, 1)), atol=1e-4
        )


@all_kernels
@pytest.mark.parametrize("int8_values", [True, False])
@pytest.mark.parametrize("token", [0, 50, 99])
def test_nan_in_a_key_or_value(kernel: str, int8_values: bool, token: int) -> None:
    case = make_case(np.random.default_rng(12), 4, 100, 32, None, int8_values, 0.1)
    values = case.values.copy()
    values[token, 3] = np.nan
    other = make_case(np.random.default_rng(12), 4, 100, 32, None, int8_values, 0.1)
    if int8_values:
        _native.append_values(other.value_cache, 0, values)
    else:
        other.value_cache = values
    y = _testing.finish_decode(other.partial(kernel))[0]
    assert np.isnan(y[:, 3]).all() and (int8_values or np.isfinite(y[:, 4:]).all())
    for bad in (np.nan, np.inf):
        case.key_cache = case.keys.copy()
        case.key_cache[token, 3] = bad
        y = _testing.finish_decode(case.partial(kernel))[0]
        # A negative q times Inf gives -Inf, so that token has no weight.
        spoiled = np.isnan(bad) | (case.q[:, 3] > 0)
        assert np.isnan(y[spoiled]).all() and np.isfinite(y[~spoiled]).all()


@all_kernels
def test_one_token_takes_all(kernel: str) -> None:
    """Tokens and whole tiles whose weight is negligible are left out."""
    case = make_case(np.random.default_rng(13), 2, 3000, 16, 1, True, 0.1)
    case.q *= 1000
    scores = case.scores(kernel)
    y = _testing.finish_decode(case.partial(kernel))[0]
    for h in range(2):
        p = np.exp2(scores[h].astype(np.float64) - scores[h].max())
        np.testing.assert_allclose(y[h], p @ case.values / p.sum(), atol=2.0**-10)


@all_kernels
def test_small_weights_beside_a_large_one_count(kernel: str) -> None:
    """One token with as much weight as 4000 others together: the small weights must still contribute half."""
    keys = np.zeros((4001, 16), np.float32)
    keys[17, 0] = 1
    q = np.zeros((1, 16), np.float32)
    q[0, 0] = np.log(4000)
    values = np.ones((4001, 16), np.float32)
    values[17] = -1
    cache = np.zeros((4001, 18), np.uint8)
    _native.append_values(cache, 0, values)
    y = _testing.finish_decode(Case(q, 1.0, keys, values, keys, cache).partial(kernel))[0]
    np.testing.assert_allclose(y, 0, atol=1e-3)


GOOD = {
    "q": np.ones((2, 3, 16), np.float32),
    "scale": 1.0,
    "keys": np.zeros((2, 40, 8), np.uint8),
    "values": np.zeros((2, 40, 18), np.uint8),
    "codebooks": np.ones((2, 16, 16, 1), np.float32),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.ones((2, 16), np.float32)}, "q must be"),
        ({"q": np.ones((2, 3, 24), np.float32)}, "head_dim is 24, expected a multiple of 16"),
        ({"codebooks": np.ones((1, 16, 16, 1), np.float32)}, "codebooks must be"),
        ({"codebooks": np.ones((2, 32, 16, 1), np.float32)}, "codebooks must have the head_dim"),
        ({"codebooks": None}, "keys without codebooks must be float32 .2, tokens, 16."),
        ({"keys": np.zeros((2, 40, 16), np.uint8)}, "keys with codebooks must be uint8 .2, tokens, 8."),
        ({"keys": np.zeros((2, 40, 16), np.uint8)[:, :, ::2]}, "C-contiguous"),
        ({"values": np.zeros((2, 40, 16), np.uint8)}, "int8 values must be uint8 .2, tokens, 18."),
        ({"values": np.zeros((2, 40, 18), np.float32)}, "values must be float32 .2, tokens, 16."),
        ({"tokens": 41}, "first_key <= begin <= end <= tokens must hold"),
        ({"begin": 41}, "first_key <= begin"),
        ({"end": 41}, "first_key <= begin"),
        ({"kernel": "Avx1024"}, "no kernel is called"),
    ],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    _testing.decode_attention(**GOOD)
    with pytest.raises(ValueError, match=message):
        _testing.decode_attention(**GOOD | change)
