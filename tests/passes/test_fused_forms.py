"""Each fused operator of ONNX Runtime is compared with the operators that replace it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import ortolan
from ortolan import Recipe
from ortolan.graph_passes.find.fused_forms import unfuse
from ortolan.graph_passes.find.linear import NotLinear, count_stored, find_linears

from .fused_graphs import fused_model, unfused
from .small_models import op_types, relative_error, run

B, S, K, W, H = 3, 7, 20, 24, 2  # sequences, tokens, input width, query width, heads
LOWEST = float(np.finfo(np.float32).min)
RNG = np.random.default_rng(11)
FUSE = Recipe.from_dict(
    {"name": "fuse", "pass": [{"name": "normalize"}, {"name": "fuse_attention"}, {"name": "verify", "seconds": 0.0}]}
)


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    global RNG
    RNG = np.random.default_rng(11)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def masks() -> dict[str, tuple[np.ndarray, list[int | str]] | None]:
    raw = np.ones((B, S), np.int32)
    raw[1, 4:] = 0
    raw[2, :2] = 0  # on the left
    return {
        "none": None,
        "lengths": (np.array([7, 1, 4], np.int32), ["batch"]),
        "raw": (raw, ["batch", "rows"]),
        "square": (
            (RNG.random((B, S, S)) < 0.6).astype(np.int32) | np.eye(S, dtype=np.int32),
            ["batch", "rows", "rows"],
        ),
    }


def attention_model(
    mask: str = "none",
    bias: bool = True,
    added: tuple[int, int] | None = None,
    widths: tuple[int, ...] = (),
    **other: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a model of one Attention node, and its inputs. added: batch and heads of a position bias."""
    columns = sum(widths) if widths else 3 * W
    given = {"x": (random(B, S, K), ["batch", "rows", K])}
    constants = {"W": random(K, columns) / 4, "b": random(columns)}
    inputs = ["x", "W", "b" if bias else "", "", "", ""]
    if not bias:
        del constants["b"]
    found = masks()[mask]
    if found is not None:
        given["mask"], inputs[3] = found, "mask"
    if added is not None:
        given["added"], inputs[5] = (
            (random(*added, S, S), ["batch" if added[0] == B else 1, added[1], "rows", "rows"]),
            "added",
        )
    while not inputs[-1]:
        inputs.pop()
    attributes = other | ({"qkv_hidden_sizes": widths} if widths else {})
    model = fused_model("Attention", inputs, given, constants, num_heads=H, **attributes)
    return model, {name: array for name, (array, _) in given.items()}


def check_fused(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], layers: int = 3, sees: np.ndarray | None = None
) -> None:
    """Check the model with Attention split, and with NoMADAttention, against ONNX Runtime.

    sees: bool [B, S], true for queries that see a key. The scores of other queries are near -10000, where float32 has
    steps of 2^-10.
    """
    (expected,) = run(model, feeds)
    apart, reasons = unfused(model)
    assert not reasons and op_types(apart).count("MatMul") == layers and "Attention" not in op_types(apart)
    assert [node.name for node in apart.graph.node if node.op_type == "MultiHeadAttention"] == ["fused"]
    report = ortolan.optimize_onnx(model, recipe=FUSE)
    assert op_types(report.model).count("NoMADAttention") == 1 and "MultiHeadAttention" not in op_types(report.model)
    sees = np.ones((B, S), bool) if sees is None else sees
    for one, library in ((apart, False), (report.model, True), (report.model, False)):
        (found,) = run(one, feeds, library)
        assert relative_error(expected[sees], found[sees]) < 1e-5
        assert sees.all() or relative_error(expected[~sees], found[~sees]) < 2**-10


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("fill", [None, LOWEST])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention(mask: str, fill: float | None, causal: int) -> None:
    model, feeds = attention_model(mask, unidirectional=causal, **({} if fill is None else {"mask_filter_value": fill}))
    sees = np.ones((B, S), bool)
    if causal and mask == "raw":
        sees[2, :2] = False  # these queries see only padding
    check_fused(model, feeds, sees=sees)


