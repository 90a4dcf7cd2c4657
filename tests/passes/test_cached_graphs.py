"""Attention with a cache from several kinds of decoders is replaced by one operator with the same answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

import ortolan
from ortolan import Recipe
from ortolan.errors import NothingToReplaceError
from ortolan.graph_passes.find.cached_attention import CachedAttention, find_cached_attentions

from . import cached_graphs
from .cached_graphs import FORMS, CachedGraph
from .small_models import op_types, run

FAST = {"verify.seconds": 0.0}
CALLS = ((0, 7), (9, 1), (9, 5), (0, 2))


STEPS = [{"name": "normalize"}, {"name": "fuse_cached_attention"}, {"name": "verify"}]
RECIPES = [Recipe.of(cache="float32"), Recipe.from_dict({"name": "fuse_cached_attention", "pass": STEPS})]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_one_operator_that_answers_the_same(form: Callable[[CachedGraph], str], recipe: Recipe) -> None:
    model = cached_graphs.model(form)
    calibration = [cached_graphs.feeds(model, 4, 3)]
    report = ortolan.optimize_onnx(model, recipe=recipe, calibration=calibration, options=FAST)
    assert report.model is not None and report.portable
    kinds = op_types(report.model)
    assert kinds.count("NoMADAttention") == 1 and not {"Softmax", "Attention"} & {*kinds}, report.notes
    for past, rows in CALLS:
        feeds = cached_graphs.feeds(model, past, rows)
        seen = feeds["mask"][:, past:, None] != 0  # mask of tokens, because callers ignore answers at padding
        expected = run(model, feeds)
        for library in (True, False):
            found = run(report.model, feeds, library=library)
            np.testing.assert_allclose(found[0] * seen, expected[0] * seen, atol=1e-5)
            for one, other in zip(found[1:], expected[1:], strict=True):
                np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("form", [form for form in FORMS if form is not cached_graphs.constant_masks])
def test_masks_that_are_cut_to_their_own_length(form: Callable[[CachedGraph], str]) -> None:
    """The provider cannot rewrite the nodes that cut a mask to the length of the attention's own keys."""
    (found,) = find_cached_attentions(ir.from_proto(cached_graphs.model(form)).graph)
    assert isinstance(found, CachedAttention)
    makers = {mask.value.producer() for mask in found.masks}
    assert not makers & found.nodes and "Slice" not in {node.op_type for node in makers if node is not None}


@pytest.mark.parametrize("form", [cached_graphs.joined_layer, cached_graphs.constant_masks], ids=lambda f: f.__name__)
def test_prompts_of_bf16(form: Callable[[CachedGraph], str]) -> None:
    """precision="bf16" with an additive mask, and with a head size of 12."""
    model = cached_graphs.model(form)
    report = ortolan.optimize_onnx(
        model,
        recipe=RECIPES[1],
        calibration=[cached_graphs.feeds(model, 4, 3)],
        options=FAST | {"fuse_cached_attention.precision": "bf16", "fuse_cached_attention.reproducible": "everywhere"},
    )
    assert report.model is not None and report.portable
    for past, rows in CALLS:
        feeds = cached_graphs.feeds(model, past, rows)
        seen = feeds["mask"][:, past:, None] != 0
        difference = np.abs((run(report.model, feeds, library=True)[0] - run(model, feeds)[0]) * seen).max()
        assert 1e-5 < difference < 0.05


@pytest.mark.parametrize("form", [cached_graphs.joined_layer, cached_graphs.constant_masks], ids=lambda f: f.__name__)
def test_lengths_are_asked_of_inputs(form: Callable[[CachedGraph], str]) -> None:
    report = ortolan.optimize_onnx(
        cached_graphs.model(form),
        cache="float32",
        calibration=[cached_graphs.feeds(cached_graphs.model(form), 4, 3)],
        options=FAST,
    )
    assert report.model is not None
    asked = {node.input[0] for node in report.model.graph.node if node.op_type == "Shape"}
    assert asked <= {"x", "mask", "past_key", "past_value"}


def test_codes() -> None:
    model = cached_graphs.model(cached_graphs.turned_in_part)
    calibration = [cached_graphs.feeds(model, 0, 16, seed) for seed in range(4)]
    with pytest.raises(NothingToReplaceError, match="its head size is 12, expected a multiple of 16"):
        ortolan.optimize_onnx(model, cache="codes", calibration=calibration, options=FAST)
