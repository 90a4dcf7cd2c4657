"""Calibration inputs, given or synthetic, and the recording of layer inputs."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan import ArgumentTypeError, CalibrationError
from ortolan.graph_passes.files.model_file import ModelFile
from ortolan.graph_passes.find.linear import linears_in
from ortolan.graph_passes.measure import recorder
from ortolan.graph_passes.measure.evidence import Evidence, make_up_feeds
from ortolan.graph_passes.measure.feeds import Sizes, model_inputs, read_calibration, synthetic_feeds
from ortolan.graph_passes.measure.input_dimensions import InputDimensions
from ortolan.graph_passes.measure.sessions import open_quietly
from ortolan.models import tiny

from ..recipes.forms import NAMED
from .small_models import branches_model, make_model, matmul_model, optimize, random_weight

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def signature(inputs: dict) -> ir.Model:
    """Return a model with these inputs and no nodes that read them."""
    node = helper.make_node("Constant", [], ["y"], value_float=1.0)
    return ir.from_proto(make_model([node], inputs, {"y": (FLOAT, [])}))


def test_bert_inputs():
    model = tiny.tiny_bert(vocab_size=23)
    feeds = synthetic_feeds(model, Sizes(2, 16, 8))
    assert {name: array.shape for name, array in feeds.items()} == {
        "input_ids": (2, 16),
        "attention_mask": (2, 16),
        "token_type_ids": (2, 16),
    }
    assert feeds["input_ids"].max() < 23 and len(np.unique(feeds["input_ids"])) > 5
    assert (feeds["attention_mask"] == 1).all() and (feeds["token_type_ids"] == 0).all()
    again = synthetic_feeds(model, Sizes(2, 16, 8))
    assert all((feeds[name] == again[name]).all() for name in feeds)


def test_decoder_inputs_fit_together():
    feeds = synthetic_feeds(
        signature(
            {
                "input_ids": (INT64, ["batch_size", "sequence_length"]),
                "attention_mask": (INT64, ["batch_size", "past_sequence_length + 1"]),
                "position_ids": (INT64, ["batch_size", "sequence_length"]),
                "past_key_values.0.key": (FLOAT, ["batch_size", 4, "past_sequence_length", 16]),
                "use_cache_branch": (TensorProto.BOOL, [1]),
            }
        ),
        Sizes(2, 5, 8),
    )
    assert feeds["attention_mask"].shape == (2, 13)
    assert feeds["position_ids"].tolist() == [[8, 9, 10, 11, 12]] * 2
    assert feeds["past_key_values.0.key"].shape == (2, 4, 8, 16) and not feeds["past_key_values.0.key"].any()
    assert feeds["use_cache_branch"].all()


def test_decoders_that_take_one_token():
    inputs = {
        "input_ids": (INT64, ["batch", 1]),
        "attention_mask": (INT64, ["batch", "total"]),
        "past_key_values.0.key": (FLOAT, ["batch", 4, "past", 16]),
    }
    feeds = synthetic_feeds(signature(inputs), Sizes(2, 16, 8))
    assert [array.shape for array in feeds.values()] == [(2, 1), (2, 9), (2, 4, 8, 16)]


@pytest.mark.parametrize("separate", [False, True])
def test_caches_that_leave_the_size_of_their_heads_open(separate):
    """If the cache does not declare its head size, it follows from the query width, as in GenAI's models."""
    inputs = {f"past_key_values.0.{part}": (FLOAT, ["batch", 2, "past", "kv_cache_dim"]) for part in ("key", "value")}
    rest = {name: (TensorProto.INT32, [1]) for name in ("seqlens", "total")}
    width = 4 * 24 if separate else (4 + 2 * 2) * 24
    queries = {"q": (FLOAT, ["batch", "sequence", width])}
    queries |= {name: (FLOAT, ["batch", "sequence", 48]) for name in ("k", "v")} if separate else {}
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", *(("k", "v") if separate else ("", "")), *inputs, *rest],
        ["y"],
        domain="com.microsoft",
        num_heads=4,
        kv_num_heads=2,
    )
    outputs = {"y": (FLOAT, ["batch", "sequence", 96])}
    model = make_model([node], queries | inputs | rest, outputs, domains={"com.microsoft": 1})
    feeds = synthetic_feeds(ir.from_proto(model), Sizes(2, 16, 8))
    assert [feeds[name].shape for name in inputs] == [(2, 2, 8, 24)] * 2


