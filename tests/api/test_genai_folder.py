"""optimize_onnx on a folder for ONNX Runtime GenAI: genai_config.json must name the copied operator library.

test_genai.py generates text with such folders if onnxruntime-genai is installed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import ortolan
from ortolan import ModelError, OutputError, RecipeError
from ortolan.graph_passes.files import genai_folder
from ortolan.graph_passes.files.genai_folder import GenaiConfig
from ortolan.graph_passes.serve.genai import engine_config
from ortolan.models import tiny

from ..recipes.forms import NAMED
from .digests import digests

FAST = {"verify.seconds": 0.0}
LIBRARY = "libortolan_ops.so"
RECIPE = {"recipe": NAMED["sparse-bf16"], "options": FAST | {"may_grow": True}}


def config(**decoder: Any) -> dict[str, Any]:
    """Return a short genai_config.json as GenAI's builder writes it."""
    options = {"session_options": {"log_id": "onnxruntime-genai", "provider_options": []}}
    return {
        "model": {
            "type": "llama",
            "context_length": 64,
            "decoder": options | {"filename": "model.onnx", "head_size": 16} | decoder,
            "vocab_size": 97,
        },
        "search": {"max_length": 64, "past_present_share_buffer": True},
    }


def write_config(folder: Path, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "genai_config.json").write_text(text, encoding="utf-8")


def read_config(folder: Path) -> Any:
    return json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    ir.save(tiny.tiny_llama(attention="gqa", head_dim=16), folder / "model.onnx")
    write_config(folder, config())
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_the_new_folder_is_complete(folder: Path, tmp_path: Path) -> None:
    before = digests(folder)
    report = ortolan.optimize_onnx(folder, tmp_path / "fast", **RECIPE)
    assert digests(folder) == before
    after = digests(tmp_path / "fast")
    assert sorted(after) == sorted([*before, LIBRARY]) and after["tokenizer.json"] == before["tokenizer.json"]
    expected = config()
    expected["model"]["decoder"]["session_options"]["custom_ops_library"] = LIBRARY
    assert read_config(tmp_path / "fast") == expected
    library = tmp_path / "fast" / LIBRARY
    assert library.read_bytes() == Path(ortolan.get_library_path()).read_bytes()
    assert not library.is_symlink() and library.stat().st_nlink == 1
    assert f"genai_config.json names {LIBRARY}, which was copied to the folder" in report.notes
    assert "SparseAMXMatMul" in {node.op_type for node in onnx.load(tmp_path / "fast" / "model.onnx").graph.node}


def named(content: Any) -> list[str]:
    """Return the JSON paths of all session options that name the operator library."""

    def walk(value: Any, place: str) -> list[str]:
        if isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        if not isinstance(value, dict):
            return []
        found = [place] if value.get("custom_ops_library") == LIBRARY else []
        return found + [name for key, item in value.items() for name in walk(item, f"{place}/{key}")]

    return walk(content, "")


@pytest.mark.parametrize(
    ("change", "places"),
    [
        ({"session_options": {}}, ["/model/decoder/session_options"]),
        ({"filename": "./model.onnx"}, ["/model/decoder/session_options"]),
        ({"session_options": {"custom_ops_library": "lib/libortolan_ops.so"}}, ["/model/decoder/session_options"]),
        # A pipeline model without session options uses the decoder's.
        ({"filename": "", "pipeline": [{"a": {"filename": "model.onnx"}}]}, ["/model/decoder/session_options"]),
        (
            {"pipeline": [{"a": {"filename": "model.onnx", "session_options": {}}}, {"b": {"filename": "b.onnx"}}]},
            ["/model/decoder/session_options", "/model/decoder/pipeline/0/a/session_options"],
        ),
    ],
)
def test_the_sessions_that_run_the_model_load_the_library(
    folder: Path, tmp_path: Path, change: dict[str, Any], places: list[str]
) -> None:
    write_config(folder, config(**change))
    ortolan.optimize_onnx(folder, tmp_path / "fast", **RECIPE)
    assert named(read_config(tmp_path / "fast")) == places


def test_a_decoder_without_session_options_gets_them(folder: Path, tmp_path: Path) -> None:
    content = config()
    del content["model"]["decoder"]["session_options"]
    write_config(folder, content)
    ortolan.optimize_onnx(folder, tmp_path / "fast", **RECIPE)
    assert read_config(tmp_path / "fast")["model"]["decoder"]["session_options"] == {"custom_ops_library": LIBRARY}


