"""More forms of attention with a cache, one attention per model, compared with ONNX Runtime."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan import Recipe
from ortolan.errors import NothingToReplaceError

from .cached_llama import llama, prompt
from .small_models import make_model, op_types, run

H, KV, D = 6, 2, 16
FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
Feeds = dict[str, np.ndarray]


def recipe(**options: Any) -> Recipe:
    options = {"keys": "float32", "values": "float32"} | options
    steps = [{"name": "normalize"}, {"name": "compress_cache", **options}, {"name": "verify", "seconds": 0.0}]
    return Recipe.from_dict({"name": "c", "pass": steps})


FUSED = Recipe.from_dict(
    {
        "name": "f",
        "pass": [{"name": "normalize"}, {"name": "fuse_cached_attention"}, {"name": "verify", "seconds": 0.0}],
    }
)


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
    """Return a model of one attention node with a cache. Input names select the shapes."""
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
    if rank == 4:  # models merge the heads after the node
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
        dims = [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
        shape = [sizes[dim] if dim in sizes else int(dim) for dim in dims]
        made[value.name] = rng.standard_normal(shape).astype(np.float32)
    if "mask" in made:  # a causal mask that also masks random keys
        seen = np.arange(past + tokens)[None] <= past + np.arange(tokens)[:, None]
        seen = seen & (rng.random((2, 1, 1, past + tokens)) > 0.2)
        seen[..., past : past + tokens] |= np.eye(tokens, dtype=bool)
        is_bool = next(value for value in model.graph.input if value.name == "mask").type.tensor_type.elem_type == BOOL
        made["mask"] = seen if is_bool else np.where(seen, 0, -np.inf).astype(np.float32)
    return made


def check(model: onnx.ModelProto, *others: str) -> None:
    """Check both passes that replace attention with a cache. others: operators that remain beside it."""
    for by in (recipe(), FUSED):
        report = ortolan.optimize_onnx(model, recipe=by, calibration=[feeds(model, 4, 3)])
        assert report.model is not None
        assert sorted(op_types(report.model)) == sorted(["NoMADAttention", *others]), report.notes
        for past, tokens in ((0, 7), (9, 1), (9, 5), (0, 1)):
            given = feeds(model, past, tokens)
            for one, expected in zip(run(report.model, given, library=True), run(model, given), strict=True):
                np.testing.assert_allclose(one, expected, atol=1e-5)


def transformers_5(numbers: bool, operator: bool = False) -> onnx.ModelProto:
    """Return a decoder as transformers 5 exports it.

    Heads are repeated with computed lengths, keys are transposed as 3-D tensors, and rows without keys become zero.
    numbers: the cache has fixed instead of symbolic dimensions. operator: ONNX's Attention (opset 23).
    """
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, np.ndarray] = {}

    def op(op_type: str, *inputs: str | np.ndarray, output: str | None = None, **attributes: Any) -> str:
        names = []
        for one in inputs:
            if not isinstance(one, str):
                weights[f"c{len(weights)}"] = one
                one = f"c{len(weights) - 1}"
            names.append(one)
        output = output or f"{op_type}_{len(nodes)}"
        nodes.append(helper.make_node(op_type, names, [output], f"/{len(nodes)}", **attributes))
        return output

    def whole(*numbers: int) -> np.ndarray:
        return np.array(numbers, np.int64)

    def size(x: str, axis: int) -> str:
        return op("Shape", x, start=axis, end=axis + 1)

    def heads(x: str, count: int) -> str:
        return op("Transpose", op("Reshape", x, whole(0, 0, count, D)), perm=[0, 2, 1, 3])

    def repeated(x: str) -> str:
        shape = op("Concat", batch, whole(KV, H // KV), tokens, whole(D), axis=0)
        return op(
            "Reshape", op("Expand", op("Unsqueeze", x, whole(2)), shape), op("Concat", batch, whole(H, -1, D), axis=0)
        )

    batch, zero, one = size("q", 0), np.array(0, np.int64), np.array(1, np.int64)
    past, new = op("Squeeze", size("past_value", 2)), op("Squeeze", size("q", 1))
    total = op("Add", past, new)
    tokens = op("Reshape", total, whole(-1))
    rows = op("Unsqueeze", op("Add", op("Range", zero, new, one), past), whole(1))
    causal = op("LessOrEqual", op("Range", zero, total, one), rows)
    visible = op("Expand", causal, op("Concat", batch, whole(1), size("q", 1), tokens, axis=0))
    lowest = np.array(np.finfo(np.float32).min)
    mask = op("Mul", op("Cast", op("Not", visible), to=FLOAT), lowest)
    count = op("ReduceSum", op("Cast", visible, to=FLOAT), whole(-1), keepdims=1)

    op("Concat", "past_key", heads("k", KV), output="present_key", axis=-2)
    op("Concat", "past_value", heads("v", KV), output="present_value", axis=-2)
    key, value = repeated("present_key"), repeated("present_value")
    if operator:
        products = op("Attention", heads("q", H), key, value, mask)
    else:
        flat = op("Reshape", key, op("Concat", whole(-1), size(key, 2), size(key, 3), axis=0))
        back = op("Concat", op("Shape", key, start=0, end=2), size(key, 3), size(key, 2), axis=0)
        key = op("Reshape", op("Transpose", flat, perm=[0, 2, 1]), back)
        root = np.array(D**-0.25, np.float32)
        scores = op("MatMul", op("Mul", heads("q", H), root), op("Mul", key, root))
        products = op("MatMul", op("Softmax", op("Add", scores, mask), axis=-1), value)
    shown = op("Where", op("Less", count, np.array(1, np.float32)), np.array(0, np.float32), products)
    op("Reshape", op("Transpose", shown, perm=[0, 2, 1, 3]), whole(0, 0, H * D), output="y")
    cache = ["b", KV, "p", D] if numbers else ["b", str(KV), "p", str(D)]
    inputs = {"q": ["b", "s", H * D], "k": ["b", "s", KV * D], "v": ["b", "s", KV * D]}
    inputs |= {"past_key": cache, "past_value": cache}
    outputs = {"y": ["b", "s", H * D]} | {f"present_{name}": ["b", KV, "t", D] for name in ("key", "value")}
    as_floats = [{name: (FLOAT, shape) for name, shape in side.items()} for side in (inputs, outputs)]
    return make_model(nodes, *as_floats, weights, 23 if operator else 20, 10)


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


@pytest.mark.parametrize("mask", [None, FLOAT, BOOL])
def test_onnx_attention_behind_an_appended_cache(mask: int | None) -> None:
    """torch's scaled_dot_product_attention with enable_gqa at opset 23: Concat nodes append to the caches."""
    model = operator("Attention", [*ONNX[:3], "mask" if mask else ""], rank=4, mask=mask or FLOAT)
    graph = model.graph
    cache = ["b", KV, "p", D]
    graph.input.extend(helper.make_tensor_value_info(f"past_{name}", FLOAT, cache) for name in ("key", "value"))
    attention = next(node for node in graph.node if node.op_type == "Attention")
    del attention.output[1:]
    nodes = list(graph.node)
    for place, name in ((1, "key"), (2, "value")):
        appended = [f"past_{name}", attention.input[place]]
        attention.input[place] = f"present_{name}"
        nodes.insert(0, helper.make_node("Concat", appended, [f"present_{name}"], f"append_{name}", axis=2))
    del graph.node[:]
    graph.node.extend(nodes)
    check(model, *(["Where"] if mask == BOOL else []))


