"""Graphs on which the fuzz test (tests/fuzz) failed, each reduced to its cause."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan.graph_passes.files.model_file import external_tensors, load_model, write_model
from ortolan.graph_passes.find.dimensions import Dimensions
from ortolan.models import tiny

from ..fuzz import values_and_graphs
from ..fuzz.case import Case, Draw
from .padded_models import MASKS, encoder_feeds, proto
from .small_models import FAST, branches_model, make_model, matmul_model, op_types, relative_error, run

SMALL = {"hidden_size": 32, "intermediate_size": 64}
DROP = {"unpad.drop_hidden": True}  # the padding token is unknown for models without a folder


def notes_of(model: onnx.ModelProto) -> tuple[list[str], onnx.ModelProto]:
    report = ortolan.optimize_onnx(model, weights="int8", options=FAST | DROP)
    assert report.model is not None
    return report.notes, report.model


def test_a_layer_in_float16_between_casts_runs_without_padding() -> None:
    """Earlier failure: UnpackTokens got float16, which it does not support."""
    model = proto(tiny.tiny_bert(num_hidden_layers=2, **SMALL))
    nodes = list(model.graph.node)
    layer = next(node for node in nodes if node.name == "/encoder/layer.0/output/dense/MatMul")
    (weight,) = (one for one in model.graph.initializer if one.name == layer.input[1])
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype(np.float16), weight.name))
    before = helper.make_node("Cast", [layer.input[0]], ["half_x"], "to_half", to=TensorProto.FLOAT16)
    after = helper.make_node("Cast", ["half_y"], [layer.output[0]], "from_half", to=TensorProto.FLOAT)
    layer.input[0], layer.output[0] = "half_x", "half_y"
    place = nodes.index(layer)
    nodes[place : place + 1] = [before, layer, after]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    notes, optimized = notes_of(model)
    assert any(note.startswith("padding is skipped") for note in notes)
    assert op_types(optimized).count("UnpackTokens") == 1
    feeds = encoder_feeds(model, MASKS["behind"])
    there = feeds["attention_mask"] != 0
    (expected,), (found,) = run(model, feeds), run(optimized, feeds, library=True)
    assert relative_error(expected[there], found[there]) < 0.05


def test_masks_that_do_not_run_on_made_up_sizes_keep_the_padding() -> None:
    """Earlier failure: an optional pass ended the run with an error of ONNX Runtime."""
    model = proto(tiny.tiny_mpnet(num_hidden_layers=1, **SMALL))
    for value, symbols in zip(model.graph.input, (("n", ""), ("batch_size", "bs")), strict=True):
        for dim, symbol in zip(value.type.tensor_type.shape.dim, symbols, strict=True):
            dim.ClearField("dim_param")
            if symbol:
                dim.dim_param = symbol
    feeds = encoder_feeds(model, MASKS["behind"])
    report = ortolan.optimize_onnx(model, weights="int8", options=FAST | DROP, calibration=[feeds])
    assert report.model is not None
    assert any("do not run on synthetic inputs" in note for note in report.notes), report.notes
    (expected,), (found,) = run(model, feeds), run(report.model, feeds, library=True)
    there = feeds["attention_mask"] != 0
    assert relative_error(expected[there], found[there]) < 0.05


def test_the_given_model_keeps_the_names_of_its_constants() -> None:
    """Earlier failure: constants of the caller's ModelProto became initializers with other names."""
    model = matmul_model()
    weights = list(model.graph.initializer)
    del model.graph.initializer[:]
    for index, weight in enumerate(weights):
        name, weight.name = weight.name, "anything"
        model.graph.node.insert(index, helper.make_node("Constant", [], [name], value=weight))
    before = model.SerializeToString(deterministic=True)
    notes_of(model)
    assert model.SerializeToString(deterministic=True) == before


def test_a_model_is_written_while_arrays_of_its_external_data_are_held(tmp_path: Path) -> None:
    """Earlier failure: BufferError: cannot close exported pointers exist."""
    onnx.save(matmul_model(), tmp_path / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
    model = load_model(tmp_path / "model.onnx").model
    held = [tensor.numpy() for tensor in external_tensors(model)]
    write_model(model, tmp_path / "copy.onnx", lambda done, total: None)
    copies = [numpy_helper.to_array(one) for one in onnx.load(tmp_path / "copy.onnx").graph.initializer]
    assert all(np.array_equal(one, other) for one, other in zip(held, copies, strict=True))


def test_attention_whose_last_nodes_are_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier failure: ValueError: Value Node(...) is not in the list."""
    case = Case(proto(tiny.tiny_bert(num_hidden_layers=1, **SMALL)), lambda rng, batch, tokens: Draw({}))
    nodes = list(case.model.graph.node)
    place = next(i for i, node in enumerate(nodes) if node.name == "/encoder/layer.0/attention/self/Reshape_3")
    window = place, place + 1, list(nodes[place].output)
    monkeypatch.setattr(values_and_graphs, "_window", lambda case, rng: window)
    values_and_graphs.into_loop(case, np.random.default_rng(0))
    feeds = encoder_feeds(case.model, MASKS["none"])
    notes, optimized = notes_of(case.model)
    assert "1 attention became one NoMADAttention each, in bf16" in notes, notes
    (expected,), (found,) = run(case.model, feeds), run(optimized, feeds, library=True)
    assert relative_error(expected, found) < 0.05


def test_the_type_of_a_branch_is_not_that_of_its_condition() -> None:
    """Earlier failure: Type (tensor(bool)) of output arg does not match expected type (tensor(double))."""
    graph = ir.from_proto(branches_model()).graph
    graph.outputs[0].type = None
    assert Dimensions(graph).dtype(graph.outputs[0]) == ir.DataType.FLOAT


def test_a_model_without_products_stays_as_it_is_on_whatever_feeds() -> None:
    """Earlier failure: a refusal because the model does not run on synthetic inputs, although no pass needs them."""
    model = make_model(
        [helper.make_node("Pad", ["x", "pads"], ["y"], "pad", mode="reflect")],
        {"x": (TensorProto.FLOAT, ["batch", "samples"])},
        {"y": (TensorProto.FLOAT, ["batch", "padded"])},
        {"pads": np.array([0, 64, 0, 64])},
    )
    report = ortolan.optimize_onnx(model)
    assert report.recipe["pass"] == [] and "the model is unchanged: it has no matrix products" in str(report)
