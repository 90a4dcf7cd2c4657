"""Pass unpad: models that it leaves unchanged, and the reasons."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan import Recipe
from ortolan.models import tiny

from .attention_forms import causal_mask, masked_by, no_mask, position_bias, usual
from .attention_graphs import Graph
from .padded_models import (
    add_nodes,
    attention_model,
    encoder_feeds,
    first_token,
    fuse_and_unpad,
    masked_mean,
    proto,
    reason,
    with_unpad,
)
from .small_models import optimize, run

make = helper.make_node
HIDDEN = "last_hidden_state"


def bert() -> onnx.ModelProto:
    return proto(tiny.tiny_bert())


def refused(model: onnx.ModelProto, recipe: Recipe | None = None) -> str:
    """Return the pass's reason after checking that the model equals the one optimized without it."""
    recipe = recipe or Recipe.of(weights="bf16")
    report = optimize(model, recipe=with_unpad(recipe))
    without = optimize(model, recipe=recipe.without_pass("unpad")).model
    assert report.model is not None and without is not None
    assert report.model.graph.SerializeToString() == without.graph.SerializeToString()
    return reason(report)


def behind(*nodes: onnx.NodeProto, **weights: np.ndarray) -> onnx.ModelProto:
    return add_nodes(bert(), nodes, {"y": None}, weights)


def pooled_by(factor: str, *nodes: onnx.NodeProto, **weights: np.ndarray) -> onnx.ModelProto:
    """Return a model that averages hidden states times the value named `factor`."""
    axes = {"tokens": np.array([1]), "last": np.array([-1]), "one": np.array(1), "half": np.array(0.5, np.float32)}
    return behind(
        make("Cast", ["attention_mask"], ["floats"], to=TensorProto.FLOAT),
        make("Unsqueeze", ["floats", "last"], ["column"]),
        *nodes,
        make("Mul", [HIDDEN, factor], ["product"], name="masked"),
        make("ReduceSum", ["product", "tokens"], ["y"], keepdims=0),
        **axes,
        **weights,
    )


