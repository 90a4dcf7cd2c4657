"""Which part of an encoder works on each token by itself, but for its attention: it can run on packed tokens, those
that are there of padded sequences one behind the other ([1, kept tokens, ...] in the place of [batch, tokens, ...])."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from ..names import ORTOLAN_DOMAIN
from .constants import DEFAULT_DOMAINS, constant_tensor
from .dimensions import Dimensions

ATTENTION = "NoMADAttention"
_TOKEN_AXES = 2  # batch and tokens, the first axes

_OF_NUMBERS = """
    Abs Add And BiasGelu Cast Ceil Clip Cos Div Elu Equal Erf Exp FastGelu Floor Gelu Greater GreaterOrEqual HardSigmoid
    HardSwish Identity IsNaN LeakyRelu Less LessOrEqual Log Max Min Mish Mul Neg Not Or Pow QuickGelu Reciprocal Relu
    Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Sub Tanh ThresholdedRelu Where
"""
_ELEMENTWISE = frozenset(_OF_NUMBERS.split())
_NORMS = frozenset(
    (
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    )
)
_REDUCTIONS = frozenset(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare"))
# Of ours, and of ONNX Runtime: X first, and a residual; all else is constant.
_LAYERS = frozenset(
    ("SparseAMXMatMul", "VNNISpMM", "W4A8MatMul", "W8A8MatMul", "MaskedMatMul", "LutPostOp", "MatMulNBits")
)
_HEAVY = _LAYERS | {"MatMul", ATTENTION}


@dataclass
class TokenRows:
    """A part of one graph. All its values but constants are by tokens, `ranks` axes each."""

    nodes: dict[ir.Node, None] = field(default_factory=dict)
    ranks: dict[ir.Value, int] = field(default_factory=dict)
    # What it reads of the rest: the axes that it has, and those that it needs.
    entries: dict[ir.Value, tuple[int, int]] = field(default_factory=dict)

    @property
    def exits(self) -> list[ir.Value]:
        """What the rest of the graph reads of it."""
        return [
            value
            for node in self.nodes
            for value in node.outputs
            if value.is_graph_output() or any(use.node not in self.nodes for use in value.uses())
        ]


class NotByTokensError(Exception):
    """Why the part that attention needs cannot run on packed tokens."""


def find_token_rows(attentions: Sequence[ir.Node]) -> TokenRows:
    """The largest part around these attentions, all of one graph and each of one sequence to itself. Raises
    NotByTokensError."""
    return _Search(attentions).found


class _Search:
    def __init__(self, attentions: Sequence[ir.Node]) -> None:
        self.found = TokenRows()
        self._attentions = set(attentions)
        graph = attentions[0].graph
        assert isinstance(graph, ir.Graph)
        self._graph, self._dimensions = graph, Dimensions(graph)
        for node in attentions:
            self._take(node, 3)
        waiting = list(self.found.nodes)
        while waiting:
            for value in waiting.pop().outputs:
                for use in value.uses():
                    before = len(self.found.nodes)
                    if use.node not in self.found.nodes and self._follows(use.node):
                        self._take(use.node, self.found.ranks[value])
                    waiting += list(self.found.nodes)[before:]

    def _follows(self, node: ir.Node) -> bool:
        """Whether a node behind the part belongs to it: it reads nothing by tokens that is not in it."""
        inputs = self._by_tokens(node)
        if not inputs or node.graph is not self._graph:
            return False
        ranks = {self.found.ranks.get(value, 0) for value in inputs}
        if node.op_type in _HEAVY:
            return self.found.ranks.get(inputs[0], 0) > _TOKEN_AXES
        return len(ranks) == 1 and min(ranks) > _TOKEN_AXES

    def _take(self, node: ir.Node, rank: int) -> None:
        """Makes a node, whose output has so many axes, part of it, and what it needs."""
        inputs = self._by_tokens(node)
        if inputs is None:
            raise NotByTokensError(f"{node.op_type} {node.name!r} is not by tokens")
        self.found.nodes[node] = None
        for value in node.outputs:
            self.found.ranks[value] = rank
        for value in inputs:
            self._need(value, self._ids_rank(node, rank) if node.op_type == "Gather" else rank)

    def _need(self, value: ir.Value, rank: int) -> None:
        """Makes the value one of the part, of as many axes, or one that it reads of the rest."""
        if value in self.found.ranks:
            return
        node = value.producer()
        if node is not None and self._grows(node, value, rank):
            self._take(node, rank)
            return
        known = self._rank(value)
        if known is None or not 0 < known <= rank:
            raise NotByTokensError(f"{value.name!r} has no known number of axes, expected {rank}")
        self.found.entries[value] = known, rank

    def _grows(self, node: ir.Node, value: ir.Value, rank: int) -> bool:
        """Whether a node in front of the part, which makes this value, belongs to it."""
        inputs = self._by_tokens(node)
        if not inputs or node.graph is not self._graph or rank <= _TOKEN_AXES:
            return False
        if value.dtype not in (None, ir.DataType.FLOAT) or any(one.uses() for one in node.outputs if one is not value):
            return False
        if node.op_type == ATTENTION or node.op_type in _LAYERS:
            return True
        if node.op_type == "Gather":
            return self._rank(inputs[0]) == self._ids_rank(node, rank)
        return all(one in self.found.ranks or self._rank(one) is not None for one in inputs)

    def _ids_rank(self, node: ir.Node, rank: int) -> int:
        """The axes of ids of which a Gather makes rows of so many."""
        table = constant_tensor(node.inputs[0])
        assert table is not None
        return rank - len(table.shape) + 1

    def _rank(self, value: ir.Value) -> int | None:
        shape = self._dimensions.shape(value)
        return None if shape is None else len(shape)

    def _by_tokens(self, node: ir.Node) -> list[ir.Value] | None:
        """Its inputs that are by tokens; None for a node that is not."""
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
        if kind in _LAYERS or kind in _NORMS:
            last = node.attributes.get("axis")
            return inputs if last is None or kind not in _NORMS or last.as_int() == -1 else None
        if kind in _ELEMENTWISE:
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
        """Whether constants are the same for all tokens."""
        tensors = [constant_tensor(value) for value in node.inputs]
        return all(all(size == 1 for size in list(one.shape)[:-1]) for one in tensors if one is not None)

    def _over_last(self, node: ir.Node) -> bool:
        if node.op_type == "Softmax":
            return "axis" not in node.attributes or node.attributes["axis"].as_int() == -1
        keeps = "keepdims" not in node.attributes or node.attributes["keepdims"].as_int() == 1
        if "axes" in node.attributes:
            axes = list(node.attributes["axes"].as_ints())
        else:
            tensor = constant_tensor(node.inputs[1]) if len(node.inputs) > 1 else None
            axes = [] if tensor is None else tensor.numpy().reshape(-1).tolist()
        return keeps and axes == [-1]
