"""Pass embeddings: word embeddings in few bits, which standard operators look up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import Recipe, RecipeError
from ortolan.graph_passes.weights.quantizers.grid import Quantization, dequantize, round_to_nearest
from ortolan.graph_passes.weights.quantizers.mse import round_mse
from ortolan.models import tiny

ROWS = 1500
IDS = np.array([[0, 1, 15, 16, 17], [1499, 31, -1, -1500, 700]])
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def model(
    width: int = 48, name: str = "input_ids", ids: int = TensorProto.INT64, dtype: str = "float32", rows: int = ROWS
) -> onnx.ModelProto:
    """Return a model of an embedding and a linear layer."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((rows, width)).astype(dtype)
    table[3] = 0
    nodes = [
        helper.make_node("Gather", ["table", name], ["rows"], name="embed"),
        helper.make_node("MatMul", ["rows", "w"], ["y"], name="dense"),
    ]
    weight = rng.standard_normal((width, 64)).astype(dtype)
    graph = helper.make_graph(
        nodes,
        "embedding",
        [helper.make_tensor_value_info(name, ids, ["batch", "tokens"])],
        [
            helper.make_tensor_value_info("rows", TYPES[dtype], ["batch", "tokens", width]),
            helper.make_tensor_value_info("y", TYPES[dtype], ["batch", "tokens", 64]),
        ],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def recipe(**options: Any) -> Recipe:
    steps = [{"name": "normalize"}, {"name": "embeddings", **options}, {"name": "verify"}]
    return Recipe.from_dict({"name": "words", "pass": steps})


def rows_of(made: onnx.ModelProto, name: str, ids: np.ndarray, output: str = "rows") -> np.ndarray:
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run([output], {name: ids})[0])


def table_of(source: onnx.ModelProto) -> np.ndarray:
    return numpy_helper.to_array(source.graph.initializer[0]).astype(np.float64)


def in_eight_bits(table: np.ndarray) -> np.ndarray:
    """Quantize each row of the table to 8 bits with one scale, and dequantize it."""
    scales = (np.abs(table).max(axis=1, keepdims=True) / 127).astype(np.float32).astype(np.float64)
    rounded: np.ndarray = np.clip(np.rint(table / np.where(scales > 0, scales, 1)), -127, 127) * scales
    return rounded


def in_four_bits(table: np.ndarray) -> np.ndarray:
    chosen = Quantization(4, 32, symmetric=False, fractions=True)
    found: np.ndarray = dequantize(round_mse(np.ascontiguousarray(table.T, np.float32), chosen), 32).T
    return found


