"""SparseAMXMatMul: bf16, int8 or int4 weights in dense, bitmap or 2:4 storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ortolan import _native

from ..find.constants import constant_tensor
from ..find.convolutions import WINDOW_DEFAULTS
from ..find.epilogue import Activation
from ..find.quantized_weight import QuantizedWeight
from ..find.stored_int4 import StoredInt4
from ..find.stored_int8 import StoredInt8
from ..weights.quantizers.grid import Quantization
from .function_body import PANEL_COLUMNS
from .linear_function import neutral_inputs_of_layer, set_missing, uses_of_layers
from .nodes import fill_missing, input_of, nodes_of
from .replacement import LayerWeight, PackedTensor, PackedWeight, Replacement, Stored, why_not_groups
from .sparse_amx_matmul_function import INPUTS, OP_TYPE, Uses, sparse_amx_matmul_function
from .sparse_amx_matmul_storage import (
    BF16,
    BITMAP,
    DENSE,
    TWO_FOUR,
    choose_storage,
    storage_bytes,
    storage_of,
    stored_in,
)

# Version of the packed format; the kernel refuses other versions.
_FORMAT_VERSION = 1
_MAX_INPUTS_WITH_ZERO_POINTS = 1 << 16  # equals kMostInputsWithZeroPoints in ops/matmul/bitmap_weight.h
_Pack = Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]  # returns masks, values and offsets
_PACK: Mapping[int, _Pack] = {BF16: _native.pack_bitmap, 8: _native.pack_bitmap_int8, 4: _native.pack_bitmap_int4}
_PACK_TWO_FOUR: Mapping[int, _Pack] = {
    BF16: _native.pack_two_four,
    8: _native.pack_two_four_int8,
    4: _native.pack_two_four_int4,
}
_VALUES = {BF16: ir.DataType.BFLOAT16, 8: ir.DataType.INT8, 4: ir.DataType.UINT8}
_LARGEST_BF16 = float(np.uint32(0x7F7F0000).view(np.float32))

# Error bounds relative to |x| |W|: rounding x and w to bf16 costs 2^-8 each; then float32 arithmetic, for any summation
# order.
_BF16_ROUNDING = 1.2 * 2**-7
_FLOAT_ROUNDING = 2**-12
# CPUs may flush smaller values to zero, and bf16 instructions always do. Dead neurons have such weights.
_SMALLEST_NORMAL = 2.0**-126


class SparseAMXMatMul(Replacement):
    """Y = activation(X W + bias) + residual, optionally layer-normalized.

    X is rounded to bf16, or for quantized weights row by row to int8, with zero points if the weights are int8.
    """

    op_type = OP_TYPE
    input_names = INPUTS
    takes_windows = True

    def why_not(self, k: int, quantization: Quantization | None) -> str | None:
        """See `Replacement.why_not`."""
        # With integer weights, SparseAMXMatMul rounds activations to int8, so integers that the model stores are kept
        # only if keeps_stored is set.
        if isinstance(quantization, StoredInt4 | StoredInt8) and not self.keeps_stored:
            if quantization.bits == 4:
                return "has scales, and perhaps zero points, that SparseAMXMatMul does not support"
            return "is stored in int8, which SparseAMXMatMul does not keep here; give weights='int8' or pattern='4x1'"
        if quantization is not None and quantization.subgroup_size is not None:
            return (
                f"is quantized to {quantization.bits} bits in subgroups of {quantization.subgroup_size}, which "
                "SparseAMXMatMul does not support; W4A8MatMul does"
            )
        zero_points = quantization is not None and not quantization.symmetric
        if zero_points and _stores_zero_points(quantization):
            # Sparse storage omits q = 0. With zero points, such a weight is not zero.
            return "has zero points, which 2:4 storage does not support" if self.storage == TWO_FOUR else None
        if zero_points:
            return (
                "is quantized with zero points, which SparseAMXMatMul does not support; set quantize.symmetric to true"
            )
        return why_not_groups(self.op_type, quantization)

    def why_not_matrix(self, matrix: np.ndarray) -> str | None:
        """See `Replacement.why_not_matrix`."""
        # Comparisons with NaN are false, so weights with NaN are refused.
        if matrix.max() <= _LARGEST_BF16 and matrix.min() >= -_LARGEST_BF16:
            return None
        return "holds NaN, infinity or values beyond bfloat16"

    def why_not_quantized(self, quantized: QuantizedWeight) -> str | None:
        """See `Replacement.why_not_quantized`."""
        if quantized.bits == 8:
            return None
        scales = quantized.scales.numpy().astype(np.float32)
        if np.array_equal(scales, scales.astype(ml_dtypes.bfloat16).astype(np.float32)):
            return None
        return "has scales that are not exact in bfloat16, as SparseAMXMatMul requires for 4 bits"

    def stored_weights(self, matrix: np.ndarray) -> Stored:
        """See `Replacement.stored_weights`."""
        return stored_in(matrix)

    def pack(self, weight: LayerWeight) -> PackedWeight:
        """See `Replacement.pack`."""
        quantized = weight.quantized
        matrix = np.ascontiguousarray(weight.matrix if quantized is None else quantized.q.numpy())
        k, n = matrix.shape
        storage = self.foreseen_storage(k, n, self.stored_weights(matrix), quantized)
        bits = weight_bits(quantized)
        if storage == TWO_FOUR:
            masks, values, offsets = _PACK_TWO_FOUR[bits](matrix)
        else:
            masks, values, offsets = _PACK[bits](matrix, dense=storage == DENSE)
        packed = {
            "masks": PackedTensor(masks, ir.DataType.UINT8),
            "values": PackedTensor(values, _VALUES[bits]),
            "offsets": PackedTensor(offsets, ir.DataType.INT64),
        }
        del matrix
        if quantized is not None:
            scales = quantized.scales.numpy()
            if bits == 8:
                packed["scales"] = PackedTensor(_native.pack_scales(scales, bf16=False), ir.DataType.FLOAT)
            else:
                packed["scales"] = PackedTensor(_native.pack_scales(scales, bf16=True), ir.DataType.BFLOAT16)
            if quantized.zero_points is not None:
                zero_points = _native.pack_scales(quantized.zero_points.numpy(), bf16=False).astype(np.int8)
                packed["zero_points"] = PackedTensor(zero_points, ir.DataType.INT8)
            del scales
            quantized.release()
        return packed

    def packed_bytes(self, k: int, n: int, stored: Stored, quantization: Quantization | None) -> int:
        """See `Replacement.packed_bytes`."""
        bits = weight_bits(quantization)
        groups = 1 if quantization is None or quantization.group_size is None else -(-k // quantization.group_size)
        of_group = {BF16: 0, 8: 4, 4: 2}[bits] + int(_stores_zero_points(quantization))
        scales = of_group * -(-n // PANEL_COLUMNS) * groups * PANEL_COLUMNS
        storage = self.foreseen_storage(k, n, stored, quantization)
        return storage_bytes(k, n, stored.count, bits, storage) + scales

    def foreseen_storage(self, k: int, n: int, stored: Stored, quantization: Quantization | None) -> str:
        """See `Replacement.foreseen_storage`."""
        if _stores_zero_points(quantization):
            return DENSE
        return choose_storage(k, n, stored, weight_bits(quantization), self.storage)

    def storage_of(self, packed: Mapping[str, ir.TensorProtocol]) -> str:
        """See `Replacement.storage_of`."""
        return storage_of(packed["masks"].size, packed["offsets"].size)

    def attributes(
        self, k: int, n: int, quantization: Quantization | None, activation: Activation, gated_columns: int
    ) -> list[ir.Attr]:
        """See `Replacement.attributes`."""
        integers = {
            "k": k,
            "n": n,
            "format_version": _FORMAT_VERSION,
            "weight_bits": weight_bits(quantization),
            "group_size": 0 if quantization is None or quantization.group_size is None else quantization.group_size,
            "activation": int(activation),
            "gated_columns": gated_columns,
            "x_zero_points": int(_has_zero_points(k, quantization)),
        }
        return [ir.AttrInt64(name, value) for name, value in integers.items()]

    def rounding_bound(self, x: np.ndarray, weight: LayerWeight) -> np.ndarray:
        """See `Replacement.rounding_bound`."""
        magnitude = np.abs(weight.matrix)
        product: np.ndarray = np.abs(x) @ magnitude
        k = len(magnitude)
        if weight.quantized is None:
            # Each weight, product and sum may be flushed once.
            lost = _SMALLEST_NORMAL * (np.abs(x).sum(axis=1, keepdims=True) + 2 * k)
            bound: np.ndarray = _BF16_ROUNDING * product + lost
            return bound
        # x is rounded by at most half a step (ops/matmul/bitmap_weight.h).
        if weight.quantized.bits == 8 and k <= _MAX_INPUTS_WITH_ZERO_POINTS:
            half_steps = (np.maximum(x.max(axis=1), 0) - np.minimum(x.min(axis=1), 0))[:, None] / 508
        else:
            half_steps = np.abs(x).max(axis=1, keepdims=True) / 254
        steps: np.ndarray = half_steps * magnitude.sum(axis=0) * (1 + _FLOAT_ROUNDING)
        # The product of the scales of x and w may be subnormal and flushed to 0.
        lost = _SMALLEST_NORMAL * 254 * 255 * k
        return steps + _FLOAT_ROUNDING * product + lost

    def typical_rounding(self, quantization: Quantization | None) -> float:
        """See `Replacement.typical_rounding`."""
        # bf16: rounding x and w has the relative error 2^-8 / sqrt(6) each. int8: the RMS error is step / sqrt(12),
        # where step is max|x| / 127 and max|x| is taken as six times the RMS of a row.
        return 0.0023 if quantization is None else 0.014

    def fill_inputs(self, model: ir.Model, new_name: Callable[[str], str]) -> None:
        """See `Replacement.fill_inputs`."""
        nodes = nodes_of(model, OP_TYPE)
        uses = _uses(nodes)
        set_missing(nodes, WINDOW_DEFAULTS if uses.windows else {})

        def neutral(node: ir.Node) -> dict[str, np.ndarray]:
            n = node.attributes["n"].as_int()
            return {
                **neutral_inputs_of_layer(n, node.attributes["gated_columns"].as_int()),
                "scales": np.ones((-(-n // PANEL_COLUMNS), 1, PANEL_COLUMNS), np.float32),
                "zero_points": np.zeros(1, np.int8),
            }

        needed = uses.needed_inputs() | ({"scales"} if len(uses.weight_bits) > 1 else set())
        needed |= {"zero_points"} if uses.zero_points else set()
        fill_missing(nodes, INPUTS, needed, neutral, new_name)

    def function(self, model: ir.Model, opset: int, unpack_once: bool) -> ir.Function:
        """See `Replacement.function`."""
        return sparse_amx_matmul_function(opset, _uses(nodes_of(model, OP_TYPE)), unpack_once)


def weight_bits(quantization: Quantization | None) -> int:
    """Return the number of bits of a stored weight; 16 means bf16."""
    return BF16 if quantization is None else quantization.bits


def _stores_zero_points(quantization: Quantization | None) -> bool:
    """Return whether the weight has zero points and the operator supports them: int8 with one scale per column."""
    if quantization is None or quantization.symmetric:
        return False
    return quantization.bits == 8 and quantization.group_size is None and not quantization.minimum


def _has_zero_points(k: int, quantization: Quantization | None) -> bool:
    """Return whether rows of x are quantized with zero points: more exact, and used if kernels support it."""
    return weight_bits(quantization) == 8 and k <= _MAX_INPUTS_WITH_ZERO_POINTS


def _uses(nodes: list[ir.Node]) -> Uses:
    storages = {_storage_of_node(node) for node in nodes}
    return Uses(
        weight_bits=frozenset(node.attributes["weight_bits"].as_int() for node in nodes),
        dense=DENSE in storages,
        bitmap=BITMAP in storages,
        two_four=TWO_FOUR in storages,
        x_zero_points=frozenset(
            node.attributes["x_zero_points"].as_int() for node in nodes if node.attributes["weight_bits"].as_int() == 8
        ),
        zero_points=any(input_of(node, INPUTS, "zero_points") is not None for node in nodes),
        **uses_of_layers(nodes, INPUTS),
    )


def _storage_of_node(node: ir.Node) -> str:
    masks, offsets = (constant_tensor(input_of(node, INPUTS, name)) for name in ("masks", "offsets"))
    assert masks is not None and offsets is not None
    return storage_of(masks.size, offsets.size)
