"""Reads 8-bit weights that a model stores.

Weights are inputs of com.microsoft's MatMulIntegerToFloat and DynamicQuantizeMatMul, or of DequantizeLinear
(quantized_forms.py converts other forms to these):

    W = scale (q - zero_point), q [k, n] int8 or uint8, one scale and zero point, or one per column

They are kept exactly: as int8 without zero points if all q - zero_point are in -128 … 127, else as int8 with zero
points (128 is subtracted from uint8). If neither is possible, a reason is returned. The execution provider uses the
same rules (ops/matmul/int8_weight.h). A model is untrusted: see node_checks.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortolan import _native

from .constants import DEFAULT_DOMAINS, lazy, required_constant
from .node_checks import MICROSOFT_DOMAIN, node_input
from .quantized_weight import QuantizedWeight

INT8_TYPES = (ir.DataType.INT8, ir.DataType.UINT8)
ZERO_POINTS = {ir.DataType.INT8: (-128, 127), ir.DataType.UINT8: (0, 255)}  # least and greatest, by code type
FLOAT_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
DYNAMIC_QUANTIZE_MATMUL = "DynamicQuantizeMatMul"
MATMUL_INTEGER_TO_FLOAT = "MatMulIntegerToFloat"

_MIDDLE = 128  # uint8 codes and zero points minus this are int8 ones


@dataclass(frozen=True)
class StoredInt8(QuantizedWeight):
    """An 8-bit weight that the model stores. Its tensors are lazy: each access reads the model's tensors."""


@dataclass(frozen=True, eq=False)
class StoredInt8Tensors:
    """The tensors of W = scales (codes - zero_points) as stored in the model."""

    codes: ir.TensorProtocol  # int8 or uint8 [k, n], or [n, k] if transposed
    transposed: bool
    scales: np.ndarray  # float32 [n], above 0
    zero_points: np.ndarray  # int16 [n], in the range of the codes' type

    @property
    def k(self) -> int:
        """Inputs of the layer."""
        return int(self.codes.shape.numpy()[1 if self.transposed else 0])

    @property
    def n(self) -> int:
        """Outputs of the layer."""
        return len(self.scales)

    def centred(self) -> np.ndarray:
        """Return codes - zero_points, int16 [k, n]."""
        codes = self.codes.numpy()
        centred: np.ndarray = np.subtract(codes.T if self.transposed else codes, self.zero_points, dtype=np.int16)
        return centred

    def tensor(self, dtype: ir.DataType) -> ir.LazyTensor:
        """Return W [k, n] as a lazy tensor."""

        def compute() -> np.ndarray:
            weights: np.ndarray = (self.centred() * self.scales).astype(dtype.numpy(), copy=False)
            return weights

        return lazy(compute, dtype, ir.Shape([self.k, self.n]))

    def stored(self) -> StoredInt8 | str:
        """Return the same weight as int8, without zero points if possible, or why it cannot be kept."""
        least, most = ZERO_POINTS[self.codes.dtype]
        assert self.zero_points.min() >= least and self.zero_points.max() <= most
        low, high = _native.int8_range(np.ascontiguousarray(self.codes.numpy()), self.zero_points, self.transposed)
        problem = _native.why_not_int8(self.k, self.n, (low, high))
        if problem:
            return problem
        symmetric = low >= -_MIDDLE and high < _MIDDLE
        shape, name = ir.Shape([self.k, self.n]), self.codes.name
        scales = ir.Tensor(self.scales.reshape(1, -1))
        if symmetric:
            return StoredInt8(
                8, None, lazy(lambda: self.centred().astype(np.int8), ir.DataType.INT8, shape, name), scales
            )
        zero_points = ir.Tensor((self.zero_points - self._middle).astype(np.int8).reshape(1, -1))
        return StoredInt8(8, None, lazy(self._int8, ir.DataType.INT8, shape, name), scales, zero_points)

    @property
    def _middle(self) -> int:
        return _MIDDLE if self.codes.dtype == ir.DataType.UINT8 else 0

    def _int8(self) -> np.ndarray:
        """Return the codes as int8 [k, n]; 128 is subtracted from uint8 codes."""
        codes = self.codes.numpy()
        if self._middle:
            codes = (codes ^ np.uint8(_MIDDLE)).view(np.int8)
        return codes.T if self.transposed else codes


@dataclass(frozen=True)
class StoredInputs:
    """Indices of an operator's inputs that hold its int8 weight and its bias."""

    codes: int
    scales: int
    zero_points: int
    bias: int

    @property
    def weight(self) -> tuple[int, int, int]:
        """Indices of codes, scales and zero points."""
        return self.codes, self.scales, self.zero_points


_INPUTS = {
    DYNAMIC_QUANTIZE_MATMUL: StoredInputs(1, 2, 3, 4),
    MATMUL_INTEGER_TO_FLOAT: StoredInputs(1, 3, 5, 6),
}


def stored_inputs(node: ir.Node) -> StoredInputs | None:
    """Return the input indices of MatMulIntegerToFloat or DynamicQuantizeMatMul; None for other nodes."""
    return _INPUTS.get(node.op_type) if node.domain == MICROSOFT_DOMAIN else None


def read_int8(linear: _native.Linear) -> StoredInt8Tensors:
    """Return the tensors of an 8-bit weight with one scale, or one per column."""
    codes = required_constant(linear.codes)
    return StoredInt8Tensors(
        codes, linear.codes_transposed, linear.scales_of_columns(), linear.zero_points_of_columns()
    )


# --- activations -----------------------------------------------------------------------------------------------------


def dynamic_source(codes: ir.Value | None) -> ir.Node | None:
    """Return the DynamicQuantizeLinear that computes these codes, or None."""
    node = codes.producer() if codes is not None else None
    known = node is not None and node.op_type == "DynamicQuantizeLinear" and node.domain in DEFAULT_DOMAINS
    return node if node is not None and known and codes is node.outputs[0] and node_input(node, 0) is not None else None


def layer_input(node: ir.Node) -> ir.Value | None:
    """Return the present float input of a linear layer; for MatMulIntegerToFloat, the input before quantization."""
    codes = node_input(node, 0)
    if node.op_type != MATMUL_INTEGER_TO_FLOAT or node.domain != MICROSOFT_DOMAIN:
        return codes
    quantize = dynamic_source(codes)
    return None if quantize is None else quantize.inputs[0]


def remove_unused_dynamic(node: ir.Node) -> None:
    """Remove a DynamicQuantizeLinear without consumers."""
    if node.graph is not None and not any(value.uses() or value.is_graph_output() for value in node.outputs):
        node.graph.remove(node, safe=True)
