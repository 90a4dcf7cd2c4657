"""Attention and QAttention, which contain their query, key and value layers: bits as in the optimized file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import ortolan

from ..ops.single_node import assert_same_bits
from ..passes.fused_graphs import fused_model, unfused
from ..passes.small_models import op_types, relative_error, run
from ..passes.test_fused_forms import LOWEST, B, H, K, S, W, add_attribute, attention_model, masks, random, set_mask
from ..recipes.forms import NAMED
from .sessions import claimed, exact_session, needs_provider, plain_session, provider_session
from .test_context import check_round_trip

pytestmark = needs_provider

PRECISION = "ep.ortolanexecutionprovider.precision"


def session_of(model: onnx.ModelProto, precision: str = "bf16", threads: int = 1) -> ort.InferenceSession:
    return provider_session(model, threads, **{PRECISION.replace(".", "__"): precision})


def optimized(model: onnx.ModelProto, weights: str, feeds: dict[str, np.ndarray], **options: Any) -> onnx.ModelProto:
    report = ortolan.optimize_onnx(
        model, weights=weights, ignore=(), calibration=[feeds],
        options={"may_grow": True, "verify.seconds": 0.0, **options},
    )  # fmt: skip
    assert report.model is not None and op_types(report.model).count("NoMADAttention") == 1
    return report.model


def check(model: onnx.ModelProto, feeds: dict[str, np.ndarray], precision: str, threads: int = 1) -> None:
    """Check the bits of the optimized file, and that a sequence alone has the bits of the batch."""
    session = session_of(model, precision, threads)
    assert claimed(session) == ["fused"]
    (y,) = session.run(None, feeds)
    assert_same_bits(y, run(optimized(model, precision, feeds), feeds, library=True)[0])
    for b in range(len(feeds["x"])):
        alone = {name: array[b : b + 1] if array.shape[0] == B else array for name, array in feeds.items()}
        assert_same_bits(session.run(None, alone)[0][0], y[b])
    assert relative_error(plain_session(model).run(None, feeds)[0], y) < 0.05


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize(
    "given", [{}, {"bias": False}, {"scale": 0.3}, {"unidirectional": 1}, {"widths": (32, 32, 32)}, {"added": (B, H)}]
)
def test_float_attention(given: dict[str, Any], precision: str) -> None:
    check(*attention_model(**given), precision)


def hidden_rows(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Let the last sequence see nothing; the mask has negative numbers too."""
    mask = feeds["mask"].copy()
    mask[-1] = -1
    return feeds | {"mask": mask}


@pytest.mark.parametrize("mask", ["lengths", "raw", "square"])
@pytest.mark.parametrize("given", [{}, {"added": (1, H)}, {"mask_filter_value": LOWEST}])
@pytest.mark.parametrize("causal", [0, 1])
def test_masks(mask: str, given: dict[str, Any], causal: int) -> None:
    """Rows that see nothing get the mean of all values if the fill is the lowest float, those after them too."""
    model, feeds = attention_model(mask, unidirectional=causal, **given)
    session, other = session_of(model), optimized(model, "bf16", feeds)
    check(model, feeds, "bf16", threads=1 + causal)
    given_feeds = hidden_rows(feeds)
    assert_same_bits(session.run(None, given_feeds)[0], run(other, given_feeds, library=True)[0])


def test_masks_of_other_sizes() -> None:
    for kind, shape in (("raw", (B, S + 1)), ("raw", (B, 1)), ("lengths", (B + 1,)), ("square", (B, 2, S))):
        model, feeds = attention_model(kind)
        for value in model.graph.input:
            for dim in value.type.tensor_type.shape.dim[: 3 if value.name == "mask" else 0]:
                if dim.dim_param == "rows":
                    dim.Clear()
        session = session_of(model)
        assert claimed(session) == ["fused"]
        with pytest.raises(Exception, match=r"Attention node .* its mask has shape .* does not broadcast to"):
            session.run(None, feeds | {"mask": np.ones(shape, np.int32)})


def test_constant_masks(tmp_path: Path) -> None:
    for kind in ("raw", "square"):
        model, feeds = attention_model(kind)
        (expected,) = session_of(model).run(None, feeds)
        mask = next(value for value in model.graph.input if value.name == "mask")
        model.graph.initializer.append(onnx.numpy_helper.from_array(feeds.pop("mask"), "mask"))
        model.graph.input.remove(mask)
        session = session_of(model)
        assert claimed(session) == ["fused"]
        assert_same_bits(session.run(None, feeds)[0], expected)
        (tmp_path / kind).mkdir()
        check_round_trip(model, tmp_path / kind, feeds, **{PRECISION.replace(".", "__"): "bf16"})


