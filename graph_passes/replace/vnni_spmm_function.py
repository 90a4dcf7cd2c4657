"""VNNISpMM as an ONNX function: its specification, and what runs where our library is not registered.

It uses only operators that mean the same from opset 13 on (but for ReduceMax), and serves any k, n and rank of X. The
format of the weight is specified in ops/formats/block_sparse_4x1.h, the rounding of X in ops/vnni_spmm/vnni_spmm.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..epilogue import Activation
from ..normalize import ORTOLAN_DOMAIN
from .function_body import FunctionBody, end_of_layer

OP_TYPE = "VNNISpMM"
INPUTS = ("X", "values", "indices", "starts", "scales", "bias", "residual")
ATTRIBUTES = ("k", "n", "format_version", "activation", "gated_columns")

# As in ops/formats/block_sparse_4x1.h.
GROUP_OUTPUTS = 4
QUAD_INPUTS = 4

_SMALLEST_HALF_RANGE = 2.0**-100  # as in ops/vnni_spmm/vnni_spmm.h


@dataclass(frozen=True)
class Uses:
    """What the VNNISpMM nodes of a model make use of."""

    activations: frozenset[Activation] = frozenset({Activation.NONE})
    residual: bool = False
    gated: bool = False


def vnni_spmm_function(opset: int, uses: Uses, unpack_once: bool = True) -> ir.Function:
    """The function for a model of this opset. unpack_once: see Replacement.function."""
    inputs = {name: ir.val(name) for name in INPUTS}
    body = FunctionBody(opset)
    product = body.op("MatMul", _rounded(body, inputs["X"]), _matrix(body, inputs, unpack_once))
    y = end_of_layer(body, product, inputs, uses.activations, uses.gated, uses.residual)
    graph = ir.Graph(list(inputs.values()), [y], nodes=body.nodes, opset_imports={"": opset}, name=OP_TYPE)
    attributes = [ir.Attr(name, ir.AttributeType.INT, None) for name in ATTRIBUTES]
    return ir.Function(ORTOLAN_DOMAIN, OP_TYPE, graph=graph, attributes=attributes)


def _matrix(body: FunctionBody, inputs: dict[str, ir.Value], unpack_once: bool) -> ir.Value:
    """W [k, n]: scales q."""
    op = body.op
    k, n = body.attribute("k"), body.attribute("n")
    int64 = ir.DataType.INT64
    starts = inputs["starts"]
    if not unpack_once:
        starts = op("Add", starts, op("Min", op("Size", inputs["X"]), body.integer(0)))
    begins, ends = op("Slice", starts, body.ints(0), body.ints(-1)), op("Slice", starts, body.ints(1), body.ints(2**31))
    # The group of each quad. A step stands where a group that has quads begins: by how much its number is higher.
    filled = op("Reshape", op("NonZero", op("Cast", op("Sub", ends, begins), to=ir.DataType.BOOL)), body.ints(-1))
    before = op("Slice", op("Concat", body.ints(0), filled, axis=0), body.ints(0), body.ints(-1))
    quads = op("Slice", op("Shape", inputs["indices"]), body.ints(0), body.ints(1))
    none = op("ConstantOfShape", quads, value=ir.tensor(np.zeros(1, np.int64)))
    steps = op("ScatterElements", none, op("Gather", begins, filled), op("Sub", filled, before), axis=0)
    group = op("CumSum", steps, body.integer(0))

    # An index that equals the one before in its quad stands for nothing: its zeros go to column k, which is cut off.
    indices = op("Cast", inputs["indices"], to=int64)
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
    values = op("Cast", inputs["values"], to=ir.DataType.FLOAT)
    flat = body.ints(-1)
    scattered = op("ScatterElements", zeros, op("Reshape", places, flat), op("Reshape", values, flat), axis=0)
    padded = op("Transpose", op("Reshape", scattered, body.shape(padded_n, row)), perm=[1, 0])
    return op("Mul", op("Slice", padded, body.ints(0, 0), body.shape(k, n)), inputs["scales"])


def _rounded(body: FunctionBody, x: ir.Value) -> ir.Value:
    """X rounded to 256 steps of its own, row by row."""
    op = body.op
    zero, half = body.number(0), body.number(0.5)
    most = op("Max", body.reduce_max(x, -1), zero)
    minus_least = op("Max", body.reduce_max(op("Neg", x), -1), zero)
    half_range = op("Add", op("Mul", most, half), op("Mul", minus_least, half))
    half_range = op("Max", half_range, body.number(_SMALLEST_HALF_RANGE))
    factor = op("Div", body.number(127.5), half_range)
    zero_point = op("Round", op("Mul", minus_least, factor))
    highest = op("Sub", body.number(255), zero_point)
    q = op("Min", op("Round", op("Mul", x, factor)), highest)
    return op("Mul", q, op("Div", half_range, body.number(127.5)))
