"""The models that mutations start from: small models of all kinds that Ortolan supports."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnxruntime import quantization

from ortolan.models import tiny

from ..passes.attention_graphs import Graph, W, plain, zeros_for_rows_without_keys
from ..passes.int8_layers import DYNAMIC, FIXED, ROUNDED, Int8Layer
from ..passes.padded_models import attention_model, masked_mean
from ..passes.small_models import branches_model, matmul_model
from ..passes.stored_layers import NBitsLayer
from .case import Case, Draw

_FORMS = ("matmul", "matmul_add", "gemm", "gemm_trans_b", "transpose", "identity", "cast", "dequantize")


def _mask(rng: np.random.Generator, batch: int, tokens: int) -> np.ndarray:
    """Return an attention_mask without padding, or with padding on the right or the left.

    Each row has at least one token.
    """
    counts = rng.integers(1, tokens + 1, batch) if tokens else np.zeros(batch, np.int64)
    kind = rng.integers(0, 3)
    if kind == 0 or not tokens:
        return np.ones((batch, tokens), np.int64)
    mask = (np.arange(tokens) < counts[:, None]).astype(np.int64)
    return mask if kind == 1 else mask[:, ::-1].copy()


def _encoder(rng: np.random.Generator, batch: int, tokens: int) -> Draw:
    mask = _mask(rng, batch, tokens)
    feeds = {
        "input_ids": np.where(mask != 0, rng.integers(2, 90, mask.shape), 0),
        "attention_mask": mask,
        "token_type_ids": rng.integers(0, 2, mask.shape),
    }
    return Draw(feeds, mask != 0)


def _decoder(heads: int, size: int, layers: int, hides: bool) -> Callable[[np.random.Generator, int, int], Draw]:
    def draw(rng: np.random.Generator, batch: int, tokens: int) -> Draw:
        past = int(rng.integers(0, 6))
        mask = np.ones((batch, past + tokens), np.int64)
        if past > 1 and hides:  # GroupQueryAttention supports padding only after a sequence
            mask[0, : rng.integers(0, past)] = 0
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, past:]
        feeds = {"input_ids": rng.integers(0, 90, (batch, tokens)), "attention_mask": mask, "position_ids": positions}
        for layer in range(layers):
            for part in ("key", "value"):
                array = rng.standard_normal((batch, heads, past, size), np.float32)
                feeds[f"past_key_values.{layer}.{part}"] = array
        return Draw(feeds)

    return draw


def _rows(width: int, flat: bool = False, scale: float = 1.0) -> Callable[[np.random.Generator, int, int], Draw]:
    def draw(rng: np.random.Generator, batch: int, tokens: int) -> Draw:
        shape = (batch, width) if flat else (batch, tokens, width)
        return Draw({"x": np.float32(scale) * rng.standard_normal(shape, np.float32)})

    return draw


def _with_flag(rng: np.random.Generator, batch: int, tokens: int) -> Draw:
    x = rng.standard_normal((batch, 20), np.float32)
    return Draw({"x": x, "flag": np.array(rng.integers(0, 2), bool)})


def _attention(rng: np.random.Generator, batch: int, tokens: int) -> Draw:
    mask = _mask(rng, batch, tokens)
    return Draw({"x": rng.standard_normal((batch, tokens, W), np.float32), "attention_mask": mask}, mask != 0)


def _plain_attention(graph: Graph) -> str:
    weights, values = plain(graph)
    return graph.merge(graph.op("MatMul", weights, values))


@cache
def _dynamic_int8() -> bytes:
    """Return a BERT that ONNX Runtime's dynamic quantizer wrote."""
    with tempfile.TemporaryDirectory() as folder:
        model, quantized = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        ir.save(tiny.tiny_bert(num_hidden_layers=1), model)
        with open(os.devnull, "w"):
            quantization.quantize_dynamic(model, quantized, weight_type=quantization.QuantType.QInt8)
        return quantized.read_bytes()


