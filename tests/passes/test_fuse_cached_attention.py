"""Attention with float caches is replaced by NoMADAttention, and the cache stays the same.

Forms of attention are tested in test_cached_graphs.py and test_compress_cache_forms.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import ortolan
from ortolan import OptimizationReport, Recipe
from ortolan.generate import Decoder, generate, shares_cache
from ortolan.graph_passes.passes.attention.rewrite import ROUNDING
from ortolan.models import tiny

from . import cached_graphs
from .cached_llama import (
    FORMS,
    LAYERS,
    RECENT,
    VOCABULARY,
    Decoding,
    decode,
    distance,
    llama,
    prompt,
    recipe,
    session,
    unequal_mask,
)
from .small_models import op_types, run

NAME = "fuse_cached_attention"
FAST = {"verify.seconds": 0.0}
BECAME = f"{LAYERS} attentions with a cache became one NoMADAttention each"
LEFT = "attention with a cache not replaced: "


def fused(model: onnx.ModelProto, **options: Any) -> tuple[onnx.ModelProto, OptimizationReport]:
    """Run a recipe with only this pass, and return the model and its report."""
    steps = [{"name": "normalize"}, {"name": NAME, **options}, {"name": "verify", "seconds": 0.0}]
    report = ortolan.optimize_onnx(
        model,
        recipe=Recipe.from_dict({"name": "f", "pass": steps}),
        calibration=[prompt(model, seed=seed) for seed in (5, 6)],
    )
    assert report.model is not None
    return report.model, report


def of_attention(report: OptimizationReport) -> list[str]:
    return [note for note in report.notes if "attention" in note]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_answers_and_caches_stay(form: str, kv_heads: int) -> None:
    model = llama(form, num_key_value_heads=kv_heads)
    found, report = fused(model)
    assert op_types(found).count("NoMADAttention") == LAYERS
    assert not {"GroupQueryAttention", "Softmax"} & set(op_types(found))
    assert report.portable and of_attention(report) == [BECAME] and report.cache is None
    for before, after in ((model.graph.input, found.graph.input), (model.graph.output, found.graph.output)):
        assert [value.name for value in before] == [value.name for value in after]
        types = [[value.type.tensor_type.elem_type for value in side] for side in (before, after)]
        assert types[0] == types[1]
    # GroupQueryAttention supports only prompts with an empty cache, and single tokens.
    cuts = (70, 71, 72) if form == "gqa" else (70, 71, 72, 80, 81)
    np.testing.assert_allclose(decode(found, cuts), decode(model, cuts), atol=2e-5)


@pytest.mark.parametrize(("form", "head_dim"), [("standard", 16), ("standard", 36), ("gqa", 16)])
def test_prompts_of_bf16(form: str, head_dim: int) -> None:
    """Prompts are rounded to bf16 if the CPU is faster with it; without the library nothing is rounded."""
    model = llama(form, head_dim=head_dim)
    found, report = fused(model, precision="bf16")
    assert report.portable and of_attention(report) == [BECAME]
    nodes = [node for node in found.graph.node if node.op_type == "NoMADAttention"]
    set_to = [{one.name: one.i for one in node.attribute} for node in nodes]
    assert [one["precision"] for one in set_to] == [16] * LAYERS and "reproducible" not in set_to[0]
    cuts = (70, 71, 72) if form == "gqa" else (70, 71, 72, 80, 81)
    expected = decode(model, cuts)
    assert distance(decode(found, cuts), expected) < LAYERS * ROUNDING["bf16"]
    same, _ = fused(model, precision="bf16", reproducible="everywhere")  # every CPU rounds to bf16
    assert 1e-5 < distance(decode(same, cuts), expected) < LAYERS * ROUNDING["bf16"]
    feeds = prompt(model, tokens=20)
    for without_library in (found, same):
        for one, other in zip(run(without_library, feeds, library=False), run(model, feeds), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_a_growing_and_of_a_shared_cache(form: str, tmp_path: Path) -> None:
    model = llama(form)
    found, _ = fused(model)
    onnx.save(found, tmp_path / "f.onnx")
    ids = [1, 20, 30, 4, 4, 90]
    expected = generate(session(model), ids, 30)
    assert generate(session(found), ids, 30) == expected and len(set(expected)) > 5
    assert shares_cache(tmp_path / "f.onnx") == (form == "gqa")
    if form == "gqa":
        assert generate(Decoder(session(found), cache_length=64), ids, 30) == expected


@pytest.mark.parametrize("padding", ["left", "right"])
def test_sequences_of_unequal_lengths(padding: str) -> None:
    model = llama("standard")
    mask = unequal_mask(padding)
    seen = mask.astype(bool)
    found, _ = fused(model)
    assert distance(decode(found, mask=mask)[seen], decode(model, mask=mask)[seen]) < 1e-6


def test_sequences_of_unequal_lengths_and_group_query_attention() -> None:
    """New tokens overwrite the padding right after the shorter prompt."""
    model = llama("gqa")
    mask = np.ones((2, 43), np.int64)
    mask[1, 25:40] = 0
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 43))
    found, _ = fused(model)
    steps = [list(Decoding(one, ids, mask).run(one, (40, 41, 42, 43))) for one in (found, model)]
    for number, (one, expected) in enumerate(zip(*steps, strict=True)):
        seen = mask[:, :40].astype(bool) if number == 0 else np.ones((2, 1), bool)
        assert distance(one[seen], expected[seen]) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_without_the_library(form: str) -> None:
    found, _ = fused(llama(form))
    feeds = prompt(found, tokens=40)
    for alone, one in zip(run(found, feeds), run(found, feeds, library=True), strict=True):
        assert distance(alone, one) < 1e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_beside_layers(form: str, weights: str) -> None:
    report = ortolan.optimize_onnx(llama(form), weights=weights, options=FAST | {"may_grow": True})
    assert report.model is not None and report.portable and of_attention(report) == [BECAME]
    assert op_types(report.model).count("NoMADAttention") == LAYERS
    products = [layer for layer in report.replaced if layer.new_op == "NoMADAttention"]
    assert len(products) == (2 * LAYERS if form == "standard" else 0)
    assert all(layer.weight_bits is None for layer in products)


@pytest.mark.parametrize("form", FORMS)
def test_dry_run(form: str) -> None:
    report = ortolan.optimize_onnx(llama(form), weights="int8", dry_run=True)
    assert of_attention(report) == [BECAME.replace("became", "would become")]


def with_attribute(name: str, value: float, layers: range = range(LAYERS)) -> onnx.ModelProto:
    model = llama("gqa")
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    for layer in layers:
        nodes[layer].attribute.append(helper.make_attribute(name, value))
    return model


@pytest.mark.parametrize("window", [1, 6, 70, 200])
@pytest.mark.parametrize("layers", [range(1), range(LAYERS)], ids=["one layer", "all layers"])
def test_windows(window: int, layers: range) -> None:
    model = with_attribute("local_window_size", window, layers)
    found, _ = fused(model)
    assert op_types(found).count("NoMADAttention") == LAYERS and "Where" not in op_types(found)
    cuts = (70, 71, 72)
    for mask in (None, unequal_mask("right")[:, :72]):
        seen = 1 if mask is None else mask[:, :, None]
        np.testing.assert_allclose(decode(found, cuts, mask) * seen, decode(model, cuts, mask) * seen, atol=2e-5)
    feeds = prompt(model, tokens=20)
    for one, other in zip(run(found, feeds, library=False), run(model, feeds), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    ids = [1, 20, 30, 4, 4, 90]
    expected = generate(session(model), ids, 30)
    assert generate(Decoder(session(found), cache_length=64), ids, 30) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", RECENT)
def test_recent_decoders(form: str, kind: str) -> None:
    """Windows in every other layer, with soft-capping and normalized queries and keys, or with sinks."""
    model = llama(form, **RECENT[kind])
    found, report = fused(model)
    assert report.portable and op_types(found).count("NoMADAttention") == LAYERS
    assert not {"GroupQueryAttention", "Softmax"} & set(op_types(found))
    cuts = (70, 71, 72) if form == "gqa" else (70, 71, 72, 80, 81)
    np.testing.assert_allclose(decode(found, cuts), decode(model, cuts), atol=3e-5)
    ids = [1, 20, 30, 4, 4, 90]
    assert generate(session(found), ids, 30) == generate(session(model), ids, 30)
    feeds = prompt(model, tokens=20)
    for one, other in zip(run(found, feeds, library=False), run(model, feeds), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5)


def test_sinks_beside_a_compressed_cache() -> None:
    model = llama("gqa", **RECENT["gpt-oss"])
    found = ortolan.optimize_onnx(
        model, recipe=recipe(), calibration=[prompt(model, seed=seed) for seed in (5, 6)]
    ).model
    assert found is not None and op_types(found).count("NoMADAttention") == LAYERS
    cuts = (70, 71, 72)
    assert distance(decode(found, cuts), decode(model, cuts)) < 0.2


@pytest.mark.parametrize("form", ["packed", "separate"])
def test_some_layers_without_rotary_embedding(form: str) -> None:
    model = llama("gqa", no_rope_layers=(1,), qk_norm=form == "separate")
    found, report = fused(model)
    assert op_types(found).count("NoMADAttention") == LAYERS and report.portable
    cuts = (70, 71, 72)
    np.testing.assert_allclose(decode(found, cuts), decode(model, cuts), atol=2e-5)
    feeds = prompt(model, tokens=20)
    for one, other in zip(run(found, feeds, library=False), run(model, feeds), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize(
    ("model", "kind", "reason"),
    [
        (
            with_attribute("softcap", 1e7),
            "GroupQueryAttention",
            "its scores are capped (softcap) at 1e+07, expected",
        ),
    ],
    ids=["softcap"],
)
def test_what_is_refused_stays_and_is_told_once(model: onnx.ModelProto, kind: str, reason: str) -> None:
    feeds = cached_graphs.feeds(model, 4, 3) if kind == "Softmax" else prompt(model)
    report = ortolan.optimize_onnx(model, weights="int8", calibration=[feeds], options=FAST | {"may_grow": True})
    assert report.model is not None and report.replaced
    (note,) = of_attention(report)
    assert note.startswith(LEFT + reason)
    assert op_types(report.model).count(kind) == op_types(model).count(kind)
    assert "NoMADAttention" not in op_types(report.model)


def test_a_model_without_a_cache_stays_the_same() -> None:
    recipe = Recipe.of(weights="int8")
    model = ir.to_proto(tiny.tiny_bert())
    reports = [ortolan.optimize_onnx(model, recipe=one, options=FAST) for one in (recipe, recipe.without_pass(NAME))]
    assert reports[0].notes == reports[1].notes
    graphs = [one.model.graph.SerializeToString() for one in reports if one.model is not None]
    assert len(graphs) == 2 and graphs[0] == graphs[1]


def test_some_attentions_by_name(tmp_path: Path) -> None:
    model = llama("gqa")
    found, report = fused(model, exclude=["*layers.0*"])
    assert sorted({"NoMADAttention", "GroupQueryAttention"} & set(op_types(found))) == [
        "GroupQueryAttention",
        "NoMADAttention",
    ]
    assert any(note.startswith(LEFT + "excluded: ") for note in report.notes)
    cuts = (70, 71, 72)
    np.testing.assert_allclose(decode(found, cuts), decode(model, cuts), atol=2e-5)
    (tmp_path / "mine.toml").write_text(Recipe.of(weights="int8").to_toml())
    by_file = ortolan.optimize_onnx(
        model, recipe=tmp_path / "mine.toml", options=FAST | {f"{NAME}.select": ["*layers.1*"]}
    )
    assert by_file.model is not None and op_types(by_file.model).count("NoMADAttention") == 1


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_compressed_caches_come_first(form: str, dry_run: bool) -> None:
    model = llama(form)
    report = ortolan.optimize_onnx(
        model,
        recipe=Recipe.of(weights="int8").with_pass("compress_cache"),
        calibration=[prompt(model, seed=seed) for seed in (5, 6)],
        options=FAST,
        dry_run=dry_run,
    )
    (note,) = of_attention(report)
    assert note.endswith("keys 4-bit codes of 1 element, values int8; the cache takes 0.203 of the bytes")
    assert report.cache is not None and report.cache.attentions == LAYERS


@pytest.mark.parametrize("portable", [False, True])
def test_beside_compressed_caches_only_where_no_function_is_needed(portable: bool) -> None:
    model = llama("gqa")
    report = ortolan.optimize_onnx(
        model,
        recipe=Recipe.of(weights="int8").with_pass("compress_cache", exclude=["*layers.0*"]),
        calibration=[prompt(model, seed=seed) for seed in (5, 6)],
        options=FAST,
        portable=portable,
    )
    assert report.model is not None and report.portable == portable
    assert op_types(report.model).count("GroupQueryAttention") == int(portable)
    told = [note for note in report.notes if note.startswith(LEFT)]
    assert len(told) == int(portable) and all("one ONNX function cannot serve it" in note for note in told)
