"""Builds MPNet encoders as ONNX from Hugging Face weights, without torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .encoder import EncoderBuilder, EncoderConfig, linear_shapes, norm_shapes, read_config
from .graph_builder import Shape, check_weights, set_type, tensor_value

PADDING = 1  # token id and position of padding; positions of tokens start at PADDING + 1
_MAX_DISTANCE = 128  # tokens with larger distances share the last bucket


@dataclass(frozen=True)
class MpnetConfig(EncoderConfig):
    """The fields of a Hugging Face MPNet config.json that shape the graph; defaults as in mpnet-base."""

    vocab_size: int = 30527
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 514
    relative_attention_num_buckets: int = 32
    layer_norm_eps: float = 1e-5

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> MpnetConfig:
        """Read a Hugging Face config.json.

        Raises:
            ModelBuildError: build_mpnet does not support this variant.
        """
        # transformers uses relative_attention_num_buckets as the size of the table, but always computes 32 buckets.
        supported = {"hidden_act": "gelu", "pad_token_id": PADDING, "relative_attention_num_buckets": 32}
        return cls(**read_config(path, cls.__dataclass_fields__, supported))


def mpnet_weight_shapes(config: MpnetConfig) -> dict[str, Shape]:
    """Return the weights that build_mpnet needs: Hugging Face name -> shape, linear layers as [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, hidden),
        **norm_shapes("embeddings.LayerNorm", hidden),
        "encoder.relative_attention_bias.weight": (config.relative_attention_num_buckets, config.num_attention_heads),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"encoder.layer.{layer}"
        shapes |= linear_shapes(
            {f"{prefix}.attention.attn.{name}": (hidden, hidden) for name in ("q", "k", "v", "o")}
            | {f"{prefix}.intermediate.dense": (inner, hidden), f"{prefix}.output.dense": (hidden, inner)}
        )
        for name in ("attention.LayerNorm", "output.LayerNorm"):
            shapes |= norm_shapes(f"{prefix}.{name}", hidden)
    return shapes


def build_mpnet(weights: Mapping[str, np.ndarray], config: MpnetConfig, name: str = "mpnet") -> ir.Model:
    """Build an MPNet encoder (without pooler), opset 17, in the form of TorchScript exports.

    Inputs, int64 [batch, sequence]: input_ids (1 = padding), attention_mask (1 = attend).
    Output: last_hidden_state, float32 [batch, sequence, hidden_size].

    weights: by Hugging Face name (mpnet_weight_shapes), in any float dtype, stored as float32. Unused weights (pooler,
    embeddings.position_ids) are ignored.

    Raises:
        ModelBuildError: A weight is missing or does not fit the configuration.
    """
    shapes = mpnet_weight_shapes(config)
    check_weights(weights, shapes)
    builder = _MpnetBuilder({key: np.asarray(weights[key], dtype=np.float32) for key in shapes}, config)
    return builder.build(name)


