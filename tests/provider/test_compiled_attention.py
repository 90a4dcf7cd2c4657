"""Attention in compiled models: bits as in a session on the original model, and rejection of damaged records."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from ortolan.models import tiny

from ..ops.single_node import assert_same_bits
from ..passes.attention_graphs import FLOAT, B, H, S, feeds
from .cached_models import Form
from .context_records import LAYERS, steps
from .sessions import needs_provider, provider_session
from .test_attention import (
    APART,
    OF_NINE_ROWS,
    TAKEN,
    apart_feeds,
    attentions,
    built,
    constant_mask,
    cross,
    cut_mask,
    four_bits,
    int8,
    mask_as_given,
    multi_head,
    of_different_kinds,
    rows_are_fixed,
    tokens,
    with_biases,
)
from .test_attention_masks import BATCH, CAUSAL, HEADS, ROWS, D, attention
from .test_context import (
    binary,
    check_round_trip,
    compile_model,
    compiled_session,
    context_nodes,
    mutate_in_a_process,
    refuse,
)

pytestmark = needs_provider

__all__ = ["int8"]  # a fixture

Quantize = Callable[[onnx.ModelProto], onnx.ModelProto]
node, value = helper.make_node, helper.make_tensor_value_info


def check(model: onnx.ModelProto, folder: Path, *given: dict[str, np.ndarray], **entries: str) -> None:
    """Check that the compiled model contains all attention, and gives the bits of the original model."""
    left = sum(one.op_type in ("Softmax", "MultiHeadAttention") for one in model.graph.node)
    assert left > 0
    check_round_trip(model, folder, *given, **entries)
    operators = [one.op_type for one in onnx.load(folder / "model_ctx.onnx").graph.node]
    assert not {"Softmax", "MultiHeadAttention", "MatMul"} & set(operators)


@pytest.mark.parametrize("embed_mode", ["0", "1"])
@pytest.mark.parametrize("form", TAKEN)
def test_every_form(form: str, embed_mode: str, int8: Quantize, tmp_path: Path) -> None:
    model = int8(built(TAKEN[form]))
    given = [feeds(model, rows) for rows in (1, 2, S, 70)]
    check(model, tmp_path, *given, ep__context_embed_mode=embed_mode)


@pytest.mark.parametrize(
    "form",
    [
        *(constant_mask(form) for form in ("whole", "expanded", "cut")),
        multi_head(scale=0.4),
        multi_head(unidirectional=1),
    ],
)
def test_constants_and_attributes(form: Any, int8: Quantize, tmp_path: Path) -> None:
    model = int8(built(form))
    check(model, tmp_path, feeds(model))


@pytest.mark.parametrize("form", ["usual", "shape chains", "zeros for NaN", "position bias and mask"])
def test_four_bits(form: str, tmp_path: Path) -> None:
    model = four_bits(built(TAKEN[form]))
    check(model, tmp_path, *(feeds(model, rows) for rows in (1, S, 70)))


@pytest.mark.parametrize("form", APART)
def test_apart_from_its_layers(form: str, int8: Quantize, tmp_path: Path) -> None:
    model = int8(built(APART[form]))
    check(model, tmp_path, *(apart_feeds(model, rows) for rows in ((9,) if form in OF_NINE_ROWS else (1, S, 70))))


@pytest.mark.parametrize("padding", [0, 2, 3])
def test_biases_and_key_padding(padding: int, int8: Quantize, tmp_path: Path) -> None:
    model = int8(built(with_biases(padding=padding, mask_filter_value=-7.5)))
    check(model, tmp_path, *(feeds(model, rows) for rows in (1, S, 70)))


def test_layers_of_different_kinds(tmp_path: Path) -> None:
    model = of_different_kinds()
    check(model, tmp_path, *(feeds(model, rows) for rows in (1, S, 70)))


@pytest.mark.parametrize("embed_mode", ["0", "1"])
@pytest.mark.parametrize("made", ["three parts", "position bias"])
def test_whole_encoders(made: str, embed_mode: str, int8: Quantize, tmp_path: Path) -> None:
    """Sizes whose 40 columns do not fill whole panels, so that query, key and value weights stay separate."""
    sizes = {"hidden_size": 40, "num_attention_heads": 4}
    encoder = tiny.tiny_bert(**sizes) if made == "three parts" else tiny.tiny_mpnet()
    model = int8(ir.to_proto(encoder))
    given = [tokens(model, batch, rows) for batch, rows in ((1, 1), (1, 16), (3, 33))]
    check(model, tmp_path, *given, ep__context_embed_mode=embed_mode)


def test_several_threads(int8: Quantize, tmp_path: Path) -> None:
    model = int8(built(TAKEN["position bias and mask"]))
    compile_model(model, tmp_path, 3)
    expected, read = provider_session(model, 3), compiled_session(tmp_path, 3)
    for rows in (1, 70, 200):
        given = feeds(model, rows)
        assert_same_bits(read.run(None, given)[0], expected.run(None, given)[0])


# --- sizes known at run time
# -------------------------------------------------------------------------------------------


def both(model: onnx.ModelProto, folder: Path) -> tuple[ort.InferenceSession, ort.InferenceSession]:
    """Return a session on the model and one on the compiled model."""
    compile_model(model, folder)
    expected = provider_session(model)
    assert attentions(expected) == 1
    return expected, compiled_session(folder)


def check_both(
    sessions: tuple[ort.InferenceSession, ort.InferenceSession], given: dict[str, np.ndarray], error: str = ""
) -> None:
    expected, read = sessions
    if not error:
        assert_same_bits(read.run(None, given)[0], expected.run(None, given)[0])
        return
    for session in sessions:
        with pytest.raises(Exception, match=error):
            session.run(None, given)


def test_the_number_of_rows(int8: Quantize, tmp_path: Path) -> None:
    model = int8(built(rows_are_fixed))
    sessions = both(model, tmp_path)
    check_both(sessions, feeds(model, S))
    check_both(sessions, feeds(model, 2 * S))
    check_both(sessions, feeds(model, S + 1), error="reshape")


def test_masks_of_any_shape(int8: Quantize, tmp_path: Path) -> None:
    model = int8(built(mask_as_given))
    sessions, x = both(model, tmp_path), feeds(model)["x"]
    rng = np.random.default_rng(3)
    for shape in ((1, 1, 1, 1), (B, 1, 1, S), (1, H, S, S), (B, H, S, S), (B, H, S, 1)):
        check_both(sessions, {"x": x, "bias": rng.standard_normal(shape, dtype=np.float32)})
    for shape in ((1, 1, 1, S + 1), (3, 1, 1, S), (0, 1, 1, S)):
        check_both(sessions, {"x": x, "bias": np.zeros(shape, np.float32)}, error=r"mask has shape|broadcast")


@pytest.mark.parametrize("longer", [0, 5])
def test_a_mask_that_is_cut(longer: int, int8: Quantize, tmp_path: Path) -> None:
    model = int8(built(cut_mask))
    bias = np.random.default_rng(0).standard_normal((B, 1, 1, S + longer), dtype=np.float32)
    check_both(both(model, tmp_path), {"x": feeds(model)["x"], "bias": bias})


def conditions() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return attention with an added mask, a condition, and a condition that sets rows to zero."""
    inputs = [
        value("mask", FLOAT, ["batch", 1, 1, "keys"]),
        value("causal", helper.TensorProto.BOOL, [1, 1, "rows", "keys"]),
        value("rows_of_zeros", helper.TensorProto.BOOL, ["batch", 1, "rows", 1]),
    ]
    model = attention([("Add", "mask"), ("Where", "causal")], inputs, zero_rows="rows_of_zeros")
    rng = np.random.default_rng(1)
    return model, {
        "x": rng.standard_normal((BATCH, ROWS, D), np.float32),
        "mask": rng.standard_normal((BATCH, 1, 1, ROWS), np.float32),
        "causal": CAUSAL,
        "rows_of_zeros": rng.random((BATCH, 1, ROWS, 1)) < 0.4,
    }


