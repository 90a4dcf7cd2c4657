"""Two layers with an activation between them in one operator: the hidden layer of an MLP, in whole numbers.

What the first layer puts out is rounded to u8, a table of 256 bytes makes the activation of it, and the second layer
multiplies that (ops/vnni_spmm/vnni_spmm.h). This takes fixed ranges, so pass `ranges` must have recorded both values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..linear import Linear
from ..lut import Chain, NoTableError, evaluate, find_chain, find_cone, graph_order, make_quantized_table
from ..quantizers.fixed_range import FixedRange, choose_range
from .replacement import LayerWeight

_GRID = 1 << 16  # numbers that the chain is computed for, to choose a range by what becomes of them


@dataclass(frozen=True, eq=False)
class Mlp:
    """layer(chain(hidden(x)))"""

    hidden: Linear
    chain: Chain
    layer: Linear


@dataclass(frozen=True, eq=False)
class ByteTable:
    """What becomes of the hidden layer's output: numbers of range x are looked up, and are then of range y."""

    table: np.ndarray  # u8 [256]
    x: FixedRange
    y: FixedRange


@dataclass(frozen=True, eq=False)
class HiddenLayer:
    """What an operator needs to compute the hidden layer as well."""

    mlp: Mlp
    weight: LayerWeight  # with a range
    table: ByteTable


def find_mlps(linears: Sequence[Linear], graph: ir.Graph) -> dict[Linear, Mlp]:
    """The MLPs of the model's main graph, float32, by their hidden layer: nothing else sees what is computed inside."""
    order = graph_order(graph)
    by_input = {linear.x: linear for linear in linears}
    found: dict[Linear, Mlp] = {}
    for hidden in linears:
        if hidden.node.graph is not graph or hidden.dtype != ir.DataType.FLOAT:
            continue
        chain = find_chain(find_cone(hidden.output, graph, order))
        layer = None if chain is None else by_input.get(chain.output)
        if (
            chain is not None
            and layer is not None
            and layer.node.graph is graph
            and len(chain.output.uses()) == 1
            and not chain.output.is_graph_output()
        ):
            found[hidden] = Mlp(hidden, chain, layer)
    return found


def make_byte_table(mlp: Mlp, activations: Mapping[str, np.ndarray], opsets: Mapping[str, int]) -> ByteTable | None:
    """The table of the chain for values like these, or None if ONNX Runtime cannot run it or makes no numbers of it.

    activations: rows of values, by name. opsets: the model's.
    """
    outputs = activations[mlp.hidden.output.name or ""]
    grid = np.linspace(min(outputs.min(), 0), max(outputs.max(), 0), _GRID, dtype=np.float32)
    try:
        results = evaluate(mlp.chain, grid, opsets)
        if not np.isfinite(results).all():
            return None
        x = choose_range(outputs, lambda numbers: np.interp(numbers, grid, results))
        y = choose_range(activations[mlp.layer.x.name or ""])
        table = make_quantized_table(mlp.chain, float(x.scale), x.zero_point, float(y.scale), y.zero_point, opsets)
    except NoTableError:
        return None
    return ByteTable(table, x, y)
