"""Synthetic inputs of models that find words by labels (GLiNER), whose inputs must fit each other.

Tokens are those of labels, each behind the label token, and then those of words. Inputs of integers number the words,
count them, and index the first and the last word of each span.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..find.constants import constant_tensor

_WORDS, _COUNTS, _SPANS, _SPAN_MASK = "words_mask", "text_lengths", "span_idx", "span_mask"


def fit_words(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the feeds with words of one token in the second half of each text, and with all their spans.

    Feeds of models without an input words_mask [batch, tokens] are returned unchanged.
    """
    ids, words = feeds.get("input_ids"), feeds.get(_WORDS)
    if ids is None or words is None or words.ndim != 2 or words.shape != ids.shape:
        return feeds
    batch, tokens = ids.shape
    before = tokens // 2
    count = tokens - before
    positions = np.arange(tokens)
    changed = {_WORDS: np.maximum(positions - before + 1, 0)}
    label = _label_token(model)
    if label is not None:
        changed["input_ids"] = np.where((positions < before) & (positions % 2 == 0), label, ids)
    changed[_COUNTS] = np.full((batch, 1), count)
    first = np.repeat(np.arange(count), _longest_span(model))
    last = first + np.tile(np.arange(_longest_span(model)), count)
    inside = last < count
    changed[_SPANS] = np.stack([first, last], axis=-1) * inside[:, None]
    changed[_SPAN_MASK] = inside
    shapes = {_COUNTS: (batch, 1), _SPANS: (batch, *changed[_SPANS].shape), _SPAN_MASK: (batch, len(inside))}
    return feeds | {
        name: np.broadcast_to(array, shapes.get(name, ids.shape)).astype(feeds[name].dtype)
        for name, array in changed.items()
        if name in feeds
    }


def _label_token(model: ir.Model) -> int | None:
    """Return the token with which the model compares input_ids to find labels."""
    for value in model.graph.inputs:
        for node, index in value.uses() if value.name == "input_ids" else ():
            tensor = constant_tensor(node.inputs[1 - index]) if node.op_type == "Equal" else None
            if tensor is not None and tensor.size == 1:
                return int(tensor.numpy().item())
    return None


def _longest_span(model: ir.Model) -> int:
    """Return the number of words of the longest span: spans are reshaped to [batch, words, this number, width]."""
    for node in model.graph:
        shape = node.inputs[1].producer() if node.op_type == "Reshape" and node.inputs[1] is not None else None
        if shape is None or shape.op_type != "Concat" or len(shape.inputs) != 4:
            continue
        sizes = [constant_tensor(size) for size in shape.inputs]
        if [size is None for size in sizes] == [True, True, False, True]:
            assert sizes[2] is not None
            return max(1, int(sizes[2].numpy().item()))
    return 1
