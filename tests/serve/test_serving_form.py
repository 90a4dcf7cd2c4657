"""The form for serving: logits like those of the decoder, with the same bits however sequences are cut and mixed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan.engine.model import CacheType, PagedModel
from ortolan.errors import ArgumentError, ModelError, VerificationError
from ortolan.generate import Decoder
from ortolan.graph_passes.serve import check
from ortolan.graph_passes.serve.form import FORM_VERSION, to_serving_form
from ortolan.graph_passes.serve.int8_cache import use_int8_cache
from ortolan.models import tiny

from ..passes.cached_llama import FORMS, RECENT, llama
from .paged import open_model, run, step_of

IDS = np.random.default_rng(0).integers(0, tiny.TINY_LLAMA.vocab_size, 45).tolist()
OTHER = IDS[::-1]
BLOCKS = [7, 2, 30]  # of IDS
WEIGHTS = ("int8", "int4")
each_cache_type = pytest.mark.parametrize("cache_type", get_args(CacheType))


@pytest.fixture(scope="module", params=[(form, weights) for form in FORMS for weights in WEIGHTS], ids="-".join)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return an optimized decoder and its form for serving."""
    form, weights = request.param
    folder = tmp_path_factory.mktemp("form")
    onnx.save(llama(form), folder / "model.onnx")
    for name, serve in (("decoder.onnx", False), ("serving.onnx", True)):
        ortolan.optimize_onnx(folder / "model.onnx", folder / name, weights=weights, serve=serve, allow_different=True)
    return folder / "decoder.onnx", folder / "serving.onnx"


def test_its_interface(files: tuple[Path, Path]) -> None:
    session = ortolan.create_session(files[1])
    config = tiny.TINY_LLAMA
    shapes = {value.name: value.shape for value in session.get_inputs()}
    caches = {name for name in shapes if name.startswith("kv_cache.")}
    assert shapes.keys() - caches == {
        *("input_ids", "position_ids", "sequence_starts", "past_lengths", "block_table", "logit_rows")
    }
    assert len(caches) == 2 * config.num_hidden_layers
    assert shapes["kv_cache.0.key"] == shapes["kv_cache.1.value"] == ["blocks", 16, 2, 16]
    types = {value.name: value.type for value in session.get_inputs()}
    assert {types[name] for name in ("input_ids", "position_ids")} == {"tensor(int64)"}
    assert {types[name] for name in ("sequence_starts", "past_lengths", "block_table", "logit_rows")} == {
        "tensor(int32)"
    }
    outputs = {value.name: value.shape for value in session.get_outputs()}
    assert outputs["logits"] == ["rows", config.vocab_size]
    assert outputs.keys() - {"logits"} == {f"new_{name}" for name in caches}
    assert {value.type for value in session.get_inputs() if value.name in caches} == {"tensor(bfloat16)"}


@each_cache_type
def test_its_logits_are_those_of_the_decoder(files: tuple[Path, Path], cache_type: CacheType) -> None:
    expected = Decoder(ortolan.create_session(files[0])).step(IDS)
    found = run(open_model(files[1], cache_type=cache_type), (IDS, 0, BLOCKS))
    # Keys and values are rounded to 8 bits, and quantization of activations may amplify that.
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)
    assert not np.array_equal(found, run(open_model(files[1], cache_type=cache_type), (IDS[1:], 0, BLOCKS)))


@pytest.mark.parametrize("threads", [1, 2])
@each_cache_type
def test_how_a_sequence_is_cut_and_what_is_beside_it_does_not_matter(
    files: tuple[Path, Path], threads: int, cache_type: CacheType
) -> None:
    whole = run(open_model(files[1], cache_type=cache_type), (IDS, 0, BLOCKS))
    model = open_model(files[1], threads, cache_type=cache_type)
    cuts = [0, 1, 5, 20, 21, 45]
    parts, past = [], 0
    for number, (begin, end) in enumerate(pairwise(cuts)):
        other = OTHER[past : past + 9]
        chunks = [(other, past, [11, 12, 13]), (IDS[begin:end], begin, BLOCKS)]
        logits = run(model, *(chunks if number % 2 else chunks[::-1]))
        parts.append(logits[-(end - begin) :] if number % 2 else logits[: end - begin])
        past += len(other)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    # The second sequence was computed beside the first, which must not matter, either.
    np.testing.assert_array_equal(
        run(model, (OTHER[:past], 0, [20, 21, 22])),
        run(open_model(files[1], cache_type=cache_type), (OTHER[:past], 0, [0, 1, 2])),
    )


