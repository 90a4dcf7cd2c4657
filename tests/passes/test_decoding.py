"""Pass verify decodes tokens with a compressed cache, and refuses a cache with wrong contents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

import ortolan
from ortolan import VerificationError
from ortolan.graph_passes.measure.decoding import calls_to_decode, check_contents, check_same_contents, decode
from ortolan.graph_passes.operators import nomad_cache_function
from ortolan.graph_passes.passes.cache import codebooks as cache_codebooks
from ortolan.graph_passes.passes.cache import compress_cache
from ortolan.graph_passes.passes.cache.compress_cache import CompressCachePass
from ortolan.graph_passes.weights.cache_format import CacheFormat, CacheUse, spread_of
from ortolan.graph_passes.weights.quantizers.codebooks import learn_codebook

from .cached_llama import EXACT, FORMS, LAYERS, compress, llama, prompt, recipe

Books = np.ndarray  # [kv_heads, head_dim / d_sub, 16, d_sub]


def zeros(books: Books) -> Books:
    return 0 * books


def mean_key(books: Books) -> Books:
    return np.broadcast_to(books.mean(axis=2, keepdims=True), books.shape).copy()


def too_small(books: Books) -> Books:
    return books / 3


def other_order(books: Books) -> Books:
    """Reverse the sub-quantizers and shift their centroids."""
    return np.ascontiguousarray(books[:, ::-1]) + np.float32(2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("ruin", "d_sub"),
    [
        (zeros, 1),
        (zeros, 2),
        (zeros, 4),
        (mean_key, 1),
        (mean_key, 4),
        (too_small, 1),
        (other_order, 1),
        (other_order, 2),
    ],
)
def test_ruined_codebooks_are_refused(
    monkeypatch: pytest.MonkeyPatch, form: str, ruin: Callable[[Books], Books], d_sub: int
) -> None:
    learn = cache_codebooks.learn_codebook
    monkeypatch.setattr(
        cache_codebooks, "learn_codebook", lambda keys, d_sub: ruin(learn(keys, d_sub)[None])[0].astype(np.float32)
    )
    with pytest.raises(
        VerificationError,
        match=r"node '.*layers.0.*': the keys of head \d in its cache 'present.0.key' are wrong by .* of their spread, "
        r"expected at most .*: codebooks '.*layers.0.*/codebooks' do not represent them",
    ):
        compress(llama(form), d_sub=d_sub)


@pytest.mark.parametrize("form", FORMS)
def test_codebooks_of_one_layer(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The codebooks are damaged when they are written into the model; the learned ones are correct."""
    right = CompressCachePass._constant

    def wrong(self, model, graph, name, array):  # type: ignore[no-untyped-def]
        return right(self, model, graph, name, 0 * array if "layers.1" in name else array)

    monkeypatch.setattr(CompressCachePass, "_constant", wrong)
    with pytest.raises(VerificationError, match=r"in its cache 'present.1.key' are wrong"):
        compress(llama(form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"d_sub": 2}, {"d_sub": 4}, {"values": "float32"}, EXACT], ids=str)
def test_the_error_of_decoded_tokens_is_reported(form: str, options: dict[str, object]) -> None:
    _, report = compress(llama(form), **options)
    assert report.cache is not None
    (error,) = report.cache.decode_error
    assert error.name == "logits"
    if options is EXACT:
        assert error.relative_l2 < 1e-5
    else:
        assert 1e-3 < error.relative_l2 < 0.7
    assert max(one.relative_l2 for one in report.portable_error) < 0.02
    assert len(report.portable_error) == 1 + sum(2 if options is EXACT else "values" in options for _ in range(LAYERS))


def test_a_limit_of_the_user_holds_for_decoded_tokens() -> None:
    model = llama("gqa")
    steps = recipe().with_options({"max_error": 0.01})
    with pytest.raises(
        VerificationError, match=r"a token decoded after a prompt of 42 tokens has relative error 0.* max_error"
    ):
        ortolan.optimize_onnx(model, recipe=steps, calibration=[prompt(model)])