def test_encoders_have_no_past():
    feeds = synthetic_feeds(
        signature({"position_ids": (INT64, ["b", "s"]), "x": (FLOAT, [None, None, 7])}), Sizes(2, 5, 8)
    )
    assert feeds["position_ids"][0].tolist() == [0, 1, 2, 3, 4]
    assert feeds["x"].shape == (2, 5, 7) and feeds["x"].std() > 0.5


@pytest.mark.parametrize("symbol", ["b", "n", "bs", "unk__0", "N", "dynamic_axis_1", None])
def test_the_first_axis_of_token_inputs_is_the_batch(symbol):
    inputs = {name: (INT64, [symbol, 256]) for name in ("input_ids", "attention_mask")}
    inputs |= {"pixels": (FLOAT, [symbol, 3, 8, 8]), "weights": (FLOAT, [symbol])}
    feeds = synthetic_feeds(signature(inputs), Sizes(2, 16, 0))
    assert [array.shape for array in feeds.values()] == [(2, 256), (2, 256), (2, 3, 8, 8), (2,)]


def test_an_only_axis_counts_tokens():
    feeds = synthetic_feeds(signature({"input_ids": (INT64, ["n"]), "mask": (INT64, [None])}), Sizes(2, 16, 0))
    assert [array.shape for array in feeds.values()] == [(16,), (16,)]


def test_a_symbol_means_the_same_in_all_inputs():
    inputs = {
        "features": (FLOAT, ["b", 7]),  # without the other inputs, "b" would count as tokens
        "cache": (FLOAT, [2, "b", 4, "p", 8]),
        "input_ids": (INT64, ["b", "s"]),
        "bias": (FLOAT, ["b", 1, "s", "s"]),
    }
    feeds = synthetic_feeds(signature(inputs), Sizes(2, 16, 0))
    assert [array.shape for array in feeds.values()] == [(2, 7), (2, 2, 4, 16, 8), (2, 16), (2, 1, 16, 16)]


def test_names_that_tell_what_an_axis_is_are_believed():
    inputs = {"input_ids": (INT64, ["sequence", "batch"]), "x": (FLOAT, ["t", "b", 4]), "m": (FLOAT, ["q", "q"])}
    feeds = synthetic_feeds(signature(inputs), Sizes(2, 16, 0))
    assert [array.shape for array in feeds.values()] == [(16, 2), (16, 2, 4), (16, 16)]
    names = InputDimensions.of(model_inputs(signature(inputs)))
    assert names.describe() == "t = tokens, b = batch, q = tokens"


def test_the_report_names_assumed_dimensions():
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["h"]),
        helper.make_node("MatMul", ["h", "W"], ["y"], name="l"),
    ]
    weights = {"table": random_weight(9, 8), "W": random_weight(8, 8)}
    model = make_model(nodes, {"input_ids": (INT64, ["n", "m"])}, {"y": (FLOAT, ["n", "m", 8])}, weights)
    assert optimize(model).feeds == "2 synthetic inputs: input_ids [2, 16] (assumed: n = batch, m = tokens)"


def test_made_up_feeds_run_on_both_kinds_of_transformer(tmp_path):
    for name, model in (("bert", tiny.tiny_bert()), ("llama", tiny.tiny_llama())):
        ir.save(model, tmp_path / name)
        session = onnxruntime.InferenceSession(tmp_path / name, providers=["CPUExecutionProvider"])
        feeds, description = make_up_feeds(model, session)
        assert len(feeds) == 2 and description.startswith("2 synthetic inputs: input_ids [2, 16]")