@pytest.mark.parametrize("bits, expected", [(8, in_eight_bits), (4, in_four_bits)])
@pytest.mark.parametrize("width", [32, 48, 63, 64, 96])
@pytest.mark.parametrize("ids, dtype", [(TensorProto.INT64, "float32"), (TensorProto.INT32, "float16")])
def test_rows_are_those_of_the_rounded_table(bits: int, expected: Any, width: int, ids: int, dtype: str) -> None:
    source = model(width, ids=ids, dtype=dtype)
    report = ortolan.optimize_onnx(source, recipe=recipe(table_bits=bits))
    how = "one scale per row" if bits == 8 else "in groups of 32"
    assert f"word embedding 'table' is stored in int{bits}, {how}" in report.notes
    given = IDS.astype(helper.tensor_dtype_to_np_dtype(ids))
    found = rows_of(report.model, "input_ids", given)
    assert found.dtype == np.dtype(dtype)
    rows = expected(table_of(source))[IDS]
    np.testing.assert_allclose(found, rows, rtol=1e-3 if dtype == "float16" else 1e-6, atol=1e-6)
    stored = {tensor.name: tensor.data_type for tensor in report.model.graph.initializer}
    assert "table" not in stored and stored["table.q"] == (TensorProto.INT8 if bits == 8 else TensorProto.UINT8)
    size = sum(
        numpy_helper.to_array(one).nbytes for one in report.model.graph.initializer if one.name.startswith("table.")
    )
    groups = -(-width // 32)
    assert size == ROWS * (width + 4 if bits == 8 else groups * (16 + 2 + 1))


def test_four_bits_are_near(tmp_path: Path) -> None:
    source = model(128)
    table = table_of(source)
    for bits, most in ((8, 0.01), (4, 0.1)):
        made = ortolan.optimize_onnx(source, recipe=recipe(table_bits=bits)).model
        found = rows_of(made, "input_ids", np.arange(ROWS)[None])[0]
        error = np.linalg.norm(found - table) / np.linalg.norm(table)
        assert most / 4 < error < most


def between(source: onnx.ModelProto, *nodes: onnx.NodeProto, **constants: np.ndarray) -> onnx.ModelProto:
    """Insert nodes that compute `ids`, the input of the Gather, from input_ids."""
    source.graph.node[0].input[1] = "ids"
    for node in reversed(nodes):
        source.graph.node.insert(0, node)
    source.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return source


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_ids_that_are_cast_and_reshaped(bits: int, known: bool) -> None:
    """Decoder exports compute input_ids.view(-1, input_ids.shape[-1])."""
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["cast"], to=TensorProto.INT64),
        helper.make_node("Shape", ["cast"], ["shape"]),
        helper.make_node("Gather", ["shape", "last"], ["length"]),
        helper.make_node("Concat", ["minus_one", "length"], ["both"], axis=0),
        helper.make_node("Reshape", ["cast", "both"], ["ids"]),
    ]
    source = between(model(ids=TensorProto.INT32), *nodes, last=np.array([1]), minus_one=np.array([-1]))
    if not known:  # hide the rank of the looked-up rows
        gather, dense = source.graph.node[-2:]
        gather.output[0] = dense.input[0] = "found"
        source.graph.node.append(helper.make_node("Identity", ["found"], ["rows"]))
    report = ortolan.optimize_onnx(source, recipe=recipe(table_bits=bits))
    assert any("word embedding 'table' is stored" in note for note in report.notes)
    expected = (in_eight_bits if bits == 8 else in_four_bits)(table_of(source))[IDS]
    np.testing.assert_allclose(rows_of(report.model, "input_ids", IDS.astype(np.int32)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
@pytest.mark.parametrize("known", [True, False])
def test_no_ids_at_all(shape: tuple[int, int], known: bool) -> None:
    source = model()
    if not known:  # hide the rank of the ids
        source.graph.input[0].type.tensor_type.ClearField("shape")
        for output in source.graph.output:
            output.type.tensor_type.ClearField("shape")
    made = ortolan.optimize_onnx(source, recipe=recipe(table_bits=4), calibration=[{"input_ids": IDS}]).model
    assert ("Shape" in {node.op_type for node in made.graph.node}) == (not known)
    assert rows_of(made, "input_ids", np.zeros(shape, np.int64)).shape == (*shape, 48)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_no_ids_of_a_table_in_a_tied_head(shape: tuple[int, int], weights: str) -> None:
    options = {"verify.seconds": 0.0, "may_grow": True}
    report = ortolan.optimize_onnx(with_head(own_copy=False), weights=weights, options=options)
    session = ortolan.create_session(report.model)
    assert session.run(["rows"], {"input_ids": np.zeros(shape, np.int64)})[0].shape == (*shape, 64)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_table_that_two_lookups_share(bits: int) -> None:
    """The table is stored once for the lookups of an encoder and a decoder, one of them in an If."""
    source = model()
    graph = source.graph
    inner = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["inside"], name="inner")],
        "inner",
        [],
        [helper.make_tensor_value_info("inside", TensorProto.FLOAT, ["batch", "tokens", 48])],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["more"], ["outside"])],
        "other",
        [],
        [helper.make_tensor_value_info("outside", TensorProto.FLOAT, ["batch", "tokens", 48])],
    )
    graph.node.append(helper.make_node("Gather", ["table", "input_ids"], ["more"], name="again"))
    graph.node.append(helper.make_node("If", ["yes"], ["chosen"], then_branch=inner, else_branch=other))
    graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    for name in ("more", "chosen"):
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "tokens", 48]))
    made = ortolan.optimize_onnx(source, recipe=recipe(table_bits=bits)).model
    names = [tensor.name for tensor in made.graph.initializer]
    assert "table" not in names and sum(name.startswith("table.q") for name in names) == 1
    expected = (in_eight_bits if bits == 8 else in_four_bits)(table_of(source))[IDS]
    for output in ("rows", "more", "chosen"):
        np.testing.assert_allclose(rows_of(made, "input_ids", IDS, output), expected, rtol=1e-6, atol=1e-6)


