"""Pass embeddings: tables of words in int8, read by standard operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import Recipe
from ortolan.errors import ModelError

ROWS = 1500
IDS = np.array([[0, 1, 15, 16, 17], [1499, 31, -1, -1500, 700]])
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def model(
    width: int = 48, name: str = "input_ids", ids: int = TensorProto.INT64, dtype: str = "float32", rows: int = ROWS
) -> onnx.ModelProto:
    """Rows of a table, and a linear layer behind them."""
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


def rows_of(made: onnx.ModelProto, name: str, ids: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["rows"], {name: ids})[0])


def expected_rows(made: onnx.ModelProto, ids: np.ndarray, group_size: int) -> np.ndarray:
    table = numpy_helper.to_array(made.graph.initializer[0]).astype(np.float64)
    groups = np.pad(table, ((0, 0), (0, -table.shape[1] % group_size))).reshape(len(table), -1, group_size)
    scales = np.abs(groups).max(axis=2, keepdims=True) / 127
    scales = scales.astype(np.float32).astype(np.float16).astype(np.float64)
    rounded = np.clip(np.rint(groups / np.where(scales > 0, scales, 1)), -127, 127) * scales
    return np.asarray(rounded.reshape(len(table), -1)[:, : table.shape[1]][ids])


@pytest.mark.parametrize("width", [32, 48, 63, 64, 96])
@pytest.mark.parametrize("ids, dtype", [(TensorProto.INT64, "float32"), (TensorProto.INT32, "float16")])
def test_rows_are_those_of_the_table_in_8_bits(width: int, ids: int, dtype: str) -> None:
    source = model(width, ids=ids, dtype=dtype)
    report = ortolan.optimize_onnx(source, recipe=recipe())
    assert any("word embedding 'table' is stored in int8" in note for note in report.notes)
    given = IDS.astype(helper.tensor_dtype_to_np_dtype(ids))
    found = rows_of(report.model, "input_ids", given)
    assert found.dtype == np.dtype(dtype)
    expected = expected_rows(source, IDS, 64 if width % 64 == 0 else 32)
    np.testing.assert_allclose(found, expected, rtol=1e-3 if dtype == "float16" else 1e-6)
    stored = {tensor.name: tensor.data_type for tensor in report.model.graph.initializer}
    assert "table" not in stored and stored["table.q"] == TensorProto.INT8 and stored["table.scales"] == 10
    assert report.file_size_after is not None and report.file_size_after < report.file_size_before


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
    assert report.notes == ["word embedding 'table' would be stored in int8, in groups"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    source = model()
    table = numpy_helper.to_array(source.graph.initializer[0]).copy()
    table[1234, 5] = bad
    source.graph.initializer[0].CopyFrom(numpy_helper.from_array(table, "table"))
    with pytest.raises(ModelError, match=r"word embedding 'table' holds NaN or infinity.*embeddings\.exclude"):
        ortolan.optimize_onnx(source, recipe=recipe())
