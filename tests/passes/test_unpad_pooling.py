"""Pass unpad before pooling with masked_fill, and after normalization of vectors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortolan import Recipe
from ortolan.models import tiny

from .padded_models import MASKS, add_nodes, answers, both, changed, encoder_feeds, proto, reason, with_unpad
from .small_models import optimize, relative_error, run

make = helper.make_node
HIDDEN = "last_hidden_state"
BF16 = Recipe.of(weights="bf16")


def filled(shows: bool, by: str, fill: float, inverted: bool = False) -> onnx.ModelProto:
    """Return a model that sets masked positions to `fill` before pooling.

    shows: the condition is true for tokens, not for padding.
    """
    condition = (
        [make("Cast", ["attention_mask"], ["condition"], to=TensorProto.BOOL)]
        if shows
        else [make("Equal", ["attention_mask", "zero"], ["condition"])]
    )
    pair = [HIDDEN, "fill"] if shows != inverted else ["fill", HIDDEN]
    axes = {"axes": [1]} if by == "ReduceMax" else {}
    nodes = [
        *condition,
        make("Unsqueeze", ["condition", "last"], ["column"]),
        make("Where", ["column", *pair], ["filled"], name="filled"),
        make(by, ["filled"] if axes else ["filled", "tokens"], ["pooled"], keepdims=0, **axes),
    ]
    weights = {"zero": np.array(0), "last": np.array([-1]), "tokens": np.array([1])}
    return add_nodes(
        proto(tiny.tiny_bert()), nodes, {"pooled": ["batch", 48]}, weights | {"fill": np.array(fill, np.float32)}
    )


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize(("by", "fill"), [("ReduceMax", -np.inf), ("ReduceMax", -1e9), ("ReduceSum", 0.0)])
def test_pooling_by_masked_fill(shows: bool, by: str, fill: float) -> None:
    model = filled(shows, by, fill)
    padded, report = both(model, BF16)
    unpadded = changed(report)
    for mask in MASKS.values():
        feeds = encoder_feeds(model, mask)
        (original,), (expected,), (found,) = run(model, feeds), answers(padded, feeds), answers(unpadded, feeds)
        assert relative_error(original, found) < 0.03 and relative_error(expected, found) < 0.02
    feeds = encoder_feeds(model, [[1] * 30, [1] * 7 + [0] * 23])
    alone = {name: array[1:, :7] for name, array in feeds.items()}
    np.testing.assert_array_equal(answers(unpadded, feeds)[0][1], answers(unpadded, alone)[0][0])


def test_a_fill_that_stands_where_tokens_are() -> None:
    found = reason(optimize(filled(True, "ReduceMax", -1e9, inverted=True), recipe=with_unpad(BF16)))
    assert found == "Where 'filled' may read positions without a token"


@pytest.mark.parametrize("norm", ["ReduceL2", "ReduceL1"])
def test_vectors_of_tokens_that_are_normalized(norm: str) -> None:
    """torch.nn.functional.normalize expands the norm to the shape of the vectors."""
    nodes = [
        make(norm, [HIDDEN], ["norm"], axes=[-1], keepdims=1),
        make("Clip", ["norm", "least"], ["clipped"]),
        make("Shape", [HIDDEN], ["shape"]),
        make("Expand", ["clipped", "shape"], ["expanded"]),
        make("Div", [HIDDEN, "expanded"], ["unit"]),
    ]
    weights = {"least": np.array(1e-12, np.float32)}
    model = add_nodes(proto(tiny.tiny_bert()), nodes, {"unit": ["batch", "sequence", 48]}, weights)
    padded, report = both(model, BF16)
    unpadded = changed(report)
    for mask in MASKS.values():
        feeds = encoder_feeds(model, mask)
        there = feeds["attention_mask"] != 0
        (expected,), (found,) = answers(padded, feeds), answers(unpadded, feeds)
        assert relative_error(expected[there], found[there]) < 0.02
        assert not found[~there].any()