def test_a_table_that_kinds_of_tokens_share() -> None:
    """XLM looks up input_ids, which are sliced, and token_type_ids in the same table."""
    nodes = [helper.make_node("Slice", ["input_ids", "start", "end", "axis"], ["ids"])]
    source = between(model(), *nodes, start=np.array([0]), end=np.array([1 << 40]), axis=np.array([1]))
    graph = source.graph
    graph.input.append(helper.make_tensor_value_info("token_type_ids", TensorProto.INT64, ["batch", "tokens"]))
    graph.node.append(helper.make_node("Gather", ["table", "token_type_ids"], ["kinds"], name="kinds"))
    graph.output.append(helper.make_tensor_value_info("kinds", TensorProto.FLOAT, ["batch", "tokens", 48]))
    made = ortolan.optimize_onnx(source, recipe=recipe()).model
    assert "table" not in {tensor.name for tensor in made.graph.initializer}
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": IDS, "token_type_ids": np.abs(IDS[::-1]) % 3}
    expected = in_eight_bits(table_of(source))
    for name, ids in (("rows", IDS), ("kinds", feeds["token_type_ids"])):
        np.testing.assert_allclose(session.run([name], feeds)[0], expected[ids], rtol=1e-6)


def with_head(own_copy: bool, dtype: str = "float32", width: int = 64) -> onnx.ModelProto:
    """Return a model whose embedding is also the head, transposed.

    own_copy: the file stores the transposed table a second time, as some exporters do.
    """
    source = model(width, dtype=dtype)
    graph = source.graph
    table = numpy_helper.to_array(graph.initializer[0])
    if own_copy:
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(table.T), "head"))
    else:
        graph.node.append(helper.make_node("Transpose", ["table"], ["head"], perm=[1, 0]))
    graph.node.append(helper.make_node("MatMul", ["rows", "head"], ["logits"], name="lm_head"))
    graph.output.append(helper.make_tensor_value_info("logits", TYPES[dtype], ["batch", "tokens", ROWS]))
    return source


def numbers(made: onnx.ModelProto) -> int:
    """Return the number of constants with at least 32 x ROWS elements, about the size of the table."""
    sizes = [int(np.prod(tensor.dims)) for tensor in made.graph.initializer]
    return sum(size >= ROWS * 32 for size in sizes)


@pytest.mark.parametrize("own_copy", [True, False])
@pytest.mark.parametrize("dtype, width", [("float32", 64), ("float32", 63), ("float16", 128)])
@pytest.mark.parametrize("form", ["bf16 head", "int8 head", "int8", "int4"])
def test_a_tied_head_and_the_table_are_one_copy(own_copy: bool, dtype: str, width: int, form: str) -> None:
    source = with_head(own_copy, dtype, width)
    call = {
        "bf16 head": {"weights": "int8", "sparsity": 0.1},
        "int8 head": {"weights": "int8", "ignore": ()},
        "int8": {"weights": "int8"},
        "int4": {"weights": "int4"},
    }[form]
    report = ortolan.optimize_onnx(source, options={"verify.seconds": 0.0, "may_grow": True}, **call)
    assert "word embedding 'table' is read from the weight of 'lm_head', its tied head" in report.notes
    assert numbers(report.model) == 1
    table = numpy_helper.to_array(source.graph.initializer[0]).astype(np.float32)
    if form == "bf16 head":
        expected = table.astype(ml_dtypes.bfloat16).astype(np.float32)
    else:
        size = None if form == "int8 head" else 64
        expected = dequantize(round_to_nearest(np.ascontiguousarray(table.T), Quantization(8, size)), size).T
    session = ortolan.create_session(report.model)
    found = session.run(["rows"], {"input_ids": IDS})[0]
    np.testing.assert_allclose(found, expected[IDS], rtol=1e-3 if dtype == "float16" else 1e-6)


def test_a_table_that_a_node_reads_which_stays_is_not_stored_twice() -> None:
    source = with_head(own_copy=False)
    steps = [
        {"name": "normalize"},
        {"name": "embeddings"},
        {"name": "replace", "op": "SparseAMXMatMul", "exclude": ["lm_head"], "may_grow": True},
        {"name": "verify", "seconds": 0.0},
    ]
    report = ortolan.optimize_onnx(source, recipe=Recipe.from_dict({"name": "words", "pass": steps}))
    expected = "word embedding 'table' is not changed: 'lm_head' (MatMul) also reads the table, so it would be "
    assert expected + "stored twice" in report.notes
    assert "table" in {tensor.name for tensor in report.model.graph.initializer}
    report = ortolan.optimize_onnx(source, recipe=recipe())
    assert expected + "stored twice" in report.notes


def test_a_table_that_the_model_gives_out_stays() -> None:
    source = model()
    source.graph.node.append(helper.make_node("Identity", ["table"], ["out"]))
    source.graph.output.append(helper.make_tensor_value_info("out", TensorProto.FLOAT, [ROWS, 48]))
    report = ortolan.optimize_onnx(source, recipe=recipe())
    assert any("an output of the model also reads the table" in note for note in report.notes)


