"""The operations after a linear layer that its operator can compute: Y = activation(X W + b) factor + residual.

A LayerNormalization of Y may follow. The provider shares the rules: ops/match/epilogue.h, halves.h and norm.h.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import onnx_ir as ir

from ortolan import _native

from .constants import constant_tensor, float_array
from .graph import native_graph
from .linear import Linear


class Activation(IntEnum):
    """Values of the attribute `activation` of the linear layers' operators."""

    NONE = 0
    RELU = 1  # max(x, 0)
    GELU = 2  # x (1 + erf(x / sqrt 2)) / 2
    GELU_TANH = 3  # x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
    SILU = 4  # x sigmoid(x)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """LayerNormalization over the last axis: (x - mean) / sqrt(variance + epsilon) weight + bias, both constant."""

    weight: ir.Value  # float32 [n]
    bias: ir.Value | None  # float32 [n]; None: zeros
    epsilon: float
    nodes: Sequence[ir.Node]  # in graph order; the last one computes the result

    def arrays(self) -> dict[str, np.ndarray]:
        """Return weight and bias under the names of the operators' inputs."""
        weight, bias = (constant_tensor(value) for value in (self.weight, self.bias))
        assert weight is not None
        norm_weight = np.array(float_array(weight))
        return {
            "norm_weight": norm_weight,
            "norm_bias": np.zeros_like(norm_weight) if bias is None else np.array(float_array(bias)),
        }

    @property
    def output(self) -> ir.Value:
        """The output of the last node."""
        return self.nodes[-1].outputs[0]


@dataclass(frozen=True, eq=False)
class Epilogue:
    """The operations activation(value) factor + residual, and LayerNormalization of the result if `norm` is set.

    The residual broadcasts by the rules of ONNX Add. An operator that replaces layer and epilogue must be placed at the
    last of `nodes`, because the residual may be computed only shortly before that node.
    """

    activation: Activation
    residual: ir.Value | None
    nodes: tuple[ir.Node, ...]  # nodes that the operator replaces besides the layer, in graph order
    output: ir.Value  # output of the last node; the layer's output if there are no nodes
    factor: ir.Value | None = None  # has the shape of the layer's output
    norm: LayerNorm | None = None


def describe_epilogue(
    activation: Activation, residual: ir.Value | None, gated: bool = False, norm: bool = False
) -> list[str]:
    """Return the operations in words: ["silu", "gated", "residual", "layer norm"]."""
    parts = {
        activation.name.lower(): activation != Activation.NONE,
        "gated": gated,
        "residual": residual is not None,
        "layer norm": norm,
    }
    return [part for part, there in parts.items() if there]


class Epilogues:
    """Finds epilogues of float32 layers. Graphs may only be changed by replacing layers with their epilogues."""

    def __init__(self) -> None:
        # As they were before layers were replaced.
        self._graphs: dict[ir.Graph | ir.Function, _native.Graph] = {}

    def of(self, linear: Linear, *factors: Linear) -> Epilogue:
        """Return the longest epilogue of a layer; without operations if the layer is not float32."""
        if linear.dtype != ir.DataType.FLOAT:
            return Epilogue(Activation.NONE, None, (), linear.output)
        return self.find(linear.output, linear.n, [factor.output for factor in factors])

    def halves(self, linear: Linear) -> tuple[ir.Value, ir.Value, tuple[ir.Node, ...]] | None:
        """Return the halves of a layer's columns and the nodes that split them; None if it has other consumers."""
        graph, native = self._graph_of(linear.output)
        found = _native.find_halves(native, linear.output, linear.n)
        if found is None or any(node.graph is not graph for node in found[2]):
            return None
        first, second, nodes = found
        return first, second, tuple(nodes)

    def find(self, output: ir.Value, columns: int, factors: Sequence[ir.Value] = ()) -> Epilogue:
        """Return the epilogue of a value [..., columns], such as half of a layer's output, without changing the graph.

        Each part is optional. No intermediate value has another consumer or is a graph output. An Add(y1, y2) of two
        layers becomes the epilogue of the layer that is replaced first, because it is then no longer in the graph.
        factors: values of the same shape as `output`.
        """
        graph, native = self._graph_of(output)
        activation, factor, residual, norm, nodes = _native.find_epilogue(
            native, output, list(factors), columns, lambda node: node.graph is graph
        )
        return Epilogue(
            Activation(activation),
            None if residual is None else residual[0].inputs[residual[1]],
            tuple(nodes),
            nodes[-1].outputs[0] if nodes else output,
            factor,
            None if norm is None else LayerNorm(*norm),
        )

    def _graph_of(self, output: ir.Value) -> tuple[ir.Graph | ir.Function, _native.Graph]:
        """Return the graph that computes a value, and its native form."""
        maker = output.producer()
        assert maker is not None and maker.graph is not None
        graph = maker.graph
        if graph not in self._graphs:
            self._graphs[graph] = native_graph(graph)
        return graph, self._graphs[graph]


def find_norms(graph: ir.Graph) -> Iterator[tuple[LayerNorm, list[ir.Value], list[ir.Node]]]:
    """Yield each float32 LayerNorm of a graph, the operands that add up to its input, and the Add nodes, last first."""
    for norm, operands, sums in _native.find_norms(native_graph(graph)):
        yield LayerNorm(*norm), operands, sums