def test_models_that_allow_a_batch_of_one_only():
    model = make_model(
        [helper.make_node("Reshape", ["x", "shape"], ["h"]), helper.make_node("MatMul", ["h", "W"], ["y"], name="l")],
        {"x": (FLOAT, ["batch", "sequence", 8])},
        {"y": (FLOAT, [16, 8])},
        {"shape": np.array([16, 8]), "W": random_weight(8, 8)},
    )
    assert optimize(model).feeds == "1 synthetic input: x [1, 16, 8]"


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("arguments", [{}, {"recipe": None, "weights": "int8"}])
def test_exports_that_run_at_one_shape(parts, arguments):
    """The only supported shape is found among the graph's constants, as one tensor or as two."""
    shape = ["whole"] if parts == 1 else ["tokens", "width"]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["h"]),
        helper.make_node("Concat", shape, ["shape"], axis=0),
        helper.make_node("Reshape", ["h", "shape"], ["r"]),
        helper.make_node("MatMul", ["r", "W"], ["y"], name="l"),
    ]
    weights = {"table": random_weight(9, 8), "W": random_weight(8, 8)}
    weights |= {"whole": np.array([2, 7, 8])} if parts == 1 else {"tokens": np.array([2, 7]), "width": np.array([8])}
    model = make_model(nodes, {"input_ids": (INT64, ["b", "s"])}, {"y": (FLOAT, [2, 7, 8])}, weights)
    report = optimize(model, **arguments)
    assert report.feeds is not None and report.feeds.startswith("1 synthetic input: input_ids [")
    rows, tokens = re.findall(r"\d+", report.feeds)[1:3]
    assert int(rows) * int(tokens) == 14 and report.output_error


def test_models_for_which_nothing_can_be_made_up():
    model = make_model(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        {"x": (FLOAT, ["n"])},
        {"y": (FLOAT, [7, 11])},
        {"shape": np.array([7, 11])},
    )
    session = open_quietly(model.SerializeToString())
    with pytest.raises(CalibrationError, match=r"does not run on synthetic inputs: .*give calibration="):
        make_up_feeds(ir.from_proto(model), session)
    shapeless = signature({"s": (FLOAT, [1])})
    shapeless.graph.inputs[0].shape = None
    with pytest.raises(CalibrationError, match=r"'s'.*not a tensor.*give calibration="):
        synthetic_feeds(shapeless, Sizes(1, 1, 0))
    with pytest.raises(CalibrationError, match="'s' of type STRING"):
        synthetic_feeds(signature({"s": (TensorProto.STRING, [1])}), Sizes(1, 1, 0))


def test_calibration_in_every_form(tmp_path):
    model = ir.from_proto(matmul_model())
    x = np.ones((1, 2, 20), np.float32)
    np.savez(tmp_path / "feeds.npz", x=x)
    for given in (tmp_path / "feeds.npz", str(tmp_path / "feeds.npz"), {"x": x}, [{"x": x}], iter([{"x": x.tolist()}])):
        (feeds,) = read_calibration(given, model)
        assert feeds["x"].dtype == np.float32 and feeds["x"].shape == (1, 2, 20)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "holds no feeds"),
        ({"z": np.ones(1)}, "missing inputs: x; unknown inputs: z; the model's inputs are: x"),
        ({"x": np.ones((1, 2, 20), np.int64)}, "'x' has type int64, expected float32"),
        ({"x": np.ones((1, 20), np.float32)}, r"'x' has shape \[1, 20\], expected \[batch,sequence,20\]"),
        ({"x": np.ones((1, 2, 21), np.float32)}, r"'x' has shape \[1, 2, 21\]"),
        ("missing.npz", "'missing.npz' does not exist"),
    ],
)
def test_calibration_that_does_not_fit(given, message):
    with pytest.raises(CalibrationError, match=message):
        read_calibration(given, ir.from_proto(matmul_model()))


def test_calibration_of_another_type():
    for given, message in (
        (3, "calibration is an int, expected texts, "),
        ([3], "calibration feeds 1 is an int, expected a dict of arrays"),
    ):
        with pytest.raises(ArgumentTypeError, match=message):
            read_calibration(given, ir.from_proto(matmul_model()))


def test_npz_of_objects_is_refused(tmp_path):
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    with pytest.raises(CalibrationError, match=r"not an .npz file of arrays"):
        read_calibration(tmp_path / "objects.npz", ir.from_proto(matmul_model()))