BF16 = {"ep__ortolanexecutionprovider__precision": "bf16"}


@pytest.mark.parametrize("embed_mode", ["0", "1"])
def test_conditions(embed_mode: str, tmp_path: Path) -> None:
    model, given = conditions()
    check(model, tmp_path, given, **BF16, ep__context_embed_mode=embed_mode)


def test_a_layer_that_makes_the_mask(tmp_path: Path) -> None:
    """One EPContext node computes the mask of another."""
    layer = node("MatMul", ["f", "w_bias"], ["bias"], name="bias_layer")
    model = attention([("Add", "bias")], [value("f", FLOAT, ["batch", HEADS, "rows", 8])], [layer])
    rng = np.random.default_rng(2)
    x, f = rng.standard_normal((BATCH, ROWS, D), np.float32), rng.standard_normal((BATCH, HEADS, ROWS, 8), np.float32)
    check(model, tmp_path, {"x": x, "f": f}, **BF16)
    assert len(context_nodes(tmp_path)) == 2


# --- damaged records --------------------------------------------------------------------------------------------------


def bits(number: float) -> int:
    return int(np.array(number, np.float32).view(np.int32))


def change(folder: Path, step: int, **numbers: int) -> None:
    """Change integers in the record of a step.

    numbers: new values by the names in context_records; two underscores in a name become a dot.
    """
    content = bytearray(binary(folder).read_bytes())
    places = list(steps(bytes(content)))[step]
    for name, number in numbers.items():
        struct.pack_into("<q", content, places[name.replace("__", ".")], number)
    binary(folder).write_bytes(content)


