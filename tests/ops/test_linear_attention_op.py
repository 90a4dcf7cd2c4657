"""Test LinearAttention in ORT: against float64 and its ONNX function, in pieces, and on invalid input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..sampling import examples
from .isa_process import each_isa, run_with_isa
from .linear_attention import RULES, Floats, Setup, answer, digest, node_model, random_feeds, reference
from .single_node import assert_same_bits, save_at_odd_places, session, with_constants

# Heads of query, key and value. ONNX Runtime's operator has no more query heads than value heads.
HEADS = [(1, 1, 1), (3, 3, 3), (2, 2, 4), (1, 2, 4), (4, 1, 4)]
MORE_QUERIES = [(4, 2, 2), (6, 1, 3)]


def assert_close(found: Floats, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape
    if expected.size:
        assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def check(setup: Setup, batch: int, tokens: int, seed: int = 0) -> None:
    """Check one call against float64, and that threads do not change a bit."""
    feeds = random_feeds(setup, batch, tokens, seed)
    found = answer(setup, feeds)
    for one, expected in zip(found, reference(setup, feeds), strict=True):
        assert_close(one, expected)
    for one, expected in zip(answer(setup, feeds, threads=2), found, strict=True):
        assert_same_bits(one, expected)


@pytest.mark.parametrize("heads", [*HEADS, *MORE_QUERIES], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_and_grouping_of_heads(rule: str, heads: tuple[int, int, int]) -> None:
    for row_decays, head_betas in ((False, True), (True, False)):
        setup = Setup(rule, heads, row_decays=row_decays, head_betas=head_betas)
        for tokens in (1, 2, 11):
            check(setup, 2, tokens)


@pytest.mark.parametrize("value_size", [1, 3, 4, 15, 16, 17, 31, 32, 33, 64, 100, 128])
def test_every_width(value_size: int) -> None:
    for key_size in (1, 16, 33):
        check(Setup(key_size=key_size, value_size=value_size, scale=0.7), 1, 5)
        check(Setup("gated", key_size=key_size, value_size=value_size, row_decays=True), 1, 5)


@examples(60)
@given(
    rule=st.sampled_from(RULES),
    heads=st.sampled_from([*HEADS, *MORE_QUERIES]),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    rows=st.tuples(st.integers(0, 3), st.integers(0, 20)),
    row_decays=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    rule: str, heads: tuple[int, int, int], sizes: tuple[int, int], rows: tuple[int, int], row_decays: bool, seed: int
) -> None:
    check(Setup(rule, heads, *sizes, row_decays=row_decays), *rows, seed)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_its_function_is_onnx_runtimes_operator(rule: str, heads: tuple[int, int, int]) -> None:
    for row_decays, head_betas in ((False, True), (True, False)):
        setup = Setup(rule, heads, row_decays=row_decays, head_betas=head_betas)
        feeds = random_feeds(setup, 2, 7)
        for found, expected in zip(answer(setup, feeds, library=False), answer(setup, feeds), strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize("rule", RULES)
def test_division_into_calls_changes_no_bit(rule: str) -> None:
    setup = Setup(rule, value_size=70, row_decays=rule == "gated")
    feeds = random_feeds(setup, 2, 40)
    model = session(node_model(setup))
    whole, final = model.run(None, feeds)
    for cuts in ([*range(1, 40)], [1], [39], [7, 8, 30]):
        state, parts = feeds["past_state"], []
        for start, end in zip([0, *cuts], [*cuts, 40], strict=True):
            call = {name: array[:, start:end] for name, array in feeds.items()} | {"past_state": state}
            part, state = model.run(None, call)
            parts.append(part)
        assert_same_bits(np.concatenate(parts, axis=1), whole)
        assert_same_bits(state, final)


def test_sequences_depend_on_nothing_else() -> None:
    """A sequence has the same bits alone and among others, with any number of threads, whatever the others hold."""
    setup = Setup(value_size=70)
    feeds = random_feeds(setup, 5, 12)
    for array in feeds.values():
        array[3] = np.nan
    whole = answer(setup, feeds)
    for threads in (1, 2, 3):
        for one, expected in zip(answer(setup, feeds, threads=threads), whole, strict=True):
            assert_same_bits(one, expected)
        for sequence in (0, 2, 4):
            alone = answer(setup, {name: array[[sequence]] for name, array in feeds.items()}, threads=threads)
            for one, expected in zip(alone, whole, strict=True):
                assert np.isfinite(one).all()
                assert_same_bits(one, expected[[sequence]])
    assert np.isnan(whole[0][3]).all() and np.isnan(whole[1][3]).all()


def test_inputs_may_be_constants_at_odd_addresses(tmp_path: Path) -> None:
    for setup in (Setup(), Setup("gated", row_decays=True)):
        feeds = random_feeds(setup, 2, 5)
        save_at_odd_places(with_constants(node_model(setup), feeds), tmp_path)
        for one, expected in zip(session(tmp_path / "model.onnx").run(None, {}), answer(setup, feeds), strict=True):
            assert_same_bits(one, expected)


@each_isa
def test_every_instruction_set_gives_the_same_bits(isa: str) -> None:
    done = run_with_isa(isa, "from tests.ops.linear_attention import digest\nprint(digest())")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"q_num_heads": 0}, "q_num_heads is 0, expected 1 to 1048576"),
        ({"kv_num_heads": -1}, "kv_num_heads is -1, expected 1 to"),
        ({"q_num_heads": None}, "'q_num_heads' is missing"),
        ({"q_num_heads": 3}, "q_num_heads is 3 and kv_num_heads 4, expected one to be a multiple of the other"),
        ({"update_rule": "Gated"}, "update_rule is 'Gated', expected linear, gated, delta or gated_delta"),
        ({"scale": np.nan}, "scale is nan, expected a finite value"),
        ({"format_version": 2}, "format_version is 2, this library reads 1"),
    ],
)
def test_invalid_attributes_are_refused(attributes: dict[str, object], message: str) -> None:
    with pytest.raises(Exception, match=f"LinearAttention node 'scan': .*{message}"):
        session(node_model(Setup(), **attributes))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("query", (2, 3, 47), r"expected \[batch, tokens, a multiple of q_num_heads, 2\]"),
        ("query", (2, 3, 0), r"expected \[batch, tokens, a multiple"),
        ("key", (2, 4, 48), r"expected \[2, 3, …\], as query"),
        ("key", (2, 3, 72), r"expected \[…, heads of 24 elements, as query\], whose number divides kv_num_heads, 4"),
        ("key", (2, 3, 23), r"expected \[…, heads of 24 elements"),
        ("key", (2, 3, 0), r"expected \[…, heads of 24 elements"),
        ("value", (1, 3, 160), r"expected \[2, 3, …\]"),
        ("value", (2, 3, 161), r"expected \[…, a multiple of kv_num_heads, 4\]"),
        ("past_state", (2, 4, 40, 24), r"expected \[2, 4, 24, 40\]"),
        ("past_state", (1, 4, 24, 40), r"expected \[2, 4, 24, 40\]"),
        ("decay", (2, 3, 5), r"expected \[…, 4\] or \[…, 96\]"),
        ("decay", (2, 1, 4), r"expected \[2, 3, …\]"),
        ("beta", (2, 3, 2), r"expected \[…, 4\] or \[…, 1\]"),
        ("beta", (3, 3, 4), r"expected \[2, 3, …\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    feeds = random_feeds(Setup(), 2, 3) | {name: np.zeros(shape, np.float32)}
    with pytest.raises(Exception, match=rf"LinearAttention node 'scan': {name} '{name}' has shape .*{message}"):
        answer(Setup(), feeds)


def test_other_ranks_are_refused() -> None:
    setup = Setup()
    model = node_model(setup)
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    for name in random_feeds(setup, 2, 3):
        feeds = random_feeds(setup, 2, 3)
        feeds[name] = feeds[name].reshape(-1)
        with pytest.raises(Exception, match=rf"LinearAttention node 'scan': {name} '{name}' has shape \[\d+\]"):
            session(model).run(None, feeds)


def test_scale_0_is_the_default() -> None:
    setup = Setup(key_size=16)
    feeds = random_feeds(setup, 1, 3)
    for one, expected in zip(answer(setup, feeds), answer(replace(setup, scale=0.25), feeds), strict=True):
        assert_same_bits(one, expected)