OF_THE_MASK = [
    "Add",
    "Add",
    "LessOrEqual",
    "Range",
    "Range",
    "Shape",
    "Shape",
    "Squeeze",
    "Squeeze",
    "Unsqueeze",
    "Where",
]


@pytest.mark.parametrize("operator", [False, True])
@pytest.mark.parametrize("numbers", [False, True])
def test_exports_of_transformers_5(numbers: bool, operator: bool) -> None:
    heads = ["Reshape", "Transpose"] * 3 if operator else []  # the cached operator takes split heads as they are
    check(transformers_5(numbers, operator), *OF_THE_MASK, *heads)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (operator("Attention", ONNX, q_num_heads=H, kv_num_heads=KV, softcap=-2.0), "its scores are capped"),
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
    with pytest.raises(NothingToReplaceError, match=f": {re.escape(reason)}"):
        ortolan.optimize_onnx(model, recipe=recipe(), dry_run=True)


def test_two_formats_in_one_model_need_the_library() -> None:
    """A model with float caches and compressed caches is not portable: one ONNX function cannot serve both."""
    model = llama("standard")
    calibration = [prompt(model, seed=seed) for seed in (5, 6)]
    codes = recipe(select=["*layers.0*"], keys="codes", values="int8")
    both = codes.with_pass("compress_cache", select=["*layers.1*"], keys="float32", values="float32")
    report = ortolan.optimize_onnx(model, recipe=both, calibration=calibration)
    assert report.model is not None and not report.portable and not report.model.functions
    types = {value.name: value.type.tensor_type.elem_type for value in report.model.graph.input}
    assert [types[f"past_key_values.{layer}.key"] for layer in range(2)] == [TensorProto.UINT8, FLOAT]
