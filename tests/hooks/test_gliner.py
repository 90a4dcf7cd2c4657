"""Optimized GLiNER models in gliner's own loader; skipped if it is not installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ortolan

from .gliner_models import make_gliner

gliner = pytest.importorskip("gliner")

TEXTS = ["the cat sat on the mat", "a quick brown dog ran and then it sat under the tree"]
LABELS = ["dog", "tree", "small mat"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def scores(folder: Path, **arguments: Any) -> np.ndarray:
    """Return the score of each span or token and label, from a model that gliner loads and runs."""
    model = gliner.GLiNER.from_pretrained(str(folder), load_onnx_model=True, **arguments)
    session, logits = model.model.session, []
    run = session.run

    def record(*inputs: Any) -> Any:
        logits.extend(run(*inputs))
        return logits

    session.run = record
    assert any(model.inference(TEXTS, LABELS, threshold=1e-3, batch_size=2))
    (found,) = logits
    return np.asarray(1 / (1 + np.exp(-found)))


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "by_spans"), [("deberta-v2", True), ("modernbert", False), ("bert", True)])
def test_gliner(tmp_path: Path, backbone: str, by_spans: bool) -> None:
    exported = tmp_path / "exported"
    make_gliner(tmp_path / "backbone", backbone, by_spans).export_to_onnx(exported)
    original = scores(exported)
    assert original.shape[0] == len(TEXTS) and original.std() > 0.05
    for weights, error in (("bf16", 0.04), ("int8", 0.16)):
        report = ortolan.optimize_onnx(exported, tmp_path / weights, weights=weights)
        reasons = [layer.reason or "" for layer in report.layers if layer.new_op is None]
        # ONNX Runtime computes products that are no linear layers, of relative positions and rotary angles.
        assert not [one for one in reasons if not re.search("both inputs are constant|at run time|rotary", one)]
        found = scores(tmp_path / weights, session_options=ortolan.register())
        assert np.abs(found - original).mean() < error * original.std()
