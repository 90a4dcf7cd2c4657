"""Pass unpad: answers for tokens do not change, and inputs and outputs keep their names and shapes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import ortolan
from ortolan import Recipe
from ortolan.models import tiny

from ..sampling import examples
from .attention_forms import FORMS
from .padded_models import (
    MASKS,
    add_nodes,
    answers,
    as_written,
    assert_zero_elsewhere,
    attention_model,
    both,
    changed,
    encoder_feeds,
    first_token,
    fuse_and_unpad,
    masked_mean,
    proto,
    with_unpad,
)
from .small_models import op_types, optimize, relative_error, run

ENCODERS: dict[str, Callable[[], onnx.ModelProto]] = {
    "bert": lambda: proto(tiny.tiny_bert()),
    "mpnet": lambda: proto(tiny.tiny_mpnet()),
    "modernbert": lambda: proto(tiny.tiny_modernbert()),
}
RECIPES = {
    "int8": Recipe.of(weights="int8"),
    "bf16": Recipe.of(weights="bf16"),
    "int4": Recipe.of(weights="int4"),
    "sparse bf16": Recipe.of(weights="bf16", sparsity=0.5),
}


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, str], tuple[onnx.ModelProto, onnx.ModelProto, onnx.ModelProto]]:
    """Return the original, the padded and the unpadded model, by encoder and recipe."""
    found = {}
    for encoder, make in ENCODERS.items():
        for name, recipe in RECIPES.items():
            original = make()
            padded, report = both(original, recipe)
            found[encoder, name] = original, padded, changed(report)
    return found


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mask", MASKS)
def test_tokens_that_are_there_are_answered_as_before(models, encoder: str, recipe: str, mask: str) -> None:
    """Answers for tokens are equal: the same bits with right padding, otherwise up to rounding."""
    _, padded, unpadded = models[encoder, recipe]
    feeds = encoder_feeds(padded, MASKS[mask])
    there = feeds["attention_mask"] != 0
    (expected,), (y,) = as_written(padded, feeds), as_written(unpadded, feeds)
    assert y.shape == expected.shape
    assert_zero_elsewhere(y, there)
    if mask in ("behind", "none"):
        np.testing.assert_array_equal(y[there], expected[there])
    else:
        assert relative_error(expected[there], y[there]) < 0.01
    (plain,) = run(unpadded, feeds)
    assert_zero_elsewhere(plain, there)
    assert relative_error(expected[there], plain[there]) < 0.02


@pytest.mark.parametrize("encoder", ENCODERS)
def test_the_original_is_answered_for(models, encoder: str) -> None:
    """Answers match the original's, for any token id at masked positions."""
    original, _, unpadded = models[encoder, "bf16"]
    for mask in MASKS.values():
        feeds = encoder_feeds(original, mask)
        there = feeds["attention_mask"] != 0
        (expected,), (y,) = run(original, feeds), answers(unpadded, feeds)
        assert relative_error(expected[there], y[there]) < 0.02
        if encoder == "mpnet":  # MPNet counts positions from the padding ids
            continue
        feeds["input_ids"][~there] = 7
        assert relative_error(y[there], answers(unpadded, feeds)[0][there]) < 0.02


@examples(40)
@given(
    encoder=st.sampled_from(sorted(ENCODERS)),
    recipe=st.sampled_from(["int8", "int4"]),  # bf16 layers with few rows accumulate in a different order
    mask=st.integers(1, 4).flatmap(
        lambda batch: st.integers(0, 30).flatmap(
            lambda tokens: st.lists(
                st.lists(st.sampled_from([0, 1, 1, 2]), min_size=tokens, max_size=tokens),
                min_size=batch,
                max_size=batch,
            )
        )
    ),
)
def test_a_sequence_is_answered_alike_alone_and_in_any_batch(models, encoder, recipe, mask) -> None:
    """A sequence has the same answers alone and in a batch.

    Sequences may be empty; any nonzero value in attention_mask marks a token.
    """
    original, _, unpadded = models[encoder, recipe]
    mask = np.array(mask, np.int64).reshape(len(mask), -1)
    feeds = encoder_feeds(original, mask)
    (y,) = answers(unpadded, feeds)
    assert y.shape == (*mask.shape, 48)
    assert_zero_elsewhere(y, mask)
    for b in range(len(mask)):
        alone = {name: array[b : b + 1] for name, array in feeds.items()}
        np.testing.assert_array_equal(answers(unpadded, alone)[0][0], y[b])


