"""The graph of a Llama decoder as ONNX Runtime's GenAI model builder writes it for CPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from .graph_builder import MICROSOFT_DOMAIN, Weight, stacked
from .llama_config import LlamaConfig
from .llama_graph import LlamaBuilder, rotary_frequencies, rotary_magnitudes

# Rotary tables of more positions are computed from two short ones: of every 256th position, and of 256 positions.
_LONGEST_TABLE = 4096
_FINE_POSITIONS = 256


class GroupQueryLlamaBuilder(LlamaBuilder):
    """Builds the graph: few nodes, mostly fused operators."""

    def __init__(
        self,
        weights: Mapping[str, Weight],
        config: LlamaConfig,
        one_table: bool = False,
        separate_qkv: Collection[int] = (),
    ) -> None:
        super().__init__(weights, config, one_table)
        self._tables: dict[bool, list[ir.Value]] = {}
        self.separate_qkv = range(config.num_hidden_layers) if config.qk_norm else separate_qkv

    def decode(
        self, hidden: ir.Value, input_ids: ir.Value, attention_mask: ir.Value, past: list[ir.Value]
    ) -> tuple[ir.Value, list[ir.Value], list[ir.Value]]:
        """See `LlamaBuilder.decode`. There are no inputs for positions."""
        graph, config = self.graph, self.config
        with graph.module("attn_mask_reformat"):
            lengths = self.lengths(attention_mask)
        present: list[ir.Value] = []
        # delta is the output of the previous sublayer (attention or MLP); the next norm adds it to the hidden state.
        delta: ir.Value | None = None
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            with graph.module(f"layers.{layer}"):
                with graph.module("input_layernorm"):
                    normed, hidden = self.add_and_norm(hidden, delta, f"{prefix}.input_layernorm.weight")
                with graph.module("self_attn"):
                    attended, *cached = self.group_query_attention(
                        normed, lengths, past[2 * layer : 2 * layer + 2], layer
                    )
                present += cached
                attended = self.residual(attended, f"{prefix}.post_attention_layernorm")
                norm = config.mlp_norm(layer)
                with graph.module(norm.split(".")[-2]):
                    normed, hidden = self.add_and_norm(hidden, attended, norm)
                delta = self.residual(self.mlp(normed, prefix), f"{prefix}.post_feedforward_layernorm")
        with graph.module("norm"):
            hidden, _ = self.add_and_norm(hidden, delta, "model.norm.weight")
        return hidden, present, []

    def lengths(self, attention_mask: ir.Value) -> list[ir.Value]:
        """Return GroupQueryAttention's int32 inputs: the last key's index for each row [batch], the number of keys."""
        graph = self.graph
        tokens = graph.node("ReduceSum", attention_mask, graph.constant([1]), keepdims=0)
        last = graph.node("Cast", graph.node("Sub", tokens, graph.constant([1])), to=ir.DataType.INT32)
        return [last, graph.node("Cast", graph.shape_of(attention_mask, 1), to=ir.DataType.INT32)]

    def add_and_norm(self, hidden: ir.Value, delta: ir.Value | None, key: str) -> tuple[ir.Value, ir.Value]:
        """Return the normalized hidden + delta, and the sum itself."""
        graph, weight, epsilon = self.graph, self.weight(key), self.config.rms_norm_eps
        if delta is None:
            return self.rms_norm(hidden, key), hidden
        normed = graph.node(
            "SkipSimplifiedLayerNormalization",
            hidden,
            delta,
            weight,
            outputs=4,
            domain=MICROSOFT_DOMAIN,
            epsilon=epsilon,
        )
        _, mean, deviation, total = normed.producer().outputs  # type: ignore[union-attr]
        mean.name = deviation.name = ""  # optional outputs that are not used are removed
        return normed, total

    def group_query_attention(
        self,
        hidden: ir.Value,
        lengths: list[ir.Value],
        past: list[ir.Value],
        layer: int,
    ) -> list[ir.Value]:
        """Return the output, present key and present value of attention."""
        graph, config, prefix = self.graph, self.config, f"model.layers.{layer}.self_attn"
        rotation = self.rotary_tables(layer)
        sinks: list[ir.Value | None] = []
        if config.attention_sinks:  # behind tables, position_ids and attention_bias
            sinks = [None] * (4 - len(rotation)) + [self.weight(f"{prefix}.sinks")]
        attributes: dict[str, float] = {}
        if config.window(layer):
            attributes["local_window_size"] = config.window(layer)
        if config.attention_scale is not None:
            attributes["scale"] = float(config.attention_scale)
        if config.attention_softcap:
            attributes["softcap"] = float(config.attention_softcap)
        context = graph.node(
            "GroupQueryAttention",
            *self.operands(hidden, layer),
            *past,
            *lengths,
            *rotation,
            *sinks,
            outputs=3,
            domain=MICROSOFT_DOMAIN,
            num_heads=config.num_attention_heads,
            kv_num_heads=config.num_key_value_heads,
            do_rotary=int(bool(rotation)),
            **attributes,
        )
        _, key, value = context.producer().outputs  # type: ignore[union-attr]
        return [self.linear(context, f"{prefix}.o_proj"), key, value]

    def rotary_tables(self, layer: int) -> list[ir.Value]:
        """Return the cosines and sines of all positions; nothing for a layer without rotary embedding."""
        config = self.config
        if layer in config.no_rope_layers:
            return []
        local = config.is_local(layer)
        if local not in self._tables:
            self._tables[local] = self._rotary_tables(rotary_frequencies(config, local), "local_" if local else "")
        return self._tables[local]

    def _rotary_tables(self, frequencies: np.ndarray, infix: str) -> list[ir.Value]:
        positions = self.config.max_position_embeddings
        if positions <= _LONGEST_TABLE:
            angles = np.arange(positions)[:, None] * frequencies
            return [self._table(f"{name}_{infix}cache", of(angles)) for name, of in (("cos", np.cos), ("sin", np.sin))]
        # Long tables would be as large as a small model's weights. ONNX Runtime computes them when it opens the model:
        # cos(a + b) = cos(a) cos(b) - sin(a) sin(b), sin(a + b) = sin(a) cos(b) + cos(a) sin(b).
        op, fine = self.graph.node, np.arange(_FINE_POSITIONS)[None, :, None] * frequencies
        coarse = np.arange(0, positions, _FINE_POSITIONS)[:, None, None] * frequencies
        cos_a, sin_a = (self._table(f"{n}_{infix}coarse", of(coarse)) for n, of in (("cos", np.cos), ("sin", np.sin)))
        cos_b, sin_b = (
            self.graph.weight(f"{n}_{infix}fine", of(fine).astype(np.float32))
            for n, of in (("cos", np.cos), ("sin", np.sin))
        )
        products = (
            op("Sub", op("Mul", cos_a, cos_b), op("Mul", sin_a, sin_b)),
            op("Add", op("Mul", sin_a, cos_b), op("Mul", cos_a, sin_b)),
        )
        size = len(frequencies)
        tables = []
        for name, product in zip(("cos", "sin"), products, strict=True):
            rows = op("Reshape", product, self.graph.constant([-1, size]))
            table = op("Slice", rows, self.graph.constant([0]), self.graph.constant([positions]))
            table.name, table.shape = f"{name}_{infix}cache", ir.Shape([positions, size])
            table.type = ir.TensorType(ir.DataType.FLOAT)
            tables.append(table)
        return tables

    def _table(self, name: str, values: np.ndarray) -> ir.Value:
        magnitudes = rotary_magnitudes(self.config)
        return self.graph.weight(name, (values if magnitudes is None else values * magnitudes).astype(np.float32))

    def rms_norm(self, x: ir.Value, key: str) -> ir.Value:
        """Return the RMS normalization of x."""
        weight, epsilon = self.weight(key), self.config.rms_norm_eps
        return self.graph.node("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=epsilon)

    def operands(self, hidden: ir.Value, layer: int) -> Sequence[ir.Value | None]:
        """Return query, key and value, or one value with all three. All layers return the same kind."""
        prefix = f"model.layers.{layer}.self_attn"
        if layer not in self.separate_qkv:
            return self.packed_qkv(hidden, prefix), None, None
        found = self.query_key_value(hidden, prefix)
        if len(self.separate_qkv) == self.config.num_hidden_layers:
            return found
        return self.graph.node("Concat", *found, axis=2), None, None

    def packed_qkv(self, hidden: ir.Value, prefix: str) -> ir.Value:
        """Return query, key and value from one linear layer."""
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        biases = [self.weights[f"{name}.bias"] for name in names] if self.config.qkv_bias else []
        weight = stacked([self.weights[f"{name}.weight"] for name in names])
        return self.graph.linear(hidden, f"{prefix}.qkv_proj", weight, stacked(biases) if biases else None)

    def query_key_value(self, hidden: ir.Value, prefix: str) -> list[ir.Value]:
        """Return query, key and value, [batch, sequence, heads * head_dim] each, normalized if config.qk_norm."""
        found = [self.linear(hidden, f"{prefix}.{part}_proj") for part in "qkv"]
        if self.config.qk_norm:
            for index, part in enumerate("qk"):
                with self.graph.module(f"{part}_norm"):
                    found[index] = self.norm_heads(found[index], f"{prefix}.{part}_norm.weight")
        return found

    def norm_heads(self, x: ir.Value, key: str) -> ir.Value:
        """Return the RMS normalization of each head."""
        graph, config = self.graph, self.config
        heads = graph.node("Reshape", x, graph.constant([0, 0, -1, config.head_size]))
        return graph.node("Reshape", self.rms_norm(heads, key), graph.constant([0, 0, -1]))

    def activation(self, x: ir.Value) -> ir.Value:
        """Return the activation of the gate."""
        if self.config.activation == "gelu_tanh":
            return self.graph.node("FastGelu", x, domain=MICROSOFT_DOMAIN)
        return super().activation(x)
