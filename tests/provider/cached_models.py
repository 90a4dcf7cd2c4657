"""Models of one GroupQueryAttention node with float caches, and inputs for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..ops.cached_attention import Setup

Arrays = dict[str, np.ndarray]
FLOAT, INT32 = TensorProto.FLOAT, TensorProto.INT32
NAME = "attention"


@dataclass(frozen=True)
class Form:
    """The attributes of a node. rotary: None, half or interleaved. scale, rotary_dim 0: the default."""

    packed: bool = False
    rotary: str | None = None
    scale: float = 0.0
    softcap: float = 0.0
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    positions: int = 128
    window: int = 0
    sinks: str | None = None  # head_sink: the input; smooth: the attribute smooth_softmax
    rotary_dim: int = 0

    @property
    def setup(self) -> Setup:
        return Setup(
            self.heads, self.kv_heads, self.head_dim, packed=self.packed, rotary=self.rotary, scale=self.scale,
            positions=self.positions, softcap=self.softcap, local_window=self.window, rotary_dim=self.rotary_dim,
        )  # fmt: skip

    @property
    def sink_scores(self) -> np.ndarray | None:
        if self.sinks is None:
            return None
        return np.linspace(-1, 3, self.heads, dtype=np.float32) * (self.sinks == "head_sink")

    def node(self, **more: Any) -> onnx.NodeProto:
        """Return the node; `more` adds or replaces attributes."""
        attributes = {
            "num_heads": self.heads,
            "kv_num_heads": self.kv_heads,
            "scale": self.scale,
            "softcap": self.softcap,
        }
        if self.rotary:
            attributes |= {"do_rotary": 1, "rotary_interleaved": int(self.rotary == "interleaved")}
        if self.window:
            attributes["local_window_size"] = self.window
        if self.sinks == "smooth":
            attributes["smooth_softmax"] = 1
        own = ["", ""] if self.packed else ["key", "value"]
        tables = ["cos", "sin"] if self.rotary else []
        inputs = ["query", *own, "past_key", "past_value", "lengths", "total", *tables]
        if self.sinks == "head_sink":
            inputs += [*[""] * (11 - len(inputs)), "head_sink"]
        outputs = ["y", "present_key", "present_value"]
        return helper.make_node(
            "GroupQueryAttention", inputs, outputs, NAME, domain="com.microsoft", **attributes | more
        )

    def model(self, node: onnx.NodeProto | None = None, **others: Any) -> onnx.ModelProto:
        """Return the model. `others` maps input names to other types and shapes."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        cache = ["batch", self.kv_heads, "past", self.head_dim]
        inputs: dict[str, Any] = {
            "query": (FLOAT, ["batch", "rows", wide + 2 * narrow if self.packed else wide]),
            "key": (FLOAT, ["batch", "rows", narrow]),
            "value": (FLOAT, ["batch", "rows", narrow]),
            "past_key": (FLOAT, cache),
            "past_value": (FLOAT, cache),
            "lengths": (INT32, ["batch"]),
            "total": (INT32, []),
        } | others
        node = node or self.node()
        value = helper.make_tensor_value_info
        tables = dict(zip(("cos", "sin"), self.setup.cos_sin(), strict=True))
        if (sinks := self.sink_scores) is not None:
            tables["head_sink"] = sinks
        graph = helper.make_graph(
            [node],
            "attention with a cache",
            [value(name, *inputs[name]) for name in inputs if name in node.input],
            [value(name, FLOAT, None) for name in node.output],
            [numpy_helper.from_array(tables[name], name) for name in tables if name in node.input],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    def feeds(self, batch: int, rows: int, past: int, lengths: Any = None, room: int = 0, seed: int = 0) -> Arrays:
        """Return the inputs of a call.

        Args:
            rows: new tokens of each sequence.
            past: length of the past caches.
            lengths: tokens of each sequence after the call.
            room: capacity of the cache; 0: the length of the past.
        """
        rng = np.random.default_rng(seed)
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {"query": wide + 2 * narrow} if self.packed else {"query": wide, "key": narrow, "value": narrow}
        tokens = np.full(batch, past + rows) if lengths is None else np.asarray(lengths)
        cache = (batch, self.kv_heads, room or past, self.head_dim)
        return {
            **{name: rng.standard_normal((batch, rows, width), np.float32) for name, width in widths.items()},
            "past_key": rng.standard_normal(cache, np.float32),
            "past_value": rng.standard_normal(cache, np.float32),
            "lengths": (tokens - 1).astype(np.int32),
            "total": np.array(tokens.max(), np.int32),
        }