def test_of_several_parts_the_decoder_is_optimized(folder: Path, tmp_path: Path) -> None:
    (folder / "model.onnx").rename(folder / "text.onnx")
    ir.save(tiny.mlp(), folder / "vision.onnx")
    content = config(filename="text.onnx")
    content["model"]["vision"] = {"filename": "vision.onnx", "session_options": {"log_id": "vision"}}
    write_config(folder, content)
    before = digests(folder)
    report = ortolan.optimize_onnx(folder, tmp_path / "fast", **RECIPE)
    assert report.input == str(folder / "text.onnx")
    assert digests(tmp_path / "fast")["vision.onnx"] == before["vision.onnx"]
    assert named(read_config(tmp_path / "fast")) == ["/model/decoder/session_options"]


def test_an_older_library_in_the_folder_is_replaced(folder: Path, tmp_path: Path) -> None:
    (folder / LIBRARY).write_bytes(b"old")
    ortolan.optimize_onnx(folder, tmp_path / "fast", **RECIPE)
    assert (tmp_path / "fast" / LIBRARY).read_bytes() == Path(ortolan.get_library_path()).read_bytes()
    assert (folder / LIBRARY).read_bytes() == b"old"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"genai_config\.json' is not a JSON text: .*; export the model again, or give the path of the ONNX file"),
        ("[" * 100_000, "is not a JSON text"),
        ("\ud800".encode("utf-8", "surrogatepass"), "is not a JSON text: 'utf-8' codec can't decode"),
        ("[]", "has no object 'model', expected what onnxruntime-genai writes"),
        ({"model": []}, "has no object 'model'"),
        ({"model": {}}, r"names no file as parts of the model, but the folder's ONNX file is 'model\.onnx'"),
        (config(filename="other.onnx"), r"names 'other\.onnx' as parts of the model, but .*correct 'filename'"),
        (config(filename="../model.onnx"), r"names '\.\./model\.onnx' as parts"),
        (config(session_options=None), "has session_options = None in the part of 'model.onnx', expected an object"),
        (config(session_options={"custom_ops_library": "extensions.so"}), "expected 'libortolan_ops.so' or no entry"),
        (config(session_options={"custom_ops_library": [LIBRARY]}), "has custom_ops_library = "),
        ({"model": {"decoder": 3, "encoder": {"filename": "model.onnx"}}}, "has decoder = 3 in 'model', expected an"),
    ],
)
def test_malformed_configurations(folder: Path, tmp_path: Path, content: Any, message: str) -> None:
    if isinstance(content, bytes):
        (folder / "genai_config.json").write_bytes(content)
    else:
        write_config(folder, content)
    before = digests(folder)
    with pytest.raises(ModelError, match=message):
        ortolan.optimize_onnx(folder, tmp_path / "fast", **RECIPE)
    assert digests(folder) == before and os.listdir(tmp_path) == ["model"]


