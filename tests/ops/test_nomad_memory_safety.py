"""NoMADAttention: constants at odd addresses, sizes whose products overflow, and its plan without ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ortolan import _testing

from .cached_attention import Decoder, Setup, node_model
from .single_node import save_at_odd_places, session
from .test_nomad_attention_op import node_model as attention_model

HUGE = 2**44


@pytest.mark.parametrize("kind", ["codes", "codes_float"])
@pytest.mark.parametrize("d_sub", [1, 4])
def test_codebooks_and_prompts_at_odd_addresses(kind: str, d_sub: int, tmp_path: Path) -> None:
    setup = Setup(kind=kind, d_sub=d_sub, rotary="half", window=5, sinks=2, prompt=40)
    model = node_model(setup)
    even = session(model)
    save_at_odd_places(model, tmp_path)
    odd, decoder = session(tmp_path / "model.onnx"), Decoder(setup)
    for queries in (40, 1, 7):
        call = decoder.call(queries)
        for found, expected in zip(odd.run(None, call.feeds), even.run(None, call.feeds), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_heads_of_huge_sizes_are_refused() -> None:
    """Of no rows at all: nothing of them is in memory, but their sizes are multiplied."""
    with pytest.raises(Exception, match="expected at most 16777216"):
        session(attention_model(4, packed=True, mask=False)).run(
            None, {"query": np.zeros((0, 1, 12 * HUGE), np.float32)}
        )
    setup = Setup(packed=True, lengths=False)
    feeds = Decoder(setup).call(1).feeds | {"query": np.zeros((0, 1, 8 * HUGE), np.float32)}
    with pytest.raises(Exception, match="expected at most 16777216"):
        session(node_model(setup)).run(None, feeds)


@pytest.mark.parametrize("causal", [False, True])
def test_the_plan_gives_what_the_operator_gives(causal: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 70, heads, 32), dtype=np.float32) for heads in (4, 2, 2))
    feeds = {"query": q.reshape(2, 70, -1), "key": k.reshape(2, 70, -1), "value": v.reshape(2, 70, -1)}
    model = attention_model(4, 2, mask=np.zeros(1, np.float32), causal=int(causal), scale=0.25)
    expected = session(model).run(None, feeds)[0]
    for threads in (1, 3):
        y = _testing.run_attention_plan(q, k, v, 0.25, causal=causal, threads=threads)
        np.testing.assert_array_equal(y.reshape(expected.shape), expected)


def test_the_plan_says_that_there_is_no_memory() -> None:
    rows = np.zeros((1, 300, 8, 64), np.float32)
    for threads in (1, 2):
        with pytest.raises(MemoryError):
            _testing.run_attention_plan(rows, rows, rows, 1.0, threads=threads, most_bytes=1000)
