"""Builds Llama decoders with a key/value cache as ONNX, and reads the weights of llama2.c."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from .graph_builder import (
    MASKED,
    MICROSOFT_DOMAIN,
    GraphBuilder,
    ModelBuildError,
    Shape,
    check_weights,
    set_type,
    tensor_value,
)


@dataclass(frozen=True)
class LlamaConfig:
    """What shapes a Llama graph. Names are those of Hugging Face's config.json, except:

    head_dim: hidden_size / num_attention_heads when None.
    rope_style: how the rows of q_proj and k_proj are ordered. "half" (Hugging Face): the rotated pairs are
        (i, i + head_dim / 2). "interleaved" (llama2.c, Meta, GGUF files of Llama): the pairs are (2i, 2i + 1).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_style: Literal["half", "interleaved"] = "half"
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelBuildError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ModelBuildError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; give head_dim"
            )
        if self.rope_style not in ("half", "interleaved"):
            raise ModelBuildError(f"rope_style is {self.rope_style!r}; expected 'half' or 'interleaved'")
        if self.head_size % 2:
            raise ModelBuildError(f"head_dim is {self.head_size}; rotary embeddings need an even one")

    @property
    def head_size(self) -> int:
        """head_dim, computed where it was not given."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def llama_weight_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """The weights that build_llama needs: Hugging Face name -> shape, linear layers as [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_size
    key_value = config.num_key_value_heads * config.head_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (query, hidden),
            f"{prefix}.self_attn.k_proj.weight": (key_value, hidden),
            f"{prefix}.self_attn.v_proj.weight": (key_value, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


AttentionForm = Literal["standard", "gqa"]


def build_llama(
    weights: Mapping[str, np.ndarray],
    config: LlamaConfig,
    name: str = "llama",
    attention: AttentionForm = "standard",
) -> ir.Model:
    """Builds a Llama decoder with cache inputs and outputs, opset 17, named as Optimum's exports are.

    weights: Hugging Face names -> arrays of any float dtype, stored as float32; see llama_weight_shapes.
    attention: "standard": operators of ONNX alone, as Optimum exports. "gqa": ONNX Runtime's GroupQueryAttention (with
        the rotary embedding inside, q_proj, k_proj and v_proj packed into one qkv_proj) and its fused norms, as its
        GenAI model builder writes them; for max_position_embeddings tokens at most.

    Inputs: input_ids int64 [batch, sequence]; attention_mask int64 [batch, past_sequence + sequence] (1 = attend);
    position_ids int64 [batch, sequence]; for each layer N, past_key_values.N.key and .value float32
    [batch, num_key_value_heads, past_sequence, head_dim], where past_sequence may be 0.
    Outputs: logits float32 [batch, sequence, vocab_size]; for each layer, present.N.key and .value float32
    [batch, num_key_value_heads, past_sequence + sequence, head_dim].
    With "gqa" there is no position_ids input, zeros of attention_mask may only stand at the end of a row, and the cache
    may be shared: where one buffer for at least past_sequence + sequence tokens is given as past and as present,
    the new keys and values are written behind the old ones, and nothing is copied.

    The graph always rotates halves, as Hugging Face's does: interleaved weights get their rows reordered, which changes
    the order inside the cached keys and nothing else.

    Raises ModelBuildError when a weight is missing or has another shape than the configuration says; when `attention`
    is unknown, or is "gqa" and head_dim no multiple of 16.
    """
    if attention not in get_args(AttentionForm):
        raise ModelBuildError(f"attention is {attention!r}; expected one of {', '.join(get_args(AttentionForm))}")
    if attention == "gqa" and config.head_size % 16:
        raise ModelBuildError(
            f"head_dim is {config.head_size}; GroupQueryAttention wants a multiple of 16: build with "
            "attention='standard'"
        )
    shapes = llama_weight_shapes(config)
    check_weights(weights, shapes)
    arrays = {key: np.asarray(weights[key], dtype=np.float32) for key in shapes}
    if config.rope_style == "interleaved":
        for layer in range(config.num_hidden_layers):
            for projection in ("q_proj", "k_proj"):
                key = f"model.layers.{layer}.self_attn.{projection}.weight"
                arrays[key] = interleaved_to_half(arrays[key], config.head_size)
        config = replace(config, rope_style="half")
    builder = _GroupQueryLlamaBuilder if attention == "gqa" else _LlamaBuilder
    return builder(arrays, config).build(name)


def interleaved_to_half(weight: np.ndarray, head_size: int) -> np.ndarray:
    """Reorders the rows of each head from (0, 1, 2, 3, …) to (0, 2, …, 1, 3, …)."""
    rows, columns = weight.shape
    return weight.reshape(-1, head_size // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians a position, of each rotated pair."""
    return np.asarray(config.rope_theta ** (-np.arange(0, config.head_size, 2) / config.head_size))


class _LlamaBuilder:
    def __init__(self, weights: Mapping[str, np.ndarray], config: LlamaConfig) -> None:
        self.weights = weights
        self.config = config
        self.graph = GraphBuilder()

    def build(self, name: str) -> ir.Model:
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
                embedded = graph.node("Gather", self.weight("model.embed_tokens.weight"), input_ids, axis=0)
            hidden, present, positions = self.decode(embedded, input_ids, attention_mask, past)
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        logits = graph.linear(hidden, "lm_head", self.weights[head])

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
        """Embedded tokens -> normed hidden state; also the present cache, and the inputs that positions need."""
        graph = self.graph
        position_ids = tensor_value("position_ids", ir.DataType.INT64, ["batch", "sequence"])
        mask = self.additive_mask(input_ids, attention_mask, past[0])
        with graph.module("rotary_emb"):
            rotation = self.rotation(position_ids)
        present: list[ir.Value] = []
        for layer in range(self.config.num_hidden_layers):
            with graph.module(f"layers.{layer}"):
                hidden, *cached = self.layer(hidden, mask, rotation, past[2 * layer : 2 * layer + 2], layer)
            present += cached
        with graph.module("norm"):
            hidden = self.rms_norm(hidden, "model.norm.weight")
        return hidden, present, [position_ids]

    def weight(self, key: str) -> ir.Value:
        return self.graph.weight(key, self.weights[key])

    def additive_mask(self, input_ids: ir.Value, attention_mask: ir.Value, past_key: ir.Value) -> ir.Value:
        """float32 [batch, 1, sequence, past + sequence]: 0 where a query may attend to a key, MASKED elsewhere."""
        graph = self.graph
        past = graph.shape_of(past_key, 2)
        total = graph.node("Add", past, graph.shape_of(input_ids, 1))
        zero, one = graph.constant(0), graph.constant(1)
        query_index = graph.unsqueeze(graph.node("Range", past, total, one), 1)
        key_index = graph.unsqueeze(graph.node("Range", zero, total, one), 0)
        causal = graph.node("LessOrEqual", key_index, query_index)
        attend = graph.unsqueeze(graph.node("Cast", attention_mask, to=ir.DataType.BOOL), 1, 2)
        allowed = graph.node("And", causal, attend)
        return graph.node("Where", allowed, graph.constant(np.float32(0)), graph.constant(MASKED))

    def rotation(self, position_ids: ir.Value) -> tuple[ir.Value, ir.Value]:
        """cos and sin of position * frequency, float32 [batch, 1, sequence, head_dim]; both halves are equal."""
        graph, config = self.graph, self.config
        frequencies = _rotary_frequencies(config).astype(np.float32)
        positions = graph.unsqueeze(graph.node("Cast", position_ids, to=ir.DataType.FLOAT), 1, 3)
        angles = graph.node("Mul", positions, graph.constant(frequencies))
        angles = graph.node("Concat", angles, angles, axis=-1)
        return graph.node("Cos", angles), graph.node("Sin", angles)

    def layer(
        self,
        hidden: ir.Value,
        mask: ir.Value,
        rotation: tuple[ir.Value, ir.Value],
        past: list[ir.Value],
        index: int,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        graph = self.graph
        prefix = f"model.layers.{index}"
        with graph.module("input_layernorm"):
            normed = self.rms_norm(hidden, f"{prefix}.input_layernorm.weight")
        with graph.module("self_attn"):
            attended, key, value = self.attention(normed, mask, rotation, past, f"{prefix}.self_attn")
        hidden = graph.node("Add", hidden, attended)
        with graph.module("post_attention_layernorm"):
            normed = self.rms_norm(hidden, f"{prefix}.post_attention_layernorm.weight")
        return graph.node("Add", hidden, self.mlp(normed, prefix)), key, value

    def mlp(self, normed: ir.Value, prefix: str) -> ir.Value:
        graph = self.graph
        with graph.module("mlp"):
            gate = self.linear(normed, f"{prefix}.mlp.gate_proj")
            with graph.module("act_fn"):
                gate = graph.node("Mul", gate, graph.node("Sigmoid", gate))
            inner = graph.node("Mul", gate, self.linear(normed, f"{prefix}.mlp.up_proj"))
            return self.linear(inner, f"{prefix}.mlp.down_proj")

    def attention(
        self,
        hidden: ir.Value,
        mask: ir.Value,
        rotation: tuple[ir.Value, ir.Value],
        past: list[ir.Value],
        prefix: str,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        graph, config = self.graph, self.config

        def heads(projection: str, count: int) -> ir.Value:
            x = graph.split_heads(self.linear(hidden, f"{prefix}.{projection}"), count, config.head_size)
            return graph.node("Transpose", x, perm=[0, 2, 1, 3])

        query = self.rotate(heads("q_proj", config.num_attention_heads), rotation)
        key = self.rotate(heads("k_proj", config.num_key_value_heads), rotation)
        key = graph.node("Concat", past[0], key, axis=2)
        value = graph.node("Concat", past[1], heads("v_proj", config.num_key_value_heads), axis=2)

        key_t = graph.node("Transpose", self.repeat_heads(key), perm=[0, 1, 3, 2])
        scores = graph.node("MatMul", query, key_t)
        scores = graph.node("Div", scores, graph.constant(np.float32(math.sqrt(config.head_size))))
        scores = graph.node("Add", scores, mask)
        context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), self.repeat_heads(value))
        context = graph.node("Transpose", context, perm=[0, 2, 1, 3])
        width = config.num_attention_heads * config.head_size
        context = graph.node("Reshape", context, graph.constant([0, 0, width]))
        return self.linear(context, f"{prefix}.o_proj"), key, value

    def rotate(self, x: ir.Value, rotation: tuple[ir.Value, ir.Value]) -> ir.Value:
        """x cos + (-second half, first half) sin."""
        graph, half = self.graph, self.config.head_size // 2
        cos, sin = rotation
        last = np.iinfo(np.int64).max
        first = graph.node("Slice", x, graph.constant([0]), graph.constant([half]), graph.constant([3]))
        second = graph.node("Slice", x, graph.constant([half]), graph.constant([last]), graph.constant([3]))
        turned = graph.node("Concat", graph.node("Neg", second), first, axis=-1)
        return graph.node("Add", graph.node("Mul", x, cos), graph.node("Mul", turned, sin))

    def repeat_heads(self, x: ir.Value) -> ir.Value:
        """Grouped-query attention: repeats each key or value head for the query heads that share it."""
        graph, config = self.graph, self.config
        groups = config.num_attention_heads // config.num_key_value_heads
        if groups == 1:
            return x
        x = graph.node("Expand", graph.unsqueeze(x, 2), graph.constant([1, 1, groups, 1, 1]))
        return graph.node("Reshape", x, graph.constant([0, config.num_attention_heads, -1, config.head_size]))

    def linear(self, x: ir.Value, name: str) -> ir.Value:
        return self.graph.linear(x, name, self.weights[f"{name}.weight"])

    def rms_norm(self, x: ir.Value, key: str) -> ir.Value:
        graph = self.graph
        mean = graph.node("ReduceMean", graph.node("Pow", x, graph.constant(np.float32(2))), axes=[-1], keepdims=1)
        root = graph.node("Sqrt", graph.node("Add", mean, graph.constant(np.float32(self.config.rms_norm_eps))))
        normed = graph.node("Mul", x, graph.node("Div", graph.constant(np.float32(1)), root))
        return graph.node("Mul", self.weight(key), normed)


class _GroupQueryLlamaBuilder(_LlamaBuilder):
    """The graph that ONNX Runtime's GenAI model builder writes for CPUs: few nodes, most of them fused operators."""

    def decode(
        self, hidden: ir.Value, input_ids: ir.Value, attention_mask: ir.Value, past: list[ir.Value]
    ) -> tuple[ir.Value, list[ir.Value], list[ir.Value]]:
        graph, config = self.graph, self.config
        with graph.module("attn_mask_reformat"):
            lengths = self.lengths(attention_mask)
        angles = np.arange(config.max_position_embeddings)[:, None] * _rotary_frequencies(config)
        rotation = [
            self.graph.weight("cos_cache", np.cos(angles).astype(np.float32)),
            self.graph.weight("sin_cache", np.sin(angles).astype(np.float32)),
        ]
        present: list[ir.Value] = []
        # The last layer's output, still to be added to the hidden state: the next norm does both at once.
        delta: ir.Value | None = None
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            with graph.module(f"layers.{layer}"):
                with graph.module("input_layernorm"):
                    normed, hidden = self.add_and_norm(hidden, delta, f"{prefix}.input_layernorm.weight")
                with graph.module("self_attn"):
                    attended, *cached = self.group_query_attention(
                        normed, lengths, rotation, past[2 * layer : 2 * layer + 2], f"{prefix}.self_attn"
                    )
                present += cached
                with graph.module("post_attention_layernorm"):
                    normed, hidden = self.add_and_norm(hidden, attended, f"{prefix}.post_attention_layernorm.weight")
                delta = self.mlp(normed, prefix)
        with graph.module("norm"):
            hidden, _ = self.add_and_norm(hidden, delta, "model.norm.weight")
        return hidden, present, []

    def lengths(self, attention_mask: ir.Value) -> list[ir.Value]:
        """What GroupQueryAttention wants of the mask, int32: the last key's index [batch], the number of keys."""
        graph = self.graph
        tokens = graph.node("ReduceSum", attention_mask, graph.constant([1]), keepdims=0)
        last = graph.node("Cast", graph.node("Sub", tokens, graph.constant([1])), to=ir.DataType.INT32)
        return [last, graph.node("Cast", graph.shape_of(attention_mask, 1), to=ir.DataType.INT32)]

    def add_and_norm(self, hidden: ir.Value, delta: ir.Value | None, key: str) -> tuple[ir.Value, ir.Value]:
        """The norm of hidden + delta, and the sum."""
        graph, weight, epsilon = self.graph, self.weight(key), self.config.rms_norm_eps
        if delta is None:
            return graph.node("SimplifiedLayerNormalization", hidden, weight, axis=-1, epsilon=epsilon), hidden
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
        mean.name = deviation.name = ""  # optional outputs that nobody wants
        return normed, total

    def group_query_attention(
        self,
        hidden: ir.Value,
        lengths: list[ir.Value],
        rotation: list[ir.Value],
        past: list[ir.Value],
        prefix: str,
    ) -> list[ir.Value]:
        """The layer's output, present key and present value."""
        graph, config = self.graph, self.config
        packed = np.concatenate([self.weights[f"{prefix}.{part}_proj.weight"] for part in "qkv"])
        qkv = graph.linear(hidden, f"{prefix}.qkv_proj", packed)
        context = graph.node(
            "GroupQueryAttention",
            qkv,
            None,
            None,
            *past,
            *lengths,
            *rotation,
            outputs=3,
            domain=MICROSOFT_DOMAIN,
            num_heads=config.num_attention_heads,
            kv_num_heads=config.num_key_value_heads,
            do_rotary=1,
        )
        _, key, value = context.producer().outputs  # type: ignore[union-attr]
        return [self.linear(context, f"{prefix}.o_proj"), key, value]


def read_llama2c(path: str | os.PathLike[str]) -> tuple[LlamaConfig, dict[str, np.ndarray]]:
    """Reads a checkpoint in llama2.c's first format: 7 int32, then the float32 weights in a fixed order.

    Returns the configuration and the weights under their Hugging Face names, memory-mapped.
    Raises ModelBuildError when the header is implausible or the file's size does not fit it.
    """
    path = Path(path)
    header_size = struct.calcsize("<7i")
    with path.open("rb") as stream:
        header = stream.read(header_size)
    if len(header) < header_size:
        raise ModelBuildError(f"{path} has {len(header)} bytes; expected a llama2.c checkpoint with 7 int32 first")
    dim, inner, layers, heads, kv_heads, vocab, max_positions = struct.unpack("<7i", header)
    # A negative vocabulary size is how the format says that the classifier has weights of its own.
    tied, vocab = vocab > 0, abs(vocab)
    sizes = (dim, inner, layers, heads, kv_heads, vocab, max_positions)
    if min(sizes) <= 0 or max(sizes) > 1 << 24 or layers > 1 << 12:
        raise ModelBuildError(f"{path} has the header {sizes}; expected a llama2.c checkpoint (version 0)")
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rope_style="interleaved",
        tie_word_embeddings=tied,
        max_position_embeddings=max_positions,
    )

    shapes = llama_weight_shapes(config)
    # One kind of weight for all layers, then the next kind.
    kinds = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    kinds += ["post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"]
    order = ["model.embed_tokens.weight"]
    order += [f"model.layers.{layer}.{kind}.weight" for kind in kinds for layer in range(layers)]
    order += ["model.norm.weight"]
    tables = max_positions * config.head_size  # cos and sin of the rotary embedding, which the graph computes itself
    count = sum(math.prod(shapes[key]) for key in order) + tables + (0 if tied else vocab * dim)
    expected = header_size + 4 * count
    if path.stat().st_size != expected:
        raise ModelBuildError(f"{path} has {path.stat().st_size} bytes; its header {sizes} asks for {expected}")

    values = np.memmap(path, dtype="<f4", mode="r", offset=header_size)
    weights: dict[str, np.ndarray] = {}
    start = 0
    for key in order:
        size = math.prod(shapes[key])
        weights[key] = values[start : start + size].reshape(shapes[key])
        start += size
    if not tied:
        weights["lm_head.weight"] = values[start + tables :].reshape(vocab, dim)
    return config, weights
