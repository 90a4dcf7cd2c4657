"""Code shared by BERT-like encoders: subgraphs built from Hugging Face weights, and config.json."""

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
    """Return the fields of a config.json that have these names.

    Args:
        path: The file.
        names: The fields to return.
        supported: Maps other fields to their only supported value, which is also the default.

    Raises:
        ModelBuildError: A field has an unsupported value.
    """
    fields = json.loads(Path(path).read_text(encoding="utf-8"))
    for key, value in supported.items():
        if fields.get(key, value) != value:
            raise ModelBuildError(f"{path}: {key} is {fields[key]!r}; only {value!r} is supported")
    return {name: fields[name] for name in names if name in fields}


class EncoderConfig:
    """Base of the encoders' configurations."""

    hidden_size: int
    num_attention_heads: int

    def __post_init__(self) -> None:
        """Check that the heads have the same width.

        Raises:
            ModelBuildError: hidden_size is not a multiple of the number of heads.
        """
        if self.hidden_size % self.num_attention_heads:
            raise ModelBuildError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )

    @property
    def head_dim(self) -> int:
        """The size of one attention head."""
        return self.hidden_size // self.num_attention_heads


def linear_shapes(linears: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of weights and biases of linear layers, given name -> [out, in]."""
    shapes: dict[str, Shape] = {}
    for name, shape in linears.items():
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = shape[:1]
    return shapes


def norm_shapes(name: str, width: int) -> dict[str, Shape]:
    """Return the shapes of a LayerNorm's weight and bias."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


class EncoderBuilder:
    """Builds the parts of an encoder from weights under their Hugging Face names."""

    def __init__(self, weights: Mapping[str, np.ndarray], layer_norm_eps: float) -> None:
        self.weights = weights
        self.layer_norm_eps = layer_norm_eps
        self.graph = GraphBuilder()

    def additive_mask(self, attention_mask: ir.Value) -> ir.Value:
        """Convert a mask int64 [batch, sequence] of 1 and 0 to float32 [batch, 1, 1, sequence] of 0 and MASKED."""
        graph = self.graph
        mask = graph.unsqueeze(graph.unsqueeze(attention_mask, 1), 2)
        mask = graph.node("Cast", mask, to=ir.DataType.FLOAT)
        mask = graph.node("Sub", graph.constant(np.float32(1)), mask)
        return graph.node("Mul", mask, graph.constant(MASKED))

    def lookup(self, table: str, ids: ir.Value) -> ir.Value:
        """Look up rows of a table, such as "embeddings.word_embeddings".

        Its last part names the module of the nodes.
        """
        key = f"{table}.weight"
        with self.graph.module(table.rpartition(".")[2]):
            return self.graph.node("Gather", self.graph.weight(key, self.weights[key]), ids, axis=0)

    def attention(
        self, hidden: ir.Value, projections: tuple[str, str, str], heads: int, head_dim: int, *added: ir.Value
    ) -> ir.Value:
        """Return the result of attention before the output layer, [batch, sequence, heads * head_dim].

        Args:
            hidden: [batch, sequence, width].
            projections: Paths of the weights of the query, key and value layers.
            heads: Number of heads.
            head_dim: Size of a head.
            *added: Addends of the scores; each broadcasts to [batch, heads, sequence, sequence].
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
        """Return the output of a block's MLP: up projection, GELU, down projection, residual, LayerNorm."""
        graph = self.graph
        with graph.module("intermediate"):
            inner = self.linear(hidden, f"{prefix}.intermediate.dense")
            with graph.module("intermediate_act_fn"):
                inner = self.gelu(inner)
        with graph.module("output"):
            x = self.linear(inner, f"{prefix}.output.dense")
            return self.add_and_norm(x, hidden, f"{prefix}.output.LayerNorm")

    def add_and_norm(self, x: ir.Value, residual: ir.Value, norm: str) -> ir.Value:
        """Return the LayerNorm of x + residual."""
        return self.layer_norm(self.graph.node("Add", x, residual), norm)

    def linear(self, x: ir.Value, name: str) -> ir.Value:
        """Return the output of the linear layer whose weights have this name."""
        return self.graph.linear(x, name, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def layer_norm(self, x: ir.Value, name: str) -> ir.Value:
        """Return the output of the LayerNorm whose weights have this name."""
        scale, bias = (self.graph.weight(key, self.weights[key]) for key in (f"{name}.weight", f"{name}.bias"))
        with self.graph.module("LayerNorm"):
            return self.graph.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=self.layer_norm_eps)

    def gelu(self, x: ir.Value) -> ir.Value:
        """Return 0.5 x (1 + erf(x / sqrt(2))), with the order of operations of exporters, which ONNX Runtime fuses."""
        graph = self.graph
        erf = graph.node("Erf", graph.node("Div", x, graph.constant(np.float32(math.sqrt(2)))))
        gate = graph.node("Add", erf, graph.constant(np.float32(1)))
        return graph.node("Mul", graph.node("Mul", x, gate), graph.constant(np.float32(0.5)))
