"""Bad inputs: each gives one clear error, an unchanged input, and no leftover files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import (
    ArgumentTypeError,
    CalibrationError,
    ModelError,
    NothingToReplaceError,
    OrtolanError,
    OutputError,
    RecipeError,
    SessionError,
)
from ortolan.graph_passes.files import model_file
from ortolan.graph_passes.files.spill import TensorSpill
from ortolan.models import tiny

from ..external_weights import put_weights_outside
from ..recipes.forms import NAMED
from ..sampling import examples


def optimize(model, output=None, recipe=NAMED["sparse-bf16"], **arguments):
    return ortolan.optimize_onnx(model, output, recipe=recipe, **arguments)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def folder(tmp_path):
    """Return a folder with two models, which tests must not change."""
    ir.save(tiny.mlp(), tmp_path / "model.onnx")
    ir.save(tiny.mlp(), tmp_path / "external.onnx", external_data="external.data", size_threshold_bytes=0)
    return tmp_path


@pytest.fixture
def unchanged(folder):
    """Return a function that records the folder; after the test, the folder must still be the same."""
    before: list[dict[str, str]] = []
    yield lambda: before.append(digests(folder))
    assert before == [digests(folder)]


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    content = (folder / "model.onnx").read_bytes()
    (folder / "text.onnx").write_text("this is no ONNX model")
    (folder / "empty.onnx").write_bytes(b"")
    (folder / "half.onnx").write_bytes(content[: len(content) // 2])
    (folder / "model.ort").write_bytes(b"\x1c\0\0\0ORTM" + bytes(50))
    (folder / "zeros.onnx").write_bytes(bytes(1000))
    (folder / "nothing").mkdir()
    return {
        "missing": (folder / "none.onnx", r"none\.onnx' does not exist"),
        "folder": (folder / "nothing", "nothing' holds no ONNX file, expected one; export a model to ONNX first"),
        "text": (folder / "text.onnx", "is not an ONNX model"),
        "empty": (folder / "empty.onnx", "is not an ONNX model: the file is empty"),
        "half": (folder / "half.onnx", "is not an ONNX model, or it is cut short"),
        "ort": (folder / "model.ort", "ORT format"),
        "zeros": (folder / "zeros.onnx", "is not an ONNX model"),
    }


def test_a_name_of_the_hub_is_no_path():
    name = "sentence-transformers/all-MiniLM-L6-v2"
    for open_model in (ortolan.inspect_onnx, ortolan.create_session, ortolan.TextEncoder):
        with pytest.raises(OrtolanError, match=rf"does not exist; if .* Hub, .* export onnx --model {name} FOLDER"):
            open_model(name)
    with pytest.raises(ModelError, match=r"models/none\.onnx' does not exist$"):
        ortolan.inspect_onnx("models/none.onnx")
    with pytest.raises(OrtolanError, match=r"model file or folder '.*nope' does not exist$"):
        ortolan.TextEncoder("nope/")


@pytest.mark.parametrize("kind", ["missing", "folder", "text", "empty", "half", "ort", "zeros"])
def test_files_that_are_no_model(folder, unchanged, kind):
    path, message = bad_files(folder)[kind]
    unchanged()
    with pytest.raises(ModelError, match=message):
        optimize(path, folder / "out.onnx")
    with pytest.raises(ModelError, match=message):
        ortolan.inspect_onnx(path)
    with pytest.raises(SessionError, match=path.name):
        ortolan.create_session(path)


def test_models_of_the_wrong_type():
    for model in (3, None, b"bytes\0"):
        with pytest.raises((ModelError, ArgumentTypeError)):
            optimize(model)
    with pytest.raises(ModelError, match="holds no graph"):
        optimize(onnx.ModelProto())


def test_already_optimized(folder, unchanged):
    optimize(folder / "model.onnx", folder / "fast.onnx", options={"seconds": 0})
    unchanged()
    with pytest.raises(ModelError, match=r"fast\.onnx was already optimized by Ortolan \(recipe 'weights=bf16"):
        optimize(folder / "fast.onnx", folder / "faster.onnx")
    stripped = onnx.load(folder / "fast.onnx")
    del stripped.metadata_props[:]
    with pytest.raises(ModelError, match=r"already optimized by Ortolan .*ai.ortolan operators"):
        optimize(stripped)


def relu_model() -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("dry_run", [False, True])
def test_nothing_to_replace(folder, unchanged, dry_run):
    onnx.save(relu_model(), folder / "relu.onnx")
    unchanged()
    with pytest.raises(NothingToReplaceError, match=r"relu\.onnx holds no MatMul or Gemm"):
        optimize(folder / "relu.onnx", folder / "out.onnx", dry_run=dry_run)
    with pytest.raises(NothingToReplaceError, match=r"none of the 3 .*: /layers.0/MatMul: excluded from replacement"):
        optimize(folder / "model.onnx", folder / "out.onnx", options={"replace.exclude": ["*"]}, dry_run=dry_run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "fastest"}, "unknown recipe 'fastest'; the recipes are: .*sparse-encoder"),
        ({"options": {"sparsity": 1.5}}, "sparsity is 1.5, expected a number from 0 to below 1"),
        ({"options": [("sparsity", 0.5)]}, "options is a list, expected a dict"),
        ({"options": []}, "options is a list, expected a dict"),
        ({"recipe": 3}, r"recipe is an int, expected a name \(.*sparse-encoder.*\), the path"),
        ({"recipe": {"name": "r"}}, "recipe is a dict, .*Recipe.from_dict"),
        ({"options": {"sparsity": True}}, "sparsity is True"),
        ({"options": {"sparsety": 0.5}}, "no option 'sparsety'.*did you mean 'sparsity'"),
        ({"options": {"exclude": []}}, "ambiguous"),
        ({"options": {"select": ["/nothing/*"]}}, "ambiguous"),
        ({"options": {"prune.select": ["/nothing/*"]}}, "matches no linear layer"),
    ],
)
def test_recipes_and_options(folder, unchanged, arguments, message):
    unchanged()
    with pytest.raises((RecipeError, ArgumentTypeError), match=message):
        optimize(folder / "model.onnx", folder / "out.onnx", **arguments)


def test_unknown_key_in_a_recipe_file(folder, unchanged):
    (folder / "bad.toml").write_text('name = "bad"\nsparsity = 0.5\n[[pass]]\nname = "prune"\n')
    unchanged()
    with pytest.raises(
        RecipeError, match=r"bad\.toml': unknown key 'sparsity', known ones are: description, name, pass"
    ):
        optimize(folder / "model.onnx", folder / "out.onnx", recipe=folder / "bad.toml")


@pytest.mark.parametrize("damage", ["cut", "missing", "hard link"])
def test_damaged_external_data(folder, unchanged, damage):
    data = folder / "external.data"
    if damage == "cut":
        data.write_bytes(data.read_bytes()[:-100])
    elif damage == "missing":
        data.unlink()
    else:
        (folder / "twin.data").hardlink_to(data)
    unchanged()
    message = {
        "cut": r"'layers.* is cut short: .* holds \d+ bytes, expected at least",
        "missing": "is missing: there is no",
        "hard link": "several hard links",
    }[damage]
    with pytest.raises(ModelError, match=message):
        optimize(folder / "external.onnx", folder / "out.onnx")
    if damage != "hard link":
        with pytest.raises(SessionError, match="external data file"):
            ortolan.create_session(folder / "external.onnx")


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "link.bin"])
def test_external_data_outside_of_the_folder(folder, unchanged, location):
    (folder.parent / "secret.bin").write_bytes(bytes(100000))
    (folder / "link.bin").symlink_to(folder.parent / "secret.bin")
    model = onnx.load(folder / "external.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    (folder / "evil.onnx").write_bytes(model.SerializeToString())
    unchanged()
    with pytest.raises(ModelError, match=r"below the model's folder|linked out of the model's folder"):
        optimize(folder / "evil.onnx", folder / "out.onnx")


def test_external_data_of_a_proto_cannot_be_found(folder):
    with pytest.raises(ModelError, match="give the path of the model instead"):
        optimize(onnx.load(folder / "external.onnx", load_external_data=False))


@pytest.mark.parametrize("output", ["model.onnx", "./model.onnx", "link.onnx"])
def test_output_that_is_the_input(folder, unchanged, output):
    (folder / "link.onnx").symlink_to(folder / "model.onnx")
    unchanged()
    with pytest.raises(OutputError, match=r"would overwrite .*model\.onnx', which belongs to the input"):
        optimize(folder / "model.onnx", folder / output)


def test_output_whose_data_file_is_the_inputs(folder, unchanged):
    (folder / "external.data").rename(folder / "out.onnx.data")
    model = onnx.load(folder / "external.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "out.onnx.data"
    (folder / "external.onnx").write_bytes(model.SerializeToString())
    unchanged()
    for output in ("out.onnx", "out.onnx.data"):
        with pytest.raises(OutputError, match=r"would overwrite .*out\.onnx\.data', which belongs to the input"):
            optimize(folder / "external.onnx", folder / output)


def test_output_in_impossible_places(folder, unchanged):
    unchanged()
    with pytest.raises(OutputError, match=r"folder of output .* does not exist"):
        optimize(folder / "model.onnx", folder / "none" / "out.onnx")
    with pytest.raises(OutputError, match="is a folder"):
        optimize(folder / "model.onnx", folder)


@pytest.mark.parametrize("name", ["out.onnx", "out.onnx.data"])
def test_outputs_that_are_no_regular_file(tmp_path, name):
    ir.save(tiny.mlp(), tmp_path / "model.onnx")
    os.mkfifo(tmp_path / name)
    with pytest.raises(OutputError, match="is not a regular file; choose another output"):
        optimize(tmp_path / "model.onnx", tmp_path / "out.onnx")
    assert (tmp_path / name).is_fifo()


def test_models_that_are_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "model.onnx")
    for call in (optimize, ortolan.inspect_onnx):
        with pytest.raises(ModelError, match="is not a regular file, expected an ONNX file"):
            call(tmp_path / "model.onnx")


def test_an_output_that_is_a_link_is_followed(tmp_path):
    ir.save(tiny.mlp(), tmp_path / "model.onnx")
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "old.onnx").write_bytes(b"old")
    (tmp_path / "link.onnx").symlink_to(tmp_path / "real" / "old.onnx")
    report = optimize(tmp_path / "model.onnx", tmp_path / "link.onnx", options={"seconds": 0})
    assert (tmp_path / "link.onnx").is_symlink() and report.output == str(tmp_path / "real" / "old.onnx")
    ortolan.create_session(tmp_path / "link.onnx")


@pytest.mark.parametrize("x", [np.full((3, 24), np.nan, np.float32), np.ones((0, 24), np.float32)])
def test_calibration_that_compares_nothing(folder, unchanged, x):
    unchanged()
    with pytest.raises(CalibrationError, match=r"\(1 given input.* no answer can be compared"):
        optimize(folder / "model.onnx", folder / "out.onnx", calibration={"x": x})


def test_calibration_that_does_not_fit(folder, unchanged):
    unchanged()
    with pytest.raises(CalibrationError, match="missing inputs: x"):
        optimize(folder / "model.onnx", folder / "out.onnx", calibration={"y": np.ones(3)})


def test_a_weight_that_is_not_finite(folder, unchanged):
    model = onnx.load(folder / "model.onnx")
    tensor = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
    array = numpy_helper.to_array(tensor).copy()
    array[0, 0] = np.nan
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, folder / "nan.onnx")
    unchanged()
    with pytest.raises(ModelError, match=rf"'{tensor.name}' holds NaN or infinity \(1 of {array.size} values\)"):
        optimize(folder / "nan.onnx", folder / "out.onnx")


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(ir.DataType.FLOAT, np.nan), (ir.DataType.FLOAT16, np.inf), (ir.DataType.BFLOAT16, -np.inf)],
)
def test_weights_that_spoil_all_answers_are_named_before_the_work(tmp_path, dtype, bad):
    model = tiny.tiny_bert(vocab_size=256)
    for name in ("encoder.layer.0.attention.output.dense.weight_t", "encoder.layer.1.output.dense.weight_t"):
        value = model.graph.initializers[name]
        array = value.const_value.numpy().copy()
        array[:3, 0] = bad
        value.const_value = ir.tensor(array, name=name)
    if dtype != ir.DataType.FLOAT:  # float16 and bfloat16 weights that are cast to float32
        to_halves(model, name, dtype)
    ir.save(model, tmp_path / "nan.onnx")
    stages = []
    for form in ({}, {"weights": "bf16"}, {"weights": "int8"}):
        with pytest.raises(ModelError, match=r"weight .* holds NaN or infinity \(3 of \d+ values\); so do 1 other"):
            ortolan.optimize_onnx(
                tmp_path / "nan.onnx",
                tmp_path / "out.onnx",
                progress=lambda stage, done, total: stages.append(stage),
                **form,
            )
    assert not stages and not (tmp_path / "out.onnx").exists()


def test_a_weight_that_is_not_finite_and_spoils_no_answer(tmp_path):
    model = tiny.tiny_bert(vocab_size=256)
    table = model.graph.initializers["embeddings.word_embeddings.weight"]
    array = table.const_value.numpy().copy()
    array[255] = np.nan
    table.const_value = ir.tensor(array, name=table.name)
    ir.save(model, tmp_path / "nan.onnx")
    feeds = {"input_ids": np.array([[1, 2, 3, 4]])}
    report = ortolan.optimize_onnx(
        tmp_path / "nan.onnx", weights="bf16", calibration=[feeds], options={"seconds": 0.0}, portable=False
    )
    assert report.replaced


def to_halves(model, name, dtype):
    value = model.graph.initializers[name]
    halves = ir.Value(name=f"{name}_halves", type=ir.TensorType(dtype), shape=value.shape)
    halves.const_value = ir.tensor(value.const_value.numpy().astype(dtype.numpy()), name=halves.name)
    cast = ir.node("Cast", [halves], {"to": ir.DataType.FLOAT})
    value.replace_all_uses_with(cast.outputs[0])
    model.graph.initializers.pop(name)
    model.graph.initializers[halves.name] = halves
    model.graph.insert_before(next(iter(model.graph)), cast)


@examples(150)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 1))
def test_damaged_bytes_give_an_error_of_ours_or_none(changes, which):
    content = bytearray(DAMAGED[which])
    for place, value in changes:
        content[place % len(content)] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.onnx"
        path.write_bytes(content)
        with contextlib.suppress(OrtolanError):
            ortolan.inspect_onnx(path)
        with contextlib.suppress(OrtolanError):
            optimize(path, dry_run=True)


DAMAGED = [
    ir.to_proto(tiny.mlp((6, 5, 4), ["cast", "dequantize"])).SerializeToString(),
    ir.to_proto(tiny.mlp((6, 5, 4, 4), ["transpose", "gemm_trans_b", "identity"])).SerializeToString(),
]


STAGES = ["normalize", "calibrate", "prune", "replace", "verify", "write", "save"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
@pytest.mark.parametrize("existing", [False, True])
def test_interrupts_leave_nothing(folder, unchanged, monkeypatch, stage, error, existing):
    """An interrupted run leaves an older model and its data file as they were, and writes no other files."""
    put_weights_outside(monkeypatch)
    if existing:
        optimize(folder / "model.onnx", folder / "out.onnx", options={"seconds": 0, "sparsity": 0.9})
    unchanged()

    def interrupt(reached: str, done: int, total: int) -> None:
        if reached == stage and not (stage == "save" and done):
            raise error("stop")

    with pytest.raises(error, match=r"^stop$"):
        optimize(folder / "external.onnx", folder / "out.onnx", options={"seconds": 0}, progress=interrupt)


@pytest.mark.parametrize("step", range(1, 5))
def test_failures_while_the_files_are_moved_put_the_old_pair_back(folder, unchanged, monkeypatch, step):
    put_weights_outside(monkeypatch)
    optimize(folder / "model.onnx", folder / "out.onnx", options={"seconds": 0, "sparsity": 0.9})
    unchanged()
    real, calls = model_file.os.replace, []

    def replace(source, target):
        # onnx-ir first moves a temporary file of its own; then Ortolan moves three files.
        calls.append(source)
        if len(calls) == step:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(model_file.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        optimize(folder / "external.onnx", folder / "out.onnx", options={"seconds": 0})
    assert len(calls) >= step


def test_outputs_and_models_of_the_wrong_type(folder, unchanged):
    unchanged()
    with pytest.raises(ArgumentTypeError, match="output is an int, expected a path or None"):
        optimize(folder / "model.onnx", 3)
    with pytest.raises(ArgumentTypeError, match="model is an int, expected the path"):
        ortolan.create_session(3)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk(folder, unchanged, monkeypatch):
    def spill(place: Path) -> TensorSpill:
        (place / "packed.bin").symlink_to("/dev/full")
        return TensorSpill(place)

    monkeypatch.setattr("ortolan.optimize.TensorSpill", spill)
    unchanged()
    with pytest.raises(OutputError, match=r"cannot write .*packed\.bin': No space left"):
        optimize(folder / "model.onnx", folder / "out.onnx")


def test_a_folder_that_nothing_can_be_moved_in(folder, unchanged, monkeypatch):
    def fail(self, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(model_file.Path, "mkdir", fail)
    unchanged()
    with pytest.raises(OutputError, match=r"cannot write .*out\.onnx': Permission denied"):
        optimize(folder / "model.onnx", folder / "out.onnx", options={"seconds": 0})
