"""Builds BERT encoders as ONNX from Hugging Face weights, without torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from .graph_builder import MASKED, GraphBuilder, ModelBuildError, Shape, check_weights, set_type, tensor_value


@dataclass(frozen=True)
class BertConfig:
    """The fields of a Hugging Face BERT config.json that shape the graph; the defaults are bert-base's."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ModelBuildError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )

    @property
    def head_dim(self) -> int:
        """The size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> BertConfig:
        """Reads a Hugging Face config.json. Raises ModelBuildError for a variant that build_bert does not know."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        for key, supported in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if fields.get(key, supported) != supported:
                raise ModelBuildError(f"{path}: {key} is {fields[key]!r}; only {supported!r} is supported")
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})


def bert_weight_shapes(config: BertConfig) -> dict[str, Shape]:
    """The weights that build_bert needs: Hugging Face name -> shape, linear layers as [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, hidden),
        "embeddings.token_type_embeddings.weight": (config.type_vocab_size, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    linears = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (inner, hidden),
        "output.dense": (hidden, inner),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"encoder.layer.{layer}"
        for name, shape in linears.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            shapes[f"{prefix}.{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
            shapes[f"{prefix}.{name}.bias"] = (hidden,)
    return shapes


def build_bert(weights: Mapping[str, np.ndarray], config: BertConfig, name: str = "bert") -> ir.Model:
    """Builds a BERT encoder (without pooler), opset 17, in the form that TorchScript exports have.

    weights: Hugging Face names -> arrays of any float dtype, stored as float32; see bert_weight_shapes. Weights that
        the encoder does not use (pooler, embeddings.position_ids) are ignored.

    Inputs, int64 [batch, sequence]: input_ids, attention_mask (1 = attend), token_type_ids.
    Output: last_hidden_state, float32 [batch, sequence, hidden_size].

    Raises ModelBuildError when a weight is missing or has another shape than the configuration says.
    """
    shapes = bert_weight_shapes(config)
    check_weights(weights, shapes)
    builder = _BertBuilder({key: np.asarray(weights[key], dtype=np.float32) for key in shapes}, config)
    return builder.build(name)


class _BertBuilder:
    def __init__(self, weights: Mapping[str, np.ndarray], config: BertConfig) -> None:
        self.weights = weights
        self.config = config
        self.graph = GraphBuilder()

    def build(self, name: str) -> ir.Model:
        graph = self.graph
        inputs = [
            tensor_value(input_name, ir.DataType.INT64, ["batch", "sequence"])
            for input_name in ("input_ids", "attention_mask", "token_type_ids")
        ]
        input_ids, attention_mask, token_type_ids = inputs
        mask = self.additive_mask(attention_mask)
        hidden = self.embeddings(input_ids, token_type_ids)
        with graph.module("encoder"):
            for layer in range(self.config.num_hidden_layers):
                with graph.module(f"layer.{layer}"):
                    hidden = self.layer(hidden, mask, f"encoder.layer.{layer}")
        set_type(hidden, ir.DataType.FLOAT, ["batch", "sequence", self.config.hidden_size])
        return graph.model(name, inputs, {"last_hidden_state": hidden})

    def additive_mask(self, attention_mask: ir.Value) -> ir.Value:
        """int64 [batch, sequence], 1 or 0 -> float32 [batch, 1, 1, sequence], 0 or MASKED."""
        graph = self.graph
        mask = graph.unsqueeze(graph.unsqueeze(attention_mask, 1), 2)
        mask = graph.node("Cast", mask, to=ir.DataType.FLOAT)
        mask = graph.node("Sub", graph.constant(np.float32(1)), mask)
        return graph.node("Mul", mask, graph.constant(MASKED))

    def embeddings(self, input_ids: ir.Value, token_type_ids: ir.Value) -> ir.Value:
        graph = self.graph
        with graph.module("embeddings"):
            sequence = graph.unsqueeze(graph.shape_of(input_ids, 1), 0)
            all_positions = np.arange(self.config.max_position_embeddings, dtype=np.int64)[None, :]
            position_ids = graph.node(
                "Slice",
                graph.weight("embeddings.position_ids", all_positions),
                graph.constant([0]),
                sequence,
                graph.constant([1]),
            )
            hidden = graph.node(
                "Add",
                self.lookup("word_embeddings", input_ids),
                self.lookup("token_type_embeddings", token_type_ids),
            )
            hidden = graph.node("Add", hidden, self.lookup("position_embeddings", position_ids))
            return self.layer_norm(hidden, "embeddings.LayerNorm")

    def lookup(self, table: str, ids: ir.Value) -> ir.Value:
        key = f"embeddings.{table}.weight"
        with self.graph.module(table):
            return self.graph.node("Gather", self.graph.weight(key, self.weights[key]), ids, axis=0)

    def layer(self, hidden: ir.Value, mask: ir.Value, prefix: str) -> ir.Value:
        graph = self.graph
        with graph.module("attention"):
            with graph.module("self"):
                context = self.self_attention(hidden, mask, f"{prefix}.attention.self")
            with graph.module("output"):
                hidden = self.dense_and_norm(context, hidden, f"{prefix}.attention.output")
        with graph.module("intermediate"):
            inner = self.linear(hidden, f"{prefix}.intermediate.dense")
            with graph.module("intermediate_act_fn"):
                inner = self.gelu(inner)
        with graph.module("output"):
            return self.dense_and_norm(inner, hidden, f"{prefix}.output")

    def self_attention(self, hidden: ir.Value, mask: ir.Value, prefix: str) -> ir.Value:
        graph, config = self.graph, self.config

        def heads(projection: str, perm: list[int]) -> ir.Value:
            x = self.linear(hidden, f"{prefix}.{projection}")
            x = graph.split_heads(x, config.num_attention_heads, config.head_dim)
            return graph.node("Transpose", x, perm=perm)

        query = heads("query", [0, 2, 1, 3])
        key_t = heads("key", [0, 2, 3, 1])
        value = heads("value", [0, 2, 1, 3])
        scores = graph.node("MatMul", query, key_t)
        scores = graph.node("Div", scores, graph.constant(np.float32(math.sqrt(config.head_dim))))
        scores = graph.node("Add", scores, mask)
        context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), value)
        context = graph.node("Transpose", context, perm=[0, 2, 1, 3])
        return graph.node("Reshape", context, graph.constant([0, 0, config.hidden_size]))

    def dense_and_norm(self, x: ir.Value, residual: ir.Value, prefix: str) -> ir.Value:
        x = self.linear(x, f"{prefix}.dense")
        x = self.graph.node("Add", x, residual)
        return self.layer_norm(x, f"{prefix}.LayerNorm")

    def linear(self, x: ir.Value, name: str) -> ir.Value:
        return self.graph.linear(x, name, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def layer_norm(self, x: ir.Value, name: str) -> ir.Value:
        scale, bias = (self.graph.weight(key, self.weights[key]) for key in (f"{name}.weight", f"{name}.bias"))
        with self.graph.module("LayerNorm"):
            return self.graph.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=self.config.layer_norm_eps)

    def gelu(self, x: ir.Value) -> ir.Value:
        """0.5 x (1 + erf(x / sqrt(2))), in the order of operations that exports have and ORT fuses."""
        graph = self.graph
        erf = graph.node("Erf", graph.node("Div", x, graph.constant(np.float32(math.sqrt(2)))))
        gate = graph.node("Add", erf, graph.constant(np.float32(1)))
        return graph.node("Mul", graph.node("Mul", x, gate), graph.constant(np.float32(0.5)))
