"""Test NoMADAttention with a prompt stored in the model: kernel and ONNX function against NumPy, call by call."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ortolan.errors import ModelError
from ortolan.graph_passes.passes.prompt import prune_prompt

from .cache_function import Both
from .cached_attention import Decoder, Setup, node_model, run_shared
from .isa_process import check_with_isa, each_isa
from .single_node import session

CALLS = (7, 1, 3, 4, 1, 33, 2)
kinds = pytest.mark.parametrize("kind", ["float", "codes", "codes_float"])


@kinds
@pytest.mark.parametrize("sparsity", [(0.0, 0.0), (0.3, 0.5), (0.9, 0.0)])
@pytest.mark.parametrize("lengths", [False, True])
def test_calls_one_after_another(kind: str, sparsity: tuple[float, float], lengths: bool) -> None:
    setup = Setup(kind=kind, rotary="half", lengths=lengths, prompt=75, prompt_sparsity=sparsity)
    both, decoder = Both(setup), Decoder(setup)
    for queries in CALLS:
        both.check(decoder.call(queries))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 512, 513, 1500])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (3, 3, 16), (9, 3, 64), (6, 1, 80)])
def test_sizes(tokens: int, heads: int, kv_heads: int, head_dim: int) -> None:
    setup = Setup(heads, kv_heads, head_dim, prompt=tokens, positions=2048, rotary="interleaved")
    ours, decoder = session(node_model(setup), threads=3), Decoder(setup)
    for queries in (1, 5, 4):
        call = decoder.call(queries)
        call.check(ours.run(None, call.feeds))


@kinds
def test_many_rows(kind: str) -> None:
    """More query rows than are processed together, where a cut falls between the heads of one query."""
    setup = Setup(6, 2, 32, kind, prompt=40)
    ours, decoder = session(node_model(setup), threads=2), Decoder(setup, 23)
    for queries in (4, 1, 3):
        call = decoder.call(queries)
        call.check(ours.run(None, call.feeds))


@kinds
def test_sequences_of_different_lengths(kind: str) -> None:
    setup = Setup(kind=kind, rotary="half", prompt=50)
    both, decoder = Both(setup), Decoder(setup, 4, room=60)
    both.check(decoder.call(40, (40, 1, 17, 32)))
    for queries in (1, 1):
        both.check(decoder.call(queries))


@pytest.mark.parametrize("prompt_sparsity", [(0.0, 0.5), (0.3, 0.5)])
def test_exact_keys(prompt_sparsity: tuple[float, float]) -> None:
    setup = Setup(kind="codes", rotary="half", prompt=50, window=5, sinks=2, prompt_sparsity=prompt_sparsity)
    both, decoder = Both(setup), Decoder(setup)
    for queries in CALLS:
        both.check(decoder.call(queries))


@kinds
@pytest.mark.parametrize("queries", [1, 3, 6])
@pytest.mark.parametrize("hidden", ["nothing", "some of the prompt", "first token", "behind the prompt"])
def test_masks(kind: str, queries: int, hidden: str) -> None:
    setup = Setup(kind=kind, mask=True, prompt=40)
    both, decoder = Both(setup), Decoder(setup)
    for count in (9, queries):
        total = 40 + decoder.tokens[0] + count
        mask = np.zeros((2, 1, 1, total), np.float32)
        tokens = {"nothing": [], "some of the prompt": [3, 11], "first token": [0], "behind the prompt": [40, 41]}
        mask[1, ..., tokens[hidden]] = -3e38
        both.check(decoder.call(count, mask=mask))


SCRIPT = """
from tests.ops.cached_attention import Decoder, Setup, node_model
from tests.ops.single_node import session
for sparsity in ((0.3, 0.5), (0.0, 0.0)):
    setup = Setup(8, 2, 128, "codes", prompt=530, prompt_sparsity=sparsity, positions=1024)
    ours, decoder = session(node_model(setup)), Decoder(setup)
    for queries in (1, 2, 4):
        call = decoder.call(queries)
        call.check(ours.run(None, call.feeds))
"""


@each_isa
def test_with_each_isa(isa: str) -> None:
    check_with_isa(isa, SCRIPT)


@kinds
def test_past_and_present_may_share_memory(kind: str) -> None:
    setup = Setup(kind=kind, rotary="half", prompt=33)
    ours, decoder = session(node_model(setup), threads=2), Decoder(setup, room=60)
    for queries in CALLS:
        call = decoder.call(queries)
        call.check(run_shared(ours, call.feeds))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_queries_that_are_not_finite_spoil_their_own_head_only(number: float) -> None:
    setup = Setup(heads=4, kv_heads=2, prompt=100)
    ours, call = session(node_model(setup)), Decoder(setup, 1).call(1)
    expected = ours.run(None, call.feeds)[0].reshape(4, 32)
    call.feeds["query"] = call.feeds["query"].copy()
    call.feeds["query"][0, 0, 33] = number  # of head 1
    y = ours.run(None, call.feeds)[0].reshape(4, 32)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2, 3]], expected[[0, 2, 3]])


def test_nothing_pruned_is_a_cache_of_the_same_tokens() -> None:
    """An unpruned prompt gives the results of a float cache with the same tokens, up to bf16 rounding."""
    setup = Setup(rotary="half", prompt=64, prompt_sparsity=(0.0, 0.0))
    plain = dataclasses.replace(setup, prompt=0)
    ours, cached = session(node_model(setup)), session(node_model(plain))
    prompt = setup.prompt_cache()
    decoder = Decoder(setup, 1)
    for queries in (5, 1, 3):
        call = decoder.call(queries)
        feeds = dict(call.feeds)
        for name, rows in (("past_key", prompt.keys), ("past_value", prompt.values)):
            feeds[name] = np.concatenate([rows[None], feeds[name]], axis=2)
        y, expected = ours.run(None, call.feeds)[0], cached.run(None, feeds)[0]
        np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 if queries > 4 else 0.03)


def test_pruning_is_by_magnitude_of_each_token() -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 3, 40, 16)).astype(np.float32)
    keys[1] *= 10
    values[0, 5] = 1  # of equal values, the first are pruned
    pruned = prune_prompt(keys, values, 0.3, 0.5)
    assert ((pruned.keys == 0).sum(-1) == 5).all() and ((pruned.values == 0).sum(-1) == 8).all()
    largest = np.where(pruned.keys == 0, np.abs(keys), 0).max(-1)
    assert (largest <= np.where(pruned.keys != 0, np.abs(keys), np.inf).min(-1)).all()
    assert (pruned.values[0, 5] == [0] * 8 + [1] * 8).all()
    np.testing.assert_allclose(pruned.values[pruned.values != 0], values[pruned.values != 0], rtol=2.0**-8)
    for bad in (np.nan, np.inf):
        values[2, 3, 1] = bad
        with pytest.raises(ModelError, match="prompt's values hold NaN or infinity"):
            prune_prompt(keys, values, 0.3, 0.5)


def test_pruning_is_by_magnitude_over_all_heads() -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 3, 40, 16)).astype(np.float32)
    keys[1] *= 10
    pruned = prune_prompt(keys, values, 0.3, 0.5, "layer")
    assert (pruned.keys == 0).sum() == round(0.3 * keys.size) and (pruned.values == 0).sum() == values.size // 2
    assert np.abs(keys[pruned.keys == 0]).max() <= np.abs(keys[pruned.keys != 0]).min()
    assert (pruned.keys[1] == 0).mean() < 0.1 < (pruned.keys[0] == 0).mean()
    np.testing.assert_allclose(pruned.values[pruned.values != 0], values[pruned.values != 0], rtol=2.0**-8)
