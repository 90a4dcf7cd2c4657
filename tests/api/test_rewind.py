"""A rewound decoder gives, bit for bit, the logits of a decoder that never went ahead."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortolan
from ortolan import Recipe
from ortolan.generate import Decoder

from ..passes.cached_llama import VOCABULARY, llama, prompt, session

IDS = np.random.default_rng(0).integers(0, VOCABULARY, 160)
OTHERS = (IDS + 1) % VOCABULARY
ROOM = 128


@cache
def make_model(head_dim: int = 16, **options: Any) -> onnx.ModelProto:
    """Return a decoder with a compressed cache. In its int8 layers, rows of a call do not depend on each other."""
    model = llama("gqa", head_dim=head_dim)
    recipe = Recipe.load("int8", cache="codes").with_options(options)
    report = ortolan.optimize_onnx(model, recipe=recipe, calibration=[prompt(model)])
    assert report.model is not None
    return report.model


@cache
def make_session(**options: Any) -> onnxruntime.InferenceSession:
    return session(make_model(**options))


def run(decoder: Decoder, end: int, ids: np.ndarray = IDS, at_once: int = 1) -> np.ndarray:
    """Continue with ids[length:end] in calls of `at_once` tokens, and return the logits."""
    cuts = range(decoder.length, end, at_once)
    return np.concatenate([decoder.step(ids[begin : min(begin + at_once, end)]) for begin in cuts])


@pytest.mark.parametrize("d_sub", [1, 2, 4])
@pytest.mark.parametrize("length", [10, 31, 32, 33, 63, 64, 65, 69])
def test_rewound_codes(d_sub: int, length: int) -> None:
    decoder, expected = (Decoder(make_session(d_sub=d_sub), ROOM) for _ in range(2))
    run(decoder, length)
    run(decoder, 70, OTHERS, at_once=7)
    decoder.rewind(length)
    run(expected, length)
    np.testing.assert_array_equal(run(decoder, 100), run(expected, 100))