@each_cache_type
def test_sequences_share_blocks(files: tuple[Path, Path], cache_type: CacheType) -> None:
    model = open_model(files[1], cache_type=cache_type)
    run(model, (IDS[:32], 0, [3, 4]))
    tails = [[*IDS[32:40]], [*OTHER[:8]]]
    found = run(model, *((tail, 32, [3, 4, 5 + i]) for i, tail in enumerate(tails)))
    for i, tail in enumerate(tails):
        expected = run(open_model(files[1], cache_type=cache_type), ([*IDS[:32], *tail], 0, [9, 8, 7]))[32:]
        np.testing.assert_array_equal(found[8 * i : 8 * (i + 1)], expected)


def test_only_the_wanted_rows_have_logits(files: tuple[Path, Path]) -> None:
    model = open_model(files[1])
    every = run(model, (IDS, 0, BLOCKS))
    step = step_of((IDS, 0, BLOCKS))
    for rows in ([44], [3, 3, 0], []):
        wanted = replace(step, logit_rows=np.array(rows, np.int64))
        np.testing.assert_array_equal(model.run(wanted), every[rows])


def test_without_the_library_its_function_runs(tmp_path: Path) -> None:
    """The ONNX functions of the model give nearly the same logits in plain ONNX Runtime."""
    import onnxruntime

    onnx.save(llama("gqa"), tmp_path / "model.onnx")
    ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "serving.onnx", weights="int8", serve=True)
    model = open_model(tmp_path / "serving.onnx")
    expected = run(model, (IDS, 0, BLOCKS))
    plain = onnxruntime.InferenceSession(tmp_path / "serving.onnx", providers=["CPUExecutionProvider"])
    found = run(PagedModel(plain, cache_bytes=40 * model.block_bytes), (IDS, 0, BLOCKS))
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


def test_an_int8_cache_of_the_function(tmp_path: Path) -> None:
    """The model with an int8 cache is valid and gives nearly the same logits in plain ONNX Runtime."""
    import onnx_ir as ir
    import onnxruntime

    onnx.save(llama("gqa"), tmp_path / "model.onnx")
    ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "serving.onnx", weights="int8", serve=True)
    model = ir.load(tmp_path / "serving.onnx")
    use_int8_cache(model, "the model")
    once = ir.to_proto(model).SerializeToString()
    use_int8_cache(model, "the model")
    assert ir.to_proto(model).SerializeToString() == once
    ours = open_model(tmp_path / "serving.onnx", cache_type="int8")
    plain = onnxruntime.InferenceSession(once, providers=["CPUExecutionProvider"])
    saved = PagedModel(plain, cache_bytes=1 << 20)
    assert (ours.cache_type, saved.cache_type, open_model(tmp_path / "serving.onnx").cache_type) == (
        "int8",
        "int8",
        "bfloat16",
    )
    expected, found = (run(one, (IDS, 0, BLOCKS)) for one in (ours, saved))
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


def test_an_int8_cache_takes_less_memory(files: tuple[Path, Path]) -> None:
    blocks = [PagedModel.open(files[1], cache_type=one).block_bytes for one in get_args(CacheType)]
    head_size = 16
    assert blocks[1] / blocks[0] == (head_size + 4) / (2 * head_size)


def test_unknown_cache_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cache_type is 'int4', expected one of bfloat16, int8"):
        PagedModel.open(tmp_path, cache_type="int4")  # type: ignore[arg-type]


def test_only_the_form_for_serving_can_have_an_int8_cache(tmp_path: Path) -> None:
    onnx.save(llama("gqa"), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"has not the form for serving"):
        PagedModel.open(tmp_path / "model.onnx", cache_type="int8")
    with pytest.raises(ModelError, match=r"missing.onnx' does not exist"):
        PagedModel.open(tmp_path / "missing.onnx", cache_type="int8")


