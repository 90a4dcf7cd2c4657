"""Native sampling against an oracle in float64, its order of equal logits, and its errors."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ortolan import _native
from ortolan.engine.requests import SamplingOptions
from ortolan.engine.rows import RowState, Sampled
from ortolan.engine.sampling import NativeSampler
from ortolan.errors import ArgumentError, OrtolanError

from ..sampling import examples
from .sampling_oracle import adjust, distribution, philox, possible_tokens, uniform

_SAMPLER = NativeSampler()


def _row(prompt=(), answer=(), index=0, seed=0, mask=None, **options: Any) -> RowState:
    return RowState(SamplingOptions(**options), tuple(prompt), list(answer), index, seed, mask)


def _sample(logits, row: RowState) -> Sampled:
    return _SAMPLER.sample(np.asarray(logits, np.float32)[None], [row])[0]


def _pack(allowed: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def _drawn(logits, count: int, **options: Any) -> np.ndarray:
    """Return the tokens that `count` seeds draw."""
    x = np.broadcast_to(np.asarray(logits, np.float32), (count, len(logits)))
    rows = [_row(seed=seed, **options) for seed in range(count)]
    return np.array([sampled.token for sampled in _SAMPLER.sample(x, rows)])


def test_the_oracle_has_the_known_answers_of_philox():
    # From kat_vectors of Random123.
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1, -1, 2**70 + 5])
def test_equal_logits_show_the_random_number(seed):
    vocabulary = 1 << 16
    row = _row(seed=seed, index=3)
    for generated in range(20):
        token = _sample(np.zeros(vocabulary), row).token
        assert token == int(uniform(seed, generated, 3) * vocabulary)
        row.answer.append(token)


@st.composite
def _cases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 300))
    logits = (rng.standard_normal(size) * draw(st.sampled_from([0.01, 1, 5, 30]))).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)  # equal logits
    if draw(st.booleans()) and size > 1:
        logits[rng.integers(0, size - 1)] = -np.inf
        logits[-1] = 1
    tokens = st.lists(st.integers(0, size - 1), max_size=20)
    options = SamplingOptions(
        temperature=draw(st.sampled_from([0, 0.3, 1.0, 1.7, 100.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 7, 50, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.5, 1e-3])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.5])),
        logit_bias=dict(zip(draw(tokens), rng.standard_normal(20) * 3, strict=False)),
        logprobs=draw(st.sampled_from([None, 0, 3, 1000])),
    )
    allowed = None
    if draw(st.booleans()):
        allowed = rng.random(size) < 0.5
        allowed[-1] = True
    index, seed = draw(st.integers(0, 5)), draw(st.integers(0, 2**64 - 1))
    return logits, options, tuple(draw(tokens)), draw(tokens), allowed, index, seed


@examples(600)
@given(_cases())
def test_tokens_match_the_oracle(case):
    logits, options, prompt, answer, allowed, index, seed = case
    row = RowState(options, prompt, answer, index, seed, None if allowed is None else _pack(allowed))
    sampled = _sample(logits, row)
    adjusted = adjust(logits, options, prompt, answer, allowed)
    assert sampled.token in possible_tokens(adjusted, options, uniform(seed, len(answer), index))
    if options.temperature == 0:
        assert sampled.token == int(adjusted.argmax())
    assert (sampled.logprob is None) == (options.logprobs is None)
    assert len(sampled.top) == min(options.logprobs or 0, len(logits))


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"top_k": 50}, {"top_p": 0.95}, {"top_p": 0.5, "top_k": 1000}, {"min_p": 0.02}],
    ids=str,
)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_large_vocabulary_matches_the_oracle(options, scale):
    logits = (np.random.default_rng(7).standard_normal(49_153) * scale).astype(np.float32)
    chosen = SamplingOptions(**options)
    for seed, token in enumerate(_drawn(logits, 20, **options)):
        assert token in possible_tokens(logits.astype(np.float64), chosen, uniform(seed, 0, 0))


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.9, "min_p": 0.1}],
    ids=str,
)
def test_frequencies_follow_the_distribution(options):
    logits = np.roll(np.linspace(-1.5, 1.5, 16), 5)
    counts = np.bincount(_drawn(logits, 20_000, **options), minlength=16)
    expected = distribution(logits.astype(np.float32).astype(np.float64), SamplingOptions(**options)) * 20_000
    assert not counts[expected == 0].any()
    kept = expected > 0
    assert stats.chisquare(counts[kept], expected[kept]).pvalue > 1e-3


def test_frequencies_within_one_sequence_follow_the_distribution():
    logits = np.random.default_rng(4).standard_normal(8)
    row = _row(seed=11)
    for _ in range(10_000):
        row.answer.append(_sample(logits, row).token)
    expected = distribution(logits.astype(np.float32).astype(np.float64), row.options) * 10_000
    assert stats.chisquare(np.bincount(row.answer, minlength=8), expected).pvalue > 1e-3
    # Successive numbers are independent: pairs of tokens have the product distribution.
    pairs = np.bincount(np.array(row.answer[:-1]) * 8 + row.answer[1:], minlength=64)
    product = np.outer(expected, expected).ravel() / 1e8 * 9_999
    assert stats.chisquare(pairs, product).pvalue > 1e-3


def test_choices_and_seeds_draw_different_tokens():
    logits = np.zeros(1 << 16)
    tokens = {_sample(logits, _row(seed=seed, index=index)).token for seed in range(8) for index in range(8)}
    assert len(tokens) > 60


@pytest.mark.parametrize("position", [0, 1, 1023, 1024, 5000, 9_999])
def test_greedy_takes_the_first_of_equal_logits(position):
    logits = np.full(10_000, -1.0)
    logits[position:] = 2.5
    assert _sample(logits, _row(temperature=0)).token == position
    assert _sample(logits, _row(temperature=1e-9)).token == position
    assert _sample(logits, _row(temperature=5, top_k=1)).token == position


def test_zeros_of_both_signs_are_equal():
    logits = [-1.0, -0.0, 0.0, -0.0]
    assert _sample(logits, _row(temperature=0)).token == 1
    assert set(_drawn(logits, 200, top_k=2)) == {1, 2}
    assert [token for token, _ in _sample(logits, _row(logprobs=3)).top] == [1, 2, 3]


def test_top_k_and_top_p_keep_the_first_of_equal_logits():
    logits = np.zeros(5000)
    logits[4000] = 1
    assert set(_drawn(logits, 300, top_k=3)) == {4000, 0, 1}
    assert set(_drawn(np.zeros(100), 500, top_p=0.1)) == set(range(10))
    assert set(_drawn(np.zeros(100), 100, top_p=0.001)) == {0}


def test_top_p_keeps_the_token_that_reaches_it():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(_drawn(logits, 500, top_p=0.51)) == {0, 1}
    assert set(_drawn(logits, 500, top_p=0.4)) == {0}
    assert set(_drawn(logits, 500, top_p=0.9)) == {0, 1, 2}


def test_min_p_one_keeps_the_most_likely_tokens():
    assert set(_drawn([1, 3, 3, 2.999], 200, min_p=1.0)) == {1, 2}


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e6, 1e300])
def test_extreme_temperatures(temperature):
    logits = np.array([-3e38, 1.0, -np.inf, 3e38, 3.0], np.float32)
    drawn = set(_drawn(logits, 200, temperature=temperature))
    assert drawn <= {0, 1, 3, 4}
    if temperature < 1:
        assert drawn == {3}
    else:
        assert set(_drawn([0.0, 1.0, -np.inf, -2.0], 200, temperature=temperature)) == {0, 1, 3}


def _many_rows(count: int, vocabulary: int) -> tuple[np.ndarray, list[RowState]]:
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((count, vocabulary)) * 3).astype(np.float32)
    rows = []
    for index in range(count):
        mask = _pack(rng.random(vocabulary) < 0.7) if index % 3 == 0 else None
        options = {
            "temperature": index % 4 * 0.5,
            "top_k": [0, 20][index % 2],
            "top_p": [1, 0.9, 0.5][index % 3],
            "repetition_penalty": [1, 1.2][index // 2 % 2],
            "frequency_penalty": [0, 0.3][index // 4 % 2],
            "logit_bias": {index: 2.0} if index % 5 == 0 else {},
            "logprobs": [None, 0, 5][index % 3],
        }
        prompt = rng.integers(0, vocabulary, 30).tolist()
        rows.append(_row(prompt, rng.integers(0, vocabulary, index).tolist(), index % 3, index, mask, **options))
    return logits, rows


def test_a_row_does_not_depend_on_other_rows():
    logits, rows = _many_rows(40, 2000)
    together = _SAMPLER.sample(logits, rows)
    order = np.random.default_rng(6).permutation(40)
    shuffled = _SAMPLER.sample(logits[order], [rows[index] for index in order])
    assert [shuffled[place] for place in np.argsort(order)] == together
    assert [_SAMPLER.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    assert [_SAMPLER.sample(logits[i : i + 3], rows[i : i + 3])[0] for i in range(40)] == together


def test_a_row_without_its_cache_draws_the_same_token():
    logits, rows = _many_rows(24, 500)
    for _ in range(5):
        kept = _SAMPLER.sample(logits, rows)
        fresh = [RowState(r.options, r.prompt, list(r.answer), r.index, r.seed, r.mask) for r in rows]
        assert _SAMPLER.sample(logits, fresh) == kept
        for row, sampled in zip(rows, kept, strict=True):
            row.answer.append(sampled.token)
    for row in rows:
        del row.answer[2:]
    fresh = [RowState(r.options, r.prompt, list(r.answer), r.index, r.seed, r.mask) for r in rows]
    assert _SAMPLER.sample(logits, rows) == _SAMPLER.sample(logits, fresh)


def test_every_compiler_and_cpu_gives_the_same_bits():
    logits = (np.random.default_rng(8).integers(-(2**15), 2**15, (60, 3001)) / 2**12).astype(np.float32)
    rows = [
        _row(
            [i, 2 * i], [3 * i] * (i % 4), i % 2, i, temperature=0.25 * (i % 7), top_k=[0, 100][i % 2],
            top_p=[1, 0.9, 0.99][i % 3], min_p=[0, 0.01][i // 2 % 2], repetition_penalty=[1, 1.1][i // 3 % 2],
            presence_penalty=[0, 0.3][i // 5 % 2], logprobs=5,
        )
        for i in range(60)
    ]  # fmt: skip
    sampled = _SAMPLER.sample(logits, rows)
    text = "\n".join(f"{one.token} {one.logprob.hex()} {[(t, p.hex()) for t, p in one.top]}" for one in sampled)
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "1acb0da64fb762243795d0dedbe9a3de97093795eb16df82e65c326779a115ba"
    )


def test_a_mask_limits_tokens():
    allowed = np.zeros(100, bool)
    allowed[[0, 31, 32, 63, 64, 99]] = True
    drawn = {_sample(np.arange(100) * 0.001, _row(seed=seed, mask=_pack(allowed))).token for seed in range(200)}
    assert drawn == {0, 31, 32, 63, 64, 99}
    assert _sample(np.arange(100), _row(temperature=0, mask=_pack(allowed))).token == 99


def test_tokens_beyond_a_short_mask_are_not_allowed():
    mask = np.full(2, 0xFFFFFFFF, np.uint32)
    assert _sample(np.arange(100), _row(temperature=0, mask=mask)).token == 63


def test_a_bias_moves_logits_before_the_mask():
    logits = np.zeros(50)
    assert _sample(logits, _row(temperature=0, logit_bias={7: 1.0, 9: 2.0})).token == 9
    mask = _pack(np.arange(50) != 9)
    assert _sample(logits, _row(temperature=0, logit_bias={7: 1.0, 9: 2.0}, mask=mask)).token == 7
    assert 3 not in _drawn(logits, 300, logit_bias={3: -100.0})


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    # Reference: CTRL (arXiv 1909.05858), and RepetitionPenaltyLogitsProcessor of transformers
    assert _sample([3.0, 2.0], _row(prompt=[0], temperature=0, repetition_penalty=1.4)).token == 0
    assert _sample([3.0, 2.0], _row(prompt=[0], temperature=0, repetition_penalty=1.6)).token == 1
    assert _sample([3.0, 2.0], _row(answer=[0, 0], temperature=0, repetition_penalty=1.4)).token == 0  # applied once
    assert _sample([-2.0, -3.0], _row(prompt=[0], temperature=0, repetition_penalty=1.4)).token == 0
    assert _sample([-2.0, -3.0], _row(prompt=[0], temperature=0, repetition_penalty=1.6)).token == 1


def test_presence_and_frequency_penalties_apply_to_the_answer():
    assert _sample([2.0, 1.0], _row(prompt=[0, 0, 0], temperature=0, presence_penalty=5)).token == 0
    assert _sample([2.0, 1.0], _row(prompt=[0, 0, 0], temperature=0, frequency_penalty=5)).token == 0
    for count in range(4):
        token = _sample([2.0, 1.0], _row(answer=[0] * count, temperature=0, frequency_penalty=0.4)).token
        assert token == (0 if 2 - 0.4 * count > 1 else 1)
    assert _sample([2.0, 1.0], _row(answer=[0] * 9, temperature=0, presence_penalty=0.9)).token == 0
    assert _sample([2.0, 1.0], _row(answer=[0], temperature=0, presence_penalty=1.1)).token == 1
    assert _sample([1.0, 2.0], _row(answer=[0], temperature=0, presence_penalty=-1.1)).token == 0


@pytest.mark.parametrize("vocabulary", [1, 5, 1000, 49_152])
def test_logprobs_are_the_log_softmax_of_the_logits(vocabulary):
    logits = (np.random.default_rng(9).standard_normal(vocabulary) * 4).astype(np.float32)
    row = _row(answer=[0], temperature=0.5, top_k=7, frequency_penalty=2, logit_bias={0: -3.0}, logprobs=5)
    sampled = _sample(logits, row)
    wide = logits.astype(np.float64)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    assert sampled.logprob == pytest.approx(expected[sampled.token], abs=1e-6)
    order = np.lexsort((np.arange(vocabulary), -wide))[:5]
    assert [token for token, _ in sampled.top] == order.tolist()
    np.testing.assert_allclose([value for _, value in sampled.top], expected[order], atol=1e-6, rtol=0)


def test_logprobs_of_zero_tokens_and_of_all():
    assert _sample([1.0, 2.0], _row(temperature=0, logprobs=0)).top == ()
    sampled = _sample([1.0, 2.0, 1.0], _row(temperature=0, logprobs=10))
    assert [token for token, _ in sampled.top] == [1, 0, 2]
    assert sampled.logprob == sampled.top[0][1]
    assert _sample([1.0, 2.0], _row(temperature=0)) == Sampled(1)
    # A mask may force a token that the model excludes.
    assert _sample([0.0, -np.inf, 5.0], _row(logprobs=3)).top[2] == (1, -np.inf)


def test_logits_are_not_changed():
    logits, rows = _many_rows(12, 300)
    before = logits.copy()
    _SAMPLER.sample(logits, rows)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 3}, {"logit_bias": {0: 1.0}}], ids=str)
@pytest.mark.parametrize(("value", "message"), [(np.nan, "NaN"), (np.inf, r"\+infinity")])
@pytest.mark.parametrize("token", [0, 5, 36])
def test_logits_that_are_no_numbers_are_errors(options, value, message, token):
    logits = np.zeros((3, 37), np.float32)
    logits[1, token] = value
    with pytest.raises(OrtolanError, match=f"^the logit of token {token} is {message}, expected"):
        _SAMPLER.sample(logits, [_row(**options) for _ in range(3)])


def test_rows_without_a_possible_token_are_errors():
    with pytest.raises(OrtolanError, match=r"^all logits are -infinity"):
        _sample(np.full(40, -np.inf), _row())
    with pytest.raises(OrtolanError, match=r"^the grammar excludes every token"):
        _sample(np.zeros(40), _row(mask=np.zeros(2, np.uint32)))
    with pytest.raises(OrtolanError, match=r"^the grammar excludes every token"):
        _sample([-np.inf, 1.0], _row(mask=np.array([1], np.uint32)))


def test_penalties_that_overflow_are_errors():
    with pytest.raises(OrtolanError, match=r"^after bias and penalties, the logit of token 1 is \+infinity"):
        _sample([1.0, 1.0], _row(answer=[1], presence_penalty=-1e300))


def test_tokens_outside_the_vocabulary_are_errors():
    with pytest.raises(OrtolanError, match=r"^bias or history has token 50, expected 0 to 49"):
        _sample(np.zeros(50), _row(logit_bias={50: 1.0}))
    with pytest.raises(OrtolanError, match=r"^bias or history has token 50, expected 0 to 49"):
        _sample(np.zeros(50), _row(answer=[50], frequency_penalty=1))
    with pytest.raises(ArgumentError, match="token 1000000 is out of range, expected 0 to 524287"):
        _sample(np.zeros(50), _row(logit_bias={10**6: 1.0}))


@pytest.mark.parametrize(
    ("logits", "mask", "message"),
    [
        (np.zeros((1, 5)), None, r"logits are float64 \[1, 5\], expected float32 \[1 rows"),
        (np.zeros(5, np.float32), None, r"logits are float32 \[5\]"),
        (np.zeros((2, 5), np.float32), None, r"logits are float32 \[2, 5\], expected float32 \[1 rows"),
        (np.zeros((1, 0), np.float32), None, "the vocabulary has 0 tokens"),
        (np.zeros((1, 2**19 + 1), np.float32), None, "the vocabulary has 524289 tokens"),
        (np.zeros((1, 5), np.float32), np.zeros(1, np.int64), "mask of row 0 is int64"),
        (np.zeros((1, 5), np.float32), np.zeros((1, 1), np.uint32), r"mask of row 0 is uint32 \[1, 1\]"),
    ],
)
def test_arrays_of_other_shapes_are_errors(logits, mask, message):
    with pytest.raises(ArgumentError, match=message):
        _SAMPLER.sample(logits, [_row(mask=mask)])


def test_no_rows():
    assert _SAMPLER.sample(np.zeros((0, 5), np.float32), []) == []


def test_the_largest_vocabulary():
    logits = np.zeros(2**19)
    assert _sample(logits, _row(seed=1)).token == int(uniform(1, 0, 0) * 2**19)
    assert _sample(logits, _row(seed=1, top_p=0.5)).token == int(uniform(1, 0, 0) * 2**18)
    assert _sample(logits, _row(temperature=0, logprobs=0)).logprob == pytest.approx(-np.log(2**19), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", -1.0), ("temperature", np.nan), ("temperature", np.inf), ("top_k", -1), ("top_p", 0.0)],
        *[("top_p", 1.01), ("top_p", np.nan), ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0.0)],
        *[("repetition_penalty", np.inf), ("presence_penalty", np.nan), ("frequency_penalty", np.inf)],
        *[("logprobs", -2), ("prompt", [-1])],
    ],
)
def test_native_rows_check_their_options(name, value):
    others = {"repetition_penalty": 1.1} if name == "prompt" else {}
    with pytest.raises(ValueError, match=f"^{'token' if name == 'prompt' else name}"):
        _native.SamplingRow(**{name: value}, **others)


def test_native_rows_check_their_bias():
    with pytest.raises(ValueError, match="bias_values has 1 elements, expected 2"):
        _native.SamplingRow(bias_tokens=[1, 2], bias_values=[0.5])
    with pytest.raises(ValueError, match="the bias of token 1 is nan"):
        _native.SamplingRow(bias_tokens=[1], bias_values=[np.nan])
