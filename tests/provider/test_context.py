"""Compiled models: what a session with ep.context_enable writes, and sessions on the written model."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization

import ortolan
from ortolan import _testing
from ortolan.models import tiny
from ortolan.provider import PROVIDER

from ..ops.isa_process import run_with_isa
from ..ops.single_node import assert_same_bits
from ..passes.int8_layers import DYNAMIC, Int8Layer, sparse_integers
from .context_records import HEADER
from .int8_models import ACTIVATIONS, all_claims, dense_integers, with_nodes
from .nbits_models import NBits, whole
from .sessions import ORT_VERSION, claimed, needs_provider, provider_session
from .test_float_layers import layer_model, precise_session

pytestmark = needs_provider

FLOAT = TensorProto.FLOAT
node = helper.make_node
ENTRIES = {"ep__ortolanexecutionprovider__claims": "all"}
FORMAT = 8


def compile_model(model: onnx.ModelProto, folder: Path, threads: int = 1, **entries: str) -> ort.InferenceSession:
    """Write model.onnx and model_ctx.onnx to the folder, and return the session that wrote the latter."""
    onnx.save(model, folder / "model.onnx")
    all_entries: dict[str, Any] = ENTRIES | {"ep__context_enable": "1"} | entries
    return provider_session(str(folder / "model.onnx"), threads, **all_entries)


def compiled_session(folder: Path, threads: int = 1) -> ort.InferenceSession:
    return provider_session(str(folder / "model_ctx.onnx"), threads)


def context_nodes(folder: Path) -> list[dict[str, Any]]:
    """Their attributes."""
    graph = onnx.load(folder / "model_ctx.onnx").graph
    found = [one for one in graph.node if one.op_type == "EPContext"]
    return [{one.name: helper.get_attribute_value(one) for one in item.attribute} for item in found]


def check_round_trip(model: onnx.ModelProto, folder: Path, *feeds: dict[str, np.ndarray], **entries: str) -> None:
    """Check that the compiled model has EPContext nodes, and gives the bits of the original model."""
    expected = provider_session(model, **ENTRIES | entries)
    written = compile_model(model, folder, 1, **entries)
    read = compiled_session(folder)
    nodes = context_nodes(folder)
    assert nodes and all(one["source"].decode() == PROVIDER for one in nodes)
    assert len(claimed(read)) == len(nodes)
    for feed in feeds:
        answers = expected.run(None, feed)
        for session in (written, read):
            for y, one in zip(session.run(None, feed), answers, strict=True):
                assert_same_bits(y, one)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("zero_points", ["", "packed", "whole", "fractions"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [(64, 16), (300, 70)])
def test_layers_of_few_bits(size: tuple[int, int], bits: int, zero_points: str, bias: bool, tmp_path: Path) -> None:
    if bits == 8 and zero_points == "fractions":
        pytest.skip("these are left to ONNX Runtime")
    layer = NBits(*size, 32, bits, zero_points=zero_points, bias=bias)
    check_round_trip(layer.model(), tmp_path, *({"x": layer.x(rows)} for rows in (1, 7, 40)))


@pytest.mark.parametrize("form", DYNAMIC)
@pytest.mark.parametrize("zeros", [0.0, 0.6])
def test_int8_layers(form: str, zeros: float, tmp_path: Path) -> None:
    """Weights are stored dense, or as a bitmap if that is faster on this CPU."""
    q = np.where(np.random.default_rng(2).random((150, 40)) < zeros, 0, dense_integers(150, 40)).astype(np.int8)
    layer = Int8Layer(form, q=q, bias=True)
    check_round_trip(layer.model(), tmp_path, *({"x": layer.inputs(rows)} for rows in (1, 20)))


def test_zero_points_of_an_int8_weight(tmp_path: Path) -> None:
    codes = np.random.default_rng(4).integers(0, 256, (70, 24)).astype(np.int16)
    layer = Int8Layer("chain", unsigned=True, zero_point=140, q=codes - 140)
    check_round_trip(layer.model(), tmp_path, {"x": layer.inputs(9)})


def test_one_layer_behind_another(tmp_path: Path) -> None:
    """A value between two EPContext nodes must have a declared type."""
    first, second = NBits(64, 32, 32), NBits(32, 48, 32)
    value = helper.make_tensor_value_info
    nodes = [first.node(y="h", name="first", prefix="1 "), second.node(x="h", name="second", prefix="2 ")]
    tensors = [*first.initializers("1 "), *second.initializers("2 ")]
    x, y = value("x", FLOAT, ["batch", 64]), value("y", FLOAT, None)
    model = whole(helper.make_graph(nodes, "two layers", [x], [y], tensors))
    check_round_trip(model, tmp_path, {"x": first.x(5)})
    assert len(context_nodes(tmp_path)) == 2


@pytest.mark.parametrize("zeros", [0.0, 0.6])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_float_layers(precision: str, zeros: float, tmp_path: Path) -> None:
    """A session on the compiled model does not need the precision option."""
    model = layer_model("MatMul", zeros=zeros)
    feed = {"x": np.random.default_rng(1).standard_normal((9, 40), np.float32)}
    (expected,) = precise_session(model, precision).run(None, feed)
    compile_model(model, tmp_path, 1, ep__ortolanexecutionprovider__precision=precision)
    assert len(context_nodes(tmp_path)) == 1
    assert_same_bits(compiled_session(tmp_path).run(None, feed)[0], expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, tmp_path: Path) -> None:
    layer = Int8Layer("chain", q=dense_integers(64, 24), bias=True)
    check_round_trip(
        with_nodes(layer, [*ACTIVATIONS[name], node("Neg", ["a"], ["y"])]), tmp_path, {"x": layer.inputs(7)}
    )


def encoder_layer() -> onnx.ModelProto:
    """Return a linear layer with a residual and a norm, between nodes that ONNX Runtime runs."""
    layer = Int8Layer("chain", q=dense_integers(64, 32), bias=True)
    weight, bias = np.random.default_rng(7).standard_normal((2, 32)).astype(np.float32)
    more = [
        node("Neg", ["z"], ["residual"], name="in front"),
        node("Add", ["residual", "r"], ["s"]),
        node("LayerNormalization", ["s", "weight", "shift"], ["n"], axis=-1, epsilon=1e-6),
        node("Neg", ["n"], ["y"], name="behind"),
    ]
    return with_nodes(layer, more, ("z",), weight=weight, shift=bias)


def encoder_feeds(*rows: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [
        {"x": rng.standard_normal((m, 64), np.float32), "z": rng.standard_normal((m, 32), np.float32)} for m in rows
    ]


def test_residual_and_layer_norm(tmp_path: Path) -> None:
    check_round_trip(encoder_layer(), tmp_path, *encoder_feeds(1, 9, 70))


def test_gated_layers(tmp_path: Path) -> None:
    layer = Int8Layer("chain", q=dense_integers(64, 32))
    more = [
        node("MatMulInteger", ["xq", "W2", "xz", "zeros"], ["sums2"], name="linear2"),
        node("Cast", ["sums2"], ["floats2"], to=FLOAT),
        node("Mul", ["floats2", "step"], ["r2"]),
        node("Sigmoid", ["r"], ["g"]),
        node("Mul", ["r", "g"], ["a"]),
        node("Mul", ["a", "r2"], ["y"], name="product"),
    ]
    model = with_nodes(layer, more, W2=dense_integers(64, 32, seed=1))
    assert "product" in claimed(all_claims(model))
    check_round_trip(model, tmp_path, *({"x": layer.inputs(rows)} for rows in (1, 40)))


def tiny_encoder(folder: Path) -> onnx.ModelProto:
    onnx.save(ir.to_proto(tiny.tiny_bert()), folder / "float.onnx")
    quantization.quantize_dynamic(folder / "float.onnx", folder / "int8.onnx", weight_type=quantization.QuantType.QInt8)
    return onnx.load(folder / "int8.onnx")


def ids(batch: int, length: int) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(length).integers(0, 101, (batch, length))
    return {"input_ids": numbers, "attention_mask": np.ones_like(numbers), "token_type_ids": np.zeros_like(numbers)}


@pytest.mark.parametrize("embed_mode", ["0", "1"])
def test_a_whole_encoder(embed_mode: str, tmp_path: Path) -> None:
    model = tiny_encoder(tmp_path)
    feeds = [ids(1, 1), ids(1, 16), ids(3, 40)]
    check_round_trip(model, tmp_path, *feeds, ep__context_embed_mode=embed_mode)
    assert len(context_nodes(tmp_path)) >= 6
    files = {one.name for one in tmp_path.iterdir()} - {"float.onnx", "int8.onnx", "model.onnx"}
    assert files == {"model_ctx.onnx", *(["model_ctx_ortolan.bin"] if embed_mode == "0" else [])}


def test_what_one_model_can_hold() -> None:
    """The files of all groups must fit into 2 GiB - 1 as Base64."""
    most = 2**31 // 4 * 3 - 3
    for files in ([], [0, 1, 2], [most], [most - 3 * 2**20, 3 * 2**19, 3 * 2**19]):
        _testing.check_embedded(files)
    for files in ([most + 1], [most, 1], [2**30, 2**30], [2**60], [1, 2**62]):
        total = f"packed weights of {len(files)} groups take {sum(files)} bytes, "
        pattern = f"{total}.*Set the session's ep.context_embed_mode to 0"
        with pytest.raises(RuntimeError, match=pattern):
            _testing.check_embedded(files)


def test_a_host_may_ask_whether_it_runs_here(tmp_path: Path) -> None:
    compile_model(NBits(64, 20, 32).model(), tmp_path)
    metadata = {one.key: one.value for one in onnx.load(tmp_path / "model_ctx.onnx").metadata_props}
    info = f"format {FORMAT} (Ortolan {ortolan.__version__})"
    assert metadata[f"ep_compatibility_info.{PROVIDER}"] == info
    native = ort.capi.onnxruntime_pybind11_state
    if not hasattr(native, "get_compatibility_info_from_model"):
        pytest.skip("onnxruntime has no such functions for Python")
    assert native.get_compatibility_info_from_model(str(tmp_path / "model_ctx.onnx"), PROVIDER) == info
    devices = [one for one in ort.get_ep_devices() if one.ep_name == PROVIDER]

    def ask(text: str) -> str:
        found: str = native.get_model_compatibility_for_ep_devices(devices, text).name
        return found

    assert ask(info) == "EP_SUPPORTED_OPTIMAL"
    for other in (f"format {FORMAT + 1} (Ortolan 9.1.0)", "format 1 (Ortolan 0.1.0)", "format ", f"format {FORMAT}"):
        assert ask(other) == "EP_UNSUPPORTED"
    for strange in ("", "another", "Format 2"):
        assert ask(strange) == "EP_NOT_APPLICABLE"


def test_weights_are_in_the_file_alone(tmp_path: Path) -> None:
    layer = NBits(512, 256, 32)
    compile_model(layer.model(), tmp_path)
    sizes = {one.name: one.stat().st_size for one in tmp_path.iterdir()}
    assert sizes["model_ctx.onnx"] < 4096 < 512 * 256 // 2 < sizes["model_ctx_ortolan.bin"] < sizes["model.onnx"] + 4096
    (attributes,) = context_nodes(tmp_path)
    assert attributes["ep_cache_context"] == b"model_ctx_ortolan.bin"
    assert attributes["embed_mode"] == 0 and attributes["main_context"] == 1


def test_a_compiled_model_may_move(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    layer = NBits(64, 20, 32)
    x = layer.x(3)
    (expected,) = compile_model(layer.model(), tmp_path / "a").run(None, {"x": x})
    (tmp_path / "a").rename(tmp_path / "b")
    assert_same_bits(compiled_session(tmp_path / "b").run(None, {"x": x})[0], expected)


def test_a_session_outlives_its_file(tmp_path: Path) -> None:
    """Writing the file again replaces it, while open sessions keep the old one."""
    layer, other = NBits(64, 20, 32), NBits(64, 20, 32, zero_points="packed")
    x = layer.x(3)
    (expected,) = compile_model(layer.model(), tmp_path).run(None, {"x": x})
    session = compiled_session(tmp_path)
    (tmp_path / "model_ctx.onnx").unlink()
    compile_model(other.model(), tmp_path)
    assert_same_bits(session.run(None, {"x": x})[0], expected)


def test_a_model_in_memory_takes_a_path(tmp_path: Path) -> None:
    layer = NBits(64, 20, 32)
    x = layer.x(3)
    with pytest.raises(Exception, match="ep_context_path and model_path are empty"):
        provider_session(layer.model(), ep__context_enable="1")  # the error comes from ONNX Runtime
    path = tmp_path / "some.name_ctx.onnx"
    written = provider_session(layer.model(), ep__context_enable="1", ep__context_file_path=str(path))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["some.name_ctx.onnx", "some.name_ctx_ortolan.bin"]
    compiled = onnx.load(path)
    with pytest.raises(
        Exception, match=r"the model was not loaded from a file\. Set the session's ep\.context_file_path"
    ):
        provider_session(compiled)
    session = provider_session(compiled, ep__context_file_path=str(path))
    assert_same_bits(session.run(None, {"x": x})[0], written.run(None, {"x": x})[0])


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none" / "model_ctx.onnx"
    with pytest.raises(Exception, match=r"model_ctx_ortolan\.bin' cannot be written: No such file"):
        compile_model(NBits(64, 20, 32).model(), tmp_path, ep__context_file_path=str(path))
    assert [one.name for one in tmp_path.iterdir()] == ["model.onnx"]


def test_a_compiled_model_is_not_compiled(tmp_path: Path) -> None:
    compile_model(NBits(64, 20, 32).model(), tmp_path)
    with pytest.raises(Exception, match="compiled already"):
        provider_session(
            str(tmp_path / "model_ctx.onnx"),
            ep__context_enable="1",
            ep__context_file_path=str(tmp_path / "second_ctx.onnx"),
        )


@pytest.mark.parametrize("residual", [False, True])
def test_a_layer_that_makes_nothing(residual: bool, tmp_path: Path) -> None:
    """A layer whose output is unused is not claimed, because an EPContext node needs an output."""
    layer = Int8Layer("chain", q=dense_integers(64, 24))
    more = [node("Add", ["r", "x2"], ["s"], name="sum")] if residual else []
    model = with_nodes(layer, [*more, node("Neg", ["x2"], ["y"])], ("x2",))
    session = compile_model(model, tmp_path)
    assert claimed(session) == [] and not (tmp_path / "model_ctx.onnx").exists()


def test_an_input_that_has_a_value(tmp_path: Path) -> None:
    """ONNX Runtime turns an input with an initializer into a constant, which an EPContext node may read."""
    layer = NBits(64, 20, 32)
    model = layer.model()
    model.graph.initializer.append(numpy_helper.from_array(layer.x(3), "x"))
    compile_model(model, tmp_path)
    assert_same_bits(compiled_session(tmp_path).run(None, {})[0], provider_session(model).run(None, {})[0])


def test_nodes_of_other_providers_stay(tmp_path: Path) -> None:
    compile_model(NBits(64, 20, 32).model(), tmp_path)
    model = onnx.load(tmp_path / "model_ctx.onnx")
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "source":
            attribute.s = b"AnotherProvider"
    with pytest.raises(Exception, match="AnotherProvider"):
        provider_session(model)


@pytest.mark.skipif(ORT_VERSION < (1, 32), reason="this onnxruntime writes no such model")
def test_layers_in_branches_are_not_compiled(tmp_path: Path) -> None:
    # The layer in the branch is small and has its own weights: ONNX Runtime drops outer values that only branches read,
    # and fails to write branches with more than 127 bytes of weights.
    layer, value = NBits(32, 4, 32), helper.make_tensor_value_info
    inner = layer.node(y="a", name="inner", prefix="inner ")
    then = helper.make_graph([inner], "then", [], [value("a", FLOAT, None)], layer.initializers("inner "))
    other = helper.make_graph([node("Neg", ["first"], ["b"])], "else", [], [value("b", FLOAT, None)])
    branches = node("If", ["condition"], ["chosen"], then_branch=then, else_branch=other)
    nodes = [layer.node(y="first", name="outer"), branches, node("Add", ["first", "chosen"], ["y"])]
    inputs = [value("x", FLOAT, ["batch", 32]), value("condition", TensorProto.BOOL, [])]
    model = whole(helper.make_graph(nodes, "branches", inputs, [value("y", FLOAT, None)], layer.initializers()))
    feeds = [{"x": layer.x(3), "condition": np.array(condition)} for condition in (False, True)]
    assert claimed(compile_model(model, tmp_path)) == ["outer"]
    # Layers in branches are claimed when the compiled model is loaded.
    expected, read = provider_session(model), compiled_session(tmp_path)
    for feed in feeds:
        assert_same_bits(read.run(None, feed)[0], expected.run(None, feed)[0])


@pytest.mark.skipif(not hasattr(ort, "ModelCompiler"), reason="onnxruntime has no ModelCompiler")
@pytest.mark.parametrize("embeds", [False, True])
def test_model_compiler(embeds: bool, tmp_path: Path) -> None:
    model = encoder_layer()
    onnx.save(model, tmp_path / "model.onnx")
    options = ortolan.session_options()
    options.add_session_config_entry("ep.ortolanexecutionprovider.claims", "all")
    compiler = ort.ModelCompiler(options, str(tmp_path / "model.onnx"), embed_compiled_data_into_model=embeds)
    compiler.compile_to_file(str(tmp_path / "model_ctx.onnx"))
    compiler.compile_to_file(str(tmp_path / "model_ctx.onnx"))
    assert (tmp_path / "model_ctx_ortolan.bin").exists() != embeds
    session, expected = compiled_session(tmp_path), all_claims(model)
    assert len(claimed(session)) == len(context_nodes(tmp_path)) == 1
    for feed in encoder_feeds(1, 9):
        assert_same_bits(session.run(None, feed)[0], expected.run(None, feed)[0])


@pytest.mark.skipif(not hasattr(ort, "ModelCompiler"), reason="onnxruntime has no ModelCompiler")
def test_model_compiler_in_memory() -> None:
    layer = NBits(64, 20, 32)
    x = layer.x(3)
    model = layer.model().SerializeToString()
    compiled = ort.ModelCompiler(ortolan.session_options(), model, embed_compiled_data_into_model=True)
    session = provider_session(onnx.load_from_string(compiled.compile_to_bytes()))
    assert_same_bits(session.run(None, {"x": x})[0], provider_session(layer.model()).run(None, {"x": x})[0])
    with pytest.raises(Exception, match=r"ep\.context_file_path"):
        ort.ModelCompiler(ortolan.session_options(), model).compile_to_bytes()


OTHER_CPU = """
import sys
import numpy as np
from tests.provider.sessions import provider_session
model, feeds, answer, *entries = sys.argv[1:]
session = provider_session(model, **dict(one.split("=") for one in entries))
np.save(answer, session.run(None, dict(np.load(feeds)))[0])
"""


@pytest.mark.parametrize("written_by, read_by", [("avx2", None), (None, "avx2")])
def test_a_file_of_another_cpu(written_by: str | None, read_by: str | None, tmp_path: Path) -> None:
    """Weights with zeros are stored as a bitmap on a CPU with AVX-512, otherwise dense. Every CPU reads both."""
    detected = ortolan._native.cpu_info()["detected_features"]
    if "avx2" not in detected:
        pytest.skip("this CPU has no AVX2")
    q = np.where(np.random.default_rng(2).random((150, 40)) < 0.6, 0, dense_integers(150, 40)).astype(np.int8)
    layer = Int8Layer("chain", q=q, bias=True)
    onnx.save(layer.model(), tmp_path / "model.onnx")
    np.savez(tmp_path / "feeds.npz", x=layer.inputs(9))

    def run(isa: str | None, model: str, **entries: str) -> np.ndarray:
        arguments = [str(tmp_path / name) for name in (model, "feeds.npz", "answer.npy")]
        told = [f"{name}={text}" for name, text in (ENTRIES | entries).items()]
        done = run_with_isa(isa or ortolan._native.cpu_info()["isa"], OTHER_CPU, *arguments, *told)
        assert done.returncode == 0, done.stderr
        answer: np.ndarray = np.load(tmp_path / "answer.npy")
        return answer

    run(written_by, "model.onnx", ep__context_enable="1")
    assert_same_bits(run(read_by, "model_ctx.onnx"), run(read_by, "model.onnx"))


def refuse(folder: Path, pattern: str) -> None:
    with pytest.raises(Exception, match=pattern) as caught:
        compiled_session(folder)
    assert "EPContext node 'Ortolan" in str(caught.value) and "Compile the original model again" in str(caught.value)


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    compile_model(encoder_layer(), tmp_path)
    return tmp_path


def binary(folder: Path) -> Path:
    return folder / "model_ctx_ortolan.bin"


def test_a_missing_file(compiled: Path) -> None:
    binary(compiled).unlink()
    refuse(compiled, r"model_ctx_ortolan\.bin' cannot be read: No such file")


def test_what_is_no_file(compiled: Path) -> None:
    binary(compiled).unlink()
    binary(compiled).mkdir()
    refuse(compiled, r"model_ctx_ortolan\.bin' cannot be read: it is no file")


@pytest.mark.parametrize("size", [0, 1, 63, 64, 128, -1, -64])
def test_a_short_file(size: int, compiled: Path) -> None:
    content = binary(compiled).read_bytes()
    binary(compiled).write_bytes(content[:size])
    refuse(compiled, r"model_ctx_ortolan\.bin' cannot be (read: it is empty|used: it holds \d+ bytes)")


def test_a_longer_file(compiled: Path) -> None:
    binary(compiled).write_bytes(binary(compiled).read_bytes() + bytes(64))
    refuse(compiled, r"it holds \d+ bytes, expected \d+")


def test_another_file(compiled: Path) -> None:
    binary(compiled).write_bytes(b"PK" + bytes(200))
    refuse(compiled, "it does not begin with the header of a compiled model's file")


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1])
def test_a_file_of_another_format(number: int, compiled: Path) -> None:
    content = bytearray(binary(compiled).read_bytes())
    content[8:16] = struct.pack("<q", number)
    content[40:64] = b"9.1.0".ljust(24, b"\0")
    binary(compiled).write_bytes(content)
    refuse(compiled, rf"it has format {number} \(by Ortolan 9\.1\.0\), expected {FORMAT}")


def test_the_file_of_another_model(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("other")
    compile_model(NBits(64, 20, 32).model(), folder)
    shutil.copy(binary(folder), binary(compiled))
    refuse(compiled, r"has id [0-9a-f]{16}, expected id [0-9a-f]{16}: the file belongs to another model")


def change_attribute(folder: Path, name: str, value: Any) -> None:
    model = onnx.load(folder / "model_ctx.onnx")
    (found,) = (one for one in model.graph.node if one.op_type == "EPContext")
    kept = [one for one in found.attribute if one.name != name]
    del found.attribute[:]
    found.attribute.extend([*kept, helper.make_attribute(name, value)])
    onnx.save(model, folder / "model_ctx.onnx")


@pytest.mark.parametrize("path", ["", "/etc/hostname", "../model_ctx_ortolan.bin", "a/../../b.bin", "a/..", ".."])
def test_paths_that_leave_the_folder(path: str, compiled: Path) -> None:
    change_attribute(compiled, "ep_cache_context", path)
    refuse(compiled, "its file is '.*', expected a file in the model's folder")


def test_a_file_in_a_folder_below(compiled: Path) -> None:
    (compiled / "below").mkdir()
    binary(compiled).rename(compiled / "below" / "x.bin")
    change_attribute(compiled, "ep_cache_context", "below/x.bin")
    assert len(claimed(compiled_session(compiled))) == 1


@pytest.mark.parametrize(
    "name, value, pattern",
    [
        ("partition_name", "another", "it holds 1 groups, but not 'another'"),
        ("embed_mode", 2, "its embed_mode is 2, expected 0 or 1"),
        ("embed_mode", 1, "is not valid Base64"),
        ("notes", "", "the file belongs to another model"),
    ],
)
def test_wrong_attributes(name: str, value: Any, pattern: str, compiled: Path) -> None:
    change_attribute(compiled, name, value)
    refuse(compiled, pattern)


@pytest.mark.parametrize("of", ["inputs", "outputs"])
def test_values_of_another_type(of: str, tmp_path: Path) -> None:
    """EPContext nodes read and write floats, so a model that declares other types is rejected."""
    compile_model(NBits(64, 20, 32).model(), tmp_path)
    model = onnx.load(tmp_path / "model_ctx.onnx")
    value = model.graph.input[0] if of == "inputs" else model.graph.output[0]
    value.type.tensor_type.elem_type = TensorProto.INT8
    onnx.save(model, tmp_path / "model_ctx.onnx")
    refuse(tmp_path, "its value '[xy]' has another type than its step expects")


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """Return the file with one to four random changes of the header, the records or any byte."""
    changed = bytearray(content)
    (record_bytes,) = struct.unpack_from("<q", content, 24)
    for _ in range(rng.integers(1, 5)):
        kind = rng.integers(4)
        if kind == 0:
            changed[rng.integers(len(changed))] = rng.integers(256)
            continue
        place = HEADER + 8 * int(rng.integers(record_bytes // 8)) if kind != 3 else 8 * int(rng.integers(2, 4))
        (number,) = struct.unpack_from("<q", changed, place)
        extreme = [-(2**63), 2**63 - 1, 2**63 - 64, -1, 0, 1, 2, 16, 64, 1 << 17, 1 << 28, 1 << 40, len(changed)]
        near = number + int(rng.choice([-64, -8, -1, 1, 8, 64]))
        chosen = near if abs(near) < 2**62 and rng.random() < 0.5 else extreme[rng.integers(len(extreme))]
        struct.pack_into("<q", changed, place, chosen)
    return bytes(changed)


FUZZ = """
import sys
from pathlib import Path
import numpy as np
from tests.provider.sessions import provider_session
from tests.provider.test_context import binary, mutated
folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
content = binary(folder).read_bytes()
feeds = dict(np.load(folder / "feeds.npz"))
rng = np.random.default_rng(seed)
errors = 0
for _ in range(count):
    binary(folder).unlink()
    binary(folder).write_bytes(mutated(content, rng))
    try:
        session = provider_session(str(folder / "model_ctx.onnx"))
    except Exception as error:
        # A message that contains a damaged name of a node may be no UTF-8. ONNX Runtime then tries other providers.
        first = error
        while (earlier := first.__cause__ or first.__context__) is not None:
            first = earlier
        assert isinstance(first, UnicodeDecodeError) or "Compile the original model again" in str(error), error
        errors += 1
        continue
    try:
        session.run(None, feeds)
    except Exception as error:
        pass
