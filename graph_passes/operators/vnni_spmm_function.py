"""VNNISpMM as an ONNX function: its specification, and what runs where our library is not registered.

It uses only operators that mean the same from opset 13 on (but for ReduceMax and ReduceMean), and serves any k, n and
rank of X. The format of the weight is specified in ops/formats/block_sparse_4x1.h, the rounding of X and the hidden
layer in ops/matmul/block_sparse_weight.h, the inputs in ops/vnni_spmm/op.cc.
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

_SMALLEST_HALF_RANGE = 2.0**-100  # as in ops/matmul/block_sparse_weight.h


@dataclass(frozen=True)
class Uses(LayerUses):
    """What the VNNISpMM nodes of a model make use of.

    own_ranges: some quantize X row by row. x_range: some have x_scale and
    x_zero_point. hidden: some have a hidden layer. plain: some have none. Nodes that lack what others have need inputs
    in its place: neutral_inputs.
    """

    own_ranges: bool = True
    x_range: bool = False
    hidden: bool = False
    plain: bool = True

    def needed_inputs(self) -> set[str]:
        """What all nodes must have."""
        needed = super().needed_inputs() | (set(_RANGE) if self.x_range else set())
        return needed | set(_HIDDEN) if self.hidden else needed


def neutral_inputs(k: int, n: int, gated_columns: int = 0) -> dict[str, np.ndarray]:
    """What stands for an input that a node of k inputs and n outputs does not have, where it must not be missing."""
    one, nothing = np.ones((), np.float32), np.zeros(1, np.float32)
    none = np.zeros((), np.uint8)
    return {
        **neutral_inputs_of_layer(n, gated_columns),
        "x_scale": np.zeros((), np.float32),
        "x_zero_point": none,
        "hidden_values": np.zeros((0, GROUP_OUTPUTS, QUAD_INPUTS), np.int8),
        "hidden_indices": np.zeros((0, QUAD_INPUTS), np.uint16),
        "hidden_starts": np.zeros(-(-k // GROUP_OUTPUTS) + 1, np.int64),
        "hidden_scales": nothing,
        "hidden_bias": nothing,
        "table": np.zeros(256, np.uint8),
        "table_x_scale": one,
        "table_x_zero_point": none,
        "table_y_scale": one,
        "table_y_zero_point": none,
    }


def vnni_spmm_function(opset: int, uses: Uses, unpack_once: bool = True) -> ir.Function:
    """The function for a model of this opset. unpack_once: see Replacement.function."""
    inputs = {name: ir.val(name) for name in INPUTS}
    body = FunctionBody(opset)
    k, n = body.attribute("k"), body.attribute("n")
    x = _rounded(body, inputs, uses)
    if uses.hidden:
        x = _hidden_layer(body, inputs, x, k, uses, unpack_once)
    product = body.op("MatMul", x, _matrix(body, inputs, "", k, n, unpack_once))
    y = end_of_layer(body, product, inputs, uses)
    return linear_function(OP_TYPE, opset, body, inputs, y, ATTRIBUTES)


def _matrix(
    body: FunctionBody, inputs: dict[str, ir.Value], prefix: str, k: ir.Value, n: ir.Value, unpack_once: bool
) -> ir.Value:
    """W [k, n]: scales q, of the inputs whose names begin with the prefix."""
    op = body.op
    int64 = ir.DataType.INT64
    values, indices, starts, scales = (inputs[prefix + name] for name in ("values", "indices", "starts", "scales"))
    if not unpack_once:
        starts = op("Add", starts, op("Min", op("Size", inputs["X"]), body.integer(0)))
    begins, ends = op("Slice", starts, body.ints(0), body.ints(-1)), op("Slice", starts, body.ints(1), body.ints(2**31))
    # The group of each quad. A step stands where a group that has quads begins: by how much its number is higher.
    filled = op("Reshape", op("NonZero", op("Cast", op("Sub", ends, begins), to=ir.DataType.BOOL)), body.ints(-1))
    before = op("Slice", op("Concat", body.ints(0), filled, axis=0), body.ints(0), body.ints(-1))
    quads = op("Slice", op("Shape", indices), body.ints(0), body.ints(1))
    none = op("ConstantOfShape", quads, value=ir.tensor(np.zeros(1, np.int64)))
    steps = op("ScatterElements", none, op("Gather", begins, filled), op("Sub", filled, before), axis=0)
    group = op("CumSum", steps, body.integer(0))

    # An index that equals the one before in its quad stands for nothing: its zeros go to column k, which is cut off.
    indices = op("Cast", indices, to=int64)
    last = body.ints(1)
    first = op("Slice", indices, body.ints(0), body.ints(1), last)
    earlier = op("Slice", indices, body.ints(0), body.ints(QUAD_INPUTS - 1), last)
    other = op("Sub", first, body.integer(1))
    input_ = op("Where", op("Equal", indices, op("Concat", other, earlier, axis=1)), k, indices)

    # Quad, output, input -> output, input.
    row = op("Add", k, body.integer(1))
    outputs = body.constant(np.arange(GROUP_OUTPUTS, dtype=np.int64)[None, :, None])
    of_group = op("Mul", op("Unsqueeze", group, body.ints(1, 2)), body.integer(GROUP_OUTPUTS))
    places = op("Add", op("Mul", op("Add", of_group, outputs), row), op("Unsqueeze", input_, body.ints(1)))
    padded_n = op("Mul", op("Sub", op("Size", starts), body.integer(1)), body.integer(GROUP_OUTPUTS))
    zeros = op("ConstantOfShape", body.vector(op("Mul", padded_n, row)), value=ir.tensor(np.zeros(1, np.float32)))
    numbers, flat = op("Cast", values, to=ir.DataType.FLOAT), body.ints(-1)
    scattered = op("ScatterElements", zeros, op("Reshape", places, flat), op("Reshape", numbers, flat), axis=0)
    padded = op("Transpose", op("Reshape", scattered, body.shape(padded_n, row)), perm=[1, 0])
    return op("Mul", op("Slice", padded, body.ints(0, 0), body.shape(k, n)), scales)


def _rounded(body: FunctionBody, inputs: dict[str, ir.Value], uses: Uses) -> ir.Value:
    """X rounded to 256 steps, of its own row by row or of x_scale."""
    op = body.op
    x = inputs["X"]
    if not uses.x_range:
        return _round(body, x, *_own_range(body, x))
    scale = inputs["x_scale"]
    # Not 1 / scale: ONNX Runtime (1.31) makes x / scale of x (1 / scale), which rounds otherwise, and where it has also
    # removed an Add of zeros in front of that, it cannot load the model any more.
    factor = op("Div", body.number(-1), op("Neg", scale))
    given = (factor, op("Cast", inputs["x_zero_point"], to=ir.DataType.FLOAT), scale)
    if not uses.own_ranges:
        return _round(body, x, *given)
    is_given = op("Greater", scale, body.number(0))
    own = _own_range(body, x)
    return _round(body, x, *(op("Where", is_given, *pair) for pair in zip(given, own, strict=True)))


def _own_range(body: FunctionBody, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The factor, zero point and scale of each row, as floats."""
    op = body.op
    zero, half = body.number(0), body.number(0.5)
    most = op("Max", body.reduce_max(x, -1), zero)
    minus_least = op("Max", body.reduce_max(op("Neg", x), -1), zero)
    half_range = op("Add", op("Mul", most, half), op("Mul", minus_least, half))
    half_range = op("Max", half_range, body.number(_SMALLEST_HALF_RANGE))
    factor = op("Div", body.number(127.5), half_range)
    return factor, op("Round", op("Mul", minus_least, factor)), op("Div", half_range, body.number(127.5))


