"""The common base class of W4A8MatMul and W8A8MatMul: weights in groups of 32 to 256 inputs.

Activations are rounded to int8 group by group (ops/matmul/group_weight.h).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortolan import _native

from ..find.epilogue import Activation
from ..find.stored_int4 import StoredInt4
from ..weights.quantizers.grid import LARGEST_VALUE, Quantization
from .function_body import PANEL_COLUMNS
from .group_function import TILE_INPUTS
from .replacement import LayerWeight, PackedTensor, Replacement, Stored

# Version of the packed format, without and with subgroups, and of K-quants; the kernels refuse other versions.
_FORMAT_VERSION, _SUBGROUPS_VERSION, _K_QUANTS_VERSION = 1, 2, 3
_LARGEST_K_QUANT = 128 * 32.0  # largest |s (q - zero point)|
_FLOAT_ROUNDING = 2**-12  # bound on the error of float32 arithmetic, for any summation order, relative to |x| |W|
_SMALLEST_NORMAL = 2.0**-126


class GroupMatMul(Replacement):
    """Y = activation(X W + bias) + residual, optionally layer-normalized; X is rounded to int8 group by group."""

    takes_windows = True
    largest: ClassVar[int]  # largest |q - zero point| of a weight without subgroups

    def packed_bytes(self, k: int, n: int, stored: Stored, quantization: Quantization | None) -> int:
        """See `Replacement.packed_bytes`."""
        if quantization is None or quantization.group_size is None:
            return 4 * k * n  # not used: why_not refuses such a layer
        panels = -(-n // PANEL_COLUMNS)
        padded_k = -(-k // TILE_INPUTS) * TILE_INPUTS
        weights = panels * PANEL_COLUMNS * padded_k * quantization.bits // 8
        groups = panels * PANEL_COLUMNS * -(-k // quantization.group_size)
        # Bytes per scale: Ortolan's quantizers usually make scales that are exact in float16; float32 scales that the
        # model stores usually are not.
        scale = 4 if isinstance(quantization, StoredInt4) and quantization.scales.dtype == ir.DataType.FLOAT else 2
        if quantization.subgroup_size is not None:
            # K-quants whose group is one subgroup have no integer scales; others may have minimums, as scales.
            per_subgroup = 0 if quantization.subgroup_size == quantization.group_size else 1
            sizes = groups * scale + panels * PANEL_COLUMNS * padded_k // quantization.subgroup_size * per_subgroup
            return weights + sizes * (2 if quantization.minimum else 1)
        offset = scale if quantization.minimum else 0 if quantization.symmetric else 1
        return weights + groups * (scale + offset)

    def attributes(
        self, k: int, n: int, quantization: Quantization | None, activation: Activation, gated_columns: int
    ) -> list[ir.Attr]:
        """See `Replacement.attributes`."""
        assert quantization is not None and quantization.group_size is not None
        attributes = {
            "k": k,
            "n": n,
            "format_version": _FORMAT_VERSION
            if quantization.subgroup_size is None
            else _SUBGROUPS_VERSION
            if quantization.k_quant_zero is None
            else _K_QUANTS_VERSION,
            "group_size": quantization.group_size,
            "activation": int(activation),
            "gated_columns": gated_columns,
        }
        return [ir.AttrInt64(name, value) for name, value in attributes.items()]

    def rounding_bound(self, x: np.ndarray, weight: LayerWeight) -> np.ndarray:
        """See `Replacement.rounding_bound`."""
        assert weight.quantized is not None and weight.quantized.group_size is not None
        group = weight.quantized.group_size
        magnitude = self.magnitude(weight)
        product = np.zeros((len(x), magnitude.shape[1]), np.float32)
        steps = np.zeros_like(product)
        for start in range(0, len(magnitude), group):  # x is rounded by at most half a step (ops/matmul/group_weight.h)
            inputs, part = np.abs(x[:, start : start + group]), np.abs(magnitude[start : start + group])
            product += inputs @ part
            steps += inputs.max(axis=1, keepdims=True) / 254 * part.sum(axis=0)
        # The product of the scales of x and W may be subnormal and flushed to 0.
        largest = self.largest if weight.quantized.subgroup_size is None else float(LARGEST_VALUE)
        if weight.quantized.k_quant_zero is not None:
            largest = _LARGEST_K_QUANT
        lost = _SMALLEST_NORMAL * 127 * largest * len(magnitude)
        bound: np.ndarray = steps * (1 + _FLOAT_ROUNDING) + _FLOAT_ROUNDING * product + lost
        return bound

    def magnitude(self, weight: LayerWeight) -> np.ndarray:
        """Return for each weight the sum of the absolute values that the kernel multiplies with x; its sign is free."""
        return weight.matrix  # its absolute values would be a copy, of gigabytes for a head

    def typical_rounding(self, quantization: Quantization | None) -> float:
        """See `Replacement.typical_rounding`."""
        # The rounding error has the RMS step / sqrt(12), where step is max|x| / 127 and max|x| is taken as three times
        # the RMS of a group.
        return 0.007


def packed_floats(*rows: np.ndarray) -> list[PackedTensor]:
    """Pack scales and minimums as float16 if that is exact for all of them, else as float32."""
    with np.errstate(over="ignore"):
        halves = [array.astype(np.float16) for array in rows]
    if any((half != array).any() for half, array in zip(halves, rows, strict=True)):
        wide = [np.ascontiguousarray(array, np.float32) for array in rows]
        return [PackedTensor(_native.pack_group_rows(array), ir.DataType.FLOAT) for array in wide]
    packed = [_native.pack_group_rows(np.ascontiguousarray(half).view(np.uint16)) for half in halves]
    return [PackedTensor(array.view(np.float16), ir.DataType.FLOAT16) for array in packed]
