"""Text that a decoder generates itself, for evaluation without texts from the user.

Random tokens are unlike training data, and quantization errors on them are several times as large.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from .feeds import Feeds, has_past, model_inputs, prompt_feeds

# Sequences and tokens of each. Every token of a sequence is a run of the model.
USUAL = (2, 64)
LARGE = (2, 32)  # for models that read gigabytes of weights a run
BEYOND_MEMORY = (8, 8)  # for models whose weights are read from disk again in every run
_PLAIN = {"input_ids", "attention_mask", "position_ids"}
_PAST, _PRESENT = "past_key_values", "present"
# The start token of SentencePiece vocabularies. In BPE vocabularies, the id is an ordinary token.
_DEFAULT_START = 1
_CONFIGS = ("generation_config.json", "config.json", "genai_config.json")


def sampled_feeds(model: ir.Model, session: Any, start: int, size: tuple[int, int] = USUAL) -> list[Feeds]:
    """Sample sequences token by token, at temperature 1 and from a fixed seed, and return them as feeds.

    The first feed holds all sequences; the second feed, the beginning of the first sequence; the third feed, the last
    token of each sequence with the cache of all earlier tokens.

    Args:
        model: The original model.
        session: A session on the model.
        start: The first token of each sequence.
        size: Number of sequences, if the model does not fix it, and tokens of each, at least 4.

    Returns:
        The feeds; an empty list if the model is not a decoder with `logits` and a growing KV cache, or does not run.
    """
    inputs = {value.name or "": value for value in model_inputs(model)}
    caches = {name: name.replace(_PAST, _PRESENT, 1) for name in inputs if name.startswith(_PAST)}
    outputs = [value.name or "" for value in model.graph.outputs]
    if not has_past(model) or inputs.keys() - caches.keys() - _PLAIN or not {"logits", *caches.values()} <= {*outputs}:
        return []
    shape = inputs["input_ids"].shape if "input_ids" in inputs else None
    if shape is None or len(shape) != 2:
        return []
    sequences, tokens = size
    rows = shape[0] if isinstance(shape[0], int) else sequences
    rng = np.random.default_rng(0)
    ids = np.full((rows, 1), start)
    found: list[Feeds] = []
    with suppress(Exception):  # ONNX Runtime fails, or the model's inputs have other sizes
        feeds = prompt_feeds(ids, model)
        while True:
            answers = dict(zip(outputs, session.run(outputs, feeds), strict=True))
            if ids.shape[1] == tokens:
                break
            logits = answers["logits"][:, -1].astype(np.float64)
            if not np.isfinite(logits).all():
                return []
            chosen = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)  # a sample of softmax(logits)
            ids = np.concatenate([ids, chosen[:, None]], axis=1)
            feeds = _next_feeds(ids, feeds) | {past: answers[present] for past, present in caches.items()}
        parts = [ids, ids[: 1 if isinstance(shape[0], ir.SymbolicDim) else rows, : max(3, tokens // 8 - 1)]]
        whole = [prompt_feeds(part, model) for part in parts]
        for one in whole:
            session.run(["logits"], one)
        found = [*whole, feeds]
    return found


def _next_feeds(ids: np.ndarray, before: Feeds) -> Feeds:
    """Return feeds for the last token of `ids`, without the cache."""
    made = {
        "input_ids": ids[:, -1:],
        "attention_mask": np.ones_like(ids),
        "position_ids": np.full((len(ids), 1), ids.shape[1] - 1),
    }
    return {name: array.astype(before[name].dtype) for name, array in made.items() if name in before}


def start_token(model: Path | None) -> int:
    """Return `bos_token_id` from a configuration file beside the model, or in the parent of a folder `onnx`, or 1."""
    if model is None:
        return _DEFAULT_START
    folders = [model.parent, model.parent.parent] if model.parent.name == "onnx" else [model.parent]
    for file in (folder / name for folder in folders for name in _CONFIGS):
        with suppress(OSError, ValueError):
            config = json.loads(file.read_text(encoding="utf-8"))
            found = _bos(config) if isinstance(config, dict) else None
            if found is not None:
                return found
    return _DEFAULT_START


def _bos(config: dict[str, Any]) -> int | None:
    inner = config.get("model")
    for one in (config, inner if isinstance(inner, dict) else {}):
        token = one.get("bos_token_id")
        token = token[0] if isinstance(token, Sequence) and token else token
        if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
            return token
    return None