@pytest.mark.parametrize("added", [(B, H), (1, H), (1, 1)])
@pytest.mark.parametrize("mask", ["none", "raw", "lengths"])
def test_attention_with_a_position_bias(mask: str, added: tuple[int, int]) -> None:
    check_fused(*attention_model(mask, added=added))


def test_attention_without_a_bias_and_with_a_scale() -> None:
    check_fused(*attention_model(bias=False, scale=0.7))


def test_attention_of_values_of_another_width_keeps_its_operator() -> None:
    model, feeds = attention_model("raw", widths=(24, 24, 10))
    apart, reasons = unfused(model)
    assert not reasons and op_types(apart).count("MatMul") == 3
    assert relative_error(run(model, feeds)[0], run(apart, feeds)[0]) < 1e-5
    report = ortolan.optimize_onnx(model, recipe=FUSE, dry_run=True)
    assert any("head widths of its queries, keys and values are" in note for note in report.notes)


def test_weights_of_several_attentions_are_split_once() -> None:
    """Attentions with the same weights split them once, and compute the masks once."""
    model, feeds = attention_model("lengths", bias=True)
    second = helper.make_node(
        "Attention", ["h", "W", "b", "mask"], ["z"], name="second", domain="com.microsoft", num_heads=H
    )
    widen = helper.make_node("MatMul", ["y", "V"], ["h"], name="widen")
    model.graph.node.extend([widen, second])
    model.graph.initializer.append(onnx.numpy_helper.from_array(random(W, K), "V"))
    model.graph.output[0].name = "z"
    apart, reasons = unfused(model)
    kinds = op_types(apart)
    assert not reasons and (kinds.count("MultiHeadAttention"), kinds.count("Range"), kinds.count("Expand")) == (2, 1, 1)
    shapes = [tuple(one.dims) for one in apart.graph.initializer if one.name.startswith("W")]
    assert shapes == [(K, W)] * 3
    assert relative_error(run(model, feeds)[0], run(apart, feeds)[0]) < 1e-5


@pytest.mark.parametrize("mask", ["none", "lengths", "raw", "square"])
@pytest.mark.parametrize("bias", [True, False])
def test_multi_head_attention_with_bias_and_mask(mask: str, bias: bool) -> None:
    given = {name: (random(B, S, W), ["batch", "rows", W]) for name in ("q", "k", "v")}
    inputs = ["q", "k", "v", "b" if bias else "", ""]
    found = masks()[mask]
    if found is not None:
        given["mask"], inputs[4] = found, "mask"
    constants = {"b": random(3 * W)} if bias else {}
    model = fused_model("MultiHeadAttention", inputs, given, constants, num_heads=H)
    feeds = {name: array for name, (array, _) in given.items()}
    if bias or found is not None:
        check_fused(model, feeds, layers=0)
    else:
        assert op_types(unfused(model)[0]) == ["MultiHeadAttention"]


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_q_attention(per_column: bool, dtype: Any) -> None:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    size = (3 * W,) if per_column else (1,)
    constants = {
        "W": RNG.integers(low, high + 1, (K, 3 * W)).astype(dtype),
        "b": random(3 * W),
        "scale": (RNG.random(size) * 0.01 + 0.001).astype(np.float32),
        "zero": np.full(size if per_column else (), 3 if dtype == np.int8 else 130, dtype),
    }
    given = {"x": (random(B, S, K), ["batch", "rows", K]), "mask": masks()["raw"]}
    before = [helper.make_node("DynamicQuantizeLinear", ["x"], ["codes", "x_scale", "x_zero"], name="quantize")]
    model = fused_model(
        "QAttention", ["codes", "W", "b", "x_scale", "scale", "mask", "x_zero", "zero"], given, constants,
        before=before, num_heads=H,
    )  # fmt: skip
    feeds = {name: array for name, (array, _) in given.items()}
    apart, reasons = unfused(model)
    assert not reasons and op_types(apart).count("MatMulIntegerToFloat") == 3 and "QAttention" not in op_types(apart)
    assert relative_error(run(model, feeds)[0], run(apart, feeds)[0]) < 1e-5
    assert count_stored(ir.from_proto(model)) == 3


