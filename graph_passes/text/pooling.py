"""Nodes that compute text vectors from token vectors: modules Pooling, Dense and Normalize of sentence-transformers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..names import POOLINGS as POOLINGS
from .nodes import Nodes

ACTIVATIONS = {"Identity": None, "Tanh": "Tanh", "ReLU": "Relu", "Sigmoid": "Sigmoid"}  # torch class -> ONNX operator
_TINY_COUNT, _TINY_NORM = 1e-9, 1e-12  # lower bounds of divisors


@dataclass(frozen=True)
class Dense:
    """A linear layer on text vectors: weight float32 [out, in], bias [out]; activation: an ONNX operator."""

    weight: np.ndarray
    bias: np.ndarray | None
    activation: str | None


def pool(nodes: Nodes, tokens: ir.Value, mask: ir.Value, pooling: str) -> ir.Value:
    """Pool token vectors [batch, tokens, hidden] by mask int64 [batch, tokens] to float32 [batch, hidden]."""
    tokens = nodes.cast(tokens, ir.DataType.FLOAT)
    weights = nodes.op("Unsqueeze", nodes.cast(mask, ir.DataType.FLOAT), nodes.ints(2))
    if pooling == "cls":
        return nodes.op("Gather", tokens, nodes.integer(0), axis=1)
    if pooling == "lasttoken":
        last = nodes.op("Max", nodes.op("Sub", nodes.sum(mask, 1, keepdims=1), nodes.integer(1)), nodes.integer(0))
        found = nodes.op("GatherND", tokens, last, batch_dims=1)
        return nodes.op("Mul", found, nodes.op("Gather", weights, nodes.integer(0), axis=1))
    if pooling == "max":
        kept = nodes.op("Greater", weights, nodes.constant(np.float32(0)))
        low = nodes.constant(np.float32(np.finfo(np.float32).min))
        return nodes.largest(nodes.op("Where", kept, tokens, low), axis=1, keepdims=0)
    if pooling == "weightedmean":
        weights = nodes.op("Mul", weights, nodes.op("CumSum", weights, nodes.integer(1)))
    count = nodes.op("Max", nodes.sum(weights, 1), nodes.constant(np.float32(_TINY_COUNT)))
    if pooling == "mean_sqrt_len_tokens":
        count = nodes.op("Sqrt", count)
    return nodes.op("Div", nodes.sum(nodes.summed_in_order(nodes.op("Mul", tokens, weights), 1), 1), count)


def apply_dense(nodes: Nodes, vectors: ir.Value, layer: Dense) -> ir.Value:
    """Apply a linear layer and its activation to text vectors."""
    made = nodes.op("MatMul", vectors, nodes.constant(np.ascontiguousarray(layer.weight.T)))
    if layer.bias is not None:
        made = nodes.op("Add", made, nodes.constant(layer.bias))
    return made if layer.activation is None else nodes.op(layer.activation, made)


def normalize(nodes: Nodes, vectors: ir.Value) -> ir.Value:
    """Scale vectors to length 1."""
    norm = nodes.op("Sqrt", nodes.sum(nodes.op("Mul", vectors, vectors), 1, keepdims=1))
    return nodes.op("Div", vectors, nodes.op("Max", norm, nodes.constant(np.float32(_TINY_NORM))))
