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
from onnx import helper

from ortolan.models import tiny

from ..ops.single_node import assert_same_bits
from ..passes.attention_forms import unknown_heads
from ..passes.attention_graphs import FLOAT, B, H, S, W, feeds
from .context_records import steps
from .sessions import needs_provider, provider_session
from .test_attention import (
    TAKEN,
    attentions,
    built,
    constant_mask,
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


def test_a_node_without_its_inputs(int8: Quantize, tmp_path: Path) -> None:
    compile_model(int8(built(TAKEN["usual"])), tmp_path)
    model = onnx.load(tmp_path / "model_ctx.onnx")
    (context,) = (one for one in model.graph.node if one.op_type == "EPContext")
    del context.input[1:]
    onnx.save(model, tmp_path / "model_ctx.onnx")
    refuse(tmp_path, "input/output index 1 out of range .1 available.")


@pytest.mark.parametrize("kind", ["constant mask", "sizes", "three parts", "conditions"])
def test_mutated_files_never_crash(kind: str, int8: Quantize, tmp_path: Path) -> None:
    entries: dict[str, str] = {}
    if kind == "conditions":
        model, given = conditions()
        entries = BF16
    elif kind == "three parts":
        model = int8(ir.to_proto(tiny.tiny_bert(hidden_size=40, num_attention_heads=4, num_hidden_layers=1)))
        given = tokens(model, 2, 9)
    else:
        model = int8(built(constant_mask("cut") if kind == "constant mask" else unknown_heads))
        given = feeds(model) | ({"shape": np.array([B, S, H, W // H])} if kind == "sizes" else {})
    mutate_in_a_process(model, given, tmp_path, **entries)