@pytest.mark.parametrize("recipe", RECIPES)
def test_bert_computes_everything_on_packed_tokens(models, recipe: str) -> None:
    """The three embeddings each have a PackTokens, the only UnpackTokens is at the end, and masks are gone."""
    _, padded, unpadded = models["bert", recipe]
    left = op_types(unpadded)
    assert left.count("UnpackTokens") == 1 and left.count("PackedNoMADAttention") == 2
    assert left.count("PackTokens") <= 3
    before = op_types(padded)
    assert {"Unsqueeze", "Sub"} <= set(before) and "Sub" not in left
    functions = {function.name for function in unpadded.functions}
    assert {"PackTokens", "UnpackTokens", "PackedNoMADAttention"} <= functions and "NoMADAttention" not in functions


@pytest.mark.parametrize("encoder", ENCODERS)
def test_inputs_and_outputs_stay(models, encoder: str) -> None:
    original, _, unpadded = models[encoder, "int8"]
    for side in ("input", "output"):
        before, after = (
            [one.SerializeToString() for one in getattr(model.graph, side)] for model in (original, unpadded)
        )
        assert before == after


@pytest.mark.parametrize("kind", [TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.FLOAT])
def test_any_type_of_attention_mask(kind: int) -> None:
    model = proto(tiny.tiny_bert())
    (value,) = (one for one in model.graph.input if one.name == "attention_mask")
    value.type.tensor_type.elem_type = kind
    if kind != TensorProto.INT64:
        cast = helper.make_node("Cast", ["attention_mask"], ["numbers"], to=TensorProto.INT64)
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                if name == "attention_mask":
                    node.input[index] = "numbers"
        model.graph.node.insert(0, cast)
    padded, report = both(model, RECIPES["int8"])
    unpadded = changed(report)
    (given_type,) = (one.type.tensor_type.elem_type for one in unpadded.graph.input if one.name == "attention_mask")
    assert given_type == kind
    feeds = encoder_feeds(model, MASKS["behind"])
    there = feeds["attention_mask"] != 0
    for library in (True, False):
        (y,) = run(unpadded, feeds, library=library)
        assert_zero_elsewhere(y, there)
        assert relative_error(run(padded, feeds, library=True)[0][there], y[there]) < (1e-6 if library else 0.02)


def test_without_functions() -> None:
    report = optimize(proto(tiny.tiny_bert()), recipe=with_unpad(RECIPES["bf16"]), portable=False)
    assert report.model is not None and not report.model.functions
    assert "PackedNoMADAttention" in op_types(report.model)


def test_a_dry_run_says_that_it_is_found_later() -> None:
    report = optimize(proto(tiny.tiny_bert()), recipe=with_unpad(RECIPES["bf16"]), dry_run=True)
    assert any("whether padding can be skipped is found after layers have been replaced" in one for one in report.notes)


# Forms without a padding mask.
NO_PADDING = {"no mask", "position bias", "causal", "Attention of heads", "Attention with softcap"}


@pytest.mark.parametrize("form", sorted(set(FORMS) - NO_PADDING))
def test_every_form_of_attention(form: str) -> None:
    """Masked tokens have no effect, whatever else is added to the scores."""
    model = attention_model(FORMS[form])
    report = fuse_and_unpad(model)
    unpadded = changed(report)
    for mask in MASKS.values():
        feeds = encoder_feeds(model, mask)
        there = feeds["attention_mask"] != 0
        (expected,) = run(model, feeds)
        for library in (True, False):
            (y,) = run(unpadded, feeds, library=library)
            assert_zero_elsewhere(y, there)
            seen = there & ~np.isnan(expected).any(-1)
            np.testing.assert_allclose(y[seen], expected[seen], atol=2e-5)


POOLING = {
    "mean": masked_mean,
    "first": first_token,
    "first by Slice": lambda model: first_token(model, by="Slice"),
    "mean and all tokens": lambda model: masked_mean(model, keep=True),
    "first and all tokens": lambda model: first_token(model, keep=True),
}


