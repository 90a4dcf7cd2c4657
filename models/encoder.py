"""What BERT-like encoders share: parts of a graph written from Hugging Face weights, and their config.json."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from .graph_builder import MASKED, GraphBuilder, ModelBuildError, Shape


def read_config(path: str | os.PathLike[str], names: Mapping[str, Any], supported: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that have these names.

    supported: further fields -> the only value that is allowed, which is also what they are where they are left out.
    Raises ModelBuildError for another one.
    """
    fields = json.loads(Path(path).read_text(encoding="utf-8"))
    for key, value in supported.items():
        if fields.get(key, value) != value:
            raise ModelBuildError(f"{path}: {key} is {fields[key]!r}; only {value!r} is supported")
    return {name: fields[name] for name in names if name in fields}


class EncoderConfig:
    """What the configurations of encoders share: dataclasses that have these fields."""

    hidden_size: int
    num_attention_heads: int

    def __post_init__(self) -> None:
        """Raises ModelBuildError unless the heads have the same width."""
        if self.hidden_size % self.num_attention_heads:
            raise ModelBuildError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )

    @property
    def head_dim(self) -> int:
        """The size of one attention head."""
        return self.hidden_size // self.num_attention_heads


def linear_shapes(linears: Mapping[str, Shape]) -> dict[str, Shape]:
    """Name -> [out, in] of linear layers, as the shapes of their weights and biases."""
    shapes: dict[str, Shape] = {}
    for name, shape in linears.items():
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = shape[:1]
    return shapes


def norm_shapes(name: str, width: int) -> dict[str, Shape]:
    """The shapes of a LayerNorm's weight and bias."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


class EncoderBuilder:
    """Writes the parts of an encoder, reading weights by their Hugging Face names."""

    def __init__(self, weights: Mapping[str, np.ndarray], layer_norm_eps: float) -> None:
        self.weights = weights
        self.layer_norm_eps = layer_norm_eps
        self.graph = GraphBuilder()

    def additive_mask(self, attention_mask: ir.Value) -> ir.Value:
        """int64 [batch, sequence], 1 or 0 -> float32 [batch, 1, 1, sequence], 0 or MASKED."""
        graph = self.graph
        mask = graph.unsqueeze(graph.unsqueeze(attention_mask, 1), 2)
        mask = graph.node("Cast", mask, to=ir.DataType.FLOAT)
        mask = graph.node("Sub", graph.constant(np.float32(1)), mask)
        return graph.node("Mul", mask, graph.constant(MASKED))

    def lookup(self, table: str, ids: ir.Value) -> ir.Value:
        """Rows of the table at path `table` ("embeddings.word_embeddings"), in a module called like its last part."""
        key = f"{table}.weight"
        with self.graph.module(table.rpartition(".")[2]):
            return self.graph.node("Gather", self.graph.weight(key, self.weights[key]), ids, axis=0)

    def attention(
        self, hidden: ir.Value, projections: tuple[str, str, str], heads: int, head_dim: int, *added: ir.Value
    ) -> ir.Value:
        """Attention up to where its heads are side by side again, [batch, sequence, heads * head_dim].

        projections: paths of the weights for queries, keys and values. added: to the scores, one after the other; each
        broadcasts to [batch, heads, sequence, sequence].
        """
        graph = self.graph

        def split(path: str, perm: list[int]) -> ir.Value:
            x = graph.split_heads(self.linear(hidden, path), heads, head_dim)
            return graph.node("Transpose", x, perm=perm)

        query = split(projections[0], [0, 2, 1, 3])
        key_t = split(projections[1], [0, 2, 3, 1])
        value = split(projections[2], [0, 2, 1, 3])
        scores = graph.node("MatMul", query, key_t)
        scores = graph.node("Div", scores, graph.constant(np.float32(math.sqrt(head_dim))))
        for one in added:
            scores = graph.node("Add", scores, one)
        context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), value)
        context = graph.node("Transpose", context, perm=[0, 2, 1, 3])
        return graph.node("Reshape", context, graph.constant([0, 0, heads * head_dim]))

    def feed_forward(self, hidden: ir.Value, prefix: str) -> ir.Value:
        """A layer behind its attention: up, GELU, down, residual, LayerNorm."""
        graph = self.graph
        with graph.module("intermediate"):
            inner = self.linear(hidden, f"{prefix}.intermediate.dense")
            with graph.module("intermediate_act_fn"):
                inner = self.gelu(inner)
        with graph.module("output"):
            x = self.linear(inner, f"{prefix}.output.dense")
            return self.add_and_norm(x, hidden, f"{prefix}.output.LayerNorm")

    def add_and_norm(self, x: ir.Value, residual: ir.Value, norm: str) -> ir.Value:
        return self.layer_norm(self.graph.node("Add", x, residual), norm)

    def linear(self, x: ir.Value, name: str) -> ir.Value:
        return self.graph.linear(x, name, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def layer_norm(self, x: ir.Value, name: str) -> ir.Value:
        scale, bias = (self.graph.weight(key, self.weights[key]) for key in (f"{name}.weight", f"{name}.bias"))
        with self.graph.module("LayerNorm"):
            return self.graph.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=self.layer_norm_eps)

    def gelu(self, x: ir.Value) -> ir.Value:
        """0.5 x (1 + erf(x / sqrt(2))), in the order of operations that exports have and ORT fuses."""
        graph = self.graph
        erf = graph.node("Erf", graph.node("Div", x, graph.constant(np.float32(math.sqrt(2)))))
        gate = graph.node("Add", erf, graph.constant(np.float32(1)))
        return graph.node("Mul", graph.node("Mul", x, gate), graph.constant(np.float32(0.5)))
