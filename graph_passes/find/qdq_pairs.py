"""QuantizeLinear/DequantizeLinear pairs that round activations to 8-bit codes of a fixed range: ops/match/ranges.h."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ortolan import _native

from .graph import native_graph


@dataclass(frozen=True, eq=False)
class QdqPair:
    """A QuantizeLinear and the DequantizeLinear nodes after it. If removed, their consumers read the float input."""

    node: ir.Node  # QuantizeLinear
    reason: str | None  # why the pair cannot be removed; then the lists are empty
    moves: list[ir.Node]  # move elements of the codes
    ends: list[ir.Node]  # DequantizeLinear
    bounds: tuple[float, float] | None  # bounds to clip the floats to, because the range may replace a Relu


def find_qdq_pairs(graph: ir.Graph) -> Iterator[QdqPair]:
    """Yield the pairs of a graph, without those of weights."""
    for found in _native.find_qdq_pairs(native_graph(graph)):
        yield QdqPair(*found)