def _bert(rng: np.random.Generator) -> Case:
    sizes = {"hidden_size": int(rng.choice([32, 40, 48])), "intermediate_size": int(rng.choice([64, 72, 100]))}
    model = tiny.tiny_bert(int(rng.integers(99)), num_hidden_layers=int(rng.integers(1, 3)), **sizes)
    proto = ir.to_proto(model)
    return Case(masked_mean(proto, keep=bool(rng.integers(2))) if rng.integers(3) == 0 else proto, _encoder)


def _mpnet(rng: np.random.Generator) -> Case:
    return Case(ir.to_proto(tiny.tiny_mpnet(int(rng.integers(99)), num_hidden_layers=1)), _encoder)


def _modernbert(rng: np.random.Generator) -> Case:
    return Case(ir.to_proto(tiny.tiny_modernbert(int(rng.integers(99)), num_hidden_layers=2)), _encoder)


def _llama(rng: np.random.Generator) -> Case:
    layers = int(rng.integers(1, 3))
    tied = bool(rng.integers(2))
    form: tiny.AttentionForm = "gqa" if rng.integers(3) == 0 else "standard"
    size = 16 if form == "gqa" else 12
    more = {"head_dim": size} if form == "gqa" else {}
    model = tiny.tiny_llama(
        int(rng.integers(99)), attention=form, num_hidden_layers=layers, tie_word_embeddings=tied, **more
    )
    return Case(ir.to_proto(model), _decoder(2, size, layers, hides=form == "standard"))


def _mlp(rng: np.random.Generator) -> Case:
    count = int(rng.integers(1, 5))
    widths = [24, *(int(rng.choice([16, 24, 24, 33, 40])) for _ in range(count))]
    forms = [str(rng.choice(_FORMS)) for _ in range(count)]
    return Case(ir.to_proto(tiny.mlp(widths, forms, int(rng.integers(99)))), _rows(24, flat=True))  # type: ignore[arg-type]


def _matmul(rng: np.random.Generator) -> Case:
    return Case(matmul_model(opset=int(rng.choice([13, 17, 18, 21]))), _rows(20))


def _branches(rng: np.random.Generator) -> Case:
    return Case(branches_model(bool(rng.integers(2))), _with_flag)


def _masked_attention(rng: np.random.Generator) -> Case:
    form = _plain_attention if rng.integers(2) else zeros_for_rows_without_keys()
    return Case(attention_model(form), _attention)


def _int8(rng: np.random.Generator) -> Case:
    form = str(rng.choice([*DYNAMIC, *FIXED, *ROUNDED]))
    layer = Int8Layer(form, bias=bool(rng.integers(2)), q=rng.integers(-127, 128, (32, 24)).astype(np.int8))
    # Inputs stay within the fixed ranges, because optimized models do not clip to these ranges.
    return Case(layer.model(), _rows(32, flat=True, scale=0.4))


def _nbits(rng: np.random.Generator) -> Case:
    layer = NBitsLayer(64, 24, 32, str(rng.choice(["", "packed"])), seed=int(rng.integers(99)))
    return Case(layer.model(), _rows(64, flat=True))


def _quantized_bert(rng: np.random.Generator) -> Case:
    return Case(onnx.ModelProto.FromString(_dynamic_int8()), _encoder)


# Relative frequencies. Small models are chosen more often, because they take less time.
BASES: dict[str, tuple[int, Callable[[np.random.Generator], Case]]] = {
    "mlp": (6, _mlp),
    "matmul": (2, _matmul),
    "branches": (1, _branches),
    "attention": (3, _masked_attention),
    "bert": (4, _bert),
    "mpnet": (1, _mpnet),
    "modernbert": (1, _modernbert),
    "llama": (3, _llama),
    "int8": (1, _int8),
    "nbits": (1, _nbits),
    "int8 bert": (1, _quantized_bert),
}


def draw_base(rng: np.random.Generator) -> tuple[str, Case]:
    """Return the name of a random base model, and a case with the model as one proto."""
    weights = np.array([weight for weight, _ in BASES.values()], np.float64)
    name = str(rng.choice(list(BASES), p=weights / weights.sum()))
    case = BASES[name][1](rng)
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    case.model = model
    return name, case
