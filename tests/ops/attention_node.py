"""Models of one NoMADAttention node without a cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from ortolan.graph_passes.operators.nomad_attention_function import (
    PACKED_INPUTS,
    PACKED_OP_TYPE,
    Uses,
    nomad_attention_function,
)


def node_model(
    num_heads: int,
    kv_num_heads: int = 0,
    packed: bool = False,
    mask: bool | np.ndarray = True,
    opset: int = 17,
    uses: Uses | None = None,
    shapes: dict[str, Sequence[int | str]] | None = None,
    mask_rank: int = 4,
    by_heads: Collection[str] = (),
    kept: bool = False,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one NoMADAttention node with its function.

    Args:
        mask: True adds a mask input; an array is stored as a constant.
        by_heads: names of inputs with shape [B, heads, S, D].
        kept: make a PackedNoMADAttention node instead; inputs that are not used get placeholders.
    """
    names = ["query", "mask" if mask is not False else "", *([] if packed else ["key", "value"])]
    initializers = [numpy_helper.from_array(mask, "mask")] if isinstance(mask, np.ndarray) else []
    if kept:
        constants = [name for name in PACKED_INPUTS[:-1] if name not in names]
        initializers += [numpy_helper.from_array(np.zeros(1, np.float32), name) for name in constants]
        names = list(PACKED_INPUTS)
    while not names[-1]:
        names.pop()
    shapes = {
        name: [f"{name}{axis}" for axis in range(mask_rank if name == "mask" else 4 if name in by_heads else 3)]
        for name in names
    } | (shapes or {})
    given = [name for name in names if name and name not in {one.name for one in initializers}]
    if kept:
        shapes["kept"] = ["batch", "tokens"]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64 if name == "kept" else TensorProto.FLOAT, shapes[name])
        for name in given
    ]
    attributes = {"scale": 0.0, "causal": 0, "zero_hidden_rows": 0, "precision": 32} | attributes
    flags = [attributes[name] == 1 for name in ("causal", "zero_hidden_rows")]
    layouts = {"by_heads": frozenset(by_heads), "by_rows": frozenset(names) - frozenset(by_heads)}
    uses = uses or Uses(
        packed,
        mask is not False,
        kv_num_heads not in (0, num_heads),
        *flags,
        kept,
        **layouts,
        softcap="softcap" in attributes,
        reproducible="reproducible" in attributes,
        sinks="head_sink" in attributes,
        window="local_window_size" in attributes,
    )
    node = helper.make_node(
        PACKED_OP_TYPE if kept else "NoMADAttention",
        names,
        ["y"],
        "attention",
        domain="ai.ortolan",
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        **attributes,
    )
    graph = helper.make_graph(
        [node],
        "single",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["y0", "y1", "y2"])],
        initializers,
    )
    return helper.make_model(
        graph,
        functions=[ir.to_proto(nomad_attention_function(opset, uses))],
        ir_version=8,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("ai.ortolan", 1)],
    )
