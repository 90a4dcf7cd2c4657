"""Pass unpad on decoders without a cache: causal attention, rotary positions, padding in front, the last token."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from ortolan import Recipe
from ortolan.models import tiny

from .padded_models import MASKS, PAD, answers, as_written, both, changed, encoder_feeds, proto, reason
from .small_models import op_types, relative_error, run

QWEN3 = {"qk_norm": True, "head_dim": 16, "pad_token_id": PAD}
GEMMA: dict[str, Any] = {
    **QWEN3,
    "bidirectional": True,
    "windows": (6, 0),
    "local_rope_theta": 100.0,
    "sandwich_norms": True,
    "activation": "gelu_tanh",
}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3-Embedding": QWEN3,
    "positions from a range": {**QWEN3, "positions": "range"},
    "e5-mistral": {"windows": (40, 40), "positions": "range", "pad_token_id": PAD},
    "short windows": {"windows": (4, 0), "positions": "range", "pad_token_id": PAD},
    "EmbeddingGemma": {**GEMMA, "positions": "range"},
    "sequence classification": {**QWEN3, "output": "score", "positions": "range"},
    "logits": {**QWEN3, "output": "logits"},
}
# The layers whose masks hide more than padding and later tokens.
OWN_MASKS = {"e5-mistral": 2, "short windows": 1, "EmbeddingGemma": 1}
BF16 = Recipe.of(weights="bf16")


def decoder(name: str) -> onnx.ModelProto:
    return proto(tiny.tiny_llama_encoder(**KINDS[name]))


def feeds_of(model: onnx.ModelProto, mask: Any) -> dict[str, np.ndarray]:
    """Return random tokens whose positions count the unmasked ones, as transformers feeds decoders."""
    feeds = encoder_feeds(model, mask)
    if "position_ids" in feeds:
        feeds["position_ids"] = np.maximum(np.cumsum(feeds["attention_mask"], axis=1) - 1, 0)
    return feeds


def alone(feeds: dict[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
    """Return the feeds of one sequence without its padding in front and behind."""
    there = np.flatnonzero(feeds["attention_mask"][row])
    return {name: array[row : row + 1, there[0] : there[-1] + 1] for name, array in feeds.items()}


@pytest.mark.parametrize("name", KINDS)
def test_sequences_are_answered_alike_alone_and_in_any_batch(name: str) -> None:
    model = decoder(name)
    padded, report = both(model, BF16)
    unpadded = changed(report)
    masks = [node.input[1] for node in unpadded.graph.node if node.op_type == "PackedNoMADAttention"]
    constant = {one.name for one in unpadded.graph.initializer}
    assert len([one for one in masks if one not in constant]) == OWN_MASKS.get(name, 0)
    for mask in MASKS.values():
        feeds = feeds_of(model, mask)
        (expected,), (found,), (original,) = as_written(padded, feeds), answers(unpadded, feeds), run(model, feeds)
        (portable,) = run(unpadded, feeds)
        there = feeds["attention_mask"] != 0 if found.ndim == 3 else np.ones(len(found), bool)
        assert relative_error(expected[there], found[there]) < 0.02
        assert relative_error(original[there], found[there]) < 0.03
        assert relative_error(portable[there], found[there]) < 0.02
        for row, whole in enumerate(found):
            own = alone(feeds, row)
            (single,) = answers(unpadded, own)
            seen = own["attention_mask"][0] != 0
            kept = whole[there[row]] if found.ndim == 3 else whole
            np.testing.assert_array_equal(single[0][seen] if found.ndim == 3 else single[0], kept)


def test_a_long_window_is_found() -> None:
    """A window is longer than the trials of other masks; on a few tokens it looks like none."""
    model = proto(tiny.tiny_llama_encoder(windows=(40, 0), pad_token_id=PAD))
    _, report = both(model, BF16)
    unpadded = changed(report)
    feeds = feeds_of(model, np.ones((2, 90)))
    assert relative_error(run(model, feeds)[0], answers(unpadded, feeds)[0]) < 0.03
    causal = [
        {one.name: one.i for one in node.attribute}["causal"]
        for node in unpadded.graph.node
        if node.op_type == "PackedNoMADAttention"
    ]
    assert causal == [0, 1]


def test_a_window_that_is_too_long_to_be_tried_keeps_its_mask() -> None:
    model = proto(tiny.tiny_llama_encoder(windows=(100_000, 0), pad_token_id=PAD))
    _, report = both(model, BF16)
    masks = [node.input[1] for node in changed(report).graph.node if node.op_type == "PackedNoMADAttention"]
    constant = {one.name for one in changed(report).graph.initializer}
    assert [one in constant for one in masks] == [False, True]


@pytest.mark.parametrize("pad", [None, PAD + 1])
def test_a_last_token_that_may_be_padding(pad: int | None) -> None:
    """The graph finds the last token by another padding token than the folder names, or no folder names one."""
    model = decoder("sequence classification")
    _, report = both(model, BF16, {} if pad is None else {"pad_token_id": pad})
    if pad is None:
        changed(report)
    else:
        assert reason(report) == "GatherND '/GatherND' may read positions without a token"


def test_the_last_token_is_read_behind_the_packed_part() -> None:
    left = op_types(changed(both(decoder("sequence classification"), BF16)[1]))
    assert left.count("UnpackTokens") == 1 and left[left.index("UnpackTokens") + 1 :].count("GatherND") == 1