@pytest.mark.parametrize("pooling", POOLING)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_pooling(pooling: str, encoder: str) -> None:
    """Pooling gives the same vectors; the first token is position 0, even with left padding."""
    model = POOLING[pooling](ENCODERS[encoder]())
    recipe = Recipe.of(weights="bf16")
    padded, report = both(model, recipe)
    unpadded = changed(report)
    for name, mask in MASKS.items():
        feeds = encoder_feeds(model, mask)
        original, expected, found = run(model, feeds), as_written(padded, feeds), as_written(unpadded, feeds)
        plain = run(unpadded, feeds)
        if name in ("behind", "none") and pooling.startswith("first"):
            np.testing.assert_array_equal(found[-1], expected[-1])
        elif name in ("behind", "none"):  # means are summed in a different order
            np.testing.assert_allclose(found[-1], expected[-1], rtol=0, atol=1e-6)
        rows = np.ones(len(mask), bool)
        # For a masked query, all keys of its window may be masked.
        if encoder == "modernbert" and pooling.startswith("first"):
            rows = np.array(mask)[:, 0] != 0
        for y in (found, plain):
            assert relative_error(original[-1][rows], y[-1][rows]) < 0.03
            assert relative_error(expected[-1][rows], y[-1][rows]) < 0.02
        if len(found) == 2:
            there = feeds["attention_mask"] != 0
            assert relative_error(expected[0][there], found[0][there]) < 0.02
            if not pooling.startswith("first"):
                assert_zero_elsewhere(found[0], there)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_mean_has_the_same_bits_at_any_padding(encoder: str) -> None:
    """The mean is summed in token order, whatever the padding and gaps are."""
    model = masked_mean(ENCODERS[encoder](), keep=True)
    unpadded = changed(optimize(model, recipe=with_unpad(RECIPES["int8"])))
    assert {"CumSum", "ReduceSum"} <= set(op_types(unpadded))
    feeds = encoder_feeds(model, [[1] * 40, [1] * 13 + [0] * 27, [0] * 9 + [1] * 30 + [0]])
    _, vectors = answers(unpadded, feeds)
    for row, there in enumerate(feeds["attention_mask"] != 0):
        alone = {name: array[row : row + 1, there] for name, array in feeds.items()}
        if encoder == "mpnet" or there[0]:  # with left padding, the other models count different positions
            np.testing.assert_array_equal(answers(unpadded, alone)[1][0], vectors[row])
    nothing = {name: array[:, :0] for name, array in feeds.items()}
    assert [y.shape for y in answers(unpadded, nothing)] == [(3, 0, 48), (3, 48)]


def test_a_convolution_of_another_input() -> None:
    """The convolution becomes a layer with windows, which must not hide that the text encoder's layers have none."""
    model = first_token(ENCODERS["bert"]())
    model.graph.input.append(helper.make_tensor_value_info("sound", TensorProto.FLOAT, ["batch", 48, "frames"]))
    convolution = helper.make_node("Conv", ["sound", "kernel"], ["heard"], name="heard", pads=[1, 1])
    kernel = np.random.default_rng(4).standard_normal((32, 48, 3), np.float32)
    model = add_nodes(model, [convolution], {"heard": ["batch", 32, "frames"]}, {"kernel": kernel}, keep=True)
    unpadded = changed(optimize(model, recipe=with_unpad(Recipe.of(weights="bf16"))))
    (layer,) = (node for node in unpadded.graph.node if node.name == "heard")
    assert layer.op_type == "SparseAMXMatMul"


def test_a_dimension_that_is_given(tmp_path) -> None:
    """The export has fixed batch and token sizes, and is read from a file."""
    model = proto(tiny.tiny_bert())
    for value in (*model.graph.input, *model.graph.output):
        for axis, size in enumerate((4, 9)):
            value.type.tensor_type.shape.dim[axis].dim_value = size
    onnx.save(model, str(tmp_path / "model.onnx"))
    report = ortolan.optimize_onnx(
        tmp_path / "model.onnx",
        tmp_path / "fast.onnx",
        recipe=with_unpad(RECIPES["int8"]),
        options={"verify.seconds": 0.0, "may_grow": True},
    )
    assert any(note.startswith("padding is skipped") for note in report.notes)
    feeds = encoder_feeds(model, MASKS["behind"])
    there = feeds["attention_mask"] != 0
    (y,) = run(str(tmp_path / "fast.onnx"), feeds, library=True)
    assert relative_error(run(model, feeds)[0][there], y[there]) < 0.05
