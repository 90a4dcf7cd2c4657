"""PackTokens and UnpackTokens: the tokens of padded sequences that are there, one behind the other, and back again.

kept  int64 [batch, tokens]: not 0 where a token is there (PackedNoMADAttention: negative if no query sees it)
PackTokens(kept, X [batch, tokens, ...])  ->  [1, kept tokens, ...];  X may have 1 in the place of batch or of tokens
UnpackTokens(kept, X float [1, kept tokens, ...])  ->  [batch, tokens, ...], zeros where no token is
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ..names import ORTOLAN_DOMAIN
from .function_body import FunctionBody

PACK, UNPACK = "PackTokens", "UnpackTokens"


def packed_tokens_function(op_type: str, opset: int) -> ir.Function:
    """What one of the two computes, for a model of this opset."""
    write: Callable[[FunctionBody, ir.Value, ir.Value], ir.Value] = packed if op_type == PACK else unpacked
    kept, x = ir.val("kept"), ir.val("X")
    body = FunctionBody(opset)
    y = write(body, kept, x)
    y.name = "Y"
    graph = ir.Graph([kept, x], [y], nodes=body.nodes, opset_imports={"": opset}, name=op_type)
    return ir.Function(ORTOLAN_DOMAIN, op_type, graph=graph, attributes=[])


def packed(body: FunctionBody, kept: ir.Value, x: ir.Value) -> ir.Value:
    op = body.op
    # No Reshape, whose zeros stand for sizes of its input.
    whole = op("Expand", x, op("Concat", op("Shape", kept), _behind_tokens(body, x), axis=0))
    return op("Unsqueeze", op("GatherND", whole, _places(body, kept)), body.ints(0))


def unpacked(body: FunctionBody, kept: ir.Value, x: ir.Value) -> ir.Value:
    op = body.op
    zeros = op("Expand", body.number(0), op("Concat", op("Shape", kept), _behind_tokens(body, x), axis=0))
    return op("ScatterND", zeros, _places(body, kept), op("Squeeze", x, body.ints(0)))


def _behind_tokens(body: FunctionBody, x: ir.Value) -> ir.Value:
    """The sizes of x behind its first two axes."""
    return body.op("Slice", body.op("Shape", x), body.ints(2), body.ints(2**31 - 1))


def _places(body: FunctionBody, kept: ir.Value) -> ir.Value:
    """Of the tokens that are kept, in all sequences one behind the other: [kept tokens, 2]."""
    return body.op("Transpose", body.op("NonZero", kept), perm=[1, 0])