def test_ids_beyond_the_table_are_an_error_as_before() -> None:
    made = ortolan.optimize_onnx(model(), recipe=recipe()).model
    for wrong in (ROWS, -ROWS - 1):
        with pytest.raises(Exception, match="out of data bounds"):
            rows_of(made, "input_ids", np.array([[wrong]]))


@pytest.mark.parametrize(
    "source", [model(name="position_ids"), model(name="token_type_ids"), model(rows=1000), model(width=31)]
)
def test_what_holds_no_words_stays(source: onnx.ModelProto) -> None:
    report = ortolan.optimize_onnx(source, recipe=recipe())
    assert "table" in {tensor.name for tensor in report.model.graph.initializer}
    assert not any("embedding" in note for note in report.notes)


def test_tables_that_are_left_out(tmp_path: Path) -> None:
    for options in ({"exclude": ["table"]}, {"exclude": ["emb*"]}, {"select": ["other"]}):
        report = ortolan.optimize_onnx(model(), recipe=recipe(**options))
        assert "table" in {tensor.name for tensor in report.model.graph.initializer}


def test_a_dry_run_says_what_would_be() -> None:
    report = ortolan.optimize_onnx(model(), recipe=recipe(), dry_run=True)
    assert report.notes == ["word embedding 'table' would be stored in int8"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_stay(bad: float) -> None:
    source = model()
    table = numpy_helper.to_array(source.graph.initializer[0]).copy()
    table[1234, 5] = bad
    source.graph.initializer[0].CopyFrom(numpy_helper.from_array(table, "table"))
    report = ortolan.optimize_onnx(source, recipe=recipe())
    assert "word embedding 'table' is not changed: it holds NaN or infinity" in report.notes
    np.testing.assert_array_equal(rows_of(report.model, "input_ids", IDS), table[IDS])


def test_bits_that_there_are_not() -> None:
    with pytest.raises(RecipeError, match=r"bits.*2"):
        recipe(table_bits=2)


@pytest.mark.parametrize(
    ("call", "stored"),
    [
        ({"weights": "int8"}, True),
        ({"weights": "int8", "sparsity": 0.5}, True),
        ({"weights": "int8", "sparsity": 0.5, "pattern": "2:4"}, True),
        ({"pattern": "4x1", "sparsity": 0.5}, True),
        ({"weights": "int4", "sparsity": 0.5}, True),
        ({"weights": "int4"}, True),
        ({"weights": "bf16"}, False),
    ],
)
def test_forms_of_few_bits_store_tables_in_int8(call: dict[str, Any], stored: bool) -> None:
    report = ortolan.optimize_onnx(model(), options={"verify.seconds": 0.0, "may_grow": True}, **call)
    types = {tensor.name: tensor.data_type for tensor in report.model.graph.initializer}
    assert ("table" in types) == (not stored) and types.get("table.q") == (TensorProto.INT8 if stored else None)


@pytest.mark.parametrize("bits", [8, 4])
def test_attention_behind_a_table_is_fused(bits: int) -> None:
    bert = ir.to_proto(tiny.tiny_bert(vocab_size=1200, hidden_size=64))
    options = {"table_bits": bits, "verify.seconds": 0.0, "may_grow": True, "unpad.drop_hidden": True}
    report = ortolan.optimize_onnx(bert, weights="int8", options=options)
    assert any(f"is stored in int{bits}" in note for note in report.notes)
    assert "PackedNoMADAttention" in {node.op_type for node in report.model.graph.node}


def test_a_table_of_positions_becomes_float16():
    """The pass finds the position table by its name and rounds its rows; the option exclude skips it."""
    original = ir.to_proto(tiny.tiny_bert(vocab_size=1200))
    (table,) = (t for t in original.graph.initializer if "position_embeddings" in t.name)

    def stored(**options: Any) -> onnx.TensorProto:
        report = ortolan.optimize_onnx(original, recipe=recipe(**options))
        assert report.model is not None
        assert any("position table" in note for note in report.notes) == (not options)
        assert not any("matches no layer" in note for note in report.notes)
        (found,) = (t for t in report.model.graph.initializer if "position_embeddings" in t.name)
        return found

    array = numpy_helper.to_array(table)
    np.testing.assert_array_equal(numpy_helper.to_array(stored()), array.astype(np.float16))
    for options in ({"exclude": ["*position*"]}, {"select": ["*word*"]}):
        np.testing.assert_array_equal(numpy_helper.to_array(stored(**options)), array)
