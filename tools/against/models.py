"""Whole models: an encoder and a decoder of published shapes with random weights.

They take as long as trained models and need no download.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ortolan.benchmarks.encoder import word_feeds
from ortolan.graph_passes.recipe import Recipe
from ortolan.models.bert import BertConfig, bert_weight_shapes, build_bert
from ortolan.models.llama import build_llama
from ortolan.models.llama_config import LlamaConfig, llama_weight_shapes
from ortolan.models.tiny import TINY_BERT, TINY_LLAMA, random_weights
from ortolan.optimize import optimize_onnx

from .layers import Feeds, Row, TimedModel, Work

_ROOM = "models"
_MINILM = BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536)  # all-MiniLM-L6-v2
# SmolLM2-135M with 8 of its 30 layers.
_SMOLLM2 = LlamaConfig(49152, 576, 1536, 8, 9, 3, rope_theta=100000.0)

# Maps the first part of a row's name to its recipe.
_ENCODERS: Mapping[str, Recipe] = {
    "int4": Recipe.of(weights="int4", ignore=()),
    "int8": Recipe.of(weights="int8"),
    "4x1 80%, fixed ranges": Recipe.of(sparsity=0.8, pattern="4x1").with_pass("ranges"),
}
_DECODERS: Mapping[str, Recipe] = {
    # Groups with float scales, as imported models have.
    "int4 g32": Recipe.of(weights="int4", group_size=64, ignore=()).with_options({"group_size": 32, "symmetric": True}),
    "bf16 50%": Recipe.of(weights="bf16", sparsity=0.5),
    "long-context": Recipe.load("long-context"),
}
_CALIBRATION_TOKENS = 96


def model_works(tiny: bool) -> list[Work]:
    """Return encoders on short and longer texts, and decoders on a prompt and on one token after it."""
    return [*_encoder_works(tiny), *_decoder_works(tiny)]


def _encoder_works(tiny: bool) -> list[Work]:
    config = BertConfig(**(vars(TINY_BERT) | {"vocab_size": 30522})) if tiny else _MINILM
    shapes = ((1, 5),) if tiny else ((1, 16), (1, 128), (8, 64))
    inputs = ("input_ids", "attention_mask", "token_type_ids")

    def write(folder: Path, recipe: Recipe) -> TimedModel:
        model = build_bert(random_weights(bert_weight_shapes(config)), config, "encoder")
        calibration = [word_feeds(inputs, 1, 24, seed) for seed in range(4)]
        return _optimized(model, folder, recipe, calibration)

    return [
        Work(
            _ROOM,
            tuple(
                Row(f"MiniLM's shape {name} {batch}x{tokens}", partial(word_feeds, inputs, batch, tokens))
                for batch, tokens in shapes
            ),
            partial(write, recipe=recipe),
        )
        for name, recipe in (list(_ENCODERS.items())[:1] if tiny else _ENCODERS.items())
    ]


def _decoder_works(tiny: bool) -> list[Work]:
    config = TINY_LLAMA if tiny else _SMOLLM2
    steps = ((3, 4),) if tiny else ((128, 0), (1, 256))  # new tokens, tokens in the cache
    works = []
    for name, recipe in list(_DECODERS.items())[:1] if tiny else _DECODERS.items():
        write, feeds_of = _decoder(config, recipe)
        rows = [
            Row(f"SmolLM2's shape {name}, {new} new after {past}", partial(feeds_of, new, past)) for new, past in steps
        ]
        works.append(Work(_ROOM, tuple(rows), write))
    return works


def _decoder(config: LlamaConfig, recipe: Recipe) -> tuple[Callable[[Path], TimedModel], Callable[[int, int], Feeds]]:
    """Return a function that writes the model, and a function that returns feeds once the model is written."""
    caches: dict[str, tuple[tuple[int, int], type]] = {}  # ((heads, head size), type)

    def write(folder: Path) -> TimedModel:
        model = build_llama(random_weights(llama_weight_shapes(config)), config, "decoder")
        calibration = [
            _decoder_feeds(config, _CALIBRATION_TOKENS, 0, _caches_of(model.graph.inputs), seed) for seed in range(2)
        ]
        timed = _optimized(model, folder, recipe, calibration)
        caches.update(_caches_of(ir.load(timed.path).graph.inputs))
        return timed

    return write, lambda new, past: _decoder_feeds(config, new, past, caches)


def _caches_of(inputs: Sequence[ir.Value]) -> dict[str, tuple[tuple[int, int], type]]:
    found = {}
    for value in inputs:
        if (value.name or "").startswith("past_key_values."):
            assert value.shape is not None and value.dtype is not None
            heads, row = value.shape[1], value.shape[3]
            assert isinstance(heads, int) and isinstance(row, int)
            found[value.name or ""] = ((heads, row), value.dtype.numpy().type)
    return found


def _decoder_feeds(
    config: LlamaConfig, new: int, past: int, caches: Mapping[str, tuple[tuple[int, int], type]], seed: int = 0
) -> Feeds:
    """Return feeds of new tokens after `past` tokens, whose cache is zeros."""
    feeds: dict[str, np.ndarray] = {
        "input_ids": np.random.default_rng(seed).integers(0, config.vocab_size, (1, new)),
        "attention_mask": np.ones((1, past + new), np.int64),
        "position_ids": np.arange(past, past + new)[None],
    }
    for name, ((heads, row), dtype) in caches.items():
        feeds[name] = np.zeros((1, heads, past, row), dtype)
    return feeds


def _optimized(model: ir.Model, folder: Path, recipe: Recipe, calibration: Sequence[Feeds]) -> TimedModel:
    source = folder / "source.onnx"
    ir.save(model, source, external_data=f"{source.name}.data")
    path = folder / "model.onnx"
    # Without verification: the answers of random weights are meaningless.
    chosen = replace(recipe, passes=tuple(step for step in recipe.passes if step.name != "verify"))
    optimize_onnx(source, path, recipe=chosen, calibration=[dict(feeds) for feeds in calibration])
    return TimedModel(path)
