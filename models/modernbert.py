"""Builds ModernBERT encoders as ONNX from Hugging Face weights, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .encoder import EncoderBuilder, EncoderConfig, read_config
from .graph_builder import MASKED, Shape, check_weights, set_type, tensor_value


@dataclass(frozen=True)
class ModernBertConfig(EncoderConfig):
    """The fields of a Hugging Face ModernBERT config.json that shape the graph; defaults as in ModernBERT-base."""

    vocab_size: int = 50368
    hidden_size: int = 768
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    intermediate_size: int = 1152
    global_attn_every_n_layers: int = 3
    local_attention: int = 128  # tokens in the window of layers with local attention, centred on the token
    global_rope_theta: float = 160000.0
    local_rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> ModernBertConfig:
        """Read a Hugging Face config.json.

        Raises:
            ModelBuildError: The builder does not support this variant.
        """
        biases = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias"), False)
        return cls(**read_config(path, cls.__dataclass_fields__, {"hidden_activation": "gelu", **biases}))


def modernbert_weight_shapes(config: ModernBertConfig) -> dict[str, Shape]:
    """Return the weights that build_modernbert needs: Hugging Face name -> shape, linear layers as [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {
        "embeddings.tok_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.norm.weight": (hidden,),
        "final_norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"
        shapes |= {
            f"{prefix}.attn.Wqkv.weight": (3 * hidden, hidden),
            f"{prefix}.attn.Wo.weight": (hidden, hidden),
            f"{prefix}.mlp.Wi.weight": (2 * inner, hidden),
            f"{prefix}.mlp.Wo.weight": (hidden, inner),
            f"{prefix}.mlp_norm.weight": (hidden,),
        }
        if layer > 0:
            shapes[f"{prefix}.attn_norm.weight"] = (hidden,)
    return shapes


def build_modernbert(weights: Mapping[str, np.ndarray], config: ModernBertConfig, name: str = "modernbert") -> ir.Model:
    """Build a ModernBERT encoder, opset 17, in the form of TorchScript exports.

    Inputs, int64 [batch, sequence]: input_ids, attention_mask (1 = attend).
    Output: last_hidden_state, float32 [batch, sequence, hidden_size].

    weights: by Hugging Face name (modernbert_weight_shapes), in any float dtype, stored as float32. Unused weights are
    ignored.

    Raises:
        ModelBuildError: A weight is missing or does not fit the configuration.
    """
    shapes = modernbert_weight_shapes(config)
    check_weights(weights, shapes)
    builder = _ModernBertBuilder({key: np.asarray(weights[key], dtype=np.float32) for key in shapes}, config)
    return builder.build(name)


class _ModernBertBuilder(EncoderBuilder):
    def __init__(self, weights: Mapping[str, np.ndarray], config: ModernBertConfig) -> None:
        super().__init__(weights, config.norm_eps)
        self.config = config
        self.no_bias = np.zeros(config.hidden_size, np.float32)

    def build(self, name: str) -> ir.Model:
        graph, config = self.graph, self.config
        inputs = [
            tensor_value(input_name, ir.DataType.INT64, ["batch", "sequence"])
            for input_name in ("input_ids", "attention_mask")
        ]
        input_ids, attention_mask = inputs
        sequence = graph.shape_of(input_ids, 1)
        positions = graph.node("Range", graph.constant(0), sequence, graph.constant(1))
        everything = self.additive_mask(attention_mask)
        window = self.window(positions, everything)
        with graph.module("embeddings"):
            hidden = self.norm(self.lookup("embeddings.tok_embeddings", input_ids), "embeddings.norm")
        rotations = {theta: self.rotation(positions, theta) for theta in self.thetas}
        for layer in range(config.num_hidden_layers):
            sees_all = layer % config.global_attn_every_n_layers == 0
            with graph.module(f"layers.{layer}"):
                rotation = rotations[self.thetas[0 if sees_all else 1]]
                hidden = self.layer(hidden, f"layers.{layer}", rotation, everything if sees_all else window)
        hidden = self.norm(hidden, "final_norm")
        set_type(hidden, ir.DataType.FLOAT, ["batch", "sequence", config.hidden_size])
        return graph.model(name, inputs, {"last_hidden_state": hidden})

    @property
    def thetas(self) -> tuple[float, float]:
        return self.config.global_rope_theta, self.config.local_rope_theta

    def window(self, positions: ir.Value, mask: ir.Value) -> ir.Value:
        """Return a mask, float32 [batch, 1, sequence, sequence], that hides padding and tokens outside the window."""
        graph = self.graph
        distance = graph.node("Abs", graph.node("Sub", graph.unsqueeze(positions, 0), graph.unsqueeze(positions, 1)))
        near = graph.node("LessOrEqual", distance, graph.constant(self.config.local_attention // 2))
        far = graph.node("Not", graph.unsqueeze(near, 0, 1))
        return graph.node("Where", far, graph.constant(MASKED), mask)

    def rotation(self, positions: ir.Value, theta: float) -> tuple[ir.Value, ir.Value]:
        """Return cosine and sine of the rotary embedding, float32 [1, 1, sequence, head_dim]."""
        graph, head_dim = self.graph, self.config.head_dim
        frequencies = (theta ** -(np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
        with graph.module("rotary_emb"):
            positions = graph.node("Cast", graph.unsqueeze(positions, 0, 1), to=ir.DataType.FLOAT)
            angles = graph.node("MatMul", graph.constant(frequencies.reshape(1, -1, 1)), positions)
            angles = graph.node("Transpose", angles, perm=[0, 2, 1])
            angles = graph.node("Concat", angles, angles, axis=-1)
            cos, sin = (graph.unsqueeze(graph.node(op_type, angles), 1) for op_type in ("Cos", "Sin"))
        return cos, sin

    def layer(self, hidden: ir.Value, prefix: str, rotation: tuple[ir.Value, ir.Value], mask: ir.Value) -> ir.Value:
        graph = self.graph
        first = f"{prefix}.attn_norm"
        x = self.norm(hidden, first) if f"{first}.weight" in self.weights else hidden
        with graph.module("attn"):
            hidden = graph.node("Add", hidden, self.rotary_attention(x, f"{prefix}.attn", rotation, mask))
        x = self.norm(hidden, f"{prefix}.mlp_norm")
        with graph.module("mlp"):
            return graph.node("Add", hidden, self.gated(x, f"{prefix}.mlp"))

    def rotary_attention(
        self, x: ir.Value, prefix: str, rotation: tuple[ir.Value, ir.Value], mask: ir.Value
    ) -> ir.Value:
        graph, config = self.graph, self.config
        qkv = self.projected(x, f"{prefix}.Wqkv")
        sizes = [graph.unsqueeze(graph.shape_of(qkv, 0), 0)]
        sizes.append(graph.constant([-1, 3, config.num_attention_heads, config.head_dim]))
        qkv = graph.node("Reshape", qkv, graph.node("Concat", *sizes, axis=0))
        by_heads = graph.node("Transpose", qkv, perm=[0, 3, 2, 1, 4])
        apart = graph.node("Split", by_heads, graph.constant([1, 1, 1]), outputs=3, axis=2).producer()
        assert apart is not None
        query, key, value = (graph.node("Squeeze", one, graph.constant([2])) for one in apart.outputs)
        query, key = (self.rotated(one, *rotation) for one in (query, key))
        root = graph.constant(np.float32(config.head_dim**-0.5))
        scores = graph.node("MatMul", query, graph.node("Transpose", key, perm=[0, 1, 3, 2]))
        scores = graph.node("Add", graph.node("Mul", scores, root), mask)
        context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), value)
        context = graph.node("Transpose", context, perm=[0, 2, 1, 3])
        context = graph.node("Reshape", context, graph.constant([0, 0, config.hidden_size]))
        return self.projected(context, f"{prefix}.Wo")

    def rotated(self, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        """Rotate pairs half a head apart in float32 [batch, heads, sequence, head_dim]."""
        graph = self.graph
        half, end, last = graph.constant([self.config.head_dim // 2]), graph.constant([2**63 - 1]), graph.constant([3])
        first = graph.node("Slice", x, graph.constant([0]), half, last)
        second = graph.node("Neg", graph.node("Slice", x, half, end, last))
        turned = graph.node("Mul", graph.node("Concat", second, first, axis=-1), sin)
        return graph.node("Add", graph.node("Mul", x, cos), turned)

    def gated(self, x: ir.Value, prefix: str) -> ir.Value:
        graph, width = self.graph, self.config.intermediate_size
        both = self.projected(x, f"{prefix}.Wi")
        begin, middle, end, last = (graph.constant([number]) for number in (0, width, 2 * width, -1))
        inner, gate = (graph.node("Slice", both, *bounds, last) for bounds in ((begin, middle), (middle, end)))
        return self.projected(graph.node("Mul", self.gelu(inner), gate), f"{prefix}.Wo")

    def projected(self, x: ir.Value, name: str) -> ir.Value:
        return self.graph.linear(x, name, self.weights[f"{name}.weight"])

    def norm(self, x: ir.Value, name: str) -> ir.Value:
        """Return the LayerNorm of x, without a bias."""
        graph = self.graph
        scale, bias = (
            graph.weight(f"{name}.weight", self.weights[f"{name}.weight"]),
            graph.weight("zeros", self.no_bias),
        )
        return graph.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=self.layer_norm_eps)
