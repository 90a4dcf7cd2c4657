"""Pass unpad if the layout has heads before tokens, as for rotary embedding."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from ortolan import Recipe
from ortolan.models import tiny

from .attention_graphs import FLOAT, D, Graph, H
from .padded_models import (
    MASKS,
    answers,
    as_written,
    assert_zero_elsewhere,
    attention_model,
    both,
    changed,
    encoder_feeds,
    fuse_and_unpad,
    proto,
    reason,
)
from .rotary_forms import ROTARY
from .small_models import op_types, relative_error, run


@pytest.mark.parametrize("form", ROTARY)
def test_heads_are_turned_on_packed_tokens(form: str) -> None:
    """Each token is rotated by its position in the padded sequence."""
    model = attention_model(ROTARY[form])
    unpadded = changed(fuse_and_unpad(model))
    left = op_types(unpadded)
    # PackTokens packs x and either cosine and sine (3 nodes) or the angles that both are computed from (2 nodes).
    assert left.count("UnpackTokens") == 1 and left.count("PackTokens") in (2, 3)
    for mask in MASKS.values():
        feeds = encoder_feeds(model, mask)
        there = feeds["attention_mask"] != 0
        (expected,) = run(model, feeds)
        for library in (True, False):
            (y,) = run(unpadded, feeds, library=library)
            assert_zero_elsewhere(y, there)
            np.testing.assert_allclose(y[there], expected[there], atol=2e-5)


@pytest.mark.parametrize("form", ROTARY)
@pytest.mark.parametrize("mask", [np.zeros((0, 5)), np.zeros((2, 0)), np.zeros((2, 5)), [[0, 0, 0], [1, 0, 1]]])
def test_sequences_without_tokens(form: str, mask: np.ndarray) -> None:
    model = attention_model(ROTARY[form])
    unpadded = changed(fuse_and_unpad(model))
    feeds = encoder_feeds(model, mask)
    for library in (True, False):
        (y,) = run(unpadded, feeds, library=library)
        assert y.shape == (*np.shape(mask), 48)
        assert_zero_elsewhere(y, mask)


def test_sizes_of_padded_sequences_are_asked_for_no_more() -> None:
    """Nodes that only computed padded sizes for Reshape and Expand are removed."""
    model = attention_model(ROTARY["shared keys"])
    unpadded = changed(fuse_and_unpad(model))
    sizes = {node.input[1] for node in unpadded.graph.node if node.op_type in ("Reshape", "Expand")}
    assert sizes <= {one.name for one in unpadded.graph.initializer}


@pytest.mark.parametrize("length", [11, 40])
@pytest.mark.parametrize("window", [4, 18, 30])
def test_windows_stay(length: int, window: int) -> None:
    """Window masks stay, even if they mask no key in the short trials."""
    model = proto(tiny.tiny_modernbert(local_attention=window))
    padded, report = both(model, Recipe.of(weights="bf16"))
    unpadded = changed(report)
    masks = [node.input[1] for node in unpadded.graph.node if node.op_type == "PackedNoMADAttention"]
    assert masks[0] == masks[2] != masks[1]  # the second layer has a window, the first and third have none
    behind = np.arange(length) < np.array([[length], [3], [length - 2], [1]])
    gaps = np.random.default_rng(length).random((4, length)) < 0.6
    for name, mask in {"behind": behind, "in front": behind[:, ::-1], "gaps": gaps}.items():
        feeds = encoder_feeds(model, mask)
        (expected,), (y,) = as_written(padded, feeds), as_written(unpadded, feeds)
        assert_zero_elsewhere(y, mask)
        if name == "behind":
            np.testing.assert_array_equal(y[mask], expected[mask])
        assert relative_error(expected[mask], y[mask]) < 1e-3
        assert relative_error(run(model, feeds)[0][mask], y[mask]) < 0.02


def test_heads_that_something_else_reads() -> None:
    """Keys that are a graph output keep their padded layout, and the pass gives the reason."""

    def shown(graph: Graph) -> str:
        y = ROTARY["halves"](graph)
        # Name the tensor of keys that the first MatMul reads.
        key = [node.input[0] for node in graph.nodes if node.op_type == "Transpose"][-2]
        graph.nodes.append(helper.make_node("Identity", [key], ["keys"], "/keys"))
        graph.outputs["keys"] = (FLOAT, ["batch", H, "rows", D])
        return y

    found = reason(fuse_and_unpad(attention_model(shown)))
    assert found.endswith("has consumers besides attention")


def test_the_report_holds_for_the_original() -> None:
    """The two passes alone give the original's answers at a length that verification did not use."""
    model = attention_model(ROTARY["joined, by Split"])
    report = fuse_and_unpad(model)
    feeds = encoder_feeds(model, np.ones((2, 70)))
    np.testing.assert_allclose(answers(changed(report), feeds)[0], run(model, feeds)[0], atol=2e-5)
