"""A model repository for Triton: its files, and its configuration as read by Triton's own parser."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from google.protobuf import text_format
from typer.testing import CliRunner

import ortolan
from ortolan.cli import app
from ortolan.errors import ArgumentError, ModelError, OutputError
from ortolan.graph_passes.text.text_input import TEXT_INPUT
from ortolan.graph_passes.text.text_plan import EMBEDDING, TextInput
from ortolan.models import tiny
from ortolan.triton import write_repository

from ..text.wordpiece_file import write_wordpiece

TYPE_INT64 = 9  # in model_config.proto


def read_config(folder: Path):
    """Parse a configuration with Triton's own definition, which rejects unknown fields."""
    package = find_spec("tritonclient")
    if package is None:
        pytest.skip("tritonclient is not installed")
    # Load the file by its path, because importing its package requires grpc.
    file = Path(package.origin).parent / "grpc" / "model_config_pb2.py"
    spec = spec_from_file_location("model_config_pb2", file)
    definitions = module_from_spec(spec)
    spec.loader.exec_module(definitions)
    return text_format.Parse((folder / "config.pbtxt").read_text(), definitions.ModelConfig())


@pytest.fixture
def encoder(tmp_path) -> Path:
    model = tiny.tiny_bert(vocab_size=256)
    ir.save(model, tmp_path / "plain.onnx")
    ortolan.optimize_onnx(tmp_path / "plain.onnx", tmp_path / "encoder.onnx", weights="bf16", sparsity=0.3)
    return tmp_path / "encoder.onnx"


def test_an_encoder(tmp_path, encoder):
    folder = write_repository(encoder, tmp_path / "repo", max_batch_size=16, instances=2, threads=3)
    assert folder == tmp_path / "repo" / "encoder"
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert files == {"config.pbtxt", "1/model.onnx", "1/libortolan_ops.so"}
    assert [path.name for path in (tmp_path / "repo").iterdir()] == ["encoder"]

    config = read_config(folder)
    assert (config.name, config.backend, config.max_batch_size) == ("encoder", "onnxruntime", 16)
    session = ortolan.create_session(folder / "1" / "model.onnx")
    for described, tensors in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        assert [one.name for one in described] == [one.name for one in tensors]
        for one, tensor in zip(described, tensors, strict=True):
            assert list(one.dims) == [size if isinstance(size, int) else -1 for size in tensor.shape[1:]]
    assert config.input[0].data_type == TYPE_INT64
    assert config.HasField("dynamic_batching")
    assert [(group.count, group.kind) for group in config.instance_group] == [(2, 2)]
    assert config.parameters["intra_op_thread_count"].string_value == "3"
    (library,) = config.model_operations.op_library_filename
    assert Path(library).read_bytes() == Path(ortolan.get_library_path()).read_bytes()


def test_without_a_batch_dimension(tmp_path):
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, "n"]))
    made = ir.node("Relu", [value])
    made.outputs[0].name, made.outputs[0].type, made.outputs[0].shape = "y", value.type, value.shape
    graph = ir.Graph([value], made.outputs, nodes=[made], opset_imports={"": 17}, name="g")
    ir.save(ir.Model(graph, ir_version=8), tmp_path / "fixed.onnx")
    config = read_config(write_repository(tmp_path / "fixed.onnx", tmp_path / "repo"))
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert [list(one.dims) for one in (*config.input, *config.output)] == [[2, -1], [2, -1]]


def test_texts_have_no_dimension_but_the_batch(tmp_path, encoder):
    pytest.importorskip("onnxruntime_extensions")
    tokenizer = write_wordpiece(tmp_path / "tokenizer.json")
    model = tmp_path / "text.onnx"
    ortolan.optimize_onnx(tmp_path / "plain.onnx", model, weights="bf16", texts_in=TextInput(tokenizer))
    with pytest.raises(ModelError, match="libortextensions"):
        write_repository(model, tmp_path / "repo")
    library = tmp_path / "libortextensions.so"
    library.write_bytes(b"library")
    folder = write_repository(model, tmp_path / "repo", path_on_server="/models", extensions=library)
    config = read_config(folder)
    (text,), (embedding,) = config.input, config.output
    assert (text.name, list(text.dims), text.HasField("reshape"), list(text.reshape.shape)) == (
        TEXT_INPUT,
        [1],
        True,
        [],
    )
    assert (embedding.name, len(embedding.dims), embedding.HasField("reshape")) == (EMBEDDING, 1, False)
    assert list(config.model_operations.op_library_filename) == [
        f"/models/text/1/{name}" for name in ("libortolan_ops.so", "libortextensions.so")
    ]


def test_external_data_comes_along(tmp_path):
    ir.save(tiny.tiny_bert(), tmp_path / "big.onnx", external_data="big.onnx.data")
    folder = write_repository(tmp_path / "big.onnx", tmp_path / "repo", name="other")
    assert (folder / "1" / "big.onnx.data").is_file()
    session = ortolan.create_session(folder / "1" / "model.onnx")
    ids = np.ones((1, 3), np.int64)
    feeds = {value.name: ids for value in session.get_inputs()}
    assert np.isfinite(session.run(None, feeds)[0]).all()


def test_refusals(tmp_path, encoder):
    write_repository(encoder, tmp_path / "repo")
    with pytest.raises(OutputError, match=r"output folder '.*' exists"):
        write_repository(encoder, tmp_path / "repo")
    with pytest.raises(ArgumentError, match=r"name is '\.\./up', expected letters, digits"):
        write_repository(encoder, tmp_path / "repo", name="../up")
    with pytest.raises(ModelError, match="does not exist"):
        write_repository(tmp_path / "none.onnx", tmp_path / "repo")


def test_command_line(tmp_path, encoder):
    result = CliRunner().invoke(app, ["triton", str(encoder), "-o", str(tmp_path / "repo"), "--name", "one"])
    assert result.exit_code == 0, result.output
    assert Path(result.stdout.strip()) == tmp_path / "repo" / "one"