LARGE = 1 << 40


@pytest.mark.parametrize(
    "numbers, pattern",
    [
        ({"kind": 4}, "a step has kind 4, expected 0 to 3"),
        ({"kind": LAYERS}, "."),
        ({"query": 9}, "input/output index 9"),
        ({"query": -1}, "its record lacks an input"),
        ({"query": -2}, "input/output index -2"),
        ({"query__layout": 6}, "a layout is 6, expected 0 to 5"),
        ({"value__layout": -1}, "a layout is -1"),
        ({"key__bias__bytes": 4}, "."),
        ({"y__layout": LARGE}, "the output's layout is 1099511627776"),
        ({"y": 1}, "input/output index 1"),
        ({"y": -1}, "its 1 steps do not compute all of its 1 outputs"),
        ({"parts": 2}, "queries, keys and values have 2 weights, expected 0, 1 or 3"),
        ({"parts": 0}, "."),
        ({"parts": LARGE}, "weights, expected 0, 1 or 3"),
        ({"part0": 4}, "a weight has kind 4, expected 0 to 3"),
        ({"heads": 0}, "the number of heads is 0, expected 1 to 65536"),
        ({"heads": -4}, "the number of heads is -4"),
        ({"heads": 5}, "queries, keys and values have 1 weights of sizes 48 x 144"),
        ({"heads": 8}, "queries, keys and values have 1 weights of sizes 48 x 144"),
        ({"kv_heads": 0}, "the number of key heads is 0"),
        ({"kv_heads": 2}, "queries, keys and values have 1 weights of sizes 48 x 144"),
        ({"head_dim": 0}, "the width of a head is 0"),
        ({"head_dim": 1 << 16}, "queries, keys and values have 1 weights of sizes 48 x 144"),
        ({"scale": bits(np.nan)}, "the scale is NaN"),
        ({"softcap": bits(np.inf)}, "softcap is inf, expected 0, or"),
        ({"softcap": bits(-1)}, "softcap is -1, expected 0, or"),
        ({"causal": 2}, "a flag is 2, expected 0 or 1"),
        ({"zero_hidden_rows": -1}, "a flag is -1"),
        ({"window": -1}, "the window is -1, expected 0 to"),
        ({"window": 4}, "it has a window of 4, but is not causal"),
        ({"sinks__bytes": 4}, "it has 1 sinks, expected 4"),
        ({"is_precise": 2}, "a flag is 2"),
        ({"is_beside_cache": 2}, "a flag is 2"),
        ({"reproducible": 2}, "a flag is 2"),
        ({"zero_rows": 0}, "has another type than its step expects"),
        ({"zero_rows": -2}, "input/output index -2"),
        ({"has_cache": 1}, "."),
        ({"masks": -1}, "the number of masks is -1"),
        ({"masks": 65}, "the number of masks is 65, expected 0 to 64"),
        ({"mask0__kind": 3}, "the kind of a mask is 3, expected 0 to 2"),
        ({"mask0__axes": -1}, "there are -1 axes of a mask"),
        ({"mask0__axes": LARGE}, "."),
        ({"mask0__axis2": 0}, "a mask of shape .* has 81 numbers"),
        ({"mask0__axis2": -9}, "a mask of shape .* has 81 numbers"),
        ({"mask0__axis2": 10}, "a mask of shape .* has 81 numbers"),
        ({"mask0__axis0": 1 << 62, "mask0__axis1": 4}, "a mask of shape .* has 81 numbers"),
        ({"mask0__numbers__bytes": 80 * 4}, "a mask of shape .* has 80 numbers"),
        ({"mask0__numbers__bytes": 81 * 4 - 1}, "a section of 4-byte elements has 323 bytes"),
        ({"mask0__numbers__first": 1}, "a section of 4-byte elements"),
        ({"mask0__numbers__first": LARGE}, "a section of 4-byte elements"),
        ({"mask0__scale": bits(np.nan)}, "the scale of a mask is NaN"),
        ({"mask0__heads": -1}, "the number of a mask's heads is -1"),
        ({"mask0__windows": 2}, "a flag is 2"),
        ({"mask0__truncated": 2}, "a flag is 2"),
    ],
)
def test_wrong_numbers(numbers: dict[str, int], pattern: str, int8: Quantize, tmp_path: Path) -> None:
    compile_model(int8(built(constant_mask("whole"))), tmp_path)
    change(tmp_path, 0, **numbers)
    refuse(tmp_path, pattern)


