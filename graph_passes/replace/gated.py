"""Two layers of one input in one operator: a gated linear unit, activation(x Wg + bg) (x Wu + bu).

The operator's weight is [Wg Wu], each with columns of zeros up to whole panels (ops/support/linear_op.h).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..epilogue import find_epilogue
from ..linear import Linear
from ..quantized_weight import QuantizedWeight
from ..quantizers.grid import Quantization
from ..spill import TensorSpill
from .function_body import PANEL_COLUMNS
from .replacement import LayerWeight


def find_gated(linears: Sequence[Linear]) -> dict[Linear, Linear]:
    """Pairs of layers whose outputs are multiplied, one of them perhaps after an activation: that one -> the other."""
    by_input: dict[tuple[ir.Value, int], list[Linear]] = defaultdict(list)
    for linear in linears:
        if linear.dtype == ir.DataType.FLOAT:
            by_input[linear.x, linear.n].append(linear)
    pairs: dict[Linear, Linear] = {}
    for siblings in by_input.values():
        by_output = {linear.output: linear for linear in siblings}
        for gate in siblings:
            others = [value for value in by_output if value is not gate.output]
            factor = find_epilogue(gate.output, others).factor
            if factor is not None and gate not in pairs.values() and by_output[factor] not in pairs:
                pairs[gate] = by_output[factor]
    return pairs


def padded_columns(n: int) -> int:
    return -(-n // PANEL_COLUMNS) * PANEL_COLUMNS


def can_join(gate: Quantization | None, up: Quantization | None) -> bool:
    """Whether one operator can hold two weights that are quantized like this."""
    return _kind(gate) == _kind(up)


def _kind(quantization: Quantization | None) -> tuple[int, int | None, bool] | None:
    return None if quantization is None else (quantization.bits, quantization.group_size, quantization.symmetric)


def join_weights(gate: LayerWeight, up: LayerWeight, spill: TensorSpill, name: str) -> LayerWeight:
    """The weight of both, [k, 2 padded_columns(n)]; see can_join."""
    matrix = join_columns(gate.matrix, up.matrix)
    if gate.quantized is None or up.quantized is None:
        return LayerWeight(matrix, x_range=gate.x_range)
    return LayerWeight(matrix, _join_quantized(gate.quantized, up.quantized, spill, name), gate.x_range)


def _join_quantized(gate: QuantizedWeight, up: QuantizedWeight, spill: TensorSpill, name: str) -> QuantizedWeight:
    def joined(part: str) -> ir.ExternalTensor | None:
        halves = getattr(gate, part), getattr(up, part)
        if None in halves:
            return None
        array = join_columns(*(half.numpy() for half in halves))
        return spill.add(f"{name}.{part}", array, ir.DataType.from_numpy(array.dtype))

    q, scales = joined("q"), joined("scales")
    assert q is not None and scales is not None
    whole = dataclasses.replace(gate, q=q, scales=scales, zero_points=joined("zero_points"))
    gate.release()
    up.release()
    return whole


def join_columns(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """[..., n] and [..., n] side by side, each padded with zeros to whole panels."""
    n = gate.shape[-1]
    padded = padded_columns(n)
    joined = np.zeros((*gate.shape[:-1], 2 * padded), np.result_type(gate, up))
    joined[..., :n] = gate
    joined[..., padded : padded + n] = up
    return joined


def split_columns(joined: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The n columns of gate and up in what join_columns made, or in a product with it."""
    padded = padded_columns(n)
    return joined[..., :n], joined[..., padded : padded + n]
