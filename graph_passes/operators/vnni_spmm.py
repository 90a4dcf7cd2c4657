"""VNNISpMM: int8 weights in blocks of 4 outputs x 1 input (format: ops/formats/block_sparse_4x1.h)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortolan import _native

from ..find.constants import constant_tensor
from ..find.epilogue import Activation
from ..weights.quantizers.grid import Quantization
from .linear_function import uses_of_layers
from .nodes import fill_missing, input_of, nodes_of
from .replacement import LayerWeight, PackedTensor, PackedWeight, Replacement, Stored, why_not_groups
from .vnni_spmm_function import GROUP_OUTPUTS, INPUTS, OP_TYPE, QUAD_INPUTS, Uses, neutral_inputs, vnni_spmm_function

# Version of the packed format; the kernel refuses other versions.
_FORMAT_VERSION = 1
_MAX_INPUTS = 1 << 16  # equals kMostSparseInputs in ops/formats/block_sparse_4x1.h
_FLOAT_ROUNDING = 2**-12  # bound on the error of float32 arithmetic, relative to |x| |W|
_SMALLEST_NORMAL = 2.0**-126


class VNNISpMM(Replacement):
    """Y = activation(X W + bias) + residual, optionally layer-normalized.

    X is quantized to 256 steps of each row's range, or of a fixed range.
    """

    op_type = OP_TYPE
    input_names = INPUTS
    takes_ranges = True

    def why_not(self, k: int, quantization: Quantization | None) -> str | None:
        """See `Replacement.why_not`."""
        if quantization is None or quantization.bits != 8:
            return "is not quantized to 8 bits; give weights='int8' (in a recipe file: quantize with bits = 8 before)"
        if not quantization.symmetric:
            return "is stored with zero points, which VNNISpMM does not support"
        if k > _MAX_INPUTS:
            return f"has {k} inputs, expected at most {_MAX_INPUTS} for VNNISpMM"
        return why_not_groups(self.op_type, quantization)

    def stored_weights(self, matrix: np.ndarray) -> Stored:
        """See `Replacement.stored_weights`."""
        return Stored(count_blocks(matrix, GROUP_OUTPUTS))

    def pack(self, weight: LayerWeight) -> PackedWeight:
        """See `Replacement.pack`."""
        quantized = weight.quantized
        assert quantized is not None
        values, indices, starts = _native.pack_block_sparse(np.ascontiguousarray(quantized.q.numpy()))
        scales = np.array(quantized.scales.numpy(), np.float32).reshape(-1)
        quantized.release()
        return {
            "values": PackedTensor(values, ir.DataType.INT8),
            "indices": PackedTensor(indices, ir.DataType.UINT16),
            "starts": PackedTensor(starts, ir.DataType.INT64),
            "scales": PackedTensor(scales, ir.DataType.FLOAT),
        }

    def packed_bytes(self, k: int, n: int, stored: Stored, quantization: Quantization | None) -> int:
        """See `Replacement.packed_bytes`."""
        groups = -(-n // GROUP_OUTPUTS)
        # The last quad of each group is padded; on average, half of it is padding.
        quads = stored.count / (GROUP_OUTPUTS * QUAD_INPUTS) + groups / 2 if stored.count else 0
        return round(quads * (GROUP_OUTPUTS + 2) * QUAD_INPUTS) + 8 * (groups + 1) + 4 * n

    def attributes(
        self, k: int, n: int, quantization: Quantization | None, activation: Activation, gated_columns: int
    ) -> list[ir.Attr]:
        """See `Replacement.attributes`."""
        integers = {
            "k": k,
            "n": n,
            "format_version": _FORMAT_VERSION,
            "activation": int(activation),
            "gated_columns": gated_columns,
            "hidden_k": 0,
        }
        return [ir.AttrInt64(name, value) for name, value in integers.items()]

    def rounding_bound(self, x: np.ndarray, weight: LayerWeight) -> np.ndarray:
        """See `Replacement.rounding_bound`."""
        magnitude = np.abs(weight.matrix)
        steps: np.ndarray
        if weight.x_range is None:
            # x is rounded by at most half a step (ops/matmul/block_sparse_weight.h).
            half_steps = (np.maximum(x.max(axis=1), 0) - np.minimum(x.min(axis=1), 0))[:, None] / 2 / 255
            steps = half_steps * magnitude.sum(axis=0) * (1 + _FLOAT_ROUNDING)
        else:
            # Values outside the range are clipped. Near the middle between two steps, kernels may round up or down.
            lost_of_x = np.abs(weight.x_range.rounded(x) - x)
            steps = np.maximum(lost_of_x, weight.x_range.scale / 2) * (1 + _FLOAT_ROUNDING) @ magnitude
        lost = _SMALLEST_NORMAL * 255 * 127 * len(magnitude)
        bound: np.ndarray = steps + _FLOAT_ROUNDING * (np.abs(x) @ magnitude) + lost
        return bound

    def typical_rounding(self, quantization: Quantization | None) -> float:
        """See `Replacement.typical_rounding`."""
        # The rounding error has the RMS step / sqrt(12), where step is (max - min) / 255 and max - min is taken as
        # twelve times the RMS of a row.
        return 0.014

    def fill_inputs(self, model: ir.Model, new_name: Callable[[str], str]) -> None:
        """See `Replacement.fill_inputs`."""
        nodes = nodes_of(model, OP_TYPE)

        def neutral(node: ir.Node) -> dict[str, np.ndarray]:
            return neutral_inputs(*(node.attributes[name].as_int() for name in ("k", "n", "gated_columns")))

        fill_missing(nodes, INPUTS, _uses(nodes).needed_inputs(), neutral, new_name)

    def function(self, model: ir.Model, opset: int, unpack_once: bool) -> ir.Function:
        """See `Replacement.function`."""
        return vnni_spmm_function(opset, _uses(nodes_of(model, OP_TYPE)), unpack_once)


def count_blocks(matrix: np.ndarray, outputs: int) -> int:
    """Return the number of weights in non-zero blocks of one input and `outputs` outputs."""
    k, n = matrix.shape
    whole = n - n % outputs
    full = np.count_nonzero(matrix[:, :whole].reshape(k, -1, outputs).any(axis=2)) * outputs
    return int(full + np.count_nonzero(matrix[:, whole:].any(axis=1)) * (n - whole))


def _uses(nodes: list[ir.Node]) -> Uses:
    return Uses(
        **uses_of_layers(nodes, INPUTS),
        own_ranges=any(not _has_range(node) for node in nodes),
        x_range=any(_has_range(node) for node in nodes),
        hidden=any(_has_hidden(node) for node in nodes),
        plain=any(not _has_hidden(node) for node in nodes),
    )


def _has_range(node: ir.Node) -> bool:
    """Return whether the node's input has a fixed range: x_scale exists and is not the neutral 0."""
    scale = constant_tensor(input_of(node, INPUTS, "x_scale"))
    return scale is not None and float(scale.numpy()) != 0


def _has_hidden(node: ir.Node) -> bool:
    return node.attributes["hidden_k"].as_int() != 0
