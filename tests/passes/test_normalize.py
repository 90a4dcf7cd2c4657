"""Normalization changes only the form of a model: answers, inputs, outputs and node names stay the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import ModelError, Recipe
from ortolan.graph_passes.passes.normalize import normalize

from .small_models import branches_model, make_model, optimize, random_weight, relative_error, run

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def normalized(model: onnx.ModelProto) -> onnx.ModelProto:
    loaded = ir.from_proto(model)
    normalize(loaded, "test")
    result = ir.to_proto(loaded)
    onnx.checker.check_model(result)
    return result


def old_model(opset: int) -> onnx.ModelProto:
    """Return a model with operators that changed before opset 13, a large weight, and a replaceable weight."""
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "W"], ["h"], name="product"),
            helper.make_node("Add", ["h", "default"], ["i"], name="default"),
            helper.make_node("Unsqueeze", ["i"], ["u"], name="unsqueeze", axes=[1]),
            helper.make_node("ReduceSum", ["u"], ["s"], name="sum", axes=[1], keepdims=0),
            helper.make_node("Softmax", ["s"], ["y"], name="softmax", axis=-1),
        ],
        {"x": (FLOAT, ["batch", 30]), "default": (FLOAT, [40])},
        {"y": (FLOAT, ["batch", 40])},
        {"W": random_weight(30, 40), "default": random_weight(40)},
        opset=opset,
    )
    return model


@pytest.mark.parametrize("opset", range(7, 13))
def test_old_opsets_are_raised(opset):
    model = old_model(opset)
    result = normalized(model)
    assert [entry.version for entry in result.opset_import] == [13]
    assert [value.name for value in result.graph.input] == ["x", "default"]
    names = [node.name for node in result.graph.node]
    assert [name for name in names if name in ("product", "default", "unsqueeze", "sum", "softmax")] == [
        "product",
        "default",
        "unsqueeze",
        "sum",
        "softmax",
    ]
    x = np.random.default_rng(0).standard_normal((3, 30)).astype(np.float32)
    for feeds in ({"x": x}, {"x": x, "default": np.ones(40, np.float32)}):
        np.testing.assert_allclose(run(result, feeds)[0], run(model, feeds)[0], rtol=1e-5)


def test_operators_of_other_domains_survive_the_raise():
    model = make_model(
        [
            helper.make_node("Gelu", ["x"], ["g"], domain="com.microsoft", name="gelu"),
            helper.make_node("Squeeze", ["g"], ["y"], axes=[0], name="squeeze"),
        ],
        {"x": (FLOAT, [1, 8])},
        {"y": (FLOAT, [8])},
        opset=11,
        domains={"com.microsoft": 1},
    )
    result = normalized(model)
    assert {entry.domain: entry.version for entry in result.opset_import} == {"": 13, "com.microsoft": 1}
    x = np.random.default_rng(0).standard_normal((1, 8)).astype(np.float32)
    np.testing.assert_allclose(run(result, {"x": x})[0], run(model, {"x": x})[0], rtol=1e-6)


def test_subgraphs_are_raised_too():
    branches = [
        helper.make_graph(
            [helper.make_node("ReduceSum", ["x"], [f"{name}_y"], axes=[0], keepdims=0, name=name)],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", FLOAT, [8])],
        )
        for name in ("then", "else")
    ]
    model = make_model(
        [helper.make_node("If", ["flag"], ["y"], then_branch=branches[0], else_branch=branches[1], name="if")],
        {"x": (FLOAT, ["batch", 8]), "flag": (TensorProto.BOOL, [])},
        {"y": (FLOAT, [8])},
        opset=11,
    )
    feeds = {"x": np.ones((3, 8), np.float32), "flag": np.array(True)}
    np.testing.assert_array_equal(run(normalized(model), feeds)[0], np.full(8, 3.0))


def test_what_cannot_be_raised_is_refused_with_advice():
    node = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"], name="norm", spatial=0)
    weights = {name: np.ones(2, np.float32) for name in "sbmv"}
    model = make_model([node], {"x": (FLOAT, [2, 2])}, {"y": (FLOAT, [2, 2])}, weights, opset=7)
    with pytest.raises(ModelError, match=r"test has opset 7 and cannot be converted to opset 13: .*export it again"):
        normalized(model)


def test_constant_nodes_become_initializers_under_their_name():
    table = random_weight(4, 8)
    model = make_model(
        [
            helper.make_node("Constant", [], ["W"], value=numpy_helper.from_array(table.T.copy()), name="constant"),
            helper.make_node("MatMul", ["x", "W"], ["y"], name="product"),
        ],
        {"x": (FLOAT, ["batch", 8])},
        {"y": (FLOAT, ["batch", 4])},
    )
    (tensor,) = normalized(model).graph.initializer
    assert tensor.name == "W"
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), table.T)


def test_nameless_nodes_get_names_and_others_keep_theirs():
    nodes = [helper.make_node("Relu", ["x"], ["a"], name="Relu_1"), helper.make_node("Relu", ["a"], ["y"])]
    result = normalized(make_model(nodes, {"x": (FLOAT, [2])}, {"y": (FLOAT, [2])}))
    assert [node.name for node in result.graph.node] == ["Relu_1", "Relu_1_"]


def test_nested_functions_are_inlined():
    inner = helper.make_function(
        "f", "Inner", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    outer = helper.make_function(
        "f",
        "Outer",
        ["a"],
        ["c"],
        [helper.make_node("Inner", ["a"], ["b"], domain="f"), helper.make_node("Neg", ["b"], ["c"])],
        [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)],
    )
    model = make_model(
        [helper.make_node("Outer", ["x"], ["y"], domain="f")],
        {"x": (FLOAT, [2])},
        {"y": (FLOAT, [2])},
        functions=[inner, outer],
        domains={"f": 1},
    )
    result = normalized(model)
    assert not result.functions and [node.op_type for node in result.graph.node] == ["Relu", "Neg"]
    assert [value.name for value in result.graph.output] == ["y"]


def test_weights_of_old_models_are_read_where_they_lie(tmp_path, monkeypatch):
    """Small weights and weights in branches are found from any current folder, after conversion to a new opset."""
    model = branches_model(opset=11, n=8)
    model.graph.node.append(helper.make_node("Add", ["y", "small"], ["z"], name="add"))
    model.graph.initializer.append(numpy_helper.from_array(random_weight(8), "small"))
    model.graph.output.append(helper.make_tensor_value_info("z", FLOAT, ["batch", 8]))
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "m.onnx"
    ir.save(ir.from_proto(model), path, external_data="m.data", size_threshold_bytes=0)
    (tmp_path / "elsewhere").mkdir()
    for foreign in (None, bytes(10_000)):
        monkeypatch.chdir(tmp_path / "elsewhere")
        if foreign is not None:
            (tmp_path / "elsewhere" / "m.data").write_bytes(foreign)
        optimize(path, tmp_path / "fast.onnx", options={"sparsity": 0.0})
        for flag in (True, False):
            feeds = {"x": np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32), "flag": np.array(flag)}
            for expected, found in zip(run(model, feeds), run(str(tmp_path / "fast.onnx"), feeds), strict=True):
                assert relative_error(expected, found) < 1e-2


def product_model(x: list[int | str], weight: tuple[int, ...]) -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    w = random_weight(weight[-2], weight[-1]) * np.ones(weight, np.float32)
    axes: list[int | str | None] = [None] * max(len(x), len(weight))
    return make_model(nodes, {"x": (TensorProto.FLOAT, x)}, {"y": (TensorProto.FLOAT, axes)}, {"w": w})


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (["batch", "rows", 32], (1, 32, 16)),
        (["batch", 4, "rows", 32], (1, 32, 16)),
        (["batch", 4, "rows", 32], (1, 1, 32, 16)),
    ],
)
def test_first_axes_of_weights_are_taken_off(x: list[int | str], weight: tuple[int, ...]) -> None:
    model = product_model(x, weight)
    report = optimize(model, recipe=Recipe.of(weights="int8"))
    assert [layer.status for layer in report.layers] == ["replaced"]
    assert [(one.k, one.n, one.reason) for one in ortolan.inspect_onnx(model).linears] == [(32, 16, None)]
    sizes = [2 if isinstance(one, str) else one for one in x]
    given = {"x": np.random.default_rng(0).standard_normal(sizes, np.float32)}
    assert report.model is not None
    (expected,), (found,) = run(model, given), run(report.model, given, library=True)
    assert expected.shape == found.shape and relative_error(expected, found) < 0.02


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (["rows", 32], (1, 32, 16)),  # the output has one axis more than x
        (["batch", "rows", 32], (1, 1, 32, 16)),
        ([2, "rows", 32], (2, 32, 16)),
    ],
)
def test_other_weights_keep_their_axes(x: list[int | str], weight: tuple[int, ...]) -> None:
    (found,) = ortolan.inspect_onnx(product_model(x, weight)).linears
    assert f"is {len(weight)}-D, expected 2-D" in str(found.reason)