def _round(body: FunctionBody, x: ir.Value, factor: ir.Value, zero_point: ir.Value, scale: ir.Value) -> ir.Value:
    """(q - zero_point) scale."""
    op = body.op
    q = op("Min", op("Round", op("Mul", x, factor)), op("Sub", body.number(255), zero_point))
    return op("Mul", op("Max", q, op("Neg", zero_point)), scale)


def _hidden_layer(
    body: FunctionBody, inputs: dict[str, ir.Value], x: ir.Value, k: ir.Value, uses: Uses, unpack_once: bool
) -> ir.Value:
    """The hidden layer's numbers of rounded x, or x where there is no such layer."""
    op = body.op
    hidden_k = body.attribute("hidden_k")
    last = body.ints(-1)
    if uses.plain:  # without a hidden layer: one input of many, for what is then thrown away
        hidden_k = op("Max", hidden_k, body.integer(1))
    first = op("Slice", x, body.ints(0), body.vector(hidden_k), last) if uses.plain else x
    w = _matrix(body, inputs, "hidden_", hidden_k, k, unpack_once)
    y = op("Add", op("MatMul", first, w), inputs["hidden_bias"])
    q = op("QuantizeLinear", y, inputs["table_x_scale"], inputs["table_x_zero_point"])
    q = op("Gather", inputs["table"], op("Cast", q, to=ir.DataType.INT32))
    numbers = op("DequantizeLinear", q, inputs["table_y_scale"], inputs["table_y_zero_point"])
    if not uses.plain:
        return numbers
    # The hidden layer's k numbers, then those of x: k of them where there is no such layer.
    begin = op("Where", op("Cast", body.attribute("hidden_k"), to=ir.DataType.BOOL), body.integer(0), k)
    end = op("Add", begin, k)
    return op("Slice", op("Concat", numbers, x, axis=-1), body.vector(begin), body.vector(end), last)
