"""MaskedMatMul: weights stored row by row, as float32, bf16 or int8.

Only the rows of W that belong to non-zero inputs are read (ops/masked_matmul/op.cc).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ..find.epilogue import Activation
from ..find.stored_int4 import StoredInt4
from ..find.stored_int8 import StoredInt8
from ..weights.quantizers.grid import Quantization
from .masked_matmul_function import INPUTS, NO_MASK, NO_SCALE, OP_TYPE, masked_matmul_function
from .nodes import fill_missing, in_order, nodes_of
from .replacement import LayerWeight, PackedTensor, PackedWeight, Replacement, Stored, why_not_groups

# Version of the operator's format; its kernel refuses other versions.
_FORMAT_VERSION = 1
_LARGEST_BF16 = float(np.uint32(0x7F7F0000).view(np.float32))

# Error bounds relative to |x| |W|: of rounding weights to bf16, and of float32 products and sums in any order.
_BF16_ROUNDING = 2**-8
_FLOAT_ROUNDING = 2**-12
# CPUs may flush smaller values to zero.
_SMALLEST_NORMAL = 2.0**-126


class MaskedMatMul(Replacement):
    """Y = X' W, where X' is X with elements up to the layer's threshold set to zero. A bias is a separate node."""

    op_type = OP_TYPE
    input_names = INPUTS
    has_epilogue = False
    masks_inputs = True

    def why_not(self, k: int, quantization: Quantization | None) -> str | None:
        """See `Replacement.why_not`."""
        if isinstance(quantization, StoredInt4 | StoredInt8):
            return f"is stored in {quantization.bits} bits, which MaskedMatMul does not support"
        if quantization is not None and quantization.bits != 8:
            return (
                f"is quantized to {quantization.bits} bits, which MaskedMatMul does not support; set quantize.bits to 8"
            )
        return why_not_groups(self.op_type, quantization)

    def why_not_matrix(self, matrix: np.ndarray) -> str | None:
        """See `Replacement.why_not_matrix`."""
        # Comparisons with NaN are false, so weights with NaN are refused.
        largest = float(np.finfo(np.float32).max) if self._is_float else _LARGEST_BF16
        if matrix.max() <= largest and matrix.min() >= -largest:
            return None
        return "holds NaN or infinity" if self._is_float else "holds NaN, infinity or values beyond bfloat16"

    @property
    def _is_float(self) -> bool:
        return self.weights == "float32"

    def pack(self, weight: LayerWeight) -> PackedWeight:
        """See `Replacement.pack`."""
        quantized = weight.quantized
        if quantized is not None:
            q, scales = np.array(quantized.q.numpy()), np.array(quantized.scales.numpy(), np.float32)
            quantized.release()
            return {"B": PackedTensor(q, ir.DataType.INT8), "b_scale": PackedTensor(scales, ir.DataType.FLOAT)}
        if self._is_float:
            return {"B": PackedTensor(np.array(weight.matrix, np.float32, order="C"), ir.DataType.FLOAT)}
        bf16 = np.ascontiguousarray(weight.matrix).astype(ml_dtypes.bfloat16)
        return {"B": PackedTensor(bf16.view(np.uint16), ir.DataType.BFLOAT16)}

    def packed_bytes(self, k: int, n: int, stored: Stored, quantization: Quantization | None) -> int:
        """See `Replacement.packed_bytes`."""
        if quantization is not None:
            return k * n + 4 * n
        return (4 if self._is_float else 2) * k * n

    def inputs(
        self, x: ir.Value, packed: Mapping[str, ir.Value], bias: ir.Value | None, residual: ir.Value | None
    ) -> list[ir.Value | None]:
        """See `Replacement.inputs`."""
        assert bias is None and residual is None
        return in_order(self.input_names, {"A": x, **packed})

    def attributes(
        self, k: int, n: int, quantization: Quantization | None, activation: Activation, gated_columns: int
    ) -> list[ir.Attr]:
        """See `Replacement.attributes`."""
        # group_size 0 means one scale per column. b_finite matters only for a B that is not constant.
        integers = {"format_version": _FORMAT_VERSION, "group_size": 0, "b_finite": 0}
        return [ir.AttrFloat32("b_threshold", 0.0), *(ir.AttrInt64(name, value) for name, value in integers.items())]

    def rounding_bound(self, x: np.ndarray, weight: LayerWeight) -> np.ndarray:
        """See `Replacement.rounding_bound`."""
        rounding = _FLOAT_ROUNDING
        if weight.quantized is None and not self._is_float:
            rounding += _BF16_ROUNDING
        lost = _SMALLEST_NORMAL * (np.abs(x).sum(axis=1, keepdims=True) + 127 * len(weight.matrix))
        bound: np.ndarray = rounding * (np.abs(x) @ np.abs(weight.matrix)) + lost
        return bound

    def typical_rounding(self, quantization: Quantization | None) -> float:
        """See `Replacement.typical_rounding`."""
        # A bf16 weight has the relative error 2^-8 / sqrt(6). With other weights, only float32 sums round.
        return 0.0016 if quantization is None and not self._is_float else 1e-6

    def fill_inputs(self, model: ir.Model, new_name: Callable[[str], str]) -> None:
        """See `Replacement.fill_inputs`."""
        neutral = {"b_scale": NO_SCALE, "a_mask": NO_MASK, "b_mask": NO_MASK}
        fill_missing(nodes_of(model, OP_TYPE), INPUTS, neutral, lambda node: neutral, new_name)

    def function(self, model: ir.Model, opset: int, unpack_once: bool) -> ir.Function:
        """See `Replacement.function`."""
        return masked_matmul_function(opset, unpack_once)
