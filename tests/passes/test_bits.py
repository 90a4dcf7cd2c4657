"""The option budget with weights="int4": which layers get 5, 6 or 8 bits instead of 4."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import ortolan
from ortolan import Recipe
from ortolan.errors import ArgumentError, VerificationError
from ortolan.graph_passes.auto.bits import FOUR, _order, _steps, has_tied_head
from ortolan.graph_passes.auto.budget import Limit, read_limit
from ortolan.graph_passes.auto.path import Step
from ortolan.graph_passes.report.search import LayerChoice, MeasuredForm
from ortolan.graph_passes.weights.quantizers.grid import Quantization, dequantize, round_to_nearest
from ortolan.models import tiny

from .separate_experts import UNUSED, rows_of_x, separate


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return ir.to_proto(tiny.tiny_llama(attention="gqa", hidden_size=64, intermediate_size=128, head_dim=16))


def mixed(model: onnx.ModelProto, budget: Any = None, **options: Any) -> ortolan.OptimizationReport:
    texts = {"input_ids": np.random.default_rng(0).integers(0, 90, (8, 24))}
    given = {"calibration": [{"input_ids": row[None]} for row in texts["input_ids"]], **options}
    return ortolan.optimize_onnx(model, budget=budget, **{"weights": "int4", **given})


def bits(report: ortolan.OptimizationReport) -> Counter[int | None]:
    return Counter(layer.weight_bits for layer in report.layers if layer.new_op)


def head_bits(report: ortolan.OptimizationReport) -> list[int | None]:
    return [layer.weight_bits for layer in report.layers if "lm_head" in layer.name]


def size(report: ortolan.OptimizationReport) -> int:
    assert report.model is not None
    return int(report.model.ByteSize())


def test_a_wide_budget_takes_4_bits_everywhere(model: onnx.ModelProto) -> None:
    report = mixed(model, 0.5)
    plain = ortolan.optimize_onnx(model, weights="int4")
    assert bits(report) == bits(plain) and bits(report)[4] > 0
    assert report.auto is not None and len(report.auto.trials) == 1
    assert "8 in 0" in report.auto.outcome


def test_a_narrow_budget_takes_8_bits_where_errors_matter(model: onnx.ModelProto) -> None:
    wide, narrow = mixed(model, 0.5), None
    assert wide.auto is not None
    cosine = wide.auto.trials[0].cosine
    assert cosine is not None
    narrow = mixed(model, 1 - (1 - cosine) / 2)
    assert sum(bits(narrow)[more] - bits(wide)[more] for more in (5, 6, 8)) > 0 and bits(narrow)[4] > 0
    assert narrow.output_error and min(error.cosine for error in narrow.output_error) > cosine
    assert size(wide) < size(narrow)
    # Layers that read the same input get the same number of bits, so that they can be joined.
    ops = Counter(node.op_type for node in narrow.model.graph.node)  # type: ignore[union-attr]
    assert ops["W4A8MatMul"] and ops["W8A8MatMul"]


def test_a_budget_of_bytes_is_kept_with_as_little_error_as_it_allows(model: onnx.ModelProto) -> None:
    least = size(mixed(model, 0.5))
    most = size(mixed(model, max_bytes="1GB"))
    assert least < most
    report = mixed(model, max_bytes=(least + most) // 2)
    # The report text in the model's metadata may differ by some bytes.
    assert least < size(report) <= (least + most) // 2 + 200
    assert bits(report)[4] and any(bits(report)[more] for more in (5, 6))
    with pytest.raises(VerificationError, match=r"no choice of 4, 5, 6 and 8 bits is within .* 4 bits in all"):
        mixed(model, max_bytes="10KB")


def test_untied_heads_take_part_in_a_budget_of_bytes(model: onnx.ModelProto) -> None:
    other = ir.to_proto(tiny.tiny_llama(vocab_size=1100))
    assert has_tied_head(ir.from_proto(other))
    (head,) = (tensor for tensor in other.graph.initializer if "lm_head" in tensor.name)
    head.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(head) + np.float32(0.01), head.name))
    assert not has_tied_head(ir.from_proto(other))
    # The table of this model is too small to be stored as integers.
    in_eight_bits = mixed(other, 0.5)
    assert head_bits(in_eight_bits) == [8]
    limit = size(in_eight_bits) * 9 // 10
    (found,) = head_bits(mixed(other, max_bytes=limit))
    assert found in (4, 5, 6)
    with pytest.raises(VerificationError, match="no choice of 4, 5, 6 and 8 bits is within"):
        mixed(other, max_bytes=limit, ignore=("heads",))


def test_experts_that_are_separate_layers_get_different_bits() -> None:
    """Experts become one mixture only if 4 bits are enough for all of them."""
    calibration = [{"x": rows_of_x(1, 24, seed)} for seed in range(8)]
    wide = mixed(separate(), 0.5, calibration=calibration)
    assert [layer.new_op for layer in wide.layers if layer.name == "mlp/experts"] == ["MoE"]
    report = mixed(separate(), max_bytes="1GB", calibration=calibration)
    found = {layer.name: layer.weight_bits for layer in report.layers}
    assert [found[f"mlp/experts.{expert}/down_proj/MatMul"] for expert in (0, UNUSED)] == [8, 4]


def test_float_scales_have_only_4_and_8_bits(model: onnx.ModelProto) -> None:
    least, most = (size(mixed(model, max_bytes=limit, group_size=64)) for limit in (None, "1GB"))
    report = mixed(model, max_bytes=(least + most) // 2, group_size=64)
    assert bits(report)[4] and bits(report)[8] and set(bits(report)) <= {4, 8, None}
    with pytest.raises(VerificationError, match=r"no choice of 4 and 8 bits is within the budget .* 4 bits in all"):
        mixed(model, max_bytes="10KB", group_size=64)


def test_steps_go_from_8_bits_to_fewer_and_leave_out_what_does_not_pay() -> None:
    forms = {"int8": (0.0, 80), "int6": (0.1, 66), "int5": (0.2, 56), "int4": (0.4, 46)}
    layers = [
        LayerChoice(name, "", forms={form: MeasuredForm([], error, size) for form, (error, size) in forms.items()})
        for name in ("a", "b")
    ]
    path = list(_steps(layers, 160))
    assert [[(step.layer, step.candidate.name) for step in steps] for steps in path] == [
        [("a", name), ("b", name)] for name in ("int6", "int5", "int4")
    ]
    assert sum(step.saved for steps in path for step in steps) == pytest.approx(2 * 34 / 160)
    assert sum(step.cost for steps in path for step in steps) == pytest.approx(2 * 0.4**2)
    # A large error of 5 bits: the path goes from 6 to 4 bits.
    for layer in layers:
        layer.forms["int5"] = MeasuredForm([], 0.35, 56)
    assert [steps[0].candidate.name for steps in _steps(layers, 160)] == ["int6", "int4"]


def test_layers_whose_weights_lie_on_a_grid_of_4_bits_keep_it(model: onnx.ModelProto) -> None:
    on_grid = onnx.ModelProto()
    on_grid.CopyFrom(model)
    for tensor in on_grid.graph.initializer:
        if len(tensor.dims) == 2 and "layers.0" in tensor.name:
            quantization = Quantization(4, 64, symmetric=False, fractions=True)
            rounded = round_to_nearest(numpy_helper.to_array(tensor), quantization)
            tensor.CopyFrom(numpy_helper.from_array(dequantize(rounded, 64), tensor.name))
    report = mixed(on_grid, max_bytes="1GB", group_size=64)
    four = {layer.name for layer in report.layers if layer.weight_bits == 4}
    assert four and all("layers.0" in name for name in four) and bits(report)[8]
    assert report.auto is not None and len(report.auto.trials) == 2
    # The first budget keeps all layers in 4 bits, the second those with error 0. Budget 1.0 allows no 4-bit layer.
    with pytest.raises(VerificationError, match="8 bits in all layers give cosine"):
        mixed(on_grid, 1.0, group_size=64)


def test_what_costs_nothing_goes_first() -> None:
    lossy, free = Step("lossy", FOUR, 0.44, 6e-11), Step("free", FOUR, 0.0004, -1e-9)
    assert sorted([[lossy], [free]], key=_order) == [[free], [lossy]]


def test_no_choice_is_good_enough(model: onnx.ModelProto) -> None:
    with pytest.raises(VerificationError, match="8 bits in all layers give cosine"):
        mixed(model, 1.0)


def test_the_recipe_makes_the_model_again(model: onnx.ModelProto) -> None:
    report = mixed(model, max_perplexity_increase=0.05)
    again = ortolan.optimize_onnx(model, recipe=Recipe.from_dict(report.recipe))
    assert bits(again) == bits(report)


def test_without_calibration_the_own_next_tokens_count(model: onnx.ModelProto) -> None:
    report = mixed(model, max_perplexity_increase=0.5, calibration=None)
    assert report.auto is not None and "perplexity of its own next tokens" in report.auto.budget


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"weights": "int8"}, "max_perplexity_increase chooses the bits of each layer and needs weights='int4'"),
        ({"weights": "int4", "sparsity": 0.5}, "needs weights='int4', without sparsity"),
        ({"recipe": "auto"}, "or call ortolan.search"),
        ({"weights": "int4", "budget": 0.9}, "budget and max_perplexity_increase exclude each other"),
        (
            {"weights": "int4", "max_perplexity_increase": None, "max_bytes": "many"},
            "max_bytes is 'many', expected a number of bytes above 0, or a string such as '100MB'",
        ),
    ],
)
def test_what_a_budget_does_not_go_with(model: onnx.ModelProto, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        ortolan.optimize_onnx(model, **({"max_perplexity_increase": 0.01} | arguments))


@pytest.mark.parametrize("text, number", [("100MB", 1e8), ("1.5 gb", 1.5e9), ("2e6", 2e6), ("7", 7), ("3KB", 3000)])
def test_sizes_are_read(text: str, number: float) -> None:
    assert read_limit(None, max_bytes=text) == Limit("bytes", number)
