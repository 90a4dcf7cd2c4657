"""Finds attention with a KV cache in decoders, or the reason why a similar subgraph cannot be replaced.

The rules are in C++ (ops/match/attention.h).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from .attention import Mask, NotAttention, found_in
from .dimensions import Dimensions


@dataclass(eq=False)
class CachedAttention:
    """Attention with a KV cache.

    query, key and value are each [batch, rows, heads x width] or [batch, heads, rows, width]. key and value are None if
    `query` contains all three. The past caches are graph inputs, the present caches graph outputs.
    """

    node: ir.Node  # the Softmax or the attention operator
    query: ir.Value
    key: ir.Value | None
    value: ir.Value | None
    past_key: ir.Value
    past_value: ir.Value
    present_key: ir.Value
    present_value: ir.Value
    heads: int
    kv_heads: int
    head_dim: int
    nodes: set[ir.Node]  # nodes that the operator replaces
    output: ir.Value  # [batch, rows, heads x width], or [batch, rows, heads, width]
    scale: float = 0.0  # 0: 1 / sqrt(head width)
    softcap: float = 0.0  # as in Attention
    masks: tuple[Mask, ...] = ()  # the sum of all masks is added to the scores
    causal: bool = False
    window: int = 0  # as in Attention
    sinks: tuple[float, ...] = ()  # as in Attention
    zero_hidden_rows: bool = False
    lengths: ir.Value | None = None  # int32, tokens of each sequence minus 1; None: past + rows for all
    cos: ir.Value | None = None  # table of the rotary embedding, [positions, head width / 2], or of fewer columns
    sin: ir.Value | None = None
    interleaved: bool = False
    products: list[ir.Node] = field(default_factory=list)
    layouts: dict[str, str] = field(default_factory=dict)  # as in Attention

    @property
    def names(self) -> list[str]:
        """Names of the Softmax or attention operator and of its MatMuls."""
        return [node.name for node in (self.node, *self.products) if node.name]


def find_cached_attentions(graph: ir.Graph | Dimensions) -> list[CachedAttention | NotAttention]:
    """Return cached attention and similar subgraphs of one graph, in graph order, without If and Loop bodies."""
    return found_in(graph, True, CachedAttention)
