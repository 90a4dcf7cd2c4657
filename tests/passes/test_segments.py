"""A model run in segments gives each layer the same inputs as a single run, and uses earlier changes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from ortolan import CalibrationError
from ortolan.graph_passes.files.model_file import load_model, to_bytes
from ortolan.graph_passes.find.linear import linears_in
from ortolan.graph_passes.measure.feeds import SIZES_TO_TRY, synthetic_feeds
from ortolan.graph_passes.measure.recorder import InputRecorder
from ortolan.graph_passes.measure.segments import Segments
from ortolan.graph_passes.measure.sessions import open_quietly
from ortolan.models import tiny

from .small_models import branches_model, make_model, random_weight

FLOAT = TensorProto.FLOAT


def recorded(model: ir.Model, feeds, folder) -> dict[str, list[np.ndarray]]:
    """Return the inputs of all layers, recorded segment by segment."""
    found: dict[str, list[np.ndarray]] = {}
    with Segments(model, list(linears_in(model)), feeds, folder) as segments:
        order = [value.name for value in segments.run(lambda x, a: found.setdefault(x.name, []).append(a))]
        assert order == [value.name for value in segments.values]
    assert not folder.exists()
    return found


def in_one_run(model: ir.Model, feeds) -> dict[str, list[np.ndarray]]:
    recorder = InputRecorder(model, list(linears_in(model)), feeds, lambda: open_quietly(to_bytes(model)))
    found: dict[str, list[np.ndarray]] = {}
    recorder.record(recorder.names, lambda name, a: found.setdefault(name, []).append(a), lambda done, total: None)
    return found


@pytest.mark.parametrize("build", [tiny.tiny_bert, tiny.tiny_llama, tiny.tiny_mpnet])
def test_pieces_give_what_one_run_gives(tmp_path, build):
    model = build()
    feeds = [synthetic_feeds(model, sizes, seed) for seed, sizes in enumerate(SIZES_TO_TRY[:2])]
    expected, found = in_one_run(model, feeds), recorded(model, feeds, tmp_path / "pieces")
    assert found.keys() == expected.keys() and len(found) > 4
    for name, arrays in expected.items():
        for one, other in zip(arrays, found[name], strict=True):
            np.testing.assert_allclose(one, other.reshape(one.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [tiny.tiny_bert, tiny.tiny_llama, tiny.tiny_mpnet, branches_model])
def test_outputs_are_those_of_one_run(tmp_path, build):
    model = build() if build is not branches_model else load_model(build()).model
    feeds = [synthetic_feeds(model, sizes, seed) for seed, sizes in enumerate(SIZES_TO_TRY[:2])]
    session = open_quietly(to_bytes(model))
    outputs = model.graph.outputs
    with Segments(model, list(linears_in(model)), feeds, tmp_path / "pieces", outputs=outputs) as pieces:
        layers = len(list(pieces.run(lambda value, array: None)))
        assert layers == 0 if build is branches_model else layers > 4
        found = list(pieces.answers())
    assert len(found) == len(feeds)
    for one, given in zip(found, feeds, strict=True):
        expected = session.run(None, given)
        assert len(one) == len(expected) == len(outputs)
        for here, there in zip(one, expected, strict=True):
            np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5)


def test_outputs_may_be_inputs_or_weights(tmp_path):
    nodes = [helper.make_node("MatMul", ["x", "W"], ["y"]), helper.make_node("MatMul", ["y", "W"], ["z"])]
    weight = random_weight(8, 8)
    shape = (FLOAT, ["batch", 8])
    model = load_model(make_model(nodes, {"x": shape}, {"y": shape, "z": shape}, {"W": weight})).model
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    outputs = [model.graph.inputs[0], *model.graph.outputs, model.graph.initializers["W"]]
    with Segments(model, list(linears_in(model)), [{"x": x}], tmp_path / "pieces", outputs=outputs) as pieces:
        assert len(list(pieces.run(lambda value, array: None))) == 2
        (found,) = pieces.answers()
    for one, expected in zip(found, (x, x @ weight, x @ weight @ weight, weight), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)


def chain(layers: int = 3) -> ir.Model:
    """Return a model x -> MatMul -> Relu -> MatMul …, with the first hidden value added to the last."""
    nodes = [helper.make_node("MatMul", ["x", "W0"], ["h0"], name="/0")]
    for index in range(1, layers):
        nodes.append(helper.make_node("Relu", [f"h{index - 1}"], [f"r{index}"], name=f"/relu{index}"))
        nodes.append(helper.make_node("MatMul", [f"r{index}", f"W{index}"], [f"h{index}"], name=f"/{index}"))
    nodes.append(helper.make_node("Add", ["h0", f"h{layers - 1}"], ["s"], name="/add"))
    nodes.append(helper.make_node("MatMul", ["s", "V"], ["y"], name="/last"))
    weights = {f"W{index}": random_weight(16, 16, seed=index) for index in range(layers)} | {"V": random_weight(16, 8)}
    return load_model(make_model(nodes, {"x": (FLOAT, ["batch", 16])}, {"y": (FLOAT, ["batch", 8])}, weights)).model


def test_later_layers_see_what_was_changed(tmp_path):
    model = chain()
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    found = {}
    with Segments(model, list(linears_in(model)), [{"x": x}], tmp_path / "pieces") as segments:
        for value in segments.run(lambda value, array: found.setdefault(value.name, array)):
            if value.name == "x":
                model.graph.initializers["W0"].const_value = ir.tensor(np.eye(16, dtype=np.float32), name="W0")
            # Files hold only values that a later segment needs; h0 stays until it is added.
            kept = len(list((tmp_path / "pieces").glob("*.npy")))
            assert kept == {"x": 0, "r1": 2, "r2": 2, "s": 0}[value.name]
    np.testing.assert_allclose(found["r1"], np.maximum(x, 0), rtol=1e-6)
    h1 = np.maximum(x, 0) @ random_weight(16, 16, seed=1)
    np.testing.assert_allclose(found["r2"], np.maximum(h1, 0), rtol=1e-5, atol=1e-6)
    h2 = found["r2"] @ random_weight(16, 16, seed=2)
    np.testing.assert_allclose(found["s"], x + h2, rtol=1e-5, atol=1e-6)


def test_each_node_runs_once_on_each_feed(tmp_path):
    model = chain(4)
    ran = []

    def open_counting(path):
        piece = ir.load(path)
        ran.extend(node.name for node in piece.graph)
        return open_quietly(path)

    feeds = [{"x": np.ones((rows, 16), np.float32)} for rows in (1, 2)]
    with Segments(model, list(linears_in(model)), feeds, tmp_path / "pieces", open_counting) as segments:
        for _ in segments.run(lambda value, array: None):
            pass
    assert sorted(ran) == sorted(node.name for node in model.graph if node.name != "/last")


def test_layers_in_subgraphs_are_left_out_and_what_they_use_is_not(tmp_path):
    """An If comes before the last layer, and its branches read a value of the outer graph."""
    model = branches_model(inner=False)
    tail = helper.make_node("MatMul", ["y", "T"], ["z"], name="/tail")
    model.graph.node.append(tail)
    model.graph.initializer.append(helper.make_tensor("T", FLOAT, [24, 3], random_weight(24, 3).ravel()))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", FLOAT, ["batch", 3]))
    loaded = load_model(model).model
    x = np.random.default_rng(0).standard_normal((4, 20)).astype(np.float32)
    found = recorded(loaded, [{"x": x, "flag": np.array(True)}], tmp_path / "pieces")
    assert list(found) == ["y"]
    np.testing.assert_allclose(found["y"][0], x @ random_weight(20, 24), rtol=1e-5, atol=1e-6)


def test_feeds_that_do_not_fit_are_named(tmp_path):
    model = chain()
    with (
        pytest.raises(CalibrationError, match="does not run on calibration feeds 2"),
        Segments(
            model, list(linears_in(model)), [{"x": np.ones((1, 16), np.float32)}, {"x": np.ones((1, 3), np.float32)}],
            tmp_path / "pieces",
        ) as segments,
    ):  # fmt: skip
        for _ in segments.run(lambda value, array: None):
            pass
    assert not (tmp_path / "pieces").exists()