def test_windows_of_masks_are_kept(tmp_path: Path) -> None:
    """A mask with a window of 6 tokens: changing a token does not change the first layer's view beyond it."""
    model = llama("standard", num_hidden_layers=1)
    _add_window(model, 6)
    onnx.save(model, tmp_path / "model.onnx")
    report = ortolan.optimize_onnx(
        tmp_path / "model.onnx", tmp_path / "serving.onnx", weights="int8", serve=True, allow_different=True
    )
    assert any("form for serving" in note for note in report.notes)
    nodes = onnx.load(tmp_path / "serving.onnx").graph.node
    (node,) = [node for node in nodes if node.op_type == "PagedNoMADAttention"]
    assert {one.name: one.i for one in node.attribute}["window"] == 6
    paged = open_model(tmp_path / "serving.onnx")
    first = run(paged, (IDS, 0, BLOCKS))
    changed = run(paged, ([IDS[0] ^ 1, *IDS[1:]], 0, BLOCKS))
    np.testing.assert_array_equal(first[6:], changed[6:])
    assert (first[:6] != changed[:6]).any(axis=1).all()


@pytest.mark.parametrize("form", FORMS)
def test_windows_and_sinks(form: str, tmp_path: Path) -> None:
    """A decoder of gpt-oss's shape: sinks, and a window in the first layer."""
    onnx.save(llama(form, **RECENT["gpt-oss"]), tmp_path / "model.onnx")
    ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "serving.onnx", weights="bf16", serve=True)
    model = onnx.load(tmp_path / "serving.onnx")
    nodes = [node for node in model.graph.node if node.op_type == "PagedNoMADAttention"]
    assert [{one.name: one.i for one in node.attribute}["window"] for node in nodes] == [6, 0]
    assert [node.input[10] != "" for node in nodes] == [True, True]
    found = run(open_model(tmp_path / "serving.onnx"), (IDS, 0, BLOCKS))
    expected = Decoder(ortolan.create_session(tmp_path / "model.onnx")).step(IDS)
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)
    paged = open_model(tmp_path / "serving.onnx")
    parts = [run(paged, (IDS[begin:end], begin, BLOCKS)) for begin, end in pairwise((0, 1, 9, 30, 45))]
    np.testing.assert_array_equal(np.concatenate(parts), found)


def _add_window(model: onnx.ModelProto, window: int) -> None:
    """Hide keys that are `window` or more tokens before the query, in the mask of a standard graph."""
    graph = model.graph
    # The mask is causal: And(LessOrEqual(key, query), …). Add And(…, Greater(key, query - window)).
    (compare,) = [node for node in graph.node if node.op_type == "LessOrEqual"]
    key, query = compare.input
    position = list(graph.node).index(compare)
    size = helper.make_tensor("window", TensorProto.INT64, [], [window])
    graph.initializer.append(size)
    causal = compare.output[0]
    compare.output[0] = f"{causal}/only"
    added = [
        helper.make_node("Sub", [query, "window"], ["window/first"], "window/sub"),
        helper.make_node("Greater", [key, "window/first"], ["window/near"], "window/greater"),
        helper.make_node("And", [f"{causal}/only", "window/near"], [causal], "window/and"),
    ]
    for offset, node in enumerate(added, 1):
        graph.node.insert(position + offset, node)


def test_without_a_target_format_layers_become_int8(tmp_path: Path) -> None:
    onnx.save(llama("gqa"), tmp_path / "model.onnx")
    report = ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "serving.onnx", serve=True)
    assert {layer.new_op for layer in report.replaced} == {"W8A8MatMul"} or report.recipe["name"] == "weights=int8"
    assert any("weights='int8' for serving" in note for note in report.notes)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cache": "codes"}, ArgumentError, "serve cannot be combined with cache='codes'"),
        ({"prompt": np.array([1, 2])}, ArgumentError, "serve cannot be combined with prompt"),
        ({"serve": 1}, TypeError, "serve"),
    ],
)
def test_options_that_exclude_it(tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    onnx.save(llama("gqa"), tmp_path / "model.onnx")
    with pytest.raises(error, match=message):
        ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "out.onnx", **{"serve": True, **options})
    assert not (tmp_path / "out.onnx").exists()


