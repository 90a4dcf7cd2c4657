"""If an optional pass fails, the report has a note and the other passes run, unless the user named the pass."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

from ortolan import ModelError, Recipe
from ortolan.graph_passes.passes.fuse_norm import FuseNormPass
from ortolan.graph_passes.passes.replace.replace import ReplacePass
from ortolan.models import tiny

from .small_models import optimize


def failing(monkeypatch: pytest.MonkeyPatch, kind: Any, changes: bool) -> None:
    """Make a pass fail; if `changes` is set, it changes the model first."""

    def call(self: Any, model: ir.Model) -> None:
        if changes:
            model.graph.remove(model.graph[-1])
        raise ModelError("the mask has an odd shape")

    monkeypatch.setattr(kind, "call", call)


def test_an_optional_pass_gives_up_and_the_others_run(monkeypatch):
    failing(monkeypatch, FuseNormPass, changes=False)
    report = optimize(ir.to_proto(tiny.tiny_bert()), recipe=None, weights="int8")
    assert "pass 'fuse_norm' was left out: the mask has an odd shape" in report.notes
    assert report.replaced and report.output_error


@pytest.mark.parametrize(("kind", "changes"), [(FuseNormPass, True), (ReplacePass, False)])
def test_a_changed_model_or_a_needed_pass_ends_the_run(monkeypatch, kind, changes):
    failing(monkeypatch, kind, changes)
    with pytest.raises(ModelError, match="odd shape"):
        optimize(ir.to_proto(tiny.tiny_bert()), recipe=None, weights="int8")


def test_a_pass_of_the_users_own_recipe_must_run(monkeypatch):
    failing(monkeypatch, FuseNormPass, changes=False)
    with pytest.raises(ModelError, match="odd shape"):
        optimize(ir.to_proto(tiny.tiny_bert()), recipe=Recipe.of(weights="int8"))