READS_PADDING: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "mean": (lambda: behind(make("ReduceMean", [HIDDEN], ["y"], name="mean", axes=[1])), "ReduceMean 'mean'"),
    "largest": (lambda: behind(make("ReduceMax", [HIDDEN], ["y"], name="largest", axes=[1])), "ReduceMax 'largest'"),
    "convolution": (
        lambda: behind(
            make("Transpose", [HIDDEN], ["t"], name="swapped", perm=[0, 2, 1]),
            make("Conv", ["t", "w"], ["y"], name="over tokens", pads=[1, 1]),
            w=np.ones((2, 48, 3), np.float32),
        ),
        "SparseAMXMatMul 'over tokens'",
    ),
    "last token": (
        lambda: behind(make("Gather", [HIDDEN, "at"], ["y"], name="last", axis=1), at=np.array(-1)),
        "Gather 'last'",
    ),
    "second token": (
        lambda: behind(
            make("Slice", [HIDDEN, "b", "e", "a"], ["y"], name="second"),
            b=np.array([1]),
            e=np.array([2]),
            a=np.array([1]),
        ),
        "Slice 'second'",
    ),
    "first two tokens": (
        lambda: behind(
            make("Slice", [HIDDEN, "b", "e", "a"], ["y"], name="two"), b=np.array([0]), e=np.array([2]), a=np.array([1])
        ),
        "Slice 'two'",
    ),
    "first sequence": (
        lambda: behind(make("Gather", [HIDDEN, "at"], ["y"], name="first", axis=0), at=np.array(0)),
        "Gather 'first'",
    ),
    "each token its own number": (
        lambda: behind(make("Softmax", [HIDDEN], ["y"], name="over tokens", axis=1)),
        "Softmax 'over tokens'",
    ),
    "a constant factor": (lambda: pooled_by("half"), None),
    "a factor that shows padding": (
        lambda: pooled_by("shown", make("Add", ["column", "half"], ["shown"])),
        "Mul 'masked'",
    ),
    "a factor from tokens": (
        lambda: pooled_by(
            "weighted",
            make("MatMul", [HIDDEN, "w"], ["score"]),
            make("Softmax", ["score"], ["weight"], name="by weight", axis=1),
            make("Mul", ["weight", "column"], ["weighted"]),
            w=np.ones((48, 1), np.float32),
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", READS_PADDING)
def test_places_without_a_token_may_be_read(name: str) -> None:
    build, reader = READS_PADDING[name]
    found = refused(build())
    assert found.endswith("may read positions without a token")
    assert reader is None or found.startswith(reader)


def test_tokens_that_are_an_output_and_read_elsewhere() -> None:
    """A node averages over all positions; the value is also an output, which must not hide that."""
    model = add_nodes(masked_mean(bert(), keep=True), [make("ReduceMean", [HIDDEN], ["y"], axes=[1])], {"y": None})
    assert refused(model).endswith("may read positions without a token")


def without_mask_input(model: onnx.ModelProto, name: str = "mask") -> onnx.ModelProto:
    """Rename the input attention_mask."""
    for value in model.graph.input:
        value.name = name if value.name == "attention_mask" else value.name
    for node in model.graph.node:
        for index, one in enumerate(node.input):
            node.input[index] = name if one == "attention_mask" else one
    return model


def test_no_attention_mask() -> None:
    assert refused(without_mask_input(bert())) == "the model has no input 'attention_mask' [batch, tokens]"


def test_a_mask_of_three_axes() -> None:
    graph = Graph()
    model = graph.model(masked_by(lambda one: one.op("Mul", "attention_mask", one.number(1)))(_with_mask(graph)))
    assert reason(fuse_and_unpad(model)) == "the model has no input 'attention_mask' [batch, tokens]"


def _with_mask(graph: Graph) -> Graph:
    graph.inputs["attention_mask"] = (TensorProto.FLOAT, ["batch", 1, "rows", "rows"])
    return graph


def beside_mask(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in which only an output reads attention_mask."""
    model.graph.input.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "rows"]))
    return add_nodes(
        model,
        [make("Cast", ["attention_mask"], ["seen"], to=TensorProto.FLOAT)],
        {"seen": ["batch", "rows"]},
        keep=True,
    )


def test_attention_without_a_mask() -> None:
    graph = Graph()
    found = reason(fuse_and_unpad(beside_mask(graph.model(no_mask(graph)))))
    assert found == "attention has no mask that depends on attention_mask"


@pytest.mark.parametrize("kind", ["bias", "causal"])
def test_a_mask_of_other_things(kind: str) -> None:
    graph = Graph()
    form = masked_by(position_bias if kind == "bias" else lambda one: causal_mask(one, "x", "x"))
    found = reason(fuse_and_unpad(beside_mask(graph.model(form(graph)))))
    if kind == "bias":
        assert found.startswith("mask '") and found.endswith("does not mask all tokens that attention_mask masks")
    else:  # an attribute
        assert found == "attention has no mask that depends on attention_mask"


def mask_by(*steps: Callable[[Graph, str], str]) -> Callable[[Graph], str]:
    """Return an attention whose mask [batch, 1, 1, rows] passes through the steps."""

    def build(graph: Graph) -> str:
        graph.inputs["mask"] = (TensorProto.INT64, ["batch", "rows"])
        y = graph.op("Cast", graph.op("Unsqueeze", "mask", np.array([1, 2])), to=TensorProto.FLOAT)
        for step in steps:
            y = step(graph, y)
        return y

    return build


def lowest_where(graph: Graph, hidden: str) -> str:
    return graph.op("Mul", hidden, graph.number(-3e38))


WEAK = {
    "it hides too little": (lambda graph, y: graph.op("Mul", graph.op("Sub", graph.number(1), y), graph.number(-100)),),
    "it hides visible tokens": (lowest_where,),
    "it hides queries": (
        lambda graph, y: graph.op("Sub", graph.number(1), y),
        lowest_where,
        lambda graph, y: graph.transpose(y, 0, 1, 3, 2),
    ),
    "it hides but the first token": (
        lambda graph, y: graph.op("Sub", graph.number(1), y),
        lambda graph, y: graph.op(
            "Mul", y, graph.op("Clip", graph.op("Cast", _places(graph), to=TensorProto.FLOAT), "", graph.number(1))
        ),
        lowest_where,
    ),
}


def _places(graph: Graph) -> str:
    rows = graph.op("Squeeze", graph.op("Shape", "x", start=1, end=2), np.array([0]))
    return graph.op("Range", np.array(0), rows, np.array(1))


@pytest.mark.parametrize("name", WEAK)
def test_a_mask_that_shows_what_is_not_there(name: str) -> None:
    found = reason(fuse_and_unpad(attention_model(masked_by(mask_by(*WEAK[name])))))
    assert found.startswith("mask '") and found.endswith("does not mask all tokens that attention_mask masks")


def test_a_mask_from_tokens() -> None:
    def of_tokens(graph: Graph) -> str:
        column = graph.op("MatMul", "x", np.ones((48, 1), np.float32))
        return graph.op("Unsqueeze", graph.transpose(column, 0, 2, 1), np.array([1]))

    found = reason(fuse_and_unpad(attention_model(masked_by(Graph.additive_mask, of_tokens))))
    assert "is computed from tokens (by MatMul" in found


def test_a_layer_of_other_tokens_in_front() -> None:
    """A mean over all positions lies between two attentions."""

    def shifted(graph: Graph) -> str:
        first = usual(graph)
        mean = graph.op("Sub", first, graph.op("ReduceMean", first, axes=[1], keepdims=1))
        graph.nodes.append(make("Identity", [mean], ["second"], "/second"))
        return _second(graph)

    def _second(graph: Graph) -> str:
        q, k, v = (graph.heads(graph.linear(name, "second")) for name in ("q", "kk", "vvv"))
        scores = graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2))
        mask = graph.additive_mask()
        return graph.merge(graph.op("MatMul", graph.op("Softmax", graph.op("Add", scores, mask), axis=-1), v))

    found = reason(fuse_and_unpad(attention_model(shifted)))
    assert found.startswith("ReduceMean") and found.endswith("may read positions without a token")


def test_attention_in_a_branch() -> None:
    graph = Graph()
    inner = attention_model(usual)
    branches = []
    for name in ("then", "else"):
        body = helper.make_graph(
            [onnx.NodeProto.FromString(node.SerializeToString()) for node in inner.graph.node],
            name,
            [],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "rows", 48])],
        )
        branches.append(body)
    graph.inputs |= {"attention_mask": (TensorProto.INT64, ["batch", "rows"]), "flag": (TensorProto.BOOL, [])}
    outer = helper.make_graph(
        [make("If", ["flag"], ["result"], then_branch=branches[0], else_branch=branches[1], name="if")],
        "outer",
        [helper.make_tensor_value_info(name, *about) for name, about in graph.inputs.items()],
        [helper.make_tensor_value_info("result", TensorProto.FLOAT, ["batch", "rows", 48])],
        list(inner.graph.initializer),
    )
    model = helper.make_model(outer, opset_imports=inner.opset_import, ir_version=8)
    onnx.checker.check_model(model)
    report = fuse_and_unpad(model)
    assert report.model is not None
    for attribute in report.model.graph.node[-1].attribute:
        assert "NoMADAttention" in {node.op_type for node in attribute.g.node}
    found = reason(report)
    assert found.startswith("attention '") and found.endswith("is in a branch")


def test_a_decoder_with_a_cache_stays() -> None:
    """Decoders with a cache have no padding to skip, and the report has no note on it."""
    model = proto(tiny.tiny_llama())
    recipe = with_unpad(Recipe.of(cache="float32"))
    report = ortolan.optimize_onnx(model, recipe=recipe, options={"verify.seconds": 0.0})
    assert report.model is not None
    assert not any("padding" in note and "left out" in note for note in report.notes)
    assert "PackTokens" not in {node.op_type for node in report.model.graph.node}


def test_a_model_without_attention_stays() -> None:
    report = optimize(proto(tiny.mlp()), recipe=with_unpad(Recipe.of(weights="int8")))
    assert not any("padding" in note and "left out" in note for note in report.notes)


def test_pooling_by_both_ways_at_once() -> None:
    """One output reads the first token, another one masks by a factor."""
    model = first_token(bert(), keep=True)
    factor = [
        make("Unsqueeze", ["attention_mask", "last"], ["column"]),
        make("Cast", ["column"], ["factor"], to=TensorProto.FLOAT),
        make("Mul", [HIDDEN, "factor"], ["product"]),
        make("ReduceSum", ["product", "tokens"], ["sum"], keepdims=0),
    ]
    weights = {"last": np.array([-1]), "tokens": np.array([1])}
    model = add_nodes(model, factor, {"sum": ["batch", 48]}, weights, keep=True)
    report = optimize(model, recipe=with_unpad(Recipe.of(weights="bf16")))
    assert report.model is not None and any("padding is skipped" in note for note in report.notes)
    feeds = encoder_feeds(model, [[1, 1, 1, 0, 0], [0, 0, 1, 1, 0]])
    for wanted, found in zip(run(model, feeds)[1:], run(report.model, feeds, library=True)[1:], strict=True):
        np.testing.assert_allclose(found, wanted, atol=0.15)