def mlp_inputs(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    """Return the inputs of each linear layer of a tiny.mlp, computed in numpy."""
    inputs = []
    for linear in linears_in(model):
        inputs.append(x)
        bias = linear.bias()
        x = np.maximum(x @ linear.matrix() + (0 if bias is None else bias), 0)
    return inputs


def capture_inputs(model: ir.Model, feeds, max_rows: int, folder):
    with Evidence(ModelFile(model, None, ir.to_proto(model)), folder, feeds) as evidence:
        return evidence.rows(model, list(linears_in(model)), max_rows, lambda done, total: None)


@pytest.mark.parametrize("capture_bytes", [1 << 28, 1])
def test_captured_inputs(monkeypatch, tmp_path, capture_bytes):
    monkeypatch.setattr(recorder, "_CAPTURE_BYTES", capture_bytes)
    model = tiny.mlp()
    outputs = [value.name for value in model.graph.outputs]
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((rows, 24)).astype(np.float32)} for rows in (3, 5)]
    captured = capture_inputs(model, feeds, 64, tmp_path)
    expected = [np.concatenate(parts) for parts in zip(*(mlp_inputs(model, one["x"]) for one in feeds), strict=True)]
    assert len(captured) == 3
    for found, reference in zip(captured.values(), expected, strict=True):
        np.testing.assert_allclose(found, reference, rtol=1e-4, atol=1e-5)
    assert [value.name for value in model.graph.outputs] == outputs


def test_few_rows_are_kept_of_all_feeds(tmp_path):
    model = tiny.mlp()
    feeds = [{"x": np.full((100, 24), float(number), np.float32)} for number in range(4)]
    captured = capture_inputs(model, feeds, 8, tmp_path)
    first = next(iter(captured.values()))
    assert first[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_external_data_is_read_where_it_lies(tmp_path):
    proto = ir.to_proto(tiny.mlp())
    folder = tmp_path / "model"
    folder.mkdir()
    ir.save(ir.from_proto(proto), folder / "m.onnx", external_data="m.data", size_threshold_bytes=0)
    listing = sorted(folder.iterdir())
    report = ortolan.optimize_onnx(
        folder / "m.onnx", tmp_path / "fast.onnx", recipe=NAMED["sparse-bf16"], options={"seconds": 0}
    )
    assert all(layer.output_error is not None for layer in report.layers)
    assert sorted(folder.iterdir()) == listing


@pytest.mark.parametrize("damage", ["empty", "truncated", "npy", "flipped"])
def test_damaged_calibration_files(tmp_path, damage):
    path = tmp_path / "feeds.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).standard_normal((1, 2, 20)).astype(np.float32))
    content = path.read_bytes()
    if damage == "npy":
        path = tmp_path / "feeds.npy"
        np.save(path, np.ones((1, 2, 20), np.float32))
    else:
        middle = bytes(byte ^ 255 for byte in content[80:-80])
        changed = {"empty": b"", "truncated": content[:-30], "flipped": content[:80] + middle + content[-80:]}
        path.write_bytes(changed[damage])
    with pytest.raises(CalibrationError, match=r"feeds\.np[yz]' is not an .npz file"):
        read_calibration(path, ir.from_proto(matmul_model()))


def test_lists_that_are_no_array():
    with pytest.raises(CalibrationError, match="calibration feeds 1: input 'x' is not an array: "):
        read_calibration({"x": [[1.0], [1.0, 2.0]]}, ir.from_proto(matmul_model()))


def test_flags_are_made_up_both_ways():
    model = branches_model()
    feeds, description = make_up_feeds(ir.from_proto(model), open_quietly(model.SerializeToString()))
    assert [bool(one["flag"]) for one in feeds] == [True, True, False]
    assert description.startswith("3 synthetic inputs")


@pytest.mark.parametrize("attention", ["standard", "gqa"])
def test_token_ids_are_enough_of_a_feed(attention):
    model = tiny.tiny_llama(attention=attention, hidden_size=64, head_dim=16)
    ids = np.arange(10)[None]
    (feeds,) = read_calibration([{"input_ids": ids}], model)
    assert set(feeds) == {value.name for value in model.graph.inputs}
    caches = [array for name, array in feeds.items() if name.startswith("past")]
    assert caches and all(array.shape[2] == 0 and array.dtype == np.float32 for array in caches)
    assert feeds["attention_mask"].tolist() == [[1] * 10]
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    assert np.isfinite(session.run(None, feeds)[0]).all()
    given = {"input_ids": ids, "attention_mask": np.zeros_like(ids)}
    assert not read_calibration([given], model)[0]["attention_mask"].any()
