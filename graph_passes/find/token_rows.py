"""Finds the part of an encoder that computes each token separately, except for its attention.

This part can run on packed tokens (all sequences without their padding): [1, kept tokens, ...] instead of
[batch, tokens, ...]. The heads may precede the tokens, [batch, heads, tokens, ...], as in rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from ..names import ORTOLAN_DOMAIN
from .constants import DEFAULT_DOMAINS, constant_tensor
from .convolutions import has_windows
from .dimensions import Dimensions
from .lut import BROADCASTING
from .token_views import Layout, behind_view, in_front_of_view, packed_sizes, viewed

ATTENTION = "NoMADAttention"
_TOKEN_AXES = 2  # the first axes are batch and tokens

_ELEMENTWISE = frozenset((*BROADCASTING, "BiasGelu", "Clip", "FastGelu", "QuickGelu"))
_NORMS = frozenset(
    [
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    ]
)
_REDUCTIONS = frozenset(
    ["ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare"]
)
# Operators of linear layers and of tables: input X, perhaps a residual; all other inputs are constant.
_LAYERS = frozenset(
    ["SparseAMXMatMul", "VNNISpMM", "W4A8MatMul", "W8A8MatMul", "MaskedMatMul", "LutPostOp", "MatMulNBits"]
)
# Treated like the element-wise operators: it computes each token separately.
_SUM_NORM = "AddLayerNorm"
_HEAVY = _LAYERS | {"MatMul", ATTENTION}


@dataclass
class TokenRows:
    """A part of one graph that can run on packed tokens: all its non-constant values have a token axis."""

    nodes: dict[ir.Node, None] = field(default_factory=dict)
    layouts: dict[ir.Value, Layout] = field(default_factory=dict)
    # Values that the part reads from the rest of the graph: their rank, and the layout that the part expects.
    entries: dict[ir.Value, tuple[int, Layout]] = field(default_factory=dict)
    # Maps Reshape and Expand nodes of the part to their second input for packed tokens.
    sizes: dict[ir.Node, list[int]] = field(default_factory=dict)

    @property
    def exits(self) -> list[ir.Value]:
        """Return the values that the rest of the graph reads."""
        return [
            value
            for node in self.nodes
            for value in node.outputs
            if value.is_graph_output() or any(use.node not in self.nodes for use in value.uses())
        ]


class NotByTokensError(Exception):
    """The part around the attention cannot run on packed tokens; the message is the reason."""


def find_token_rows(attentions: Sequence[ir.Node]) -> TokenRows:
    """Return the largest part around these NoMADAttention nodes, which must be in one graph.

    Raises:
        NotByTokensError: The part cannot run on packed tokens.
    """
    return _Search(attentions).found


class _Search:
    def __init__(self, attentions: Sequence[ir.Node]) -> None:
        self.found = TokenRows()
        self._attentions = set(attentions)
        graph = attentions[0].graph
        assert isinstance(graph, ir.Graph)
        self._graph, self._dimensions = graph, Dimensions(graph)
        of_first = self._dimensions.shape(attentions[0].inputs[0])
        self._batch = None if of_first is None else of_first[0]
        for node in attentions:
            self._take(node, Layout(3))
        waiting = list(self.found.nodes)
        while waiting:
            for value in waiting.pop().outputs:
                for use in value.uses():
                    before = len(self.found.nodes)
                    if use.node not in self.found.nodes and self._follows(use.node):
                        self._take(use.node, self.found.layouts[value])
                    waiting += list(self.found.nodes)[before:]

    def _follows(self, node: ir.Node) -> bool:
        """Return whether a node that reads the part's values can join the part without changing their layout.

        All inputs of the node with a token axis must be in the part.
        """
        inputs = viewed(node) or self._by_tokens(node)
        if not inputs or node.graph is not self._graph:
            return False
        layouts = [self.found.layouts.get(value) for value in inputs]
        first = layouts[0]
        if first is None or first.rank <= _TOKEN_AXES:
            return False
        if node.op_type in _HEAVY:
            return True
        return len(set(layouts)) == 1 and (not viewed(node) or behind_view(self._dimensions, node, first) == first)

    def _take(self, node: ir.Node, layout: Layout) -> None:
        """Add a node whose output has this layout, and the nodes that its inputs need, to the part."""
        needed = self._needed(node, layout)
        if needed is None:
            raise NotByTokensError(f"{node.op_type} {node.name!r} does not compute tokens separately")
        self.found.nodes[node] = None
        for value in node.outputs:
            self.found.layouts[value] = layout
            # The value may have been an entry until its node joined the part.
            _, read = self.found.entries.pop(value, (0, layout))
            if read != layout:
                raise NotByTokensError(f"{value.name!r} is read with two different token axes")
        for value, one in needed.items():
            self._need(value, one)
        if viewed(node):
            sizes = packed_sizes(self._dimensions, node, next(iter(needed.values())))
            if sizes is not None:
                self.found.sizes[node] = sizes

    def _need(self, value: ir.Value, layout: Layout) -> None:
        """Add the node that computes a value to the part if possible; else add the value as an entry."""
        known = self._dimensions.shape(value)
        given = self.found.entries.get(value, (0, None))[1] or self.found.layouts.get(value)
        if given is not None:
            if given != layout:
                raise NotByTokensError(f"{value.name!r} is read with two different token axes")
            return
        node = value.producer()
        if node is not None and self._grows(node, value, layout):
            self._take(node, layout)
            return
        if known is None or not 0 < len(known) <= layout.rank:
            raise NotByTokensError(f"{value.name!r} has an unsupported or unknown rank, expected at most {layout.rank}")
        self.found.entries[value] = len(known), layout

    def _grows(self, node: ir.Node, value: ir.Value, layout: Layout) -> bool:
        """Return whether the node that computes an input of the part should join the part."""
        needed = self._needed(node, layout)
        if not needed or node.graph is not self._graph or layout.rank <= _TOKEN_AXES:
            return False
        if value.dtype not in (None, ir.DataType.FLOAT):
            return False
        if viewed(node):
            return True
        if any(one.uses() for one in node.outputs if one is not value):
            return False
        if node.op_type == ATTENTION or node.op_type in _LAYERS:
            return True
        if node.op_type == "Gather":
            return all(self._rank(one) == of_it.rank for one, of_it in needed.items())
        known = all(one in self.found.layouts or self._rank(one) is not None for one in needed)
        return known and not self._is_shared(value, layout)

    def _is_shared(self, value: ir.Value, layout: Layout) -> bool:
        """Return whether all sequences share a value, so that computing it before packing is cheaper."""
        shape = self._dimensions.shape(value) or (None,)
        return self._batch != 1 and (len(shape) < layout.rank or shape[0] == 1)

    def _needed(self, node: ir.Node, layout: Layout) -> dict[ir.Value, Layout] | None:
        """Return the inputs with a token axis and their layouts, for an output of this layout.

        None: the node does not compute tokens separately.
        """
        views = viewed(node)
        if views:
            front = in_front_of_view(self._dimensions, node, layout)
            return None if front is None else dict.fromkeys(views, front)
        inputs = self._by_tokens(node)
        if inputs is None:
            return None
        if node.op_type == "Gather":
            table = constant_tensor(node.inputs[0])
            assert table is not None
            return dict.fromkeys(inputs, Layout(layout.rank - len(table.shape) + 1, layout.tokens))
        if node.op_type == ATTENTION:
            return {value: Layout(4, 2) if self._rank(value) == 4 else layout for value in inputs}
        return dict.fromkeys(inputs, layout)

    def _rank(self, value: ir.Value) -> int | None:
        shape = self._dimensions.shape(value)
        return None if shape is None else len(shape)

    def _by_tokens(self, node: ir.Node) -> list[ir.Value] | None:
        """Return the inputs with a token axis; None if the node does not compute tokens separately."""
        ours = node.domain == ORTOLAN_DOMAIN
        if not ours and node.domain not in (*DEFAULT_DOMAINS, "com.microsoft"):
            return None
        inputs = [value for value in node.inputs if value is not None and constant_tensor(value) is None]
        if not inputs:
            return None
        kind = node.op_type
        if kind == ATTENTION:
            mask = node.inputs[1] if len(node.inputs) > 1 else None
            return [value for value in inputs if value is not mask] if node in self._attentions else None
        if kind in _LAYERS and ours and has_windows(node):  # a row reads other tokens
            return None
        if kind in _LAYERS or kind in _NORMS:
            last = node.attributes.get("axis")
            return inputs if last is None or kind not in _NORMS or last.as_int() == -1 else None
        if kind in _ELEMENTWISE or kind == _SUM_NORM:
            return inputs if self._constants_fit(node) else None
        if kind == "MatMul":
            weight = constant_tensor(node.inputs[1])
            return inputs if weight is not None and len(weight.shape) == 2 else None
        if kind == "Gather":
            first = "axis" not in node.attributes or node.attributes["axis"].as_int() == 0
            of_table = constant_tensor(node.inputs[0]) is not None
            return inputs if first and of_table and inputs == [node.inputs[1]] else None
        if kind in _REDUCTIONS or kind == "Softmax":
            return inputs if self._over_last(node) else None
        return None

    def _constants_fit(self, node: ir.Node) -> bool:
        """Return whether constants are the same for all tokens."""
        tensors = [constant_tensor(value) for value in node.inputs]
        return all(all(size == 1 for size in list(one.shape)[:-1]) for one in tensors if one is not None)

    def _over_last(self, node: ir.Node) -> bool:
        if node.op_type == "Softmax":
            return "axis" not in node.attributes or node.attributes["axis"].as_int() == -1
        keeps = "keepdims" not in node.attributes or node.attributes["keepdims"].as_int() == 1
        return keeps and reduced_axes(node) == [-1]


def reduced_axes(node: ir.Node) -> list[int]:
    """Return the axes of a reduction; empty if all axes are reduced, or if they are unknown."""
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    tensor = constant_tensor(node.inputs[1]) if len(node.inputs) > 1 else None
    return [] if tensor is None else [int(axis) for axis in tensor.numpy().reshape(-1)]
