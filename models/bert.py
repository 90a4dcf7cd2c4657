"""Builds BERT encoders and masked language models as ONNX from Hugging Face weights, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .encoder import EncoderBuilder, EncoderConfig, linear_shapes, norm_shapes, read_config
from .graph_builder import Shape, check_weights, set_type, tensor_value


@dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """The fields of a Hugging Face BERT config.json that shape the graph; defaults as in bert-base."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> BertConfig:
        """Read a Hugging Face config.json.

        Raises:
            ModelBuildError: build_bert does not support this variant.
        """
        supported = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
        return cls(**read_config(path, cls.__dataclass_fields__, supported))


def bert_weight_shapes(config: BertConfig) -> dict[str, Shape]:
    """Return the weights that build_bert needs: Hugging Face name -> shape, linear layers as [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, hidden),
        "embeddings.token_type_embeddings.weight": (config.type_vocab_size, hidden),
        **norm_shapes("embeddings.LayerNorm", hidden),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"encoder.layer.{layer}"
        shapes |= linear_shapes(
            {
                f"{prefix}.attention.self.query": (hidden, hidden),
                f"{prefix}.attention.self.key": (hidden, hidden),
                f"{prefix}.attention.self.value": (hidden, hidden),
                f"{prefix}.attention.output.dense": (hidden, hidden),
                f"{prefix}.intermediate.dense": (inner, hidden),
                f"{prefix}.output.dense": (hidden, inner),
            }
        )
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= norm_shapes(f"{prefix}.{name}", hidden)
    return shapes


_MASKED_LM = "bert."  # the prefix of the encoder's weights in BertForMaskedLM
_HEAD = "cls.predictions"


def masked_lm_weight_shapes(config: BertConfig) -> dict[str, Shape]:
    """Return the weights that build_bert_masked_lm needs, as bert_weight_shapes does."""
    hidden = config.hidden_size
    return {
        **{f"{_MASKED_LM}{name}": shape for name, shape in bert_weight_shapes(config).items()},
        **linear_shapes({f"{_HEAD}.transform.dense": (hidden, hidden)}),
        **norm_shapes(f"{_HEAD}.transform.LayerNorm", hidden),
        f"{_HEAD}.bias": (config.vocab_size,),
    }


def build_bert(weights: Mapping[str, np.ndarray], config: BertConfig, name: str = "bert") -> ir.Model:
    """Build a BERT encoder (without pooler), opset 17, in the form of TorchScript exports.

    Inputs, int64 [batch, sequence]: input_ids, attention_mask (1 = attend), token_type_ids.
    Output: last_hidden_state, float32 [batch, sequence, hidden_size].

    weights: by Hugging Face name (bert_weight_shapes), in any float dtype, stored as float32. Unused weights (pooler,
    embeddings.position_ids) are ignored.

    Raises:
        ModelBuildError: A weight is missing or does not fit the configuration.
    """
    shapes = bert_weight_shapes(config)
    check_weights(weights, shapes)
    builder = _BertBuilder({key: np.asarray(weights[key], dtype=np.float32) for key in shapes}, config)
    return builder.build(name)


def build_bert_masked_lm(weights: Mapping[str, np.ndarray], config: BertConfig, name: str = "bert") -> ir.Model:
    """Build a BERT with the head of a masked language model, whose last weight is the table of words.

    Like build_bert, but with the names of BertForMaskedLM (masked_lm_weight_shapes), and the output is logits, float32
    [batch, sequence, vocab_size].

    Raises:
        ModelBuildError: A weight is missing or does not fit the configuration.
    """
    shapes = masked_lm_weight_shapes(config)
    check_weights(weights, shapes)
    found = {key.removeprefix(_MASKED_LM): np.asarray(weights[key], dtype=np.float32) for key in shapes}
    return _BertBuilder(found, config).build(name, has_head=True)


class _BertBuilder(EncoderBuilder):
    def __init__(self, weights: Mapping[str, np.ndarray], config: BertConfig) -> None:
        super().__init__(weights, config.layer_norm_eps)
        self.config = config

    def build(self, name: str, has_head: bool = False) -> ir.Model:
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
        output, width = "last_hidden_state", self.config.hidden_size
        if has_head:
            hidden, output, width = self.head(hidden), "logits", self.config.vocab_size
        set_type(hidden, ir.DataType.FLOAT, ["batch", "sequence", width])
        return graph.model(name, inputs, {output: hidden})

    def head(self, hidden: ir.Value) -> ir.Value:
        graph = self.graph
        with graph.module("cls"), graph.module("predictions"):
            with graph.module("transform"):
                hidden = self.gelu(self.linear(hidden, f"{_HEAD}.transform.dense"))
                hidden = self.layer_norm(hidden, f"{_HEAD}.transform.LayerNorm")
            words, bias = self.weights["embeddings.word_embeddings.weight"], self.weights[f"{_HEAD}.bias"]
            return graph.linear(hidden, f"{_HEAD}.decoder", words, bias)

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
                self.lookup("embeddings.word_embeddings", input_ids),
                self.lookup("embeddings.token_type_embeddings", token_type_ids),
            )
            hidden = graph.node("Add", hidden, self.lookup("embeddings.position_embeddings", position_ids))
            return self.layer_norm(hidden, "embeddings.LayerNorm")

    def layer(self, hidden: ir.Value, mask: ir.Value, prefix: str) -> ir.Value:
        graph, config = self.graph, self.config
        path = f"{prefix}.attention"
        with graph.module("attention"):
            with graph.module("self"):
                projections = (f"{path}.self.query", f"{path}.self.key", f"{path}.self.value")
                context = self.attention(hidden, projections, config.num_attention_heads, config.head_dim, mask)
            with graph.module("output"):
                x = self.linear(context, f"{path}.output.dense")
                hidden = self.add_and_norm(x, hidden, f"{path}.output.LayerNorm")
        return self.feed_forward(hidden, prefix)
