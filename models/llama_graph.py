"""The graph of a Llama decoder in standard ONNX operators, as Optimum exports it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from .graph_builder import MASKED, MICROSOFT_DOMAIN, GraphBuilder, Weight, interleaved, set_type, tensor_value
from .llama_config import LlamaConfig

_TABLE = "model.embed_tokens.weight"

# GELU with tanh: x (1 + tanh(_GELU_SCALE (x + _GELU_CUBE x^3))) / 2.
_GELU_CUBE = np.float32(0.044715)
_GELU_SCALE = np.float32(math.sqrt(2 / math.pi))


def rotary_frequencies(config: LlamaConfig, local: bool = False) -> np.ndarray:
    """Return the frequency of each pair, in radians per position; 0 for pairs that are not rotated.

    local: Return those of layers with `local_rope_theta`.
    """
    size, theta, factors = config.rotary_size, config.rope_theta, config.rope_factors
    if local and config.local_rope_theta is not None:
        theta, factors = config.local_rope_theta, None
    frequencies = np.asarray(theta ** (-np.arange(0, size, 2) / size))
    frequencies = frequencies if factors is None else frequencies / np.array(factors)
    return np.pad(frequencies, (0, (config.head_size - size) // 2))


def rotary_magnitudes(config: LlamaConfig) -> np.ndarray | None:
    """Return the factor of each pair's cosine and sine; None: all are 1."""
    if config.rope_magnitude == 1:
        return None
    return np.where(np.arange(config.head_size // 2) < config.rotary_size // 2, config.rope_magnitude, 1.0)


class LlamaBuilder:
    """Builds the graph of a decoder from weights under their Hugging Face names."""

    def __init__(self, weights: Mapping[str, Weight], config: LlamaConfig, one_table: bool = False) -> None:
        self.weights = weights
        self.config = config
        self.one_table = one_table and config.tie_word_embeddings
        self.graph = GraphBuilder()

    def build(self, name: str) -> ir.Model:
        """Return the model, with the inputs and outputs that build_llama describes."""
        graph, config = self.graph, self.config
        total = "past_sequence + sequence"
        input_ids = tensor_value("input_ids", ir.DataType.INT64, ["batch", "sequence"])
        attention_mask = tensor_value("attention_mask", ir.DataType.INT64, ["batch", total])
        cache: list[int | str] = ["batch", config.num_key_value_heads, "past_sequence", config.head_size]
        past = [
            tensor_value(f"past_key_values.{layer}.{part}", ir.DataType.FLOAT, cache)
            for layer in range(config.num_hidden_layers)
            for part in ("key", "value")
        ]
        with graph.module("model"):
            with graph.module("embed_tokens"):
                embedded = graph.node("Gather", self.weight(_TABLE), input_ids, axis=0)
                if config.embedding_scale != 1:
                    embedded = graph.node("Mul", embedded, graph.constant(np.float32(config.embedding_scale)))
            hidden, present, positions = self.decode(embedded, input_ids, attention_mask, past)
        logits = self.scaled_logits(self.head(hidden))

        set_type(logits, ir.DataType.FLOAT, ["batch", "sequence", config.vocab_size])
        cache[2] = total
        outputs = {"logits": logits}
        for before, value in zip(past, present, strict=True):
            outputs[(before.name or "").replace("past_key_values", "present")] = set_type(
                value, ir.DataType.FLOAT, cache
            )
        return graph.model(name, [input_ids, attention_mask, *positions, *past], outputs)

    def decode(
        self, hidden: ir.Value, input_ids: ir.Value, attention_mask: ir.Value, past: list[ir.Value]
    ) -> tuple[ir.Value, list[ir.Value], list[ir.Value]]:
        """Return the last hidden state, the present cache and inputs for positions. hidden: the embedded tokens."""
        graph = self.graph
        position_ids = tensor_value("position_ids", ir.DataType.INT64, ["batch", "sequence"])
        layers = range(self.config.num_hidden_layers)
        windows = dict.fromkeys(map(self.config.window, layers))
        masks = {window: self.additive_mask(input_ids, attention_mask, past[0], window) for window in windows}
        with graph.module("rotary_emb"):
            rotations = {local: self.rotation(position_ids, local) for local in map(self.config.is_local, layers)}
        present: list[ir.Value] = []
        for layer in layers:
            mask, rotation = masks[self.config.window(layer)], rotations[self.config.is_local(layer)]
            with graph.module(f"layers.{layer}"):
                hidden, *cached = self.layer(
                    hidden,
                    mask,
                    None if layer in self.config.no_rope_layers else rotation,
                    past[2 * layer : 2 * layer + 2],
                    layer,
                )
            present += cached
        with graph.module("norm"):
            hidden = self.rms_norm(hidden, "model.norm.weight")
        return hidden, present, [position_ids]

    def head(self, hidden: ir.Value) -> ir.Value:
        """Return the logits of a hidden state."""
        graph = self.graph
        if self.one_table:
            with graph.module("lm_head"):
                return graph.node("MatMul", hidden, graph.node("Transpose", self.weight(_TABLE), perm=[1, 0]))
        weight = _TABLE if self.config.tie_word_embeddings else "lm_head.weight"
        return graph.linear(hidden, "lm_head", self.weights[weight])

    def scaled_logits(self, logits: ir.Value) -> ir.Value:
        """Return the logits after `logit_scale` and `logit_softcap`."""
        if self.config.logit_scale != 1:
            logits = self.scaled(logits, self.config.logit_scale)
        return self.capped(logits, self.config.logit_softcap)

    def capped(self, x: ir.Value, softcap: float) -> ir.Value:
        """Return softcap tanh(x / softcap), or x if softcap is 0."""
        if softcap == 0:
            return x
        return self.scaled(self.graph.node("Tanh", self.scaled(x, 1 / softcap)), softcap)

    def scaled(self, x: ir.Value, factor: float) -> ir.Value:
        """Return x times a number."""
        return self.graph.node("Mul", x, self.graph.constant(np.float32(factor)))

    def weight(self, key: str) -> ir.Value:
        """Return the initializer of a weight."""
        return self.graph.weight(key, self.weights[key])

    def additive_mask(
        self, input_ids: ir.Value, attention_mask: ir.Value, past_key: ir.Value, window: int = 0
    ) -> ir.Value:
        """Return float32 [batch, 1, sequence, past + sequence] with 0 if a query may attend to a key, else MASKED."""
        graph = self.graph
        past = graph.shape_of(past_key, 2)
        total = graph.node("Add", past, graph.shape_of(input_ids, 1))
        zero, one = graph.constant(0), graph.constant(1)
        query_index = graph.unsqueeze(graph.node("Range", past, total, one), 1)
        key_index = graph.unsqueeze(graph.node("Range", zero, total, one), 0)
        causal = graph.node("LessOrEqual", key_index, query_index)
        if window:
            first = graph.node("Sub", query_index, graph.constant(window - 1))
            causal = graph.node("And", causal, graph.node("GreaterOrEqual", key_index, first))
        attend = graph.unsqueeze(graph.node("Cast", attention_mask, to=ir.DataType.BOOL), 1, 2)
        allowed = graph.node("And", causal, attend)
        return graph.node("Where", allowed, graph.constant(np.float32(0)), graph.constant(MASKED))

    def rotation(self, position_ids: ir.Value, local: bool = False) -> tuple[ir.Value, ir.Value]:
        """Return cos and sin of position * frequency, float32 [batch, 1, sequence, head_dim]; both halves are equal."""
        graph, config = self.graph, self.config
        frequencies = rotary_frequencies(config, local).astype(np.float32)
        positions = graph.unsqueeze(graph.node("Cast", position_ids, to=ir.DataType.FLOAT), 1, 3)
        angles = graph.node("Mul", positions, graph.constant(frequencies))
        angles = graph.node("Concat", angles, angles, axis=-1)
        cos, sin = graph.node("Cos", angles), graph.node("Sin", angles)
        if (magnitudes := rotary_magnitudes(config)) is None:
            return cos, sin
        factor = graph.constant(np.concatenate([magnitudes, magnitudes]).astype(np.float32))
        return graph.node("Mul", cos, factor), graph.node("Mul", sin, factor)

    def layer(
        self,
        hidden: ir.Value,
        mask: ir.Value,
        rotation: tuple[ir.Value, ir.Value] | None,
        past: list[ir.Value],
        index: int,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return the output, present key and present value of one layer."""
        graph = self.graph
        prefix = f"model.layers.{index}"
        with graph.module("input_layernorm"):
            normed = self.rms_norm(hidden, f"{prefix}.input_layernorm.weight")
        with graph.module("self_attn"):
            attended, key, value = self.attention(normed, mask, rotation, past, f"{prefix}.self_attn")
        hidden = graph.node("Add", hidden, self.residual(attended, f"{prefix}.post_attention_layernorm"))
        norm = self.config.mlp_norm(index)
        with graph.module(norm.split(".")[-2]):
            normed = self.rms_norm(hidden, norm)
        added = self.residual(self.mlp(normed, prefix), f"{prefix}.post_feedforward_layernorm")
        return graph.node("Add", hidden, added), key, value

    def residual(self, x: ir.Value, norm: str) -> ir.Value:
        """Return what is added to the hidden state for the output x of a sublayer; norm: its norm, if it has one."""
        if self.config.sandwich_norms:
            with self.graph.module(norm.rpartition(".")[2]):
                x = self.rms_norm(x, f"{norm}.weight")
        return x if self.config.residual_scale == 1 else self.scaled(x, self.config.residual_scale)

    def mlp(self, normed: ir.Value, prefix: str) -> ir.Value:
        """Return the gated MLP of a normalized hidden state, or its mixture of experts."""
        if self.config.num_experts:
            return self.experts(normed, prefix)
        graph = self.graph
        with graph.module("mlp"):
            gate = self.linear(normed, f"{prefix}.mlp.gate_proj")
            with graph.module("act_fn"):
                gate = self.activation(gate)
            inner = graph.node("Mul", gate, self.linear(normed, f"{prefix}.mlp.up_proj"))
            return self.linear(inner, f"{prefix}.mlp.down_proj")

    def experts(self, normed: ir.Value, prefix: str) -> ir.Value:
        """Return the mixture of experts of a normalized hidden state: a node MoE of ONNX Runtime."""
        graph, config, name = self.graph, self.config, f"{prefix}.mlp.experts"
        with graph.module("mlp"):
            logits = self.linear(normed, f"{prefix}.mlp.gate")
            rows = graph.node("Reshape", logits, graph.constant([-1, config.num_experts]))
            gate, up, down = (self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            # The CPU's operator reads rows of gate and up in turns.
            layers = [graph.weight(f"{name}.gate_up_proj", interleaved(gate, up)), None]
            layers += [graph.weight(f"{name}.down_proj", down)]
            if config.expert_bias:
                gate, up, down = (self.weights[f"{name}.{part}_proj.bias"] for part in ("gate", "up", "down"))
                layers[1] = graph.weight(f"{name}.gate_up_proj_bias", interleaved(gate, up))
                layers += [graph.weight(f"{name}.down_proj_bias", down)]
            attributes: dict[str, Any] = {}
            if config.swiglu_limit is not None:
                attributes = {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": config.swiglu_limit}
            return graph.node(
                "MoE",
                normed,
                rows,
                *layers,
                domain=MICROSOFT_DOMAIN,
                k=config.num_experts_per_tok,
                activation_type="swiglu",
                swiglu_fusion=1,
                normalize_routing_weights=1,
                **attributes,
            )

    def activation(self, x: ir.Value) -> ir.Value:
        """Return the activation of the gate."""
        graph = self.graph
        if self.config.activation == "silu":
            return graph.node("Mul", x, graph.node("Sigmoid", x))
        cube = graph.node("Mul", graph.node("Pow", x, graph.constant(np.float32(3))), graph.constant(_GELU_CUBE))
        inner = graph.node("Mul", graph.node("Add", x, cube), graph.constant(_GELU_SCALE))
        above = graph.node("Add", graph.node("Tanh", inner), graph.constant(np.float32(1)))
        return graph.node("Mul", graph.node("Mul", x, above), graph.constant(np.float32(0.5)))

    def attention(
        self,
        hidden: ir.Value,
        mask: ir.Value,
        rotation: tuple[ir.Value, ir.Value] | None,
        past: list[ir.Value],
        prefix: str,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return the attention's output, present key and present value. past: the cached ones; empty: no cache."""
        graph, config = self.graph, self.config

        def heads(part: str, count: int) -> ir.Value:
            x = graph.split_heads(self.linear(hidden, f"{prefix}.{part}_proj"), count, config.head_size)
            if config.qk_norm and part != "v":
                with graph.module(f"{part}_norm"):
                    x = self.rms_norm(x, f"{prefix}.{part}_norm.weight")
            return graph.node("Transpose", x, perm=[0, 2, 1, 3])

        query, key = heads("q", config.num_attention_heads), heads("k", config.num_key_value_heads)
        if rotation is not None:
            query, key = self.rotate(query, rotation), self.rotate(key, rotation)
        value = heads("v", config.num_key_value_heads)
        if past:
            key, value = (graph.node("Concat", *pair, axis=2) for pair in zip(past, (key, value), strict=True))

        key_t = graph.node("Transpose", self.repeat_heads(key), perm=[0, 1, 3, 2])
        scores = graph.node("MatMul", query, key_t)
        if config.attention_scale is None:
            scores = graph.node("Div", scores, graph.constant(np.float32(math.sqrt(config.head_size))))
        else:
            scores = self.scaled(scores, config.attention_scale)
        scores = graph.node("Add", self.capped(scores, config.attention_softcap), mask)
        context = graph.node("MatMul", self.softmax(scores, f"{prefix}.sinks"), self.repeat_heads(value))
        context = graph.node("Transpose", context, perm=[0, 2, 1, 3])
        width = config.num_attention_heads * config.head_size
        context = graph.node("Reshape", context, graph.constant([0, 0, width]))
        return self.linear(context, f"{prefix}.o_proj"), key, value

    def softmax(self, scores: ir.Value, sinks: str) -> ir.Value:
        """Return the attention weights, as transformers computes them for gpt-oss if there are sinks."""
        graph = self.graph
        if not self.config.attention_sinks:
            return graph.node("Softmax", scores, axis=-1)
        column = graph.node("Reshape", self.weight(sinks), graph.constant([1, -1, 1, 1]))
        sizes = [graph.unsqueeze(graph.shape_of(scores, axis), 0) for axis in range(3)]
        column = graph.node("Expand", column, graph.node("Concat", *sizes, graph.constant([1]), axis=0))
        scores = graph.node("Concat", scores, column, axis=-1)
        scores = graph.node("Sub", scores, graph.node("ReduceMax", scores, axes=[-1], keepdims=1))
        weights = graph.node("Softmax", scores, axis=-1)
        return graph.node("Slice", weights, graph.constant([0]), graph.constant([-1]), graph.constant([3]))

    def rotate(self, x: ir.Value, rotation: tuple[ir.Value, ir.Value]) -> ir.Value:
        """Return the rotated x: x * cos + concat(-second half of x, first half of x) * sin."""
        graph, half = self.graph, self.config.head_size // 2
        cos, sin = rotation
        last = np.iinfo(np.int64).max
        first = graph.node("Slice", x, graph.constant([0]), graph.constant([half]), graph.constant([3]))
        second = graph.node("Slice", x, graph.constant([half]), graph.constant([last]), graph.constant([3]))
        turned = graph.node("Concat", graph.node("Neg", second), first, axis=-1)
        return graph.node("Add", graph.node("Mul", x, cos), graph.node("Mul", turned, sin))

    def repeat_heads(self, x: ir.Value) -> ir.Value:
        """Repeat each key or value head for the query heads that share it (grouped-query attention)."""
        graph, config = self.graph, self.config
        groups = config.num_attention_heads // config.num_key_value_heads
        if groups == 1:
            return x
        x = graph.node("Expand", graph.unsqueeze(x, 2), graph.constant([1, 1, groups, 1, 1]))
        return graph.node("Reshape", x, graph.constant([0, config.num_attention_heads, -1, config.head_size]))

    def linear(self, x: ir.Value, name: str) -> ir.Value:
        """Return the output of the linear layer whose weights have this name."""
        return self.graph.linear(x, name, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def rms_norm(self, x: ir.Value, key: str) -> ir.Value:
        """Return the RMS normalization of x."""
        graph = self.graph
        mean = graph.node("ReduceMean", graph.node("Pow", x, graph.constant(np.float32(2))), axes=[-1], keepdims=1)
        root = graph.node("Sqrt", graph.node("Add", mean, graph.constant(np.float32(self.config.rms_norm_eps))))
        normed = graph.node("Mul", x, graph.node("Div", graph.constant(np.float32(1)), root))
        return graph.node("Mul", self.weight(key), normed)
