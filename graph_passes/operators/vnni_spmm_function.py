"""VNNISpMM as an ONNX function: the operator's specification, and the fallback without Ortolan's library.

The function uses only operators whose meaning has not changed since opset 13 (except ReduceMax and ReduceMean). It
supports any k, n and rank of X. The weight format is specified in ops/formats/block_sparse_4x1.h, the rounding of X and
the hidden layer in ops/matmul/block_sparse_weight.h, and the inputs in ops/vnni_spmm/op.cc.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .function_body import FunctionBody
from .linear_function import NORM_INPUTS, LayerUses, end_of_layer, linear_function, neutral_inputs_of_layer

OP_TYPE = "VNNISpMM"
_LAYER = ("X", "values", "indices", "starts", "scales", "bias", "residual")
_RANGE = ("x_scale", "x_zero_point")
_HIDDEN = (
    "hidden_values",
    "hidden_indices",
    "hidden_starts",
    "hidden_scales",
    "hidden_bias",
    "table",
    "table_x_scale",
    "table_x_zero_point",
    "table_y_scale",
    "table_y_zero_point",
)
INPUTS = (*_LAYER, *NORM_INPUTS, *_RANGE, *_HIDDEN)
ATTRIBUTES = ("k", "n", "format_version", "activation", "gated_columns", "hidden_k")

# As in ops/formats/block_sparse_4x1.h.
GROUP_OUTPUTS = 4
QUAD_INPUTS = 4

_SMALLEST_HALF_RANGE = 2.0**-100  # equals the constant in ops/matmul/block_sparse_weight.h


@dataclass(frozen=True)
class Uses(LayerUses):
    """The features that the VNNISpMM nodes of a model use.

    Nodes without a feature that other nodes use get neutral inputs: `neutral_inputs`.

    Attributes:
        own_ranges: Some nodes quantize X row by row.
        x_range: Some nodes have x_scale and x_zero_point.
        hidden: Some nodes have a hidden layer.
        plain: Some nodes have no hidden layer.
    """

    own_ranges: bool = True
    x_range: bool = False
    hidden: bool = False
    plain: bool = True

    def needed_inputs(self) -> set[str]:
        """Return the inputs that all nodes must have."""
        needed = super().needed_inputs() | (set(_RANGE) if self.x_range else set())
        return needed | set(_HIDDEN) if self.hidden else needed


def neutral_inputs(k: int, n: int, gated_columns: int = 0) -> dict[str, np.ndarray]:
    """Return neutral constants for inputs that a node with a weight [k, n] lacks but must have."""
    one, zero = np.ones((), np.float32), np.zeros(1, np.float32)
    zero_point = np.zeros((), np.uint8)
    return {
        **neutral_inputs_of_layer(n, gated_columns),
        "x_scale": np.zeros((), np.float32),
        "x_zero_point": zero_point,
        "hidden_values": np.zeros((0, GROUP_OUTPUTS, QUAD_INPUTS), np.int8),
        "hidden_indices": np.zeros((0, QUAD_INPUTS), np.uint16),
        "hidden_starts": np.zeros(-(-k // GROUP_OUTPUTS) + 1, np.int64),
        "hidden_scales": zero,
        "hidden_bias": zero,
        "table": np.zeros(256, np.uint8),
        "table_x_scale": one,
        "table_x_zero_point": zero_point,
        "table_y_scale": one,
        "table_y_zero_point": zero_point,
    }


def vnni_spmm_function(opset: int, uses: Uses, unpack_once: bool = True) -> ir.Function:
    """Return the function for a model of this opset. unpack_once: see `Replacement.function`."""
    inputs = {name: ir.val(name) for name in INPUTS}
    body = FunctionBody(opset)
    k, n = body.attribute("k"), body.attribute("n")
    x = _rounded(body, inputs, uses)
    if uses.hidden:
        x = _hidden_layer(body, inputs, x, k, uses, unpack_once)
    product = body.op("MatMul", x, _matrix(body, inputs, "", k, n, unpack_once))
    y = end_of_layer(body, product, inputs, uses)
    return linear_function(OP_TYPE, opset, body, inputs, y, ATTRIBUTES, uses)


def _matrix(
    body: FunctionBody, inputs: dict[str, ir.Value], prefix: str, k: ir.Value, n: ir.Value, unpack_once: bool
) -> ir.Value:
    """Return W [k, n] = scales * q, read from the inputs whose names start with the prefix."""
    op = body.op
    int64 = ir.DataType.INT64
    values, indices, starts, scales = (inputs[prefix + name] for name in ("values", "indices", "starts", "scales"))
    if not unpack_once:
        starts = op("Add", starts, op("Min", op("Size", inputs["X"]), body.integer(0)))
    begins, ends = op("Slice", starts, body.ints(0), body.ints(-1)), op("Slice", starts, body.ints(1), body.ints(2**31))
    # Compute each quad's group as a running sum of `steps`: the first quad of a non-empty group adds the difference to
    # the previous non-empty group, all other quads add 0.
    filled = op("Reshape", op("NonZero", op("Cast", op("Sub", ends, begins), to=ir.DataType.BOOL)), body.ints(-1))
    before = op("Slice", op("Concat", body.ints(0), filled, axis=0), body.ints(0), body.ints(-1))
    quads = op("Slice", op("Shape", indices), body.ints(0), body.ints(1))
    no_steps = op("ConstantOfShape", quads, value=ir.tensor(np.zeros(1, np.int64)))
    steps = op("ScatterElements", no_steps, op("Gather", begins, filled), op("Sub", filled, before), axis=0)
    group = op("CumSum", steps, body.integer(0))

    # An index that equals the previous index in its quad is padding: its zeros are written to column k, which is cut
    # off.
    indices = op("Cast", indices, to=int64)
    last = body.ints(1)
    first = op("Slice", indices, body.ints(0), body.ints(1), last)
    earlier = op("Slice", indices, body.ints(0), body.ints(QUAD_INPUTS - 1), last)
    other = op("Sub", first, body.integer(1))
    input_ = op("Where", op("Equal", indices, op("Concat", other, earlier, axis=1)), k, indices)

    # [quad, output, input] -> [output, input].
    row = op("Add", k, body.integer(1))
    outputs = body.constant(np.arange(GROUP_OUTPUTS, dtype=np.int64)[None, :, None])
    of_group = op("Mul", op("Unsqueeze", group, body.ints(1, 2)), body.integer(GROUP_OUTPUTS))
    positions = op("Add", op("Mul", op("Add", of_group, outputs), row), op("Unsqueeze", input_, body.ints(1)))
    padded_n = op("Mul", op("Sub", op("Size", starts), body.integer(1)), body.integer(GROUP_OUTPUTS))
    zeros = op("ConstantOfShape", body.vector(op("Mul", padded_n, row)), value=ir.tensor(np.zeros(1, np.float32)))
    floats, flat = op("Cast", values, to=ir.DataType.FLOAT), body.ints(-1)
    scattered = op("ScatterElements", zeros, op("Reshape", positions, flat), op("Reshape", floats, flat), axis=0)
    padded = op("Transpose", op("Reshape", scattered, body.shape(padded_n, row)), perm=[1, 0])
    return op("Mul", op("Slice", padded, body.ints(0, 0), body.shape(k, n)), scales)


def _rounded(body: FunctionBody, inputs: dict[str, ir.Value], uses: Uses) -> ir.Value:
    """Return X rounded to 256 steps: of each row's range, or of size x_scale."""
    op = body.op
    x = inputs["X"]
    if not uses.x_range:
        return _round(body, x, *_own_range(body, x))
    scale = inputs["x_scale"]
    # The factor 1 / scale is written as -1 / -scale. From 1 / scale, ONNX Runtime (1.31) makes a division x / scale,
    # which rounds differently; if it also removed an Add of zeros before the node, it cannot load the model.
    factor = op("Div", body.number(-1), op("Neg", scale))
    given = (factor, op("Cast", inputs["x_zero_point"], to=ir.DataType.FLOAT), scale)
    if not uses.own_ranges:
        return _round(body, x, *given)
    is_given = op("Greater", scale, body.number(0))
    own = _own_range(body, x)
    return _round(body, x, *(op("Where", is_given, *pair) for pair in zip(given, own, strict=True)))