def test_models_that_are_no_decoders(tmp_path: Path) -> None:
    onnx.save(llama("standard", head_dim=8), tmp_path / "small.onnx")
    with pytest.raises(ModelError, match="multiple of 16"):
        ortolan.optimize_onnx(tmp_path / "small.onnx", tmp_path / "out.onnx", weights="int8", serve=True)
    assert not (tmp_path / "out.onnx").exists()


def test_a_recipe_that_replaces_no_attention(tmp_path: Path) -> None:
    onnx.save(llama("gqa"), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"is read by .* expected one NoMADAttention"):
        ortolan.optimize_onnx(
            tmp_path / "model.onnx", tmp_path / "out.onnx", recipe=ortolan.Recipe("none", "no passes", ()), serve=True
        )
    assert not (tmp_path / "out.onnx").exists()


def test_a_model_without_the_form_is_refused(tmp_path: Path) -> None:
    onnx.save(llama("gqa"), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="expected the form for serving"):
        PagedModel.open(tmp_path / "model.onnx")


def test_a_malformed_form_is_refused(tmp_path: Path) -> None:
    onnx.save(llama("gqa"), tmp_path / "model.onnx")
    ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "serving.onnx", weights="int8", serve=True)
    for context in ("many", "0", "9" * 5000, "-5"):
        model = onnx.load(tmp_path / "serving.onnx")
        (entry,) = (one for one in model.metadata_props if one.key == "ortolan.context")
        entry.value = context
        onnx.save(model, tmp_path / "bad.onnx")
        with pytest.raises(ModelError, match="expected a number of tokens"):
            PagedModel.open(tmp_path / "bad.onnx")
    model = onnx.load(tmp_path / "serving.onnx")
    (entry,) = (one for one in model.metadata_props if one.key == "ortolan.serving")
    entry.value = "paged"
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(ModelError, match=r"has version 'paged' of the form for serving, expected 'paged 1'"):
        PagedModel.open(tmp_path / "bad.onnx")
    model = onnx.load(tmp_path / "model.onnx")  # it has no pools
    model.metadata_props.add(key="ortolan.serving", value=FORM_VERSION)
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(ModelError, match="expected pools and a vocabulary"):
        PagedModel.open(tmp_path / "bad.onnx")


def test_the_default_cache_is_a_quarter_of_the_memory(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = open_model(files[1], blocks=3).block_bytes
    monkeypatch.setattr("ortolan.engine.model.usable_memory", lambda: 4 * 5 * block + 3)
    assert PagedModel.open(files[1]).blocks == 5


def test_limits_of_context_and_cache(files: tuple[Path, Path]) -> None:
    model = open_model(files[1], blocks=3)
    assert model.context <= 48 and model.blocks == 3
    with pytest.raises(
        ArgumentError, match=r"give more cache memory \(--cache-memory, cache_bytes\) or a shorter context"
    ):
        PagedModel.open(files[1], context=64, cache_bytes=3 * model.block_bytes)
    with pytest.raises(ArgumentError, match="give more cache memory"):
        PagedModel.open(files[1], cache_bytes=10)


@pytest.mark.parametrize("form", FORMS)
def test_the_check_allows_for_rounding_of_the_cache(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding keys and values to bfloat16 changes the logits of deep models more than the fixed limit allows."""
    monkeypatch.setattr(check, "_MOST_DIFFERENCE", 0.0)
    onnx.save(llama(form), tmp_path / "model.onnx")
    ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "serving.onnx", weights="int8", serve=True)

    def wrong_form(model: ir.Model, name: str) -> None:
        to_serving_form(model, name)
        for node in model.graph:
            if node.op_type == "PagedNoMADAttention":
                node.attributes["scale"] = ir.AttrFloat32("scale", 0.5)  # expected: 1 / sqrt(16)

    monkeypatch.setattr(check, "to_serving_form", wrong_form)
    with pytest.raises(VerificationError, match=r"other logits than the optimized model: cosine .*, expected at least"):
        ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "wrong.onnx", weights="int8", serve=True)
    assert not (tmp_path / "wrong.onnx").exists()
