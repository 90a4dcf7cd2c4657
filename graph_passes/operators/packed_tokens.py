"""PackTokens and UnpackTokens: removing the padding of sequences, and restoring it.

kept  int64 [batch, tokens]: 0 for padding (PackedNoMADAttention: negative if no query sees its key)
PackTokens(kept, X [batch, tokens, ...])  ->  [1, kept tokens, ...];  batch and tokens of X may be 1
UnpackTokens(kept, X float [1, kept tokens, ...])  ->  [batch, tokens, ...], zeros for padding
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ..names import ORTOLAN_DOMAIN
from .function_body import FunctionBody

PACK, UNPACK = "PackTokens", "UnpackTokens"


def packed_tokens_function(op_type: str, opset: int) -> ir.Function:
    """Return PackTokens or UnpackTokens as an ONNX function for a model of this opset."""
    write: Callable[[FunctionBody, ir.Value, ir.Value], ir.Value] = packed if op_type == PACK else unpacked
    kept, x = ir.val("kept"), ir.val("X")
    body = FunctionBody(opset)
    y = write(body, kept, x)
    y.name = "Y"
    graph = ir.Graph([kept, x], [y], nodes=body.nodes, opset_imports={"": opset}, name=op_type)
    return ir.Function(ORTOLAN_DOMAIN, op_type, graph=graph, attributes=[])


def packed(body: FunctionBody, kept: ir.Value, x: ir.Value) -> ir.Value:
    """Add PackTokens to a function."""
    op = body.op
    # Expand, not Reshape, which would copy the input's dimension for a size of 0.
    whole = op("Expand", x, op("Concat", op("Shape", kept), _behind_tokens(body, x), axis=0))
    return op("Unsqueeze", op("GatherND", whole, _positions(body, kept)), body.ints(0))


def unpacked(body: FunctionBody, kept: ir.Value, x: ir.Value) -> ir.Value:
    """Add UnpackTokens to a function."""
    op = body.op
    zeros = op("Expand", body.number(0), op("Concat", op("Shape", kept), _behind_tokens(body, x), axis=0))
    return op("ScatterND", zeros, _positions(body, kept), op("Squeeze", x, body.ints(0)))


def _behind_tokens(body: FunctionBody, x: ir.Value) -> ir.Value:
    """Return the dimensions of x after [batch, tokens]."""
    return body.op("Slice", body.op("Shape", x), body.ints(2), body.ints(2**31 - 1))


def _positions(body: FunctionBody, kept: ir.Value) -> ir.Value:
    """Return the (sequence, token) positions of all kept tokens, in order: [kept tokens, 2]."""
    return body.op("Transpose", body.op("NonZero", kept), perm=[1, 0])
