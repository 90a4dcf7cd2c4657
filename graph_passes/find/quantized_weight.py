"""A weight as integers with scales, and its dequantized floats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from ..files.model_file import release_maps
from ..weights.quantizers.grid import Quantization, QuantizedMatrix, dequantize

# Limit of kInt8Bitmap and kInt4Bitmap in ops/formats: with more inputs, int32 accumulators could overflow.
MAX_INPUTS = 1 << 17


def too_wide(k: int) -> str:
    """Return why a layer with more inputs is not quantized."""
    return f"it has {k} inputs, expected at most {MAX_INPUTS}: int32 accumulators could overflow"


@dataclass(frozen=True)
class QuantizedWeight(Quantization):
    """W = scales (q - zero_points / zero_point_steps), or scales q + minimums, [k, n].

    With subgroups: W = scales subgroup_scales (q - zero_points). K-quants: W = scales subgroup_scales (q -
    k_quant_zero) + minimums subgroup_minimums.

    The tensors may be mapped from a file: call release() after reading them.
    """

    # [k, n]: int8 (4 bits: -8 … 7); 4 bits, not symmetric: uint8, 0 … 15; with subgroups: uint8 of 4, 5 or 6 bits
    q: ir.TensorProtocol
    scales: ir.TensorProtocol  # [groups, n]: float32, or float16 if the model stores float16
    # 4 bits: uint8 [groups, n], 0 … 15, or 0 … 255 if `fractions`; with subgroups: uint8 [subgroups, n]; 8 bits: int8
    # [1, n]; None: symmetric or minimums
    zero_points: ir.TensorProtocol | None = None
    minimums: ir.TensorProtocol | None = None  # float32 [groups, n]
    # [subgroups, n]: uint8, K-quants int8; None without subgroups, or if all are 1
    subgroup_scales: ir.TensorProtocol | None = None
    subgroup_minimums: ir.TensorProtocol | None = None  # K-quants: uint8 [subgroups, n], or None if all are 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "symmetric", self.zero_points is None and self.minimums is None)
        object.__setattr__(self, "minimum", self.minimums is not None)

    def matrix(self) -> np.ndarray:
        """Return the dequantized weight, float32 [k, n]; values that overflow are infinite."""
        zero_points, minimums = (None if one is None else one.numpy() for one in (self.zero_points, self.minimums))
        if zero_points is not None and self.fractions:
            zero_points = zero_points.astype(np.float32) / self.zero_point_steps
        steps, factors = (
            None if one is None else one.numpy() for one in (self.subgroup_scales, self.subgroup_minimums)
        )
        weights = dequantize(
            QuantizedMatrix(self.q.numpy(), self.scales.numpy(), zero_points, minimums, steps, factors),
            self.group_size,
            self.subgroup_size,
            self.k_quant_zero,
        )
        del zero_points, minimums, steps, factors
        self.release()
        return weights

    def release(self) -> None:
        """Unmap the tensors that are mapped from a file."""
        release_maps([tensor for tensor in self.tensors().values() if isinstance(tensor, ir.ExternalTensor)])

    def tensors(self) -> dict[str, ir.TensorProtocol | None]:
        """Return the tensors by the names of their fields."""
        names = ("q", "scales", "zero_points", "minimums", "subgroup_scales", "subgroup_minimums")
        return {name: getattr(self, name) for name in names}

    def with_tensors(self, tensors: Mapping[str, ir.TensorProtocol | None]) -> QuantizedWeight:
        """Return a weight of the same format with these tensors, by the names of their fields."""
        return replace(self, **cast(dict[str, Any], tensors))


def dequantized_tensor(weight: QuantizedWeight, transposed: bool, dtype: ir.DataType) -> ir.LazyTensor:
    """Return the dequantized weight, [k, n] or transposed, as a lazy tensor, clipped to the range of dtype."""

    def compute() -> np.ndarray:
        matrix = weight.matrix()
        largest = np.float32(dtype.max)
        np.clip(matrix, -largest, largest, out=matrix)
        return (matrix.T if transposed else matrix).astype(dtype.numpy(), copy=False)

    shape = weight.q.shape.numpy()
    # Not `lazy`, which would copy a transpose of gigabytes.
    return ir.LazyTensor(
        lambda: ir.Tensor(compute()), dtype=dtype, shape=ir.Shape(shape[::-1] if transposed else shape)
    )
