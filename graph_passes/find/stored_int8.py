"""Reads 8-bit weights that a model stores, and the fixed ranges of quantized activations.

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

from ..weights.quantizers.fixed_range import FixedRange
from ..weights.quantizers.grid import SMALLEST_SCALE
from .constants import DEFAULT_DOMAINS, constant_tensor, float_array, lazy, required_constant
from .node_checks import MICROSOFT_DOMAIN, makers, node_input
from .quantized_weight import QuantizedWeight

INT8_TYPES = (ir.DataType.INT8, ir.DataType.UINT8)
ZERO_POINTS = {ir.DataType.INT8: (-128, 127), ir.DataType.UINT8: (0, 255)}  # least and greatest, by code type
FLOAT_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
DYNAMIC_QUANTIZE_MATMUL = "DynamicQuantizeMatMul"
MATMUL_INTEGER_TO_FLOAT = "MatMulIntegerToFloat"

# Operators that move elements of the first input without changing them.
_MOVES = ("Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
_MIDDLE = 128  # uint8 codes and zero points minus this are int8 ones
_LARGEST_SCALE = np.finfo(np.float32).max / 256  # a scale times any code stays finite


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


def fixed_range(x: ir.Value) -> FixedRange | None:
    """Return the range of a layer's input if a DequantizeLinear of 8-bit codes computes it, else None."""
    node = maker(x, "DequantizeLinear")
    return None if node is None else range_at(node, 1, 2)


def maker(value: ir.Value, op_type: str) -> ir.Node | None:
    """Return the node of this type that computes a value, perhaps before operators that only move elements."""
    node = next((node for node in makers(value, _MOVES) if node.op_type not in _MOVES), None)
    return node if node is not None and node.op_type == op_type and node.domain in DEFAULT_DOMAINS else None


def range_at(node: ir.Node, scale: int, zero_point: int) -> FixedRange | None:
    """Return the range with these inputs as scalar scale and zero point; None if VNNISpMM does not support it."""
    scales, zeros = constant_tensor(node_input(node, scale)), constant_tensor(node_input(node, zero_point))
    if scales is None or scales.size != 1 or scales.dtype not in FLOAT_TYPES:
        return None
    number = float_array(scales).reshape(-1)[0]
    if not SMALLEST_SCALE <= number <= _LARGEST_SCALE:
        return None
    if zeros is None:
        # Without a zero point input, it is 0 and the codes' type decides, which is uint8 for QuantizeLinear.
        missing = node_input(node, zero_point) is None
        kind = _code_type(node_input(node, 0)) if missing else None
        zero = {ir.DataType.UINT8: 0, ir.DataType.INT8: _MIDDLE}.get(kind) if kind is not None else None
    elif zeros.size == 1 and zeros.dtype in INT8_TYPES:
        zero = int(zeros.numpy().reshape(-1)[0]) + (_MIDDLE if zeros.dtype == ir.DataType.INT8 else 0)
    else:
        zero = None
    return None if zero is None else FixedRange(np.float32(number), np.uint8(zero))


def _code_type(codes: ir.Value | None) -> ir.DataType | None:
    return None if codes is None or codes.type is None else codes.dtype


def unrounded(x: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Return the float input of the QuantizeLinear before the DequantizeLinear that computes x; else x itself."""
    dequantize = x.producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear" or dequantize.domain not in DEFAULT_DOMAINS:
        return x
    codes = node_input(dequantize, 0)
    quantize = codes.producer() if codes is not None else None
    if quantize is None or quantize.op_type != "QuantizeLinear" or quantize.domain not in DEFAULT_DOMAINS:
        return x
    scale, floats = constant_tensor(node_input(quantize, 1)), node_input(quantize, 0)
    whole_type = "output_dtype" not in quantize.attributes and "precision" not in quantize.attributes
    same = range_at(quantize, 1, 2) == range_at(dequantize, 1, 2) is not None
    zeros = [constant_tensor(node_input(node, 2)) for node in (quantize, dequantize)]
    known = zeros[0] is not None and zeros[1] is not None and zeros[0].dtype == zeros[1].dtype
    if not (same and known and whole_type and scale is not None and scale.dtype == dtype) or floats is None:
        return x
    return floats
