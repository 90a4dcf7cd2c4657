"""optimize_onnx and inspect_onnx on a folder as Optimum writes it.

Folders for ONNX Runtime GenAI are tested in test_genai_folder.py.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import ortolan
from ortolan import ArgumentTypeError, ModelError, OutputError, RecipeError, VerificationError
from ortolan.benchmarks.matmul_nbits import make_matmul_nbits
from ortolan.graph_passes.files import model_folder
from ortolan.models import tiny

from ..external_weights import put_weights_outside
from ..recipes.forms import NAMED
from .digests import digests

FAST = {"verify.seconds": 0.0}


def optimize(model, output=None, **arguments):
    return ortolan.optimize_onnx(model, output, options=FAST | arguments.pop("options", {}), **arguments)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A decoder with 4-bit weights in model.onnx.data, its tokenizer, and unrelated files."""
    folder = tmp_path / "model"
    folder.mkdir()
    ir.save(tiny.tiny_llama(attention="gqa", head_dim=16), tmp_path / "float.onnx")
    make_matmul_nbits(tmp_path / "float.onnx", folder / "model.onnx", 32, 4)
    (tmp_path / "float.onnx").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_bytes(os.urandom(1000))
    (folder / "chat templates").mkdir()
    (folder / "chat templates" / "a.jinja").write_text("{{ }}")
    return folder


def ids() -> np.ndarray:
    return np.array([[1, 5, 80, 3]])


def logits(path: Path) -> np.ndarray:
    past = {
        f"past_key_values.{i}.{part}": np.zeros((1, 2, 0, 16), np.float32) for i in (0, 1) for part in ("key", "value")
    }
    return ortolan.create_session(path).run(
        ["logits"], {"input_ids": ids(), "attention_mask": np.ones_like(ids()), **past}
    )[0]


COPIED = ["chat templates/a.jinja", "config.json", "tokenizer.json"]


def test_a_folder_becomes_a_folder(folder, tmp_path):
    before = digests(folder)
    report = optimize(folder, tmp_path / "fast")
    assert digests(folder) == before
    after = digests(tmp_path / "fast")
    assert sorted(after) == sorted([*COPIED, "model.onnx"])
    assert {name: after[name] for name in COPIED} == {name: before[name] for name in COPIED}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fast", "model"]
    assert (report.input, report.output) == (str(folder / "model.onnx"), str(tmp_path / "fast"))
    assert report.file_size_after == (tmp_path / "fast" / "model.onnx").stat().st_size
    expected = logits(folder / "model.onnx")
    assert np.abs(logits(tmp_path / "fast" / "model.onnx") - expected).max() < 0.02 * np.abs(expected).max()


def test_the_recipe_is_chosen_by_what_the_model_stores(folder, tmp_path):
    report = optimize(folder, dry_run=True)
    assert report.recipe["name"] == "weights as stored"
    (note,) = [note for note in report.notes if "no recipe was given" in note]
    assert "layers store quantized weights, which are kept exactly" in note
    text = " ".join(str(report).split())
    assert "recipe weights as stored" in text and "layers would replace" in text
    ir.save(tiny.mlp(), tmp_path / "float.onnx")
    report = optimize(tmp_path / "float.onnx", dry_run=True)
    assert report.recipe["name"] == "auto" and not any("chosen" in note for note in report.notes)
    assert report.auto is not None
    report = optimize(folder, dry_run=True, recipe=NAMED["int4"])
    assert report.recipe["name"] == "weights=int4, ignore=none" and not any("chosen" in note for note in report.notes)
    with pytest.raises(RecipeError, match="recipe 'weights as stored' has no option 'sparsity'"):
        optimize(folder, options={"sparsity": 0.5})


def test_large_weights_go_to_a_data_file_of_the_same_name(folder, tmp_path, monkeypatch):
    put_weights_outside(monkeypatch)
    old = digests(folder)["model.onnx.data"]
    optimize(folder, tmp_path / "fast")
    after = digests(tmp_path / "fast")
    assert sorted(after) == sorted([*COPIED, "model.onnx", "model.onnx.data"]) and after["model.onnx.data"] != old
    logits(tmp_path / "fast" / "model.onnx")


def test_the_only_onnx_file_may_have_any_name(folder, tmp_path):
    for name in ("model.onnx", "model.onnx.data"):
        (folder / name).rename(folder / name.replace("model", "decoder"))
    renamed = onnx.load(folder / "decoder.onnx", load_external_data=False)
    for tensor in renamed.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "decoder.onnx.data"
    onnx.save(renamed, folder / "decoder.onnx")
    optimize(folder, tmp_path / "fast")
    assert sorted(digests(tmp_path / "fast")) == sorted([*COPIED, "decoder.onnx"])
    assert len(ortolan.inspect_onnx(folder).linears) == len(ortolan.inspect_onnx(folder / "decoder.onnx").linears)