def test_a_configuration_that_is_too_large(folder: Path, tmp_path: Path) -> None:
    with open(folder / "genai_config.json", "wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ModelError, match="has 1099511627776 bytes, expected at most"):
        ortolan.optimize_onnx(folder, tmp_path / "fast", **RECIPE)


def test_a_configuration_outside_of_the_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    (folder / "genai_config.json").rename(tmp_path / "secret.json")
    (folder / "genai_config.json").symlink_to(tmp_path / "secret.json")
    report = ortolan.optimize_onnx(folder, tmp_path / "fast", **RECIPE)
    assert not (tmp_path / "fast" / "genai_config.json").exists() and not (tmp_path / "fast" / LIBRARY).exists()
    assert any(note.startswith("not copied") and "genai_config.json" in note for note in report.notes)


class Stop(Exception):
    pass


@pytest.mark.parametrize("stage", ["verify", "copy", "save"])
def test_an_interrupted_run_leaves_nothing(folder: Path, tmp_path: Path, stage: str) -> None:
    def stop(name: str, done: int, total: int) -> None:
        if name == stage and done == 0:
            raise Stop

    with pytest.raises(Stop):
        ortolan.optimize_onnx(folder, tmp_path / "fast", progress=stop, **RECIPE)
    assert os.listdir(tmp_path) == ["model"]


def test_a_library_that_cannot_be_copied(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copyfile = shutil.copyfile

    def fail(source: Any, target: Any) -> None:
        if os.path.basename(target) == LIBRARY:
            raise OSError(28, "No space left on device")
        copyfile(source, target)

    monkeypatch.setattr(genai_folder.shutil, "copyfile", fail)
    with pytest.raises(OutputError, match="No space left on device"):
        ortolan.optimize_onnx(folder, tmp_path / "fast", **RECIPE)
    assert os.listdir(tmp_path) == ["model"]


def ids(tokens: int) -> list[dict[str, np.ndarray]]:
    return [{"input_ids": np.random.default_rng(0).integers(0, 97, (1, tokens))}]


@pytest.mark.parametrize("options", [{}, {"equal_rows": False}])
def test_compressed_caches_are_equally_wide(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    ortolan.optimize_onnx(
        folder, tmp_path / "fast", recipe="long-context", options=FAST | options, calibration=ids(300)
    )
    model = onnx.load(tmp_path / "fast" / "model.onnx")
    widths = {value.type.tensor_type.shape.dim[3].dim_value for value in model.graph.input if "past" in value.name}
    assert widths == {18}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"window": 8}}, "need inputs that onnxruntime-genai does not pass on, expected 0"),
        ({"options": {"sinks": 1}}, "need inputs that onnxruntime-genai does not pass on"),
        ({"options": {"values": "float32"}}, "equal_rows = true needs"),
        ({"prompt": [1, 2, 3]}, "a prompt part of the model, but onnxruntime-genai does not count"),
    ],
)
def test_caches_that_genai_cannot_carry(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        ortolan.optimize_onnx(folder, recipe="long-context", calibration=ids(300), dry_run=True, **arguments)


def test_float_caches_stay(folder: Path) -> None:
    options = {"keys": "float32", "values": "float32"}
    report = ortolan.optimize_onnx(folder, recipe="long-context", options=options, dry_run=True, calibration=ids(300))
    (step,) = [step for step in report.recipe["pass"] if step["name"] == "compress_cache"]
    assert not step["equal_rows"]


SERVING = {
    "inputs": {
        "input_ids": "input_ids",
        "position_ids": "position_ids",
        "cumulative_sequence_lengths": "sequence_starts",
        "past_sequence_lengths": "past_lengths",
        "block_table": "block_table",
        "logits_indices": "logit_rows",
        "past_key_names": "kv_cache.%d.key",
        "past_value_names": "kv_cache.%d.value",
    },
    "outputs": {
        "logits": "logits",
        "present_key_names": "new_kv_cache.%d.key",
        "present_value_names": "new_kv_cache.%d.value",
    },
}


def test_the_form_for_serving_is_configured_for_the_engine(folder: Path, tmp_path: Path) -> None:
    write_config(folder, config(inputs={"attention_mask": "attention_mask"}))
    ortolan.optimize_onnx(folder, tmp_path / "serving", weights="int8", serve=True, allow_different=True)
    expected = config(**SERVING)
    expected["model"]["decoder"]["session_options"]["custom_ops_library"] = LIBRARY
    expected["engine"] = {"dynamic_batching": {"block_size": 16, "num_blocks": 64, "max_batch_size": 16}}
    assert read_config(tmp_path / "serving") == expected
    graph = onnx.load(tmp_path / "serving" / "model.onnx").graph
    names = {value.name for value in [*graph.input, *graph.output]}
    given = [name for part in SERVING.values() for name in part.values()]
    assert {name % layer if "%d" in name else name for name in given for layer in range(2)} == names


@pytest.mark.parametrize("context, blocks", [(64, 64), (1000, 1000), (8192, 8192), (100_000, 8192), (200_001, 12_501)])
def test_pools_hold_16_requests_or_one_context(context: int, blocks: int) -> None:
    given = config()
    given["model"]["context_length"] = context
    made = engine_config(GenaiConfig(Path("genai_config.json"), given))
    assert made.content["engine"]["dynamic_batching"]["num_blocks"] == blocks
    assert "engine" not in given and "inputs" not in given["model"]["decoder"]


@pytest.mark.parametrize(
    "changes, message",
    [
        *(({"context_length": one}, f"context_length = {one!r}") for one in (None, "64", 0, True)),
        ({"decoder": []}, r"decoder = \[\] in 'model', expected an object"),
    ],
)
def test_the_engine_needs_a_context_length_and_a_decoder(changes: dict[str, Any], message: str) -> None:
    given = config()
    given["model"] |= changes
    with pytest.raises(ModelError, match=message):
        engine_config(GenaiConfig(Path("genai_config.json"), given))
