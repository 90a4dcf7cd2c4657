"""Finds scaled dot-product attention without a cache, or the reason why a similar subgraph cannot be replaced.

The rules are in C++ (ops/match/attention.h).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import onnx_ir as ir

from .dimensions import Dimensions
from .fused_forms import why_left

# Axes of batch, heads, rows and head width in a 4-D value; of batch, rows and the width of all heads in a 3-D value.
LAYOUTS: dict[str, tuple[int, ...]] = {
    "by_rows": (0, 1, 2),
    "columns": (0, 2, 1),
    "rows_first": (1, 0, 2),
    "by_heads": (0, 1, 2, 3),
    "apart": (0, 2, 1, 3),
    "by_columns": (0, 1, 3, 2),
}
Found = TypeVar("Found")


@dataclass(frozen=True)
class Mask:
    """A mask of the scores: floats that are added, or booleans that add `fill` to masked keys and 0 to other keys."""

    value: ir.Value
    fill: float | None = None  # None: a float mask
    hides: bool = True  # a boolean mask hides keys where it is true; if this is False, where it is false
    scale: float = 1.0  # factor of a float mask
    heads: int = 0  # number of heads if the mask is [batch x heads, queries, keys]
    windows: bool = False  # [1, windows, 1 or heads, queries, keys], for scores [batch x windows, heads, …]


@dataclass(eq=False)
class Attention:
    """Attention in the graph, with the inputs and output of the operator that can replace it."""

    node: ir.Node  # the Softmax, MultiHeadAttention or Attention
    query: ir.Value
    key: ir.Value
    value: ir.Value
    heads: int
    kv_heads: int
    scale: float  # 0: 1 / sqrt(head width)
    softcap: float  # scores become softcap tanh(scores / softcap); 0: they stay
    masks: tuple[Mask, ...]  # the sum of all masks is added to the scores
    causal: bool
    window: int  # causal attention: number of latest keys that a query sees, its own included; 0: all
    sinks: tuple[float, ...]  # a further score of each head, without a value (gpt-oss); empty: none
    zero_hidden_rows: bool  # fully masked rows give zeros instead of NaN
    nodes: set[ir.Node]  # nodes that the operator replaces
    products: list[ir.Node] = field(default_factory=list)  # the two MatMuls of the attention
    output: ir.Value | None = None  # [batch, rows, width], or the layout in `layouts`
    head_dim: int = 0
    # Maps query, key, value or output to its entry of LAYOUTS if its layout is not [batch, rows, width].
    layouts: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the Softmax or attention operator and of its MatMuls."""
        return [node.name for node in (self.node, *self.products) if node.name]


@dataclass(frozen=True, eq=False)
class NotAttention:
    """A node of a subgraph that resembles attention, with the reason why it is not replaced."""

    node: ir.Node
    reason: str
    cached: bool = True  # False: find_cached_attentions found no KV cache

    @property
    def names(self) -> list[str]:
        """Name of the node."""
        return [self.node.name or f"{self.node.op_type} that makes {self.node.outputs[0].name!r}"]


def find_attentions(graph: ir.Graph | Dimensions) -> list[Attention | NotAttention]:
    """Return attention and similar subgraphs of one graph, in graph order; If and Loop bodies are not searched."""
    return found_in(graph, False, Attention)


def found_in(graph: ir.Graph | Dimensions, cached: bool, kind: Callable[..., Found]) -> list[Found | NotAttention]:
    """Return the matches with or without a cache."""
    found = list[Found | NotAttention]()
    dims = graph if isinstance(graph, Dimensions) else Dimensions(graph)
    for one in dims.native.attentions(cached):
        if isinstance(one, dict):
            one["masks"] = tuple(Mask(*mask) for mask in one["masks"])
            found.append(kind(**one))
        else:
            node, reason, has_cache = one
            # Unfusing knows better why a MultiHeadAttention keeps these inputs.
            other = why_left(node) if reason.startswith("it has an input") else None
            found.append(NotAttention(node, other or reason, has_cache))
    return found
