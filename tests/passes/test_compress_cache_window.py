"""A compressed cache that keeps the first and the most recent keys as floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortolan
from ortolan.generate import Decoder, generate, shares_cache
from ortolan.graph_passes.weights.cache_format import ExactKeys

from .cached_llama import FORMS, LAYERS, VOCABULARY, Decoding, compress, decode, distance, llama, recipe, session

CUTS = (70, 71, 72, 73, 74)


@pytest.mark.parametrize("form", FORMS)
def test_a_window_of_everything_changes_nothing(form: str) -> None:
    model = llama(form)
    for options in ({"window": 100}, {"window": 40, "sinks": 60}, {"sinks": 100}):
        found, report = compress(model, values="float32", **options)
        assert report.portable
        np.testing.assert_allclose(decode(found, CUTS), decode(model, CUTS), atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_more_exact_keys_are_nearer(form: str) -> None:
    model = llama(form)
    expected = decode(model, CUTS)[:, 70:]
    errors = []
    for options in ({}, {"window": 24}, {"window": 24, "sinks": 24}, {"window": 50, "sinks": 22}):
        found, report = compress(model, d_sub=2, values="float32", **options)
        errors.append(distance(decode(found, CUTS)[:, 70:], expected))
        # After a prompt of 50 tokens, some keys are read as codes unless window and sinks cover 50 tokens.
        some_codes = sum(options.values()) < 50
        assert report.cache is not None
        assert (report.cache.decode_error[0].relative_l2 > 1e-4) == some_codes
    assert errors[3] < errors[2] < errors[1] < errors[0]


@pytest.mark.parametrize("form", FORMS)
def test_inputs_and_outputs_are_added_behind_the_others(form: str) -> None:
    model = llama(form)
    found, report = compress(model, window=6, sinks=2)
    for before, after, prefix in (
        (model.graph.input, found.graph.input, "past_key_values"),
        (model.graph.output, found.graph.output, "present"),
    ):
        names = [value.name for value in after]
        added = [f"{prefix}.{layer}.exact_key" for layer in range(LAYERS)]
        assert names == [value.name for value in before] + added
        for value in list(after)[len(before) :]:
            kind = value.type.tensor_type
            assert kind.elem_type == onnx.TensorProto.FLOAT
            assert [dim.dim_value for dim in kind.shape.dim][1:] == [2, 8, 16] and kind.shape.dim[0].dim_param
    assert any(note.startswith("keys of the first 2 and the last 6 tokens became exact") for note in report.notes)
    assert [error.name for error in report.output_error] == ["logits"]
    names = [output.name for output in session(found).get_outputs()]
    assert names == [value.name for value in found.graph.output]


@pytest.mark.parametrize("form", FORMS)
def test_it_runs_without_our_library(form: str) -> None:
    found, _ = compress(llama(form), window=6, sinks=2)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 41))
    decoding = Decoding(found, ids)
    next(decoding.run(found, (40,)))
    portable = onnxruntime.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = decoding.feeds(40, 41)
    for ours, others in zip(session(found).run(None, feeds), portable.run(None, feeds), strict=True):
        if ours.dtype == np.float32:  # codes may differ by a step, because tables are rounded to 1/255
            assert distance(others, ours) < 0.05


@pytest.mark.parametrize("form", FORMS)
def test_generation(form: str, tmp_path: Any) -> None:
    """Exact keys stay correct in growing and shared caches, also after the ring buffer wraps around."""
    original = llama(form)
    model, _ = compress(original, window=6, sinks=2)
    onnx.save(model, tmp_path / "c.onnx")
    assert shares_cache(tmp_path / "c.onnx") == (form == "gqa")
    runner = session(model)
    ids = [1, 20, 30, 4, 4, 90] * 8
    made = generate(runner, ids, 40)
    if form == "gqa":
        decoder = Decoder(runner, cache_length=96)
        assert generate(decoder, ids, 40) == made
        decoder.reset()
        assert generate(decoder, ids[:5], 3) == generate(runner, ids[:5], 3)
    exact, _ = compress(original, window=100, values="float32")
    assert generate(session(exact), ids, 40) == generate(session(original), ids, 40)


def test_a_dry_run_says_so() -> None:
    report = ortolan.optimize_onnx(llama("gqa"), recipe=recipe(window=64, sinks=4), dry_run=True)
    assert "keys of the first 4 and the last 64 tokens would become exact" in " ".join(report.notes)


@pytest.mark.parametrize(("window", "sinks"), [(4, 3), (0, 3), (4, 0)])
def test_exact_keys_of_a_cache(window: int, sinks: int) -> None:
    cache = np.random.default_rng(0).standard_normal((2, 3, 10, 16))
    found = ExactKeys("past", window, sinks).of(cache)
    assert found.dtype == np.float32 and found.shape == (2, 3, window + sinks, 16)
    tokens = [0, 1, 2][:sinks] + {(4, 3): [7, 8, 9, 6], (4, 0): [8, 9, 6, 7]}.get((window, sinks), [])
    np.testing.assert_array_equal(found, cache[:, :, tokens].astype(np.float32))
    short = ExactKeys("past", window, sinks).of(cache[:, :, :2])
    np.testing.assert_array_equal(short[:, :, 2:], 0)