@pytest.mark.parametrize(
    "numbers, pattern",
    [
        ({"mask1__fill": bits(np.nan)}, "the fill of a mask is NaN"),
        ({"mask1__input": -1}, "."),
        ({"mask1__kind": 0}, "has another type than its step expects"),
        ({"mask0__kind": 1}, "has another type than its step expects"),
        ({"mask0__kind": 2}, "has another type than its step expects"),
    ],
)
def test_wrong_conditions(numbers: dict[str, int], pattern: str, tmp_path: Path) -> None:
    """The linear layers are int8, because context_records reads only these and 4-bit layers."""
    model, _ = conditions()
    compile_model(model, tmp_path, 1, ep__ortolanexecutionprovider__precision="int8")
    change(tmp_path, 0, **numbers)
    refuse(tmp_path, pattern)


@pytest.mark.parametrize(
    "numbers, pattern",
    [
        ({"past_key": -1}, "its record lacks an input"),
        ({"past_value": -1}, "its record lacks an input"),
        ({"past_key": 5}, "has another type than its step expects"),
        ({"key": -1}, "its record lacks an input"),
        ({"cos": -1}, "its record lacks an input"),
        ({"lengths": 0}, "has another type than its step expects"),
        ({"total": 3}, "has another type than its step expects"),
        ({"present_key": -1}, "do not compute all of its 3 outputs"),
        ({"present_key": 2}, "two steps compute output 2"),
        ({"present_value": 3}, "input/output index 3"),
        ({"interleaved": 2}, "a flag is 2"),
        ({"kv_heads": 4}, "has 6 heads and 4 key heads"),
        ({"head_dim": 15}, "its record lacks an input"),
        ({"has_cache": 0}, "."),
        ({"parts": 1}, "."),
    ],
)
def test_wrong_caches(numbers: dict[str, int], pattern: str, tmp_path: Path) -> None:
    compile_model(Form(rotary="half").model(), tmp_path)
    change(tmp_path, 0, **numbers)
    refuse(tmp_path, pattern)


@pytest.mark.parametrize("name", ["past_key", "past_value", "cos", "present_key", "present_value"])
def test_caches_of_another_type(name: str, tmp_path: Path) -> None:
    """Steps read caches and rotary tables as float32."""
    compile_model(Form(rotary="half").model(), tmp_path)
    model = onnx.load(tmp_path / "model_ctx.onnx")
    for one in (*model.graph.input, *model.graph.output):
        if one.name == name:
            one.type.tensor_type.elem_type = helper.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        if tensor.name == name:
            halves = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(halves, name))
    onnx.save(model, tmp_path / "model_ctx.onnx")
    refuse(tmp_path, f"its value '{name}' has another type than its step expects")


def test_parts_of_different_sizes(int8: Quantize, tmp_path: Path) -> None:
    """The record of another layer, with other sizes, replaces that of the value layer."""
    compile_model(int8(ir.to_proto(tiny.tiny_bert(hidden_size=40, num_attention_heads=4))), tmp_path)
    content = bytearray(binary(tmp_path).read_bytes())
    found = list(steps(bytes(content)))

    def part(step: dict[str, int], index: int) -> bytes:
        return bytes(content[step[f"part{index}"] : step[f"part{index} end"]])

    (attention, *_) = (one for one in found if "part2" in one)
    size = len(part(attention, 2))
    others = [part(one, 0) for one in found if "part0" in one and "part2" not in one]
    (other, *_) = (one for one in others if struct.unpack_from("<qqq", one) != (1, 40, 40) and len(one) == size)
    content[attention["part2"] : attention["part2 end"]] = other
    binary(tmp_path).write_bytes(content)
    refuse(tmp_path, "queries, keys and values have 3 weights of sizes 40 x 40 and ")


def test_a_node_without_its_inputs(int8: Quantize, tmp_path: Path) -> None:
    compile_model(int8(built(TAKEN["usual"])), tmp_path)
    model = onnx.load(tmp_path / "model_ctx.onnx")
    (context,) = (one for one in model.graph.node if one.op_type == "EPContext")
    del context.input[1:]
    onnx.save(model, tmp_path / "model_ctx.onnx")
    refuse(tmp_path, "input/output index 1 out of range .1 available.")


@pytest.mark.parametrize("kind", ["constant mask", "cross attention", "three parts", "conditions", "cache"])
def test_mutated_files_never_crash(kind: str, int8: Quantize, tmp_path: Path) -> None:
    entries: dict[str, str] = {}
    if kind == "conditions":
        model, given = conditions()
        entries = BF16
    elif kind == "three parts":
        model = int8(ir.to_proto(tiny.tiny_bert(hidden_size=40, num_attention_heads=4, num_hidden_layers=1)))
        given = tokens(model, 2, 9)
    elif kind == "cache":
        form = Form(rotary="half", packed=True, window=4, sinks="head_sink")
        model, given = form.model(), form.feeds(2, 3, 5)
    else:
        model = int8(built(constant_mask("cut") if kind == "constant mask" else cross))
        given = apart_feeds(model, S)
    mutate_in_a_process(model, given, tmp_path, **entries)
