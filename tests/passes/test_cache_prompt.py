"""A fixed prompt stored in a decoder: logits equal those of the decoder with the pruned prompt in its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan import OptimizationReport, Recipe
from ortolan.errors import CalibrationError, ModelError, RecipeError
from ortolan.generate import Decoder, generate
from ortolan.graph_passes.passes.prompt import prune_prompt
from ortolan.models import tiny

from ..recipes.forms import NAMED
from .cached_llama import EXACT, LAYERS, VOCABULARY, llama
from .small_models import op_types

FORMS = ("standard", "gqa")
IDS = np.random.default_rng(1).integers(0, VOCABULARY, 70)
TEXT = np.random.default_rng(2).integers(0, VOCABULARY, 40)
CUTS = (9, 1, 1, 4, 8, 2)
Arrays = dict[str, np.ndarray]


def recipe(cache: dict[str, Any] | None = None, *others: dict[str, Any], **options: Any) -> Recipe:
    steps = [
        {"name": "normalize"},
        {"name": "cache_prompt", **options},
        {"name": "compress_cache", **(EXACT if cache is None else cache)},
        *others,
        {"name": "verify", "seconds": 0.0},
    ]
    return Recipe.from_dict({"name": "p", "pass": steps})


def optimize(
    model: onnx.ModelProto, cache: dict[str, Any] | None = None, *others: dict[str, Any], **options: Any
) -> tuple[onnx.ModelProto, OptimizationReport]:
    report = ortolan.optimize_onnx(
        model, recipe=recipe(cache, *others, **options), prompt=IDS, calibration=[{"input_ids": TEXT[None]}]
    )
    assert report.model is not None
    return report.model, report


def decoder(model: onnx.ModelProto, library: bool = True) -> Decoder:
    if library:
        return Decoder(ortolan.create_session(model.SerializeToString()))
    import onnxruntime

    return Decoder(onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]))


def logits(decoder: Decoder) -> np.ndarray:
    """Return the logits of consecutive calls with CUTS tokens each."""
    ends = np.cumsum(CUTS)
    return np.concatenate([decoder.step(part) for part in np.split(TEXT[: ends[-1]], ends[:-1])])


def behind_pruned_prompt(model: onnx.ModelProto, sparsities: tuple[float, float], scope: str = "token") -> np.ndarray:
    """Return logits of the original model after this function has pruned the prompt in its cache."""
    original = decoder(model)
    original.step(IDS)
    caches = original.cache()
    for key in [name for name in caches if name.endswith(".key")]:
        value = key.replace(".key", ".value")
        pruned = prune_prompt(caches[key][0], caches[value][0], *sparsities, scope)
        caches[key], caches[value] = pruned.keys[None], pruned.values[None]
    tokens = TEXT[None, : sum(CUTS)]
    feeds = {
        "input_ids": tokens,
        "attention_mask": np.ones((1, len(IDS) + tokens.shape[1]), np.int64),
        "position_ids": len(IDS) + np.arange(tokens.shape[1])[None],
    }
    session = ortolan.create_session(model.SerializeToString())
    names = {value.name for value in session.get_inputs()}
    given = {name: array for name, array in feeds.items() if name in names}
    return session.run(["logits"], given | caches)[0][0]


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("sparsities", "scope"),
    [((0.0, 0.0), "token"), ((0.3, 0.5), "token"), ((0.6, 0.0), "token"), ((0.3, 0.5), "layer")],
)
def test_a_prompt_is_a_pruned_past(form: str, sparsities: tuple[float, float], scope: str) -> None:
    model = llama(form)
    found, report = optimize(model, keys_sparsity=sparsities[0], values_sparsity=sparsities[1], scope=scope)
    assert op_types(found).count("NoMADAttention") == LAYERS
    assert report.portable
    expected = behind_pruned_prompt(model, sparsities, scope)
    # Queries and attention weights are rounded to bf16, with a relative error of 2^-9 each.
    assert distance(logits(decoder(found)), expected) < 0.004
    assert distance(logits(decoder(found, library=False)), expected) < 1e-5
    exact = behind_pruned_prompt(model, (0.0, 0.0))
    error = distance(expected, exact)
    assert (error > 0.01) == any(sparsities)


@pytest.mark.parametrize("form", FORMS)
def test_with_codes(form: str) -> None:
    """The cache of later tokens may be compressed; the prompt stays exact."""
    model = llama(form)
    found, report = optimize(model, {"window": 8, "sinks": 2}, keys_sparsity=0.0, values_sparsity=0.0)
    assert report.portable
    error = distance(logits(decoder(found)), behind_pruned_prompt(model, (0.0, 0.0)))
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize("form", FORMS)
def test_a_shared_buffer_and_generate(form: str) -> None:
    model = llama(form)
    found, _ = optimize(model, keys_sparsity=0.0, values_sparsity=0.0)
    original = decoder(model)
    expected = generate(original, [*IDS, *TEXT], 12)
    assert generate(decoder(found), list(TEXT), 12) == expected
    if form == "gqa":
        shared = Decoder(ortolan.create_session(found.SerializeToString()), cache_length=64)
        assert generate(shared, list(TEXT), 12) == expected


def test_a_window_that_hides_a_part_of_the_prompt() -> None:
    with pytest.raises(ModelError, match="its window of 16 tokens can hide a part of the prompt"):
        optimize(llama("gqa", windows=(0, 16)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_behind_the_prompt(form: str, padding: str) -> None:
    """Two sequences of unequal length share the prompt."""
    if form == "gqa" and padding == "left":
        pytest.skip("GroupQueryAttention counts the tokens of a mask")
    model = llama(form)
    found, _ = optimize(model, keys_sparsity=0.0, values_sparsity=0.0)
    ids = np.stack([TEXT[:12], TEXT[12:24]])
    mask = np.ones((2, 12), np.int64)
    mask[1, slice(0, 5) if padding == "left" else slice(7, 12)] = 0
    whole = np.concatenate([np.ones((2, len(IDS)), np.int64), mask], 1)
    positions = np.maximum(np.cumsum(whole, axis=1) - 1, 0)

    def feeds(of: onnx.ModelProto, begin: int, tokens: np.ndarray) -> Arrays:
        given = {"input_ids": tokens, "attention_mask": whole, "position_ids": positions[:, begin:]}
        result = {}
        for value in of.graph.input:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            result[value.name] = given.get(value.name, np.zeros((2, *shape[1:]), np.float32))
        return result

    prompted = np.concatenate([np.stack([IDS, IDS]), ids], 1)
    expected = ortolan.create_session(model.SerializeToString()).run(["logits"], feeds(model, 0, prompted))[0]
    y = ortolan.create_session(found.SerializeToString()).run(["logits"], feeds(found, len(IDS), ids))[0]
    counts = mask.astype(bool)
    assert distance(y[counts], expected[:, len(IDS) :][counts]) < 0.004


def test_lengths_that_the_graph_asks_of_its_cache() -> None:
    """Positions and masks computed from the length of the cache must count the prompt."""
    model = llama("standard")
    graph = ir.from_proto(model)
    # Compute position_ids as Range(past, past + tokens), like exports without that input.
    past = next(value for value in graph.graph.inputs if (value.name or "").endswith("0.key"))
    ids = next(value for value in graph.graph.inputs if value.name == "input_ids")
    positions = next(value for value in graph.graph.inputs if value.name == "position_ids")
    tape = ir.tape.Tape()
    number = [tape.op("Constant", [], {"value": ir.tensor(np.array(i, np.int64))}) for i in range(3)]
    before = tape.op("Gather", [tape.op("Shape", [past]), number[2]])
    after = tape.op("Add", [before, tape.op("Gather", [tape.op("Shape", [ids]), number[1]])])
    zero = tape.op("Constant", [], {"value": ir.tensor(np.zeros(1, np.int64))})
    made = tape.op("Unsqueeze", [tape.op("Range", [before, after, number[1]]), zero])
    positions.replace_all_uses_with(made)
    graph.graph.inputs.remove(positions)
    graph.graph.insert_before(graph.graph[0], tape.nodes)
    changed = ir.to_proto(graph)
    found, _ = optimize(changed, keys_sparsity=0.0, values_sparsity=0.0)
    expected = behind_pruned_prompt(changed, (0.0, 0.0))
    assert distance(logits(decoder(found)), expected) < 0.004


def test_any_recipe_with_a_cache_takes_a_prompt(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", IDS.astype(np.int32))
    model = llama("gqa")
    text = [{"input_ids": TEXT[None]}]
    report = ortolan.optimize_onnx(model, recipe="long-context", prompt=tmp_path / "ids.npy", calibration=text)
    names = [step["name"] for step in report.recipe["pass"]]
    passes = ["normalize", "fuse_attention", "cache_prompt", "compress_cache", "linear_attention", "verify"]
    assert names == passes
    assert any("a prompt of 70 tokens is part of the model: keys 30% and values 50%" in note for note in report.notes)
    assert ortolan.optimize_onnx(model, prompt=IDS, dry_run=True).recipe["name"] == "cached-prompt"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"prompt is float64 \[0\], expected token ids"),
        ([[1, 2], [3, 4]], r"prompt is int64 \[2, 2\]"),
        ([0.5], "prompt is float64"),
        ([-1, 3], "expected token ids: non-negative integers"),
        ([[1], [2, 3]], "prompt is not an array of token ids"),
        ("missing.npy", "prompt file 'missing.npy' does not exist"),
        ([3, 10**9], "does not run on the prompt of 2 tokens"),
    ],
)
def test_bad_prompts(prompt: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        ortolan.optimize_onnx(llama("gqa"), recipe=recipe(), prompt=prompt)


def test_a_file_that_is_no_array(tmp_path: Path) -> None:
    (tmp_path / "ids.npy").write_text("1 2 3")
    with pytest.raises(CalibrationError, match=r"ids\.npy' is not an \.npy file of token ids"):
        ortolan.optimize_onnx(llama("gqa"), recipe=recipe(), prompt=tmp_path / "ids.npy")


def test_refusals() -> None:
    model = llama("gqa")
    with pytest.raises(RecipeError, match=r"prompt needs pass 'compress_cache', which recipe '.*sparsity=0\.5' does"):
        ortolan.optimize_onnx(model, recipe=NAMED["sparse-bf16"], prompt=IDS)
    with pytest.raises(RecipeError, match="pass 'cache_prompt' needs a prompt"):
        ortolan.optimize_onnx(model, recipe="cached-prompt")
    alone = Recipe.from_dict({"name": "p", "pass": [{"name": "normalize"}, {"name": "cache_prompt"}]})
    with pytest.raises(RecipeError, match="needs a later pass 'compress_cache'"):
        ortolan.optimize_onnx(model, recipe=alone)
    with pytest.raises(ModelError, match=r"a prompt needs all attentions to be replaced, but .* excluded"):
        ortolan.optimize_onnx(model, recipe=recipe({**EXACT, "exclude": ["*layers.1*"]}), prompt=IDS)
    with pytest.raises(ModelError, match="the model has no attention with a cache"):
        ortolan.optimize_onnx(ir.to_proto(tiny.tiny_bert()), recipe=recipe(), prompt=IDS)
    with pytest.raises(ModelError, match="its head size is 8"):
        ortolan.optimize_onnx(llama("standard", head_dim=8), recipe=recipe(), prompt=IDS)


def test_an_input_of_unknown_meaning() -> None:
    model = llama("gqa")
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.FLOAT, []))
    model.graph.initializer.append(helper.make_tensor("flag", TensorProto.FLOAT, [], [1.0]))
    optimize(model)  # `flag` has a default value
    del model.graph.initializer[-1]
    with pytest.raises(CalibrationError, match="the prompt: missing inputs: flag;"):
        ortolan.optimize_onnx(model, recipe=recipe(), prompt=IDS)
