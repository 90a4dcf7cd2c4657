"""optimize_onnx from end to end: outputs, reports, and unchanged inputs."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import ortolan
from ortolan.graph_passes.files import model_file
from ortolan.models import tiny
from ortolan.progress import Stage

from ..external_weights import put_weights_outside
from ..recipes.forms import NAMED
from .digests import digests

FAST = {"seconds": 0.0}


def optimize(model, output=None, **arguments):
    options = FAST | arguments.pop("options", {})
    return ortolan.optimize_onnx(model, output, recipe=NAMED["sparse-bf16"], options=options, **arguments)


@pytest.fixture
def bert(tmp_path) -> Path:
    path = tmp_path / "bert.onnx"
    ir.save(tiny.tiny_bert(), path)
    return path


@pytest.fixture
def bert_with_data(tmp_path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    ir.save(tiny.tiny_bert(), folder / "bert.onnx", external_data="bert.data", size_threshold_bytes=0)
    return folder / "bert.onnx"


def bert_feeds(rows: int = 2, length: int = 9) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(5).integers(0, 101, (rows, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def answers(path: Path, library: bool) -> np.ndarray:
    if library:
        return ortolan.create_session(path).run(None, bert_feeds())[0]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, bert_feeds())[0]


def error(expected: np.ndarray, found: np.ndarray) -> float:
    return float(np.linalg.norm(expected - found) / np.linalg.norm(expected))


def test_a_model_becomes_smaller_and_answers_the_same_with_and_without_the_library(bert, tmp_path):
    before = digests(tmp_path)
    report = optimize(bert, tmp_path / "fast.onnx", options={"sparsity": 0.0})
    assert error(answers(bert, False), answers(tmp_path / "fast.onnx", True)) < 2e-2
    assert error(answers(tmp_path / "fast.onnx", True), answers(tmp_path / "fast.onnx", False)) < 1e-2
    after = digests(tmp_path)
    assert set(after) == {*before, "fast.onnx"} and after["bert.onnx"] == before["bert.onnx"]
    assert report.file_size_before == bert.stat().st_size
    assert report.file_size_after == (tmp_path / "fast.onnx").stat().st_size < report.file_size_before
    assert report.model is None and len(report.replaced) == len(report.layers)


def test_provenance(bert, tmp_path):
    optimize(bert, tmp_path / "fast.onnx", options={"sparsity": 0.6})
    properties = {entry.key: entry.value for entry in onnx.load(tmp_path / "fast.onnx").metadata_props}
    assert properties["ortolan.recipe"] == "weights=bf16, sparsity=0.5"
    assert properties["ortolan.version"] == ortolan.__version__
    prune = next(step for step in json.loads(properties["ortolan.options"]) if step["name"] == "prune")
    assert prune["sparsity"] == 0.6


def test_report_as_json_and_text(bert, tmp_path):
    report = optimize(bert, tmp_path / "fast.onnx")
    table = json.loads(report.to_json())
    assert table == report.to_dict()
    layer = table["layers"][0]
    assert layer == {
        "name": "/encoder/layer.0/attention/self/query/MatMul",
        "op": "MatMul+Add",
        "new_op": "SparseAMXMatMul",
        "k": 48,
        "n": 48,
        "sparsity": 0.5,
        "bytes_before": 4 * 48 * 48,
        "bytes_after": layer["bytes_after"],
        "output_error": layer["output_error"],
        "status": "replaced",
        "reason": None,
        "threshold": None,
        "density": None,
        "weight_bits": None,
        "storage": "bitmap",
        "fused": ["key", "value"],
    }
    assert 0 < layer["bytes_after"] < 4 * 48 * 48 / 2 and 0.1 < layer["output_error"] < 0.5
    text, details, table = str(report), report.details(), report.table()
    for part in ("replaced 16 of 16", "48 x 48", "50.0 % zeros", "smaller", "cosine similarity", "last_hidden_state"):
        assert part in text and part in details
    for part in ("/encoder/layer.0/attention/self/query", "48 x 48", "50.0 %"):
        assert part in " ".join(table.split()) and part in " ".join(details.split())
    assert "kernel rounding contributes" in details and "SparseAMXMatMul" in details
    assert "SparseAMXMatMul" not in text and "/encoder/layer.0" not in text
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 80  # paths are not wrapped


def test_without_output_nothing_is_written(bert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = digests(tmp_path)
    report = optimize(bert)
    assert digests(tmp_path) == before and report.output is None
    onnx.checker.check_model(report.model)
    assert report.file_size_after == report.model.ByteSize()


def test_a_model_proto_is_not_changed(bert):
    model = onnx.load(bert)
    before = model.SerializeToString(deterministic=True)
    assert len(optimize(model).replaced) == 16
    assert model.SerializeToString(deterministic=True) == before


def test_the_same_run_gives_the_same_file(bert, tmp_path):
    for name in ("a.onnx", "b.onnx"):
        optimize(bert, tmp_path / name)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_dry_run_tells_and_writes_nothing(bert_with_data, tmp_path):
    before = digests(tmp_path)
    report = optimize(bert_with_data, tmp_path / "fast.onnx", dry_run=True)
    assert digests(tmp_path) == before
    assert {layer.status for layer in report.layers} == {"would replace"}
    # Each of the two attentions has two MatMuls.
    assert [layer.new_op for layer in report.layers].count("NoMADAttention") == 4
    real = optimize(bert_with_data, tmp_path / "fast.onnx")
    # Layers in one node share the bytes of its other tensors, so sizes differ slightly.
    sizes = [[layer.bytes_after for layer in one.layers if layer.k] for one in (report, real)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.03)
    assert "would replace 16 of 16" in str(report)


@pytest.mark.parametrize("large", [False, True])
def test_progress_tells_every_stage(bert, tmp_path, monkeypatch, large):
    if large:
        put_weights_outside(monkeypatch)
    calls = []
    optimize(bert, tmp_path / "fast.onnx", progress=lambda *call: calls.append(call))
    stages = list(dict.fromkeys(stage for stage, _, _ in calls))
    written = ["write"] if large else []  # tensor by tensor
    assert all(isinstance(stage, Stage) for stage in stages)
    assert stages == [
        "normalize",
        "calibrate",
        "prune",
        "fuse attention",
        "replace",
        "unpad",
        *written,
        "verify",
        "save",
    ]
    for stage in stages:
        done = [call[1:] for call in calls if call[0] == stage]
        assert done == sorted(done) and done[-1][0] == done[-1][1]


def test_steps_and_decisions_are_logged(bert, caplog):
    with caplog.at_level(logging.DEBUG, logger="ortolan"):
        ortolan.optimize_onnx(bert, weights="int4", options=FAST)
    told = {level: [one.getMessage() for one in caplog.records if one.levelno == level] for level in (20, 10)}
    assert told[20][0] == "recipe weights=int4: int4 weights in groups of 16 by mse"
    stages = [one for one in told[20] if one in set(Stage)]
    changes = ["normalize", "calibrate", "quantize", "fuse attention", "replace", "fuse norms", "unpad"]
    assert stages == [*changes, "verify"]
    assert told[20][-1] == "16 of 16 layers replaced"
    assert sum(one.endswith(": W4A8MatMul") for one in told[10]) == 12


@pytest.fixture
def large_files(monkeypatch):
    """Treat every tensor as large, so that weights go to an external data file."""
    put_weights_outside(monkeypatch)


def test_large_weights_go_to_one_aligned_data_file(bert_with_data, tmp_path, large_files):
    before = digests(tmp_path / "in")
    report = optimize(bert_with_data, tmp_path / "fast.onnx", options={"sparsity": 0.0})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fast.onnx", "fast.onnx.data", "in"]
    assert digests(tmp_path / "in") == before
    external = [
        t for t in onnx.load(tmp_path / "fast.onnx", load_external_data=False).graph.initializer if t.external_data
    ]
    assert len(external) > 10
    for tensor in external:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        assert entries["location"] == "fast.onnx.data" and int(entries["offset"]) % 64 == 0
    sizes = [(tmp_path / name).stat().st_size for name in ("fast.onnx", "fast.onnx.data")]
    assert report.file_size_after == sum(sizes)
    assert error(answers(bert_with_data, False), answers(tmp_path / "fast.onnx", True)) < 2e-2
    assert error(answers(bert_with_data, False), answers(tmp_path / "fast.onnx", False)) < 2e-2


def test_an_existing_pair_is_replaced(bert, tmp_path, monkeypatch):
    put_weights_outside(monkeypatch)
    optimize(bert, tmp_path / "fast.onnx")
    first = digests(tmp_path)
    optimize(bert, tmp_path / "fast.onnx", options={"sparsity": 0.8})
    second = digests(tmp_path)
    assert set(first) == set(second) and first["fast.onnx.data"] != second["fast.onnx.data"]
    answers(tmp_path / "fast.onnx", True)
    # A model without external data removes the old data file.
    monkeypatch.setattr(model_file, "EMBED_LIMIT", 1 << 30)
    optimize(bert, tmp_path / "fast.onnx")
    assert sorted(digests(tmp_path)) == ["bert.onnx", "fast.onnx"]


def test_a_foreign_data_file_stays(bert, tmp_path):
    (tmp_path / "fast.onnx.data").write_bytes(b"not ours")
    optimize(bert, tmp_path / "fast.onnx")
    assert (tmp_path / "fast.onnx.data").read_bytes() == b"not ours"


def test_models_in_download_caches_are_linked_to_one_folder(bert_with_data, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in bert_with_data.parent.iterdir():
        path.rename(path.with_name("blob-" + path.name))
        (snapshot / path.name).symlink_to(path.with_name("blob-" + path.name))
    report = optimize(snapshot / "bert.onnx", tmp_path / "fast.onnx", dry_run=True)
    assert len(report.replaced) == 16


def test_recipe_objects_and_files(bert, tmp_path):
    recipe = NAMED["sparse-bf16"].with_options({"sparsity": 0.25} | FAST)
    (tmp_path / "mine.toml").write_text(recipe.to_toml())
    for chosen in (recipe, tmp_path / "mine.toml"):
        report = ortolan.optimize_onnx(bert, recipe=chosen, dry_run=True)
        assert {layer.sparsity for layer in report.replaced if layer.k} == {0.25}


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_llama(tmp_path, scope):
    path = tmp_path / "llama.onnx"
    ir.save(tiny.tiny_llama(), path)
    report = optimize(path, tmp_path / "fast.onnx", options={"scope": scope})
    statuses = {layer.name: layer for layer in report.layers if layer.k}
    pruned = [layer for name, layer in statuses.items() if "lm_head" not in name]
    total = sum(layer.k * layer.n for layer in pruned)
    assert sum(layer.sparsity * layer.k * layer.n for layer in pruned) == pytest.approx(total / 2, abs=len(pruned))
    assert all(layer.status == "replaced" for layer in statuses.values())


def test_files_reach_the_disk_before_they_get_their_names(bert, tmp_path, monkeypatch, large_files):
    done = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        done.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def recorded_replace(source, target):
        done.append(("replace", os.stat(source).st_ino))
        replace(source, target)

    monkeypatch.setattr(model_file.os, "fsync", recorded_fsync)
    monkeypatch.setattr(model_file.os, "replace", recorded_replace)
    optimize(bert, tmp_path / "fast.onnx")
    model, data = (os.stat(tmp_path / name).st_ino for name in ("fast.onnx", "fast.onnx.data"))
    assert done[-4:] == [("fsync", model), ("fsync", data), ("replace", data), ("replace", model)]


def test_what_a_killed_run_left_goes_after_a_day(bert, tmp_path):
    yesterday = time.time() - 25 * 3600
    for name, file_time in (("dead", yesterday), ("alive", None)):
        folder = tmp_path / f".fast.onnx.ortolan-{name}"
        folder.mkdir()
        (folder / "packed.bin").write_bytes(b"x")
        if file_time is not None:
            os.utime(folder / "packed.bin", (file_time, file_time))
        os.utime(folder, (yesterday, yesterday))
    (tmp_path / ".fast.onnx.mine").mkdir()
    os.utime(tmp_path / ".fast.onnx.mine", (yesterday, yesterday))
    optimize(bert, tmp_path / "fast.onnx")
    left = [".fast.onnx.mine", ".fast.onnx.ortolan-alive", "bert.onnx", "fast.onnx"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_a_system_that_does_not_tell_usable_cpus(bert, tmp_path, monkeypatch):
    """Timing uses all cores on systems like macOS, where the usable CPUs are unknown."""
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    report = optimize(bert, tmp_path / "out.onnx", options={"seconds": 0.01})
    assert report.latency_cpus == report.latency_threads == os.cpu_count()


def test_threads_follow_the_affinity_of_the_process_or_the_argument(bert, tmp_path):
    fast = {"options": {"seconds": 0.01}}
    report = optimize(bert, tmp_path / "out.onnx", threads=3, **fast)
    assert report.latency_threads == 3 and "3 threads per model" in str(report)
    if hasattr(os, "sched_setaffinity"):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        try:
            assert optimize(bert, tmp_path / "out.onnx", **fast).latency_threads == 1
        finally:
            os.sched_setaffinity(0, before)
    with pytest.raises(ortolan.ArgumentError, match="threads is 0, expected a positive integer"):
        optimize(bert, tmp_path / "out.onnx", threads=0)


def reproducible_of(report):
    """Return the values of the attribute of all attention nodes."""
    nodes = [node for node in report.model.graph.node if "NoMADAttention" in node.op_type]
    told = [{one.name: onnx.helper.get_attribute_value(one) for one in node.attribute} for node in nodes]
    return {one.get("reproducible") for one in told}


@pytest.mark.parametrize(
    "arguments", [{"weights": "int8"}, {"recipe": "int4"}, {"weights": "int4", "max_bytes": "1MB"}]
)
def test_reproducible_is_an_option_of_every_format(bert, arguments):
    for where, expected in (("everywhere", {b"everywhere"}), (None, {None})):
        report = ortolan.optimize_onnx(bert, None, reproducible=where, options=FAST, **arguments)
        assert reproducible_of(report) == expected
        again = ortolan.optimize_onnx(bert, None, recipe=ortolan.Recipe.from_dict(report.recipe))
        assert reproducible_of(again) == expected


def test_bf16_layers_in_reproducible_models_are_named(bert):
    steps = [{"name": "normalize"}, {"name": "fuse_attention", "precision": "bf16", "reproducible": "everywhere"}]
    steps += [{"name": "replace", "may_grow": True}, {"name": "verify", "seconds": 0.0}]
    report = ortolan.optimize_onnx(bert, None, recipe=ortolan.Recipe.from_dict({"name": "own", "pass": steps}))
    assert any("are in bf16: the bytes depend on the CPU" in note for note in report.notes)
    assert not any("left to ONNX Runtime" in note for note in report.notes)


@pytest.mark.parametrize(("name", "left"), [("fuse_attention", "MatMul"), ("replace", "query")])
def test_layers_and_attention_left_by_reproducible_models_are_named(bert, name, left):
    steps = [{"name": "normalize"}, {"name": "quantize", "bits": 8}]
    steps += [{"name": "fuse_attention", "precision": "bf16", "reproducible": "everywhere"}]
    steps += [{"name": "replace", "may_grow": True}, {"name": "verify", "seconds": 0.0}]
    for exclude in ([], ["*"]):
        table = [step | ({"exclude": exclude} if step["name"] == name else {}) for step in steps]
        report = ortolan.optimize_onnx(bert, None, recipe=ortolan.Recipe.from_dict({"name": "own", "pass": table}))
        found = [note for note in report.notes if note.startswith("layers or attention left to ONNX Runtime: ")]
        assert len(found) == bool(exclude) and all(left in note for note in found), found


def test_attention_operators_left_by_reproducible_models_are_named(tmp_path):
    ir.save(tiny.tiny_llama(attention="gqa", hidden_size=64, head_dim=16), tmp_path / "decoder.onnx")
    recipe = ortolan.Recipe.of(weights="int8", ignore=()).reproducing("everywhere")
    for one, expected in ((recipe, []), (recipe.without_pass("fuse_cached_attention"), ["GroupQueryAttention"])):
        report = ortolan.optimize_onnx(tmp_path / "decoder.onnx", None, recipe=one, options={"verify.seconds": 0.0})
        notes = [note for note in report.notes if note.startswith("layers or attention left to ONNX Runtime: ")]
        assert len(notes) == len(expected) and all(word in note for word in expected for note in notes), notes


@pytest.mark.parametrize(
    ("value", "message"),
    [("here", "reproducible is 'here', expected 'everywhere', or None"), (True, "reproducible is a bool, expected")],
)
def test_wrong_values_of_reproducible(bert, value, message):
    with pytest.raises((ortolan.ArgumentError, ortolan.ArgumentTypeError), match=message):
        ortolan.optimize_onnx(bert, None, reproducible=value)


def test_a_timed_feed_with_padding_is_named_beside_the_speed(bert, tmp_path):
    ids = np.ones((1, 16), np.int64)
    mask = (np.arange(16) < 5).astype(np.int64)[None]
    report = optimize(
        bert,
        tmp_path / "out.onnx",
        options={"seconds": 0.01},
        calibration=[{"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids}],
    )
    assert report.latency_padding == (11, 16)
    assert "11 of 16 tokens of the timed inputs are padding" in str(report)