@pytest.mark.parametrize("simplified", [False, True])
@pytest.mark.parametrize("optional", [(), ("bias",), ("beta",), ("beta", "bias"), ("sum",), ("beta", "bias", "sum")])
@pytest.mark.parametrize("opset", [13, 17])
def test_norms_with_a_skip(simplified: bool, optional: tuple[str, ...], opset: int) -> None:
    names = ["h", "skip", "gamma", *([] if simplified else ["beta"]), "bias"]
    constants = {"gamma": random(W), "beta": random(W), "bias": random(W), "M": random(K, W)}
    inputs = [name if name in ("h", "skip", "gamma", *optional) else "" for name in names]
    while not inputs[-1]:
        inputs.pop()
    constants = {name: array for name, array in constants.items() if name in (*inputs, "M")}
    given = {"x": (random(B, S, K), ["batch", "rows", K]), "skip": (random(B, S, W), ["batch", "rows", W])}
    model = fused_model(
        "SkipSimplifiedLayerNormalization" if simplified else "SkipLayerNormalization", inputs, given, constants,
        ["y", "", "", "sum"] if "sum" in optional else ["y"], opset, epsilon=1e-3,
        before=[helper.make_node("MatMul", ["x", "M"], ["h"], name="layer")],
    )  # fmt: skip
    feeds = {name: array for name, (array, _) in given.items()}
    apart, reasons = unfused(model)
    assert not reasons and not any(kind.startswith("Skip") for kind in op_types(apart))
    for expected, found in zip(run(model, feeds), run(apart, feeds), strict=True):
        assert relative_error(expected, found) < 1e-5
    if not simplified:
        onnx.checker.check_model(apart)


def test_norms_that_no_layer_is_in_front_of_stay() -> None:
    given = {name: (random(B, S, W), ["batch", "rows", W]) for name in ("x", "skip")}
    model = fused_model("SkipLayerNormalization", ["x", "skip", "gamma"], given, {"gamma": random(W)})
    assert op_types(unfused(model)[0]) == ["SkipLayerNormalization"]


@pytest.mark.parametrize(("op", "inside"), [("BiasGelu", "Gelu"), ("FastGelu", "FastGelu")])
def test_gelus_with_a_bias(op: str, inside: str) -> None:
    given = {"x": (random(B, S, W), ["batch", "rows", W])}
    model = fused_model(op, ["x", "b"], given, {"b": random(W)})
    apart, reasons = unfused(model)
    assert not reasons and op_types(apart) == ["Add", inside] and apart.graph.node[1].name == "fused"
    feeds = {"x": given["x"][0]}
    assert relative_error(run(model, feeds)[0], run(apart, feeds)[0]) < 1e-6


def test_gelus_without_a_bias_stay() -> None:
    given = {"x": (random(B, S, W), ["batch", "rows", W])}
    assert op_types(unfused(fused_model("FastGelu", ["x"], given, {}))[0]) == ["FastGelu"]