def test_folders_with_several_models(folder, tmp_path):
    ir.save(tiny.mlp(), folder / "vision.onnx", external_data="vision.data", size_threshold_bytes=0)
    before = digests(folder)
    optimize(folder, tmp_path / "fast")  # model.onnx is chosen; other models are copied with their data files
    after = digests(tmp_path / "fast")
    assert all(after[name] == before[name] for name in ("vision.onnx", "vision.data"))
    (folder / "model.onnx").rename(folder / "text.onnx")
    with pytest.raises(ModelError, match=r"several ONNX files: text\.onnx, vision\.onnx; give the path of one"):
        optimize(folder, tmp_path / "other")
    for name in ("text.onnx", "vision.onnx"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="holds no ONNX file, expected one"):
        ortolan.inspect_onnx(folder)
    for name, advice in (
        ("model.gguf", r"it holds a GGUF file: import it .*ortolan serve .*model\.gguf"),
        ("model.safetensors", r"it holds PyTorch weights \(model.safetensors\): export the model first, with"),
    ):
        (folder / name).write_bytes(b"")
        with pytest.raises(ModelError, match=f"holds no ONNX file, expected one; {advice}"):
            ortolan.inspect_onnx(folder)
    (folder / "models").mkdir()
    ir.save(tiny.mlp(), folder / "models" / "model.onnx")
    with pytest.raises(ModelError, match=r"holds no ONNX file; did you mean '.*/models'\?"):
        ortolan.inspect_onnx(folder)


def test_a_model_in_a_folder_onnx_stays_there(folder, tmp_path):
    (folder / "onnx").mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (folder / name).rename(folder / "onnx" / name)
    before = logits(folder)
    optimize(folder, tmp_path / "fast")
    after = digests(tmp_path / "fast")
    assert "onnx/model.onnx" in after and "model.onnx" not in after
    assert logits(tmp_path / "fast").shape == before.shape


def test_weights_that_another_model_reads_are_copied(folder, tmp_path):
    (folder / "twin.onnx").write_bytes((folder / "model.onnx").read_bytes())
    (folder / "model.onnx.data").rename(folder / "both.data")
    for name in ("model.onnx", "twin.onnx"):
        loaded = onnx.load(folder / name, load_external_data=False)
        for tensor in loaded.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "both.data"
        onnx.save(loaded, folder / name)
    optimize(folder, tmp_path / "fast")
    assert sorted(digests(tmp_path / "fast")) == sorted([*COPIED, "model.onnx", "twin.onnx", "both.data"])
    logits(tmp_path / "fast" / "twin.onnx")


def test_hidden_files_stay_behind(folder, tmp_path):
    (folder / ".git" / "lfs").mkdir(parents=True)
    (folder / ".git" / "lfs" / "object").write_bytes(b"x")
    (folder / ".gitattributes").write_text("*.onnx filter=lfs")
    optimize(folder, tmp_path / "fast")
    assert sorted(digests(tmp_path / "fast")) == sorted([*COPIED, "model.onnx"])


def test_links_that_lead_out_are_not_followed(folder, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    (folder / "key.json").symlink_to(tmp_path / "secret" / "key")
    (folder / "keys").symlink_to(tmp_path / "secret")
    (folder / "broken.json").symlink_to(folder / "nowhere")
    (folder / "up").symlink_to("..")
    (folder / "inside.json").symlink_to("tokenizer.json")
    os.mkfifo(folder / "pipe")
    report = optimize(folder, tmp_path / "fast")
    after = digests(tmp_path / "fast")
    assert sorted(after) == sorted([*COPIED, "inside.json", "model.onnx"])
    assert after["inside.json"] == after["tokenizer.json"] and not (tmp_path / "fast" / "inside.json").is_symlink()
    (note,) = [note for note in report.notes if note.startswith("not copied")]
    assert note.endswith("broken.json, key.json, keys, pipe, up")


def test_download_caches_link_all_files_to_one_folder(folder, tmp_path):
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(path for path in folder.iterdir() if path.is_file())):
        blob = tmp_path / "blobs" / f"{number:064x}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    (tmp_path / "secret").write_text("secret")
    (snapshot / "key").symlink_to("../../secret")
    optimize(snapshot, tmp_path / "fast")
    found = [path for path in (tmp_path / "fast").iterdir()]
    assert sorted(path.name for path in found) == ["config.json", "model.onnx", "tokenizer.json"]
    assert not any(path.is_symlink() for path in found)


