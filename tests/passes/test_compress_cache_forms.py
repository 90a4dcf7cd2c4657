"""Other forms of attention with a cache, one node or one Softmax a model, against ONNX Runtime."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan import Recipe

from .small_models import make_model, op_types, run

H, KV, D = 6, 2, 16
FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
Feeds = dict[str, np.ndarray]


def recipe(**options: Any) -> Recipe:
    options = {"keys": "float32", "values": "float32"} | options
    steps = [{"name": "normalize"}, {"name": "compress_cache", **options}, {"name": "verify", "seconds": 0.0}]
    return Recipe.from_dict({"name": "c", "pass": steps})


def operator(
    op_type: str,
    inputs: list[str],
    domain: str = "",
    opset: int = 23,
    heads: int = H,
    kv_heads: int = KV,
    rank: int = 3,
    mask: int = FLOAT,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one node, with inputs of these names and a cache."""
    width = {"q": heads * D, "k": kv_heads * D, "v": kv_heads * D}
    shapes: dict[str, Any] = {
        name: (FLOAT, ["b", "s", size] if rank == 3 else ["b", size // D, "s", D]) for name, size in width.items()
    }
    shapes |= {name: (FLOAT, ["b", kv_heads, "p", D]) for name in ("past_key", "past_value")}
    shapes["mask"] = (mask, ["b", 1, "s", "t"])
    outputs = {
        "y": (FLOAT, ["b", "s", heads * D] if rank == 3 else ["b", heads, "s", D]),
        "present_key": (FLOAT, ["b", kv_heads, "t", D]),
        "present_value": (FLOAT, ["b", kv_heads, "t", D]),
    }
    nodes = [helper.make_node(op_type, inputs, list(outputs), "attend", domain=domain, **attributes)]
    weights = {}
    if rank == 4:  # a layer follows, as in a model
        nodes[0].output[0] = "by_heads"
        nodes.append(helper.make_node("Transpose", ["by_heads"], ["rows"], "turn", perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", ["rows", "shape"], ["y"], "merge"))
        weights["shape"] = np.array([0, 0, heads * D], np.int64)
        outputs["y"] = (FLOAT, ["b", "s", heads * D])
    given = {name: shapes[name] for name in inputs if name}
    return make_model(nodes, given, outputs, weights, opset, 10, domains={domain: 1} if domain else None)


def feeds(model: onnx.ModelProto, past: int, tokens: int, seed: int = 0) -> Feeds:
    rng = np.random.default_rng(seed)
    sizes = {"b": 2, "s": tokens, "p": past, "t": past + tokens}
    made = {}
    for value in model.graph.input:
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        made[value.name] = rng.standard_normal(shape).astype(np.float32)
    if "mask" in made:  # causal, and some more hidden
        seen = np.arange(past + tokens)[None] <= past + np.arange(tokens)[:, None]
        seen = seen & (rng.random((2, 1, 1, past + tokens)) > 0.2)
        seen[..., past : past + tokens] |= np.eye(tokens, dtype=bool)
        is_bool = next(value for value in model.graph.input if value.name == "mask").type.tensor_type.elem_type == BOOL
        made["mask"] = seen if is_bool else np.where(seen, 0, -np.inf).astype(np.float32)
    return made


def check(model: onnx.ModelProto, *others: str) -> None:
    """others: nodes that stand beside the attention."""
    report = ortolan.optimize_onnx(model, recipe=recipe(), calibration=[feeds(model, 4, 3)])
    assert report.model is not None
    assert sorted(op_types(report.model)) == ["NoMADAttention", *others], report.notes
    for past, tokens in ((0, 7), (9, 1), (9, 5), (0, 1)):
        given = feeds(model, past, tokens)
        for one, expected in zip(run(report.model, given, library=True), run(model, given), strict=True):
            np.testing.assert_allclose(one, expected, atol=1e-5)


MHA = ["q", "k", "v", "", "", "", "past_key", "past_value"]
ONNX = ["q", "k", "v", "", "past_key", "past_value"]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("attributes", [{}, {"unidirectional": 1}, {"scale": 0.5}], ids=str)
def test_multi_head_attention(masked: bool, attributes: dict[str, Any]) -> None:
    inputs = [*MHA[:5], "mask" if masked else "", *MHA[6:]]
    check(operator("MultiHeadAttention", inputs, "com.microsoft", 17, kv_heads=H, num_heads=H, **attributes))


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("mask", [None, FLOAT, BOOL])
@pytest.mark.parametrize("attributes", [{}, {"is_causal": 1}, {"scale": 0.5}], ids=str)
def test_onnx_attention(rank: int, mask: int | None, attributes: dict[str, Any]) -> None:
    inputs = [*ONNX[:3], "mask" if mask else "", *ONNX[4:]]
    if rank == 3:
        attributes = attributes | {"q_num_heads": H, "kv_num_heads": KV}
    model = operator("Attention", inputs, rank=rank, mask=mask or FLOAT, **attributes)
    check(model, *(["Where"] if mask == BOOL else []))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (operator("Attention", ONNX, q_num_heads=H, kv_num_heads=KV, softcap=20.0), "it has softcap 20.0"),
        (
            operator("Attention", ["q", "k", "v"], q_num_heads=H, kv_num_heads=KV),
            "it has no cache of keys and values",
        ),
        (
            operator("MultiHeadAttention", [*MHA[:4], "", *MHA[5:]], "com.microsoft", 17, kv_heads=KV, num_heads=H),
            "its cache 'past_key' has shape",
        ),
    ],
)
def test_refusals(model: onnx.ModelProto, reason: str) -> None:
    notes = ortolan.optimize_onnx(model, recipe=recipe(), dry_run=True).notes
    assert any(re.match(f"cache not compressed: {re.escape(reason)}", note) for note in notes), notes
