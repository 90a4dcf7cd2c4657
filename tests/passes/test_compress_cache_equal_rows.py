"""A compressed cache whose key rows and value rows have equal size, for hosts that use one shape for all caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortolan
from ortolan.errors import RecipeError
from ortolan.generate import Decoder, generate, shares_cache
from ortolan.graph_passes.weights.cache_format import CacheFormat

from .cached_llama import (
    FORMS,
    LAYERS,
    VOCABULARY,
    Decoding,
    compress,
    decode,
    distance,
    llama,
    prompt,
    recipe,
    session,
)

CUTS = (70, 71, 72, 73, 74)
WIDTH = 16 + 2  # bytes per row for a head size of 16


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d_sub", [1, 2, 4])
def test_caches_are_equally_wide(form: str, d_sub: int) -> None:
    model = llama(form)
    found, report = compress(model, d_sub=d_sub, equal_rows=True)
    for before, after in ((model.graph.input, found.graph.input), (model.graph.output, found.graph.output)):
        assert [value.name for value in before] == [value.name for value in after]
        caches = [value.type.tensor_type for value in after if value.name.endswith((".key", ".value"))]
        assert len(caches) == 2 * LAYERS
        for kind in caches:
            assert kind.elem_type == onnx.TensorProto.UINT8
            assert [dim.dim_value for dim in kind.shape.dim][1::2] == [2, WIDTH]
    assert report.portable and report.cache is not None
    assert (report.cache.bytes_before, report.cache.bytes_after) == (LAYERS * 2 * 2 * 64, LAYERS * 2 * 2 * WIDTH)
    assert report.cache.decoded_tokens == 8 and report.cache.decode_error[0].relative_l2 < 0.6
    assert any("became equally wide, 18 bytes per token and head" in note for note in report.notes)


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_narrow_caches(form: str) -> None:
    model = llama(form)
    narrow, equal = (compress(model, equal_rows=equal)[0] for equal in (False, True))
    np.testing.assert_array_equal(decode(equal, CUTS), decode(narrow, CUTS))


@pytest.mark.parametrize("form", FORMS)
def test_generation(form: str, tmp_path: Any) -> None:
    """The cache has the same contents if it grows as if it is a shared buffer with given lengths."""
    model, _ = compress(llama(form), equal_rows=True)
    onnx.save(model, tmp_path / "c.onnx")
    assert shares_cache(tmp_path / "c.onnx") == (form == "gqa")
    runner = session(model)
    ids = [1, 20, 30, 4, 4, 90] * 8
    made = generate(runner, ids, 40)
    assert made == generate(session(compress(llama(form))[0]), ids, 40)
    growing = Decoder(runner)
    assert generate(growing, ids, 40) == made
    assert {cache.shape for cache in growing.cache().values()} == {(1, 2, 87, WIDTH)}
    if form == "gqa":
        decoder = Decoder(runner, cache_length=96)
        assert generate(decoder, ids, 40) == made
        for name, cache in decoder.cache().items():
            row = 8 if name.endswith("key") else WIDTH
            shared, grown = (array.reshape(2, -1)[:, : 87 * row] for array in (cache, growing.cache()[name]))
            np.testing.assert_array_equal(shared, grown)


@pytest.mark.parametrize("form", FORMS)
def test_it_runs_without_our_library(form: str) -> None:
    found, _ = compress(llama(form), equal_rows=True)
    decoding = Decoding(found, np.random.default_rng(0).integers(0, VOCABULARY, (2, 41)))
    portable = onnxruntime.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
    next(decoding.run(found, (40,)))
    feeds = decoding.feeds(40, 41)
    ours, others = (one.run(None, feeds) for one in (session(found), portable))
    assert distance(others[0], ours[0]) < 0.05
    for a, b in zip(ours[1:3], others[1:3], strict=True):  # outputs of layer 0, whose inputs are not rounded
        np.testing.assert_array_equal(a, b)


def test_with_exact_keys_and_a_prompt() -> None:
    model = llama("gqa")
    expected = decode(model, CUTS)[:, 70:]
    near, far = (compress(model, equal_rows=True, d_sub=2, window=window)[0] for window in (60, 0))
    assert distance(decode(near, CUTS)[:, 70:], expected) < distance(decode(far, CUTS)[:, 70:], expected)
    report = ortolan.optimize_onnx(
        model, recipe=recipe(equal_rows=True), calibration=[prompt(model, batch=1)], prompt=np.arange(40)
    )
    assert report.model is not None and report.portable


def test_what_goes_with_it() -> None:
    for keys, values in (("codes", "float32"), ("float32", "float32")):
        with pytest.raises(
            RecipeError,
            match=f'equal_rows = true needs keys = "codes" and values = "int8"; keys are "{keys}" and values '
            f'"{values}"',
        ):
            recipe(keys=keys, values=values, equal_rows=True)
    with pytest.raises(RecipeError, match="equal_rows is 1"):
        recipe(equal_rows=1)


def test_of_some_layers() -> None:
    report = ortolan.optimize_onnx(llama("gqa"), recipe=recipe(equal_rows=True, exclude=["*layers.0*"]), dry_run=True)
    assert any(note.startswith("some caches stay float32") for note in report.notes)
    assert any("would become equally wide" in note for note in report.notes)


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_the_format_is_the_narrow_one_in_front(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    floats = rng.standard_normal((2, 3, tokens, 16), dtype=np.float32)
    for books in (None, rng.standard_normal((3, 16, 16, 1), dtype=np.float32)):
        narrow, equal = CacheFormat(16, books), CacheFormat(16, books, equal_width=21)
        small, large = narrow.encode(floats), equal.encode(floats)
        assert large.shape == (2, 3, tokens, 21)
        used = tokens * narrow.row_bytes
        heads = large.reshape(6, tokens * 21)
        np.testing.assert_array_equal(heads[:, :used], small.reshape(6, used))
        assert not heads[:, used:].any()
        np.testing.assert_array_equal(equal.decode(large), narrow.decode(small))
