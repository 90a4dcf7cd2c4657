"""Decisions of a plan about linear layers, before any pass runs."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

import ortolan
from ortolan import Recipe
from ortolan.graph_passes.find.linear import Linear, linears_in
from ortolan.graph_passes.operators.replacement import Stored
from ortolan.graph_passes.passes.plan.plan import Plan
from ortolan.graph_passes.passes.plan.replace import LayerState
from ortolan.graph_passes.weights.quantizers.grid import Quantization
from ortolan.models import tiny

INT8 = Quantization(8, None)


def steps_of(*steps: dict[str, Any]) -> tuple[Any, ...]:
    return Recipe.from_dict({"name": "r", "pass": list(steps)}).passes


def plan_of(*steps: dict[str, Any]) -> Plan:
    return Plan(steps_of(*steps))


def layers() -> tuple[Linear, Linear]:
    """Return the layers /layers.0/* [256, 320] and /layers.1/* [320, 64]."""
    first, second = linears_in(tiny.mlp(widths=(256, 320, 64), forms="matmul"))
    return first, second


def untouched(linear: Linear) -> LayerState:
    return LayerState(linear.stored_bytes)


def test_an_empty_plan_gains_from_everything() -> None:
    plan = plan_of({"name": "prune"})
    assert not plan.replaces and plan.feeds_to_verify == 0
    assert all(plan.gains(linear, Stored(0), untouched(linear)) for linear in layers())


def test_gains_follow_the_options_of_replace() -> None:
    first, second = layers()
    plan = plan_of({"name": "replace", "select": ["/layers.0/*"], "min_sparsity": 0.5})
    dense, half = Stored(first.k * first.n), Stored(first.k * first.n // 2)
    assert [plan.gains(first, stored, untouched(first)) for stored in (dense, half)] == [False, True]
    assert not plan.gains(second, Stored(0), untouched(second))
    both = plan_of(
        {"name": "replace", "select": ["/layers.0/*"], "min_sparsity": 0.5}, {"name": "replace", "may_grow": True}
    )
    assert both.gains(first, dense, untouched(first))
    assert both.gains(second, Stored(second.k * second.n), untouched(second))


def test_what_is_packed_may_not_be_larger_than_what_the_file_stores() -> None:
    (first, _), stored = layers(), Stored(256 * 320)
    # The file stores one byte per weight, and the packed weight would be larger.
    small = LayerState(bytes_before=stored.count)
    assert not plan_of({"name": "replace"}).gains(first, stored, small)
    assert plan_of({"name": "replace"}).gains(first, stored, untouched(first))
    assert plan_of({"name": "replace", "may_grow": True}).gains(first, stored, small)
    # A plan that quantizes to 4 bits compares the 4-bit size.
    assert plan_of({"name": "quantize", "bits": 4}, {"name": "replace"}).gains(first, stored, small)


def test_the_first_step_that_takes_a_layer_quantizes_it() -> None:
    first, second = layers()
    plan = plan_of(
        {"name": "prune", "method": "sparsegpt", "weight_bits": 8, "exclude": ["/layers.1/*"]},
        {"name": "quantize", "bits": 4, "group_size": 32},
    )
    assert [plan.quantization(linear) for linear in (first, second)] == [INT8, Quantization(4, 32)]


def test_a_threshold_is_foreseen_where_one_is_chosen_and_applied() -> None:
    first, second = layers()
    plan = plan_of(
        {"name": "activations", "sparsity": 0.5, "select": ["/layers.0/*"]}, {"name": "replace", "op": "MaskedMatMul"}
    )
    assert plan.applies_thresholds
    assert [plan.gains(linear, Stored(linear.k * linear.n), untouched(linear)) for linear in (first, second)] == [
        True,
        False,
    ]
    refused = LayerState(first.stored_bytes, threshold="its input is inside a subgraph")
    assert not plan.gains(first, Stored(first.k * first.n), refused)


def test_what_the_steps_do_to_the_whole_model() -> None:
    steps = steps_of(
        {"name": "ranges"}, {"name": "compress_cache"}, {"name": "replace"}, {"name": "replace"}, {"name": "verify"}
    )
    plan = Plan(steps)
    assert plan.replaces and plan.records_ranges and plan.takes_prompt
    assert plan.feeds_to_verify == steps[-1].options.feeds > 0
    assert [plan.is_last(step.options) for step in steps[2:4]] == [False, True]


@pytest.mark.parametrize(
    "steps",
    [
        [{"name": "prune", "sparsity": 0.6}, {"name": "replace", "min_sparsity": 0.5}],
        [{"name": "quantize", "bits": 8}, {"name": "replace", "op": "VNNISpMM", "exclude": ["/layers.1/*"]}],
        [{"name": "quantize", "bits": 4}, {"name": "replace", "op": "W4A8MatMul"}],
        [{"name": "replace", "op": "W4A8MatMul", "select": ["/layers.0/*"]}, {"name": "replace"}],
    ],
    ids=["pruned", "int8", "int4", "two operators"],
)
def test_a_dry_run_foresees_what_a_run_does(steps: list[dict[str, Any]]) -> None:
    model = ir.to_proto(tiny.mlp(widths=(256, 320, 64), forms="matmul"))
    table = {"name": "r", "pass": [{"name": "normalize"}, *steps, {"name": "verify", "seconds": 0}]}
    dry, real = (
        ortolan.optimize_onnx(model, recipe=Recipe.from_dict(table), dry_run=dry_run) for dry_run in (True, False)
    )
    assert [layer.new_op for layer in dry.layers] == [layer.new_op for layer in real.layers]
    assert any(layer.new_op for layer in real.layers)