def test_a_link_to_a_folder(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    optimize(tmp_path / "link", tmp_path / "fast")
    assert sorted(digests(tmp_path / "fast")) == sorted([*COPIED, "model.onnx"])


def test_outputs_that_are_refused(folder, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_bytes(b"x")
    before = digests(tmp_path)
    for output, text in (
        (tmp_path / "file", "is a file, but the input is a folder"),
        (tmp_path / "full", "is not empty; remove it, or choose another one"),
        (folder, "is not empty"),
        (folder / "fast", "is inside the input folder"),
        (tmp_path / "none" / "fast", "does not exist; create it first"),
        (tmp_path / "fast.onnx", "is named like a file"),
        (3, "output is an int, expected a path or None"),
    ):
        with pytest.raises((OutputError, ArgumentTypeError), match=text):
            optimize(folder, output)
    assert digests(tmp_path) == before and not (tmp_path / "fast").exists()


def test_an_empty_output_folder_is_filled(folder, tmp_path):
    (tmp_path / "fast").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "fast")
    optimize(folder, tmp_path / "link")
    assert sorted(digests(tmp_path / "fast")) == sorted([*COPIED, "model.onnx"])
    assert (tmp_path / "link").is_symlink()


def test_without_output_nothing_is_written(folder, tmp_path):
    before = digests(tmp_path)
    report = optimize(folder)
    assert "W4A8MatMul" in {node.op_type for node in report.model.graph.node}
    assert digests(tmp_path) == before and report.output is None
    optimize(folder, tmp_path / "fast", dry_run=True)
    assert digests(tmp_path) == before


class Stop(Exception):
    pass


@pytest.mark.parametrize("stage", ["normalize", "calibrate", "replace", "verify", "copy", "save"])
def test_an_interrupted_run_leaves_nothing(folder, tmp_path, stage):
    before = digests(tmp_path)

    def stop(name, done, total):
        if name == stage and done == 0:
            raise Stop

    with pytest.raises(Stop):
        optimize(folder, tmp_path / "fast", progress=stop)
    assert digests(tmp_path) == before and os.listdir(tmp_path) == ["model"]


def test_a_failed_verification_leaves_nothing(folder, tmp_path):
    with pytest.raises(VerificationError):
        optimize(folder, tmp_path / "fast", options={"max_error": 0.0, "max_rounding_error": 0.0})
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("where", ["copyfile", "rename"])
def test_a_full_disk_leaves_nothing(folder, tmp_path, monkeypatch, where):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    module = model_folder.shutil if where == "copyfile" else model_folder.os
    monkeypatch.setattr(module, where, fail)
    with pytest.raises(OutputError, match="No space left on device"):
        optimize(folder, tmp_path / "fast")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["model"]


def test_the_result_appears_at_once(folder, tmp_path, monkeypatch):
    """The output folder must appear only when it is complete."""
    seen, over = set(), threading.Event()

    def look():
        while not over.is_set():
            if (tmp_path / "fast").exists():
                seen.add(tuple(sorted(digests(tmp_path / "fast"))))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        optimize(folder, tmp_path / "fast")
    finally:
        over.set()
        watcher.join()
    assert seen <= {tuple(sorted([*COPIED, "model.onnx"]))}


def test_files_reach_the_disk_before_the_folder_gets_its_name(folder, tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        model_folder.os, "fsync", lambda descriptor: (done.append(os.fstat(descriptor).st_ino), fsync(descriptor))[1]
    )
    monkeypatch.setattr(model_folder.os, "rename", lambda *names: (done.append("rename"), rename(*names))[1])
    optimize(folder, tmp_path / "fast")
    assert done[-1] == "rename"
    files = [path for path in (tmp_path / "fast").rglob("*") if path.is_file()]
    assert {path.stat().st_ino for path in files} <= set(done[:-1])


def test_a_folder_that_cannot_be_read(folder, tmp_path, monkeypatch):
    def fail(path, onerror):
        onerror(PermissionError(13, "Permission denied", str(path)))
        yield from ()

    monkeypatch.setattr(model_folder.os, "walk", fail)
    with pytest.raises(ModelError, match="cannot be read: Permission denied"):
        optimize(folder, tmp_path / "fast")
    assert os.listdir(tmp_path) == ["model"]


def test_create_session_takes_a_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    onnx.save(ir.to_proto(tiny.mlp()), folder / "model.onnx")
    session = ortolan.create_session(folder)
    assert [value.name for value in session.get_inputs()] == ["x"]
    (folder / "model.onnx").rename(folder / "other.txt")
    with pytest.raises(ortolan.OrtolanError, match="holds no ONNX file"):
        ortolan.create_session(folder)


def test_options_of_a_recipe_that_was_chosen_by_itself(tmp_path):
    onnx.save(ir.to_proto(tiny.mlp()), tmp_path / "model.onnx")
    with pytest.raises(ortolan.RecipeError, match=r"recipe 'auto' has no option 'nonsense'; .*verify.seconds"):
        ortolan.optimize_onnx(tmp_path / "model.onnx", options={"nonsense": 1})
