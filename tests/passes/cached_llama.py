"""A small decoder, the same decoder with a compressed cache, and a loop that runs both on a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import helper

import ortolan
from ortolan import OptimizationReport, Recipe
from ortolan.models import tiny

FORMS = ("standard", "gqa")

EXACT = {"keys": "float32", "values": "float32"}

SIZES = {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2}

# Decoders of the shapes of Gemma 2 and 3, and of gpt-oss without its experts.
RECENT: dict[str, dict[str, Any]] = {
    "gemma": {
        "windows": (6, 0),
        "local_rope_theta": 500.0,
        "qk_norm": True,
        "sandwich_norms": True,
        "attention_scale": 0.2,
        "attention_softcap": 5.0,
        "activation": "gelu_tanh",
    },
    "gpt-oss": {"windows": (6, 0), "attention_sinks": True, "qkv_bias": True},
}

VOCABULARY = tiny.TINY_LLAMA.vocab_size

LAYERS = tiny.TINY_LLAMA.num_hidden_layers

Arrays = dict[str, np.ndarray]


def recipe(*others: dict[str, Any], **options: Any) -> Recipe:
    steps = [{"name": "normalize"}, {"name": "compress_cache", **options}, *others, {"name": "verify", "seconds": 0.0}]
    return Recipe.from_dict({"name": "c", "pass": steps})


def llama(attention: str, **overrides: Any) -> onnx.ModelProto:
    return ir.to_proto(tiny.tiny_llama(attention=attention, **{**SIZES, **overrides}))


def unequal_mask(padding: str) -> np.ndarray:
    """Return an attention_mask int64 [2, 81] for a prompt of 70 tokens and 11 more tokens.

    The second sequence has 30 tokens of padding on the left or right of its prompt.
    """
    mask = np.ones((2, 81), np.int64)
    mask[1, :30] = 0
    if padding == "right":
        mask[1, :70] = mask[1, 69::-1]
    return mask


def compress(
    model: onnx.ModelProto, calibration: list[Arrays] | None = None, **options: Any
) -> tuple[onnx.ModelProto, OptimizationReport]:
    report = ortolan.optimize_onnx(
        model, recipe=recipe(**options), calibration=calibration or [prompt(model, seed=seed) for seed in (5, 6)]
    )
    assert report.model is not None
    return report.model, report


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return ortolan.create_session(model.SerializeToString())


def prompt(model: onnx.ModelProto, batch: int = 2, tokens: int = 50, seed: int = 0) -> Arrays:
    """Return inputs for a prompt with an empty cache."""
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, (batch, tokens))
    return Decoding(model, ids).feeds(0, tokens)


class Decoding:
    """Inputs of consecutive calls that pass the cache on. `mask` [batch, tokens] is 0 for padding."""

    def __init__(self, model: onnx.ModelProto, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        self.ids, self.mask = ids, np.ones_like(ids) if mask is None else mask
        self.names = [value.name for value in model.graph.input]
        self.caches: Arrays = {}
        for value in model.graph.input:
            if value.name.startswith("past_key_values"):
                shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
                dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
                # The cache of exact keys has a fixed number of slots; the other caches begin with 0 tokens.
                self.caches[value.name] = np.zeros((len(ids), *shape[1:]), dtype)

    def feeds(self, begin: int, end: int) -> Arrays:
        given = {"input_ids": self.ids[:, begin:end], "attention_mask": self.mask[:, :end]}
        given["position_ids"] = np.maximum(np.cumsum(self.mask, axis=1) - 1, 0)[:, begin:end]
        return {name: given[name] for name in self.names if name in given} | self.caches

    def run(self, model: onnx.ModelProto, cuts: Sequence[int]) -> Iterator[np.ndarray]:
        """Run one call per element of `cuts`, up to that token, and yield its logits."""
        runner = session(model)
        names = [output.name for output in runner.get_outputs()]
        begin = 0
        for end in cuts:
            outputs = dict(zip(names, runner.run(None, self.feeds(begin, end)), strict=True))
            self.caches = {name: outputs[name.replace("past_key_values", "present")] for name in self.caches}
            yield outputs["logits"]
            begin = end


def decode(
    model: onnx.ModelProto, cuts: Sequence[int] = (70, 71, 72, 80, 81), mask: np.ndarray | None = None
) -> np.ndarray:
    """Return the logits [2, tokens, vocabulary] of a prompt, single tokens and several tokens."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, cuts[-1]))
    return np.concatenate(list(Decoding(model, ids, mask).run(model, cuts)), axis=1)


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
