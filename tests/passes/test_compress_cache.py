"""Attention with a cache is replaced by NoMADAttention: exact with float caches, approximate with codes.

Graphs that only look like such attention stay unchanged.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import ortolan
from ortolan import Recipe, _native
from ortolan.errors import CalibrationError, NothingToReplaceError, RecipeError
from ortolan.generate import Decoder, generate, shares_cache
from ortolan.graph_passes.report.lines import count
from ortolan.models import tiny

from .cached_llama import (
    EXACT,
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
    unequal_mask,
)
from .small_models import op_types


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_float_caches_change_nothing(form: str, kv_heads: int) -> None:
    model = llama(form, num_key_value_heads=kv_heads)
    found, report = compress(model, **EXACT)
    assert op_types(found).count("NoMADAttention") == LAYERS
    assert not {"GroupQueryAttention", "Softmax"} & set(op_types(found))
    assert len(report.output_error) == 1 + 2 * LAYERS
    if form == "gqa":  # GroupQueryAttention supports only prompts with an empty cache, and single tokens
        np.testing.assert_allclose(decode(found, (70, 71, 72)), decode(model, (70, 71, 72)), atol=2e-5)
    else:
        np.testing.assert_allclose(decode(found), decode(model), atol=2e-5)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_of_the_standard_form(padding: str) -> None:
    model = llama("standard")
    mask = unequal_mask(padding)
    seen = mask.astype(bool)
    for options, most in ((EXACT, 1e-6), ({}, 0.1)):
        found, _ = compress(model, **options)
        assert distance(decode(found, mask=mask)[seen], decode(model, mask=mask)[seen]) < most


def test_prompts_of_different_lengths_and_group_query_attention() -> None:
    model = llama("gqa")
    mask = np.ones((2, 40), np.int64)
    mask[1, 25:] = 0
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 40))
    for options, most in ((EXACT, 1e-6), ({}, 1e-6)):  # prompts are exact
        found, _ = compress(model, **options)
        logits = [next(Decoding(one, ids, mask).run(one, (40,))) for one in (found, model)]
        seen = mask.astype(bool)
        assert distance(logits[0][seen], logits[1][seen]) < most


@pytest.mark.parametrize("form", FORMS)
def test_compressed_caches_are_near(form: str) -> None:
    model = llama(form)
    cuts = (70, 71, 72, 73, 74)
    expected = decode(model, cuts)
    errors = []
    for options in ({"values": "float32"}, {"d_sub": 1}, {"d_sub": 2}, {"d_sub": 4}):
        found, report = compress(model, **options)
        logits = decode(found, cuts)
        np.testing.assert_allclose(logits[:, :70], expected[:, :70], atol=2e-5)  # prompts are exact
        errors.append(distance(logits[:, 70:], expected[:, 70:]))
        cache = report.cache
        assert cache is not None and (cache.prompt_tokens, cache.decoded_tokens) == (42, 8)
        # Errors of tokens that read the compressed cache.
        assert [error.name for error in cache.decode_error] == ["logits"]
        assert report.output_error[0].relative_l2 < 1e-5
        assert 0.3 * errors[-1] < cache.decode_error[0].relative_l2 < 2 * errors[-1]
    # Random weights give keys without clusters, so errors are larger than in real models.
    assert 1e-3 < errors[0] < 0.12 and errors[0] < 1.05 * errors[1] < errors[2] < errors[3] < 0.6


@pytest.mark.parametrize("d_sub", [1, 2, 4])
def test_a_step_reads_what_codes_stand_for(d_sub: int) -> None:
    """The original gives almost the same answers if its cache holds the decoded keys and values."""
    model = llama("standard")
    found, _ = compress(model, d_sub=d_sub)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, 71))
    decoding = Decoding(found, ids)
    next(decoding.run(found, (70,)))
    books = {
        one.name.split("/")[2]: numpy_helper.to_array(one) for one in found.graph.initializer if "books" in one.name
    }
    original = Decoding(model, ids)
    for name, cache in decoding.caches.items():
        book = books[f"layers.{name.split('.')[1]}"]
        heads = [
            _native.decode_keys(head, 70, book[number]) if name.endswith("key") else _native.decode_values(head, 70)
            for number, head in enumerate(cache[0])
        ]
        original.caches[name] = np.stack(heads)[None]
    logits = [
        session(one).run(["logits"], steps.feeds(70, 71))[0] for one, steps in ((found, decoding), (model, original))
    ]
    # Only the new token's own key and the scores, in steps of 1/255, still differ.
    assert distance(logits[0], logits[1]) < 0.04


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d_sub", [1, 2, 4])
def test_caches_keep_their_names_and_places(form: str, d_sub: int) -> None:
    model = llama(form)
    found, report = compress(model, d_sub=d_sub)
    for before, after in ((model.graph.input, found.graph.input), (model.graph.output, found.graph.output)):
        assert [value.name for value in before] == [value.name for value in after]
        for value in after:
            kind = value.type.tensor_type
            if value.name.endswith((".key", ".value")):
                assert kind.elem_type == onnx.TensorProto.UINT8
                last = 16 // d_sub // 2 if value.name.endswith("key") else 2 + 16
                assert [dim.dim_value or dim.dim_param for dim in kind.shape.dim][1::2] == [2, last]
    notes = " ".join(report.notes)
    assert f"{LAYERS} attentions with a cache became one NoMADAttention each" in notes
    assert "needs Ortolan's library" not in notes and report.portable
    ids = np.arange(20)[None] % VOCABULARY
    decoding = Decoding(found, ids)
    list(decoding.run(found, (11, 12)))
    assert {cache.shape[:3] for cache in decoding.caches.values()} == {(1, 2, 12)}
    books = [one for one in found.graph.initializer if "codebooks" in one.name]
    assert [list(book.dims) for book in books] == [[2, 16 // d_sub, 16, d_sub]] * LAYERS


@pytest.mark.parametrize("form", FORMS)
def test_generation(form: str, tmp_path: Any) -> None:
    """The cache has the same contents if it grows as if it is a shared buffer with given lengths."""
    model, _ = compress(llama(form))
    onnx.save(model, tmp_path / "c.onnx")
    assert shares_cache(tmp_path / "c.onnx") == (form == "gqa")
    runner = session(model)
    ids = [1, 20, 30, 4, 4, 90] * 8
    made = generate(runner, ids, 40)
    assert len(made) == 40
    if form == "gqa":
        decoder = Decoder(runner, cache_length=96)
        assert generate(decoder, ids, 40) == made
        assert decoder.length == 87
        decoder.reset()
        assert generate(decoder, ids[:5], 3) == generate(runner, ids[:5], 3)


def test_generation_with_float_caches_is_that_of_the_original() -> None:
    for form in FORMS:
        model = llama(form)
        found, _ = compress(model, **EXACT)
        ids = [1, 20, 30, 4, 4, 90]
        assert generate(session(found), ids, 30) == generate(session(model), ids, 30)


def test_the_same_calibration_gives_the_same_model() -> None:
    model = llama("gqa")
    assert compress(model)[0].SerializeToString() == compress(model)[0].SerializeToString()


def test_keys_of_padding_are_not_learned_from() -> None:
    """Codebooks do not depend on the tokens at padding."""
    model = llama("gqa")
    mask = np.ones((1, 60), np.int64)
    mask[0, 40:] = 0
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, 60))
    others = np.where(mask != 0, ids, (ids + 1) % VOCABULARY)
    feeds = [Decoding(model, one, mask).feeds(0, 60) for one in (ids, others)]
    books = [
        [one.raw_data for one in compress(model, [feed])[0].graph.initializer if "codebooks" in one.name]
        for feed in feeds
    ]
    assert len(books[0]) == LAYERS and books[0] == books[1]


def test_some_layers_by_name() -> None:
    model = llama("gqa")
    found, report = compress(model, exclude=["*layers.0*"])
    assert op_types(found).count("NoMADAttention") == LAYERS - 1
    types = {value.name: value.type.tensor_type.elem_type for value in found.graph.input}
    assert types["past_key_values.0.key"] == onnx.TensorProto.FLOAT
    assert types["past_key_values.1.key"] == onnx.TensorProto.UINT8
    assert any(note.startswith("cache not compressed: excluded: '/model/layers.0") for note in report.notes)
    assert distance(decode(found, (30, 31, 32)), decode(model, (30, 31, 32))) < 0.02
    with pytest.raises(NothingToReplaceError, match=r"can be compressed: .*layers.0.*: not selected"):
        compress(model, select=["*layers.9*"])


def test_a_dry_run_changes_nothing_and_needs_no_calibration() -> None:
    report = ortolan.optimize_onnx(llama("standard"), recipe=recipe(), dry_run=True)
    assert f"{LAYERS} attentions with a cache would become one NoMADAttention each" in report.notes[0]
    assert "takes 0.203 of the bytes" in report.notes[0]


def test_codes_want_real_feeds() -> None:
    with pytest.raises(CalibrationError, match="pass 'compress_cache' needs calibration inputs"):
        ortolan.optimize_onnx(llama("gqa"), recipe=recipe())
    assert ortolan.optimize_onnx(llama("gqa"), recipe=recipe(**EXACT)).model is not None


def test_impossible_options() -> None:
    with pytest.raises(RecipeError, match='keys = "float32" needs values = "float32"'):
        recipe(keys="float32")
    with pytest.raises(RecipeError, match=r"d_sub is 3"):
        recipe(d_sub=3)
    with pytest.raises(RecipeError, match='window = 0 and sinks = 4 need keys = "codes"'):
        recipe(**EXACT, sinks=4)
    with pytest.raises(RecipeError, match=r"window is -1"):
        recipe(window=-1)
    old = llama("standard")
    old.opset_import[0].version = 12
    steps = [{"name": "compress_cache"}]
    with pytest.raises(RecipeError, match="pass 'compress_cache' needs pass 'normalize' before it"):
        ortolan.optimize_onnx(old, recipe=Recipe.from_dict({"name": "c", "pass": steps}))


def attentions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]


def set_attribute(name: str, value: Any) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        for node in attentions(model):
            node.attribute.append(helper.make_attribute(name, value))

    return change


def add_bias(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("bias", onnx.TensorProto.FLOAT, [1, 1, "s", "t"]))
    for node in attentions(model):
        node.input.extend(["", "bias"])


def read_head_dim(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Shape", ["past_key_values.0.key"], ["key_shape"], "asks"))
    model.graph.output.append(helper.make_tensor_value_info("key_shape", onnx.TensorProto.INT64, [4]))


def use_present(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Relu", ["present.0.key"], ["other"], "reads"))
    model.graph.output.append(helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, ["b", 2, "t", 16]))


def hide_present(model: onnx.ModelProto) -> None:
    kept = [value for value in model.graph.output if value.name != "present.0.value"]
    del model.graph.output[:]
    model.graph.output.extend(kept)


@pytest.mark.parametrize(
    ("change", "reason", "left"),
    [
        (set_attribute("local_window_size", "64"), "its attribute 'local_window_size' is not", 2),
        (set_attribute("softcap", -3.0), r"its scores are capped \(softcap\) at -3, expected", 2),
        (set_attribute("smooth_softmax", 2), "it has smooth_softmax 2", 2),
        (set_attribute("causal", 0), "it has causal 0", 2),
        (add_bias, "it has an input attention_bias", 2),
        (read_head_dim, "its cache 'past_key_values.0.key' is also used by Shape 'asks'", 1),
        (use_present, "its cache 'present.0.key' is also used by Relu 'reads'", 1),
        (hide_present, "its cache 'present.0.value' is not an output of the graph", 1),
    ],
)
def test_what_is_not_known_is_left_alone(change: Callable[[onnx.ModelProto], None], reason: str, left: int) -> None:
    model = llama("gqa")
    change(model)
    if left == LAYERS:
        with pytest.raises(NothingToReplaceError, match=f": {reason}"):
            ortolan.optimize_onnx(model, recipe=recipe(**EXACT), dry_run=True)
        return
    report = ortolan.optimize_onnx(model, recipe=recipe(**EXACT), dry_run=True)
    assert any(note.startswith(f"cache not compressed: {reason}") for note in report.notes), report.notes
    assert sum(f"{count(LAYERS - left, 'attention')} with a cache would" in note for note in report.notes) == 1


def test_attributes_that_ask_for_nothing_are_fine() -> None:
    model = llama("gqa")
    for name, value in (("local_window_size", -1), ("softcap", 0.0), ("smooth_softmax", 0)):
        set_attribute(name, value)(model)
    assert "GroupQueryAttention" not in op_types(compress(model, **EXACT)[0])


def test_a_head_that_is_no_multiple_of_16() -> None:
    model = llama("standard", head_dim=8)
    with pytest.raises(NothingToReplaceError, match="its head size is 8, expected a multiple of 16"):
        ortolan.optimize_onnx(model, recipe=recipe(), dry_run=True)
    found, _ = compress(model, **EXACT)  # float caches support any head size
    np.testing.assert_allclose(decode(found), decode(model), atol=2e-5)


@pytest.mark.parametrize("options", [{}, EXACT])
@pytest.mark.parametrize("dry_run", [False, True])
def test_models_without_a_cache(options: dict[str, Any], dry_run: bool) -> None:
    error = r"has no cache that can be compressed.* does not come from a cache"
    with pytest.raises(NothingToReplaceError, match=error):
        ortolan.optimize_onnx(ir.to_proto(tiny.tiny_bert()), recipe=recipe(**options), dry_run=dry_run)
    with pytest.raises(NothingToReplaceError, match="holds no attention with a cache, so no cache can be compressed"):
        ortolan.optimize_onnx(ir.to_proto(tiny.mlp()), recipe=recipe(**options), dry_run=dry_run)


def test_a_model_without_a_cache_whose_layers_are_replaced() -> None:
    report = ortolan.optimize_onnx(ir.to_proto(tiny.mlp()), weights="int8", cache="float32")
    assert report.replaced
    assert "no attention with a cache was found" in report.notes


@pytest.mark.parametrize("form", FORMS)
def test_with_int4_weights_in_one_recipe(form: str) -> None:
    model = llama(form)
    steps = [
        {"name": "normalize"},
        {"name": "calibrate"},
        {"name": "quantize", "method": "rtn", "bits": 4, "group_size": 32, "symmetric": False},
        {"name": "compress_cache"},
        {"name": "replace", "op": "W4A8MatMul", "may_grow": True},
        {"name": "verify", "seconds": 0.0},
    ]
    report = ortolan.optimize_onnx(
        copy.deepcopy(model), recipe=Recipe.from_dict({"name": "both", "pass": steps}), calibration=[prompt(model)]
    )
    assert report.model is not None
    assert op_types(report.model).count("NoMADAttention") == LAYERS
    assert "W4A8MatMul" in op_types(report.model)
    assert distance(decode(report.model, (30, 31, 32)), decode(model, (30, 31, 32))) < 0.3


def test_the_recipe() -> None:
    model = llama("gqa")
    report = ortolan.optimize_onnx(
        model, recipe="long-context", calibration=[prompt(model)], options={"verify.seconds": 0.0}
    )
    assert report.model is not None and op_types(report.model).count("NoMADAttention") == LAYERS
    text = " ".join(str(report).split())
    assert ", cache 4.92x smaller, cosine similarity " in text
    assert "recipe long-context" in text and "layers replaced " in text
    assert "cache 512 B -> 104 B per token (4.92x smaller)" in text
    assert " 2 attention layers: keys 4-bit codes of 1 element, values int8" in text
    assert "decoded logits: relative error 0." in text and "(8 tokens, one per call, after a prompt of 42)" in text
    table = json.loads(report.to_json())["cache"]
    assert (table["bytes_before"], table["bytes_after"]) == (2 * LAYERS * 2 * 16 * 4, LAYERS * 2 * (8 + 18))
    assert table["decode_error"][0]["name"] == "logits"


@pytest.mark.parametrize("hides", [True, False, None])
def test_masks_that_are_cut_to_the_number_of_keys(hides: bool | None) -> None:
    """transformers 4.57, exported by Optimum: the mask is sliced to the length of the repeated keys.

    hides: True if a boolean mask is true for masked keys, None if the mask is float. The mask is twice as long as the
    keys, so a lost Slice changes the answers.
    """
    model = llama("standard")
    graph = model.graph
    where = next(node for node in graph.node if node.op_type == "Where")
    numbers = {"first": [0], "last": [3], "tokens": 2, "zero": np.float32(0), "hidden": np.float32(-np.inf)}
    graph.initializer.extend(numpy_helper.from_array(np.array(value), f"m_{name}") for name, value in numbers.items())
    mask = where.output[0]
    made = []
    if hides is not None:
        made = [helper.make_node("Less" if hides else "Equal", [mask, "m_zero"], ["seen"], "seen")]
        mask = "seen"
    made.append(helper.make_node("Concat", [mask, mask], ["twice"], "twice", axis=3))
    nodes = list(graph.node)
    place = nodes.index(where) + 1
    nodes[place:place] = made
    for layer in range(LAYERS):
        name = f"/model/layers.{layer}/self_attn"
        add = next(node for node in nodes if node.name == f"{name}/Add_2")
        cut = [
            helper.make_node("Shape", [f"{name}/Reshape_3_output_0"], [f"{name}/s"], f"{name}/s"),
            helper.make_node("Gather", [f"{name}/s", "m_tokens"], [f"{name}/g"], f"{name}/g"),
            helper.make_node("Unsqueeze", [f"{name}/g", "m_first"], [f"{name}/u"], f"{name}/u"),
            helper.make_node("Slice", ["twice", "m_first", f"{name}/u", "m_last"], [f"{name}/cut"], f"{name}/cut"),
        ]
        add.input[1] = f"{name}/cut"
        if hides is not None:
            fills = ["m_hidden", "m_zero"] if hides else ["m_zero", "m_hidden"]
            cut.append(helper.make_node("Where", [f"{name}/cut", *fills], [f"{name}/fill"], f"{name}/fill"))
            add.input[1] = f"{name}/fill"
        nodes[nodes.index(add) : nodes.index(add)] = cut
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.checker.check_model(model)
    found, report = compress(model, **EXACT)
    types = op_types(found)
    assert types.count("NoMADAttention") == LAYERS and "Softmax" not in types, report.notes
    np.testing.assert_allclose(decode(found), decode(model), atol=2e-5)
