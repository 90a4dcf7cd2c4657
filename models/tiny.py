"""Small models with reproducible random weights, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import onnx_ir as ir

from .bert import BertConfig, bert_weight_shapes, build_bert
from .graph_builder import GraphBuilder, ModelBuildError, Shape, set_type, tensor_value
from .llama import AttentionForm, build_llama
from .llama_config import LlamaConfig, llama_weight_shapes
from .llama_encoder import SCORE_WEIGHT, EncoderOutput, Positions, build_llama_encoder
from .modernbert import ModernBertConfig, build_modernbert, modernbert_weight_shapes
from .mpnet import MpnetConfig, build_mpnet, mpnet_weight_shapes

LinearForm = Literal["matmul", "matmul_add", "gemm", "gemm_trans_b", "transpose", "identity", "cast", "dequantize"]

TINY_BERT = BertConfig(
    vocab_size=101,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=64,
)
TINY_MPNET = MpnetConfig(
    vocab_size=103,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=66,
)
TINY_MODERNBERT = ModernBertConfig(
    vocab_size=107,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=64,
    global_attn_every_n_layers=2,
    local_attention=6,
)
TINY_LLAMA = LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def random_weights(shapes: Mapping[str, Shape], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random float32 weights of the given shapes, scaled so that activations stay near 1 in every layer.

    Matrices have variance 1 / fan-in. Biases are small but not 0, and scales of norms are near 1 but not 1, so that
    tests detect a kernel that ignores them.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        if len(shape) > 1:
            noise *= shape[-1] ** -0.5
        else:
            noise = 0.1 * noise + (0 if name.endswith("bias") else 1)
        weights[name] = noise.astype(np.float32)
    return weights


def tiny_bert(seed: int = 0, **overrides: Any) -> ir.Model:
    """Return a BERT encoder of build_bert with configuration TINY_BERT and `overrides`.

    Sizes need not be powers of two: tiny_bert(hidden_size=40, intermediate_size=100) works.

    Raises:
        TypeError: A field is unknown.
        ModelBuildError: The sizes do not fit together.
    """
    config = BertConfig(**{**vars(TINY_BERT), **overrides})
    return build_bert(random_weights(bert_weight_shapes(config), seed), config, name="tiny_bert")


def tiny_mpnet(seed: int = 0, **overrides: Any) -> ir.Model:
    """Return an MPNet encoder of build_mpnet with configuration TINY_MPNET and `overrides`; see `tiny_bert`."""
    config = MpnetConfig(**{**vars(TINY_MPNET), **overrides})
    return build_mpnet(random_weights(mpnet_weight_shapes(config), seed), config, name="tiny_mpnet")


def tiny_modernbert(seed: int = 0, **overrides: Any) -> ir.Model:
    """Return an encoder of build_modernbert with configuration TINY_MODERNBERT and `overrides`; see `tiny_bert`."""
    config = ModernBertConfig(**{**vars(TINY_MODERNBERT), **overrides})
    return build_modernbert(random_weights(modernbert_weight_shapes(config), seed), config, name="tiny_modernbert")


def tiny_llama(seed: int = 0, attention: AttentionForm = "standard", **overrides: Any) -> ir.Model:
    """Return a Llama decoder of build_llama with configuration TINY_LLAMA and `overrides`; see `tiny_bert`."""
    config = LlamaConfig(**{**vars(TINY_LLAMA), **overrides})
    return build_llama(random_weights(llama_weight_shapes(config), seed), config, "tiny_llama", attention)


def tiny_llama_encoder(
    seed: int = 0,
    output: EncoderOutput = "last_hidden_state",
    positions: Positions = "input",
    bidirectional: bool = False,
    pad_token_id: int = 0,
    **overrides: Any,
) -> ir.Model:
    """Return an encoder of build_llama_encoder with configuration TINY_LLAMA and `overrides`; see `tiny_bert`."""
    config = LlamaConfig(**{**vars(TINY_LLAMA), **overrides})
    shapes = {**llama_weight_shapes(config), SCORE_WEIGHT: (1, config.hidden_size)}
    return build_llama_encoder(
        random_weights(shapes, seed),
        config,
        "tiny_llama_encoder",
        output,
        positions=positions,
        bidirectional=bidirectional,
        pad_token_id=pad_token_id,
    )


def mlp(
    widths: Sequence[int] = (24, 40, 33, 16),
    forms: LinearForm | Sequence[LinearForm] = ("matmul_add", "gemm", "gemm_trans_b"),
    seed: int = 0,
) -> ir.Model:
    """Return a chain of linear layers with Relu between them, each in one of the forms that exporters write.

    Input: x, float32 [batch, widths[0]]. Output: y, float32 [batch, widths[-1]]. Layer i is in module /layers.i.

        matmul        MatMul without bias
        matmul_add    MatMul, then Add
        gemm          Gemm with B as [in, out]
        gemm_trans_b  Gemm with transB=1 and B as [out, in]
        transpose     MatMul and Add, the weight a Transpose of [out, in]
        identity      MatMul and Add, the weight through an Identity
        cast          MatMul and Add, the weight float16 through a Cast
        dequantize    MatMul and Add, the weight int8 through a DequantizeLinear with one scale per column

    Args:
        widths: Features before the first layer and after each layer.
        forms: One of the above for all layers, or one per layer.
        seed: Seed of the weights.

    Raises:
        ModelBuildError: The number of forms does not fit, or a form is unknown.
    """
    layers = len(widths) - 1
    chosen: Sequence[LinearForm] = [forms] * layers if isinstance(forms, str) else forms
    if layers < 1 or len(chosen) != layers or not set(chosen) <= set(get_args(LinearForm)):
        raise ModelBuildError(
            f"{layers} layers between widths {tuple(widths)}, but forms {tuple(chosen)}; expected one form per layer "
            f"out of {', '.join(get_args(LinearForm))}"
        )
    shapes: dict[str, Shape] = {}
    for index, (wide_in, wide_out) in enumerate(pairwise(widths)):
        shapes[f"layers.{index}.weight"] = (wide_out, wide_in)
        shapes[f"layers.{index}.bias"] = (wide_out,)
    weights = random_weights(shapes, seed)

    graph = GraphBuilder()
    inputs = [tensor_value("x", ir.DataType.FLOAT, ["batch", widths[0]])]
    hidden = inputs[0]
    for index, form in enumerate(chosen):
        with graph.module(f"layers.{index}"):
            hidden = _linear(graph, hidden, f"layers.{index}", form, weights)
            if index < layers - 1:
                hidden = graph.node("Relu", hidden)
    set_type(hidden, ir.DataType.FLOAT, ["batch", widths[-1]])
    return graph.model("mlp", inputs, {"y": hidden})


def _linear(
    graph: GraphBuilder, x: ir.Value, name: str, form: LinearForm, weights: Mapping[str, np.ndarray]
) -> ir.Value:
    weight = weights[f"{name}.weight"]
    if form == "matmul":
        return graph.node("MatMul", x, graph.weight(f"{name}.weight_t", weight.T))
    bias = graph.weight(f"{name}.bias", weights[f"{name}.bias"])
    if form == "gemm_trans_b":
        return graph.node("Gemm", x, graph.weight(f"{name}.weight", weight), bias, transB=1)
    if form == "gemm":
        return graph.node("Gemm", x, graph.weight(f"{name}.weight_t", weight.T), bias)
    return graph.node("Add", graph.node("MatMul", x, _wrapped_weight(graph, name, form, weight)), bias)


def _wrapped_weight(graph: GraphBuilder, name: str, form: LinearForm, weight: np.ndarray) -> ir.Value:
    """Add a weight in one of the forms of `tiny_linears`, and return it as the operand [in, out] of a MatMul."""
    if form == "transpose":
        return graph.node("Transpose", graph.weight(f"{name}.weight", weight), perm=[1, 0])
    if form == "cast":
        half = graph.weight(f"{name}.weight_t", weight.T.astype(np.float16))
        return graph.node("Cast", half, to=ir.DataType.FLOAT)
    if form == "dequantize":
        scales = np.abs(weight).max(axis=1) / np.float32(127)
        codes = np.rint(weight / scales[:, None]).astype(np.int8)
        operands = {"quantized": codes.T, "scale": scales, "zero_point": np.zeros(len(scales), np.int8)}
        values = [graph.weight(f"{name}.weight_t_{part}", array) for part, array in operands.items()]
        return graph.node("DequantizeLinear", *values, axis=1)
    plain = graph.weight(f"{name}.weight_t", weight.T)
    return graph.node("Identity", plain) if form == "identity" else plain
