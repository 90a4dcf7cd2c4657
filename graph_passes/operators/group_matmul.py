"""What W4A8MatMul and W8A8MatMul share: weights in groups of 32, 64 or 128 inputs, activations rounded to int8 group by
group (ops/matmul/group_weight.h)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortolan import _native

from ..find.epilogue import Activation
from ..find.stored_int4 import StoredInt4
from ..weights.quantizers.grid import Quantization
from .function_body import PANEL_COLUMNS
from .group_function import TILE_INPUTS
from .replacement import LayerWeight, PackedTensor, Replacement, Stored

GROUP_SIZES = (32, 64, 128)

# Of the packed tensors; the kernels refuse any other.
_FORMAT_VERSION = 1
_FLOAT_ROUNDING = 2**-12  # of float32 arithmetic, as a share of |x| |W|: any order of sums
_SMALLEST_NORMAL = 2.0**-126


class GroupMatMul(Replacement):
    """Y = activation(X W + bias) + residual, or the LayerNormalization of that; X is rounded to int8 group by group."""

    bits: ClassVar[int]
    largest: ClassVar[int]  # magnitude of a weight less its zero point, in steps of the scale

    def packed_bytes(self, k: int, n: int, stored: Stored, quantization: Quantization | None) -> int:
        if quantization is None or quantization.group_size is None:
            return 4 * k * n  # why_not refuses it
        panels = -(-n // PANEL_COLUMNS)
        weights = panels * PANEL_COLUMNS * -(-k // TILE_INPUTS) * TILE_INPUTS * self.bits // 8
        groups = panels * PANEL_COLUMNS * -(-k // quantization.group_size)
        # The scales of our quantizers are float16 numbers as a rule, float32 ones that a model stores are not.
        scale = 4 if isinstance(quantization, StoredInt4) and quantization.scales.dtype == ir.DataType.FLOAT else 2
        offset = scale if quantization.minimum else 0 if quantization.symmetric else 1
        return weights + groups * (scale + offset)

    def attributes(
        self, k: int, n: int, quantization: Quantization | None, activation: Activation, gated_columns: int
    ) -> list[ir.Attr]:
        assert quantization is not None and quantization.group_size is not None
        numbers = {
            "k": k,
            "n": n,
            "format_version": _FORMAT_VERSION,
            "group_size": quantization.group_size,
            "activation": int(activation),
            "gated_columns": gated_columns,
        }
        return [ir.AttrInt64(name, number) for name, number in numbers.items()]

    def rounding_bound(self, x: np.ndarray, weight: LayerWeight) -> np.ndarray:
        assert weight.quantized is not None and weight.quantized.group_size is not None
        group = weight.quantized.group_size
        magnitude = self.magnitude(weight)
        product: np.ndarray = np.abs(x) @ magnitude
        steps = np.zeros_like(product)
        for start in range(0, len(magnitude), group):  # half a step of each x (ops/matmul/group_weight.h)
            half_steps = np.abs(x[:, start : start + group]).max(axis=1, keepdims=True) / 254
            steps += half_steps * magnitude[start : start + group].sum(axis=0)
        # The scale of x times that of W, which multiplies a sum of q (w - zero point).
        lost = _SMALLEST_NORMAL * 127 * self.largest * len(magnitude)
        bound: np.ndarray = steps * (1 + _FLOAT_ROUNDING) + _FLOAT_ROUNDING * product + lost
        return bound

    def magnitude(self, weight: LayerWeight) -> np.ndarray:
        """Of what is added up for each weight, [k, n]."""
        magnitude: np.ndarray = np.abs(weight.matrix)
        return magnitude

    def typical_rounding(self, quantization: Quantization | None) -> float:
        # A step of max|x| / 127 over sqrt 12, for groups whose largest number is three times their root mean square.
        return 0.007


def packed_floats(*rows: np.ndarray) -> list[PackedTensor]:
    """Scales, and minimums: float16 where that loses nothing of any of them, else float32."""
    with np.errstate(over="ignore"):
        halves = [array.astype(np.float16) for array in rows]
    if any((half != array).any() for half, array in zip(halves, rows, strict=True)):
        wide = [np.ascontiguousarray(array, np.float32) for array in rows]
        return [PackedTensor(_native.pack_group_rows(array), ir.DataType.FLOAT) for array in wide]
    packed = [_native.pack_group_rows(np.ascontiguousarray(half).view(np.uint16)) for half in halves]
    return [PackedTensor(array.view(np.float16), ir.DataType.FLOAT16) for array in packed]
