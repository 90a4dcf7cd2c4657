"""Pass linear_attention: which nodes it replaces, with the same answers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan import OptimizationReport, Recipe

from ..ops.linear_attention import RULES, Setup, random_feeds
from ..ops.single_node import session

INPUTS = ("query", "key", "value", "past_state", "decay", "beta")


def scan(
    setup: Setup, inputs: tuple[str, ...] = INPUTS, element: int = TensorProto.FLOAT, **more: object
) -> onnx.ModelProto:
    """Return a model with one LinearAttention of ONNX Runtime. inputs: names; "" leaves an input out."""
    queries, keys, values = setup.heads
    attributes = {"q_num_heads": queries, "kv_num_heads": values, "update_rule": setup.rule, **more}
    node = helper.make_node("LinearAttention", inputs, ["y", "state"], "scan", domain="com.microsoft", **attributes)
    widths = {
        "query": queries * setup.key_size,
        "key": keys * setup.key_size,
        "value": values * setup.value_size,
        "decay": values,
        "beta": values,
    }
    shapes = {name: ["batch", "tokens", width] for name, width in widths.items()}
    shapes["past_state"] = ["batch", values, setup.key_size, setup.value_size]
    given = [helper.make_tensor_value_info(name, element, shapes[name]) for name in inputs if name]
    outputs = [("y", shapes["value"]), ("state", shapes["past_state"])]
    made = [helper.make_tensor_value_info(name, element, shape) for name, shape in outputs]
    graph = helper.make_graph([node], "scan", given, made)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def optimize(model: onnx.ModelProto, dry_run: bool = False) -> OptimizationReport:
    passes = [{"name": "normalize"}, {"name": "linear_attention"}, {"name": "verify", "seconds": 0.0}]
    recipe = Recipe.from_dict({"name": "scan", "pass": passes})
    return ortolan.optimize_onnx(model, recipe=recipe, dry_run=dry_run)


def read_by(rule: str) -> tuple[str, ...]:
    return tuple(random_feeds(Setup(rule), 1, 1))


@pytest.mark.parametrize("rule", RULES)
def test_a_node_is_replaced(rule: str) -> None:
    setup = Setup(rule)
    inputs = tuple(name if name in read_by(rule) else "" for name in INPUTS)
    while not inputs[-1]:
        inputs = inputs[:-1]
    model = scan(setup, inputs, chunk_size=16, scale=0.3)
    report = optimize(model)
    assert report.notes == ["1 LinearAttention replaced"]
    assert report.model is not None
    onnx.checker.check_model(report.model)
    assert report.model.graph.output == model.graph.output
    (node,) = report.model.graph.node
    assert (node.domain, node.name, len(node.input)) == ("ai.ortolan", "scan", len(INPUTS))
    feeds = random_feeds(setup, 2, 9)
    expected = session(model).run(None, feeds)
    for library in (True, False):
        for one, other in zip(session(report.model, library=library).run(None, feeds), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_function_for_hosts_without_the_operator_is_not_inlined() -> None:
    """Exporters such as mobius add one. This one has other answers, so that inlining it would show."""
    model = scan(Setup())
    body = [
        helper.make_node("Identity", [name], [output]) for name, output in (("value", "y"), ("past_state", "state"))
    ]
    opsets = [helper.make_opsetid("", 21)]
    function = helper.make_function("com.microsoft", "LinearAttention", list(INPUTS), ["y", "state"], body, opsets)
    model.functions.append(function)
    found = optimize(model).model
    assert found is not None
    assert [node.domain for node in found.graph.node] == ["ai.ortolan"]
    feeds = random_feeds(Setup(), 2, 9)
    for one, other in zip(session(found).run(None, feeds), session(scan(Setup())).run(None, feeds), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (scan(Setup(), ("query", "key", "value", "", "decay", "beta")), "its input past_state is missing"),
        (scan(Setup(), INPUTS[:5]), "its input beta is missing"),
        (scan(Setup(), state_window=2), "its attribute 'state_window' is not supported"),
        (scan(Setup(), element=TensorProto.FLOAT16), "its input 'query' is not float32"),
        (scan(Setup("other")), "its update_rule 'other' is unknown"),
        (scan(Setup(), q_num_heads=2.0), "its attribute 'q_num_heads' has another type"),
    ],
)
def test_a_node_stays(model: onnx.ModelProto, reason: str) -> None:
    report = optimize(model, dry_run=True)
    assert report.notes == [f"LinearAttention 'scan' stays in ONNX Runtime: {reason}"]


def test_a_dry_run_changes_nothing() -> None:
    report = optimize(scan(Setup()), dry_run=True)
    assert report.notes == ["1 LinearAttention would be replaced"] and report.model is None
