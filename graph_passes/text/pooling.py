"""From tokens' vectors to a text's: what sentence-transformers calls Pooling, Dense and Normalize."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..names import POOLINGS as POOLINGS
from .nodes import Nodes

ACTIVATIONS = {"Identity": None, "Tanh": "Tanh", "ReLU": "Relu", "Sigmoid": "Sigmoid"}  # torch's names, ONNX's
_TINY_COUNT, _TINY_NORM = 1e-9, 1e-12  # what is divided by is at least this


@dataclass(frozen=True)
class Dense:
    """A linear layer on a text's vector: weight float32 [out, in], bias [out] or None; activation: of ONNX, or None."""

    weight: np.ndarray
    bias: np.ndarray | None
    activation: str | None


def pool(nodes: Nodes, tokens: ir.Value, mask: ir.Value, pooling: str) -> ir.Value:
    """tokens [batch, tokens, hidden], mask int64 [batch, tokens] -> float32 [batch, hidden]."""
    tokens = nodes.cast(tokens, ir.DataType.FLOAT)
    share = nodes.op("Unsqueeze", nodes.cast(mask, ir.DataType.FLOAT), nodes.ints(2))
    if pooling == "cls":
        return nodes.op("Gather", tokens, nodes.integer(0), axis=1)
    if pooling == "lasttoken":
        last = nodes.op("Max", nodes.op("Sub", nodes.sum(mask, 1, keepdims=1), nodes.integer(1)), nodes.integer(0))
        found = nodes.op("GatherND", tokens, last, batch_dims=1)
        return nodes.op("Mul", found, nodes.op("Gather", share, nodes.integer(0), axis=1))
    if pooling == "max":
        kept = nodes.op("Greater", share, nodes.constant(np.float32(0)))
        low = nodes.constant(np.float32(np.finfo(np.float32).min))
        return nodes.largest(nodes.op("Where", kept, tokens, low), axis=1, keepdims=0)
    if pooling == "weightedmean":
        share = nodes.op("Mul", share, nodes.op("CumSum", share, nodes.integer(1)))
    count = nodes.op("Max", nodes.sum(share, 1), nodes.constant(np.float32(_TINY_COUNT)))
    if pooling == "mean_sqrt_len_tokens":
        count = nodes.op("Sqrt", count)
    return nodes.op("Div", nodes.sum(nodes.summed_in_order(nodes.op("Mul", tokens, share), 1), 1), count)


def apply_dense(nodes: Nodes, vectors: ir.Value, layer: Dense) -> ir.Value:
    made = nodes.op("MatMul", vectors, nodes.constant(np.ascontiguousarray(layer.weight.T)))
    if layer.bias is not None:
        made = nodes.op("Add", made, nodes.constant(layer.bias))
    return made if layer.activation is None else nodes.op(layer.activation, made)


def normalize(nodes: Nodes, vectors: ir.Value) -> ir.Value:
    """Vectors of length 1."""
    norm = nodes.op("Sqrt", nodes.sum(nodes.op("Mul", vectors, vectors), 1, keepdims=1))
    return nodes.op("Div", vectors, nodes.op("Max", norm, nodes.constant(np.float32(_TINY_NORM))))