@pytest.mark.parametrize("turned", ["", "A", "B", "AB"])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
@pytest.mark.parametrize("constant", [True, False])
def test_products_with_transposes_and_a_factor(turned: str, alpha: float, constant: bool) -> None:
    a, b = random(B, S, K), random(K, 5) if constant else random(B, K, 5)
    a, b = (
        array.swapaxes(-1, -2).copy() if name in turned else array for name, array in zip("AB", (a, b), strict=True)
    )
    given = {"A": (a, list(a.shape))} | ({} if constant else {"B": (b, list(b.shape))})
    model = fused_model(
        "FusedMatMul", ["A", "B"], given, {"B": b} if constant else {},
        alpha=alpha, transA=int("A" in turned), transB=int("B" in turned),
    )  # fmt: skip
    apart, reasons = unfused(model)
    assert not reasons and op_types(apart).count("MatMul") == 1
    feeds = {name: array for name, (array, _) in given.items()}
    (expected,) = run(model, feeds)
    assert relative_error(expected, run(apart, feeds)[0]) < 1e-6
    if constant:
        report = ortolan.optimize_onnx(model, weights="bf16", options={"verify.seconds": 0.0, "replace.may_grow": True})
        assert [layer.status for layer in report.layers] == ["replaced"]
        assert relative_error(expected, run(report.model, feeds, library=True)[0]) < 1e-2


ACTIVATIONS: dict[str, dict[str, float]] = {
    "Relu": {}, "Sigmoid": {}, "Tanh": {}, "LeakyRelu": {"alpha": 0.2}, "HardSigmoid": {"alpha": 0.3, "beta": 0.4},
}  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_gemm_with_an_activation(activation: str, bias: bool) -> None:
    given = {"x": (random(B, K), ["batch", K])}
    constants = {"W": random(9, K)} | ({"b": random(9)} if bias else {})
    numbers = {f"activation_{name}": number for name, number in ACTIVATIONS[activation].items()}
    model = fused_model(
        "FusedGemm",
        ["x", *constants],
        given,
        constants,
        ranks={"y": 2},
        activation=activation,
        transB=1,
        alpha=0.5,
        beta=2.0,
        **numbers,
    )
    apart, reasons = unfused(model)
    assert not reasons and op_types(apart) == ["Gemm", activation]
    feeds = {"x": given["x"][0]}
    assert relative_error(run(model, feeds)[0], run(apart, feeds)[0]) < 1e-6


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("opset", [13, 17])
def test_embeddings(segments: bool, positions: bool, mask: bool, opset: int) -> None:
    shape = ["batch", "rows"]
    given = {"ids": (RNG.integers(0, 31, (B, S)).astype(np.int32), shape)}
    constants = {"words": random(31, W), "places": random(12, W), "gamma": random(W), "beta": random(W)}
    inputs = ["ids", "", "words", "places", "", "gamma", "beta", "", ""]
    if segments:
        given["kinds"], constants["segments"] = (RNG.integers(0, 2, (B, S)).astype(np.int32), shape), random(2, W)
        inputs[1], inputs[4] = "kinds", "segments"
    if mask:
        given["mask"], inputs[7] = masks()["raw"], "mask"
    if positions:
        given["at"], inputs[8] = (RNG.integers(0, 12, (B, S)).astype(np.int32), shape), "at"
    while not inputs[-1]:
        inputs.pop()
    model = fused_model(
        "EmbedLayerNormalization", inputs, given, constants, ["y", "lengths", "sum"], opset,
        ranks={"lengths": 1}, epsilon=1e-3,
    )  # fmt: skip
    apart, reasons = unfused(model)
    assert not reasons and op_types(apart).count("Gather") >= 1 and "EmbedLayerNormalization" not in op_types(apart)
    onnx.checker.check_model(apart)
    feeds = {name: array for name, (array, _) in given.items()}
    (y, lengths, total), (found, found_lengths, found_total) = run(model, feeds), run(apart, feeds)
    assert relative_error(y, found) < 1e-5 and relative_error(total, found_total) < 1e-6
    np.testing.assert_array_equal(found_lengths, lengths)
    assert op_types(unfused(model, tables=False)[0]) == ["EmbedLayerNormalization"]