class _MpnetBuilder(EncoderBuilder):
    def __init__(self, weights: Mapping[str, np.ndarray], config: MpnetConfig) -> None:
        super().__init__(weights, config.layer_norm_eps)
        self.config = config

    def build(self, name: str) -> ir.Model:
        graph = self.graph
        inputs = [
            tensor_value(input_name, ir.DataType.INT64, ["batch", "sequence"])
            for input_name in ("input_ids", "attention_mask")
        ]
        input_ids, attention_mask = inputs
        mask = self.additive_mask(attention_mask)
        hidden = self.embeddings(input_ids)
        with graph.module("encoder"):
            bias = self.position_bias(hidden)
            for layer in range(self.config.num_hidden_layers):
                with graph.module(f"layer.{layer}"):
                    hidden = self.layer(hidden, bias, mask, f"encoder.layer.{layer}")
        set_type(hidden, ir.DataType.FLOAT, ["batch", "sequence", self.config.hidden_size])
        return graph.model(name, inputs, {"last_hidden_state": hidden})

    def embeddings(self, input_ids: ir.Value) -> ir.Value:
        graph = self.graph
        with graph.module("embeddings"):
            # Positions of tokens start at PADDING + 1 and do not count padding tokens.
            is_token = graph.node("Not", graph.node("Equal", input_ids, graph.constant(PADDING)))
            is_token = graph.node("Cast", is_token, to=ir.DataType.INT32)
            positions = graph.node("Mul", graph.node("CumSum", is_token, graph.constant(1)), is_token)
            positions = graph.node("Cast", positions, to=ir.DataType.INT64)
            positions = graph.node("Add", positions, graph.constant(PADDING))
            words = self.lookup("embeddings.word_embeddings", input_ids)
            hidden = graph.node("Add", words, self.lookup("embeddings.position_embeddings", positions))
            return self.layer_norm(hidden, "embeddings.LayerNorm")

    def position_bias(self, hidden: ir.Value) -> ir.Value:
        """Return attention biases for the distances of keys and queries, float32 [batch, heads, sequence, sequence]."""
        graph = self.graph
        batch, sequence = graph.shape_of(hidden, 0), graph.shape_of(hidden, 1)
        positions = graph.node("Range", graph.constant(0), sequence, graph.constant(1))
        distance = graph.node("Sub", graph.unsqueeze(positions, 0), graph.unsqueeze(positions, 1))
        bias = self.lookup("encoder.relative_attention_bias", self.bucket(distance))
        bias = graph.unsqueeze(graph.node("Transpose", bias, perm=[2, 0, 1]), 0)
        sizes = [graph.unsqueeze(batch, 0), graph.constant([1])] + [graph.unsqueeze(sequence, 0)] * 2
        return graph.node("Expand", bias, graph.node("Concat", *sizes, axis=0))

    def bucket(self, distance: ir.Value) -> ir.Value:
        """Return the table row for each distance, int64 of the same shape.

        Half of the rows are for keys after the query. In each half, the first 50 % of the rows are for one distance
        each; the rest are for ranges of distances that grow logarithmically.
        """
        graph = self.graph
        half = self.config.relative_attention_num_buckets // 2
        exact = half // 2
        behind = graph.node("Neg", distance)
        is_after = graph.node("Cast", graph.node("Less", behind, graph.constant(0)), to=ir.DataType.INT64)
        first = graph.node("Mul", is_after, graph.constant(half))
        far = graph.node("Abs", behind)
        is_exact = graph.node("Less", far, graph.constant(exact))
        # Distance 0 gives -Inf here, but the result for small distances is not used.
        log = graph.node("Log", self.divided(graph.node("Cast", far, to=ir.DataType.FLOAT), exact))
        log = self.divided(log, math.log(_MAX_DISTANCE / exact))
        grown = graph.node("Mul", log, graph.constant(np.float32(half - exact)))
        grown = graph.node("Add", graph.node("Cast", grown, to=ir.DataType.INT64), graph.constant(exact))
        grown = graph.node("Min", grown, graph.constant(half - 1))
        return graph.node("Add", first, graph.node("Where", is_exact, far, grown))

    def divided(self, x: ir.Value, divisor: float) -> ir.Value:
        return self.graph.node("Div", x, self.graph.constant(np.float32(divisor)))

    def layer(self, hidden: ir.Value, bias: ir.Value, mask: ir.Value, prefix: str) -> ir.Value:
        graph, config = self.graph, self.config
        path = f"{prefix}.attention"
        with graph.module("attention"):
            with graph.module("attn"):
                projections = (f"{path}.attn.q", f"{path}.attn.k", f"{path}.attn.v")
                context = self.attention(hidden, projections, config.num_attention_heads, config.head_dim, bias, mask)
                context = self.linear(context, f"{path}.attn.o")
            hidden = self.add_and_norm(context, hidden, f"{path}.LayerNorm")
        return self.feed_forward(hidden, prefix)