@pytest.mark.parametrize("mask", ["none", "lengths", "square"])
@pytest.mark.parametrize("widths", [(), (32, 32, 32)])
def test_compiled_models(mask: str, widths: tuple[int, ...], tmp_path: Path) -> None:
    """24 columns do not fill whole panels, so that query, key and value weights stay separate."""
    model, feeds = attention_model(mask, unidirectional=1, widths=widths)
    check_round_trip(model, tmp_path, feeds, **{PRECISION.replace(".", "__"): "int8"})
    operators = [one.op_type for one in onnx.load(tmp_path / "model_ctx.onnx").graph.node]
    assert operators == ["EPContext"]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_float16(precision: str) -> None:
    model, feeds = attention_model("raw")
    wide = session_of(model, precision).run(None, feeds)[0]
    half(model)
    session = session_of(model, precision)
    assert claimed(session) == ["fused"]
    (y,) = session.run(None, feeds | {"x": feeds["x"].astype(np.float16)})
    assert y.dtype == np.float16 and relative_error(wide, y.astype(np.float32)) < 0.02


def half(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
        )


def reasons(model: onnx.ModelProto, precision: str = "bf16") -> list[str]:
    nodes = ortolan.inspect_provider(model, claims="all", precision=precision).nodes
    return [one.reason for one in nodes if not one.taken]


def test_float_weights_stay_without_a_precision() -> None:
    model, feeds = attention_model("raw")
    session = session_of(model, "float32")
    assert claimed(session) == [] and reasons(model, "float32") == []
    assert relative_error(plain_session(model).run(None, feeds)[0], session.run(None, feeds)[0]) < 1e-5


REFUSED: dict[str, tuple[Any, str]] = {
    "rotary": (lambda model: add_attribute(model, "do_rotary", 1), "it applies a rotary embedding (do_rotary)"),
    "sum of the widths": (
        lambda model: add_attribute(model, "qkv_hidden_sizes", [24, 24, 10]),
        "its weights have 72 columns, expected the sum of its qkv_hidden_sizes [24, 24, 10], each a multiple of 2",
    ),
    "two widths": (lambda model: add_attribute(model, "qkv_hidden_sizes", [24, 48]), "qkv_hidden_sizes [24, 48]"),
    "negative width": (
        lambda model: add_attribute(model, "qkv_hidden_sizes", [96, -48, 24]), "qkv_hidden_sizes [96, -48, 24]"
    ),
    "large widths": (
        lambda model: add_attribute(model, "qkv_hidden_sizes", [2**62, 2**62, 76]), "its weights have 72 columns"
    ),
    "heads that do not fit": (lambda model: add_attribute(model, "num_heads", 5), "each a multiple of 5 heads"),
    "wider values": (
        lambda model: add_attribute(model, "qkv_hidden_sizes", [16, 16, 40]), "head widths of its queries, keys and"
    ),
    "infinite fill": (lambda model: add_attribute(model, "mask_filter_value", -np.inf), "is not finite"),
    "lengths of other batches": (lambda model: set_mask(model, ["other"]), "is a vector whose length is not known"),
    "megatron": (lambda model: set_mask(model, ["batch", 1, 9, 9]), "expected INT32 [batch], [batch, keys] or [batch"),
}  # fmt: skip

