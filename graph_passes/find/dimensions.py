"""Symbolic shapes and element types of a graph's values, and the integers that shapes are computed from.

The rules are in C++ (ops/match/dimensions.h). A dimension is an integer; the name of an input's dimension; (value,
axis) if it is unknown; or a Sum of such dimensions. Equal dimensions have equal sizes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import onnx_ir as ir

from ortolan._native import Dimensions as NativeDimensions

from .graph import native_graph

Dim = Hashable
Shape = tuple[Dim, ...]
# An element of a small tensor: a number, a boolean, a symbolic Dim, or None if unknown.
Element = Dim | float | None


class Dimensions:
    """Dimensions of one graph as it was when this object was made; later changes of the graph are not seen."""

    def __init__(self, graph: ir.Graph) -> None:
        self.native = NativeDimensions(native_graph(graph))

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Return the dimensions of a value, or None if its rank is unknown."""
        return self.native.shape(value)

    def elements(self, value: ir.Value | None) -> tuple[Element, ...] | None:
        """Return the elements of a short vector or scalar, some of them None; None if their count is unknown."""
        return self.native.elements(value)

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """Return a value's element type, if known."""
        number = self.native.dtype(value)
        return ir.DataType(number) if number else None


def head_sizes(inputs: Iterable[ir.Value]) -> dict[ir.Value, int]:
    """Return the head widths of caches whose shape does not state it, if GroupQueryAttention has it."""
    unknown = [
        one for one in inputs if one.shape is not None and len(one.shape) == 4 and not isinstance(one.shape[3], int)
    ]
    if not unknown or unknown[0].graph is None:
        return {}
    native = Dimensions(unknown[0].graph).native
    return {value: size for value in unknown if (size := native.head_size(value)) is not None}