def half(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def asked_for(model: onnx.ModelProto) -> None:
    """Make W a graph input with a default value, which callers may replace."""
    weight = next(one for one in model.graph.initializer if one.name == "W")
    model.graph.input.append(helper.make_tensor_value_info("W", weight.data_type, weight.dims))


REFUSED: dict[str, tuple[Any, str]] = {
    "cache": (lambda model: model.graph.node[0].input.append("x"), "it has a cache of keys and values"),
    "rotary": (lambda model: add_attribute(model, "do_rotary", 1), "it applies a rotary embedding (do_rotary)"),
    "unknown": (lambda model: add_attribute(model, "novel", 1), "its attribute 'novel' is not supported"),
    "widths": (lambda model: add_attribute(model, "qkv_hidden_sizes", [24, 24, 10]), "its weights have 72 columns"),
    "half": (half, "its input 'x' is FLOAT16, expected FLOAT"),
    "weights": (asked_for, "its weights 'W' are not constant"),
    "fill": (lambda model: add_attribute(model, "mask_filter_value", 1), "its attribute 'mask_filter_value' is not"),
    "heads": (lambda model: add_attribute(model, "num_heads", 0), "its num_heads is 0"),
    "vector": (lambda model: set_mask(model, ["other"]), "its mask 'mask' is a vector whose length is not known to be"),
    "one key": (lambda model: set_mask(model, ["batch", 1]), "its mask 'mask' has one column for all keys"),
    "megatron": (lambda model: set_mask(model, ["batch", 1, 9, 9]), "its mask 'mask' is INT32 [batch, 1, 9, 9]"),
}


def add_attribute(model: onnx.ModelProto, name: str, number: Any) -> None:
    (node,) = model.graph.node
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, number)])


def set_mask(model: onnx.ModelProto, shape: list[int | str]) -> None:
    model.graph.input[1].CopyFrom(helper.make_tensor_value_info("mask", onnx.TensorProto.INT32, shape))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_stays_and_says_why(case: str) -> None:
    change, reason = REFUSED[case]
    model, _ = attention_model("raw")
    change(model)
    apart, (found,) = unfused(model)
    assert op_types(apart) == ["Attention"] and reason in found
    loaded = ir.from_proto(model)
    unfuse(loaded, str, tables=False)
    (layer,) = find_linears(loaded)
    assert isinstance(layer, NotLinear) and found in layer.reason


def test_multi_head_attention_that_is_not_read_says_why() -> None:
    given = {name: (random(B, S, W), ["batch", "rows", W]) for name in ("q", "k", "v")}
    given["mask"] = np.ones(B, np.int32), ["other"]
    model = fused_model("MultiHeadAttention", ["q", "k", "v", "", "mask"], given, {}, num_heads=H)
    notes = " ".join(ortolan.optimize_onnx(model, recipe=FUSE, dry_run=True).notes)
    assert "attention not fused: its mask 'mask' is a vector whose length is not known to be" in notes


def test_outputs_that_are_only_in_the_operator() -> None:
    model, _ = attention_model()
    model.graph.node[0].output.append("present")
    model.graph.output.append(helper.make_tensor_value_info("present", onnx.TensorProto.FLOAT, [None] * 5))
    assert unfused(model)[1] == ["it has a cache of keys and values"]
    given = {"x": (random(B, S, K), ["batch", "rows", K]), "skip": (random(B, S, W), ["batch", "rows", W])}
    layer = helper.make_node("MatMul", ["x", "M"], ["h"], name="layer")
    model = fused_model(
        "SkipLayerNormalization", ["h", "skip", "gamma"], given, {"gamma": random(W), "M": random(K, W)},
        ["y", "mean"], before=[layer],
    )  # fmt: skip
    assert unfused(model)[1] == ["its output 1 is used"]


def test_activations_that_are_not_known() -> None:
    given = {"x": (random(B, K), ["batch", K])}
    for name, reason in (("Elu", "its activation is Elu"), ("LeakyRelu", "its activation_alpha is missing")):
        model = fused_model("FusedGemm", ["x", "W"], given, {"W": random(K, 9)}, ranks={"y": 2}, activation=name)
        (found,) = unfused(model)[1]
        assert reason in found