BROKEN = ("sum of the widths", "two widths", "negative width", "large widths", "heads that do not fit")  # for everyone


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_stays(case: str) -> None:
    """A layer after the attention is claimed."""
    change, reason = REFUSED[case]
    model, _ = attention_model("raw")
    change(model)
    sizes = [list(one.ints) for one in model.graph.node[0].attribute if one.name == "qkv_hidden_sizes"]
    model.graph.node.append(helper.make_node("MatMul", ["y", "next"], ["z"], name="next"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(random(sizes[0][-1] if sizes else W, W), "next"))
    model.graph.output[0].name = "z"
    if case in BROKEN:
        with pytest.raises(Exception, match=r"qkv_hidden_sizes|idden sizes|divisible by num_heads"):
            session_of(model)
        (found,) = unfused(model)[1]  # by the same rule
    else:
        assert claimed(session_of(model)) == ["next"]
        (found,) = reasons(model)
    assert reason in found


def quantized_model(
    dtype: Any, per_column: bool, fixed: bool, mask: str = "raw", zeros: float = 0.0, widths: int = W
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a model of one QAttention, whose input has a fixed range or is quantized dynamically."""
    rng = np.random.default_rng(5)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    columns, zero = 3 * widths, 3 if dtype == np.int8 else 130
    size = (columns,) if per_column else (1,)
    codes = rng.integers(low, high + 1, (K, columns)).astype(dtype)
    codes[:, : int(columns * zeros)] = zero
    constants = {
        "W": codes, "b": random(columns), "scale": (rng.random(size) * 0.01 + 0.001).astype(np.float32),
        "zero": np.full(size if per_column else (), zero, dtype),
    }  # fmt: skip
    given = {"x": (random(B, S, K), ["batch", "rows", K])}
    if mask != "none":
        given["mask"] = masks()[mask]
    before = [helper.make_node("DynamicQuantizeLinear", ["x"], ["codes", "x_scale", "x_zero"], name="quantize")]
    if fixed:
        before = [helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["codes"], name="quantize")]
        constants |= {"x_scale": np.array(0.03, np.float32), "x_zero": np.array(125, np.uint8)}
    inputs = ["codes", "W", "b", "x_scale", "scale", "mask" if mask != "none" else "", "x_zero", "zero"]
    model = fused_model("QAttention", inputs, given, constants, before=before, num_heads=H)
    return model, {name: array for name, (array, _) in given.items()}


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("mask", "zeros", "widths"), [("raw", 0.0, W), ("lengths", 0.4, W), ("none", 0.8, 32)])
def test_quantized_attention(
    dtype: Any, per_column: bool, fixed: bool, mask: str, zeros: float, widths: int, tmp_path: Path
) -> None:
    """Zeros make the query layer sparse, but not the value layer.

    Of such models with fixed ranges the optimized file replaces only the sparse layers.
    """
    model, feeds = quantized_model(dtype, per_column, fixed, mask, 0.0 if fixed else zeros, widths)
    session = provider_session(model)
    assert claimed(session) == ["fused", "quantize"]
    options = {"verify.seconds": 0.0, "may_grow": True}
    expected = ortolan.optimize_onnx(model, recipe=NAMED["adopt"].without_pass("unpad"), options=options).model
    assert expected is not None and op_types(expected).count("NoMADAttention") == 1
    (y,) = session.run(None, feeds)
    assert_same_bits(y, run(expected, feeds, library=True)[0])
    for b in range(B):
        assert_same_bits(session.run(None, {name: array[b : b + 1] for name, array in feeds.items()})[0][0], y[b])
    check_round_trip(model, tmp_path, feeds)


def test_an_input_that_quantizing_clips_stays() -> None:
    model, feeds = quantized_model(np.int8, False, True)
    (zero,) = (one for one in model.graph.initializer if one.name == "x_zero")
    zero.CopyFrom(numpy_helper.from_array(np.array(0, np.uint8), "x_zero"))
    assert "fused" not in claimed(provider_session(model))
    np.testing.assert_allclose(provider_session(model).run(None, feeds)[0], run(model, feeds)[0], atol=1e-3)


def test_quantized_input_that_others_read() -> None:
    model, feeds = quantized_model(np.int8, False, False)
    model.graph.output.append(helper.make_tensor_value_info("codes", onnx.TensorProto.UINT8, None))
    assert claimed(provider_session(model)) == []
    assert reasons(model) == ["its quantized input or integer sums are also read outside the claimed layers"]
    assert run(model, feeds)


def test_layers_that_share_the_quantized_input() -> None:
    """Attention and a layer of the same quantized input are one group."""
    model, feeds = quantized_model(np.int8, False, False, "raw")
    more = [
        helper.make_node("MatMulInteger", ["codes", "V", "x_zero"], ["sums"], name="other"),
        helper.make_node("Cast", ["sums"], ["floats"], to=1),
        helper.make_node("Mul", ["x_scale", "v_scale"], ["product"]),
        helper.make_node("Mul", ["floats", "product"], ["z"]),
    ]
    model.graph.node.extend(more)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((K, 20), np.int8), "V"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.01, np.float32), "v_scale"))
    model.graph.output.append(helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None))
    session = provider_session(model)
    assert {"fused", "quantize"} <= set(claimed(session)) and len(claimed(session)) > 3
    for y, expected in zip(session.run(None, feeds), exact_session(model).run(None, feeds), strict=True):
        assert relative_error(expected, y) < 0.03