def test_a_step_that_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches are correct, but attention decodes them with a wrong scale."""
    right = CompressCachePass.make_node

    def wrong(self, *given):  # type: ignore[no-untyped-def]
        node = right(self, *given)
        node.attributes["scale"] = ir.AttrFloat32("scale", -4.0)
        return node

    monkeypatch.setattr(CompressCachePass, "make_node", wrong)
    model = llama("gqa")
    with pytest.raises(VerificationError, match=r"'logits' has relative error"):
        compress(model, **EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_a_function_that_writes_another_cache(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    right = nomad_cache_function.nomad_cache_function

    def wrong(opset: int, uses: nomad_cache_function.CacheUses) -> ir.Function:
        function = right(opset, uses)
        node = next(node for node in function if node.outputs[0].name == "present_value")
        flipped = ir.node("BitShift", [node.inputs[0], node.inputs[0]], {"direction": "LEFT"})
        node.replace_input_with(0, flipped.outputs[0])
        function.insert_before(node, flipped)
        return function

    monkeypatch.setattr(compress_cache, "nomad_cache_function", wrong)
    with pytest.raises(
        VerificationError, match=r"node '.*layers.0.*': its cache 'present.0.value' differs between the native kernels"
    ):
        compress(llama(form))


def test_padding_is_left_out() -> None:
    """Only the longest sequence is decoded, without its padding and with most tokens in the prompt."""
    ids = np.arange(20, dtype=np.int64).reshape(2, 10)
    mask = np.ones((2, 13), np.int64)
    mask[0, :3] = mask[0, 8:] = mask[1, 3:7] = 0
    past = np.ones((2, 3, 3, 16), np.float32)
    feeds = {"input_ids": ids, "attention_mask": mask, "past.key": past}
    calls = calls_to_decode([feeds], ["past.key"])
    assert calls is not None
    assert [call["input_ids"].tolist() for call in calls] == [[[14, 15, 16]], [[17]], [[18]], [[19]]]
    assert [call["attention_mask"].shape for call in calls] == [(1, 3), (1, 4), (1, 5), (1, 6)]
    assert calls[0]["past.key"].shape == (1, 3, 0, 16) and "past.key" not in calls[1]
    assert calls_to_decode([feeds | {"other": ids}], ["past.key"]) is None
    assert calls_to_decode([feeds | {"input_ids": ids[:, :1]}], ["past.key"]) is None
    done = decode(lambda given: [given["input_ids"] + len(given), given["past.key"] + 1], calls, {"past.key": 1})
    assert done.last_feeds["past.key"].shape == (1, 3, 0, 16) and done.steps[0][1] is None
    np.testing.assert_array_equal(done.steps[2][0], [[19 + 3]])


@pytest.mark.parametrize("form", FORMS)
def test_answers_to_padding_are_not_compared(form: str) -> None:
    model = llama(form)
    feeds = prompt(model)
    feeds["attention_mask"][1, 30:] = 0
    _, report = compress(model, [feeds], **EXACT)
    assert len(report.output_error) == 1 + 2 * LAYERS
    assert max(error.relative_l2 for error in report.output_error) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_answers_to_padding_are_not_compared_where_no_token_is_decoded(form: str) -> None:
    """An additional input prevents decoding, so pass verify compares answers to the given inputs instead."""
    proto = llama(form)
    model = ir.from_proto(proto)
    feeds = prompt(proto) | {"number": np.ones(1, np.float32)}
    feeds["attention_mask"][0, 30:] = 0
    number = ir.Value(name="number", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    model.graph.inputs.append(number)
    node = ir.node("Neg", [number], name="negative")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "negative", number.type, number.shape
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    _, report = compress(ir.to_proto(model), [feeds], **EXACT)
    assert any("cache was not verified by decoding" in note for note in report.notes)
    assert max(error.relative_l2 for error in report.portable_error) < 0.05


def test_contents() -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((1, 2, 40, 16)).astype(np.float32) + 3
    books = np.stack([learn_codebook(head, 1) for head in keys[0]])
    use = CacheUse("past", "present", "node", CacheFormat(16, books), "books", spread_of(keys[0]))
    found = {"present": CacheFormat(16, books).encode(keys)}
    check_contents([use], {"present": keys}, found, 0.0)
    # Keys that are close together have little spread, so errors are divided by the spread of the calibration keys.
    close = keys[:, :, :4] * 0.01 + 3
    check_contents([use], {"present": close}, {"present": CacheFormat(16, books).encode(close)}, 0.0)
    with pytest.raises(VerificationError, match="node 'node': the keys of head 1 in its cache 'present'"):
        check_contents([use], {"present": keys * np.array([1, 2])[None, :, None, None]}, found, 0.0)
    values = CacheUse("past", "present", "node", CacheFormat(16))
    found = {"present": CacheFormat(16).encode(keys)}
    check_contents([values], {"present": keys}, found, 0.0)
    with pytest.raises(VerificationError, match=r"the values of head \d in its cache 'present' are wrong by 0\.0"):
        check_contents([values], {"present": keys * 1.05}, found, 0.0)
    check_contents([values], {"present": keys * 1.05}, found, 0.1)
    other = {"present": CacheFormat(16).encode(keys * 1.001)}
    check_same_contents([values], found, other, 0.0)
    with pytest.raises(VerificationError, match=r"between the native kernels and the portable operators: by 0\.0"):
        check_same_contents([values], found, {"present": CacheFormat(16).encode(keys * 1.05)}, 0.0)
