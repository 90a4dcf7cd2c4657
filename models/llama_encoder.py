"""Builds text encoders with a decoder's layers and no cache: Qwen3-Embedding, EmbeddingGemma, rerankers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from .graph_builder import ModelBuildError, Weight, check_weights, set_type, tensor_value
from .llama_config import LlamaConfig, llama_weight_shapes
from .llama_graph import LlamaBuilder

EncoderOutput = Literal["last_hidden_state", "logits", "score"]
Positions = Literal["input", "range"]
SCORE_WEIGHT = "score.weight"


def build_llama_encoder(
    weights: Mapping[str, Weight],
    config: LlamaConfig,
    name: str = "encoder",
    output: EncoderOutput = "last_hidden_state",
    *,
    positions: Positions = "input",
    bidirectional: bool = False,
    pad_token_id: int = 0,
) -> ir.Model:
    """Build a decoder's layers without a cache, opset 17, with the names of Optimum's exports.

    Inputs: input_ids and attention_mask int64 [batch, sequence]; with positions "input" also position_ids.

    Args:
        weights: As for `build_llama`, whose rotated pairs must be halves; for output "score" also `score.weight` [1,
            hidden_size].
        config: The configuration.
        name: Name of the graph.
        output: "last_hidden_state": float32 [batch, sequence, hidden]. "logits": those of all tokens, float32 [batch,
            sequence, vocab_size]. "score": logits float32 [batch, 1], of the last token that is not `pad_token_id`, as
            transformers computes it for sequence classification.
        positions: "range": 0, 1, 2, …, whatever the mask is.
        bidirectional: Tokens see later tokens too; a window reaches window / 2 tokens in both directions, as in
            EmbeddingGemma.
        pad_token_id: The padding token, for output "score".

    Raises:
        ModelBuildError: A weight is missing or does not fit the configuration, or an argument is unknown.
    """
    for said, known in ((output, EncoderOutput), (positions, Positions)):
        if said not in get_args(known):
            raise ModelBuildError(f"{said!r} is not one of {', '.join(get_args(known))}")
    shapes = llama_weight_shapes(config)
    if output == "score":
        shapes[SCORE_WEIGHT] = (1, config.hidden_size)
    check_weights(weights, shapes)
    return _EncoderBuilder({key: weights[key] for key in shapes}, config, positions, bidirectional).encoder(
        name, output, pad_token_id
    )


class _EncoderBuilder(LlamaBuilder):
    def __init__(
        self, weights: Mapping[str, Weight], config: LlamaConfig, positions: Positions, bidirectional: bool
    ) -> None:
        super().__init__(weights, config)
        self._positions, self._bidirectional = positions, bidirectional

    def encoder(self, name: str, output: EncoderOutput, pad_token_id: int) -> ir.Model:
        graph, config = self.graph, self.config
        shape = ["batch", "sequence"]
        names = ["input_ids", "attention_mask", *(["position_ids"] if self._positions == "input" else [])]
        inputs = [tensor_value(one, ir.DataType.INT64, shape) for one in names]
        input_ids, attention_mask = inputs[:2]
        with graph.module("model"):
            with graph.module("embed_tokens"):
                hidden = graph.node("Gather", self.weight("model.embed_tokens.weight"), input_ids, axis=0)
                if config.embedding_scale != 1:
                    hidden = self.scaled(hidden, config.embedding_scale)
            position_ids = inputs[2] if len(inputs) > 2 else graph.unsqueeze(self._range(input_ids), 0)
            layers = range(config.num_hidden_layers)
            windows = dict.fromkeys(map(config.window, layers))
            masks = {window: self._mask(input_ids, attention_mask, window) for window in windows}
            with graph.module("rotary_emb"):
                rotations = {local: self.rotation(position_ids, local) for local in map(config.is_local, layers)}
            for layer in layers:
                with graph.module(f"layers.{layer}"):
                    mask, rotation = masks[config.window(layer)], rotations[config.is_local(layer)]
                    hidden, *_ = self.layer(hidden, mask, rotation, [], layer)
            with graph.module("norm"):
                hidden = self.rms_norm(hidden, "model.norm.weight")
        if output == "last_hidden_state":
            set_type(hidden, ir.DataType.FLOAT, [*shape, config.hidden_size])
        elif output == "logits":
            hidden = self.scaled_logits(self.head(hidden))
            set_type(hidden, ir.DataType.FLOAT, [*shape, config.vocab_size])
        else:
            hidden = self._score(hidden, input_ids, pad_token_id)
            set_type(hidden, ir.DataType.FLOAT, ["batch", 1])
        return graph.model(name, inputs, {"logits" if output == "score" else output: hidden})

    def _range(self, input_ids: ir.Value) -> ir.Value:
        graph = self.graph
        return graph.node("Range", graph.constant(0), graph.shape_of(input_ids, 1), graph.constant(1))

    def _mask(self, input_ids: ir.Value, attention_mask: ir.Value, window: int) -> ir.Value:
        """Return bool [batch, 1, sequence, sequence]: which keys a query sees."""
        graph = self.graph
        query, key = graph.unsqueeze(self._range(input_ids), 1), graph.unsqueeze(self._range(input_ids), 0)
        seen = graph.unsqueeze(graph.node("Cast", attention_mask, to=ir.DataType.BOOL), 1, 2)
        behind = window
        if not self._bidirectional:
            seen = graph.node("And", seen, graph.node("LessOrEqual", key, query))
        elif window:
            behind = window // 2 + 1
            seen = graph.node("And", seen, graph.node("Less", key, graph.node("Add", query, graph.constant(behind))))
        if window:
            first = graph.node("Sub", query, graph.constant(behind))
            seen = graph.node("And", seen, graph.node("Greater", key, first))
        fill = np.float32(np.finfo(np.float32).min)
        return graph.node("Where", seen, graph.constant(np.float32(0)), graph.constant(fill))

    def _score(self, hidden: ir.Value, input_ids: ir.Value, pad_token_id: int) -> ir.Value:
        """Return the score of the last token that is not padding."""
        graph = self.graph
        scores = graph.linear(hidden, "score", self.weights[SCORE_WEIGHT])
        is_token = graph.node("Not", graph.node("Equal", input_ids, graph.constant(pad_token_id)))
        position = graph.node("Mul", graph.node("Cast", is_token, to=ir.DataType.INT64), self._range(input_ids))
        last = graph.node("ArgMax", position, axis=-1, keepdims=1)
        return graph.node("GatherND", scores, last, batch_dims=1)