print(errors)
"""


def mutate_in_a_process(model: onnx.ModelProto, feeds: dict[str, np.ndarray], folder: Path, **entries: str) -> None:
    """Run 400 damaged files in a separate process: each must give an error or an output, not a crash."""
    compile_model(model, folder, 1, **entries)
    np.savez(folder / "feeds.npz", **feeds)  # type: ignore[arg-type]
    done = run_with_isa(ortolan._native.cpu_info()["isa"], FUZZ, str(folder), "1", "400")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 100  # after what ONNX Runtime prints


@pytest.mark.parametrize("kind", ["int8", "bitmap", "blocks", "bf16", "4 bits", "8 bits"])
def test_mutated_files_never_crash(kind: str, tmp_path: Path) -> None:
    feeds: dict[str, np.ndarray]
    entries: dict[str, str] = {}
    if kind == "int8":
        model, (feeds,) = encoder_layer(), encoder_feeds(5)
    elif kind == "bitmap":
        q = np.where(np.random.default_rng(2).random((150, 40)) < 0.6, 0, dense_integers(150, 40)).astype(np.int8)
        layer = Int8Layer("chain", q=q, bias=True)
        model, feeds = layer.model(), {"x": layer.inputs(5)}
    elif kind == "blocks":
        layer = Int8Layer("chain", q=sparse_integers(150, 42), bias=True)
        model, feeds = layer.model(), {"x": layer.inputs(5)}
    elif kind == "bf16":
        model, feeds = layer_model("MatMul", zeros=0.6), {"x": np.ones((5, 40), np.float32)}
        entries["ep__ortolanexecutionprovider__precision"] = "bf16"
    else:
        few = NBits(100, 40, 32, int(kind[0]), zero_points="packed" if kind[0] == "4" else "", bias=True)
        model, feeds = few.model(), {"x": few.x(5)}
    mutate_in_a_process(model, feeds, tmp_path, **entries)