def _own_range(body: FunctionBody, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the factor, zero point and scale of each row, as floats."""
    op = body.op
    zero, half = body.number(0), body.number(0.5)
    maximum = op("Max", body.reduce_max(x, -1), zero)
    minus_minimum = op("Max", body.reduce_max(op("Neg", x), -1), zero)
    half_range = op("Add", op("Mul", maximum, half), op("Mul", minus_minimum, half))
    half_range = op("Max", half_range, body.number(_SMALLEST_HALF_RANGE))
    factor = op("Div", body.number(127.5), half_range)
    return factor, op("Round", op("Mul", minus_minimum, factor)), op("Div", half_range, body.number(127.5))


def _round(body: FunctionBody, x: ir.Value, factor: ir.Value, zero_point: ir.Value, scale: ir.Value) -> ir.Value:
    """Return x rounded: (q - zero_point) scale."""
    op = body.op
    q = op("Min", op("Round", op("Mul", x, factor)), op("Sub", body.number(255), zero_point))
    return op("Mul", op("Max", q, op("Neg", zero_point)), scale)


def _hidden_layer(
    body: FunctionBody, inputs: dict[str, ir.Value], x: ir.Value, k: ir.Value, uses: Uses, unpack_once: bool
) -> ir.Value:
    """Return the hidden layer's output for rounded x, or x if the node has no hidden layer."""
    op = body.op
    hidden_k = body.attribute("hidden_k")
    last = body.ints(-1)
    if uses.plain:  # a node without a hidden layer multiplies one input, and the result is discarded
        hidden_k = op("Max", hidden_k, body.integer(1))
    first = op("Slice", x, body.ints(0), body.vector(hidden_k), last) if uses.plain else x
    w = _matrix(body, inputs, "hidden_", hidden_k, k, unpack_once)
    y = op("Add", op("MatMul", first, w), inputs["hidden_bias"])
    q = op("QuantizeLinear", y, inputs["table_x_scale"], inputs["table_x_zero_point"])
    q = op("Gather", inputs["table"], op("Cast", q, to=ir.DataType.INT32))
    hidden = op("DequantizeLinear", q, inputs["table_y_scale"], inputs["table_y_zero_point"])
    if not uses.plain:
        return hidden
    # Select the k columns of the hidden layer's output. A node without a hidden layer selects the k columns of x
    # instead.
    begin = op("Where", op("Cast", body.attribute("hidden_k"), to=ir.DataType.BOOL), body.integer(0), k)
    end = op("Add", begin, k)
    return op("Slice", op("Concat", hidden, x, axis=-1), body.vector(begin), body.vector(end), last)
